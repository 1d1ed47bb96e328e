/* Admission is arithmetic: every byte that a sequence can ever hold on the device, from n_prompt, max_new and the configuration. The same numbers size the
 * allocations, so that they cannot drift apart. */
#include "worker/cache/engine_private.h"
#include <errno.h>
#include <string.h>

static inline int max_int(int a, int b)
{
    return a > b ? a : b;
}

/* Sinks and the newest prompt tokens count inside the budget. Those of them that the recent window holds anyway need no row: each position is in one tier. */
static void plan_kept(struct sequence_plan *p, int budget)
{
    const int r0 = p->recent_first;
    const int sinks = min_int(min_int(SELECT_SINKS, budget), p->n_prompt);
    const int newest = min_int(min_int(SELECT_MANDATORY, budget - sinks), p->n_prompt - sinks);
    const int newest_first = p->n_prompt - newest;

    p->n_sinks = min_int(sinks, r0);
    p->tail_first = min_int(newest_first, r0);
    p->n_tail = r0 - p->tail_first;
    p->free_first = p->n_sinks;
    p->free_last = max_int(p->n_sinks, p->tail_first);
    p->n_free = min_int(budget - sinks - newest, p->free_last - p->free_first);
    p->n_kept = p->n_sinks + p->n_free + p->n_tail;
}

int sequence_plan_layer_free(const struct engine *engine, const struct sequence_plan *plan, int layer)
{
    const struct selector_budget budget = {
        .n_layers = engine->model->config.n_layers,
        .n_keys = plan->n_prompt,
        .n_candidates = plan->free_last - plan->free_first,
        .n_free = plan->n_free,
    };
    return (int)engine->config.selector->layer_free(&budget, layer);
}

static struct selector_shape shape_of(const struct engine *engine, const struct sequence_plan *plan, int n_free)
{
    return (struct selector_shape){
        .n_kv_heads = engine->model->config.n_kv_heads,
        .n_keys = plan->n_prompt,
        .n_candidates = plan->free_last - plan->free_first,
        .n_free = n_free,
        .ranks = engine->ranks,
    };
}

int sequence_plan_layer_rows(const struct engine *engine, const struct sequence_plan *plan, int layer)
{
    const int n_free = plan->n_free ? sequence_plan_layer_free(engine, plan, layer) : 0;
    const struct selector_shape shape = shape_of(engine, plan, n_free);
    return engine->model->config.n_kv_heads * (plan->n_sinks + plan->n_tail) + (n_free ? (int)engine->config.selector->rows_max(&shape) : 0);
}

/* Returns the largest layer_free. */
static int plan_layers(const struct engine *engine, struct sequence_plan *p)
{
    int most_free = 0;
    for (int layer = 0; layer < engine->model->config.n_layers; layer++) {
        const int n_rows = sequence_plan_layer_rows(engine, p, layer);
        p->kept_rows += n_rows;
        p->layer_rows_max = max_int(p->layer_rows_max, n_rows);
        most_free = max_int(most_free, p->n_free ? sequence_plan_layer_free(engine, p, layer) : 0);
    }
    return most_free;
}

static void plan_bytes(const struct engine *engine, struct sequence_plan *p, int most_free)
{
    const struct model_config *c = &engine->model->config;
    const size_t head_row = 2 * (size_t)c->head_dim * sizeof(bf16_t), row = (size_t)c->n_kv_heads * head_row; /* K and V of one token in one layer */
    const struct selector_shape shape = shape_of(engine, p, most_free);

    p->fast_bytes = round64((size_t)p->kept_rows * head_row + (size_t)c->n_layers * (size_t)p->recent_rows * row);
    p->kept_bytes = c->qkv_bias ? round64((size_t)p->kept_rows * sizeof(int32_t)) : 0;
    p->table_bytes = round64((size_t)(p->n_pages / BLOCK_SUBPAGES) * sizeof(struct kv_block));
    p->masks_bytes = round64((size_t)c->n_layers * (size_t)c->n_kv_heads * (size_t)p->n_pages * sizeof(uint16_t));
    p->summaries_bytes = round64((size_t)c->n_layers * (size_t)c->n_kv_heads * (size_t)p->n_pages * engine->summary_bytes);
    p->active_kv_bytes = round64((size_t)p->n_resident * (size_t)p->active_rows * row);
    p->window_bytes = round64((size_t)p->n_resident * (size_t)p->n_window * (size_t)c->n_heads * (size_t)c->head_dim * sizeof(float));
    if (p->all_queries)
        p->columns_bytes = round64(((size_t)p->n_resident * (size_t)c->n_kv_heads * (size_t)p->n_prompt + 2 * (size_t)min_int(engine->config.chunk, p->n_prompt) * (size_t)c->n_heads) * sizeof(float));
    p->selector_bytes = p->n_free ? round64(engine->config.selector->scratch_bytes(&shape)) : 0;
    p->indices_bytes = round64((size_t)p->layer_rows_max * sizeof(int32_t));
    p->bad_bytes = round64(sizeof(int32_t));
    p->logits_bytes = round64((size_t)c->n_vocab * sizeof(float));
    for (int first = 0; first < 2; first++)
        p->block_bytes[first] = round64(engine->layout.block_bytes[first]);
}

