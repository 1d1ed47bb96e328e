/* Between scheduler and router: what the router asks becomes jobs, what happens to jobs becomes messages. */
#include "worker/sched/worker_private.h"

#include "proto/base/log.h"
#include "worker/sched/generate_parse.h"
#include <errno.h>
#include <stdlib.h>

/* ---- to the router ---- */

static const Tidepool__Engine__Failed__Kind failure_kinds[] = {
    [JOB_FAILED_INVALID] = TIDEPOOL__ENGINE__FAILED__KIND__INVALID,
    [JOB_FAILED_TOO_LONG] = TIDEPOOL__ENGINE__FAILED__KIND__TOO_LONG,
    [JOB_FAILED_OVERLOADED] = TIDEPOOL__ENGINE__FAILED__KIND__OVERLOADED,
    [JOB_FAILED_INTERNAL] = TIDEPOOL__ENGINE__FAILED__KIND__INTERNAL,
    [JOB_FAILED_DRAINING] = TIDEPOOL__ENGINE__FAILED__KIND__DRAINING,
};

static void on_failed(void *arg, uint64_t id, enum job_failure failure, const char *text)
{
    struct worker *w = arg;
    Tidepool__Engine__Failed message = TIDEPOOL__ENGINE__FAILED__INIT;

    LOG_WARN("request_failed", LOG_INT("req", id), LOG_INT("kind", failure_kinds[failure]), LOG_STR("text", text));
    message.epoch = router_link_epoch(w->link);
    message.kind = failure_kinds[failure];
    message.text = (char *)text;
    router_link_send(w->link, ENGINE_FAILED, id, &message.base);
}

static void on_progress(void *arg, uint64_t id, int done, int total)
{
    struct worker *w = arg;
    Tidepool__Engine__PrefillProgress message = TIDEPOOL__ENGINE__PREFILL_PROGRESS__INIT;

    message.epoch = router_link_epoch(w->link);
    message.done = (uint32_t)done;
    message.total = (uint32_t)total;
    router_link_send(w->link, ENGINE_PREFILL_PROGRESS, id, &message.base);
}

/* The log-probabilities of prompt[1..]: [n] pointers, then [n] messages, in one piece. NULL without memory. */
static Tidepool__Engine__Token **prompt_tokens(const struct job_prefilled *p)
{
    size_t n = (size_t)p->n_prompt - 1;
    Tidepool__Engine__Token **list = calloc(n + 1, sizeof *list + sizeof **list);
    Tidepool__Engine__Token *tokens;

    if (!list)
        return NULL;
    tokens = (Tidepool__Engine__Token *)(list + n);
    for (size_t i = 0; i < n; i++) {
        tidepool__engine__token__init(&tokens[i]);
        tokens[i].id = (uint32_t)p->prompt[i + 1];
        tokens[i].logprob = p->prompt_logprobs[i];
        list[i] = &tokens[i];
    }
    return list;
}

static void on_prefilled(void *arg, uint64_t id, const struct job_prefilled *p)
{
    struct worker *w = arg;
    Tidepool__Engine__Prefilled message = TIDEPOOL__ENGINE__PREFILLED__INIT;
    Tidepool__Engine__Token **list = p->prompt_logprobs ? prompt_tokens(p) : NULL;

    message.epoch = router_link_epoch(w->link);
    message.prompt_tokens = (uint32_t)p->n_prompt;
    message.cached_tokens = (uint32_t)p->n_cached;
    message.bytes_loaded = p->bytes_loaded;
    message.queue_us = p->queue_us;
    message.prefill_us = p->prefill_us;
    message.prompt_logprobs = list;
    message.n_prompt_logprobs = list ? (size_t)p->n_prompt - 1 : 0;
    router_link_send(w->link, ENGINE_PREFILLED, id, &message.base);
    free(list);
    LOG_INFO("prefilled", LOG_INT("req", id), LOG_INT("prompt_tokens", p->n_prompt), LOG_INT("cached_tokens", p->n_cached), LOG_INT("known_tokens", p->n_known), LOG_INT("restored_tokens", p->n_restored),
             LOG_INT("queue_us", p->queue_us), LOG_INT("prefill_us", p->prefill_us));
}

