/* A partial of decode attention over sub-pages of the pool, in place (layouts: proto/block_layout.h).
 *
 * K8 keys: logit = kstep * S * step + kmin * step * Q with the query quantized to q = step * qi, |qi| <= 4064, S = sum of qi * code and Q = sum of qi exact integers.
 * BF16 keys: one chain of fma over d, as everywhere. Both go on with the terms of key biases.
 * Values: w = weight * vstep for each (group of 32 channels, token); out = (sum over tokens of w * code) + sum of weight * vmin, the latter in 16 lanes of tokens over all
 * pages of the segment. Of K8V4 pages the former is step * sum of (integer * code), exact (vdot.h), with step = largest w of the segment and group / VDOT_MAX: that costs
 * less than a hundredth of what coding the values does. Of other pages it goes on as a chain over tokens ascending of fma(w, code). */
#pragma once
#include "kernels/cpu/attn_bias.h"
#include "kernels/cpu/attn_weights.h"
#include "kernels/cpu/kv_expand.h"
#include "kernels/cpu/qdot.h"
#include "kernels/cpu/vdot.h"
#include "kernels/kv_page.h"

enum {
    PAGES_SEGMENT = 16, /* pages of one partial */
    PAGES_TOKENS = PAGES_SEGMENT * SUBPAGE_TOKENS,
    PAGES_AHEAD = 2, /* in a cold segment a page is asked for while the second before it is scored */
};

/* What a segment asks of memory besides computing: the pages of a segment that the same thread will soon run. So memory is read all the time; with a segment's own pages
 * asked for while their keys are multiplied, it would be idle during the values. */
struct page_ahead {
    const uint8_t *pages[PAGES_SEGMENT];
    int n;
    bool cold; /* nobody has asked for the segment itself */
};

/* Into the second-level cache: the first has too few miss buffers for a whole page. */
ALWAYS_INLINE void page_prefetch(const struct block_layout *layout, const uint8_t *page)
{
    for (uint32_t byte = 0; byte < layout->page.bytes; byte += 64)
        __builtin_prefetch(page + byte, 0, 2);
}

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
        v16i sum = v16i_zero();
        pq->step[h] = attn_quantize(q + h * d, d, QDOT_MAX, qi);
        for (int c = 0; c < d; c += LANES) {
            qdot_pack(qi + c, &pq->digits[h][c / 4]);
            sum = v16i_add(sum, v16i_load(qi + c));
        }
        pq->step_sum[h] = pq->step[h] * v16_reduce_add(v16_from_i32(sum)); /* exact: below 2^24 */
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

