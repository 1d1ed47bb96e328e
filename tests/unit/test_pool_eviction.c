/* Who is evicted, over random operations on trees of blocks of different lengths, held against a model that knows nothing but the rule: of the sealed blocks without leases and
 * without children in the pool, the one whose last lease ended longest ago, in ticks of lookups; the one sealed first among equals. */
#include "kvstore/pool.h"
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { N_GRANULES = 24, N_IDS = 64, MAX_HELD = 24, MAX_DEPTH = 8, STEPS = 60000 };

/* ---- the model ---- */

/* One storing of a block; a key that is stored again is another one. */
struct instance {
    uint32_t id;
    int n_leases;
    bool sealed, indexed;
    uint64_t used, serial;
};

static struct {
    struct instance *at[N_IDS + 1]; /* indexed instance of an id, or NULL */
    uint64_t tick, serial;
    int n_pinned;                   /* granules of instances with leases */
    int n_evicted;
} model;

static struct held {
    uint64_t lease;
    struct lease_owner *owner;
    struct instance *block;
    bool write;
} held[MAX_HELD];
static int n_held;

static struct pool pool;
static struct lease_owner owners[2];
static uint64_t random_state = 9;

static uint32_t below(uint32_t n)
{
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(random_state >> 33) % n;
}

/* A binary tree: 1 is the root, the children of i are 2i and 2i + 1. */
static uint32_t depth(uint32_t id)
{
    return (uint32_t)(31 - __builtin_clz(id));
}

static int granules(uint32_t id)
{
    return 1 + (int)(id % 3);
}

static bool has_child(uint32_t id)
{
    return 2 * id + 1 <= N_IDS ? model.at[2 * id] || model.at[2 * id + 1] : 2 * id <= N_IDS && model.at[2 * id];
}

static struct instance *victim(void)
{
    struct instance *best = NULL;
    for (uint32_t id = 1; id <= N_IDS; id++) {
        struct instance *b = model.at[id];
        if (!b || !b->sealed || b->n_leases || has_child(id))
            continue;
        if (!best || b->used < best->used || (b->used == best->used && b->serial < best->serial))
            best = b;
    }
    return best;
}

static void unindex(struct instance *b)
{
    model.at[b->id] = NULL;
    b->indexed = false;
    if (b->n_leases == 0)
        free(b);
}

static void hold(uint64_t lease, struct lease_owner *owner, struct instance *b, bool write)
{
    if (b->n_leases++ == 0)
        model.n_pinned += granules(b->id);
    held[n_held++] = (struct held){lease, owner, b, write};
}

/* ---- the pool tells ---- */

static bool reporting;

static void on_stored(void *arg, const struct block_key *key, uint64_t *mark)
{
    (void)arg, (void)key, (void)mark;
}

static void on_evicted(void *arg, const struct block_key *key, const uint64_t *mark)
{
    uint32_t id;
    (void)arg, (void)mark;
    memcpy(&id, key->bytes, sizeof id);
    if (reporting)
        return;
    struct instance *expected = victim();
    cr_assert_not_null(expected, "block %u went although nothing may go", id);
    cr_assert_eq(id, expected->id, "block %u went, not %u", id, expected->id);
    model.n_evicted++;
    unindex(expected);
}

static void setup(void)
{
    const struct pool_listener listener = {.stored = on_stored, .evicted = on_evicted};
    cr_assert_eq(pool_init(&pool, (uint64_t)N_GRANULES * EXTENT_GRANULE, &listener), 0);
    for (int i = 0; i < 2; i++)
        lease_owner_init(&owners[i]);
}

static void teardown(void)
{
    reporting = true;
    for (int i = 0; i < 2; i++)
        pool_owner_end(&pool, &owners[i]);
    pool_fini(&pool);
}

TestSuite(pool_eviction, .init = setup, .fini = teardown, .timeout = 120);

static struct block_key key_of(uint32_t id)
{
    struct block_key key = {{0}};
    memcpy(key.bytes, &id, sizeof id);
    return key;
}

/* ---- operations on both ---- */

static void reserve(struct lease_owner *owner, uint32_t id)
{
    const struct pool_reserve_request request = {.key = key_of(id), .parent = key_of(id / 2), .first = id == 1, .position = depth(id),
                                                 .length = (uint64_t)granules(id) * EXTENT_GRANULE - below(EXTENT_GRANULE)};
    struct instance *there = model.at[id];
    const int n_before = model.n_evicted;
    const bool too_much = granules(id) > N_GRANULES - model.n_pinned;
    struct pool_extent e;
    const enum pool_reserve_status status = pool_reserve(&pool, owner, &request, &e);
    if (there) {
        cr_assert_eq(status, there->sealed ? POOL_RESERVE_EXISTS : POOL_RESERVE_BUSY);
        cr_assert_eq(model.n_evicted, n_before);
        if (there->sealed)
            hold(e.lease, owner, there, false);
    } else if (status == POOL_RESERVE_GRANTED) {
        struct instance *b = calloc(1, sizeof *b);
        cr_assert_not_null(b);
        *b = (struct instance){.id = id, .indexed = true};
        model.at[id] = b;
        hold(e.lease, owner, b, true);
    } else {
        cr_assert_eq(status, POOL_RESERVE_FULL);
        cr_assert(too_much ? model.n_evicted == n_before : victim() == NULL, "block %u is refused although one may go", id);
    }
}

