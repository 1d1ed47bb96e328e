#include "worker/model/model_key_bias.h"
#include "worker/model/model.h"
#include <errno.h>
#include <math.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>

enum {
    ROWS_AT_A_TIME = 16,
    SIXTEEN = 16,
    PIECE_ALIGNMENT = 64,
};

static size_t round_piece(size_t bytes)
{
    return (bytes + PIECE_ALIGNMENT - 1) / PIECE_ALIGNMENT * PIECE_ALIGNMENT;
}

/* ---- device memory: for each layer first, pair and u, with room for KEY_BIAS_PAIRS_MAX pairs a head ---- */

struct layer_bytes {
    size_t first, pair, u;
};

static struct layer_bytes layer_bytes(const struct model_config *c)
{
    const size_t n = (size_t)c->n_kv_heads * KEY_BIAS_PAIRS_MAX;
    return (struct layer_bytes){
        .first = round_piece(((size_t)c->n_kv_heads + 1) * sizeof(int32_t)),
        .pair = round_piece(n * sizeof(int32_t)),
        .u = round_piece(n * 2 * (size_t)c->head_dim * sizeof(float)),
    };
}

static size_t all_layers_bytes(const struct model_config *c)
{
    const struct layer_bytes b = layer_bytes(c);
    return (size_t)c->n_layers * (b.first + b.pair + b.u);
}

size_t model_key_bias_bytes(const struct model_config *config)
{
    return config->qkv_bias ? all_layers_bytes(config) : 0;
}

/* ---- which pairs ---- */

/* The two channels of a pair. */
static void pair_channels(const struct model_config *c, int pair, int ret_channel[2])
{
    const bool halves = c->rope_style == ROPE_HALVES;
    ret_channel[0] = halves ? pair : 2 * pair;
    ret_channel[1] = halves ? pair + c->head_dim / 2 : 2 * pair + 1;
}

struct biased_pair {
    int pair;
    double energy;
};

static int larger_first(const void *a, const void *b)
{
    const struct biased_pair *x = a, *y = b;
    if (x->energy != y->energy)
        return x->energy > y->energy ? -1 : 1;
    return x->pair - y->pair;
}

static int lower_first(const void *a, const void *b)
{
    return ((const struct biased_pair *)a)->pair - ((const struct biased_pair *)b)->pair;
}

/* Marked pairs of one head with bias[head_dim] and own energy, ascending in ret_pairs; returns how many. A head with a bias that is not finite is left alone: no code can help it. */
static int mark_head(const struct model_config *c, const float *bias, double own, int32_t ret_pairs[KEY_BIAS_PAIRS_MAX])
{
    struct biased_pair pairs[ROPE_MAX_FREQS];
    double left[ROPE_MAX_FREQS + 1]; /* energy of pairs[i] and all behind it */
    const int n = c->head_dim / 2;
    int marked = 0;
    for (int i = 0; i < n; i++) {
        int channel[2];
        pair_channels(c, i, channel);
        const double b0 = bias[channel[0]], b1 = bias[channel[1]];
        pairs[i] = (struct biased_pair){.pair = i, .energy = b0 * b0 + b1 * b1};
        if (!isfinite(pairs[i].energy))
            return 0;
    }
    qsort(pairs, (size_t)n, sizeof(*pairs), larger_first);
    left[n] = 0;
    for (int i = n - 1; i >= 0; i--)
        left[i] = left[i + 1] + pairs[i].energy;
    while (marked < n && marked < KEY_BIAS_PAIRS_MAX && left[marked] > own)
        marked++;
    qsort(pairs, (size_t)marked, sizeof(*pairs), lower_first);
    for (int i = 0; i < marked; i++)
        ret_pairs[i] = pairs[i].pair;
    return marked;
}

/* ---- one layer ---- */

/* Host buffers of a split, and the device rows that `embed` expands weights into. */
struct splitter {
    struct model *model;
    float *bias, *gamma;  /* [n_kv_heads * head_dim], [dim] */
    float *rows;          /* [ROWS_AT_A_TIME, dim] */
    float *device_rows;   /* the same on the device */
    double *own;          /* [n_kv_heads] */
    int32_t *first, *pair;
    float *u;
    crypto_generichash_state digest;
};

