/* What the server says about itself: models, health, version, metrics. */
#include "proto/base/base_assert.h"
#include "router/api/api_private.h"
#include <stdio.h>
#include <string.h>

static void reply(struct api *api, struct http_exchange *exchange, enum metrics_endpoint endpoint, int status, struct buf *out, struct json_writer *w)
{
    api_count(api, endpoint, status);
    if (json_write_end(w) < 0)
        http_reply_error(exchange, 503, NULL, NULL, "out of memory");
    else
        http_reply(exchange, status, NULL, out->data, out->len);
    buf_fini(out);
}

static void begin(struct buf *out, struct json_writer *w)
{
    buf_init(out, API_REPLY_BYTES_MAX);
    json_write_begin(w, out);
    json_write_object(w);
}

/* -- models -- */

static void write_model(const struct api *api, struct json_writer *w)
{
    uint32_t context_length = route_context_length(api->config.route);
    json_write_kstr(w, "id", api->config.model);
    json_write_kstr(w, "object", "model");
    json_write_kint(w, "created", api->started_s);
    json_write_kstr(w, "owned_by", "tidepool");
    json_write_kstr(w, "root", api->config.model_path);
    json_write_knull(w, "parent");
    json_write_key(w, "max_model_len");
    context_length ? json_write_int(w, context_length) : json_write_null(w);
    json_write_karray(w, "permission");
    json_write_array_end(w);
}

void handle_models(struct api *api, struct http_exchange *exchange)
{
    struct buf out;
    struct json_writer w;
    begin(&out, &w);
    json_write_kstr(&w, "object", "list");
    json_write_karray(&w, "data");
    json_write_object(&w);
    write_model(api, &w);
    json_write_object_end(&w);
    json_write_array_end(&w);
    json_write_object_end(&w);
    reply(api, exchange, ENDPOINT_MODELS, 200, &out, &w);
}

void handle_model(struct api *api, struct http_exchange *exchange, const char *name)
{
    struct buf out;
    struct json_writer w;
    struct api_error err = {.status = 0};
    if (!*name || !api_model_is_served(api, name, &err)) {
        if (!err.status)
            api_error_set(&err, 404, "model", "model_not_found", "no model is named");
        api_reply_error(api, exchange, ENDPOINT_MODELS, &err, 0);
        return;
    }
    begin(&out, &w);
    write_model(api, &w);
    json_write_object_end(&w);
    reply(api, exchange, ENDPOINT_MODELS, 200, &out, &w);
}

/* -- health -- */

static void reply_status(struct api *api, struct http_exchange *exchange, int status, const char *text)
{
    struct buf out;
    struct json_writer w;
    begin(&out, &w);
    json_write_kstr(&w, "status", text);
    json_write_kint(&w, "workers_ready", route_n_ready(api->config.route));
    json_write_kint(&w, "requests_running", route_n_running(api->config.route));
    json_write_kint(&w, "requests_waiting", route_n_queued(api->config.route));
    json_write_object_end(&w);
    if (status != 200)
        http_exchange_add_header(exchange, "Retry-After", "5");
    reply(api, exchange, ENDPOINT_OTHER, status, &out, &w);
}

/* Readiness: may requests be sent here? */
void handle_health(struct api *api, struct http_exchange *exchange)
{
    if (api->draining)
        reply_status(api, exchange, 503, "draining");
    else if (route_n_ready(api->config.route) == 0)
        reply_status(api, exchange, 503, "no worker is ready");
    else
        reply_status(api, exchange, 200, "ok");
}

/* Liveness: the loop turns. */
void handle_live(struct api *api, struct http_exchange *exchange)
{
    reply_status(api, exchange, 200, api->draining ? "draining" : "ok");
}

/* -- version -- */

static void write_worker(const struct route_worker_info *info, struct json_writer *w)
{
    json_write_object(w);
    json_write_kstr(w, "name", info->name);
    json_write_kstr(w, "state", info->state);
    json_write_kstr(w, "description", info->description);
    json_write_kint(w, "context_length", info->context_length);
    json_write_kint(w, "max_running", info->max_running);
    json_write_kbool(w, "store_connected", info->store_connected);
    json_write_object_end(w);
}

