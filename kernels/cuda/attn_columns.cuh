/* What keys get from queries: the weights exp(logit - m) / l of strips of 16 query rows over a tile of 64 keys, summed down the columns, on tensor cores. For the observation window
 * (window_scores.cu) and for accumulated attention (attn_column_sums.cu). Rows of a strip are queries of one head. */
#pragma once
#include "kernels/cuda/attn_tile.cuh"
#include "kernels/cuda/cuda_private.h"

enum { COLUMN_KEYS = 64, COLUMN_THREADS = 128, COLUMN_WARPS = COLUMN_THREADS / 32 };

/* Shared memory of a block: a tile of keys, a strip of queries for each warp, and the warps' sums. */
template <int D> struct columns_shared {
    enum { LD = D + 8 };
    uint16_t keys[COLUMN_KEYS * LD], strips[COLUMN_WARPS][16 * LD];
    float sums[COLUMN_WARPS][COLUMN_KEYS];
};

/* Queries [first, first + 16) of a head to the warp's strip: query i at q + i * ld; zeros from n on. */
template <int D> DEVICE void column_strip(uint16_t *strip, const float *q, int64_t ld, int first, int n)
{
    const int lane = (int)threadIdx.x % 32;
    __syncwarp(); /* the strip before has been read */
    for (int i = lane; i < 16 * D; i += 32)
        strip[i / D * (D + 8) + i % D] = first + i / D < n ? bf16_from_float(q[(first + i / D) * ld + i % D]) : (uint16_t)0;
    __syncwarp();
}

/* Logits of a strip, each passed through logit(query, key, s) (-inf where the query does not see the key); query counts from the head's first, key from the tile's. */
template <int D, class Logit> DEVICE void column_logits(const uint16_t *strip, const uint16_t *keys, float scale, int first, Logit logit, float s[COLUMN_KEYS / 8][4])
{
    const int lane = (int)threadIdx.x % 32;
    struct attn_tile_rows<D> r;
    attn_tile_queries<D>(r, strip);
    attn_tile_logits<D, COLUMN_KEYS>(r, keys, scale, s);
    UNROLL for (int n = 0; n < COLUMN_KEYS / 8; n++)
        UNROLL for (int i = 0; i < 4; i++)
            s[n][i] = logit(first + lane / 4 + i / 2 * 8, n * 8 + lane % 4 * 2 + i % 2, s[n][i]);
}

/* Adds the weights of a strip's two rows of this lane to the lane's columns: ml(query) gives m, and 1 / l. */
template <class Stats> DEVICE void column_add(const float s[COLUMN_KEYS / 8][4], int first, Stats stats, float sums[COLUMN_KEYS / 8][2])
{
    const int lane = (int)threadIdx.x % 32;
    UNROLL for (int half = 0; half < 2; half++) {
        const float2 ml = stats(first + lane / 4 + half * 8);
        UNROLL for (int n = 0; n < COLUMN_KEYS / 8; n++)
            UNROLL for (int c = 0; c < 2; c++)
                sums[n][c] = fmaf(exp_nonpositive(s[n][2 * half + c] - ml.x), ml.y, sums[n][c]);
    }
}

/* The block's sums of 64 columns: over lanes with the same columns, then over warps, in fixed orders. Thread k < 64 gets column k's. */
template <int D> DEVICE float column_total(struct columns_shared<D> *shared, float sums[COLUMN_KEYS / 8][2])
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    UNROLL for (int n = 0; n < COLUMN_KEYS / 8; n++)
        UNROLL for (int c = 0; c < 2; c++) {
            for (int x = 4; x < 32; x *= 2)
                sums[n][c] += __shfl_xor_sync(0xFFFFFFFFu, sums[n][c], x);
            if (lane < 4)
                shared->sums[warp][n * 8 + lane * 2 + c] = sums[n][c];
        }
    __syncthreads();
    float total = 0;
    for (int w = 0; threadIdx.x < COLUMN_KEYS && w < COLUMN_WARPS; w++)
        total += shared->sums[w][threadIdx.x];
    __syncthreads(); /* sums may be written again */
    return total;
}

/* Calls f<D>(...) for the head dims that have tensor-core kernels. */
#define COLUMNS_EACH_DIM(d, f, ...)              \
    switch (d) {                                 \
    case 32: return f<32>(__VA_ARGS__);          \
    case 64: return f<64>(__VA_ARGS__);          \
    case 80: return f<80>(__VA_ARGS__);          \
    case 96: return f<96>(__VA_ARGS__);          \
    case 128: return f<128>(__VA_ARGS__);        \
    default: return -ENOTSUP;                    \
    }
