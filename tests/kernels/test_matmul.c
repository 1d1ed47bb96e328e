/* weight_pack, matmul and embed. Because an output is defined as one chain of fma over exact weights, the reference is compared with ==; a sum in double shows that
 * the definition is the right one. */
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/plain_dequant.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A matrix as the file has it, as values, and packed. */
struct matrix {
    struct weight w;
    uint8_t *file;
    float *values; /* [n_rows, n_cols] */
};

static struct matrix matrix_make(struct device *device, struct stream *stream, enum weight_dtype dtype, int64_t n_rows, int64_t n_cols, uint64_t seed)
{
    struct matrix m = {.w = {.dtype = dtype, .n_rows = n_rows, .n_cols = n_cols}};
    size_t row_bytes = plain_row_bytes(dtype, n_cols);
    m.file = malloc(row_bytes * (size_t)n_rows);
    m.values = malloc(sizeof *m.values * (size_t)(n_rows * n_cols));
    plain_fill_rows(dtype, m.file, n_rows, n_cols, seed);
    for (int64_t r = 0; r < n_rows; r++)
        for (int64_t c = 0; c < n_cols; c++)
            m.values[r * n_cols + c] = (float)plain_weight(dtype, m.file + (size_t)r * row_bytes, c);
    void *packed;
    size_t bytes = cpu_kernel_ops()->weight_bytes(dtype, n_rows, n_cols);
    cr_assert_gt(bytes, 0);
    cr_assert_eq(cpu_device_ops()->alloc(device, MEM_WEIGHTS, bytes, &packed), 0);
    memset(packed, 0xFF, bytes);
    cr_assert_eq(cpu_kernel_ops()->weight_pack(stream, dtype, n_rows, n_cols, m.file, packed), 0);
    m.w.packed = packed;
    return m;
}

static void matrix_free(struct device *device, struct matrix *m)
{
    cpu_device_ops()->free(device, (void *)(uintptr_t)m->w.packed);
    free(m->file);
    free(m->values);
}

/* The definition: a chain of fma in the order of the columns, from 0; then bias; then residual. */
static float chain(const struct matrix *m, int64_t row, const float *x)
{
    float acc = 0.0f;
    for (int64_t c = 0; c < m->w.n_cols; c++)
        acc = fmaf(x[c], m->values[row * m->w.n_cols + c], acc);
    return acc;
}

static double exact_sum(const struct matrix *m, int64_t row, const float *x, double *ret_magnitude)
{
    double sum = 0, magnitude = 0;
    for (int64_t c = 0; c < m->w.n_cols; c++) {
        double term = (double)x[c] * (double)m->values[row * m->w.n_cols + c];
        sum += term;
        magnitude += fabs(term);
    }
    *ret_magnitude = magnitude;
    return sum;
}

static void check_rows(const struct matrix *m, const float *x, int64_t ld_x, int64_t n, const float *y, int64_t ld_y)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t r = 0; r < m->w.n_rows; r++) {
            double magnitude, sum = exact_sum(m, r, x + i * ld_x, &magnitude);
            float expected = chain(m, r, x + i * ld_x), actual = y[i * ld_y + r];
            cr_assert(expected == actual, "%s [%lld x %lld] row %lld of %lld, output %lld is %a, the chain gives %a", plain_dtype_name(m->w.dtype),
                      (long long)m->w.n_rows, (long long)m->w.n_cols, (long long)i, (long long)n, (long long)r, actual, expected);
            cr_assert(fabs((double)actual - sum) <= 1e-6 * (magnitude + 1e-30) * sqrt((double)m->w.n_cols), "far from the sum in double");
        }
}

