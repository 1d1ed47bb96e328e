#include "formats/gguf.h"
#include "gguf_build.h"
#include "worker/model/model_config.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- Hugging Face ---- */

static int parse(const char *config, const char *generation, struct model_config *ret, struct error *err)
{
    *err = (struct error){0};
    return model_config_from_json(config, strlen(config), generation, generation ? strlen(generation) : 0, ret, err);
}

static void parse_ok(const char *config, const char *generation, struct model_config *ret)
{
    struct error err;
    int r = parse(config, generation, ret, &err);
    cr_assert_eq(r, 0, "%s", err.text);
}

static void check_refused(const char *config, int code, const char *expected)
{
    struct model_config c;
    struct error err;
    cr_expect_eq(parse(config, NULL, &c, &err), code, "%s", config);
    cr_expect(strstr(err.text, expected), "%s: \"%s\" does not contain \"%s\"", config, err.text, expected);
}

#define SHAPE                                                                                                                                  \
    "\"hidden_size\":2048,\"intermediate_size\":8192,\"num_hidden_layers\":16,\"num_attention_heads\":32,\"num_key_value_heads\":8,"           \
    "\"vocab_size\":128256,\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\""
#define LLAMA "{\"architectures\":[\"LlamaForCausalLM\"]," SHAPE ",\"max_position_embeddings\":131072"
#define MISTRAL "{\"architectures\":[\"MistralForCausalLM\"]," SHAPE ",\"max_position_embeddings\":32768"
#define QWEN2 "{\"architectures\":[\"Qwen2ForCausalLM\"]," SHAPE ",\"max_position_embeddings\":32768"

static const char llama32_old[] = LLAMA ",\"head_dim\":64,\"rope_theta\":500000.0,\"rope_scaling\":{\"factor\":32.0,\"high_freq_factor\":4.0,"
                                        "\"low_freq_factor\":1.0,\"original_max_position_embeddings\":8192,\"rope_type\":\"llama3\"},"
                                        "\"tie_word_embeddings\":true,\"torch_dtype\":\"bfloat16\",\"eos_token_id\":[128001,128008,128009]}";
static const char llama32_new[] = LLAMA ",\"head_dim\":64,\"rope_parameters\":{\"factor\":32.0,\"high_freq_factor\":4.0,"
                                        "\"low_freq_factor\":1.0,\"original_max_position_embeddings\":8192,\"rope_type\":\"llama3\",\"rope_theta\":500000.0},"
                                        "\"tie_word_embeddings\":true,\"dtype\":\"bfloat16\",\"eos_token_id\":[128001,128008,128009]}";

Test(model_config, llama_with_its_scaling)
{
    struct model_config c;
    parse_ok(llama32_old, NULL, &c);
    cr_expect_eq(c.arch, MODEL_ARCH_LLAMA);
    cr_expect(c.n_layers == 16 && c.dim == 2048 && c.ffn_dim == 8192 && c.n_heads == 32 && c.n_kv_heads == 8 && c.head_dim == 64);
    cr_expect(c.n_vocab == 128256 && c.trained_context == 131072 && c.max_context == 131072 && c.note[0] == 0);
    cr_expect(c.tied_embeddings && !c.qkv_bias);
    cr_expect_eq(c.rope_style, ROPE_HALVES);
    cr_expect_eq(c.rms_eps, 1e-5f);
    cr_expect_eq(c.attention_scale, 0.125f);
    cr_expect(c.n_eos == 3 && c.eos_ids[2] == 128009);
    cr_expect_eq(c.rope_scaling.type, ROPE_SCALING_LLAMA3);
    cr_expect(c.rope.n_freqs == 32 && c.rope.factor == 1.0);
    /* Values of transformers' _compute_llama3_parameters: short waves kept, long ones divided by 32, one between. */
    cr_expect_float_eq(c.rope.inv_freq[0], 1.0, 1e-15);
    cr_expect_float_eq(c.rope.inv_freq[31], pow(500000.0, -62.0 / 64) / 32, 1e-18);
    double freq = pow(500000.0, -32.0 / 64), smooth = (8192 * freq / (2 * M_PI) - 1) / 3;
    cr_assert(smooth > 0 && smooth < 1);
    cr_expect_float_eq(c.rope.inv_freq[16], (1 - smooth) * freq / 32 + smooth * freq, 1e-16);
}

