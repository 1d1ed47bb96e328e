/* Parts of matrices of every format: what is read, and what values it has when it begins or ends inside a block. */
#include "tests/kernels/plain_dequant.h"
#include "worker/model/tensor_part.h"
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 150, COLS = 768, PARTS = 6 };

static const struct tensor_part parts[PARTS] = {
    {0, ROWS, 0, COLS}, {32, 65, 0, COLS}, {0, ROWS, 256, 512}, {0, ROWS, 96, 192}, {7, 1, 250, 20}, {0, ROWS, 513, 255},
};

static struct source_tensor make(enum weight_dtype dtype)
{
    struct source_tensor t = {.name = "t", .dtype = dtype, .n_rows = ROWS, .n_cols = COLS, .bytes = plain_row_bytes(dtype, COLS) * ROWS};
    uint8_t *rows = malloc(t.bytes);
    cr_assert(rows);
    plain_fill_rows(dtype, rows, ROWS, COLS, 9 + (uint64_t)dtype);
    t.data = rows;
    return t;
}

/* Every value of what was read. */
static void expect_read(const struct source_tensor *whole, const struct tensor_part *part, const struct source_tensor *read)
{
    const int64_t block = plain_block_cols(whole->dtype);
    const size_t row = plain_row_bytes(whole->dtype, COLS), read_row = plain_row_bytes(whole->dtype, read->n_cols);
    int64_t first, n;
    tensor_part_columns(whole->dtype, part, &first, &n);
    cr_assert(first % block == 0 && n % block == 0 && first <= part->col && first + n >= part->col + part->n_cols && n < part->n_cols + 2 * block);
    cr_assert(read->n_rows == part->n_rows && read->n_cols == n && read->bytes == read_row * (size_t)part->n_rows && read->bytes == tensor_part_bytes(whole->dtype, part));
    for (int64_t r = 0; r < part->n_rows; r++)
        for (int64_t c = 0; c < n; c++)
            cr_assert_eq(plain_weight(whole->dtype, (const uint8_t *)read->data + (size_t)r * read_row, c),
                         plain_weight(whole->dtype, (const uint8_t *)whole->data + (size_t)(part->row + r) * row, first + c));
}

static void expect_values(const struct tensor_expand_params *p, const struct source_tensor *whole, const struct tensor_part *part, const struct source_tensor *read)
{
    float *values = malloc((size_t)(part->n_rows * part->n_cols) * sizeof(float));
    cr_assert_eq(tensor_part_expand(p, read, part, values), 0);
    for (int64_t r = 0; r < part->n_rows; r++)
        for (int64_t c = 0; c < part->n_cols; c++)
            cr_assert_eq(values[r * part->n_cols + c], (float)plain_weight(whole->dtype, (const uint8_t *)whole->data + (size_t)(part->row + r) * plain_row_bytes(whole->dtype, COLS), part->col + c),
                         "%s row %d column %d", weight_dtype_name(whole->dtype), (int)r, (int)c);
    free(values);
}

Test(tensor_part, test_parts_of_every_format)
{
    const struct device_config config = {.n_threads = 1};
    struct tensor_expand_params p = {.dev = cpu_device_ops(), .ops = cpu_kernel_ops()};
    cr_assert(p.dev->open(&config, &p.device) == 0 && p.dev->stream_create(p.device, &p.stream) == 0);
    for (enum weight_dtype dtype = 0; dtype < WEIGHT_DTYPE_COUNT; dtype++) {
        const struct source_tensor whole = make(dtype);
        cr_expect(weight_block_of(dtype).columns == plain_block_cols(dtype) && (size_t)weight_block_of(dtype).bytes == plain_row_bytes(dtype, plain_block_cols(dtype)));
        for (int i = 0; i < PARTS; i++) {
            const bool cut = parts[i].col % plain_block_cols(dtype) != 0 || parts[i].n_cols % plain_block_cols(dtype) != 0;
            struct source_tensor read;
            void *copy;
            cr_assert_eq(tensor_part_read(&whole, &parts[i], &read, &copy), 0);
            cr_expect(!copy == (read.n_cols == COLS || parts[i].n_rows == 1), "rows that lie together are not copied");
            expect_read(&whole, &parts[i], &read);
            expect_values(&p, &whole, &parts[i], &read);
            cr_expect_eq(tensor_part_dtype(dtype, &parts[i]), cut ? WEIGHT_F32 : dtype);
            free(copy);
        }
        free((void *)(uintptr_t)whole.data);
    }
    p.dev->stream_free(p.stream);
    p.dev->close(p.device); /* asserts that nothing is left */
}
