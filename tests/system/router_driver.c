#include "tests/system/router_driver.h"

#include "proto/base/clock.h"
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

void driver_open(struct driver *d, const char *endpoint)
{
    int one = 1, zero = 0;

    memset(d, 0, sizeof *d);
    d->epoch = 1000;
    d->context = zmq_ctx_new();
    d->socket = zmq_socket(d->context, ZMQ_ROUTER);
    zmq_setsockopt(d->socket, ZMQ_ROUTER_MANDATORY, &one, sizeof one);
    zmq_setsockopt(d->socket, ZMQ_LINGER, &zero, sizeof zero);
    cr_assert_eq(zmq_bind(d->socket, endpoint), 0, "%s: %s", endpoint, zmq_strerror(zmq_errno()));
}

void driver_close(struct driver *d)
{
    zmq_close(d->socket);
    zmq_ctx_term(d->context);
}

void driver_send_raw(struct driver *d, struct driver_worker *w, const void *header, size_t n_header, const void *body, size_t n_body)
{
    /* A worker that was killed is gone from the socket. */
    if (zmq_send(d->socket, w->identity, w->n_identity, ZMQ_SNDMORE) < 0)
        return;
    zmq_send(d->socket, header, n_header, body ? ZMQ_SNDMORE : 0);
    if (body)
        zmq_send(d->socket, body, n_body, 0);
}

void driver_send(struct driver *d, struct driver_worker *w, enum engine_frame type, uint64_t id, const ProtobufCMessage *message)
{
    size_t n = protobuf_c_message_get_packed_size(message);
    uint8_t *body = malloc(n + 1), header[FRAME_HEADER_BYTES];

    protobuf_c_message_pack(message, body);
    frame_header_encode(&(struct frame_header){.type = (uint16_t)type, .body_bytes = (uint32_t)n, .request_id = id}, header);
    driver_send_raw(d, w, header, sizeof header, body, n);
    free(body);
}

static void send_beats(struct driver *d)
{
    Tidepool__Engine__Heartbeat beat = TIDEPOOL__ENGINE__HEARTBEAT__INIT;
    uint64_t now = clock_now_us();

    if (d->silent || now - d->beat_us < DRIVER_HEARTBEAT_MS * 1000)
        return;
    d->beat_us = now;
    beat.epoch = d->epoch;
    for (int i = 0; i < d->n_workers; i++)
        driver_send(d, &d->workers[i], ENGINE_HEARTBEAT, 0, &beat.base);
}

/* ---- what workers say ---- */

static struct driver_worker *worker_of(struct driver *d, const char *identity, size_t n)
{
    for (int i = 0; i < d->n_workers; i++) {
        if (d->workers[i].n_identity == n && memcmp(d->workers[i].identity, identity, n) == 0)
            return &d->workers[i];
    }
    return NULL;
}

static void on_ready(struct driver *d, const char *identity, size_t n_identity, const Tidepool__Engine__Ready *ready)
{
    Tidepool__Engine__ReadyAck ack = TIDEPOOL__ENGINE__READY_ACK__INIT;
    struct driver_worker *w = worker_of(d, identity, n_identity);

    if (!w) {
        cr_assert_lt(d->n_workers, DRIVER_WORKERS_MAX);
        w = &d->workers[d->n_workers++];
        memcpy(w->identity, identity, n_identity);
        w->n_identity = n_identity;
    }
    w->n_ready++;
    snprintf(w->name, sizeof w->name, "%s", ready->name);
    w->context_length = ready->context_length;
    w->vocab_size = ready->vocab_size;
    w->eos_id = ready->n_eos_ids ? ready->eos_ids[0] : 0;
    cr_assert_eq(ready->boot_uuid.len, 16);
    cr_assert_eq(ready->fingerprint.len, 32);
    cr_assert_eq(strncmp(identity, ready->name, strlen(ready->name)), 0);
    w->has_store = ready->store_uuid.len == 16;
    if (w->has_store)
        memcpy(w->store_uuid, ready->store_uuid.data, 16);
    if (d->silent)
        return;
    ack.epoch = d->epoch;
    ack.heartbeat_ms = DRIVER_HEARTBEAT_MS;
    driver_send(d, w, ENGINE_READY_ACK, 0, &ack.base);
}

static void on_tokens(struct driver_request *r, const Tidepool__Engine__Tokens *t)
{
    if (r->n_tokens == 0)
        r->first_index = (int)t->first_index;
    cr_assert_eq((int)t->first_index, r->first_index + r->n_tokens);
    for (size_t i = 0; i < t->n_tokens; i++) {
        r->tokens[r->n_tokens] = t->tokens[i]->id;
        r->logprobs[r->n_tokens++] = t->tokens[i]->logprob;
        r->n_top = (int)t->tokens[i]->n_top;
    }
}

