#include "proto/base/base_assert.h"
#include "worker/model/model.h"
#include <errno.h>

/* The MLP's two wide buffers dominate a chunk's activations; this many tokens at a time amortize the expansion of a weight panel. */
enum { MLP_ROWS = 512, BUFFER_ALIGNMENT = 64 };

static size_t buffer_bytes(int64_t n, int64_t width)
{
    size_t bytes = (size_t)n * (size_t)width * sizeof(float);
    return (bytes + BUFFER_ALIGNMENT - 1) / BUFFER_ALIGNMENT * BUFFER_ALIGNMENT;
}

struct workspace_layout {
    int mlp_rows;
    size_t norm; /* shared by norm and attn_out */
    size_t q, kv, ffn; /* bytes of one buffer each */
    size_t total;
};

static void layout_workspace(const struct model_config *c, int n_max, struct workspace_layout *ret)
{
    int64_t q_dim = (int64_t)c->n_heads * c->head_dim;
    struct workspace_layout l = {.mlp_rows = n_max < MLP_ROWS ? n_max : MLP_ROWS};
    l.norm = buffer_bytes(n_max, c->dim > q_dim ? c->dim : q_dim);
    l.q = buffer_bytes(n_max, q_dim);
    l.kv = buffer_bytes(n_max, (int64_t)c->n_kv_heads * c->head_dim);
    l.ffn = buffer_bytes(l.mlp_rows, c->ffn_dim);
    size_t qkv = l.q + 2 * l.kv, mlp = 2 * l.ffn;
    l.total = l.norm + (qkv > mlp ? qkv : mlp);
    *ret = l;
}

size_t model_workspace_bytes(const struct model_config *config, int n_max)
{
    struct workspace_layout l;
    layout_workspace(config, n_max, &l);
    return l.total;
}

int model_workspace_init(struct model_workspace *ws, const struct model *model, int n_max)
{
    struct workspace_layout l;
    void *memory;
    if (n_max < 1 || n_max > MODEL_MAX_CONTEXT)
        return -EINVAL;
    layout_workspace(&model->config, n_max, &l);
    int r = model->dev->alloc(model->device, MEM_WORKSPACE, l.total, &memory);
    if (r < 0)
        return r;
    char *at = memory, *shared = at + l.norm;
    *ws = (struct model_workspace){
        .memory = memory,
        .bytes = l.total,
        .n_max = n_max,
        .mlp_rows = l.mlp_rows,
        .norm = (float *)at,
        .attn_out = (float *)at,
        .q = (float *)shared,
        .k = (float *)(shared + l.q),
        .v = (float *)(shared + l.q + l.kv),
        .gate = (float *)shared,
        .up = (float *)(shared + l.ffn),
    };
    return 0;
}

void model_workspace_fini(struct model_workspace *ws, const struct model *model)
{
    model->dev->free(model->device, ws->memory);
    *ws = (struct model_workspace){0};
}

int model_embed(const struct model *model, const int32_t *ids, int n, float *x)
{
    for (int i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= model->config.n_vocab)
            return -EINVAL;
    return model->ops->embed(model->stream, &model->weights.embedding, ids, n, x);
}

int model_rope_table(const struct model *model, const int32_t *positions, int n, float *table)
{
    const struct rope_freqs *rope = &model->config.rope;
    return model->ops->rope_table(model->stream, rope->inv_freq, rope->n_freqs, rope->factor, positions, n, table);
}

static struct matmul_out linear_out(const struct model_linear *linear, float *y)
{
    return (struct matmul_out){.w = &linear->w, .y = y, .ld_y = linear->w.n_rows, .bias = linear->bias};
}

/* y += x W^T + b, rows of the residual stream. Of a sharded model each rank has a term of the sum, rank 0's with y and b in it (add_up). */
static int add_linear(const struct model *model, const struct model_linear *linear, const float *x, int64_t n, float *y)
{
    struct matmul_out out = linear_out(linear, y);
    out.residual = model->config.shard.rank == 0 ? y : NULL;
    return model->ops->matmul(model->stream, x, n, linear->w.n_cols, &out, 1);
}

static int add_up(const struct model *model, float *x, int64_t n)
{
    return model_is_sharded(&model->config) ? model->collective_ops->all_reduce(model->collective, model->stream, x, n * model->config.dim) : 0;
}

