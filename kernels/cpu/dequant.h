/* Packed weights to fp32 in registers: a vector is one column of a panel. The exact expressions are in weight_layout.h; all callers (one row at a time, panels
 * for many rows) get their values here, so that they agree. `dtype` is a constant in every caller and everything else folds. */
#pragma once
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/weight_layout.h"

/* 32 columns of one panel. */
struct dequant {
    const uint8_t *low, *high;
    v16 d, m;   /* value = code * d (+ m); Q6_K: of the 16 columns that come next */
    v16 d2, m2; /* Q6_K: of columns 16..31 */
    v16 d16;    /* AVX2: d / 16, for codes that are used without being shifted down */
};

ALWAYS_INLINE v16 dequant_fp16(const uint8_t *p)
{
    return v16_load_fp16((const uint16_t *)(const void *)p);
}

/* `group`, np and p as in weight_run_at; `run` counts 32 columns. */
ALWAYS_INLINE struct dequant dequant_open(const enum weight_dtype dtype, const uint8_t *group, int np, int p, int64_t run)
{
    struct weight_run r = weight_run_at(&weight_formats[dtype], np, p, run);
    struct dequant q = {.low = group + r.low, .high = group + r.high, .d = v16_zero(), .m = v16_zero()};
    if (dtype == WEIGHT_F32 || dtype == WEIGHT_F16 || dtype == WEIGHT_BF16)
        return q;
    q.d = dequant_fp16(group + r.scale_a);
    if (dtype == WEIGHT_Q4_1)
        q.m = dequant_fp16(group + r.scale_b);
    if (dtype == WEIGHT_Q4_0)
        q.m = v16_mul(q.d, v16_set1(-8.0f));
    if (dtype == WEIGHT_Q5_0)
        q.m = v16_mul(q.d, v16_set1(-16.0f));
    if (dtype == WEIGHT_Q4_K || dtype == WEIGHT_Q5_K) {
        v16 m = v16_from_i32(v16i_load_u8(group + r.sub + PANEL_ROWS));
        q.m = v16_neg(v16_mul(dequant_fp16(group + r.scale_b), m));
        q.d = v16_mul(q.d, v16_from_i32(v16i_load_u8(group + r.sub)));
    }
    if (dtype == WEIGHT_Q6_K) {
        q.d2 = v16_mul(q.d, v16_from_i32(v16i_load_i8((const int8_t *)group + r.sub + PANEL_ROWS)));
        q.d = v16_mul(q.d, v16_from_i32(v16i_load_i8((const int8_t *)group + r.sub)));
        q.m = v16_mul(q.d, v16_set1(-32.0f));
        q.m2 = v16_mul(q.d2, v16_set1(-32.0f));
    }
    q.d16 = v16_mul(q.d, v16_set1(0.0625f));
    return q;
}

/* Between columns 15 and 16. */
ALWAYS_INLINE void dequant_second_half(const enum weight_dtype dtype, struct dequant *q)
{
    if (dtype != WEIGHT_Q6_K)
        return;
    q->d = q->d2;
    q->d16 = v16_mul(q->d, v16_set1(0.0625f));
    q->m = q->m2;
}

/* Column 8j + i of a 4-bit run as fma(code, d, m). `word` is word row j; i is a constant.
 * AVX-512 looks the code up in a table of floats, whose index ignores higher bits. AVX2 spares the shifts: bytes are moved into place by loading from 0 to 3 bytes
 * further on, and the upper nibble of a byte stays where it is, 16 * code, with d / 16 for a scale: exact, so the sum rounds as code * d + m does. */
ALWAYS_INLINE v16 dequant_nibble(const uint8_t *word, int i, const struct dequant *q, v16 m)
{
#if CPU_ISA_BUILD == 2
    const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return v16_fma(_mm512_permutexvar_ps(v16i_shr(v16i_load(word), 4 * i), codes), q->d, m);
#elif CPU_ISA_BUILD == 1
    v16i byte = v16i_load(word + i / 2);
    if (i % 2)
        return v16_fma(v16_from_i32(v16i_and(byte, v16i_set1(0xF0))), q->d16, m);
    return v16_fma(v16_from_i32(v16i_and(byte, v16i_set1(0x0F))), q->d, m);
#else
    return v16_fma(v16_from_i32(v16i_and(v16i_shr(v16i_load(word), 4 * i), v16i_set1(15))), q->d, m);
#endif
}

