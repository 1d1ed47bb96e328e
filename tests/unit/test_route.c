/* The routing core against workers that speak the real protocol over real ZeroMQ sockets, on the same loop. */
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "proto/wire/engine.pb-c.h"
#include "proto/wire/frame.h"
#include "proto/wire/store.pb-c.h"
#include "router/route/route.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

enum { GUARD_US = 10000000, CONTEXT = 1000, EOS = 2 };

struct fake {
    char name[16];
    void *socket;
    struct loop_source *source;
    uint64_t epoch, id;         /* id: of the last Generate */
    uint32_t prompt[2048], n_prompt, generated[256], n_generated, max_tokens, n_stop_ids;
    uint64_t seed;
    int n_generate, n_cancel, n_beats, n_acks;
    uint64_t cancelled_id;
};

struct client {
    struct route_request *request;
    uint32_t tokens[256], n_tokens;
    int n_prefilled, n_finished, n_failed;
    bool stopped;
    uint32_t retries, cached;
    enum route_failure failure;
    char text[256], worker[64];
};

static char dir[64];
static char endpoint[128];
static void *context;
static struct loop *loop;
static struct loop_source *guard;
static struct route *route;
static bool timed_out;

static void on_guard(void *arg)
{
    (void)arg;
    timed_out = true;
    loop_stop(loop);
}

static struct route_config defaults(void)
{
    return (struct route_config){.loop = loop, .endpoint = endpoint, .policy = &policy_prefix, .queue_requests_max = 4, .queue_tokens_max = 100000,
                                 .worker_wait_us = 60000000, .queue_timeout_us = 60000000, .heartbeat_ms = 50, .progress_timeout_us = 300000,
                                 .retries_max = 2, .vocab_size = 100};
}

static void setup(void)
{
    struct error err;
    cr_assert_geq(sodium_init(), 0);
    snprintf(dir, sizeof(dir), "%s/tp-route-XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    cr_assert_not_null(mkdtemp(dir));
    snprintf(endpoint, sizeof(endpoint), "ipc://%s/r", dir);
    context = zmq_ctx_new();
    cr_assert_eq(loop_create(&loop), 0);
    cr_assert_eq(loop_timer_add(loop, on_guard, NULL, &guard), 0);
    log_init("test", LOG_LEVEL_ERROR, LOG_FORMAT_LOGFMT);
    struct route_config config = defaults();
    cr_assert_eq(route_create(&config, &route, &err), 0, "%s", err.text);
}

static void restart_with(struct route_config config)
{
    struct error err;
    route_free(route);
    cr_assert_eq(route_create(&config, &route, &err), 0, "%s", err.text);
}

static void teardown(void)
{
    char path[160];
    route_free(route);
    zmq_ctx_term(context);
    loop_source_free(guard);
    loop_free(loop);
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof(path), "%s/%c", dir, "res"[i]);
        unlink(path);
    }
    rmdir(dir);
}

TestSuite(route, .init = setup, .fini = teardown, .timeout = 60);

/* Turns the loop until the condition holds. */
#define UNTIL(condition)                                                                           \
    do {                                                                                           \
        timed_out = false;                                                                         \
        loop_timer_arm(guard, GUARD_US);                                                           \
        while (!(condition) && !timed_out)                                                         \
            loop_poll(loop);                                                                       \
        cr_assert(condition, "timed out");                                                         \
        loop_timer_disarm(guard);                                                                  \
    } while (0)

/* -- workers -- */

static void fake_send(struct fake *w, enum engine_frame type, uint64_t id, const ProtobufCMessage *message)
{
    uint8_t head[FRAME_HEADER_BYTES], body[8192];
    size_t len = protobuf_c_message_pack(message, body);
    cr_assert_leq(len, sizeof(body));
    frame_header_encode(&(struct frame_header){.type = (uint16_t)type, .body_bytes = (uint32_t)len, .request_id = id}, head);
    cr_assert_geq(zmq_send(w->socket, head, sizeof(head), ZMQ_SNDMORE | ZMQ_DONTWAIT), 0);
    cr_assert_geq(zmq_send(w->socket, body, len, ZMQ_DONTWAIT), 0);
    loop_zmq_kick(w->source);
}