Test(model_config, newer_keys_mean_the_same)
{
    struct model_config older, newer;
    parse_ok(llama32_old, NULL, &older);
    parse_ok(llama32_new, NULL, &newer);
    for (int i = 0; i < 32; i++)
        cr_expect_eq(older.rope.inv_freq[i], newer.rope.inv_freq[i]);
    cr_expect_eq(newer.rope.factor, 1.0);
}

Test(model_config, defaults_of_llama)
{
    struct model_config c;
    parse_ok("{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":128,\"intermediate_size\":256,\"num_hidden_layers\":2,\"num_attention_heads\":4,"
             "\"vocab_size\":100,\"rms_norm_eps\":1e-6,\"max_position_embeddings\":512,\"rope_scaling\":null,\"head_dim\":null,\"eos_token_id\":null,"
             "\"sliding_window\":null,\"quantization_config\":null,\"unknown\":{\"a\":[1,2]}}",
             NULL, &c);
    cr_expect(c.n_kv_heads == 4 && c.head_dim == 32 && !c.tied_embeddings && c.n_eos == 0);
    cr_expect_eq(c.rope_scaling.type, ROPE_SCALING_NONE);
    cr_expect_float_eq(c.rope.inv_freq[8], 0.01, 1e-16);
}

Test(model_config, qwen2_has_biases_and_ignores_an_unused_window)
{
    struct model_config c;
    parse_ok(QWEN2 ",\"rope_theta\":1000000.0,\"sliding_window\":4096,\"use_sliding_window\":false,\"max_window_layers\":8,\"eos_token_id\":151645}",
             "{\"do_sample\":true,\"eos_token_id\":[5,6],\"temperature\":0.7}", &c);
    cr_expect_eq(c.arch, MODEL_ARCH_QWEN2);
    cr_expect(c.qkv_bias && c.max_context == 32768);
    /* 151645 is beyond this vocabulary and can never be drawn. */
    cr_expect(c.n_eos == 2 && c.eos_ids[0] == 5 && c.eos_ids[1] == 6);
}

Test(model_config, sliding_windows_limit_the_context)
{
    static const struct {
        const char *config;
        int max_context;
    } cases[] = {
        {MISTRAL ",\"sliding_window\":4096}", 4096},
        {MISTRAL ",\"sliding_window\":null}", 32768},
        {MISTRAL ",\"sliding_window\":65536}", 32768},
        {QWEN2 ",\"sliding_window\":4096,\"use_sliding_window\":true,\"max_window_layers\":8}", 4096},
        {QWEN2 ",\"sliding_window\":4096,\"use_sliding_window\":true,\"max_window_layers\":16}", 32768},
        {QWEN2 ",\"sliding_window\":4096,\"layer_types\":[\"full_attention\",\"full_attention\"]}", 32768},
        {QWEN2 ",\"sliding_window\":4096,\"layer_types\":[\"full_attention\",\"sliding_attention\"]}", 4096},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct model_config c;
        parse_ok(cases[i].config, NULL, &c);
        cr_expect_eq(c.max_context, cases[i].max_context, "%s: %d", cases[i].config, c.max_context);
        cr_expect_eq(c.trained_context, 32768);
        cr_expect_eq(strstr(c.note, "sliding window of 4096") != NULL, cases[i].max_context == 4096);
    }
}

Test(model_config, linear_scaling)
{
    struct model_config c;
    parse_ok(LLAMA ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":4.0}}", NULL, &c);
    cr_expect_float_eq(c.rope.inv_freq[16], 0.01 / 4, 1e-17);
    cr_expect_eq(c.rope.factor, 1.0);
}

