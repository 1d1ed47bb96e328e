#include "worker/sched/worker_private.h"

#include "kernels/backend.h"
#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "worker/cache/engine_configure.h"
#include "worker/cache/scorer.h"
#include "worker/cache/selector.h"
#include <errno.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { STORE_CONNECT_US = 3000000, STORE_DEADLINE_US = 50000, POOL_RETRY_US = 5000000 };

/* ---- parts ---- */

/* In the order of weights_choices. */
enum { WEIGHTS_AUTO, WEIGHTS_BF16, WEIGHTS_STORED };

static struct model_open_params model_params(const struct worker *w)
{
    return (struct model_open_params){
        .path = w->options->model, .rank = (int)w->options->tp_rank, .n_ranks = (int)w->options->engine.tp, .dev = w->dev, .ops = w->ops, .device = w->device, .stream = w->stream};
}

/* What of the device's memory is this process's to use: what it holds, and what nobody holds. Other processes, this one's context and code are in neither. */
static size_t device_room(const struct worker *w, const struct device_properties *properties)
{
    const size_t free_bytes = w->dev->free_memory(w->device);
    struct device_memory_stats memory;

    w->dev->memory_stats(w->device, &memory);
    return free_bytes == SIZE_MAX ? properties->memory_bytes : free_bytes + memory.total_now;
}

/* The form of the weights is a choice between tables of ops. What is left of the device beside them is for sequences and the page cache. */
static int choose_ops(struct worker *w, const struct kernel_backend *backend, const struct device_properties *properties, struct error *err)
{
    const size_t room = device_room(w, properties);
    struct model_open_params params;
    struct model_weights_size expanded, stored;
    int rc;

    w->ops = w->options->engine.weights == WEIGHTS_STORED ? backend->stored_ops : backend->ops;
    if (w->options->engine.weights != WEIGHTS_AUTO || backend->stored_ops == backend->ops)
        return 0;
    params = model_params(w);
    rc = model_measure(&params, &expanded, err);
    if (rc < 0)
        return rc;
    params.ops = backend->stored_ops;
    rc = model_measure(&params, &stored, err);
    if (rc < 0)
        return rc;
    if (expanded.device_bytes / 3 > room / 4 && stored.device_bytes < expanded.device_bytes)
        w->ops = backend->stored_ops;
    LOG_INFO("weights_chosen", LOG_STR("form", w->ops == backend->ops ? "bf16" : "stored"), LOG_INT("bf16_bytes", expanded.device_bytes), LOG_INT("stored_bytes", stored.device_bytes),
             LOG_INT("device_bytes", properties->memory_bytes), LOG_INT("room_bytes", room));
    return 0;
}

static int open_device(struct worker *w, struct error *err)
{
    const struct worker_options *o = w->options;
    struct device_config config = {.n_threads = (int)o->engine.threads, .isa = (enum cpu_isa)o->engine.isa, .ordinal = (int)o->gpu};
    const struct kernel_backend *backend;
    struct device_properties properties;
    struct error note;
    int rc;

    if (!config.n_threads) {
        long n = sysconf(_SC_NPROCESSORS_ONLN);
        n /= o->engine.tp; /* ranks of a host share it */
        config.n_threads = n < 1 ? 1 : n > 256 ? 256 : (int)n;
    }
    rc = backend_open((enum backend_choice)o->engine.device, &config, &backend, &w->device, &note, err);
    if (rc < 0)
        return rc;
    w->dev = backend->device;
    w->collective_ops = backend->collective;
    w->dev->properties(w->device, &properties);
    LOG_INFO("device_opened", LOG_STR("device", properties.name), LOG_STR("note", note.text));
    rc = choose_ops(w, backend, &properties, err);
    if (rc < 0)
        return rc;
    rc = w->dev->stream_create(w->device, &w->stream);
    return rc < 0 ? error_set(err, rc, "device: %s", strerror(-rc)) : 0;
}

