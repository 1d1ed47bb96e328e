/* /v1/completions: chunks and the whole answer. */
#include "router/api/api_private.h"

static void write_choice(struct choice *c, struct json_writer *w, bool whole, enum chunk_part part)
{
    json_write_object(w);
    json_write_kint(w, "index", c->index);
    json_write_key(w, "text");
    json_write_str_n(w, (const char *)c->text.data, c->text.len);
    buf_clear(&c->text);
    if (whole || part == CHUNK_TEXT)
        logprobs_write(c, w);
    else
        json_write_knull(w, "logprobs");
    if (whole || part == CHUNK_FINISH)
        format_finish_reason(c, w);
    else
        json_write_knull(w, "finish_reason");
    if (whole || !c->ids_begun)
        format_prompt_ids(c, w);
    c->ids_begun = true;
    format_token_ids(c, w);
    json_write_object_end(w);
}

void completion_chunk(struct choice *c, enum chunk_part part)
{
    struct buf chunk;
    struct json_writer w;
    format_chunk_begin(c->g, &chunk, &w, "text_completion");
    json_write_karray(&w, "choices");
    write_choice(c, &w, false, part);
    json_write_array_end(&w);
    format_chunk_end(c->g, &chunk, &w);
}

static void write_whole_choice(struct choice *c, struct json_writer *w)
{
    write_choice(c, w, true, CHUNK_FINISH);
}

int completion_answer(struct generation *g, struct buf *out)
{
    struct json_writer w;
    format_answer_begin(g, out, &w, "text_completion", write_whole_choice);
    return format_answer_end(g, &w);
}
