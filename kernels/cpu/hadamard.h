/* The rotation of queries and keys: Hadamard/sqrt(b) in blocks of b, the largest power of two that divides head_dim. It is its own inverse but for rounding. The butterflies go
 * from distance 1 up; each output is a + b or b - a, rounded once. */
#pragma once
#include "kernels/cpu/lanes.h"

/* Distances 1, 2, 4, 8: inside a vector. A lane whose partner is above takes x + partner, else partner - x. */
ALWAYS_INLINE v16 hadamard16(v16 x)
{
    static const float sign[4][LANES] = {
        {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
        {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
        {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
        {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1},
    };
    x = v16_fma(x, v16_load(sign[0]), v16_swap1(x));
    x = v16_fma(x, v16_load(sign[1]), v16_swap2(x));
    x = v16_fma(x, v16_load(sign[2]), v16_swap4(x));
    return v16_fma(x, v16_load(sign[3]), v16_swap8(x));
}

ALWAYS_INLINE void hadamard(float *x, int b)
{
    for (int i = 0; i < b; i += LANES)
        v16_store(x + i, hadamard16(v16_load(x + i)));
    for (int h = LANES; h < b; h *= 2)
        for (int i = 0; i < b; i += 2 * h)
            for (int j = i; j < i + h; j += LANES) {
                const v16 lo = v16_load(x + j), hi = v16_load(x + j + h);
                v16_store(x + j, v16_add(lo, hi));
                v16_store(x + j + h, v16_sub(lo, hi));
            }
    const v16 scale = v16_set1(1.0f / sqrtf((float)b));
    for (int i = 0; i < b; i += LANES)
        v16_store(x + i, v16_mul(v16_load(x + i), scale));
}
