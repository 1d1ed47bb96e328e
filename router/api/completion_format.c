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
    struct generation *g = c->g;
    struct buf chunk;
    struct json_writer w;
    buf_init(&chunk, API_CHUNK_BYTES_MAX);
    json_write_begin(&w, &chunk);
    json_write_object(&w);
    format_head(g, &w, "text_completion");
    json_write_karray(&w, "choices");
    write_choice(c, &w, false, part);
    json_write_array_end(&w);
    if (g->req.include_usage)
        json_write_knull(&w, "usage");
    json_write_object_end(&w);
    format_send(g, &chunk, &w);
    buf_fini(&chunk);
}

int completion_answer(struct generation *g, struct buf *out)
{
    struct json_writer w;
    json_write_begin(&w, out);
    json_write_object(&w);
    format_head(g, &w, "text_completion");
    json_write_karray(&w, "choices");
    for (uint32_t i = 0; i < g->n_choices; i++)
        write_choice(&g->choices[i], &w, true, CHUNK_FINISH);
    json_write_array_end(&w);
    format_usage(g, &w);
    json_write_object_end(&w);
    return json_write_end(&w);
}
