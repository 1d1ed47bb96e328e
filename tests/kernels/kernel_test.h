/* What the kernel tests share: devices of every instruction set, and deterministic inputs. */
#pragma once
#include "kernels/kernels.h"
#include <stdbool.h>
#include <stdint.h>

/* Opens a device; false (with a message) where the machine lacks the instruction set, a failed test for any other reason. */
bool kernel_test_open(enum cpu_isa isa, int n_threads, struct device **ret_device, struct stream **ret_stream);
void kernel_test_close(struct device *device, struct stream *stream);

/* Uniform in [lo, hi), a function of seed and index alone (SplitMix64). */
double kernel_test_uniform(uint64_t seed, uint64_t index, double lo, double hi);
void kernel_test_fill(float *x, int64_t n, uint64_t seed, float lo, float hi);
uint64_t kernel_test_bits(uint64_t seed, uint64_t index);

/* Fails the test where the two differ in a bit, and names the first place. */
void kernel_test_expect_same(const char *what, const float *expected, const float *actual, int64_t n);

#define KERNEL_TEST_EACH_ISA(isa) for (enum cpu_isa isa = CPU_ISA_PLAIN; isa <= CPU_ISA_AVX512; isa++)
