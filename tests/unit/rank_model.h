/* Small random models in GGUF files, of whatever shape and stored in whatever format a test of tensor parallelism wants. */
#pragma once
#include "kernels/kernels.h"
#include <stdbool.h>

enum { RANK_MODEL_DTYPES = 4 };

struct rank_model {
    const char *arch;       /* "llama", "qwen2" (with biases) */
    int n_layers, dim, n_heads, n_kv_heads, head_dim, ffn_dim, n_vocab, context;
    bool tied;
    /* Of the matrices in turn; those whose rows are no multiple of a block are stored in F32. */
    int n_dtypes;
    enum weight_dtype dtypes[RANK_MODEL_DTYPES];
};

/* The same file for the same model. Failures are Criterion assertions. */
void rank_model_write(const struct rank_model *model, const char *path);
