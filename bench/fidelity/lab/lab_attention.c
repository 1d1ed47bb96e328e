#include "bench/fidelity/lab/lab_attention.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { CHOICE_BATCH = 8 }; /* queries whose rows are gathered before attention runs */

int lab_attend_causal(const struct model *model, const float *q, int n, int row0, const bf16_t *k, const bf16_t *v, int64_t head_stride, float *out)
{
    const struct model_config *c = &model->config;
    const int64_t q_dim = (int64_t)c->n_heads * c->head_dim;
    int r = 0;
    for (int i = 0, end; r >= 0 && i < n; i = end) {
        const int left = BLOCK_TOKENS - (row0 + i) % BLOCK_TOKENS;
        end = i + left < n ? i + left : n;
        const struct attn_prefill_params p = {
            .q = q + i * q_dim,
            .pos0 = row0 + i,
            .n_q = end - i,
            .k = k,
            .v = v,
            .head_stride = head_stride,
            .n_heads = c->n_heads,
            .n_kv_heads = c->n_kv_heads,
            .head_dim = c->head_dim,
            .scale = c->attention_scale,
            .out = out + i * q_dim,
        };
        r = model->ops->attn_prefill(model->stream, &p);
    }
    return r;
}

/* Each new token attends the new ones up to itself. */
static double count_new(const struct lab_layer *l)
{
    return (double)l->n_kv_heads * (double)l->n_new * (double)(l->n_new + 1) / 2;
}

int lab_attend_all(const struct lab_layer *l, const bf16_t *k, const bf16_t *v)
{
    const struct model *m = l->context->model;
    const int64_t rows = (int64_t)(l->n_rows + l->n_new), stride = rows * l->head_dim, n_k = (int64_t)l->n_rows * l->head_dim, n_new = (int64_t)l->n_new * l->head_dim;
    bf16_t *both;
    int r = m->dev->alloc(m->device, MEM_WORKSPACE, (size_t)(2 * l->n_kv_heads * stride) * sizeof *both, (void **)&both);
    if (r < 0)
        return r;
    bf16_t *all_v = both + l->n_kv_heads * stride;
    for (int h = 0; h < l->n_kv_heads; h++) {
        memcpy(both + h * stride, k + h * n_k, (size_t)n_k * sizeof *both);
        memcpy(both + h * stride + n_k, l->new_k + h * n_new, (size_t)n_new * sizeof *both);
        memcpy(all_v + h * stride, v + h * n_k, (size_t)n_k * sizeof *both);
        memcpy(all_v + h * stride + n_k, l->new_v + h * n_new, (size_t)n_new * sizeof *both);
    }
    r = lab_attend_causal(m, l->q, l->n_new, l->n_rows, both, all_v, stride, l->out);
    m->dev->free(m->device, both);
    l->counters->attended += count_new(l) + (double)l->n_kv_heads * l->n_new * l->n_rows;
    return r;
}

/* Items of queries first .. first + n - 1, the new tokens' rows filled in. */
static void fill_items(const struct lab_layer *l, int first, int n, struct attn_decode_item *items)
{
    const int64_t head_new = (int64_t)l->n_new * l->head_dim;
    for (int i = 0; i < n; i++)
        for (int h = 0; h < l->n_kv_heads; h++) {
            const int64_t q = ((int64_t)(first + i) * l->n_heads + (int64_t)h * l->group) * l->head_dim;
            items[i * l->n_kv_heads + h] = (struct attn_decode_item){
                .q = l->q + q,
                .out = l->out + q,
                .rows = {{0}, {.k = l->new_k + h * head_new, .v = l->new_v + h * head_new, .n = first + i + 1}},
            };
        }
}

static int run_items(const struct lab_layer *l, struct attn_decode_item *items, int n)
{
    const struct model *m = l->context->model;
    struct block_layout layout;
    int r = block_layout_init(&layout, KV_FORMAT_BF16, (uint32_t)m->config.n_layers, (uint32_t)l->n_kv_heads, (uint32_t)l->head_dim);
    if (r < 0)
        return r;
    struct attn_decode_params p = {
        .items = items,
        .n_items = n,
        .layout = &layout,
        .group = l->group,
        .head_dim = l->head_dim,
        .scale = m->config.attention_scale,
    };
    return m->ops->attn_decode(m->stream, &p);
}

int lab_attend_heads(const struct lab_layer *l, const struct lab_head_rows *heads)
{
    struct attn_decode_item *items = calloc((size_t)l->n_new * (size_t)l->n_kv_heads, sizeof *items);
    if (!items)
        return -ENOMEM;
    fill_items(l, 0, l->n_new, items);
    for (int i = 0; i < l->n_new * l->n_kv_heads; i++) {
        const struct lab_head_rows *head = &heads[i % l->n_kv_heads];
        items[i].rows[0] = (struct kv_rows){.k = head->k, .v = head->v, .n = head->n};
        l->counters->attended += head->n;
    }
    l->counters->attended += count_new(l);
    const int r = run_items(l, items, l->n_new * l->n_kv_heads);
    free(items);
    return r;
}

