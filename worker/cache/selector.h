/* Selectors: which prompt positions a KV head keeps in the fast tier, chosen at the end of a layer's prefill (docs/cache.md). One file each, one const table
 * each; formula, constants and source stand in the head of the file, and so does each deviation from the original.
 *
 * The engine owns what is mandatory: the attention sinks and the newest prompt tokens count inside the budget and are kept for every head whatever a selector says. A selector
 * ranks only the free candidates between them. A choice is a pure function of the layer's queries and keys, so a warm run chooses what a cold one does.
 *
 * How many rows a layer gets is known at admission (layer_free); how the layer's KV heads share them may depend on the scores. */
#pragma once
#include "kernels/collective.h"
#include "kernels/kernels.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SELECT_SINKS = 4,       /* first positions of the sequence, always kept */
    SELECT_MANDATORY = 32,  /* newest prompt tokens, always kept */
};

/* The ranks that share a layer's heads (worker/model/model_shard.h), where there are several. A rank's row of scores of a KV head is its part of that head: all of it, or, with more ranks than KV heads,
 * what the rank's query heads make of it. Parts are counted rank after rank, and so KV head after KV head. */
struct model;
struct selector_ranks {
    int rank, n_ranks;
    int n_kv_heads;                              /* of the model */
    int first_kv_head;                           /* the first of this rank's */
    int32_t part_first[COLLECTIVE_MAX_RANKS + 1]; /* of each rank */
    int32_t head_first[SCORE_PARTS_MAX + 1];     /* of each KV head */
    float share[SCORE_PARTS_MAX];                /* of the KV head's query heads that the part has */
    /* Every rank has written its own of parts [n_parts, n_columns] in device memory; then every rank has all of them. Errors are the collective's. */
    int (*gather)(const struct selector_ranks *ranks, struct stream *stream, float *parts, int64_t n_columns);
    const struct model *model;                   /* borrowed */
};
/* Of a sharded model. -ENOTSUP: more than SCORE_PARTS_MAX parts. */
int selector_ranks_init(const struct model *model, struct selector_ranks *ret_ranks);
/* KV heads are on several ranks each. */
static inline bool selector_ranks_share(const struct selector_ranks *ranks)
{
    return ranks->part_first[ranks->n_ranks] > ranks->n_kv_heads;
}

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
    const struct selector_ranks *ranks; /* n_kv_heads are this rank's; NULL: all heads are here */
};

/* KV heads of the layer. */
int selector_n_kv_heads(const struct selector_shape *shape);

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
    int64_t n_free;        /* how many to choose per KV head of the layer on average, 1 .. last-first */
    const struct selector_ranks *ranks; /* heads and keys are this rank's, and all ranks call alike; NULL: all heads are here */
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
    /* The most that one KV head of one layer of n_kv_heads can get when n_free is the average over layers and heads. */
    int64_t (*head_free_max)(int n_kv_heads, int64_t n_free);
    /* The most that the shape's n_kv_heads heads can get together in a layer: exactly that many where all heads are here, and where every head gets n_free. */
    int64_t (*rows_max)(const struct selector_shape *shape);
    /* Device bytes that `select` needs beside its input; grows with n_free. Called at admission. */
    size_t (*scratch_bytes)(const struct selector_shape *shape);
    /* Fills ret_n [n_kv_heads] with how many candidates each head keeps, n_free on average over all heads of the layer, and ret_indices [rows_max] (both host memory) with their positions, head
     * after head, ascending in each. Waits for the stream. Errors are those of the ops and of ranks->gather; nothing is promised about the outputs then. */
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
