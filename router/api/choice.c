/* One answer: tokens to text, stop strings, logprobs, and its end. */
#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "router/api/api_private.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>

/* -- life -- */

int choice_init(struct choice *c, struct generation *g, uint32_t index, uint32_t prompt_index)
{
    c->g = g;
    c->index = index;
    c->prompt_index = prompt_index;
    c->prompt = g->prompts[prompt_index];
    c->stop_index = -1;
    c->stop_id = -1;
    buf_init(&c->text, API_REPLY_BYTES_MAX);
    buf_init(&c->ids, API_REPLY_BYTES_MAX);
    logprobs_init(&c->log);
    detok_init(&c->detok, g->api->config.tok, g->req.skip_special_tokens, false);
    return stop_text_create(g->req.stops, g->req.n_stops, g->req.include_stop, &c->stop);
}

void choice_fini(struct choice *c)
{
    stop_text_free(c->stop);
    buf_fini(&c->text);
    buf_fini(&c->ids);
    logprobs_fini(&c->log);
}

/* -- sending -- */

static void begin_stream(struct generation *g)
{
    if (!http_stream_begun(g->exchange))
        http_stream_begin(g->exchange);
}

static void send_chunk(struct choice *c, enum chunk_part part)
{
    if (c->g->req.kind == API_CHAT)
        chat_chunk(c, part);
    else
        completion_chunk(c, part);
}

static void send_role(struct choice *c)
{
    if (c->role_sent)
        return;
    c->role_sent = true;
    begin_stream(c->g);
    if (c->g->req.kind == API_CHAT)
        send_chunk(c, CHUNK_ROLE);
}

/* What is certain so far. Text that is held back holds its logprobs back too. */
static void send_text(struct choice *c)
{
    if (!c->g->req.stream || c->text.len == 0)
        return;
    send_role(c);
    send_chunk(c, CHUNK_TEXT);
}

/* -- the end -- */

static void end(struct choice *c, const char *finish_reason)
{
    struct generation *g = c->g;
    struct metrics *m = &g->api->metrics;
    c->ended = true;
    c->finish_reason = finish_reason;
    if (c->stop_index < 0 && stop_text_flush(c->stop, &c->text) < 0)
        LOG_WARN("text_lost", LOG_STR("req", http_exchange_id(g->exchange)), LOG_STR("why", "out of memory"));
    if (g->req.stream) {
        send_role(c);
        if (c->text.len || c->log.n || c->ids.len)
            send_chunk(c, CHUNK_TEXT);
        send_chunk(c, CHUNK_FINISH);
    }
    m->finished[strcmp(finish_reason, "stop") == 0 ? FINISHED_STOP : FINISHED_LENGTH]++;
    m->bytes_loaded += c->bytes_loaded;
    m->bytes_attended += c->bytes_attended;
    m->bytes_missed += c->bytes_missed;
    m->pool_written_bytes += c->bytes_to_pool;
    metrics_observe(&m->answer_size, c->n_tokens);
    if (c->n_tokens > 1)
        metrics_observe(&m->decode, (double)(c->last_token_us - c->first_token_us) / 1e6);
    generation_choice_ended(g);
}

/* Our own memory is short: nothing sensible can follow. */
static void fail_broken(struct choice *c)
{
    api_error_set(&c->g->err, 503, NULL, NULL, "out of memory");
    generation_fail(c->g);
}

/* -- events of the route -- */

static void note_prefilled(struct choice *c, const struct route_prefilled *p)
{
    struct metrics *m = &c->g->api->metrics;
    c->prefilled = true;
    c->cached_tokens = p->cached_tokens;
    c->bytes_loaded = p->bytes_loaded;
    c->queue_us = p->queue_us;
    c->prefill_us = p->prefill_us;
    snprintf(c->worker, sizeof(c->worker), "%s", p->worker);
    m->prompt_tokens += c->prompt->n;
    m->prefix_queries += c->prompt->n;
    m->prefix_hits += p->cached_tokens;
    metrics_observe(&m->queue, (double)p->queue_us / 1e6);
    metrics_observe(&m->prefill, (double)p->prefill_us / 1e6);
    metrics_observe(&m->prompt_size, c->prompt->n);
}

