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

/* The layer's heads share exactly the rows that admission has reserved for it, unless heads of other ranks have taken some. */
static int check_layer_rows(const struct sequence *seq, int layer, struct error *err)
{
    const int n_kv_heads = seq->engine->model->config.n_kv_heads, *first = sequence_head_first(seq, layer), n_rows = seq->layers[layer].n_rows;
    if (first[0] != 0 || first[n_kv_heads] > n_rows || (first[n_kv_heads] < n_rows && !seq->engine->ranks))
        return error_set(err, -EINVAL, "layer %d: its heads have %d kept rows of %d", layer, first[n_kv_heads] - first[0], n_rows);
    return 0;
}

/* What the device has of the slow tier, in host memory. */
struct slow_copy {
    struct kv_block *table; /* of the blocks below the recent window */
    uint16_t *masks;        /* as in the sequence */
};

static void slow_copy_free(struct slow_copy *copy)
{
    free(copy->masks);
    free(copy->table);
}

static int slow_copy_init(struct slow_copy *copy, const struct sequence *seq, struct error *err)
{
    const struct model *m = seq->engine->model;
    const size_t n_blocks = (size_t)(seq->recent_first / BLOCK_TOKENS), n_masks = (size_t)m->config.n_layers * (size_t)m->config.n_kv_heads * (size_t)seq->plan.n_pages;
    *copy = (struct slow_copy){.table = calloc(n_blocks + 1, sizeof(*copy->table)), .masks = calloc(n_masks + 1, sizeof(*copy->masks))};
    int r = copy->table && copy->masks ? 0 : -ENOMEM;
    if (r >= 0 && n_blocks)
        r = m->dev->copy(m->stream, copy->table, seq->table, n_blocks * sizeof(*copy->table));
    if (r >= 0 && n_blocks)
        r = m->dev->copy(m->stream, copy->masks, seq->masks, n_masks * sizeof(*copy->masks));
    if (r >= 0)
        r = m->dev->stream_sync(m->stream);
    if (r < 0) {
        slow_copy_free(copy);
        return error_set(err, r, "the slow tier cannot be read");
    }
    return 0;
}

static int check_table(const struct sequence *seq, const struct slow_copy *copy, struct error *err)
{
    for (int b = 0; b < seq->recent_first / BLOCK_TOKENS; b++) {
        const struct kv_block *entry = &copy->table[b];
        const struct device_block *device = seq->blocks[b].device;
        if (entry->data != seq->blocks[b].data || entry->index != (device ? device->index : NULL) || entry->id != (device ? device->id : 0))
            return error_set(err, -EINVAL, "block %d is elsewhere than the table says", b);
    }
    return 0;
}

static int cover_slow(const struct sequence *seq, const struct slow_copy *copy, uint8_t *count, struct place at, struct error *err)
{
    const struct slow_pages slow = slow_tier_pages(seq, at.layer, at.kv_head);
    const uint16_t *masks = copy->masks + (slow.masks - seq->masks);
    int r = 0, n = 0;
    for (int pos = 0; r >= 0 && pos < slow.n_subpages * SUBPAGE_TOKENS; pos++) {
        const uint16_t mask = masks[pos / SUBPAGE_TOKENS];
        n += mask && pos % SUBPAGE_TOKENS == 0;
        if (mask >> pos % SUBPAGE_TOKENS & 1)
            r = cover(count, pos, seq->n_tokens, at, "slow", err);
    }
    if (r >= 0 && n != slow.n_pages)
        r = error_set(err, -EINVAL, "layer %d KV head %d: %d sub-pages have slow tokens, counted were %d", at.layer, at.kv_head, n, slow.n_pages);
    return r;
}

/* Summaries are what the pages' bytes and masks give now. Where the host does not read the device's memory they are not looked at. */
static int check_summaries(const struct sequence *seq, struct place at, struct error *err)
{
    const struct engine *e = seq->engine;
    struct page_summary_params p = {.scorer = e->config.scorer->kernel, .layout = &e->layout, .slow = slow_tier_pages(seq, at.layer, at.kv_head)};
    const size_t bytes = (size_t)p.slow.n_subpages * e->summary_bytes;
    if (bytes == 0 || e->counts)
        return 0;
    p.summaries = malloc(bytes);
    if (!p.summaries)
        return error_set(err, -ENOMEM, "no memory for %d summaries", p.slow.n_subpages);
    int r = e->model->ops->page_summaries(e->model->stream, &p);
    if (r < 0)
        error_set(err, r, "summaries cannot be made");
    else if (memcmp(p.summaries, sequence_summaries(seq, at.layer, at.kv_head), bytes) != 0)
        r = error_set(err, -EINVAL, "layer %d KV head %d: a summary is not its page's", at.layer, at.kv_head);
    free(p.summaries);
    return r;
}

static int check_head(const struct sequence *seq, const struct slow_copy *copy, uint8_t *count, struct place at, struct error *err)
{
    memset(count, 0, (size_t)seq->n_tokens);
    int r = cover_kept(seq, count, at, err);
    if (r >= 0)
        r = cover_slow(seq, copy, count, at, err);
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
    struct slow_copy copy;
    int r = slow_copy_init(&copy, seq, err);
    if (r < 0)
        return r;
    uint8_t *count = malloc((size_t)seq->n_tokens);
    r = count ? check_table(seq, &copy, err) : error_set(err, -ENOMEM, "no memory for %d positions", seq->n_tokens);
    for (int layer = 0; r >= 0 && layer < c->n_layers; layer++) {
        r = check_layer_rows(seq, layer, err);
        for (int h = 0; r >= 0 && h < c->n_kv_heads; h++)
            r = check_head(seq, &copy, count, (struct place){layer, h}, err);
    }
    free(count);
    slow_copy_free(&copy);
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
