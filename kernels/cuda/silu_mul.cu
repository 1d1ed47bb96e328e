/* out = gate / (1 + exp(-gate)) * up, rounded to bf16; four elements a thread where rows are whole vectors. Reads 8 bytes and writes 2 an element. Before the rounding the bits of
 * kernels/cpu/silu_mul.c. */
#include "kernels/cuda/elementwise.cuh"
#include <errno.h>

struct silu_args {
    const float *gate, *up;
    int64_t n, dim, ld_out;
    bf16_t *out;
};

DEVICE float silu_times(float gate, float up)
{
    return gate / (1.0f + exp_float(-gate)) * up;
}

__global__ void silu_mul_kernel(const struct silu_args a)
{
    EACH_ELEMENT(i, a.n * a.dim)
    {
        a.out[i / a.dim * a.ld_out + i % a.dim] = bf16_from_float(silu_times(a.gate[i], a.up[i]));
    }
}

/* `row_blocks` blocks a row; nothing is divided but the block's number. */
__global__ void __launch_bounds__(BLOCK_THREADS) silu_mul_vector_kernel(const struct silu_args a, unsigned row_blocks)
{
    const int64_t row = blockIdx.x / row_blocks, c = ((int64_t)(blockIdx.x % row_blocks) * BLOCK_THREADS + threadIdx.x) * 4;
    if (c >= a.dim)
        return;
    const float4 g = *reinterpret_cast<const float4 *>(a.gate + row * a.dim + c), u = *reinterpret_cast<const float4 *>(a.up + row * a.dim + c);
    *reinterpret_cast<uint2 *>(a.out + row * a.ld_out + c) = make_uint2(bf16_pair(silu_times(g.x, u.x), silu_times(g.y, u.y)), bf16_pair(silu_times(g.z, u.z), silu_times(g.w, u.w)));
}

extern "C" int cuda_silu_mul(struct stream *s, const float *gate, const float *up, int64_t n, int64_t dim, void *out, int64_t ld_out)
{
    if (n < 0 || dim < 1 || ld_out < dim)
        return -EINVAL;
    if (n == 0)
        return 0;
    const struct silu_args a = {gate, up, n, dim, ld_out, (bf16_t *)out};
    const int64_t row_blocks = ceil_div64(dim, 4 * BLOCK_THREADS);
    const bool whole = dim % 4 == 0 && ld_out % 4 == 0 && ((uintptr_t)gate | (uintptr_t)up) % sizeof(float4) == 0 && (uintptr_t)out % sizeof(uint2) == 0;
    if (whole && n * row_blocks <= INT32_MAX)
        return LAUNCH(silu_mul_vector_kernel, (unsigned)(n * row_blocks), BLOCK_THREADS, 0, s, a, (unsigned)row_blocks);
    return LAUNCH(silu_mul_kernel, blocks_for(n * dim), BLOCK_THREADS, 0, s, a);
}
