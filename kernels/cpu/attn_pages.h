/* A partial of decode attention over sub-pages of the pool, in place (layouts: proto/block_layout.h).
 *
 * K8 keys: logit = kstep * S * step + kmin * step * Q with the query quantized to q = step * qi, |qi| <= 4064, S = sum of qi * code and Q = sum of qi exact integers.
 * BF16 keys: one chain of fma over d, as everywhere. Both go on with the terms of key biases.
 * Values: w = weight * vstep for each (group of 32 channels, token); out = (chain over tokens ascending of fma(w, code)) + sum of weight * vmin, the latter in 16 lanes
 * of tokens over all pages of the segment. A 4-bit code is not shifted down: masked in place it reads as code * 2^k exactly, and w carries 2^-k. */
#pragma once
#include "kernels/cpu/attn_bias.h"
#include "kernels/cpu/attn_weights.h"
#include "kernels/cpu/kv_expand.h"
#include "kernels/cpu/qdot.h"
#include "kernels/kernels.h"

enum {
    PAGES_SEGMENT = 16, /* pages of one partial */
    PAGES_TOKENS = PAGES_SEGMENT * SUBPAGE_TOKENS,
    PAGES_AHEAD = 2, /* a page is asked for while the second before it is scored, into the second-level cache: the first has too few miss buffers for a whole page */
};

struct page_query {
    int heads, d;
    struct attn_bias bias;
    const float *q;                                /* [heads, d], scale applied; for BF16 keys */
    float step[ATTN_HEADS], step_sum[ATTN_HEADS];  /* step, step * Q */
    struct qdot_query digits[ATTN_HEADS][KV_MAX_DIM / 4];
};

static void page_query_init(struct page_query *pq, const float *q, int heads, int d, const struct bias_pairs *pairs)
{
    int32_t qi[KV_MAX_DIM];
    attn_bias_init(&pq->bias, pairs, q, heads, d);
    pq->heads = heads;
    pq->d = d;
    pq->q = q;
    for (int h = 0; h < heads; h++) {
        int32_t sum = 0;
        pq->step[h] = attn_quantize(q + h * d, d, QDOT_MAX, qi);
        for (int j = 0; j < d / 4; j++) {
            pq->digits[h][j] = qdot_pack(qi + 4 * j);
            sum += qi[4 * j] + qi[4 * j + 1] + qi[4 * j + 2] + qi[4 * j + 3];
        }
        pq->step_sum[h] = pq->step[h] * (float)sum;
    }
}

SPECIALIZE void page_logits_store(const struct page_query *pq, const struct kv_page *page, v16 *logit, const int heads, float *s)
{
    attn_bias_sixteen(&pq->bias, page->subpage, heads, logit);
    UNROLL for (int h = 0; h < heads; h++)
        v16_store(s + h * PAGES_TOKENS, attn_mask_tokens(logit[h], page->tokens));
}

SPECIALIZE void page_logits_k8(const struct page_query *pq, const struct subpage_layout *l, const struct kv_page *page, const int heads, float *s)
{
    qdot_sum sum[ATTN_HEADS];
    UNROLL for (int h = 0; h < heads; h++)
        sum[h] = qdot_zero();
    for (int g = 0; g < pq->d / 4; g++) {
        qdot_codes codes = qdot_load(page->page + l->keys + 64 * g);
        UNROLL for (int h = 0; h < heads; h++)
            sum[h] = qdot_step(sum[h], codes, &pq->digits[h][g]);
    }
    v16 step = v16_load_fp16((const uint16_t *)(page->page + l->key_step)), min = v16_load_fp16((const uint16_t *)(page->page + l->key_min));
    v16 logit[ATTN_HEADS];
    UNROLL for (int h = 0; h < heads; h++) {
        v16 code = v16_from_i32(qdot_total(sum[h]));
        logit[h] = v16_fma(v16_mul(step, code), v16_set1(pq->step[h]), v16_mul(min, v16_set1(pq->step_sum[h])));
    }
    page_logits_store(pq, page, logit, heads, s);
}

