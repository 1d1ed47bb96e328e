/* The end of a layer: its kept entries are chosen from the whole prompt, gathered with the recent rows into the fast tier, and masked out of the slow pages. After this the layer's
 * full KV is not needed any more. */
#include "worker/cache/engine_private.h"
#include <string.h>

static int select_free(struct sequence *seq, int layer, int32_t *ret_indices)
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
        .k = prefill_k(seq, layer),
        .head_stride = prefill_head_stride(seq),
        .n_keys = p->n_prompt,
        .n_heads = m->config.n_heads,
        .n_kv_heads = m->config.n_kv_heads,
        .head_dim = m->config.head_dim,
        .scale = m->config.attention_scale,
        .first = p->free_first,
        .last = p->free_last,
        .n_free = p->n_free,
        .scratch = seq->prefill.scratch,
    };
    return e->config.selector->select(&in, ret_indices);
}

/* Sinks, the selector's choice, the newest tokens below the recent window: ascending, since the three ranges are. */
static int fill_kept(struct sequence *seq, int layer)
{
    const struct sequence_plan *p = &seq->plan;
    const int n_kv_heads = seq->engine->model->config.n_kv_heads;
    /* The selector writes dense rows of n_free; they are spread from the last head to the first, so that none is overwritten before it is moved. */
    int32_t *rows = sequence_kept_row(seq, layer, 0);
    int r = p->n_free ? select_free(seq, layer, rows) : 0;
    if (r < 0)
        return r;
    for (int h = n_kv_heads - 1; h >= 0; h--) {
        int32_t *row = sequence_kept_row(seq, layer, h);
        memmove(row + p->n_sinks, rows + (int64_t)h * p->n_free, (size_t)p->n_free * sizeof(*row));
        for (int i = 0; i < p->n_sinks; i++)
            row[i] = i;
        for (int i = 0; i < p->n_tail; i++)
            row[p->n_sinks + p->n_free + i] = p->tail_first + i;
    }
    return 0;
}

int selection_run(struct sequence *seq, int layer)
{
    const struct model *m = seq->engine->model;
    const struct sequence_plan *p = &seq->plan;
    const int n_kv_heads = m->config.n_kv_heads;
    int r = fill_kept(seq, layer);
    if (r >= 0 && p->n_kept)
        r = m->dev->copy(m->stream, seq->prefill.indices, sequence_kept_row(seq, layer, 0), (size_t)n_kv_heads * (size_t)p->n_kept * sizeof(int32_t));
    if (r >= 0)
        r = fast_tier_fill(seq, layer, seq->prefill.indices, prefill_k(seq, layer), prefill_v(seq, layer), prefill_head_stride(seq));
    for (int h = 0; r >= 0 && h < n_kv_heads; h++)
        page_list_build(seq, layer, h, sequence_kept_row(seq, layer, h));
    return r;
}
