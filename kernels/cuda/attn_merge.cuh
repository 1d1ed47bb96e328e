/* Several partial attentions of the same query rows to one (kernels.h says what a partial is), and the rounding of queries for who wants them in bf16. */
#pragma once
#include "kernels/cuda/cuda_private.h"
#include "kernels/cuda/math.cuh"

struct attn_merge_params {
    const float *o, *ml;     /* [n_parts, n_rows, d] not divided by l (unwritten where l is 0), [n_parts, n_rows, 2] */
    int n_parts;
    bf16_t *out;             /* [n_rows, d], divided by l */
    float *ret_ml;           /* [n_rows, 2] or NULL */
    int64_t n_rows;
    int d;
};

/* exp(m - max), 0 for an empty part. */
DEVICE float merge_weight(float m, float max)
{
    return m == -INFINITY ? 0.0f : exp_nonpositive(m - max);
}

int attn_merge(struct stream *s, const struct attn_merge_params *p);
int attn_round_queries(struct stream *s, const float *q, int64_t n, bf16_t *out);
