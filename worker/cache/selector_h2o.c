/* H2O (arXiv 2306.14048): the heavy hitters, what all queries of the prompt together attended to, are kept.
 *
 *     score[g,i] = sum over the query heads h of KV head g and over all queries j >= i of softmax over keys <= j of q[h, j] . k . scale, at key i
 *
 * and the n_free candidates of largest score are kept (ties: lower position). The sums come from a second pass of the queries over the keys while the prompt is computed
 * (attn_column_sums), in fp32, so every query has to be computed: with this selector no prefix is taken from the pool, though the prompt's blocks are put there.
 * Deviations from the original: sums of the whole prompt decide once, at its end, where the original evicts a token a step and never sees it again; of recent tokens the newest 32 and
 * the recent window are kept, not half of the budget, since what is not kept stays reachable; a column is not divided by the number of queries that see it (kvpress does), so
 * earlier tokens are favoured as in the original. */
#include "worker/cache/selector_private.h"

/* The candidates' sums one head after the other, then what is chosen. */
static size_t h2o_scratch_bytes(const struct selector_shape *shape)
{
    return selector_rank_bytes(shape->n_kv_heads, shape->n_candidates, shape->n_free) + selector_shared_bytes(shape);
}

static int h2o_select(const struct selector_input *in, int32_t *ret_n, int32_t *ret_indices)
{
    int r = selector_own_sums(in);
    return r < 0 ? r : selector_rank(in, in->n_kv_heads, ret_n, ret_indices);
}

const struct selector_ops selector_h2o = {
    .name = "h2o",
    .n_window = 0,
    .all_queries = true,
    .layer_free = selector_even_layer_free,
    .head_free_max = selector_even_head_free_max,
    .rows_max = selector_even_rows_max,
    .scratch_bytes = h2o_scratch_bytes,
    .select = h2o_select,
};
