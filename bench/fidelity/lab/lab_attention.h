/* Attention in the lab, over rows of bf16. All of it runs on the model's ops. */
#pragma once
#include "bench/fidelity/lab/lab.h"

/* Queries [n, n_heads, d] at rows row0 .. row0 + n - 1 of k and v (head h, row i at k + h * head_stride + i * d), each over rows 0 .. its own. `head_stride` in elements. */
int lab_attend_causal(const struct model *model, const float *q, int n, int row0, const bf16_t *k, const bf16_t *v, int64_t head_stride, float *out);

/* The whole prompt in the values of k and v [n_kv_heads, n_rows, d], and the new tokens. Counts attended tokens. */
int lab_attend_all(const struct lab_layer *layer, const bf16_t *k, const bf16_t *v);

/* Rows of the prompt that one KV head attends whatever the query. */
struct lab_head_rows {
    const bf16_t *k, *v; /* [n, d] */
    int n;
};
/* A part of the prompt, the same for every query, and the new tokens: heads [n_kv_heads]. Counts attended tokens. */
int lab_attend_heads(const struct lab_layer *layer, const struct lab_head_rows *heads);

/* What a query attends: its head's fast rows, and of the units that were chosen for it those tokens that are not fast. Unit u covers rows u * unit .. u * unit + unit - 1. */
struct lab_choice {
    int unit;                    /* rows */
    int n_chosen;                /* units a query and KV head */
    const int32_t *chosen;       /* [n_kv_heads, n_new, n_chosen] ascending */
    const uint8_t *fast;         /* [n_kv_heads, n_rows] 1: in the fast tier; NULL: no row is */
    const bf16_t *slow_k, *slow_v; /* [n_kv_heads, n_rows, d]: what chosen rows read as; the fast ones read as layer->k and v */
    double slow_row_bytes;       /* of one token's K and V in slow memory; 0: the chosen rows lie in fast memory too */
};
/* Counts attended tokens and slow bytes. */
int lab_attend_choice(const struct lab_layer *layer, const struct lab_choice *choice);
