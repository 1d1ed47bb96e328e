/* y = (x * (1 / sqrt(mean(x^2) + eps))) * gamma, one row a task; the sum of squares runs in 16 lanes. */
#include "kernels/cpu/ops.h"
#include <errno.h>

struct rmsnorm_args {
    const float *x, *gamma;
    float *y, eps;
    int64_t dim;
};

static float sum_of_squares(const float *x, int64_t dim)
{
    v16 sum = v16_zero();
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) {
        v16 v = v16_load(x + i);
        sum = v16_fma(v, v, sum);
    }
    if (i < dim) {
        v16 v = v16_load_n(x + i, (int)(dim - i));
        sum = v16_fma(v, v, sum);
    }
    return v16_reduce_add(sum);
}

static void rmsnorm_row(void *arg, int64_t row, int thread)
{
    const struct rmsnorm_args *a = arg;
    const float *x = a->x + row * a->dim;
    float *y = a->y + row * a->dim;
    (void)thread;
    v16 scale = v16_set1(1.0f / sqrtf(sum_of_squares(x, a->dim) / (float)a->dim + a->eps));
    int64_t i = 0;
    for (; i + LANES <= a->dim; i += LANES)
        v16_store(y + i, v16_mul(v16_mul(v16_load(x + i), scale), v16_load(a->gamma + i)));
    if (i < a->dim) {
        int n = (int)(a->dim - i);
        v16_store_n(y + i, v16_mul(v16_mul(v16_load_n(x + i, n), scale), v16_load_n(a->gamma + i, n)), n);
    }
}

int ISA(rmsnorm)(struct stream *s, const float *x, const float *gamma, float eps, int64_t n, int64_t dim, void *y)
{
    if (n < 0 || dim < 1)
        return -EINVAL;
    struct rmsnorm_args args = {.x = x, .gamma = gamma, .y = y, .eps = eps, .dim = dim};
    cpu_run(s, n, rmsnorm_row, &args);
    return 0;
}
