/* kernel_ops.sample for a single row. */
#pragma once
#include "kernels/kernels.h"

static inline int sample_one(const struct kernel_ops *ops, struct stream *s, const float *logits, int n_vocab, const struct sample_params *p, struct sample_result *ret_result)
{
    struct sample_row row = {.logits = logits, .params = *p};
    int r = ops->sample(s, &row, 1, n_vocab);

    if (r >= 0)
        r = row.status;
    if (r >= 0)
        *ret_result = row.result;
    return r;
}
