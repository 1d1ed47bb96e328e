/* What a client asks of the store and what it does with the answers. */
#include "kvstore/client/kv_client_private.h"

#include "proto/base/base_assert.h"
#include "proto/base/capped_alloc.h"
#include "proto/wire/frame.h"
#include "proto/wire/store.pb-c.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* ---- pending calls ---- */

void kv_pending_append(struct kv_pending_list *list, struct kv_pending *pending)
{
    pending->next = NULL;
    *(list->first ? list->last : &list->first) = pending;
    list->last = &pending->next;
    list->n++;
}

struct kv_pending *kv_pending_pop(struct kv_pending_list *list)
{
    struct kv_pending *pending = list->first;

    if (pending) {
        list->first = pending->next;
        list->n--;
    }
    return pending;
}

static void pending_free(struct kv_pending *pending)
{
    if (!pending)
        return;
    free(pending->status);
    free(pending);
}

static int pending_create(enum kv_pending_kind kind, int n, struct kv_pending **ret_pending)
{
    struct kv_pending *pending = calloc(1, sizeof *pending + (size_t)n * sizeof pending->leases[0]);

    if (!pending)
        return -ENOMEM;
    pending->kind = kind;
    pending->n = n;
    pending->status = calloc((size_t)n + 1, sizeof *pending->status);
    if (!pending->status) {
        pending_free(pending);
        return -ENOMEM;
    }
    *ret_pending = pending;
    return 0;
}

void kv_finish(struct kv_client *client, struct kv_pending *pending, int result)
{
    ASSERT(client->waiting.first == pending);
    kv_pending_pop(&client->waiting);
    pending->done = true;
    pending->result = result;
    for (int i = 0; i < pending->n && result < 0; i++) {
        if (pending->leases[i].id)
            kv_unlease(&pending->leases[i]);
    }
    if (pending->abandoned) {
        kv_client_release(client, pending->leases, pending->n);
        pending_free(pending);
    } else if (pending->cb) {
        kv_pending_append(&client->finished, pending);
        loop_timer_arm(client->wake_timer, 0);
    }
}

void kv_deliver(struct kv_client *client)
{
    /* A callback may make further calls; what those finish waits for the next turn. */
    int n = client->finished.n;

    while (n-- > 0) {
        struct kv_pending *pending = kv_pending_pop(&client->finished);
        pending->cb(pending->result, pending->status, pending->leases, pending->result < 0 ? 0 : pending->n, pending->arg);
        pending_free(pending);
    }
}

static int may_ask(const struct kv_client *client, int n)
{
    if (client->state != KV_CONNECTED)
        return -ENOTCONN;
    if (n < 0 || n > KV_BLOCKS_MAX)
        return -E2BIG;
    return client->out.len > KV_REQUEST_BACKLOG || client->waiting.n >= KV_PENDING_MAX ? -EAGAIN : 0;
}

/* Queues the call behind the request it sends. If sending breaks the connection, the call is finished like all that wait. */
static int pending_send(struct kv_client *client, struct kv_pending *pending, uint16_t type, const ProtobufCMessage *message)
{
    pending->id = client->next_id++;
    kv_pending_append(&client->waiting, pending);
    int rc = kv_send(client, type, pending->id, message);
    if (rc == -ENOTCONN || rc == 0)
        return 0;
    /* Not even queued for sending: take the call back, it is the last one. */
    struct kv_pending **link = &client->waiting.first;
    while (*link != pending)
        link = &(*link)->next;
    *link = NULL;
    client->waiting.last = link;
    client->waiting.n--;
    return rc;
}

/* ---- leases in answers ---- */

static bool lease_take(struct kv_client *client, const Tidepool__Store__Extent *extent, struct kv_lease *ret_lease)
{
    struct kv_mapping *mapping = client->current;

    if (extent->lease == 0 || extent->length == 0 || extent->length > mapping->bytes || extent->offset > mapping->bytes - extent->length)
        return false;
    mapping->n_leases++;
    *ret_lease = (struct kv_lease){
        .id = extent->lease,
        .data = mapping->base + extent->offset,
        .length = extent->length,
        .checksum = extent->checksum,
        .mapping = mapping,
    };
    return true;
}

