#include "tests/kernels/bias_fixture.h"
#include <math.h>
#include <stdlib.h>

static const double factor = 1.25;

static double frequency(int d, int j)
{
    return pow(10000, -2.0 * j / d);
}

static void make_tables(struct bias_fixture *b, int n_positions)
{
    const int n_freqs = b->d / 2, n_sixteens = (n_positions + BLOCK_TOKENS - 1) / BLOCK_TOKENS * (BLOCK_TOKENS / 16);
    b->coarse = aligned_zeros(sizeof(float) * (size_t)n_sixteens * (size_t)b->d);
    b->fine = aligned_zeros(sizeof(float) * (size_t)n_freqs * 32);
    for (int j = 0; j < n_freqs; j++) {
        for (int i = 0; i < n_sixteens; i++) {
            b->coarse[(i * n_freqs + j) * 2] = (float)(factor * cos(16 * i * frequency(b->d, j)));
            b->coarse[(i * n_freqs + j) * 2 + 1] = (float)(factor * sin(16 * i * frequency(b->d, j)));
        }
        for (int t = 0; t < 16; t++) {
            b->fine[j * 32 + t] = (float)cos(t * frequency(b->d, j));
            b->fine[j * 32 + 16 + t] = (float)sin(t * frequency(b->d, j));
        }
    }
}

void bias_fixture_make(struct bias_fixture *b, struct ref_rng *rng, int n_kv_heads, int d, int n_positions, const int *n_pairs, double size)
{
    size_t n = 0;
    *b = (struct bias_fixture){.d = d, .first = aligned_zeros(sizeof(int32_t) * ((size_t)n_kv_heads + 1))};
    for (int h = 0; h < n_kv_heads; h++)
        b->first[h + 1] = (int32_t)(n += (size_t)n_pairs[h]);
    b->pair = aligned_zeros(sizeof(int32_t) * n);
    for (int h = 0; h < n_kv_heads; h++)
        for (int j = 0; j < n_pairs[h]; j++)
            b->pair[b->first[h] + j] = (int)(ref_uniform(rng) * d / 2);
    b->u = random_floats(rng, n * 2 * (size_t)d, size / sqrt(d));
    make_tables(b, n_positions);
    b->bias = (struct key_bias){.first = b->first, .pair = b->pair, .u = b->u, .coarse = b->coarse, .fine = b->fine, .n_freqs = d / 2};
}

void bias_fixture_free(struct bias_fixture *b)
{
    free(b->first);
    free(b->pair);
    free(b->u);
    free(b->coarse);
    free(b->fine);
}

double bias_fixture_term(const struct bias_fixture *b, int kv_head, const float *q, int64_t pos)
{
    double sum = 0;
    for (int j = b->first[kv_head]; j < b->first[kv_head + 1]; j++) {
        double ab[2] = {0, 0}, angle = (double)pos * frequency(b->d, b->pair[j]);
        for (int i = 0; i < 2; i++)
            for (int c = 0; c < b->d; c++)
                ab[i] += (double)q[c] * b->u[(2 * j + i) * b->d + c];
        sum += factor * (ab[0] * cos(angle) + ab[1] * sin(angle));
    }
    return sum;
}
