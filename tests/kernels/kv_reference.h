/* Reference for the tests of the cache's ops: everything in double, one value at a time, written from proto/block_layout.h and the formulas alone.
 * Nothing here shares code with kernels/. */
#pragma once
#include "proto/block_layout.h"
#include <stdbool.h>
#include <stdint.h>

/* xorshift64*, so that a test's data do not depend on the C library. */
struct ref_rng {
    uint64_t state; /* not 0 */
};
double ref_uniform(struct ref_rng *rng);  /* [0, 1) */
double ref_gaussian(struct ref_rng *rng); /* mean 0, variance 1 (sum of 12 uniforms) */

double ref_bf16_value(uint16_t bits);
uint16_t ref_bf16_bits(double x); /* nearest, ties to even */
double ref_fp16_value(uint16_t bits);
uint16_t ref_fp16_bits(double x); /* nearest, ties to even; overflow to infinity */

/* Attention of one query: q [d], keys and values [n, d], `visible` [n] or NULL (all), `terms` [n] added to the scaled logits or NULL. m = -INFINITY, l = 0, out = 0 if nothing is visible. */
struct ref_attention_result {
    double m, l; /* max logit, sum exp(logit - m) */
};
struct ref_attention_result ref_attention(const double *q, const double *keys, const double *values, const bool *visible, const double *terms, int n,
                                          int d, double scale, double *out);

/* Key and value of one token as a sub-page gives them back, [d], without the rounding to bf16. */
void ref_page_key(const struct subpage_layout *page_layout, const uint8_t *page, int d, int token, double *key);
void ref_page_value(const struct subpage_layout *page_layout, const uint8_t *page, int d, int token, double *value);
/* Key of one token as the 2-bit index gives it, [d]. */
void ref_index_key(const struct block_layout *layout, const uint8_t *entry, int token, double *key);
