/* KVQuant-like (arXiv 2401.18079): keys per channel, taken before RoPE and rotated again when they are read; values per token; both with non-uniform levels of 3 or 4 bits that a layer
 * shares, each vector (a channel of keys, a token of values over all KV heads) scaled between its own minimum and maximum; of each vector 1 % of the values, half of them the largest and half
 * the smallest, stay exact; so does the first token. Everything resident, everything attended.
 *
 * Simplified: levels and the keys' scales and outliers are found on the prompt itself (the original calibrates them offline on other text), by plain Lloyd iterations (the original
 * weights the values with their Fisher information), and the exact values are bf16 (fp16 there). The first two favour it, the missing weights do not. Keys before RoPE are recovered from the
 * cache, rounded to bf16 as they are there. */
#include "bench/fidelity/lab/baseline.h"
#include "bench/fidelity/lab/baseline_methods.h"
#include "bench/fidelity/lab/lab_attention.h"
#include "bench/fidelity/lab/lab_keys.h"
#include "bench/fidelity/lab/lab_quant.h"
#include "kernels/cpu/half.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { EXACT_FIRST = 1 }; /* tokens */
static const double OUTLIERS_EACH_SIDE = 0.005; /* of a vector */

struct kvquant {
    int bits;
};

/* One layer at work. All matrices have n_kv_heads * n_rows * d elements. */
struct codec {
    const struct lab_layer *l;
    int bits;
    float *x, *vectors, *negative;
    uint8_t *outlier;
    int32_t *found;        /* [n_vectors, outliers a side] */
    float *rope;           /* [n_rows, d] */
    bf16_t *k, *v;
};

static int64_t elements(const struct lab_layer *l)
{
    return (int64_t)l->n_kv_heads * l->n_rows * l->head_dim;
}

static int outliers_each_side(int64_t length)
{
    const int n = (int)lrint(OUTLIERS_EACH_SIDE * (double)length);
    return n < 1 ? 1 : n;
}

/* Marks the largest and the smallest values of each vector. */
static int mark_outliers(struct codec *c, int64_t n_vectors, int64_t length)
{
    const struct model *m = c->l->context->model;
    const int n = outliers_each_side(length);
    int r = 0;
    memset(c->outlier, 0, (size_t)(n_vectors * length));
    for (int64_t i = 0; i < n_vectors * length; i++)
        c->negative[i] = -c->vectors[i];
    for (int side = 0; r >= 0 && side < 2; side++) {
        r = m->ops->topk(m->stream, side ? c->negative : c->vectors, (int)n_vectors, length, n, c->found);
        for (int64_t i = 0; r >= 0 && i < n_vectors * n; i++)
            c->outlier[i / n * length + c->found[i]] = 1;
    }
    return r;
}

/* vectors[channel][row] <-> x[row][channel] of one head, without the first tokens. */
static void transpose_head(struct codec *c, int head, bool back)
{
    const struct lab_layer *l = c->l;
    const int64_t length = l->n_rows - EXACT_FIRST;
    for (int64_t i = 0; i < length; i++)
        for (int j = 0; j < l->head_dim; j++) {
            float *x = c->x + (i + EXACT_FIRST) * l->head_dim + j, *vector = c->vectors + ((int64_t)head * l->head_dim + j) * length + i;
            *(back ? x : vector) = *(back ? vector : x);
        }
}

static int code_keys(struct codec *c)
{
    const struct lab_layer *l = c->l;
    const enum rope_style style = l->context->model->config.rope_style;
    const int64_t head = (int64_t)l->n_rows * l->head_dim, n_channels = (int64_t)l->n_kv_heads * l->head_dim, length = l->n_rows - EXACT_FIRST;
    for (int h = 0; h < l->n_kv_heads; h++) {
        lab_keys_read(l->k + h * head, l->n_rows, l->head_dim, LAB_BEFORE_ROPE, style, c->rope, c->x);
        transpose_head(c, h, false);
    }
    int r = mark_outliers(c, n_channels, length);
    if (r < 0)
        return r;
    lab_quant_nuq(c->vectors, n_channels, length, c->outlier, c->bits);
    for (int h = 0; h < l->n_kv_heads; h++) {
        transpose_head(c, h, true);
        lab_keys_write(c->x + EXACT_FIRST * l->head_dim, length, l->head_dim, LAB_BEFORE_ROPE, style, c->rope + EXACT_FIRST * l->head_dim,
                       c->k + h * head + EXACT_FIRST * l->head_dim);
    }
    return 0;
}