static void take_generate(struct fake *w, uint64_t id, const uint8_t *body, size_t len)
{
    Tidepool__Engine__Generate *g = tidepool__engine__generate__unpack(NULL, len, body);
    cr_assert_not_null(g);
    cr_assert_eq(g->epoch, w->epoch);
    w->id = id;
    w->n_generate++;
    w->n_prompt = (uint32_t)g->n_prompt;
    memcpy(w->prompt, g->prompt, g->n_prompt * sizeof(uint32_t));
    w->n_generated = (uint32_t)g->n_generated;
    if (g->n_generated)
        memcpy(w->generated, g->generated, g->n_generated * sizeof(uint32_t));
    w->max_tokens = g->max_tokens;
    w->n_stop_ids = (uint32_t)g->n_stop_ids;
    w->seed = g->sampling->seed;
    tidepool__engine__generate__free_unpacked(g, NULL);
}

static void take(struct fake *w, const struct frame_header *header, const uint8_t *body, size_t len)
{
    if (header->type == ENGINE_READY_ACK) {
        Tidepool__Engine__ReadyAck *ack = tidepool__engine__ready_ack__unpack(NULL, len, body);
        w->epoch = ack->epoch;
        w->n_acks++;
        tidepool__engine__ready_ack__free_unpacked(ack, NULL);
    } else if (header->type == ENGINE_HEARTBEAT) {
        w->n_beats++;
    } else if (header->type == ENGINE_GENERATE) {
        take_generate(w, header->request_id, body, len);
    } else if (header->type == ENGINE_CANCEL) {
        w->n_cancel++;
        w->cancelled_id = header->request_id;
    }
}

static void on_fake(void *arg)
{
    struct fake *w = arg;
    for (int i = 0; i < 50; i++) {
        zmq_msg_t head, body;
        struct frame_header header;
        zmq_msg_init(&head);
        zmq_msg_init(&body);
        bool any = zmq_msg_recv(&head, w->socket, ZMQ_DONTWAIT) >= 0 && zmq_msg_recv(&body, w->socket, ZMQ_DONTWAIT) >= 0;
        if (any) {
            cr_assert_eq(frame_header_decode(zmq_msg_data(&head), zmq_msg_size(&head), &header), 0);
            take(w, &header, zmq_msg_data(&body), zmq_msg_size(&body));
        }
        zmq_msg_close(&head);
        zmq_msg_close(&body);
        if (!any)
            return;
    }
}

static void fake_connect(struct fake *w, const char *name, int boot)
{
    char identity[32];
    int linger = 0;
    memset(w, 0, sizeof(*w));
    snprintf(w->name, sizeof(w->name), "%s", name);
    snprintf(identity, sizeof(identity), "%s-%d", name, boot);
    w->socket = zmq_socket(context, ZMQ_DEALER);
    zmq_setsockopt(w->socket, ZMQ_ROUTING_ID, identity, strlen(identity));
    zmq_setsockopt(w->socket, ZMQ_LINGER, &linger, sizeof(linger));
    cr_assert_eq(zmq_connect(w->socket, endpoint), 0);
    cr_assert_eq(loop_zmq_add(loop, w->socket, on_fake, w, &w->source), 0);
}

static void fake_ready_with(struct fake *w, const char *store)
{
    uint8_t uuid[16] = {1}, fingerprint[32] = {7};
    uint32_t eos[1] = {EOS};
    char events[160] = "", snapshots[160] = "";
    if (store) {
        snprintf(events, sizeof(events), "ipc://%s/e", dir);
        snprintf(snapshots, sizeof(snapshots), "ipc://%s/s", dir);
    }
    Tidepool__Engine__Ready ready = TIDEPOOL__ENGINE__READY__INIT;
    ready.name = w->name;
    ready.boot_uuid = (ProtobufCBinaryData){16, uuid};
    ready.model_id = "m";
    ready.fingerprint = (ProtobufCBinaryData){32, fingerprint};
    ready.context_length = CONTEXT;
    ready.vocab_size = 100;
    ready.eos_ids = eos;
    ready.n_eos_ids = 1;
    ready.max_running = 2;
    ready.prefix_reuse = true;
    ready.store_event_endpoint = events;
    ready.store_snapshot_endpoint = snapshots;
    fake_send(w, ENGINE_READY, 0, &ready.base);
    int before = w->n_acks;
    UNTIL(w->n_acks > before);
}

static void fake_start(struct fake *w, const char *name, int boot)
{
    fake_connect(w, name, boot);
    fake_ready_with(w, NULL);
}

static void fake_close(struct fake *w)
{
    loop_source_free(w->source);
    zmq_close(w->socket);
    w->socket = NULL;
}