/* The prompt's text and, when asked for, its logprobs stand before the answer. */
static int add_echo(struct choice *c, const struct route_prefilled *p)
{
    const struct api_request *req = &c->g->req;
    const struct tokenizer *tok = c->g->api->config.tok;
    const struct api_prompt *from = &req->prompts[c->prompt_index];
    struct detok detok;
    struct buf text;
    int rc = 0;
    buf_init(&text, API_REPLY_BYTES_MAX);
    detok_init(&detok, tok, req->skip_special_tokens, true);
    for (uint32_t i = 0; i < c->prompt->n && rc >= 0; i++) {
        struct detok_piece piece = {.bytes = NULL, .n_bytes = 0};
        uint32_t id = c->prompt->tokens[i];
        struct route_token unknown = {.id = id};
        bool has = i > 0 && i - 1 < p->n_prompt_logprobs;
        rc = detok_push(&detok, (int32_t)id, &text, &piece);
        if (rc >= 0 && req->sampling.logprobs)
            rc = logprobs_add(c, has ? &p->prompt_logprobs[i - 1] : &unknown, has, piece.bytes, piece.n_bytes);
    }
    if (rc >= 0)
        rc = detok_flush(&detok, &text);
    if (rc >= 0)
        rc = from->text ? buf_append(&c->text, from->text, from->len) : buf_append(&c->text, text.data, text.len);
    buf_fini(&text);
    return rc;
}

static void submit_siblings(struct choice *first)
{
    struct generation *g = first->g;
    for (uint32_t i = first->index + 1; i < g->n_choices && g->choices[i].prompt_index == first->prompt_index; i++)
        if (!g->choices[i].submitted && choice_submit(&g->choices[i], true) < 0) {
            generation_fail(g);
            return;
        }
}

static void on_prefilled(const struct route_prefilled *prefilled, void *arg)
{
    struct choice *c = arg;
    struct generation *g = c->g;
    note_prefilled(c, prefilled);
    if (g->req.echo && add_echo(c, prefilled) < 0) {
        fail_broken(c);
        return;
    }
    if (g->req.stream) {
        send_role(c);
        send_text(c);
    }
    if (c->index % (uint32_t)g->req.n == 0)
        submit_siblings(c);
}

static void note_time(struct choice *c, uint32_t n)
{
    struct metrics *m = &c->g->api->metrics;
    uint64_t now = clock_now_us();
    if (!c->first_token_us) {
        c->first_token_us = now;
        metrics_observe(&m->ttft, (double)(now - c->g->start_us) / 1e6);
        n--;
    }
    for (uint32_t i = 0; i < n; i++)
        metrics_observe(&m->itl, (double)(now - c->last_token_us) / 1e6 / n);
    c->last_token_us = now;
}

static int add_id(struct choice *c, uint32_t id)
{
    return c->g->req.return_token_ids ? buf_printf(&c->ids, c->ids.len ? ",%u" : "%u", id) : 0;
}

/* 1: a stop string ends the answer. */
static int push_token(struct choice *c, const struct route_token *token)
{
    const struct api_request *req = &c->g->req;
    struct detok_piece piece = {.bytes = NULL, .n_bytes = 0};
    uint8_t scratch_bytes[1] = {0};
    struct buf scratch;
    bool may_stop = (int64_t)c->n_tokens >= req->min_tokens;
    c->n_tokens++;
    c->g->api->metrics.generation_tokens++;
    if (add_id(c, token->id) < 0)
        return -ENOMEM;
    if (token->ends && !req->include_stop)
        return 0; /* the token that ends an answer is not part of its text */
    buf_init(&scratch, 4096);
    int rc = detok_push(&c->detok, (int32_t)token->id, &scratch, &piece);
    buf_fini(&scratch);
    if (rc == -ERANGE) /* an id beyond the tokenizer's vocabulary stands for no text */
        piece = (struct detok_piece){.bytes = scratch_bytes, .n_bytes = 0};
    else if (rc < 0)
        return rc;
    if (req->sampling.logprobs && (rc = logprobs_add(c, token, true, piece.bytes, piece.n_bytes)) < 0)
        return rc;
    return stop_text_push(c->stop, piece.bytes, piece.n_bytes, may_stop, &c->text);
}

static void note_stop_id(struct choice *c, const struct route_token *token)
{
    if (!token->ends)
        return;
    for (uint32_t i = 0; i < c->g->req.n_stop_ids; i++)
        if (c->g->req.stop_ids[i] == token->id)
            c->stop_id = token->id;
}

