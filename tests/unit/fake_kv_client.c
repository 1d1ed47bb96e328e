#include "tests/unit/fake_kv_client.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { FAKE_MAX_BLOCKS = 4096, FAKE_MAX_PENDING = 256 };

struct fake_block {
    struct block_key key;
    uint32_t position;
    uint64_t length;
    uint8_t *data;
    int n_leases;
    bool used, sealed;
};

struct pending {
    struct kv_reserve_block wanted;
    kv_reserve_cb *cb;
    void *arg;
};

struct kv_client {
    struct fake_answers answers;
    struct fake_block blocks[FAKE_MAX_BLOCKS];
    struct pending pending[FAKE_MAX_PENDING];
    int n_pending, n_new;
};

struct kv_client *fake_store_create(void)
{
    struct kv_client *store = calloc(1, sizeof(*store));
    ASSERT(store);
    store->answers = (struct fake_answers){.lookup_max = -1, .full_from = -1};
    return store;
}

static void drop(struct fake_block *b)
{
    free(b->data);
    *b = (struct fake_block){0};
}

void fake_store_free(struct kv_client *store)
{
    for (int i = 0; i < store->n_pending; i++)
        store->pending[i].cb(-ECANCELED, NULL, NULL, 0, store->pending[i].arg);
    for (int i = 0; i < FAKE_MAX_BLOCKS; i++) {
        ASSERT(store->blocks[i].n_leases == 0);
        drop(&store->blocks[i]);
    }
    free(store);
}

void fake_store_answer(struct kv_client *store, struct fake_answers answers)
{
    store->answers = answers;
}

static struct fake_block *find(struct kv_client *store, const struct block_key *key)
{
    for (int i = 0; i < FAKE_MAX_BLOCKS; i++)
        if (store->blocks[i].used && memcmp(&store->blocks[i].key, key, sizeof(*key)) == 0)
            return &store->blocks[i];
    return NULL;
}

static struct kv_lease lease_on(struct kv_client *store, struct fake_block *b)
{
    b->n_leases++;
    return (struct kv_lease){.id = (uint64_t)(b - store->blocks) + 1, .data = b->data, .length = b->length};
}

int kv_client_lookup(struct kv_client *store, const struct block_key *keys, int n, uint64_t deadline_us, struct kv_lease *ret_leases)
{
    (void)deadline_us;
    if (store->answers.lookup_error < 0)
        return store->answers.lookup_error;
    int i = 0;
    for (; i < n && (store->answers.lookup_max < 0 || i < store->answers.lookup_max); i++) {
        struct fake_block *b = find(store, &keys[i]);
        if (!b || !b->sealed)
            break;
        ret_leases[i] = lease_on(store, b);
    }
    return i;
}

static enum kv_reserve_status reserve_one(struct kv_client *store, const struct kv_reserve_block *wanted, struct kv_lease *ret_lease)
{
    const struct fake_answers *a = &store->answers;
    struct fake_block *b = find(store, &wanted->key);
    if (b && b->sealed) {
        *ret_lease = lease_on(store, b);
        return KV_RESERVE_EXISTS;
    }
    if (b || (a->busy_every && ++store->n_new % a->busy_every == 0))
        return KV_RESERVE_BUSY;
    if (a->full_from >= 0 && wanted->position >= (uint32_t)a->full_from)
        return KV_RESERVE_FULL;
    for (b = store->blocks; b->used; b++)
        ASSERT(b + 1 < store->blocks + FAKE_MAX_BLOCKS);
    *b = (struct fake_block){.key = wanted->key, .position = wanted->position, .length = wanted->length, .used = true};
    b->data = aligned_alloc(64, (wanted->length + 63) / 64 * 64);
    ASSERT(b->data);
    *ret_lease = lease_on(store, b);
    return KV_RESERVE_GRANTED;
}

