/* Weights of every format, embedding rows and GEMM. The GPU keeps weights and inputs in bf16, so results are held to the CPU's by 2e-5 (two roundings of 2^-9 make 5e-6). */
#include "tests/kernels/plain_dequant.h"
#include "tests/simt/ops_test.h"
#include <errno.h>
#include <stdlib.h>

struct matrix {
    struct weight cpu, gpu;
    uint8_t *file;
    void *cpu_packed;
};

static struct matrix matrix_make(struct ops_test *t, enum weight_dtype dtype, int64_t n_rows, int64_t n_cols)
{
    struct matrix m = {.cpu = {.dtype = dtype, .n_rows = n_rows, .n_cols = n_cols}};
    m.file = ops_test_alloc(plain_row_bytes(dtype, n_cols) * (size_t)n_rows);
    plain_fill_rows(dtype, m.file, n_rows, n_cols, (uint64_t)(n_rows * 31 + n_cols));
    m.gpu = m.cpu;
    m.cpu.packed = m.cpu_packed = ops_test_alloc(t->cpu_ops->weight_bytes(dtype, n_rows, n_cols));
    m.gpu.packed = ops_test_room(t, t->gpu_ops->weight_bytes(dtype, n_rows, n_cols));
    t->cpu_ops->weight_pack(t->cpu, dtype, n_rows, n_cols, m.file, m.cpu_packed);
    ops_test_true(t, "weight_pack", t->gpu_ops->weight_pack(t->gpu, dtype, n_rows, n_cols, m.file, (void *)(uintptr_t)m.gpu.packed) == 0);
    return m;
}

static void matrix_free(struct matrix *m)
{
    free(m->file);
    free(m->cpu_packed);
}

/* Rows as embedded are the weights themselves, to half a unit of bf16. */
static void embed(struct ops_test *t, enum weight_dtype dtype, int64_t n_rows, int64_t n_cols)
{
    int32_t ids[5] = {0, (int32_t)n_rows - 1, 1, (int32_t)n_rows / 2, 0};
    const size_t count = 5 * (size_t)n_cols, bytes = count * sizeof(float);
    struct matrix m = matrix_make(t, dtype, n_rows, n_cols);
    float *expected = ops_test_alloc(bytes), *dy = ops_test_room(t, bytes);
    t->cpu_ops->embed(t->cpu, &m.cpu, ids, 5, expected);
    ops_test_true(t, "embed", t->gpu_ops->embed(t->gpu, &m.gpu, ids, 5, dy) == 0);
    float *actual = ops_test_download(t, dy, bytes);
    ops_test_nmse(t, ops_test_shape("embed %s [%d, %d]", plain_dtype_name(dtype), (int)n_rows, (int)n_cols), expected, actual, count, dtype == WEIGHT_BF16 ? 0 : 4e-6);
    ids[2] = (int32_t)n_rows;
    ops_test_true(t, "an id outside", t->gpu_ops->embed(t->gpu, &m.gpu, ids, 5, dy) == -EINVAL);
    matrix_free(&m);
    free(expected), free(actual);
}

/* Rows from a multiple of WEIGHT_ROWS_UNIT on are a matrix of their own. */
static void rows_in_units(struct ops_test *t, enum weight_dtype dtype)
{
    enum { ROWS = 75, FIRST = 64, N = ROWS - FIRST };
    const int64_t n_cols = plain_block_cols(dtype) == 1 ? 37 : plain_block_cols(dtype) * 2;
    const size_t bytes = N * (size_t)n_cols * sizeof(float);
    int32_t ids[N], own[N];
    struct matrix m = matrix_make(t, dtype, ROWS, n_cols);
    struct weight part = m.gpu;
    part.n_rows = N;
    part.packed = (const uint8_t *)m.gpu.packed + t->gpu_ops->weight_bytes(dtype, FIRST + WEIGHT_ROWS_UNIT, n_cols) - t->gpu_ops->weight_bytes(dtype, WEIGHT_ROWS_UNIT, n_cols);
    for (int i = 0; i < N; i++)
        ids[i] = FIRST + (own[i] = i);
    float *whole = ops_test_room(t, bytes), *rows = ops_test_room(t, bytes);
    ops_test_true(t, "embed", t->gpu_ops->embed(t->gpu, &m.gpu, ids, N, whole) == 0 && t->gpu_ops->embed(t->gpu, &part, own, N, rows) == 0);
    float *expected = ops_test_download(t, whole, bytes), *actual = ops_test_download(t, rows, bytes);
    ops_test_same(t, ops_test_shape("rows of %s in units", plain_dtype_name(dtype)), expected, actual, bytes);
    matrix_free(&m);
    free(expected), free(actual);
}

