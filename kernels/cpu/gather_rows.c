/* Copies the chosen rows of K and V of one head, a lot of rows a task. */
#include "kernels/cpu/ops.h"
#include <errno.h>

enum { GATHER_ROWS = 256 }; /* a task: tens of KiB, so that handing it out costs nothing beside it */

struct gather_args {
    const bf16_t *k, *v;
    const int32_t *indices;
    int64_t n;
    size_t row_bytes;
    int64_t d;
    bf16_t *dst_k, *dst_v;
};

static void gather_task(void *arg, int64_t task, int thread)
{
    const struct gather_args *a = arg;
    int64_t end = (task + 1) * GATHER_ROWS < a->n ? (task + 1) * GATHER_ROWS : a->n;
    (void)thread;
    for (int64_t i = task * GATHER_ROWS; i < end; i++) {
        memcpy(a->dst_k + i * a->d, a->k + a->indices[i] * a->d, a->row_bytes);
        memcpy(a->dst_v + i * a->d, a->v + a->indices[i] * a->d, a->row_bytes);
    }
}

int ISA(gather_rows)(struct stream *s, const bf16_t *k, const bf16_t *v, const int32_t *indices, int64_t n, int head_dim, bf16_t *dst_k, bf16_t *dst_v)
{
    if (n < 0 || head_dim < 1)
        return -EINVAL;
    struct gather_args a = {.k = k, .v = v, .indices = indices, .n = n, .row_bytes = sizeof(bf16_t) * (size_t)head_dim, .d = head_dim, .dst_k = dst_k, .dst_v = dst_v};
    cpu_run(s, (n + GATHER_ROWS - 1) / GATHER_ROWS, gather_task, &a);
    return 0;
}
