#include "bench/fidelity/lab/lab_attention.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* One prefill under way: layer-major, whatever the chunk. */
struct prefill {
    const struct lab_prefill_params *p;
    const struct model *m;
    struct lab_context *ctx;
    struct model_workspace ws;
    float *rope;           /* [n, d] cos and sin */
    struct kv_dst *dst;    /* [chunk] */
    struct block_layout layout;
    uint8_t *slice;        /* with LAB_VALUES_K8V4: one layer of a block */
    /* With eviction: the layer's rows, what was kept and the chunk behind it. */
    bf16_t *cache_k, *cache_v; /* [n_kv_heads, cache_rows, d] */
    int cache_rows, n_cached;
    int32_t *kept;         /* [n_kv_heads, budget] */
    int32_t *n_of_head;    /* [n_kv_heads] */
    void *scratch;
};

/* Where a layer's rows are while it is prefilled. */
struct layer_rows {
    bf16_t *k, *v;
    int64_t head_stride;
};

static struct layer_rows rows_of(const struct prefill *s, int layer)
{
    const struct model_config *c = &s->m->config;
    if (s->p->eviction)
        return (struct layer_rows){s->cache_k, s->cache_v, (int64_t)s->cache_rows * c->head_dim};
    const int64_t stride = (int64_t)s->ctx->n_rows * c->head_dim, at = layer * c->n_kv_heads * stride;
    return (struct layer_rows){s->ctx->k + at, s->ctx->v + at, stride};
}

static int project(struct prefill *s, int layer, int first, int n, int row0)
{
    const struct model_config *c = &s->m->config;
    const struct layer_rows rows = rows_of(s, layer);
    for (int i = 0; i < n; i++)
        s->dst[i] = (struct kv_dst){.k = rows.k + (int64_t)(row0 + i) * c->head_dim, .v = rows.v + (int64_t)(row0 + i) * c->head_dim, .head_stride = rows.head_stride};
    return model_layer_qkv(s->m, layer, s->ctx->hidden + (int64_t)first * c->dim, n, s->rope + (int64_t)first * c->head_dim, s->dst, &s->ws);
}

static void save_window(struct prefill *s, int layer, int first, int n)
{
    const struct model_config *c = &s->m->config;
    const int64_t q_dim = (int64_t)c->n_heads * c->head_dim;
    const int window_first = s->ctx->n_tokens - s->ctx->n_window, from = first > window_first ? first : window_first;
    if (from < first + n)
        memcpy(s->ctx->window + ((int64_t)layer * s->ctx->n_window + from - window_first) * q_dim, s->ws.q + (from - first) * q_dim,
               (size_t)((first + n - from) * q_dim) * sizeof(float));
}

/* What the pool gives back replaces the block's K and V. */
static int code_block(struct prefill *s, int layer, int block)
{
    const struct layer_rows rows = rows_of(s, layer);
    const int64_t at = (int64_t)block * BLOCK_TOKENS * s->m->config.head_dim;
    const struct block_params p = {
        .layout = &s->layout, .first = block == 0, .slice = s->slice, .k = rows.k + at, .v = rows.v + at, .head_stride = rows.head_stride};
    int32_t n_bad = 0; /* the lab's device is the CPU */
    const int r = s->m->ops->block_encode(s->m->stream, &p, 1, true, &n_bad);
    return r < 0 ? r : n_bad ? -ERANGE : 0;
}

/* Queries of rows row0 .. row0 + n - 1; a block is coded behind its last query. */
static int attend(struct prefill *s, int layer, int n, int row0)
{
    const int64_t q_dim = (int64_t)s->m->config.n_heads * s->m->config.head_dim;
    const struct layer_rows rows = rows_of(s, layer);
    int r = 0;
    if (s->p->values == LAB_VALUES_EXACT)
        return lab_attend_causal(s->m, s->ws.q, n, row0, rows.k, rows.v, rows.head_stride, s->ws.attn_out);
    for (int i = 0, end; r >= 0 && i < n; i = end) {
        const int left = BLOCK_TOKENS - (row0 + i) % BLOCK_TOKENS;
        end = i + left < n ? i + left : n;
        r = lab_attend_causal(s->m, s->ws.q + i * q_dim, end - i, row0 + i, rows.k, rows.v, rows.head_stride, (float *)s->ws.attn_out + i * q_dim);
        if (r >= 0 && end - i == left)
            r = code_block(s, layer, (row0 + i) / BLOCK_TOKENS);
    }
    return r;
}

/* ---- eviction ---- */