static void fake_beat(struct fake *w, uint64_t progress, bool busy)
{
    Tidepool__Engine__Heartbeat beat = TIDEPOOL__ENGINE__HEARTBEAT__INIT;
    beat.epoch = w->epoch;
    beat.progress = progress;
    beat.busy = busy;
    fake_send(w, ENGINE_HEARTBEAT, 0, &beat.base);
}

static void fake_prefilled(struct fake *w, uint32_t cached)
{
    Tidepool__Engine__Prefilled prefilled = TIDEPOOL__ENGINE__PREFILLED__INIT;
    prefilled.epoch = w->epoch;
    prefilled.prompt_tokens = w->n_prompt;
    prefilled.cached_tokens = cached;
    fake_send(w, ENGINE_PREFILLED, w->id, &prefilled.base);
}

static void fake_tokens_at(struct fake *w, uint64_t epoch, uint32_t first_index, const uint32_t *ids, size_t n)
{
    Tidepool__Engine__Token tokens[16], *at[16];
    Tidepool__Engine__Tokens message = TIDEPOOL__ENGINE__TOKENS__INIT;
    for (size_t i = 0; i < n; i++) {
        tokens[i] = (Tidepool__Engine__Token)TIDEPOOL__ENGINE__TOKEN__INIT;
        tokens[i].id = ids[i];
        at[i] = &tokens[i];
    }
    message.epoch = epoch;
    message.first_index = first_index;
    message.tokens = at;
    message.n_tokens = n;
    fake_send(w, ENGINE_TOKENS, w->id, &message.base);
}

static void fake_tokens(struct fake *w, uint32_t first_index, uint32_t a, uint32_t b)
{
    fake_tokens_at(w, w->epoch, first_index, (const uint32_t[]){a, b}, 2);
}

static void fake_finished(struct fake *w, uint32_t completion_tokens)
{
    Tidepool__Engine__Finished finished = TIDEPOOL__ENGINE__FINISHED__INIT;
    finished.epoch = w->epoch;
    finished.reason = TIDEPOOL__ENGINE__FINISH_REASON__FINISH_LENGTH;
    finished.completion_tokens = completion_tokens;
    fake_send(w, ENGINE_FINISHED, w->id, &finished.base);
}

static void fake_failed(struct fake *w, Tidepool__Engine__Failed__Kind kind, const char *text)
{
    Tidepool__Engine__Failed failed = TIDEPOOL__ENGINE__FAILED__INIT;
    failed.epoch = w->epoch;
    failed.kind = kind;
    failed.text = (char *)text;
    fake_send(w, ENGINE_FAILED, w->id, &failed.base);
}

/* Turns the loop once; now and then the worker says that it is alive. */
static void live_on(struct fake *w)
{
    static uint64_t last_us;
    if (clock_now_us() - last_us > 20000) {
        last_us = clock_now_us();
        fake_beat(w, 1, false);
    }
    loop_poll(loop);
}

/* -- requests -- */

static void on_prefilled(const struct route_prefilled *prefilled, void *arg)
{
    struct client *c = arg;
    c->n_prefilled++;
    c->cached = prefilled->cached_tokens;
    snprintf(c->worker, sizeof(c->worker), "%s", prefilled->worker);
}

static void on_tokens(const struct route_token *tokens, uint32_t n, void *arg)
{
    struct client *c = arg;
    for (uint32_t i = 0; i < n; i++)
        c->tokens[c->n_tokens++] = tokens[i].id;
}

static void on_finished(const struct route_finished *finished, void *arg)
{
    struct client *c = arg;
    c->request = NULL;
    c->n_finished++;
    c->stopped = finished->stopped;
    c->retries = finished->retries;
}

static void on_failed(enum route_failure failure, const char *text, void *arg)
{
    struct client *c = arg;
    c->request = NULL;
    c->n_failed++;
    c->failure = failure;
    snprintf(c->text, sizeof(c->text), "%s", text);
}

static const struct route_events events = {on_prefilled, on_tokens, on_finished, on_failed};

static int submit_n(struct client *c, uint32_t n_prompt, uint32_t max_tokens)
{
    struct error err = {.text = ""};
    uint32_t retry_after_s = 0;
    struct prompt *prompt;
    uint32_t *tokens = malloc(n_prompt * sizeof(uint32_t));
    memset(c, 0, sizeof(*c));
    for (uint32_t i = 0; i < n_prompt; i++)
        tokens[i] = i % 100;
    cr_assert_eq(prompt_create(tokens, n_prompt, NULL, 0, &prompt), 0);
    struct route_job job = {.id = "test", .prompt = prompt, .max_tokens = max_tokens, .sampling = {.seed = 42}, .events = &events, .arg = c};
    int rc = route_submit(route, &job, &c->request, &retry_after_s, &err);
    prompt_unref(prompt);
    if (rc == -EBUSY)
        cr_assert_gt(retry_after_s, 0);
    snprintf(c->text, sizeof(c->text), "%s", err.text);
    return rc;
}

