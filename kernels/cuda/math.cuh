/* Device arithmetic that gives the bits of kernels/cpu: conversions as in half.h, exp and log as in vmath.h, one value at a time. The sources are compiled without contraction
 * of a * b + c, so a multiply and an add are fused where fmaf stands and nowhere else; divisions and square roots are the IEEE ones. */
#pragma once
#include "kernels/cuda/ptx.cuh"
#include <math.h>

#define DEVICE static __device__ __forceinline__

DEVICE float bf16_to_float(uint16_t h)
{
    return __uint_as_float((uint32_t)h << 16);
}

DEVICE uint16_t bf16_from_float(float x)
{
    const uint32_t u = __float_as_uint(x);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u)
        return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7FFFu + (u >> 16 & 1)) >> 16);
}

DEVICE float fp16_to_float(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    if (exponent == 31)
        return __uint_as_float(sign | 0x7F800000u | fraction << 13 | (fraction ? 0x400000u : 0));
    if (exponent == 0)
        return __uint_as_float(sign | __float_as_uint((float)fraction * 0x1p-24f));
    return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
}

DEVICE uint16_t fp16_from_float(float x)
{
    const uint32_t u = __float_as_uint(x), sign = u >> 16 & 0x8000;
    uint32_t a = u & 0x7FFFFFFFu;
    if (a > 0x7F800000u)
        return (uint16_t)(sign | 0x7E00 | (a >> 13 & 0x3FF));
    if (a >= 0x477FF000u)
        return (uint16_t)(sign | 0x7C00);
    if (a < 0x38800000u)
        return (uint16_t)(sign | (__float_as_uint(__uint_as_float(a) + 0.5f) - 0x3F000000u));
    a += 0xFFFu + (a >> 13 & 1);
    return (uint16_t)(sign | ((a - 0x38000000u) >> 13));
}

/* exp(x) for results that are normal numbers, elsewhere garbage; then with its ends: below 2^-126 0, above the largest float +inf, NaN stays. */
DEVICE float exp_core(float x)
{
    const float shifted = fmaf(x, 0x1.715476p+0f, 0x1.8p23f), n = shifted - 0x1.8p23f;
    float f = fmaf(n, -0.693145751953125f, x), p = 0.0013814539415761828f;
    f = fmaf(n, -1.428606765330187e-06f, f);
    p = fmaf(p, f, 0.00836874544620514f);
    p = fmaf(p, f, 0.04166838899254799f);
    p = fmaf(p, f, 0.1666652113199234f);
    p = fmaf(p, f, 0.4999999403953552f);
    p = fmaf(p, f * f, f);
    p = p + 1.0f;
    return __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
}

DEVICE float exp_float(float x)
{
    if (!(x == x))
        return x;
    return x < -87.33654f ? 0.0f : 88.72283f < x ? INFINITY : exp_core(x);
}

/* For x <= 0; NaN (from -inf - -inf) gives 0. */
DEVICE float exp_nonpositive(float x)
{
    return -87.33654f <= x ? exp_core(x) : 0.0f;
}

DEVICE float log_float(float x)
{
    const bool tiny = x < 0x1p-126f;
    const float scaled = tiny ? x * 0x1p23f : x;
    const int32_t exponent = (int32_t)(__float_as_uint(scaled) - 0x3F3504F3u) >> 23;
    const float e = (float)exponent - (tiny ? 23.0f : 0.0f);
    const float f = __uint_as_float(__float_as_uint(scaled) - ((uint32_t)exponent << 23)) - 1.0f, ff = f * f;
    float p = -0.07634492963552475f, r;
    p = fmaf(p, f, 0.12761574983596802f);
    p = fmaf(p, f, -0.13160182535648346f);
    p = fmaf(p, f, 0.14201758801937103f);
    p = fmaf(p, f, -0.16623356938362122f);
    p = fmaf(p, f, 0.20001226663589478f);
    p = fmaf(p, f, -0.2500081956386566f);
    p = fmaf(p, f, 0.3333333134651184f);
    r = fmaf(e, 1.428606765330187e-06f, (p * f) * ff);
    r = fmaf(ff, -0.5f, r);
    r = fmaf(e, 0.693145751953125f, f + r);
    if (x == INFINITY)
        r = x;
    if (x == 0)
        r = -INFINITY;
    return 0 <= x ? r : NAN;
}

/* Over a whole warp; every lane gets the result, and the order of the sum is fixed. */
DEVICE float warp_sum(float x)
{
    for (int h = 16; h > 0; h /= 2)
        x += __shfl_xor_sync(0xFFFFFFFFu, x, h);
    return x;
}

DEVICE float warp_max(float x)
{
    for (int h = 16; h > 0; h /= 2) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, x, h);
        x = other > x ? other : x;
    }
    return x;
}

/* Over a block of up to 1,024 threads, a multiple of 32; `part` is shared memory of 32 floats. */
DEVICE float block_sum(float x, float *part)
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, n_warps = (int)blockDim.x / 32;
    x = warp_sum(x);
    if (lane == 0)
        part[warp] = x;
    __syncthreads();
    x = warp_sum(lane < n_warps ? part[lane] : 0.0f);
    __syncthreads(); /* part may be used again */
    return x;
}