/* Reference: transformers' _compute_yarn_parameters in double, for head dim 64, theta 1e6, factor 4, original context 32768. */
Test(model_config, yarn_scaling)
{
    struct model_config c;
    parse_ok(QWEN2 ",\"rope_theta\":1000000.0,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4.0,\"original_max_position_embeddings\":32768}}", NULL, &c);
    cr_expect_eq(c.trained_context, 131072);
    cr_expect_float_eq(c.rope.factor, 0.1 * log(4.0) + 1, 1e-15);
    double low = floor(64 * log(32768 / (32 * 2 * M_PI)) / (2 * log(1e6))), high = ceil(64 * log(32768 / (2 * M_PI)) / (2 * log(1e6)));
    for (int i = 0; i < 32; i++) {
        double ramp = fmin(fmax((i - low) / (high - low), 0), 1), freq = pow(1e6, -i / 32.0);
        cr_expect_float_eq(c.rope.inv_freq[i], (freq / 4) * ramp + freq * (1 - ramp), freq * 1e-14);
    }
    cr_expect_float_eq(c.rope.inv_freq[31], pow(1e6, -31 / 32.0) / 4, 1e-18);
}

Test(model_config, yarn_attention_factor_and_range)
{
    struct model_config c;
    parse_ok(LLAMA ",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":8,\"attention_factor\":0.75,\"truncate\":false}}", NULL, &c);
    cr_expect_eq(c.rope.factor, 0.75);
    double low = 64 * log(131072 / (32 * 2 * M_PI)) / (2 * log(1e4)), high = 64 * log(131072 / (2 * M_PI)) / (2 * log(1e4));
    double ramp = (24 - low) / (high - low), freq = pow(1e4, -24 / 32.0);
    cr_assert(ramp > 0 && ramp < 1);
    cr_expect_float_eq(c.rope.inv_freq[24], freq / 8 * ramp + freq * (1 - ramp), 1e-16);
    parse_ok(LLAMA ",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":8,\"mscale\":0.7,\"mscale_all_dim\":1.5}}", NULL, &c);
    cr_expect_float_eq(c.rope.factor, (0.07 * log(8) + 1) / (0.15 * log(8) + 1), 1e-15);
    parse_ok(LLAMA ",\"rope_scaling\":{\"type\":\"yarn\",\"original_max_position_embeddings\":32768}}", NULL, &c);
    cr_expect_eq(c.rope_scaling.factor, 4.0);
}

Test(model_config, unsupported_configs_are_named)
{
    check_refused("{\"architectures\":[\"MixtralForCausalLM\"]," SHAPE ",\"max_position_embeddings\":4096}", -ENOTSUP, "MixtralForCausalLM");
    check_refused("{\"architectures\":[]," SHAPE ",\"max_position_embeddings\":4096}", -ENOTSUP, "architectures");
    check_refused(LLAMA ",\"rope_scaling\":{\"rope_type\":\"dynamic\",\"factor\":2}}", -ENOTSUP, "\"dynamic\"");
    check_refused(LLAMA ",\"rope_scaling\":{\"rope_type\":\"longrope\",\"short_factor\":[1]}}", -ENOTSUP, "\"longrope\"");
    check_refused(LLAMA ",\"rope_parameters\":{\"full_attention\":{\"rope_theta\":1e6}}}", -ENOTSUP, "differ by layer");
    check_refused(LLAMA ",\"partial_rotary_factor\":0.5}", -ENOTSUP, "partial_rotary_factor");
    check_refused(LLAMA ",\"quantization_config\":{\"quant_method\":\"awq\"}}", -ENOTSUP, "quantization_config");
    check_refused(LLAMA ",\"layer_types\":[\"chunked_attention\"]}", -ENOTSUP, "chunked_attention");
    check_refused(LLAMA ",\"head_dim\":80}", -ENOTSUP, "head dim is 80");
    check_refused("{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_act\":\"gelu\"}", -ENOTSUP, "hidden_act");
}

