/* The plain C version of lanes.h, the reference for the others. Included by lanes.h alone. */
#pragma once

typedef struct { float f[16]; } v16;
typedef struct { int32_t i[16]; } v16i;
typedef struct { uint8_t m[16]; } v16m;

#define EACH_LANE for (int l = 0; l < 16; l++)
#define LANES_1(name, expr) ALWAYS_INLINE v16 name(v16 x) { v16 r; EACH_LANE r.f[l] = (expr); return r; }
#define LANES_2(name, expr) ALWAYS_INLINE v16 name(v16 a, v16 b) { v16 r; EACH_LANE r.f[l] = (expr); return r; }
#define LANES_I2(name, expr) ALWAYS_INLINE v16i name(v16i a, v16i b) { v16i r; EACH_LANE r.i[l] = (int32_t)(expr); return r; }
#define LANES_CMP(name, expr) ALWAYS_INLINE v16m name(v16 a, v16 b) { v16m r; EACH_LANE r.m[l] = (expr); return r; }

ALWAYS_INLINE v16 v16_set1(float x) { v16 r; EACH_LANE r.f[l] = x; return r; }
ALWAYS_INLINE v16 v16_zero(void) { return v16_set1(0.0f); }
ALWAYS_INLINE v16 v16_load(const float *p) { v16 r; memcpy(&r, p, sizeof r); return r; }
ALWAYS_INLINE void v16_store(float *p, v16 x) { memcpy(p, &x, sizeof x); }
ALWAYS_INLINE v16 v16_load_n(const float *p, int n) { v16 r = v16_zero(); for (int l = 0; l < n; l++) r.f[l] = p[l]; return r; }
ALWAYS_INLINE void v16_store_n(float *p, v16 x, int n) { for (int l = 0; l < n; l++) p[l] = x.f[l]; }
ALWAYS_INLINE v16 v16_load_bf16(const uint16_t *p) { v16 r; EACH_LANE r.f[l] = bf16_to_float(p[l]); return r; }
ALWAYS_INLINE v16 v16_load_fp16(const uint16_t *p) { v16 r; EACH_LANE r.f[l] = fp16_to_float(p[l]); return r; }
ALWAYS_INLINE void v16_store_bf16(uint16_t *p, v16 x) { EACH_LANE p[l] = bf16_from_float(x.f[l]); }
ALWAYS_INLINE void v16_store_fp16(uint16_t *p, v16 x) { EACH_LANE p[l] = fp16_from_float(x.f[l]); }

LANES_2(v16_add, a.f[l] + b.f[l])
LANES_2(v16_sub, a.f[l] - b.f[l])
LANES_2(v16_mul, a.f[l] * b.f[l])
LANES_2(v16_div, a.f[l] / b.f[l])
LANES_2(v16_min, a.f[l] < b.f[l] ? a.f[l] : b.f[l])
LANES_2(v16_max, a.f[l] > b.f[l] ? a.f[l] : b.f[l])
ALWAYS_INLINE v16 v16_fma(v16 a, v16 b, v16 c) { v16 r; EACH_LANE r.f[l] = fmaf(a.f[l], b.f[l], c.f[l]); return r; }
LANES_1(v16_neg, -x.f[l])
LANES_1(v16_abs, fabsf(x.f[l]))
LANES_1(v16_sqrt, sqrtf(x.f[l]))

LANES_CMP(v16_eq, a.f[l] == b.f[l])
LANES_CMP(v16_lt, a.f[l] < b.f[l])
LANES_CMP(v16_le, a.f[l] <= b.f[l])
ALWAYS_INLINE uint32_t v16m_bits(v16m m) { uint32_t r = 0; EACH_LANE r |= (uint32_t)(m.m[l] != 0) << l; return r; }
ALWAYS_INLINE v16 v16_select(v16m m, v16 a, v16 b) { v16 r; EACH_LANE r.f[l] = m.m[l] ? a.f[l] : b.f[l]; return r; }

LANES_1(v16_swap1, x.f[l ^ 1])
LANES_1(v16_swap2, x.f[l ^ 2])
LANES_1(v16_swap4, x.f[l ^ 4])
LANES_1(v16_swap8, x.f[l ^ 8])

