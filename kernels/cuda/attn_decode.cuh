/* What the kernels of decode attention share; attn_decode.cu says how they work together. All pointers are device memory. */
#pragma once
#include "kernels/cuda/cuda_private.h"
#include "kernels/cuda/attn_bias.cuh"
#include "kernels/cuda/page_cache.cuh"
#include "kernels/kv_page.h"

enum {
    DECODE_GROUP_MAX = 16,  /* query heads of a group: the rows of a tensor core's tile */
    DECODE_ROWS = 256,      /* fast rows of one partial */
    DECODE_PAGES = 16,      /* sub-pages of one partial */
    DECODE_PART_ROW = 128,  /* floats between the heads of a partial's o: as many as the weights of 256 rows in bf16 take */
    DECODE_THREADS = 128, DECODE_WARPS = DECODE_THREADS / 32,
    SCORE_WARPS = 8,        /* sub-pages scored by a block */
    CHOOSE_THREADS = 512,
};

struct decode_item {
    const float *q;
    bf16_t *out;
    struct kv_rows rows[2];
    struct slow_pages slow;
    const uint8_t *summaries;
    struct page_counts *counts;
    float *ab;                         /* coefficients of key biases, [group, BIAS_LD]; NULL: none */
    int n_chosen;                      /* the most there can be when blocks are chosen */
    int n_choices;                     /* pages or blocks to choose */
    int scored;                        /* not: the last n_chosen sub-pages with slow tokens are attended */
    int n_row_parts[2], n_page_parts;
    float *ml, *o;                     /* [parts, group, 2]; [parts] of group * DECODE_PART_ROW, with [group, d] at the beginning; rows first */
    float *e, *mass;                   /* when scored: [n_subpages, group] log-sum-exp of a sub-page, [n_subpages]; -inf without slow tokens */
    int32_t *chosen;                   /* [n_chosen] sub-pages, ascending */
    int32_t *blocks;                   /* [n_choices] the chosen blocks; NULL: pages are chosen */
    int32_t *n_now;                    /* how many pages have been chosen; NULL: n_chosen */
};

/* Pages that are attended. */
DEVICE int decode_n_chosen(const struct decode_item &item)
{
    return item.n_now ? *item.n_now : item.n_chosen;
}

/* Which parts of a launch: all, those whose pages were there at once, the others. */
enum decode_pass { DECODE_ALL, DECODE_PRESENT, DECODE_ARRIVED };

struct decode_args {
    const struct decode_item *items;
    struct block_layout layout;
    int group, head_dim;
    float scale;
    enum page_scorer scorer;
    struct key_bias bias;
    /* Parts of pages of all items in a row, page_parts an item: those of a launch begin at first_part. */
    int page_parts, first_part;
    /* Of the launch's pages, DECODE_PAGES a part: where each is to be read, as the page cache says. NULL: where it lies. */
    const uint8_t *const *places;
    enum decode_pass pass; /* DECODE_ALL: there is no page cache */
};

/* o of a part, [group, d]. Between the two passes over fast rows (attn_decode_rows.cuh) their weights are there. */
DEVICE float *decode_part_o(const struct decode_args &a, const struct decode_item &item, int part)
{
    return item.o + (int64_t)part * a.group * DECODE_PART_ROW;
}

/* A logit of head h and a key at `position`, with its bias. */
DEVICE float decode_logit(const struct decode_args &a, const struct decode_item &item, int h, int64_t position, float s)
{
    return item.ab && h < a.group ? bias_continue(a.bias, item.slow.kv_head, item.ab + h * BIAS_LD, position, s) : s;
}
