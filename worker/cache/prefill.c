/* The schedule of a prompt: which unit of work comes next. Layer-major (TideKV): one layer over the whole prompt before the next one starts, so that one layer's full KV is
 * resident. Chunk-major, the baseline: one chunk through all layers, every layer's KV resident, selection at the end. The units themselves are the same, and so
 * are the results.
 *
 *   load     some cached blocks of a layer are decoded into its full KV (prefix_load.c)
 *   chunk    one chunk of the tokens to compute goes through a layer (prefill_chunk.c)
 *   select   the layer is complete: its kept entries and recent rows move to the fast tier */
#include "worker/cache/engine_private.h"
#include <errno.h>

enum unit_kind { UNIT_LOAD, UNIT_CHUNK, UNIT_SELECT };
struct unit {
    enum unit_kind kind;
    int layer, index;
};

void prefill_init(struct sequence *seq)
{
    struct prefill *f = &seq->prefill;
    const int n_layers = seq->engine->model->config.n_layers;
    const int cached_blocks = seq->n_cached / BLOCK_TOKENS;

    f->n_new = seq->plan.n_prompt - seq->n_cached;
    f->n_loads = (cached_blocks + PREFIX_LOAD_BLOCKS - 1) / PREFIX_LOAD_BLOCKS;
    f->n_chunks = sequence_plan_chunks(seq->engine, f->n_new);
    f->n_units = n_layers * (f->n_loads + f->n_chunks + 1);
}

static struct unit unit_at(const struct sequence *seq, int i)
{
    const struct prefill *f = &seq->prefill;
    const int n_layers = seq->engine->model->config.n_layers;
    if (seq->engine->config.order == PREFILL_LAYER_MAJOR) {
        const int per_layer = f->n_loads + f->n_chunks + 1, layer = i / per_layer, j = i % per_layer;
        if (j < f->n_loads)
            return (struct unit){UNIT_LOAD, layer, j};
        if (j < f->n_loads + f->n_chunks)
            return (struct unit){UNIT_CHUNK, layer, j - f->n_loads};
        return (struct unit){UNIT_SELECT, layer, 0};
    }
    if (i < n_layers * f->n_loads)
        return (struct unit){UNIT_LOAD, i / f->n_loads, i % f->n_loads};
    i -= n_layers * f->n_loads;
    if (i < n_layers * f->n_chunks)
        return (struct unit){UNIT_CHUNK, i % n_layers, i / n_layers};
    return (struct unit){UNIT_SELECT, i - n_layers * f->n_chunks, 0};
}

static int run_unit(struct sequence *seq, struct unit unit)
{
    switch (unit.kind) {
    case UNIT_LOAD:
        return prefix_load_unit(seq, unit.layer, unit.index);
    case UNIT_CHUNK:
        return prefill_chunk_run(seq, unit.layer, unit.index);
    case UNIT_SELECT:
        return selection_run(seq, unit.layer);
    }
    return -EINVAL;
}

static int finish(struct sequence *seq)
{
    int r = block_writes_finish(seq);
    sequence_prefill_memory_free(seq);
    sequence_commit(seq, sequence_plan_decode_bytes(seq->engine, &seq->plan) + sequence_blocks_bytes(seq, false), seq->n_indices);
    seq->n_tokens = seq->plan.n_prompt;
    if (r >= 0)
        r = answer_blocks_restore(seq);
    seq->phase = r < 0 ? SEQUENCE_FAILED : SEQUENCE_DECODE;
    return r;
}

/* No layer is closed over keys or values that its blocks cannot hold. A rank sees those of its own heads alone, and the others wait for it in every layer: so it goes on until here, where they
 * hear of it. */
static int check_range(struct sequence *seq, struct unit unit)
{
    if (unit.kind != UNIT_SELECT)
        return 0;
    int r = sequence_blocks_check(seq);
    if (r < 0 && r != -ERANGE)
        return engine_lone_error(seq->engine, r);
    int32_t result = r;
    r = engine_agree(seq->engine, &result, 1);
    return r < 0 ? r : result;
}

int sequence_prefill_step(struct sequence *seq)
{
    struct prefill *f = &seq->prefill;
    if (seq->phase != SEQUENCE_PREFILL)
        return seq->phase == SEQUENCE_DECODE ? 0 : -EINVAL;
    const struct unit unit = unit_at(seq, f->unit);
    int r = engine_lone_error(seq->engine, block_writes_poll(seq->engine));
    if (r >= 0)
        r = check_range(seq, unit);
    if (r >= 0)
        r = engine_lone_error(seq->engine, run_unit(seq, unit));
    if (r < 0) {
        seq->phase = SEQUENCE_FAILED;
        return r;
    }
    f->unit++;
    if (f->unit < f->n_units)
        return 1;
    return engine_lone_error(seq->engine, finish(seq));
}