static bool lease_verify(const struct kv_lease *lease)
{
    return XXH3_64bits(lease->data, lease->length) == lease->checksum;
}

static void report_corrupt(struct kv_client *client, const struct kv_lease *lease)
{
    Tidepool__Store__ReportCorrupt report = TIDEPOOL__STORE__REPORT_CORRUPT__INIT;
    uint64_t id = lease->id;

    client->lookups_corrupt++;
    if (client->state != KV_CONNECTED || lease->mapping != client->current)
        return;
    report.leases = &id;
    report.n_leases = 1;
    (void)kv_send(client, STORE_REPORT_CORRUPT, client->next_id++, &report.base);
}

static int answer_lookup(struct kv_client *client, struct kv_pending *pending, const Tidepool__Store__LookupResult *result)
{
    if (result->n_extents > (size_t)pending->n)
        return -EPROTO;
    for (size_t i = 0; i < result->n_extents; i++) {
        if (!lease_take(client, result->extents[i], &pending->leases[i]))
            return -EPROTO;
    }
    kv_finish(client, pending, (int)result->n_extents);
    return 0;
}

static int answer_reserve(struct kv_client *client, struct kv_pending *pending, const Tidepool__Store__ReserveResult *result)
{
    if (result->n_status != (size_t)pending->n || result->n_extents != (size_t)pending->n)
        return -EPROTO;
    for (int i = 0; i < pending->n; i++) {
        switch (result->status[i]) {
        case TIDEPOOL__STORE__RESERVE_STATUS__RESERVE_GRANTED: pending->status[i] = KV_RESERVE_GRANTED; break;
        case TIDEPOOL__STORE__RESERVE_STATUS__RESERVE_EXISTS: pending->status[i] = KV_RESERVE_EXISTS; break;
        case TIDEPOOL__STORE__RESERVE_STATUS__RESERVE_BUSY: pending->status[i] = KV_RESERVE_BUSY; break;
        case TIDEPOOL__STORE__RESERVE_STATUS__RESERVE_FULL: pending->status[i] = KV_RESERVE_FULL; break;
        default: return -EPROTO;
        }
        if (pending->status[i] <= KV_RESERVE_EXISTS && !lease_take(client, result->extents[i], &pending->leases[i]))
            return -EPROTO;
    }
    for (int i = 0; i < pending->n && !pending->abandoned; i++) {
        if (pending->status[i] == KV_RESERVE_EXISTS && !lease_verify(&pending->leases[i])) {
            report_corrupt(client, &pending->leases[i]);
            kv_client_release(client, &pending->leases[i], 1);
            pending->status[i] = KV_RESERVE_BUSY;
        }
    }
    /* Reporting may have broken the connection, which finishes every call that waits. */
    if (client->waiting.first == pending)
        kv_finish(client, pending, pending->n);
    return 0;
}

int kv_answer(struct kv_client *client, uint16_t type, uint64_t id, const uint8_t *body, size_t n)
{
    static const struct {
        uint16_t type;
        enum kv_pending_kind kind;
        const ProtobufCMessageDescriptor *descriptor;
    } kinds[] = {
        {STORE_LOOKUP_RESULT, KV_PENDING_LOOKUP, &tidepool__store__lookup_result__descriptor},
        {STORE_RESERVE_RESULT, KV_PENDING_RESERVE, &tidepool__store__reserve_result__descriptor},
    };
    struct kv_pending *pending = client->waiting.first;
    struct capped_alloc alloc;
    ProtobufCMessage *message;
    size_t k = 0;
    int rc;

    /* Nobody waits for these: what they say is known or in the statistics. */
    if (type == STORE_SEAL_RESULT || type == STORE_RELEASE_RESULT || type == STORE_STATS_RESULT)
        return 0;
    while (k < ARRAY_LEN(kinds) && kinds[k].type != type)
        k++;
    if (k == ARRAY_LEN(kinds) || !pending || pending->id != id || pending->kind != kinds[k].kind)
        return -EPROTO;
    capped_alloc_init(&alloc, KV_EXPANDED_MAX);
    message = protobuf_c_message_unpack(kinds[k].descriptor, &alloc.pb, n, body);
    if (!message)
        return -EPROTO;
    if (type == STORE_LOOKUP_RESULT)
        rc = answer_lookup(client, pending, (const Tidepool__Store__LookupResult *)message);
    else
        rc = answer_reserve(client, pending, (const Tidepool__Store__ReserveResult *)message);
    protobuf_c_message_free_unpacked(message, &alloc.pb);
    return rc;
}

