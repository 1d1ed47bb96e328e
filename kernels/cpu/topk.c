/* Indices of the k largest scores of each row, ascending: radix_select.h, one row a task. */
#include "kernels/cpu/ops.h"
#include "kernels/cpu/radix_select.h"
#include <errno.h>

struct topk_args {
    const float *scores;
    int64_t n, k;
    int32_t *indices;
};

static void topk_row(void *arg, int64_t row, int thread)
{
    const struct topk_args *a = arg;
    (void)thread;
    radix_select(a->scores + row * a->n, a->n, a->k, a->indices + row * a->k);
}

int ISA(topk)(struct stream *s, const float *scores, int n_rows, int64_t n, int64_t k, int32_t *indices)
{
    if (n_rows < 0 || n < 0 || n > INT32_MAX || k < 0 || k > n)
        return -EINVAL;
    struct topk_args a = {.scores = scores, .n = n, .k = k, .indices = indices};
    cpu_run(s, n_rows, topk_row, &a);
    return 0;
}
