/* One chunk of the prompt through one layer. Consistent prefill: a query attends the blocks before its own in the values that the pool gives back and its own block as computed. So the
 * chunk's K and V go to a place of their own (engine->own); the blocks that the chunk completes are coded from there, and what the code gives back is the layer's K and V; then one call
 * attends all queries. Chunk borders need not be block borders: the first part of a block that is not complete waits in the layer's K and V for the next chunk. With exact values
 * everything is computed in place. */
#include "worker/cache/engine_private.h"

/* A chunk's place. Rows count from the chunk's first token. */
struct chunk {
    int layer;
    int first, n;      /* positions */
    int origin;        /* where the block of the first begins */
    int rows_from;     /* rows whose hidden state is still needed behind this layer: rows_from .. n-1 */
    float *x;          /* [n, dim] */
};

/* Behind the last layer only the prompt's last token is needed, unless log-probabilities of the prompt are wanted or the selector observes all queries, whose attention it
 * then needs. Its K and V are needed all the same. */
static struct chunk chunk_at(const struct sequence *seq, int layer, int index)
{
    const struct engine *e = seq->engine;
    const int offset = index * e->config.chunk, left = seq->prefill.n_new - offset;
    struct chunk c = {.layer = layer, .first = seq->n_cached + offset, .n = left < e->config.chunk ? left : e->config.chunk};

    c.origin = c.first / BLOCK_TOKENS * BLOCK_TOKENS;
    if (layer == e->model->config.n_layers - 1 && !seq->prompt_logprobs && !seq->plan.all_queries)
        c.rows_from = c.first + c.n == seq->plan.n_prompt ? c.n - 1 : c.n;
    c.x = bridge_rows(seq, layer, index);
    return c;
}

/* Where K and V of the chunk's tokens go. */
static void place_tokens(struct sequence *seq, const struct chunk *c)
{
    struct engine *e = seq->engine;
    const int d = e->model->config.head_dim, from = e->own ? c->origin : 0;
    bf16_t *k = e->own ? engine_own_k(e) : prefill_k(seq, c->layer), *v = e->own ? engine_own_v(e) : prefill_v(seq, c->layer);
    for (int i = 0; i < c->n; i++) {
        const int64_t offset = (int64_t)(c->first + i - from) * d;
        e->positions[i] = c->first + i;
        e->dst[i] = (struct kv_dst){.k = k + offset, .v = v + offset, .head_stride = e->own ? engine_own_stride(e) : prefill_head_stride(seq)};
    }
}

/* A prompt of one chunk needs one table for all layers. */
static int fill_rope(struct engine *e, const struct chunk *c)
{
    if (e->rope_first == c->first && e->rope_n == c->n)
        return 0;
    e->rope_n = 0;
    const int r = model_rope_table(e->model, e->positions, c->n, e->rope);
    if (r >= 0) {
        e->rope_first = c->first;
        e->rope_n = c->n;
    }
    return r;
}

static int project(struct sequence *seq, const struct chunk *c)
{
    struct engine *e = seq->engine;
    const struct model *m = e->model;
    int r = 0;

    place_tokens(seq, c);
    if (c->layer == 0)
        r = model_embed(m, seq->tokens + c->first, c->n, c->x);
    if (r >= 0)
        r = fill_rope(e, c);
    if (r >= 0)
        r = model_layer_qkv(m, c->layer, c->x, c->n, e->rope, e->dst, &e->ws);
    return r;
}

/* Exact rows of positions from..end-1 between engine->own and the layer's K and V. */
static int copy_own(struct sequence *seq, const struct chunk *c, int from, int end, bool to_layer)
{
    const struct engine *e = seq->engine;
    const struct model *m = e->model;
    const int d = m->config.head_dim;
    const size_t bytes = (size_t)(end - from) * (size_t)d * sizeof(bf16_t);
    int r = 0;
    if (!e->own || from >= end)
        return 0;
    for (int h = 0; r >= 0 && h < m->config.n_kv_heads; h++) {
        const int64_t own = h * engine_own_stride(e) + (int64_t)(from - c->origin) * d, at = h * prefill_head_stride(seq) + (int64_t)from * d;
        bf16_t *own_k = engine_own_k(e) + own, *own_v = engine_own_v(e) + own, *k = prefill_k(seq, c->layer) + at, *v = prefill_v(seq, c->layer) + at;
        r = m->dev->copy(m->stream, to_layer ? k : own_k, to_layer ? own_k : k, bytes);
        if (r >= 0)
            r = m->dev->copy(m->stream, to_layer ? v : own_v, to_layer ? own_v : v, bytes);
    }
    return r;
}