void handle_version(struct api *api, struct http_exchange *exchange)
{
    struct buf out;
    struct json_writer w;
    struct route_worker_info info;
    begin(&out, &w);
    json_write_kstr(&w, "version", api->config.version);
    json_write_kstr(&w, "model", api->config.model);
    json_write_kstr(&w, "tokenizer", tokenizer_describe(api->config.tok));
    json_write_karray(&w, "workers");
    for (uint32_t i = 0; i < route_n_workers(api->config.route); i++) {
        route_worker_info(api->config.route, i, &info);
        write_worker(&info, &w);
    }
    json_write_array_end(&w);
    json_write_object_end(&w);
    reply(api, exchange, ENDPOINT_OTHER, 200, &out, &w);
}

/* -- metrics -- */

static void gauge(struct buf *out, const char *name, const char *help, uint64_t value)
{
    metrics_head(out, name, "gauge", help);
    metrics_sample_int(out, name, "", value);
}

static void counter(struct buf *out, const char *name, const char *help, uint64_t value)
{
    metrics_head(out, name, "counter", help);
    metrics_sample_int(out, name, "", value);
}

struct worker_metric {
    const char *name, *type, *help;
    size_t offset;
    bool wide; /* uint64_t, else uint32_t */
};

#define WORKER_AT(f, w) .offset = offsetof(struct route_worker_info, f), .wide = (w)

static const struct worker_metric worker_metrics[] = {
    {"worker_requests_inflight", "gauge", "Requests that the router has given to the worker.", WORKER_AT(n_inflight, false)},
    {"worker_requests_running", "gauge", "Sequences that the worker decodes.", WORKER_AT(n_running, false)},
    {"worker_requests_prefilling", "gauge", "Sequences that the worker prefills.", WORKER_AT(n_prefilling, false)},
    {"worker_requests_waiting", "gauge", "Requests that wait in the worker.", WORKER_AT(n_waiting, false)},
    {"worker_load_tokens", "gauge", "Outstanding work as the router counts it, in tokens of prefill.", WORKER_AT(load_tokens, true)},
    {"worker_dispatched_total", "counter", "Requests given to the worker.", WORKER_AT(dispatched, true)},
    {"worker_steps_total", "counter", "Steps of the worker's engine.", WORKER_AT(progress, true)},
    {"worker_device_bytes", "gauge", "Device memory in use.", WORKER_AT(device_bytes, true)},
    {"worker_device_peak_bytes", "gauge", "Most device memory that was ever in use.", WORKER_AT(device_peak_bytes, true)},
    {"pool_bytes", "gauge", "Size of the store's pool, as the worker sees it.", WORKER_AT(pool_bytes, true)},
    {"pool_used_bytes", "gauge", "Bytes of the pool that hold blocks, as the worker sees it.", WORKER_AT(pool_used_bytes, true)},
    {"page_cache_bytes", "gauge", "Capacity of the worker's page cache.", WORKER_AT(page_cache_bytes, true)},
    {"page_cache_used_bytes", "gauge", "Bytes of it that hold sub-pages.", WORKER_AT(page_cache_used_bytes, true)},
    {"page_cache_hits_total", "counter", "Sub-pages in the pool that a step attended and the page cache had.", WORKER_AT(page_cache_hits, true)},
    {"page_cache_misses_total", "counter", "Sub-pages in the pool that a step attended and the page cache had not.", WORKER_AT(page_cache_misses, true)},
};

static bool is_shown(const struct route_worker_info *info)
{
    return strcmp(info->state, "lost") != 0;
}

static void write_worker_metric(const struct api *api, const struct worker_metric *m, struct buf *out)
{
    struct route_worker_info info;
    metrics_head(out, m->name, m->type, m->help);
    for (uint32_t i = 0; i < route_n_workers(api->config.route); i++) {
        struct buf labels;
        route_worker_info(api->config.route, i, &info);
        if (!is_shown(&info))
            continue;
        buf_init(&labels, 1024);
        metrics_label(&labels, "worker", info.name);
        const char *at = (const char *)&info + m->offset;
        metrics_sample_int(out, m->name, buf_cstr(&labels), m->wide ? *(const uint64_t *)at : *(const uint32_t *)at);
        buf_fini(&labels);
    }
}

