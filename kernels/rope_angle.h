/* Cosine and sine of a RoPE angle, for the CPU and the GPU. In double, so that rounding the result to fp32 gives the same bits in every build, whatever the libm. Reduction:
 * x - n * pi/2 with pi/2 in a part of 33 bits, whose product with n < 2^20 is exact, and a remainder: good for angles below 1.6 million. Series: Taylor on
 * [-pi/4, pi/4]; the first term left out is below 1e-17. */
#pragma once
#include <stdint.h>

#ifndef DEVICE /* kernels/cuda/math.cuh */
#define DEVICE static inline
#endif

DEVICE double rope_sin_series(double x)
{
    const double z = x * x;
    double p = 1.0 / 355687428096000.0; /* 1 / 17! */
    p = p * z - 1.0 / 1307674368000.0;
    p = p * z + 1.0 / 6227020800.0;
    p = p * z - 1.0 / 39916800.0;
    p = p * z + 1.0 / 362880.0;
    p = p * z - 1.0 / 5040.0;
    p = p * z + 1.0 / 120.0;
    p = p * z - 1.0 / 6.0;
    return x + x * z * p;
}

DEVICE double rope_cos_series(double x)
{
    const double z = x * x;
    double p = 1.0 / 20922789888000.0; /* 1 / 16! */
    p = p * z - 1.0 / 87178291200.0;
    p = p * z + 1.0 / 479001600.0;
    p = p * z - 1.0 / 3628800.0;
    p = p * z + 1.0 / 40320.0;
    p = p * z - 1.0 / 720.0;
    p = p * z + 1.0 / 24.0;
    p = p * z - 1.0 / 2.0;
    return 1.0 + z * p;
}

DEVICE void rope_cos_sin(double x, double *ret_cos, double *ret_sin)
{
    /* Adding and taking away 1.5 * 2^52 rounds to the nearest integer. */
    const double magic = 0x1.8p52, n = (x * 0x1.45f306dc9c883p-1 + magic) - magic;
    const double r = (x - n * 0x1.921fb544p+0) - n * 0x1.0b4611a626331p-34;
    const double c = rope_cos_series(r), s = rope_sin_series(r);
    switch ((int64_t)n & 3) {
    case 0: *ret_cos = c, *ret_sin = s; break;
    case 1: *ret_cos = -s, *ret_sin = c; break;
    case 2: *ret_cos = -c, *ret_sin = -s; break;
    default: *ret_cos = s, *ret_sin = -c; break;
    }
}
