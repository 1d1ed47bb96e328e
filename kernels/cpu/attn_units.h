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

/* The query of a unit. */
struct unit_query {
    const float *q; /* [group, d] */
    int group, d;
    float scale;
    struct bias_pairs bias;
};

/* Rows first .. first + n - 1. ml [group, 2], o [group, d]. */
static void unit_rows(const struct unit_query *u, const struct kv_rows *rows, int first, int n, float *ml, float *o)
{
    float scaled[ATTN_HEADS * KV_MAX_DIM] __attribute__((aligned(64)));
    for (int h = 0; h < u->group; h += ATTN_HEADS) {
        int heads = lot_heads(u->group, h);
        lot_query(u->q + h * u->d, heads, u->d, u->scale, scaled);
        attn_rows(scaled, heads, u->d, &u->bias, rows, first, n, ml + 2 * h, o + h * u->d);
    }
}

/* n <= SCORE_SEGMENT pages; summaries of all sub-pages of the sequence. ml [group, 2], page_sum [group, SCORE_SEGMENT]; attn_score.h says what they mean. */
static void unit_scores(const struct unit_query *u, enum page_scorer scorer, const struct block_layout *layout, const struct kv_page *pages, const uint8_t *summaries, int n,
                        float *ml, float *page_sum)
{
    float scaled[ATTN_HEADS * KV_MAX_DIM] __attribute__((aligned(64)));
    for (int h = 0; h < u->group; h += ATTN_HEADS) {
        int heads = lot_heads(u->group, h);
        lot_query(u->q + h * u->d, heads, u->d, u->scale, scaled);
        switch (scorer) {
        case PAGE_SCORER_INDEX2:
            index_score(scaled, heads, &u->bias, layout, pages, n, ml + 2 * h, page_sum + h * SCORE_SEGMENT);
            break;
        case PAGE_SCORER_ORACLE:
            oracle_score(scaled, heads, &u->bias, layout, pages, n, ml + 2 * h, page_sum + h * SCORE_SEGMENT);
            break;
        default:
            summary_score(scorer, scaled, heads, u->d, &u->bias, pages, summaries, n, ml + 2 * h, page_sum + h * SCORE_SEGMENT);
            break;
        }
    }
}

/* ml [group, 2], o [group, d]. */
static void unit_pages(const struct unit_query *u, const struct block_layout *layout, const struct kv_page *const *pages, int n, const struct page_ahead *ahead, float *ml,
                       float *o)
{
    const struct page_ahead none = {0};
    float scaled[ATTN_HEADS * KV_MAX_DIM] __attribute__((aligned(64)));
    for (int h = 0; h < u->group; h += ATTN_HEADS) {
        struct page_query pq;
        int heads = lot_heads(u->group, h);
        lot_query(u->q + h * u->d, heads, u->d, u->scale, scaled);
        page_query_init(&pq, scaled, heads, u->d, &u->bias);
        attn_pages(&pq, layout, pages, n, h == 0 ? ahead : &none, ml + 2 * h, o + h * u->d);
    }
}
