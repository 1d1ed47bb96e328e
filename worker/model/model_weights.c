#include "worker/model/model_weights.h"
#include "proto/base/base_assert.h"
#include "worker/model/model_key_bias.h"
#include "worker/model/model_shard.h"
#include "worker/model/tensor_part.h"
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
    int64_t n_rows, n_cols;    /* in the file */
    struct tensor_part part;   /* of it */
    struct weight *matrix;
    float **vector;
    struct source_tensor found; /* data is NULL when absent */
};

/* 9 tensors and 7 biases a layer, and 3 outside. */
enum { WANTED_PER_LAYER = 16, WANTED_OUTSIDE = 3 };
enum { FAMILY_SAMPLE_BYTES = 4096 };

struct loader {
    const struct model_weights_params *p;
    struct model_weights *weights;
    struct wanted *wanted; /* [n_wanted] in loading order */
    size_t n_wanted;
    crypto_generichash_state digest, family;
    struct error *err;
};

/* ---- what is wanted ---- */

/* The rank's part of rows or columns: `n` of `all`, from `first` on. */
struct share {
    int64_t first, n, all;
};

static struct share share_of(int64_t first, int64_t n, int64_t all)
{
    return (struct share){.first = first, .n = n, .all = all};
}

static struct share whole(int64_t n)
{
    return share_of(0, n, n);
}

static struct wanted *want(struct loader *l, enum tensor_role role, int layer, struct share rows, struct share cols)
{
    struct wanted *w = &l->wanted[l->n_wanted++];
    *w = (struct wanted){.role = role, .layer = layer, .required = true, .n_rows = rows.all, .n_cols = cols.all};
    w->part = (struct tensor_part){.row = rows.first, .n_rows = rows.n, .col = cols.first, .n_cols = cols.n};
    return w;
}

static void want_vector(struct loader *l, enum tensor_role role, int layer, int64_t n, float **vector)
{
    want(l, role, layer, whole(1), whole(n))->vector = vector;
}

/* The bias goes with the rows; where columns are shared, so that every rank has all rows, it is rank 0's. */
static void want_linear(struct loader *l, enum tensor_role role, int layer, struct share rows, struct share cols, struct model_linear *linear)
{
    const bool is_qkv = role == TENSOR_Q || role == TENSOR_K || role == TENSOR_V;
    want(l, role, layer, rows, cols)->matrix = &linear->w;
    if (cols.n < cols.all && l->p->config->shard.rank > 0)
        return;
    struct wanted *bias = want(l, role, layer, whole(1), rows);
    bias->bias = true;
    bias->vector = &linear->bias;
    bias->required = is_qkv && l->p->config->qkv_bias;
}

static void want_layer(struct loader *l, int layer)
{
    const struct model_config *c = l->p->config;
    const struct model_shard *s = &c->shard;
    const bool sharded = model_is_sharded(c);
    const int64_t d = c->head_dim;
    const struct share q = share_of(s->first_head * d, c->n_heads * d, (sharded ? s->all_heads : c->n_heads) * d);
    const struct share kv = share_of(s->first_kv_head * d, c->n_kv_heads * d, (sharded ? s->all_kv_heads : c->n_kv_heads) * d);
    const struct share ffn = share_of(s->first_ffn, c->ffn_dim, sharded ? s->all_ffn : c->ffn_dim), dim = whole(c->dim);
    struct model_layer_weights *w = &l->weights->layers[layer];
    want_vector(l, TENSOR_ATTN_NORM, layer, c->dim, &w->attn_norm);
    want_linear(l, TENSOR_Q, layer, q, dim, &w->q);
    want_linear(l, TENSOR_K, layer, kv, dim, &w->k);
    want_linear(l, TENSOR_V, layer, kv, dim, &w->v);
    want_linear(l, TENSOR_O, layer, dim, q, &w->o);
    want_vector(l, TENSOR_FFN_NORM, layer, c->dim, &w->ffn_norm);
    want_linear(l, TENSOR_GATE, layer, ffn, dim, &w->gate);
    want_linear(l, TENSOR_UP, layer, ffn, dim, &w->up);
    want_linear(l, TENSOR_DOWN, layer, dim, ffn, &w->down);
}