/* ---- calls ---- */

static bool pending_done(const struct kv_client *client, const void *arg)
{
    (void)client;
    return ((const struct kv_pending *)arg)->done;
}

/* Waits for the answer and takes the call back, or leaves it behind as abandoned. */
static int pending_wait(struct kv_client *client, struct kv_pending *pending, uint64_t deadline_us)
{
    int rc = kv_wait(client, pending_done, pending, deadline_us);

    if (pending->done)
        return pending->result;
    pending->abandoned = true;
    return rc;
}

/* Checks the blocks of a run. A corrupt one is reported and ends it; the leases behind are given back. */
static int run_verify(struct kv_client *client, struct kv_lease *leases, int n)
{
    for (int i = 0; i < n; i++) {
        if (lease_verify(&leases[i]))
            continue;
        report_corrupt(client, &leases[i]);
        kv_client_release(client, leases + i, n - i);
        return i;
    }
    return n;
}

int kv_client_lookup(struct kv_client *client, const struct block_key *keys, int n, uint64_t deadline_us, struct kv_lease *ret_leases)
{
    Tidepool__Store__Lookup lookup = TIDEPOOL__STORE__LOOKUP__INIT;
    struct kv_pending *pending = NULL;
    int rc = may_ask(client, n);

    if (rc < 0 || n == 0)
        return rc;
    lookup.keys = calloc((size_t)n, sizeof *lookup.keys);
    if (!lookup.keys)
        return -ENOMEM;
    rc = pending_create(KV_PENDING_LOOKUP, n, &pending);
    if (rc < 0)
        goto done;
    for (int i = 0; i < n; i++)
        lookup.keys[i] = (ProtobufCBinaryData){BLOCK_KEY_BYTES, (uint8_t *)keys[i].bytes};
    lookup.n_keys = (size_t)n;
    rc = pending_send(client, pending, STORE_LOOKUP, &lookup.base);
    if (rc == 0) {
        rc = pending_wait(client, pending, deadline_us);
        if (!pending->done)
            pending = NULL; /* the client's now */
    }
    if (rc > 0) {
        rc = run_verify(client, pending->leases, rc);
        memcpy(ret_leases, pending->leases, (size_t)rc * sizeof *ret_leases);
    }
done:
    pending_free(pending);
    free(lookup.keys);
    return rc;
}

static int reserve_send(struct kv_client *client, const struct kv_reserve_block *blocks, struct kv_pending *pending)
{
    Tidepool__Store__Reserve reserve = TIDEPOOL__STORE__RESERVE__INIT;
    size_t n = (size_t)pending->n;
    Tidepool__Store__ReserveBlock **list = calloc(n ? n : 1, sizeof *list + sizeof **list);
    Tidepool__Store__ReserveBlock *messages;
    int rc;

    if (!list)
        return -ENOMEM;
    messages = (Tidepool__Store__ReserveBlock *)(list + n);
    for (size_t i = 0; i < n; i++) {
        tidepool__store__reserve_block__init(&messages[i]);
        messages[i].key = (ProtobufCBinaryData){BLOCK_KEY_BYTES, (uint8_t *)blocks[i].key.bytes};
        if (!blocks[i].first)
            messages[i].parent = (ProtobufCBinaryData){BLOCK_KEY_BYTES, (uint8_t *)blocks[i].parent.bytes};
        messages[i].length = blocks[i].length;
        messages[i].position = blocks[i].position;
        list[i] = &messages[i];
    }
    reserve.blocks = list;
    reserve.n_blocks = n;
    rc = pending_send(client, pending, STORE_RESERVE, &reserve.base);
    free(list);
    return rc;
}

