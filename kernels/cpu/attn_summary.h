/* Scorers minmax, mean and meanvar: sub-pages against a query from their summaries, [vectors, d] fp16 in the model's own basis (page_summaries.c). The query is turned back to
 * that basis once. A sum over d runs in 16 lanes and ends in the usual tree.
 *
 * minmax is Quest's bound on the largest logit (arXiv 2406.10774), without log n, as there. meanvar is the log-mean-exp of keys that are gaussian with a diagonal covariance;
 * the spread is limited, since for a few tokens that are far apart it would promise what no token holds.
 * Key biases are not in the summaries: each token's term is known exactly, and so what they add to a page is. */
#pragma once
#include "kernels/cpu/attn_bias.h"
#include "kernels/cpu/attn_score.h"
#include "kernels/cpu/hadamard.h"
#include "kernels/cpu/kv_expand.h"
#include "kernels/kv_page.h"

/* ln n for the n slow tokens of a page; a page without any has no mass. */
static const float summary_log_n[SUBPAGE_TOKENS + 1] = {-INFINITY, 0.0f,       0.69314718f, 1.09861229f, 1.38629436f, 1.60943791f, 1.79175947f, 1.94591015f, 2.07944154f,
                                                        2.19722458f, 2.30258509f, 2.39789527f, 2.48490665f, 2.56494936f, 2.63905733f, 2.70805020f, 2.77258872f};

SPECIALIZE float summary_minmax(const float *q, int d, const uint16_t *summary)
{
    v16 sum = v16_zero();
    for (int c = 0; c < d; c += LANES) {
        v16 x = v16_load(q + c);
        sum = v16_add(sum, v16_max(v16_mul(x, v16_load_fp16(summary + c)), v16_mul(x, v16_load_fp16(summary + d + c))));
    }
    return v16_reduce_add(sum);
}

SPECIALIZE float summary_mean(const float *q, int d, const uint16_t *summary)
{
    v16 sum = v16_zero();
    for (int c = 0; c < d; c += LANES)
        sum = v16_fma(v16_load(q + c), v16_load_fp16(summary + c), sum);
    return v16_reduce_add(sum);
}

SPECIALIZE float summary_spread(const float *q, int d, const uint16_t *variance)
{
    v16 sum = v16_zero();
    for (int c = 0; c < d; c += LANES) {
        v16 x = v16_load(q + c);
        sum = v16_fma(v16_mul(x, x), v16_load_fp16(variance + c), sum);
    }
    float spread = 0.5f * v16_reduce_add(sum);
    return spread < PAGE_SCORE_SPREAD_MAX ? spread : PAGE_SCORE_SPREAD_MAX;
}

/* What the slow tokens' own terms add to a page's e: log n where there are none. A page without slow tokens has no mass. */
static void summary_terms(enum page_scorer scorer, const struct attn_bias *bias, int heads, const struct kv_page *page, float *ret_terms)
{
    v16 term[ATTN_HEADS];
    if (bias->pairs.n == 0 || page->tokens == 0) {
        float log_n = summary_log_n[__builtin_popcount(page->tokens)];
        for (int h = 0; h < heads; h++)
            ret_terms[h] = scorer == PAGE_SCORER_MINMAX && page->tokens ? 0 : log_n;
        return;
    }
    for (int h = 0; h < ATTN_HEADS; h++)
        term[h] = v16_zero();
    attn_bias_sixteen(bias, page->subpage, ATTN_HEADS, term); /* all of them, as compiled in; the others are zeros */
    for (int h = 0; h < heads; h++) {
        v16 t = attn_mask_tokens(term[h], page->tokens);
        float m = v16_reduce_max(t);
        ret_terms[h] = scorer == PAGE_SCORER_MINMAX ? m : m + vmath_logf(v16_reduce_add(v16_exp_nonpositive(v16_sub(t, v16_set1(m)))));
    }
}

static float summary_logit(enum page_scorer scorer, const float *q, int d, const uint16_t *summary)
{
    switch (scorer) {
    case PAGE_SCORER_MINMAX:
        return summary_minmax(q, d, summary);
    case PAGE_SCORER_MEANVAR:
        return summary_mean(q, d, summary) + summary_spread(q, d, summary + d);
    default:
        return summary_mean(q, d, summary);
    }
}

/* q [heads, d], scale applied; n <= SCORE_SEGMENT pages; `summaries` of the sequence's sub-pages from the first on. ml [heads, 2]: the largest e and the sum over all pages; page_sum
 * [heads, SCORE_SEGMENT]: exp(e - m) of each page, zeros from n on. */
static void summary_score(enum page_scorer scorer, const float *q, int heads, int d, const struct bias_pairs *pairs, const struct kv_page *pages, const uint8_t *summaries, int n, float *ml, float *page_sum)
{
    float own[ATTN_HEADS * KV_MAX_DIM] __attribute__((aligned(64)));
    struct attn_bias bias;
    int block = d & -d;
    attn_bias_init(&bias, pairs, q, heads, d);
    memcpy(own, q, sizeof *own * (size_t)heads * (size_t)d);
    for (int c = 0; c < heads * d; c += block)
        hadamard(own + c, block);
    for (int i = 0; i < n; i++) {
        float terms[ATTN_HEADS];
        summary_terms(scorer, &bias, heads, &pages[i], terms);
        for (int h = 0; h < heads; h++)
            page_sum[h * SCORE_SEGMENT + i] = summary_logit(scorer, own + h * d, d, (const uint16_t *)(summaries + (size_t)pages[i].subpage * page_summary_bytes(scorer, d))) + terms[h];
    }
    for (int h = 0; h < heads; h++) {
        for (int i = n; i < SCORE_SEGMENT; i++)
            page_sum[h * SCORE_SEGMENT + i] = -INFINITY;
        attn_weights(page_sum + h * SCORE_SEGMENT, SCORE_SEGMENT, ml + 2 * h);
    }
}
