#include "worker/model/model_weights.h"
#include "proto/base/base_assert.h"
#include "worker/model/model_key_bias.h"
#include <errno.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* One tensor that the model wants, and where it goes: a matrix into `matrix` or a vector into `vector`. */
struct wanted {
    enum tensor_role role;
    int layer;
    bool bias, required;
    int64_t n_rows, n_cols;
    struct weight *matrix;
    float **vector;
    struct source_tensor found; /* data is NULL when absent */
};

/* 9 tensors and 7 biases a layer, and 3 outside. */
enum { WANTED_PER_LAYER = 16, WANTED_OUTSIDE = 3 };

struct loader {
    const struct model_weights_params *p;
    struct model_weights *weights;
    struct wanted *wanted; /* [n_wanted] in loading order */
    size_t n_wanted;
    crypto_generichash_state digest;
    struct error *err;
};

/* ---- what is wanted ---- */

static struct wanted *want(struct loader *l, enum tensor_role role, int layer, int64_t n_rows, int64_t n_cols)
{
    struct wanted *w = &l->wanted[l->n_wanted++];
    *w = (struct wanted){.role = role, .layer = layer, .required = true, .n_rows = n_rows, .n_cols = n_cols};
    return w;
}

static void want_vector(struct loader *l, enum tensor_role role, int layer, int64_t n, float **vector)
{
    want(l, role, layer, 1, n)->vector = vector;
}

static void want_linear(struct loader *l, enum tensor_role role, int layer, int64_t n_rows, int64_t n_cols, struct model_linear *linear)
{
    bool is_qkv = role == TENSOR_Q || role == TENSOR_K || role == TENSOR_V;
    want(l, role, layer, n_rows, n_cols)->matrix = &linear->w;
    struct wanted *bias = want(l, role, layer, 1, n_rows);
    bias->bias = true;
    bias->vector = &linear->bias;
    bias->required = is_qkv && l->p->config->qkv_bias;
}

static void want_layer(struct loader *l, int layer)
{
    const struct model_config *c = l->p->config;
    struct model_layer_weights *w = &l->weights->layers[layer];
    int64_t q_dim = (int64_t)c->n_heads * c->head_dim, kv_dim = (int64_t)c->n_kv_heads * c->head_dim;
    want_vector(l, TENSOR_ATTN_NORM, layer, c->dim, &w->attn_norm);
    want_linear(l, TENSOR_Q, layer, q_dim, c->dim, &w->q);
    want_linear(l, TENSOR_K, layer, kv_dim, c->dim, &w->k);
    want_linear(l, TENSOR_V, layer, kv_dim, c->dim, &w->v);
    want_linear(l, TENSOR_O, layer, c->dim, q_dim, &w->o);
    want_vector(l, TENSOR_FFN_NORM, layer, c->dim, &w->ffn_norm);
    want_linear(l, TENSOR_GATE, layer, c->ffn_dim, c->dim, &w->gate);
    want_linear(l, TENSOR_UP, layer, c->ffn_dim, c->dim, &w->up);
    want_linear(l, TENSOR_DOWN, layer, c->dim, c->ffn_dim, &w->down);
}

static void want_all(struct loader *l)
{
    const struct model_config *c = l->p->config;
    want(l, TENSOR_EMBEDDING, 0, c->n_vocab, c->dim)->matrix = &l->weights->embedding;
    for (int layer = 0; layer < c->n_layers; layer++)
        want_layer(l, layer);
    want_vector(l, TENSOR_FINAL_NORM, 0, c->dim, &l->weights->final_norm);
    if (!c->tied_embeddings)
        want(l, TENSOR_HEAD, 0, c->n_vocab, c->dim)->matrix = &l->weights->head;
}

