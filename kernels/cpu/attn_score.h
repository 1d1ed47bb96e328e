/* What the scorers of slow sub-pages have in common. For each query head a segment of pages gives m and, for each page, exp(e - m), e being the log-sum-exp that the scorer
 * expects of the page's slow tokens; attn_decode.c turns these into shares of everything attended. */
#pragma once
#include "kernels/cpu/attn_weights.h"
#include "kernels/cpu/transpose16.h"

enum { SCORE_SEGMENT = 64 }; /* pages; borders are fixed, so that threads can share a sequence without changing a bit */

/* From logits of tokens: s [heads, SCORE_SEGMENT * 16], n pages filled, -INFINITY for tokens that are not slow; overwritten. ml [heads, 2]: largest logit and the sum over
 * all pages; page_sum [heads, SCORE_SEGMENT]: sum of exp(logit - m) of each page, zeros from n on. */
SPECIALIZE void score_page_sums(float *s, int heads, int n, float *ml, float *page_sum)
{
    for (int h = 0; h < heads; h++) {
        float *logits = s + h * SCORE_SEGMENT * LANES;
        attn_weights(logits, n * LANES, ml + 2 * h);
        for (int first = 0; first < SCORE_SEGMENT; first += LANES) {
            v16i r[LANES];
            v16 sum[LANES];
            for (int i = 0; i < LANES; i++)
                r[i] = first + i < n ? v16_bits(v16_load(logits + (first + i) * LANES)) : v16i_zero();
            transpose16(r); /* now r[t] holds token t of 16 pages; the tree over t is that of v16_reduce_add */
            for (int t = 0; t < LANES; t++)
                sum[t] = v16_from_bits(r[t]);
            for (int half = LANES / 2; half > 0; half /= 2)
                for (int t = 0; t < half; t++)
                    sum[t] = v16_add(sum[t], sum[t + half]);
            v16_store(page_sum + h * SCORE_SEGMENT + first, sum[0]);
        }
    }
}
