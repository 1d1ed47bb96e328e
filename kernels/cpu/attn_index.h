/* Scorer index2: sub-pages against a query from their 2-bit index entries.
 *
 * The query is quantized to q = step * qi, |qi| <= 127; with key = kmin + kstep * (64 c + 31.5) the logit is
 * kstep * (64 step * D + 31.5 step * Q) + kmin * step * Q, D = sum of qi * c and Q = sum of qi, both exact integers. */
#pragma once
#include "kernels/cpu/attn_bias.h"
#include "kernels/cpu/attn_score.h"
#include "kernels/cpu/kv_expand.h"
#include "kernels/cpu/qdot.h"
#include "kernels/kv_page.h"

enum { INDEX_AHEAD = 16 }; /* pages whose entries are on their way */

struct index_query {
    int heads, d;
    struct attn_bias bias;
    float step_code[ATTN_HEADS], step_sum[ATTN_HEADS], step_middle[ATTN_HEADS]; /* 64 step, step * Q, 31.5 step * Q */
    uint32_t bytes[ATTN_HEADS][KV_MAX_DIM / 4]; /* qi of dims 4 j .. 4 j + 3 */
};

/* q [heads, d], scale applied. */
static void index_query_init(struct index_query *iq, const float *q, int heads, int d, const struct bias_pairs *pairs)
{
    int32_t qi[KV_MAX_DIM];
    attn_bias_init(&iq->bias, pairs, q, heads, d);
    iq->heads = heads;
    iq->d = d;
    for (int h = 0; h < heads; h++) {
        float step = attn_quantize(q + h * d, d, QDOT_INDEX_MAX, qi);
        int32_t sum = 0;
        for (int j = 0; j < d / 4; j++) {
            iq->bytes[h][j] = qdot_bytes(qi + 4 * j);
            sum += qi[4 * j] + qi[4 * j + 1] + qi[4 * j + 2] + qi[4 * j + 3];
        }
        iq->step_code[h] = step * 64.0f;
        iq->step_sum[h] = step * (float)sum;
        iq->step_middle[h] = iq->step_sum[h] * 31.5f;
    }
}

/* Logits of one page's 16 tokens for `heads` heads; head h at s + h * ld_s. */
SPECIALIZE void index_page_logits(const struct index_query *iq, const struct block_layout *layout, const struct kv_page *page, const int heads, float *s, int64_t ld_s)
{
    v16i dot[ATTN_HEADS];
    UNROLL for (int h = 0; h < heads; h++)
        dot[h] = v16i_zero();
    int groups = iq->d / 16;
    for (int first = 0; first < groups; first += QDOT_INDEX_GROUPS) {
        int end = first + QDOT_INDEX_GROUPS < groups ? first + QDOT_INDEX_GROUPS : groups;
        qdot_narrow sum[ATTN_HEADS];
        UNROLL for (int h = 0; h < heads; h++)
            sum[h] = qdot_narrow_zero();
        for (int g = first; g < end; g++) {
            qdot_fields fields = qdot_index_load(page->index + 64 * g);
            UNROLL for (int h = 0; h < heads; h++)
                sum[h] = qdot_index_step(sum[h], &fields, &iq->bytes[h][4 * g]);
        }
        UNROLL for (int h = 0; h < heads; h++)
            dot[h] = qdot_widen(dot[h], sum[h]);
    }
    v16 step = v16_load_fp16((const uint16_t *)(page->index + layout->index_step)), min = v16_load_fp16((const uint16_t *)(page->index + layout->index_min));
    v16 logit[ATTN_HEADS];
    UNROLL for (int h = 0; h < heads; h++) {
        v16 code = v16_fma(v16_from_i32(dot[h]), v16_set1(iq->step_code[h]), v16_set1(iq->step_middle[h]));
        logit[h] = v16_fma(step, code, v16_mul(min, v16_set1(iq->step_sum[h])));
    }
    attn_bias_sixteen(&iq->bias, page->subpage, heads, logit);
    UNROLL for (int h = 0; h < heads; h++)
        v16_store(s + h * ld_s, attn_mask_tokens(logit[h], page->tokens));
}

/* Into the second-level cache: the first has too few miss buffers for several entries. */
ALWAYS_INLINE void index_prefetch(const struct block_layout *layout, const struct kv_page *page)
{
    for (uint32_t byte = 0; byte < layout->index_entry_bytes; byte += 64)
        __builtin_prefetch(page->index + byte, 0, 2);
}

SPECIALIZE void index_segment_logits(const struct index_query *iq, const struct block_layout *layout, const struct kv_page *pages, int n, const int heads, float *s)
{
    for (int i = 0; i < n && i < INDEX_AHEAD; i++)
        index_prefetch(layout, &pages[i]);
    for (int i = 0; i < n; i++) {
        if (i + INDEX_AHEAD < n) /* entries of a block lie together, blocks lie anywhere */
            index_prefetch(layout, &pages[i + INDEX_AHEAD]);
        index_page_logits(iq, layout, &pages[i], heads, s + i * LANES, SCORE_SEGMENT * LANES);
    }
}

/* q [heads, d], scale applied; n <= SCORE_SEGMENT pages. Gives what score_page_sums does. */
static void index_score(const float *q, int heads, const struct bias_pairs *pairs, const struct block_layout *layout, const struct kv_page *pages, int n, float *ml, float *page_sum)
{
    float s[ATTN_HEADS * SCORE_SEGMENT * LANES] __attribute__((aligned(64)));
    struct index_query iq;
    index_query_init(&iq, q, heads, (int)layout->head_dim, pairs);
    switch (heads) {
    case 1:
        index_segment_logits(&iq, layout, pages, n, 1, s);
        break;
    case 2:
        index_segment_logits(&iq, layout, pages, n, 2, s);
        break;
    case 3:
        index_segment_logits(&iq, layout, pages, n, 3, s);
        break;
    default:
        index_segment_logits(&iq, layout, pages, n, 4, s);
        break;
    }
    score_page_sums(s, heads, n, ml, page_sum);
}
