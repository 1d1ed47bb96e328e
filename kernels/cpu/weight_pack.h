/* Slots weight_bytes and weight_pack of kernels.h; the same for every instruction set. */
#pragma once
#include "kernels/cpu/cpu_private.h"

/* 0 for a shape that weight_pack refuses. */
size_t cpu_weight_bytes(enum weight_dtype dtype, int64_t n_rows, int64_t n_cols);
int cpu_weight_pack(struct stream *s, enum weight_dtype dtype, int64_t n_rows, int64_t n_cols, const void *src, void *packed);
