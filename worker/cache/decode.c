/* One decode step over a batch: each sequence's new token attends its kept and recent rows and the slow pages that its query finds. Nothing here waits for the store.
 *
 * From the embedding to the logits it is one step of the device (device_ops.step_begin), which may replay what an earlier one has submitted. So everything in it that is a sequence's own travels
 * in arguments, the logits go to the engine's rows, and what lies before and after it is submitted each time. The ops of a step may be called several times: they change nothing of the host's. */
#include "worker/cache/engine_private.h"
#include <errno.h>

static int check_batch(struct engine *e, struct sequence **sequences, const int32_t *tokens, int n)
{
    if (n < 1 || n > e->config.max_batch)
        return -EINVAL;
    int r = 0, i;
    for (i = 0; i < n && r >= 0; i++) {
        struct sequence *s = sequences[i];
        if (s->engine != e || s->in_step || s->phase != SEQUENCE_DECODE || s->n_tokens >= s->plan.n_total || tokens[i] < 0 ||
            tokens[i] >= e->model->config.n_vocab)
            r = -EINVAL;
        else
            s->in_step = true;
    }
    for (int j = 0; j < (r < 0 ? i - 1 : i); j++)
        sequences[j]->in_step = false;
    return r;
}

static int project(struct engine *e, struct sequence **sequences, int layer, int n)
{
    const struct model *m = e->model;
    for (int i = 0; i < n; i++) {
        const struct sequence *s = sequences[i];
        const struct fast_rows rows = fast_tier_rows(s, layer);
        const int64_t offset = (int64_t)(s->n_tokens - s->recent_first) * m->config.head_dim;
        e->dst[i] = (struct kv_dst){.k = rows.recent_k + offset, .v = rows.recent_v + offset, .head_stride = rows.recent_stride};
    }
    return model_layer_qkv(m, layer, e->hidden, n, e->rope, e->dst, &e->ws);
}

static void fill_item(struct engine *e, const struct sequence *s, int layer, int kv_head, int i_seq, struct attn_decode_item *item)
{
    const struct model_config *c = &e->model->config;
    const int group = c->n_heads / c->n_kv_heads;
    const int64_t q = ((int64_t)i_seq * c->n_heads + (int64_t)kv_head * group) * c->head_dim;
    const struct fast_rows rows = fast_tier_rows(s, layer);
    const struct kept_rows kept = sequence_kept(s, layer, kv_head);
    const int32_t *positions = s->kept_device ? s->kept_device + s->layers[layer].first + kept.first : NULL;
    const int64_t first = (int64_t)kept.first * c->head_dim, recent = kv_head * rows.recent_stride;

    *item = (struct attn_decode_item){
        .q = e->ws.q + q,
        .out = matmul_input_at(e->model->ops, e->ws.attn_out, q),
        .rows = {{.k = rows.kept_k + first, .v = rows.kept_v + first, .n = kept.n, .positions = positions},
                 {.k = rows.recent_k + recent, .v = rows.recent_v + recent, .n = s->n_tokens + 1 - s->recent_first, .pos0 = s->recent_first}},
        .slow = slow_tier_pages(s, layer, kv_head),
        .summaries = sequence_summaries(s, layer, kv_head),
        .fetch_pages = e->fetch_pages,
    };
    page_traffic_item(e, i_seq, kv_head, item);
}

static int attend(struct engine *e, struct sequence **sequences, int layer, int n)
{
    const struct model *m = e->model;
    const int n_kv_heads = m->config.n_kv_heads;
    for (int i = 0; i < n; i++)
        for (int h = 0; h < n_kv_heads; h++)
            fill_item(e, sequences[i], layer, h, i, &e->items[i * n_kv_heads + h]);
    struct attn_decode_params p = {
        .items = e->items,
        .n_items = n * n_kv_heads,
        .layout = &e->layout,
        .group = m->config.n_heads / n_kv_heads,
        .head_dim = m->config.head_dim,
        .scale = m->config.attention_scale,
        .bias = key_bias_of(&e->bias, layer),
        .scorer = e->config.scorer->kernel,
        .fetch_blocks = e->config.fetch_unit == BLOCK_TOKENS,
        .page_cache = e->pages.cache,
    };
    int r = m->ops->attn_decode(m->stream, &p);
    if (r < 0)
        return r;
    page_traffic_layer(e, sequences, n);
    return 0;
}

