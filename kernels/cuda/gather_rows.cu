/* Copies the chosen rows of K and V of one head; a warp a row, 16 bytes a lane where rows allow it (head_dim a multiple of 8), else value by value. `indices` is device memory. */
#include "kernels/cuda/elementwise.cuh"
#include <errno.h>

enum { GATHER_WARPS = 8 };

template <class Piece> __global__ void __launch_bounds__(GATHER_WARPS * 32) gather_rows_kernel(const Piece *k, const Piece *v, const int32_t *indices, int64_t n, int pieces, Piece *dst_k, Piece *dst_v)
{
    const int lane = (int)threadIdx.x % 32;
    for (int64_t row = (int64_t)blockIdx.x * GATHER_WARPS + threadIdx.x / 32; row < n; row += (int64_t)gridDim.x * GATHER_WARPS) {
        const int64_t from = (int64_t)indices[row] * pieces, to = row * pieces;
        for (int i = lane; i < pieces; i += 32) {
            dst_k[to + i] = k[from + i];
            dst_v[to + i] = v[from + i];
        }
    }
}

static bool on_16_bytes(const void *p)
{
    return (uintptr_t)p % 16 == 0;
}

extern "C" int cuda_gather_rows(struct stream *s, const bf16_t *k, const bf16_t *v, const int32_t *indices, int64_t n, int head_dim, bf16_t *dst_k, bf16_t *dst_v)
{
    if (n < 0 || head_dim < 1)
        return -EINVAL;
    if (n == 0)
        return 0;
    const int64_t blocks = ceil_div64(n, GATHER_WARPS);
    const unsigned grid = (unsigned)(blocks < 1 << 16 ? blocks : 1 << 16);
    if (head_dim % 8 == 0 && on_16_bytes(k) && on_16_bytes(v) && on_16_bytes(dst_k) && on_16_bytes(dst_v))
        return LAUNCH(gather_rows_kernel<uint4>, grid, GATHER_WARPS * 32, 0, s, (const uint4 *)k, (const uint4 *)v, indices, n, head_dim / 8, (uint4 *)dst_k, (uint4 *)dst_v);
    return LAUNCH(gather_rows_kernel<bf16_t>, grid, GATHER_WARPS * 32, 0, s, k, v, indices, n, head_dim, dst_k, dst_v);
}