int kv_client_reserve(struct kv_client *client, const struct kv_reserve_block *blocks, int n, uint64_t deadline_us,
                      enum kv_reserve_status *ret_status, struct kv_lease *ret_leases)
{
    struct kv_pending *pending;
    int rc = may_ask(client, n);

    if (rc < 0 || n == 0)
        return rc;
    rc = pending_create(KV_PENDING_RESERVE, n, &pending);
    if (rc < 0)
        return rc;
    rc = reserve_send(client, blocks, pending);
    if (rc == 0) {
        rc = pending_wait(client, pending, deadline_us);
        if (!pending->done)
            return rc; /* the client's now */
    }
    if (rc >= 0) {
        memcpy(ret_status, pending->status, (size_t)n * sizeof *ret_status);
        memcpy(ret_leases, pending->leases, (size_t)n * sizeof *ret_leases);
    }
    pending_free(pending);
    return rc;
}

int kv_client_reserve_async(struct kv_client *client, const struct kv_reserve_block *blocks, int n, kv_reserve_cb *cb, void *arg)
{
    struct kv_pending *pending;
    int rc = may_ask(client, n);

    if (rc < 0)
        return rc;
    rc = pending_create(KV_PENDING_RESERVE, n, &pending);
    if (rc < 0)
        return rc;
    pending->cb = cb;
    pending->arg = arg;
    rc = reserve_send(client, blocks, pending);
    if (rc < 0)
        pending_free(pending);
    return rc;
}

int kv_client_seal(struct kv_client *client, struct kv_lease *const *leases, int n)
{
    Tidepool__Store__Seal seal = TIDEPOOL__STORE__SEAL__INIT;
    Tidepool__Store__SealBlock **list, *messages;
    int rc = 0;

    if (n < 0 || n > KV_BLOCKS_MAX)
        return -E2BIG;
    list = calloc((size_t)n + 1, sizeof *list + sizeof **list);
    if (!list)
        return -ENOMEM;
    messages = (Tidepool__Store__SealBlock *)(list + n);
    for (int i = 0; i < n; i++) {
        leases[i]->checksum = XXH3_64bits(leases[i]->data, leases[i]->length);
        if (leases[i]->mapping != client->current)
            continue;
        tidepool__store__seal_block__init(&messages[i]);
        messages[i].lease = leases[i]->id;
        messages[i].checksum = leases[i]->checksum;
        list[seal.n_blocks++] = &messages[i];
    }
    seal.blocks = list;
    if (seal.n_blocks) {
        rc = kv_send(client, STORE_SEAL, client->next_id++, &seal.base);
        if (rc < 0 && rc != -ENOTCONN)
            kv_disconnect(client, rc, "no room for a Seal");
    }
    free(list);
    return rc < 0 || seal.n_blocks < (size_t)n ? -ENOTCONN : 0;
}

static void release_some(struct kv_client *client, struct kv_lease *leases, int n, bool discard)
{
    Tidepool__Store__Release release = TIDEPOOL__STORE__RELEASE__INIT;
    uint64_t ids[KV_BLOCKS_MAX];

    for (int i = 0; i < n; i++) {
        if (!leases[i].id)
            continue;
        if (leases[i].mapping == client->current)
            ids[release.n_leases++] = leases[i].id;
        kv_unlease(&leases[i]);
    }
    if (!release.n_leases)
        return;
    release.leases = ids;
    release.discard = discard;
    int rc = kv_send(client, STORE_RELEASE, client->next_id++, &release.base);
    if (rc < 0 && rc != -ENOTCONN)
        kv_disconnect(client, rc, "no room for a Release");
}

static void release_all(struct kv_client *client, struct kv_lease *leases, int n, bool discard)
{
    for (int i = 0; i < n; i += KV_BLOCKS_MAX)
        release_some(client, leases + i, n - i < KV_BLOCKS_MAX ? n - i : KV_BLOCKS_MAX, discard);
    kv_mapping_drop_unused(client);
}

void kv_client_release(struct kv_client *client, struct kv_lease *leases, int n)
{
    release_all(client, leases, n, false);
}

void kv_client_discard(struct kv_client *client, struct kv_lease *leases, int n)
{
    release_all(client, leases, n, true);
}
