/* The weights of a model in device memory, packed by the backend (MEM_WEIGHTS). Created by the thread that owns the device; read by its ops.
 * The files are needed only while loading. */
#pragma once
#include "kernels/kernels.h"
#include "proto/base/error.h"
#include "worker/model/model_config.h"
#include "worker/model/tensor_part.h"
#include "worker/model/weight_source.h"

/* A projection and its optional bias. y = x W^T + b. */
struct model_linear {
    struct weight w;
    float *bias; /* [w.n_rows] or NULL */
};

/* Of a rank: its heads, columns and rows (model_shard.h), with n_heads, n_kv_heads and ffn_dim of its configuration. */
struct model_layer_weights {
    float *attn_norm, *ffn_norm; /* [dim] */
    struct model_linear q;       /* [n_heads * head_dim, dim] */
    struct model_linear k, v;    /* [n_kv_heads * head_dim, dim]; of k's bias what model_key_bias.h leaves in the key */
    struct model_linear o;       /* [dim, n_heads * head_dim] */
    struct model_linear gate, up; /* [ffn_dim, dim] */
    struct model_linear down;    /* [dim, ffn_dim] */
};

enum { WEIGHTS_DIGEST_BYTES = 32 };

struct model_weights {
    struct model_layer_weights *layers; /* [n_layers] */
    int n_layers;
    struct weight embedding;            /* [n_vocab, dim] */
    struct weight head;                 /* [n_vocab, dim], a rank's: its rows of that, perhaps none; shares the embedding's memory when tied */
    float *final_norm;                  /* [dim] */
    void **memory;                      /* [n_memory] every allocation, in order */
    size_t n_memory;
    uint64_t file_bytes;                /* of the tensors that were loaded */
    uint8_t family[WEIGHTS_DIGEST_BYTES]; /* the same on every rank: BLAKE2b-256 over name, dtype and shape of every whole tensor and a sample of its bytes (both ends) */
    uint8_t digest[WEIGHTS_DIGEST_BYTES]; /* BLAKE2b-256 over name, dtype, shape and XXH3-128 of the bytes of every loaded tensor, in loading order */
};

/* Bytes of the file packed so far and in all; called on the loading thread after every tensor. */
typedef void model_progress_fn(void *arg, uint64_t done_bytes, uint64_t total_bytes);

struct model_weights_params {
    const struct model_config *config;
    const struct weight_source *source;
    const struct device_ops *dev;
    const struct kernel_ops *ops;
    struct device *device;
    struct stream *stream;
    model_progress_fn *progress; /* or NULL */
    void *progress_arg;
};

/* Maps, checks, packs and digests every tensor, of a rank's configuration its part of each; done when it returns. -EINVAL (a tensor is missing or has another shape), -ENOTSUP (its type, or a
 * tensor that this architecture does not have: ignoring one would compute something else), -ENOMEM. */
int model_weights_load(const struct model_weights_params *p, struct model_weights *ret_weights, struct error *err);

struct model_weights_size {
    uint64_t file_bytes; /* of the tensors that would be loaded */
    size_t device_bytes; /* MEM_WEIGHTS once they are */
    bool has_key_bias;   /* then model_open sets qkv_bias in the configuration, which plans depend on */
};
/* What model_weights_load would take, without loading: of the source's tensors, or with a NULL source of the tensors that the configuration must have, its matrices in
 * `dtype`. Of the parameters it uses config, source and ops. Errors as model_weights_load. */
int model_weights_measure(const struct model_weights_params *p, enum weight_dtype dtype, struct model_weights_size *ret_size, struct error *err);
/* Columns of the largest block in the down projections of a source, the unit in which their columns are shared (model_shard_split). Whole models ask nothing of it. */
int model_weights_ffn_unit(const struct weight_source *source, int n_layers);
/* A zeroed struct is fine. */
void model_weights_fini(struct model_weights *weights, const struct device_ops *dev, struct device *device);