/* Finds and checks everything before the first byte is packed, so that a wrong file fails at once. */
static int find_all(struct loader *l)
{
    for (size_t i = 0; i < l->n_wanted; i++) {
        struct wanted *w = &l->wanted[i];
        char name[TENSOR_NAME_BYTES];
        int r = weight_source_find(l->p->source, w->role, w->layer, w->bias, &w->found, l->err);
        if (r == -ENOENT && !w->required)
            continue;
        weight_source_name(l->p->source, w->role, w->layer, w->bias, name);
        if (r == -ENOENT)
            return error_set(l->err, -EINVAL, "tensor %s is missing", name);
        if (r < 0)
            return r;
        if (w->found.n_rows != w->n_rows || w->found.n_cols != w->n_cols)
            return error_set(l->err, -EINVAL, "tensor %s: its shape is [%lld, %lld], the configuration says [%lld, %lld]", name,
                             (long long)w->found.n_rows, (long long)w->found.n_cols, (long long)w->n_rows, (long long)w->n_cols);
        if (w->vector && w->found.dtype != WEIGHT_F32 && w->found.dtype != WEIGHT_F16 && w->found.dtype != WEIGHT_BF16)
            return error_set(l->err, -ENOTSUP, "tensor %s: a vector must be F32, F16 or BF16", name);
        l->weights->file_bytes += w->found.bytes;
    }
    return 0;
}

/* ---- loading ---- */

static int allocate(struct loader *l, const struct wanted *w, size_t bytes, void **ret_memory)
{
    int r = l->p->dev->alloc(l->p->device, MEM_WEIGHTS, bytes, ret_memory);
    if (r < 0)
        return error_set(l->err, r, "tensor %s: no memory for its %zu bytes on the device", w->found.name, bytes);
    l->weights->memory[l->weights->n_memory++] = *ret_memory;
    return 0;
}

static size_t element_bytes(enum weight_dtype dtype)
{
    return dtype == WEIGHT_F32 ? 4 : 2;
}

/* `src` where it is aligned for its dtype, else a copy in *ret_copy (freed by the caller). Blocks of quantized types need no more than 2 bytes. */
static const void *aligned_source(const struct source_tensor *t, void **ret_copy)
{
    *ret_copy = NULL;
    if ((uintptr_t)t->data % element_bytes(t->dtype) == 0)
        return t->data;
    *ret_copy = malloc(t->bytes);
    if (*ret_copy)
        memcpy(*ret_copy, t->data, t->bytes);
    return *ret_copy;
}

static int load_matrix(struct loader *l, const struct wanted *w)
{
    const struct source_tensor *t = &w->found;
    const struct model_weights_params *p = l->p;
    void *packed, *copy;
    int r = allocate(l, w, p->ops->weight_bytes(t->dtype, t->n_rows, t->n_cols), &packed);
    if (r < 0)
        return r;
    const void *src = aligned_source(t, &copy);
    if (!src)
        return error_set(l->err, -ENOMEM, "tensor %s: no memory to align its %llu bytes", t->name, (unsigned long long)t->bytes);
    r = p->ops->weight_pack(p->stream, t->dtype, t->n_rows, t->n_cols, src, packed);
    if (r >= 0 && copy)
        r = p->dev->stream_sync(p->stream);
    free(copy);
    if (r < 0)
        return error_set(l->err, r, "tensor %s: cannot be packed: %s", t->name, strerror(-r));
    *w->matrix = (struct weight){.dtype = t->dtype, .n_rows = t->n_rows, .n_cols = t->n_cols, .packed = packed};
    return 0;
}

