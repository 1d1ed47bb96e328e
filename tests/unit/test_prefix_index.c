#include "router/route/prefix_index.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static struct prefix_index *index_;

static void setup(void)
{
    cr_assert_eq(prefix_index_create(100000, &index_), 0);
}

static void teardown(void)
{
    prefix_index_free(index_);
}

TestSuite(prefix_index, .init = setup, .fini = teardown);

static struct block_key key(uint64_t n)
{
    struct block_key k = {.bytes = {0}};
    uint64_t mixed = n * 0x9e3779b97f4a7c15ull;
    memcpy(k.bytes, &mixed, sizeof(mixed));
    memcpy(k.bytes + 8, &n, sizeof(n));
    return k;
}

static void chain(struct block_key *keys, size_t n)
{
    for (size_t i = 0; i < n; i++)
        keys[i] = key(i);
}

Test(prefix_index, test_prefix_index_match_stops_at_the_first_block_missing)
{
    struct block_key keys[6];
    uint32_t blocks[2];
    chain(keys, 6);
    for (int i = 0; i < 6; i++)
        if (i != 4)
            cr_assert_eq(prefix_index_add(index_, 0, &keys[i]), 0);
    prefix_index_add(index_, 1, &keys[0]);
    prefix_index_match(index_, keys, 6, 0, 2, blocks);
    cr_assert_eq(blocks[0], 4);
    cr_assert_eq(blocks[1], 1);
}

Test(prefix_index, test_prefix_index_remove_forgets_one_store_only)
{
    struct block_key keys[2];
    uint32_t blocks[2];
    chain(keys, 2);
    for (int store = 0; store < 2; store++)
        for (int i = 0; i < 2; i++)
            prefix_index_add(index_, store, &keys[i]);
    prefix_index_remove(index_, 0, &keys[1]);
    prefix_index_match(index_, keys, 2, 0, 2, blocks);
    cr_assert_eq(blocks[0], 1);
    cr_assert_eq(blocks[1], 2);
    cr_assert_eq(prefix_index_store_blocks(index_, 0), 1);
    prefix_index_drop(index_, 1);
    prefix_index_match(index_, keys, 2, 0, 2, blocks);
    cr_assert_eq(blocks[1], 0);
    cr_assert_eq(blocks[0], 1);
    cr_assert_eq(prefix_index_entries(index_), 1);
}

Test(prefix_index, test_prefix_index_adding_twice_counts_once)
{
    struct block_key k = key(7);
    prefix_index_add(index_, 3, &k);
    prefix_index_add(index_, 3, &k);
    cr_assert_eq(prefix_index_store_blocks(index_, 3), 1);
    prefix_index_remove(index_, 3, &k);
    prefix_index_remove(index_, 3, &k);
    cr_assert_eq(prefix_index_store_blocks(index_, 3), 0);
    cr_assert_eq(prefix_index_entries(index_), 0);
}

Test(prefix_index, test_prefix_index_prediction_counts_until_it_runs_out)
{
    struct block_key keys[3];
    uint32_t blocks[1];
    chain(keys, 3);
    prefix_index_predict(index_, 0, keys, 3, 1000, 500);
    prefix_index_match(index_, keys, 3, 1400, 1, blocks);
    cr_assert_eq(blocks[0], 3);
    prefix_index_match(index_, keys, 3, 1501, 1, blocks);
    cr_assert_eq(blocks[0], 0);
    prefix_index_add(index_, 0, &keys[0]);
    prefix_index_match(index_, keys, 3, 1501, 1, blocks);
    cr_assert_eq(blocks[0], 1);
}

Test(prefix_index, test_prefix_index_refuses_beyond_its_limit_and_reuses_expired_predictions)
{
    struct prefix_index *small;
    cr_assert_eq(prefix_index_create(10, &small), 0);
    for (uint64_t i = 0; i < 10; i++) {
        struct block_key k = key(i);
        prefix_index_predict(small, 0, &k, 1, 0, 10);
    }
    struct block_key k = key(50);
    prefix_index_predict(small, 0, &k, 1, 1000, 10); /* tells the time: the others have run out */
    for (uint64_t i = 100; i < 109; i++) {
        k = key(i);
        cr_assert_eq(prefix_index_add(small, 0, &k), 0);
    }
    k = key(110);
    cr_assert_eq(prefix_index_add(small, 0, &k), -ENOSPC);
    prefix_index_free(small);
}

/* Against a plain array: a million steps of add and remove with many collisions of home slots. */
Test(prefix_index, test_prefix_index_agrees_with_a_model_over_random_operations, .timeout = 60)
{
    enum { KEYS = 3000, STEPS = 1000000 };
    static uint8_t has[KEYS];
    unsigned seed = 1;
    size_t n = 0;
    for (int step = 0; step < STEPS; step++) {
        int i = rand_r(&seed) % KEYS;
        struct block_key k = key((uint64_t)i);
        if (rand_r(&seed) % 2) {
            cr_assert_eq(prefix_index_add(index_, 5, &k), 0);
            n += !has[i];
            has[i] = 1;
        } else {
            prefix_index_remove(index_, 5, &k);
            n -= has[i];
            has[i] = 0;
        }
    }
    cr_assert_eq(prefix_index_entries(index_), n);
    for (int i = 0; i < KEYS; i++) {
        struct block_key k = key((uint64_t)i);
        uint32_t blocks[6];
        prefix_index_match(index_, &k, 1, 0, 6, blocks);
        cr_assert_eq(blocks[5], has[i], "key %d", i);
    }
}
