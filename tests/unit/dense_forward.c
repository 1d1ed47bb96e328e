#include "dense_forward.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Buffers of one pass, from the device's arena. */
struct pass {
    const struct dense_device *d;
    struct model_workspace ws;
    struct key_bias_tables bias;
    float *x;          /* [n, dim] */
    bf16_t *k, *v;     /* [n_kv_heads, n, head_dim] of one layer */
    float *rope;       /* [n, head_dim / 2, 2] */
    struct kv_dst *dst; /* [n] */
    int32_t *positions; /* [n] 0, 1, 2, ... */
    int n, chunk;
};

void dense_open(struct dense_device *d, const char *path, int n_threads, enum cpu_isa isa)
{
    const struct device_config config = {.n_threads = n_threads, .isa = isa};
    struct error err = {0};
    *d = (struct dense_device){0};
    cr_assert_eq(cpu_device_ops()->open(&config, &d->device), 0);
    cr_assert_eq(cpu_device_ops()->stream_create(d->device, &d->stream), 0);
    const struct model_open_params params = {
        .path = path, .dev = cpu_device_ops(), .ops = cpu_kernel_ops(), .device = d->device, .stream = d->stream};
    cr_assert_eq(model_open(&params, &d->model, &err), 0, "%s", err.text);
}

void dense_close(struct dense_device *d)
{
    model_close(d->model);
    cpu_device_ops()->stream_free(d->stream);
    cpu_device_ops()->close(d->device);
}

static void *take(const struct pass *p, enum mem_tag tag, size_t bytes)
{
    void *memory;
    cr_assert_eq(p->d->model->dev->alloc(p->d->device, tag, bytes, &memory), 0);
    return memory;
}

static void pass_init(struct pass *p, const struct dense_device *d, int n, int chunk)
{
    const struct model_config *c = &d->model->config;
    size_t kv = (size_t)c->n_kv_heads * (size_t)n * (size_t)c->head_dim * sizeof(bf16_t);
    *p = (struct pass){.d = d, .n = n, .chunk = chunk};
    cr_assert_eq(model_workspace_init(&p->ws, d->model, chunk, 0), 0);
    cr_assert_eq(key_bias_tables_init(&p->bias, d->model, n), 0);
    p->x = take(p, MEM_BRIDGE, (size_t)n * (size_t)c->dim * sizeof(float));
    p->k = take(p, MEM_ACTIVE_KV, kv);
    p->v = take(p, MEM_ACTIVE_KV, kv);
    p->rope = take(p, MEM_WORKSPACE, (size_t)n * (size_t)c->head_dim * sizeof(float));
    p->dst = calloc((size_t)n, sizeof(*p->dst));
    p->positions = calloc((size_t)n, sizeof(*p->positions));
    cr_assert(p->dst && p->positions);
    for (int i = 0; i < n; i++) {
        p->positions[i] = i;
        p->dst[i] = (struct kv_dst){.k = p->k + (size_t)i * (size_t)c->head_dim, .v = p->v + (size_t)i * (size_t)c->head_dim,
                                    .head_stride = (int64_t)n * c->head_dim};
    }
}

static void pass_fini(struct pass *p)
{
    const struct device_ops *dev = p->d->model->dev;
    dev->free(p->d->device, p->rope);
    dev->free(p->d->device, p->v);
    dev->free(p->d->device, p->k);
    dev->free(p->d->device, p->x);
    key_bias_tables_fini(&p->bias);
    model_workspace_fini(&p->ws, p->d->model);
    free(p->dst);
    free(p->positions);
}

/* Queries first..first+n of the chunk that starts at `pos0`, block by block. */
static int attend(struct pass *p, int layer, int pos0, int n)
{
    const struct model *m = p->d->model;
    const struct model_config *c = &m->config;
    int64_t row = (int64_t)c->n_heads * c->head_dim;
    for (int i = 0; i < n;) {
        int left = BLOCK_TOKENS - (pos0 + i) % BLOCK_TOKENS;
        const struct attn_prefill_params a = {
            .q = p->ws.q + i * row,
            .pos0 = pos0 + i,
            .n_q = n - i < left ? n - i : left,
            .k = p->k,
            .v = p->v,
            .head_stride = (int64_t)p->n * c->head_dim,
            .n_heads = c->n_heads,
            .n_kv_heads = c->n_kv_heads,
            .head_dim = c->head_dim,
            .scale = c->attention_scale,
            .bias = key_bias_of(&p->bias, layer),
            .out = matmul_input_at(m->ops, p->ws.attn_out, i * row),
        };
        int r = m->ops->attn_prefill(m->stream, &a);
        if (r < 0)
            return r;
        i += a.n_q;
    }
    return 0;
}

static int layer_chunk(struct pass *p, int layer, int pos0)
{
    const struct model *m = p->d->model;
    int n = p->n - pos0 < p->chunk ? p->n - pos0 : p->chunk, r;
    float *x = p->x + (int64_t)pos0 * m->config.dim;
    const float *rope = p->rope + (int64_t)pos0 * m->config.head_dim;
    if ((r = model_layer_qkv(m, layer, x, n, rope, p->dst + pos0, &p->ws)) < 0 || (r = attend(p, layer, pos0, n)) < 0)
        return r;
    return model_layer_out(m, layer, x, n, &p->ws);
}

/* Moves the rows of the positions to the front; as many at a time as the workspace takes. */
static int position_logits(struct pass *p, const int32_t *positions, int n_positions, float *ret_logits)
{
    const struct model_config *c = &p->d->model->config;
    int r = 0;
    for (int i = 0; i < n_positions; i++)
        memmove(p->x + (int64_t)i * c->dim, p->x + (int64_t)positions[i] * c->dim, (size_t)c->dim * sizeof(float));
    for (int i = 0; i < n_positions && r >= 0; i += p->chunk) {
        int n = n_positions - i < p->chunk ? n_positions - i : p->chunk;
        r = model_logits(p->d->model, p->x + (int64_t)i * c->dim, n, &p->ws, ret_logits + (int64_t)i * c->n_vocab);
    }
    return r;
}

int dense_forward(const struct dense_device *d, const int32_t *tokens, int n, int chunk, const int32_t *positions, int n_positions, float *ret_logits)
{
    const struct model *m = d->model;
    struct pass p;
    pass_init(&p, d, n, chunk);
    int r = model_embed(m, tokens, n, p.x);
    if (r >= 0)
        r = model_rope_table(m, p.positions, n, p.rope);
    for (int layer = 0; layer < m->config.n_layers && r >= 0; layer++)
        for (int pos = 0; pos < n && r >= 0; pos += chunk)
            r = layer_chunk(&p, layer, pos);
    if (r >= 0)
        r = position_logits(&p, positions, n_positions, ret_logits);
    pass_fini(&p);
    return r;
}
