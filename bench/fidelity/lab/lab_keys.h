/* Keys and queries in other bases. The cache's basis is RoPE, then Hadamard/sqrt(b) in blocks of b, the largest power of two that divides the head dim; the rotation is its own
 * inverse. bf16 rows of a KV head on one side, fp32 rows on the other. */
#pragma once
#include "worker/model/model.h"

enum lab_basis { LAB_ROTATED /* as cached */, LAB_AFTER_ROPE, LAB_BEFORE_ROPE };

/* In place on n rows [n, d]. */
void lab_rotate(float *x, int64_t n, int head_dim);
/* rows [n, d] -> x [n, d] in `basis`. `rope` [n, d/2, 2], cos and sin of the rows' positions, for LAB_BEFORE_ROPE only. */
void lab_keys_read(const bf16_t *rows, int64_t n, int head_dim, enum lab_basis basis, enum rope_style style, const float *rope, float *x);
/* The way back, rounded to bf16. x is overwritten. */
void lab_keys_write(float *x, int64_t n, int head_dim, enum lab_basis basis, enum rope_style style, const float *rope, bf16_t *rows);