/* ---- chosen units ---- */

/* Room for the rows of a batch of queries: each has its head's fast rows in front. */
struct gather {
    int max_rows;  /* of one query and head */
    bf16_t *k, *v; /* [CHOICE_BATCH, n_kv_heads, max_rows, d] */
    struct attn_decode_item items[];
};

static int copy_rows(const struct lab_layer *l, const bf16_t *k, const bf16_t *v, int row, int n, bf16_t *to_k, bf16_t *to_v)
{
    const size_t bytes = (size_t)n * (size_t)l->head_dim * sizeof *k;
    memcpy(to_k, k + (int64_t)row * l->head_dim, bytes);
    memcpy(to_v, v + (int64_t)row * l->head_dim, bytes);
    return n;
}

/* Rows first .. end-1 whose flag is `want`. Returns how many. */
static int copy_flagged(const struct lab_layer *l, const uint8_t *fast, uint8_t want, const bf16_t *k, const bf16_t *v, int first, int end, bf16_t *to_k, bf16_t *to_v)
{
    int n = 0;
    for (int row = first, next; row < end; row = next) {
        const uint8_t flag = fast ? fast[row] : 0;
        for (next = row + 1; next < end && (fast ? fast[next] : 0) == flag; next++)
            ;
        if (flag == want)
            n += copy_rows(l, k, v, row, next - row, to_k + (int64_t)n * l->head_dim, to_v + (int64_t)n * l->head_dim);
    }
    return n;
}

static int count_fast(const struct lab_layer *l, const struct lab_choice *c, int head)
{
    int n = 0;
    for (int i = 0; c->fast && i < l->n_rows; i++)
        n += c->fast[(int64_t)head * l->n_rows + i];
    return n;
}

static int gather_create(const struct lab_layer *l, const struct lab_choice *c, struct gather **ret)
{
    struct gather *g = calloc(1, sizeof *g + sizeof g->items[0] * (size_t)(CHOICE_BATCH * l->n_kv_heads));
    if (!g)
        return -ENOMEM;
    for (int h = 0; h < l->n_kv_heads; h++) {
        const int n = count_fast(l, c, h) + c->n_chosen * c->unit;
        g->max_rows = n > g->max_rows ? n : g->max_rows;
    }
    const size_t n = (size_t)CHOICE_BATCH * (size_t)l->n_kv_heads * (size_t)g->max_rows * (size_t)l->head_dim;
    g->k = malloc(2 * n * sizeof *g->k);
    if (!g->k) {
        free(g);
        return -ENOMEM;
    }
    g->v = g->k + n;
    *ret = g;
    return 0;
}

static void gather_free(struct gather *g)
{
    free(g->k);
    free(g);
}

/* Rows of one query and head into place `at` of the batch. */
static void gather_item(const struct lab_layer *l, const struct lab_choice *c, struct gather *g, int query, int head, int at)
{
    const int64_t rows = (int64_t)head * l->n_rows, base = rows * l->head_dim, d = l->head_dim;
    const uint8_t *fast = c->fast ? c->fast + rows : NULL;
    const int32_t *chosen = c->chosen + ((int64_t)head * l->n_new + query) * c->n_chosen;
    bf16_t *k = g->k + (int64_t)at * g->max_rows * d, *v = g->v + (int64_t)at * g->max_rows * d;
    const int n_fast = fast ? copy_flagged(l, fast, 1, l->k + base, l->v + base, 0, l->n_rows, k, v) : 0;
    int n = n_fast;
    for (int i = 0; i < c->n_chosen; i++) {
        const int first = chosen[i] * c->unit, end = first + c->unit < l->n_rows ? first + c->unit : l->n_rows;
        n += copy_flagged(l, fast, 0, c->slow_k + base, c->slow_v + base, first, end, k + n * d, v + n * d);
    }
    g->items[at].rows[0] = (struct kv_rows){.k = k, .v = v, .n = n};
    l->counters->attended += n;
    l->counters->bytes_slow += (n - n_fast) * c->slow_row_bytes;
}

int lab_attend_choice(const struct lab_layer *l, const struct lab_choice *c)
{
    struct gather *g;
    int r = gather_create(l, c, &g);
    if (r < 0)
        return r;
    for (int first = 0; r >= 0 && first < l->n_new; first += CHOICE_BATCH) {
        const int n = l->n_new - first < CHOICE_BATCH ? l->n_new - first : CHOICE_BATCH;
        fill_items(l, first, n, g->items);
        for (int i = 0; i < n * l->n_kv_heads; i++)
            gather_item(l, c, g, first + i / l->n_kv_heads, i % l->n_kv_heads, i);
        r = run_items(l, g->items, n * l->n_kv_heads);
    }
    gather_free(g);
    l->counters->attended += count_new(l);
    return r;
}