static int open_model(struct worker *w, struct error *err)
{
    const struct model_open_params params = model_params(w);
    uint64_t started_us = clock_now_us();
    const char *slash = strrchr(w->options->model, '/');
    const struct model_config *c;
    int rc = model_open(&params, &w->model, err);

    if (rc < 0)
        return rc;
    c = &w->model->config;
    w->limits = (struct job_limits){.n_vocab = c->n_vocab, .max_context = c->max_context};
    if (w->options->engine.context > c->max_context)
        return error_set(err, -EINVAL, "--context %lld: this model allows at most %d", (long long)w->options->engine.context, c->max_context);
    if (w->options->engine.context)
        w->limits.max_context = (int)w->options->engine.context;
    for (int i = 0; i < c->n_eos; i++)
        w->eos_ids[i] = (uint32_t)c->eos_ids[i];
    snprintf(w->model_id, sizeof w->model_id, "%s", *c->name ? c->name : slash && slash[1] ? slash + 1 : w->options->model);
    LOG_INFO("model_loaded", LOG_STR("path", w->options->model), LOG_STR("name", w->model_id), LOG_STR("arch", model_arch_name(c->arch)),
             LOG_INT("layers", c->n_layers), LOG_INT("kv_heads", c->n_kv_heads), LOG_INT("head_dim", c->head_dim),
             LOG_INT("context", c->max_context), LOG_INT("biased_key_pairs", w->model->key_bias.n_pairs), LOG_INT("load_ms", (clock_now_us() - started_us) / 1000));
    if (*c->note)
        LOG_WARN("model_note", LOG_STR("note", c->note));
    return 0;
}

static void store_changed(bool connected, void *arg)
{
    struct worker *w = arg;
    struct kv_store_info info;

    kv_client_info(w->store, &info);
    if (connected)
        LOG_INFO("store_connected", LOG_STR("store", w->options->store), LOG_INT("pool_bytes", info.pool_bytes));
    else
        LOG_WARN("store_lost", LOG_STR("error", info.error.text));
    if (w->link)
        router_link_announce(w->link);
}

/* Kernels read the pool where it lies, so until the device has it the worker goes on without. Only a mapping that cannot even be begun with is refused: the client tries again then, as it does
 * with a store that is gone. */
static int pool_mapped(void *base, uint64_t bytes, void *arg)
{
    struct worker *w = arg;
    int rc = pool_registration_add(w->registration, base, bytes);

    if (rc == 0 && w->engine)
        engine_use_pool(w->engine, pool_registration_ready(w->registration));
    return rc;
}

static void pool_registered(void *arg)
{
    struct worker *w = arg;

    engine_use_pool(w->engine, true);
    if (w->link)
        router_link_announce(w->link);
}

static void pool_unmapped(void *base, void *arg)
{
    struct worker *w = arg;

    pool_registration_remove(w->registration, base);
}

bool worker_pool_there(const struct worker *w, const struct kv_store_info *info)
{
    return info->connected && pool_registration_ready(w->registration);
}

static int open_store(struct worker *w, struct error *err)
{
    const struct kv_client_config config = {
        .socket_path = w->options->store,
        .name = w->options->name,
        .connect_timeout_us = STORE_CONNECT_US,
        .on_state = store_changed,
        .on_map = pool_mapped,
        .on_unmap = pool_unmapped,
        .arg = w,
    };
    const struct pool_registration_config registration = {
        .dev = w->dev, .device = w->device, .loop = w->loop, .retry_us = POOL_RETRY_US, .registered = pool_registered, .arg = w};
    struct kv_store_info info;
    int rc;

    if (!w->options->store)
        return 0;
    rc = pool_registration_create(&registration, &w->registration);
    if (rc < 0)
        return error_set(err, rc, "pool: %s", strerror(-rc));
    rc = kv_client_create(w->loop, &config, &w->store, err);
    if (rc < 0)
        return rc;
    kv_client_info(w->store, &info);
    if (!info.connected)
        LOG_WARN("store_missing", LOG_STR("error", info.error.text));
    return 0;
}

