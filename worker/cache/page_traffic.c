/* What the pages of a decode step cost: tokens and bytes attended, and, for those that lie in the pool, whether the page cache had them. Private blocks lie in the device's own memory,
 * so their pages are attended but never fetched. Counting alone: nothing here changes what is attended. Where the host reads the device's memory it counts the pages that each item has
 * chosen, against a page cache without bytes; else the device counts, and the host takes the sums once a step. */
#include "worker/cache/engine_private.h"
#include <assert.h>
#include <string.h>

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

static void count_page(struct take *t, const struct slow_pages *slow, int subpage)
{
    struct sequence *seq = t->seq;
    const struct engine *e = seq->engine;
    const int block = subpage / BLOCK_SUBPAGES, layer = slow->layer, kv_head = slow->kv_head;
    const bool sink = subpage == 0;
    const uint32_t bytes = sink ? e->layout.sink.bytes : e->layout.page.bytes;
    seq->stats.tokens_attended += (uint64_t)__builtin_popcount(slow->masks[subpage]);
    seq->stats.bytes_attended += bytes;
    if (seq->blocks[block].place == BLOCK_PRIVATE)
        return;
    if (!e->page_cache) {
        seq->stats.page_misses++;
        seq->stats.bytes_missed += bytes;
    } else if (sink) {
        take_sink(seq, &seq->keys[block], layer, kv_head);
    } else {
        t->refs[t->n++] = (struct page_ref){.block = &seq->keys[block], .place = page_place(layer, kv_head, subpage, 0)};
        if (t->n == TAKE_PAGES)
            take_pages(t);
    }
}

static void count_item(struct sequence *seq, const struct attn_decode_item *item)
{
    const struct slow_pages *slow = &item->slow;
    struct take t;
    t.seq = seq;
    t.n = 0;
    seq->stats.tokens_attended += (uint64_t)(item->rows[0].n + item->rows[1].n);
    seq->stats.pages_attended += (uint64_t)(item->ret_chosen ? item->ret_n_chosen : slow->n_pages);
    for (int i = 0; item->ret_chosen && i < item->ret_n_chosen; i++)
        count_page(&t, slow, item->ret_chosen[i]);
    for (int i = 0; !item->ret_chosen && i < slow->n_subpages; i++)
        if (slow->masks[i])
            count_page(&t, slow, i);
    if (t.n > 0)
        take_pages(&t);
}

int page_traffic_step(struct engine *e, int n)
{
    const struct model *m = e->model;
    const size_t bytes = (size_t)n * sizeof(*e->counts);
    if (!e->counts)
        return 0;
    memset(e->host_counts, 0, bytes);
    return m->dev->copy(m->stream, e->counts, e->host_counts, bytes);
}

void page_traffic_item(struct engine *e, int i, int kv_head, struct attn_decode_item *item)
{
    item->ret_counts = e->counts ? e->counts + i : NULL;
    item->ret_chosen = e->chosen ? e->chosen + (int64_t)(i * e->model->config.n_kv_heads + kv_head) * e->fetch_pages : NULL;
}

/* The device needs the pages of a layer together. */
void page_traffic_layer(struct engine *e, struct sequence **sequences, int n)
{
    const int n_kv_heads = e->model->config.n_kv_heads;
    if (e->counts)
        return;
    if (e->page_cache)
        page_cache_begin(e->page_cache);
    for (int i = 0; i < n * n_kv_heads; i++)
        count_item(sequences[i / n_kv_heads], &e->items[i]);
}

static void add_counts(struct sequence *seq, const struct page_counts *counts)
{
    const struct model_config *c = &seq->engine->model->config;
    const int n_recent = seq->n_tokens + 1 - seq->recent_first;
    seq->stats.tokens_attended += (uint64_t)seq->n_kept_rows + (uint64_t)c->n_layers * (uint64_t)c->n_kv_heads * (uint64_t)n_recent + counts->tokens;
    seq->stats.pages_attended += counts->pages;
    seq->stats.bytes_attended += counts->bytes;
    seq->stats.page_hits += counts->hits;
    seq->stats.page_misses += counts->misses;
    seq->stats.bytes_missed += counts->bytes_missed;
}

int page_traffic_end(struct engine *e, struct sequence **sequences, int n)
{
    const struct model *m = e->model;
    if (!e->counts)
        return 0;
    int r = m->dev->copy(m->stream, e->host_counts, e->counts, (size_t)n * sizeof(*e->counts));
    if (r >= 0)
        r = m->dev->stream_sync(m->stream);
    for (int i = 0; r >= 0 && i < n; i++)
        add_counts(sequences[i], &e->host_counts[i]);
    return r >= 0 ? device_pages_refresh(e) : r;
}

/* ---- the engine's cache ---- */

/* What admission leaves; sequences come first. */
static size_t capacity(const struct engine *e)
{
    const size_t limit = e->config.memory_limit, held = engine_promised_bytes(e) + engine_spare_bytes(e);
    const size_t left = limit == 0 ? e->config.page_cache : limit > held ? limit - held : 0;
    return e->config.page_cache < left ? e->config.page_cache : left;
}

int page_traffic_open(struct engine *e)
{
    const bool none = e->config.page_cache == PAGE_CACHE_AUTO && e->config.memory_limit == 0;
    const size_t most = none ? 0 : capacity(e);
    if (e->counts)
        return device_pages_open(e, most);
    return most < e->layout.page.bytes ? 0 : page_cache_create(e->layout.page.bytes, most, &e->page_cache);
}

void page_traffic_fit(struct engine *e)
{
    if (e->page_cache)
        page_cache_resize(e->page_cache, capacity(e));
    device_pages_fit(e, capacity(e));
}

void engine_page_cache_stats(const struct engine *engine, struct page_cache_stats *ret)
{
    *ret = (struct page_cache_stats){0};
    if (engine->page_cache)
        page_cache_stats(engine->page_cache, ret);
    else
        *ret = engine->pages.stats;
}
