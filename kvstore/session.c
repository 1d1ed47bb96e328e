#include "kvstore/session.h"

#include "proto/wire/stats_page.h"
#include "proto/base/base_assert.h"
#include "proto/base/capped_alloc.h"
#include "proto/wire/frame.h"
#include "proto/wire/frame_append.h"
#include "proto/wire/store.pb-c.h"
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS_MAX = 4096, EXPANDED_MAX = 4 << 20, OUT_MAX = SESSION_OUT_PAUSE + (1 << 20) };

void session_init(struct session *session, struct session_env *env)
{
    *session = (struct session){.env = env};
    lease_owner_init(&session->owner);
    buf_init(&session->in, FRAME_HEADER_BYTES + SESSION_IN_MAX + (64 << 10));
    buf_init(&session->out, OUT_MAX);
}

void session_fini(struct session *session)
{
    ASSERT(session->owner.n_leases == 0);
    buf_fini(&session->in);
    buf_fini(&session->out);
}

static int session_fail(struct session *session, uint64_t request_id, int code, const char *fmt, ...) __attribute__((format(printf, 4, 5)));

static int session_fail(struct session *session, uint64_t request_id, int code, const char *fmt, ...)
{
    Tidepool__Store__Failure failure = TIDEPOOL__STORE__FAILURE__INIT;
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(session->failure, sizeof session->failure, fmt, ap);
    va_end(ap);
    failure.code = code;
    failure.text = session->failure;
    /* Without room for it the client sees the closed socket only. */
    (void)frame_append(&session->out, STORE_FAILURE, request_id, &failure.base);
    session->state = SESSION_FAILED;
    session->env->protocol_errors++;
    buf_clear(&session->in);
    return -EPROTO;
}

static int reply(struct session *session, uint16_t type, uint64_t request_id, const ProtobufCMessage *message)
{
    int rc = frame_append(&session->out, type, request_id, message);

    return rc < 0 ? session_fail(session, request_id, rc, "no room for the answer") : 0;
}

static bool key_get(const ProtobufCBinaryData *data, struct block_key *ret_key)
{
    if (data->len != BLOCK_KEY_BYTES)
        return false;
    memcpy(ret_key->bytes, data->data, BLOCK_KEY_BYTES);
    return true;
}

static void extent_fill(Tidepool__Store__Extent *message, const struct pool_extent *extent)
{
    message->offset = extent->offset;
    message->length = extent->length;
    message->checksum = extent->checksum;
    message->lease = extent->lease;
}

/* The messages of n extents and the pointers that protobuf-c wants, in one piece: [n] pointers, then [n] messages. */
static Tidepool__Store__Extent **extents_alloc(size_t n)
{
    Tidepool__Store__Extent **list = calloc(n ? n : 1, sizeof *list + sizeof **list);
    Tidepool__Store__Extent *messages;

    if (!list)
        return NULL;
    messages = (Tidepool__Store__Extent *)(list + n);
    for (size_t i = 0; i < n; i++) {
        tidepool__store__extent__init(&messages[i]);
        list[i] = &messages[i];
    }
    return list;
}

/* ---- requests ---- */

static int handle_hello(struct session *session, uint64_t id, const ProtobufCMessage *message)
{
    const Tidepool__Store__Hello *hello = (const Tidepool__Store__Hello *)message;
    struct session_env *env = session->env;
    Tidepool__Store__Welcome welcome = TIDEPOOL__STORE__WELCOME__INIT;

    if (session->state != SESSION_NEW)
        return session_fail(session, id, -EPROTO, "a second Hello");
    if (hello->version != FRAME_VERSION)
        return session_fail(session, id, -EPROTONOSUPPORT, "version %u: this store speaks %d", hello->version, FRAME_VERSION);
    if (strlen(hello->client_name) > SESSION_NAME_MAX)
        return session_fail(session, id, -EINVAL, "client_name is longer than %d bytes", SESSION_NAME_MAX);
    snprintf(session->name, sizeof session->name, "%s", hello->client_name);
    session->state = SESSION_WELCOMED;
    welcome.version = FRAME_VERSION;
    welcome.store_uuid = (ProtobufCBinaryData){sizeof env->store_uuid, env->store_uuid};
    welcome.pool_bytes = env->pool->extents.bytes;
    welcome.lease_timeout_ms = env->lease_timeout_ms;
    welcome.event_endpoint = (char *)env->event_endpoint;
    welcome.snapshot_endpoint = (char *)env->snapshot_endpoint;
    return reply(session, STORE_WELCOME, id, &welcome.base);
}

