/* ChunkKV (arXiv 2502.00299): chunks of neighbouring tokens are kept or not as a whole, the same ones in all heads of a layer.
 *
 *     s[i]     = mean over the window of 32 queries and over all query heads of a[h, w, i]    (selector_snapkv.c has a; not pooled)
 *     score[c] = mean of s over the candidates of chunk c, the positions 16 c .. 16 c + 15
 *
 * and the chunks of largest score are kept (ties: lower position) until n_free rows are used. Deviations from the original: chunks of 16 (the paper finds 10 robust, kvpress
 * has 20), counted from position 0, so that a chunk is a sub-page of the slow tier, which a kept chunk leaves altogether; the last chunk that fits only in part gives its first
 * tokens, because the rows are reserved anyway (the original keeps whole chunks and rounds the budget down); the first and the last chunk may be cut by the mandatory tokens
 * and count with the mean of what is left. Choices are not reused in other layers: that trades quality for time that selection does not take. */
#include "worker/cache/selector_private.h"

enum { CHUNKKV_CHUNK = 16 };

static size_t chunkkv_scratch_bytes(const struct selector_shape *shape)
{
    return selector_rank_bytes(1, shape->n_candidates, shape->n_free) + selector_parts_bytes(shape);
}

/* Every token has its chunk's mean for a score, so ranking tokens ranks chunks: equal scores go by position. */
static int chunkkv_select(const struct selector_input *in, int32_t *ret_n, int32_t *ret_indices)
{
    const struct selector_window window = {.pool = 1, .all_heads = true, .chunk = CHUNKKV_CHUNK};
    int r = selector_layer_row(in, &window);
    return r < 0 ? r : selector_rank(in, 1, ret_n, ret_indices);
}

const struct selector_ops selector_chunkkv = {
    .name = "chunkkv",
    .n_window = SNAPKV_WINDOW,
    .layer_free = selector_even_layer_free,
    .head_free_max = selector_even_head_free_max,
    .rows_max = selector_even_rows_max,
    .scratch_bytes = chunkkv_scratch_bytes,
    .select = chunkkv_select,
};