SPECIALIZE void page_logits_bf16(const struct page_query *pq, const struct subpage_layout *l, const struct kv_page *page, const int heads, float *s)
{
    v16 acc[ATTN_HEADS];
    UNROLL for (int h = 0; h < heads; h++)
        acc[h] = v16_zero();
    for (int g = 0; g < pq->d / 2; g++) {
        v16i pair = v16i_load(page->page + l->keys + 64 * g);
        v16 even = v16_from_bits(v16i_shl(pair, 16)), odd = v16_from_bits(v16i_and(pair, v16i_set1((int32_t)0xFFFF0000u)));
        UNROLL for (int h = 0; h < heads; h++) {
            acc[h] = v16_fma(v16_set1(pq->q[h * pq->d + 2 * g]), even, acc[h]);
            acc[h] = v16_fma(v16_set1(pq->q[h * pq->d + 2 * g + 1]), odd, acc[h]);
        }
    }
    page_logits_store(pq, page, acc, heads, s);
}

ALWAYS_INLINE const struct subpage_layout *page_layout_of(const struct block_layout *layout, const struct kv_page *page)
{
    return page->sink ? &layout->sink : &layout->page;
}

SPECIALIZE void pages_logits(const struct page_query *pq, const struct block_layout *layout, const struct kv_page *const *pages, int n, const int heads, float *s)
{
    for (int i = 0; i < n; i++) {
        const struct subpage_layout *l = page_layout_of(layout, pages[i]);
        if (i + PAGES_AHEAD < n)
            for (uint32_t byte = 0; byte < layout->page.bytes; byte += 64)
                __builtin_prefetch(pages[i + PAGES_AHEAD]->page + byte, 0, 2);
        if (l->format == KV_FORMAT_BF16)
            page_logits_bf16(pq, l, pages[i], heads, s + i * SUBPAGE_TOKENS);
        else
            page_logits_k8(pq, l, pages[i], heads, s + i * SUBPAGE_TOKENS);
    }
}

/* The factor w carries for each token of a V4 page; see v4_codes. */
static const float v4_unshift[SUBPAGE_TOKENS] = {0x1p-0f, 0x1p-8f, 0x1p-16f, 0x1p-24f, 0x1p-4f, 0x1p-12f, 0x1p-20f, 1.0f,
                                                 0x1p-0f, 0x1p-8f, 0x1p-16f, 0x1p-24f, 0x1p-4f, 0x1p-12f, 0x1p-20f, 1.0f};

/* Codes of token `t` of 8 from the 4 bytes of 16 channels, times 2^(their place), except the topmost, whose place is the sign's. */
SPECIALIZE v16 v4_codes(v16i x, const int t)
{
    int shift = t < 4 ? 8 * t : 8 * (t - 4) + 4;
    return v16_from_i32(shift == 28 ? v16i_shr(x, 28) : v16i_and(x, v16i_set1(15 << (shift & 31))));
}

/* The accumulators of some heads over 16 * cols channels. */
struct page_output {
    v16 acc[ATTN_HEADS][2];
};

SPECIALIZE void page_output_add(struct page_output *out, const v16 *x, const float *w, const int heads, const int cols)
{
    UNROLL for (int h = 0; h < heads; h++) {
        v16 weight = v16_set1(w[h * PAGES_TOKENS]);
        UNROLL for (int j = 0; j < cols; j++)
            out->acc[h][j] = v16_fma(weight, x[j], out->acc[h][j]);
    }
}

SPECIALIZE void page_values_v4(struct page_output *out, const uint8_t *values, int d, int c, const float *w, const int heads, const int cols)
{
    for (int half = 0; half < 2; half++) {
        const uint8_t *bytes = values + (half * d + c) * 4;
        UNROLL for (int t = 0; t < 8; t++) {
            v16 x[2];
            UNROLL for (int j = 0; j < cols; j++)
                x[j] = v4_codes(v16i_load(bytes + 64 * j), t);
            page_output_add(out, x, w + 8 * half + t, heads, cols);
        }
    }
}

SPECIALIZE void page_values_v8(struct page_output *out, const uint8_t *values, int d, int c, const float *w, const int heads, const int cols)
{
    for (int t = 0; t < SUBPAGE_TOKENS; t++) {
        v16 x[2];
        UNROLL for (int j = 0; j < cols; j++)
            x[j] = v16_from_i32(v16i_load_u8(values + t * d + c + LANES * j));
        page_output_add(out, x, w + t, heads, cols);
    }
}

