/* The external functions of the op files, one set an instruction set; kernels.h has their contracts. Only isa_ops.c and the op files include this. */
#pragma once
#include "kernels/cpu/cpu_private.h"
#include "kernels/cpu/lanes.h"

int ISA(embed)(struct stream *s, const struct weight *w, const int32_t *ids, int n, float *y);
int ISA(matmul)(struct stream *s, const void *x, int64_t n, int64_t ld_x, const struct matmul_out *outs, int n_outs);
int ISA(rmsnorm)(struct stream *s, const float *x, const float *gamma, float eps, int64_t n, int64_t dim, void *y);
int ISA(silu_mul)(struct stream *s, const float *gate, const float *up, int64_t n, int64_t dim, void *out, int64_t ld_out);
int ISA(rope_table)(struct stream *s, const double *inv_freq, int n_freq, double factor, const int32_t *positions, int n, float *table);
int ISA(qkv_finish)(struct stream *s, const struct qkv_params *p);
int ISA(attn_prefill)(struct stream *s, const struct attn_prefill_params *p);
int ISA(attn_decode)(struct stream *s, struct attn_decode_params *p);
int ISA(page_summaries)(struct stream *s, const struct page_summary_params *p);
int ISA(window_scores)(struct stream *s, const struct window_score_params *p);
int ISA(sample)(struct stream *s, struct sample_row *rows, int n, int n_vocab);
int ISA(keydiff_scores)(struct stream *s, const struct keydiff_params *p);
int ISA(merge_scores)(struct stream *s, const struct score_merge_params *p);
int ISA(attn_column_sums)(struct stream *s, const struct column_sum_params *p);
int ISA(topk)(struct stream *s, const float *scores, int n_rows, int64_t n, int64_t k, int32_t *indices);
int ISA(gather_rows)(struct stream *s, const bf16_t *k, const bf16_t *v, const int32_t *indices, int64_t n, int head_dim, bf16_t *dst_k, bf16_t *dst_v);
int ISA(block_encode)(struct stream *s, const struct block_params *blocks, int n, bool attended, int32_t *bad);
int ISA(block_decode)(struct stream *s, const struct block_params *blocks, int n);
/* Parts of scratch_bytes. */
size_t ISA(attn_decode_scratch)(const struct op_bounds *b);
size_t ISA(window_scores_scratch)(const struct op_bounds *b);
size_t ISA(sample_scratch)(const struct stream *s, const struct op_bounds *b);
