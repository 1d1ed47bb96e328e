/* Transposes 16 x 16 32-bit lanes in registers: lane j of r[i] becomes lane i of r[j]. Only moves bits, so the three versions agree by construction. */
#pragma once
#include "kernels/cpu/lanes.h"

#if CPU_ISA_BUILD == 2
SPECIALIZE void transpose16(v16i r[LANES])
{
    v16i t[LANES], u[LANES];
    UNROLL for (int i = 0; i < LANES; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < LANES; i += 4) { /* u[i + c]: rows i..i+3 of columns c, 4 + c, 8 + c, 12 + c */
        u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLL for (int c = 0; c < 4; c++) {
        v16i low_even = _mm512_shuffle_i32x4(u[c], u[4 + c], 0x88), low_odd = _mm512_shuffle_i32x4(u[c], u[4 + c], 0xDD);
        v16i high_even = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0x88), high_odd = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0xDD);
        r[c] = _mm512_shuffle_i32x4(low_even, high_even, 0x88);
        r[8 + c] = _mm512_shuffle_i32x4(low_even, high_even, 0xDD);
        r[4 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
        r[12 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xDD);
    }
}
#elif CPU_ISA_BUILD == 1
ALWAYS_INLINE void transpose8(__m256i r[8])
{
    __m256i t[8], u[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) { /* u[i + c]: rows i..i+3 of columns c and 4 + c */
        u[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLL for (int c = 0; c < 4; c++) {
        r[c] = _mm256_permute2x128_si256(u[c], u[4 + c], 0x20);
        r[4 + c] = _mm256_permute2x128_si256(u[c], u[4 + c], 0x31);
    }
}

SPECIALIZE void transpose16(v16i r[LANES])
{
    __m256i a[8], b[8];
    UNROLL for (int half = 0; half < 2; half++) { /* the upper 8 rows end in the upper lanes */
        UNROLL for (int i = 0; i < 8; i++) {
            a[i] = r[8 * half + i].lo;
            b[i] = r[8 * half + i].hi;
        }
        transpose8(a);
        transpose8(b);
        UNROLL for (int i = 0; i < 8; i++) {
            r[8 * half + i].lo = a[i];
            r[8 * half + i].hi = b[i];
        }
    }
    UNROLL for (int i = 0; i < 8; i++) {
        __m256i upper = r[i].hi;
        r[i].hi = r[8 + i].lo;
        r[8 + i].lo = upper;
    }
}
#else
SPECIALIZE void transpose16(v16i r[LANES])
{
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            int32_t t = r[i].i[j];
            r[i].i[j] = r[j].i[i];
            r[j].i[i] = t;
        }
}
#endif
