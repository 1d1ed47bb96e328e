/* The report as one JSON object; every size in bytes. */
#include "proto/base/json_write.h"
#include "proto/option_choices.h"
#include "worker/plan/plan_report.h"

static void write_model(const struct plan_report *p, struct json_writer *w)
{
    const struct model_config *m = &p->whole;
    json_write_kobject(w, "model");
    json_write_kstr(w, "name", m->name);
    json_write_kstr(w, "arch", model_arch_name(m->arch));
    json_write_kint(w, "layers", m->n_layers);
    json_write_kint(w, "heads", m->n_heads);
    json_write_kint(w, "kv_heads", m->n_kv_heads);
    json_write_kint(w, "head_dim", m->head_dim);
    json_write_kint(w, "dim", m->dim);
    json_write_kint(w, "vocabulary", m->n_vocab);
    json_write_kint(w, "max_context", m->max_context);
    json_write_object_end(w);
}

static void write_configuration(const struct plan_report *p, struct json_writer *w)
{
    const struct plan_options *o = p->options;
    json_write_kobject(w, "configuration");
    json_write_kint(w, "context", p->context);
    json_write_kint(w, "prompt_tokens", p->n_prompt);
    json_write_kint(w, "max_new", o->max_new);
    json_write_kint(w, "workers", o->workers);
    json_write_kint(w, "tp", o->engine.tp);
    json_write_kint(w, "budget", o->engine.budget);
    json_write_kint(w, "recent", o->engine.recent);
    json_write_key(w, "fetch");
    if (o->engine.fetch == INT32_MAX)
        json_write_str(w, "all");
    else
        json_write_int(w, o->engine.fetch);
    json_write_kint(w, "fetch_unit", fetch_unit_tokens(o->engine.fetch_unit));
    json_write_kstr(w, "scorer", scorer_choices[o->engine.scorer]);
    json_write_kint(w, "chunk", o->engine.chunk);
    json_write_kstr(w, "selector", selector_choices[o->engine.selector]);
    json_write_kstr(w, "bridge", bridge_choices[o->engine.bridge]);
    json_write_kstr(w, "kv_format", kv_format_name((enum kv_format)o->engine.kv_format));
    json_write_kbool(w, "pool", o->pool);
    json_write_kint(w, "max_running", o->engine.max_running);
    json_write_kstr(w, "device", p->device);
    json_write_object_end(w);
}

/* Whose sizes all others are. */
static void write_rank(const struct plan_report *p, struct json_writer *w)
{
    json_write_kobject(w, "rank");
    json_write_kint(w, "heads", p->model.n_heads);
    json_write_kint(w, "kv_heads", p->model.n_kv_heads);
    json_write_kint(w, "ffn_dim", p->model.ffn_dim);
    json_write_object_end(w);
}

static void write_weights(const struct plan_report *p, struct json_writer *w)
{
    json_write_kobject(w, "weights");
    json_write_kstr(w, "dtype", p->weights_name);
    json_write_kint(w, "device_bytes", (int64_t)p->weights);
    json_write_kint(w, "bf16_bytes", (int64_t)p->bf16.device_bytes);
    if (p->stored.file_bytes) {
        json_write_kint(w, "stored_bytes", (int64_t)p->stored.device_bytes);
        json_write_kint(w, "file_bytes", (int64_t)p->stored.file_bytes);
    }
    json_write_object_end(w);
}

static void write_pool(const struct plan_report *p, struct json_writer *w)
{
    const struct memory_plan *plan = &p->orders[PLAN_LAYER];
    json_write_kobject(w, "pool");
    json_write_kint(w, "bytes_per_token", (int64_t)(plan->block_bytes[0] / BLOCK_TOKENS));
    json_write_kint(w, "block_bytes", (int64_t)plan->block_bytes[0]);
    json_write_kint(w, "first_block_bytes", (int64_t)plan->block_bytes[1]);
    json_write_kint(w, "request_bytes", (int64_t)plan->pool_bytes);
    json_write_object_end(w);
}

static void write_tags(struct json_writer *w, const char *key, const size_t bytes[MEM_TAG_COUNT])
{
    json_write_kobject(w, key);
    for (int tag = 0; tag < MEM_TAG_COUNT; tag++)
        json_write_kint(w, mem_tag_name((enum mem_tag)tag), (int64_t)bytes[tag]);
    json_write_object_end(w);
}

static void write_order(const struct plan_report *p, enum plan_order order, struct json_writer *w)
{
    const struct memory_plan *plan = &p->orders[order];
    json_write_kobject(w, plan_order_names[order]);
    write_tags(w, "peak_bytes", plan->peak);
    write_tags(w, "prefill_bytes", plan->prefill);
    write_tags(w, "decode_bytes", plan->decode);
    json_write_kint(w, "peak_total_bytes", (int64_t)plan->peak_total);
    json_write_kint(w, "workspace_bytes", (int64_t)plan->fixed);
    json_write_kint(w, "request_bytes", (int64_t)plan->sequence);
    json_write_kint(w, "running_bytes", (int64_t)plan->running);
    json_write_kint(w, "host_worker_bytes", (int64_t)plan->host_engine);
    json_write_kint(w, "host_request_bytes", (int64_t)plan->host_sequence);
    json_write_kint(w, "host_bridge_bytes", (int64_t)plan->host_bridge);
    if (p->options->device_memory) {
        json_write_kobject(w, "fits");
        json_write_kint(w, "running", (int64_t)p->fits[order].running);
        json_write_kint(w, "with_one_at_its_prompt", (int64_t)p->fits[order].prefilling);
        json_write_kint(w, "longest_context", p->longest[order]);
        json_write_kint(w, "page_cache_bytes", (int64_t)p->fits[order].page_cache);
        json_write_object_end(w);
    }
    json_write_object_end(w);
}

int plan_report_json(const struct plan_report *p, struct buf *out)
{
    struct json_writer w;
    json_write_begin(&w, out);
    json_write_object(&w);
    write_model(p, &w);
    write_configuration(p, &w);
    write_rank(p, &w);
    write_weights(p, &w);
    write_pool(p, &w);
    if (p->options->device_memory) {
        const size_t memory = (size_t)p->options->device_memory;
        json_write_kint(&w, "device_bytes", p->options->device_memory);
        json_write_kint(&w, "memory_limit", memory > p->weights ? (int64_t)(memory - p->weights) : 0);
    }
    for (int order = 0; order < PLAN_ORDER_COUNT; order++)
        write_order(p, (enum plan_order)order, &w);
    json_write_object_end(&w);
    int r = json_write_end(&w);
    return r < 0 ? r : buf_append_str(out, "\n");
}