static void write_pool_usage(const struct api *api, struct buf *out)
{
    struct route_worker_info info;
    double most = 0;
    size_t blocks = 0;
    bool seen[64] = {false};
    for (uint32_t i = 0; i < route_n_workers(api->config.route); i++) {
        route_worker_info(api->config.route, i, &info);
        if (is_shown(&info) && info.pool_bytes && (double)info.pool_used_bytes / (double)info.pool_bytes > most)
            most = (double)info.pool_used_bytes / (double)info.pool_bytes;
        if (info.store >= 0 && info.store < 64 && !seen[info.store]) {
            seen[info.store] = true;
            blocks += info.store_blocks;
        }
    }
    metrics_head(out, "kv_cache_usage_ratio", "gauge", "Part of the pool that is in use, 0 to 1; of several stores the fullest.");
    metrics_sample(out, "kv_cache_usage_ratio", "", most);
    gauge(out, "prefix_index_blocks", "Blocks that the router knows to be in a pool.", blocks);
    metrics_head(out, "cache_config_info", "gauge", "Always 1; the labels tell.");
    metrics_sample_int(out, "cache_config_info", "block_size=\"128\"", 1);
}

static void write_route(const struct api *api, struct buf *out)
{
    const struct route *route = api->config.route;
    const struct route_counters *c = route_counters(route);
    gauge(out, "num_requests_running", "Requests that a worker has.", route_n_running(route));
    gauge(out, "num_requests_waiting", "Requests in the router's queue.", route_n_queued(route));
    gauge(out, "workers_ready", "Workers that take requests.", route_n_ready(route));
    counter(out, "requests_dispatched_total", "Requests given to workers, retries counted.", c->dispatched);
    counter(out, "request_retries_total", "Requests that moved to another worker.", c->retried);
    counter(out, "requests_cancelled_total", "Requests cancelled before their end.", c->cancelled);
    counter(out, "queue_rejected_total", "Requests refused because the queue was full.", c->queue_rejected);
    counter(out, "workers_lost_total", "Workers that fell silent or ended.", c->workers_lost);
    counter(out, "workers_unhealthy_total", "Workers that stopped making progress.", c->unhealthy);
    counter(out, "messages_malformed_total", "Messages that made no sense.", c->malformed);
    counter(out, "messages_late_total", "Messages about requests that had moved or ended.", c->dropped_late);
    counter(out, "store_event_gaps_total", "Gaps in a store's block events.", c->store_gaps);
    counter(out, "store_snapshots_total", "Snapshots asked of stores.", c->snapshots);
    for (size_t i = 0; i < ARRAY_LEN(worker_metrics); i++)
        write_worker_metric(api, &worker_metrics[i], out);
    write_pool_usage(api, out);
}

static void write_http(const struct api *api, struct buf *out)
{
    struct buf labels;
    buf_init(&labels, 1024);
    metrics_label(&labels, "version", api->config.version);
    metrics_label(&labels, "model_name", api->config.model);
    metrics_head(out, "build_info", "gauge", "Always 1; the labels tell.");
    metrics_sample_int(out, "build_info", buf_cstr(&labels), 1);
    buf_fini(&labels);
    gauge(out, "http_exchanges_open", "HTTP requests without a finished answer.", http_server_n_open(api->http));
    counter(out, "http_streams_cut_total", "Streams cut because their reader was too slow.", http_server_n_cut(api->http));
}

void handle_metrics(struct api *api, struct http_exchange *exchange)
{
    struct buf out;
    buf_init(&out, API_REPLY_BYTES_MAX);
    write_http(api, &out);
    metrics_write(&api->metrics, &out);
    write_route(api, &out);
    http_reply(exchange, 200, "text/plain; version=0.0.4; charset=utf-8", out.data, out.len);
    api_count(api, ENDPOINT_METRICS, 200);
    buf_fini(&out);
}