static float bits_float(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

/* Exact: subnormals are scaled by a power of two. */
static float half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
    if (exponent == 0)
        return (sign ? -1.0f : 1.0f) * ((float)mantissa * 0x1p-24f);
    if (exponent == 31)
        return bits_float(sign | 0x7f800000 | mantissa << 13);
    return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

static void expand_vector(const struct source_tensor *t, float *ret_values)
{
    const uint8_t *bytes = t->data;
    uint16_t h;
    for (int64_t i = 0; i < t->n_cols; i++) {
        if (t->dtype == WEIGHT_F32) {
            memcpy(&ret_values[i], bytes + 4 * i, 4);
            continue;
        }
        memcpy(&h, bytes + 2 * i, 2);
        ret_values[i] = t->dtype == WEIGHT_F16 ? half_to_float(h) : bits_float((uint32_t)h << 16);
    }
}

static int load_vector(struct loader *l, const struct wanted *w)
{
    const struct model_weights_params *p = l->p;
    size_t bytes = (size_t)w->found.n_cols * sizeof(float);
    void *memory;
    int r = allocate(l, w, bytes, &memory);
    if (r < 0)
        return r;
    float *values = malloc(bytes);
    if (!values)
        return error_set(l->err, -ENOMEM, "tensor %s: out of memory", w->found.name);
    expand_vector(&w->found, values);
    r = p->dev->copy(p->stream, memory, values, bytes);
    if (r >= 0)
        r = p->dev->stream_sync(p->stream); /* the source is freed now */
    free(values);
    if (r < 0)
        return error_set(l->err, r, "tensor %s: cannot be copied to the device: %s", w->found.name, strerror(-r));
    *w->vector = memory;
    return 0;
}

static void digest_u64(crypto_generichash_state *digest, uint64_t v)
{
    crypto_generichash_update(digest, (const unsigned char *)&v, sizeof(v));
}

static void digest_tensor(struct loader *l, const struct source_tensor *t)
{
    XXH128_canonical_t content;
    XXH128_canonicalFromHash(&content, XXH3_128bits(t->data, t->bytes));
    digest_u64(&l->digest, strlen(t->name));
    crypto_generichash_update(&l->digest, (const unsigned char *)t->name, strlen(t->name));
    digest_u64(&l->digest, (uint64_t)t->dtype);
    digest_u64(&l->digest, (uint64_t)t->n_rows);
    digest_u64(&l->digest, (uint64_t)t->n_cols);
    crypto_generichash_update(&l->digest, content.digest, sizeof(content.digest));
}

static int load_all(struct loader *l)
{
    uint64_t done = 0;
    crypto_generichash_init(&l->digest, NULL, 0, WEIGHTS_DIGEST_BYTES);
    for (size_t i = 0; i < l->n_wanted; i++) {
        const struct wanted *w = &l->wanted[i];
        if (!w->found.data)
            continue;
        int r = w->matrix ? load_matrix(l, w) : load_vector(l, w);
        if (r < 0)
            return r;
        digest_tensor(l, &w->found);
        done += w->found.bytes;
        if (l->p->progress)
            l->p->progress(l->p->progress_arg, done, l->weights->file_bytes);
    }
    crypto_generichash_final(&l->digest, l->weights->digest, WEIGHTS_DIGEST_BYTES);
    if (l->p->config->tied_embeddings)
        l->weights->head = l->weights->embedding;
    int r = l->p->dev->stream_sync(l->p->stream); /* the files may be closed now */
    return r < 0 ? error_set(l->err, r, "the weights cannot be loaded: %s", strerror(-r)) : 0;
}

/* ---- sizes without loading ---- */

static const struct {
    const char *name;
    int64_t columns;  /* a block */
    double bits;      /* a value in the file */
} dtypes[WEIGHT_DTYPE_COUNT] = {
    [WEIGHT_F32] = {"f32", 1, 32},         [WEIGHT_F16] = {"f16", 1, 16},         [WEIGHT_BF16] = {"bf16", 1, 16},         [WEIGHT_Q8_0] = {"q8_0", 32, 8.5},
    [WEIGHT_Q4_0] = {"q4_0", 32, 4.5},     [WEIGHT_Q4_1] = {"q4_1", 32, 5},       [WEIGHT_Q5_0] = {"q5_0", 32, 5.5},       [WEIGHT_Q4_K] = {"q4_k", 256, 4.5},
    [WEIGHT_Q5_K] = {"q5_k", 256, 5.5},    [WEIGHT_Q6_K] = {"q6_k", 256, 6.5625},
};

const char *weight_dtype_name(enum weight_dtype dtype)
{
    return (unsigned)dtype < WEIGHT_DTYPE_COUNT ? dtypes[dtype].name : "unknown";
}

/* Without files every matrix has the dtype asked for; vectors are kept in 16 bits, and only those are there that must be. */
static int find_shapes(struct loader *l, enum weight_dtype dtype)
{
    for (size_t i = 0; i < l->n_wanted; i++) {
        struct wanted *w = &l->wanted[i];
        if (!w->required)
            continue;
        w->found = (struct source_tensor){.dtype = w->matrix ? dtype : WEIGHT_BF16, .n_rows = w->n_rows, .n_cols = w->n_cols, .data = l};
        if (w->n_cols % dtypes[w->found.dtype].columns != 0)
            return error_set(l->err, -EINVAL, "rows of %lld are no multiple of the %lld values in a block of %s", (long long)w->n_cols,
                             (long long)dtypes[dtype].columns, dtypes[dtype].name);
        w->found.bytes = (uint64_t)((double)(w->n_rows * w->n_cols) * dtypes[w->found.dtype].bits / 8);
        l->weights->file_bytes += w->found.bytes;
    }
    return 0;
}

int model_weights_measure(const struct model_weights_params *p, enum weight_dtype dtype, struct model_weights_size *ret_size, struct error *err)
{
    struct model_weights weights = {.n_layers = p->config->n_layers};
    struct loader l = {.p = p, .weights = &weights, .err = err};
    struct model_config config = *p->config;
    size_t n_max = WANTED_OUTSIDE + (size_t)p->config->n_layers * WANTED_PER_LAYER, device_bytes = 0;
    int r = -ENOMEM;
    l.wanted = calloc(n_max, sizeof(*l.wanted));
    weights.layers = calloc((size_t)p->config->n_layers, sizeof(*weights.layers));
    if (!l.wanted || !weights.layers) {
        error_set(err, r, "the weights cannot be measured: out of memory");
        goto fail;
    }
    want_all(&l);
    r = p->source ? find_all(&l) : find_shapes(&l, dtype);
    for (size_t i = 0; r >= 0 && i < l.n_wanted; i++) {
        const struct wanted *w = &l.wanted[i];
        const struct source_tensor *t = &w->found;
        if (!t->data)
            continue;
        device_bytes += w->matrix ? p->ops->weight_bytes(t->dtype, t->n_rows, t->n_cols) : (size_t)t->n_cols * sizeof(float);
        config.qkv_bias |= w->role == TENSOR_K && w->bias;
    }
    if (r >= 0)
        *ret_size = (struct model_weights_size){
            .file_bytes = weights.file_bytes, .device_bytes = device_bytes + model_key_bias_bytes(&config), .has_key_bias = config.qkv_bias};
fail:
    free(weights.layers);
    free(l.wanted);
    return r;
}

/* ---- */

int model_weights_load(const struct model_weights_params *p, struct model_weights *ret_weights, struct error *err)
{
    struct model_weights weights = {.n_layers = p->config->n_layers};
    struct loader l = {.p = p, .weights = &weights, .err = err};
    size_t n_max = WANTED_OUTSIDE + (size_t)p->config->n_layers * WANTED_PER_LAYER;
    int r = weight_source_check_unknown(p->source, p->config->n_layers, err);
    if (r < 0)
        return r;
    l.wanted = calloc(n_max, sizeof(*l.wanted));
    weights.memory = calloc(n_max, sizeof(*weights.memory));
    weights.layers = calloc((size_t)p->config->n_layers, sizeof(*weights.layers));
    if (!l.wanted || !weights.memory || !weights.layers) {
        r = error_set(err, -ENOMEM, "the weights cannot be loaded: out of memory");
        goto fail;
    }
    want_all(&l);
    ASSERT(l.n_wanted <= n_max);
    if ((r = find_all(&l)) < 0 || (r = load_all(&l)) < 0)
        goto fail;
    free(l.wanted);
    *ret_weights = weights;
    return 0;
fail:
    free(l.wanted);
    model_weights_fini(&weights, p->dev, p->device);
    return r;
}

void model_weights_fini(struct model_weights *weights, const struct device_ops *dev, struct device *device)
{
    while (weights->n_memory > 0)
        dev->free(device, weights->memory[--weights->n_memory]);
    free(weights->memory);
    free(weights->layers);
    *weights = (struct model_weights){0};
}
