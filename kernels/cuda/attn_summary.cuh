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

/* log-sum-exp over the half warp; every lane gets it. -inf where all are. */
DEVICE float half_warp_lse(float x)
{
    float m = x, sum;
    for (int h = 1; h < 16; h *= 2)
        m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, h));
    sum = exp_nonpositive(x - m);
    for (int h = 1; h < 16; h *= 2)
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, h);
    return m + log_float(sum);
}

/* What the slow tokens' own terms add to e: log n without key biases (0 to minmax), else the log-sum-exp (the largest) of their terms; -inf for a page without slow tokens. */
DEVICE float summary_terms(const struct decode_args &a, const struct decode_item &item, const struct kv_page &page, int h)
{
    static const float log_n[SUBPAGE_TOKENS + 1] = {-INFINITY,   0.0f,        0.69314718f, 1.09861229f, 1.38629436f, 1.60943791f, 1.79175947f, 1.94591015f, 2.07944154f,
                                                    2.19722458f, 2.30258509f, 2.39789527f, 2.48490665f, 2.56494936f, 2.63905733f, 2.70805020f, 2.77258872f};
    const uint32_t tokens = page.tokens;
    const bool minmax = a.scorer == PAGE_SCORER_MINMAX;
    const int t = (int)threadIdx.x % 16;
    if (!item.ab || a.bias.first[item.slow.kv_head + 1] == a.bias.first[item.slow.kv_head]) /* the same for the whole warp */
        return tokens && minmax ? 0.0f : log_n[__popc(tokens)];
    float term = tokens >> t & 1 ? decode_logit(a, item, h, (int64_t)page.subpage * SUBPAGE_TOKENS + t, 0.0f) : -INFINITY;
    const float all = half_warp_lse(term);
    for (int x = 1; x < 16; x *= 2)
        term = fmaxf(term, __shfl_xor_sync(0xFFFFFFFFu, term, x));
    return minmax ? term : all;
}

/* e by a summary, in lane 0 of the half warp. */
DEVICE float summary_score(const struct decode_args &a, const struct decode_item &item, const struct kv_page &page, int h, const float *q, const uint16_t *summary)
{
    const enum page_scorer scorer = a.scorer;
    const int d = a.head_dim;
    const float terms = summary_terms(a, item, page, h);
    float sum = 0, squares = 0;
    for (int c = (int)threadIdx.x % 16; c < d; c += 16) {
        const float one = fp16_to_float(summary[c]), two = scorer == PAGE_SCORER_MEAN ? 0.0f : fp16_to_float(summary[d + c]);
        if (scorer == PAGE_SCORER_MINMAX) {
            const float low = q[c] * one, high = q[c] * two;
            sum += low > high ? low : high;
        } else {
            sum = fmaf(q[c], one, sum);
            squares = fmaf(q[c] * q[c], two, squares);
        }
    }
    sum = half_warp_sum(sum);
    const float spread = 0.5f * half_warp_sum(squares);
    return sum + (scorer == PAGE_SCORER_MEANVAR ? (spread < PAGE_SCORE_SPREAD_MAX ? spread : PAGE_SCORE_SPREAD_MAX) : 0.0f) + terms;
}

/* e by the page's keys, one lane a token; every lane of the half warp gets it. */
DEVICE float oracle_score(const struct decode_args &a, const struct decode_item &item, const struct kv_page &page, int h, const float *q)
{
    const int t = (int)threadIdx.x % 16;
    float logit = 0;
    for (int c = 0; c < a.head_dim; c++)
        logit = fmaf(q[c], bf16_to_float(page_key(page.sink ? a.layout.sink : a.layout.page, page.page, t, c)), logit);
    return half_warp_lse(page.tokens >> t & 1 ? decode_logit(a, item, h, (int64_t)page.subpage * SUBPAGE_TOKENS + t, logit) : -INFINITY);
}
