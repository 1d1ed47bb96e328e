/* KeyDiff (arXiv 2504.15364): keys that differ most from the others are kept; no query is looked at.
 *
 *     anchor   = mean over all prompt keys of k / |k|, for each KV head
 *     score[i] = -cos(k[i], anchor)
 *
 * and the n_free candidates of largest score are kept (ties: lower position). Keys are those behind RoPE, as attended; the Hadamard rotation they are held in changes no angle.
 * Deviations from the original: biases of the key projection that the cache keeps out of the keys (kernels.h, struct key_bias) are not in k, since a direction that all keys share tells
 * none of them apart; one choice over the whole prompt, where the original evicts block by block and so measures against the anchor of what it has left; sinks and the
 * newest tokens are kept whatever they score (the original protects neither). */
#include "worker/cache/selector_private.h"

static size_t keydiff_scratch_bytes(const struct selector_shape *shape)
{
    return selector_rank_bytes(shape->n_kv_heads, shape->n_candidates, shape->n_free);
}

static int keydiff_select(const struct selector_input *in, int32_t *ret_n, int32_t *ret_indices)
{
    const struct keydiff_params p = {
        .k = in->k,
        .head_stride = in->head_stride,
        .n_keys = in->n_keys,
        .n_kv_heads = in->n_kv_heads,
        .head_dim = in->head_dim,
        .first = in->first,
        .last = in->last,
        .scores = selector_rank_scores(in),
    };
    int r = in->ops->keydiff_scores(in->stream, &p);
    return r < 0 ? r : selector_rank(in, in->n_kv_heads, ret_n, ret_indices);
}

const struct selector_ops selector_keydiff = {
    .name = "keydiff",
    .n_window = 0,
    .layer_free = selector_even_layer_free,
    .head_free_max = selector_even_head_free_max,
    .rows_max = selector_even_rows_max,
    .scratch_bytes = keydiff_scratch_bytes,
    .select = keydiff_select,
};