static int handle_lookup(struct session *session, uint64_t id, const ProtobufCMessage *message)
{
    const Tidepool__Store__Lookup *lookup = (const Tidepool__Store__Lookup *)message;
    Tidepool__Store__LookupResult result = TIDEPOOL__STORE__LOOKUP_RESULT__INIT;
    struct block_key *keys = NULL;
    struct pool_extent *extents = NULL;
    int rc, n = (int)lookup->n_keys;

    if (lookup->n_keys > BLOCKS_MAX)
        return session_fail(session, id, -E2BIG, "Lookup of %zu keys, at most %d", lookup->n_keys, BLOCKS_MAX);
    keys = calloc((size_t)n + 1, sizeof *keys);
    extents = calloc((size_t)n + 1, sizeof *extents);
    result.extents = extents_alloc((size_t)n);
    if (!keys || !extents || !result.extents) {
        rc = session_fail(session, id, -ENOMEM, "out of memory");
        goto done;
    }
    for (int i = 0; i < n; i++) {
        if (!key_get(&lookup->keys[i], &keys[i])) {
            rc = session_fail(session, id, -EINVAL, "a key of %zu bytes", lookup->keys[i].len);
            goto done;
        }
    }
    result.n_extents = (size_t)pool_lookup(session->env->pool, &session->owner, keys, n, extents);
    for (size_t i = 0; i < result.n_extents; i++)
        extent_fill(result.extents[i], &extents[i]);
    rc = reply(session, STORE_LOOKUP_RESULT, id, &result.base);
done:
    free(result.extents);
    free(extents);
    free(keys);
    return rc;
}

static int reserve_block_get(struct session *session, uint64_t id, const Tidepool__Store__ReserveBlock *block, struct pool_reserve_request *ret)
{
    struct pool_reserve_request request = {.first = block->parent.len == 0, .position = block->position, .length = block->length};

    if (!key_get(&block->key, &request.key))
        return session_fail(session, id, -EINVAL, "a key of %zu bytes", block->key.len);
    if (!request.first && !key_get(&block->parent, &request.parent))
        return session_fail(session, id, -EINVAL, "a parent of %zu bytes", block->parent.len);
    if (request.first != (block->position == 0))
        return session_fail(session, id, -EINVAL, "a block at position %u %s parent", block->position, request.first ? "without" : "with");
    if (block->length == 0)
        return session_fail(session, id, -EINVAL, "a block of 0 bytes");
    *ret = request;
    return 0;
}

static const Tidepool__Store__ReserveStatus wire_status[] = {
    [POOL_RESERVE_GRANTED] = TIDEPOOL__STORE__RESERVE_STATUS__RESERVE_GRANTED,
    [POOL_RESERVE_EXISTS] = TIDEPOOL__STORE__RESERVE_STATUS__RESERVE_EXISTS,
    [POOL_RESERVE_BUSY] = TIDEPOOL__STORE__RESERVE_STATUS__RESERVE_BUSY,
    [POOL_RESERVE_FULL] = TIDEPOOL__STORE__RESERVE_STATUS__RESERVE_FULL,
};

static int handle_reserve(struct session *session, uint64_t id, const ProtobufCMessage *message)
{
    const Tidepool__Store__Reserve *reserve = (const Tidepool__Store__Reserve *)message;
    Tidepool__Store__ReserveResult result = TIDEPOOL__STORE__RESERVE_RESULT__INIT;
    struct pool_reserve_request *requests = NULL;
    size_t n = reserve->n_blocks;
    int rc;

    if (n > BLOCKS_MAX)
        return session_fail(session, id, -E2BIG, "Reserve of %zu blocks, at most %d", n, BLOCKS_MAX);
    requests = calloc(n + 1, sizeof *requests);
    result.status = calloc(n + 1, sizeof *result.status);
    result.extents = extents_alloc(n);
    if (!requests || !result.status || !result.extents) {
        rc = session_fail(session, id, -ENOMEM, "out of memory");
        goto done;
    }
    for (size_t i = 0; i < n; i++) {
        rc = reserve_block_get(session, id, reserve->blocks[i], &requests[i]);
        if (rc < 0)
            goto done;
    }
    for (size_t i = 0; i < n; i++) {
        struct pool_extent extent = {0};
        enum pool_reserve_status status = pool_reserve(session->env->pool, &session->owner, &requests[i], &extent);
        result.status[i] = wire_status[status];
        extent_fill(result.extents[i], &extent);
    }
    result.n_status = result.n_extents = n;
    rc = reply(session, STORE_RESERVE_RESULT, id, &result.base);
done:
    free(result.extents);
    free(result.status);
    free(requests);
    return rc;
}