static void log_retrieval(const struct worker *w, const struct engine_config *config)
{
    struct engine_retrieval retrieval;
    struct page_cache_stats pages;

    engine_retrieval(w->engine, &retrieval);
    engine_page_cache_stats(w->engine, &pages);
    LOG_INFO("retrieval", LOG_STR("scorer", config->scorer->name), LOG_INT("fetch_unit", config->fetch_unit), LOG_INT("fetch_tokens", retrieval.fetch_tokens),
             LOG_INT("fetch_bytes_per_step", retrieval.step_bytes), LOG_INT("subpage_bytes", retrieval.subpage_bytes), LOG_INT("index_bytes", retrieval.index_bytes),
             LOG_INT("summary_bytes", retrieval.summary_bytes),
             LOG_INT("page_cache_bytes", pages.capacity_bytes));
    if (config->scorer->measuring_only)
        LOG_WARN("scorer_measures_only", LOG_STR("scorer", config->scorer->name), LOG_STR("note", "it reads every key in every step; serve with another scorer"));
}

/* Of what the worker has, a tenth is left for what its libraries have not taken yet: code is loaded and plans are built when they are first used. */
enum { LIBRARIES_RESERVE = 512 << 20 /* at least, but no more than a quarter */ };

/* A device of its own memory has nothing else to do: without a limit, what is there beside the weights is for requests, so that --page-cache auto has something to take. A CPU's memory is
 * everybody's. */
static size_t memory_limit(const struct worker *w, const struct device_properties *properties)
{
    const size_t room = device_room(w, properties), limit = (size_t)w->options->engine.memory_limit;
    struct device_memory_stats memory;
    size_t reserve = room / 4 < LIBRARIES_RESERVE ? room / 4 : LIBRARIES_RESERVE, share;

    if (properties->host_memory)
        return limit;
    w->dev->memory_stats(w->device, &memory);
    if (limit && limit > room - memory.now[MEM_WEIGHTS])
        LOG_WARN("memory_limit_beyond_device", LOG_INT("memory_limit", limit), LOG_INT("room_bytes", room - memory.now[MEM_WEIGHTS]), LOG_STR("note", "others hold some of this device's memory"));
    if (limit)
        return limit;
    if (reserve < room / 10)
        reserve = room / 10;
    share = room - reserve > memory.now[MEM_WEIGHTS] ? room - reserve - memory.now[MEM_WEIGHTS] : 1; /* 1: the engine says that it needs more */
    LOG_INFO("memory_limit_chosen", LOG_INT("memory_limit", share), LOG_INT("device_bytes", properties->memory_bytes), LOG_INT("room_bytes", room), LOG_INT("weights_bytes", memory.now[MEM_WEIGHTS]),
             LOG_INT("libraries_bytes", memory.now[MEM_LIBRARIES]), LOG_INT("reserve_bytes", reserve));
    return share;
}

static int open_engine(struct worker *w, struct error *err)
{
    const struct worker_options *o = w->options;
    struct device_properties properties;
    struct engine_config config = engine_configure(&o->engine);
    char ranks[32] = "";
    int rc;

    w->dev->properties(w->device, &properties);
    config.memory_limit = memory_limit(w, &properties);
    config.max_context = w->limits.max_context;
    config.store_deadline_us = STORE_DEADLINE_US;
    config.peers = worker_ranks_peers(w);
    rc = engine_create(&config, w->model, w->store, &w->engine, err);
    if (rc < 0)
        return rc;
    if (w->registration)
        engine_use_pool(w->engine, pool_registration_ready(w->registration));
    engine_fingerprint(w->engine, w->fingerprint);
    if (config.bridge == BRIDGE_HOST && properties.host_memory)
        LOG_WARN("bridge_on_device", LOG_STR("device", properties.name), LOG_STR("note", "the memory of this device is the host's: --bridge host changes nothing"));
    if (o->engine.tp > 1)
        snprintf(ranks, sizeof ranks, ", rank %d of %d", (int)o->tp_rank, (int)o->engine.tp);
    snprintf(w->description, sizeof w->description, "%.80s, %s, %s, budget %d, recent %d, fetch %d by %s, chunk %d%s", properties.name,
             kv_format_name(config.format), config.selector->name, config.budget, config.recent, config.fetch, config.scorer->name, config.chunk, ranks);
    log_retrieval(w, &config);
    return 0;
}

