/* Walks what attention would read and counts how often each position comes up. */
#include "worker/cache/coverage.h"
#include "worker/cache/engine_private.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct place {
    int layer, kv_head;
};

static int cover(uint8_t *count, int pos, int n, struct place at, const char *tier, struct error *err)
{
    if (pos < 0 || pos >= n)
        return error_set(err, -EINVAL, "layer %d KV head %d: %s position %d of %d", at.layer, at.kv_head, tier, pos, n);
    if (count[pos]++)
        return error_set(err, -EINVAL, "layer %d KV head %d: position %d is covered again by the %s tier", at.layer, at.kv_head, pos, tier);
    return 0;
}

static int cover_kept(const struct sequence *seq, uint8_t *count, struct place at, struct error *err)
{
    const struct kept_rows kept = sequence_kept(seq, at.layer, at.kv_head);
    int r = 0;
    for (int i = 0; r >= 0 && i < kept.n; i++) {
        if (i && kept.pos[i] <= kept.pos[i - 1])
            return error_set(err, -EINVAL, "layer %d KV head %d: kept positions %d, %d", at.layer, at.kv_head, kept.pos[i - 1], kept.pos[i]);
        r = cover(count, kept.pos[i], seq->n_tokens, at, "kept", err);
    }
    return r;
}

/* The layer's heads share exactly the rows that admission has reserved for it. */
static int check_layer_rows(const struct sequence *seq, int layer, struct error *err)
{
    const int n_kv_heads = seq->engine->model->config.n_kv_heads, *first = sequence_head_first(seq, layer), n_rows = seq->layers[layer].n_rows;
    if (first[0] != 0 || first[n_kv_heads] != n_rows)
        return error_set(err, -EINVAL, "layer %d: its heads have %d kept rows of %d", layer, first[n_kv_heads] - first[0], n_rows);
    return 0;
}

/* Pages are in position order, so one pass over the sub-pages below the recent window must meet them all. */
static int cover_slow(const struct sequence *seq, uint8_t *count, struct place at, struct error *err)
{
    const struct block_layout *l = &seq->engine->layout;
    const struct page_list *list = sequence_list(seq, at.layer, at.kv_head);
    const int n_blocks = seq->recent_first / BLOCK_TOKENS;
    int i = 0, r = 0;
    for (int b = 0; b < n_blocks; b++) {
        const bool first = b == 0;
        const uint8_t *slice = seq->blocks[b].data + block_slice_offset(l, first, (uint32_t)at.layer);
        for (uint32_t s = 0; s < BLOCK_SUBPAGES && i < list->n; s++) {
            const struct kv_page *page = &list->pages[i];
            if (page->page != slice + block_subpage_offset(l, first, (uint32_t)at.kv_head, s))
                continue;
            if (page->index != slice + block_index_offset(l, first, (uint32_t)at.kv_head, s) || page->sink != (first && s == 0) || !page->tokens ||
                page->subpage != b * BLOCK_SUBPAGES + (int)s)
                return error_set(err, -EINVAL, "layer %d KV head %d: page %d of block %d is wrong", at.layer, at.kv_head, (int)s, b);
            for (int t = 0; r >= 0 && t < SUBPAGE_TOKENS; t++)
                if (page->tokens >> t & 1)
                    r = cover(count, b * BLOCK_TOKENS + (int)s * SUBPAGE_TOKENS + t, seq->n_tokens, at, "slow", err);
            if (r < 0)
                return r;
            i++;
        }
    }
    return i == list->n ? 0 : error_set(err, -EINVAL, "layer %d KV head %d: page %d lies in no block", at.layer, at.kv_head, i);
}

/* Summaries are what the pages' bytes and masks give now. */
static int check_summaries(const struct sequence *seq, struct place at, struct error *err)
{
    const struct engine *e = seq->engine;
    const struct page_list *list = sequence_list(seq, at.layer, at.kv_head);
    const size_t bytes = (size_t)list->n * e->summary_bytes;
    if (bytes == 0)
        return 0;
    uint8_t *again = malloc(bytes);
    if (!again)
        return error_set(err, -ENOMEM, "no memory for %d summaries", list->n);
    const struct page_summary_params p = {
        .scorer = e->config.scorer->kernel, .layout = &e->layout, .pages = list->pages, .n_pages = list->n, .summaries = again};
    int r = e->model->ops->page_summaries(e->model->stream, &p);
    if (r < 0)
        error_set(err, r, "summaries cannot be made");
    else if (memcmp(again, sequence_summaries(seq, at.layer, at.kv_head), bytes) != 0)
        r = error_set(err, -EINVAL, "layer %d KV head %d: a summary is not its page's", at.layer, at.kv_head);
    free(again);
    return r;
}

static int check_head(const struct sequence *seq, uint8_t *count, struct place at, struct error *err)
{
    memset(count, 0, (size_t)seq->n_tokens);
    int r = cover_kept(seq, count, at, err);
    if (r >= 0)
        r = cover_slow(seq, count, at, err);
    for (int pos = seq->recent_first; r >= 0 && pos < seq->n_tokens; pos++)
        r = cover(count, pos, seq->n_tokens, at, "recent", err);
    if (r >= 0)
        r = check_summaries(seq, at, err);
    for (int pos = 0; r >= 0 && pos < seq->n_tokens; pos++)
        if (!count[pos])
            return error_set(err, -EINVAL, "layer %d KV head %d: position %d is in no tier", at.layer, at.kv_head, pos);
    return r;
}

int coverage_check(const struct sequence *seq, struct error *err)
{
    const struct model_config *c = &seq->engine->model->config;
    if (seq->phase != SEQUENCE_DECODE)
        return error_set(err, -EINVAL, "the prompt is not done");
    uint8_t *count = malloc((size_t)seq->n_tokens);
    if (!count)
        return error_set(err, -ENOMEM, "no memory for %d positions", seq->n_tokens);
    int r = 0;
    for (int layer = 0; r >= 0 && layer < c->n_layers; layer++) {
        r = check_layer_rows(seq, layer, err);
        for (int h = 0; r >= 0 && h < c->n_kv_heads; h++)
            r = check_head(seq, count, (struct place){layer, h}, err);
    }
    free(count);
    return r;
}

const int32_t *coverage_kept(const struct sequence *seq, int layer, int kv_head, int *ret_n)
{
    const struct kept_rows kept = sequence_kept(seq, layer, kv_head);
    *ret_n = kept.n;
    return kept.pos;
}

int coverage_recent_first(const struct sequence *seq)
{
    return seq->recent_first;
}

const uint8_t *coverage_block(const struct sequence *seq, int block)
{
    return block >= 0 && block < seq->plan.n_blocks ? seq->blocks[block].data : NULL;
}
