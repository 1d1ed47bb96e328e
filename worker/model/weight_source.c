#include "worker/model/weight_source.h"
#include "formats/gguf.h"
#include "formats/safetensors.h"
#include "worker/model/random_weights.h"
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

struct role_names {
    const char *gguf, *hf; /* inside a layer: behind the layer's prefix */
    bool may_have_bias;
};

static const struct role_names roles[TENSOR_ROLE_COUNT] = {
    [TENSOR_EMBEDDING] = {"token_embd", "model.embed_tokens", false},
    [TENSOR_FINAL_NORM] = {"output_norm", "model.norm", false},
    [TENSOR_HEAD] = {"output", "lm_head", false},
    [TENSOR_ATTN_NORM] = {"attn_norm", "input_layernorm", false},
    [TENSOR_Q] = {"attn_q", "self_attn.q_proj", true},
    [TENSOR_K] = {"attn_k", "self_attn.k_proj", true},
    [TENSOR_V] = {"attn_v", "self_attn.v_proj", true},
    [TENSOR_O] = {"attn_output", "self_attn.o_proj", true},
    [TENSOR_FFN_NORM] = {"ffn_norm", "post_attention_layernorm", false},
    [TENSOR_GATE] = {"ffn_gate", "mlp.gate_proj", true},
    [TENSOR_UP] = {"ffn_up", "mlp.up_proj", true},
    [TENSOR_DOWN] = {"ffn_down", "mlp.down_proj", true},
};

/* ggml's numbers; a type that is not here has no kernel. */
static const struct {
    uint32_t ggml_type;
    enum weight_dtype dtype;
} ggml_dtypes[] = {
    {0, WEIGHT_F32},   {1, WEIGHT_F16},   {30, WEIGHT_BF16}, {8, WEIGHT_Q8_0},  {2, WEIGHT_Q4_0},
    {3, WEIGHT_Q4_1},  {6, WEIGHT_Q5_0},  {12, WEIGHT_Q4_K}, {13, WEIGHT_Q5_K}, {14, WEIGHT_Q6_K},
};

static const char *layer_prefix(const struct weight_source *source)
{
    return source->gguf ? "blk." : "model.layers.";
}

void weight_source_name(const struct weight_source *source, enum tensor_role role, int layer, bool bias, char ret_name[TENSOR_NAME_BYTES])
{
    const char *name = source->gguf ? roles[role].gguf : roles[role].hf, *suffix = bias ? "bias" : "weight";
    if (role < TENSOR_LAYER_FIRST)
        snprintf(ret_name, TENSOR_NAME_BYTES, "%s.%s", name, suffix);
    else
        snprintf(ret_name, TENSOR_NAME_BYTES, "%s%d.%s.%s", layer_prefix(source), layer, name, suffix);
}

int weight_source_open(const char *path, struct weight_source *ret_source, struct error *err)
{
    struct weight_source source = {0};
    struct stat st;
    int r;
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode))
        r = safetensors_open(path, &source.safetensors, err);
    else
        r = gguf_open(path, &source.gguf, err);
    if (r < 0)
        return r;
    *ret_source = source;
    return 0;
}

void weight_source_close(struct weight_source *source)
{
    gguf_close(source->gguf);
    safetensors_close(source->safetensors);
    random_weights_free(source->random);
    *source = (struct weight_source){0};
}

/* Dimensions beyond the second must be 1; `rows` and `cols` are what the file has in that order. */
static int set_shape(struct source_tensor *t, uint64_t rows, uint64_t cols, bool flat, struct error *err)
{
    if (!flat || rows > INT32_MAX || cols > INT32_MAX)
        return error_set(err, -EINVAL, "tensor %s: is no matrix or vector of a possible size", t->name);
    t->n_rows = (int64_t)rows;
    t->n_cols = (int64_t)cols;
    return 0;
}

static int find_gguf(const struct gguf *file, struct source_tensor *t, struct error *err)
{
    const struct gguf_tensor *g = gguf_find_tensor(file, t->name);
    if (!g)
        return -ENOENT;
    size_t i = 0, n = sizeof(ggml_dtypes) / sizeof(ggml_dtypes[0]);
    while (i < n && ggml_dtypes[i].ggml_type != g->ggml_type)
        i++;
    if (i == n)
        return error_set(err, -ENOTSUP, "tensor %s: type %s is not supported (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q4_K, Q5_K and Q6_K are)", t->name,
                         gguf_tensor_type_name(g->ggml_type));
    t->dtype = ggml_dtypes[i].dtype;
    t->data = g->data;
    t->bytes = g->bytes;
    return set_shape(t, g->dims[1], g->dims[0], g->dims[2] == 1 && g->dims[3] == 1, err);
}

