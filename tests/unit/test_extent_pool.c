#include "kvstore/extent_pool.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MODEL_GRANULES = 4096, MODEL_STEPS = 1000000, MODEL_MAX_EXTENT = 64 };

static uint64_t random_state = 88172645463325252ull;

static uint32_t random_below(uint32_t n)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 33) % n;
}

/* The model: one byte a granule. Best fit means the shortest free run that is long enough, the lowest of those. */
static int model_best_fit(const uint8_t *taken, uint32_t n)
{
    uint32_t best = 0, best_n = UINT32_MAX, i = 0;

    while (i < MODEL_GRANULES) {
        uint32_t run = 0;
        while (i + run < MODEL_GRANULES && !taken[i + run])
            run++;
        if (run >= n && run < best_n) {
            best = i;
            best_n = run;
        }
        i += run ? run : 1;
    }
    return best_n == UINT32_MAX ? -1 : (int)best;
}

Test(extent_pool, test_take_and_give_like_a_model_over_a_million_operations, .timeout = 300)
{
    static uint8_t taken[MODEL_GRANULES];
    static struct extent *held[MODEL_GRANULES];
    struct extent_pool pool;
    uint32_t n_held = 0;
    uint64_t n_taken_granules = 0;

    cr_assert_eq(extent_pool_init(&pool, (uint64_t)MODEL_GRANULES * EXTENT_GRANULE), 0);
    for (int step = 0; step < MODEL_STEPS; step++) {
        bool full_phase = step / 1000 % 2; /* fill up in one phase, drain in the next */
        if (random_below(100) < (full_phase ? 60u : 40u)) {
            uint32_t n = 1 + random_below(MODEL_MAX_EXTENT);
            uint64_t bytes = (uint64_t)n * EXTENT_GRANULE - random_below(EXTENT_GRANULE);
            struct extent *e = NULL;
            int rc = extent_pool_take(&pool, bytes, &e);
            /* The model costs a scan of all granules: compare the choice on a sample of the steps, overlap on each. */
            if (step % 16 == 0) {
                int at = model_best_fit(taken, n);
                cr_assert_eq(rc, at < 0 ? -ENOSPC : 0);
                if (at >= 0)
                    cr_assert_eq(e->offset, (uint64_t)at * EXTENT_GRANULE);
            }
            if (rc < 0)
                continue;
            cr_assert_eq(e->bytes, (uint64_t)n * EXTENT_GRANULE);
            for (uint32_t i = 0; i < n; i++) {
                uint8_t *granule = &taken[e->offset / EXTENT_GRANULE + i];
                cr_assert_eq(*granule, 0);
                *granule = 1;
            }
            n_taken_granules += n;
            held[n_held++] = e;
        } else if (n_held) {
            uint32_t i = random_below(n_held);
            memset(&taken[held[i]->offset / EXTENT_GRANULE], 0, held[i]->bytes / EXTENT_GRANULE);
            n_taken_granules -= held[i]->bytes / EXTENT_GRANULE;
            extent_pool_give(&pool, held[i]);
            held[i] = held[--n_held];
        }
        cr_assert_eq(pool.bytes_taken, n_taken_granules * EXTENT_GRANULE);
        cr_assert_eq(pool.n_taken, n_held);
    }
    while (n_held)
        extent_pool_give(&pool, held[--n_held]);
    cr_assert_eq(pool.n_free, 1);
    cr_assert_eq(extent_pool_largest(&pool), pool.bytes);
    extent_pool_fini(&pool);
}

Test(extent_pool, test_give_joins_both_neighbours)
{
    struct extent_pool pool;
    struct extent *e[3];

    cr_assert_eq(extent_pool_init(&pool, 3 * EXTENT_GRANULE), 0);
    for (int i = 0; i < 3; i++)
        cr_assert_eq(extent_pool_take(&pool, EXTENT_GRANULE, &e[i]), 0);
    cr_assert_eq(extent_pool_largest(&pool), 0);
    extent_pool_give(&pool, e[0]);
    extent_pool_give(&pool, e[2]);
    cr_assert_eq(pool.n_free, 2);
    extent_pool_give(&pool, e[1]);
    cr_assert_eq(pool.n_free, 1);
    cr_assert_eq(extent_pool_largest(&pool), 3 * EXTENT_GRANULE);
    extent_pool_fini(&pool);
}

Test(extent_pool, test_take_refuses_what_cannot_be)
{
    struct extent_pool pool;
    struct extent *e;

    cr_assert_eq(extent_pool_init(&pool, EXTENT_GRANULE - 1), -EINVAL);
    cr_assert_eq(extent_pool_init(&pool, 2 * EXTENT_GRANULE + 5), 0);
    cr_assert_eq(pool.bytes, 2 * EXTENT_GRANULE);
    cr_assert_eq(extent_pool_take(&pool, 0, &e), -EINVAL);
    cr_assert_eq(extent_pool_take(&pool, UINT64_MAX, &e), -ENOSPC);
    cr_assert_eq(extent_pool_take(&pool, 2 * EXTENT_GRANULE + 1, &e), -ENOSPC);
    cr_assert_eq(extent_pool_take(&pool, 2 * EXTENT_GRANULE, &e), 0);
    extent_pool_fini(&pool);
}
