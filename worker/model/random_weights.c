#include "worker/model/random_weights.h"
#include <errno.h>
#include <stdlib.h>

enum {
    WINDOWS = 16384,      /* places in the buffer where a tensor may begin, */
    WINDOW_VALUES = 32,   /* so many values apart */
};

struct random_weights {
    struct model_config config;
    uint64_t seed;
    bf16_t *values; /* of matrices and biases */
    bf16_t *norms;  /* [dim + WINDOWS * WINDOW_VALUES] */
};

/* SplitMix64 */
static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static void shape_of(const struct model_config *c, enum tensor_role role, bool bias, int64_t *ret_rows, int64_t *ret_cols)
{
    const int64_t q = (int64_t)c->n_heads * c->head_dim, kv = (int64_t)c->n_kv_heads * c->head_dim;
    const int64_t shapes[TENSOR_ROLE_COUNT][2] = {
        [TENSOR_EMBEDDING] = {c->n_vocab, c->dim}, [TENSOR_FINAL_NORM] = {1, c->dim}, [TENSOR_HEAD] = {c->n_vocab, c->dim}, [TENSOR_ATTN_NORM] = {1, c->dim},
        [TENSOR_Q] = {q, c->dim}, [TENSOR_K] = {kv, c->dim}, [TENSOR_V] = {kv, c->dim}, [TENSOR_O] = {c->dim, q},
        [TENSOR_FFN_NORM] = {1, c->dim}, [TENSOR_GATE] = {c->ffn_dim, c->dim}, [TENSOR_UP] = {c->ffn_dim, c->dim}, [TENSOR_DOWN] = {c->dim, c->ffn_dim},
    };
    *ret_rows = bias ? 1 : shapes[role][0];
    *ret_cols = bias ? shapes[role][0] : shapes[role][1];
}

static bool is_norm(enum tensor_role role)
{
    return role == TENSOR_FINAL_NORM || role == TENSOR_ATTN_NORM || role == TENSOR_FFN_NORM;
}

static int64_t largest(const struct model_config *c)
{
    int64_t most = 0, rows, cols;
    for (int role = 0; role < TENSOR_ROLE_COUNT; role++) {
        shape_of(c, (enum tensor_role)role, false, &rows, &cols);
        most = rows * cols > most ? rows * cols : most;
    }
    return most;
}

/* Four values of 16 random bits each: the upper half of (bits / 2^15 - 1) * sqrt(3) * 0.02. */
static void draw(bf16_t *to, int64_t n, uint64_t seed)
{
    for (int64_t i = 0; i < n; i += 4) {
        const uint64_t bits = mix(seed + (uint64_t)i);
        for (int j = 0; j < 4; j++) {
            union { float f; uint32_t u; } x = {.f = ((float)(bits >> 16 * j & 0xffff) * 0x1p-15f - 1.0f) * 0.034641f};
            to[i + j] = (bf16_t)(x.u >> 16);
        }
    }
}

int random_weights_create(const struct model_config *config, uint64_t seed, struct random_weights **ret_weights, struct error *err)
{
    const int64_t n = (largest(config) + (int64_t)WINDOWS * WINDOW_VALUES + 3) / 4 * 4, n_norms = config->dim + (int64_t)WINDOWS * WINDOW_VALUES;
    struct random_weights *w = calloc(1, sizeof(*w));
    if (w) {
        w->config = *config;
        w->seed = seed;
        w->values = malloc((size_t)n * sizeof(*w->values));
        w->norms = malloc((size_t)n_norms * sizeof(*w->norms));
    }
    if (!w || !w->values || !w->norms) {
        random_weights_free(w);
        return error_set(err, -ENOMEM, "no memory for random weights of %lld values", (long long)n);
    }
    draw(w->values, n, seed);
    for (int64_t i = 0; i < n_norms; i++)
        w->norms[i] = (bf16_t)(0x3f80 + (mix(seed ^ (uint64_t)i) & 7)); /* 1 to 1.055 */
    *ret_weights = w;
    return 0;
}

void random_weights_free(struct random_weights *weights)
{
    if (!weights)
        return;
    free(weights->norms);
    free(weights->values);
    free(weights);
}

int random_weights_find(const struct random_weights *weights, enum tensor_role role, int layer, bool bias, struct source_tensor *ret_tensor)
{
    const struct model_config *c = &weights->config;
    const bool is_qkv = role == TENSOR_Q || role == TENSOR_K || role == TENSOR_V;
    if ((bias && !(is_qkv && c->qkv_bias)) || (role == TENSOR_HEAD && c->tied_embeddings))
        return -ENOENT;
    const uint64_t window = mix(weights->seed ^ ((uint64_t)role << 32 | (uint64_t)bias << 40 | (uint64_t)layer)) % WINDOWS;
    ret_tensor->dtype = WEIGHT_BF16;
    shape_of(c, role, bias, &ret_tensor->n_rows, &ret_tensor->n_cols);
    ret_tensor->data = (is_norm(role) ? weights->norms : weights->values) + window * WINDOW_VALUES;
    ret_tensor->bytes = (uint64_t)(ret_tensor->n_rows * ret_tensor->n_cols) * sizeof(bf16_t);
    return 0;
}