static int find_safetensors(const struct safetensors *set, struct source_tensor *t, struct error *err)
{
    static const enum weight_dtype dtypes[] = {[ST_F32] = WEIGHT_F32, [ST_F16] = WEIGHT_F16, [ST_BF16] = WEIGHT_BF16};
    const struct st_tensor *s = safetensors_find(set, t->name);
    if (!s)
        return -ENOENT;
    if (s->dtype == ST_OTHER)
        return error_set(err, -ENOTSUP, "tensor %s: its dtype is not supported (F32, F16 and BF16 are)", t->name);
    t->dtype = dtypes[s->dtype];
    t->data = s->data;
    t->bytes = s->bytes;
    uint64_t rows = s->n_dims == 2 ? s->dims[0] : 1;
    return set_shape(t, rows, s->n_dims ? s->dims[s->n_dims - 1] : 1, s->n_dims == 1 || s->n_dims == 2, err);
}

int weight_source_find(const struct weight_source *source, enum tensor_role role, int layer, bool bias, struct source_tensor *ret_tensor,
                       struct error *err)
{
    struct source_tensor t = {.dtype = WEIGHT_F32};
    weight_source_name(source, role, layer, bias, t.name);
    int r = source->gguf     ? find_gguf(source->gguf, &t, err)
            : source->random ? random_weights_find(source->random, role, layer, bias, &t)
                             : find_safetensors(source->safetensors, &t, err);
    if (r < 0)
        return r;
    *ret_tensor = t;
    return 0;
}

bool weight_role_may_have_bias(enum tensor_role role)
{
    return roles[role].may_have_bias;
}

/* The layer that a tensor's name speaks of, 0 when of none, -1 when that is no number. */
static int name_layer(const struct weight_source *source, const char *name)
{
    const char *prefix = layer_prefix(source);
    size_t n = strlen(prefix);
    if (strncmp(name, prefix, n) != 0)
        return 0;
    if (!isdigit((unsigned char)name[n]))
        return -1;
    long layer = strtol(name + n, NULL, 10);
    return layer <= INT32_MAX ? (int)layer : -1;
}

static bool is_known(const struct weight_source *source, const char *name, int n_layers)
{
    char expected[TENSOR_NAME_BYTES];
    int layer = name_layer(source, name);
    if (layer < 0 || layer >= n_layers)
        return false;
    for (int role = 0; role < TENSOR_ROLE_COUNT; role++)
        for (int bias = 0; bias <= roles[role].may_have_bias; bias++) {
            weight_source_name(source, (enum tensor_role)role, layer, bias, expected);
            if (strcmp(expected, name) == 0)
                return true;
        }
    return false;
}

/* Tensors that only repeat what the configuration says. */
static bool is_redundant(const struct weight_source *source, const char *name)
{
    static const char suffix[] = ".rotary_emb.inv_freq"; /* in safetensors of older exports */
    size_t n = strlen(name), m = sizeof(suffix) - 1;
    if (source->gguf)
        return strcmp(name, "rope_freqs.weight") == 0;
    return n > m && strcmp(name + n - m, suffix) == 0;
}

int weight_source_check_unknown(const struct weight_source *source, int n_layers, struct error *err)
{
    char name[256];
    uint64_t n = source->gguf ? gguf_n_tensors(source->gguf) : source->random ? 0 : safetensors_n_tensors(source->safetensors);
    for (uint64_t i = 0; i < n; i++) {
        if (source->gguf) {
            struct gguf_str s = gguf_tensor_at(source->gguf, i)->name;
            snprintf(name, sizeof(name), "%.*s", s.len < sizeof(name) ? (int)s.len : (int)sizeof(name) - 1, s.data);
        } else {
            snprintf(name, sizeof(name), "%s", safetensors_at(source->safetensors, i)->name);
        }
        if (!is_known(source, name, n_layers) && !is_redundant(source, name))
            return error_set(err, -ENOTSUP, "tensor %s does not belong to a supported architecture (%d layers)", name, n_layers);
    }
    return 0;
}
