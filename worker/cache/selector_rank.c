/* What most selectors end with: the best candidates of each row of scores. */
#include "worker/cache/selector_private.h"
#include <string.h>

int64_t selector_even_layer_free(const struct selector_budget *budget, int layer)
{
    (void)layer;
    return budget->n_free;
}

int64_t selector_even_head_free_max(int n_kv_heads, int64_t n_free)
{
    (void)n_kv_heads;
    return n_free;
}

int64_t selector_even_rows_max(const struct selector_shape *shape)
{
    return shape->n_kv_heads * shape->n_free;
}

/* Scores [n_rows, n_candidates], then the chosen candidates [n_rows, n_free]. */
size_t selector_rank_bytes(int64_t n_rows, int64_t n_candidates, int64_t n_free)
{
    return (size_t)n_rows * ((size_t)n_candidates * sizeof(float) + (size_t)n_free * sizeof(int32_t));
}

float *selector_rank_scores(const struct selector_input *in)
{
    return in->scratch;
}

int selector_window_scores(const struct selector_input *in, const struct selector_window *window, float *scores)
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
        .bias = in->bias,
        .first = in->first,
        .last = in->last,
        .pool = window->pool,
        .pool_after_group = window->pool_after_group,
        .all_heads = window->all_heads,
        .chunk = window->chunk,
        .scores = scores,
    };
    return in->ops->window_scores(in->stream, &p);
}

int selector_rank(const struct selector_input *in, int n_rows, int32_t *ret_n, int32_t *ret_indices)
{
    const int64_t n_candidates = in->last - in->first, n_chosen = n_rows * in->n_free;
    float *scores = selector_rank_scores(in);
    int32_t *chosen = (int32_t *)(scores + n_rows * n_candidates);

    int r = in->ops->topk(in->stream, scores, n_rows, n_candidates, in->n_free, chosen);
    if (r >= 0)
        r = in->dev->copy(in->stream, ret_indices, chosen, (size_t)n_chosen * sizeof(int32_t));
    if (r >= 0)
        r = in->dev->stream_sync(in->stream);
    if (r < 0)
        return r;
    for (int64_t i = 0; i < n_chosen; i++)
        ret_indices[i] += (int32_t)in->first;
    for (int h = 0; h < in->n_kv_heads; h++) {
        ret_n[h] = (int32_t)in->n_free;
        if (h >= n_rows)
            memcpy(ret_indices + h * in->n_free, ret_indices, (size_t)in->n_free * sizeof(int32_t));
    }
    return 0;
}
