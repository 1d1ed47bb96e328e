/* Several partial attentions of the same query rows to one (kernels.h says what a partial is), and the rounding of queries for who wants them in bf16. */
#pragma once
#include "kernels/cuda/cuda_private.h"

enum { PREFILL_SPLITS_MAX = 32 };

struct attn_merge_params {
    const float *o, *ml;     /* [n_parts, n_rows, d] not divided by l (unwritten where l is 0), [n_parts, n_rows, 2]; part 0's o may be out */
    int n_parts;
    const bf16_t *prefix_o;  /* one more: [n_rows, d] divided by l, and its m + log l: row r, head r % n_heads, at prefix_lse[head * prefix_stride + r / n_heads]; NULL: none */
    const float *prefix_lse;
    int64_t prefix_stride;
    float *out;              /* [n_rows, d], divided by l */
    float *ret_ml;           /* [n_rows, 2] or NULL */
    int64_t n_rows;
    int n_heads, d;
};

int attn_merge(struct stream *s, const struct attn_merge_params *p);
int attn_round_queries(struct stream *s, const float *q, int64_t n, bf16_t *out);
