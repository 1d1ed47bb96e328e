/* The AVX2 + FMA + F16C version of lanes.h: two registers side by side. Included by lanes.h alone. */
#pragma once
#include <immintrin.h>

typedef struct { __m256 lo, hi; } v16;
typedef struct { __m256i lo, hi; } v16i;
typedef struct { __m256 lo, hi; } v16m;
/* Shifts are written with vector types: the compiler takes the immediate form where the count is a constant. */
typedef uint32_t lanes_u32x8 __attribute__((vector_size(32)));
typedef int32_t lanes_i32x8 __attribute__((vector_size(32)));

ALWAYS_INLINE v16 v16_zero(void) { return (v16){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
ALWAYS_INLINE v16 v16_set1(float x) { return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
ALWAYS_INLINE v16 v16_load(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
ALWAYS_INLINE void v16_store(float *p, v16 x)
{
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
}

/* The masks of the first n lanes, n in 0..16. */
ALWAYS_INLINE v16i lanes_first_n(int n)
{
    __m256i count = _mm256_set1_epi32(n), lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return (v16i){_mm256_cmpgt_epi32(count, lane), _mm256_cmpgt_epi32(count, _mm256_add_epi32(lane, _mm256_set1_epi32(8)))};
}
ALWAYS_INLINE v16 v16_load_n(const float *p, int n)
{
    v16i m = lanes_first_n(n);
    return (v16){_mm256_maskload_ps(p, m.lo), _mm256_maskload_ps(p + 8, m.hi)};
}
ALWAYS_INLINE void v16_store_n(float *p, v16 x, int n)
{
    v16i m = lanes_first_n(n);
    _mm256_maskstore_ps(p, m.lo, x.lo);
    _mm256_maskstore_ps(p + 8, m.hi, x.hi);
}

ALWAYS_INLINE __m256 lanes_half_bf16(const uint16_t *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));
}
ALWAYS_INLINE v16 v16_load_bf16(const uint16_t *p) { return (v16){lanes_half_bf16(p), lanes_half_bf16(p + 8)}; }
ALWAYS_INLINE v16 v16_load_fp16(const uint16_t *p)
{
    return (v16){_mm256_cvtph_ps(_mm_loadu_si128((const void *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p + 8)))};
}
ALWAYS_INLINE void v16_store_fp16(uint16_t *p, v16 x)
{
    _mm_storeu_si128((void *)p, _mm256_cvtps_ph(x.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((void *)(p + 8), _mm256_cvtps_ph(x.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
/* The upper halves, rounded, in the low 16 bits of each lane. */
ALWAYS_INLINE __m256i lanes_round_bf16(__m256 x)
{
    __m256i u = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7FFF)), odd);
    __m256i nan = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    r = _mm256_blendv_epi8(r, nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    return _mm256_srli_epi32(r, 16);
}
ALWAYS_INLINE void v16_store_bf16(uint16_t *p, v16 x)
{
    __m256i packed = _mm256_packus_epi32(lanes_round_bf16(x.lo), lanes_round_bf16(x.hi));
    _mm256_storeu_si256((void *)p, _mm256_permute4x64_epi64(packed, 0xD8));
}

ALWAYS_INLINE v16 v16_add(v16 a, v16 b) { return (v16){_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
ALWAYS_INLINE v16 v16_sub(v16 a, v16 b) { return (v16){_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
ALWAYS_INLINE v16 v16_mul(v16 a, v16 b) { return (v16){_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
ALWAYS_INLINE v16 v16_div(v16 a, v16 b) { return (v16){_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
ALWAYS_INLINE v16 v16_min(v16 a, v16 b) { return (v16){_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
ALWAYS_INLINE v16 v16_max(v16 a, v16 b) { return (v16){_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
ALWAYS_INLINE v16 v16_fma(v16 a, v16 b, v16 c) { return (v16){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
ALWAYS_INLINE v16 v16_neg(v16 x) { return (v16){_mm256_xor_ps(x.lo, _mm256_set1_ps(-0.0f)), _mm256_xor_ps(x.hi, _mm256_set1_ps(-0.0f))}; }
ALWAYS_INLINE v16 v16_abs(v16 x) { return (v16){_mm256_andnot_ps(_mm256_set1_ps(-0.0f), x.lo), _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x.hi)}; }
ALWAYS_INLINE v16 v16_sqrt(v16 x) { return (v16){_mm256_sqrt_ps(x.lo), _mm256_sqrt_ps(x.hi)}; }

ALWAYS_INLINE v16m v16_eq(v16 a, v16 b) { return (v16m){_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ)}; }
ALWAYS_INLINE v16m v16_lt(v16 a, v16 b) { return (v16m){_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)}; }
ALWAYS_INLINE v16m v16_le(v16 a, v16 b) { return (v16m){_mm256_cmp_ps(a.lo, b.lo, _CMP_LE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LE_OQ)}; }
ALWAYS_INLINE uint32_t v16m_bits(v16m m) { return (uint32_t)_mm256_movemask_ps(m.lo) | (uint32_t)_mm256_movemask_ps(m.hi) << 8; }
ALWAYS_INLINE v16 v16_select(v16m m, v16 a, v16 b) { return (v16){_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)}; }

ALWAYS_INLINE v16 v16_swap1(v16 x) { return (v16){_mm256_permute_ps(x.lo, 0xB1), _mm256_permute_ps(x.hi, 0xB1)}; }
ALWAYS_INLINE v16 v16_swap2(v16 x) { return (v16){_mm256_permute_ps(x.lo, 0x4E), _mm256_permute_ps(x.hi, 0x4E)}; }
ALWAYS_INLINE v16 v16_swap4(v16 x) { return (v16){_mm256_permute2f128_ps(x.lo, x.lo, 0x01), _mm256_permute2f128_ps(x.hi, x.hi, 0x01)}; }
ALWAYS_INLINE v16 v16_swap8(v16 x) { return (v16){x.hi, x.lo}; }

ALWAYS_INLINE v16i v16i_add(v16i a, v16i b) { return (v16i){_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
ALWAYS_INLINE v16i v16i_sub(v16i a, v16i b) { return (v16i){_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
ALWAYS_INLINE v16i v16i_mul(v16i a, v16i b) { return (v16i){_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)}; }
ALWAYS_INLINE v16i v16i_and(v16i a, v16i b) { return (v16i){_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
ALWAYS_INLINE v16i v16i_or(v16i a, v16i b) { return (v16i){_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
ALWAYS_INLINE v16i v16i_xor(v16i a, v16i b) { return (v16i){_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
ALWAYS_INLINE v16i v16i_shl(v16i x, int n) { return (v16i){(__m256i)((lanes_u32x8)x.lo << n), (__m256i)((lanes_u32x8)x.hi << n)}; }
ALWAYS_INLINE v16i v16i_shr(v16i x, int n) { return (v16i){(__m256i)((lanes_u32x8)x.lo >> n), (__m256i)((lanes_u32x8)x.hi >> n)}; }
ALWAYS_INLINE v16i v16i_sar(v16i x, int n) { return (v16i){(__m256i)((lanes_i32x8)x.lo >> n), (__m256i)((lanes_i32x8)x.hi >> n)}; }
ALWAYS_INLINE v16m v16i_eq(v16i a, v16i b) { return (v16m){_mm256_castsi256_ps(_mm256_cmpeq_epi32(a.lo, b.lo)), _mm256_castsi256_ps(_mm256_cmpeq_epi32(a.hi, b.hi))}; }
ALWAYS_INLINE v16i v16i_select(v16m m, v16i a, v16i b) { return (v16i){_mm256_blendv_epi8(b.lo, a.lo, _mm256_castps_si256(m.lo)), _mm256_blendv_epi8(b.hi, a.hi, _mm256_castps_si256(m.hi))}; }

ALWAYS_INLINE v16i v16_bits(v16 x) { return (v16i){_mm256_castps_si256(x.lo), _mm256_castps_si256(x.hi)}; }
ALWAYS_INLINE v16 v16_from_bits(v16i x) { return (v16){_mm256_castsi256_ps(x.lo), _mm256_castsi256_ps(x.hi)}; }
ALWAYS_INLINE v16 v16_from_i32(v16i x) { return (v16){_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
ALWAYS_INLINE v16i v16_to_i32(v16 x) { return (v16i){_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)}; }

ALWAYS_INLINE float v16_reduce_add(v16 x)
{
    __m256 h = _mm256_add_ps(x.lo, x.hi);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

/* Each step adds two halves of two vectors into one, so that 16 sums take 29 additions instead of 60 and no transpose. */
ALWAYS_INLINE __m256 reduce_pair(v16 a, v16 b)
{
    __m256 x = _mm256_add_ps(a.lo, a.hi), y = _mm256_add_ps(b.lo, b.hi);
    return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31)); /* 4 of a, 4 of b */
}
ALWAYS_INLINE __m256 reduce_halves(__m256 x, __m256 y)
{
    return _mm256_add_ps(_mm256_shuffle_ps(x, y, 0x44), _mm256_shuffle_ps(x, y, 0xEE)); /* in each half 2 of x, 2 of y */
}
ALWAYS_INLINE __m256 reduce_add8(const v16 x[8])
{
    __m256 a = reduce_halves(reduce_pair(x[0], x[4]), reduce_pair(x[1], x[5])), b = reduce_halves(reduce_pair(x[2], x[6]), reduce_pair(x[3], x[7]));
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD));
}
ALWAYS_INLINE v16 v16_reduce_add16(const v16 x[16]) { return (v16){reduce_add8(x), reduce_add8(x + 8)}; }

ALWAYS_INLINE float v16_reduce_max(v16 x)
{
    __m256 h = _mm256_max_ps(x.lo, x.hi);
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

ALWAYS_INLINE v16i v16i_zero(void) { return (v16i){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
ALWAYS_INLINE v16i v16i_set1(int32_t x) { return (v16i){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
ALWAYS_INLINE v16i v16i_load(const void *p)
{
    return (v16i){_mm256_loadu_si256(p), _mm256_loadu_si256((const void *)((const char *)p + 32))};
}
ALWAYS_INLINE void v16i_store(void *p, v16i x)
{
    _mm256_storeu_si256(p, x.lo);
    _mm256_storeu_si256((void *)((char *)p + 32), x.hi);
}
ALWAYS_INLINE v16i v16i_load_u8(const uint8_t *p)
{
    return (v16i){_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p)), _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)(p + 8)))};
}
ALWAYS_INLINE v16i v16i_load_i8(const int8_t *p)
{
    return (v16i){_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)), _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(p + 8)))};
}
ALWAYS_INLINE void v16i_store_u8(uint8_t *p, v16i x)
{
    __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(x.lo, x.hi), 0xD8);
    _mm_storeu_si128((void *)p, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

ALWAYS_INLINE __m256i lanes_half_dot4(__m256i acc, const void *u, const void *s)
{
    __m256i pairs = _mm256_maddubs_epi16(_mm256_loadu_si256(u), _mm256_loadu_si256(s));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
ALWAYS_INLINE v16i v16i_dot4_u8i8(v16i acc, const uint8_t *u, const int8_t *s)
{
    return (v16i){lanes_half_dot4(acc.lo, u, s), lanes_half_dot4(acc.hi, u + 32, s + 32)};
}
