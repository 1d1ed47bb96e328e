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

/* Summaries of blocks first .. first+n-1 for all KV heads, from where they lie or, with `staged`, from the half at work. */
static int summarize(struct sequence *seq, int layer, int first, int n, bool staged)
{
    const struct engine *e = seq->engine;
    int r = 0;
    for (int h = 0; r >= 0 && h < e->model->config.n_kv_heads; h++) {
        struct page_summary_params p = {
            .scorer = e->config.scorer->kernel,
            .layout = &e->layout,
            .slow = slow_tier_pages(seq, layer, h),
            .first = first * BLOCK_SUBPAGES,
            .summaries = sequence_summaries(seq, layer, h),
            .slices = staged ? slice_staging_at(e, 0) : NULL,
            .slice_stride = e->sizes.slice,
        };
        p.slow.n_subpages = (first + n) * BLOCK_SUBPAGES;
        r = e->model->ops->page_summaries(e->model->stream, &p);
    }
    return r;
}

/* Where the device has memory of its own, what lies in the pool comes through the staging area. */
static int summarize_staged(struct sequence *seq, int layer, int first, int n)
{
    struct engine *e = seq->engine;
    for (int i = 0; i < n; i++)
        e->copies[i] = slice_copy_in(seq, layer, first + i, slice_staging_at(e, i));
    int r = slice_staging_read(e, n);
    if (r >= 0)
        r = summarize(seq, layer, first, n, true);
    return slice_staging_end(e, r);
}

static bool is_staged(const struct sequence *seq, int block)
{
    return seq->engine->staging.slices && seq->blocks[block].place != BLOCK_PRIVATE;
}

/* Summaries of blocks first .. last-1: runs of them that are read in the same way. */
static int summarize_blocks(struct sequence *seq, int layer, int first, int last)
{
    const struct engine *e = seq->engine;
    int r = 0;
    for (int n; e->summary_bytes && r >= 0 && first < last; first += n) {
        const bool staged = is_staged(seq, first);
        n = 1;
        while (first + n < last && is_staged(seq, first + n) == staged && !(staged && n == e->n_chunk_blocks))
            n++;
        r = staged ? summarize_staged(seq, layer, first, n) : summarize(seq, layer, first, n, false);
    }
    return r;
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
    return r < 0 ? r : summarize_blocks(seq, layer, 0, seq->plan.recent_first / BLOCK_TOKENS);
}

int slow_tier_append(struct sequence *seq, int block)
{
    ASSERT(block < sequence_slow_blocks(seq));
    int r = slow_tier_place(seq, block);
    for (int layer = 0; r >= 0 && layer < seq->engine->model->config.n_layers; layer++)
        r = summarize_blocks(seq, layer, block, block + 1);
    return r;
}
