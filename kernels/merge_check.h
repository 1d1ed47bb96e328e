/* What both backends' merge_scores asks of its parameters. On the host; C, and C++ for the .cu file. */
#pragma once
#include "kernels/kernels.h"
#include <errno.h>

enum { MERGE_POOL_MAX = 127 };

static inline int merge_check(const struct score_merge_params *p)
{
    if (p->n_rows < 1 || p->first < 0 || p->first >= p->last || p->last > p->n_columns || p->pool < 1 || p->pool % 2 == 0 || p->row_first[0] != 0)
        return -EINVAL;
    for (int i = 0; i < p->n_rows; i++)
        if (p->row_first[i + 1] <= p->row_first[i])
            return -EINVAL;
    return p->pool > MERGE_POOL_MAX || p->row_first[p->n_rows] > SCORE_PARTS_MAX ? -ENOTSUP : 0;
}
