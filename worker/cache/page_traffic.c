/* What the pages of a decode step cost: tokens and bytes attended, and, for those that lie in the pool, whether the page cache had them. Private blocks lie in the device's own memory,
 * so their pages are attended but never fetched. Counting alone: nothing here changes what is attended. */
#include "worker/cache/engine_private.h"
#include <assert.h>

enum { TAKE_PAGES = 64, SINK_PARTS_MAX = 8 };
static_assert(SINK_PARTS_MAX * 26 >= 64, "a bf16 sub-page, 64 d bytes, in slots of the smallest page, 26 d + 64");

struct take {
    struct sequence *seq;
    struct page_ref refs[TAKE_PAGES];
    int n;
};

static void take_pages(struct take *t)
{
    struct engine *e = t->seq->engine;
    int32_t slots[TAKE_PAGES];
    bool missed[TAKE_PAGES];
    const int misses = page_cache_take(e->page_cache, t->refs, t->n, slots, missed);
    t->seq->stats.page_hits += (uint64_t)(t->n - misses);
    t->seq->stats.page_misses += (uint64_t)misses;
    t->seq->stats.bytes_missed += (uint64_t)misses * e->layout.page.bytes;
    t->n = 0;
}

/* The sinks' sub-page takes as many slots as its bytes need, and is missed when any of them is. */
static void take_sink(struct sequence *seq, const struct block_key *block, int layer, int kv_head)
{
    struct engine *e = seq->engine;
    const uint32_t slot_bytes = e->layout.page.bytes, bytes = e->layout.sink.bytes;
    const int n_parts = (int)((bytes + slot_bytes - 1) / slot_bytes);
    struct page_ref refs[SINK_PARTS_MAX];
    int32_t slots[SINK_PARTS_MAX];
    bool missed[SINK_PARTS_MAX];
    ASSERT(n_parts <= SINK_PARTS_MAX);
    for (int i = 0; i < n_parts; i++)
        refs[i] = (struct page_ref){.block = block, .place = page_place(layer, kv_head, 0, i)};
    const bool miss = page_cache_take(e->page_cache, refs, n_parts, slots, missed) > 0;
    for (int i = 0; i < n_parts; i++)
        seq->stats.bytes_missed += !missed[i] ? 0 : i == n_parts - 1 ? bytes - (uint32_t)i * slot_bytes : slot_bytes;
    seq->stats.page_hits += !miss;
    seq->stats.page_misses += miss;
}

static void count_page(struct take *t, int layer, int kv_head, const struct kv_page *page)
{
    struct sequence *seq = t->seq;
    const struct engine *e = seq->engine;
    const int block = page->subpage / BLOCK_SUBPAGES;
    const uint32_t bytes = page->sink ? e->layout.sink.bytes : e->layout.page.bytes;
    seq->stats.tokens_attended += (uint64_t)__builtin_popcount(page->tokens);
    seq->stats.bytes_attended += bytes;
    if (seq->blocks[block].place == BLOCK_PRIVATE)
        return;
    if (!e->page_cache) {
        seq->stats.page_misses++;
        seq->stats.bytes_missed += bytes;
    } else if (page->sink) {
        take_sink(seq, &seq->keys[block], layer, kv_head);
    } else {
        t->refs[t->n++] = (struct page_ref){.block = &seq->keys[block], .place = page_place(layer, kv_head, page->subpage, 0)};
        if (t->n == TAKE_PAGES)
            take_pages(t);
    }
}

void page_traffic_begin(struct engine *e)
{
    if (e->page_cache)
        page_cache_begin(e->page_cache);
}

void page_traffic_count(struct sequence *seq, int layer, int kv_head, const struct attn_decode_item *item)
{
    const int n = item->ret_n_chosen;
    const bool all = n == item->n_pages;
    struct take t;
    t.seq = seq;
    t.n = 0;
    seq->stats.tokens_attended += (uint64_t)(item->rows[0].n + item->rows[1].n);
    seq->stats.pages_attended += (uint64_t)n;
    for (int i = 0; i < n; i++)
        count_page(&t, layer, kv_head, &item->pages[all ? i : item->ret_chosen[i]]);
    if (t.n > 0)
        take_pages(&t);
}

/* ---- the engine's cache ---- */

/* What admission leaves; sequences come first. */
static size_t capacity(const struct engine *e)
{
    const size_t limit = e->config.memory_limit, held = e->fixed_bytes + e->committed_bytes;
    const size_t left = limit == 0 ? e->config.page_cache : limit > held ? limit - held : 0;
    return e->config.page_cache < left ? e->config.page_cache : left;
}

int page_traffic_open(struct engine *e)
{
    if (e->config.page_cache == PAGE_CACHE_AUTO && e->config.memory_limit == 0)
        return 0;
    const size_t most = capacity(e);
    return most < e->layout.page.bytes ? 0 : page_cache_create(e->layout.page.bytes, most, &e->page_cache);
}

void page_traffic_fit(struct engine *e)
{
    if (e->page_cache)
        page_cache_resize(e->page_cache, capacity(e));
}

void engine_page_cache_stats(const struct engine *engine, struct page_cache_stats *ret)
{
    *ret = (struct page_cache_stats){0};
    if (engine->page_cache)
        page_cache_stats(engine->page_cache, ret);
}
