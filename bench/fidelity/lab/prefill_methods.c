/* What a prefill does to the prompt, measured on the prompt itself (drift.h) and on the continuation, whose attention is over everything that is left.
 *
 * Drift rows: layer-major prefill over exact values, in chunks, must move nothing at all; consistent prefill (earlier blocks attended as K8V4) pays for being the same run whether its
 * prefix was computed or came from the pool.
 *
 * Control rows are immediate eviction (TideKV's controls): chunk after chunk, each layer's cache is cut to B rows per KV head before the next chunk attends, so the prompt itself is read through
 * what was left of it. Block-wise SnapKV: the newest 32 queries of the chunk rank what the cache holds, with the four sinks and the chunk's newest 32 tokens inside B. Recent tokens: sinks and
 * newest. The prompt's queries see no more than B + chunk rows, so a larger chunk degrades less. */
#include "bench/fidelity/lab/baseline.h"
#include "bench/fidelity/lab/baseline_methods.h"
#include "bench/fidelity/lab/drift.h"
#include "bench/fidelity/lab/drift_engine.h"
#include "bench/fidelity/lab/lab_cache.h"
#include <errno.h>
#include <string.h>

struct prefill_method {
    int chunk;
    bool engine;           /* the engine has this prefill too: hold it to the lab */
    enum lab_values values;
    const char *selector;  /* of the eviction, or NULL: none */
};

static void give_drift(struct fidelity_sink *sink, const struct drift *d)
{
    fidelity_sink_value(sink, "drift_relative_l2", d->relative_l2);
    fidelity_sink_value(sink, "drift_cosine", d->cosine);
    fidelity_sink_value(sink, "drift_top1", d->top1);
    fidelity_sink_value(sink, "drift_jsd", d->jsd);
    fidelity_sink_value(sink, "drift_kl", d->kl);
}

/* The engine is held to the lab in the first case alone: it would prefill each of them again, and what the first shows bit for bit the others do not show better. */
static int measure(const struct prefill_method *method, const struct fidelity_run *run, const struct fidelity_case *c, const struct lab_context *context, struct fidelity_sink *sink)
{
    const bool hold_engine = method->engine && c == run->cases;
    const struct lab_context *reference;
    struct drift d;
    int n_different = 0;
    int r = lab_cache_context(run->model, c, &reference);
    if (r >= 0)
        r = drift_measure(reference, context, &d);
    if (r >= 0 && hold_engine)
        r = drift_engine_compare(context, run->model, c->tokens, method->values, method->chunk, &n_different, run->err);
    if (r < 0)
        return r;
    give_drift(sink, &d);
    if (hold_engine)
        fidelity_sink_value(sink, "engine_numbers_different", n_different);
    return 0;
}

static int run_case(const struct prefill_method *method, const struct fidelity_run *run, int i_case, struct fidelity_sink *sink)
{
    const struct fidelity_case *c = &run->cases[i_case];
    const int budget = run->budget > SELECT_SINKS + SELECT_MANDATORY ? run->budget : SELECT_SINKS + SELECT_MANDATORY + 1;
    const struct lab_eviction eviction = {.selector = method->selector ? selector_find(method->selector) : NULL, .budget = budget < c->n_prompt ? budget : c->n_prompt};
    const struct lab_prefill_params p = {.model = run->model, .tokens = c->tokens, .n = c->n_prompt, .chunk = method->chunk, .values = method->values,
                                         .eviction = method->selector && c->n_prompt > budget ? &eviction : NULL};
    struct lab_context *context = NULL;
    if (method->selector && !eviction.selector)
        return -ENOENT;
    int r = lab_prefill(&p, &context);
    if (r >= 0 && run->task == TASK_KL)
        r = measure(method, run, c, context, sink);
    if (r >= 0)
        r = baseline_continue(context, run, i_case, baseline_attend_resident, NULL, sink);
    lab_context_free(context);
    return r;
}

static int prefill_run(const struct fidelity_method *method, const struct fidelity_run *run, struct fidelity_sink *sink)
{
    int r = 0;
    for (int i = 0; r >= 0 && i < run->n_cases; i++)
        r = run_case(method->arg, run, i, sink);
    return r < 0 ? error_set(run->err, r, "%s: %s", method->name, strerrordesc_np(-r)) : 0;
}

static const struct prefill_method exact = {.chunk = 512, .engine = true}, consistent = {.chunk = 512, .engine = true, .values = LAB_VALUES_K8V4};
static const struct prefill_method snapkv_512 = {.chunk = 512, .selector = "snapkv"}, snapkv_2048 = {.chunk = 2048, .selector = "snapkv"};
static const struct prefill_method recent_512 = {.chunk = 512, .selector = "streaming"}, recent_2048 = {.chunk = 2048, .selector = "streaming"};
static const struct fidelity_split everything = {FIDELITY_ALL, 0};

/* A prompt is prefilled anew for each row, so the larger chunk has few of them. */
static const struct fidelity_split few[] = {{256, 0}, {1024, 0}};

#define EVICTION(name_, text_, arg_, tasks_, importance_, ...) \
    { \
        .name = name_, .text = text_, .group = GROUP_CONTROL, .run = prefill_run, .arg = arg_, .tasks = tasks_, .cost = 9, .importance = importance_, __VA_ARGS__ \
    }
static const struct fidelity_method evictions[] = {
    EVICTION("blockwise-snapkv-512", "immediate eviction: after each chunk of 512 SnapKV cuts the layer's cache to B", &snapkv_512, ON_KL | ON_RECALL, 1, .sweep = true),
    EVICTION("blockwise-snapkv-2048", "immediate eviction: after each chunk of 2,048 SnapKV cuts the layer's cache to B", &snapkv_2048, ON_KL, 2, .splits = few, .n_splits = 2),
    EVICTION("recent-512", "immediate eviction: after each chunk of 512 the sinks and the newest B - 4 tokens are left", &recent_512, ON_KL, 1, .sweep = true),
    EVICTION("recent-2048", "immediate eviction: after each chunk of 2,048 the sinks and the newest B - 4 tokens are left", &recent_2048, ON_KL, 2, .splits = few, .n_splits = 2),
};
const struct fidelity_methods eviction_methods = {evictions, sizeof evictions / sizeof *evictions};

#define DRIFT(name_, text_, arg_) \
    { \
        .name = name_, .text = text_, .group = GROUP_DRIFT, .run = prefill_run, .arg = arg_, .tasks = ON_KL, .splits = &everything, .n_splits = 1, .cost = 11, .importance = 1 \
    }
static const struct fidelity_method drifts[] = {
    DRIFT("layer-major-exact", "prefill layer by layer in chunks of 512, exact values", &exact),
    DRIFT("layer-major-consistent", "prefill layer by layer in chunks of 512, earlier blocks attended as K8V4", &consistent),
};
const struct fidelity_methods drift_methods = {drifts, sizeof drifts / sizeof *drifts};
