/* Scores of sub-pages by summaries (minmax, mean, meanvar) and by their own keys (oracle): e of one query head, for the formulas of kernels.h. Sums over dims run in 16 lanes and end in the CPU's
 * tree, so e has the CPU's bits for the summaries; the oracle's keys are those that prefill attends, rounded to bf16.
 * Half a warp a head. */
#pragma once
#include "kernels/cuda/attn_decode.cuh"
#include "kernels/cuda/block_page.cuh"

enum { SUMMARY_DIM_MAX = 128 };

/* Queries with the scale applied; turned back to the model's own basis for the summaries. */
struct summary_query {
    float q[DECODE_GROUP_MAX][SUMMARY_DIM_MAX];
};

/* One head by one warp. Butterflies from distance 1 up, as the cache's rotation: it is its own inverse. */
DEVICE void summary_rotate_back(float *q, int d)
{
    const int lane = (int)threadIdx.x % 32, block = d & -d;
    for (int h = 1; h < block; h *= 2) {
        __syncwarp();
        for (int i = lane; i < d / 2; i += 32) { /* pairs (c, c + h) */
            const int c = i / h * 2 * h + i % h;
            const float low = q[c], high = q[c + h];
            q[c] = low + high;
            q[c + h] = low - high;
        }
    }
    __syncwarp();
    for (int c = lane; c < d; c += 32)
        q[c] *= 1.0f / sqrtf((float)block);
}

/* The CPU's tree over 16 lanes; lane 0 of each half warp gets it. */
DEVICE float half_warp_sum(float x)
{
    for (int h = 8; h > 0; h /= 2)
        x += __shfl_down_sync(0xFFFFFFFFu, x, (unsigned)h, 16);
    return x;
}

/* e by a summary, in lane 0 of the half warp. */
DEVICE float summary_score(enum page_scorer scorer, const float *q, int d, uint32_t tokens, const uint16_t *summary)
{
    static const float log_n[SUBPAGE_TOKENS + 1] = {-INFINITY,   0.0f,        0.69314718f, 1.09861229f, 1.38629436f, 1.60943791f, 1.79175947f, 1.94591015f, 2.07944154f,
                                                    2.19722458f, 2.30258509f, 2.39789527f, 2.48490665f, 2.56494936f, 2.63905733f, 2.70805020f, 2.77258872f};
    float sum = 0, squares = 0;
    for (int c = (int)threadIdx.x % 16; c < d; c += 16) {
        const float a = fp16_to_float(summary[c]), b = scorer == PAGE_SCORER_MEAN ? 0.0f : fp16_to_float(summary[d + c]);
        if (scorer == PAGE_SCORER_MINMAX) {
            const float low = q[c] * a, high = q[c] * b;
            sum += low > high ? low : high;
        } else {
            sum = fmaf(q[c], a, sum);
            squares = fmaf(q[c] * q[c], b, squares);
        }
    }
    sum = half_warp_sum(sum);
    const float spread = 0.5f * half_warp_sum(squares);
    if (scorer == PAGE_SCORER_MINMAX)
        return tokens ? sum : -INFINITY;
    return sum + (scorer == PAGE_SCORER_MEANVAR ? (spread < PAGE_SCORE_SPREAD_MAX ? spread : PAGE_SCORE_SPREAD_MAX) : 0.0f) + log_n[__popc(tokens)];
}

/* e by the page's keys, one lane a token; every lane of the half warp gets it. */
DEVICE float oracle_score(const float *q, const struct subpage_layout &l, const struct kv_page &page, int d)
{
    const int t = (int)threadIdx.x % 16;
    float logit = 0, m, sum;
    for (int c = 0; c < d; c++)
        logit = fmaf(q[c], bf16_to_float(page_key(l, page.page, t, c)), logit);
    logit = page.tokens >> t & 1 ? logit : -INFINITY;
    m = logit;
    for (int x = 1; x < 16; x *= 2)
        m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, x));
    sum = exp_nonpositive(logit - m);
    for (int x = 1; x < 16; x *= 2)
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, x);
    return m + log_float(sum);
}
