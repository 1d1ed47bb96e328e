/* The ROUTER socket. Rules measured in libzmq 4.3.4: without ROUTER_MANDATORY messages to a peer that does not read are lost without a word, and a
 * blocking send to a peer that leaves blocks for ever; so sends are MANDATORY and DONTWAIT, and what ZeroMQ does not take waits in a
 * queue of the worker's own with a limit in bytes. */
#include "proto/base/base_assert.h"
#include "proto/base/capped_alloc.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "router/route/message_parts.h"
#include "router/route/route_private.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

enum {
    RECEIVE_BATCH = 50,
    SEND_HWM = 2000,
    RECEIVE_HWM = 20000,
    LINGER_MS = 500,
    HANDSHAKE_MS = 10000,
    BACKLOG_RETRY_US = 5000,
};

/* -- sending -- */

static void out_message_free(struct out_message *message)
{
    free(message->body);
    free(message);
}

void worker_link_drop_backlog(struct worker *worker)
{
    while (worker->out_first) {
        struct out_message *message = worker->out_first;
        worker->out_first = message->next;
        out_message_free(message);
    }
    worker->out_last = &worker->out_first;
    worker->out_bytes = 0;
}

/* 0, -EAGAIN (the peer does not read), -EHOSTUNREACH (gone). The first part decides; ZeroMQ takes the rest then. */
static int send_now(struct worker *worker, const struct out_message *message)
{
    void *socket = worker->route->socket;
    if (zmq_send(socket, worker->identity, worker->n_identity, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0)
        return -zmq_errno();
    if (zmq_send(socket, message->header, FRAME_HEADER_BYTES, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0)
        return -zmq_errno();
    if (zmq_send(socket, message->body, message->len, ZMQ_DONTWAIT) < 0)
        return -zmq_errno();
    return 0;
}

static int pack(enum engine_frame type, uint64_t request_id, const ProtobufCMessage *message, struct out_message **ret_message)
{
    size_t len = protobuf_c_message_get_packed_size(message);
    if (len > FRAME_BODY_MAX)
        return -EMSGSIZE;
    struct out_message *out = calloc(1, sizeof(*out));
    uint8_t *body = malloc(len + 1);
    if (!out || !body) {
        free(out);
        free(body);
        return -ENOMEM;
    }
    struct frame_header header = {.type = (uint16_t)type, .body_bytes = (uint32_t)len, .request_id = request_id};
    frame_header_encode(&header, out->header);
    protobuf_c_message_pack(message, body);
    out->body = body;
    out->len = len;
    *ret_message = out;
    return 0;
}

static int keep(struct worker *worker, struct out_message *message)
{
    if (worker->out_bytes + message->len > ROUTE_OUT_BYTES_MAX) {
        out_message_free(message);
        worker_set_lost(worker, "does not take its messages");
        return -ENOBUFS;
    }
    *worker->out_last = message;
    worker->out_last = &message->next;
    worker->out_bytes += message->len + sizeof(*message);
    loop_timer_arm(worker->route->out_timer, BACKLOG_RETRY_US);
    return 0;
}

int worker_link_send(struct worker *worker, enum engine_frame type, uint64_t request_id, const ProtobufCMessage *body)
{
    struct out_message *message = NULL;
    int rc = pack(type, request_id, body, &message);
    if (rc < 0)
        return rc;
    rc = worker->out_first ? -EAGAIN : send_now(worker, message);
    loop_zmq_kick(worker->route->socket_source);
    if (rc == -EAGAIN)
        return keep(worker, message);
    out_message_free(message);
    if (rc < 0)
        worker_set_lost(worker, rc == -EHOSTUNREACH ? "its connection is gone" : zmq_strerror(-rc));
    return rc;
}

static bool drain_backlog(struct worker *worker)
{
    while (worker->out_first) {
        struct out_message *message = worker->out_first;
        int rc = send_now(worker, message);
        if (rc == -EAGAIN)
            return false;
        if (rc < 0) {
            worker_set_lost(worker, "its connection is gone");
            return true;
        }
        worker->out_first = message->next;
        if (!worker->out_first)
            worker->out_last = &worker->out_first;
        worker->out_bytes -= message->len + sizeof(*message);
        out_message_free(message);
    }
    return true;
}

static void on_out_timer(void *arg)
{
    struct route *route = arg;
    bool again = false;
    for (uint32_t i = 0; i < route->n_workers; i++)
        again |= !drain_backlog(route->workers[i]);
    if (again)
        loop_timer_arm(route->out_timer, BACKLOG_RETRY_US);
    loop_zmq_kick(route->socket_source);
}

/* -- receiving -- */

static void malformed(struct route *route, struct worker *worker, const char *why)
{
    route->counters.malformed++;
    LOG_DEBUG("malformed_message", LOG_STR("worker", worker ? worker->name : "unknown"), LOG_STR("why", why));
    if (worker && ++worker->malformed >= ROUTE_MALFORMED_MAX)
        worker_set_lost(worker, "too many malformed messages");
}

static void take_message(struct route *route, const uint8_t *identity, size_t n_identity, const uint8_t *head, size_t n_head,
                         const uint8_t *body, size_t len)
{
    struct frame_header header;
    struct worker *worker = worker_find(route, identity, n_identity);
    if (frame_header_decode(head, n_head, &header) < 0 || n_head != FRAME_HEADER_BYTES || header.body_bytes != len) {
        malformed(route, worker, "header");
        return;
    }
    if (header.type == ENGINE_READY) {
        worker_on_ready(route, identity, n_identity, body, len);
        return;
    }
    if (!worker) {
        route->counters.dropped_late++; /* of another life of the router; it will say Ready */
        return;
    }
    if (worker_on_message(worker, &header, body) == -EPROTO)
        malformed(route, worker, "body");
}

static void on_readable(void *arg)
{
    struct route *route = arg;
    for (int i = 0; i < RECEIVE_BATCH; i++) {
        zmq_msg_t parts[3];
        int n = message_parts_receive(route->socket, parts, 3);
        if (n == 3)
            take_message(route, zmq_msg_data(&parts[0]), zmq_msg_size(&parts[0]), zmq_msg_data(&parts[1]), zmq_msg_size(&parts[1]),
                         zmq_msg_data(&parts[2]), zmq_msg_size(&parts[2]));
        else if (n > 0)
            malformed(route, worker_find(route, zmq_msg_data(&parts[0]), zmq_msg_size(&parts[0])), "parts");
        message_parts_close(parts, 3);
        if (n < 0)
            break;
    }
}

/* -- the socket -- */

static int set_options(void *socket)
{
    const int64_t message_max = FRAME_BODY_MAX + FRAME_HEADER_BYTES;
    const struct { int option, value; } options[] = {
        {ZMQ_ROUTER_MANDATORY, 1}, {ZMQ_SNDHWM, SEND_HWM}, {ZMQ_RCVHWM, RECEIVE_HWM}, {ZMQ_LINGER, LINGER_MS},
        {ZMQ_HANDSHAKE_IVL, HANDSHAKE_MS}, {ZMQ_IPV6, 1}, {ZMQ_BACKLOG, 1024},
    };
    for (size_t i = 0; i < ARRAY_LEN(options); i++)
        if (zmq_setsockopt(socket, options[i].option, &options[i].value, sizeof(int)) < 0)
            return -zmq_errno();
    return zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &message_max, sizeof(message_max)) < 0 ? -zmq_errno() : 0;
}

int worker_link_open(struct route *route, struct error *err)
{
    route->socket = zmq_socket(route->zmq_context, ZMQ_ROUTER);
    if (!route->socket)
        return error_set(err, -zmq_errno(), "zmq_socket: %s", zmq_strerror(zmq_errno()));
    int rc = set_options(route->socket);
    if (rc < 0)
        return error_set(err, rc, "zmq_setsockopt: %s", zmq_strerror(-rc));
    if (zmq_bind(route->socket, route->config.endpoint) < 0)
        return error_set(err, -zmq_errno(), "--endpoint %s: %s", route->config.endpoint, zmq_strerror(zmq_errno()));
    rc = loop_timer_add(route->config.loop, on_out_timer, route, &route->out_timer);
    if (rc >= 0)
        rc = loop_zmq_add(route->config.loop, route->socket, on_readable, route, &route->socket_source);
    return rc < 0 ? error_set(err, rc, "cannot watch the workers' socket: %s", strerror(-rc)) : 0;
}

void worker_link_close(struct route *route)
{
    loop_source_free(route->socket_source);
    loop_source_free(route->out_timer);
    if (route->socket) {
        zmq_close(route->socket);
        /* libzmq leaves the file of an ipc endpoint behind. */
        if (strncmp(route->config.endpoint, "ipc://", 6) == 0)
            unlink(route->config.endpoint + 6);
    }
    route->socket = NULL;
    route->socket_source = route->out_timer = NULL;
}
