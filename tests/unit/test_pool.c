#include "kvstore/pool.h"
#include <criterion/criterion.h>
#include <string.h>

enum { BLOCK_BYTES = 2 * EXTENT_GRANULE, N_SLOTS = 8 };

/* What a subscriber of the events would know. */
static struct {
    int n_stored, n_evicted;
    uint32_t evicted[4096];
} heard;

static void on_stored(void *arg, const struct block_key *key, uint64_t *mark)
{
    (void)arg;
    (void)key;
    *mark = 1;
    heard.n_stored++;
}

static void on_evicted(void *arg, const struct block_key *key, const uint64_t *mark)
{
    (void)arg;
    cr_assert_eq(*mark, 1);
    memcpy(&heard.evicted[heard.n_evicted++ % 4096], key->bytes, sizeof heard.evicted[0]);
}

static struct pool pool;
static struct lease_owner alice, bob;

static void setup(void)
{
    const struct pool_listener listener = {.stored = on_stored, .evicted = on_evicted};

    memset(&heard, 0, sizeof heard);
    cr_assert_eq(pool_init(&pool, N_SLOTS * BLOCK_BYTES, &listener), 0);
    lease_owner_init(&alice);
    lease_owner_init(&bob);
}

static void teardown(void)
{
    pool_owner_end(&pool, &alice);
    pool_owner_end(&pool, &bob);
    cr_assert_eq(pool.leases.n_used, 0);
    cr_assert_eq(pool.bytes_pinned, 0);
    cr_assert_eq(pool.n_unsealed, 0);
    pool_fini(&pool);
}

static struct block_key key_of(uint32_t id)
{
    struct block_key key = {{0}};

    memcpy(key.bytes, &id, sizeof id);
    return key;
}

static struct pool_reserve_request request_of(uint32_t id, uint32_t parent, uint32_t position)
{
    return (struct pool_reserve_request){
        .key = key_of(id), .parent = key_of(parent), .first = position == 0, .position = position, .length = BLOCK_BYTES};
}

static enum pool_reserve_status reserve(struct lease_owner *owner, uint32_t id, uint32_t parent, uint32_t position, struct pool_extent *ret)
{
    struct pool_reserve_request request = request_of(id, parent, position);

    return pool_reserve(&pool, owner, &request, ret);
}

/* Stores a block and keeps its read lease. */
static uint64_t store(struct lease_owner *owner, uint32_t id, uint32_t parent, uint32_t position)
{
    struct pool_extent e;

    cr_assert_eq(reserve(owner, id, parent, position, &e), POOL_RESERVE_GRANTED);
    cr_assert(pool_seal(&pool, owner, e.lease, id));
    return e.lease;
}

static bool has(uint32_t id)
{
    struct block_key key = key_of(id);
    struct pool_extent e;
    bool found = pool_lookup(&pool, &bob, &key, 1, &e) == 1;

    if (found) {
        cr_assert_eq(e.checksum, id);
        cr_assert(pool_release(&pool, &bob, e.lease));
    }
    return found;
}

TestSuite(pool, .init = setup, .fini = teardown);

Test(pool, test_lookup_returns_the_sealed_run_only)
{
    struct block_key keys[4] = {key_of(1), key_of(2), key_of(3), key_of(4)};
    struct pool_extent e[4], writing;

    store(&alice, 1, 0, 0);
    store(&alice, 2, 1, 1);
    cr_assert_eq(reserve(&alice, 3, 2, 2, &writing), POOL_RESERVE_GRANTED);
    store(&alice, 4, 3, 3);
    cr_assert_eq(pool_lookup(&pool, &bob, keys, 4, e), 2);
    cr_assert_eq(e[1].length, BLOCK_BYTES);
    cr_assert_eq(e[1].checksum, 2);
    cr_assert(pool_seal(&pool, &alice, writing.lease, 3));
    cr_assert_eq(pool_lookup(&pool, &bob, keys, 4, e), 4);
    cr_assert_eq(bob.n_leases, 6);
}

