/* What the scorers of slow sub-pages have in common. For each query head a segment of pages gives m and, for each page, exp(e - m), e being the log-sum-exp that the scorer
 * expects of the page's slow tokens; attn_decode.c turns these into shares of everything attended. */
#pragma once
#include "kernels/cpu/attn_weights.h"

enum { SCORE_SEGMENT = 64 }; /* pages; borders are fixed, so that threads can share a sequence without changing a bit */

/* exp(x) for x <= 0, within 8e-5 of it: a third cheaper than vmath's, and the logits of an index are far less sure than that. 0 below ATTN_WEIGHT_CUT, and for NaN. 2^f on
 * [-1/2, 1/2] by weighted least squares toward minimax, fitted by us. */
SPECIALIZE v16 score_exp(v16 x)
{
    const v16 log2e = v16_set1(0x1.715476p+0f);
    v16 shifted = v16_fma(x, log2e, v16_set1(0x1.8p23f)); /* the integer nearest to x / ln2, in the low bits */
    v16 f = v16_fma(x, log2e, v16_sub(v16_set1(0x1.8p23f), shifted));
    v16 p = v16_fma(v16_set1(0.0551716648042202f), f, v16_set1(0.2426111400127411f));
    p = v16_fma(p, f, v16_set1(0.6932609677314758f));
    p = v16_fma(p, f, v16_set1(0.9999280571937561f));
    p = v16_from_bits(v16i_add(v16_bits(p), v16i_shl(v16_bits(shifted), 23)));
    return v16_select(v16_le(v16_set1(ATTN_WEIGHT_CUT), x), p, v16_zero());
}

/* From logits of tokens: s [heads, SCORE_SEGMENT * 16], n pages filled, -INFINITY for tokens that are not slow. ml [heads, 2]: largest logit and the sum over all pages;
 * page_sum [heads, SCORE_SEGMENT]: sum of exp(logit - m) of each page, zeros from n on. */
SPECIALIZE void score_page_sums(const float *s, int heads, int n, float *ml, float *page_sum)
{
    for (int h = 0; h < heads; h++, s += SCORE_SEGMENT * LANES) {
        v16 max = v16_set1(-INFINITY), total = v16_zero();
        for (int i = 0; i < n; i++)
            max = v16_max(max, v16_load(s + i * LANES));
        ml[2 * h] = v16_reduce_max(max);
        v16 m = v16_set1(ml[2 * h]);
        for (int first = 0; first < SCORE_SEGMENT; first += LANES) {
            v16 w[LANES];
            UNROLL for (int i = 0; i < LANES; i++)
                w[i] = first + i < n ? score_exp(v16_sub(v16_load(s + (first + i) * LANES), m)) : v16_zero();
            v16 sums = v16_reduce_add16(w);
            v16_store(page_sum + h * SCORE_SEGMENT + first, sums);
            total = v16_add(total, sums);
        }
        ml[2 * h + 1] = v16_reduce_add(total);
    }
}
