#include "tests/unit/route_fixture.h"
#include "proto/base/log.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

enum { GUARD_US = 10000000 };

char route_dir[64];
void *zmq_context;
struct loop *loop;
struct route *route;
static char endpoint[128];
static struct loop_source *guard;
static bool timed_out;

static void on_guard(void *arg)
{
    (void)arg;
    timed_out = true;
    loop_stop(loop);
}

struct route_config route_defaults(void)
{
    return (struct route_config){.loop = loop, .endpoint = endpoint, .policy = &policy_prefix, .queue_requests_max = 4, .queue_tokens_max = 100000,
                                 .worker_wait_us = 60000000, .queue_timeout_us = 60000000, .heartbeat_ms = 50, .progress_timeout_us = 300000,
                                 .retries_max = 2, .vocab_size = 100};
}

void route_fixture_open(void)
{
    struct error err;
    cr_assert_geq(sodium_init(), 0);
    snprintf(route_dir, sizeof(route_dir), "%s/tp-route-XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    cr_assert_not_null(mkdtemp(route_dir));
    snprintf(endpoint, sizeof(endpoint), "ipc://%s/r", route_dir);
    zmq_context = zmq_ctx_new();
    cr_assert_eq(loop_create(&loop), 0);
    cr_assert_eq(loop_timer_add(loop, on_guard, NULL, &guard), 0);
    log_init("test", LOG_LEVEL_ERROR, LOG_FORMAT_LOGFMT);
    struct route_config config = route_defaults();
    cr_assert_eq(route_create(&config, &route, &err), 0, "%s", err.text);
}

void route_restart(struct route_config config)
{
    struct error err;
    route_free(route);
    cr_assert_eq(route_create(&config, &route, &err), 0, "%s", err.text);
}

void route_fixture_close(void)
{
    char path[160];
    route_free(route);
    zmq_ctx_term(zmq_context);
    loop_source_free(guard);
    loop_free(loop);
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof(path), "%s/%c", route_dir, "res"[i]);
        unlink(path);
    }
    rmdir(route_dir);
}

void guard_arm(void)
{
    timed_out = false;
    loop_timer_arm(guard, GUARD_US);
}

bool guard_turn(void)
{
    if (!timed_out)
        loop_poll(loop);
    return !timed_out;
}

void guard_disarm(void)
{
    loop_timer_disarm(guard);
}

/* -- workers -- */

void fake_send(struct fake_worker *w, enum engine_frame type, uint64_t id, const ProtobufCMessage *message)
{
    uint8_t head[FRAME_HEADER_BYTES], body[8192];
    size_t len = protobuf_c_message_pack(message, body);
    cr_assert_leq(len, sizeof(body));
    frame_header_encode(&(struct frame_header){.type = (uint16_t)type, .body_bytes = (uint32_t)len, .request_id = id}, head);
    cr_assert_geq(zmq_send(w->socket, head, sizeof(head), ZMQ_SNDMORE | ZMQ_DONTWAIT), 0);
    cr_assert_geq(zmq_send(w->socket, body, len, ZMQ_DONTWAIT), 0);
    loop_zmq_kick(w->source);
}

static void take_generate(struct fake_worker *w, uint64_t id, const uint8_t *body, size_t len)
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

static void take(struct fake_worker *w, const struct frame_header *header, const uint8_t *body, size_t len)
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
    struct fake_worker *w = arg;
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

void fake_connect(struct fake_worker *w, const char *name, int boot)
{
    char identity[32];
    int linger = 0;
    memset(w, 0, sizeof(*w));
    snprintf(w->name, sizeof(w->name), "%s", name);
    snprintf(identity, sizeof(identity), "%s-%d", name, boot);
    w->socket = zmq_socket(zmq_context, ZMQ_DEALER);
    zmq_setsockopt(w->socket, ZMQ_ROUTING_ID, identity, strlen(identity));
    zmq_setsockopt(w->socket, ZMQ_LINGER, &linger, sizeof(linger));
    cr_assert_eq(zmq_connect(w->socket, endpoint), 0);
    cr_assert_eq(loop_zmq_add(loop, w->socket, on_fake, w, &w->source), 0);
}

void fake_ready_with(struct fake_worker *w, const char *store)
{
    uint8_t uuid[16] = {1}, fingerprint[32] = {7};
    uint32_t eos[1] = {EOS};
    char events[160] = "", snapshots[160] = "";
    if (store) {
        snprintf(events, sizeof(events), "ipc://%s/e", route_dir);
        snprintf(snapshots, sizeof(snapshots), "ipc://%s/s", route_dir);
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

void fake_start(struct fake_worker *w, const char *name, int boot)
{
    fake_connect(w, name, boot);
    fake_ready_with(w, NULL);
}

void fake_close(struct fake_worker *w)
{
    loop_source_free(w->source);
    zmq_close(w->socket);
    w->socket = NULL;
}

void fake_beat(struct fake_worker *w, uint64_t progress, bool busy)
{
    Tidepool__Engine__Heartbeat beat = TIDEPOOL__ENGINE__HEARTBEAT__INIT;
    beat.epoch = w->epoch;
    beat.progress = progress;
    beat.busy = busy;
    fake_send(w, ENGINE_HEARTBEAT, 0, &beat.base);
}

void fake_prefilled(struct fake_worker *w, uint32_t cached)
{
    Tidepool__Engine__Prefilled prefilled = TIDEPOOL__ENGINE__PREFILLED__INIT;
    prefilled.epoch = w->epoch;
    prefilled.prompt_tokens = w->n_prompt;
    prefilled.cached_tokens = cached;
    fake_send(w, ENGINE_PREFILLED, w->id, &prefilled.base);
}

void fake_tokens_at(struct fake_worker *w, uint64_t epoch, uint32_t first_index, const uint32_t *ids, size_t n)
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

void fake_tokens(struct fake_worker *w, uint32_t first_index, uint32_t a, uint32_t b)
{
    fake_tokens_at(w, w->epoch, first_index, (const uint32_t[]){a, b}, 2);
}

void fake_finished(struct fake_worker *w, uint32_t completion_tokens)
{
    Tidepool__Engine__Finished finished = TIDEPOOL__ENGINE__FINISHED__INIT;
    finished.epoch = w->epoch;
    finished.reason = TIDEPOOL__ENGINE__FINISH_REASON__FINISH_LENGTH;
    finished.completion_tokens = completion_tokens;
    fake_send(w, ENGINE_FINISHED, w->id, &finished.base);
}

void fake_failed(struct fake_worker *w, Tidepool__Engine__Failed__Kind kind, const char *text)
{
    Tidepool__Engine__Failed failed = TIDEPOOL__ENGINE__FAILED__INIT;
    failed.epoch = w->epoch;
    failed.kind = kind;
    failed.text = (char *)text;
    fake_send(w, ENGINE_FAILED, w->id, &failed.base);
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

int client_submit_n(struct client *c, uint32_t n_prompt, uint32_t max_tokens)
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

void client_submit(struct client *c)
{
    cr_assert_eq(client_submit_n(c, 10, 6), 0, "%s", c->text);
}
