#include "worker/model/model_config.h"
#include "formats/file_map.h"
#include "formats/gguf.h"
#include "worker/model/model_config_private.h"
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <sys/stat.h>

/* Real ones have a few kilobytes. */
enum { MAX_JSON_BYTES = 16 << 20 };

const char *model_arch_name(enum model_arch arch)
{
    switch (arch) {
    case MODEL_ARCH_LLAMA: return "llama";
    case MODEL_ARCH_MISTRAL: return "mistral";
    case MODEL_ARCH_QWEN2: return "qwen2";
    }
    return "unknown";
}

void model_config_add_eos(struct model_config *c, int64_t id)
{
    if (id < 0 || id >= c->n_vocab || c->n_eos == MODEL_MAX_EOS)
        return;
    for (int i = 0; i < c->n_eos; i++)
        if (c->eos_ids[i] == (int32_t)id)
            return;
    c->eos_ids[c->n_eos++] = (int32_t)id;
}

static int check_bounds(const struct model_config *c, struct error *err)
{
    const struct {
        const char *name;
        int value, min, max;
    } bounds[] = {
        {"the number of layers", c->n_layers, 1, MODEL_MAX_LAYERS},
        {"the hidden size", c->dim, 1, MODEL_MAX_DIM},
        {"the number of heads", c->n_heads, 1, MODEL_MAX_HEADS},
        {"the number of KV heads", c->n_kv_heads, 1, MODEL_MAX_KV_HEADS},
        {"the head dim", c->head_dim, 32, MODEL_MAX_HEAD_DIM},
        {"the intermediate size", c->ffn_dim, 1, MODEL_MAX_FFN_DIM},
        {"the vocabulary", c->n_vocab, 1, MODEL_MAX_VOCAB},
        {"the context length", c->trained_context, 1, MODEL_MAX_CONTEXT},
    };
    for (size_t i = 0; i < sizeof(bounds) / sizeof(bounds[0]); i++)
        if (bounds[i].value < bounds[i].min || bounds[i].value > bounds[i].max)
            return error_set(err, -EINVAL, "%s is %d (allowed: %d to %d)", bounds[i].name, bounds[i].value, bounds[i].min, bounds[i].max);
    if (c->n_heads % c->n_kv_heads != 0)
        return error_set(err, -EINVAL, "%d heads cannot share %d KV heads evenly", c->n_heads, c->n_kv_heads);
    if (c->head_dim % 32 != 0)
        return error_set(err, -ENOTSUP, "the head dim is %d (supported: multiples of 32 up to %d)", c->head_dim, MODEL_MAX_HEAD_DIM);
    if (!(c->rms_eps > 0.0f && c->rms_eps < 1.0f))
        return error_set(err, -EINVAL, "the epsilon of RMSNorm is %g (allowed: above 0, below 1)", (double)c->rms_eps);
    return 0;
}

int model_config_finish(struct model_config *c, int64_t window, const float *divisors, struct error *err)
{
    if (c->head_dim == 0) {
        if (c->n_heads < 1 || c->dim % c->n_heads != 0)
            return error_set(err, -EINVAL, "the hidden size %d is no multiple of the number of heads %d, and no head dim is given", c->dim, c->n_heads);
        c->head_dim = c->dim / c->n_heads;
    }
    int r = check_bounds(c, err);
    if (r < 0 || (r = rope_freqs_init(&c->rope_scaling, c->head_dim, divisors, &c->rope, err)) < 0)
        return r;
    c->attention_scale = (float)(1.0 / sqrt((double)c->head_dim));
    c->max_context = c->trained_context;
    if (window > 0 && window < c->max_context) {
        /* Up to the window's length a sliding window attends to everything, so there the result is the model's own. */
        c->max_context = (int)window;
        snprintf(c->note, sizeof(c->note), "the model has a sliding window of %d tokens: its context of %d is limited to that", c->max_context,
                 c->trained_context);
    }
    return 0;
}

/* Maps `folder/file`; a file that is absent gives -ENOENT without a text unless it is required. */
static int map_json(const char *folder, const char *file, bool required, struct file_map *ret_map, struct error *err)
{
    char path[PATH_MAX];
    struct stat st;
    if (snprintf(path, sizeof(path), "%s/%s", folder, file) >= (int)sizeof(path))
        return error_set(err, -ENAMETOOLONG, "%s: the path is too long", folder);
    if (!required && stat(path, &st) < 0 && errno == ENOENT)
        return -ENOENT;
    int r = file_map_open(path, ret_map, err);
    if (r >= 0 && ret_map->size > MAX_JSON_BYTES) {
        r = error_set(err, -EINVAL, "%s: has %zu bytes (at most %d)", path, ret_map->size, MAX_JSON_BYTES);
        file_map_close(ret_map);
    }
    return r;
}

static int load_folder(const char *folder, struct model_config *ret_config, struct error *err)
{
    struct file_map config = {0}, generation = {0};
    struct error reason = {0};
    int r = map_json(folder, "config.json", true, &config, err);
    if (r < 0)
        return r;
    r = map_json(folder, "generation_config.json", false, &generation, err);
    if (r < 0 && r != -ENOENT)
        goto fail;
    r = model_config_from_json(config.data, config.size, generation.data, generation.size, ret_config, &reason);
    if (r < 0)
        error_set(err, r, "%s: %.400s", folder, reason.text);
fail:
    file_map_close(&generation);
    file_map_close(&config);
    return r;
}

static int load_gguf(const char *path, struct model_config *ret_config, struct error *err)
{
    struct error reason = {0};
    struct gguf *file;
    int r = gguf_open(path, &file, err);
    if (r < 0)
        return r;
    r = model_config_from_gguf(file, ret_config, &reason);
    if (r < 0)
        error_set(err, r, "%s: %.400s", path, reason.text);
    gguf_close(file);
    return r;
}

int model_config_load(const char *path, struct model_config *ret_config, struct error *err)
{
    struct stat st;
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode))
        return load_folder(path, ret_config, err);
    return load_gguf(path, ret_config, err);
}
