/* GGUF metadata. Keys: ggml/docs/gguf.md and gguf-py/gguf/constants.py; meanings: llama.cpp's loaders of "llama" and "qwen2". */
#include "formats/gguf.h"
#include "worker/model/model_config.h"
#include "worker/model/model_config_private.h"
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

struct gguf_arch {
    const char *name; /* prefix of its keys */
    enum model_arch arch;
    enum rope_style rope_style;
    bool qkv_bias;
};

/* Converters reorder the rows of Q and K for "llama" (Mistral and SmolLM2 among them), so that pairs are neighbours. */
static const struct gguf_arch architectures[] = {
    {"llama", MODEL_ARCH_LLAMA, ROPE_INTERLEAVED, false},
    {"qwen2", MODEL_ARCH_QWEN2, ROPE_HALVES, true},
};

/* Keys that change the arithmetic in ways that are not implemented, with the value at which they do not. */
static const struct {
    const char *suffix;
    double neutral;
} refused_keys[] = {
    {"expert_count", 0},          {"attention.max_alibi_bias", 0}, {"attention.clamp_kqv", 0},      {"attn_logit_softcapping", 0},
    {"final_logit_softcapping", 0}, {"logit_scale", 1},            {"residual_scale", 1},           {"embedding_scale", 1},
    {"attention.causal", 1},      {"use_parallel_residual", 0},    {"rope.scaling.yarn_log_multiplier", 0}, {"rope.scaling.yarn_ext_factor", 1},
    {"attention.temperature_scale", 0},
};

struct source {
    const struct gguf *file;
    const struct gguf_arch *arch;
    struct error *err;
};

static void make_key(const struct source *s, const char *suffix, char key[128])
{
    snprintf(key, 128, "%s.%s", s->arch->name, suffix);
}

/* -ENOENT leaves *ret_value alone. */
static int get_number(const struct source *s, const char *suffix, double *ret_value)
{
    char key[128];
    bool flag;
    make_key(s, suffix, key);
    int r = gguf_get_f64(s->file, key, ret_value);
    if (r == -EINVAL && gguf_get_bool(s->file, key, &flag) == 0) {
        *ret_value = flag;
        return 0;
    }
    if (r == -EINVAL)
        return error_set(s->err, r, "%s must be one number (values that differ by layer are not supported)", key);
    return r;
}

static int get_int(const struct source *s, const char *suffix, bool required, int *ret_value)
{
    char key[128];
    uint64_t v;
    make_key(s, suffix, key);
    int r = gguf_get_u64(s->file, key, &v);
    if (r == -ENOENT)
        return required ? error_set(s->err, -EINVAL, "%s is missing", key) : 0;
    if (r < 0)
        return error_set(s->err, -EINVAL, "%s must be one integer (values that differ by layer are not supported)", key);
    if (v > INT_MAX)
        return error_set(s->err, -EINVAL, "%s is %llu (allowed: 0 to %d)", key, (unsigned long long)v, INT_MAX);
    *ret_value = (int)v;
    return 0;
}

static int check_refused(const struct source *s)
{
    for (size_t i = 0; i < sizeof(refused_keys) / sizeof(refused_keys[0]); i++) {
        double v = refused_keys[i].neutral;
        int r = get_number(s, refused_keys[i].suffix, &v);
        if (r < 0 && r != -ENOENT)
            return r;
        if (v != refused_keys[i].neutral)
            return error_set(s->err, -ENOTSUP, "%s.%s is %g, which is not supported%s", s->arch->name, refused_keys[i].suffix, v,
                             i == 0 ? " (mixture of experts)" : "");
    }
    uint64_t n_splits = 0;
    if (gguf_get_u64(s->file, "split.count", &n_splits) == 0 && n_splits > 1)
        return error_set(s->err, -ENOTSUP, "the file is one of %llu parts: merge them first (gguf-split --merge)", (unsigned long long)n_splits);
    return 0;
}

static int find_arch(struct source *s)
{
    struct gguf_str name;
    if (gguf_get_str(s->file, "general.architecture", &name) < 0)
        return error_set(s->err, -EINVAL, "general.architecture is missing");
    for (size_t i = 0; i < sizeof(architectures) / sizeof(architectures[0]); i++)
        if (name.len == strlen(architectures[i].name) && memcmp(name.data, architectures[i].name, name.len) == 0) {
            s->arch = &architectures[i];
            return 0;
        }
    return error_set(s->err, -ENOTSUP, "architecture \"%.*s\" is not supported (llama and qwen2 are)", name.len < 64 ? (int)name.len : 64, name.data);
}

