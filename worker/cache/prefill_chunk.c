/* One chunk of the prompt through one layer. Consistent prefill: a query attends the blocks before its own in the values that the pool gives back and its own block as
 * computed, so a block is coded the moment its last query is done, and what the code gives back replaces its K and V. Chunk borders need not be block borders. */
#include "worker/cache/engine_private.h"

/* A chunk's place. Rows count from the chunk's first token. */
struct chunk {
    int layer;
    int first, n;      /* positions */
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

    if (layer == e->model->config.n_layers - 1 && !seq->prompt_logprobs && !seq->plan.all_queries)
        c.rows_from = c.first + c.n == seq->plan.n_prompt ? c.n - 1 : c.n;
    c.x = bridge_rows(seq, layer, index);
    return c;
}

static int project(struct sequence *seq, const struct chunk *c)
{
    struct engine *e = seq->engine;
    const struct model *m = e->model;
    bf16_t *k = prefill_k(seq, c->layer), *v = prefill_v(seq, c->layer);
    int r = 0;

    for (int i = 0; i < c->n; i++) {
        const int64_t offset = (int64_t)(c->first + i) * m->config.head_dim;
        e->positions[i] = c->first + i;
        e->dst[i] = (struct kv_dst){.k = k + offset, .v = v + offset, .head_stride = prefill_head_stride(seq)};
    }
    if (c->layer == 0)
        r = model_embed(m, seq->tokens + c->first, c->n, c->x);
    if (r >= 0)
        r = model_rope_table(m, e->positions, c->n, e->rope);
    if (r >= 0)
        r = model_layer_qkv(m, c->layer, c->x, c->n, e->rope, e->dst, &e->ws);
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

/* Queries of rows from..end-1, which lie in one block. Their output goes where model_layer_out expects row rows_from first. */
static int attend_rows(struct sequence *seq, const struct chunk *c, int from, int end)
{
    const struct engine *e = seq->engine;
    const struct model *m = e->model;
    const int64_t row = (int64_t)m->config.n_heads * m->config.head_dim;
    const struct attn_prefill_params p = {
        .q = e->ws.q + from * row,
        .pos0 = c->first + from,
        .n_q = end - from,
        .k = prefill_k(seq, c->layer),
        .v = prefill_v(seq, c->layer),
        .head_stride = prefill_head_stride(seq),
        .bias = key_bias_of(&e->bias, c->layer),
        .n_heads = m->config.n_heads,
        .n_kv_heads = m->config.n_kv_heads,
        .head_dim = m->config.head_dim,
        .scale = m->config.attention_scale,
        .out = e->ws.attn_out + (from - c->rows_from) * row,
        .ret_ml = seq->plan.all_queries ? prefill_column_ml(seq) : NULL,
    };
    int r = m->ops->attn_prefill(m->stream, &p);
    if (r < 0 || !seq->plan.all_queries)
        return r;
    const struct column_sum_params sums = {.attn = &p, .sums = prefill_column_sums(seq, c->layer), .sum_stride = seq->plan.n_prompt};
    return m->ops->attn_column_sums(m->stream, &sums);
}

static int complete_block(struct sequence *seq, int layer, int block)
{
    const int64_t offset = (int64_t)block * BLOCK_TOKENS * seq->engine->model->config.head_dim;
    int r = sequence_block_complete(seq, layer, block, prefill_k(seq, layer) + offset, prefill_v(seq, layer) + offset, prefill_head_stride(seq));
    if (r >= 0 && !seq->out_of_range && layer == seq->engine->model->config.n_layers - 1)
        r = sequence_block_seal(seq, block);
    return r;
}

static int attend(struct sequence *seq, const struct chunk *c)
{
    int r = 0;
    for (int row = 0, end; r >= 0 && row < c->n; row = end) {
        const int block = (c->first + row) / BLOCK_TOKENS;
        const int block_end = (block + 1) * BLOCK_TOKENS - c->first;
        end = block_end < c->n ? block_end : c->n;
        const int from = row > c->rows_from ? row : c->rows_from;
        if (from < end)
            r = attend_rows(seq, c, from, end);
        if (r >= 0 && end == block_end)
            r = complete_block(seq, c->layer, block);
    }
    return r;
}

/* log-softmax of a row at the token that follows. `sample` gives the raw log-probability of the token it draws; a large bias makes it draw this one. */
static int token_logprob(const struct model *m, const float *logits, int32_t token, float *ret_logprob)
{
    const struct logit_bias bias = {.token = token, .bias = 1e30f};
    const struct sample_params p = {.top_p = 1, .repetition_penalty = 1, .bias = &bias, .n_bias = 1};
    struct sample_result result;
    int r = m->ops->sample(m->stream, logits, m->config.n_vocab, &p, &result);
    if (r < 0)
        return r;
    ASSERT(result.token == token || result.logprob != result.logprob);
    *ret_logprob = result.logprob;
    return 0;
}

static int prompt_logprobs(struct sequence *seq, const struct chunk *c)
{
    struct engine *e = seq->engine;
    const struct model *m = e->model;
    int r = 0;
    for (int row = 0; r >= 0 && row < c->n; row += e->n_logit_rows) {
        const int n = c->n - row < e->n_logit_rows ? c->n - row : e->n_logit_rows;
        r = model_logits(m, c->x + (int64_t)row * m->config.dim, n, &e->ws, e->logits);
        for (int i = 0; r >= 0 && i < n; i++) {
            const int pos = c->first + row + i;
            if (pos + 1 < seq->plan.n_prompt)
                r = token_logprob(m, e->logits + (int64_t)i * m->config.n_vocab, seq->tokens[pos + 1], &seq->prompt_logprobs[pos]);
        }
    }
    return r;
}

static int finish_last_layer(struct sequence *seq, const struct chunk *c)
{
    const struct model *m = seq->engine->model;
    int r = seq->prompt_logprobs ? prompt_logprobs(seq, c) : 0;
    if (r >= 0 && c->first + c->n == seq->plan.n_prompt)
        r = model_logits(m, c->x + (int64_t)(c->n - 1) * m->config.dim, 1, &seq->engine->ws, seq->logits);
    return r;
}

int prefill_chunk_run(struct sequence *seq, int layer, int index)
{
    const struct model *m = seq->engine->model;
    const struct chunk c = chunk_at(seq, layer, index);
    int r = bridge_begin(seq, layer, index);
    if (r >= 0)
        r = project(seq, &c);
    if (r >= 0)
        r = save_window(seq, &c);
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