static struct share vocab_share(const struct model_config *c)
{
    const int64_t first = model_shard_vocab_first(c, c->shard.rank);
    return share_of(first, model_shard_vocab_first(c, c->shard.rank + 1) - first, c->n_vocab);
}

static void want_all(struct loader *l)
{
    const struct model_config *c = l->p->config;
    const struct share vocab = vocab_share(c);
    want(l, TENSOR_EMBEDDING, 0, whole(c->n_vocab), whole(c->dim))->matrix = &l->weights->embedding;
    for (int layer = 0; layer < c->n_layers; layer++)
        want_layer(l, layer);
    want_vector(l, TENSOR_FINAL_NORM, 0, c->dim, &l->weights->final_norm);
    if (!c->tied_embeddings && vocab.n > 0)
        want(l, TENSOR_HEAD, 0, vocab, whole(c->dim))->matrix = &l->weights->head;
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
        l->weights->file_bytes += tensor_part_bytes(w->found.dtype, &w->part);
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

/* A part that begins or ends inside a block, as fp32 in *ret_copy. */
static int expand_part(struct loader *l, const struct wanted *w, struct source_tensor *t, void **ret_copy)
{
    const struct model_weights_params *p = l->p;
    const struct tensor_expand_params params = {.dev = p->dev, .ops = p->ops, .device = p->device, .stream = p->stream};
    const uint64_t bytes = (uint64_t)w->part.n_rows * (uint64_t)w->part.n_cols * sizeof(float);
    float *values = malloc(bytes);
    int r = values ? tensor_part_expand(&params, t, &w->part, values) : -ENOMEM;
    if (r < 0) {
        free(values);
        return error_set(l->err, r, "tensor %s: cannot be expanded: %s", t->name, strerror(-r));
    }
    t->dtype = WEIGHT_F32;
    t->n_cols = w->part.n_cols;
    t->data = values;
    t->bytes = bytes;
    *ret_copy = values;
    return 0;
}

static int pack_matrix(struct loader *l, const struct wanted *w, const struct source_tensor *t)
{
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

static int load_matrix(struct loader *l, const struct wanted *w, const struct source_tensor *read)
{
    struct source_tensor t = *read;
    void *expanded = NULL;
    int r = t.n_cols != w->part.n_cols ? expand_part(l, w, &t, &expanded) : 0;
    if (r >= 0)
        r = pack_matrix(l, w, &t);
    if (r >= 0 && expanded)
        r = l->p->dev->stream_sync(l->p->stream);
    free(expanded);
    return r;
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

static int load_vector(struct loader *l, const struct wanted *w, const struct source_tensor *t)
{
    const struct model_weights_params *p = l->p;
    size_t bytes = (size_t)t->n_cols * sizeof(float);
    void *memory;
    int r = allocate(l, w, bytes, &memory);
    if (r < 0)
        return r;
    float *values = malloc(bytes);
    if (!values)
        return error_set(l->err, -ENOMEM, "tensor %s: out of memory", t->name);
    expand_vector(t, values);
    r = p->dev->copy(p->stream, memory, values, bytes);
    if (r >= 0)
        r = p->dev->stream_sync(p->stream); /* the source is freed now */
    free(values);
    if (r < 0)
        return error_set(l->err, r, "tensor %s: cannot be copied to the device: %s", t->name, strerror(-r));
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

/* Ranks read parts of the tensors that are not the same, and to read all of them would cost each rank the whole file. */
static void add_to_family(struct loader *l, const struct source_tensor *t)
{
    const size_t n = t->bytes < FAMILY_SAMPLE_BYTES ? (size_t)t->bytes : FAMILY_SAMPLE_BYTES;
    digest_u64(&l->family, strlen(t->name));
    crypto_generichash_update(&l->family, (const unsigned char *)t->name, strlen(t->name));
    digest_u64(&l->family, (uint64_t)t->dtype);
    digest_u64(&l->family, (uint64_t)t->n_rows);
    digest_u64(&l->family, (uint64_t)t->n_cols);
    crypto_generichash_update(&l->family, t->data, n);
    crypto_generichash_update(&l->family, (const unsigned char *)t->data + (t->bytes - n), n);
}

/* A column slice was copied out of the mapping, so its packing is waited for. */
static int load_one(struct loader *l, const struct wanted *w)
{
    struct source_tensor t;
    void *copy;
    int r = tensor_part_read(&w->found, &w->part, &t, &copy);
    if (r < 0)
        return error_set(l->err, r, "tensor %s: no memory for a part of it", w->found.name);
    r = w->matrix ? load_matrix(l, w, &t) : load_vector(l, w, &t);
    if (r >= 0) {
        digest_tensor(l, &t);
        add_to_family(l, &w->found);
    }
    if (r >= 0 && copy)
        r = l->p->dev->stream_sync(l->p->stream);
    free(copy);
    return r;
}

/* Its own rows of the embedding are a matrix in themselves (WEIGHT_ROWS_UNIT). */
static void tie_head(struct loader *l)
{
    const struct model_config *c = l->p->config;
    const struct weight *e = &l->weights->embedding;
    const struct share vocab = vocab_share(c);
    l->weights->head = *e;
    if (!model_is_sharded(c))
        return;
    const size_t unit = l->p->ops->weight_bytes(e->dtype, WEIGHT_ROWS_UNIT, e->n_cols), to = l->p->ops->weight_bytes(e->dtype, vocab.first + WEIGHT_ROWS_UNIT, e->n_cols);
    l->weights->head.n_rows = vocab.n;
    l->weights->head.packed = vocab.n ? (const uint8_t *)e->packed + (to - unit) : NULL;
}

static int load_all(struct loader *l)
{
    uint64_t done = 0;
    crypto_generichash_init(&l->digest, NULL, 0, WEIGHTS_DIGEST_BYTES);
    crypto_generichash_init(&l->family, NULL, 0, WEIGHTS_DIGEST_BYTES);
    for (size_t i = 0; i < l->n_wanted; i++) {
        const struct wanted *w = &l->wanted[i];
        if (!w->found.data)
            continue;
        int r = load_one(l, w);
        if (r < 0)
            return r;
        done += tensor_part_bytes(w->found.dtype, &w->part);
        if (l->p->progress)
            l->p->progress(l->p->progress_arg, done, l->weights->file_bytes);
    }
    crypto_generichash_final(&l->digest, l->weights->digest, WEIGHTS_DIGEST_BYTES);
    crypto_generichash_final(&l->family, l->weights->family, WEIGHTS_DIGEST_BYTES);
    if (l->p->config->tied_embeddings)
        tie_head(l);
    int r = l->p->dev->stream_sync(l->p->stream); /* the files may be closed now */
    return r < 0 ? error_set(l->err, r, "the weights cannot be loaded: %s", strerror(-r)) : 0;
}

/* ---- sizes without loading ---- */

/* Without files every matrix has the dtype asked for; vectors are kept in 16 bits, and only those are there that must be. */
static int find_shapes(struct loader *l, enum weight_dtype dtype)
{
    for (size_t i = 0; i < l->n_wanted; i++) {
        struct wanted *w = &l->wanted[i];
        if (!w->required)
            continue;
        w->found = (struct source_tensor){.dtype = w->matrix ? dtype : WEIGHT_BF16, .n_rows = w->n_rows, .n_cols = w->n_cols, .data = l};
        const int64_t columns = weight_block_of(w->found.dtype).columns;
        if (w->n_cols % columns != 0)
            return error_set(l->err, -EINVAL, "rows of %lld are no multiple of the %lld values in a block of %s", (long long)w->n_cols, (long long)columns, weight_dtype_name(dtype));
        l->weights->file_bytes += tensor_part_bytes(w->found.dtype, &w->part);
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
        const struct tensor_part *part = &w->part;
        if (!w->found.data)
            continue;
        device_bytes += w->matrix ? p->ops->weight_bytes(tensor_part_dtype(w->found.dtype, part), part->n_rows, part->n_cols) : (size_t)part->n_cols * sizeof(float);
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

int model_weights_ffn_unit(const struct weight_source *source, int n_layers)
{
    int64_t unit = 1;
    for (int layer = 0; layer < n_layers; layer++) {
        struct source_tensor t;
        if (weight_source_find(source, TENSOR_DOWN, layer, false, &t, NULL) >= 0 && weight_block_of(t.dtype).columns > unit)
            unit = weight_block_of(t.dtype).columns;
    }
    return (int)unit;
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
