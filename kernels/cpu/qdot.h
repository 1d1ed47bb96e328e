/* Integer dot products of key codes with a query, 16 tokens at a time. Integers are exact, so each instruction set may take its own way to the same number.
 *
 * Keys of a sub-page, [d/4][16][4] bytes: sum of code * q with q in +-4064 = 64 * hi + lo, |hi| <= 63, |lo| <= 32 (two digits, because a query of 7 bits
 * alone would lose as much as coding the keys does). AVX-512: two vpdpbusd a step. AVX2: even and odd bytes as int16, two vpmaddwd a step; vpmaddubsw with two
 * digits needs more instructions.
 *
 * Index, [d/16][16][4] bytes of four 2-bit codes: sum of code * q with q in +-127. AVX2 sums in int16: 4 * 762 a group of 16 dims, so up to 8 groups
 * (24,384) before they are widened. */
#pragma once
#include "kernels/cpu/lanes.h"

enum { QDOT_MAX = 64 * 63 + 32, QDOT_INDEX_MAX = 127, QDOT_INDEX_GROUPS = 8 };

/* A query of four dims in the form that qdot_step broadcasts; qdot_pack makes those of 16. */
struct qdot_query {
    uint32_t word[2];
};

ALWAYS_INLINE uint32_t qdot_bytes(const int32_t q[4])
{
    return (uint32_t)(q[0] & 255) | (uint32_t)(q[1] & 255) << 8 | (uint32_t)(q[2] & 255) << 16 | (uint32_t)(q[3] & 255) << 24;
}

#if CPU_ISA_BUILD == 2

typedef v16i qdot_codes;
typedef struct { v16i hi, lo; } qdot_sum;

ALWAYS_INLINE void qdot_pack(const int32_t q[LANES], struct qdot_query ret[LANES / 4])
{
    v16i x = v16i_load(q), hi = _mm512_min_epi32(v16i_sar(v16i_add(x, v16i_set1(32)), 6), v16i_set1(63));
    __m128i high = _mm512_cvtepi32_epi8(hi), low = _mm512_cvtepi32_epi8(v16i_sub(x, v16i_shl(hi, 6)));
    _mm_storeu_si128((void *)ret, _mm_unpacklo_epi32(high, low));
    _mm_storeu_si128((void *)(ret + 2), _mm_unpackhi_epi32(high, low));
}
ALWAYS_INLINE qdot_codes qdot_load(const uint8_t *codes) { return v16i_load(codes); }
ALWAYS_INLINE qdot_sum qdot_zero(void) { return (qdot_sum){v16i_zero(), v16i_zero()}; }
ALWAYS_INLINE qdot_sum qdot_step(qdot_sum sum, qdot_codes codes, const struct qdot_query *q)
{
    sum.hi = _mm512_dpbusd_epi32(sum.hi, codes, v16i_set1((int32_t)q->word[0]));
    sum.lo = _mm512_dpbusd_epi32(sum.lo, codes, v16i_set1((int32_t)q->word[1]));
    return sum;
}
ALWAYS_INLINE v16i qdot_total(qdot_sum sum) { return _mm512_add_epi32(_mm512_slli_epi32(sum.hi, 6), sum.lo); }

typedef struct { v16i field[4]; } qdot_fields;
typedef struct { v16i a, b; } qdot_narrow; /* two chains, whose latency hides behind one another */

ALWAYS_INLINE qdot_fields qdot_index_load(const uint8_t *codes)
{
    v16i x = v16i_load(codes), three = _mm512_set1_epi8(3);
    return (qdot_fields){{_mm512_and_si512(x, three), _mm512_and_si512(_mm512_srli_epi16(x, 2), three), _mm512_and_si512(_mm512_srli_epi16(x, 4), three),
                          _mm512_and_si512(_mm512_srli_epi16(x, 6), three)}};
}
ALWAYS_INLINE qdot_narrow qdot_narrow_zero(void) { return (qdot_narrow){v16i_zero(), v16i_zero()}; }
ALWAYS_INLINE qdot_narrow qdot_index_step(qdot_narrow sum, const qdot_fields *f, const uint32_t q[4])
{
    UNROLL for (int j = 0; j < 4; j += 2) {
        sum.a = _mm512_dpbusd_epi32(sum.a, f->field[j], v16i_set1((int32_t)q[j]));
        sum.b = _mm512_dpbusd_epi32(sum.b, f->field[j + 1], v16i_set1((int32_t)q[j + 1]));
    }
    return sum;
}
ALWAYS_INLINE v16i qdot_widen(v16i total, qdot_narrow sum) { return v16i_add(total, v16i_add(sum.a, sum.b)); }

#elif CPU_ISA_BUILD == 1

typedef struct { v16i even, odd; } qdot_codes;
typedef v16i qdot_sum;