/* x with the field that begins at bit `from` moved to bit `to`; both are constants. */
ALWAYS_INLINE v16i dequant_move(v16i x, int from, int to)
{
    return from < to ? v16i_shl(x, to - from) : v16i_shr(x, from - to);
}

/* The same for codes of 5 or 6 bits, whose upper ones stand in `high` from bit `at` on; mask has as many bits (1 or 3). */
ALWAYS_INLINE v16 dequant_wide(const uint8_t *word, int i, v16i high, int at, int mask, const struct dequant *q)
{
#if CPU_ISA_BUILD == 2
    v16i code = _mm512_ternarylogic_epi32(v16i_set1(15), v16i_shr(v16i_load(word), 4 * i), dequant_move(high, at, 4), 0xCA);
    v16 value = v16_from_i32(v16i_and(code, v16i_set1(15 | mask << 4)));
    return v16_fma(value, q->d, q->m);
#elif CPU_ISA_BUILD == 1
    v16i byte = v16i_load(word + i / 2);
    if (i % 2) {
        v16i code = v16i_or(v16i_and(byte, v16i_set1(0xF0)), v16i_and(dequant_move(high, at, 8), v16i_set1(mask << 8)));
        return v16_fma(v16_from_i32(code), q->d16, q->m);
    }
    v16i code = v16i_or(v16i_and(byte, v16i_set1(0x0F)), v16i_and(dequant_move(high, at, 4), v16i_set1(mask << 4)));
    return v16_fma(v16_from_i32(code), q->d, q->m);
#else
    v16i code = v16i_and(v16i_shr(v16i_load(word), 4 * i), v16i_set1(15));
    code = v16i_or(code, v16i_and(dequant_move(high, at, 4), v16i_set1(mask << 4)));
    return v16_fma(v16_from_i32(code), q->d, q->m);
#endif
}

/* Column 8j + i of the 32; i is a constant, 0..7. Columns are read in ascending order, with dequant_second_half in the middle. */
ALWAYS_INLINE v16 dequant_value(const enum weight_dtype dtype, const struct dequant *q, int j, int i)
{
    int c = 8 * j + i;
    const uint8_t *word = q->low + j * 64;
    switch (dtype) {
    case WEIGHT_F32:
        return v16_load((const float *)(const void *)q->low + c * LANES);
    case WEIGHT_F16:
        return v16_load_fp16((const uint16_t *)(const void *)q->low + c * LANES);
    case WEIGHT_BF16:
        return v16_load_bf16((const uint16_t *)(const void *)q->low + c * LANES);
    case WEIGHT_Q8_0:
        return v16_mul(v16_from_i32(v16i_load_i8((const int8_t *)q->low + c * LANES)), q->d);
    case WEIGHT_Q4_0:
    case WEIGHT_Q4_1:
    case WEIGHT_Q4_K:
        return dequant_nibble(word, i, q, q->m);
    case WEIGHT_Q5_0:
    case WEIGHT_Q5_K:
        return dequant_wide(word, i, v16i_shr(v16i_load(q->high), 8 * j), i, 1, q);
    default: /* Q6_K */
        return dequant_wide(word, i, v16i_shr(v16i_load(q->high + j / 2 * 64), j % 2 * 16), 2 * i, 3, q);
    }
}

/* Asks for memory 4 KiB ahead: the processors' own prefetchers do not keep up with loops that compute this much a byte (without this Q8_0 is read at a third of the
 * speed). A group's run is read in 4 * np slots, 8 columns of a panel each; in their order the addresses ascend evenly and cover everything, scales too. Prefetching
 * each panel's own next lines instead was measured at half the speed: the addresses jump, and the hardware does not join in. */
ALWAYS_INLINE void dequant_prefetch(const enum weight_dtype dtype, const uint8_t *group, int np, int64_t run, int slot)
{
    enum { AHEAD_BYTES = 4096, LINE = 64, SLOTS = 4 };
    const struct weight_format *f = &weight_formats[dtype];
    const int64_t share = weight_block_bytes(f) / weight_block_runs(f) / SLOTS;
    const uint8_t *ahead = group + (run * np * SLOTS + slot) * share + AHEAD_BYTES;
    for (int line = 0; line < share; line += LINE)
        __builtin_prefetch(ahead + line);
}

#define DEQUANT_EACH_DTYPE(X) X(F32) X(F16) X(BF16) X(Q8_0) X(Q4_0) X(Q4_1) X(Q5_0) X(Q4_K) X(Q5_K) X(Q6_K)
