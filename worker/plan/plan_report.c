#include "worker/plan/plan_report.h"
#include "kernels/backend.h"
#include "worker/cache/engine_configure.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

const char *const plan_order_names[PLAN_ORDER_COUNT] = {[PLAN_LAYER] = "layer-major", [PLAN_CHUNK] = "chunk-major", [PLAN_ONE_SHOT] = "one-shot"};

static int choose_context(const struct plan_options *o, struct plan_report *report, struct error *err)
{
    const int most = report->model.max_context;
    if (o->engine.context > most)
        return error_set(err, -EINVAL, "--context %lld: %s allows at most %d tokens", (long long)o->engine.context, report->model.name, most);
    report->context = o->engine.context ? (int)o->engine.context : most;
    if (o->max_new >= report->context)
        return error_set(err, -EINVAL, "--max-new %lld: must be less than the context of %d, which holds the prompt too", (long long)o->max_new, report->context);
    report->n_prompt = report->context - (int)o->max_new;
    return 0;
}

static void set_order(struct memory_plan_params *p, enum plan_order order, const struct plan_options *o, const struct plan_report *report)
{
    p->engine.order = order == PLAN_LAYER ? PREFILL_LAYER_MAJOR : PREFILL_CHUNK_MAJOR;
    p->engine.chunk = order == PLAN_ONE_SHOT ? report->n_prompt : (int)o->engine.chunk;
}

static int longest(const struct memory_plan_params *params, enum plan_order order, size_t limit, int *ret_context, struct error *err)
{
    struct memory_plan_params p = *params;
    if (order == PLAN_ONE_SHOT)
        p.engine.chunk = p.model->max_context; /* of whatever prompt */
    if (p.engine.bridge == BRIDGE_AUTO)
        p.engine.bridge = BRIDGE_HOST; /* what admission comes to when the prompt is long */
    return memory_plan_longest(&p, limit, ret_context, err);
}

/* A worker with --memory-limit chooses as it admits; of a request alone that is known here. */
static int plan_order(struct memory_plan_params *p, size_t limit, struct memory_plan *ret_plan, struct error *err)
{
    const enum bridge_place bridge = p->engine.bridge;
    int r = memory_plan_init(p, ret_plan, err);
    if (r < 0 || bridge != BRIDGE_AUTO || limit == 0 || ret_plan->peak_total <= limit)
        return r;
    p->engine.bridge = BRIDGE_HOST;
    r = memory_plan_init(p, ret_plan, err);
    p->engine.bridge = bridge;
    return r;
}

static int plan_orders(const struct plan_options *o, struct memory_plan_params *p, struct plan_report *report, struct error *err)
{
    const size_t memory = (size_t)o->device_memory, limit = memory > report->weights ? memory - report->weights : 0;
    int r = 0;
    for (int order = 0; r >= 0 && order < PLAN_ORDER_COUNT; order++) {
        set_order(p, (enum plan_order)order, o, report);
        r = plan_order(p, limit, &report->orders[order], err);
        if (r < 0 || !memory)
            continue;
        report->fits[order] = memory_plan_fit(&report->orders[order], limit);
        r = longest(p, (enum plan_order)order, limit, &report->longest[order], err);
    }
    return r;
}

static int open_device(const struct plan_options *o, struct memory_plan_params *p, struct plan_report *report, struct error *err)
{
    struct device_config config = {.n_threads = (int)o->engine.threads, .isa = (enum cpu_isa)o->engine.isa};
    if (!config.n_threads) {
        long n = sysconf(_SC_NPROCESSORS_ONLN);
        config.n_threads = n < 1 ? 1 : n > 256 ? 256 : (int)n;
    }
    const struct kernel_backend *backend;
    struct device_properties properties;
    struct error note;
    int r = backend_open((enum backend_choice)o->engine.device, &config, &backend, &p->device, &note, err);
    if (r < 0)
        return r;
    p->dev = backend->device;
    p->ops = backend->ops;
    p->collective = o->engine.tp > 1 ? backend->collective : NULL;
    p->dev->properties(p->device, &properties);
    snprintf(report->device, sizeof(report->device), "%s", properties.name);
    r = p->dev->stream_create(p->device, &p->stream);
    return r < 0 ? error_set(err, r, "device: %s", strerror(-r)) : 0;
}

int plan_report_make(const struct plan_options *o, struct plan_report *ret_report, struct error *err)
{
    struct plan_report *report = ret_report;
    struct memory_plan_params p = {.pool = o->pool, .max_new = (int)o->max_new};
    *report = (struct plan_report){.options = o};
    int r = open_device(o, &p, report, err);
    if (r >= 0)
        r = plan_model_read(o, p.ops, report, err);
    if (r >= 0)
        r = choose_context(o, report, err);
    if (r >= 0) {
        p.engine = engine_configure(&o->engine);
        p.engine.max_context = report->context;
        p.model = &report->model;
        p.n_prompt = report->n_prompt;
        r = plan_orders(o, &p, report, err);
    }
    if (p.stream)
        p.dev->stream_free(p.stream);
    if (p.device)
        p.dev->close(p.device);
    return r;
}