static void on_request_message(struct driver_request *r, uint16_t type, const ProtobufCMessage *message)
{
    const Tidepool__Engine__Prefilled *p = (const Tidepool__Engine__Prefilled *)message;
    const Tidepool__Engine__Finished *f = (const Tidepool__Engine__Finished *)message;
    const Tidepool__Engine__Failed *e = (const Tidepool__Engine__Failed *)message;

    cr_assert(!r->finished && !r->failed, "a message behind the end");
    switch (type) {
    case ENGINE_PREFILLED:
        r->prefilled = true;
        r->prompt_tokens = p->prompt_tokens;
        r->cached_tokens = p->cached_tokens;
        r->n_prompt_logprobs = (int)p->n_prompt_logprobs;
        break;
    case ENGINE_TOKENS:
        cr_assert(r->prefilled);
        on_tokens(r, (const Tidepool__Engine__Tokens *)message);
        break;
    case ENGINE_FINISHED:
        r->finished = true;
        r->reason = f->reason;
        r->completion_tokens = f->completion_tokens;
        r->stop_id = f->stop_id;
        r->page_hits = f->page_hits;
        r->page_misses = f->page_misses;
        r->bytes_attended = f->bytes_attended;
        r->pages_attended = f->pages_attended;
        break;
    case ENGINE_FAILED:
        r->failed = true;
        r->kind = e->kind;
        snprintf(r->text, sizeof r->text, "%s", e->text);
        break;
    default: break;
    }
}

static const ProtobufCMessageDescriptor *descriptor_of(uint16_t type)
{
    switch (type) {
    case ENGINE_READY: return &tidepool__engine__ready__descriptor;
    case ENGINE_HEARTBEAT: return &tidepool__engine__heartbeat__descriptor;
    case ENGINE_PREFILLED: return &tidepool__engine__prefilled__descriptor;
    case ENGINE_PREFILL_PROGRESS: return &tidepool__engine__prefill_progress__descriptor;
    case ENGINE_TOKENS: return &tidepool__engine__tokens__descriptor;
    case ENGINE_FINISHED: return &tidepool__engine__finished__descriptor;
    case ENGINE_FAILED: return &tidepool__engine__failed__descriptor;
    default: return NULL;
    }
}

/* All messages of workers but Ready carry the epoch as their first field, so Heartbeat reads it from any of them. */
static void receive(struct driver *d)
{
    static uint8_t body[FRAME_BODY_MAX];
    uint8_t bytes[FRAME_HEADER_BYTES];
    struct frame_header header;
    char identity[256];
    int n_identity = zmq_recv(d->socket, identity, sizeof identity, 0), n;
    struct driver_worker *w = worker_of(d, identity, (size_t)n_identity);

    cr_assert_eq(zmq_recv(d->socket, bytes, sizeof bytes, 0), FRAME_HEADER_BYTES);
    cr_assert_eq(frame_header_decode(bytes, sizeof bytes, &header), 0);
    n = zmq_recv(d->socket, body, sizeof body, 0);
    cr_assert_eq(n, (int)header.body_bytes);
    cr_assert_not_null(descriptor_of(header.type));
    ProtobufCMessage *message = protobuf_c_message_unpack(descriptor_of(header.type), NULL, (size_t)n, body);
    cr_assert_not_null(message);
    if (header.type == ENGINE_READY) {
        on_ready(d, identity, (size_t)n_identity, (Tidepool__Engine__Ready *)message);
    } else if (((Tidepool__Engine__Cancel *)message)->epoch == d->epoch && w) {
        if (header.type == ENGINE_HEARTBEAT) {
            w->beat = *(Tidepool__Engine__Heartbeat *)message;
            w->has_beat = true;
        } else {
            cr_assert_lt(header.request_id, DRIVER_REQUESTS_MAX);
            on_request_message(&d->requests[header.request_id], header.type, message);
        }
    }
    protobuf_c_message_free_unpacked(message, NULL);
}

bool driver_pump(struct driver *d, bool (*holds)(struct driver *d, uint64_t arg), uint64_t arg, int ms)
{
    uint64_t end_us = clock_now_us() + (uint64_t)ms * 1000, now;
    zmq_pollitem_t item = {.socket = d->socket, .events = ZMQ_POLLIN};

    for (;;) {
        send_beats(d);
        if (holds && holds(d, arg))
            return true;
        now = clock_now_us();
        if (now >= end_us)
            return false;
        long wait_ms = (long)((end_us - now) / 1000) + 1;
        if (zmq_poll(&item, 1, wait_ms < DRIVER_HEARTBEAT_MS / 2 ? wait_ms : DRIVER_HEARTBEAT_MS / 2) > 0)
            receive(d);
    }
}

