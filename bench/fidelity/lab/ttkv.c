/* TTKV's rule (its Algorithm 1, as far as it is specified): tiers by age. The newest B - 4 tokens and the four attention sinks are in fast memory in bf16; all older ones are in slow
 * memory in blocks of 128 tokens, 8-bit keys and 4-bit values; a step fetches the F / 128 blocks (at least one) that score best against its query, by the mean of a block's slow keys.
 *
 *     share[h, b] = softmax over b of q[h] . mean_b * scale + log n_b,   n_b the slow tokens of block b;   averaged over the group: one choice per KV head
 *
 * The paper leaves the scoring function, the number of blocks and the quantizer's granularity open. Chosen here: the mean (what its words suggest), F, and this project's own code (a
 * key rotated, per token; values per token in groups of 32). Partials are one softmax, not the sum of separately normalised ones that its Algorithm 1 adds up. It is given the sinks, which
 * pure age would demote. */
#include "bench/fidelity/lab/baseline.h"
#include "bench/fidelity/lab/baseline_methods.h"
#include "bench/fidelity/lab/lab_attention.h"
#include "bench/fidelity/lab/lab_keys.h"
#include "bench/fidelity/lab/lab_quant.h"
#include "bench/fidelity/lab/lab_search.h"
#include "kernels/cpu/half.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { KEY_BITS = 8, VALUE_BITS = 4 };

struct ttkv {
    const struct lab_layer *l;
    int n_blocks, n_choose, n_fast;
    uint8_t *fast;         /* [n_kv_heads, n_rows] */
    float *means, *bias, *x;
    int *counts;
    int32_t *chosen;
    bf16_t *k, *v;         /* the slow tier's values */
};

static void mark_fast(struct ttkv *t, int budget)
{
    const struct lab_layer *l = t->l;
    const int sinks = budget < SELECT_SINKS ? budget : SELECT_SINKS, newest = l->n_rows - (budget - sinks);
    t->n_fast = 0;
    for (int i = 0; i < l->n_rows; i++) {
        const bool fast = i < sinks || i >= newest;
        t->n_fast += fast;
        for (int h = 0; h < l->n_kv_heads; h++)
            t->fast[(int64_t)h * l->n_rows + i] = fast;
    }
}

static void code(struct ttkv *t)
{
    const struct lab_layer *l = t->l;
    const int64_t n = (int64_t)l->n_kv_heads * l->n_rows;
    const enum rope_style style = l->context->model->config.rope_style;
    lab_keys_read(l->k, n, l->head_dim, LAB_ROTATED, style, NULL, t->x);
    lab_quant_tokens(t->x, n, l->head_dim, l->head_dim, KEY_BITS);
    lab_keys_write(t->x, n, l->head_dim, LAB_ROTATED, style, NULL, t->k);
    for (int64_t i = 0; i < n * l->head_dim; i++)
        t->x[i] = bf16_to_float(l->v[i]);
    lab_quant_tokens(t->x, n, l->head_dim, VALUE_GROUP, VALUE_BITS);
    for (int64_t i = 0; i < n * l->head_dim; i++)
        t->v[i] = bf16_from_float(t->x[i]);
}

static int init(struct ttkv *t, const struct baseline_args *a)
{
    const struct lab_layer *l = t->l;
    const int budget = a->budget < l->n_rows ? a->budget : l->n_rows, fetch = a->fetch < l->n_rows ? a->fetch : l->n_rows;
    t->n_blocks = (l->n_rows + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    t->n_choose = fetch <= 0 ? 0 : fetch == l->n_rows ? t->n_blocks : fetch < BLOCK_TOKENS ? 1 : fetch / BLOCK_TOKENS;
    const size_t heads = (size_t)l->n_kv_heads, blocks = heads * (size_t)t->n_blocks;
    t->fast = malloc(heads * (size_t)l->n_rows);
    t->means = malloc(blocks * (size_t)l->head_dim * sizeof *t->means);
    t->bias = malloc(blocks * sizeof *t->bias);
    t->counts = malloc(blocks * sizeof *t->counts);
    t->chosen = malloc((heads * (size_t)l->n_new * (size_t)t->n_choose + 1) * sizeof *t->chosen);
    t->x = baseline_rows(l, 1, sizeof *t->x);
    t->k = baseline_rows(l, 1, sizeof *t->k);
    t->v = baseline_rows(l, 1, sizeof *t->v);
    if (!t->fast || !t->means || !t->bias || !t->counts || !t->chosen || !t->x || !t->k || !t->v)
        return -ENOMEM;
    mark_fast(t, budget);
    return 0;
}

static void fini(struct ttkv *t)
{
    free(t->v);
    free(t->k);
    free(t->x);
    free(t->chosen);
    free(t->counts);
    free(t->bias);
    free(t->means);
    free(t->fast);
}

static int search(struct ttkv *t)
{
    const struct lab_layer *l = t->l;
    lab_unit_means(l, BLOCK_TOKENS, t->fast, t->means, t->counts);
    for (int i = 0; i < l->n_kv_heads * t->n_blocks; i++)
        t->bias[i] = t->counts[i] ? logf((float)t->counts[i]) : -INFINITY;
    const struct lab_search s = {
        .n_units = t->n_blocks,
        .width = l->head_dim,
        .summary = t->means,
        .queries = l->q,
        .bias = t->bias,
        .scale = l->context->model->config.attention_scale,
        .group = LAB_GROUP_MEAN,
        .n_choose = t->n_choose,
    };
    return lab_search(l, &s, t->chosen);
}

static int attend(const struct lab_layer *l, void *arg)
{
    struct ttkv t = {.l = l};
    int r = init(&t, arg);
    if (r >= 0)
        r = search(&t);
    if (r >= 0) {
        code(&t);
        const struct lab_choice choice = {
            .unit = BLOCK_TOKENS,
            .n_chosen = t.n_choose,
            .chosen = t.chosen,
            .fast = t.fast,
            .slow_k = t.k,
            .slow_v = t.v,
            .slow_row_bytes = baseline_row_bytes(l, KEY_BITS, VALUE_BITS) + 4 + 4.0 * l->head_dim / VALUE_GROUP,
        };
        r = lab_attend_choice(l, &choice);
        l->counters->bytes_fast += l->n_kv_heads * (t.n_fast * baseline_row_bytes(l, 16, 16) + t.n_blocks * 2.0 * l->head_dim);
    }
    fini(&t);
    return r;
}

static const struct baseline ttkv = {.attend = attend};

static const struct fidelity_method methods[] = {
    {
        .name = "ttkv",
        .text = "tiers by age: sinks and newest fast, older 128-token blocks K8V4, fetched by their mean key",
        .group = GROUP_BASELINE,
        .run = baseline_run,
        .arg = &ttkv,
        .tasks = ON_ALL,
        .sweep = true,
        .fetch_per_budget = 1,
        .importance = 1,
    },
};
const struct fidelity_methods ttkv_methods = {methods, sizeof methods / sizeof *methods};