/* The chain from the root to `id`. */
static void lookup(struct lease_owner *owner, uint32_t id)
{
    struct block_key keys[MAX_DEPTH];
    struct pool_extent e[MAX_DEPTH];
    const int n = (int)depth(id) + 1;
    int expected = 0;
    if (n_held + n > MAX_HELD)
        return;
    for (int i = 0; i < n; i++)
        keys[i] = key_of(id >> (n - 1 - i));
    while (expected < n && model.at[id >> (n - 1 - expected)] && model.at[id >> (n - 1 - expected)]->sealed)
        expected++;
    model.tick++;
    cr_assert_eq(pool_lookup(&pool, owner, keys, n, e), expected);
    for (int i = 0; i < expected; i++)
        hold(e[i].lease, owner, model.at[id >> (n - 1 - i)], false);
}

static void seal(int i)
{
    struct held *h = &held[i];
    if (!h->write)
        return;
    cr_assert(pool_seal(&pool, h->owner, h->lease, h->block->id));
    h->write = false;
    h->block->sealed = true;
    h->block->serial = ++model.serial;
}

static void forget(int i)
{
    const struct held h = held[i];
    held[i] = held[--n_held];
    if (--h.block->n_leases == 0)
        model.n_pinned -= granules(h.block->id);
    if (!h.write)
        h.block->used = model.tick;
    if (h.write)
        unindex(h.block);
    else if (!h.block->indexed && h.block->n_leases == 0)
        free(h.block);
}

static void release(int i)
{
    model.tick++;
    cr_assert(pool_release(&pool, held[i].owner, held[i].lease));
    forget(i);
}

static void discard(int i)
{
    struct instance *b = held[i].block;
    const bool goes = b->indexed && b->sealed && b->n_leases == 1 && !has_child(b->id);
    const uint64_t discarded = pool.counters.discarded;
    reporting = true;
    model.tick++;
    cr_assert(pool_discard(&pool, held[i].owner, held[i].lease));
    reporting = false;
    cr_assert_eq(pool.counters.discarded - discarded, goes);
    forget(i);
    if (goes)
        unindex(b);
}

static void end_owner(struct lease_owner *owner)
{
    model.tick++;
    pool_owner_end(&pool, owner);
    for (int i = n_held - 1; i >= 0; i--)
        if (held[i].owner == owner)
            forget(i);
}

static void report(int i)
{
    if (held[i].write || !held[i].block->indexed)
        return;
    reporting = true;
    cr_assert(pool_report_corrupt(&pool, held[i].owner, held[i].lease));
    reporting = false;
    unindex(held[i].block);
}

static void check(void)
{
    int n_sealed = 0;
    for (uint32_t id = 1; id <= N_IDS; id++)
        n_sealed += model.at[id] && model.at[id]->sealed;
    cr_assert_eq((int)pool.n_blocks, n_sealed);
    cr_assert_eq(pool.bytes_pinned, (uint64_t)model.n_pinned * EXTENT_GRANULE);
    cr_assert_eq((int)pool.leases.n_used, n_held);
}

Test(pool_eviction, test_leases_hold_and_leaves_go_before_roots_by_age)
{
    for (int step = 0; step < STEPS; step++) {
        struct lease_owner *owner = &owners[below(2)];
        const uint32_t op = below(100), id = 1 + below(N_IDS);
        const int i = n_held ? (int)below((uint32_t)n_held) : 0;
        if (op < 35 && n_held < MAX_HELD)
            reserve(owner, id);
        else if (op < 50)
            lookup(owner, id);
        else if (op < 65 && n_held)
            seal(i);
        else if (op < 92 && n_held)
            release(i);
        else if (op < 96 && n_held)
            discard(i);
        else if (op < 98 && n_held)
            report(i);
        else if (op == 99)
            end_owner(owner);
        check();
    }
    cr_assert_gt(model.n_evicted, STEPS / 50, "%d evictions", model.n_evicted);
    while (n_held)
        release(0);
    /* With nothing held all of it can go, to the last root. */
    while (victim()) {
        struct lease_owner *owner = &owners[0];
        const uint32_t n = 1000 + below(1000);
        const struct pool_reserve_request whole = {.key = key_of(n), .first = true, .length = (uint64_t)N_GRANULES * EXTENT_GRANULE};
        struct pool_extent e;
        cr_assert_eq(pool_reserve(&pool, owner, &whole, &e), POOL_RESERVE_GRANTED);
        cr_assert(pool_release(&pool, owner, e.lease));
    }
    cr_assert_eq(pool.n_blocks, 0);
}