/* The selector's observation window may span chunks. */
static int save_window(struct sequence *seq, const struct chunk *c)
{
    const struct model *m = seq->engine->model;
    const int64_t row = (int64_t)m->config.n_heads * m->config.head_dim;
    const int window_first = seq->plan.n_prompt - seq->plan.n_window;
    const int from = c->first > window_first ? c->first : window_first, end = c->first + c->n;
    if (from >= end)
        return 0;
    return m->dev->copy(m->stream, prefill_window(seq, c->layer) + (from - window_first) * row, seq->engine->ws.q + (from - c->first) * row,
                        (size_t)((end - from) * row) * sizeof(float));
}

static int n_completed(const struct chunk *c)
{
    return (c->first + c->n - c->origin) / BLOCK_TOKENS;
}

/* The blocks that the chunk completes become the layer's K and V; what is left waits there for the next chunk, or for the end of the layer. */
static int complete_blocks(struct sequence *seq, const struct chunk *c)
{
    const int n = n_completed(c), end = c->first + c->n, rest = c->origin + n * BLOCK_TOKENS;
    int r = copy_own(seq, c, c->origin, c->first, false);
    if (r >= 0)
        r = sequence_blocks_complete(seq, c->layer, c->origin / BLOCK_TOKENS, n);
    if (r >= 0)
        r = copy_own(seq, c, rest > c->first ? rest : c->first, end, true);
    return r;
}

/* Attention of rows rows_from .. n-1. */
static struct attn_prefill_params attention_of(const struct sequence *seq, const struct chunk *c)
{
    const struct engine *e = seq->engine;
    const struct model *m = e->model;
    const int64_t row = (int64_t)m->config.n_heads * m->config.head_dim;
    const int pos0 = c->first + c->rows_from;
    const int64_t own = (int64_t)(pos0 / BLOCK_TOKENS * BLOCK_TOKENS - c->origin) * m->config.head_dim;
    return (struct attn_prefill_params){
        .q = e->ws.q + c->rows_from * row,
        .pos0 = pos0,
        .n_q = c->n - c->rows_from,
        .k = prefill_k(seq, c->layer),
        .v = prefill_v(seq, c->layer),
        .head_stride = prefill_head_stride(seq),
        .own_k = e->own ? engine_own_k(e) + own : NULL,
        .own_v = e->own ? engine_own_v(e) + own : NULL,
        .own_stride = engine_own_stride(e),
        .bias = key_bias_of(&e->bias, c->layer),
        .n_heads = m->config.n_heads,
        .n_kv_heads = m->config.n_kv_heads,
        .head_dim = m->config.head_dim,
        .scale = m->config.attention_scale,
        .out = e->ws.attn_out,
        .ret_ml = seq->plan.all_queries ? prefill_column_ml(seq) : NULL,
    };
}

/* Column sums take the queries block by block. */
static int add_columns(struct sequence *seq, const struct chunk *c, const struct attn_prefill_params *all)
{
    const struct model *m = seq->engine->model;
    struct attn_prefill_params p = *all;
    int r = 0;
    for (int done = 0; r >= 0 && done < all->n_q; done += p.n_q) {
        const int64_t pos = all->pos0 + done, own = (pos / BLOCK_TOKENS - all->pos0 / BLOCK_TOKENS) * BLOCK_TOKENS * m->config.head_dim;
        const int in_block = (int)(BLOCK_TOKENS - pos % BLOCK_TOKENS), left = all->n_q - done;
        p.q = all->q + (int64_t)done * p.n_heads * p.head_dim;
        p.pos0 = pos;
        p.n_q = in_block < left ? in_block : left;
        p.own_k = all->own_k ? all->own_k + own : NULL;
        p.own_v = all->own_v ? all->own_v + own : NULL;
        p.ret_ml = all->ret_ml + (int64_t)done * p.n_heads * 2;
        const struct column_sum_params sums = {.attn = &p, .sums = prefill_column_sums(seq, c->layer), .sum_stride = seq->plan.n_prompt};
        r = m->ops->attn_column_sums(m->stream, &sums);
    }
    return r;
}

