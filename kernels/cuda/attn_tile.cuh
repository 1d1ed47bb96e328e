/* Attention of 16 query rows by one warp over keys and values in shared memory, on tensor cores: mma.sync 16x8x16 in bf16 with fp32 sums, online softmax
 * (FlashAttention). Both prefill and decode are loops around attn_tile_step.
 *
 * Rows of shared tiles are D + 8 elements apart: 16 bytes of padding, so that the eight rows of an ldmatrix lie in different banks (D * 2 bytes is a multiple of 32).
 * A lane holds, of its 16 rows, rows g = lane / 4 and g + 8, and of each group of 8 keys or dims columns 2 (lane % 4) and the next.
 * Rounding: queries, weights exp(s - m) and values to bf16, everything else fp32; base e, own exp. */
#pragma once
#include "kernels/cuda/math.cuh"

template <int D> struct attn_tile_rows {
    uint32_t q[D / 16][4]; /* A fragments of the queries */
    float o[D / 8][4];     /* not divided by l */
    float m[2], l[2];      /* of rows g and g + 8; l of this lane's keys alone until attn_tile_sum */
};

template <int D> DEVICE void attn_tile_init(struct attn_tile_rows<D> &r)
{
    UNROLL for (int i = 0; i < D / 8; i++)
        UNROLL for (int j = 0; j < 4; j++)
            r.o[i][j] = 0;
    r.m[0] = r.m[1] = -INFINITY;
    r.l[0] = r.l[1] = 0;
}

/* Queries from shared memory, [16, D + 8]. */
template <int D> DEVICE void attn_tile_queries(struct attn_tile_rows<D> &r, const uint16_t *q)
{
    const int lane = (int)threadIdx.x % 32;
    UNROLL for (int k = 0; k < D / 16; k++)
        load_matrix_x4(r.q[k], q + lane % 16 * (D + 8) + k * 16 + lane / 16 * 8);
}

/* Logits of KEYS keys (a multiple of 16), scale applied. */
template <int D, int KEYS> DEVICE void attn_tile_logits(const struct attn_tile_rows<D> &r, const uint16_t *keys, float scale, float s[KEYS / 8][4])
{
    const int lane = (int)threadIdx.x % 32;
    UNROLL for (int n = 0; n < KEYS / 8; n++)
        UNROLL for (int i = 0; i < 4; i++)
            s[n][i] = 0;
    UNROLL for (int k = 0; k < D / 16; k++)
        UNROLL for (int n = 0; n < KEYS / 16; n++) {
            uint32_t b[4]; /* 16 keys by 16 dims: keys 0..7 in b[0..1], 8..15 in b[2..3] */
            load_matrix_x4(b, keys + (n * 16 + lane % 8 + lane / 16 * 8) * (D + 8) + k * 16 + lane / 8 % 2 * 8);
            mma_bf16(s[2 * n], r.q[k], b, s[2 * n]);
            mma_bf16(s[2 * n + 1], r.q[k], b + 2, s[2 * n + 1]);
        }
    UNROLL for (int n = 0; n < KEYS / 8; n++)
        UNROLL for (int i = 0; i < 4; i++)
            s[n][i] *= scale;
}

/* Logits to weights; m, l and o move to the new maxima. A row that has seen nothing keeps m = -inf, l = 0. */
template <int D, int KEYS> DEVICE void attn_tile_weights(struct attn_tile_rows<D> &r, float s[KEYS / 8][4])
{
    UNROLL for (int half = 0; half < 2; half++) {
        float m = r.m[half], sum = 0;
        UNROLL for (int n = 0; n < KEYS / 8; n++)
            m = fmaxf(m, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
        for (int x = 1; x < 4; x *= 2) /* the four lanes of a row */
            m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, x));
        const float shrink = exp_nonpositive(r.m[half] - m); /* -inf - -inf is NaN, and that gives 0 */
        UNROLL for (int n = 0; n < KEYS / 8; n++)
            UNROLL for (int c = 2 * half; c < 2 * half + 2; c++) {
                s[n][c] = exp_nonpositive(s[n][c] - m);
                sum += s[n][c];
            }
        r.l[half] = fmaf(r.l[half], shrink, sum);
        r.m[half] = m;
        UNROLL for (int i = 0; i < D / 8; i++) {
            r.o[i][2 * half] *= shrink;
            r.o[i][2 * half + 1] *= shrink;
        }
    }
}