static int read_device(const struct model *m, void *dst, const void *src, size_t bytes)
{
    int r = m->dev->copy(m->stream, dst, src, bytes);
    return r < 0 ? r : m->dev->stream_sync(m->stream);
}

static double row_energy(const float *row, const float *gamma, int n)
{
    double energy = 0;
    for (int i = 0; i < n; i++) {
        const double w = (double)row[i] * (double)gamma[i];
        energy += w * w;
    }
    return energy;
}

/* own[h] of every head of a layer. */
static int own_energies(struct splitter *s, const struct weight *k)
{
    const struct model *m = s->model;
    const struct model_config *c = &m->config;
    memset(s->own, 0, (size_t)c->n_kv_heads * sizeof(*s->own));
    for (int row = 0; row < (int)k->n_rows; row += ROWS_AT_A_TIME) { /* head_dim is a multiple of it */
        int32_t ids[ROWS_AT_A_TIME];
        for (int i = 0; i < ROWS_AT_A_TIME; i++)
            ids[i] = row + i;
        int r = m->ops->embed(m->stream, k, ids, ROWS_AT_A_TIME, s->device_rows);
        if (r < 0 || (r = read_device(m, s->rows, s->device_rows, ROWS_AT_A_TIME * (size_t)c->dim * sizeof(float))) < 0)
            return r;
        for (int i = 0; i < ROWS_AT_A_TIME; i++)
            s->own[row / c->head_dim] += row_energy(s->rows + (int64_t)i * c->dim, s->gamma, c->dim);
    }
    return 0;
}

/* u [head_dim]: b0 and b1 at the pair's channels, rotated by the Hadamard matrix over sqrt(size) in blocks of head_dim's largest power of two. Entry (i, j) of that
 * matrix has the sign of the parity of i & j. */
static void rotated_pair(int head_dim, const int channel[2], float b0, float b1, float *u)
{
    const int size = head_dim & -head_dim;
    for (int i = 0; i < head_dim; i++) {
        double sum = 0;
        for (int x = 0; x < 2; x++)
            if (channel[x] / size == i / size)
                sum += (__builtin_popcount((unsigned)(channel[x] & i & (size - 1))) & 1 ? -1.0 : 1.0) * (double)(x ? b1 : b0);
        u[i] = (float)(sum / sqrt(size));
    }
}

/* Fills first, pair and u from bias and own, and takes the marked biases out of it. Returns the number of pairs. */
static int split_heads(struct splitter *s)
{
    const struct model_config *c = &s->model->config;
    int n = 0;
    for (int h = 0; h < c->n_kv_heads; h++) {
        float *bias = s->bias + (int64_t)h * c->head_dim;
        s->first[h] = n;
        n += mark_head(c, bias, s->own[h], s->pair + n);
        for (int j = s->first[h]; j < n; j++) {
            float *u = s->u + (int64_t)j * 2 * c->head_dim;
            int channel[2];
            pair_channels(c, s->pair[j], channel);
            rotated_pair(c->head_dim, channel, bias[channel[0]], bias[channel[1]], u);
            rotated_pair(c->head_dim, channel, -bias[channel[1]], bias[channel[0]], u + c->head_dim);
            bias[channel[0]] = bias[channel[1]] = 0;
        }
    }
    s->first[c->n_kv_heads] = n;
    return n;
}

