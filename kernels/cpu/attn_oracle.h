/* Scorer oracle: the logits of attn_pages.h over every key of every page. What it chooses is what attending everything would find heaviest, so it bounds what any scorer with
 * this budget can reach; it reads as much as it saves. */
#pragma once
#include "kernels/cpu/attn_pages.h"
#include "kernels/cpu/attn_score.h"

SPECIALIZE void oracle_segment_logits(const struct page_query *pq, const struct block_layout *layout, const struct kv_page *pages, int n, const int heads, float *s)
{
    float part[ATTN_HEADS * PAGES_TOKENS] __attribute__((aligned(64)));
    const struct kv_page *list[PAGES_SEGMENT];
    for (int first = 0; first < n; first += PAGES_SEGMENT) {
        int n_part = n - first < PAGES_SEGMENT ? n - first : PAGES_SEGMENT;
        for (int i = 0; i < n_part; i++)
            list[i] = &pages[first + i];
        pages_logits(pq, layout, list, n_part, &(struct page_ahead){.cold = true}, heads, part);
        for (int h = 0; h < heads; h++)
            memcpy(s + (h * SCORE_SEGMENT + first) * LANES, part + h * PAGES_TOKENS, sizeof *s * (size_t)n_part * SUBPAGE_TOKENS);
    }
}

/* As index_score. */
static void oracle_score(const float *q, int heads, const struct bias_pairs *pairs, const struct block_layout *layout, const struct kv_page *pages, int n, float *ml, float *page_sum)
{
    float s[ATTN_HEADS * SCORE_SEGMENT * LANES] __attribute__((aligned(64)));
    struct page_query pq;
    page_query_init(&pq, q, heads, (int)layout->head_dim, pairs);
    switch (heads) {
    case 1:
        oracle_segment_logits(&pq, layout, pages, n, 1, s);
        break;
    case 2:
        oracle_segment_logits(&pq, layout, pages, n, 2, s);
        break;
    case 3:
        oracle_segment_logits(&pq, layout, pages, n, 3, s);
        break;
    default:
        oracle_segment_logits(&pq, layout, pages, n, 4, s);
        break;
    }
    score_page_sums(s, heads, n, ml, page_sum);
}