/* A GPU's library builds a plan of attention for each distance between heads and takes its time for it: so from 2,048 tokens on there are eight of them to a doubling. */
static int active_rows(const struct engine *engine, int n_prompt)
{
    int step = 1;
    if (engine->sizes.staging == 0 || n_prompt < 2048) /* the host's memory, or little of it */
        return n_prompt;
    while (n_prompt / step >= 16)
        step *= 2;
    return n_prompt / step * step + (n_prompt % step ? step : 0);
}

void sequence_plan_init(const struct engine *engine, int n_prompt, int max_new, struct sequence_plan *ret_plan)
{
    const struct engine_config *config = &engine->config;
    struct sequence_plan p = {.n_prompt = n_prompt, .n_total = n_prompt + max_new};
    const int last_recent_first = engine_recent_first(engine, n_prompt, p.n_total);

    p.recent_first = engine_recent_first(engine, n_prompt, n_prompt);
    p.recent_rows = config->answer_stays ? p.n_total - p.recent_first : min_int(config->recent + BLOCK_TOKENS, p.n_total);
    plan_kept(&p, config->budget);
    const int most_free = plan_layers(engine, &p);
    p.n_window = p.n_free ? min_int(config->selector->n_window, n_prompt) : 0;
    p.all_queries = p.n_free && config->selector->all_queries;
    p.n_prompt_blocks = n_prompt / BLOCK_TOKENS;
    p.n_blocks = config->answer_stays ? p.n_prompt_blocks : p.n_total / BLOCK_TOKENS;
    p.n_pages = last_recent_first / SUBPAGE_TOKENS;
    p.active_rows = active_rows(engine, n_prompt);
    p.n_resident = config->order == PREFILL_LAYER_MAJOR ? 1 : engine->model->config.n_layers;
    p.bridge_on_host = engine->bridge == BRIDGE_HOST;
    p.stage_loads = true;
    plan_bytes(engine, &p, most_free);
    *ret_plan = p;
}

int sequence_plan_chunks(const struct engine *engine, int n_new)
{
    return n_new / engine->config.chunk + (n_new % engine->config.chunk != 0);
}

/* With as few chunks as the device would hold anyway nothing is saved. */
static bool on_host(const struct engine *engine, const struct sequence_plan *plan, int n_new)
{
    return plan->bridge_on_host && sequence_plan_chunks(engine, n_new) > BRIDGE_CHUNKS;
}

size_t sequence_plan_bridge_bytes(const struct engine *engine, const struct sequence_plan *plan, int n_new)
{
    int rows = n_new;
    if (engine->config.order == PREFILL_CHUNK_MAJOR)
        rows = min_int(n_new, engine->config.chunk);
    else if (on_host(engine, plan, n_new))
        rows = BRIDGE_CHUNKS * engine->config.chunk;
    return round64((size_t)rows * (size_t)engine->model->config.dim * sizeof(float));
}

size_t sequence_plan_host_bridge_bytes(const struct engine *engine, const struct sequence_plan *plan, int n_new)
{
    return on_host(engine, plan, n_new) ? (size_t)n_new * (size_t)engine->model->config.dim * sizeof(float) : 0;
}

size_t sequence_plan_load_bytes(const struct engine *engine, const struct sequence_plan *plan, int n_new)
{
    const struct engine_sizes *s = &engine->sizes;
    const int n_cached = (plan->n_prompt - n_new) / BLOCK_TOKENS;
    return plan->stage_loads && s->load_group ? (size_t)min_int(n_cached, s->load_group * s->load_groups) * s->load_slice : 0;
}

