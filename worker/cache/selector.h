/* Selectors: which prompt positions a KV head keeps in the fast tier, chosen at the end of a layer's prefill (docs/cache.md). One file each, one const table
 * each; formula, constants and source stand in the head of the file, and so does each deviation from the original.
 *
 * The engine owns what is mandatory: the attention sinks and the newest prompt tokens count inside the budget and are kept whatever a selector says. A selector
 * ranks only the free candidates between them. A choice is a pure function of the layer's queries and keys, so a warm run chooses what a cold one does. */
#pragma once
#include "kernels/kernels.h"
#include <stddef.h>
#include <stdint.h>

enum {
    SELECT_SINKS = 4,       /* first positions of the sequence, always kept */
    SELECT_MANDATORY = 32,  /* newest prompt tokens, always kept */
};

struct selector_input {
    const struct device_ops *dev;
    const struct kernel_ops *ops;
    struct stream *stream;
    const float *q;        /* [n_window, n_heads, d] rotated queries of the newest n_window prompt tokens; NULL when n_window is 0 */
    int n_window;          /* min(selector's n_window, n_keys) */
    const bf16_t *k;       /* the layer's keys: head h, position p at k + h * head_stride + p * d */
    int64_t head_stride;   /* elements */
    int64_t n_keys;        /* prompt tokens */
    int n_heads, n_kv_heads, head_dim;
    float scale;
    int64_t first, last;   /* candidates are the positions first .. last-1 */
    int64_t n_free;        /* how many to choose per KV head, 1 .. last-first */
    void *scratch;         /* device memory of scratch_bytes() */
};

struct selector_ops {
    const char *name;
    /* Queries observed at the end of the prompt. A prefix hit never covers them. 0: none. */
    int n_window;
    /* Device bytes that `select` needs beside its input, for a prompt of n_keys. Pure; called at admission. */
    size_t (*scratch_bytes)(int n_kv_heads, int64_t n_keys, int64_t n_free);
    /* Fills ret_indices [n_kv_heads, n_free] (host memory) with positions, ascending in each row. Owner thread; waits for the stream. Errors are those of the
     * ops; nothing is promised about ret_indices then. */
    int (*select)(const struct selector_input *in, int32_t *ret_indices);
};

extern const struct selector_ops selector_snapkv;
extern const struct selector_ops selector_streaming;

/* By name; NULL when there is none. */
const struct selector_ops *selector_find(const char *name);
/* "snapkv, streaming", for messages. */
const char *selector_names(void);
