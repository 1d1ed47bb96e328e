/* Indices of the k largest scores of each row, ascending: radix_select.cuh, a block of 1,024 threads a row. Reads a row five times, the last four from cache where it
 * fits. Shared memory: 1.3 KiB. */
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/radix_select.cuh"
#include <errno.h>

enum { TOPK_THREADS = 1024 };

__global__ void __launch_bounds__(TOPK_THREADS) topk_kernel(const float *scores, int64_t n, int64_t k, int32_t *indices)
{
    __shared__ struct radix_shared r;
    const float *row = scores + (int64_t)blockIdx.x * n;
    radix_find(&r, row, n, k);
    radix_collect(&r, row, n, indices + (int64_t)blockIdx.x * k);
}

extern "C" int cuda_topk(struct stream *s, const float *scores, int n_rows, int64_t n, int64_t k, int32_t *indices)
{
    if (n_rows < 0 || n < 0 || n > INT32_MAX || k < 0 || k > n)
        return -EINVAL;
    if (n_rows == 0 || k == 0)
        return 0;
    const unsigned threads = n >= TOPK_THREADS ? (unsigned)TOPK_THREADS : (unsigned)ceil_div64(n, 32) * 32;
    return LAUNCH(topk_kernel, (unsigned)n_rows, threads, 0, s, scores, n, k, indices);
}
