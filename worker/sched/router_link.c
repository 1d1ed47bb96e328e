#include "worker/sched/router_link.h"

#include "proto/base/base_assert.h"
#include "proto/base/capped_alloc.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>
#include <zmq.h>

enum {
    RECEIVE_BATCH = 50,
    HWM = 2000,                     /* messages in ZeroMQ's own queues */
    LINGER_MS = 500,
    RECONNECT_MS = 100,
    RECONNECT_MAX_MS = 2000,
    READY_US = 1000000,
    CONNECTING_US = 50000,
    RETRY_US = 2000,                /* when ZeroMQ's queue is full */
    BEATS_MISSED_MAX = 5,
    HEARTBEAT_MS_MIN = 10,
    HEARTBEAT_MS_MAX = 60000,
    EXPANDED_MAX = 64 << 20,        /* bytes of an unpacked message */
    NAME_MAX_BYTES = 63,
};

struct out_message {
    struct out_message *next;
    uint8_t header[FRAME_HEADER_BYTES];
    size_t n;
    uint8_t body[];                 /* [n] */
};

struct router_link {
    char *name;
    uint8_t boot_uuid[16];
    struct router_link_events events;
    void *context, *socket;         /* ZeroMQ */
    struct loop_source *source, *beat_timer, *retry_timer;
    uint64_t epoch;                 /* 0: not connected */
    uint64_t heartbeat_us, heard_us, dropped;
    struct out_message *out_first, **out_last;
    size_t out_bytes;
};

/* ---- sending ---- */

static int message_pack(enum engine_frame type, uint64_t id, const ProtobufCMessage *message, struct out_message **ret_message)
{
    size_t n = protobuf_c_message_get_packed_size(message);
    struct out_message *out;

    if (n > FRAME_BODY_MAX)
        return -EMSGSIZE;
    out = malloc(sizeof *out + n);
    if (!out)
        return -ENOMEM;
    out->next = NULL;
    out->n = n;
    frame_header_encode(&(struct frame_header){.type = (uint16_t)type, .body_bytes = (uint32_t)n, .request_id = id}, out->header);
    protobuf_c_message_pack(message, out->body);
    *ret_message = out;
    return 0;
}

