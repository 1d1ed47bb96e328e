/* rmsnorm and silu_mul against their formulas in double, and between the instruction sets with ==. */
#include "tests/kernels/kernel_test.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_VALUES = 40000 };

static const int64_t dims[] = {1, 7, 15, 16, 17, 64, 576, 1000, 1536};

static void rmsnorm_check(const float *x, const float *gamma, const float *y, int64_t dim)
{
    double sum = 0;
    for (int64_t i = 0; i < dim; i++)
        sum += (double)x[i] * (double)x[i];
    double scale = 1.0 / sqrt(sum / (double)dim + 1e-5);
    for (int64_t i = 0; i < dim; i++) {
        double exact = (double)x[i] * scale * (double)gamma[i];
        cr_assert(fabs((double)y[i] - exact) <= 1e-6 * fabs(exact), "dim %lld element %lld: %g, expected %g", (long long)dim, (long long)i, (double)y[i], exact);
    }
}

Test(rmsnorm, test_agrees_with_the_formula_and_between_instruction_sets)
{
    float *x = malloc(sizeof *x * MAX_VALUES), *gamma = malloc(sizeof *gamma * MAX_VALUES), *y = malloc(sizeof *y * MAX_VALUES);
    float *plain = malloc(sizeof *plain * MAX_VALUES);
    kernel_test_fill(x, MAX_VALUES, 1, -3.0f, 3.0f);
    kernel_test_fill(gamma, MAX_VALUES, 2, 0.5f, 2.0f);
    KERNEL_TEST_EACH_ISA(isa)
    for (size_t d = 0; d < sizeof dims / sizeof dims[0]; d++) {
        struct device *device;
        struct stream *stream;
        int64_t n = 9, dim = dims[d];
        if (!kernel_test_open(isa, 2, &device, &stream))
            continue;
        cr_assert_eq(cpu_kernel_ops()->rmsnorm(stream, x, gamma, 1e-5f, n, dim, y), 0);
        for (int64_t i = 0; i < n; i++)
            rmsnorm_check(x + i * dim, gamma, y + i * dim, dim);
        float *in_place = malloc(sizeof *in_place * (size_t)(n * dim));
        memcpy(in_place, x, sizeof *in_place * (size_t)(n * dim));
        cr_assert_eq(cpu_kernel_ops()->rmsnorm(stream, in_place, gamma, 1e-5f, n, dim, in_place), 0);
        kernel_test_expect_same("in place", y, in_place, n * dim);
        free(in_place);
        if (isa == CPU_ISA_PLAIN)
            memcpy(plain + d * 4000, y, sizeof *y * (size_t)dim * 2);
        else
            kernel_test_expect_same("rmsnorm", plain + d * 4000, y, dim * 2);
        kernel_test_close(device, stream);
    }
    free(x);
    free(gamma);
    free(y);
    free(plain);
}

Test(rmsnorm, test_rows_of_zeros_and_bad_shapes)
{
    struct device *device;
    struct stream *stream;
    float x[20] = {0}, gamma[20], y[20];
    cr_assert(kernel_test_open(CPU_ISA_AUTO, 1, &device, &stream));
    kernel_test_fill(gamma, 20, 1, 1.0f, 2.0f);
    cr_assert_eq(cpu_kernel_ops()->rmsnorm(stream, x, gamma, 1e-5f, 1, 20, y), 0);
    for (int i = 0; i < 20; i++)
        cr_assert_eq(y[i], 0.0f);
    cr_assert_eq(cpu_kernel_ops()->rmsnorm(stream, x, gamma, 1e-5f, 1, 0, y), -EINVAL);
    cr_assert_eq(cpu_kernel_ops()->rmsnorm(stream, x, gamma, 1e-5f, -1, 20, y), -EINVAL);
    kernel_test_close(device, stream);
}

Test(silu_mul, test_agrees_with_the_formula_and_between_instruction_sets)
{
    float *gate = malloc(sizeof *gate * MAX_VALUES), *up = malloc(sizeof *up * MAX_VALUES);
    float *out = malloc(sizeof *out * MAX_VALUES), *plain = malloc(sizeof *plain * MAX_VALUES);
    kernel_test_fill(gate, MAX_VALUES, 3, -20.0f, 20.0f);
    kernel_test_fill(up, MAX_VALUES, 4, -3.0f, 3.0f);
    static const float edges[] = {INFINITY, -200.0f, 200.0f, 0.0f, -0.0f, -88.5f, 88.5f, 0x1p-140f};
    memcpy(gate, edges, sizeof edges);
    KERNEL_TEST_EACH_ISA(isa)
    {
        struct device *device;
        struct stream *stream;
        int64_t n = 23, dim = 1537;
        if (!kernel_test_open(isa, 2, &device, &stream))
            continue;
        cr_assert_eq(cpu_kernel_ops()->silu_mul(stream, gate, up, n, dim, out, dim), 0);
        for (int64_t i = 1; i < n * dim; i++) {
            double g = (double)gate[i], exact = g / (1.0 + exp(-g)) * (double)up[i];
            cr_assert(fabs((double)out[i] - exact) <= 1e-6 * fabs(exact) + 1e-36, "silu(%g) * %g = %g, expected %g", g, (double)up[i], (double)out[i], exact);
        }
        cr_assert(isinf(out[0]));
        if (isa == CPU_ISA_PLAIN)
            memcpy(plain, out, sizeof *out * MAX_VALUES);
        else
            kernel_test_expect_same("silu_mul", plain, out, n * dim);
        memcpy(out, gate, sizeof *out * MAX_VALUES);
        cr_assert_eq(cpu_kernel_ops()->silu_mul(stream, out, up, n, dim, out, dim), 0);
        kernel_test_expect_same("in place", plain, out, n * dim);
        kernel_test_close(device, stream);
    }
    free(gate);
    free(up);
    free(out);
    free(plain);
}
