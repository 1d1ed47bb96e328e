/* y_i = x W_i^T (+ bias) (+ residual): cuBLAS over bf16 operands with fp32 sums. x is rounded to bf16 into the device's fixed scratch, in lots of rows that fit; a residual that is y
 * itself is summed by the GEMM, another one and the bias by a pass over y (so y + bias comes last there, which is the CPU's sum but for a rounding).
 * Weights kept as the file has them (weight_stored.h) are expanded in lots of rows into the other half of that scratch, a GEMM each: the same operands, at the price of a pass over the
 * weights for every call.
 * cuBLAS chooses its algorithm by shape, so, unlike on the CPU, an output's last bits may depend on the number of rows. */
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/weight_stored.h"
#include <errno.h>

enum { MATMUL_OUTS_MAX = 4 };

/* Four columns a thread, `row_blocks` blocks a row; nothing is divided but the block's number. `whole`: rows are whole vectors of four. */
__global__ void __launch_bounds__(BLOCK_THREADS) matmul_round_kernel(const float *x, int64_t n_cols, int64_t ld_x, int64_t ld, unsigned row_blocks, bool whole, bf16_t *y)
{
    const int64_t row = blockIdx.x / row_blocks, c = ((int64_t)(blockIdx.x % row_blocks) * BLOCK_THREADS + threadIdx.x) * 4;
    const float *from = x + row * ld_x + c;
    if (c >= ld)
        return;
    float4 v = make_float4(0, 0, 0, 0);
    if (whole && c < n_cols) {
        v = *reinterpret_cast<const float4 *>(from);
    } else {
        v.x = c < n_cols ? from[0] : 0.0f;
        v.y = c + 1 < n_cols ? from[1] : 0.0f;
        v.z = c + 2 < n_cols ? from[2] : 0.0f;
        v.w = c + 3 < n_cols ? from[3] : 0.0f;
    }
    *reinterpret_cast<uint2 *>(y + row * ld + c) = make_uint2(bf16_pair(v.x, v.y), bf16_pair(v.z, v.w));
}

static int round_rows(struct stream *s, const float *x, int64_t n, int64_t n_cols, int64_t ld_x, int64_t ld, bf16_t *y)
{
    const int64_t row_blocks = ceil_div64(ld, 4 * BLOCK_THREADS);
    const bool whole = n_cols % 4 == 0 && ld_x % 4 == 0 && (uintptr_t)x % sizeof(float4) == 0;
    if (n * row_blocks > INT32_MAX)
        return -ENOTSUP;
    return LAUNCH(matmul_round_kernel, (unsigned)(n * row_blocks), BLOCK_THREADS, 0, s, x, n_cols, ld_x, ld, (unsigned)row_blocks, whole, y);
}

__global__ void matmul_add_kernel(float *y, int64_t n, int64_t n_cols, int64_t ld_y, const float *bias, const float *residual)
{
    EACH_ELEMENT(i, n * n_cols)
    {
        const int64_t at = i / n_cols * ld_y + i % n_cols;
        float sum = y[at];
        if (bias)
            sum += bias[i % n_cols];
        if (residual)
            sum += residual[at];
        y[at] = sum;
    }
}

enum { HALF_BYTES = CUDA_FIXED_SCRATCH_BYTES / 2 }; /* of the fixed scratch: x, then expanded weights */

static int gemm(struct stream *s, const bf16_t *x, int64_t n, const bf16_t *w, int64_t n_rows, int64_t n_cols, float add, float *y, int64_t ld_y)
{
    const struct gemm_shape g = {x, w, n, n_rows, n_cols, cuda_weight_ld(n_cols), y, ld_y, add};
    return submit_gemm(s, &g);
}

