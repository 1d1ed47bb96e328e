#include "bench/fidelity/lab/lab.h"
#include <errno.h>
#include <stdlib.h>

enum { LOGIT_ROWS = 32 }; /* rows of logits at a time */

/* One continuation under way. */
struct continuation {
    const struct lab_continuation *c;
    const struct model *m;
    struct model_workspace ws;
    float *x;              /* [n, dim] */
    float *rope;           /* [n, d] */
    float *logits;         /* [LOGIT_ROWS, n_vocab] */
    bf16_t *k, *v;         /* [n_kv_heads, n, d] of the layer at work */
    struct kv_dst *dst;    /* [n] */
    struct lab_counters counters;
};

static int take(const struct model *m, size_t bytes, void *ret)
{
    return m->dev->alloc(m->device, MEM_WORKSPACE, bytes, ret);
}

static int init_tables(struct continuation *s)
{
    const struct model_config *c = &s->m->config;
    const int n = s->c->n;
    int32_t *positions = malloc((size_t)n * sizeof *positions);
    s->dst = calloc((size_t)n, sizeof *s->dst);
    int r = positions && s->dst ? 0 : -ENOMEM;
    for (int i = 0; r >= 0 && i < n; i++) {
        const int64_t at = (int64_t)i * c->head_dim;
        positions[i] = s->c->context->n_tokens + i;
        s->dst[i] = (struct kv_dst){.k = s->k + at, .v = s->v + at, .head_stride = (int64_t)n * c->head_dim};
    }
    if (r >= 0)
        r = model_rope_table(s->m, positions, n, s->rope);
    free(positions);
    return r;
}

static int init(struct continuation *s)
{
    const struct model_config *c = &s->m->config;
    const size_t n = (size_t)s->c->n, kv = (size_t)c->n_kv_heads * n * (size_t)c->head_dim * sizeof(bf16_t);
    int r = model_workspace_init(&s->ws, s->m, s->c->n > LOGIT_ROWS ? s->c->n : LOGIT_ROWS, 0);
    if (r < 0 || (r = take(s->m, n * (size_t)c->dim * sizeof(float), &s->x)) < 0 || (r = take(s->m, n * (size_t)c->head_dim * sizeof(float), &s->rope)) < 0 ||
        (r = take(s->m, (size_t)LOGIT_ROWS * (size_t)c->n_vocab * sizeof(float), &s->logits)) < 0 || (r = take(s->m, kv, &s->k)) < 0 || (r = take(s->m, kv, &s->v)) < 0)
        return r;
    return init_tables(s);
}

static void fini(struct continuation *s)
{
    const struct device_ops *dev = s->m->dev;
    dev->free(s->m->device, s->v);
    dev->free(s->m->device, s->k);
    dev->free(s->m->device, s->logits);
    dev->free(s->m->device, s->rope);
    dev->free(s->m->device, s->x);
    if (s->ws.memory)
        model_workspace_fini(&s->ws, s->m);
    free(s->dst);
}

static int run_layer(struct continuation *s, int index)
{
    const struct lab_context *ctx = s->c->context;
    const struct model_config *c = &s->m->config;
    const int64_t at = (int64_t)index * c->n_kv_heads * ctx->n_rows * c->head_dim;
    int r = model_layer_qkv(s->m, index, s->x, s->c->n, s->rope, s->dst, &s->ws);
    if (r < 0)
        return r;
    const struct lab_layer layer = {
        .context = ctx,
        .index = index,
        .n_rows = ctx->n_rows,
        .n_new = s->c->n,
        .n_heads = c->n_heads,
        .n_kv_heads = c->n_kv_heads,
        .group = c->n_heads / c->n_kv_heads,
        .head_dim = c->head_dim,
        .k = ctx->k + at,
        .v = ctx->v + at,
        .new_k = s->k,
        .new_v = s->v,
        .q = s->ws.q,
        .out = s->ws.attn_out,
        .counters = &s->counters,
    };
    r = s->c->attend(&layer, s->c->attend_arg);
    if (r >= 0)
        r = model_layer_out(s->m, index, s->x, s->c->n, &s->ws);
    return r;
}

static int give_logits(struct continuation *s)
{
    const struct model_config *c = &s->m->config;
    int r = 0;
    for (int row = 0; r >= 0 && row < s->c->n; row += LOGIT_ROWS) {
        const int n = s->c->n - row < LOGIT_ROWS ? s->c->n - row : LOGIT_ROWS;
        r = model_logits(s->m, s->x + (int64_t)row * c->dim, n, &s->ws, s->logits);
        for (int i = 0; r >= 0 && i < n; i++)
            r = s->c->logits(s->c->logits_arg, row + i, s->logits + (int64_t)i * c->n_vocab);
    }
    return r;
}

int lab_continue(const struct lab_continuation *c, struct lab_counters *ret_counters)
{
    const struct model *m = c->context->model;
    struct continuation s = {.c = c, .m = m};
    if (c->n < 1 || c->n > LAB_MAX_NEW || c->context->n_tokens > m->config.max_context - c->n)
        return -EINVAL;
    int r = init(&s);
    if (r >= 0)
        r = model_embed(m, c->tokens, c->n, s.x);
    for (int layer = 0; r >= 0 && layer < m->config.n_layers; layer++)
        r = run_layer(&s, layer);
    if (r >= 0)
        r = give_logits(&s);
    if (r >= 0)
        *ret_counters = s.counters;
    fini(&s);
    return r;
}