static int handle_seal(struct session *session, uint64_t id, const ProtobufCMessage *message)
{
    const Tidepool__Store__Seal *seal = (const Tidepool__Store__Seal *)message;
    Tidepool__Store__SealResult result = TIDEPOOL__STORE__SEAL_RESULT__INIT;
    int rc;

    if (seal->n_blocks > BLOCKS_MAX)
        return session_fail(session, id, -E2BIG, "Seal of %zu blocks, at most %d", seal->n_blocks, BLOCKS_MAX);
    result.sealed = calloc(seal->n_blocks + 1, sizeof *result.sealed);
    if (!result.sealed)
        return session_fail(session, id, -ENOMEM, "out of memory");
    for (size_t i = 0; i < seal->n_blocks; i++)
        result.sealed[i] = pool_seal(session->env->pool, &session->owner, seal->blocks[i]->lease, seal->blocks[i]->checksum);
    result.n_sealed = seal->n_blocks;
    rc = reply(session, STORE_SEAL_RESULT, id, &result.base);
    free(result.sealed);
    return rc;
}

static int handle_release(struct session *session, uint64_t id, const ProtobufCMessage *message)
{
    const Tidepool__Store__Release *release = (const Tidepool__Store__Release *)message;
    Tidepool__Store__ReleaseResult result = TIDEPOOL__STORE__RELEASE_RESULT__INIT;

    if (release->n_leases > BLOCKS_MAX)
        return session_fail(session, id, -E2BIG, "Release of %zu leases, at most %d", release->n_leases, BLOCKS_MAX);
    for (size_t i = 0; i < release->n_leases; i++)
        result.released += (release->discard ? pool_discard : pool_release)(session->env->pool, &session->owner, release->leases[i]);
    return reply(session, STORE_RELEASE_RESULT, id, &result.base);
}

static int handle_report_corrupt(struct session *session, uint64_t id, const ProtobufCMessage *message)
{
    const Tidepool__Store__ReportCorrupt *report = (const Tidepool__Store__ReportCorrupt *)message;

    if (report->n_leases > BLOCKS_MAX)
        return session_fail(session, id, -E2BIG, "ReportCorrupt of %zu leases, at most %d", report->n_leases, BLOCKS_MAX);
    for (size_t i = 0; i < report->n_leases; i++)
        (void)pool_report_corrupt(session->env->pool, &session->owner, report->leases[i]);
    return 0;
}

static int handle_stats(struct session *session, uint64_t id, const ProtobufCMessage *message)
{
    Tidepool__Store__StatsResult r = TIDEPOOL__STORE__STATS_RESULT__INIT;
    uint64_t f[STATS_FIELD_COUNT];

    (void)message;
    session->env->stats(session->env->arg, f);
    r.pool_bytes = f[STATS_POOL_BYTES];
    r.used_bytes = f[STATS_USED_BYTES];
    r.pinned_bytes = f[STATS_PINNED_BYTES];
    r.n_blocks = f[STATS_BLOCKS];
    r.n_unsealed = f[STATS_UNSEALED];
    r.n_read_leases = f[STATS_LEASES] - f[STATS_UNSEALED];
    r.n_clients = f[STATS_CLIENTS];
    r.lookups = f[STATS_LOOKUPS];
    r.lookup_hits = f[STATS_LOOKUP_HITS];
    r.lookup_misses = f[STATS_LOOKUP_MISSES];
    r.stored = f[STATS_STORED];
    r.evicted = f[STATS_EVICTED];
    r.rejected_full = f[STATS_REJECTED_FULL];
    r.corrupt = f[STATS_CORRUPT];
    r.protocol_errors = f[STATS_PROTOCOL_ERRORS];
    r.event_sequence = f[STATS_EVENT_SEQUENCE];
    r.unresponsive = f[STATS_UNRESPONSIVE];
    r.discarded = f[STATS_DISCARDED];
    return reply(session, STORE_STATS_RESULT, id, &r.base);
}

