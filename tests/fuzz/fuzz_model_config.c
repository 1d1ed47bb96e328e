/* Any text as config.json, or as generation_config.json beside a good one: what is accepted is within bounds and finite. */
#include "worker/model/model_config.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char good[] = "{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":128,\"intermediate_size\":256,\"num_hidden_layers\":2,"
                           "\"num_attention_heads\":4,\"vocab_size\":100,\"rms_norm_eps\":1e-6,\"max_position_embeddings\":512}";

static void check(const struct model_config *c)
{
    if (c->head_dim % 32 != 0 || c->head_dim > MODEL_MAX_HEAD_DIM || c->n_heads % c->n_kv_heads != 0 || c->n_layers > MODEL_MAX_LAYERS ||
        c->max_context < 1 || c->max_context > c->trained_context || c->n_eos > MODEL_MAX_EOS || !isfinite(c->rope.factor))
        abort();
    for (int i = 0; i < c->rope.n_freqs; i++)
        if (!isfinite(c->rope.inv_freq[i]))
            abort();
    for (int i = 0; i < c->n_eos; i++)
        if (c->eos_ids[i] < 0 || c->eos_ids[i] >= c->n_vocab)
            abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct model_config config;
    struct error err;
    if (model_config_from_json((const char *)data, size, NULL, 0, &config, &err) >= 0)
        check(&config);
    if (size > 0 && model_config_from_json(good, strlen(good), (const char *)data, size, &config, &err) >= 0)
        check(&config);
    return 0;
}
