/* Expands bf16 rows of K and V into fp32 panels for panel_gemm.h. bf16 is the upper half of an fp32, so this is exact. */
#pragma once
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/transpose16.h"
#include <stdbool.h>

enum { KV_MAX_DIM = 256 };

/* The 32 dims from c on of 16 rows, 16 of them if that is all there is; rows from n_rows on are zeros. Two dims are one 32-bit lane until the transpose is done, which
 * halves the shuffles. */
#if CPU_ISA_BUILD == 1
/* In blocks of 8 keys by 16 dims, which fit the registers. */
SPECIALIZE void kv_expand_keys_part(const uint16_t *keys, int64_t ld, int n_rows, int d, int c, float *panel)
{
    const __m256i upper = _mm256_set1_epi32((int32_t)0xFFFF0000u);
    for (int dim = c; dim < d && dim < c + 2 * LANES; dim += LANES)
        UNROLL for (int first = 0; first < LANES; first += 8) {
            __m256i r[8];
            UNROLL for (int i = 0; i < 8; i++)
                r[i] = first + i < n_rows ? _mm256_loadu_si256((const void *)(keys + (first + i) * ld + dim)) : _mm256_setzero_si256();
            transpose8(r);
            UNROLL for (int i = 0; i < 8; i++) {
                float *to = panel + (dim + 2 * i) * LANES + first;
                _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_slli_epi32(r[i], 16)));
                _mm256_storeu_ps(to + LANES, _mm256_castsi256_ps(_mm256_and_si256(r[i], upper)));
            }
        }
}
#else
SPECIALIZE void kv_expand_keys_part(const uint16_t *keys, int64_t ld, int n_rows, int d, int c, float *panel)
{
    const v16i upper = v16i_set1((int32_t)0xFFFF0000u);
    v16i r[LANES];
    bool half = c + LANES == d;
    UNROLL for (int i = 0; i < LANES; i++) {
        if (i >= n_rows) {
            r[i] = v16i_zero();
        } else if (half) {
            uint16_t padded[2 * LANES] = {0};
            memcpy(padded, keys + i * ld + c, LANES * sizeof *padded);
            r[i] = v16i_load(padded);
        } else {
            r[i] = v16i_load(keys + i * ld + c);
        }
    }
    transpose16(r);
    UNROLL for (int i = 0; i < LANES; i++) {
        if (half && i >= LANES / 2)
            break;
        v16_store(panel + (c + 2 * i) * LANES, v16_from_bits(v16i_shl(r[i], 16)));
        v16_store(panel + (c + 2 * i + 1) * LANES, v16_from_bits(v16i_and(r[i], upper)));
    }
}
#endif

/* Sixteen keys as a panel [d][16]: key i in lane i. Rows from n_rows (0..16) on are zeros and are not read. d is a multiple of 16, at most KV_MAX_DIM. */
SPECIALIZE void kv_expand_keys16(const uint16_t *keys, int64_t ld, int n_rows, int d, float *panel)
{
    for (int c = 0; c < d; c += 2 * LANES)
        kv_expand_keys_part(keys, ld, n_rows, d, c, panel);
}

/* n_panels panels of 16 keys; rows from n_rows on are zeros. */
static inline __attribute__((unused)) void kv_expand_keys(const uint16_t *keys, int64_t ld, int n_rows, int n_panels, int d, float *panels)
{
    for (int p = 0; p < n_panels; p++) {
        int n = n_rows - p * LANES;
        const uint16_t *rows = keys + (n > 0 ? p * LANES * ld : 0);
        if (n >= LANES)
            kv_expand_keys16(rows, ld, LANES, d, panels + (int64_t)p * LANES * d);
        else
            kv_expand_keys16(rows, ld, n > 0 ? n : 0, d, panels + (int64_t)p * LANES * d);
    }
}

/* Values as panels [d/16][n_padded][16]: channel in the lane. Rows from n_rows on are zeros. */
static inline __attribute__((unused)) void kv_expand_values(const uint16_t *values, int64_t ld, int n_rows, int n_padded, int d, float *panels)
{
    for (int i = 0; i < n_rows; i++)
        for (int c = 0; c < d; c += LANES)
            v16_store(panels + (int64_t)c * n_padded + i * LANES, v16_load_bf16(values + i * ld + c));
    for (int i = n_rows; i < n_padded; i++)
        for (int c = 0; c < d; c += LANES)
            v16_store(panels + (int64_t)c * n_padded + i * LANES, v16_zero());
}
