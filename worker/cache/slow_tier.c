/* The slow tier as attention reads it, in memory of the device: one table of the sequence's blocks, and per layer and KV head the mask of slow tokens of every sub-page. A kept token
 * is in its block too, so its bit is clear. Blocks that leave the recent window while decoding have no kept tokens, so their masks are full and written from the start: of
 * them only the table's entry is still to come. Nothing of this is written for a step. */
#include "worker/cache/engine_private.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static bool is_placed(const struct sequence *seq, int block)
{
    return seq->blocks[block].place != BLOCK_ABSENT;
}

/* Private extents are memory of the device: a page cache has nothing to gain from them, their bytes move, and their index is read where it lies. */
static struct kv_block entry_of(const struct sequence *seq, int block)
{
    const struct sequence_block *b = &seq->blocks[block];
    return (struct kv_block){.data = b->data, .index = b->device ? b->device->index : NULL, .id = b->device ? b->device->id : 0};
}

int slow_tier_init(struct sequence *seq)
{
    const struct model *m = seq->engine->model;
    const int n = sequence_slow_blocks(seq);
    if (n == 0)
        return 0;
    struct kv_block *table = calloc((size_t)n, sizeof(*table));
    if (!table)
        return -ENOMEM;
    for (int b = 0; b < n; b++)
        if (is_placed(seq, b))
            table[b] = entry_of(seq, b);
    const int r = m->dev->copy(m->stream, seq->table, table, (size_t)n * sizeof(*table));
    free(table);
    return r;
}

int slow_tier_place(struct sequence *seq, int block)
{
    const struct model *m = seq->engine->model;
    if (block >= sequence_slow_blocks(seq))
        return 0;
    const struct kv_block entry = entry_of(seq, block);
    return m->dev->copy(m->stream, seq->table + block, &entry, sizeof(entry));
}

struct slow_pages slow_tier_pages(const struct sequence *seq, int layer, int kv_head)
{
    const size_t list = sequence_list(seq, layer, kv_head);
    return (struct slow_pages){
        .blocks = seq->table,
        .masks = seq->masks + list * (size_t)seq->plan.n_pages,
        .n_subpages = seq->recent_first / SUBPAGE_TOKENS,
        .n_pages = seq->n_prompt_pages[list] + (seq->recent_first - seq->plan.recent_first) / SUBPAGE_TOKENS,
        .layer = layer,
        .kv_head = kv_head,
    };
}

/* Summaries of sub-pages first .. n-1. */
static int summarize(struct sequence *seq, int layer, int kv_head, int first, int n)
{
    const struct engine *e = seq->engine;
    if (e->summary_bytes == 0 || first == n)
        return 0;
    struct page_summary_params p = {
        .scorer = e->config.scorer->kernel,
        .layout = &e->layout,
        .slow = slow_tier_pages(seq, layer, kv_head),
        .first = first,
        .summaries = sequence_summaries(seq, layer, kv_head),
    };
    p.slow.n_subpages = n;
    return e->model->ops->page_summaries(e->model->stream, &p);
}

/* One row of masks; returns how many sub-pages below the recent window hold slow tokens. */
static int fill_masks(const struct sequence *seq, int layer, int kv_head, uint16_t *masks)
{
    const struct kept_rows kept = sequence_kept(seq, layer, kv_head);
    const int n_prompt = seq->plan.recent_first / SUBPAGE_TOKENS;
    int n = n_prompt;
    memset(masks, 0xff, (size_t)seq->plan.n_pages * sizeof(*masks));
    for (int j = 0; j < kept.n; j++) {
        uint16_t *mask = &masks[kept.pos[j] / SUBPAGE_TOKENS];
        ASSERT(kept.pos[j] < seq->plan.recent_first);
        *mask &= (uint16_t)~(1u << kept.pos[j] % SUBPAGE_TOKENS);
        n -= *mask == 0;
    }
    return n;
}

int slow_tier_build(struct sequence *seq, int layer)
{
    struct engine *e = seq->engine;
    const struct model *m = e->model;
    const int n_kv_heads = m->config.n_kv_heads;
    const size_t n = (size_t)seq->plan.n_pages;
    if (n == 0)
        return 0;
    for (int h = 0; h < n_kv_heads; h++)
        seq->n_prompt_pages[sequence_list(seq, layer, h)] = fill_masks(seq, layer, h, e->mask_rows + (size_t)h * n);
    int r = m->dev->copy(m->stream, seq->masks + sequence_list(seq, layer, 0) * n, e->mask_rows, (size_t)n_kv_heads * n * sizeof(*seq->masks));
    for (int h = 0; r >= 0 && h < n_kv_heads; h++)
        r = summarize(seq, layer, h, 0, seq->plan.recent_first / SUBPAGE_TOKENS);
    return r;
}

int slow_tier_append(struct sequence *seq, int block)
{
    const struct model_config *c = &seq->engine->model->config;
    ASSERT(block < sequence_slow_blocks(seq));
    int r = slow_tier_place(seq, block);
    for (int layer = 0; r >= 0 && layer < c->n_layers; layer++)
        for (int h = 0; r >= 0 && h < c->n_kv_heads; h++)
            r = summarize(seq, layer, h, block * BLOCK_SUBPAGES, (block + 1) * BLOCK_SUBPAGES);
    return r;
}
