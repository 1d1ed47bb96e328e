/* Weights as the GPU keeps them: bf16 [n_rows, ld], row-major, ld = columns rounded up to 8 (cuda_weight_ld), whatever the file had; columns beyond the matrix are zeros.
 * F32 and the quantized formats are rounded to bf16 once, here. The file's bytes go to the device piece by piece and are expanded there, an element a thread.
 * In the stored form (weight_stored.h) rows of quantized blocks are copied as they are. */
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/weight_stored.h"
#include "kernels/cuda/weight_value.cuh"
#include <errno.h>

enum { PIECE_BYTES = 16 << 20, DIM_MAX = 1 << 28 };

static bool shape_is_valid(enum weight_dtype dtype, int64_t n_rows, int64_t n_cols)
{
    return (unsigned)dtype < WEIGHT_DTYPE_COUNT && n_rows >= 1 && n_rows <= DIM_MAX && n_cols >= 1 && n_cols <= DIM_MAX && n_cols % weight_file_block_of(dtype).cols == 0;
}

/* An element a thread, `row_blocks` blocks a row: in the stored form all weights pass here for every GEMM, and a division of 64 bits for each would take longer than the rest. file.cols is a
 * power of two. */
__global__ void __launch_bounds__(BLOCK_THREADS) weight_expand_kernel(enum weight_dtype dtype, struct weight_file_block file, const uint8_t *src, int n_cols, int ld, unsigned row_blocks, bf16_t *packed)
{
    const int64_t row = blockIdx.x / row_blocks;
    const int c = (int)(blockIdx.x % row_blocks) * BLOCK_THREADS + (int)threadIdx.x, shift = __popc(file.cols - 1);
    const uint8_t *block = src + (row * (n_cols >> shift) + (c >> shift)) * file.bytes;
    if (c < ld)
        packed[row * ld + c] = c < n_cols ? bf16_from_float(weight_value(dtype, block, c & (file.cols - 1))) : 0;
}

extern "C" bool cuda_weight_stays(enum weight_dtype dtype)
{
    return weight_file_block_of(dtype).cols > 1;
}

extern "C" int cuda_weight_expand(struct stream *s, enum weight_dtype dtype, const void *src, int64_t n_rows, int64_t n_cols, bf16_t *dst)
{
    const int64_t ld = cuda_weight_ld(n_cols);
    const int64_t row_blocks = ceil_div64(ld, BLOCK_THREADS);
    if (n_rows * row_blocks > INT32_MAX)
        return -ENOTSUP;
    return LAUNCH(weight_expand_kernel, (unsigned)(n_rows * row_blocks), BLOCK_THREADS, 0, s, dtype, weight_file_block_of(dtype), (const uint8_t *)src, (int)n_cols, (int)ld, (unsigned)row_blocks, dst);
}

extern "C" size_t cuda_weight_bytes(enum weight_dtype dtype, int64_t n_rows, int64_t n_cols)
{
    return shape_is_valid(dtype, n_rows, n_cols) ? (size_t)(n_rows * cuda_weight_ld(n_cols)) * sizeof(bf16_t) : 0;
}

/* src is host memory. */
extern "C" int cuda_weight_pack(struct stream *s, enum weight_dtype dtype, int64_t n_rows, int64_t n_cols, const void *src, void *packed)
{
    void *piece;
    if (!shape_is_valid(dtype, n_rows, n_cols) || !src || !packed)
        return -EINVAL;
    const struct weight_file_block file = weight_file_block_of(dtype);
    const int64_t ld = cuda_weight_ld(n_cols), row_bytes = n_cols / file.cols * file.bytes, rows = PIECE_BYTES / row_bytes;
    if (rows < 1)
        return -ENOTSUP;
    int r = stream_temp(s, (size_t)(row_bytes * (rows < n_rows ? rows : n_rows)), &piece);
    if (r < 0)
        return r;
    for (int64_t row = 0; r == 0 && row < n_rows; row += rows) {
        const int64_t n = n_rows - row < rows ? n_rows - row : rows;
        r = submit_copy(s, piece, (const uint8_t *)src + row * row_bytes, (size_t)(n * row_bytes));
        if (r == 0)
            r = cuda_weight_expand(s, dtype, piece, n, n_cols, (bf16_t *)packed + row * ld);
    }
    return stream_temp_end(s, r);
}

extern "C" size_t cuda_stored_weight_bytes(enum weight_dtype dtype, int64_t n_rows, int64_t n_cols)
{
    const struct weight_file_block file = weight_file_block_of(dtype);
    if (!cuda_weight_stays(dtype) || !shape_is_valid(dtype, n_rows, n_cols))
        return cuda_weight_bytes(dtype, n_rows, n_cols);
    return (size_t)(n_rows * (n_cols / file.cols) * file.bytes);
}

extern "C" int cuda_stored_weight_pack(struct stream *s, enum weight_dtype dtype, int64_t n_rows, int64_t n_cols, const void *src, void *packed)
{
    if (!cuda_weight_stays(dtype))
        return cuda_weight_pack(s, dtype, n_rows, n_cols, src, packed);
    if (!shape_is_valid(dtype, n_rows, n_cols) || !src || !packed)
        return -EINVAL;
    return submit_copy(s, packed, src, cuda_stored_weight_bytes(dtype, n_rows, n_cols));
}
