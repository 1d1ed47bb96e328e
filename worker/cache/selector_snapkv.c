/* SnapKV (arXiv 2404.14469): what the last W = 32 prompt tokens attend to is kept.
 *
 *     a[h, w, i] = softmax over i <= pos(w) of q[h, w] . k[i] * scale        (fp32, the window's own keys count in the denominator)
 *     s[h, i]    = mean over w of a[h, w, i], for i before the window
 *     s'[h, i]   = max of s[h, i-3 .. i+3]                                   (pooling 7, edges clipped, the window's columns cut off first)
 *     score[g,i] = mean over the query heads h of KV head g of s'[h, i]
 *
 * and the n_free candidates of largest score are kept (ties: lower position). Deviations from the original code: one choice per KV head, pooled per query head before
 * the group's mean (max pooling and the mean do not commute, and the original has no groups); window and sinks count inside the budget, as they must where the budget
 * is a promise; softmax and sums stay fp32 instead of the model's 16 bits. */
#include "worker/cache/selector_private.h"

static size_t snapkv_scratch_bytes(const struct selector_shape *shape)
{
    return selector_rank_bytes(shape->n_kv_heads, shape->n_candidates, shape->n_free) + selector_shared_bytes(shape);
}

static int snapkv_select(const struct selector_input *in, int32_t *ret_n, int32_t *ret_indices)
{
    const struct selector_window window = {.pool = SNAPKV_POOL, .chunk = 1};
    int r = selector_own_rows(in, &window);
    return r < 0 ? r : selector_rank(in, in->n_kv_heads, ret_n, ret_indices);
}

const struct selector_ops selector_snapkv = {
    .name = "snapkv",
    .n_window = SNAPKV_WINDOW,
    .layer_free = selector_even_layer_free,
    .head_free_max = selector_even_head_free_max,
    .rows_max = selector_even_rows_max,
    .scratch_bytes = snapkv_scratch_bytes,
    .select = snapkv_select,
};
