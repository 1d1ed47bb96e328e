/* Integer dot products of 4-bit value codes with weights of their tokens, 32 channels at a time. Integers are exact, so each instruction set may take its own way to
 * the same number.
 *
 * Values of a K8V4 sub-page, [2][d][4] bytes (proto/block_layout.h): four tokens of a channel lie in one 32-bit lane, the next four in the upper nibbles. A weight is
 * 0 <= w <= 32512, w = 256 * hi + lo with 0 <= hi <= 127 and -128 <= lo <= 127; over the tokens of a segment the sums stay below 2^27. AVX-512: a vpdpbusd for each
 * digit and four tokens. AVX2: vpmaddubsw, whose int16 lanes hold two pages (8 * 2 * 15 * 128 = 30,720) before they are widened. */
#pragma once
#include "kernels/cpu/lanes.h"
#include "proto/block_layout.h"

enum { VDOT_MAX = 127 * 256, VDOT_PAGES = 16, VDOT_HEADS = 4, VDOT_QUADS = SUBPAGE_TOKENS / 4 };

/* Digits of the weights of a segment's tokens, for one group of channels. Of each four pages byte [j][p][i] belongs to token 4j+i of page p: what the packing instructions
 * give, with the four tokens of a 32-bit lane side by side. */
enum { VDOT_FOURS = VDOT_PAGES / 4 };
struct vdot_weights {
    uint8_t hi[VDOT_HEADS][VDOT_FOURS][4 * SUBPAGE_TOKENS], lo[VDOT_HEADS][VDOT_FOURS][4 * SUBPAGE_TOKENS];
};

/* The four digits of tokens 4j .. 4j+3 of a page. */
ALWAYS_INLINE int32_t vdot_digits(const uint8_t digits[VDOT_FOURS][4 * SUBPAGE_TOKENS], int page, int j)
{
    int32_t four;
    memcpy(&four, digits[page / 4] + 16 * j + 4 * (page % 4), sizeof four);
    return four;
}

/* vdot_split(weight, hi, lo): digits of the weights of four pages. */
/* vdot_group(values, n, d, w, heads, ret_total): totals of 32 channels over n <= VDOT_PAGES pages. values[i]: the codes of page i from the first of these channels on,
 * NULL for a page to be left out; ret_total [heads][2 * LANES]. */

#if CPU_ISA_BUILD == 2

ALWAYS_INLINE void vdot_split(const v16i weight[4], uint8_t *hi, uint8_t *lo)
{
    const v16i half = _mm512_set1_epi16(128), low = _mm512_set1_epi16(255);
    v16i a = _mm512_packs_epi32(weight[0], weight[1]), b = _mm512_packs_epi32(weight[2], weight[3]);
    v16i_store(hi, _mm512_packus_epi16(_mm512_srli_epi16(_mm512_add_epi16(a, half), 8), _mm512_srli_epi16(_mm512_add_epi16(b, half), 8)));
    v16i_store(lo, _mm512_packus_epi16(v16i_and(a, low), v16i_and(b, low)));
}

/* Four tokens of 32 channels. */
SPECIALIZE void vdot_four(v16i hi[VDOT_HEADS][2], v16i lo[VDOT_HEADS][2], const v16i code[2], const struct vdot_weights *w, int page, int four, const int heads)
{
    UNROLL for (int h = 0; h < heads; h++) {
        v16i weight_hi = v16i_set1(vdot_digits(w->hi[h], page, four)), weight_lo = v16i_set1(vdot_digits(w->lo[h], page, four));
        UNROLL for (int j = 0; j < 2; j++) {
            hi[h][j] = _mm512_dpbusd_epi32(hi[h][j], code[j], weight_hi);
            lo[h][j] = _mm512_dpbusd_epi32(lo[h][j], code[j], weight_lo);
        }
    }
}

SPECIALIZE void vdot_group(const uint8_t *const *values, int n, int d, const struct vdot_weights *w, const int heads, int32_t *ret_total)
{
    const v16i nibble = _mm512_set1_epi8(15);
    v16i hi[VDOT_HEADS][2], lo[VDOT_HEADS][2];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int j = 0; j < 2; j++)
            hi[h][j] = lo[h][j] = v16i_zero();
    for (int i = 0; i < n; i++) {
        if (!values[i])
            continue;
        UNROLL for (int half = 0; half < 2; half++) {
            v16i even[2], odd[2];
            UNROLL for (int j = 0; j < 2; j++) {
                v16i x = v16i_load(values[i] + half * 4 * d + 64 * j);
                even[j] = v16i_and(x, nibble);
                odd[j] = v16i_and(v16i_shr(x, 4), nibble);
            }
            vdot_four(hi, lo, even, w, i, 2 * half, heads);
            vdot_four(hi, lo, odd, w, i, 2 * half + 1, heads);
        }
    }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int j = 0; j < 2; j++)
            v16i_store(ret_total + (2 * h + j) * LANES, v16i_add(v16i_shl(hi[h][j], 8), lo[h][j]));
}

#elif CPU_ISA_BUILD == 1

