/* Shared by event_stream.c and event_snapshot.c only. */
#pragma once
#include "kvstore/event_stream.h"
#include <protobuf-c/protobuf-c.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SNAPSHOT_JOBS_MAX = 16,       /* snapshots being sent at a time; further requests are dropped, their senders ask again */
    SNAPSHOT_REQUEST_MAX = 256,   /* bytes of a message part from a subscriber */
    SNAPSHOT_PEER_MAX = 255,      /* bytes of a ZeroMQ routing id */
    SNAPSHOT_KEYS = 2048,         /* in one part: 70 KB */
    SNAPSHOT_TIMEOUT_MS = 30000,  /* without progress a snapshot is given up */
};

struct stream_peer {
    uint8_t id[SNAPSHOT_PEER_MAX]; /* ZeroMQ routing id */
    size_t n;
};

/* A snapshot on its way to one subscriber. */
struct snapshot_job {
    struct stream_peer peer;      /* n = 0: the place is free */
    uint64_t request_id;
    uint64_t sequence;            /* of the last message published before the walk began */
    struct pool_cursor cursor;
    uint64_t progress_us;         /* when a part was last accepted */
};

struct event_stream {
    struct pool *pool;            /* borrowed */
    uint8_t store_uuid[16];
    char *event_endpoint, *snapshot_endpoint;
    void *context, *publisher, *snapshots; /* ZeroMQ */
    struct loop_source *flush_timer, *snapshot_source, *snapshot_timer;
    uint64_t sequence, errors;
    struct block_key *stored, *evicted; /* [4096] changes of this turn */
    size_t n_stored, n_evicted;
    struct snapshot_job jobs[SNAPSHOT_JOBS_MAX];
};

void event_stream_flush(struct event_stream *stream);
/* Sends header and body, to `peer` on a ROUTER socket. Only the first part can be refused (-EAGAIN, -EHOSTUNREACH): all memory is taken before, and
 * the parts behind belong to a message that the socket has accepted. */
int event_stream_send(void *socket, const struct stream_peer *peer, uint16_t type, uint64_t request_id, const ProtobufCMessage *message);

void snapshot_requests(void *arg); /* the ROUTER socket is readable */
void snapshot_continue(void *arg); /* sends the next parts */
void snapshot_jobs_end(struct event_stream *stream);
