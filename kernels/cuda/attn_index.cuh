/* Scores of sub-pages by their 2-bit index entries: for each query head e, the log-sum-exp of the logits over the page's slow tokens. The logits are the CPU's to the bit
 * (kernels/cpu/attn_index.h has the algebra): q = step * qi with |qi| <= 127, codes and qi multiplied as integers by dp4a.
 * A warp a page: lane t and lane 16 + t share token t, each taking every second group of 16 dims. */
#pragma once
#include "kernels/cuda/attn_decode.cuh"
#include "kernels/cuda/block_page.cuh"

enum { INDEX_DIM_MAX = 256 };

struct index_query {
    float step_code[DECODE_GROUP_MAX], step_sum[DECODE_GROUP_MAX], step_middle[DECODE_GROUP_MAX];
    int8_t bytes[DECODE_GROUP_MAX][INDEX_DIM_MAX];
};

/* Quantizes one head by one warp. */
DEVICE void index_quantize(struct index_query *iq, const float *q, int h, int d, float scale)
{
    const int lane = (int)threadIdx.x % 32;
    float largest = 0;
    int sum = 0;
    for (int c = lane; c < d; c += 32)
        largest = fmaxf(largest, fabsf(q[c] * scale));
    largest = warp_max(largest);
    const bool none = !(largest > 0x1p-100f);
    const float factor = none ? 0.0f : 127.0f / largest;
    for (int c = lane; c < d; c += 32) {
        float x = q[c] * scale * factor;
        x = x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : x;
        const int code = (int)rintf(x);
        iq->bytes[h][c] = (int8_t)code;
        sum += code;
    }
    sum = (int)__reduce_add_sync(0xFFFFFFFFu, (unsigned)sum);
    if (lane == 0) {
        const float step = none ? 0.0f : largest / 127.0f;
        iq->step_code[h] = step * 64.0f;
        iq->step_sum[h] = step * (float)sum;
        iq->step_middle[h] = iq->step_sum[h] * 31.5f;
    }
}

/* e of one head for one page; every lane gets it. */
DEVICE float index_page_score(const struct decode_args &a, const struct decode_item &item, const struct index_query *iq, const struct kv_page &page, int h)
{
    const struct block_layout &layout = a.layout;
    const int lane = (int)threadIdx.x % 32, t = lane % 16, d = (int)layout.head_dim;
    const uint32_t *codes = reinterpret_cast<const uint32_t *>(page.index);
    const int *query = reinterpret_cast<const int *>(iq->bytes[h]);
    int dot = 0;
    for (int g = lane / 16; g < d / 16; g += 2) {
        const uint32_t word = codes[g * SUBPAGE_TOKENS + t];
        UNROLL for (int j = 0; j < 4; j++)
            dot = __dp4a((int)(word >> 2 * j & 0x03030303u), query[4 * g + j], dot);
    }
    dot += __shfl_xor_sync(0xFFFFFFFFu, dot, 16);
    const float step = fp16_to_float(page_fp16(page.index, layout.index_step, t)), min = fp16_to_float(page_fp16(page.index, layout.index_min, t));
    const float logit = fmaf(step, fmaf((float)dot, iq->step_code[h], iq->step_middle[h]), min * iq->step_sum[h]);
    const float s = page.tokens >> t & 1 ? decode_logit(a, item, h, (int64_t)page.subpage * SUBPAGE_TOKENS + t, logit) : -INFINITY, m = warp_max(s);
    const float sum = warp_sum(lane < 16 ? exp_nonpositive(s - m) : 0.0f); /* a page without slow tokens: NaN there, so 0 */
    return m + log_float(sum);
}
