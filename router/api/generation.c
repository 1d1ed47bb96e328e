/* The life of one request for text, from its body to the last event.
 *
 *   prepare (prepare.c: parse, render, encode)  ->  route (choices are submitted)  ->  tokens (choice.c)  ->  the last choice ends
 *
 * The client may go away at any point: then everything of the request is cancelled at once; if a thread has it, it is freed when it comes back. */
#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "router/api/api_private.h"
#include <errno.h>
#include <inttypes.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static enum metrics_endpoint endpoint_of(const struct generation *g)
{
    switch (g->req.kind) {
    case API_CHAT: return ENDPOINT_CHAT;
    case API_COMPLETION: return ENDPOINT_COMPLETIONS;
    default: return ENDPOINT_TOKENIZE;
    }
}

/* -- life -- */

static void cancel_choices(struct generation *g)
{
    for (uint32_t i = 0; i < g->n_choices; i++) {
        struct choice *c = &g->choices[i];
        if (c->request)
            route_cancel(c->request);
        c->request = NULL;
        if (!c->ended)
            g->api->metrics.finished[g->err.status ? FINISHED_ERROR : FINISHED_CANCELLED]++;
        c->ended = true;
    }
}

void generation_free(struct generation *g)
{
    ASSERT(!g->working);
    struct api *api = g->api;
    cancel_choices(g);
    if (g->render)
        template_cancel(g->render);
    for (uint32_t i = 0; i < g->n_choices; i++)
        choice_fini(&g->choices[i]);
    for (uint32_t i = 0; i < g->n_prompts; i++)
        prompt_unref(g->prompts[i]);
    free(g->choices);
    free(g->prompts);
    free(g->body);
    free(g->rendered);
    token_ids_fini(&g->ids);
    api_request_fini(&g->req);
    *(g->prev ? &g->prev->next : &api->generations) = g->next;
    if (g->next)
        g->next->prev = g->prev;
    api->n_generations--;
    free(g);
}

static void on_gone(struct http_exchange *exchange, void *arg)
{
    struct generation *g = arg;
    LOG_INFO("client_gone", LOG_STR("req", http_exchange_id(exchange)), LOG_INT("open_choices", g->n_open));
    g->exchange = NULL;
    if (!g->working)
        generation_free(g);
}

void generation_start(struct api *api, struct http_exchange *exchange, enum api_kind kind, int tenant)
{
    struct generation *g = calloc(1, sizeof(*g));
    if (!g || http_exchange_take_body(exchange, &g->body, &g->body_len) < 0) {
        free(g);
        http_reply_error(exchange, 503, NULL, NULL, "out of memory");
        return;
    }
    uint64_t random;
    g->api = api;
    g->exchange = exchange;
    g->req.kind = kind;
    g->tenant = tenant;
    g->start_us = http_exchange_start_us(exchange);
    g->created_s = clock_wall_s();
    randombytes_buf(&random, sizeof(random));
    snprintf(g->id, sizeof(g->id), "%s-%016" PRIx64, kind == API_CHAT ? "chatcmpl" : "cmpl", random);
    g->next = api->generations;
    if (g->next)
        g->next->prev = g;
    api->generations = g;
    api->n_generations++;
    http_exchange_set_gone(exchange, on_gone, g);
    prepare_start(g);
}

/* -- the end -- */

static void send_error_event(struct generation *g)
{
    struct buf event;
    struct json_writer w;
    buf_init(&event, API_CHUNK_BYTES_MAX);
    json_write_begin(&w, &event);
    api_error_write(&g->err, &w);
    format_send(g, &event, &w);
    buf_fini(&event);
    http_stream_event(g->exchange, "[DONE]", 6);
    http_stream_end(g->exchange);
}

void generation_fail(struct generation *g)
{
    if (g->exchange) {
        LOG_INFO("request_refused", LOG_STR("req", http_exchange_id(g->exchange)), LOG_INT("status", g->err.status), LOG_STR("param", g->err.param),
                 LOG_STR("message", g->err.message));
        cancel_choices(g);
        http_exchange_set_gone(g->exchange, NULL, NULL);
        if (http_stream_begun(g->exchange)) {
            api_count(g->api, endpoint_of(g), 200);
            send_error_event(g);
        } else {
            api_reply_error(g->api, g->exchange, endpoint_of(g), &g->err, g->retry_after_s);
        }
        g->exchange = NULL;
    }
    generation_free(g);
}

void generation_answered(struct generation *g, int status)
{
    api_count(g->api, endpoint_of(g), status);
    g->exchange = NULL;
    generation_free(g);
}

