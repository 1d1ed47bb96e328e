/* The entries are what the published config.json files say, reduced to the keys that matter here, and are read by the same code as those files. */
#include "worker/model/known_models.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#define ROPE_LLAMA3 \
    "\"rope_theta\":500000.0,\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,\"high_freq_factor\":4.0," \
    "\"original_max_position_embeddings\":8192}"

static const struct {
    const char *name, *json;
} models[] = {
    {"Llama-3.1-8B",
     "{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":4096,\"intermediate_size\":14336,\"num_hidden_layers\":32,\"num_attention_heads\":32,"
     "\"num_key_value_heads\":8,\"vocab_size\":128256,\"max_position_embeddings\":131072,\"rms_norm_eps\":1e-05,\"tie_word_embeddings\":false," ROPE_LLAMA3 "}"},
    {"Llama-3.1-70B",
     "{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":8192,\"intermediate_size\":28672,\"num_hidden_layers\":80,\"num_attention_heads\":64,"
     "\"num_key_value_heads\":8,\"vocab_size\":128256,\"max_position_embeddings\":131072,\"rms_norm_eps\":1e-05,\"tie_word_embeddings\":false," ROPE_LLAMA3 "}"},
    {"Mistral-7B", /* v0.3: no sliding window */
     "{\"architectures\":[\"MistralForCausalLM\"],\"hidden_size\":4096,\"intermediate_size\":14336,\"num_hidden_layers\":32,\"num_attention_heads\":32,"
     "\"num_key_value_heads\":8,\"vocab_size\":32768,\"max_position_embeddings\":32768,\"rms_norm_eps\":1e-05,\"tie_word_embeddings\":false,"
     "\"rope_theta\":1000000.0,\"sliding_window\":null}"},
    {"Qwen2.5-32B",
     "{\"architectures\":[\"Qwen2ForCausalLM\"],\"hidden_size\":5120,\"intermediate_size\":27648,\"num_hidden_layers\":64,\"num_attention_heads\":40,"
     "\"num_key_value_heads\":8,\"vocab_size\":152064,\"max_position_embeddings\":131072,\"rms_norm_eps\":1e-05,\"tie_word_embeddings\":false,"
     "\"rope_theta\":1000000.0,\"use_sliding_window\":false}"},
    {"DeepSeek-R1-Distill-14B", /* DeepSeek-R1-Distill-Qwen-14B */
     "{\"architectures\":[\"Qwen2ForCausalLM\"],\"hidden_size\":5120,\"intermediate_size\":13824,\"num_hidden_layers\":48,\"num_attention_heads\":40,"
     "\"num_key_value_heads\":8,\"vocab_size\":152064,\"max_position_embeddings\":131072,\"rms_norm_eps\":1e-05,\"tie_word_embeddings\":false,"
     "\"rope_theta\":1000000.0,\"use_sliding_window\":false}"},
    {"SmolLM2-135M",
     "{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":576,\"intermediate_size\":1536,\"num_hidden_layers\":30,\"num_attention_heads\":9,"
     "\"num_key_value_heads\":3,\"vocab_size\":49152,\"max_position_embeddings\":8192,\"rms_norm_eps\":1e-05,\"tie_word_embeddings\":true,"
     "\"rope_theta\":100000.0}"},
    {"SmolLM2-1.7B",
     "{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":2048,\"intermediate_size\":8192,\"num_hidden_layers\":24,\"num_attention_heads\":32,"
     "\"num_key_value_heads\":32,\"vocab_size\":49152,\"max_position_embeddings\":8192,\"rms_norm_eps\":1e-05,\"tie_word_embeddings\":true,"
     "\"rope_theta\":130000.0}"},
};

const char *known_model_name(int i)
{
    return i >= 0 && (size_t)i < ARRAY_LEN(models) ? models[i].name : NULL;
}

int known_model_config(const char *name, struct model_config *ret_config, struct error *err)
{
    for (size_t i = 0; i < ARRAY_LEN(models); i++) {
        if (strcasecmp(models[i].name, name) != 0)
            continue;
        int r = model_config_from_json(models[i].json, strlen(models[i].json), NULL, 0, ret_config, err);
        if (r >= 0)
            snprintf(ret_config->name, sizeof(ret_config->name), "%s", models[i].name);
        return r;
    }
    return error_set(err, -ENOENT, "%s is none of the known models", name);
}
