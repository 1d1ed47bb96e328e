/* One unit of decode attention, for all heads of the group: what a task of attn_decode.c runs. Heads go through in lots of ATTN_HEADS. */
#pragma once
#include "kernels/cpu/attn_index.h"
#include "kernels/cpu/attn_oracle.h"
#include "kernels/cpu/attn_pages.h"
#include "kernels/cpu/attn_rows.h"
#include "kernels/cpu/attn_summary.h"

static int lot_heads(int group, int first)
{
    return group - first < ATTN_HEADS ? group - first : ATTN_HEADS;
}

/* q scale of one lot, [heads, d]. */
static void lot_query(const float *q, int heads, int d, float scale, float *ret_q)
{
    for (int c = 0; c < heads * d; c += LANES)
        v16_store(ret_q + c, v16_mul(v16_load(q + c), v16_set1(scale)));
}

/* ml [group, 2], o [group, d]. */
static void unit_rows(const float *q, int group, int d, float scale, const bf16_t *k, const bf16_t *v, int n, float *ml, float *o)
{
    float scaled[ATTN_HEADS * KV_MAX_DIM] __attribute__((aligned(64)));
    for (int h = 0; h < group; h += ATTN_HEADS) {
        lot_query(q + h * d, lot_heads(group, h), d, scale, scaled);
        attn_rows(scaled, lot_heads(group, h), d, k, v, n, ml + 2 * h, o + h * d);
    }
}

/* n <= SCORE_SEGMENT pages and their summaries. ml [group, 2], page_sum [group, SCORE_SEGMENT]; attn_score.h says what they mean. */
static void unit_scores(const float *q, int group, float scale, enum page_scorer scorer, const struct block_layout *layout, const struct kv_page *pages, const uint8_t *summaries,
                        int n, float *ml, float *page_sum)
{
    int d = (int)layout->head_dim;
    float scaled[ATTN_HEADS * KV_MAX_DIM] __attribute__((aligned(64)));
    for (int h = 0; h < group; h += ATTN_HEADS) {
        int heads = lot_heads(group, h);
        lot_query(q + h * d, heads, d, scale, scaled);
        switch (scorer) {
        case PAGE_SCORER_INDEX2:
            index_score(scaled, heads, layout, pages, n, ml + 2 * h, page_sum + h * SCORE_SEGMENT);
            break;
        case PAGE_SCORER_ORACLE:
            oracle_score(scaled, heads, layout, pages, n, ml + 2 * h, page_sum + h * SCORE_SEGMENT);
            break;
        default:
            summary_score(scorer, scaled, heads, d, pages, summaries, n, ml + 2 * h, page_sum + h * SCORE_SEGMENT);
            break;
        }
    }
}

/* ml [group, 2], o [group, d]. */
static void unit_pages(const float *q, int group, float scale, const struct block_layout *layout, const struct kv_page *const *pages, int n, float *ml, float *o)
{
    int d = (int)layout->head_dim;
    float scaled[ATTN_HEADS * KV_MAX_DIM] __attribute__((aligned(64)));
    for (int h = 0; h < group; h += ATTN_HEADS) {
        struct page_query pq;
        lot_query(q + h * d, lot_heads(group, h), d, scale, scaled);
        page_query_init(&pq, scaled, lot_heads(group, h), d);
        attn_pages(&pq, layout, pages, n, ml + 2 * h, o + h * d);
    }
}
