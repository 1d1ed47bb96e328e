/* What the key biases that are kept out of the cache add to logits (kernels.h: struct key_bias).
 *
 * For a pair of frequency f and position p = 16 i + t the angle's cosine and sine come from two tables, 16 positions at a time:
 *     c = fma(C_i, c_t, -(S_i s_t)),  s = fma(S_i, c_t, C_i s_t)
 * and the logit's chain goes on, pairs in order: logit = fma(B, s, fma(A, c, logit)). The same expression wherever a key lies, in prefill, rows, index and pages. */
#pragma once
#include "kernels/cpu/lanes.h"
#include "kernels/kernels.h"

/* The marked pairs of one KV head; n is 0 without any. */
struct bias_pairs {
    const struct key_bias *bias;
    int first, n;
};

static inline __attribute__((unused)) struct bias_pairs bias_pairs_of(const struct key_bias *bias, int kv_head)
{
    if (!bias)
        return (struct bias_pairs){0};
    return (struct bias_pairs){.bias = bias, .first = bias->first[kv_head], .n = bias->first[kv_head + 1] - bias->first[kv_head]};
}

/* (A, B) of every pair for one query [d], scale applied: ret_ab [n, 2]. Sums in 16 lanes. */
SPECIALIZE void bias_coefficients(const struct bias_pairs *pairs, const float *q, int d, float *ret_ab)
{
    const float *u = pairs->n ? pairs->bias->u + (int64_t)pairs->first * 2 * d : NULL;
    for (int i = 0; i < 2 * pairs->n; i++, u += d) {
        v16 sum = v16_zero();
        for (int c = 0; c < d; c += LANES)
            sum = v16_fma(v16_load(q + c), v16_load(u + c), sum);
        ret_ab[i] = v16_reduce_add(sum);
    }
}

/* Cosine and sine of pair j at 16 positions, from C, S of their sixteens and c, s of their places in them. */
SPECIALIZE void bias_turn(v16 coarse_c, v16 coarse_s, v16 fine_c, v16 fine_s, v16 *ret_c, v16 *ret_s)
{
    *ret_c = v16_fma(coarse_c, fine_c, v16_neg(v16_mul(coarse_s, fine_s)));
    *ret_s = v16_fma(coarse_s, fine_c, v16_mul(coarse_c, fine_s));
}

/* Pair j at the positions 16 sixteen .. 16 sixteen + 15. */
SPECIALIZE void bias_waves(const struct bias_pairs *pairs, int j, int64_t sixteen, v16 *ret_c, v16 *ret_s)
{
    const struct key_bias *b = pairs->bias;
    int pair = b->pair[pairs->first + j];
    const float *coarse = b->coarse + (sixteen * b->n_freqs + pair) * 2, *fine = b->fine + pair * 2 * LANES;
    bias_turn(v16_set1(coarse[0]), v16_set1(coarse[1]), v16_load(fine), v16_load(fine + LANES), ret_c, ret_s);
}

/* Waves of n_panels sixteens in the form of panel_gemm.h: [n_panels][2 n][16], so that a product with (A, B) continues the logits' chains. */
static inline __attribute__((unused)) void bias_panels(const struct bias_pairs *pairs, int64_t sixteen, int n_panels, float *panels)
{
    for (int p = 0; p < n_panels; p++)
        for (int j = 0; j < pairs->n; j++, panels += 2 * LANES) {
            v16 c, s;
            bias_waves(pairs, j, sixteen + p, &c, &s);
            v16_store(panels, c);
            v16_store(panels + LANES, s);
        }
}