static int run_layers(struct engine *e, struct sequence **sequences, const int32_t *tokens, int n)
{
    const struct model *m = e->model;
    for (int i = 0; i < n; i++)
        e->positions[i] = sequences[i]->n_tokens;
    int r = model_embed(m, tokens, n, e->hidden);
    if (r >= 0)
        r = model_rope_table(m, e->positions, n, e->rope);
    e->rope_n = 0;
    for (int layer = 0; r >= 0 && layer < m->config.n_layers; layer++) {
        r = project(e, sequences, layer, n);
        if (r >= 0)
            r = attend(e, sequences, layer, n);
        if (r >= 0)
            r = model_layer_out(m, layer, e->hidden, n, &e->ws);
    }
    return r < 0 ? r : model_logits(m, e->hidden, n, &e->ws, e->logits);
}

static int run_step(struct engine *e, struct sequence **sequences, const int32_t *tokens, int n)
{
    const struct model *m = e->model;
    int r = page_traffic_step(e, n);
    if (r >= 0)
        r = m->dev->step_begin(m->stream);
    if (r < 0)
        return r;
    do
        r = m->dev->step_end(m->stream, run_layers(e, sequences, tokens, n));
    while (r == 1);
    return r;
}

static int write_logits(struct engine *e, struct sequence **sequences, int n)
{
    const struct model *m = e->model;
    const int n_vocab = m->config.n_vocab;
    int r = 0;
    for (int i = 0; r >= 0 && i < n; i++)
        r = m->dev->copy(m->stream, sequences[i]->logits, e->logits + (int64_t)i * n_vocab, (size_t)n_vocab * sizeof(float));
    return r;
}

/* Ranks count tokens alike, so they know alike when there is something to agree on. */
static bool completes_block(struct sequence *const *sequences, int n)
{
    for (int i = 0; i < n; i++)
        if ((sequences[i]->n_tokens + 1) % BLOCK_TOKENS == 0)
            return true;
    return false;
}

static int prepare(struct engine *e, struct sequence **sequences, int n, bool completes)
{
    int r = 0;
    for (int i = 0; r >= 0 && i < n; i++)
        r = answer_block_prepare(sequences[i]);
    return completes ? engine_agree_result(e, r, NULL) : r;
}

/* The tokens belong to their sequences. results[i]: what became of the block that it may have completed. */
static int append(struct engine *e, struct sequence **sequences, const int32_t *tokens, int n, bool completes, int32_t *results)
{
    for (int i = 0; i < n; i++) {
        sequences[i]->tokens[sequences[i]->n_tokens++] = tokens[i];
        results[i] = answer_block_complete(sequences[i]);
    }
    return completes ? engine_agree(e, results, n) : 0;
}

static int end_step(struct sequence *seq, int result)
{
    if (result == -ERANGE) { /* its own values, nobody else's concern */
        seq->phase = SEQUENCE_FAILED;
        return 0;
    }
    const int r = result < 0 ? result : fast_tier_leave(seq);
    if (r >= 0)
        block_move_retry(seq);
    return r;
}

int engine_decode(struct engine *e, struct sequence **sequences, const int32_t *tokens, int n)
{
    int32_t *const results = e->positions; /* which the layers no longer need by then */
    int r = check_batch(e, sequences, tokens, n);
    if (r < 0)
        return r;
    const bool completes = completes_block(sequences, n);
    r = prepare(e, sequences, n, completes);
    if (r == -ENOMEM)
        return r;
    if (r >= 0)
        r = run_step(e, sequences, tokens, n);
    if (r >= 0)
        r = write_logits(e, sequences, n);
    if (r >= 0)
        r = page_traffic_end(e, sequences, n);
    if (r >= 0)
        r = append(e, sequences, tokens, n, completes, results);
    for (int i = 0; r >= 0 && i < n; i++)
        r = end_step(sequences[i], results[i]);
    for (int i = 0; r < 0 && i < n; i++)
        sequences[i]->phase = SEQUENCE_FAILED;
    return engine_lone_error(e, r);
}