SPECIALIZE void pages_logits(const struct page_query *pq, const struct block_layout *layout, const struct kv_page *const *pages, int n, const struct page_ahead *ahead, const int heads,
                             float *s)
{
    for (int i = 0; i < n; i++) {
        const struct subpage_layout *l = page_layout_of(layout, pages[i]);
        if (i < ahead->n)
            page_prefetch(layout, ahead->pages[i]);
        if (ahead->cold && i + PAGES_AHEAD < n)
            page_prefetch(layout, pages[i + PAGES_AHEAD]->page);
        if (l->format == KV_FORMAT_BF16)
            page_logits_bf16(pq, l, pages[i], heads, s + i * SUBPAGE_TOKENS);
        else
            page_logits_k8(pq, l, pages[i], heads, s + i * SUBPAGE_TOKENS);
    }
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

/* What one group of 32 channels multiplies codes by. */
struct value_weights {
    float w[ATTN_HEADS * PAGES_TOKENS] __attribute__((aligned(64))); /* weight * vstep; of a BF16 page the weight itself */
    struct vdot_weights digits;                                      /* K8V4: w = step * integer */
    const uint8_t *values[PAGES_SEGMENT];                            /* K8V4: codes of the group, NULL for a page of another format */
    int n_integer;                                                   /* pages with them */
    float step[ATTN_HEADS];
    float bias[ATTN_HEADS]; /* sum of weight * vmin */
};

SPECIALIZE void value_weights_bf16(struct value_weights *vw, int i, int heads, const float *weights)
{
    for (int h = 0; h < heads; h++)
        v16_store(vw->w + h * PAGES_TOKENS + i * SUBPAGE_TOKENS, v16_load(weights + h * PAGES_TOKENS + i * SUBPAGE_TOKENS));
}

/* weights [heads, PAGES_TOKENS]. */
SPECIALIZE void value_weights_init(struct value_weights *vw, const struct block_layout *layout, const struct kv_page *const *pages, int n, int group, const int heads,
                                   const float *weights)
{
    v16 bias[ATTN_HEADS], largest[ATTN_HEADS];
    UNROLL for (int h = 0; h < heads; h++)
        bias[h] = largest[h] = v16_zero();
    vw->n_integer = 0;
    for (int i = 0; i < n; i++) {
        const struct subpage_layout *l = page_layout_of(layout, pages[i]);
        vw->values[i] = l->format == KV_FORMAT_K8V4 ? pages[i]->page + l->values + group * VALUE_GROUP * 4 : NULL;
        vw->n_integer += vw->values[i] != NULL;
        if (l->format == KV_FORMAT_BF16) {
            value_weights_bf16(vw, i, heads, weights);
            continue;
        }
        v16 step = v16_load_fp16((const uint16_t *)(pages[i]->page + l->value_step) + group * SUBPAGE_TOKENS);
        v16 min = v16_load_fp16((const uint16_t *)(pages[i]->page + l->value_min) + group * SUBPAGE_TOKENS);
        UNROLL for (int h = 0; h < heads; h++) {
            int at = h * PAGES_TOKENS + i * SUBPAGE_TOKENS;
            v16 p = v16_load(weights + at), w = v16_mul(p, step);
            v16_store(vw->w + at, w);
            largest[h] = v16_max(largest[h], w);
            bias[h] = v16_fma(p, min, bias[h]);
        }
    }
    UNROLL for (int h = 0; h < heads; h++) {
        vw->bias[h] = v16_reduce_add(bias[h]);
        vw->step[h] = v16_reduce_max(largest[h]);
    }
}

/* The weights of K8V4 pages as integers; `step`, the largest of them so far, becomes what one stands for. */
SPECIALIZE void value_weights_digits(struct value_weights *vw, int n, const int heads)
{
    UNROLL for (int h = 0; h < heads; h++) {
        const bool any = vw->step[h] > 0x1p-100f;
        const v16 scale = v16_set1(any ? (float)VDOT_MAX / vw->step[h] : 0);
        vw->step[h] = any ? vw->step[h] / (float)VDOT_MAX : 0;
        for (int first = 0; first < n; first += 4) {
            v16i four[4];
            UNROLL for (int i = 0; i < 4; i++)
                four[i] = first + i < n && vw->values[first + i] ? v16_to_i32(v16_mul(v16_load(vw->w + h * PAGES_TOKENS + (first + i) * SUBPAGE_TOKENS), scale)) : v16i_zero();
            vdot_split(four, vw->digits.hi[h][first / 4], vw->digits.lo[h][first / 4]);
        }
    }
}

/* Channels c .. c + 16 cols - 1, all in one group of 32. `total` [heads, 32]: of K8V4 pages, from the group's first of these channels on; NULL without any. */
SPECIALIZE void pages_output(const struct block_layout *layout, const struct kv_page *const *pages, int n, int d, int c, const struct value_weights *vw,
                             const int32_t *total, const int heads, const int cols, float *o)
{
    struct page_output out;
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int j = 0; j < cols; j++)
            out.acc[h][j] = total ? v16_mul(v16_from_i32(v16i_load(total + h * VALUE_GROUP + LANES * j)), v16_set1(vw->step[h])) : v16_zero();
    for (int i = 0; vw->n_integer < n && i < n; i++) {
        const struct subpage_layout *l = page_layout_of(layout, pages[i]);
        const uint8_t *values = pages[i]->page + l->values;
        const float *page_w = vw->w + i * SUBPAGE_TOKENS;
        if (l->format == KV_FORMAT_K8V8)
            page_values_v8(&out, values, d, c, page_w, heads, cols);
        else if (l->format == KV_FORMAT_BF16)
            page_values_bf16(&out, values, d, c, page_w, heads, cols);
    }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int j = 0; j < cols; j++)
            v16_store(o + h * d + c + LANES * j, v16_add(out.acc[h][j], v16_set1(vw->bias[h])));
}

/* The channels of one group. */
SPECIALIZE void pages_group(const struct block_layout *layout, const struct kv_page *const *pages, int n, int d, int group, const float *weights, const int heads,
                            const int cols, float *o)
{
    struct value_weights vw;

    int32_t total[ATTN_HEADS * VALUE_GROUP] __attribute__((aligned(64)));
    value_weights_init(&vw, layout, pages, n, group, heads, weights);
    if (vw.n_integer) {
        value_weights_digits(&vw, n, heads);
        vdot_group(vw.values, n, d, &vw.digits, heads, total);
    }
    for (int half = 0; half < VALUE_GROUP; half += LANES * cols)
        pages_output(layout, pages, n, d, group * VALUE_GROUP + half, &vw, vw.n_integer ? total + half : NULL, heads, cols, o);
}

SPECIALIZE void pages_run(const struct page_query *pq, const struct block_layout *layout, const struct kv_page *const *pages, int n, const struct page_ahead *ahead, const int heads,
                          const int cols, float *ml, float *o)
{
    float s[ATTN_HEADS * PAGES_TOKENS] __attribute__((aligned(64)));
    pages_logits(pq, layout, pages, n, ahead, heads, s);
    for (int h = 0; h < heads; h++)
        attn_weights(s + h * PAGES_TOKENS, n * SUBPAGE_TOKENS, ml + 2 * h);
    for (int group = 0; group < pq->d / VALUE_GROUP; group++)
        pages_group(layout, pages, n, pq->d, group, s, heads, cols, o);
}

/* n <= PAGES_SEGMENT pages in order. ml [heads, 2], o [heads, d]. */
static void attn_pages(const struct page_query *pq, const struct block_layout *layout, const struct kv_page *const *pages, int n, const struct page_ahead *ahead, float *ml,
                       float *o)
{
    switch (pq->heads) {
    case 1:
        pages_run(pq, layout, pages, n, ahead, 1, 2, ml, o);
        break;
    case 2:
        pages_run(pq, layout, pages, n, ahead, 2, 2, ml, o);
        break;
    case 3:
        pages_run(pq, layout, pages, n, ahead, 3, ATTN_WIDE, ml, o);
        break;
    default:
        pages_run(pq, layout, pages, n, ahead, 4, ATTN_WIDE, ml, o);
        break;
    }
}