Test(pool, test_reserve_tells_writers_of_one_key_apart)
{
    struct pool_extent a, b;

    cr_assert_eq(reserve(&alice, 1, 0, 0, &a), POOL_RESERVE_GRANTED);
    cr_assert_eq(reserve(&bob, 1, 0, 0, &b), POOL_RESERVE_BUSY);
    cr_assert_eq(reserve(&alice, 1, 0, 0, &b), POOL_RESERVE_BUSY);
    cr_assert_not(pool_seal(&pool, &bob, a.lease, 1));
    cr_assert(pool_seal(&pool, &alice, a.lease, 1));
    cr_assert_not(pool_seal(&pool, &alice, a.lease, 1));
    cr_assert_eq(reserve(&bob, 1, 0, 0, &b), POOL_RESERVE_EXISTS);
    cr_assert_eq(b.offset, a.offset);
    cr_assert_eq(heard.n_stored, 1);
}

Test(pool, test_full_pool_evicts_leaves_before_roots_and_oldest_first)
{
    uint64_t leases[N_SLOTS];

    /* Chains 10-11-12-13 and 20-21-22-23, the second used last. */
    for (uint32_t i = 0; i < 4; i++)
        leases[i] = store(&alice, 10 + i, 9 + i, i);
    for (uint32_t i = 0; i < 4; i++)
        leases[4 + i] = store(&alice, 20 + i, 19 + i, i);
    for (int i = 0; i < N_SLOTS; i++)
        cr_assert(pool_release(&pool, &alice, leases[i]));
    for (uint32_t i = 0; i < 6; i++)
        store(&alice, 100 + i, 0, 0);
    const uint32_t expected[6] = {13, 12, 11, 10, 23, 22};
    cr_assert_eq(heard.n_evicted, 6);
    for (int i = 0; i < 6; i++)
        cr_assert_eq(heard.evicted[i], expected[i]);
    cr_assert(has(20) && has(21) && !has(22));
}

Test(pool, test_discarded_blocks_leave_at_once_unless_others_need_them)
{
    struct block_key keys[3] = {key_of(1), key_of(2), key_of(3)};
    struct pool_extent e[3];
    uint64_t leases[3];

    for (uint32_t i = 0; i < 3; i++)
        leases[i] = store(&alice, 1 + i, i, i);
    cr_assert_eq(pool_lookup(&pool, &bob, keys, 3, e), 3);
    for (int i = 2; i >= 0; i--)
        cr_assert(pool_discard(&pool, &alice, leases[i]));
    cr_assert_eq(pool.n_blocks, 3, "bob has them");
    cr_assert(pool_discard(&pool, &bob, e[1].lease));
    cr_assert_eq(pool.n_blocks, 3, "it has a child");
    cr_assert(pool_discard(&pool, &bob, e[2].lease));
    cr_assert(pool_release(&pool, &bob, e[0].lease));
    cr_assert_eq(pool.n_blocks, 2);
    cr_assert(heard.n_evicted == 1 && heard.evicted[0] == 3 && has(1) && has(2));
    cr_assert_not(pool_discard(&pool, &bob, e[2].lease), "no lease any more");
    cr_assert_eq(pool.extents.bytes_taken, 2 * BLOCK_BYTES);
}

Test(pool, test_use_renews_a_block)
{
    uint64_t leases[N_SLOTS];

    for (uint32_t i = 0; i < N_SLOTS; i++)
        leases[i] = store(&alice, 1 + i, 0, 0);
    for (uint32_t i = 0; i < N_SLOTS; i++)
        cr_assert(pool_release(&pool, &alice, leases[i]));
    cr_assert(has(1));
    store(&alice, 100, 0, 0);
    cr_assert_eq(heard.n_evicted, 1);
    cr_assert_eq(heard.evicted[0], 2);
}

Test(pool, test_leased_blocks_and_their_ancestors_stay_until_released)
{
    struct pool_extent e;
    uint64_t root = store(&alice, 1, 0, 0), leaf = store(&alice, 2, 1, 1);

    for (uint32_t i = 0; i < N_SLOTS - 2; i++)
        store(&alice, 10 + i, 0, 0);
    cr_assert(pool_release(&pool, &alice, root));
    cr_assert_eq(reserve(&alice, 100, 0, 0, &e), POOL_RESERVE_FULL);
    cr_assert_eq(heard.n_evicted, 0);
    cr_assert(pool_release(&pool, &alice, leaf));
    cr_assert_eq(reserve(&alice, 100, 0, 0, &e), POOL_RESERVE_GRANTED);
    cr_assert_eq(heard.evicted[0], 2);
    cr_assert_eq(pool.counters.rejected_full, 1);
}