static bool has_worker(struct driver *d, uint64_t arg)
{
    for (int i = 0; i < d->n_workers; i++) {
        if (strcmp(d->workers[i].name, (const char *)(uintptr_t)arg) == 0)
            return true;
    }
    return false;
}

struct driver_worker *driver_worker(struct driver *d, const char *name)
{
    cr_assert(driver_pump(d, has_worker, (uint64_t)(uintptr_t)name, DRIVER_WAIT_MS), "%s is not ready", name);
    for (int i = 0; i < d->n_workers; i++) {
        if (strcmp(d->workers[i].name, name) == 0)
            return &d->workers[i];
    }
    return NULL;
}

static bool has_ended(struct driver *d, uint64_t id)
{
    return d->requests[id].finished || d->requests[id].failed;
}

struct driver_request *driver_end(struct driver *d, uint64_t id)
{
    cr_assert(driver_pump(d, has_ended, id, DRIVER_WAIT_MS), "request %lu does not end", id);
    return &d->requests[id];
}

static bool has_tokens(struct driver *d, uint64_t arg)
{
    return d->requests[arg >> 32].n_tokens >= (int)(uint32_t)arg;
}

void driver_tokens(struct driver *d, uint64_t id, int n)
{
    cr_assert(driver_pump(d, has_tokens, id << 32 | (uint32_t)n, DRIVER_WAIT_MS), "request %lu has %d tokens: %s", id, d->requests[id].n_tokens,
              d->requests[id].text);
}

void driver_cancel(struct driver *d, struct driver_worker *w, uint64_t id)
{
    Tidepool__Engine__Cancel cancel = TIDEPOOL__ENGINE__CANCEL__INIT;

    cancel.epoch = d->epoch;
    driver_send(d, w, ENGINE_CANCEL, id, &cancel.base);
}

void driver_ask(struct driver *d, struct driver_worker *w, uint64_t id, const struct driver_ask *ask)
{
    static uint32_t prompt[DRIVER_PROMPT_MAX];
    uint32_t stop_ids[1] = {ask->stop_id};
    Tidepool__Engine__Sampling sampling = TIDEPOOL__ENGINE__SAMPLING__INIT;
    Tidepool__Engine__Generate g = TIDEPOOL__ENGINE__GENERATE__INIT;

    cr_assert_leq(ask->n_prompt, DRIVER_PROMPT_MAX);
    for (int i = 0; i < ask->n_prompt; i++)
        prompt[i] = (uint32_t)(((uint64_t)i * 7919 + ask->prompt_seed * 104729ull + (uint64_t)(i / 7) * 31) % w->vocab_size);
    sampling.temperature = ask->temperature;
    sampling.top_p = 1;
    sampling.repetition_penalty = 1;
    sampling.seed = ask->seed;
    sampling.logprobs = ask->n_logprobs > 0;
    sampling.n_logprobs = (uint32_t)ask->n_logprobs;
    g.epoch = d->epoch;
    g.prompt = prompt;
    g.n_prompt = (size_t)ask->n_prompt;
    g.generated = (uint32_t *)ask->generated;
    g.n_generated = (size_t)ask->n_generated;
    g.max_tokens = (uint32_t)ask->max_tokens;
    g.stop_ids = stop_ids;
    g.n_stop_ids = ask->stop_id != 0;
    g.sampling = &sampling;
    g.no_cache = ask->no_cache;
    g.prompt_logprobs = ask->prompt_logprobs;
    driver_send(d, w, ENGINE_GENERATE, id, &g.base);
}

static bool is_idle(struct driver *d, uint64_t i)
{
    const struct driver_worker *w = &d->workers[i];

    return w->has_beat && !w->beat.busy && w->beat.n_running + w->beat.n_prefilling + w->beat.n_waiting == 0;
}

void driver_idle(struct driver *d, struct driver_worker *w)
{
    w->has_beat = false;
    cr_assert(driver_pump(d, is_idle, (uint64_t)(w - d->workers), DRIVER_WAIT_MS), "%s has not become idle", w->name);
}

void driver_expect_same(const struct driver_request *a, int from, const struct driver_request *b, int n, float tolerance)
{
    for (int i = 0; i < n; i++) {
        cr_assert_eq(a->tokens[from + i], b->tokens[i], "token %d: %u, %u", i, a->tokens[from + i], b->tokens[i]);
        cr_assert_leq(fabsf(a->logprobs[from + i] - b->logprobs[i]), tolerance, "logprob %d: %g, %g", i, (double)a->logprobs[from + i], (double)b->logprobs[i]);
    }
}
