#include "worker/model/tensor_part.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { EXPAND_ROWS = 64 /* at a time */ };

static const struct {
    const char *name;
    struct weight_block block;
} dtypes[WEIGHT_DTYPE_COUNT] = {
    [WEIGHT_F32] = {"f32", {1, 4}},       [WEIGHT_F16] = {"f16", {1, 2}},       [WEIGHT_BF16] = {"bf16", {1, 2}},     [WEIGHT_Q8_0] = {"q8_0", {32, 34}},
    [WEIGHT_Q4_0] = {"q4_0", {32, 18}},   [WEIGHT_Q4_1] = {"q4_1", {32, 20}},   [WEIGHT_Q5_0] = {"q5_0", {32, 22}},   [WEIGHT_Q4_K] = {"q4_k", {256, 144}},
    [WEIGHT_Q5_K] = {"q5_k", {256, 176}}, [WEIGHT_Q6_K] = {"q6_k", {256, 210}},
};

struct weight_block weight_block_of(enum weight_dtype dtype)
{
    return dtypes[dtype].block;
}

const char *weight_dtype_name(enum weight_dtype dtype)
{
    return (unsigned)dtype < WEIGHT_DTYPE_COUNT ? dtypes[dtype].name : "unknown";
}

void tensor_part_columns(enum weight_dtype dtype, const struct tensor_part *part, int64_t *ret_first, int64_t *ret_n)
{
    const int64_t columns = weight_block_of(dtype).columns, first = part->col / columns;
    *ret_first = first * columns;
    *ret_n = ((part->col + part->n_cols + columns - 1) / columns - first) * columns;
}

enum weight_dtype tensor_part_dtype(enum weight_dtype dtype, const struct tensor_part *part)
{
    int64_t first, n;
    tensor_part_columns(dtype, part, &first, &n);
    return n == part->n_cols ? dtype : WEIGHT_F32;
}

static uint64_t columns_bytes(enum weight_dtype dtype, int64_t n_cols)
{
    const struct weight_block block = weight_block_of(dtype);
    return (uint64_t)(n_cols / block.columns * block.bytes);
}

uint64_t tensor_part_bytes(enum weight_dtype dtype, const struct tensor_part *part)
{
    int64_t first, n;
    tensor_part_columns(dtype, part, &first, &n);
    return (uint64_t)part->n_rows * columns_bytes(dtype, n);
}

int tensor_part_read(const struct source_tensor *whole, const struct tensor_part *part, struct source_tensor *ret_read, void **ret_copy)
{
    struct source_tensor read = *whole;
    int64_t first;
    *ret_copy = NULL;
    tensor_part_columns(whole->dtype, part, &first, &read.n_cols);
    read.n_rows = part->n_rows;
    read.bytes = tensor_part_bytes(whole->dtype, part);
    const uint64_t whole_row = columns_bytes(whole->dtype, whole->n_cols), row = columns_bytes(whole->dtype, read.n_cols);
    const uint8_t *from = (const uint8_t *)whole->data + (uint64_t)part->row * whole_row + columns_bytes(whole->dtype, first);
    read.data = from;
    if (row != whole_row && part->n_rows > 1) {
        uint8_t *copy = malloc(read.bytes);
        if (!copy)
            return -ENOMEM;
        for (int64_t i = 0; i < part->n_rows; i++)
            memcpy(copy + (uint64_t)i * row, from + (uint64_t)i * whole_row, row);
        read.data = *ret_copy = copy;
    }
    *ret_read = read;
    return 0;
}

/* Device and host buffers of a piece of rows. */
struct expander {
    const struct tensor_expand_params *p;
    const struct source_tensor *read;
    void *packed, *rows; /* device: [EXPAND_ROWS] packed rows, and their values */
    float *host;         /* the values here */
};

static int expand_rows(struct expander *e, int64_t row, int n)
{
    static const int32_t ids[EXPAND_ROWS] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
                                             32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
    const struct source_tensor *t = e->read;
    const struct tensor_expand_params *p = e->p;
    const struct weight w = {.dtype = t->dtype, .n_rows = n, .n_cols = t->n_cols, .packed = e->packed};
    int r = p->ops->weight_pack(p->stream, t->dtype, n, t->n_cols, (const uint8_t *)t->data + (uint64_t)row * columns_bytes(t->dtype, t->n_cols), e->packed);
    if (r >= 0)
        r = p->ops->embed(p->stream, &w, ids, n, e->rows);
    if (r >= 0)
        r = p->dev->copy(p->stream, e->host, e->rows, (size_t)n * (size_t)t->n_cols * sizeof(float));
    return r < 0 ? r : p->dev->stream_sync(p->stream);
}

int tensor_part_expand(const struct tensor_expand_params *p, const struct source_tensor *read, const struct tensor_part *part, float *ret_values)
{
    struct expander e = {.p = p, .read = read};
    const size_t bytes = EXPAND_ROWS * (size_t)read->n_cols * sizeof(float);
    int64_t first, n_read;
    int r = -ENOMEM;
    tensor_part_columns(read->dtype, part, &first, &n_read);
    e.host = malloc(bytes);
    if (!e.host || (r = p->dev->alloc(p->device, MEM_WORKSPACE, p->ops->weight_bytes(read->dtype, EXPAND_ROWS, read->n_cols), &e.packed)) < 0 ||
        (r = p->dev->alloc(p->device, MEM_WORKSPACE, bytes, &e.rows)) < 0)
        goto fail;
    for (int64_t row = 0; r >= 0 && row < part->n_rows; row += EXPAND_ROWS) {
        const int n = part->n_rows - row < EXPAND_ROWS ? (int)(part->n_rows - row) : EXPAND_ROWS;
        r = expand_rows(&e, row, n);
        for (int i = 0; r >= 0 && i < n; i++)
            memcpy(ret_values + (row + i) * part->n_cols, e.host + (int64_t)i * n_read + part->col - first, (size_t)part->n_cols * sizeof(float));
    }
fail:
    p->dev->free(p->device, e.rows);
    p->dev->free(p->device, e.packed);
    free(e.host);
    return r;
}
