/* /tokenize and /detokenize, in vLLM's shapes. A text or a chat becomes tokens on the same path as a request for generation does. */
#include "router/api/api_private.h"
#include "proto/base/utf8.h"
#include <errno.h>
#include <stdlib.h>

/* -- tokenize -- */

static void write_strings(const struct generation *g, struct json_writer *w)
{
    json_write_key(w, "token_strs");
    if (!g->req.return_token_strs) {
        json_write_null(w);
        return;
    }
    json_write_array(w);
    for (size_t i = 0; i < g->ids.n; i++) {
        size_t n = 0;
        const char *text = tokenizer_token_text(g->api->config.tok, g->ids.data[i], &n);
        json_write_str_n(w, text ? text : "", n);
    }
    json_write_array_end(w);
}

void tokenize_reply(struct generation *g)
{
    struct buf out;
    struct json_writer w;
    buf_init(&out, API_REPLY_BYTES_MAX);
    json_write_begin(&w, &out);
    json_write_object(&w);
    json_write_kint(&w, "count", (int64_t)g->ids.n);
    json_write_kint(&w, "max_model_len", route_context_length(g->api->config.route));
    json_write_karray(&w, "tokens");
    for (size_t i = 0; i < g->ids.n; i++)
        json_write_int(&w, g->ids.data[i]);
    json_write_array_end(&w);
    write_strings(g, &w);
    json_write_object_end(&w);
    int status = json_write_end(&w) < 0 ? 503 : 200;
    http_exchange_set_gone(g->exchange, NULL, NULL);
    if (status == 200)
        http_reply(g->exchange, 200, NULL, out.data, out.len);
    else
        http_reply_error(g->exchange, 503, NULL, NULL, "out of memory");
    buf_fini(&out);
    generation_answered(g, status);
}

/* -- detokenize -- */

struct detokenize {
    struct api *api;
    struct http_exchange *exchange; /* NULL: the client has gone */
    struct work work;
    char *body;
    size_t body_len;
    struct token_ids ids;
    bool skip_special;
    struct buf text;
    struct api_error err;
};

static int parse_id(struct detokenize *d, struct json *j)
{
    int64_t id, n_vocab = (int64_t)tokenizer_n_vocab(d->api->config.tok);
    if (json_peek(j) != JSON_NUMBER || json_int(j, &id) < 0 || id < 0 || id >= n_vocab)
        return api_error_set(&d->err, 400, "tokens", "invalid_value", "tokens must be a list of token ids from 0 to %lld", (long long)n_vocab - 1);
    return token_ids_append(&d->ids, (int32_t)id) < 0 ? api_error_set(&d->err, 503, NULL, NULL, "out of memory") : 0;
}

static int parse_tokens(struct detokenize *d, struct json *j)
{
    if (json_peek(j) != JSON_ARRAY)
        return api_error_set(&d->err, 400, "tokens", "invalid_type", "tokens must be a list of token ids");
    json_array(j);
    while (json_next_item(j))
        if (parse_id(d, j) < 0)
            return -EINVAL;
    return 0;
}

static int parse_detokenize(struct detokenize *d, struct json *j)
{
    struct json_str key;
    bool has_tokens = false;
    if (json_peek(j) != JSON_OBJECT && !j->error)
        return api_error_set(&d->err, 400, NULL, "invalid_type", "the body must be a JSON object");
    json_object(j);
    while (json_next_key(j, &key)) {
        if (json_str_eq(&key, "tokens")) {
            has_tokens = true;
            if (parse_tokens(d, j) < 0)
                return -EINVAL;
        } else if (json_str_eq(&key, "skip_special_tokens") && json_peek(j) == JSON_BOOL) {
            json_bool(j, &d->skip_special);
        } else {
            json_skip(j);
        }
    }
    if (json_end(j) < 0)
        return api_error_set(&d->err, 400, NULL, "invalid_json", "the body is not valid JSON: %s at byte %zu", j->error_text, j->error_pos);
    return has_tokens ? 0 : api_error_set(&d->err, 400, "tokens", "missing", "tokens is required");
}

static void run_detokenize(void *arg)
{
    struct detokenize *d = arg;
    struct json j;
    struct buf bytes;
    json_init(&j, d->body, d->body_len);
    int rc = parse_detokenize(d, &j);
    json_fini(&j);
    if (rc < 0)
        return;
    buf_init(&bytes, API_REPLY_BYTES_MAX);
    rc = tokenizer_decode(d->api->config.tok, d->ids.data, d->ids.n, d->skip_special, &bytes);
    if (rc >= 0)
        rc = utf8_append_text(&d->text, bytes.data, bytes.len, true);
    buf_fini(&bytes);
    if (rc < 0)
        api_error_set(&d->err, 503, NULL, NULL, "out of memory");
}

static void reply_detokenize(struct detokenize *d)
{
    struct buf out;
    struct json_writer w;
    buf_init(&out, API_REPLY_BYTES_MAX);
    json_write_begin(&w, &out);
    json_write_object(&w);
    json_write_key(&w, "prompt");
    json_write_str_n(&w, (const char *)d->text.data, d->text.len);
    json_write_object_end(&w);
    if (json_write_end(&w) < 0)
        api_error_set(&d->err, 503, NULL, NULL, "out of memory");
    http_exchange_set_gone(d->exchange, NULL, NULL);
    if (d->err.status) {
        api_reply_error(d->api, d->exchange, ENDPOINT_DETOKENIZE, &d->err, 0);
    } else {
        http_reply(d->exchange, 200, NULL, out.data, out.len);
        api_count(d->api, ENDPOINT_DETOKENIZE, 200);
    }
    buf_fini(&out);
}

static void on_detokenized(void *arg)
{
    struct detokenize *d = arg;
    if (d->exchange)
        reply_detokenize(d);
    token_ids_fini(&d->ids);
    buf_fini(&d->text);
    free(d->body);
    free(d);
}

static void on_gone(struct http_exchange *exchange, void *arg)
{
    (void)exchange;
    ((struct detokenize *)arg)->exchange = NULL;
}

void handle_detokenize(struct api *api, struct http_exchange *exchange)
{
    struct detokenize *d = calloc(1, sizeof(*d));
    if (!d || http_exchange_take_body(exchange, &d->body, &d->body_len) < 0) {
        free(d);
        http_reply_error(exchange, 503, NULL, NULL, "out of memory");
        return;
    }
    d->api = api;
    d->exchange = exchange;
    buf_init(&d->text, API_REPLY_BYTES_MAX);
    http_exchange_set_gone(exchange, on_gone, d);
    d->work = (struct work){.run = run_detokenize, .done = on_detokenized, .arg = d};
    work_pool_submit(api->pool, &d->work);
}
