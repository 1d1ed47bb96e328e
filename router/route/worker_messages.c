/* What workers say. Every message is checked against what the router knows: the epoch, who has the request, and where its answer stands. */
#include "proto/base/base_assert.h"
#include "proto/base/capped_alloc.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "router/route/route_private.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* The request of a message if it is still with this worker; late messages are dropped. */
static struct route_request *expect(struct worker *worker, uint64_t wire_id, uint64_t epoch)
{
    struct route *route = worker->route;
    struct route_request *request = epoch == route->epoch ? request_find(route, wire_id) : NULL;
    if (request && request->worker == worker)
        return request;
    route->counters.dropped_late++;
    return NULL;
}

static void cancel_at_worker(struct worker *worker, uint64_t wire_id)
{
    Tidepool__Engine__Cancel cancel = TIDEPOOL__ENGINE__CANCEL__INIT;
    cancel.epoch = worker->route->epoch;
    worker_link_send(worker, ENGINE_CANCEL, wire_id, &cancel.base);
}

/* -- heartbeat -- */

static void note_progress(struct worker *worker, const Tidepool__Engine__Heartbeat *beat)
{
    if (beat->busy && beat->progress == worker->progress)
        return;
    worker->progress = beat->progress;
    worker->progress_us = clock_now_us();
    if (worker->state == WORKER_UNHEALTHY) {
        LOG_INFO("worker_recovered", LOG_STR("worker", worker->name));
        worker->state = WORKER_READY;
        dispatch_kick(worker->route);
    }
}

static int on_heartbeat(struct worker *worker, ProtobufCAllocator *alloc, const uint8_t *body, size_t len)
{
    Tidepool__Engine__Heartbeat *beat = tidepool__engine__heartbeat__unpack(alloc, len, body);
    if (!beat)
        return -EPROTO;
    if (beat->epoch == worker->route->epoch) {
        worker->busy = beat->busy;
        worker->n_running = beat->n_running;
        worker->n_prefilling = beat->n_prefilling;
        worker->n_waiting = beat->n_waiting;
        worker->device_bytes = beat->device_bytes;
        worker->device_peak_bytes = beat->device_peak_bytes;
        worker->pool_bytes = beat->pool_bytes;
        worker->pool_used_bytes = beat->pool_used_bytes;
        worker->store_connected = beat->store_connected;
        worker->page_cache_bytes = beat->page_cache_bytes;
        worker->page_cache_used_bytes = beat->page_cache_used_bytes;
        worker->page_cache_hits = beat->page_cache_hits;
        worker->page_cache_misses = beat->page_cache_misses;
        note_progress(worker, beat);
    }
    tidepool__engine__heartbeat__free_unpacked(beat, alloc);
    return 0;
}

/* -- tokens -- */

/* One allocation: the tokens, then the alternatives they point to. -EPROTO for too many alternatives. */
static int convert_tokens(Tidepool__Engine__Token *const *from, size_t n, struct route_token **ret_tokens)
{
    size_t n_top = 0;
    for (size_t i = 0; i < n; i++) {
        if (from[i]->n_top > ROUTE_TOP_LOGPROBS_MAX)
            return -EPROTO;
        n_top += from[i]->n_top;
    }
    struct route_token *tokens = malloc(n * sizeof(*tokens) + n_top * sizeof(struct route_top) + 1);
    if (!tokens)
        return -ENOMEM;
    struct route_top *top = (struct route_top *)(tokens + n);
    for (size_t i = 0; i < n; i++) {
        tokens[i] = (struct route_token){.id = from[i]->id, .logprob = from[i]->logprob, .n_top = (uint32_t)from[i]->n_top, .top = top};
        for (size_t t = 0; t < from[i]->n_top; t++)
            *top++ = (struct route_top){.id = from[i]->top[t]->token, .logprob = from[i]->top[t]->logprob};
    }
    *ret_tokens = tokens;
    return 0;
}

/* Takes the new tokens of a message into the answer; returns how many are new from index `skip` on. */
static uint32_t append_new(struct route_request *request, struct route_token *tokens, uint32_t n, uint32_t skip)
{
    uint32_t taken = 0;
    for (uint32_t i = skip; i < n && !request->ended && request->n_generated < request->max_tokens; i++) {
        if (request_append(request, tokens[i].id) < 0)
            break; /* the gap shows with the next message */
        tokens[i].ends = request_is_stop(request, tokens[i].id);
        request->ended = tokens[i].ends;
        taken++;
    }
    return taken;
}