int sequence_plan_indices(const struct engine *engine, const struct sequence_plan *plan, int last)
{
    return engine->sizes.index ? min_int(last, plan->n_pages / BLOCK_SUBPAGES) : 0;
}

size_t engine_slabs_bytes(const struct engine *engine, int n)
{
    const struct engine_sizes *s = &engine->sizes;
    return s->index ? (size_t)(n / s->index_pieces + (n % s->index_pieces != 0)) * (size_t)s->index_pieces * s->index : 0;
}

/* Slabs of n index copies, or those that are in use, if these are more: few pieces may be left in each. */
static size_t slabs_bytes(const struct engine *engine, int n)
{
    const size_t used = device_slabs_used(device_blocks_slabs(engine->device_blocks)), planned = engine_slabs_bytes(engine, n);
    return planned > used ? planned : used;
}

size_t engine_index_bytes(const struct engine *engine, int n)
{
    return slabs_bytes(engine, engine->n_indices + n) - slabs_bytes(engine, engine->n_indices);
}

size_t engine_promised_bytes(const struct engine *engine)
{
    return engine->fixed_bytes + engine->committed_bytes + slabs_bytes(engine, engine->n_indices);
}

size_t sequence_plan_staging_bytes(const struct sequence_plan *plan, int first, int last)
{
    if (last <= first)
        return 0;
    return (size_t)(last - first - (first == 0)) * plan->block_bytes[0] + (first == 0 ? plan->block_bytes[1] : 0);
}

void sequence_plan_pieces(const struct engine *engine, const struct sequence_plan *plan, int n_new, struct sequence_piece ret_pieces[PIECE_COUNT])
{
    const struct sequence_piece pieces[PIECE_COUNT] = {
        [PIECE_FAST] = {MEM_FAST, plan->fast_bytes, false},
        [PIECE_KEPT] = {MEM_FAST, plan->kept_bytes, false},
        [PIECE_TABLE] = {MEM_TABLES, plan->table_bytes, false},
        [PIECE_MASKS] = {MEM_TABLES, plan->masks_bytes, false},
        [PIECE_SUMMARIES] = {MEM_SUMMARIES, plan->summaries_bytes, false},
        [PIECE_LOGITS] = {MEM_WORKSPACE, plan->logits_bytes, false},
        [PIECE_BAD] = {MEM_WORKSPACE, plan->bad_bytes, false},
        [PIECE_ACTIVE_KV] = {MEM_ACTIVE_KV, plan->active_kv_bytes, true},
        [PIECE_BRIDGE] = {MEM_BRIDGE, sequence_plan_bridge_bytes(engine, plan, n_new), true},
        [PIECE_LOADS] = {MEM_STAGING, sequence_plan_load_bytes(engine, plan, n_new), true},
        [PIECE_WINDOW] = {MEM_WORKSPACE, plan->window_bytes, true},
        [PIECE_COLUMNS] = {MEM_WORKSPACE, plan->columns_bytes, true},
        [PIECE_INDICES] = {MEM_WORKSPACE, plan->indices_bytes, true},
    };
    memcpy(ret_pieces, pieces, sizeof(pieces));
}

static size_t pieces_bytes(const struct engine *engine, const struct sequence_plan *plan, int n_new, bool prefill)
{
    struct sequence_piece pieces[PIECE_COUNT];
    size_t bytes = 0;
    sequence_plan_pieces(engine, plan, n_new, pieces);
    for (int i = 0; i < PIECE_COUNT; i++)
        bytes += prefill || !pieces[i].prefill ? pieces[i].bytes : 0;
    return bytes;
}

size_t sequence_plan_decode_bytes(const struct engine *engine, const struct sequence_plan *plan)
{
    return pieces_bytes(engine, plan, 0, false);
}

size_t sequence_plan_prefill_bytes(const struct engine *engine, const struct sequence_plan *plan, int n_new)
{
    return pieces_bytes(engine, plan, n_new, true);
}

size_t sequence_plan_peak_bytes(const struct engine *engine, const struct sequence_plan *plan, int n_new, size_t prompt_blocks, size_t all_blocks)
{
    const size_t prefill = sequence_plan_prefill_bytes(engine, plan, n_new) + prompt_blocks, decode = sequence_plan_decode_bytes(engine, plan) + all_blocks;
    return prefill > decode ? prefill : decode;
}

size_t engine_spare_bytes(const struct engine *engine)
{
    return device_slabs_spare(device_blocks_slabs(engine->device_blocks)) + device_slabs_spare(engine->extents);
}

