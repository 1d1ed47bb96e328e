/* out = gate / (1 + exp(-gate)) * up; an element a thread. Reads 8 bytes and writes 4 an element. The bits of kernels/cpu/silu_mul.c. */
#include "kernels/cuda/elementwise.cuh"
#include <errno.h>

__global__ void silu_mul_kernel(const float *gate, const float *up, int64_t n, float *out)
{
    EACH_ELEMENT(i, n)
    {
        const float g = gate[i];
        out[i] = g / (1.0f + exp_float(-g)) * up[i];
    }
}

extern "C" int cuda_silu_mul(struct stream *s, const float *gate, const float *up, int64_t n, int64_t dim, float *out)
{
    if (n < 0 || dim < 1)
        return -EINVAL;
    if (n == 0)
        return 0;
    return LAUNCH(silu_mul_kernel, blocks_for(n * dim), BLOCK_THREADS, 0, s, gate, up, n * dim, out);
}