Test(pool, test_nothing_is_evicted_for_what_cannot_fit)
{
    struct pool_reserve_request request = request_of(100, 0, 0);
    struct pool_extent e;

    cr_assert(pool_release(&pool, &alice, store(&alice, 1, 0, 0)));
    store(&alice, 2, 0, 0);
    request.length = N_SLOTS * BLOCK_BYTES;
    cr_assert_eq(pool_reserve(&pool, &bob, &request, &e), POOL_RESERVE_FULL);
    request.length = UINT64_MAX;
    cr_assert_eq(pool_reserve(&pool, &bob, &request, &e), POOL_RESERVE_FULL);
    cr_assert(has(1));
}

Test(pool, test_parent_stored_after_its_child_is_still_evicted_after_it)
{
    uint64_t child = store(&alice, 2, 1, 1), parent = store(&alice, 1, 0, 0);

    cr_assert(pool_release(&pool, &alice, parent));
    cr_assert(pool_release(&pool, &alice, child));
    for (uint32_t i = 0; i < N_SLOTS; i++)
        store(&alice, 10 + i, 0, 0);
    cr_assert_eq(heard.n_evicted, 2);
    cr_assert_eq(heard.evicted[0], 2);
    cr_assert_eq(heard.evicted[1], 1);
}

Test(pool, test_ring_of_parents_can_be_evicted)
{
    uint64_t a, b, c;

    /* A client that lies: 1 -> 2 -> 3 -> 1, and a block that is its own parent. */
    a = store(&alice, 1, 3, 5);
    b = store(&alice, 2, 1, 6);
    c = store(&alice, 3, 2, 4);
    cr_assert(pool_release(&pool, &alice, store(&alice, 4, 4, 1)));
    cr_assert(pool_release(&pool, &alice, a));
    cr_assert(pool_release(&pool, &alice, b));
    cr_assert(pool_release(&pool, &alice, c));
    for (uint32_t i = 0; i < N_SLOTS; i++)
        store(&alice, 10 + i, 0, 0);
    cr_assert_eq(heard.n_evicted, 4);
    cr_assert_eq(pool.index.n_nodes, N_SLOTS);
}

Test(pool, test_release_of_a_write_lease_frees_the_slot_unseen)
{
    struct pool_extent e;

    cr_assert_eq(reserve(&alice, 1, 0, 0, &e), POOL_RESERVE_GRANTED);
    cr_assert_not(pool_release(&pool, &bob, e.lease));
    cr_assert(pool_release(&pool, &alice, e.lease));
    cr_assert_eq(pool.extents.bytes_taken, 0);
    cr_assert_eq(pool.index.n_nodes, 0);
    cr_assert_eq(heard.n_stored + heard.n_evicted, 0);
}

Test(pool, test_detached_owner_keeps_its_extents_but_not_its_keys)
{
    struct pool_extent a, b;

    store(&alice, 1, 0, 0);
    cr_assert_eq(reserve(&alice, 2, 1, 1, &a), POOL_RESERVE_GRANTED);
    pool_owner_detach(&pool, &alice, false);
    cr_assert_eq(alice.n_leases, 1);
    cr_assert_eq(pool.extents.bytes_taken, 2 * BLOCK_BYTES);
    cr_assert_eq(reserve(&bob, 2, 1, 1, &b), POOL_RESERVE_GRANTED);
    cr_assert_neq(a.offset, b.offset);
    cr_assert_not(pool_seal(&pool, &alice, a.lease, 2));
    cr_assert(pool_seal(&pool, &bob, b.lease, 2));
    pool_owner_end(&pool, &alice);
    cr_assert_eq(pool.extents.bytes_taken, 2 * BLOCK_BYTES);
    cr_assert(has(1) && has(2));
}

