/* A dense decoder-only transformer in pieces: the caller owns hidden states, positions, caches and attention, and drives one layer after the other.
 * That is what lets the engine run layer-major. Every call comes from the thread that owns the device and is asynchronous on the model's stream (CPU: done on
 * return). Activations are fp32, row-major, but for what products read, which has the backend's
 * input type (kernel_ops.input_bytes). Each output row depends on its own input row alone, whatever n is.
 *
 *     model_embed(m, ids, n, x);
 *     model_rope_table(m, positions, n, table);
 *     for (layer ...) {
 *         model_layer_qkv(m, layer, x, n, table, dst, ws);      // ws->q and dst[i].k, dst[i].v are ready
 *         ... attention: reads ws->q, writes ws->attn_out ...
 *         model_layer_out(m, layer, x, n, ws);                  // x is the next layer's input
 *     }
 *     model_logits(m, x, n, ws, logits);
 *
 * Of a sharded model (model_shard.h) every rank makes the same calls; x and logits are whole and the same on every rank, q, K and V are those of the rank's heads.
 *
 * Errors: 0; -EINVAL or -ENOTSUP from an op; a device's sticky error; -ECONNRESET or -ETIMEDOUT from a collective. After a failure the contents of x, ws and dst are undefined. */
#pragma once
#include "kernels/collective.h"
#include "kernels/kernels.h"
#include "proto/base/error.h"
#include "proto/block_key.h"
#include "proto/block_layout.h"
#include "worker/model/model_config.h"
#include "worker/model/model_key_bias.h"
#include "worker/model/model_shard.h"
#include "worker/model/model_weights.h"

struct model {
    struct model_config config;
    struct model_weights weights;
    struct model_key_bias key_bias; /* large key biases are here and no longer in the weights */
    const struct device_ops *dev; /* borrowed, like device and stream: they outlive the model */
    const struct kernel_ops *ops;
    struct device *device;
    struct stream *stream;
    const struct collective_ops *collective_ops; /* of a sharded model (model_join), borrowed; else NULL */
    struct collective *collective;
};

struct model_open_params {
    const char *path; /* GGUF file or Hugging Face folder */
    const struct model_config *random; /* or NULL; then weights of this shape are drawn at random (random_weights.h), and path is not used */
    uint64_t random_seed;
    int rank, n_ranks; /* this process's part (model_shard.h); 0, 0: the whole model */
    const struct device_ops *dev;
    const struct kernel_ops *ops;
    struct device *device;
    struct stream *stream;
    model_progress_fn *progress; /* or NULL */
    void *progress_arg;
};

/* Blocks until the weights are on the device. Errors as model_config_load and model_weights_load. */
int model_open(const struct model_open_params *p, struct model **ret_model, struct error *err);
/* What its weights would take with these ops; nothing is loaded, and device and stream are not used. Errors likewise. */
int model_measure(const struct model_open_params *p, struct model_weights_size *ret_size, struct error *err);
void model_close(struct model *model); /* NULL is fine */
/* Who a sharded model computes with: from now until it is closed, forward calls are made by all ranks alike, and their results are the same on all. The collective's gather_columns are at
 * least model_gather_columns(config). Before the first forward call. */
void model_join(struct model *model, const struct collective_ops *ops, struct collective *collective);
/* Logits of one token, or a row of scores for every KV head, or the part of it that a rank has (worker/cache/selector.h). */
static inline int64_t model_gather_columns(const struct model_config *config)
{
    const struct model_shard *s = &config->shard;
    const int64_t scores = (int64_t)(s->all_kv_heads > s->n_ranks ? s->all_kv_heads : s->n_ranks) * config->max_context;
    return config->n_vocab > scores ? config->n_vocab : scores;
}

/* Identity of the KV that this model makes (docs/design.md, block identity): weights, layer and head geometry, RoPE, key biases kept out, block format and layout version, tensor-parallel degree and rank. */
void model_fingerprint(const struct model *model, enum kv_format format, int tp_degree, int tp_rank, uint8_t ret_fingerprint[FINGERPRINT_BYTES]);

/* What all ranks of one model have in common, and no other model has. */
void model_family(const struct model *model, uint8_t ret_family[FINGERPRINT_BYTES]);

/* Activations of up to n_max tokens in one piece of MEM_WORKSPACE. Buffers share memory where their lives do not meet: `norm` with `attn_out`; q, k, v and `shared` with mid, gate and up. */
struct model_workspace {
    void *memory;
    size_t bytes;
    int n_max;
    int mlp_rows;    /* tokens that the MLP takes at a time */
    int64_t lot;     /* floats of gate, and of up */
    void *norm;      /* [n_max, dim] of the input type */
    float *q;        /* [n_max, n_heads, head_dim]: valid from model_layer_qkv to model_layer_out, which overwrites it */
    float *k, *v;    /* [n_max, n_kv_heads, head_dim]: scratch of model_layer_qkv */
    void *attn_out;  /* [n_max, n_heads, head_dim] of the input type: written by the caller between the two */
    void *shared;    /* the caller's, as many bytes as it asked for: model_layer_out overwrites it */
    void *mid;       /* [mlp_rows, ffn_dim] of the input type, silu(gate) * up: scratch of model_layer_out; may be gate */
    float *gate, *up; /* [lot]: as many columns of each as there is room for; likewise */
};

/* Bytes that model_workspace_init takes from the arena; from the configuration alone, for plans. n_max >= 1; `shared`: bytes of ws->shared. */
size_t model_workspace_bytes(const struct kernel_ops *ops, const struct model_config *config, int n_max, size_t shared);
/* -EINVAL (n_max), -ENOMEM. */
int model_workspace_init(struct model_workspace *ws, const struct model *model, int n_max, size_t shared);
void model_workspace_fini(struct model_workspace *ws, const struct model *model); /* a zeroed struct is fine */

/* x[i] = embedding of ids[i]; [n, dim]. -EINVAL for an id outside 0..n_vocab-1. */
int model_embed(const struct model *model, const int32_t *ids, int n, float *x);
/* cos and sin for positions[n]: [n, head_dim / 2, 2]. Serves every layer. */
int model_rope_table(const struct model *model, const int32_t *positions, int n, float *table);
/* Norm, projections, RoPE and rotation of x [n, dim], n <= n_max. Token i's K and V go to dst[i] (bf16), K without the biases of marked pairs (model_key_bias.h): whoever
 * attends passes the layer's struct key_bias. Its Q stays in ws->q. */
int model_layer_qkv(const struct model *model, int layer, const float *x, int n, const float *rope_table, const struct kv_dst *dst,
                    struct model_workspace *ws);
/* x += attn_out Wo^T; x += MLP(norm(x)). In place on x [n, dim], n <= n_max. */
int model_layer_out(const struct model *model, int layer, float *x, int n, struct model_workspace *ws);
/* Final norm and head: logits [n, n_vocab] of x [n, dim] (not changed), n <= n_max. */
int model_logits(const struct model *model, const float *x, int n, struct model_workspace *ws, float *logits);