void engine_trim(struct engine *engine)
{
    device_slabs_trim(device_blocks_slabs(engine->device_blocks));
    device_slabs_trim(engine->extents);
}

int engine_bytes_fit(const struct engine *engine, size_t bytes, int n_indices, struct error *err)
{
    const size_t limit = engine->config.memory_limit, alone = bytes + engine_slabs_bytes(engine, n_indices);
    if (limit == 0 || engine_promised_bytes(engine) + engine_index_bytes(engine, n_indices) + bytes <= limit)
        return 1;
    if (engine->fixed_bytes + alone <= limit)
        return 0;
    return error_set(err, -E2BIG, "the request needs %zu bytes of device memory beside %zu of workspace, and the limit is %zu: shorten the prompt or max_tokens, or serve with "
                     "--memory-limit %zu or more", alone, engine->fixed_bytes, limit, alone + engine->fixed_bytes);
}

int sequence_plan_choose(const struct engine *engine, struct sequence_plan *plan, int n_new, size_t prompt_blocks, size_t all_blocks, int n_indices, size_t *ret_bytes, struct error *err)
{
    const bool first = engine->bridge == BRIDGE_HOST, last = engine->bridge != BRIDGE_DEVICE;
    int r = 0;
    for (int host = first; host <= last && r <= 0; host++)
        for (int direct = 0; direct < 2 && r <= 0; direct++) {
            plan->bridge_on_host = host;
            plan->stage_loads = !direct;
            *ret_bytes = sequence_plan_peak_bytes(engine, plan, n_new, prompt_blocks, all_blocks);
            r = engine_bytes_fit(engine, *ret_bytes, n_indices, err);
        }
    return r;
}

/* With a pool the prompt's blocks live there (sequence_create counts again once the store has answered), and on a device with memory of its own a copy of their indices here, which nobody may share.
 * Blocks made while decoding are always counted: should the store be full or gone when they are made, they stay here. */
static void admission_blocks(const struct sequence_plan *plan, bool pool, size_t *ret_prompt, size_t *ret_all)
{
    const int first = pool ? plan->n_prompt_blocks : 0;
    *ret_prompt = sequence_plan_staging_bytes(plan, first, plan->n_prompt_blocks);
    *ret_all = sequence_plan_staging_bytes(plan, first, plan->n_blocks);
}

static int admission_indices(const struct engine *engine, const struct sequence_plan *plan, bool pool)
{
    return sequence_plan_indices(engine, plan, pool ? plan->n_prompt_blocks : 0);
}

size_t sequence_plan_admission_bytes(const struct engine *engine, const struct sequence_plan *plan, bool pool)
{
    size_t prompt, all;
    admission_blocks(plan, pool, &prompt, &all);
    return sequence_plan_peak_bytes(engine, plan, plan->n_prompt, prompt, all) + engine_slabs_bytes(engine, admission_indices(engine, plan, pool));
}

size_t engine_sequence_bytes(const struct engine *engine, int n_prompt, int max_new)
{
    const size_t limit = engine->config.memory_limit;
    struct sequence_plan plan;
    sequence_plan_init(engine, n_prompt, max_new, &plan);
    const size_t bytes = sequence_plan_admission_bytes(engine, &plan, engine->store != NULL);
    if (engine->bridge != BRIDGE_AUTO || limit == 0 || engine->fixed_bytes + bytes <= limit)
        return bytes;
    plan.bridge_on_host = true;
    return sequence_plan_admission_bytes(engine, &plan, engine->store != NULL);
}

int engine_admits(const struct engine *engine, int n_prompt, int max_new, struct error *err)
{
    const int max_context = engine->config.max_context;
    struct sequence_plan plan;
    size_t prompt, all, bytes;
    if (n_prompt < 1 || max_new < 0)
        return error_set(err, -EINVAL, "n_prompt is %d and max_new %d; at least 1 and 0 are needed", n_prompt, max_new);
    if (n_prompt > max_context || max_new > max_context - n_prompt)
        return error_set(err, -E2BIG, "%d prompt tokens and %d new ones exceed the context of %d", n_prompt, max_new, max_context);
    sequence_plan_init(engine, n_prompt, max_new, &plan);
    admission_blocks(&plan, engine->store != NULL, &prompt, &all);
    return sequence_plan_choose(engine, &plan, n_prompt, prompt, all, admission_indices(engine, &plan, engine->store != NULL), &bytes, err);
}