static int split_layer(struct splitter *s, int layer, char *memory)
{
    struct model *m = s->model;
    const struct model_config *c = &m->config;
    const struct model_layer_weights *w = &m->weights.layers[layer];
    const struct layer_bytes bytes = layer_bytes(c);
    const size_t n_heads = (size_t)c->n_kv_heads, d = (size_t)c->head_dim;
    int r;
    if (!w->k.bias)
        return 0;
    if ((r = read_device(m, s->bias, w->k.bias, n_heads * d * sizeof(float))) < 0 || (r = read_device(m, s->gamma, w->attn_norm, (size_t)c->dim * sizeof(float))) < 0 ||
        (r = own_energies(s, &w->k.w)) < 0)
        return r;
    const int n = split_heads(s);
    const uint64_t place[2] = {(uint64_t)layer, (uint64_t)n};
    crypto_generichash_update(&s->digest, (const unsigned char *)place, sizeof(place));
    crypto_generichash_update(&s->digest, (const unsigned char *)s->first, (n_heads + 1) * sizeof(*s->first));
    crypto_generichash_update(&s->digest, (const unsigned char *)s->pair, (size_t)n * sizeof(*s->pair));
    if (n == 0)
        return 0;
    int32_t *first = (int32_t *)memory, *pair = (int32_t *)(memory + bytes.first);
    float *u = (float *)(memory + bytes.first + bytes.pair);
    if ((r = m->dev->copy(m->stream, first, s->first, (n_heads + 1) * sizeof(*first))) < 0 || (r = m->dev->copy(m->stream, pair, s->pair, (size_t)n * sizeof(*pair))) < 0 ||
        (r = m->dev->copy(m->stream, u, s->u, (size_t)n * 2 * d * sizeof(*u))) < 0 || (r = read_device(m, w->k.bias, s->bias, n_heads * d * sizeof(float))) < 0)
        return r;
    m->key_bias.layers[layer] = (struct layer_key_bias){.first = first, .pair = pair, .u = u, .n_pairs = n};
    m->key_bias.n_pairs += n;
    return 0;
}

/* ---- the model ---- */

static int splitter_init(struct splitter *s, struct model *m)
{
    const struct model_config *c = &m->config;
    const size_t n_heads = (size_t)c->n_kv_heads, n_pairs = n_heads * KEY_BIAS_PAIRS_MAX, rows = ROWS_AT_A_TIME * (size_t)c->dim;
    void *device_rows;
    *s = (struct splitter){.model = m};
    s->bias = calloc(n_heads * (size_t)c->head_dim, sizeof(float));
    s->gamma = calloc((size_t)c->dim, sizeof(float));
    s->rows = calloc(rows, sizeof(float));
    s->own = calloc(n_heads, sizeof(double));
    s->first = calloc(n_heads + 1, sizeof(int32_t));
    s->pair = calloc(n_pairs, sizeof(int32_t));
    s->u = calloc(n_pairs * 2 * (size_t)c->head_dim, sizeof(float));
    m->key_bias.layers = calloc((size_t)c->n_layers, sizeof(*m->key_bias.layers));
    if (!s->bias || !s->gamma || !s->rows || !s->own || !s->first || !s->pair || !s->u || !m->key_bias.layers)
        return -ENOMEM;
    int r = m->dev->alloc(m->device, MEM_WEIGHTS, all_layers_bytes(c), &m->key_bias.memory);
    if (r < 0 || (r = m->dev->alloc(m->device, MEM_WORKSPACE, rows * sizeof(float), &device_rows)) < 0)
        return r;
    s->device_rows = device_rows;
    return crypto_generichash_init(&s->digest, NULL, 0, KEY_BIAS_DIGEST_BYTES);
}

static void splitter_fini(struct splitter *s)
{
    s->model->dev->free(s->model->device, s->device_rows);
    free(s->bias);
    free(s->gamma);
    free(s->rows);
    free(s->own);
    free(s->first);
    free(s->pair);
    free(s->u);
}

static bool has_key_biases(const struct model *m)
{
    bool any = m->config.qkv_bias;
    for (int l = 0; l < m->config.n_layers; l++)
        any = any || m->weights.layers[l].k.bias;
    return any;
}

int model_key_bias_split(struct model *model, struct error *err)
{
    const struct layer_bytes bytes = layer_bytes(&model->config);
    struct splitter s;
    if (!has_key_biases(model))
        return 0;
    model->config.qkv_bias = true; /* what follows from the configuration counts on it */
    int r = splitter_init(&s, model);
    for (int l = 0; r >= 0 && l < model->config.n_layers; l++)
        r = split_layer(&s, l, (char *)model->key_bias.memory + (size_t)l * (bytes.first + bytes.pair + bytes.u));
    if (r >= 0)
        crypto_generichash_final(&s.digest, model->key_bias.digest, KEY_BIAS_DIGEST_BYTES);
    splitter_fini(&s);
    if (r >= 0)
        return 0;
    model_key_bias_fini(model);
    return error_set(err, r, "the key biases cannot be set apart: %s", strerror(-r));
}

