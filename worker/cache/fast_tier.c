/* The fast tier: bf16 rows of fixed number per layer. The kept ones lie flattened, head after head, since heads may share a layer's rows unevenly; then every head's recent
 * window in position order. The window holds at least the `recent` newest tokens and at most recent + BLOCK_TOKENS; when it is full its oldest block becomes slow. */
#include "worker/cache/engine_private.h"

struct fast_rows fast_tier_rows(const struct sequence *seq, int layer)
{
    const struct model_config *c = &seq->engine->model->config;
    const struct layer_rows *l = &seq->layers[layer];
    const int64_t recent_stride = (int64_t)seq->plan.recent_rows * c->head_dim;
    const int64_t kept = (int64_t)l->n_rows * c->head_dim, recent = c->n_kv_heads * recent_stride;
    bf16_t *k = seq->fast + 2 * (l->first * c->head_dim + layer * recent), *v = k + kept + recent;
    return (struct fast_rows){.kept_k = k, .kept_v = v, .recent_k = k + kept, .recent_v = v + kept, .recent_stride = recent_stride};
}

static int copy_rows(const struct model *m, bf16_t *dst, const bf16_t *src, int64_t n_rows)
{
    return m->dev->copy(m->stream, dst, src, (size_t)(n_rows * m->config.head_dim) * sizeof(bf16_t));
}

int fast_tier_fill(struct sequence *seq, int layer, const int32_t *indices, const bf16_t *k, const bf16_t *v, int64_t head_stride)
{
    const struct model *m = seq->engine->model;
    const int d = m->config.head_dim, first = seq->plan.recent_first;
    const int n_recent = seq->plan.n_prompt - first;
    const struct fast_rows rows = fast_tier_rows(seq, layer);
    int r = 0;

    for (int h = 0; r >= 0 && h < m->config.n_kv_heads; h++) {
        const bf16_t *head_k = k + h * head_stride, *head_v = v + h * head_stride;
        const struct kept_rows kept = sequence_kept(seq, layer, h);
        const int64_t to = (int64_t)kept.first * d;
        if (kept.n)
            r = m->ops->gather_rows(m->stream, head_k, head_v, indices + kept.first, kept.n, d, rows.kept_k + to, rows.kept_v + to);
        if (r >= 0 && n_recent)
            r = copy_rows(m, rows.recent_k + h * rows.recent_stride, head_k + (int64_t)first * d, n_recent);
        if (r >= 0 && n_recent)
            r = copy_rows(m, rows.recent_v + h * rows.recent_stride, head_v + (int64_t)first * d, n_recent);
    }
    return r;
}

/* The block that goes when the window holds n tokens, or -1. */
static int leaving_block(const struct sequence *seq, int n_tokens)
{
    const int first = engine_recent_first(seq->engine, seq->plan.n_prompt, n_tokens);
    ASSERT(first == seq->recent_first || first == seq->recent_first + BLOCK_TOKENS);
    return first == seq->recent_first ? -1 : seq->recent_first / BLOCK_TOKENS;
}

/* Row j of the window becomes row j - BLOCK_TOKENS. Copied in pieces that do not overlap, since a device's copy need not be a memmove. */
static int shift_head(const struct model *m, bf16_t *recent, int64_t n_rows)
{
    int r = 0;
    for (int64_t row = 0; r >= 0 && row < n_rows; row += BLOCK_TOKENS) {
        const int64_t n = n_rows - row < BLOCK_TOKENS ? n_rows - row : BLOCK_TOKENS;
        r = copy_rows(m, recent + row * m->config.head_dim, recent + (row + BLOCK_TOKENS) * m->config.head_dim, n);
    }
    return r;
}

static int shift_window(struct sequence *seq)
{
    const struct model *m = seq->engine->model;
    const int64_t n_rows = seq->n_tokens - seq->recent_first - BLOCK_TOKENS;
    int r = 0;
    for (int layer = 0; r >= 0 && layer < m->config.n_layers; layer++) {
        const struct fast_rows rows = fast_tier_rows(seq, layer);
        for (int h = 0; r >= 0 && h < m->config.n_kv_heads; h++) {
            r = shift_head(m, rows.recent_k + h * rows.recent_stride, n_rows);
            if (r >= 0)
                r = shift_head(m, rows.recent_v + h * rows.recent_stride, n_rows);
        }
    }
    return r;
}

int fast_tier_leave(struct sequence *seq)
{
    const int block = leaving_block(seq, seq->n_tokens);
    if (block < 0)
        return 0;
    int r = shift_window(seq);
    if (r >= 0)
        r = slow_tier_append(seq, block);
    seq->recent_first += BLOCK_TOKENS;
    return r;
}
