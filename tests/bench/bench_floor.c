#include "tests/bench/bench_floor.h"
#include "kernels/cpu/lanes.h"

/* AVX2 has 16 registers, two a v16: six chains at a time fill the two units (latency 4 or 5). */
#if CPU_ISA_BUILD == 1
enum { AT_ONCE = 6 };
#else
enum { AT_ONCE = 12 };
#endif
enum { AT_ONCE_MAX = 12 };

float ISA(bench_fma)(long rounds)
{
    float start[LANES]; /* lanes that differ, or the compiler would compute one half of them */
    for (int i = 0; i < LANES; i++)
        start[i] = (float)i;
    v16 sum = v16_zero(), a = v16_set1(0.999f), b = v16_set1(0.001f);
    for (int part = 0; part < BENCH_FMA_CHAINS / AT_ONCE; part++) {
        v16 c[AT_ONCE_MAX];
        UNROLL for (int i = 0; i < AT_ONCE; i++)
            c[i] = v16_mul(v16_load(start), v16_set1((float)(part * AT_ONCE + i)));
        for (long r = 0; r < rounds; r++)
            UNROLL for (int i = 0; i < AT_ONCE; i++)
                c[i] = v16_fma(c[i], a, b);
        UNROLL for (int i = 0; i < AT_ONCE; i++)
            sum = v16_add(sum, c[i]);
    }
    return v16_reduce_add(sum);
}

int ISA(bench_read)(const void *memory, size_t bytes)
{
    const char *p = memory;
    v16i a = v16i_zero(), b = a, c = a, d = a;
    for (size_t i = 0; i < bytes; i += 256) {
        a = v16i_xor(a, v16i_load(p + i));
        b = v16i_xor(b, v16i_load(p + i + 64));
        c = v16i_xor(c, v16i_load(p + i + 128));
        d = v16i_xor(d, v16i_load(p + i + 192));
    }
    int32_t lanes[LANES], sum = 0;
    v16i_store(lanes, v16i_xor(v16i_xor(a, b), v16i_xor(c, d)));
    for (int i = 0; i < LANES; i++)
        sum ^= lanes[i];
    return sum;
}
