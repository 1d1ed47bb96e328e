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

static void run(struct stream *s, const float *gate, const float *up, int64_t total, float *out)
{
    struct silu_args args = {.gate = gate, .up = up, .out = out, .total = total};
    cpu_run(s, (total + SILU_TASK - 1) / SILU_TASK, silu_task, &args);
}

int ISA(silu_mul)(struct stream *s, const float *gate, const float *up, int64_t n, int64_t dim, void *out, int64_t ld_out)
{
    if (n < 0 || dim < 1 || ld_out < dim)
        return -EINVAL;
    if (ld_out == dim)
        run(s, gate, up, n * dim, out);
    else
        for (int64_t row = 0; row < n; row++)
            run(s, gate + row * dim, up + row * dim, dim, (float *)out + row * ld_out);
    return 0;
}
