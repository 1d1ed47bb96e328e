/* Key biases for the tests of attention. */
#include "tests/simt/ops_test.h"
#include <math.h>
#include <stdlib.h>

static void *copied(struct ops_test *t, const void *host, size_t bytes)
{
    return ops_test_upload(t, host, bytes);
}

/* KV head h has h % 4 marked pairs and one more, with biases that move logits by several units. */
void ops_test_bias_make(struct ops_test *t, int n_kv_heads, int d, int n_positions, struct key_bias *ret_cpu, struct key_bias *ret_gpu)
{
    const int n_freqs = d / 2, n_sixteens = (n_positions + BLOCK_TOKENS - 1) / BLOCK_TOKENS * (BLOCK_TOKENS / 16);
    int32_t *first = ops_test_alloc(sizeof *first * (size_t)(n_kv_heads + 1)), n_pairs = 0;
    for (int h = 0; h <= n_kv_heads; h++) {
        first[h] = n_pairs;
        n_pairs += h < n_kv_heads ? h % 4 + 1 : 0;
    }
    const size_t coarse_floats = (size_t)(n_sixteens * n_freqs) * 2, fine_floats = (size_t)n_freqs * 32, u_floats = (size_t)(n_pairs * 2 * d);
    int32_t *pair = ops_test_alloc(sizeof *pair * (size_t)n_pairs);
    float *coarse = ops_test_alloc(coarse_floats * sizeof *coarse), *fine = ops_test_alloc(fine_floats * sizeof *fine), *u = ops_test_floats(t, u_floats, .5);
    for (int i = 0; i < n_pairs; i++)
        pair[i] = (i * 7 + 3) % n_freqs;
    for (int f = 0; f < n_freqs; f++) {
        const double frequency = pow(1000, -(double)f / n_freqs);
        for (int i = 0; i < n_sixteens; i++) {
            coarse[(i * n_freqs + f) * 2] = (float)cos(16 * i * frequency);
            coarse[(i * n_freqs + f) * 2 + 1] = (float)sin(16 * i * frequency);
        }
        for (int i = 0; i < 16; i++) {
            fine[f * 32 + i] = (float)cos(i * frequency);
            fine[f * 32 + 16 + i] = (float)sin(i * frequency);
        }
    }
    *ret_cpu = (struct key_bias){.first = first, .pair = pair, .u = u, .coarse = coarse, .fine = fine, .n_freqs = n_freqs};
    *ret_gpu = (struct key_bias){.first = copied(t, first, sizeof *first * (size_t)(n_kv_heads + 1)), .pair = copied(t, pair, sizeof *pair * (size_t)n_pairs),
                                 .u = copied(t, u, u_floats * sizeof *u), .coarse = copied(t, coarse, coarse_floats * sizeof *coarse), .fine = copied(t, fine, fine_floats * sizeof *fine),
                                 .n_freqs = n_freqs};
}

void ops_test_bias_free(struct key_bias *cpu)
{
    free((void *)(uintptr_t)cpu->first);
    free((void *)(uintptr_t)cpu->pair);
    free((void *)(uintptr_t)cpu->u);
    free((void *)(uintptr_t)cpu->coarse);
    free((void *)(uintptr_t)cpu->fine);
}
