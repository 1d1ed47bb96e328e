#include "proto/base/base_assert.h"
#include "worker/model/model.h"
#include <errno.h>

enum { BUFFER_ALIGNMENT = 64 };

static size_t buffer_bytes(int64_t n, int64_t width, size_t element)
{
    size_t bytes = (size_t)n * (size_t)width * element;
    return (bytes + BUFFER_ALIGNMENT - 1) / BUFFER_ALIGNMENT * BUFFER_ALIGNMENT;
}

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Columns of gate and up at a time: equal lots, of at most `room` or the least there can be. */
static int64_t lot_columns(int64_t ffn, int64_t room)
{
    if (room >= ffn)
        return ffn;
    const int64_t most = room < WEIGHT_ROWS_UNIT ? WEIGHT_ROWS_UNIT : room / WEIGHT_ROWS_UNIT * WEIGHT_ROWS_UNIT, n_lots = (ffn + most - 1) / most, each = (ffn + n_lots - 1) / n_lots;
    return min64((each + WEIGHT_ROWS_UNIT - 1) / WEIGHT_ROWS_UNIT * WEIGHT_ROWS_UNIT, ffn);
}

struct workspace_layout {
    int mlp_rows;
    int64_t lot; /* floats of gate, and of up */
    size_t norm; /* shared by norm and attn_out */
    size_t q, kv, mid, lots; /* bytes of one buffer each; mid 0: it is gate */
    size_t total;
};

/* Gate and up dominate a chunk's activations, so as many of their columns are made at a time as keep the device busy. Where that is all, and inputs are fp32, the product takes gate's place. */
static void layout_workspace(const struct kernel_ops *ops, const struct model_config *c, int n_max, size_t shared, struct workspace_layout *ret)
{
    const int64_t q_dim = (int64_t)c->n_heads * c->head_dim;
    struct workspace_layout l = {.mlp_rows = (size_t)n_max < ops->matmul_rows ? n_max : (int)ops->matmul_rows};
    const int64_t all = (int64_t)l.mlp_rows * c->ffn_dim;
    l.lot = ops->matmul_outputs < (size_t)all ? l.mlp_rows * lot_columns(c->ffn_dim, (int64_t)ops->matmul_outputs / l.mlp_rows) : all;
    l.norm = buffer_bytes(n_max, c->dim > q_dim ? c->dim : q_dim, ops->input_bytes);
    l.q = buffer_bytes(n_max, q_dim, sizeof(float));
    l.kv = buffer_bytes(n_max, (int64_t)c->n_kv_heads * c->head_dim, sizeof(float));
    l.lots = buffer_bytes(1, l.lot, sizeof(float));
    if (l.lot < all || ops->input_bytes != sizeof(float))
        l.mid = buffer_bytes(l.mlp_rows, c->ffn_dim, ops->input_bytes);
    const size_t attention = l.q + 2 * l.kv + shared, mlp = l.mid + 2 * l.lots;
    l.total = l.norm + (attention > mlp ? attention : mlp);
    *ret = l;
}

size_t model_workspace_bytes(const struct kernel_ops *ops, const struct model_config *config, int n_max, size_t shared)
{
    struct workspace_layout l;
    layout_workspace(ops, config, n_max, shared, &l);
    return l.total;
}

int model_workspace_init(struct model_workspace *ws, const struct model *model, int n_max, size_t shared)
{
    struct workspace_layout l;
    void *memory;
    if (n_max < 1 || n_max > MODEL_MAX_CONTEXT)
        return -EINVAL;
    layout_workspace(model->ops, &model->config, n_max, shared, &l);
    int r = model->dev->alloc(model->device, MEM_WORKSPACE, l.total, &memory);
    if (r < 0)
        return r;
    char *at = memory, *behind = at + l.norm;
    *ws = (struct model_workspace){
        .memory = memory,
        .bytes = l.total,
        .n_max = n_max,
        .mlp_rows = l.mlp_rows,
        .lot = l.lot,
        .norm = at,
        .attn_out = at,
        .q = (float *)behind,
        .k = (float *)(behind + l.q),
        .v = (float *)(behind + l.q + l.kv),
        .shared = behind + l.q + 2 * l.kv,
        .mid = behind,
        .gate = (float *)(behind + l.mid),
        .up = (float *)(behind + l.mid + l.lots),
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
static int add_linear(const struct model *model, const struct model_linear *linear, const void *x, int64_t n, float *y)
{
    struct matmul_out out = linear_out(linear, y);
    out.residual = model->config.shard.rank == 0 ? y : NULL;
    return model->ops->matmul(model->stream, x, n, linear->w.n_cols, &out, 1);
}

static int add_up(const struct model *model, float *x, int64_t n)
{
    return model_is_sharded(&model->config) ? model->collective_ops->all_reduce(model->collective, model->stream, x, n * model->config.dim) : 0;
}

static int norm_rows(const struct model *model, const float *gamma, const float *x, int64_t n, void *y)
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

/* Rows of a matrix, that is columns of its product, from a multiple of WEIGHT_ROWS_UNIT on: a matrix in themselves. */
static struct matmul_out lot_out(const struct model *model, const struct model_linear *linear, int64_t first, int64_t n, struct weight *w, float *y)
{
    const size_t unit = model->ops->weight_bytes(linear->w.dtype, WEIGHT_ROWS_UNIT, linear->w.n_cols);
    *w = linear->w;
    w->n_rows = n;
    w->packed = (const char *)linear->w.packed + (model->ops->weight_bytes(w->dtype, first + WEIGHT_ROWS_UNIT, w->n_cols) - unit);
    return (struct matmul_out){.w = w, .y = y, .ld_y = n, .bias = linear->bias ? linear->bias + first : NULL};
}

/* Columns first .. first + n_columns - 1 of ws->mid, of n rows whose norm is there. */
static int gate_columns(const struct model *model, const struct model_layer_weights *layer, int n, int64_t first, int64_t n_columns, struct model_workspace *ws)
{
    struct weight w[2];
    const struct matmul_out outs[] = {lot_out(model, &layer->gate, first, n_columns, &w[0], ws->gate), lot_out(model, &layer->up, first, n_columns, &w[1], ws->up)};
    const int r = model->ops->matmul(model->stream, ws->norm, n, model->config.dim, outs, 2);
    return r < 0 ? r : model->ops->silu_mul(model->stream, ws->gate, ws->up, n, n_columns, matmul_input_at(model->ops, ws->mid, first), model->config.ffn_dim);
}

/* x [n, dim] += MLP(norm(x)), n <= mlp_rows; still to be added up. */
static int add_mlp(const struct model *model, const struct model_layer_weights *w, float *x, int n, struct model_workspace *ws)
{
    const int64_t ffn = model->config.ffn_dim, columns = lot_columns(ffn, ws->lot / n);
    int r = norm_rows(model, w->ffn_norm, x, n, ws->norm);
    for (int64_t first = 0; r >= 0 && first < ffn; first += columns)
        r = gate_columns(model, w, n, first, min64(columns, ffn - first), ws);
    return r < 0 ? r : add_linear(model, &w->down, ws->mid, n, x);
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