static void submit(struct client *c)
{
    cr_assert_eq(submit_n(c, 10, 6), 0, "%s", c->text);
}

/* -- the ordinary way -- */

Test(route, test_route_delivers_tokens_and_the_end)
{
    struct fake w;
    struct client c;
    fake_start(&w, "w0", 1);
    submit(&c);
    UNTIL(w.n_generate == 1);
    cr_assert_eq(w.n_prompt, 10);
    cr_assert_eq(w.seed, 42);
    cr_assert_eq(w.max_tokens, 6);
    cr_assert_eq(w.n_stop_ids, 1, "the model's own end is added");
    fake_prefilled(&w, 4);
    fake_tokens(&w, 0, 11, 12);
    fake_tokens(&w, 2, 13, EOS);
    fake_finished(&w, 4);
    UNTIL(c.n_finished == 1);
    cr_assert_eq(c.n_prefilled, 1);
    cr_assert_eq(c.cached, 4);
    cr_assert_eq(c.n_tokens, 4);
    cr_assert(c.stopped);
    cr_assert_eq(route_n_running(route), 0);
    fake_close(&w);
}

Test(route, test_route_without_max_tokens_gives_the_rest_of_the_context)
{
    struct fake w;
    struct client c;
    fake_start(&w, "w0", 1);
    cr_assert_eq(submit_n(&c, 10, 0), 0);
    UNTIL(w.n_generate == 1);
    cr_assert_eq(w.max_tokens, CONTEXT - 10);
    route_cancel(c.request);
    UNTIL(w.n_cancel == 1);
    cr_assert_eq(w.cancelled_id, w.id);
    fake_close(&w);
}

Test(route, test_route_refuses_what_no_context_holds)
{
    struct fake w;
    struct client c;
    fake_start(&w, "w0", 1);
    cr_assert_eq(submit_n(&c, 990, 11), -EMSGSIZE);
    cr_assert(strstr(c.text, "at most 10 fit"), "%s", c.text);
    cr_assert_eq(submit_n(&c, 1000, 0), -EMSGSIZE);
    cr_assert_eq(submit_n(&c, 990, 10), 0);
    route_cancel(c.request);
    fake_close(&w);
}

Test(route, test_route_takes_turns_among_idle_workers)
{
    struct fake w[2];
    struct client c;
    fake_start(&w[0], "w0", 1);
    fake_start(&w[1], "w1", 1);
    for (int i = 0; i < 4; i++) {
        submit(&c);
        UNTIL(w[0].n_generate + w[1].n_generate == i + 1);
        route_cancel(c.request);
        cr_assert_leq(abs(w[0].n_generate - w[1].n_generate), 1);
    }
    cr_assert_eq(w[0].n_generate, 2);
    cr_assert_eq(w[1].n_generate, 2);
    fake_close(&w[0]);
    fake_close(&w[1]);
}

/* -- the queue -- */

Test(route, test_route_queues_beyond_what_workers_take_and_refuses_beyond_the_limit)
{
    struct fake w;
    struct client c[8];
    fake_start(&w, "w0", 1);
    for (int i = 0; i < 2; i++)
        submit(&c[i]);
    UNTIL(w.n_generate == 2);
    for (int i = 2; i < 6; i++)
        submit(&c[i]);
    cr_assert_eq(route_n_queued(route), 4);
    cr_assert_eq(submit_n(&c[6], 10, 6), -EBUSY);
    cr_assert_eq(route_counters(route)->queue_rejected, 1);
    route_cancel(c[0].request);
    UNTIL(w.n_generate == 3);
    cr_assert_eq(route_n_queued(route), 3);
    for (int i = 1; i < 6; i++)
        route_cancel(c[i].request);
    cr_assert_eq(route_n_queued(route), 0);
    cr_assert_eq(route_n_running(route), 0);
    fake_close(&w);
}

