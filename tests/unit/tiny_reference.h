/* The tiny model in plain loops and double precision, full attention over everything: what the engine is held against. Its K and V are rounded to bf16 in the rotated
 * basis, as the system rounds them; biases that are kept out of the cache are added to K behind that. */
#pragma once
#include "tests/unit/engine_fixture.h"

/* Logits [n, TINY_VOCAB] after each of n tokens. */
void tiny_reference_logits(const struct fixture *f, const int32_t *tokens, int n, double *ret_logits);
/* KL(want || got) of the next-token distributions, rows [n_rows, TINY_VOCAB] of logits: the mean, and the largest (ret_max may be NULL). */
double tiny_reference_mean_kl(const double *want, const float *got, int n_rows, double *ret_max);
