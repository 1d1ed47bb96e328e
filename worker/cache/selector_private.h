/* What selectors have in common: even budgets, scores of the observation window, and keeping the best of a row of scores. */
#pragma once
#include "worker/cache/selector.h"

/* SnapKV's window and pooling, as they were measured; pyramidkv, adakv and chunkkv observe with them too. */
enum { SNAPKV_WINDOW = 32, SNAPKV_POOL = 7 };

/* layer_free and head_free_max of selectors that treat all layers and heads alike. */
int64_t selector_even_layer_free(const struct selector_budget *budget, int layer);
int64_t selector_even_head_free_max(int n_kv_heads, int64_t n_free);
int64_t selector_even_rows_max(const struct selector_shape *shape);

/* Device memory for `n_rows` rows of scores and what is chosen from them. */
size_t selector_rank_bytes(int64_t n_rows, int64_t n_candidates, int64_t n_free);
/* in->scratch as selector_rank_bytes counts it: scores [n_rows, last - first]. */
float *selector_rank_scores(const struct selector_input *in);
/* Keeps the n_free candidates of largest score (ties: lower position) of each KV head. n_rows is n_kv_heads, or 1 when one row of scores is for all heads. */
int selector_rank(const struct selector_input *in, int n_rows, int32_t *ret_n, int32_t *ret_indices);

/* Scores of the observation window, SnapKV's unless the selector says otherwise; each of them fills `scores` [n_kv_heads, last - first], or [1, last - first] for all heads. */
struct selector_window {
    int pool;             /* max pooling along the positions before the window */
    bool pool_after_group;
    bool all_heads;       /* one row: mean over all heads */
    int chunk;            /* mean over aligned chunks of positions; 1: none */
};
int selector_window_scores(const struct selector_input *in, const struct selector_window *window, float *scores);

/* The same with the heads that other ranks have, into selector_rank_scores(in) (selector_ranks.c). Scratch, behind selector_rank_bytes of the rows that are ranked: */
size_t selector_parts_bytes(const struct selector_shape *shape);  /* where heads are compared; */
size_t selector_shared_bytes(const struct selector_shape *shape); /* where each is ranked by itself */
/* One row for all heads of the layer; window->all_heads is set. */
int selector_layer_row(const struct selector_input *in, const struct selector_window *window);
/* A row for each KV head of the layer, pooled after the group. pool: 1 or SNAPKV_POOL. */
int selector_layer_rows(const struct selector_input *in, int pool);
/* A row for each KV head of this rank, by the window, and by the column sums. */
int selector_own_rows(const struct selector_input *in, const struct selector_window *window);
int selector_own_sums(const struct selector_input *in);
