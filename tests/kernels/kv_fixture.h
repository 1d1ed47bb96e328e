/* What the tests of the cache's ops share: devices of each instruction set, random bf16 data, comparisons. */
#pragma once
#include "kernels/kernels.h"
#include "tests/kernels/kv_reference.h"
#include <stdbool.h>
#include <stddef.h>

/* Every (instruction set, threads) that a result must not depend on; the first is the reference. Those that the processor lacks are left out. */
enum { FIXTURE_DEVICES = 5 };
struct fixture_device {
    enum cpu_isa isa;
    int n_threads;
    struct device *device;
    struct stream *stream;
};
struct fixture {
    struct fixture_device devices[FIXTURE_DEVICES];
    int n;
    const struct kernel_ops *ops;
};
void fixture_open(struct fixture *f);
void fixture_close(struct fixture *f); /* asserts that the ops left nothing allocated beyond what open held */

/* Gaussian values, [n]; the caller frees. */
float *random_floats(struct ref_rng *rng, size_t n, double scale);
uint16_t *random_bf16(struct ref_rng *rng, size_t n, double scale);
double *widen_floats(const float *x, size_t n);
double *widen_bf16(const uint16_t *x, size_t n);
/* Zeroed memory on a cache line. */
void *aligned_zeros(size_t bytes);

/* Largest |a - b|, and the largest |b|. */
double max_difference(const float *a, const double *b, size_t n);
double max_magnitude(const double *b, size_t n);