static void on_token(void *arg, uint64_t id, int index, const struct sample_result *result)
{
    struct worker *w = arg;
    Tidepool__Engine__Tokens message = TIDEPOOL__ENGINE__TOKENS__INIT;
    Tidepool__Engine__Token token = TIDEPOOL__ENGINE__TOKEN__INIT, *list[1] = {&token};
    Tidepool__Engine__TopLogprob top[JOB_TOP_LOGPROBS_MAX], *top_list[JOB_TOP_LOGPROBS_MAX];

    for (int i = 0; i < result->n_top && i < JOB_TOP_LOGPROBS_MAX; i++) {
        tidepool__engine__top_logprob__init(&top[i]);
        top[i].token = (uint32_t)result->top[i].token;
        top[i].logprob = result->top[i].logprob;
        top_list[token.n_top++] = &top[i];
    }
    token.id = (uint32_t)result->token;
    token.logprob = result->logprob;
    token.top = top_list;
    message.epoch = router_link_epoch(w->link);
    message.first_index = (uint32_t)index;
    message.tokens = list;
    message.n_tokens = 1;
    router_link_send(w->link, ENGINE_TOKENS, id, &message.base);
}

static void on_finished(void *arg, uint64_t id, const struct job_finished *f)
{
    struct worker *w = arg;
    Tidepool__Engine__Finished message = TIDEPOOL__ENGINE__FINISHED__INIT;

    message.epoch = router_link_epoch(w->link);
    message.reason = f->end == JOB_END_STOP ? TIDEPOOL__ENGINE__FINISH_REASON__FINISH_STOP : TIDEPOOL__ENGINE__FINISH_REASON__FINISH_LENGTH;
    message.completion_tokens = (uint32_t)f->n_tokens;
    message.bytes_loaded = f->bytes_loaded;
    message.bytes_attended = f->bytes_attended;
    message.bytes_missed = f->bytes_missed;
    message.page_hits = f->page_hits;
    message.page_misses = f->page_misses;
    message.bytes_to_pool = f->bytes_to_pool;
    message.decode_us = f->decode_us;
    message.pages_attended = f->pages_attended;
    message.stop_id = (uint32_t)f->stop_id;
    router_link_send(w->link, ENGINE_FINISHED, id, &message.base);
    LOG_INFO("finished", LOG_INT("req", id), LOG_INT("tokens", f->n_tokens), LOG_STR("end", f->end == JOB_END_STOP ? "stop" : "length"),
             LOG_INT("decode_us", f->decode_us), LOG_INT("bytes_loaded", f->bytes_loaded), LOG_INT("bytes_to_pool", f->bytes_to_pool),
             LOG_INT("bytes_attended", f->bytes_attended), LOG_INT("bytes_missed", f->bytes_missed), LOG_INT("page_hits", f->page_hits), LOG_INT("page_misses", f->page_misses));
}

struct scheduler_sink worker_sink(struct worker *w)
{
    return (struct scheduler_sink){
        .prefill_progress = on_progress,
        .prefilled = on_prefilled,
        .token = on_token,
        .finished = on_finished,
        .failed = on_failed,
        .arg = w,
    };
}

/* ---- from the router ---- */

static void on_connected(void *arg)
{
    struct worker *w = arg;

    LOG_INFO("router_connected", LOG_STR("router", w->options->router), LOG_INT("epoch", router_link_epoch(w->link)));
}

static void on_lost(void *arg, const char *why)
{
    struct worker *w = arg;
    struct scheduler_load load;

    scheduler_load(w->scheduler, &load);
    LOG_WARN("router_lost", LOG_STR("router", w->options->router), LOG_STR("why", why),
             LOG_INT("cancelled", load.n_running + load.n_prefilling + load.n_waiting));
    scheduler_cancel_all(w->scheduler);
}

static void on_generate(void *arg, uint64_t id, const Tidepool__Engine__Generate *message)
{
    struct worker *w = arg;
    struct job_params params;
    struct error err = {""};
    int rc = generate_parse(message, id, &w->limits, &params, &err);

    if (rc == 0)
        scheduler_submit(w->scheduler, &params);
    else
        on_failed(w, id, rc == -E2BIG ? JOB_FAILED_TOO_LONG : rc == -EINVAL ? JOB_FAILED_INVALID : JOB_FAILED_OVERLOADED, err.text);
    /* The loop may be waiting: there is something to compute now. */
    loop_stop(w->loop);
}

