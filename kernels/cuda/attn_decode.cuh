/* What the kernels of decode attention share; attn_decode.cu says how they work together. All pointers are device memory. */
#pragma once
#include "kernels/cuda/cuda_private.h"
#include "kernels/cuda/attn_bias.cuh"

enum {
    DECODE_GROUP_MAX = 16,  /* query heads of a group: the rows of a tensor core's tile */
    DECODE_ROWS = 256,      /* fast rows of one partial */
    DECODE_PAGES = 16,      /* sub-pages of one partial */
    DECODE_THREADS = 128, DECODE_WARPS = DECODE_THREADS / 32,
    SCORE_WARPS = 8,        /* sub-pages scored by a block */
    CHOOSE_THREADS = 512,
};

struct decode_item {
    const float *q;
    float *out;
    struct kv_rows rows[2];
    const struct kv_page *pages;
    const uint8_t *summaries;
    int kv_head;
    float *ab;                         /* coefficients of key biases, [group, BIAS_LD]; NULL: none */
    int n_pages, n_chosen, first_page; /* not scored: pages first_page .. first_page + n_chosen - 1 are attended */
    int n_choices;                     /* pages or blocks to choose */
    int scored;
    int n_row_parts[2], n_page_parts;
    float *ml, *o;                     /* [parts, group, 2], [parts, group, d], rows first */
    float *e, *mass;                   /* when scored: [n_pages, group] log-sum-exp of a page, [n_pages] */
    int32_t *chosen;                   /* [n_chosen], the most there can be when blocks are chosen */
    int32_t *blocks;                   /* [n_choices] first pages of the chosen blocks; NULL: pages are chosen */
    int32_t *n_now;                    /* how many pages have been chosen; NULL: n_chosen */
};

/* Pages that are attended. */
DEVICE int decode_n_chosen(const struct decode_item &item)
{
    return item.n_now ? *item.n_now : item.n_chosen;
}

struct decode_args {
    const struct decode_item *items;
    struct block_layout layout;
    int group, head_dim;
    float scale;
    enum page_scorer scorer;
    struct key_bias bias;
};

/* A logit of head h and a key at `position`, with its bias. */
DEVICE float decode_logit(const struct decode_args &a, const struct decode_item &item, int h, int64_t position, float s)
{
    return item.ab && h < a.group ? bias_continue(a.bias, item.kv_head, item.ab + h * BIAS_LD, position, s) : s;
}
