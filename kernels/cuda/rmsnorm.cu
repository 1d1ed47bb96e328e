/* y = (x * (1 / sqrt(mean(x^2) + eps))) * gamma, rounded to bf16; a block a row. The sum of squares runs in 256 threads, then by the tree of block_sum: an order of its own, the same
 * for every row and batch, but not the CPU's 16 lanes. Shared memory: 32 floats. */
#include "kernels/cuda/elementwise.cuh"
#include <errno.h>

__global__ void __launch_bounds__(BLOCK_THREADS) rmsnorm_kernel(const float *x, const float *gamma, float eps, int64_t dim, bf16_t *y)
{
    __shared__ float part[32];
    const float *row = x + (int64_t)blockIdx.x * dim;
    bf16_t *to = y + (int64_t)blockIdx.x * dim;
    float sum = 0;
    for (int64_t i = threadIdx.x; i < dim; i += BLOCK_THREADS)
        sum = fmaf(row[i], row[i], sum);
    sum = block_sum(sum, part);
    const float scale = 1.0f / sqrtf(sum / (float)dim + eps);
    for (int64_t i = threadIdx.x; i < dim; i += BLOCK_THREADS)
        to[i] = bf16_from_float(row[i] * scale * gamma[i]);
}

extern "C" int cuda_rmsnorm(struct stream *s, const float *x, const float *gamma, float eps, int64_t n, int64_t dim, void *y)
{
    if (n < 0 || dim < 1)
        return -EINVAL;
    if (n > INT32_MAX)
        return -ENOTSUP;
    if (n == 0)
        return 0;
    return LAUNCH(rmsnorm_kernel, (unsigned)n, BLOCK_THREADS, 0, s, x, gamma, eps, dim, (bf16_t *)y);
}