Test(route, test_route_limits_the_queue_by_tokens)
{
    struct client c[3];
    struct route_config config = defaults();
    config.queue_tokens_max = 1000;
    restart_with(config);
    cr_assert_eq(submit_n(&c[0], 900, 1), 0, "alone, a prompt of any length may wait");
    cr_assert_eq(submit_n(&c[1], 101, 1), -EBUSY);
    cr_assert_eq(submit_n(&c[2], 100, 1), 0);
    route_cancel(c[0].request);
    route_cancel(c[2].request);
}

Test(route, test_route_fails_a_request_when_no_worker_comes)
{
    struct client c;
    struct route_config config = defaults();
    config.worker_wait_us = 100000;
    restart_with(config);
    submit(&c);
    UNTIL(c.n_failed == 1);
    cr_assert_eq(c.failure, ROUTE_NO_WORKER);
}

Test(route, test_route_waits_for_a_worker_that_comes_later)
{
    struct fake w;
    struct client c;
    submit(&c);
    fake_start(&w, "w0", 1);
    UNTIL(w.n_generate == 1);
    route_cancel(c.request);
    fake_close(&w);
}

/* -- workers that die -- */

static struct fake *holder(struct fake *w, struct fake **ret_other)
{
    struct fake *has = w[0].n_generate ? &w[0] : &w[1];
    *ret_other = has == &w[0] ? &w[1] : &w[0];
    return has;
}

Test(route, test_route_continues_on_another_worker_without_gap_or_repeat)
{
    struct fake w[2], *first, *second;
    struct client c;
    fake_start(&w[0], "w0", 1);
    fake_start(&w[1], "w1", 1);
    submit(&c);
    UNTIL(w[0].n_generate + w[1].n_generate == 1);
    first = holder(w, &second);
    fake_prefilled(first, 0);
    fake_tokens(first, 0, 11, 12);
    UNTIL(c.n_tokens == 2);
    uint64_t old_id = first->id;
    fake_close(first); /* noticed by the next heartbeat: no route to it */
    while (second->n_generate == 0)
        live_on(second);
    cr_assert_eq(second->n_generated, 2);
    cr_assert_eq(second->generated[0], 11);
    cr_assert_eq(second->generated[1], 12);
    cr_assert_eq(second->seed, 42);
    cr_assert_eq(second->max_tokens, 6, "in all, those generated included");
    cr_assert_neq(second->id, old_id, "a wire id is used once");
    fake_prefilled(second, 0);
    fake_tokens(second, 2, 13, EOS);
    fake_finished(second, 4);
    UNTIL(c.n_finished == 1);
    cr_assert_eq(c.n_prefilled, 1, "told once");
    cr_assert_eq(c.retries, 1);
    cr_assert_arr_eq(c.tokens, ((uint32_t[]){11, 12, 13, EOS}), 4 * sizeof(uint32_t));
    fake_close(second);
}

Test(route, test_route_finishes_by_itself_when_only_the_last_word_was_missing)
{
    struct fake w;
    struct client c;
    fake_start(&w, "w0", 1);
    cr_assert_eq(submit_n(&c, 10, 2), 0);
    UNTIL(w.n_generate == 1);
    fake_prefilled(&w, 0);
    fake_tokens(&w, 0, 11, 12);
    UNTIL(c.n_tokens == 2);
    fake_close(&w);
    UNTIL(c.n_finished == 1);
    cr_assert_not(c.stopped);
}

Test(route, test_route_gives_up_after_the_last_retry)
{
    struct fake w;
    struct client c;
    fake_start(&w, "w0", 1);
    submit(&c);
    for (int i = 1; i <= 3; i++) {
        UNTIL(w.n_generate == i);
        fake_failed(&w, TIDEPOOL__ENGINE__FAILED__KIND__INTERNAL, "engine trouble");
    }
    UNTIL(c.n_failed == 1);
    cr_assert_eq(c.failure, ROUTE_LOST);
    cr_assert_str_eq(c.text, "engine trouble");
    fake_close(&w);
}

Test(route, test_route_does_not_retry_what_is_the_requests_fault)
{
    struct fake w;
    struct client c;
    fake_start(&w, "w0", 1);
    submit(&c);
    UNTIL(w.n_generate == 1);
    fake_failed(&w, TIDEPOOL__ENGINE__FAILED__KIND__TOO_LONG, "does not fit");
    UNTIL(c.n_failed == 1);
    cr_assert_eq(c.failure, ROUTE_TOO_LONG);
    cr_assert_eq(w.n_generate, 1);
    fake_close(&w);
}

