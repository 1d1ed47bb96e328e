/* Hugging Face's config.json and generation_config.json. Keys and defaults: transformers' configuration_llama.py, configuration_mistral.py,
 * configuration_qwen2.py; both the older rope_scaling/rope_theta and the newer rope_parameters are read. */
#include "formats/json.h"
#include "worker/model/model_config.h"
#include "worker/model/model_config_private.h"
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

enum { TEXT_BYTES = 64, MAX_LAYER_TYPES = MODEL_MAX_LAYERS };

/* What the file says. -1: absent or null. */
struct hf_config {
    int64_t hidden_size, intermediate_size, n_layers, n_heads, n_kv_heads, head_dim, n_vocab, max_positions;
    int64_t sliding_window, max_window_layers;
    double rms_norm_eps, rope_theta, partial_rotary_factor;
    bool tie_word_embeddings, attention_bias, use_sliding_window, is_quantized, has_layer_types, has_sliding_layers;
    char architecture[TEXT_BYTES], hidden_act[TEXT_BYTES], rope_type[TEXT_BYTES], other_layer_type[TEXT_BYTES], name[TEXT_BYTES * 2];
    struct rope_scaling rope;
    double rope_factor; /* -1: absent */
    bool rope_nested;
    int64_t eos[MODEL_MAX_EOS];
    int n_eos;
};

/* ---- values, null meaning absent ---- */

static bool is_null(struct json *j)
{
    return json_peek(j) == JSON_NULL && json_null(j) >= 0;
}

static void read_int(struct json *j, int64_t *ret_value)
{
    if (!is_null(j))
        json_int(j, ret_value);
}

static void read_double(struct json *j, double *ret_value)
{
    if (!is_null(j))
        json_double(j, ret_value);
}

static void read_bool(struct json *j, bool *ret_value)
{
    if (!is_null(j))
        json_bool(j, ret_value);
}

/* Longer texts than any known name are cut: they match none. */
static void copy_text(struct json_str s, char *ret_text, size_t size)
{
    snprintf(ret_text, size, "%.*s", s.len < size ? (int)s.len : (int)size - 1, s.data);
}

static void read_text(struct json *j, char *ret_text, size_t size)
{
    struct json_str s;
    if (!is_null(j) && json_string(j, &s) >= 0)
        copy_text(s, ret_text, size);
}

/* An id or a list of ids. */
static void read_eos(struct json *j, struct hf_config *h)
{
    int64_t id = -1;
    if (json_peek(j) != JSON_ARRAY) {
        read_int(j, &id);
        if (h->n_eos < MODEL_MAX_EOS)
            h->eos[h->n_eos++] = id;
        return;
    }
    json_array(j);
    while (json_next_item(j))
        if (json_int(j, &id) >= 0 && h->n_eos < MODEL_MAX_EOS)
            h->eos[h->n_eos++] = id;
}

static void read_architectures(struct json *j, struct hf_config *h)
{
    if (is_null(j))
        return;
    json_array(j);
    for (int i = 0; json_next_item(j); i++) {
        if (i == 0)
            read_text(j, h->architecture, sizeof(h->architecture));
        else
            json_skip(j);
    }
}

static void read_layer_types(struct json *j, struct hf_config *h)
{
    struct json_str s;
    if (is_null(j))
        return;
    h->has_layer_types = true;
    json_array(j);
    while (json_next_item(j)) {
        if (json_string(j, &s) < 0)
            return;
        if (json_str_eq(&s, "sliding_attention"))
            h->has_sliding_layers = true;
        else if (!json_str_eq(&s, "full_attention"))
            copy_text(s, h->other_layer_type, sizeof(h->other_layer_type));
    }
}

/* ---- RoPE ---- */

