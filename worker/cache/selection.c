/* The end of a layer: its kept entries are chosen from the whole prompt, gathered with the recent rows into the fast tier, and masked out of the slow pages. After this the layer's
 * full KV is not needed any more. */
#include "worker/cache/engine_private.h"
#include <string.h>

/* The selector's choice as it gives it: dense, head after head. */
static int select_free(struct sequence *seq, int layer, int n_free, int32_t *ret_n, int32_t *ret_indices)
{
    const struct engine *e = seq->engine;
    const struct model *m = e->model;
    const struct sequence_plan *p = &seq->plan;
    const struct selector_input in = {
        .dev = m->dev,
        .ops = m->ops,
        .stream = m->stream,
        .q = p->n_window ? prefill_window(seq, layer) : NULL,
        .n_window = p->n_window,
        .column_sums = p->all_queries ? prefill_column_sums(seq, layer) : NULL,
        .k = prefill_k(seq, layer),
        .head_stride = prefill_head_stride(seq),
        .n_keys = p->n_prompt,
        .n_heads = m->config.n_heads,
        .n_kv_heads = m->config.n_kv_heads,
        .head_dim = m->config.head_dim,
        .scale = m->config.attention_scale,
        .bias = key_bias_of(&e->bias, layer),
        .first = p->free_first,
        .last = p->free_last,
        .n_free = n_free,
        .ranks = e->ranks,
        .scratch = e->ws.shared,
    };
    return e->config.selector->select(&in, ret_n, ret_indices);
}

/* Turns the free rows of each head, which `head_first` holds as counts, into first rows; returns how many there are. */
static int32_t place_heads(int32_t *head_first, int n_kv_heads, int n_mandatory)
{
    int32_t first = 0, n_free_all = 0;
    for (int h = 0; h <= n_kv_heads; h++) {
        const int32_t n_free = h < n_kv_heads ? head_first[h] : 0;
        head_first[h] = first;
        first += n_free + n_mandatory;
        n_free_all += n_free;
    }
    return n_free_all;
}

/* Sinks, the selector's choice, the newest tokens below the recent window: ascending, since the three ranges are. */
static int fill_kept(struct sequence *seq, int layer)
{
    const struct sequence_plan *p = &seq->plan;
    const int n_kv_heads = seq->engine->model->config.n_kv_heads, n_mandatory = p->n_sinks + p->n_tail;
    const int n_free = p->n_free ? sequence_plan_layer_free(seq->engine, p, layer) : 0;
    int32_t *rows = sequence_layer_kept(seq, layer), *first = sequence_head_first(seq, layer);

    memset(first, 0, (size_t)(n_kv_heads + 1) * sizeof(*first));
    int r = n_free ? select_free(seq, layer, n_free, first, rows) : 0;
    if (r < 0)
        return r;
    int32_t from = place_heads(first, n_kv_heads, n_mandatory);
    ASSERT(from + n_kv_heads * n_mandatory <= seq->layers[layer].n_rows);
    /* Spread from the last head to the first, so that no head's choice is overwritten before it is moved. */
    for (int h = n_kv_heads - 1; h >= 0; h--) {
        int32_t *row = rows + first[h];
        const int32_t n = first[h + 1] - first[h] - n_mandatory;
        from -= n;
        memmove(row + p->n_sinks, rows + from, (size_t)n * sizeof(*row));
        for (int i = 0; i < p->n_sinks; i++)
            row[i] = i;
        for (int i = 0; i < p->n_tail; i++)
            row[p->n_sinks + n + i] = p->tail_first + i;
    }
    return 0;
}

int selection_run(struct sequence *seq, int layer)
{
    const struct model *m = seq->engine->model;
    int r = fill_kept(seq, layer);
    const size_t n_rows = (size_t)sequence_head_first(seq, layer)[m->config.n_kv_heads];
    seq->n_kept_rows += (int64_t)n_rows;
    if (r >= 0 && n_rows)
        r = m->dev->copy(m->stream, seq->prefill.indices, sequence_layer_kept(seq, layer), n_rows * sizeof(int32_t));
    if (r >= 0 && seq->kept_device && n_rows)
        r = m->dev->copy(m->stream, seq->kept_device + seq->layers[layer].first, seq->prefill.indices, n_rows * sizeof(int32_t));
    if (r >= 0)
        r = fast_tier_fill(seq, layer, seq->prefill.indices, prefill_k(seq, layer), prefill_v(seq, layer), prefill_head_stride(seq));
    return r < 0 ? r : slow_tier_build(seq, layer);
}
