/* Scorers minmax, mean and meanvar: sub-pages against a query from their summaries, [vectors, d] fp16 in the model's own basis (page_summaries.c). The query is turned back to
 * that basis once. A sum over d runs in 16 lanes and ends in the usual tree.
 *
 * minmax is Quest's bound on the largest logit (arXiv 2406.10774), without log n, as there. meanvar is the log-mean-exp of keys that are gaussian with a diagonal covariance;
 * the spread is limited, since for a few tokens that are far apart it would promise what no token holds. */
#pragma once
#include "kernels/cpu/attn_score.h"
#include "kernels/cpu/hadamard.h"
#include "kernels/cpu/kv_expand.h"
#include "kernels/kernels.h"

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

static float summary_logit(enum page_scorer scorer, const float *q, int d, uint16_t tokens, const uint16_t *summary)
{
    float log_n = summary_log_n[__builtin_popcount(tokens)];
    switch (scorer) {
    case PAGE_SCORER_MINMAX:
        return tokens ? summary_minmax(q, d, summary) : -INFINITY;
    case PAGE_SCORER_MEANVAR:
        return summary_mean(q, d, summary) + summary_spread(q, d, summary + d) + log_n;
    default:
        return summary_mean(q, d, summary) + log_n;
    }
}

/* q [heads, d], scale applied; n <= SCORE_SEGMENT pages, their summaries side by side. ml [heads, 2]: the largest e and the sum over all pages; page_sum
 * [heads, SCORE_SEGMENT]: exp(e - m) of each page, zeros from n on. */
static void summary_score(enum page_scorer scorer, const float *q, int heads, int d, const struct kv_page *pages, const uint8_t *summaries, int n, float *ml, float *page_sum)
{
    float own[ATTN_HEADS * KV_MAX_DIM] __attribute__((aligned(64)));
    int block = d & -d;
    memcpy(own, q, sizeof *own * (size_t)heads * (size_t)d);
    for (int c = 0; c < heads * d; c += block)
        hadamard(own + c, block);
    for (int h = 0; h < heads; h++) {
        float *e = page_sum + h * SCORE_SEGMENT;
        for (int i = 0; i < SCORE_SEGMENT; i++)
            e[i] = i < n ? summary_logit(scorer, own + h * d, d, pages[i].tokens, (const uint16_t *)(summaries + (size_t)i * page_summary_bytes(scorer, d))) : -INFINITY;
        attn_weights(e, SCORE_SEGMENT, ml + 2 * h);
    }
}
