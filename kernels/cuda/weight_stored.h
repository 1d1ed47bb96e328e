/* The other form of weights on a GPU: quantized matrices stay as the file has them (rows of blocks, 4.5 to 8.5 bits a value in place of 16) and are expanded for each GEMM; the others are
 * bf16 as in the usual form. Every value that enters a GEMM is the same in both. For models whose weights in bf16 leave no memory for anything else. */
#pragma once
#include "kernels/kernels.h"
#ifdef __cplusplus
extern "C" {
#endif
bool cuda_weight_stays(enum weight_dtype dtype);
/* Expands rows in device memory to bf16 [n_rows, cuda_weight_ld(n_cols)], on the stream. */
int cuda_weight_expand(struct stream *s, enum weight_dtype dtype, const void *src, int64_t n_rows, int64_t n_cols, bf16_t *dst);

/* The ops that see weights, in this form (kernels.h). */
size_t cuda_stored_weight_bytes(enum weight_dtype dtype, int64_t n_rows, int64_t n_cols);
int cuda_stored_weight_pack(struct stream *s, enum weight_dtype dtype, int64_t n_rows, int64_t n_cols, const void *src, void *packed);
int cuda_stored_matmul(struct stream *s, const void *x, int64_t n, int64_t ld_x, const struct matmul_out *outs, int n_outs);
int cuda_stored_embed(struct stream *s, const struct weight *w, const int32_t *ids, int n, float *y);
#ifdef __cplusplus
}
#endif
