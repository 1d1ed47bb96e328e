/* Weights as the GPU keeps them: bf16 [n_rows, ld], row-major, ld = columns rounded up to 8 (cuda_weight_ld), whatever the file had; columns beyond the matrix are zeros.
 * F32 and the quantized formats are rounded to bf16 once, here. The file's bytes go to the device piece by piece and are expanded there, eight columns a thread.
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

enum { EXPAND_COLUMNS = 8 /* of a thread: a store of 16 bytes; they lie in one block of the file, or are one each */ };

/* The format is known when this is compiled: what its branches and divisions cost is many times what the bytes do. */
template <enum weight_dtype DTYPE, int COLS, int BYTES> __global__ void __launch_bounds__(BLOCK_THREADS) weight_expand_kernel(const uint8_t *src, unsigned n_pieces, unsigned row_pieces, int n_cols, uint4 *packed)
{
    EACH_ELEMENT(i, n_pieces)
    {
        const unsigned row = (unsigned)i / row_pieces;
        const int first = (int)((unsigned)i % row_pieces) * EXPAND_COLUMNS;
        const uint8_t *blocks = src + (int64_t)row * (n_cols / COLS) * BYTES;
        float x[EXPAND_COLUMNS];
        UNROLL for (int j = 0; j < EXPAND_COLUMNS; j++) {
            const int c = first + j;
            x[j] = c < n_cols ? weight_value(DTYPE, blocks + (int64_t)(c / COLS) * BYTES, c % COLS) : 0.0f;
        }
        packed[i] = make_uint4(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]), bf16_pair(x[6], x[7]));
    }
}

template <enum weight_dtype DTYPE> static int expand(struct stream *s, const void *src, int64_t n_rows, int64_t n_cols, bf16_t *dst)
{
    constexpr struct weight_file_block file = weight_file_block_of(DTYPE);
    const int64_t row_pieces = cuda_weight_ld(n_cols) / EXPAND_COLUMNS, n = n_rows * row_pieces;
    if (n > INT32_MAX || (uintptr_t)dst % sizeof(uint4))
        return -ENOTSUP;
    return LAUNCH((weight_expand_kernel<DTYPE, file.cols, file.bytes>), blocks_for(n), BLOCK_THREADS, 0, s, (const uint8_t *)src, (unsigned)n, (unsigned)row_pieces, (int)n_cols, (uint4 *)dst);
}

extern "C" bool cuda_weight_stays(enum weight_dtype dtype)
{
    return weight_file_block_of(dtype).cols > 1;
}

extern "C" int cuda_weight_expand(struct stream *s, enum weight_dtype dtype, const void *src, int64_t n_rows, int64_t n_cols, bf16_t *dst)
{
    switch (dtype) {
    case WEIGHT_F32: return expand<WEIGHT_F32>(s, src, n_rows, n_cols, dst);
    case WEIGHT_F16: return expand<WEIGHT_F16>(s, src, n_rows, n_cols, dst);
    case WEIGHT_BF16: return expand<WEIGHT_BF16>(s, src, n_rows, n_cols, dst);
    case WEIGHT_Q8_0: return expand<WEIGHT_Q8_0>(s, src, n_rows, n_cols, dst);
    case WEIGHT_Q4_0: return expand<WEIGHT_Q4_0>(s, src, n_rows, n_cols, dst);
    case WEIGHT_Q4_1: return expand<WEIGHT_Q4_1>(s, src, n_rows, n_cols, dst);
    case WEIGHT_Q5_0: return expand<WEIGHT_Q5_0>(s, src, n_rows, n_cols, dst);
    case WEIGHT_Q4_K: return expand<WEIGHT_Q4_K>(s, src, n_rows, n_cols, dst);
    case WEIGHT_Q5_K: return expand<WEIGHT_Q5_K>(s, src, n_rows, n_cols, dst);
    case WEIGHT_Q6_K: return expand<WEIGHT_Q6_K>(s, src, n_rows, n_cols, dst);
    default: return -EINVAL;
    }
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
