/* The lab: full attention's K and V of a prompt, every layer resident, and a teacher-forced continuation whose attention a method replaces. For what the engine cannot express:
 * other people's caches, which quantize otherwise, choose by other summaries, or throw away while the prompt is still read.
 *
 * The continuation is known, so all its tokens go through a layer's GEMMs together and attention is done for one layer at a time. A method sees the layer's K and V of the prompt
 * and may attend them changed (quantized and read back) or in part; the continuation's own tokens are attended exactly, each with those before it.
 *
 * K is what the cache holds everywhere in the system: bf16, RoPE applied, rotated by Hadamard (proto/block_layout.h). lab_keys.h leads back to the bases in which other
 * methods quantize.
 *
 * CPU device only: methods read device memory as it is. Owner thread of the device. Errors: those of the ops; -ENOMEM; -EINVAL for tokens outside the vocabulary;
 * -ENOTSUP for a model whose key biases are kept out of its keys (kernels.h, struct key_bias): others have them in what they quantize. */
#pragma once
#include "worker/cache/selector.h"
#include "worker/model/model.h"
#include <stdbool.h>

enum {
    LAB_WINDOW = 64,      /* newest queries of the prompt that are kept for methods that look at attention */
    LAB_MAX_NEW = 4096,   /* continuation tokens in one run */
};

enum lab_values { LAB_VALUES_EXACT, LAB_VALUES_K8V4 }; /* what prefill attends in earlier blocks: as computed, or as the pool holds it (consistent prefill) */

/* Eviction while the prompt is read: after each chunk every layer keeps `budget` rows per KV head, and the next chunk attends those alone. */
struct lab_eviction {
    const struct selector_ops *selector; /* ranks what is between the sinks and the newest rows; one that gives its heads different numbers is -ENOTSUP */
    int budget;                          /* rows; more than SELECT_SINKS + SELECT_MANDATORY */
};

struct lab_prefill_params {
    struct model *model;
    const int32_t *tokens; /* [n] */
    int n;                 /* >= 1 */
    int chunk;             /* tokens that go through a layer together, >= 1; n: one shot */
    enum lab_values values;
    const struct lab_eviction *eviction; /* or NULL; with exact values only */
};

/* What a prefill leaves. */
struct lab_context {
    const struct model *model; /* borrowed */
    int n_tokens;          /* the continuation's first position */
    int n_rows;            /* rows of each KV head: n_tokens, or what an eviction left */
    bf16_t *k, *v;         /* [n_layers, n_kv_heads, n_rows, head_dim]; MEM_ACTIVE_KV */
    int n_window;          /* min(LAB_WINDOW, n_tokens) */
    float *window;         /* [n_layers, n_window, n_heads, head_dim] rotated queries of the newest prompt tokens */
    float *hidden;         /* [n_tokens, dim] behind the last layer; MEM_BRIDGE */
    size_t bytes;          /* of all that */
};

/* Blocks for the whole prompt. */
int lab_prefill(const struct lab_prefill_params *p, struct lab_context **ret_context);
void lab_context_free(struct lab_context *context); /* NULL is fine */

/* What a method reads for the continuation, and what it holds. */
struct lab_counters {
    double attended;       /* tokens attended, prompt and continuation, summed over steps, layers and KV heads */
    double bytes_slow;     /* bytes of slow memory that attention read, summed over steps */
    double bytes_fast;     /* bytes of fast memory that the prompt's entries and their summaries take, layers and KV heads together */
};

/* One layer of a continuation, as a method sees it. Strides: head h, row i at k + (h * n_rows + i) * head_dim. */
struct lab_layer {
    const struct lab_context *context;
    int index;             /* of the layer */
    int n_rows, n_new;
    int n_heads, n_kv_heads, group, head_dim;
    const bf16_t *k, *v;         /* [n_kv_heads, n_rows, head_dim] the prompt's */
    const bf16_t *new_k, *new_v; /* [n_kv_heads, n_new, head_dim] the continuation's */
    const float *q;              /* [n_new, n_heads, head_dim] rotated */
    float *out;                  /* [n_new, n_heads, head_dim]: the method's answer */
    struct lab_counters *counters;
};

/* Fills layer->out and adds to the counters. */
typedef int lab_attend_fn(const struct lab_layer *layer, void *arg);
/* Row i: logits [n_vocab] behind continuation token i. */
typedef int lab_logits_fn(void *arg, int row, const float *logits);

struct lab_continuation {
    const struct lab_context *context;
    const int32_t *tokens; /* [n] */
    int n;                 /* 1 .. LAB_MAX_NEW */
    lab_attend_fn *attend;
    void *attend_arg;
    lab_logits_fn *logits; /* in order of rows */
    void *logits_arg;
};
int lab_continue(const struct lab_continuation *c, struct lab_counters *ret_counters);
