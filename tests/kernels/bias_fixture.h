/* Random key biases of a layer for the tests of the ops that take them, and what they add to a logit, in double from the angles themselves. */
#pragma once
#include "tests/kernels/kv_fixture.h"

struct bias_fixture {
    struct key_bias bias;
    int d;
    int32_t *first, *pair;
    float *u, *coarse, *fine;
};

/* n_pairs [n_kv_heads] marked pairs of each head, every position below n_positions; `size`: of the biases. RoPE's theta is 10,000, its factor 1.25. */
void bias_fixture_make(struct bias_fixture *b, struct ref_rng *rng, int n_kv_heads, int d, int n_positions, const int *n_pairs, double size);
void bias_fixture_free(struct bias_fixture *b);
/* q . R_p b without the scale; q [d]. */
double bias_fixture_term(const struct bias_fixture *b, int kv_head, const float *q, int64_t pos);