/* 0, or -EAGAIN: nobody is connected or the queue is full. Only the first part can be refused. */
static int message_send(struct router_link *link, const struct out_message *out)
{
    if (zmq_send(link->socket, out->header, FRAME_HEADER_BYTES, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0)
        return -zmq_errno();
    if (zmq_send(link->socket, out->body, out->n, ZMQ_DONTWAIT) < 0)
        return -zmq_errno();
    return 0;
}

static void queue_drop(struct router_link *link)
{
    while (link->out_first) {
        struct out_message *out = link->out_first;
        link->out_first = out->next;
        free(out);
    }
    link->out_last = &link->out_first;
    link->out_bytes = 0;
}

static void router_lost(struct router_link *link, const char *why)
{
    if (!link->epoch)
        return;
    link->epoch = 0;
    queue_drop(link);
    link->events.lost(link->events.arg, why);
    loop_timer_arm(link->beat_timer, 0);
}

static void queue_send(void *arg)
{
    struct router_link *link = arg;
    int rc = 0;

    while (link->out_first && (rc = message_send(link, link->out_first)) == 0) {
        struct out_message *out = link->out_first;
        link->out_first = out->next;
        link->out_bytes -= out->n;
        free(out);
    }
    if (!link->out_first)
        link->out_last = &link->out_first;
    if (rc == -EAGAIN)
        loop_timer_arm(link->retry_timer, RETRY_US);
    loop_zmq_kick(link->source);
    if (rc < 0 && rc != -EAGAIN)
        router_lost(link, zmq_strerror(-rc));
}

/* Ready and Heartbeat are sent now or not at all: the next one comes by itself. */
static int send_or_drop(struct router_link *link, enum engine_frame type, const ProtobufCMessage *message)
{
    struct out_message *out;
    int rc = message_pack(type, 0, message, &out);

    if (rc < 0)
        return rc;
    rc = message_send(link, out);
    free(out);
    loop_zmq_kick(link->source);
    return rc;
}

void router_link_send(struct router_link *link, enum engine_frame type, uint64_t id, const ProtobufCMessage *message)
{
    struct out_message *out;
    int rc;

    if (!link->epoch)
        return;
    rc = message_pack(type, id, message, &out);
    if (rc == 0 && link->out_bytes + out->n > ROUTER_LINK_OUT_MAX) {
        free(out);
        rc = -ENOBUFS;
    }
    if (rc < 0) {
        /* From inside a step of the scheduler nothing may be cancelled: the loop does it. */
        link->heard_us = 0;
        loop_timer_arm(link->beat_timer, 0);
        return;
    }
    *link->out_last = out;
    link->out_last = &out->next;
    link->out_bytes += out->n;
    if (link->out_first == out)
        loop_timer_arm(link->retry_timer, 0);
}

/* ---- beats ---- */

static int send_ready(struct router_link *link)
{
    Tidepool__Engine__Ready ready = TIDEPOOL__ENGINE__READY__INIT;

    link->events.fill_ready(link->events.arg, &ready);
    ready.name = link->name;
    ready.boot_uuid = (ProtobufCBinaryData){sizeof link->boot_uuid, link->boot_uuid};
    ready.pid = (uint32_t)getpid();
    return send_or_drop(link, ENGINE_READY, &ready.base);
}

/* Behind what is queued, so that a beat never speaks of an end that is yet to come. */
static void send_heartbeat(struct router_link *link)
{
    Tidepool__Engine__Heartbeat beat = TIDEPOOL__ENGINE__HEARTBEAT__INIT;

    queue_send(link);
    if (!link->epoch || link->out_first)
        return;
    link->events.fill_heartbeat(link->events.arg, &beat);
    beat.epoch = link->epoch;
    (void)send_or_drop(link, ENGINE_HEARTBEAT, &beat.base);
}

static void beat(void *arg)
{
    struct router_link *link = arg;

    if (link->epoch && clock_now_us() - link->heard_us > BEATS_MISSED_MAX * link->heartbeat_us)
        router_lost(link, link->heard_us ? "it is silent" : "it does not take its messages");
    if (link->epoch)
        send_heartbeat(link);
    if (link->epoch) {
        loop_timer_arm(link->beat_timer, link->heartbeat_us);
    } else {
        /* Refused: there is no connection yet. */
        loop_timer_arm(link->beat_timer, send_ready(link) < 0 ? CONNECTING_US : READY_US);
    }
}

void router_link_announce(struct router_link *link)
{
    (void)send_ready(link);
}

/* ---- receiving ---- */

static int on_ready_ack(struct router_link *link, const uint8_t *body, size_t n, ProtobufCAllocator *alloc)
{
    Tidepool__Engine__ReadyAck *ack = tidepool__engine__ready_ack__unpack(alloc, n, body);
    uint64_t epoch = ack ? ack->epoch : 0, heartbeat_ms = ack ? ack->heartbeat_ms : 0;

    if (ack)
        tidepool__engine__ready_ack__free_unpacked(ack, alloc);
    if (!epoch || heartbeat_ms < HEARTBEAT_MS_MIN || heartbeat_ms > HEARTBEAT_MS_MAX)
        return -EPROTO;
    link->heard_us = clock_now_us();
    if (epoch == link->epoch)
        return 0;
    router_lost(link, "another router took its place");
    link->epoch = epoch;
    link->heartbeat_us = heartbeat_ms * 1000;
    link->events.connected(link->events.arg);
    loop_timer_arm(link->beat_timer, 0);
    return 0;
}

static bool of_this_epoch(struct router_link *link, uint64_t epoch)
{
    if (!link->epoch || epoch != link->epoch) {
        link->dropped++;
        return false;
    }
    link->heard_us = clock_now_us();
    return true;
}

static int on_generate(struct router_link *link, uint64_t id, const uint8_t *body, size_t n, ProtobufCAllocator *alloc)
{
    Tidepool__Engine__Generate *message = tidepool__engine__generate__unpack(alloc, n, body);

    if (!message)
        return -EPROTO;
    if (of_this_epoch(link, message->epoch))
        link->events.generate(link->events.arg, id, message);
    tidepool__engine__generate__free_unpacked(message, alloc);
    return 0;
}

/* Cancel, Drain and the router's Heartbeat carry the epoch only. */
static int on_small(struct router_link *link, uint16_t type, uint64_t id, const uint8_t *body, size_t n, ProtobufCAllocator *alloc)
{
    Tidepool__Engine__Heartbeat *message = tidepool__engine__heartbeat__unpack(alloc, n, body);
    uint64_t epoch;

    if (!message)
        return -EPROTO;
    epoch = message->epoch;
    tidepool__engine__heartbeat__free_unpacked(message, alloc);
    if (!of_this_epoch(link, epoch))
        return 0;
    if (type == ENGINE_CANCEL)
        link->events.cancel(link->events.arg, id);
    else if (type == ENGINE_DRAIN)
        link->events.drain(link->events.arg);
    return 0;
}

static int dispatch(struct router_link *link, const struct frame_header *header, const uint8_t *body)
{
    struct capped_alloc alloc;

    capped_alloc_init(&alloc, EXPANDED_MAX);
    switch (header->type) {
    case ENGINE_READY_ACK: return on_ready_ack(link, body, header->body_bytes, &alloc.pb);
    case ENGINE_GENERATE: return on_generate(link, header->request_id, body, header->body_bytes, &alloc.pb);
    case ENGINE_HEARTBEAT:
    case ENGINE_CANCEL:
    case ENGINE_DRAIN: return on_small(link, header->type, header->request_id, body, header->body_bytes, &alloc.pb);
    default: return -EPROTO;
    }
}

/* Reads one part into `part`, which is initialised by the caller. Returns whether more follow, or an error. */
static int part_receive(struct router_link *link, zmq_msg_t *part)
{
    if (zmq_msg_recv(part, link->socket, ZMQ_DONTWAIT) < 0)
        return -zmq_errno();
    return zmq_msg_more(part);
}

/* Receives and handles one message. -EAGAIN: there is none; -EPROTO: it made no sense. */
static int receive_one(struct router_link *link)
{
    struct frame_header header;
    zmq_msg_t first, second;
    int rc, more;

    zmq_msg_init(&first);
    zmq_msg_init(&second);
    more = part_receive(link, &first);
    rc = more < 0 ? more : -EPROTO;
    if (more > 0)
        more = part_receive(link, &second);
    else
        goto done;
    if (more == 0 && frame_header_decode(zmq_msg_data(&first), zmq_msg_size(&first), &header) == 0 &&
        zmq_msg_size(&first) == FRAME_HEADER_BYTES && zmq_msg_size(&second) == header.body_bytes)
        rc = dispatch(link, &header, zmq_msg_data(&second));
    while (more > 0)
        more = part_receive(link, &second);
done:
    zmq_msg_close(&second);
    zmq_msg_close(&first);
    return rc;
}

static void socket_ready(void *arg)
{
    struct router_link *link = arg;

    for (int i = 0; i < RECEIVE_BATCH; i++) {
        int rc = receive_one(link);
        if (rc == -EPROTO) {
            link->dropped++;
            LOG_WARN("router_message_dropped", LOG_STR("why", "malformed"), LOG_INT("dropped", link->dropped));
        } else if (rc < 0) {
            return;
        }
    }
}

/* ---- life ---- */

static int socket_open(struct router_link *link, const char *endpoint, struct error *err)
{
    char identity[NAME_MAX_BYTES + 1 + 32 + 1];
    const int64_t max_size = FRAME_BODY_MAX + FRAME_HEADER_BYTES;
    const struct {
        int option, value;
    } options[] = {
        {ZMQ_LINGER, LINGER_MS}, {ZMQ_SNDHWM, HWM}, {ZMQ_RCVHWM, HWM}, {ZMQ_IMMEDIATE, 1},
        {ZMQ_RECONNECT_IVL, RECONNECT_MS}, {ZMQ_RECONNECT_IVL_MAX, RECONNECT_MAX_MS},
    };
    int n = snprintf(identity, sizeof identity, "%s-", link->name);

    for (size_t i = 0; i < sizeof link->boot_uuid; i++)
        n += snprintf(identity + n, sizeof identity - (size_t)n, "%02x", link->boot_uuid[i]);
    link->context = zmq_ctx_new();
    link->socket = link->context ? zmq_socket(link->context, ZMQ_DEALER) : NULL;
    if (!link->socket)
        return error_set(err, -zmq_errno(), "ZeroMQ socket: %s", zmq_strerror(zmq_errno()));
    for (size_t i = 0; i < ARRAY_LEN(options); i++) {
        if (zmq_setsockopt(link->socket, options[i].option, &options[i].value, sizeof options[i].value) < 0)
            return error_set(err, -zmq_errno(), "ZeroMQ option: %s", zmq_strerror(zmq_errno()));
    }
    if (zmq_setsockopt(link->socket, ZMQ_ROUTING_ID, identity, (size_t)n) < 0 ||
        zmq_setsockopt(link->socket, ZMQ_MAXMSGSIZE, &max_size, sizeof max_size) < 0)
        return error_set(err, -zmq_errno(), "ZeroMQ option: %s", zmq_strerror(zmq_errno()));
    if (zmq_connect(link->socket, endpoint) < 0)
        return error_set(err, -zmq_errno(), "--router %s: %s", endpoint, zmq_strerror(zmq_errno()));
    return 0;
}

static bool name_is_good(const char *name)
{
    size_t n = strlen(name);

    for (size_t i = 0; i < n; i++) {
        if (name[i] <= ' ' || name[i] > '~')
            return false;
    }
    return n >= 1 && n <= NAME_MAX_BYTES;
}

int router_link_create(struct loop *loop, const struct router_link_config *config, struct router_link **ret_link, struct error *err)
{
    struct router_link *link;
    int rc;

    if (!name_is_good(config->name))
        return error_set(err, -EINVAL, "--name %s: 1 to %d printable characters without spaces", config->name, NAME_MAX_BYTES);
    link = calloc(1, sizeof *link);
    if (!link)
        return error_set(err, -ENOMEM, "out of memory");
    link->out_last = &link->out_first;
    link->events = config->events;
    link->name = strdup(config->name);
    rc = -ENOMEM;
    error_set(err, rc, "out of memory");
    if (!link->name)
        goto fail;
    if (getrandom(link->boot_uuid, sizeof link->boot_uuid, 0) != sizeof link->boot_uuid) {
        rc = error_set(err, -EIO, "no random numbers for the identity of this worker");
        goto fail;
    }
    rc = socket_open(link, config->endpoint, err);
    if (rc < 0)
        goto fail;
    rc = loop_zmq_add(loop, link->socket, socket_ready, link, &link->source);
    if (rc == 0)
        rc = loop_timer_add(loop, beat, link, &link->beat_timer);
    if (rc == 0)
        rc = loop_timer_add(loop, queue_send, link, &link->retry_timer);
    if (rc < 0) {
        error_set(err, rc, "event loop: %s", strerror(-rc));
        goto fail;
    }
    loop_timer_arm(link->beat_timer, 0);
    *ret_link = link;
    return 0;
fail:
    router_link_free(link);
    return rc;
}

/* Waits for ZeroMQ to take what is queued. */
static void queue_leave(struct router_link *link)
{
    uint64_t end_us = clock_now_us() + LINGER_MS * 1000;

    while (link->epoch && link->out_first && clock_now_us() < end_us) {
        zmq_pollitem_t item = {.socket = link->socket, .events = ZMQ_POLLOUT};
        struct out_message *out = link->out_first;
        if (message_send(link, out) == 0) {
            link->out_first = out->next;
            free(out);
        } else if (zmq_poll(&item, 1, 10) < 0) {
            return;
        }
    }
}

void router_link_free(struct router_link *link)
{
    if (!link)
        return;
    queue_leave(link);
    queue_drop(link);
    loop_source_free(link->source);
    loop_source_free(link->beat_timer);
    loop_source_free(link->retry_timer);
    if (link->socket)
        zmq_close(link->socket);
    if (link->context)
        zmq_ctx_term(link->context);
    free(link->name);
    free(link);
}

uint64_t router_link_epoch(const struct router_link *link)
{
    return link->epoch;
}

uint64_t router_link_dropped(const struct router_link *link)
{
    return link->dropped;
}