static int norm_rows(const struct model *model, const float *gamma, const float *x, int64_t n, float *y)
{
    const struct model_config *c = &model->config;
    return model->ops->rmsnorm(model->stream, x, gamma, c->rms_eps, n, c->dim, y);
}

int model_layer_qkv(const struct model *model, int layer, const float *x, int n, const float *rope_table, const struct kv_dst *dst,
                    struct model_workspace *ws)
{
    ASSERT(layer >= 0 && layer < model->config.n_layers && n >= 1 && n <= ws->n_max);
    const struct model_config *c = &model->config;
    const struct model_layer_weights *w = &model->weights.layers[layer];
    const struct matmul_out outs[] = {linear_out(&w->q, ws->q), linear_out(&w->k, ws->k), linear_out(&w->v, ws->v)};
    int r = norm_rows(model, w->attn_norm, x, n, ws->norm);
    if (r < 0 || (r = model->ops->matmul(model->stream, ws->norm, n, c->dim, outs, 3)) < 0)
        return r;
    const struct qkv_params qkv = {
        .q = ws->q,
        .k = ws->k,
        .v = ws->v,
        .rope = rope_table,
        .style = c->rope_style,
        .dst = dst,
        .n = n,
        .n_heads = c->n_heads,
        .n_kv_heads = c->n_kv_heads,
        .head_dim = c->head_dim,
    };
    return model->ops->qkv_finish(model->stream, &qkv);
}

/* x [n, dim] += MLP(norm(x)), n <= mlp_rows; still to be added up. */
static int add_mlp(const struct model *model, const struct model_layer_weights *w, float *x, int n, struct model_workspace *ws)
{
    const struct model_config *c = &model->config;
    const struct matmul_out outs[] = {linear_out(&w->gate, ws->gate), linear_out(&w->up, ws->up)};
    int r = norm_rows(model, w->ffn_norm, x, n, ws->norm);
    if (r < 0 || (r = model->ops->matmul(model->stream, ws->norm, n, c->dim, outs, 2)) < 0 ||
        (r = model->ops->silu_mul(model->stream, ws->gate, ws->up, n, c->ffn_dim, ws->gate)) < 0)
        return r;
    return add_linear(model, &w->down, ws->gate, n, x);
}

int model_layer_out(const struct model *model, int layer, float *x, int n, struct model_workspace *ws)
{
    ASSERT(layer >= 0 && layer < model->config.n_layers && n >= 1 && n <= ws->n_max);
    const struct model_layer_weights *w = &model->weights.layers[layer];
    int r = add_linear(model, &w->o, ws->attn_out, n, x);
    if (r >= 0)
        r = add_up(model, x, n);
    for (int i = 0; i < n && r >= 0; i += ws->mlp_rows) {
        int rows = n - i < ws->mlp_rows ? n - i : ws->mlp_rows;
        r = add_mlp(model, w, x + (int64_t)i * model->config.dim, rows, ws);
    }
    return r < 0 ? r : add_up(model, x, n);
}

/* The ranks' columns of the logits, on every rank. */
static int gather_logits(const struct model *model, int n, float *logits)
{
    const struct model_config *c = &model->config;
    int64_t first[COLLECTIVE_MAX_RANKS + 1];
    if (!model_is_sharded(c))
        return 0;
    for (int rank = 0; rank <= c->shard.n_ranks; rank++)
        first[rank] = model_shard_vocab_first(c, rank);
    return model->collective_ops->all_gather(model->collective, model->stream, logits, n, c->n_vocab, first);
}

int model_logits(const struct model *model, const float *x, int n, struct model_workspace *ws, float *logits)
{
    ASSERT(n >= 1 && n <= ws->n_max);
    const struct model_config *c = &model->config;
    const struct matmul_out out = {.w = &model->weights.head, .y = logits + model_shard_vocab_first(c, c->shard.rank), .ld_y = c->n_vocab};
    int r = norm_rows(model, model->weights.final_norm, x, n, ws->norm);
    if (r >= 0 && out.w->n_rows > 0)
        r = model->ops->matmul(model->stream, ws->norm, n, c->dim, &out, 1);
    return r < 0 ? r : gather_logits(model, n, logits);
}
