/* The pieces of attn_decode one by one, for tests and benches: attn_rows.h, attn_index.h, attn_pages.h and lse_merge.h say what each computes. The formulas
 * are the op's own, without key biases; the limits on n are those of one partial. Any thread. */
#pragma once
#include "kernels/kv_page.h"

struct attn_pieces {
    int rows_max, index_pages_max, pages_max; /* of one call */
    /* Fast rows: q [group, d], k and v [n, d]; ml [group, 2], o [group, d], not divided by l. */
    void (*rows)(const float *q, int group, int d, float scale, const bf16_t *k, const bf16_t *v, int n, float *ml, float *o);
    /* Index: ml [group, 2] over all slow tokens of the pages, page_sum [group, n]: sum exp(logit - m) of each page. */
    void (*index)(const float *q, int group, float scale, const struct block_layout *layout, const struct kv_page *pages, int n, float *ml, float *page_sum);
    /* Sub-pages: ml [group, 2], o [group, d], not divided by l. */
    void (*pages)(const float *q, int group, float scale, const struct block_layout *layout, const struct kv_page *pages, int n, float *ml, float *o);
    /* n partials of one head, ml [n, 2], o [n, d]: out [d], divided by l. */
    void (*merge)(const float *ml, const float *o, int n, int d, float *out, float *ret_m, float *ret_l);
};

/* NULL for CPU_ISA_AUTO; the caller makes sure that the processor has the instructions (device_ops.open with the same isa succeeds). */
const struct attn_pieces *cpu_attn_pieces(enum cpu_isa isa);

extern const struct attn_pieces attn_pieces_plain, attn_pieces_avx2, attn_pieces_avx512;