static int attend(struct sequence *seq, const struct chunk *c)
{
    const struct model *m = seq->engine->model;
    if (c->rows_from == c->n)
        return 0;
    const struct attn_prefill_params p = attention_of(seq, c);
    const int r = m->ops->attn_prefill(m->stream, &p);
    return r >= 0 && seq->plan.all_queries ? add_columns(seq, c, &p) : r;
}

/* log-softmax of n rows of logits at the tokens that follow them. */
static int token_logprobs(const struct model *m, const float *logits, const int32_t *tokens, int n, float *ret_logprobs)
{
    enum { ROWS = 16 };
    struct sample_row rows[ROWS];
    for (int first = 0; first < n; first += ROWS) {
        const int n_rows = n - first < ROWS ? n - first : ROWS;
        for (int i = 0; i < n_rows; i++)
            rows[i] = (struct sample_row){.logits = logits + (int64_t)(first + i) * m->config.n_vocab,
                                          .params = {.top_p = 1, .repetition_penalty = 1, .given = &tokens[first + i]}};
        int r = m->ops->sample(m->stream, rows, n_rows, m->config.n_vocab);
        for (int i = 0; r >= 0 && i < n_rows; i++) {
            r = rows[i].status;
            ret_logprobs[first + i] = rows[i].result.logprob;
        }
        if (r < 0)
            return r;
    }
    return 0;
}

static int prompt_logprobs(struct sequence *seq, const struct chunk *c)
{
    struct engine *e = seq->engine;
    const struct model *m = e->model;
    int r = 0;
    for (int row = 0; r >= 0 && row < c->n; row += e->n_logit_rows) {
        const int n = c->n - row < e->n_logit_rows ? c->n - row : e->n_logit_rows, pos = c->first + row;
        const int n_followed = seq->plan.n_prompt - 1 - pos < n ? seq->plan.n_prompt - 1 - pos : n; /* the last one is not */
        r = model_logits(m, c->x + (int64_t)row * m->config.dim, n, &e->ws, e->logits);
        if (r >= 0)
            r = token_logprobs(m, e->logits, seq->tokens + pos + 1, n_followed, seq->prompt_logprobs + pos);
    }
    return r;
}

/* Logits, and the blocks that are complete in all layers, which nobody may find before they are checked. What does not pass ends with the layer. */
static int finish_last_layer(struct sequence *seq, const struct chunk *c)
{
    const struct model *m = seq->engine->model;
    int r = seq->prompt_logprobs ? prompt_logprobs(seq, c) : 0;
    if (r >= 0 && c->first + c->n == seq->plan.n_prompt)
        r = model_logits(m, c->x + (int64_t)(c->n - 1) * m->config.dim, 1, &seq->engine->ws, seq->logits);
    return r < 0 ? r : sequence_blocks_finish(seq, c->origin / BLOCK_TOKENS, n_completed(c));
}

int prefill_chunk_run(struct sequence *seq, int layer, int index)
{
    const struct model *m = seq->engine->model;
    const struct chunk c = chunk_at(seq, layer, index);
    int r = bridge_begin(seq, layer, index);
    if (r >= 0)
        r = sequence_blocks_load(seq, layer, c.origin / BLOCK_TOKENS, n_completed(&c));
    if (r >= 0)
        r = project(seq, &c);
    if (r >= 0)
        r = save_window(seq, &c);
    if (r >= 0)
        r = complete_blocks(seq, &c);
    if (r >= 0)
        r = attend(seq, &c);
    if (r >= 0 && c.rows_from < c.n)
        r = model_layer_out(m, layer, c.x + (int64_t)c.rows_from * m->config.dim, c.n - c.rows_from, &seq->engine->ws);
    if (r >= 0 && layer == m->config.n_layers - 1)
        r = finish_last_layer(seq, &c);
    if (r >= 0)
        r = bridge_end(seq, layer, index);
    return r >= 0 ? prefix_load_ahead(seq, layer) : r;
}