Test(route, test_route_takes_a_silent_worker_for_lost_and_drops_its_late_words)
{
    struct fake w[2], *first, *second;
    struct client c;
    fake_start(&w[0], "w0", 1);
    fake_start(&w[1], "w1", 1);
    submit(&c);
    UNTIL(w[0].n_generate + w[1].n_generate == 1);
    first = holder(w, &second);
    fake_tokens(first, 0, 11, 12);
    UNTIL(c.n_tokens == 2);
    while (second->n_generate == 0) /* `first` is stopped: connected, but silent */
        live_on(second);
    cr_assert_eq(route_n_ready(route), 1);
    uint64_t dropped = route_counters(route)->dropped_late;
    fake_tokens(first, 2, 90, 91); /* it wakes up */
    UNTIL(route_counters(route)->dropped_late > dropped);
    cr_assert_eq(c.n_tokens, 2);
    fake_tokens(second, 2, 13, 14);
    UNTIL(c.n_tokens == 4);
    cr_assert_eq(c.tokens[2], 13);
    fake_ready_with(first, NULL); /* having cancelled everything, it says Ready and is back */
    cr_assert_eq(route_n_ready(route), 2);
    route_cancel(c.request);
    fake_close(first);
    fake_close(second);
}

Test(route, test_route_moves_requests_off_a_worker_without_progress)
{
    struct fake w[2], *first, *second;
    struct client c;
    fake_start(&w[0], "w0", 1);
    fake_start(&w[1], "w1", 1);
    submit(&c);
    UNTIL(w[0].n_generate + w[1].n_generate == 1);
    first = holder(w, &second);
    uint64_t beat_us = clock_now_us();
    while (second->n_generate == 0) { /* beats, but its counter stands still */
        if (clock_now_us() - beat_us > 20000) {
            fake_beat(first, 7, true);
            fake_beat(second, 1, false);
            beat_us = clock_now_us();
        }
        loop_poll(loop);
    }
    UNTIL(first->n_cancel == 1);
    cr_assert_eq(route_counters(route)->unhealthy, 1);
    cr_assert_eq(route_n_ready(route), 1);
    fake_beat(first, 8, true);
    UNTIL(route_n_ready(route) == 2);
    route_cancel(c.request);
    fake_close(first);
    fake_close(second);
}

/* -- messages that are wrong -- */

Test(route, test_route_drops_repeats_and_retries_after_a_gap)
{
    struct fake w;
    struct client c;
    fake_start(&w, "w0", 1);
    submit(&c);
    UNTIL(w.n_generate == 1);
    fake_tokens(&w, 0, 11, 12);
    fake_tokens(&w, 0, 11, 12); /* again */
    fake_tokens(&w, 1, 12, 13); /* overlapping */
    UNTIL(c.n_tokens == 3);
    uint64_t old_id = w.id;
    fake_tokens(&w, 4, 15, 16); /* one is missing */
    UNTIL(w.n_generate == 2);
    cr_assert_eq(w.cancelled_id, old_id);
    cr_assert_eq(w.n_generated, 3);
    cr_assert_arr_eq(c.tokens, ((uint32_t[]){11, 12, 13}), 3 * sizeof(uint32_t));
    route_cancel(c.request);
    fake_close(&w);
}

Test(route, test_route_drops_messages_of_another_epoch_and_unknown_requests)
{
    struct fake w;
    struct client c;
    fake_start(&w, "w0", 1);
    submit(&c);
    UNTIL(w.n_generate == 1);
    fake_tokens_at(&w, w.epoch + 1, 0, (const uint32_t[]){50, 51}, 2);
    w.id++;
    fake_tokens(&w, 0, 60, 61);
    w.id--;
    fake_tokens(&w, 0, 11, 12);
    UNTIL(c.n_tokens > 0);
    cr_assert_eq(c.tokens[0], 11);
    cr_assert_eq(route_counters(route)->dropped_late, 2);
    route_cancel(c.request);
    fake_close(&w);
}

Test(route, test_route_never_delivers_more_than_max_tokens_or_behind_the_end)
{
    struct fake w;
    struct client c;
    fake_start(&w, "w0", 1);
    cr_assert_eq(submit_n(&c, 10, 3), 0);
    UNTIL(w.n_generate == 1);
    fake_tokens(&w, 0, 11, 12);
    fake_tokens(&w, 2, 13, 14);
    fake_finished(&w, 3);
    UNTIL(c.n_finished == 1);
    cr_assert_eq(c.n_tokens, 3);
    submit(&c);
    UNTIL(w.n_generate == 2);
    fake_tokens(&w, 0, EOS, 14);
    fake_finished(&w, 1);
    UNTIL(c.n_finished == 1);
    cr_assert_eq(c.n_tokens, 1);
    cr_assert(c.stopped);
    fake_close(&w);
}

