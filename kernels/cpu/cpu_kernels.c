/* The CPU's op table: each slot passes the call on to the table of the device's instruction set. */
#include "kernels/cpu/cpu_private.h"

static int rmsnorm(struct stream *s, const float *x, const float *gamma, float eps, int64_t n, int64_t dim, float *y)
{
    return s->device->ops->rmsnorm(s, x, gamma, eps, n, dim, y);
}

static int silu_mul(struct stream *s, const float *gate, const float *up, int64_t n, int64_t dim, float *out)
{
    return s->device->ops->silu_mul(s, gate, up, n, dim, out);
}

const struct kernel_ops *cpu_kernel_ops(void)
{
    static const struct kernel_ops ops = {
        .rmsnorm = rmsnorm,
        .silu_mul = silu_mul,
    };
    return &ops;
}