static int gemm_stored(struct stream *s, const bf16_t *x, int64_t n, const struct weight *w, float add, float *y, int64_t ld_y)
{
    const int64_t ld = cuda_weight_ld(w->n_cols), lot = HALF_BYTES / (ld * (int64_t)sizeof(bf16_t));
    bf16_t *expanded = (bf16_t *)((uint8_t *)s->device->fixed_scratch + HALF_BYTES);
    int r = 0;
    for (int64_t row = 0; r == 0 && row < w->n_rows; row += lot) {
        const int64_t rows = w->n_rows - row < lot ? w->n_rows - row : lot;
        const uint8_t *src = (const uint8_t *)w->packed + cuda_stored_weight_bytes(w->dtype, row, w->n_cols);
        r = cuda_weight_expand(s, w->dtype, src, rows, w->n_cols, expanded);
        if (r == 0)
            r = gemm(s, x, n, expanded, rows, w->n_cols, add, y + row, ld_y);
    }
    return r;
}

/* Rows [row, row + n) of one output. */
static int matmul_lot(struct stream *s, const bf16_t *x, int64_t row, int64_t n, const struct matmul_out *out, bool stored)
{
    const struct weight *w = out->w;
    float *y = out->y + row * out->ld_y;
    const float add = out->residual == out->y ? 1.0f : 0.0f;
    const float *residual = out->residual && add == 0 ? out->residual + row * out->ld_y : nullptr;
    int r = stored && cuda_weight_stays(w->dtype) ? gemm_stored(s, x, n, w, add, y, out->ld_y) : gemm(s, x, n, (const bf16_t *)w->packed, w->n_rows, w->n_cols, add, y, out->ld_y);
    if (r == 0 && (out->bias || residual))
        r = LAUNCH(matmul_add_kernel, blocks_for(n * w->n_rows), BLOCK_THREADS, 0, s, y, n, w->n_rows, out->ld_y, out->bias, residual);
    return r;
}

static int check(int64_t n, int64_t ld_x, const struct matmul_out *outs, int n_outs)
{
    if (n < 0 || n_outs < 1 || n_outs > MATMUL_OUTS_MAX)
        return -EINVAL;
    for (int i = 0; i < n_outs; i++) {
        const struct weight *w = outs[i].w;
        if (w->n_cols != outs[0].w->n_cols || ld_x < w->n_cols || outs[i].ld_y < w->n_rows)
            return -EINVAL;
        if (w->n_rows > INT32_MAX || w->n_cols > INT32_MAX || outs[i].ld_y > INT32_MAX)
            return -ENOTSUP;
    }
    return cuda_weight_ld(outs[0].w->n_cols) * (int64_t)sizeof(bf16_t) > HALF_BYTES ? -ENOTSUP : 0;
}

static int matmul(struct stream *s, const float *x, int64_t n, int64_t ld_x, const struct matmul_out *outs, int n_outs, bool stored)
{
    void *scratch;
    int r = check(n, ld_x, outs, n_outs);
    if (r < 0 || n == 0)
        return r;
    const int64_t n_cols = outs[0].w->n_cols, ld = cuda_weight_ld(n_cols), lot = HALF_BYTES / (ld * (int64_t)sizeof(bf16_t));
    r = stream_fixed(s, &scratch);
    for (int64_t row = 0; r == 0 && row < n; row += lot) {
        const int64_t rows = n - row < lot ? n - row : lot;
        r = round_rows(s, x + row * ld_x, rows, n_cols, ld_x, ld, (bf16_t *)scratch);
        for (int i = 0; r == 0 && i < n_outs; i++)
            r = matmul_lot(s, (const bf16_t *)scratch, row, rows, &outs[i], stored);
    }
    return r;
}

extern "C" int cuda_matmul(struct stream *s, const float *x, int64_t n, int64_t ld_x, const struct matmul_out *outs, int n_outs)
{
    return matmul(s, x, n, ld_x, outs, n_outs, false);
}

extern "C" int cuda_stored_matmul(struct stream *s, const float *x, int64_t n, int64_t ld_x, const struct matmul_out *outs, int n_outs)
{
    return matmul(s, x, n, ld_x, outs, n_outs, true);
}