SPECIALIZE void page_values_bf16(struct page_output *out, const uint8_t *values, int d, int c, const float *w, const int heads, const int cols)
{
    for (int t = 0; t < SUBPAGE_TOKENS; t++) {
        v16 x[2];
        UNROLL for (int j = 0; j < cols; j++)
            x[j] = v16_load_bf16((const uint16_t *)values + t * d + c + LANES * j);
        page_output_add(out, x, w + t, heads, cols);
    }
}

/* w = weight * vstep of one group of channels, [heads, PAGES_TOKENS]; ret_bias [heads]: sum of weight * vmin. */
static void pages_value_weights(const struct block_layout *layout, const struct kv_page *const *pages, int n, int group, int heads, const float *weights, float *w,
                                float *ret_bias)
{
    for (int h = 0; h < heads; h++) {
        v16 bias = v16_zero();
        for (int i = 0; i < n; i++) {
            const struct subpage_layout *l = page_layout_of(layout, pages[i]);
            int at = h * PAGES_TOKENS + i * SUBPAGE_TOKENS;
            v16 p = v16_load(weights + at);
            if (l->format == KV_FORMAT_BF16) {
                v16_store(w + at, p);
                continue;
            }
            v16 step = v16_load_fp16((const uint16_t *)(pages[i]->page + l->value_step) + group * SUBPAGE_TOKENS);
            if (l->format == KV_FORMAT_K8V4)
                step = v16_mul(step, v16_load(v4_unshift));
            v16_store(w + at, v16_mul(p, step));
            bias = v16_fma(p, v16_load_fp16((const uint16_t *)(pages[i]->page + l->value_min) + group * SUBPAGE_TOKENS), bias);
        }
        ret_bias[h] = v16_reduce_add(bias);
    }
}

/* Channels c .. c + 16 cols - 1, all in one group of 32. */
SPECIALIZE void pages_output(const struct block_layout *layout, const struct kv_page *const *pages, int n, int d, int c, const float *w, const float *bias,
                                const int heads, const int cols, float *o)
{
    struct page_output out;
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int j = 0; j < cols; j++)
            out.acc[h][j] = v16_zero();
    for (int i = 0; i < n; i++) {
        const struct subpage_layout *l = page_layout_of(layout, pages[i]);
        const uint8_t *values = pages[i]->page + l->values;
        const float *page_w = w + i * SUBPAGE_TOKENS;
        if (l->format == KV_FORMAT_K8V4)
            page_values_v4(&out, values, d, c, page_w, heads, cols);
        else if (l->format == KV_FORMAT_K8V8)
            page_values_v8(&out, values, d, c, page_w, heads, cols);
        else
            page_values_bf16(&out, values, d, c, page_w, heads, cols);
    }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int j = 0; j < cols; j++)
            v16_store(o + h * d + c + LANES * j, v16_add(out.acc[h][j], v16_set1(bias[h])));
}

SPECIALIZE void pages_run(const struct page_query *pq, const struct block_layout *layout, const struct kv_page *const *pages, int n, const int heads, const int cols,
                             float *ml, float *o)
{
    float s[ATTN_HEADS * PAGES_TOKENS] __attribute__((aligned(64))), w[ATTN_HEADS * PAGES_TOKENS] __attribute__((aligned(64)));
    float bias[ATTN_HEADS];
    pages_logits(pq, layout, pages, n, heads, s);
    for (int h = 0; h < heads; h++)
        attn_weights(s + h * PAGES_TOKENS, n * SUBPAGE_TOKENS, ml + 2 * h);
    for (int c = 0; c < pq->d; c += VALUE_GROUP) {
        pages_value_weights(layout, pages, n, c / VALUE_GROUP, heads, s, w, bias);
        for (int half = 0; half < VALUE_GROUP; half += LANES * cols)
            pages_output(layout, pages, n, pq->d, c + half, w, bias, heads, cols, o);
    }
}

/* n <= PAGES_SEGMENT pages in order. ml [heads, 2], o [heads, d]. */
static void attn_pages(const struct page_query *pq, const struct block_layout *layout, const struct kv_page *const *pages, int n, float *ml, float *o)
{
    switch (pq->heads) {
    case 1:
        pages_run(pq, layout, pages, n, 1, 2, ml, o);
        break;
    case 2:
        pages_run(pq, layout, pages, n, 2, 2, ml, o);
        break;
    case 3:
        pages_run(pq, layout, pages, n, 3, ATTN_WIDE, ml, o);
        break;
    default:
        pages_run(pq, layout, pages, n, 4, ATTN_WIDE, ml, o);
        break;
    }
}