ALWAYS_INLINE void qdot_pack(const int32_t q[LANES], struct qdot_query ret[LANES / 4])
{
    for (int i = 0; i < LANES / 4; i++, q += 4)
        ret[i] = (struct qdot_query){{(uint32_t)(q[0] & 0xFFFF) | (uint32_t)q[2] << 16, (uint32_t)(q[1] & 0xFFFF) | (uint32_t)q[3] << 16}};
}
ALWAYS_INLINE qdot_codes qdot_load(const uint8_t *codes)
{
    v16i x = v16i_load(codes);
    __m256i low = _mm256_set1_epi16(255);
    return (qdot_codes){{_mm256_and_si256(x.lo, low), _mm256_and_si256(x.hi, low)}, {_mm256_srli_epi16(x.lo, 8), _mm256_srli_epi16(x.hi, 8)}};
}
ALWAYS_INLINE qdot_sum qdot_zero(void) { return v16i_zero(); }
ALWAYS_INLINE qdot_sum qdot_step(qdot_sum sum, qdot_codes codes, const struct qdot_query *q)
{
    __m256i even = _mm256_set1_epi32((int32_t)q->word[0]), odd = _mm256_set1_epi32((int32_t)q->word[1]);
    sum.lo = _mm256_add_epi32(sum.lo, _mm256_madd_epi16(codes.even.lo, even));
    sum.hi = _mm256_add_epi32(sum.hi, _mm256_madd_epi16(codes.even.hi, even));
    sum.lo = _mm256_add_epi32(sum.lo, _mm256_madd_epi16(codes.odd.lo, odd));
    sum.hi = _mm256_add_epi32(sum.hi, _mm256_madd_epi16(codes.odd.hi, odd));
    return sum;
}
ALWAYS_INLINE v16i qdot_total(qdot_sum sum) { return sum; }

typedef struct { v16i field[4]; } qdot_fields;
typedef v16i qdot_narrow; /* int16: two partial sums a token */

ALWAYS_INLINE qdot_fields qdot_index_load(const uint8_t *codes)
{
    v16i x = v16i_load(codes);
    __m256i three = _mm256_set1_epi8(3);
    return (qdot_fields){{{_mm256_and_si256(x.lo, three), _mm256_and_si256(x.hi, three)},
                          {_mm256_and_si256(_mm256_srli_epi16(x.lo, 2), three), _mm256_and_si256(_mm256_srli_epi16(x.hi, 2), three)},
                          {_mm256_and_si256(_mm256_srli_epi16(x.lo, 4), three), _mm256_and_si256(_mm256_srli_epi16(x.hi, 4), three)},
                          {_mm256_and_si256(_mm256_srli_epi16(x.lo, 6), three), _mm256_and_si256(_mm256_srli_epi16(x.hi, 6), three)}}};
}
ALWAYS_INLINE qdot_narrow qdot_narrow_zero(void) { return v16i_zero(); }
ALWAYS_INLINE qdot_narrow qdot_index_step(qdot_narrow sum, const qdot_fields *f, const uint32_t q[4])
{
    UNROLL for (int j = 0; j < 4; j++) {
        __m256i bytes = _mm256_set1_epi32((int32_t)q[j]);
        sum.lo = _mm256_add_epi16(sum.lo, _mm256_maddubs_epi16(f->field[j].lo, bytes));
        sum.hi = _mm256_add_epi16(sum.hi, _mm256_maddubs_epi16(f->field[j].hi, bytes));
    }
    return sum;
}
ALWAYS_INLINE v16i qdot_widen(v16i total, qdot_narrow sum)
{
    __m256i one = _mm256_set1_epi16(1);
    return v16i_add(total, (v16i){_mm256_madd_epi16(sum.lo, one), _mm256_madd_epi16(sum.hi, one)});
}

#else

typedef struct { uint8_t byte[64]; } qdot_codes;
typedef v16i qdot_sum;

ALWAYS_INLINE void qdot_pack(const int32_t q[LANES], struct qdot_query ret[LANES / 4])
{
    for (int i = 0; i < LANES / 4; i++, q += 4)
        ret[i] = (struct qdot_query){{(uint32_t)(q[0] & 0xFFFF) | (uint32_t)q[1] << 16, (uint32_t)(q[2] & 0xFFFF) | (uint32_t)q[3] << 16}};
}
ALWAYS_INLINE qdot_codes qdot_load(const uint8_t *codes)
{
    qdot_codes r;
    memcpy(&r, codes, sizeof r);
    return r;
}
ALWAYS_INLINE qdot_sum qdot_zero(void) { return v16i_zero(); }
ALWAYS_INLINE qdot_sum qdot_step(qdot_sum sum, qdot_codes codes, const struct qdot_query *q)
{
    int16_t dim[4];
    memcpy(dim, q, sizeof dim);
    for (int t = 0; t < LANES; t++)
        for (int i = 0; i < 4; i++)
            sum.i[t] += codes.byte[4 * t + i] * dim[i];
    return sum;
}
ALWAYS_INLINE v16i qdot_total(qdot_sum sum) { return sum; }

typedef qdot_codes qdot_fields;
typedef v16i qdot_narrow;

ALWAYS_INLINE qdot_fields qdot_index_load(const uint8_t *codes) { return qdot_load(codes); }
ALWAYS_INLINE qdot_narrow qdot_narrow_zero(void) { return v16i_zero(); }
ALWAYS_INLINE qdot_narrow qdot_index_step(qdot_narrow sum, const qdot_fields *f, const uint32_t q[4])
{
    for (int j = 0; j < 4; j++) {
        int8_t dim[4];
        memcpy(dim, q + j, sizeof dim);
        for (int t = 0; t < LANES; t++)
            for (int i = 0; i < 4; i++)
                sum.i[t] += (f->byte[4 * t + i] >> (2 * j) & 3) * dim[i];
    }
    return sum;
}
ALWAYS_INLINE v16i qdot_widen(v16i total, qdot_narrow sum) { return v16i_add(total, sum); }

#endif