static void on_tokens(const struct route_token *tokens, uint32_t n, void *arg)
{
    struct choice *c = arg;
    int stopped = 0;
    note_time(c, n);
    if (c->g->req.max_tokens == 0)
        return; /* echo alone: the one token that was generated is dropped */
    for (uint32_t i = 0; i < n && stopped == 0; i++) {
        stopped = push_token(c, &tokens[i]);
        note_stop_id(c, &tokens[i]);
    }
    if (stopped == 0) {
        send_text(c);
        return;
    }
    route_cancel(c->request);
    c->request = NULL;
    if (stopped < 0) {
        fail_broken(c);
        return;
    }
    c->stop_index = stop_text_matched(c->stop);
    end(c, "stop");
}

static void on_finished(const struct route_finished *finished, void *arg)
{
    struct choice *c = arg;
    c->request = NULL;
    c->retries = finished->retries;
    c->bytes_to_pool = finished->bytes_to_pool;
    c->bytes_attended = finished->bytes_attended;
    c->bytes_missed = finished->bytes_missed;
    if (finished->bytes_loaded > c->bytes_loaded)
        c->bytes_loaded = finished->bytes_loaded;
    if (*finished->worker)
        snprintf(c->worker, sizeof(c->worker), "%s", finished->worker);
    end(c, finished->stopped && c->g->req.max_tokens != 0 ? "stop" : "length");
}

static void on_failed(enum route_failure failure, const char *text, void *arg)
{
    struct choice *c = arg;
    struct api_error *err = &c->g->err;
    const char *prompt_field = c->g->req.kind == API_CHAT ? "messages" : "prompt";
    c->request = NULL;
    switch (failure) {
    case ROUTE_INVALID:
        api_error_set(err, 400, NULL, "invalid_request", "the worker refuses the request: %s", text);
        break;
    case ROUTE_TOO_LONG:
        api_error_set(err, 400, prompt_field, "context_length_exceeded", "%s", text);
        break;
    case ROUTE_NO_WORKER:
        api_error_set(err, 503, NULL, "no_worker", "%s; try again", text);
        break;
    case ROUTE_TIMEOUT:
        api_error_set(err, 503, NULL, "queue_timeout", "%s; try again", text);
        break;
    case ROUTE_LOST:
        api_error_set(err, 500, NULL, "worker_failed", "the request failed on every worker it was tried on: %s", text);
        break;
    }
    generation_fail(c->g);
}

static const struct route_events events = {
    .on_prefilled = on_prefilled, .on_tokens = on_tokens, .on_finished = on_finished, .on_failed = on_failed};

/* -- submission -- */

/* Answers of one request differ by their seeds; the first has the request's own. */
static uint64_t derive_seed(uint64_t seed, uint32_t i)
{
    return seed + i * 0x9e3779b97f4a7c15ull;
}

int choice_submit(struct choice *c, bool admitted)
{
    struct generation *g = c->g;
    const struct api_request *req = &g->req;
    struct route_job job = {
        .id = http_exchange_id(g->exchange),
        .prompt = c->prompt,
        .max_tokens = req->max_tokens < 0 ? 0 : req->max_tokens == 0 ? 1 : (uint32_t)req->max_tokens,
        .min_tokens = (uint32_t)req->min_tokens,
        .stop_ids = req->stop_ids,
        .n_stop_ids = req->n_stop_ids,
        .ignore_eos = req->ignore_eos,
        .prompt_logprobs = req->echo && req->sampling.logprobs,
        .no_cache = req->no_cache,
        .admitted = admitted,
        .sampling = req->sampling,
        .events = &events,
        .arg = c,
    };
    struct error err = {.text = ""};
    uint32_t retry_after_s = 0;
    job.sampling.seed = derive_seed(g->seed, c->index % (uint32_t)req->n);
    int rc = route_submit(g->api->config.route, &job, &c->request, &retry_after_s, &err);
    if (rc >= 0) {
        c->submitted = true;
        return 0;
    }
    if (rc == -EBUSY) {
        g->retry_after_s = retry_after_s;
        return api_error_set(&g->err, 429, NULL, "queue_full", "%s", err.text);
    }
    if (rc == -EMSGSIZE)
        return api_error_set(&g->err, 400, req->kind == API_CHAT ? "messages" : "prompt", "context_length_exceeded", "%s", err.text);
    return api_error_set(&g->err, 503, NULL, NULL, "%s", err.text);
}
