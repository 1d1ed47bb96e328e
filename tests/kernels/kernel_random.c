/* The inputs of the kernel tests; apart from kernel_test.c, so that programs without Criterion can use them. */
#include "tests/kernels/kernel_test.h"

uint64_t kernel_test_bits(uint64_t seed, uint64_t index)
{
    uint64_t z = (seed * 0x9E3779B97F4A7C15ull) ^ (index + 1) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

double kernel_test_uniform(uint64_t seed, uint64_t index, double lo, double hi)
{
    return lo + (hi - lo) * ((double)(kernel_test_bits(seed, index) >> 11) * 0x1p-53);
}

void kernel_test_fill(float *x, int64_t n, uint64_t seed, float lo, float hi)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = (float)kernel_test_uniform(seed, (uint64_t)i, lo, hi);
}