/* Two weights over the same x, with strides, a bias, and a residual in place or elsewhere. */
static void matmul(struct ops_test *t, enum weight_dtype dtype, int n, int rows_a, int rows_b, int n_cols)
{
    /* Rows of whole vectors, and not. */
    const size_t ld_x = (size_t)n_cols + (n % 2 ? 3 : 4), ld_a = (size_t)rows_a + 5, ld_b = (size_t)rows_b, a_bytes = sizeof(float) * ld_a * (size_t)n, b_bytes = sizeof(float) * ld_b * (size_t)n;
    struct matrix a = matrix_make(t, dtype, rows_a, n_cols), b = matrix_make(t, dtype, rows_b, n_cols);
    float *x = ops_test_floats(t, ld_x * (size_t)n, 1), *bias = ops_test_floats(t, (size_t)rows_a, .1), *residual = ops_test_floats(t, ld_b * (size_t)n, .2);
    float *ya = ops_test_floats(t, ld_a * (size_t)n, 1), *yb = ops_test_alloc(b_bytes);
    void *dx = ops_test_upload_inputs(t, x, ld_x * (size_t)n);
    float *dbias = ops_test_upload(t, bias, sizeof(float) * (size_t)rows_a), *dresidual = ops_test_upload(t, residual, b_bytes);
    float *dya = ops_test_upload(t, ya, a_bytes), *dyb = ops_test_room(t, b_bytes);
    struct matmul_out cpu[2] = {{.w = &a.cpu, .y = ya, .ld_y = (int64_t)ld_a, .bias = bias, .residual = ya}, {.w = &b.cpu, .y = yb, .ld_y = (int64_t)ld_b, .residual = residual}};
    struct matmul_out gpu[2] = {{.w = &a.gpu, .y = dya, .ld_y = (int64_t)ld_a, .bias = dbias, .residual = dya}, {.w = &b.gpu, .y = dyb, .ld_y = (int64_t)ld_b, .residual = dresidual}};
    t->cpu_ops->matmul(t->cpu, x, n, (int64_t)ld_x, cpu, 2);
    ops_test_true(t, "matmul", t->gpu_ops->matmul(t->gpu, dx, n, (int64_t)ld_x, gpu, 2) == 0);
    float *ga = ops_test_download(t, dya, a_bytes), *gb = ops_test_download(t, dyb, b_bytes);
    const char *shape = ops_test_shape("matmul %s n %d rows %d, %d cols %d", plain_dtype_name(dtype), n, rows_a, rows_b, n_cols);
    ops_test_nmse(t, shape, ya, ga, ld_a * (size_t)n, 2e-5); /* what lies between the rows is as it was */
    ops_test_nmse(t, shape, yb, gb, ld_b * (size_t)n, 2e-5);
    matrix_free(&a), matrix_free(&b);
    free(x), free(bias), free(residual), free(ya), free(yb), free(ga), free(gb);
}

/* The library's workspace is one for all streams. */
static void two_streams(struct ops_test *t)
{
    enum { N = 5, ROWS = 9, COLS = 40, STREAMS = 2, ROUNDS = 3 };
    const struct device_ops *ops = t->gpu_backend->device;
    struct matrix m = matrix_make(t, WEIGHT_BF16, ROWS, COLS);
    struct stream *streams[STREAMS] = {t->gpu, NULL};
    void *dx[STREAMS];
    float *x[STREAMS], *dy[STREAMS][ROUNDS], expected[N * ROWS];
    ops_test_true(t, "stream", ops->stream_create(t->gpu_device, &streams[1]) == 0);
    for (int s = 0; s < STREAMS; s++) {
        x[s] = ops_test_floats(t, N * COLS, 1);
        dx[s] = ops_test_upload_inputs(t, x[s], N * COLS);
        for (int i = 0; i < ROUNDS; i++)
            dy[s][i] = ops_test_room(t, sizeof expected);
    }
    ops->stream_sync(t->gpu);
    for (int i = 0; i < ROUNDS; i++)
        for (int s = 0; s < STREAMS; s++) {
            struct matmul_out out = {.w = &m.gpu, .y = dy[s][i], .ld_y = ROWS};
            ops_test_true(t, "matmul", t->gpu_ops->matmul(streams[s], dx[s], N, COLS, &out, 1) == 0);
        }
    ops->stream_sync(streams[1]);
    for (int s = 0; s < STREAMS; s++) {
        struct matmul_out out = {.w = &m.cpu, .y = expected, .ld_y = ROWS};
        t->cpu_ops->matmul(t->cpu, x[s], N, COLS, &out, 1);
        for (int i = 0; i < ROUNDS; i++) {
            float *y = ops_test_download(t, dy[s][i], sizeof expected);
            ops_test_nmse(t, "matmul on two streams", expected, y, N * ROWS, 2e-5);
            free(y);
        }
        free(x[s]);
    }
    ops->stream_free(streams[1]);
    matrix_free(&m);
}

