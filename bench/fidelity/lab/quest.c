/* Quest-like (arXiv 2406.10774): the whole cache stays in fast memory in bf16; each step attends the pages of 16 tokens whose keys could give its query the largest logit,
 *
 *     bound[h, p] = sum over d of max(q[h, d] * max_p[d], q[h, d] * min_p[d])
 *
 * with the minimum and maximum of each channel over the page (RoPE applied, not rotated). At least three pages; the first two layers attend everything. It attends B + F tokens, so that a row
 * compares with others at equal attended tokens.
 *
 * Differences: one choice per KV head, by the group's mean of softmax(bound * scale) over the pages (the original was made for models without groups and ranks each query head's bounds), and
 * the continuation is not paged but attended exactly. */
#include "bench/fidelity/lab/baseline.h"
#include "bench/fidelity/lab/baseline_methods.h"
#include "bench/fidelity/lab/lab_attention.h"
#include "bench/fidelity/lab/lab_keys.h"
#include "bench/fidelity/lab/lab_search.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { PAGE = 16, DENSE_LAYERS = 2, MIN_PAGES = 3 };

/* One layer's search: width is 2 * d, the positive part of the query against the maxima and the negative part against the minima. */
struct quest {
    const struct lab_layer *l;
    int n_pages, n_choose;
    float *keys;           /* [n_rows, d] of one head */
    float *bounds;         /* [n_kv_heads, n_pages, 2, d] max, min */
    float *queries;        /* [n_new, n_heads, 2, d] */
    int32_t *chosen;
};

static void bound_head(struct quest *s, int head)
{
    const struct lab_layer *l = s->l;
    const int d = l->head_dim;
    lab_keys_read(l->k + (int64_t)head * l->n_rows * d, l->n_rows, d, LAB_AFTER_ROPE, l->context->model->config.rope_style, NULL, s->keys);
    for (int i = 0; i < l->n_rows; i++) {
        float *max = s->bounds + ((int64_t)head * s->n_pages + i / PAGE) * 2 * d, *min = max + d;
        const float *key = s->keys + (int64_t)i * d;
        for (int c = 0; c < d; c++) {
            max[c] = i % PAGE == 0 || key[c] > max[c] ? key[c] : max[c];
            min[c] = i % PAGE == 0 || key[c] < min[c] ? key[c] : min[c];
        }
    }
}

static void split_queries(struct quest *s)
{
    const struct lab_layer *l = s->l;
    const int d = l->head_dim;
    for (int64_t i = 0; i < (int64_t)l->n_new * l->n_heads; i++) {
        float *positive = s->queries + i * 2 * d, *negative = positive + d;
        memcpy(positive, l->q + i * d, (size_t)d * sizeof *positive);
        lab_rotate(positive, 1, d);
        for (int c = 0; c < d; c++) {
            negative[c] = positive[c] < 0 ? positive[c] : 0;
            positive[c] = positive[c] > 0 ? positive[c] : 0;
        }
    }
}

static int init(struct quest *s, const struct baseline_args *a)
{
    const struct lab_layer *l = s->l;
    s->n_pages = (l->n_rows + PAGE - 1) / PAGE;
    s->n_choose = (baseline_attended(a, l->n_rows) + PAGE - 1) / PAGE;
    s->n_choose = s->n_choose < MIN_PAGES ? MIN_PAGES : s->n_choose;
    s->n_choose = s->n_choose < s->n_pages ? s->n_choose : s->n_pages;
    const size_t d = (size_t)l->head_dim, heads = (size_t)l->n_kv_heads, n_new = (size_t)l->n_new;
    s->keys = malloc((size_t)l->n_rows * d * sizeof *s->keys);
    s->bounds = malloc(heads * (size_t)s->n_pages * 2 * d * sizeof *s->bounds);
    s->queries = malloc(n_new * (size_t)l->n_heads * 2 * d * sizeof *s->queries);
    s->chosen = malloc(heads * n_new * (size_t)s->n_choose * sizeof *s->chosen);
    return s->keys && s->bounds && s->queries && s->chosen ? 0 : -ENOMEM;
}

static int search(struct quest *s)
{
    const struct lab_layer *l = s->l;
    for (int h = 0; h < l->n_kv_heads; h++)
        bound_head(s, h);
    split_queries(s);
    const struct lab_search p = {
        .n_units = s->n_pages,
        .width = 2 * l->head_dim,
        .summary = s->bounds,
        .queries = s->queries,
        .scale = l->context->model->config.attention_scale,
        .group = LAB_GROUP_MEAN,
        .n_choose = s->n_choose,
    };
    return lab_search(l, &p, s->chosen);
}

static int attend(const struct lab_layer *l, void *arg)
{
    struct quest s = {.l = l};
    if (l->index < DENSE_LAYERS)
        return baseline_attend_resident(l, NULL);
    int r = init(&s, arg);
    if (r >= 0)
        r = search(&s);
    if (r >= 0) {
        const struct lab_choice choice = {.unit = PAGE, .n_chosen = s.n_choose, .chosen = s.chosen, .slow_k = l->k, .slow_v = l->v};
        r = lab_attend_choice(l, &choice);
        l->counters->bytes_fast += l->n_kv_heads * (l->n_rows * baseline_row_bytes(l, 16, 16) + s.n_pages * 4.0 * l->head_dim);
    }
    free(s.chosen);
    free(s.queries);
    free(s.bounds);
    free(s.keys);
    return r;
}

static const struct baseline quest = {.attend = attend};

static const struct fidelity_method methods[] = {
    {
        .name = "quest",
        .text = "whole cache resident in bf16; B + F tokens attended in pages of 16 by their channels' minimum and maximum; first two layers dense",
        .group = GROUP_BASELINE,
        .run = baseline_run,
        .arg = &quest,
        .tasks = ON_ALL,
        .sweep = true,
        .fetch_per_budget = 1,
        .importance = 1,
    },
};
const struct fidelity_methods quest_methods = {methods, sizeof methods / sizeof *methods};
