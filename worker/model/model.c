#include "worker/model/model.h"
#include "proto/base/base_assert.h"
#include "worker/model/random_weights.h"
#include <errno.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>

static const char *name_of(const struct model_open_params *p)
{
    return p->random ? p->random->name : p->path;
}

static int open_source(const struct model_open_params *p, struct weight_source *ret_source, struct error *err)
{
    return p->random ? random_weights_create(p->random, p->random_seed, &ret_source->random, err) : weight_source_open(p->path, ret_source, err);
}

static int load_config(const struct model_open_params *p, const struct weight_source *source, struct model_config *ret_config, struct error *err)
{
    struct error reason = {0};
    if (p->random) {
        *ret_config = *p->random;
        return 0;
    }
    if (!source->gguf)
        return model_config_load(p->path, ret_config, err);
    int r = model_config_from_gguf(source->gguf, ret_config, &reason);
    return r < 0 ? error_set(err, r, "%s: %.400s", p->path, reason.text) : 0;
}

static int take_part(const struct model_open_params *p, const struct weight_source *source, struct model_config *config, struct error *err)
{
    struct error reason = {0};
    if (p->n_ranks <= 1)
        return 0;
    int r = model_shard_split(config, p->rank, p->n_ranks, model_weights_ffn_unit(source, config->n_layers), config, &reason);
    return r < 0 ? error_set(err, r, "%s: %.400s", name_of(p), reason.text) : 0;
}

static int load_weights(const struct model_open_params *p, const struct weight_source *source, struct model *m, struct error *err)
{
    struct error reason = {0};
    const struct model_weights_params params = {
        .config = &m->config,
        .source = source,
        .dev = p->dev,
        .ops = p->ops,
        .device = p->device,
        .stream = p->stream,
        .progress = p->progress,
        .progress_arg = p->progress_arg,
    };
    int r = model_weights_load(&params, &m->weights, &reason);
    return r < 0 ? error_set(err, r, "%s: %.400s", name_of(p), reason.text) : 0;
}

int model_measure(const struct model_open_params *p, struct model_weights_size *ret_size, struct error *err)
{
    struct weight_source source = {0};
    struct error reason = {0};
    struct model_config config;
    int r = open_source(p, &source, err);
    if (r < 0)
        return r;
    r = load_config(p, &source, &config, err);
    if (r >= 0)
        r = take_part(p, &source, &config, err);
    if (r >= 0) {
        const struct model_weights_params params = {.config = &config, .source = &source, .ops = p->ops};
        r = model_weights_measure(&params, WEIGHT_BF16, ret_size, &reason);
        if (r < 0)
            error_set(err, r, "%s: %.400s", name_of(p), reason.text);
    }
    weight_source_close(&source);
    return r;
}

int model_open(const struct model_open_params *p, struct model **ret_model, struct error *err)
{
    struct weight_source source = {0};
    struct model *m = calloc(1, sizeof(*m));
    if (!m)
        return error_set(err, -ENOMEM, "%s: out of memory", name_of(p));
    m->dev = p->dev;
    m->ops = p->ops;
    m->device = p->device;
    m->stream = p->stream;
    int r = open_source(p, &source, err);
    if (r < 0 || (r = load_config(p, &source, &m->config, err)) < 0 || (r = take_part(p, &source, &m->config, err)) < 0 ||
        (r = load_weights(p, &source, m, err)) < 0 ||
        (r = model_key_bias_split(m, err)) < 0)
        goto fail;
    weight_source_close(&source);
    *ret_model = m;
    return 0;
fail:
    weight_source_close(&source);
    model_close(m);
    return r;
}

void model_close(struct model *model)
{
    if (!model)
        return;
    model_key_bias_fini(model);
    model_weights_fini(&model->weights, model->dev, model->device);
    free(model);
}

void model_join(struct model *model, const struct collective_ops *ops, struct collective *collective)
{
    ASSERT(model_is_sharded(&model->config));
    model->collective_ops = ops;
    model->collective = collective;
}

static void hash_u64(crypto_generichash_state *hash, uint64_t v)
{
    crypto_generichash_update(hash, (const unsigned char *)&v, sizeof(v));
}

static void hash_double(crypto_generichash_state *hash, double v)
{
    uint64_t bits;
    memcpy(&bits, &v, sizeof(bits));
    hash_u64(hash, bits);
}

/* What both identities are made of. `tag` with its NUL. */
static void hash_model(crypto_generichash_state *hash, const char *tag, const uint8_t weights[WEIGHTS_DIGEST_BYTES], const uint64_t *numbers, size_t n_numbers, const struct model_config *c)
{
    crypto_generichash_init(hash, NULL, 0, FINGERPRINT_BYTES);
    crypto_generichash_update(hash, (const unsigned char *)tag, strlen(tag) + 1);
    crypto_generichash_update(hash, weights, WEIGHTS_DIGEST_BYTES);
    for (size_t i = 0; i < n_numbers; i++)
        hash_u64(hash, numbers[i]);
    hash_double(hash, (double)c->rms_eps);
    hash_double(hash, c->rope.factor);
    for (int i = 0; i < c->rope.n_freqs; i++)
        hash_double(hash, c->rope.inv_freq[i]);
}

void model_fingerprint(const struct model *model, enum kv_format format, int tp_degree, int tp_rank, uint8_t ret_fingerprint[FINGERPRINT_BYTES])
{
    const struct model_config *c = &model->config;
    const uint64_t numbers[] = {
        (uint64_t)c->n_layers, (uint64_t)c->dim,         (uint64_t)c->n_heads, (uint64_t)c->n_kv_heads, (uint64_t)c->head_dim,
        (uint64_t)c->ffn_dim,  (uint64_t)c->rope_style,  (uint64_t)format,     BLOCK_LAYOUT_VERSION,    (uint64_t)tp_degree,
        (uint64_t)tp_rank,     (uint64_t)c->rope.n_freqs,
    };
    crypto_generichash_state hash;
    hash_model(&hash, "tidepool kv", model->weights.digest, numbers, ARRAY_LEN(numbers), c);
    if (model->key_bias.n_pairs)
        crypto_generichash_update(&hash, model->key_bias.digest, KEY_BIAS_DIGEST_BYTES);
    crypto_generichash_final(&hash, ret_fingerprint, FINGERPRINT_BYTES);
}

void model_family(const struct model *model, uint8_t ret_family[FINGERPRINT_BYTES])
{
    const struct model_config *c = &model->config;
    const uint64_t numbers[] = {(uint64_t)c->n_layers, (uint64_t)c->dim,        (uint64_t)c->head_dim, (uint64_t)c->n_vocab,
                                (uint64_t)c->rope_style, (uint64_t)c->max_context, (uint64_t)c->rope.n_freqs};
    crypto_generichash_state hash;
    hash_model(&hash, "tidepool ranks", model->weights.family, numbers, ARRAY_LEN(numbers), c);
    crypto_generichash_final(&hash, ret_family, FINGERPRINT_BYTES);
}
