/* The table of attn_pieces.h for one instruction set. */
#include "kernels/cpu/attn_pieces.h"
#include "kernels/cpu/attn_units.h"
#include "kernels/cpu/lse_merge.h"

static void piece_rows(const float *q, int group, int d, float scale, const bf16_t *k, const bf16_t *v, int n, float *ml, float *o)
{
    const struct unit_query u = {.q = q, .group = group, .d = d, .scale = scale};
    const struct kv_rows rows = {.k = k, .v = v, .n = n};
    unit_rows(&u, &rows, 0, n, ml, o);
}

static void piece_index(const float *q, int group, float scale, const struct block_layout *layout, const struct kv_page *pages, int n, float *ml, float *page_sum)
{
    float padded[ATTN_HEADS * SCORE_SEGMENT];
    int d = (int)layout->head_dim;
    for (int first = 0; first < group; first += ATTN_HEADS) {
        const struct unit_query u = {.q = q + first * d, .group = lot_heads(group, first), .d = d, .scale = scale};
        unit_scores(&u, PAGE_SCORER_INDEX2, layout, pages, NULL, n, ml + 2 * first, padded);
        for (int h = 0; h < u.group; h++)
            memcpy(page_sum + (first + h) * n, padded + h * SCORE_SEGMENT, sizeof *padded * (size_t)n);
    }
}

static void piece_pages(const float *q, int group, float scale, const struct block_layout *layout, const struct kv_page *pages, int n, float *ml, float *o)
{
    const struct unit_query u = {.q = q, .group = group, .d = (int)layout->head_dim, .scale = scale};
    const struct kv_page *list[PAGES_SEGMENT];
    for (int i = 0; i < n; i++)
        list[i] = &pages[i];
    unit_pages(&u, layout, list, n, &(struct page_ahead){.cold = true}, ml, o);
}

static void piece_merge(const float *ml, const float *o, int n, int d, float *out, float *ret_m, float *ret_l)
{
    lse_merge(ml, 2, o, d, n, d, out, ret_m, ret_l);
}

const struct attn_pieces ISA(attn_pieces) = {
    .rows_max = ROWS_SEGMENT,
    .index_pages_max = SCORE_SEGMENT,
    .pages_max = PAGES_SEGMENT,
    .rows = piece_rows,
    .index = piece_index,
    .pages = piece_pages,
    .merge = piece_merge,
};
