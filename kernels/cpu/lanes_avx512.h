/* The AVX-512 (F, BW, VL, DQ, VNNI) version of lanes.h. Included by lanes.h alone. */
#pragma once
#include <immintrin.h>

typedef __m512 v16;
typedef __m512i v16i;
typedef __mmask16 v16m;
/* Shifts are written with vector types: the compiler takes the immediate form where the count is a constant. */
typedef uint32_t lanes_u32x16 __attribute__((vector_size(64)));
typedef int32_t lanes_i32x16 __attribute__((vector_size(64)));

ALWAYS_INLINE v16 v16_zero(void) { return _mm512_setzero_ps(); }
ALWAYS_INLINE v16 v16_set1(float x) { return _mm512_set1_ps(x); }
ALWAYS_INLINE v16 v16_load(const float *p) { return _mm512_loadu_ps(p); }
ALWAYS_INLINE void v16_store(float *p, v16 x) { _mm512_storeu_ps(p, x); }
ALWAYS_INLINE v16 v16_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
ALWAYS_INLINE void v16_store_n(float *p, v16 x, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), x); }
ALWAYS_INLINE v16 v16_load_bf16(const uint16_t *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}
ALWAYS_INLINE v16 v16_load_fp16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
ALWAYS_INLINE void v16_store_fp16(uint16_t *p, v16 x)
{
    _mm256_storeu_si256((void *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
ALWAYS_INLINE void v16_store_bf16(uint16_t *p, v16 x)
{
    __m512i u = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF)), odd), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    r = _mm512_mask_or_epi32(r, nan, _mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
    _mm256_storeu_si256((void *)p, _mm512_cvtepi32_epi16(r));
}

ALWAYS_INLINE v16 v16_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
ALWAYS_INLINE v16 v16_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
ALWAYS_INLINE v16 v16_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
ALWAYS_INLINE v16 v16_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
ALWAYS_INLINE v16 v16_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }
ALWAYS_INLINE v16 v16_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
ALWAYS_INLINE v16 v16_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
ALWAYS_INLINE v16 v16_neg(v16 x) { return _mm512_xor_ps(x, _mm512_set1_ps(-0.0f)); }
ALWAYS_INLINE v16 v16_abs(v16 x) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), x); }
ALWAYS_INLINE v16 v16_sqrt(v16 x) { return _mm512_sqrt_ps(x); }

ALWAYS_INLINE v16m v16_eq(v16 a, v16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
ALWAYS_INLINE v16m v16_lt(v16 a, v16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
ALWAYS_INLINE v16m v16_le(v16 a, v16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
ALWAYS_INLINE uint32_t v16m_bits(v16m m) { return m; }
ALWAYS_INLINE v16 v16_select(v16m m, v16 a, v16 b) { return _mm512_mask_blend_ps(m, b, a); }

ALWAYS_INLINE v16 v16_swap1(v16 x) { return _mm512_permute_ps(x, 0xB1); }
ALWAYS_INLINE v16 v16_swap2(v16 x) { return _mm512_permute_ps(x, 0x4E); }
ALWAYS_INLINE v16 v16_swap4(v16 x) { return _mm512_shuffle_f32x4(x, x, 0xB1); }
ALWAYS_INLINE v16 v16_swap8(v16 x) { return _mm512_shuffle_f32x4(x, x, 0x4E); }

ALWAYS_INLINE float v16_reduce_add(v16 x)
{
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

/* Each step adds two halves of two vectors into one, so that 16 sums take 15 additions and no transpose. */
ALWAYS_INLINE v16 reduce_eights(v16 a, v16 b)
{
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE)); /* 8 of a, 8 of b */
}
ALWAYS_INLINE v16 reduce_fours(const v16 *x) /* x[0], x[4], x[8], x[12]: 4 of each */
{
    v16 a = reduce_eights(x[0], x[4]), b = reduce_eights(x[8], x[12]);
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}
ALWAYS_INLINE v16 reduce_twos(v16 a, v16 b)
{
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE)); /* in each quarter 2 of a, 2 of b */
}
ALWAYS_INLINE v16 v16_reduce_add16(const v16 x[16])
{
    v16 a = reduce_twos(reduce_fours(x), reduce_fours(x + 1)), b = reduce_twos(reduce_fours(x + 2), reduce_fours(x + 3));
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
}

ALWAYS_INLINE float v16_reduce_max(v16 x)
{
    __m256 h = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

ALWAYS_INLINE v16i v16i_zero(void) { return _mm512_setzero_si512(); }
ALWAYS_INLINE v16i v16i_set1(int32_t x) { return _mm512_set1_epi32(x); }
ALWAYS_INLINE v16i v16i_load(const void *p) { return _mm512_loadu_si512(p); }
ALWAYS_INLINE void v16i_store(void *p, v16i x) { _mm512_storeu_si512(p, x); }
ALWAYS_INLINE v16i v16i_load_u8(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p)); }
ALWAYS_INLINE v16i v16i_load_i8(const int8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)); }
ALWAYS_INLINE void v16i_store_u8(uint8_t *p, v16i x) { _mm_storeu_si128((void *)p, _mm512_cvtepi32_epi8(x)); }
ALWAYS_INLINE v16i v16i_add(v16i a, v16i b) { return _mm512_add_epi32(a, b); }
ALWAYS_INLINE v16i v16i_sub(v16i a, v16i b) { return _mm512_sub_epi32(a, b); }
ALWAYS_INLINE v16i v16i_mul(v16i a, v16i b) { return _mm512_mullo_epi32(a, b); }
ALWAYS_INLINE v16i v16i_and(v16i a, v16i b) { return _mm512_and_si512(a, b); }
ALWAYS_INLINE v16i v16i_or(v16i a, v16i b) { return _mm512_or_si512(a, b); }
ALWAYS_INLINE v16i v16i_xor(v16i a, v16i b) { return _mm512_xor_si512(a, b); }
ALWAYS_INLINE v16i v16i_shl(v16i x, int n) { return (__m512i)((lanes_u32x16)x << n); }
ALWAYS_INLINE v16i v16i_shr(v16i x, int n) { return (__m512i)((lanes_u32x16)x >> n); }
ALWAYS_INLINE v16i v16i_sar(v16i x, int n) { return (__m512i)((lanes_i32x16)x >> n); }
ALWAYS_INLINE v16m v16i_eq(v16i a, v16i b) { return _mm512_cmpeq_epi32_mask(a, b); }
ALWAYS_INLINE v16i v16i_select(v16m m, v16i a, v16i b) { return _mm512_mask_blend_epi32(m, b, a); }

ALWAYS_INLINE v16i v16_bits(v16 x) { return _mm512_castps_si512(x); }
ALWAYS_INLINE v16 v16_from_bits(v16i x) { return _mm512_castsi512_ps(x); }
ALWAYS_INLINE v16 v16_from_i32(v16i x) { return _mm512_cvtepi32_ps(x); }
ALWAYS_INLINE v16i v16_to_i32(v16 x) { return _mm512_cvtps_epi32(x); }

ALWAYS_INLINE v16i v16i_dot4_u8i8(v16i acc, const uint8_t *u, const int8_t *s)
{
    return _mm512_dpbusd_epi32(acc, _mm512_loadu_si512(u), _mm512_loadu_si512(s));
}