static void log_done(const struct generation *g)
{
    const struct choice *c = &g->choices[0];
    uint32_t n_tokens = 0;
    for (uint32_t i = 0; i < g->n_choices; i++)
        n_tokens += g->choices[i].n_tokens;
    LOG_INFO("request_done", LOG_STR("req", http_exchange_id(g->exchange)), LOG_STR("kind", g->req.kind == API_CHAT ? "chat" : "completion"),
             LOG_STR("worker", c->worker), LOG_INT("prompt_tokens", c->prompt->n), LOG_INT("cached_tokens", c->cached_tokens),
             LOG_INT("completion_tokens", n_tokens), LOG_STR("finish_reason", c->finish_reason ? c->finish_reason : ""),
             LOG_INT("ttft_us", c->first_token_us ? c->first_token_us - g->start_us : 0), LOG_INT("e2e_us", clock_now_us() - g->start_us),
             LOG_INT("retries", c->retries));
}

static void end_stream(struct generation *g)
{
    if (g->req.include_usage) {
        struct buf chunk;
        struct json_writer w;
        buf_init(&chunk, API_CHUNK_BYTES_MAX);
        json_write_begin(&w, &chunk);
        json_write_object(&w);
        format_head(g, &w, g->req.kind == API_CHAT ? "chat.completion.chunk" : "text_completion");
        json_write_karray(&w, "choices");
        json_write_array_end(&w);
        format_usage(g, &w);
        json_write_object_end(&w);
        format_send(g, &chunk, &w);
        buf_fini(&chunk);
    }
    http_stream_event(g->exchange, "[DONE]", 6);
    http_stream_end(g->exchange);
}

static void end_answer(struct generation *g)
{
    struct buf out;
    buf_init(&out, API_REPLY_BYTES_MAX);
    int rc = g->req.kind == API_CHAT ? chat_answer(g, &out) : completion_answer(g, &out);
    if (rc < 0)
        http_reply_error(g->exchange, 500, NULL, NULL, "the answer is too long to be sent in one piece; use stream");
    else
        http_reply(g->exchange, 200, NULL, out.data, out.len);
    buf_fini(&out);
}

void generation_choice_ended(struct generation *g)
{
    if (--g->n_open > 0)
        return;
    metrics_observe(&g->api->metrics.e2e, (double)(clock_now_us() - g->start_us) / 1e6);
    log_done(g);
    http_exchange_set_gone(g->exchange, NULL, NULL);
    g->req.stream ? end_stream(g) : end_answer(g);
    generation_answered(g, 200);
}

/* -- routing -- */

static int make_choices(struct generation *g)
{
    uint32_t n = (uint32_t)g->req.n;
    g->choices = calloc((size_t)g->n_prompts * n, sizeof(*g->choices));
    if (!g->choices)
        return -ENOMEM;
    for (uint32_t i = 0; i < g->n_prompts * n; i++) {
        g->n_choices++; /* counted first: choice_fini takes a half-built one */
        if (choice_init(&g->choices[i], g, i, i / n) < 0)
            return -ENOMEM;
    }
    g->n_open = g->n_choices;
    return 0;
}

static void choose_seed(struct generation *g)
{
    if (g->req.has_seed)
        g->seed = (uint64_t)g->req.seed;
    else
        randombytes_buf(&g->seed, sizeof(g->seed));
}

/* The answers to one prompt wait for the first one's prefill, so that they find the prompt in the pool instead of computing it again. */
static bool waits_for_first(const struct generation *g, uint32_t i)
{
    uint32_t n = (uint32_t)g->req.n;
    return i % n != 0 && g->choices[i].prompt->n_blocks > 0 && !g->req.no_cache;
}

void generation_route(struct generation *g)
{
    choose_seed(g);
    if (make_choices(g) < 0) {
        api_error_set(&g->err, 503, NULL, NULL, "out of memory");
        generation_fail(g);
        return;
    }
    for (uint32_t i = 0; i < g->n_choices; i++)
        if (!waits_for_first(g, i) && choice_submit(&g->choices[i], i > 0) < 0) {
            generation_fail(g);
            return;
        }
}

/* A stream begins with its first token, or when the client has waited long enough to need a sign of life. */
void generation_tick(struct api *api)
{
    uint64_t now = clock_now_us();
    for (struct generation *g = api->generations; g; g = g->next)
        if (g->req.stream && g->n_choices > 0 && g->exchange && !http_stream_begun(g->exchange) &&
            now - g->start_us > (uint64_t)api->config.keepalive_s * 1000000)
            http_stream_begin(g->exchange);
}