Test(model_config, wrong_values_are_named)
{
    check_refused("{\"architectures\":[\"LlamaForCausalLM\"]," SHAPE "}", -EINVAL, "max_position_embeddings");
    check_refused("{\"architectures\":[\"LlamaForCausalLM\"]," SHAPE ",\"max_position_embeddings\":-4}", -EINVAL, "max_position_embeddings");
    check_refused(LLAMA ",\"head_dim\":512}", -EINVAL, "head dim is 512");
    check_refused(LLAMA ",\"rope_theta\":0}", -EINVAL, "theta");
    check_refused(LLAMA ",\"rope_scaling\":{\"type\":\"linear\"}}", -EINVAL, "factor");
    check_refused(LLAMA ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":0.5}}", -EINVAL, "factor");
    check_refused(LLAMA ",\"rope_scaling\":{\"type\":\"llama3\",\"factor\":8}}", -EINVAL, "original_max_position_embeddings");
    check_refused(LLAMA ",\"rope_scaling\":{\"type\":\"llama3\",\"factor\":8,\"original_max_position_embeddings\":8192,\"low_freq_factor\":4,"
                        "\"high_freq_factor\":4}}",
                  -EINVAL, "high_freq_factor");
    check_refused(LLAMA ",\"eos_token_id\":\"2\"}", -EINVAL, "config.json");
    check_refused(LLAMA ",", -EINVAL, "config.json");
    check_refused("[]", -EINVAL, "config.json");
    check_refused("", -EINVAL, "config.json");
    check_refused("{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":100,\"intermediate_size\":256,\"num_hidden_layers\":2,\"num_attention_heads\":3,"
                  "\"vocab_size\":100,\"rms_norm_eps\":1e-6,\"max_position_embeddings\":512}",
                  -EINVAL, "no multiple");
    check_refused("{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":128,\"intermediate_size\":256,\"num_hidden_layers\":2,\"num_attention_heads\":4,"
                  "\"num_key_value_heads\":3,\"vocab_size\":100,\"rms_norm_eps\":1e-6,\"max_position_embeddings\":512}",
                  -EINVAL, "KV heads");
    check_refused("{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":128,\"intermediate_size\":256,\"num_hidden_layers\":100000,"
                  "\"num_attention_heads\":4,\"vocab_size\":100,\"rms_norm_eps\":1e-6,\"max_position_embeddings\":512}",
                  -EINVAL, "layers");
    check_refused("{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":99999999999,\"intermediate_size\":256,\"num_hidden_layers\":2,"
                  "\"num_attention_heads\":4,\"vocab_size\":100,\"rms_norm_eps\":1e-6,\"max_position_embeddings\":512}",
                  -EINVAL, "hidden_size");
    check_refused("{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":128,\"intermediate_size\":256,\"num_hidden_layers\":2,"
                  "\"num_attention_heads\":4,\"vocab_size\":100,\"max_position_embeddings\":512}",
                  -EINVAL, "epsilon");
}

/* ---- GGUF ---- */

/* The metadata of a small model, without what a test adds itself. */
static void build_model(struct gguf_build *b, const char *arch)
{
    static const uint64_t embedding[] = {128, 100};
    static const struct gguf_number numbers[] = {{"block_count", 2}, {"context_length", 4096}, {"embedding_length", 128}, {"feed_forward_length", 256}, {"attention.head_count", 4}};
    gguf_build_init(b);
    gguf_build_model(b, arch, numbers, sizeof(numbers) / sizeof(numbers[0]));
    gguf_build_tensor(b, "token_embd.weight", 1, 2, embedding, NULL, 128 * 100 * 2);
}

static int read_build(struct gguf_build *b, struct model_config *ret, struct error *err)
{
    struct buf file;
    struct gguf *g;
    buf_init(&file, 1 << 20);
    gguf_build_finish(b, &file);
    gguf_build_fini(b);
    cr_assert_eq(gguf_open_memory(file.data, file.len, &g, err), 0, "%s", err->text);
    int r = model_config_from_gguf(g, ret, err);
    gguf_close(g);
    buf_fini(&file);
    return r;
}

static void read_build_ok(struct gguf_build *b, struct model_config *ret)
{
    struct error err;
    int r = read_build(b, ret, &err);
    cr_assert_eq(r, 0, "%s", err.text);
}

static void check_build_refused(struct gguf_build *b, int code, const char *expected)
{
    struct model_config c;
    struct error err = {0};
    cr_expect_eq(read_build(b, &c, &err), code, "expected \"%s\"", expected);
    cr_expect(strstr(err.text, expected), "\"%s\" does not contain \"%s\"", err.text, expected);
}

