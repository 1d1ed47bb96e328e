#include "kvstore/event_stream.h"

#include "kvstore/event_stream_private.h"
#include "proto/base/base_assert.h"
#include "proto/wire/frame.h"
#include "proto/wire/store.pb-c.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

enum { KEYS_MAX = 4096, EVENT_HWM = 4096, LINGER_MS = 100 };

static void flush(void *arg);

/* ---- sockets ---- */

static int socket_set(void *socket, int option, int value)
{
    return zmq_setsockopt(socket, option, &value, sizeof value) < 0 ? -zmq_errno() : 0;
}

static int socket_open(void *context, int type, const char *endpoint, void **ret_socket, struct error *err)
{
    void *socket = zmq_socket(context, type);
    int rc;

    if (!socket)
        return error_set(err, -zmq_errno(), "ZeroMQ socket for %s: %s", endpoint, zmq_strerror(zmq_errno()));
    if ((rc = socket_set(socket, ZMQ_LINGER, LINGER_MS)) < 0 || (rc = socket_set(socket, ZMQ_SNDHWM, EVENT_HWM)) < 0 ||
        (rc = socket_set(socket, ZMQ_RCVHWM, SNAPSHOT_JOBS_MAX)) < 0)
        goto fail;
    if (type == ZMQ_ROUTER) {
        int64_t max = SNAPSHOT_REQUEST_MAX;
        if (zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &max, sizeof max) < 0 || (rc = socket_set(socket, ZMQ_ROUTER_MANDATORY, 1)) < 0)
            goto fail;
    }
    if (zmq_bind(socket, endpoint) < 0)
        goto fail;
    *ret_socket = socket;
    return 0;
fail:
    rc = error_set(err, -zmq_errno(), "cannot serve %s: %s", endpoint, zmq_strerror(zmq_errno()));
    zmq_close(socket);
    return rc;
}

int event_stream_create(struct loop *loop, const struct event_stream_config *config, struct event_stream **ret_stream, struct error *err)
{
    struct event_stream *stream = calloc(1, sizeof *stream);
    int rc;

    if (!stream)
        return error_set(err, -ENOMEM, "out of memory");
    memcpy(stream->store_uuid, config->store_uuid, sizeof stream->store_uuid);
    rc = error_set(err, -ENOMEM, "out of memory");
    stream->stored = calloc(KEYS_MAX, sizeof *stream->stored);
    stream->evicted = calloc(KEYS_MAX, sizeof *stream->evicted);
    stream->event_endpoint = strdup(config->event_endpoint);
    stream->snapshot_endpoint = strdup(config->snapshot_endpoint);
    stream->context = zmq_ctx_new();
    if (!stream->stored || !stream->evicted || !stream->event_endpoint || !stream->snapshot_endpoint || !stream->context)
        goto fail;
    rc = socket_open(stream->context, ZMQ_PUB, config->event_endpoint, &stream->publisher, err);
    if (rc < 0)
        goto fail;
    rc = socket_open(stream->context, ZMQ_ROUTER, config->snapshot_endpoint, &stream->snapshots, err);
    if (rc < 0)
        goto fail;
    rc = loop_timer_add(loop, flush, stream, &stream->flush_timer);
    if (rc == 0)
        rc = loop_zmq_add(loop, stream->snapshots, snapshot_requests, stream, &stream->snapshot_source);
    if (rc == 0)
        rc = loop_timer_add(loop, snapshot_continue, stream, &stream->snapshot_timer);
    if (rc < 0) {
        error_set(err, rc, "event loop: %s", strerror(-rc));
        goto fail;
    }
    *ret_stream = stream;
    return 0;
fail:
    event_stream_free(stream);
    return rc;
}

static void unlink_ipc(const char *endpoint)
{
    if (endpoint && strncmp(endpoint, "ipc://", 6) == 0)
        unlink(endpoint + 6);
}

void event_stream_free(struct event_stream *stream)
{
    if (!stream)
        return;
    if (stream->pool) {
        flush(stream);
        snapshot_jobs_end(stream);
    }
    loop_source_free(stream->snapshot_timer);
    loop_source_free(stream->snapshot_source);
    loop_source_free(stream->flush_timer);
    if (stream->snapshots) {
        zmq_close(stream->snapshots);
        unlink_ipc(stream->snapshot_endpoint);
    }
    if (stream->publisher) {
        zmq_close(stream->publisher);
        unlink_ipc(stream->event_endpoint);
    }
    if (stream->context)
        zmq_ctx_term(stream->context);
    free(stream->snapshot_endpoint);
    free(stream->event_endpoint);
    free(stream->evicted);
    free(stream->stored);
    free(stream);
}