/* ret_free [n_kv_heads, n_free]: rows between the sinks and the newest. */
static int rank_free(struct prefill *s, int n_new, int32_t *ret_free)
{
    const struct lab_eviction *e = s->p->eviction;
    const struct model_config *c = &s->m->config;
    const int n_window = e->selector->n_window < n_new ? e->selector->n_window : n_new, n_rows = s->n_cached + n_new;
    const struct selector_input in = {
        .dev = s->m->dev,
        .ops = s->m->ops,
        .stream = s->m->stream,
        .q = n_window ? s->ws.q + (int64_t)(n_new - n_window) * c->n_heads * c->head_dim : NULL,
        .n_window = n_window,
        .k = s->cache_k,
        .head_stride = (int64_t)s->cache_rows * c->head_dim,
        .n_keys = n_rows,
        .n_heads = c->n_heads,
        .n_kv_heads = c->n_kv_heads,
        .head_dim = c->head_dim,
        .scale = c->attention_scale,
        .first = SELECT_SINKS,
        .last = n_rows - SELECT_MANDATORY,
        .n_free = e->budget - SELECT_SINKS - SELECT_MANDATORY,
        .scratch = s->scratch,
    };
    int r = e->selector->select(&in, s->n_of_head, ret_free);
    for (int h = 0; r >= 0 && h < c->n_kv_heads; h++)
        if (s->n_of_head[h] != in.n_free)
            r = -ENOTSUP;
    return r;
}

/* Rows move towards the front, in ascending order, so none is overwritten before it was moved. */
static void compact_head(struct prefill *s, int head, const int32_t *free_rows, int n_rows)
{
    const int budget = s->p->eviction->budget, n_free = budget - SELECT_SINKS - SELECT_MANDATORY;
    const int64_t d = s->m->config.head_dim, base = (int64_t)head * s->cache_rows * d;
    for (int i = SELECT_SINKS; i < budget; i++) {
        const int from = i < SELECT_SINKS + n_free ? free_rows[i - SELECT_SINKS] : n_rows - (budget - i);
        memmove(s->cache_k + base + i * d, s->cache_k + base + from * d, (size_t)d * sizeof(bf16_t));
        memmove(s->cache_v + base + i * d, s->cache_v + base + from * d, (size_t)d * sizeof(bf16_t));
    }
}

/* Behind a chunk of n tokens, whose queries are still in the workspace. */
static int evict(struct prefill *s, int n)
{
    const int budget = s->p->eviction->budget, n_free = budget - SELECT_SINKS - SELECT_MANDATORY, n_rows = s->n_cached + n;
    if (n_rows <= budget) {
        s->n_cached = n_rows;
        return 0;
    }
    int r = rank_free(s, n, s->kept);
    for (int h = 0; r >= 0 && h < s->m->config.n_kv_heads; h++)
        compact_head(s, h, s->kept + (int64_t)h * n_free, n_rows);
    s->n_cached = budget;
    return r;
}

static void save_evicted(struct prefill *s, int layer)
{
    const struct model_config *c = &s->m->config;
    const int64_t n = (int64_t)s->ctx->n_rows * c->head_dim, stride = (int64_t)s->cache_rows * c->head_dim;
    for (int h = 0; h < c->n_kv_heads; h++) {
        const int64_t to = ((int64_t)layer * c->n_kv_heads + h) * n;
        memcpy(s->ctx->k + to, s->cache_k + h * stride, (size_t)n * sizeof(bf16_t));
        memcpy(s->ctx->v + to, s->cache_v + h * stride, (size_t)n * sizeof(bf16_t));
    }
}

/* ---- layers ---- */

static int run_chunk(struct prefill *s, int layer, int first, int n)
{
    const int row0 = s->p->eviction ? s->n_cached : first;
    int r = project(s, layer, first, n, row0);
    if (r < 0)
        return r;
    save_window(s, layer, first, n);
    r = attend(s, layer, n, row0);
    if (r >= 0 && s->p->eviction)
        r = evict(s, n);
    if (r >= 0)
        r = model_layer_out(s->m, layer, s->ctx->hidden + (int64_t)first * s->m->config.dim, n, &s->ws);
    return r;
}

static int run_layers(struct prefill *s)
{
    const int n = s->p->n;
    int r = model_embed(s->m, s->p->tokens, n, s->ctx->hidden);
    for (int layer = 0; r >= 0 && layer < s->m->config.n_layers; layer++) {
        s->n_cached = 0;
        for (int first = 0; r >= 0 && first < n; first += s->p->chunk)
            r = run_chunk(s, layer, first, n - first < s->p->chunk ? n - first : s->p->chunk);
        if (r >= 0 && s->p->eviction)
            save_evicted(s, layer);
    }
    return r;
}

static int take(const struct model *m, enum mem_tag tag, size_t bytes, void *ret)
{
    return m->dev->alloc(m->device, tag, bytes, ret);
}

static int init_context(struct lab_context *ctx, const struct lab_prefill_params *p)
{
    const struct model *m = p->model;
    const struct model_config *c = &m->config;
    *ctx = (struct lab_context){.model = m, .n_tokens = p->n, .n_rows = p->n, .n_window = p->n < LAB_WINDOW ? p->n : LAB_WINDOW};
    if (p->eviction && p->eviction->budget < p->n)
        ctx->n_rows = p->eviction->budget;
    const size_t kv = (size_t)c->n_layers * (size_t)c->n_kv_heads * (size_t)ctx->n_rows * (size_t)c->head_dim * sizeof(bf16_t);
    const size_t window = (size_t)c->n_layers * (size_t)ctx->n_window * (size_t)c->n_heads * (size_t)c->head_dim * sizeof(float);
    const size_t hidden = (size_t)p->n * (size_t)c->dim * sizeof(float);
    int r;
    if ((r = take(m, MEM_ACTIVE_KV, kv, &ctx->k)) < 0 || (r = take(m, MEM_ACTIVE_KV, kv, &ctx->v)) < 0 || (r = take(m, MEM_WORKSPACE, window, &ctx->window)) < 0 ||
        (r = take(m, MEM_BRIDGE, hidden, &ctx->hidden)) < 0)
        return r;
    ctx->bytes = 2 * kv + window + hidden;
    return 0;
}

