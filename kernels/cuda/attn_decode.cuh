/* What the kernels of decode attention share; attn_decode.cu says how they work together. All pointers are device memory. */
#pragma once
#include "kernels/cuda/cuda_private.h"

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
    int n_pages, n_chosen, first_page; /* not scored: pages first_page .. first_page + n_chosen - 1 are attended */
    int scored;
    int n_row_parts[2], n_parts;       /* all partials: rows, then pages */
    float *ml, *o;                     /* [n_parts, group, 2], [n_parts, group, d] */
    float *e, *mass;                   /* when scored: [n_pages, group] log-sum-exp of a page, [n_pages] */
    int32_t *chosen;                   /* [n_chosen] */
};

struct decode_args {
    const struct decode_item *items;
    struct block_layout layout;
    int group, head_dim;
    float scale;
};