static int take_tokens(struct worker *worker, uint64_t wire_id, const Tidepool__Engine__Tokens *message)
{
    struct route_request *request = expect(worker, wire_id, message->epoch);
    uint32_t n = (uint32_t)message->n_tokens;
    if (!request)
        return 0;
    if (message->first_index > request->n_generated) {
        cancel_at_worker(worker, wire_id);
        if (request_find(worker->route, wire_id) == request) /* else the send has found the worker gone and moved it */
            request_retry(request, "a message was lost");
        return 0;
    }
    uint32_t skip = request->n_generated - message->first_index;
    if (skip >= n)
        return 0;
    struct route_token *tokens;
    int rc = convert_tokens(message->tokens, n, &tokens);
    if (rc < 0)
        return rc;
    uint32_t taken = append_new(request, tokens, n, skip);
    if (taken)
        request->job.events->on_tokens(tokens + skip, taken, request->job.arg); /* may cancel the request */
    free(tokens);
    return 0;
}

static int on_tokens(struct worker *worker, uint64_t wire_id, ProtobufCAllocator *alloc, const uint8_t *body, size_t len)
{
    Tidepool__Engine__Tokens *message = tidepool__engine__tokens__unpack(alloc, len, body);
    if (!message)
        return -EPROTO;
    int rc = take_tokens(worker, wire_id, message);
    tidepool__engine__tokens__free_unpacked(message, alloc);
    return rc;
}

/* -- prefill -- */

static void set_load(struct route_request *request, uint64_t load_tokens)
{
    request->worker->load_tokens += load_tokens - request->load_tokens;
    request->load_tokens = load_tokens;
}

static int take_prefilled(struct route_request *request, const Tidepool__Engine__Prefilled *message)
{
    struct route_token *logprobs = NULL;
    set_load(request, ROUTE_DECODE_LOAD_TOKENS);
    if (request->prefilled_told)
        return 0;
    int rc = convert_tokens(message->prompt_logprobs, message->n_prompt_logprobs, &logprobs);
    if (rc < 0)
        return rc;
    request->prefilled_told = true;
    struct route_prefilled prefilled = {
        .prompt_tokens = message->prompt_tokens,
        .cached_tokens = message->cached_tokens < request->job.prompt->n ? message->cached_tokens : request->job.prompt->n,
        .bytes_loaded = message->bytes_loaded,
        .queue_us = message->queue_us,
        .prefill_us = message->prefill_us,
        .prompt_logprobs = logprobs,
        .n_prompt_logprobs = (uint32_t)message->n_prompt_logprobs,
        .worker = request->worker->name,
    };
    request->job.events->on_prefilled(&prefilled, request->job.arg);
    free(logprobs);
    return 0;
}

static int on_prefilled(struct worker *worker, uint64_t wire_id, ProtobufCAllocator *alloc, const uint8_t *body, size_t len)
{
    Tidepool__Engine__Prefilled *message = tidepool__engine__prefilled__unpack(alloc, len, body);
    if (!message)
        return -EPROTO;
    struct route_request *request = expect(worker, wire_id, message->epoch);
    int rc = request ? take_prefilled(request, message) : 0;
    tidepool__engine__prefilled__free_unpacked(message, alloc);
    return rc;
}

static int on_progress(struct worker *worker, uint64_t wire_id, ProtobufCAllocator *alloc, const uint8_t *body, size_t len)
{
    Tidepool__Engine__PrefillProgress *message = tidepool__engine__prefill_progress__unpack(alloc, len, body);
    if (!message)
        return -EPROTO;
    struct route_request *request = expect(worker, wire_id, message->epoch);
    int rc = message->total == 0 || message->done > message->total ? -EPROTO : 0;
    if (request && rc == 0 && !request->prefilled_told)
        set_load(request, ROUTE_DECODE_LOAD_TOKENS + (uint64_t)request->job.prompt->n * (message->total - message->done) / message->total);
    tidepool__engine__prefill_progress__free_unpacked(message, alloc);
    return rc;
}