/* rope_scaling and rope_parameters have the same keys; "type" is the older spelling of "rope_type". */
static void read_rope(struct json *j, struct hf_config *h)
{
    struct json_str key;
    bool truncate = true;
    if (is_null(j))
        return;
    json_object(j);
    while (json_next_key(j, &key)) {
        const struct {
            const char *key;
            double *value;
        } numbers[] = {
            {"factor", &h->rope_factor},
            {"rope_theta", &h->rope_theta},
            {"partial_rotary_factor", &h->partial_rotary_factor},
            {"original_max_position_embeddings", &h->rope.original_context},
            {"low_freq_factor", &h->rope.low_freq_factor},
            {"high_freq_factor", &h->rope.high_freq_factor},
            {"attention_factor", &h->rope.attention_factor},
            {"mscale", &h->rope.mscale},
            {"mscale_all_dim", &h->rope.mscale_all_dim},
            {"beta_fast", &h->rope.beta_fast},
            {"beta_slow", &h->rope.beta_slow},
        };
        bool known = false;
        for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]) && !known; i++)
            if ((known = json_str_eq(&key, numbers[i].key)))
                read_double(j, numbers[i].value);
        if (known)
            continue;
        if (json_str_eq(&key, "rope_type") || json_str_eq(&key, "type"))
            read_text(j, h->rope_type, sizeof(h->rope_type));
        else if (json_str_eq(&key, "truncate"))
            read_bool(j, &truncate);
        else {
            h->rope_nested |= json_peek(j) == JSON_OBJECT;
            json_skip(j);
        }
    }
    h->rope.no_truncate = !truncate;
}

static int finish_rope(struct hf_config *h, struct error *err)
{
    static const struct {
        const char *name;
        enum rope_scaling_type type;
    } types[] = {{"", ROPE_SCALING_NONE},         {"default", ROPE_SCALING_NONE}, {"linear", ROPE_SCALING_LINEAR},
                 {"llama3", ROPE_SCALING_LLAMA3}, {"yarn", ROPE_SCALING_YARN}};
    size_t i = 0, n = sizeof(types) / sizeof(types[0]);
    while (i < n && strcmp(h->rope_type, types[i].name) != 0)
        i++;
    if (i == n)
        return error_set(err, -ENOTSUP, "RoPE scaling \"%s\" is not supported (default, linear, llama3 and yarn are)", h->rope_type);
    if (h->rope_nested)
        return error_set(err, -ENOTSUP, "RoPE parameters that differ by layer are not supported");
    if (h->partial_rotary_factor >= 0 && h->partial_rotary_factor != 1)
        return error_set(err, -ENOTSUP, "partial_rotary_factor is %g (supported: 1)", h->partial_rotary_factor);
    struct rope_scaling *rope = &h->rope;
    rope->type = types[i].type;
    rope->theta = h->rope_theta >= 0 ? h->rope_theta : 10000.0;
    if (rope->type == ROPE_SCALING_LLAMA3 && rope->original_context == 0)
        return error_set(err, -EINVAL, "RoPE scaling llama3 needs original_max_position_embeddings");
    if (rope->original_context == 0)
        rope->original_context = (double)h->max_positions;
    rope->factor = h->rope_factor;
    if (rope->factor < 0)
        rope->factor = rope->type == ROPE_SCALING_YARN && rope->original_context > 0 ? (double)h->max_positions / rope->original_context : 0;
    /* YaRN is often added to a config whose max_position_embeddings still says what the model was trained on first. */
    if (rope->type == ROPE_SCALING_YARN && rope->factor * rope->original_context > (double)h->max_positions &&
        rope->factor * rope->original_context <= MODEL_MAX_CONTEXT)
        h->max_positions = (int64_t)(rope->factor * rope->original_context);
    return 0;
}

/* ---- the whole file ---- */