void model_key_bias_fini(struct model *model)
{
    model->dev->free(model->device, model->key_bias.memory);
    free(model->key_bias.layers);
    model->key_bias = (struct model_key_bias){0};
}

/* ---- tables of positions ---- */

static int n_sixteens(int n_positions)
{
    return (n_positions + BLOCK_TOKENS - 1) / BLOCK_TOKENS * (BLOCK_TOKENS / SIXTEEN);
}

static size_t coarse_bytes(const struct model_config *c, int n_positions)
{
    return round_piece((size_t)n_sixteens(n_positions) * (size_t)c->head_dim * sizeof(float));
}

static size_t fine_bytes(const struct model_config *c)
{
    return (size_t)c->head_dim * SIXTEEN * sizeof(float);
}

size_t key_bias_tables_bytes(const struct model_config *config, int n_positions)
{
    return config->qkv_bias ? coarse_bytes(config, n_positions) + fine_bytes(config) : 0;
}

static int fill_coarse(const struct model *m, int n_positions, float *coarse)
{
    const struct rope_freqs *rope = &m->config.rope;
    const int n = n_sixteens(n_positions);
    int32_t *positions = calloc((size_t)n, sizeof(*positions));
    if (!positions)
        return -ENOMEM;
    for (int i = 0; i < n; i++)
        positions[i] = SIXTEEN * i;
    int r = m->ops->rope_table(m->stream, rope->inv_freq, rope->n_freqs, rope->factor, positions, n, coarse);
    free(positions);
    return r;
}

/* rope_table gives [16, n_freqs, 2]; ops want the sixteen of a frequency side by side. The factor is in the coarse table already. */
static int fill_fine(const struct model *m, float *fine)
{
    static const int32_t places[SIXTEEN] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const struct rope_freqs *rope = &m->config.rope;
    float by_place[SIXTEEN * 2 * ROPE_MAX_FREQS], by_freq[SIXTEEN * 2 * ROPE_MAX_FREQS];
    const size_t bytes = fine_bytes(&m->config);
    int r = m->ops->rope_table(m->stream, rope->inv_freq, rope->n_freqs, 1, places, SIXTEEN, fine);
    if (r < 0 || (r = read_device(m, by_place, fine, bytes)) < 0)
        return r;
    for (int i = 0; i < 2 * rope->n_freqs; i++)
        for (int t = 0; t < SIXTEEN; t++)
            by_freq[i * SIXTEEN + t] = by_place[t * 2 * rope->n_freqs + i];
    return read_device(m, fine, by_freq, bytes);
}

int key_bias_tables_init(struct key_bias_tables *ret_tables, const struct model *model, int n_positions)
{
    const struct model_config *c = &model->config;
    struct key_bias_tables t = {.model = model};
    if (!c->qkv_bias) {
        *ret_tables = t;
        return 0;
    }
    int r = model->dev->alloc(model->device, MEM_WORKSPACE, key_bias_tables_bytes(c, n_positions), &t.memory);
    if (r < 0)
        goto fail;
    float *coarse = t.memory, *fine = (float *)((char *)t.memory + coarse_bytes(c, n_positions));
    t.layers = calloc((size_t)c->n_layers, sizeof(*t.layers));
    r = t.layers ? fill_coarse(model, n_positions, coarse) : -ENOMEM;
    if (r < 0 || (r = fill_fine(model, fine)) < 0)
        goto fail;
    for (int l = 0; l < c->n_layers; l++) {
        const struct layer_key_bias b = model->key_bias.layers ? model->key_bias.layers[l] : (struct layer_key_bias){0};
        t.layers[l] = (struct key_bias){.first = b.first, .pair = b.pair, .u = b.u, .coarse = coarse, .fine = fine, .n_freqs = c->rope.n_freqs};
    }
    *ret_tables = t;
    return 0;
fail:
    key_bias_tables_fini(&t);
    return r;
}

void key_bias_tables_fini(struct key_bias_tables *tables)
{
    if (tables->model)
        tables->model->dev->free(tables->model->device, tables->memory);
    free(tables->layers);
    *tables = (struct key_bias_tables){0};
}

const struct key_bias *key_bias_of(const struct key_bias_tables *tables, int layer)
{
    return tables->layers && tables->layers[layer].first ? &tables->layers[layer] : NULL;
}
