/* out = gate / (1 + exp(-gate)) * up, elementwise over n * dim values; a task is a run of values that fits the first-level cache. */
#include "kernels/cpu/ops.h"
#include "kernels/cpu/vmath.h"
#include <errno.h>

enum { SILU_TASK = 4096 };

struct silu_args {
    const float *gate, *up;
    float *out;
    int64_t total;
};

ALWAYS_INLINE v16 silu_times(v16 gate, v16 up)
{
    v16 denominator = v16_add(v16_set1(1.0f), v16_exp(v16_neg(gate)));
    return v16_mul(v16_div(gate, denominator), up);
}

static void silu_task(void *arg, int64_t task, int thread)
{
    const struct silu_args *a = arg;
    int64_t i = task * SILU_TASK, end = i + SILU_TASK < a->total ? i + SILU_TASK : a->total;
    (void)thread;
    for (; i + LANES <= end; i += LANES)
        v16_store(a->out + i, silu_times(v16_load(a->gate + i), v16_load(a->up + i)));
    if (i < end) {
        int n = (int)(end - i);
        v16_store_n(a->out + i, silu_times(v16_load_n(a->gate + i, n), v16_load_n(a->up + i, n)), n);
    }
}

int ISA(silu_mul)(struct stream *s, const float *gate, const float *up, int64_t n, int64_t dim, float *out)
{
    if (n < 0 || dim < 1)
        return -EINVAL;
    struct silu_args args = {.gate = gate, .up = up, .out = out, .total = n * dim};
    cpu_run(s, (args.total + SILU_TASK - 1) / SILU_TASK, silu_task, &args);
    return 0;
}
