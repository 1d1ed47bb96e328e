/* A plan is an engine that is measured and not built. */
#include "worker/cache/memory_plan.h"
#include "worker/cache/engine_private.h"
#include <errno.h>

static void add_pieces(const struct engine *engine, const struct sequence_plan *s, struct memory_plan *plan)
{
    struct sequence_piece pieces[PIECE_COUNT];
    sequence_plan_pieces(engine, s, s->n_prompt, pieces);
    for (int i = 0; i < PIECE_COUNT; i++) {
        plan->prefill[pieces[i].tag] += pieces[i].bytes;
        if (!pieces[i].prefill)
            plan->decode[pieces[i].tag] += pieces[i].bytes;
    }
}

static void fill(struct engine *engine, const struct sequence_plan *s, bool pool, struct memory_plan *plan)
{
    const int first = pool ? s->n_prompt_blocks : 0;
    const size_t all_staging = sequence_plan_staging_bytes(s, first, s->n_blocks), index = engine_slabs_bytes(engine, sequence_plan_indices(engine, s, first));

    add_pieces(engine, s, plan);
    const size_t workspace = engine->fixed_bytes - engine->sizes.staging - engine->sizes.pages - engine->sizes.libraries;
    plan->prefill[MEM_WORKSPACE] += workspace;
    plan->decode[MEM_WORKSPACE] += workspace;
    plan->prefill[MEM_LIBRARIES] += engine->sizes.libraries;
    plan->decode[MEM_LIBRARIES] += engine->sizes.libraries;
    plan->prefill[MEM_PAGE_CACHE] += engine->sizes.pages;
    plan->decode[MEM_PAGE_CACHE] += engine->sizes.pages;
    plan->prefill[MEM_INDEX] += index;
    plan->decode[MEM_INDEX] += index;
    plan->prefill[MEM_STAGING] += engine->sizes.staging + sequence_plan_staging_bytes(s, first, s->n_prompt_blocks);
    plan->decode[MEM_STAGING] += engine->sizes.staging + all_staging;
    for (int tag = 0; tag < MEM_TAG_COUNT; tag++)
        plan->peak[tag] = plan->prefill[tag] > plan->decode[tag] ? plan->prefill[tag] : plan->decode[tag];
    plan->fixed = engine->fixed_bytes;
    plan->sequence = sequence_plan_admission_bytes(engine, s, pool);
    plan->running = sequence_plan_decode_bytes(engine, s) + all_staging + index;
    plan->peak_total = plan->fixed + plan->sequence;
    plan->host_engine = engine_host_bytes(engine);
    plan->host_sequence = sequence_host_bytes(engine, s);
    plan->host_bridge = sequence_plan_host_bridge_bytes(engine, s, s->n_prompt);
    for (int b = 0; b < 2; b++)
        plan->block_bytes[b] = engine->layout.block_bytes[b];
    plan->pool_bytes = sequence_plan_staging_bytes(s, 0, s->n_blocks);
    plan->n_kept = s->n_kept;
    plan->recent_rows = s->recent_rows;
}

int memory_plan_init(const struct memory_plan_params *params, struct memory_plan *ret_plan, struct error *err)
{
    struct model model = {.config = *params->model, .dev = params->dev, .ops = params->ops, .device = params->device, .stream = params->stream, .collective_ops = params->collective};
    struct engine_config config = params->engine;
    struct engine engine = {0};
    struct sequence_plan sequence;
    struct memory_plan plan = {0};
    config.memory_limit = 0;
    int r = engine_plan(&config, &model, &engine, err);
    if (r < 0)
        return r;
    r = engine_admits(&engine, params->n_prompt, params->max_new, err);
    if (r < 0)
        return r;
    sequence_plan_init(&engine, params->n_prompt, params->max_new, &sequence);
    fill(&engine, &sequence, params->pool, &plan);
    *ret_plan = plan;
    return 0;
}

struct memory_fit memory_plan_fit(const struct memory_plan *plan, size_t limit)
{
    struct memory_fit fit = {0};
    if (limit < plan->fixed)
        return fit;
    fit.running = (limit - plan->fixed) / plan->running;
    if (fit.running)
        fit.page_cache = limit - plan->fixed - plan->running;
    if (limit - plan->fixed >= plan->sequence)
        fit.prefilling = 1 + (limit - plan->fixed - plan->sequence) / plan->running;
    return fit;
}

/* Everything grows with the context, so the longest one is found by halving. */
int memory_plan_longest(const struct memory_plan_params *params, size_t limit, int *ret_context, struct error *err)
{
    struct memory_plan_params p = *params;
    struct memory_plan plan;
    int low = 0, high = params->model->max_context + 1; /* low fits or is 0, high does not fit */
    if (params->max_new < 0 || params->max_new >= params->model->max_context)
        return error_set(err, -EINVAL, "max_new is %d; the model allows a context of %d", params->max_new, params->model->max_context);
    while (high - low > 1) {
        const int context = low + (high - low) / 2;
        if (context <= params->max_new) {
            low = context;
            continue;
        }
        p.engine.max_context = context;
        p.n_prompt = context - p.max_new;
        int r = memory_plan_init(&p, &plan, err);
        if (r < 0)
            return r;
        if (plan.peak_total <= limit)
            low = context;
        else
            high = context;
    }
    *ret_context = low > params->max_new ? low : 0;
    return 0;
}