/* Every format, shapes that fill panels and groups and that do not, one row, a few and several tiles. */
static void formats_run(enum cpu_isa isa)
{
    static const int64_t rows[] = {1, 15, 16, 17, 64, 100}, counts[] = {1, 2, 3, 5, 7, 13, 25};
    struct device *device;
    struct stream *stream;
    if (!kernel_test_open(isa, 2, &device, &stream))
        return;
    for (enum weight_dtype dtype = 0; dtype < WEIGHT_DTYPE_COUNT; dtype++)
        for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
            int block = plain_block_cols(dtype);
            int64_t n_cols = block == 1 ? 37 + (int64_t)r * 50 : block == 32 ? 32 * (int64_t)(1 + r * 2) : 256 * (int64_t)(1 + r % 2);
            struct matrix m = matrix_make(device, stream, dtype, rows[r], n_cols, r + 10 * dtype);
            for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
                int64_t n = counts[c], ld_x = n_cols + 3, ld_y = rows[r] + 5;
                float *x = malloc(sizeof *x * (size_t)(n * ld_x)), *y = malloc(sizeof *y * (size_t)(n * ld_y));
                kernel_test_fill(x, n * ld_x, 3 + c, -1.0f, 1.0f);
                kernel_test_fill(y, n * ld_y, 4, 7.0f, 7.0f);
                struct matmul_out out = {.w = &m.w, .y = y, .ld_y = ld_y};
                cr_assert_eq(cpu_kernel_ops()->matmul(stream, x, n, ld_x, &out, 1), 0);
                check_rows(&m, x, ld_x, n, y, ld_y);
                for (int64_t i = 0; i < n; i++)
                    for (int64_t j = rows[r]; j < ld_y; j++)
                        cr_assert_eq(y[i * ld_y + j], 7.0f, "written beyond the row");
                free(x);
                free(y);
            }
            matrix_free(device, &m);
        }
    kernel_test_close(device, stream);
}

Test(matmul, test_every_format_is_the_chain_of_fma_plain)
{
    formats_run(CPU_ISA_PLAIN);
}

Test(matmul, test_every_format_is_the_chain_of_fma_avx2)
{
    formats_run(CPU_ISA_AVX2);
}

Test(matmul, test_every_format_is_the_chain_of_fma_avx512)
{
    formats_run(CPU_ISA_AVX512);
}

Test(matmul, test_embed_gives_the_exact_rows)
{
    KERNEL_TEST_EACH_ISA(isa)
    {
        struct device *device;
        struct stream *stream;
        if (!kernel_test_open(isa, 2, &device, &stream))
            continue;
        for (enum weight_dtype dtype = 0; dtype < WEIGHT_DTYPE_COUNT; dtype++) {
            enum { ROWS = 83, IDS = 7 };
            static const int32_t ids[IDS] = {0, 82, 16, 15, 64, 81, 16};
            int64_t n_cols = plain_block_cols(dtype) == 1 ? 301 : 512;
            struct matrix m = matrix_make(device, stream, dtype, ROWS, n_cols, 31 + dtype);
            float *y = malloc(sizeof *y * IDS * (size_t)n_cols);
            cr_assert_eq(cpu_kernel_ops()->embed(stream, &m.w, ids, IDS, y), 0);
            for (int i = 0; i < IDS; i++)
                for (int64_t c = 0; c < n_cols; c++)
                    cr_assert(y[i * n_cols + c] == m.values[ids[i] * n_cols + c], "%s row %d column %lld", plain_dtype_name(dtype), ids[i], (long long)c);
            cr_assert_eq(cpu_kernel_ops()->embed(stream, &m.w, &(int32_t){ROWS}, 1, y), -EINVAL);
            cr_assert_eq(cpu_kernel_ops()->embed(stream, &m.w, &(int32_t){-1}, 1, y), -EINVAL);
            free(y);
            matrix_free(device, &m);
        }
        kernel_test_close(device, stream);
    }
}

/* Ranks that share a tied head take rows of the embedding as matrices of their own. */
Test(matmul, test_rows_in_units_are_a_matrix)
{
    enum { ROWS = 83 };
    static const int64_t parts[][2] = {{0, 32}, {32, 64}, {32, ROWS}, {64, ROWS}};
    const struct kernel_ops *ops = cpu_kernel_ops();
    struct device *device;
    struct stream *stream;
    cr_assert(kernel_test_open(CPU_ISA_AUTO, 1, &device, &stream));
    for (enum weight_dtype dtype = 0; dtype < WEIGHT_DTYPE_COUNT; dtype++) {
        const int64_t n_cols = plain_block_cols(dtype) == 1 ? 77 : 512;
        struct matrix m = matrix_make(device, stream, dtype, ROWS, n_cols, 7 + dtype);
        float *x = malloc(sizeof *x * (size_t)n_cols), whole[ROWS], y[ROWS];
        kernel_test_fill(x, n_cols, 5, -1.0f, 1.0f);
        struct matmul_out out = {.w = &m.w, .y = whole, .ld_y = ROWS};
        cr_assert_eq(ops->matmul(stream, x, 1, n_cols, &out, 1), 0);
        for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
            const int64_t first = parts[i][0], n = parts[i][1] - first;
            const size_t offset = ops->weight_bytes(dtype, first + WEIGHT_ROWS_UNIT, n_cols) - ops->weight_bytes(dtype, WEIGHT_ROWS_UNIT, n_cols);
            const struct weight part = {.dtype = dtype, .n_rows = n, .n_cols = n_cols, .packed = (const uint8_t *)m.w.packed + offset};
            out = (struct matmul_out){.w = &part, .y = y, .ld_y = n};
            cr_assert_eq(ops->matmul(stream, x, 1, n_cols, &out, 1), 0);
            cr_assert(memcmp(y, whole + first, (size_t)n * sizeof *y) == 0, "%s rows %lld to %lld", plain_dtype_name(dtype), (long long)first, (long long)(first + n));
        }
        free(x);
        matrix_free(device, &m);
    }
    kernel_test_close(device, stream);
}

