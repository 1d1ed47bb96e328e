/* The page cache against a plain model of the clock: random pages, rounds and capacities; the same slots, hits and evictions. */
#include "worker/cache/page_cache.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { SLOT_BYTES = 100, MODEL_SLOTS = 64 };

/* ---- the model: an array of pages, searched from the front ---- */

struct model_slot {
    bool filled, used;
    int page;  /* index into the pages of the test */
    int round;
};

struct model {
    struct model_slot slots[MODEL_SLOTS];
    int n, hand, round;
    uint64_t evictions;
};

static int model_room(struct model *m)
{
    for (int i = 0; i < m->n; i++)
        if (!m->slots[i].filled)
            return i;
    bool any = false;
    for (int i = 0; i < m->n; i++)
        any |= m->slots[i].round != m->round;
    if (!any)
        return -1;
    for (;; m->hand = (m->hand + 1) % m->n) {
        struct model_slot *s = &m->slots[m->hand];
        if (s->round == m->round)
            continue;
        if (!s->used)
            break;
        s->used = false;
    }
    const int slot = m->hand;
    m->hand = (m->hand + 1) % m->n;
    m->evictions++;
    return slot;
}

static int model_take(struct model *m, int page, bool *ret_missed)
{
    int slot = -1;
    for (int i = 0; i < m->n; i++)
        if (m->slots[i].filled && m->slots[i].page == page)
            slot = i;
    *ret_missed = slot < 0;
    if (slot >= 0)
        m->slots[slot].used = true;
    else if ((slot = model_room(m)) >= 0)
        m->slots[slot] = (struct model_slot){.filled = true, .page = page};
    if (slot >= 0)
        m->slots[slot].round = m->round;
    return slot;
}

static void model_resize(struct model *m, int n)
{
    for (int i = n; i < m->n; i++) {
        m->evictions += m->slots[i].filled;
        m->slots[i] = (struct model_slot){0};
    }
    m->n = n;
    if (m->hand >= n)
        m->hand = 0;
}

/* ---- pages ---- */

static uint64_t random_next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static int below(uint64_t *state, int n)
{
    return (int)(random_next(state) % (uint64_t)n);
}

/* Blocks whose keys agree in their first 8 bytes share chains: the rest of the key has to tell them apart. */
static void make_keys(struct block_key *keys, int n, bool alike)
{
    uint64_t state = 5;
    memset(keys, 0, sizeof(*keys) * (size_t)n);
    for (int i = 0; i < n; i++) {
        for (size_t b = alike ? 8 : 0; b < sizeof(keys[i].bytes); b += 8) {
            uint64_t x = random_next(&state);
            memcpy(keys[i].bytes + b, &x, 8);
        }
    }
}

static struct page_ref page_at(const struct block_key *keys, int page)
{
    return (struct page_ref){.block = &keys[page / 24], .place = page_place(page / 12 % 2, page / 8 % 3, page, page / 3 % 2)};
}

static void check_stats(const struct page_cache *cache, const struct model *m, uint64_t hits, uint64_t misses)
{
    struct page_cache_stats stats;
    size_t filled = 0;
    page_cache_stats(cache, &stats);
    for (int i = 0; i < m->n; i++)
        filled += m->slots[i].filled;
    cr_assert(stats.hits == hits && stats.misses == misses && stats.evictions == m->evictions);
    cr_assert(stats.capacity_bytes == (size_t)m->n * SLOT_BYTES && stats.used_bytes == filled * SLOT_BYTES);
}