Test(route, test_route_drops_a_worker_that_talks_nonsense)
{
    struct fake w;
    fake_start(&w, "w0", 1);
    for (int i = 0; i < 100; i++) {
        uint8_t head[FRAME_HEADER_BYTES];
        frame_header_encode(&(struct frame_header){.type = ENGINE_TOKENS, .body_bytes = 3, .request_id = 1}, head);
        zmq_send(w.socket, head, sizeof(head), ZMQ_SNDMORE);
        zmq_send(w.socket, "\xff\xff\xff", 3, 0);
        zmq_send(w.socket, "one part", 8, 0);
    }
    UNTIL(route_n_ready(route) == 0);
    cr_assert_geq(route_counters(route)->malformed, 100);
    fake_close(&w);
}

Test(route, test_route_refuses_a_second_worker_of_a_name_that_is_alive)
{
    struct fake a, b;
    fake_start(&a, "w0", 1);
    fake_connect(&b, "w0", 2);
    uint8_t uuid[16] = {2}, fingerprint[32] = {0};
    Tidepool__Engine__Ready ready = TIDEPOOL__ENGINE__READY__INIT;
    ready.name = b.name;
    ready.boot_uuid = (ProtobufCBinaryData){16, uuid};
    ready.fingerprint = (ProtobufCBinaryData){32, fingerprint};
    ready.context_length = CONTEXT;
    ready.vocab_size = 100;
    ready.max_running = 1;
    fake_send(&b, ENGINE_READY, 0, &ready.base);
    int beats = a.n_beats;
    UNTIL(a.n_beats > beats + 1);
    cr_assert_eq(b.n_acks, 0);
    cr_assert_eq(route_n_workers(route), 1);
    fake_close(&a); /* it was the old one after all: the next Ready is taken */
    uint64_t since = 0;
    UNTIL((clock_now_us() - since > 20000 ? (since = clock_now_us(), fake_send(&b, ENGINE_READY, 0, &ready.base), 0) : 0) || b.n_acks > 0);
    cr_assert_eq(route_n_workers(route), 1, "the old entry is gone");
    fake_close(&b);
}

Test(route, test_route_refuses_a_worker_with_a_smaller_vocabulary)
{
    struct fake w;
    fake_connect(&w, "w0", 1);
    uint8_t uuid[16] = {2}, fingerprint[32] = {0};
    Tidepool__Engine__Ready ready = TIDEPOOL__ENGINE__READY__INIT;
    ready.name = w.name;
    ready.boot_uuid = (ProtobufCBinaryData){16, uuid};
    ready.fingerprint = (ProtobufCBinaryData){32, fingerprint};
    ready.context_length = CONTEXT;
    ready.vocab_size = 99;
    ready.max_running = 1;
    fake_send(&w, ENGINE_READY, 0, &ready.base);
    UNTIL(route_counters(route)->malformed == 1);
    cr_assert_eq(route_n_workers(route), 0);
    fake_close(&w);
}

/* -- the store -- */

struct fake_store {
    void *events, *snapshots;
    struct loop_source *source;
    uint64_t sequence;
    int n_snapshots;
    struct block_key keys[8];
    int n_keys;
    uint8_t uuid[16];
};

static void store_send(void *socket, uint16_t type, uint64_t id, const ProtobufCMessage *message)
{
    uint8_t head[FRAME_HEADER_BYTES], body[4096];
    size_t len = protobuf_c_message_pack(message, body);
    frame_header_encode(&(struct frame_header){.type = type, .body_bytes = (uint32_t)len, .request_id = id}, head);
    zmq_send(socket, head, sizeof(head), ZMQ_SNDMORE | ZMQ_DONTWAIT);
    zmq_send(socket, body, len, ZMQ_DONTWAIT);
}

