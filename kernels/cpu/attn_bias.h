/* Terms of key biases (key_bias.h) for the few query heads that decode attention takes at a time. */
#pragma once
#include "kernels/cpu/attn_weights.h"
#include "kernels/cpu/key_bias.h"

struct attn_bias {
    struct bias_pairs pairs; /* n is 0 without any; then nothing else is set */
    float ab[ATTN_HEADS][2 * KEY_BIAS_PAIRS_MAX];
};

/* q [heads, d], scale applied. */
static void attn_bias_init(struct attn_bias *b, const struct bias_pairs *pairs, const float *q, int heads, int d)
{
    b->pairs = *pairs;
    if (b->pairs.n == 0)
        return;
    for (int h = 0; h < heads; h++)
        bias_coefficients(pairs, q + h * d, d, b->ab[h]);
    for (int h = heads; h < ATTN_HEADS; h++)
        memset(b->ab[h], 0, sizeof b->ab[h]);
}

/* Continues the chains of logit[heads] at 16 positions by pair j. */
SPECIALIZE void attn_bias_add(const struct attn_bias *b, int j, v16 c, v16 s, const int heads, v16 *logit)
{
    UNROLL for (int h = 0; h < heads; h++) {
        logit[h] = v16_fma(v16_set1(b->ab[h][2 * j]), c, logit[h]);
        logit[h] = v16_fma(v16_set1(b->ab[h][2 * j + 1]), s, logit[h]);
    }
}

/* All pairs, at positions 16 sixteen and on. */
SPECIALIZE void attn_bias_sixteen(const struct attn_bias *b, int64_t sixteen, const int heads, v16 *logit)
{
    for (int j = 0; j < b->pairs.n; j++) {
        v16 c, s;
        bias_waves(&b->pairs, j, sixteen, &c, &s);
        attn_bias_add(b, j, c, s, heads, logit);
    }
}

/* All pairs at 16 positions anywhere: the same expression, its parts gathered. */
SPECIALIZE void attn_bias_scattered(const struct attn_bias *b, const int32_t position[LANES], const int heads, v16 *logit)
{
    const struct key_bias *bias = b->pairs.bias;
    for (int j = 0; j < b->pairs.n; j++) {
        float part[4][LANES];
        v16 c, s;
        int pair = bias->pair[b->pairs.first + j];
        for (int i = 0; i < LANES; i++) {
            const float *coarse = bias->coarse + ((int64_t)(position[i] / LANES) * bias->n_freqs + pair) * 2, *fine = bias->fine + pair * 2 * LANES + position[i] % LANES;
            part[0][i] = coarse[0];
            part[1][i] = coarse[1];
            part[2][i] = fine[0];
            part[3][i] = fine[LANES];
        }
        bias_turn(v16_load(part[0]), v16_load(part[1]), v16_load(part[2]), v16_load(part[3]), &c, &s);
        attn_bias_add(b, j, c, s, heads, logit);
    }
}
