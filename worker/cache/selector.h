/* Selectors: which prompt positions a KV head keeps in the fast tier, chosen at the end of a layer's prefill (docs/cache.md). One file each, one const table
 * each; formula, constants and source stand in the head of the file, and so does each deviation from the original.
 *
 * The engine owns what is mandatory: the attention sinks and the newest prompt tokens count inside the budget and are kept for every head whatever a selector says. A selector
 * ranks only the free candidates between them. A choice is a pure function of the layer's queries and keys, so a warm run chooses what a cold one does.
 *
 * How many rows a layer gets is known at admission (layer_free); how the layer's KV heads share them may depend on the scores. */
#pragma once
#include "kernels/kernels.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SELECT_SINKS = 4,       /* first positions of the sequence, always kept */
    SELECT_MANDATORY = 32,  /* newest prompt tokens, always kept */
};

/* What a sequence has to share out among its layers. */
struct selector_budget {
    int n_layers;
    int64_t n_keys;         /* prompt tokens */
    int64_t n_candidates;
    int64_t n_free;         /* to choose per layer and KV head, on average; 1 .. n_candidates */
};

/* One layer's task, as admission knows it. */
struct selector_shape {
    int n_kv_heads;
    int64_t n_keys;
    int64_t n_candidates;
    int64_t n_free;         /* per KV head on average, 1 .. n_candidates */
};

struct selector_input {
    const struct device_ops *dev;
    const struct kernel_ops *ops;
    struct stream *stream;
    const float *q;        /* [n_window, n_heads, d] rotated queries of the newest n_window prompt tokens; NULL when n_window is 0 */
    int n_window;          /* min(selector's n_window, n_keys) */
    const float *column_sums; /* [n_kv_heads, n_keys] attention that each key got from all queries of the prompt, summed over the group; NULL unless all_queries */
    const bf16_t *k;       /* the layer's keys: head h, position p at k + h * head_stride + p * d */
    int64_t head_stride;   /* elements */
    int64_t n_keys;        /* prompt tokens */
    int n_heads, n_kv_heads, head_dim;
    float scale;
    const struct key_bias *bias; /* what is missing in k, or NULL: for every op that makes logits */
    int64_t first, last;   /* candidates are the positions first .. last-1; last <= n_keys - n_window */
    int64_t n_free;        /* how many to choose per KV head on average, 1 .. last-first */
    void *scratch;         /* device memory of scratch_bytes() */
};

/* All slots are pure functions but select, which belongs to the owner thread of the device. */
struct selector_ops {
    const char *name;
    /* Queries observed at the end of the prompt, at most SELECT_MANDATORY. A prefix hit never covers them. 0: none. */
    int n_window;
    /* Wants the column sums of attention: then every query is computed and no prefix taken from the pool. */
    bool all_queries;
    /* n_free of one layer: 0 .. n_candidates, and n_layers * n_free over all layers. */
    int64_t (*layer_free)(const struct selector_budget *budget, int layer);
    /* The most that one KV head of one layer can get when n_free is the average over layers and heads. */
    int64_t (*head_free_max)(int n_kv_heads, int64_t n_free);
    /* Device bytes that `select` needs beside its input; grows with n_free. Called at admission. */
    size_t (*scratch_bytes)(const struct selector_shape *shape);
    /* Fills ret_n [n_kv_heads] with how many candidates each head keeps, n_kv_heads * n_free in all, and ret_indices (both host memory) with their positions, head after head,
     * ascending in each. Waits for the stream. Errors are those of the ops; nothing is promised about the outputs then. */
    int (*select)(const struct selector_input *in, int32_t *ret_n, int32_t *ret_indices);
};

extern const struct selector_ops selector_adakv;
extern const struct selector_ops selector_chunkkv;
extern const struct selector_ops selector_h2o;
extern const struct selector_ops selector_keydiff;
extern const struct selector_ops selector_pyramidkv;
extern const struct selector_ops selector_snapkv;
extern const struct selector_ops selector_streaming;
extern const struct selector_ops selector_tova;

/* By name; NULL when there is none. */
const struct selector_ops *selector_find(const char *name);
/* All names, for messages: "snapkv, streaming". */
const char *selector_names(void);
