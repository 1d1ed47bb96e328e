/* Conversions between fp32 and the 16-bit formats, one value at a time; round to nearest, ties to even, as the vector instructions do.
 * A NaN stays a (quiet) NaN. lanes.h has the same for 16 lanes, with the same bits. */
#pragma once
#include <stdint.h>
#include <string.h>

static inline uint32_t float_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float float_from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline float bf16_to_float(uint16_t h)
{
    return float_from_bits((uint32_t)h << 16);
}

static inline uint16_t bf16_from_float(float x)
{
    uint32_t u = float_bits(x);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u)
        return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7FFFu + (u >> 16 & 1)) >> 16);
}

static inline float fp16_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    if (exponent == 31)
        return float_from_bits(sign | 0x7F800000u | fraction << 13 | (fraction ? 0x400000u : 0));
    if (exponent == 0) /* zero or subnormal: fraction * 2^-24, exact in fp32 */
        return float_from_bits(sign | float_bits((float)fraction * 0x1p-24f));
    return float_from_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

static inline uint16_t fp16_from_float(float x)
{
    uint32_t u = float_bits(x), sign = u >> 16 & 0x8000, a = u & 0x7FFFFFFFu;
    if (a > 0x7F800000u)
        return (uint16_t)(sign | 0x7E00 | (a >> 13 & 0x3FF));
    if (a >= 0x477FF000u) /* 65520 and beyond round to infinity */
        return (uint16_t)(sign | 0x7C00);
    if (a < 0x38800000u) {
        /* Below 2^-14 the result counts units of 2^-24. Adding 0.5 puts that unit at the last place of the sum, so the
         * addition itself rounds to nearest even. */
        return (uint16_t)(sign | (float_bits(float_from_bits(a) + 0.5f) - 0x3F000000u));
    }
    a += 0xFFFu + (a >> 13 & 1);
    return (uint16_t)(sign | ((a - 0x38000000u) >> 13));
}
