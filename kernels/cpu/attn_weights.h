/* Logits of a run of keys to softmax weights, for some heads at once. */
#pragma once
#include "kernels/cpu/vmath.h"

enum { ATTN_HEADS = 4 }; /* query heads of a group that share one pass over the keys; larger groups take several */

/* Groups of 16 channels whose sums three or four heads keep in registers at a time. */
#if CPU_ISA_BUILD == 2
enum { ATTN_WIDE = 2 };
#else
enum { ATTN_WIDE = 1 };
#endif

/* Weights below e^-60 of the largest are 0: no sum could see them, and their products with the steps of values would fall among the subnormal numbers, which
 * are slow (attn_pages.h). */
#define ATTN_WEIGHT_CUT -60.0f

/* s[n], n a multiple of 16, padded or masked with -INFINITY: becomes exp(s - max s). ret_ml = (max, sum); an empty run gives (-INFINITY, 0) and zeros. */
SPECIALIZE void attn_weights(float *s, int n, float ret_ml[2])
{
    v16 max = v16_set1(-INFINITY), sum = v16_zero();
    for (int i = 0; i < n; i += LANES)
        max = v16_max(max, v16_load(s + i));
    ret_ml[0] = v16_reduce_max(max);
    v16 m = v16_set1(ret_ml[0]), cut = v16_set1(ATTN_WEIGHT_CUT);
    for (int i = 0; i < n; i += LANES) {
        v16 x = v16_sub(v16_load(s + i), m); /* NaN if all are -INFINITY; not <= anything, so the weight is 0 */
        v16 w = v16_select(v16_le(cut, x), vmath_exp_core(x), v16_zero());
        v16_store(s + i, w);
        sum = v16_add(sum, w);
    }
    ret_ml[1] = v16_reduce_add(sum);
}

/* s where bit t of `tokens` is set, else -INFINITY. */
SPECIALIZE v16 attn_mask_tokens(v16 s, uint16_t tokens)
{
    static const int32_t bit[LANES] = {1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 5, 1 << 6, 1 << 7, 1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    if (tokens == 0xFFFF) /* all slow: nearly every page */
        return s;
    v16i bits = v16i_load(bit);
    return v16_select(v16i_eq(v16i_and(v16i_set1(tokens), bits), bits), s, v16_set1(-INFINITY));
}

/* Quantizes q[d] to integers within +-max, ties to even: q ~ step * ret_q. Returns step; 0 and zeros for a query without any magnitude. */
SPECIALIZE float attn_quantize(const float *q, int d, float max, int32_t *ret_q)
{
    v16 largest = v16_zero();
    for (int c = 0; c < d; c += LANES)
        largest = v16_max(v16_abs(v16_load(q + c)), largest);
    float magnitude = v16_reduce_max(largest);
    if (!(magnitude > 0x1p-100f)) {
        memset(ret_q, 0, sizeof *ret_q * (size_t)d);
        return 0;
    }
    v16 scale = v16_set1(max / magnitude), limit = v16_set1(max);
    for (int c = 0; c < d; c += LANES) {
        v16 x = v16_mul(v16_load(q + c), scale);
        x = v16_max(v16_min(x, limit), v16_neg(limit)); /* holds what is not finite within bounds */
        v16i_store(ret_q + c, v16_to_i32(x));
    }
    return magnitude / max;
}
