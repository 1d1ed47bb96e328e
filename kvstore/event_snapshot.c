/* Snapshots: all sealed blocks, in parts, one part a job and turn of the loop, while the pool goes on changing. A cursor walks the blocks in order of
 * sealing. What changes meanwhile is published with numbers above the snapshot's, so a subscriber that applies those on top ends up right. */
#include "kvstore/event_stream_private.h"

#include "proto/base/clock.h"
#include "proto/wire/frame.h"
#include "proto/wire/store.pb-c.h"
#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <zmq.h>

enum { REQUESTS_PER_CALL = 50, RETRY_US = 10000 };

/* Reads one part. Returns its size, also where that is beyond `max`, and whether more follow. Negative: nothing to read. */
static int part_receive(void *socket, void *data, size_t max, bool *ret_more)
{
    int n = zmq_recv(socket, data, max, ZMQ_DONTWAIT), more = 0;
    size_t size = sizeof more;

    if (n < 0)
        return -zmq_errno();
    if (zmq_getsockopt(socket, ZMQ_RCVMORE, &more, &size) < 0)
        return -zmq_errno();
    *ret_more = more;
    return n;
}

/* Reads peer, header and body. 1: a well-formed request, 0: something else (dropped), negative: nothing to read. */
static int request_receive(void *socket, struct snapshot_job *ret_job)
{
    uint8_t header[FRAME_HEADER_BYTES], body[SNAPSHOT_REQUEST_MAX];
    struct frame_header decoded;
    bool more = false;
    int n_peer = part_receive(socket, ret_job->peer.id, sizeof ret_job->peer.id, &more), n_header = -1, n_body = -1;

    if (n_peer < 0)
        return n_peer;
    if (more)
        n_header = part_receive(socket, header, sizeof header, &more);
    if (more)
        n_body = part_receive(socket, body, sizeof body, &more);
    if (more || n_header != sizeof header || n_body < 0) {
        while (more && part_receive(socket, body, sizeof body, &more) >= 0)
            ;
        return 0;
    }
    if (frame_header_decode(header, sizeof header, &decoded) < 0 || decoded.type != STORE_SNAPSHOT_REQUEST || n_peer > SNAPSHOT_PEER_MAX)
        return 0;
    ret_job->peer.n = (size_t)n_peer;
    ret_job->request_id = decoded.request_id;
    return 1;
}

static void job_end(struct event_stream *stream, struct snapshot_job *job)
{
    pool_cursor_close(stream->pool, &job->cursor);
    job->peer.n = 0;
}

void snapshot_jobs_end(struct event_stream *stream)
{
    for (int i = 0; i < SNAPSHOT_JOBS_MAX; i++) {
        if (stream->jobs[i].peer.n)
            job_end(stream, &stream->jobs[i]);
    }
}

/* The place of this peer's snapshot, else a free one, else NULL. */
static struct snapshot_job *job_place(struct event_stream *stream, const struct snapshot_job *request)
{
    struct snapshot_job *free = NULL;

    for (int i = 0; i < SNAPSHOT_JOBS_MAX; i++) {
        struct snapshot_job *job = &stream->jobs[i];
        if (job->peer.n == request->peer.n && memcmp(job->peer.id, request->peer.id, job->peer.n) == 0)
            return job;
        if (!job->peer.n && !free)
            free = job;
    }
    return free;
}

static void job_start(struct event_stream *stream, const struct snapshot_job *request)
{
    struct snapshot_job *job = job_place(stream, request);

    if (!job)
        return;
    if (job->peer.n)
        job_end(stream, job);
    /* So that `sequence` covers every change before the walk. */
    event_stream_flush(stream);
    *job = *request;
    job->sequence = stream->sequence;
    job->progress_us = clock_now_us();
    pool_cursor_open(stream->pool, &job->cursor);
    loop_timer_arm(stream->snapshot_timer, 0);
}

void snapshot_requests(void *arg)
{
    struct event_stream *stream = arg;
    struct snapshot_job request;

    for (int i = 0; i < REQUESTS_PER_CALL; i++) {
        int rc = request_receive(stream->snapshots, &request);
        if (rc < 0)
            return;
        if (rc > 0)
            job_start(stream, &request);
    }
}

/* Sends one part. 1: the last one, 0: more to come, -EAGAIN: the peer's queue is full, other errors: it is gone. */
static int part_send(struct event_stream *stream, struct snapshot_job *job)
{
    Tidepool__Store__Snapshot part = TIDEPOOL__STORE__SNAPSHOT__INIT;
    struct block_key keys[SNAPSHOT_KEYS];
    ProtobufCBinaryData list[SNAPSHOT_KEYS];
    struct pool_block *start = job->cursor.block;
    int rc, n;

    n = pool_cursor_read(&job->cursor, keys, SNAPSHOT_KEYS);
    for (int i = 0; i < n; i++)
        list[i] = (ProtobufCBinaryData){BLOCK_KEY_BYTES, keys[i].bytes};
    part.store_uuid = (ProtobufCBinaryData){sizeof stream->store_uuid, stream->store_uuid};
    part.sequence = job->sequence;
    part.keys = list;
    part.n_keys = (size_t)n;
    part.more = job->cursor.block != NULL;
    rc = event_stream_send(stream->snapshots, &job->peer, STORE_SNAPSHOT, job->request_id, &part.base);
    if (rc < 0) {
        job->cursor.block = start;
        return rc;
    }
    return part.more ? 0 : 1;
}

void snapshot_continue(void *arg)
{
    struct event_stream *stream = arg;
    uint64_t now = clock_now_us();
    bool more = false, blocked = false;

    for (int i = 0; i < SNAPSHOT_JOBS_MAX; i++) {
        struct snapshot_job *job = &stream->jobs[i];
        int rc = job->peer.n ? part_send(stream, job) : -EAGAIN;
        if (!job->peer.n)
            continue;
        if (rc == 0) {
            job->progress_us = now;
            more = true;
        } else if (rc == -EAGAIN && now - job->progress_us < SNAPSHOT_TIMEOUT_MS * 1000ull) {
            blocked = true;
        } else {
            stream->errors += rc < 0;
            job_end(stream, job);
        }
    }
    if (more || blocked)
        loop_timer_arm(stream->snapshot_timer, more ? 0 : RETRY_US);
    loop_zmq_kick(stream->snapshot_source);
}
