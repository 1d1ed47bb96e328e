/* The store's side of the socket protocol: bytes of one client go through framing, unpacking, every check and the pool. The first byte picks how the
 * rest is cut into reads. Afterwards nothing may be leased and the books of the pool balance. */
#include "kvstore/session.h"
#include "proto/base/base_assert.h"
#include "proto/wire/frame.h"
#include "proto/wire/stats_page.h"
#include <string.h>

enum { POOL_BYTES = 1 << 20 };

static uint64_t n_stored, n_evicted;

static void on_stored(void *arg, const struct block_key *key, uint64_t *mark)
{
    (void)arg, (void)key;
    *mark = ++n_stored;
}

static void on_evicted(void *arg, const struct block_key *key, const uint64_t *mark)
{
    (void)arg, (void)key;
    ASSERT(*mark);
    n_evicted++;
}

static void stats(void *arg, uint64_t *ret_fields)
{
    (void)arg;
    memset(ret_fields, 0, STATS_FIELD_COUNT * sizeof *ret_fields);
}

/* What the store sends must be frames. */
static void check_output(struct session *session)
{
    size_t done = 0;

    while (done < session->out.len) {
        struct frame_header header;
        ASSERT(frame_header_decode(session->out.data + done, session->out.len - done, &header) == 0);
        ASSERT(session->out.len - done >= FRAME_HEADER_BYTES + header.body_bytes);
        done += FRAME_HEADER_BYTES + header.body_bytes;
    }
    buf_clear(&session->out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const struct pool_listener listener = {.stored = on_stored, .evicted = on_evicted};
    struct session_env env = {.event_endpoint = "ipc:///e", .snapshot_endpoint = "ipc:///s", .stats = stats};
    struct session session;
    struct pool pool;
    size_t step;

    if (size < 1)
        return 0;
    n_stored = n_evicted = 0;
    ASSERT(pool_init(&pool, POOL_BYTES, &listener) == 0);
    env.pool = &pool;
    session_init(&session, &env);
    step = data[0] ? data[0] * 16u : 65536;
    for (size_t done = 1; done < size; done += step) {
        if (session_receive(&session, data + done, size - done < step ? size - done : step) < 0)
            break;
        check_output(&session);
    }
    check_output(&session);
    ASSERT((session.state == SESSION_FAILED) == (env.protocol_errors == 1));
    pool_owner_detach(&pool, &session.owner, false);
    ASSERT(session.owner.n_leases == session.owner.n_writes);
    pool_owner_end(&pool, &session.owner);
    ASSERT(pool.leases.n_used == 0 && pool.bytes_pinned == 0 && pool.n_unsealed == 0);
    ASSERT(pool.n_blocks == n_stored - n_evicted);
    session_fini(&session);
    pool_fini(&pool);
    return 0;
}