/* A row's result must not depend on the rows beside it, the number of threads or the instruction set. */
Test(matmul, test_rows_do_not_depend_on_the_batch, .timeout = 100)
{
    enum { ROWS = 208, COLS = 544, MAX = 600 };
    static const int64_t counts[] = {1, 2, 7, 8, 33, 128, 512, 600};
    static const int threads[] = {1, 2, 3};
    float *x = malloc(sizeof *x * MAX * COLS), *y = malloc(sizeof *y * MAX * ROWS), *expected = malloc(sizeof *expected * MAX * ROWS);
    kernel_test_fill(x, MAX * COLS, 77, -2.0f, 2.0f);
    bool have_expected = false;
    KERNEL_TEST_EACH_ISA(isa)
    for (size_t t = 0; t < sizeof threads / sizeof threads[0]; t++) {
        struct device *device;
        struct stream *stream;
        if ((isa == CPU_ISA_PLAIN && t > 1) || !kernel_test_open(isa, threads[t], &device, &stream))
            continue;
        struct matrix m = matrix_make(device, stream, WEIGHT_Q4_1, ROWS, COLS, 5);
        struct matmul_out out = {.w = &m.w, .ld_y = ROWS};
        for (int64_t i = 0; i < MAX && !have_expected; i++) {
            out.y = expected + i * ROWS;
            cr_assert_eq(cpu_kernel_ops()->matmul(stream, x + i * COLS, 1, COLS, &out, 1), 0);
        }
        have_expected = true;
        out.y = y;
        for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
            if (isa == CPU_ISA_PLAIN && counts[c] > 128)
                break;
            int64_t first = MAX - counts[c];
            cr_assert_eq(cpu_kernel_ops()->matmul(stream, x + first * COLS, counts[c], COLS, &out, 1), 0);
            kernel_test_expect_same("a batch", expected + first * ROWS, y, counts[c] * ROWS);
        }
        matrix_free(device, &m);
        kernel_test_close(device, stream);
    }
    free(x);
    free(y);
    free(expected);
}

/* Up to four outputs of different heights and formats over the same x; bias, residual, and a residual that is the output itself. */
static void outputs_run(enum cpu_isa isa, int64_t n)
{
    enum { COLS = 288, OUTS = 4, ROWS_MAX = 96 };
    static const int64_t rows[OUTS] = {96, 48, 19, 64};
    static const enum weight_dtype dtypes[OUTS] = {WEIGHT_Q4_1, WEIGHT_Q8_0, WEIGHT_F16, WEIGHT_Q5_0};
    struct device *device;
    struct stream *stream;
    if (!kernel_test_open(isa, 2, &device, &stream))
        return;
    float *x = malloc(sizeof *x * (size_t)n * COLS), bias[ROWS_MAX];
    kernel_test_fill(x, n * COLS, 12, -1.0f, 1.0f);
    kernel_test_fill(bias, ROWS_MAX, 13, -5.0f, 5.0f);
    struct matrix m[OUTS];
    struct matmul_out outs[OUTS];
    float *y[OUTS], *residual = malloc(sizeof *residual * (size_t)n * ROWS_MAX);
    kernel_test_fill(residual, n * ROWS_MAX, 14, -5.0f, 5.0f);
    for (int i = 0; i < OUTS; i++) {
        m[i] = matrix_make(device, stream, dtypes[i], rows[i], COLS, 50 + (uint64_t)i);
        y[i] = malloc(sizeof **y * (size_t)n * ROWS_MAX);
        memcpy(y[i], residual, sizeof **y * (size_t)n * ROWS_MAX);
        outs[i] = (struct matmul_out){.w = &m[i].w, .y = y[i], .ld_y = ROWS_MAX, .bias = i % 2 ? bias : NULL};
    }
    outs[1].residual = residual;
    outs[2].residual = y[2];
    cr_assert_eq(cpu_kernel_ops()->matmul(stream, x, n, COLS, outs, OUTS), 0);
    for (int i = 0; i < OUTS; i++) {
        for (int64_t j = 0; j < n; j++)
            for (int64_t r = 0; r < rows[i]; r++) {
                float expected = chain(&m[i], r, x + j * COLS);
                if (i % 2)
                    expected += bias[r];
                if (i == 1 || i == 2)
                    expected += residual[j * ROWS_MAX + r];
                cr_assert(y[i][j * ROWS_MAX + r] == expected, "output %d, row %lld, %lld", i, (long long)j, (long long)r);
            }
        free(y[i]);
        matrix_free(device, &m[i]);
    }
    free(x);
    free(residual);
    kernel_test_close(device, stream);
}