Test(model_config, gguf_llama_with_defaults)
{
    struct gguf_build b;
    struct model_config c;
    build_model(&b, "llama");
    gguf_build_u32(&b, "tokenizer.ggml.eos_token_id", 7);
    gguf_build_u32(&b, "tokenizer.ggml.eot_token_id", 8);
    gguf_build_str(&b, "general.name", "tiny");
    read_build_ok(&b, &c);
    cr_expect(c.n_layers == 2 && c.dim == 128 && c.n_heads == 4 && c.n_kv_heads == 4 && c.head_dim == 32 && c.ffn_dim == 256 && c.n_vocab == 100);
    cr_expect(c.tied_embeddings && !c.qkv_bias && c.max_context == 4096);
    cr_expect_eq(c.rope_style, ROPE_INTERLEAVED);
    cr_expect(c.n_eos == 2 && c.eos_ids[0] == 7 && c.eos_ids[1] == 8);
    cr_expect_str_eq(c.name, "tiny");
    cr_expect_float_eq(c.rope.inv_freq[8], 0.01, 1e-16);
}

Test(model_config, gguf_qwen2_has_halves_and_biases)
{
    static const uint64_t head[] = {128, 100};
    struct gguf_build b;
    struct model_config c;
    build_model(&b, "qwen2");
    gguf_build_u32(&b, "qwen2.attention.head_count_kv", 2);
    gguf_build_f32(&b, "qwen2.rope.freq_base", 1000000.0f);
    gguf_build_tensor(&b, "output.weight", 1, 2, head, NULL, 128 * 100 * 2);
    read_build_ok(&b, &c);
    cr_expect_eq(c.rope_style, ROPE_HALVES);
    cr_expect(c.qkv_bias && !c.tied_embeddings && c.n_kv_heads == 2);
    cr_expect_float_eq(c.rope.inv_freq[8], 0.001, 1e-16);
}

Test(model_config, gguf_divisors_scale_the_frequencies)
{
    static const uint64_t shape[] = {16};
    float divisors[16];
    struct gguf_build b;
    struct model_config c;
    for (int i = 0; i < 16; i++)
        divisors[i] = 1.0f + (float)i;
    build_model(&b, "llama");
    gguf_build_tensor(&b, "rope_freqs.weight", 0, 1, shape, divisors, sizeof(divisors));
    read_build_ok(&b, &c);
    cr_expect_float_eq(c.rope.inv_freq[8], 0.01 / 9, 1e-16);
    divisors[3] = 0.0f;
    build_model(&b, "llama");
    gguf_build_tensor(&b, "rope_freqs.weight", 0, 1, shape, divisors, sizeof(divisors));
    check_build_refused(&b, -EINVAL, "divisor of frequency 3");
    build_model(&b, "llama");
    gguf_build_tensor(&b, "rope_freqs.weight", 1, 1, shape, divisors, 32);
    check_build_refused(&b, -EINVAL, "rope_freqs.weight");
}

Test(model_config, gguf_scaling_types)
{
    struct gguf_build b;
    struct model_config c;
    build_model(&b, "llama");
    gguf_build_f32(&b, "llama.rope.scale_linear", 2.0f);
    read_build_ok(&b, &c);
    cr_expect_float_eq(c.rope.inv_freq[8], 0.005, 1e-16);
    build_model(&b, "llama");
    gguf_build_str(&b, "llama.rope.scaling.type", "yarn");
    gguf_build_f32(&b, "llama.rope.scaling.factor", 4.0f);
    gguf_build_u32(&b, "llama.rope.scaling.original_context_length", 1024);
    gguf_build_f32(&b, "llama.rope.scaling.attn_factor", 0.5f);
    read_build_ok(&b, &c);
    cr_expect_float_eq(c.rope.factor, 0.5 * (0.1 * log(4.0) + 1), 1e-15);
    cr_expect_eq(c.rope_scaling.original_context, 1024.0);
    build_model(&b, "llama");
    gguf_build_str(&b, "llama.rope.scaling.type", "longrope");
    check_build_refused(&b, -ENOTSUP, "longrope");
}