static int open_schedule(struct worker *w, struct error *err)
{
    const struct scheduler_config config = {
        .engine = w->engine,
        .group = w->group,
        .ops = w->model->ops,
        .stream = w->stream,
        .n_vocab = w->limits.n_vocab,
        .max_running = (int)w->options->engine.max_running,
        .max_queue = (int)w->options->max_queue,
        .sink = worker_sink(w),
    };
    const struct router_link_config link = {.endpoint = w->options->router, .name = w->options->name, .events = worker_link_events(w)};
    int rc;

    if (w->follower)
        return 0;
    rc = w->group ? rank_group_serve(w->group, w->loop) : 0;
    if (rc == 0)
        rc = scheduler_create(&config, &w->scheduler);
    if (rc < 0)
        return error_set(err, rc, "scheduler: %s", strerror(-rc));
    return router_link_create(w->loop, &link, &w->link, err);
}

/* ---- signals ---- */

static void on_stop_signal(int signal, void *arg)
{
    struct worker *w = arg;

    if (!w->draining && w->follower) {
        w->draining = true;
        rank_follower_drain(w->follower);
        return;
    }
    if (!w->draining) {
        worker_drain(w, signal == SIGTERM ? "SIGTERM" : "SIGINT");
        return;
    }
    w->follower_result = -ECANCELED;
    LOG_WARN("stopping", LOG_STR("why", "second signal"));
    w->stopped = true;
    loop_stop(w->loop);
}

/* What became of the decode steps, where the device keeps them. */
static void log_steps(const struct worker *w)
{
    struct step_stats steps = {0};

    if (w->engine)
        engine_step_stats(w->engine, &steps);
    if (steps.eager + steps.captures + steps.replays > 0)
        LOG_INFO("decode_steps", LOG_INT("eager", steps.eager), LOG_INT("captured", steps.captures), LOG_INT("replayed", steps.replays));
}

static void on_usr1(int signal, void *arg)
{
    struct worker *w = arg;
    struct device_memory_stats memory;
    struct rank_usage ranks;
    const struct mallinfo2 heap = mallinfo2();

    (void)signal;
    w->dev->memory_stats(w->device, &memory);
    for (int tag = 0; tag < MEM_TAG_COUNT; tag++)
        LOG_INFO("memory", LOG_STR("tag", mem_tag_name((enum mem_tag)tag)), LOG_INT("bytes", memory.now[tag]), LOG_INT("peak_bytes", memory.peak[tag]));
    LOG_INFO("memory", LOG_STR("tag", "total"), LOG_INT("bytes", memory.total_now), LOG_INT("peak_bytes", memory.total_peak));
    if (w->group) {
        worker_usage(w, &ranks);
        LOG_INFO("memory", LOG_STR("tag", "ranks"), LOG_INT("bytes", ranks.device_bytes), LOG_INT("peak_bytes", ranks.device_peak_bytes));
    }
    log_steps(w);
    /* Of the process: bookkeeping, messages, and on a CPU those pieces of device memory that are no mappings of their own. */
    LOG_INFO("memory", LOG_STR("tag", "heap"), LOG_INT("bytes", heap.uordblks + heap.hblkhd));
}