ALWAYS_INLINE float v16_reduce_add(v16 x)
{
    for (int h = 8; h > 0; h /= 2)
        for (int l = 0; l < h; l++)
            x.f[l] += x.f[l + h];
    return x.f[0];
}

ALWAYS_INLINE v16 v16_reduce_add16(const v16 x[16])
{
    v16 r;
    EACH_LANE r.f[l] = v16_reduce_add(x[l]);
    return r;
}

ALWAYS_INLINE float v16_reduce_max(v16 x)
{
    for (int h = 8; h > 0; h /= 2)
        for (int l = 0; l < h; l++)
            x.f[l] = x.f[l] > x.f[l + h] ? x.f[l] : x.f[l + h];
    return x.f[0];
}

ALWAYS_INLINE v16i v16i_set1(int32_t x) { v16i r; EACH_LANE r.i[l] = x; return r; }
ALWAYS_INLINE v16i v16i_zero(void) { return v16i_set1(0); }
ALWAYS_INLINE v16i v16i_load(const void *p) { v16i r; memcpy(&r, p, sizeof r); return r; }
ALWAYS_INLINE void v16i_store(void *p, v16i x) { memcpy(p, &x, sizeof x); }
ALWAYS_INLINE v16i v16i_load_u8(const uint8_t *p) { v16i r; EACH_LANE r.i[l] = p[l]; return r; }
ALWAYS_INLINE v16i v16i_load_i8(const int8_t *p) { v16i r; EACH_LANE r.i[l] = p[l]; return r; }
ALWAYS_INLINE void v16i_store_u8(uint8_t *p, v16i x) { EACH_LANE p[l] = (uint8_t)x.i[l]; }
LANES_I2(v16i_add, (uint32_t)a.i[l] + (uint32_t)b.i[l])
LANES_I2(v16i_sub, (uint32_t)a.i[l] - (uint32_t)b.i[l])
LANES_I2(v16i_mul, (uint32_t)a.i[l] * (uint32_t)b.i[l])
LANES_I2(v16i_and, a.i[l] & b.i[l])
LANES_I2(v16i_or, a.i[l] | b.i[l])
LANES_I2(v16i_xor, a.i[l] ^ b.i[l])
ALWAYS_INLINE v16i v16i_shl(v16i x, int n) { v16i r; EACH_LANE r.i[l] = (int32_t)((uint32_t)x.i[l] << n); return r; }
ALWAYS_INLINE v16i v16i_shr(v16i x, int n) { v16i r; EACH_LANE r.i[l] = (int32_t)((uint32_t)x.i[l] >> n); return r; }
ALWAYS_INLINE v16i v16i_sar(v16i x, int n) { v16i r; EACH_LANE r.i[l] = x.i[l] >> n; return r; }
ALWAYS_INLINE v16m v16i_eq(v16i a, v16i b) { v16m r; EACH_LANE r.m[l] = a.i[l] == b.i[l]; return r; }
ALWAYS_INLINE v16i v16i_select(v16m m, v16i a, v16i b) { v16i r; EACH_LANE r.i[l] = m.m[l] ? a.i[l] : b.i[l]; return r; }

ALWAYS_INLINE v16i v16_bits(v16 x) { v16i r; memcpy(&r, &x, sizeof r); return r; }
ALWAYS_INLINE v16 v16_from_bits(v16i x) { v16 r; memcpy(&r, &x, sizeof r); return r; }
ALWAYS_INLINE v16 v16_from_i32(v16i x) { v16 r; EACH_LANE r.f[l] = (float)x.i[l]; return r; }
ALWAYS_INLINE v16i v16_to_i32(v16 x)
{
    v16i r; /* 1.5 * 2^23: the sum's last place is 1, so the addition rounds; its low bits are the integer */
    EACH_LANE r.i[l] = (int32_t)(float_bits(x.f[l] + 0x1.8p23f) - 0x4B400000u);
    return r;
}

ALWAYS_INLINE v16i v16i_dot4_u8i8(v16i acc, const uint8_t *u, const int8_t *s)
{
    EACH_LANE for (int j = 0; j < 4; j++)
        acc.i[l] = (int32_t)((uint32_t)acc.i[l] + (uint32_t)(u[4 * l + j] * s[4 * l + j])); /* wraps like the vector versions */
    return acc;
}

#undef LANES_1
#undef LANES_2
#undef LANES_I2
#undef LANES_CMP
#undef EACH_LANE
