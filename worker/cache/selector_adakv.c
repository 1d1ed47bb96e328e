/* Ada-KV (arXiv 2407.11550): SnapKV's scores compete over all KV heads of a layer, so that heads with spread attention keep more rows than heads with sharp attention.
 *
 *     s[g, i]  = mean over the window and over the query heads of KV head g of a[h, w, i], then max-pooled over 7 positions    (snapkv.c has a)
 *     c_g      = how many of the H base largest s of the whole layer lie in head g, base = n_free
 *     n_g      = (1 - alpha) c_g + alpha base, alpha = 0.2: the safeguard, no head gets less than a fifth of its even share
 *
 * and each head keeps its n_g best (ties: lower head, then lower position). Deviations from the original code: base does not count the sinks either, and sinks and the newest
 * tokens are kept for every head beside n_g; n_g is rounded by largest remainders (ties: lower head) instead of each to the nearest, so that the heads share the layer's
 * rows to the last one. Its optional normalisation by head is off, and no layer is exempt, as in its defaults. kvpress's reading of alpha, a minimum
 * instead of a mixture, is not followed: it spends the minimum on the window first and then protects nothing. */
#include "worker/cache/selector_private.h"
#include <errno.h>
#include <string.h>

enum { ADAKV_ALPHA_PARTS = 1, ADAKV_PARTS = 5 }; /* alpha = 1/5 */

/* The rank helper's memory: scores [all KV heads, n_candidates], then n_free indices a head. */
static size_t adakv_scratch_bytes(const struct selector_shape *shape)
{
    return selector_rank_bytes(selector_n_kv_heads(shape), shape->n_candidates, shape->n_free) + selector_parts_bytes(shape);
}

static int64_t adakv_head_free_max(int n_kv_heads, int64_t n_free)
{
    return n_kv_heads * n_free;
}

/* What the safeguard leaves to the heads of other ranks is theirs. */
static int64_t adakv_rows_max(const struct selector_shape *shape)
{
    const int64_t n_others = selector_n_kv_heads(shape) - shape->n_kv_heads, most = shape->n_kv_heads * shape->n_candidates;
    const int64_t left = selector_n_kv_heads(shape) * shape->n_free - n_others * (ADAKV_ALPHA_PARTS * shape->n_free / ADAKV_PARTS);
    return left < most ? left : most;
}

/* KV heads of the layer. */
static int n_heads(const struct selector_input *in)
{
    return in->ranks ? in->ranks->n_kv_heads : in->n_kv_heads;
}

static int32_t *chosen_memory(const struct selector_input *in)
{
    return (int32_t *)(selector_rank_scores(in) + n_heads(in) * (in->last - in->first));
}

static int read_chosen(const struct selector_input *in, int64_t first, int64_t n, int32_t *ret_indices)
{
    int r = in->dev->copy(in->stream, ret_indices, chosen_memory(in) + first, (size_t)n * sizeof(int32_t));
    return r < 0 ? r : in->dev->stream_sync(in->stream);
}

/* c_g: how many of the layer's best lie in each head. Read in pieces of this rank's even share, which `indices` has room for. */
static int count_best(const struct selector_input *in, int32_t *ret_count, int32_t *indices)
{
    const int64_t n_candidates = in->last - in->first, n_best = n_heads(in) * in->n_free, piece = in->n_kv_heads * in->n_free;
    int r = in->ops->topk(in->stream, selector_rank_scores(in), 1, n_heads(in) * n_candidates, n_best, chosen_memory(in));
    memset(ret_count, 0, (size_t)n_heads(in) * sizeof(*ret_count));
    for (int64_t first = 0; r >= 0 && first < n_best; first += piece) {
        const int64_t n = n_best - first < piece ? n_best - first : piece;
        r = read_chosen(in, first, n, indices);
        for (int64_t i = 0; r >= 0 && i < n; i++)
            ret_count[indices[i] / n_candidates]++;
    }
    return r;
}

/* Counts of best candidates to rows. In parts of a row the shares add up exactly; what is left when they are cut to whole rows goes to the largest remainders. */
static void share_rows(int n_kv_heads, int64_t n_free, int32_t *n_of_head)
{
    int64_t left = n_kv_heads * n_free;
    for (int h = 0; h < n_kv_heads; h++) {
        n_of_head[h] = (int32_t)((ADAKV_PARTS - ADAKV_ALPHA_PARTS) * (int64_t)n_of_head[h] + ADAKV_ALPHA_PARTS * n_free);
        left -= n_of_head[h] / ADAKV_PARTS;
    }
    for (int remainder = ADAKV_PARTS - 1; remainder > 0; remainder--) {
        for (int h = 0; h < n_kv_heads && left > 0; h++) {
            if (n_of_head[h] % ADAKV_PARTS == remainder) {
                n_of_head[h] += ADAKV_PARTS - remainder;
                left--;
            }
        }
    }
    for (int h = 0; h < n_kv_heads; h++)
        n_of_head[h] /= ADAKV_PARTS;
}

static int keep_best(const struct selector_input *in, const int32_t *n_of_head, int32_t *ret_indices)
{
    const int64_t n_candidates = in->last - in->first;
    const float *scores = selector_rank_scores(in) + (in->ranks ? in->ranks->first_kv_head * n_candidates : 0);
    int64_t n = 0;
    int r = 0;
    for (int h = 0; r >= 0 && h < in->n_kv_heads; h++) {
        r = in->ops->topk(in->stream, scores + h * n_candidates, 1, n_candidates, n_of_head[h], chosen_memory(in) + n);
        n += n_of_head[h];
    }
    if (r >= 0)
        r = read_chosen(in, 0, n, ret_indices);
    for (int64_t i = 0; r >= 0 && i < n; i++)
        ret_indices[i] += (int32_t)in->first;
    return r;
}

static int adakv_select(const struct selector_input *in, int32_t *ret_n, int32_t *ret_indices)
{
    int32_t n_of_head[SCORE_PARTS_MAX];
    if (n_heads(in) > SCORE_PARTS_MAX)
        return -ENOTSUP;
    int r = selector_layer_rows(in, SNAPKV_POOL);
    if (r >= 0)
        r = count_best(in, n_of_head, ret_indices);
    if (r < 0)
        return r;
    share_rows(n_heads(in), in->n_free, n_of_head);
    memcpy(ret_n, n_of_head + (in->ranks ? in->ranks->first_kv_head : 0), (size_t)in->n_kv_heads * sizeof(*ret_n));
    return keep_best(in, ret_n, ret_indices);
}

const struct selector_ops selector_adakv = {
    .name = "adakv",
    .n_window = SNAPKV_WINDOW,
    .layer_free = selector_even_layer_free,
    .head_free_max = adakv_head_free_max,
    .rows_max = adakv_rows_max,
    .scratch_bytes = adakv_scratch_bytes,
    .select = adakv_select,
};