Test(model_config, gguf_end_tokens_are_known_by_their_text)
{
    static const char *const tokens[] = {"a", "<|eot_id|>", "<|eot_id|>", "</s>", "<|end_of_text|>"};
    static const int32_t types[] = {1, 1, 3, 3, 3}; /* 3: control; the second is plain text that looks like one */
    struct gguf_build b;
    struct model_config c;
    uint8_t array[12 + sizeof(types)] = {5, 0, 0, 0, 5}; /* five i32 */
    memcpy(array + 12, types, sizeof(types));
    build_model(&b, "llama");
    gguf_build_u32(&b, "tokenizer.ggml.eos_token_id", 3);
    gguf_build_strings(&b, "tokenizer.ggml.tokens", tokens, 5);
    gguf_build_raw(&b, "tokenizer.ggml.token_type", 9, array, sizeof(array));
    read_build_ok(&b, &c);
    cr_expect(c.n_eos == 3 && c.eos_ids[0] == 3 && c.eos_ids[1] == 2 && c.eos_ids[2] == 4);
}

Test(model_config, gguf_window_limits_the_context)
{
    struct gguf_build b;
    struct model_config c;
    build_model(&b, "llama");
    gguf_build_u32(&b, "llama.attention.sliding_window", 1024);
    read_build_ok(&b, &c);
    cr_expect(c.max_context == 1024 && c.trained_context == 4096 && strstr(c.note, "1024"));
}

Test(model_config, gguf_unsupported_is_named)
{
    struct gguf_build b;
    uint8_t per_layer[20] = {4, 0, 0, 0, 2}; /* two u32 */
    build_model(&b, "gemma2");
    check_build_refused(&b, -ENOTSUP, "gemma2");
    build_model(&b, "llama");
    gguf_build_u32(&b, "llama.expert_count", 8);
    check_build_refused(&b, -ENOTSUP, "mixture of experts");
    build_model(&b, "llama");
    gguf_build_bool(&b, "llama.attention.causal", false);
    check_build_refused(&b, -ENOTSUP, "attention.causal");
    build_model(&b, "llama");
    gguf_build_u32(&b, "split.count", 3);
    check_build_refused(&b, -ENOTSUP, "3 parts");
    build_model(&b, "llama");
    gguf_build_u32(&b, "llama.rope.dimension_count", 16);
    check_build_refused(&b, -ENOTSUP, "RoPE over 16");
    build_model(&b, "llama");
    gguf_build_raw(&b, "llama.attention.head_count_kv", 9, per_layer, sizeof(per_layer));
    check_build_refused(&b, -EINVAL, "differ by layer");
}

Test(model_config, gguf_missing_keys_are_named)
{
    struct gguf_build b;
    gguf_build_init(&b);
    check_build_refused(&b, -EINVAL, "general.architecture");
    gguf_build_init(&b);
    gguf_build_str(&b, "general.architecture", "llama");
    check_build_refused(&b, -EINVAL, "llama.block_count");
}

Test(model_config, real_model)
{
    static const char path[] = "models/SmolLM2-135M-Instruct.Q4_1.gguf";
    struct model_config c;
    struct error err;
    if (access(path, R_OK) < 0)
        cr_skip_test("skipped: %s is not here", path);
    cr_assert_eq(model_config_load(path, &c, &err), 0, "%s", err.text);
    cr_expect(c.n_layers == 30 && c.dim == 576 && c.n_heads == 9 && c.n_kv_heads == 3 && c.head_dim == 64 && c.ffn_dim == 1536 && c.n_vocab == 49152);
    cr_expect(c.tied_embeddings && c.max_context == 8192 && c.n_eos == 2 && c.eos_ids[0] == 2 && c.eos_ids[1] == 0);
    cr_expect_float_eq(c.rope.inv_freq[16], pow(100000.0, -0.5), 1e-16);
}

Test(model_config, path_that_does_not_exist)
{
    struct model_config c;
    struct error err;
    cr_expect_eq(model_config_load("no/such/model", &c, &err), -ENOENT);
    cr_expect(strstr(err.text, "no/such/model"));
}