static void run_random(bool alike, int n_pages, uint64_t seed)
{
    struct block_key keys[16];
    struct page_cache *cache;
    struct model *m = calloc(1, sizeof(*m));
    uint64_t state = seed, hits = 0, misses = 0;
    make_keys(keys, 16, alike);
    m->n = 40;
    cr_assert_eq(page_cache_create(SLOT_BYTES, 40 * SLOT_BYTES + 99, &cache), 0);
    for (int step = 0; step < 3000; step++) {
        if (below(&state, 50) == 0) {
            const int n = below(&state, 60);
            page_cache_resize(cache, (size_t)n * SLOT_BYTES + 7);
            model_resize(m, n < 40 ? n : 40);
        }
        page_cache_begin(cache);
        m->round++;
        struct page_ref refs[70];
        int pages[70], n = below(&state, 70);
        int32_t slots[70];
        bool missed[70];
        for (int i = 0; i < n; i++) {
            pages[i] = below(&state, 4) ? below(&state, n_pages) : below(&state, 10); /* some are hot */
            refs[i] = page_at(keys, pages[i]);
        }
        const int n_missed = page_cache_take(cache, refs, n, slots, missed);
        int expected = 0;
        for (int i = 0; i < n; i++) {
            bool want_missed;
            const int want = model_take(m, pages[i], &want_missed);
            cr_assert(slots[i] == want && missed[i] == want_missed, "step %d page %d: slot %d, not %d", step, i, slots[i], want);
            expected += want_missed;
            hits += !want_missed;
        }
        misses += (uint64_t)expected;
        cr_assert_eq(n_missed, expected);
        check_stats(cache, m, hits, misses);
    }
    cr_assert(hits > 1000 && misses > 1000);
    page_cache_free(cache);
    free(m);
}

Test(page_cache, test_random_operations_match_the_model)
{
    run_random(false, 100, 1);
    run_random(false, 380, 2);
    run_random(true, 380, 3);
}

/* Pages that are needed together each keep their slot, and what finds none gets -1 until the next round. */
Test(page_cache, test_pages_of_a_round_do_not_evict_each_other)
{
    struct block_key keys[16];
    struct page_cache *cache;
    int32_t slots[20];
    bool missed[20];
    make_keys(keys, 16, false);
    cr_assert_eq(page_cache_create(SLOT_BYTES, 12 * SLOT_BYTES, &cache), 0);
    for (int round = 0; round < 3; round++) {
        struct page_ref refs[20];
        page_cache_begin(cache);
        for (int i = 0; i < 20; i++)
            refs[i] = page_at(keys, round * 20 + i);
        cr_assert_eq(page_cache_take(cache, refs, 20, slots, missed), 20);
        uint32_t seen = 0;
        for (int i = 0; i < 20; i++) {
            cr_assert(missed[i] && (i < 12 ? slots[i] >= 0 && slots[i] < 12 : slots[i] == -1));
            seen |= slots[i] >= 0 ? 1u << slots[i] : 0;
        }
        cr_assert_eq(seen, (1u << 12) - 1);
        cr_assert_eq(page_cache_take(cache, refs, 12, slots, missed), 0, "they are there");
    }
    page_cache_free(cache);
}

/* A page that is used again survives a scan of pages that are not. */
Test(page_cache, test_second_chance)
{
    struct block_key keys[16];
    struct page_cache *cache;
    int32_t slot;
    bool missed;
    make_keys(keys, 16, false);
    cr_assert_eq(page_cache_create(SLOT_BYTES, 10 * SLOT_BYTES, &cache), 0);
    for (int i = 0; i < 200; i++) {
        const struct page_ref hot = page_at(keys, 0), cold = page_at(keys, 1 + i % 300);
        page_cache_begin(cache);
        page_cache_take(cache, &hot, 1, &slot, &missed);
        cr_assert_eq(missed, i == 0);
        page_cache_begin(cache);
        page_cache_take(cache, &cold, 1, &slot, &missed);
        cr_assert(missed);
    }
    page_cache_free(cache);
}

Test(page_cache, test_sizes_that_make_no_cache)
{
    struct page_cache *cache;
    cr_assert_eq(page_cache_create(0, 100, &cache), -EINVAL);
    cr_assert_eq(page_cache_create(SLOT_BYTES, SLOT_BYTES - 1, &cache), -EINVAL);
    cr_assert_eq(page_cache_create(SLOT_BYTES, SLOT_BYTES, &cache), 0);
    page_cache_resize(cache, 0);
    struct block_key key = {{1}};
    const struct page_ref page = {.block = &key};
    int32_t slot;
    bool missed;
    page_cache_begin(cache);
    cr_assert(page_cache_take(cache, &page, 1, &slot, &missed) == 1 && missed && slot == -1);
    page_cache_free(cache);
    page_cache_free(NULL);
}