int kv_client_reserve(struct kv_client *store, const struct kv_reserve_block *blocks, int n, uint64_t deadline_us, enum kv_reserve_status *ret_status,
                      struct kv_lease *ret_leases)
{
    (void)deadline_us;
    if (store->answers.reserve_error < 0)
        return store->answers.reserve_error;
    for (int i = 0; i < n; i++)
        ret_status[i] = reserve_one(store, &blocks[i], &ret_leases[i]);
    return n;
}

int kv_client_reserve_async(struct kv_client *store, const struct kv_reserve_block *blocks, int n, kv_reserve_cb *cb, void *arg)
{
    ASSERT(n == 1);
    if (store->answers.reserve_error == -ENOTCONN || store->n_pending == FAKE_MAX_PENDING)
        return -ENOTCONN;
    store->pending[store->n_pending++] = (struct pending){.wanted = blocks[0], .cb = cb, .arg = arg};
    return 0;
}

int fake_store_pump(struct kv_client *store)
{
    const int n = store->n_pending;
    store->n_pending = 0;
    for (int i = 0; i < n; i++) {
        const struct pending p = store->pending[i];
        struct kv_lease lease = {0};
        if (store->answers.reserve_error < 0) {
            p.cb(store->answers.reserve_error, NULL, NULL, 0, p.arg);
            continue;
        }
        const enum kv_reserve_status status = reserve_one(store, &p.wanted, &lease);
        p.cb(0, &status, &lease, 1, p.arg);
    }
    return n;
}

int fake_store_n_pending(const struct kv_client *store)
{
    return store->n_pending;
}

int kv_client_seal(struct kv_client *store, struct kv_lease *const *leases, int n)
{
    if (store->answers.seal_error < 0)
        return store->answers.seal_error;
    for (int i = 0; i < n; i++)
        store->blocks[leases[i]->id - 1].sealed = true;
    return 0;
}

void kv_client_release(struct kv_client *store, struct kv_lease *leases, int n)
{
    for (int i = 0; i < n; i++) {
        if (!leases[i].id)
            continue;
        struct fake_block *b = &store->blocks[leases[i].id - 1];
        ASSERT(b->used && b->n_leases > 0);
        if (--b->n_leases == 0 && !b->sealed)
            drop(b);
        leases[i] = (struct kv_lease){0};
    }
}

void kv_client_discard(struct kv_client *store, struct kv_lease *leases, int n)
{
    for (int i = 0; i < n; i++) {
        struct fake_block *b = leases[i].id ? &store->blocks[leases[i].id - 1] : NULL;
        kv_client_release(store, &leases[i], 1);
        if (b && b->used && b->n_leases == 0)
            drop(b);
    }
}

static int count(const struct kv_client *store, bool sealed, bool leases)
{
    int n = 0;
    for (int i = 0; i < FAKE_MAX_BLOCKS; i++) {
        const struct fake_block *b = &store->blocks[i];
        if (b->used && (leases || b->sealed == sealed))
            n += leases ? b->n_leases : 1;
    }
    return n;
}

int fake_store_n_blocks(const struct kv_client *store)
{
    return count(store, true, false);
}
int fake_store_n_granted(const struct kv_client *store)
{
    return count(store, false, false);
}
int fake_store_n_leases(const struct kv_client *store)
{
    return count(store, false, true);
}

void fake_store_drop_from(struct kv_client *store, uint32_t position)
{
    for (int i = 0; i < FAKE_MAX_BLOCKS; i++) {
        ASSERT(store->blocks[i].n_leases == 0);
        if (store->blocks[i].used && store->blocks[i].position >= position)
            drop(&store->blocks[i]);
    }
}

void fake_store_scribble(struct kv_client *store, uint32_t position)
{
    for (int i = 0; i < FAKE_MAX_BLOCKS; i++)
        if (store->blocks[i].used && store->blocks[i].position == position)
            store->blocks[i].data[store->blocks[i].length / 2] ^= 1;
}
