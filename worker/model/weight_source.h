/* One view of a model's tensors for GGUF files, safetensors folders and weights drawn at random: found by role, as rows of columns. Owner thread only while open. */
#pragma once
#include "kernels/kernels.h"
#include "proto/base/error.h"
#include <stdbool.h>

/* The tensors that the supported architectures have. Those from TENSOR_LAYER_FIRST on are there once a layer. */
enum tensor_role {
    TENSOR_EMBEDDING,
    TENSOR_FINAL_NORM,
    TENSOR_HEAD,
    TENSOR_ATTN_NORM,
    TENSOR_Q,
    TENSOR_K,
    TENSOR_V,
    TENSOR_O,
    TENSOR_FFN_NORM,
    TENSOR_GATE,
    TENSOR_UP,
    TENSOR_DOWN,
    TENSOR_ROLE_COUNT,
    TENSOR_LAYER_FIRST = TENSOR_ATTN_NORM,
};

enum { TENSOR_NAME_BYTES = 96 };

struct source_tensor {
    char name[TENSOR_NAME_BYTES]; /* in the file */
    enum weight_dtype dtype;
    int64_t n_rows, n_cols;       /* a vector is one row */
    const void *data;             /* borrowed from the mapping; rows of n_cols, GGUF block order; any alignment */
    uint64_t bytes;
};

struct gguf;
struct safetensors;
struct random_weights;
struct weight_source {
    struct gguf *gguf; /* one of the three is open */
    struct safetensors *safetensors;
    struct random_weights *random;
};

/* `path` is a GGUF file or a folder. Errors as gguf_open and safetensors_open. */
int weight_source_open(const char *path, struct weight_source *ret_source, struct error *err);
void weight_source_close(struct weight_source *source);

/* The weight (or the bias) of `role` in `layer` (ignored for roles outside layers). -ENOENT when absent, without a text; -ENOTSUP for a dtype that
 * is not supported; -EINVAL when it is no matrix or vector. */
int weight_source_find(const struct weight_source *source, enum tensor_role role, int layer, bool bias, struct source_tensor *ret_tensor,
                       struct error *err);
/* The name that the file would use; for messages. */
void weight_source_name(const struct weight_source *source, enum tensor_role role, int layer, bool bias, char ret_name[TENSOR_NAME_BYTES]);
/* True for projections. */
bool weight_role_may_have_bias(enum tensor_role role);
/* -ENOTSUP naming the first tensor that is no role of a model with n_layers layers. */
int weight_source_check_unknown(const struct weight_source *source, int n_layers, struct error *err);