static int read_shape(const struct source *s, struct model_config *c)
{
    int value_length = 0, rope_dims = 0, r;
    if ((r = get_int(s, "block_count", true, &c->n_layers)) < 0 || (r = get_int(s, "embedding_length", true, &c->dim)) < 0 ||
        (r = get_int(s, "feed_forward_length", true, &c->ffn_dim)) < 0 || (r = get_int(s, "attention.head_count", true, &c->n_heads)) < 0 ||
        (r = get_int(s, "context_length", true, &c->trained_context)) < 0)
        return r;
    c->n_kv_heads = c->n_heads;
    if ((r = get_int(s, "attention.head_count_kv", false, &c->n_kv_heads)) < 0 || (r = get_int(s, "attention.key_length", false, &c->head_dim)) < 0 ||
        (r = get_int(s, "attention.value_length", false, &value_length)) < 0 || (r = get_int(s, "rope.dimension_count", false, &rope_dims)) < 0)
        return r;
    int head_dim = c->head_dim ? c->head_dim : c->n_heads > 0 ? c->dim / c->n_heads : 0;
    if ((value_length && value_length != head_dim) || (rope_dims && rope_dims != head_dim))
        return error_set(s->err, -ENOTSUP, "heads of %d dimensions with values of %d and RoPE over %d are not supported (all must be equal)", head_dim,
                         value_length ? value_length : head_dim, rope_dims ? rope_dims : head_dim);
    const struct gguf_tensor *embedding = gguf_find_tensor(s->file, "token_embd.weight");
    if (!embedding || embedding->n_dims != 2 || embedding->dims[1] > INT_MAX)
        return error_set(s->err, -EINVAL, "tensor token_embd.weight is missing or no matrix");
    c->n_vocab = (int)embedding->dims[1];
    c->tied_embeddings = !gguf_find_tensor(s->file, "output.weight");
    return 0;
}

/* Old files without a type scale linearly. */
static int read_scaling_type(const struct source *s, struct rope_scaling *rope)
{
    char key[128];
    struct gguf_str type = {"linear", 6};
    make_key(s, "rope.scaling.type", key);
    if (gguf_get_str(s->file, key, &type) == -EINVAL)
        return error_set(s->err, -EINVAL, "%s must be a string", key);
    if (type.len == 4 && memcmp(type.data, "none", 4) == 0)
        rope->type = ROPE_SCALING_NONE;
    else if (type.len == 6 && memcmp(type.data, "linear", 6) == 0)
        rope->type = rope->factor != 0 && rope->factor != 1 ? ROPE_SCALING_LINEAR : ROPE_SCALING_NONE;
    else if (type.len == 4 && memcmp(type.data, "yarn", 4) == 0)
        rope->type = ROPE_SCALING_YARN;
    else
        return error_set(s->err, -ENOTSUP, "%s \"%.*s\" is not supported (none, linear and yarn are)", key, type.len < 64 ? (int)type.len : 64, type.data);
    return 0;
}

static int read_rope(const struct source *s, struct model_config *c)
{
    struct rope_scaling *rope = &c->rope_scaling;
    double scale_linear = 0;
    const struct {
        const char *suffix;
        double *value;
    } numbers[] = {
        {"rope.freq_base", &rope->theta},
        {"rope.scale_linear", &scale_linear},
        {"rope.scaling.factor", &rope->factor},
        {"rope.scaling.original_context_length", &rope->original_context},
        {"rope.scaling.attn_factor", &rope->attention_multiplier},
        {"rope.scaling.yarn_attn_factor", &rope->attention_multiplier},
        {"rope.scaling.yarn_beta_fast", &rope->beta_fast},
        {"rope.scaling.yarn_beta_slow", &rope->beta_slow},
    };
    rope->theta = 10000.0;
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        int r = get_number(s, numbers[i].suffix, numbers[i].value);
        if (r < 0 && r != -ENOENT)
            return r;
    }
    if (rope->factor == 0)
        rope->factor = scale_linear;
    int r = read_scaling_type(s, rope);
    if (r < 0)
        return r;
    if (rope->original_context == 0)
        rope->original_context = c->trained_context;
    return 0;
}

