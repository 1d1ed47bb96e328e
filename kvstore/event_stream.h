/* Tells routers which blocks the pool holds: a ZeroMQ PUB socket for changes, gathered over one turn of the loop into one message with the next sequence
 * number, and a ROUTER socket that answers SnapshotRequest in parts. Nothing here waits: a subscriber that is too slow misses messages, sees the gap
 * and asks again; a snapshot that is not fetched is given up after a deadline. One thread.
 *
 * Within a message `evicted` happened before `stored`; a block that comes and goes within one turn is therefore split over two messages. */
#pragma once
#include "kvstore/pool.h"
#include "proto/base/error.h"
#include "proto/base/loop.h"

struct event_stream;

struct event_stream_config {
    const char *event_endpoint, *snapshot_endpoint; /* ipc:// files are removed when the stream is freed */
    uint8_t store_uuid[16];
};

int event_stream_create(struct loop *loop, const struct event_stream_config *config, struct event_stream **ret_stream, struct error *err);
/* Publishes what is left and closes the sockets (waits at most 100 ms for them). Called before the pool goes; NULL is fine. */
void event_stream_free(struct event_stream *stream);
/* What the pool calls. */
struct pool_listener event_stream_listener(struct event_stream *stream);
/* The pool whose blocks a snapshot lists; once, before the loop runs. */
void event_stream_attach(struct event_stream *stream, struct pool *pool);
/* Sequence number of the last message. */
uint64_t event_stream_sequence(const struct event_stream *stream);
/* Errors of a publication or a snapshot so far (memory, sockets): each makes a gap that subscribers see. */
uint64_t event_stream_errors(const struct event_stream *stream);
