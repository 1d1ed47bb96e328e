/* SnapKV (arXiv 2404.14469): what the last W = 32 prompt tokens attend to is kept.
 *
 *     a[h, w, i] = softmax over i <= pos(w) of q[h, w] . k[i] * scale        (fp32, the window's own keys count in the denominator)
 *     s[h, i]    = mean over w of a[h, w, i]
 *     s'[h, i]   = max of s[h, i-3 .. i+3]                                   (pooling 7, edges clipped)
 *     score[g,i] = mean over the query heads h of KV head g of s'[h, i]
 *
 * and the n_free candidates of largest score are kept (ties: lower position). Deviations from the original code: one choice per KV head, pooled per query head before
 * the group's mean (max pooling and the mean do not commute, and the original has no groups); the window counts inside the budget; the columns of the window are
 * part of the pooling's input, since they are mandatory anyway. */
#include "worker/cache/selector.h"

enum { SNAPKV_WINDOW = 32, SNAPKV_POOL = 7 };

/* Scores [n_kv_heads, n_keys], then the chosen candidates [n_kv_heads, n_free]. */
static size_t snapkv_scratch_bytes(int n_kv_heads, int64_t n_keys, int64_t n_free)
{
    return (size_t)n_kv_heads * ((size_t)n_keys * sizeof(float) + (size_t)n_free * sizeof(int32_t));
}

static int score(const struct selector_input *in, float *scores)
{
    const struct window_score_params p = {
        .q = in->q,
        .n_window = in->n_window,
        .k = in->k,
        .head_stride = in->head_stride,
        .n_keys = in->n_keys,
        .n_heads = in->n_heads,
        .n_kv_heads = in->n_kv_heads,
        .head_dim = in->head_dim,
        .scale = in->scale,
        .pool = SNAPKV_POOL,
        .pool_after_group = false,
        .scores = scores,
    };
    return in->ops->window_scores(in->stream, &p);
}

static int snapkv_select(const struct selector_input *in, int32_t *ret_indices)
{
    float *scores = in->scratch;
    int32_t *chosen = (int32_t *)(scores + in->n_kv_heads * in->n_keys);
    const int64_t n_chosen = in->n_kv_heads * in->n_free;

    int r = score(in, scores);
    for (int h = 0; r >= 0 && h < in->n_kv_heads; h++)
        r = in->ops->topk(in->stream, scores + h * in->n_keys + in->first, 1, in->last - in->first, in->n_free, chosen + h * in->n_free);
    if (r >= 0)
        r = in->dev->copy(in->stream, ret_indices, chosen, (size_t)n_chosen * sizeof(int32_t));
    if (r >= 0)
        r = in->dev->stream_sync(in->stream);
    if (r < 0)
        return r;
    for (int64_t i = 0; i < n_chosen; i++)
        ret_indices[i] += (int32_t)in->first;
    return 0;
}

const struct selector_ops selector_snapkv = {
    .name = "snapkv",
    .n_window = SNAPKV_WINDOW,
    .scratch_bytes = snapkv_scratch_bytes,
    .select = snapkv_select,
};