/* Llama 3's scaling comes as a tensor of divisors, one a frequency. */
static int read_divisors(const struct source *s, float divisors[ROPE_MAX_FREQS], int head_dim, bool *ret_found)
{
    const struct gguf_tensor *t = gguf_find_tensor(s->file, "rope_freqs.weight");
    *ret_found = t != NULL;
    if (gguf_find_tensor(s->file, "rope_factors_long.weight") || gguf_find_tensor(s->file, "rope_factors_short.weight"))
        return error_set(s->err, -ENOTSUP, "RoPE with long and short factors (longrope) is not supported");
    if (!t)
        return 0;
    if (t->ggml_type != 0 || t->n_dims != 1 || head_dim < 0 || t->dims[0] != (uint64_t)head_dim / 2 || t->dims[0] > ROPE_MAX_FREQS)
        return error_set(s->err, -EINVAL, "tensor rope_freqs.weight must hold %d values in F32", head_dim / 2);
    memcpy(divisors, t->data, t->bytes);
    return 0;
}

/* Control tokens that end a turn or a text, whatever the file's ids say: many converters store one end token only, and a chat would run on behind the others.
 * llama.cpp recognises them by text too. */
static bool ends_generation(struct gguf_str token)
{
    static const char *const texts[] = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>"};
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
        if (token.len == strlen(texts[i]) && memcmp(token.data, texts[i], token.len) == 0)
            return true;
    return false;
}

static void add_end_tokens(const struct source *s, struct model_config *c)
{
    enum { TYPE_CONTROL = 3 };
    const struct gguf_value *tokens = gguf_find(s->file, "tokenizer.ggml.tokens"), *types = gguf_find(s->file, "tokenizer.ggml.token_type");
    struct gguf_str token;
    int32_t type;
    if (!tokens || !types || types->type != GGUF_ARRAY || types->item_type != GGUF_I32 || tokens->type != GGUF_ARRAY || types->n_items != tokens->n_items)
        return;
    const uint8_t *cursor = tokens->data;
    for (uint64_t id = 0; gguf_next_str(tokens, &cursor, &token); id++) {
        memcpy(&type, types->data + 4 * id, sizeof(type));
        if (type == TYPE_CONTROL && ends_generation(token))
            model_config_add_eos(c, (int64_t)id);
    }
}

static void read_names(const struct source *s, struct model_config *c)
{
    static const char *const eos_keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"};
    struct gguf_str name;
    uint64_t id;
    if (gguf_get_str(s->file, "general.name", &name) == 0)
        snprintf(c->name, sizeof(c->name), "%.*s", name.len < sizeof(c->name) ? (int)name.len : (int)sizeof(c->name) - 1, name.data);
    for (size_t i = 0; i < sizeof(eos_keys) / sizeof(eos_keys[0]); i++)
        if (gguf_get_u64(s->file, eos_keys[i], &id) == 0 && id <= INT_MAX)
            model_config_add_eos(c, (int64_t)id);
    add_end_tokens(s, c);
}

int model_config_from_gguf(const struct gguf *file, struct model_config *ret_config, struct error *err)
{
    struct source s = {.file = file, .err = err};
    int r = find_arch(&s);
    if (r < 0 || (r = check_refused(&s)) < 0)
        return r;
    struct model_config c = {.arch = s.arch->arch, .rope_style = s.arch->rope_style, .qkv_bias = s.arch->qkv_bias};
    float divisors[ROPE_MAX_FREQS];
    bool has_divisors;
    double eps = 0;
    int window = 0;
    if ((r = read_shape(&s, &c)) < 0 || (r = read_rope(&s, &c)) < 0 || (r = get_int(&s, "attention.sliding_window", false, &window)) < 0)
        return r;
    r = get_number(&s, "attention.layer_norm_rms_epsilon", &eps);
    if (r < 0)
        return r == -ENOENT ? error_set(err, -EINVAL, "%s.attention.layer_norm_rms_epsilon is missing", s.arch->name) : r;
    c.rms_eps = (float)eps;
    int head_dim = c.head_dim ? c.head_dim : c.n_heads > 0 ? c.dim / c.n_heads : 0;
    if ((r = read_divisors(&s, divisors, head_dim, &has_divisors)) < 0)
        return r;
    read_names(&s, &c);
    if ((r = model_config_finish(&c, window, has_divisors ? divisors : NULL, err)) < 0)
        return r;
    *ret_config = c;
    return 0;
}