Test(pool, test_corrupt_block_leaves_the_index_while_others_still_read_it)
{
    uint64_t a = store(&alice, 1, 0, 0);
    struct block_key key = key_of(1);
    struct pool_extent b, again;

    cr_assert_eq(pool_lookup(&pool, &bob, &key, 1, &b), 1);
    cr_assert(pool_report_corrupt(&pool, &bob, b.lease));
    cr_assert(pool_report_corrupt(&pool, &alice, a));
    cr_assert_eq(pool.counters.corrupt, 1);
    cr_assert_eq(pool_lookup(&pool, &bob, &key, 1, &again), 0);
    cr_assert_eq(reserve(&bob, 1, 0, 0, &again), POOL_RESERVE_GRANTED);
    cr_assert_neq(again.offset, b.offset);
    cr_assert_eq(pool.extents.bytes_taken, 2 * BLOCK_BYTES);
    cr_assert(pool_release(&pool, &bob, b.lease));
    cr_assert(pool_release(&pool, &alice, a));
    cr_assert_eq(pool.extents.bytes_taken, BLOCK_BYTES);
}

Test(pool, test_cursor_survives_changes_below_it)
{
    struct pool_cursor cursor;
    struct block_key keys[N_SLOTS];
    uint64_t leases[4];

    for (uint32_t i = 0; i < 4; i++)
        leases[i] = store(&alice, 1 + i, 0, 0);
    pool_cursor_open(&pool, &cursor);
    cr_assert_eq(pool_cursor_read(&cursor, keys, 1), 1);
    cr_assert(pool_report_corrupt(&pool, &alice, leases[1])); /* the cursor stands here */
    cr_assert(pool_report_corrupt(&pool, &alice, leases[0])); /* behind it */
    cr_assert(pool_report_corrupt(&pool, &alice, leases[3])); /* before it */
    store(&alice, 50, 0, 0);
    cr_assert_eq(pool_cursor_read(&cursor, keys, N_SLOTS), 2);
    cr_assert_eq(memcmp(&keys[0], &(struct block_key){{3}}, sizeof keys[0]), 0);
    cr_assert_eq(keys[1].bytes[0], 50);
    cr_assert_eq(pool_cursor_read(&cursor, keys, N_SLOTS), 0);
    pool_cursor_close(&pool, &cursor);
}

/* Random calls of two owners; after each the books must balance. */
Test(pool, test_books_balance_over_random_operations, .timeout = 120)
{
    enum { STEPS = 300000, MAX_HELD = 64 };
    static struct { uint64_t id; struct lease_owner *owner; bool write; } held[MAX_HELD];
    int n_held = 0;
    uint64_t state = 1;

    for (int step = 0; step < STEPS; step++) {
        struct lease_owner *owner = (state >> 40) & 1 ? &alice : &bob;
        uint32_t op, id;
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        op = (uint32_t)(state >> 33) % 100;
        id = 1 + (uint32_t)(state >> 45) % 24;
        struct pool_extent e = {0};
        if (op < 30 && n_held < MAX_HELD) {
            enum pool_reserve_status status = reserve(owner, id, id - 1, (id - 1) % 6, &e);
            if (status == POOL_RESERVE_GRANTED || status == POOL_RESERVE_EXISTS)
                held[n_held++] = (typeof(held[0])){e.lease, owner, status == POOL_RESERVE_GRANTED};
        } else if (op < 45 && n_held < MAX_HELD) {
            struct block_key key = key_of(id);
            if (pool_lookup(&pool, owner, &key, 1, &e) == 1)
                held[n_held++] = (typeof(held[0])){e.lease, owner, false};
        } else if (op < 70 && n_held) {
            int i = (int)(id % (uint32_t)n_held);
            cr_assert_eq(pool_seal(&pool, held[i].owner, held[i].id, id), held[i].write);
            held[i].write = false;
        } else if (op < 95 && n_held) {
            int i = (int)(id % (uint32_t)n_held);
            cr_assert(pool_release(&pool, held[i].owner, held[i].id));
            held[i] = held[--n_held];
        } else if (n_held) {
            int i = (int)(id % (uint32_t)n_held);
            cr_assert_eq(pool_report_corrupt(&pool, held[i].owner, held[i].id), !held[i].write);
        }
        cr_assert_eq(pool.leases.n_used, (uint32_t)n_held);
        cr_assert_leq(pool.bytes_pinned, pool.extents.bytes_taken);
        cr_assert_eq((int)pool.n_blocks, heard.n_stored - heard.n_evicted);
        cr_assert_eq(pool.extents.bytes_taken % BLOCK_BYTES, 0);
    }
    pool_owner_end(&pool, &alice);
    pool_owner_end(&pool, &bob);
    cr_assert_eq(pool.extents.bytes_taken, pool.n_blocks * BLOCK_BYTES);
}