Test(matmul, test_several_outputs_with_bias_and_residual)
{
    KERNEL_TEST_EACH_ISA(isa)
    {
        outputs_run(isa, 1);
        outputs_run(isa, 9);
        outputs_run(isa, 150);
    }
}

Test(matmul, test_bad_shapes_are_refused_and_nothing_is_written)
{
    const struct kernel_ops *ops = cpu_kernel_ops();
    struct device *device;
    struct stream *stream;
    cr_assert(kernel_test_open(CPU_ISA_PLAIN, 1, &device, &stream));
    struct matrix a = matrix_make(device, stream, WEIGHT_F32, 4, 8, 1), b = matrix_make(device, stream, WEIGHT_F32, 4, 16, 2);
    float x[16] = {1}, y[8] = {9};
    struct matmul_out outs[5] = {{.w = &a.w, .y = y, .ld_y = 4}, {.w = &b.w, .y = y + 4, .ld_y = 4}};
    cr_assert_eq(ops->matmul(stream, x, 1, 8, outs, 0), -EINVAL);
    cr_assert_eq(ops->matmul(stream, x, 1, 8, outs, 5), -EINVAL);
    cr_assert_eq(ops->matmul(stream, x, 1, 16, outs, 2), -EINVAL, "different widths");
    cr_assert_eq(ops->matmul(stream, x, 1, 7, outs, 1), -EINVAL, "rows of x overlap");
    cr_assert_eq(ops->matmul(stream, x, -1, 8, outs, 1), -EINVAL);
    outs[0].ld_y = 3;
    cr_assert_eq(ops->matmul(stream, x, 1, 8, outs, 1), -EINVAL, "rows of y overlap");
    outs[0].ld_y = 4;
    cr_assert_eq(ops->matmul(stream, x, 0, 8, outs, 1), 0);
    cr_assert_eq(y[0], 9.0f);
    cr_assert_eq(ops->weight_bytes(WEIGHT_Q4_0, 16, 33), 0);
    cr_assert_eq(ops->weight_bytes(WEIGHT_Q4_K, 16, 128), 0);
    cr_assert_eq(ops->weight_bytes(WEIGHT_DTYPE_COUNT, 16, 32), 0);
    cr_assert_eq(ops->weight_pack(stream, WEIGHT_Q4_0, 16, 33, a.file, y), -EINVAL);
    cr_assert_eq(ops->weight_pack(stream, WEIGHT_Q4_0, 0, 32, a.file, y), -EINVAL);
    matrix_free(device, &a);
    matrix_free(device, &b);
    kernel_test_close(device, stream);
}

/* Values that are not finite go where the arithmetic sends them, and no further. */
Test(matmul, test_nan_stays_in_its_row)
{
    KERNEL_TEST_EACH_ISA(isa)
    {
        enum { N = 14, COLS = 64, ROWS = 32 };
        struct device *device;
        struct stream *stream;
        if (!kernel_test_open(isa, 1, &device, &stream))
            continue;
        struct matrix m = matrix_make(device, stream, WEIGHT_Q4_0, ROWS, COLS, 3);
        float x[N * COLS], y[N * ROWS];
        kernel_test_fill(x, N * COLS, 1, -1.0f, 1.0f);
        x[5 * COLS + 7] = NAN;
        struct matmul_out out = {.w = &m.w, .y = y, .ld_y = ROWS};
        cr_assert_eq(cpu_kernel_ops()->matmul(stream, x, N, COLS, &out, 1), 0);
        for (int i = 0; i < N; i++)
            for (int r = 0; r < ROWS; r++)
                cr_assert_eq(isnan(y[i * ROWS + r]) != 0, i == 5, "row %d", i);
        matrix_free(device, &m);
        kernel_test_close(device, stream);
    }
}