static void on_cancel(void *arg, uint64_t id)
{
    struct worker *w = arg;

    if (scheduler_cancel(w->scheduler, id))
        LOG_INFO("cancelled", LOG_INT("req", id));
    loop_stop(w->loop);
}

void worker_drain(struct worker *w, const char *why)
{
    struct scheduler_load load;

    scheduler_load(w->scheduler, &load);
    LOG_INFO("draining", LOG_STR("why", why), LOG_INT("running", load.n_running + load.n_prefilling), LOG_INT("refused", load.n_waiting));
    w->draining = true;
    scheduler_drain(w->scheduler);
    loop_stop(w->loop);
}

static void on_drain(void *arg)
{
    worker_drain(arg, "the router asked");
}

static void fill_ready(void *arg, Tidepool__Engine__Ready *ready)
{
    struct worker *w = arg;
    struct kv_store_info *store = &w->store_info;
    const struct worker_options *o = w->options;

    *store = (struct kv_store_info){0};
    if (w->store)
        kv_client_info(w->store, store);
    ready->model_id = w->model_id;
    ready->fingerprint = (ProtobufCBinaryData){sizeof w->fingerprint, w->fingerprint};
    ready->context_length = (uint32_t)w->limits.max_context;
    ready->vocab_size = (uint32_t)w->limits.n_vocab;
    ready->eos_ids = w->eos_ids;
    ready->n_eos_ids = (size_t)w->model->config.n_eos;
    ready->max_running = (uint32_t)o->engine.max_running;
    ready->description = w->description;
    if (!w->store || !worker_pool_there(w, store))
        return;
    ready->store_uuid = (ProtobufCBinaryData){sizeof store->store_uuid, store->store_uuid};
    ready->store_event_endpoint = store->event_endpoint;
    ready->store_snapshot_endpoint = store->snapshot_endpoint;
    /* With exact values the blocks of a lossy format are not what a run attends, so nobody starts from them. */
    ready->prefix_reuse = o->engine.prefill == PREFILL_CONSISTENT || o->engine.kv_format == KV_FORMAT_BF16;
}

void worker_usage(struct worker *w, struct rank_usage *ret_usage)
{
    struct device_memory_stats memory;
    struct page_cache_stats pages;

    engine_page_cache_stats(w->engine, &pages);
    w->dev->memory_stats(w->device, &memory);
    *ret_usage = (struct rank_usage){
        .device_bytes = memory.total_now,
        .device_peak_bytes = memory.total_peak,
        .page_cache_bytes = pages.capacity_bytes,
        .page_cache_used_bytes = pages.used_bytes,
        .page_cache_hits = pages.hits,
        .page_cache_misses = pages.misses,
    };
    rank_group_usage(w->group, ret_usage);
}

static void fill_heartbeat(void *arg, Tidepool__Engine__Heartbeat *beat)
{
    struct worker *w = arg;
    struct scheduler_load load;
    struct kv_store_info store = {0};
    struct rank_usage usage;

    worker_usage(w, &usage);
    scheduler_load(w->scheduler, &load);
    if (w->store)
        kv_client_info(w->store, &store);
    beat->progress = load.progress;
    beat->busy = scheduler_has_work(w->scheduler);
    beat->n_running = (uint32_t)load.n_running;
    beat->n_prefilling = (uint32_t)load.n_prefilling;
    beat->n_waiting = (uint32_t)load.n_waiting;
    beat->waiting_tokens = load.waiting_tokens;
    beat->device_bytes = usage.device_bytes;
    beat->device_peak_bytes = usage.device_peak_bytes;
    beat->pool_bytes = store.pool_bytes;
    beat->pool_used_bytes = store.pool_used_bytes;
    beat->store_connected = w->store && worker_pool_there(w, &store);
    beat->page_cache_bytes = usage.page_cache_bytes;
    beat->page_cache_used_bytes = usage.page_cache_used_bytes;
    beat->page_cache_hits = usage.page_cache_hits;
    beat->page_cache_misses = usage.page_cache_misses;
}

struct router_link_events worker_link_events(struct worker *w)
{
    return (struct router_link_events){
        .connected = on_connected,
        .lost = on_lost,
        .generate = on_generate,
        .cancel = on_cancel,
        .drain = on_drain,
        .fill_ready = fill_ready,
        .fill_heartbeat = fill_heartbeat,
        .arg = w,
    };
}