/* -- the end -- */

static void take_finished(struct route_request *request, const Tidepool__Engine__Finished *message)
{
    if (message->reason == TIDEPOOL__ENGINE__FINISH_REASON__FINISH_CANCELLED) {
        request_retry(request, "the worker cancelled it"); /* we did not ask for that */
        return;
    }
    if (message->completion_tokens != request->n_generated && !request->ended && request->n_generated < request->max_tokens) {
        request_retry(request, "a message was lost");
        return;
    }
    struct route_finished finished = {
        .stopped = request->ended,
        .completion_tokens = request->n_generated,
        .bytes_loaded = message->bytes_loaded,
        .bytes_to_pool = message->bytes_to_pool,
        .bytes_attended = message->bytes_attended,
        .bytes_missed = message->bytes_missed,
        .decode_us = message->decode_us,
        .retries = request->retries,
        .worker = request->worker->name,
    };
    request_finish(request, &finished);
}

static int on_finished(struct worker *worker, uint64_t wire_id, ProtobufCAllocator *alloc, const uint8_t *body, size_t len)
{
    Tidepool__Engine__Finished *message = tidepool__engine__finished__unpack(alloc, len, body);
    if (!message)
        return -EPROTO;
    struct route_request *request = expect(worker, wire_id, message->epoch);
    if (request)
        take_finished(request, message);
    tidepool__engine__finished__free_unpacked(message, alloc);
    return 0;
}

static void take_failed(struct route_request *request, const Tidepool__Engine__Failed *message)
{
    struct worker *worker = request->worker;
    LOG_WARN("request_failed", LOG_STR("req", request->id), LOG_STR("worker", worker->name), LOG_INT("kind", message->kind),
             LOG_STR("text", message->text));
    switch (message->kind) {
    case TIDEPOOL__ENGINE__FAILED__KIND__INVALID:
        request_fail(request, ROUTE_INVALID, message->text);
        return;
    case TIDEPOOL__ENGINE__FAILED__KIND__TOO_LONG:
        request_fail(request, ROUTE_TOO_LONG, message->text);
        return;
    case TIDEPOOL__ENGINE__FAILED__KIND__DRAINING:
        if (worker->state == WORKER_READY)
            worker->state = WORKER_DRAINING;
        break;
    default:
        break;
    }
    request->avoid = worker;
    request_retry(request, *message->text ? message->text : "the worker failed");
}

static int on_failed(struct worker *worker, uint64_t wire_id, ProtobufCAllocator *alloc, const uint8_t *body, size_t len)
{
    Tidepool__Engine__Failed *message = tidepool__engine__failed__unpack(alloc, len, body);
    if (!message)
        return -EPROTO;
    struct route_request *request = expect(worker, wire_id, message->epoch);
    if (request)
        take_failed(request, message);
    tidepool__engine__failed__free_unpacked(message, alloc);
    return 0;
}

int worker_on_message(struct worker *worker, const struct frame_header *header, const uint8_t *body)
{
    struct capped_alloc alloc;
    uint64_t id = header->request_id;
    size_t len = header->body_bytes;
    if (worker->state == WORKER_LOST) {
        /* It gets no heartbeats from us, so it will take us for gone, cancel what it has, and say Ready. */
        worker->route->counters.dropped_late++;
        return 0;
    }
    worker->heard_us = clock_now_us();
    capped_alloc_init(&alloc, ROUTE_UNPACK_BYTES_MAX);
    switch (header->type) {
    case ENGINE_HEARTBEAT: return on_heartbeat(worker, &alloc.pb, body, len);
    case ENGINE_TOKENS: return on_tokens(worker, id, &alloc.pb, body, len);
    case ENGINE_PREFILLED: return on_prefilled(worker, id, &alloc.pb, body, len);
    case ENGINE_PREFILL_PROGRESS: return on_progress(worker, id, &alloc.pb, body, len);
    case ENGINE_FINISHED: return on_finished(worker, id, &alloc.pb, body, len);
    case ENGINE_FAILED: return on_failed(worker, id, &alloc.pb, body, len);
    default: return -EPROTO;
    }
}
