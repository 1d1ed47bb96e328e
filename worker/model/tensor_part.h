/* Parts of a file's matrices, for ranks that hold some rows or some columns of each (model_shard.h). Owner thread of the device. */
#pragma once
#include "kernels/kernels.h"
#include "proto/base/error.h"
#include "worker/model/weight_source.h"

struct tensor_part {
    int64_t row, n_rows, col, n_cols;
};

/* A block of the file's rows: so many columns in so many bytes. */
struct weight_block {
    int64_t columns, bytes;
};
struct weight_block weight_block_of(enum weight_dtype dtype);
const char *weight_dtype_name(enum weight_dtype dtype); /* "bf16", "q4_k" */

/* Columns are read in whole blocks: the first one that is, and how many are. */
void tensor_part_columns(enum weight_dtype dtype, const struct tensor_part *part, int64_t *ret_first, int64_t *ret_n);
/* The dtype that the part is kept in: its own, or fp32 where it begins or ends inside a block. Then the values are those of the whole matrix, and take more memory. */
enum weight_dtype tensor_part_dtype(enum weight_dtype dtype, const struct tensor_part *part);
uint64_t tensor_part_bytes(enum weight_dtype dtype, const struct tensor_part *part);
/* The part's rows of the columns that are read, contiguous: in the mapping, or in *ret_copy (malloc), which the caller frees; else that is NULL. -ENOMEM. */
int tensor_part_read(const struct source_tensor *whole, const struct tensor_part *part, struct source_tensor *ret_read, void **ret_copy);

struct tensor_expand_params {
    const struct device_ops *dev;
    const struct kernel_ops *ops;
    struct device *device;
    struct stream *stream;
};
/* The part in fp32, [n_rows, n_cols], from what was read: expanded on the device, as the matrix itself would be. -ENOMEM, or the error of an op. */
int tensor_part_expand(const struct tensor_expand_params *p, const struct source_tensor *read, const struct tensor_part *part, float *ret_values);