static void on_snapshot_request(void *arg)
{
    struct fake_store *s = arg;
    uint8_t peer[256], head[FRAME_HEADER_BYTES], body[16];
    int n_peer;
    while ((n_peer = zmq_recv(s->snapshots, peer, sizeof(peer), ZMQ_DONTWAIT)) >= 0) {
        struct frame_header header;
        ProtobufCBinaryData keys[8];
        Tidepool__Store__Snapshot part = TIDEPOOL__STORE__SNAPSHOT__INIT;
        zmq_recv(s->snapshots, head, sizeof(head), ZMQ_DONTWAIT);
        zmq_recv(s->snapshots, body, sizeof(body), ZMQ_DONTWAIT);
        cr_assert_eq(frame_header_decode(head, sizeof(head), &header), 0);
        cr_assert_eq(header.type, STORE_SNAPSHOT_REQUEST);
        s->n_snapshots++;
        part.store_uuid = (ProtobufCBinaryData){16, s->uuid};
        part.sequence = s->sequence;
        for (int i = 0; i < s->n_keys; i++) { /* one key a part */
            keys[0] = (ProtobufCBinaryData){32, s->keys[i].bytes};
            part.keys = keys;
            part.n_keys = 1;
            part.more = i + 1 < s->n_keys;
            zmq_send(s->snapshots, peer, (size_t)n_peer, ZMQ_SNDMORE | ZMQ_DONTWAIT);
            store_send(s->snapshots, STORE_SNAPSHOT, header.request_id, &part.base);
        }
    }
}

static void store_open(struct fake_store *s)
{
    char text[160];
    int linger = 0;
    memset(s, 0, sizeof(*s));
    s->uuid[0] = 9;
    s->sequence = 5;
    s->events = zmq_socket(context, ZMQ_PUB);
    s->snapshots = zmq_socket(context, ZMQ_ROUTER);
    zmq_setsockopt(s->events, ZMQ_LINGER, &linger, sizeof(linger));
    zmq_setsockopt(s->snapshots, ZMQ_LINGER, &linger, sizeof(linger));
    snprintf(text, sizeof(text), "ipc://%s/e", dir);
    cr_assert_eq(zmq_bind(s->events, text), 0);
    snprintf(text, sizeof(text), "ipc://%s/s", dir);
    cr_assert_eq(zmq_bind(s->snapshots, text), 0);
    cr_assert_eq(loop_zmq_add(loop, s->snapshots, on_snapshot_request, s, &s->source), 0);
}

static void store_close(struct fake_store *s)
{
    loop_source_free(s->source);
    zmq_close(s->events);
    zmq_close(s->snapshots);
}

static void store_publish(struct fake_store *s, const struct block_key *stored, const struct block_key *evicted)
{
    Tidepool__Store__BlockEvents message = TIDEPOOL__STORE__BLOCK_EVENTS__INIT;
    ProtobufCBinaryData in = {32, stored ? (uint8_t *)stored->bytes : NULL}, out = {32, evicted ? (uint8_t *)evicted->bytes : NULL};
    message.store_uuid = (ProtobufCBinaryData){16, s->uuid};
    message.sequence = ++s->sequence;
    message.stored = &in;
    message.n_stored = stored != NULL;
    message.evicted = &out;
    message.n_evicted = evicted != NULL;
    store_send(s->events, STORE_BLOCK_EVENTS, 0, &message.base);
}

static size_t known(void)
{
    struct route_worker_info info;
    route_worker_info(route, 0, &info);
    return info.store_blocks;
}

static struct block_key numbered(uint8_t n)
{
    struct block_key key = {.bytes = {n}};
    return key;
}

Test(route, test_route_follows_a_store_from_snapshot_through_events_and_gaps)
{
    struct fake w;
    struct fake_store s;
    store_open(&s);
    s.n_keys = 3;
    for (int i = 0; i < 3; i++)
        s.keys[i] = numbered((uint8_t)(i + 1));
    fake_connect(&w, "w0", 1);
    fake_ready_with(&w, "store");
    UNTIL(known() == 3);
    struct block_key four = numbered(4), one = numbered(1);
    store_publish(&s, &four, NULL);
    UNTIL(known() == 4);
    store_publish(&s, NULL, &one);
    UNTIL(known() == 3);
    int before = s.n_snapshots;
    s.sequence += 3; /* lost messages */
    s.keys[0] = numbered(7);
    s.n_keys = 1;
    store_publish(&s, &one, NULL);
    UNTIL(s.n_snapshots > before && known() == 1);
    cr_assert_eq(route_counters(route)->store_gaps, 1);
    store_close(&s); /* the store dies: what it held may be gone */
    UNTIL(known() == 0);
    store_open(&s); /* and comes back as another one */
    s.uuid[0] = 77;
    s.n_keys = 2;
    s.keys[0] = numbered(8);
    s.keys[1] = numbered(9);
    UNTIL(known() == 2);
    store_close(&s);
    fake_close(&w);
}