ALWAYS_INLINE void vdot_split_half(__m256i w0, __m256i w1, __m256i w2, __m256i w3, uint8_t *hi, uint8_t *lo)
{
    const __m256i half = _mm256_set1_epi16(128), low = _mm256_set1_epi16(255);
    __m256i a = _mm256_packs_epi32(w0, w1), b = _mm256_packs_epi32(w2, w3);
    _mm256_storeu_si256((void *)hi, _mm256_packus_epi16(_mm256_srli_epi16(_mm256_add_epi16(a, half), 8), _mm256_srli_epi16(_mm256_add_epi16(b, half), 8)));
    _mm256_storeu_si256((void *)lo, _mm256_packus_epi16(_mm256_and_si256(a, low), _mm256_and_si256(b, low)));
}
ALWAYS_INLINE void vdot_split(const v16i weight[4], uint8_t *hi, uint8_t *lo)
{
    vdot_split_half(weight[0].lo, weight[1].lo, weight[2].lo, weight[3].lo, hi, lo);
    vdot_split_half(weight[0].hi, weight[1].hi, weight[2].hi, weight[3].hi, hi + 32, lo + 32);
}

/* Four tokens of 8 channels. */
SPECIALIZE void vdot_four(__m256i hi[VDOT_HEADS], __m256i lo[VDOT_HEADS], __m256i code, const struct vdot_weights *w, int page, int four, const int heads)
{
    UNROLL for (int h = 0; h < heads; h++) {
        hi[h] = _mm256_add_epi16(hi[h], _mm256_maddubs_epi16(code, _mm256_set1_epi32(vdot_digits(w->hi[h], page, four))));
        lo[h] = _mm256_add_epi16(lo[h], _mm256_maddubs_epi16(code, _mm256_set1_epi32(vdot_digits(w->lo[h], page, four))));
    }
}

/* 8 channels. The totals stay in memory: with four heads the sums of two pages take the registers. */
SPECIALIZE void vdot_eight(const uint8_t *const *values, int n, int d, int c, const struct vdot_weights *w, const int heads, int32_t *total)
{
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int first = 0; first < n; first += 2) {
        __m256i hi[VDOT_HEADS], lo[VDOT_HEADS];
        UNROLL for (int h = 0; h < heads; h++)
            hi[h] = lo[h] = _mm256_setzero_si256();
        for (int i = first; i < n && i < first + 2; i++) {
            if (!values[i])
                continue;
            UNROLL for (int half = 0; half < 2; half++) {
                __m256i x = _mm256_loadu_si256((const void *)(values[i] + (half * d + c) * 4));
                vdot_four(hi, lo, _mm256_and_si256(x, nibble), w, i, 2 * half, heads);
                vdot_four(hi, lo, _mm256_and_si256(_mm256_srli_epi16(x, 4), nibble), w, i, 2 * half + 1, heads);
            }
        }
        UNROLL for (int h = 0; h < heads; h++) {
            int32_t *to = total + 2 * h * LANES + c;
            __m256i high = _mm256_madd_epi16(hi[h], _mm256_set1_epi16(256)), low = _mm256_madd_epi16(lo[h], _mm256_set1_epi16(1));
            _mm256_storeu_si256((void *)to, _mm256_add_epi32(_mm256_loadu_si256((const void *)to), _mm256_add_epi32(high, low)));
        }
    }
}

SPECIALIZE void vdot_group(const uint8_t *const *values, int n, int d, const struct vdot_weights *w, const int heads, int32_t *ret_total)
{
    memset(ret_total, 0, sizeof *ret_total * (size_t)heads * 2 * LANES);
    for (int c = 0; c < VALUE_GROUP; c += 8)
        vdot_eight(values, n, d, c, w, heads, ret_total);
}

#else

static void vdot_split(const v16i weight[4], uint8_t *hi, uint8_t *lo)
{
    for (int p = 0; p < 4; p++)
        for (int t = 0; t < SUBPAGE_TOKENS; t++) {
            const int32_t high = (weight[p].i[t] + 128) >> 8;
            hi[16 * (t / 4) + 4 * p + t % 4] = (uint8_t)high;
            lo[16 * (t / 4) + 4 * p + t % 4] = (uint8_t)(weight[p].i[t] - 256 * high);
        }
}

static int32_t vdot_weight(const struct vdot_weights *w, int head, int page, int token)
{
    int8_t hi[4], lo[4];
    int32_t high = vdot_digits(w->hi[head], page, token / 4), low = vdot_digits(w->lo[head], page, token / 4);
    memcpy(hi, &high, sizeof hi);
    memcpy(lo, &low, sizeof lo);
    return 256 * hi[token % 4] + lo[token % 4];
}

static void vdot_group(const uint8_t *const *values, int n, int d, const struct vdot_weights *w, const int heads, int32_t *ret_total)
{
    memset(ret_total, 0, sizeof *ret_total * (size_t)heads * 2 * LANES);
    for (int i = 0; i < n; i++)
        for (int t = 0; values[i] && t < SUBPAGE_TOKENS; t++)
            for (int h = 0; h < heads; h++) {
                const int32_t weight = vdot_weight(w, h, i, t);
                for (int c = 0; c < 2 * LANES; c++)
                    ret_total[2 * h * LANES + c] += (values[i][(t / 8 * d + c) * 4 + t % 4] >> (t % 8 < 4 ? 0 : 4) & 15) * weight;
            }
}

#endif
