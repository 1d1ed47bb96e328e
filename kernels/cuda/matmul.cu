/* y_i = x W_i^T (+ bias) (+ residual): cuBLAS over bf16 operands with fp32 sums. x comes in bf16. A residual that is y itself is summed by the GEMM, another one and the bias by a pass
 * over y (so y + bias comes last there, which is the CPU's sum but for a rounding).
 * Weights kept as the file has them (weight_stored.h) are expanded in lots of rows into the op's scratch, a GEMM each: the same operands, at the price of a pass over the
 * weights for every call.
 * cuBLAS chooses its algorithm by shape, so, unlike on the CPU, an output's last bits may depend on the number of rows. */
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/weight_stored.h"
#include <errno.h>

enum { MATMUL_OUTS_MAX = 4 };

struct matmul_in {
    const bf16_t *x;
    int64_t n, ld;
};

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

static int gemm(struct stream *s, const struct matmul_in *x, const bf16_t *w, int64_t n_rows, int64_t n_cols, float add, float *y, int64_t ld_y)
{
    const struct gemm_shape g = {x->x, w, x->n, n_rows, n_cols, x->ld, cuda_weight_ld(n_cols), y, ld_y, add};
    return submit_gemm(s, &g);
}

static int gemm_stored(struct stream *s, const struct matmul_in *x, const struct weight *w, float add, float *y, int64_t ld_y)
{
    const int64_t ld = cuda_weight_ld(w->n_cols), lot = CUDA_EXPANDED_BYTES / (ld * (int64_t)sizeof(bf16_t));
    void *expanded;
    int r = lot > 0 ? stream_temp(s, CUDA_EXPANDED_BYTES, &expanded) : -ENOTSUP;
    if (r < 0)
        return r;
    for (int64_t row = 0; r == 0 && row < w->n_rows; row += lot) {
        const int64_t rows = w->n_rows - row < lot ? w->n_rows - row : lot;
        const uint8_t *src = (const uint8_t *)w->packed + cuda_stored_weight_bytes(w->dtype, row, w->n_cols);
        r = cuda_weight_expand(s, w->dtype, src, rows, w->n_cols, (bf16_t *)expanded);
        if (r == 0)
            r = gemm(s, x, (const bf16_t *)expanded, rows, w->n_cols, add, y + row, ld_y);
    }
    return stream_temp_end(s, r);
}

static int matmul_one(struct stream *s, const struct matmul_in *x, const struct matmul_out *out, bool stored)
{
    const struct weight *w = out->w;
    const float add = out->residual == out->y ? 1.0f : 0.0f;
    const float *residual = add == 0 ? out->residual : nullptr;
    int r = stored && cuda_weight_stays(w->dtype) ? gemm_stored(s, x, w, add, out->y, out->ld_y) : gemm(s, x, (const bf16_t *)w->packed, w->n_rows, w->n_cols, add, out->y, out->ld_y);
    if (r == 0 && (out->bias || residual))
        r = LAUNCH(matmul_add_kernel, blocks_for(x->n * w->n_rows), BLOCK_THREADS, 0, s, out->y, x->n, w->n_rows, out->ld_y, out->bias, residual);
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
    return n > INT32_MAX || ld_x > INT32_MAX ? -ENOTSUP : 0;
}

static int matmul(struct stream *s, const void *inputs, int64_t n, int64_t ld_x, const struct matmul_out *outs, int n_outs, bool stored)
{
    const struct matmul_in x = {(const bf16_t *)inputs, n, ld_x};
    int r = check(n, ld_x, outs, n_outs);
    if (r < 0 || n == 0)
        return r;
    r = stream_take_blas(s);
    for (int i = 0; r == 0 && i < n_outs; i++)
        r = matmul_one(s, &x, &outs[i], stored);
    return r;
}

extern "C" int cuda_matmul(struct stream *s, const void *x, int64_t n, int64_t ld_x, const struct matmul_out *outs, int n_outs)
{
    return matmul(s, x, n, ld_x, outs, n_outs, false);
}

extern "C" int cuda_stored_matmul(struct stream *s, const void *x, int64_t n, int64_t ld_x, const struct matmul_out *outs, int n_outs)
{
    return matmul(s, x, n, ld_x, outs, n_outs, true);
}
