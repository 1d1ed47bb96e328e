/* What chat and completion answers have in common. */
#include "proto/base/log.h"
#include "router/api/api_private.h"
#include <stdio.h>

void format_head(const struct generation *g, struct json_writer *w, const char *object)
{
    json_write_kstr(w, "id", g->id);
    json_write_kstr(w, "object", object);
    json_write_kint(w, "created", g->created_s);
    json_write_kstr(w, "model", g->api->config.model);
    char fingerprint[48];
    snprintf(fingerprint, sizeof(fingerprint), "tidepool-%s", g->api->config.version);
    json_write_kstr(w, "system_fingerprint", fingerprint);
}

/* What the answers cost: of Tidepool, beside OpenAI's fields. Times are those of the first answer. */
static void write_costs(const struct generation *g, struct json_writer *w)
{
    const struct choice *first = &g->choices[0];
    uint64_t loaded = 0, attended = 0, missed = 0, to_pool = 0, retries = 0;
    double decode_s = (double)(first->last_token_us - first->first_token_us) / 1e6;
    for (uint32_t i = 0; i < g->n_choices; i++) {
        loaded += g->choices[i].bytes_loaded;
        attended += g->choices[i].bytes_attended;
        missed += g->choices[i].bytes_missed;
        to_pool += g->choices[i].bytes_to_pool;
        retries += g->choices[i].retries;
    }
    json_write_kobject(w, "tidepool");
    json_write_kstr(w, "worker", first->worker);
    json_write_kint(w, "bytes_loaded", (int64_t)loaded);
    json_write_kint(w, "bytes_attended", (int64_t)attended);
    json_write_kint(w, "bytes_missed", (int64_t)missed);
    json_write_kint(w, "bytes_to_pool", (int64_t)to_pool);
    json_write_kdouble(w, "ttft_ms", first->first_token_us ? (double)(first->first_token_us - g->start_us) / 1e3 : 0);
    json_write_kdouble(w, "queue_ms", (double)first->queue_us / 1e3);
    json_write_kdouble(w, "prefill_ms", (double)first->prefill_us / 1e3);
    json_write_kdouble(w, "decode_tokens_per_s", first->n_tokens > 1 && decode_s > 0 ? (first->n_tokens - 1) / decode_s : 0);
    json_write_kint(w, "retries", (int64_t)retries);
    json_write_object_end(w);
}

void format_usage(const struct generation *g, struct json_writer *w)
{
    uint64_t prompt = 0, cached = 0, completion = 0;
    for (uint32_t i = 0; i < g->n_choices; i++) {
        const struct choice *c = &g->choices[i];
        completion += c->n_tokens;
        if (i % (uint32_t)g->req.n == 0) { /* a prompt counts once, however many answers it gets */
            prompt += c->prompt->n;
            cached += c->cached_tokens;
        }
    }
    json_write_kobject(w, "usage");
    json_write_kint(w, "prompt_tokens", (int64_t)prompt);
    json_write_kint(w, "completion_tokens", (int64_t)completion);
    json_write_kint(w, "total_tokens", (int64_t)(prompt + completion));
    json_write_kobject(w, "prompt_tokens_details");
    json_write_kint(w, "cached_tokens", (int64_t)cached);
    json_write_object_end(w);
    write_costs(g, w);
    json_write_object_end(w);
}

void format_finish_reason(const struct choice *c, struct json_writer *w)
{
    json_write_key(w, "finish_reason");
    c->finish_reason ? json_write_str(w, c->finish_reason) : json_write_null(w);
    json_write_key(w, "stop_reason"); /* as vLLM: which stop string or stop id of the caller's */
    if (c->finish_reason && c->stop_index >= 0)
        json_write_str_n(w, c->g->req.stops[c->stop_index].text, c->g->req.stops[c->stop_index].len);
    else if (c->finish_reason && c->stop_id >= 0)
        json_write_int(w, c->stop_id);
    else
        json_write_null(w);
}

void format_token_ids(struct choice *c, struct json_writer *w)
{
    if (!c->g->req.return_token_ids)
        return;
    json_write_karray(w, "token_ids");
    if (c->ids.len)
        json_write_raw(w, (const char *)c->ids.data, c->ids.len);
    json_write_array_end(w);
    buf_clear(&c->ids);
}

void format_prompt_ids(const struct choice *c, struct json_writer *w)
{
    if (!c->g->req.return_token_ids)
        return;
    json_write_karray(w, "prompt_token_ids");
    for (uint32_t i = 0; i < c->prompt->n; i++)
        json_write_int(w, c->prompt->tokens[i]);
    json_write_array_end(w);
}

void format_send(struct generation *g, struct buf *chunk, struct json_writer *w)
{
    int rc = json_write_end(w);
    if (rc < 0) /* memory is short: the reader sees a gap rather than half an event */
        LOG_WARN("chunk_dropped", LOG_STR("req", http_exchange_id(g->exchange)), LOG_INT("error", rc));
    else
        http_stream_event(g->exchange, chunk->data, chunk->len);
}

void format_chunk_begin(const struct generation *g, struct buf *chunk, struct json_writer *w, const char *object)
{
    buf_init(chunk, API_CHUNK_BYTES_MAX);
    json_write_begin(w, chunk);
    json_write_object(w);
    format_head(g, w, object);
}

void format_chunk_end(struct generation *g, struct buf *chunk, struct json_writer *w)
{
    if (g->req.include_usage)
        json_write_knull(w, "usage");
    json_write_object_end(w);
    format_send(g, chunk, w);
    buf_fini(chunk);
}

void format_answer_begin(struct generation *g, struct buf *out, struct json_writer *w, const char *object, void (*write_choice)(struct choice *, struct json_writer *))
{
    json_write_begin(w, out);
    json_write_object(w);
    format_head(g, w, object);
    json_write_karray(w, "choices");
    for (uint32_t i = 0; i < g->n_choices; i++)
        write_choice(&g->choices[i], w);
    json_write_array_end(w);
}

int format_answer_end(const struct generation *g, struct json_writer *w)
{
    format_usage(g, w);
    json_write_object_end(w);
    return json_write_end(w);
}