static int code_values(struct codec *c)
{
    const struct lab_layer *l = c->l;
    const int64_t head = (int64_t)l->n_rows * l->head_dim, width = (int64_t)l->n_kv_heads * l->head_dim, n = l->n_rows - EXACT_FIRST;
    for (int64_t i = 0; i < n * width; i++)
        c->vectors[i] = bf16_to_float(l->v[i % width / l->head_dim * head + (i / width + EXACT_FIRST) * l->head_dim + i % l->head_dim]);
    int r = mark_outliers(c, n, width);
    if (r < 0)
        return r;
    lab_quant_nuq(c->vectors, n, width, c->outlier, c->bits);
    for (int64_t i = 0; i < n * width; i++)
        c->v[i % width / l->head_dim * head + (i / width + EXACT_FIRST) * l->head_dim + i % l->head_dim] = bf16_from_float(c->vectors[i]);
    return 0;
}

static int init(struct codec *c)
{
    const struct lab_layer *l = c->l;
    const size_t n = (size_t)elements(l);
    int32_t *positions = malloc((size_t)l->n_rows * sizeof *positions);
    c->x = malloc((size_t)l->n_rows * (size_t)l->head_dim * sizeof *c->x);
    c->rope = malloc((size_t)l->n_rows * (size_t)l->head_dim * sizeof *c->rope);
    c->vectors = malloc(n * sizeof *c->vectors);
    c->negative = malloc(n * sizeof *c->negative);
    c->found = malloc(n * sizeof *c->found);
    c->outlier = malloc(n);
    c->k = malloc(n * sizeof *c->k);
    c->v = malloc(n * sizeof *c->v);
    int r = positions && c->x && c->rope && c->vectors && c->negative && c->found && c->outlier && c->k && c->v ? 0 : -ENOMEM;
    for (int i = 0; r >= 0 && i < l->n_rows; i++)
        positions[i] = i;
    if (r >= 0)
        r = model_rope_table(l->context->model, positions, l->n_rows, c->rope);
    free(positions);
    return r;
}

static void fini(struct codec *c)
{
    free(c->v);
    free(c->k);
    free(c->outlier);
    free(c->found);
    free(c->negative);
    free(c->vectors);
    free(c->rope);
    free(c->x);
}

/* Codes, the values' scale and minimum of each token, and for each exact value itself and a 16-bit place. The keys' scales are a few of a layer. */
static void count_bytes(const struct codec *c)
{
    const struct lab_layer *l = c->l;
    const double width = (double)l->n_kv_heads * l->head_dim, length = l->n_rows - EXACT_FIRST;
    const double outliers = 2 * (width * outliers_each_side((int64_t)length) + length * outliers_each_side((int64_t)width));
    l->counters->bytes_fast += length * (l->n_kv_heads * baseline_row_bytes(l, c->bits, c->bits) + 4) + outliers * 4 + width * 4 +
                               EXACT_FIRST * l->n_kv_heads * baseline_row_bytes(l, 16, 16);
}

static int attend(const struct lab_layer *l, void *arg)
{
    const struct kvquant *q = ((const struct baseline_args *)arg)->constants;
    struct codec c = {.l = l, .bits = q->bits};
    if (l->n_rows <= 2 * EXACT_FIRST + 2)
        return baseline_attend_resident(l, NULL);
    int r = init(&c);
    if (r >= 0) {
        memcpy(c.k, l->k, (size_t)elements(l) * sizeof *c.k);
        memcpy(c.v, l->v, (size_t)elements(l) * sizeof *c.v);
        r = code_keys(&c);
    }
    if (r >= 0)
        r = code_values(&c);
    if (r >= 0)
        r = lab_attend_all(l, c.k, c.v);
    if (r >= 0)
        count_bytes(&c);
    fini(&c);
    return r;
}

static const struct kvquant three_bits = {3}, four_bits = {4};
static const struct baseline kvquant3 = {attend, &three_bits}, kvquant4 = {attend, &four_bits};
static const struct fidelity_split everything = {FIDELITY_ALL, 0};

#define KVQUANT(name_, text_, baseline_) \
    { \
        .name = name_, .text = text_, .group = GROUP_BASELINE, .run = baseline_run, .arg = baseline_, .tasks = ON_ALL, .splits = &everything, .n_splits = 1, .cost = 2, .importance = 1 \
    }
static const struct fidelity_method methods[] = {
    KVQUANT("kvquant-4bit", "keys per channel before RoPE, values per token, non-uniform 4 bits, 1 % exact; all resident", &kvquant4),
    KVQUANT("kvquant-3bit", "keys per channel before RoPE, values per token, non-uniform 3 bits, 1 % exact; all resident", &kvquant3),
};
const struct fidelity_methods kvquant_methods = {methods, sizeof methods / sizeof *methods};