/* Quantized weights that stay as they are: the same rows and products as from bf16, to the bit where the GEMM is one that does not choose by shape (the emulator's), and they take no more than
 * the file's bytes. */
static void stored_form(struct ops_test *t)
{
    static const enum weight_dtype quantized[] = {WEIGHT_Q8_0, WEIGHT_Q4_0, WEIGHT_Q4_1, WEIGHT_Q5_0, WEIGHT_Q4_K, WEIGHT_Q5_K, WEIGHT_Q6_K};
    const struct kernel_ops *expanded = t->gpu_ops, *stored = t->gpu_backend->stored_ops;
    for (size_t i = 0; i < sizeof quantized / sizeof *quantized; i++) {
        const int64_t n_cols = plain_block_cols(quantized[i]) * 3;
        ops_test_true(t, "bytes of the stored form", stored->weight_bytes(quantized[i], 7, n_cols) == 7 * plain_row_bytes(quantized[i], n_cols));
        t->gpu_ops = stored;
        embed(t, quantized[i], 7, n_cols);
        rows_in_units(t, quantized[i]);
        t->gpu_ops = expanded;
    }
    t->gpu_ops = stored;
    matmul(t, WEIGHT_Q4_1, 9, 33, 20, 96);
    matmul(t, WEIGHT_Q6_K, 3, 17, 5, 512);
    matmul(t, WEIGHT_BF16, 1, 17, 3, 29);
    t->gpu_ops = expanded;
    ops_test_true(t, "bytes of bf16", stored->weight_bytes(WEIGHT_BF16, 7, 30) == expanded->weight_bytes(WEIGHT_BF16, 7, 30) && stored->weight_bytes(WEIGHT_Q4_0, 0, 32) == 0);
}

/* More rows than one lot of expanded ones: ld * 2 bytes a row, 16 MiB a lot. The operands of both forms are the same. */
static void stored_lots(struct ops_test *t)
{
    enum { N = 2, ROWS = 523, COLS = 16384 }; /* a lot has 512 */
    const struct kernel_ops *expanded = t->gpu_ops, *forms[2] = {expanded, t->gpu_backend->stored_ops};
    float *x = ops_test_floats(t, N * COLS, 1), *y[2];
    void *dx = ops_test_upload_inputs(t, x, N * COLS);
    for (int i = 0; i < 2; i++) {
        t->gpu_ops = forms[i];
        struct matrix m = matrix_make(t, WEIGHT_Q4_0, ROWS, COLS);
        float *dy = ops_test_room(t, sizeof(float) * N * ROWS);
        struct matmul_out out = {.w = &m.gpu, .y = dy, .ld_y = ROWS};
        ops_test_true(t, "matmul", t->gpu_ops->matmul(t->gpu, dx, N, COLS, &out, 1) == 0);
        y[i] = ops_test_download(t, dy, sizeof(float) * N * ROWS);
        matrix_free(&m);
    }
    t->gpu_ops = expanded;
    ops_test_nmse(t, "lots of stored rows", y[0], y[1], N * ROWS, 1e-10);
    free(x), free(y[0]), free(y[1]);
}

void test_ops_matmul(struct ops_test *t)
{
    two_streams(t);
    stored_form(t);
    stored_lots(t);
    static const enum weight_dtype dtypes[] = {WEIGHT_F32, WEIGHT_F16, WEIGHT_BF16, WEIGHT_Q8_0, WEIGHT_Q4_0, WEIGHT_Q4_1, WEIGHT_Q5_0, WEIGHT_Q4_K, WEIGHT_Q5_K, WEIGHT_Q6_K};
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        embed(t, dtypes[i], 7, dtypes[i] < WEIGHT_Q8_0 ? 37 : plain_block_cols(dtypes[i]) * 3);
    rows_in_units(t, WEIGHT_F32);
    rows_in_units(t, WEIGHT_Q4_K);
    matmul(t, WEIGHT_BF16, 2, 9, 3, 1100);
    matmul(t, WEIGHT_BF16, 1, 17, 3, 29);
    matmul(t, WEIGHT_Q4_1, 9, 33, 20, 96);
    ops_test_true(t, "no rows", t->gpu_ops->weight_bytes(WEIGHT_BF16, 0, 8) == 0 && t->gpu_ops->weight_bytes(WEIGHT_Q4_K, 8, 128) == 0);
}
