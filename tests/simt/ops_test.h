/* Every op of a GPU backend against the CPU's, in odd shapes, on the emulator or on a real device: the same program, C and libc alone. An op's results are held to the CPU's by a limit on their
 * normalized mean squared error (sum of squared differences over sum of squares), or to the same bytes where the arithmetic allows it. */
#pragma once
#include "kernels/backend.h"
#include <stddef.h>

enum { OPS_TEST_BUFFERS = 128 };

struct ops_test {
    const struct kernel_backend *gpu_backend, *cpu_backend;
    struct device *gpu_device, *cpu_device;
    struct stream *gpu, *cpu;
    const struct kernel_ops *gpu_ops, *cpu_ops;
    void *buffers[OPS_TEST_BUFFERS]; /* device memory of the running test */
    int n_buffers;
    const char *test;                /* its name */
    int n_checks, n_failed;
    uint64_t random;
};

/* Device memory until the test ends: filled with 0xFF, or a copy of host memory. */
void *ops_test_room(struct ops_test *t, size_t bytes);
void *ops_test_upload(struct ops_test *t, const void *src, size_t bytes);
/* To new host memory, after everything submitted. */
void *ops_test_download(struct ops_test *t, const void *device, size_t bytes);
/* Arrays of the backend's input type (kernel_ops.input_bytes), from floats and to them. */
void *ops_test_room_inputs(struct ops_test *t, size_t n);
void *ops_test_upload_inputs(struct ops_test *t, const float *src, size_t n);
float *ops_test_download_inputs(struct ops_test *t, const void *device, size_t n);
void ops_test_round_inputs(struct ops_test *t, float *x, size_t n); /* what comes back from there */
void ops_test_free_buffers(struct ops_test *t); /* before the test ends */
void *ops_test_alloc(size_t bytes); /* 64-byte aligned host memory, filled with 0xFF */

/* Deterministic inputs. */
double ops_test_uniform(struct ops_test *t, double low, double high);
float *ops_test_floats(struct ops_test *t, size_t n, double scale);    /* about normal */
uint16_t *ops_test_bf16(struct ops_test *t, size_t n, double scale);
float ops_test_bf16_value(uint16_t bits);

/* A failed check prints a line; `what` names the shape. */
void ops_test_nmse(struct ops_test *t, const char *what, const float *expected, const float *actual, size_t n, double limit);
void ops_test_same(struct ops_test *t, const char *what, const void *expected, const void *actual, size_t bytes);
void ops_test_true(struct ops_test *t, const char *what, bool condition);
/* Prints a shape into a buffer that the next call overwrites. */
const char *ops_test_shape(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Key biases of n_kv_heads heads, for positions below n_positions: the CPU's arrays are the caller's to free, the GPU's are gone with the test's. */
void ops_test_bias_make(struct ops_test *t, int n_kv_heads, int d, int n_positions, struct key_bias *ret_cpu, struct key_bias *ret_gpu);
void ops_test_bias_free(struct key_bias *cpu);

/* The tests, one group a file. */
void test_ops_device(struct ops_test *t);
void test_ops_elementwise(struct ops_test *t);
void test_ops_matmul(struct ops_test *t);
void test_ops_blocks(struct ops_test *t);
void test_ops_select(struct ops_test *t);
void test_ops_attention(struct ops_test *t);
void test_ops_prefix(struct ops_test *t);
void test_ops_sample(struct ops_test *t);
void test_ops_decode(struct ops_test *t);
void test_ops_page_cache(struct ops_test *t);
void test_ops_decode_fetch(struct ops_test *t);
void test_ops_scores(struct ops_test *t);
void test_ops_steps(struct ops_test *t);
