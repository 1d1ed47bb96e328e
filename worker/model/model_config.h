/* What a model is, read from a GGUF file's metadata or from a Hugging Face folder's config.json and generation_config.json. Plain data; any thread.
 * Everything is bounded: a config that was returned may be used in shape arithmetic without further checks.
 * Supported: Llama 3.x and its layout (SmolLM2, DeepSeek-R1-Distill-Llama), Mistral, Qwen2/2.5 (DeepSeek-R1-Distill-Qwen). */
#pragma once
#include "kernels/kernels.h"
#include "proto/base/error.h"
#include "worker/model/rope_scaling.h"
#include <stdbool.h>
#include <stdint.h>

struct gguf;

enum {
    MODEL_MAX_LAYERS = 512,
    MODEL_MAX_HEADS = 1024,
    MODEL_MAX_KV_HEADS = 256,
    MODEL_MAX_HEAD_DIM = 256,
    MODEL_MAX_DIM = 65536,
    MODEL_MAX_FFN_DIM = 1 << 20,
    MODEL_MAX_VOCAB = 1 << 22,
    MODEL_MAX_CONTEXT = 1 << 24,
    MODEL_MAX_EOS = 16,
};

enum model_arch { MODEL_ARCH_LLAMA, MODEL_ARCH_MISTRAL, MODEL_ARCH_QWEN2 };
const char *model_arch_name(enum model_arch arch); /* "llama", "mistral", "qwen2" */

/* What part of a model a configuration is of (model_shard.h). n_ranks 0 or 1: the whole model, the rest is 0. */
struct model_shard {
    int rank, n_ranks;
    int all_heads, all_kv_heads, all_ffn; /* the whole model's */
    int first_head, first_kv_head, first_ffn; /* of those, where the rank's n_heads, n_kv_heads and ffn_dim begin */
};

struct model_config {
    enum model_arch arch;
    char name[128];                   /* as the file calls itself, or "" */
    int n_layers;
    int dim;                          /* width of the residual stream */
    int n_heads, n_kv_heads, head_dim; /* n_heads % n_kv_heads == 0; head_dim a multiple of 32 up to 256; dim need not be n_heads * head_dim */
    int ffn_dim;
    struct model_shard shard;         /* heads and ffn_dim are those of one rank */
    int n_vocab;                      /* rows of the embedding, padding rows included */
    float rms_eps;
    float attention_scale;            /* 1 / sqrt(head_dim) */
    enum rope_style rope_style;       /* how this file orders the rows of Q and K */
    struct rope_scaling rope_scaling; /* as configured */
    struct rope_freqs rope;           /* what follows from it */
    bool tied_embeddings;             /* the head is the embedding */
    bool qkv_bias;                    /* biases of Q, K and V must be there (other biases are used when they are) */
    int trained_context;              /* positions as the model states them */
    int max_context;                  /* positions that may be used: smaller where the model has a sliding window */
    int32_t eos_ids[MODEL_MAX_EOS];   /* [n_eos] each ends a generation; ids in 0..n_vocab-1 */
    int n_eos;
    char note[256];                   /* what an operator should know (a limited context), or "" */
};

/* `path` is a GGUF file or a Hugging Face folder. -EINVAL with the key, its value and what is allowed; -ENOTSUP naming what is not supported;
 * the errno of opening. */
int model_config_load(const char *path, struct model_config *ret_config, struct error *err);
int model_config_from_gguf(const struct gguf *file, struct model_config *ret_config, struct error *err);
/* config.json's text, and generation_config.json's or NULL. */
int model_config_from_json(const char *config, size_t n_config, const char *generation, size_t n_generation, struct model_config *ret_config,
                           struct error *err);
