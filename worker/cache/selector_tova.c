/* TOVA (arXiv 2401.06104): what the last prompt token attends to is kept, the same positions in all heads of a layer.
 *
 *     score[i] = mean over all query heads of softmax over i of q[h, last] . k[i] * scale
 *
 * and the n_free candidates of largest score are kept (ties: lower position). Deviations from the original: sinks and the newest 32 tokens are kept whatever they score, as with
 * every selector here (the original forces the last token alone); the choice is made once, at the end of the prompt, where the original drops one entry a token while the prompt
 * runs and so never sees again what an earlier token did not want. */
#include "worker/cache/selector_private.h"

static size_t tova_scratch_bytes(const struct selector_shape *shape)
{
    return selector_rank_bytes(1, shape->n_candidates, shape->n_free) + selector_parts_bytes(shape);
}

static int tova_select(const struct selector_input *in, int32_t *ret_n, int32_t *ret_indices)
{
    const struct selector_window window = {.pool = 1, .all_heads = true, .chunk = 1};
    int r = selector_layer_row(in, &window);
    return r < 0 ? r : selector_rank(in, 1, ret_n, ret_indices);
}

const struct selector_ops selector_tova = {
    .name = "tova",
    .n_window = 1,
    .layer_free = selector_even_layer_free,
    .head_free_max = selector_even_head_free_max,
    .rows_max = selector_even_rows_max,
    .scratch_bytes = tova_scratch_bytes,
    .select = tova_select,
};
