/* Safetensors files (one, or a folder with model.safetensors.index.json), memory-mapped read-only, every offset checked. Any thread may read an open set.
 * Format: huggingface/safetensors README. */
#pragma once
#include "proto/base/error.h"
#include <stddef.h>
#include <stdint.h>

enum st_dtype { ST_F32, ST_F16, ST_BF16, ST_OTHER };
struct st_tensor {
    const char *name;
    enum st_dtype dtype;
    uint32_t n_dims;
    uint64_t dims[4]; /* row-major, as in the file: [rows, columns] */
    const void *data;
    uint64_t bytes;
};
struct safetensors;

/* Opens model.safetensors or the shards that model.safetensors.index.json names inside `folder`. */
int safetensors_open(const char *folder, struct safetensors **ret_set, struct error *err);
int safetensors_open_memory(const void *data, size_t size, struct safetensors **ret_set, struct error *err); /* one file; for fuzzing */
void safetensors_close(struct safetensors *set);
const struct st_tensor *safetensors_find(const struct safetensors *set, const char *name);
size_t safetensors_n_tensors(const struct safetensors *set);
const struct st_tensor *safetensors_at(const struct safetensors *set, size_t i);
