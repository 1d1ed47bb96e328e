/* Merging partials of attention by log-sum-exp: partials (m_i, l_i, o_i) over disjoint keys become one, with weights exp(m_i - max m). Base e.
 * Empty partials (m = -INFINITY, l = 0) weigh nothing; nothing but empty ones give an empty one. The sums run over i ascending. */
#pragma once
#include "kernels/cpu/vmath.h"

/* Partials of one head: ml + i * ml_stride is (m, l), o + i * o_stride is [d]. `out` [d] is divided by l; an empty result is zeros. */
static inline __attribute__((unused)) void lse_merge(const float *ml, int64_t ml_stride, const float *o, int64_t o_stride, int n, int d, float *out,
                                                     float *ret_m, float *ret_l)
{
    float m = -INFINITY, l = 0;
    for (int i = 0; i < n; i++)
        m = ml[i * ml_stride] > m ? ml[i * ml_stride] : m;
    for (int c = 0; c < d; c += LANES)
        v16_store(out + c, v16_zero());
    for (int first = 0; first < n; first += LANES) {
        int count = n - first < LANES ? n - first : LANES;
        float weight[LANES] = {0};
        for (int i = 0; i < count; i++)
            weight[i] = ml[(first + i) * ml_stride] - m;
        v16_store(weight, v16_exp_nonpositive(v16_load(weight))); /* -inf - -inf is NaN, and that gives 0 */
        for (int i = 0; i < count; i++) {
            const float *part = o + (first + i) * o_stride;
            v16 w = v16_set1(weight[i]);
            l = fmaf(weight[i], ml[(first + i) * ml_stride + 1], l);
            for (int c = 0; c < d; c += LANES)
                v16_store(out + c, v16_fma(w, v16_load(part + c), v16_load(out + c)));
        }
    }
    v16 total = v16_set1(l > 0 ? l : 1.0f);
    for (int c = 0; c < d; c += LANES)
        v16_store(out + c, v16_add(v16_div(v16_load(out + c), total), v16_zero()));
    *ret_m = m;
    *ret_l = l;
}
