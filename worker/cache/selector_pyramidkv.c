/* PyramidKV (arXiv 2406.02069): SnapKV inside a layer, with budgets that fall linearly from the first layer to the last, beta = 20.
 *
 *     base = n_free,  min = floor(base / beta),  max = 2 base - min;  if max exceeds the candidates: max = candidates, min = 2 base - max
 *     n_l  = max - l (max - min) / (L - 1), rounded;  n_l = base when the prompt has fewer than 2 base tokens
 *
 * Deviations from the original code: base does not count the sinks either (they are mandatory here); each n_l is the exact line's value, rounded away from base in the middle
 * between two integers, so that layers l and L-1-l balance and the total is L base to the row, which is what admission promises (the original steps by whole numbers and
 * loses up to L-1 rows a layer); scores are snapkv's, with its deviations. */
#include "worker/cache/selector_private.h"

enum { PYRAMID_BETA = 20 };

static int64_t pyramidkv_layer_free(const struct selector_budget *b, int layer)
{
    const int64_t base = b->n_free, steps = b->n_layers - 1, min = base / PYRAMID_BETA;
    const int64_t max = 2 * base - min < b->n_candidates ? 2 * base - min : b->n_candidates;
    if (b->n_keys < 2 * base || steps == 0)
        return base;
    const int64_t twice = 2 * (max - base) * (steps - 2 * layer); /* twice the distance from base, in 1 / steps */
    return base + (twice + (twice < 0 ? -steps : steps)) / (2 * steps);
}

static int64_t pyramidkv_head_free_max(int n_kv_heads, int64_t n_free)
{
    (void)n_kv_heads;
    return 2 * n_free;
}

static size_t pyramidkv_scratch_bytes(const struct selector_shape *shape)
{
    return selector_snapkv.scratch_bytes(shape);
}

static int pyramidkv_select(const struct selector_input *in, int32_t *ret_n, int32_t *ret_indices)
{
    return selector_snapkv.select(in, ret_n, ret_indices);
}

const struct selector_ops selector_pyramidkv = {
    .name = "pyramidkv",
    .n_window = SNAPKV_WINDOW,
    .layer_free = pyramidkv_layer_free,
    .head_free_max = pyramidkv_head_free_max,
    .rows_max = selector_even_rows_max,
    .scratch_bytes = pyramidkv_scratch_bytes,
    .select = pyramidkv_select,
};