void event_stream_attach(struct event_stream *stream, struct pool *pool)
{
    ASSERT(!stream->pool);
    stream->pool = pool;
}

uint64_t event_stream_sequence(const struct event_stream *stream)
{
    return stream->sequence;
}

uint64_t event_stream_errors(const struct event_stream *stream)
{
    return stream->errors;
}

/* ---- changes ---- */

int event_stream_send(void *socket, const struct stream_peer *peer, uint16_t type, uint64_t request_id, const ProtobufCMessage *message)
{
    size_t n = protobuf_c_message_get_packed_size(message);
    uint8_t header[FRAME_HEADER_BYTES];
    zmq_msg_t body;
    int rc;

    if (zmq_msg_init_size(&body, n) < 0)
        return -ENOMEM;
    protobuf_c_message_pack(message, zmq_msg_data(&body));
    frame_header_encode(&(struct frame_header){.type = type, .body_bytes = (uint32_t)n, .request_id = request_id}, header);
    if (peer && zmq_send(socket, peer->id, peer->n, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0)
        goto fail;
    if (zmq_send(socket, header, sizeof header, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0)
        goto fail;
    if (zmq_msg_send(&body, socket, ZMQ_DONTWAIT) < 0)
        goto fail;
    return 0;
fail:
    rc = -zmq_errno();
    zmq_msg_close(&body);
    return rc;
}

static void keys_wrap(ProtobufCBinaryData *list, struct block_key *keys, size_t n)
{
    for (size_t i = 0; i < n; i++)
        list[i] = (ProtobufCBinaryData){BLOCK_KEY_BYTES, keys[i].bytes};
}

/* One message of all changes since the last. A message that cannot be sent uses up its number, so that subscribers see a gap. */
static void flush(void *arg)
{
    struct event_stream *stream = arg;
    Tidepool__Store__BlockEvents events = TIDEPOOL__STORE__BLOCK_EVENTS__INIT;
    size_t n = stream->n_stored + stream->n_evicted;
    ProtobufCBinaryData *list;

    if (!n)
        return;
    list = calloc(n, sizeof *list);
    events.store_uuid = (ProtobufCBinaryData){sizeof stream->store_uuid, stream->store_uuid};
    events.sequence = ++stream->sequence;
    if (list) {
        keys_wrap(list, stream->stored, stream->n_stored);
        keys_wrap(list + stream->n_stored, stream->evicted, stream->n_evicted);
        events.stored = list;
        events.n_stored = stream->n_stored;
        events.evicted = list + stream->n_stored;
        events.n_evicted = stream->n_evicted;
    }
    if (!list || event_stream_send(stream->publisher, NULL, STORE_BLOCK_EVENTS, 0, &events.base) < 0)
        stream->errors++;
    free(list);
    stream->n_stored = stream->n_evicted = 0;
}

void event_stream_flush(struct event_stream *stream)
{
    flush(stream);
}

/* The sequence number that the message being gathered will have. */
static uint64_t next_sequence(const struct event_stream *stream)
{
    return stream->sequence + 1;
}

static void changed(struct event_stream *stream)
{
    if (stream->n_stored + stream->n_evicted == 1)
        loop_timer_arm(stream->flush_timer, 0);
}

static void on_stored(void *arg, const struct block_key *key, uint64_t *mark)
{
    struct event_stream *stream = arg;

    if (stream->n_stored == KEYS_MAX)
        flush(stream);
    stream->stored[stream->n_stored++] = *key;
    *mark = next_sequence(stream);
    changed(stream);
}

static void on_evicted(void *arg, const struct block_key *key, const uint64_t *mark)
{
    struct event_stream *stream = arg;

    if (stream->n_evicted == KEYS_MAX || *mark == next_sequence(stream))
        flush(stream);
    stream->evicted[stream->n_evicted++] = *key;
    changed(stream);
}

struct pool_listener event_stream_listener(struct event_stream *stream)
{
    return (struct pool_listener){.stored = on_stored, .evicted = on_evicted, .arg = stream};
}