static int init_eviction(struct prefill *s)
{
    const struct lab_eviction *e = s->p->eviction;
    const struct model_config *c = &s->m->config;
    s->cache_rows = e->budget + s->p->chunk;
    const size_t bytes = (size_t)c->n_kv_heads * (size_t)s->cache_rows * (size_t)c->head_dim * sizeof(bf16_t);
    s->kept = malloc((size_t)c->n_kv_heads * (size_t)e->budget * sizeof *s->kept);
    s->n_of_head = malloc((size_t)c->n_kv_heads * sizeof *s->n_of_head);
    const struct selector_shape shape = {.n_kv_heads = c->n_kv_heads, .n_keys = s->cache_rows, .n_candidates = s->cache_rows, .n_free = e->budget};
    int r;
    if (!s->kept || !s->n_of_head)
        return -ENOMEM;
    if ((r = take(s->m, MEM_ACTIVE_KV, bytes, &s->cache_k)) < 0 || (r = take(s->m, MEM_ACTIVE_KV, bytes, &s->cache_v)) < 0)
        return r;
    return take(s->m, MEM_WORKSPACE, e->selector->scratch_bytes(&shape), &s->scratch);
}

static int init(struct prefill *s)
{
    const struct model_config *c = &s->m->config;
    const int n = s->p->n;
    int r = block_layout_init(&s->layout, KV_FORMAT_K8V4, (uint32_t)c->n_layers, (uint32_t)c->n_kv_heads, (uint32_t)c->head_dim);
    int32_t *positions = malloc((size_t)n * sizeof *positions);
    s->dst = calloc((size_t)s->p->chunk, sizeof *s->dst);
    if (r >= 0 && (!positions || !s->dst))
        r = -ENOMEM;
    if (r >= 0)
        r = model_workspace_init(&s->ws, s->m, s->p->chunk, 0);
    if (r >= 0)
        r = take(s->m, MEM_WORKSPACE, (size_t)n * (size_t)c->head_dim * sizeof(float), &s->rope);
    if (r >= 0)
        r = take(s->m, MEM_STAGING, s->layout.slice_bytes[1], &s->slice);
    for (int i = 0; r >= 0 && i < n; i++)
        positions[i] = i;
    if (r >= 0)
        r = model_rope_table(s->m, positions, n, s->rope);
    if (r >= 0 && s->p->eviction)
        r = init_eviction(s);
    free(positions);
    return r;
}

static void fini(struct prefill *s)
{
    const struct device_ops *dev = s->m->dev;
    dev->free(s->m->device, s->scratch);
    dev->free(s->m->device, s->cache_v);
    dev->free(s->m->device, s->cache_k);
    dev->free(s->m->device, s->slice);
    dev->free(s->m->device, s->rope);
    if (s->ws.memory)
        model_workspace_fini(&s->ws, s->m);
    free(s->n_of_head);
    free(s->kept);
    free(s->dst);
}

static bool valid(const struct lab_prefill_params *p)
{
    if (p->n < 1 || p->n > p->model->config.max_context || p->chunk < 1)
        return false;
    return !p->eviction || (p->values == LAB_VALUES_EXACT && p->eviction->budget > SELECT_SINKS + SELECT_MANDATORY);
}

int lab_prefill(const struct lab_prefill_params *params, struct lab_context **ret_context)
{
    struct lab_prefill_params p = *params;
    if (!valid(&p))
        return -EINVAL;
    if (p.model->key_bias.n_pairs)
        return -ENOTSUP;
    p.chunk = p.chunk < p.n ? p.chunk : p.n;
    struct lab_context *ctx = calloc(1, sizeof *ctx);
    if (!ctx)
        return -ENOMEM;
    struct prefill s = {.p = &p, .m = p.model, .ctx = ctx};
    int r = init_context(ctx, &p);
    if (r >= 0)
        r = init(&s);
    if (r >= 0)
        r = run_layers(&s);
    fini(&s);
    if (r < 0) {
        lab_context_free(ctx);
        return r;
    }
    *ret_context = ctx;
    return 0;
}

void lab_context_free(struct lab_context *ctx)
{
    if (!ctx)
        return;
    const struct model *m = ctx->model;
    m->dev->free(m->device, ctx->hidden);
    m->dev->free(m->device, ctx->window);
    m->dev->free(m->device, ctx->v);
    m->dev->free(m->device, ctx->k);
    free(ctx);
}