static bool read_number(struct json *j, const struct json_str *key, struct hf_config *h)
{
    const struct {
        const char *key;
        int64_t *value;
    } integers[] = {
        {"hidden_size", &h->hidden_size},
        {"intermediate_size", &h->intermediate_size},
        {"num_hidden_layers", &h->n_layers},
        {"num_attention_heads", &h->n_heads},
        {"num_key_value_heads", &h->n_kv_heads},
        {"head_dim", &h->head_dim},
        {"vocab_size", &h->n_vocab},
        {"max_position_embeddings", &h->max_positions},
        {"sliding_window", &h->sliding_window},
        {"max_window_layers", &h->max_window_layers},
    };
    const struct {
        const char *key;
        double *value;
    } doubles[] = {
        {"rms_norm_eps", &h->rms_norm_eps},
        {"rope_theta", &h->rope_theta},
        {"partial_rotary_factor", &h->partial_rotary_factor},
    };
    const struct {
        const char *key;
        bool *value;
    } bools[] = {
        {"tie_word_embeddings", &h->tie_word_embeddings},
        {"attention_bias", &h->attention_bias},
        {"use_sliding_window", &h->use_sliding_window},
    };
    for (size_t i = 0; i < sizeof(integers) / sizeof(integers[0]); i++)
        if (json_str_eq(key, integers[i].key))
            return read_int(j, integers[i].value), true;
    for (size_t i = 0; i < sizeof(doubles) / sizeof(doubles[0]); i++)
        if (json_str_eq(key, doubles[i].key))
            return read_double(j, doubles[i].value), true;
    for (size_t i = 0; i < sizeof(bools) / sizeof(bools[0]); i++)
        if (json_str_eq(key, bools[i].key))
            return read_bool(j, bools[i].value), true;
    return false;
}

static void read_member(struct json *j, const struct json_str *key, struct hf_config *h)
{
    if (read_number(j, key, h))
        return;
    if (json_str_eq(key, "architectures"))
        read_architectures(j, h);
    else if (json_str_eq(key, "hidden_act"))
        read_text(j, h->hidden_act, sizeof(h->hidden_act));
    else if (json_str_eq(key, "_name_or_path"))
        read_text(j, h->name, sizeof(h->name));
    else if (json_str_eq(key, "rope_scaling") || json_str_eq(key, "rope_parameters"))
        read_rope(j, h);
    else if (json_str_eq(key, "layer_types"))
        read_layer_types(j, h);
    else if (json_str_eq(key, "eos_token_id"))
        read_eos(j, h);
    else if (json_str_eq(key, "quantization_config")) {
        h->is_quantized = json_peek(j) != JSON_NULL;
        json_skip(j);
    } else
        json_skip(j);
}

/* With `eos_only` generation_config.json, which has nothing else that matters here. */
static int read_file(const char *text, size_t n, const char *file, bool eos_only, struct hf_config *h, struct error *err)
{
    struct json j;
    struct json_str key;
    json_init(&j, text, n);
    json_object(&j);
    while (json_next_key(&j, &key)) {
        if (eos_only && !json_str_eq(&key, "eos_token_id"))
            json_skip(&j);
        else
            read_member(&j, &key, h);
    }
    int r = json_end(&j);
    if (r < 0)
        error_set(err, r, "%s: %s (at byte %zu)", file, j.error_text, j.error_pos);
    json_fini(&j);
    return r;
}

/* ---- meaning ---- */

static int find_arch(const struct hf_config *h, enum model_arch *ret_arch, struct error *err)
{
    static const struct {
        const char *name;
        enum model_arch arch;
    } archs[] = {{"LlamaForCausalLM", MODEL_ARCH_LLAMA}, {"MistralForCausalLM", MODEL_ARCH_MISTRAL}, {"Qwen2ForCausalLM", MODEL_ARCH_QWEN2}};
    for (size_t i = 0; i < sizeof(archs) / sizeof(archs[0]); i++)
        if (strcmp(h->architecture, archs[i].name) == 0) {
            *ret_arch = archs[i].arch;
            return 0;
        }
    return error_set(err, -ENOTSUP, "architectures names \"%s\", which is not supported (LlamaForCausalLM, MistralForCausalLM and Qwen2ForCausalLM are)",
                     h->architecture);
}