static int open_signals(struct worker *w, struct error *err)
{
    int rc = loop_signal_add(w->loop, SIGTERM, on_stop_signal, w, &w->signals[0]);

    if (rc == 0)
        rc = loop_signal_add(w->loop, SIGINT, on_stop_signal, w, &w->signals[1]);
    if (rc == 0)
        rc = loop_signal_add(w->loop, SIGUSR1, on_usr1, w, &w->signals[2]);
    return rc < 0 ? error_set(err, rc, "signals: %s", strerror(-rc)) : 0;
}

/* ---- life ---- */

int worker_create(const struct worker_options *options, struct worker **ret_worker, struct error *err)
{
    struct worker *w = calloc(1, sizeof *w);
    int rc;

    if (!w)
        return error_set(err, -ENOMEM, "out of memory");
    w->options = options;
    rc = loop_create(&w->loop);
    if (rc < 0) {
        error_set(err, rc, "event loop: %s", strerror(-rc));
        goto fail;
    }
    /* Signals come after the model: until then they end the process at once. */
    rc = worker_ranks_start(w, err);
    if (rc == 0)
        rc = open_device(w, err);
    if (rc == 0)
        rc = worker_ranks_meet(w, err);
    if (rc == 0)
        rc = open_model(w, err);
    if (rc == 0)
        rc = worker_ranks_load(w, err);
    if (rc == 0)
        rc = open_store(w, err);
    if (rc == 0)
        rc = open_engine(w, err);
    if (rc == 0)
        rc = worker_ranks_ready(w, err);
    if (rc == 0)
        rc = open_schedule(w, err);
    if (rc == 0)
        rc = open_signals(w, err);
    if (rc < 0)
        goto fail;
    LOG_INFO(w->follower ? "rank_ready" : "worker_ready", LOG_STR("worker", options->name), LOG_STR("router", options->router ? options->router : "none"), LOG_STR("engine", w->description),
             LOG_INT("context", w->limits.max_context), LOG_INT("max_running", options->engine.max_running));
    *ret_worker = w;
    return 0;
fail:
    worker_free(w);
    return rc;
}

void worker_free(struct worker *w)
{
    if (!w)
        return;
    for (size_t i = 0; i < ARRAY_LEN(w->signals); i++)
        loop_source_free(w->signals[i]);
    scheduler_free(w->scheduler);
    router_link_free(w->link);
    worker_ranks_stop(w);
    log_steps(w);
    engine_free(w->engine);
    worker_ranks_free(w);
    kv_client_free(w->store);
    pool_registration_free(w->registration);
    model_close(w->model);
    if (w->stream)
        w->dev->stream_free(w->stream);
    if (w->device)
        w->dev->close(w->device);
    rank_follower_free(w->follower);
    loop_free(w->loop);
    free(w);
}

/* One turn: what has arrived, then one unit of work. Negative: the process cannot go on. */
static int turn(struct worker *w)
{
    int rc = scheduler_has_work(w->scheduler) ? loop_poll(w->loop) : loop_run(w->loop);

    if (rc < 0) {
        LOG_ERROR("loop_failed", LOG_STR("error", strerror(-rc)));
        return rc;
    }
    if (rank_group_take_drain(w->group) && !w->draining)
        worker_drain(w, "a rank was asked to end");
    if (scheduler_has_work(w->scheduler)) {
        rc = scheduler_step(w->scheduler);
        if (rc < 0)
            LOG_ERROR("engine_failed", LOG_STR("error", strerror(-rc)), LOG_STR("group", rank_group_failure(w->group)));
    } else if (*rank_group_failure(w->group)) {
        LOG_ERROR("group_failed", LOG_STR("why", rank_group_failure(w->group)));
        rc = -EIO;
    }
    return rc;
}

int worker_run(struct worker *w)
{
    if (w->follower)
        return worker_follow(w);
    while (!w->stopped && !(w->draining && !scheduler_has_work(w->scheduler)))
        if (turn(w) < 0)
            return 1;
    return w->stopped && scheduler_has_work(w->scheduler);
}