/* o += weights * values of 16 keys, the weights as the A fragment that attn_tile_pack makes. */
template <int D> DEVICE void attn_tile_values(struct attn_tile_rows<D> &r, const uint32_t weights[4], const uint16_t *values)
{
    const int lane = (int)threadIdx.x % 32;
    UNROLL for (int n = 0; n < D / 16; n++) {
        uint32_t b[4]; /* 16 keys by 16 dims */
        load_matrix_x4_transposed(b, values + lane % 16 * (D + 8) + n * 16 + lane / 16 * 8);
        mma_bf16(r.o[2 * n], weights, b, r.o[2 * n]);
        mma_bf16(r.o[2 * n + 1], weights, b + 2, r.o[2 * n + 1]);
    }
}

/* Rounds the weights of 16 keys: [0] and [2] are of row g, keys 2 (lane % 4) and 8 more, [1] and [3] the same of row g + 8. */
DEVICE void attn_tile_pack(const float s[2][4], uint32_t weights[4])
{
    UNROLL for (int i = 0; i < 4; i++)
        weights[i] = bf16_pair(s[i / 2][i % 2 * 2], s[i / 2][i % 2 * 2 + 1]);
}

/* o += weights * values. */
template <int D, int KEYS> DEVICE void attn_tile_output(struct attn_tile_rows<D> &r, const float s[KEYS / 8][4], const uint16_t *values)
{
    UNROLL for (int k = 0; k < KEYS / 16; k++) {
        uint32_t weights[4];
        attn_tile_pack(s + 2 * k, weights);
        attn_tile_values<D>(r, weights, values + k * 16 * (D + 8));
    }
}

/* logit(row, key, s): what the logit s of row `row` (0..15) and key `key` (0..KEYS - 1) of the tile comes to: -inf where the row does not see the key. Keys and values that nobody sees must
 * still be finite. */
template <int D, int KEYS, class Logit>
DEVICE void attn_tile_step(struct attn_tile_rows<D> &r, const uint16_t *keys, const uint16_t *values, float scale, Logit logit)
{
    const int lane = (int)threadIdx.x % 32;
    float s[KEYS / 8][4];
    attn_tile_logits<D, KEYS>(r, keys, scale, s);
    UNROLL for (int n = 0; n < KEYS / 8; n++)
        UNROLL for (int i = 0; i < 4; i++)
            s[n][i] = logit(lane / 4 + i / 2 * 8, n * 8 + lane % 4 * 2 + i % 2, s[n][i]);
    attn_tile_weights<D, KEYS>(r, s);
    attn_tile_output<D, KEYS>(r, s, values);
}

/* Sums l over the lanes of each row. Once, at the end. */
template <int D> DEVICE void attn_tile_sum(struct attn_tile_rows<D> &r)
{
    UNROLL for (int half = 0; half < 2; half++)
        for (int x = 1; x < 4; x *= 2)
            r.l[half] += __shfl_xor_sync(0xFFFFFFFFu, r.l[half], x);
}

/* Copies rows of D bf16 to a shared tile by all threads of the block, asynchronously; rows from n_rows on become zeros. `rows` on 16 bytes. */
template <int D> DEVICE void attn_tile_copy(uint16_t *tile, const uint16_t *rows, int n_rows, int n_tile)
{
    for (int i = (int)threadIdx.x; i < n_tile * (D / 8); i += (int)blockDim.x) {
        const int row = i / (D / 8), c = i % (D / 8) * 8;
        copy_async16(tile + row * (D + 8) + c, rows + (row < n_rows ? (int64_t)row * D + c : 0), row < n_rows);
    }
}

/* Rounds rows of D floats to a shared tile; rows from n_rows on become zeros. row(i): where row i is. */
template <int D, class Row> DEVICE void attn_tile_round(uint16_t *tile, int n_rows, int n_tile, Row row)
{
    for (int i = (int)threadIdx.x; i < n_tile * D; i += (int)blockDim.x)
        tile[i / D * (D + 8) + i % D] = i / D < n_rows ? bf16_from_float(row(i / D)[i % D]) : (uint16_t)0;
}
