/* What the key biases that are kept out of the cache add to logits (kernels.h: struct key_bias; the expressions of kernels/cpu/key_bias.h). The struct is the host's, its arrays are device memory.
 *
 * The coefficients (A, B) of every query row and marked pair are computed once, by a kernel, into scratch; attention then continues each logit's chain by
 * fma(B, s, fma(A, c, logit)), pair by pair, c and s from the two tables. That is some ten instructions a pair and logit on plain cores, beside 2 d operations on
 * tensor cores: models that have biases mark a few pairs. */
#pragma once
#include "kernels/cuda/cuda_private.h"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/submit.cuh"

enum { BIAS_LD = 2 * KEY_BIAS_PAIRS_MAX, BIAS_WARPS = 4 };

struct attn_bias {
    struct key_bias key;
    float *ab; /* [rows, BIAS_LD], as the op counts its rows; NULL: no biases */
};

/* The coefficients of one query [d] of KV head kv_head, by one warp. */
DEVICE void bias_coefficients(const struct key_bias &key, int kv_head, const float *q, int d, float scale, float *ab)
{
    const int lane = (int)threadIdx.x % 32, first = key.first[kv_head], n = key.first[kv_head + 1] - first;
    for (int i = 0; i < 2 * n; i++) {
        const float *u = key.u + ((int64_t)first * 2 + i) * d;
        float sum = 0;
        for (int c = lane; c < d; c += 32)
            sum = fmaf(q[c] * scale, u[c], sum);
        sum = warp_sum(sum);
        if (lane == 0)
            ab[i] = sum;
    }
}

/* `logit` of a key at `position`, continued. */
DEVICE float bias_continue(const struct key_bias &key, int kv_head, const float *ab, int64_t position, float logit)
{
    const int first = key.first[kv_head], n = key.first[kv_head + 1] - first;
    for (int j = 0; j < n; j++) {
        const int pair = key.pair[first + j];
        const float *coarse = key.coarse + (position / 16 * key.n_freqs + pair) * 2, *fine = key.fine + pair * 32 + position % 16;
        const float c = fmaf(coarse[0], fine[0], -(coarse[1] * fine[16])), s = fmaf(coarse[1], fine[0], coarse[0] * fine[16]);
        logit = fmaf(ab[2 * j], c, logit);
        logit = fmaf(ab[2 * j + 1], s, logit);
    }
    return logit;
}

/* Rows (query, head) of q [n_queries, n_heads, d], a warp each. */
static __global__ void __launch_bounds__(BIAS_WARPS * 32) bias_rows_kernel(const struct attn_bias bias, const float *q, int64_t n_rows, int n_heads, int group, int d, float scale)
{
    const int64_t row = (int64_t)blockIdx.x * BIAS_WARPS + threadIdx.x / 32;
    if (row < n_rows)
        bias_coefficients(bias.key, (int)(row % n_heads) / group, q + row * d, d, scale, bias.ab + row * BIAS_LD);
}

static inline size_t bias_rows_bytes(int64_t n_rows)
{
    return (size_t)n_rows * BIAS_LD * sizeof(float);
}

/* Fills bias.ab, if there is one. */
static inline int bias_rows(struct stream *s, const struct attn_bias &bias, const float *q, int64_t n_queries, int n_heads, int group, int d, float scale)
{
    const int64_t n_rows = n_queries * n_heads;
    if (!bias.ab)
        return 0;
    return LAUNCH(bias_rows_kernel, (unsigned)ceil_div64(n_rows, BIAS_WARPS), BIAS_WARPS * 32, 0, s, bias, q, n_rows, n_heads, group, d, scale);
}
