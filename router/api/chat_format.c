/* /v1/chat/completions: chunks and the whole answer. Clients want the role first, a finish_reason that is null until the end, and `choices` in every chunk. */
#include "router/api/api_private.h"

static void write_delta(struct choice *c, struct json_writer *w, enum chunk_part part)
{
    json_write_kobject(w, "delta");
    if (part == CHUNK_ROLE) {
        json_write_kstr(w, "role", "assistant");
        json_write_kstr(w, "content", "");
    }
    if (part == CHUNK_TEXT) {
        json_write_key(w, "content");
        json_write_str_n(w, (const char *)c->text.data, c->text.len);
        buf_clear(&c->text);
    }
    json_write_object_end(w);
}

void chat_chunk(struct choice *c, enum chunk_part part)
{
    struct buf chunk;
    struct json_writer w;
    format_chunk_begin(c->g, &chunk, &w, "chat.completion.chunk");
    if (part == CHUNK_ROLE)
        format_prompt_ids(c, &w);
    json_write_karray(&w, "choices");
    json_write_object(&w);
    json_write_kint(&w, "index", c->index);
    write_delta(c, &w, part);
    if (part == CHUNK_TEXT) {
        logprobs_write(c, &w);
        format_token_ids(c, &w);
    } else {
        json_write_knull(&w, "logprobs");
    }
    if (part == CHUNK_FINISH)
        format_finish_reason(c, &w);
    else
        json_write_knull(&w, "finish_reason");
    json_write_object_end(&w);
    json_write_array_end(&w);
    format_chunk_end(c->g, &chunk, &w);
}

static void write_choice(struct choice *c, struct json_writer *w)
{
    json_write_object(w);
    json_write_kint(w, "index", c->index);
    json_write_kobject(w, "message");
    json_write_kstr(w, "role", "assistant");
    json_write_key(w, "content");
    json_write_str_n(w, (const char *)c->text.data, c->text.len);
    json_write_knull(w, "refusal");
    json_write_object_end(w);
    logprobs_write(c, w);
    format_finish_reason(c, w);
    format_token_ids(c, w);
    json_write_object_end(w);
}

int chat_answer(struct generation *g, struct buf *out)
{
    struct json_writer w;
    format_answer_begin(g, out, &w, "chat.completion", write_choice);
    format_prompt_ids(&g->choices[0], &w);
    return format_answer_end(g, &w);
}