/* ---- frames ---- */

struct request_kind {
    uint16_t type;
    const ProtobufCMessageDescriptor *descriptor;
    int (*handle)(struct session *session, uint64_t request_id, const ProtobufCMessage *message);
};

static const struct request_kind request_kinds[] = {
    {STORE_HELLO, &tidepool__store__hello__descriptor, handle_hello},
    {STORE_LOOKUP, &tidepool__store__lookup__descriptor, handle_lookup},
    {STORE_RESERVE, &tidepool__store__reserve__descriptor, handle_reserve},
    {STORE_SEAL, &tidepool__store__seal__descriptor, handle_seal},
    {STORE_RELEASE, &tidepool__store__release__descriptor, handle_release},
    {STORE_REPORT_CORRUPT, &tidepool__store__report_corrupt__descriptor, handle_report_corrupt},
    {STORE_STATS, &tidepool__store__stats__descriptor, handle_stats},
};

static int handle_frame(struct session *session, const struct frame_header *header, const uint8_t *body)
{
    const struct request_kind *kind = NULL;
    struct capped_alloc alloc;
    ProtobufCMessage *message;
    int rc;

    for (size_t i = 0; i < ARRAY_LEN(request_kinds); i++) {
        if (request_kinds[i].type == header->type)
            kind = &request_kinds[i];
    }
    if (!kind)
        return session_fail(session, header->request_id, -EPROTO, "message type %u is unknown", header->type);
    if (session->state == SESSION_NEW && kind->type != STORE_HELLO)
        return session_fail(session, header->request_id, -EPROTO, "message type %u before Hello", header->type);
    capped_alloc_init(&alloc, EXPANDED_MAX);
    message = protobuf_c_message_unpack(kind->descriptor, &alloc.pb, header->body_bytes, body);
    if (!message)
        return session_fail(session, header->request_id, -EPROTO, "message type %u cannot be parsed", header->type);
    if (message->n_unknown_fields)
        rc = session_fail(session, header->request_id, -EPROTO, "message type %u has unknown fields", header->type);
    else
        rc = kind->handle(session, header->request_id, message);
    protobuf_c_message_free_unpacked(message, &alloc.pb);
    return rc;
}

int session_resume(struct session *session)
{
    size_t done = 0;
    int rc;

    while (session->state != SESSION_FAILED && session->out.len < SESSION_OUT_PAUSE) {
        struct frame_header header;
        size_t left = session->in.len - done;
        if (left < FRAME_HEADER_BYTES)
            break;
        rc = frame_header_decode(session->in.data + done, left, &header);
        if (rc < 0)
            return session_fail(session, 0, rc, "bad frame header");
        if (header.body_bytes > SESSION_IN_MAX)
            return session_fail(session, header.request_id, -EMSGSIZE, "a message of %u bytes, at most %d", header.body_bytes, SESSION_IN_MAX);
        if (left < FRAME_HEADER_BYTES + header.body_bytes)
            break;
        rc = handle_frame(session, &header, session->in.data + done + FRAME_HEADER_BYTES);
        if (rc < 0)
            return rc;
        done += FRAME_HEADER_BYTES + header.body_bytes;
    }
    if (session->state == SESSION_FAILED)
        return -EPROTO;
    buf_consume(&session->in, done);
    return 0;
}

int session_receive(struct session *session, const void *data, size_t n)
{
    int rc;

    if (session->state == SESSION_FAILED)
        return -EPROTO;
    rc = buf_append(&session->in, data, n);
    if (rc < 0)
        return session_fail(session, 0, rc, "no room for more input");
    return session_resume(session);
}

bool session_wants_input(const struct session *session)
{
    return session->state != SESSION_FAILED && session->out.len < SESSION_OUT_PAUSE;
}