static int check_supported(const struct hf_config *h, struct error *err)
{
    if (h->is_quantized)
        return error_set(err, -ENOTSUP, "quantization_config: quantized safetensors are not supported (a GGUF file of the same model is)");
    if (h->hidden_act[0] && strcmp(h->hidden_act, "silu") != 0)
        return error_set(err, -ENOTSUP, "hidden_act is \"%s\" (supported: silu)", h->hidden_act);
    if (h->other_layer_type[0])
        return error_set(err, -ENOTSUP, "layer_types names \"%s\", which is not supported", h->other_layer_type);
    return 0;
}

/* Copies an integer that must be there and fit; the range that the model may have is checked with all others later. */
static int take_int(const char *key, int64_t value, int *ret_value, struct error *err)
{
    if (value < 0)
        return error_set(err, -EINVAL, "%s is missing or negative", key);
    if (value > INT_MAX)
        return error_set(err, -EINVAL, "%s is %lld (allowed: up to %d)", key, (long long)value, INT_MAX);
    *ret_value = (int)value;
    return 0;
}

static int take_shape(const struct hf_config *h, struct model_config *c, struct error *err)
{
    int64_t n_kv_heads = h->n_kv_heads < 0 && c->arch == MODEL_ARCH_LLAMA ? h->n_heads : h->n_kv_heads;
    const struct {
        const char *key;
        int64_t value;
        int *target;
    } fields[] = {
        {"hidden_size", h->hidden_size, &c->dim},
        {"intermediate_size", h->intermediate_size, &c->ffn_dim},
        {"num_hidden_layers", h->n_layers, &c->n_layers},
        {"num_attention_heads", h->n_heads, &c->n_heads},
        {"num_key_value_heads", n_kv_heads, &c->n_kv_heads},
        {"head_dim", h->head_dim < 0 ? 0 : h->head_dim, &c->head_dim},
        {"vocab_size", h->n_vocab, &c->n_vocab},
        {"max_position_embeddings", h->max_positions, &c->trained_context},
    };
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        int r = take_int(fields[i].key, fields[i].value, fields[i].target, err);
        if (r < 0)
            return r;
    }
    c->rms_eps = (float)h->rms_norm_eps;
    return 0;
}

/* The window of the narrowest layer, 0: none. */
static int64_t sliding_window(const struct hf_config *h, enum model_arch arch)
{
    bool slides = h->has_sliding_layers;
    if (!h->has_layer_types && arch == MODEL_ARCH_MISTRAL)
        slides = true;
    if (!h->has_layer_types && arch == MODEL_ARCH_QWEN2)
        slides = h->use_sliding_window && h->max_window_layers < h->n_layers;
    return slides && h->sliding_window > 0 ? h->sliding_window : 0;
}

int model_config_from_json(const char *config, size_t n_config, const char *generation, size_t n_generation, struct model_config *ret_config,
                           struct error *err)
{
    struct hf_config h = {.hidden_size = -1, .intermediate_size = -1, .n_layers = -1, .n_heads = -1, .n_kv_heads = -1, .head_dim = -1, .n_vocab = -1,
                          .max_positions = -1, .sliding_window = -1, .max_window_layers = -1, .rope_theta = -1, .partial_rotary_factor = -1,
                          .rope_factor = -1};
    struct model_config c = {.rope_style = ROPE_HALVES};
    int r = read_file(config, n_config, "config.json", false, &h, err);
    if (r < 0 || (generation && (r = read_file(generation, n_generation, "generation_config.json", true, &h, err)) < 0))
        return r;
    if ((r = find_arch(&h, &c.arch, err)) < 0 || (r = check_supported(&h, err)) < 0 || (r = finish_rope(&h, err)) < 0 ||
        (r = take_shape(&h, &c, err)) < 0)
        return r;
    c.rope_scaling = h.rope;
    c.tied_embeddings = h.tie_word_embeddings;
    c.qkv_bias = c.arch == MODEL_ARCH_QWEN2 || h.attention_bias;
    for (int i = 0; i < h.n_eos; i++)
        model_config_add_eos(&c, h.eos[i]);
    snprintf(c.name, sizeof(c.name), "%s", h.name);
    if ((r = model_config_finish(&c, sliding_window(&h, c.arch), NULL, err)) < 0)
        return r;
    *ret_config = c;
    return 0;
}
