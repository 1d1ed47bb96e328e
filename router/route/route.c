/* Create, submit, cancel, and what the outside may know. */
#include "router/route/route.h"
#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "router/route/route_private.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <zmq.h>

enum { RETRY_AFTER_S_MAX = 60 };

/* Never zero, never that of an earlier router: messages of another epoch are dropped. */
static int choose_epoch(struct route *route)
{
    route->epoch = route->config.rng_seed;
    if (!route->epoch && getrandom(&route->epoch, sizeof(route->epoch), 0) != sizeof(route->epoch))
        return -EIO;
    route->epoch |= 1;
    return 0;
}

int route_create(const struct route_config *config, struct route **ret_route, struct error *err)
{
    struct route *route = calloc(1, sizeof(*route));
    if (!route)
        return error_set(err, -ENOMEM, "out of memory");
    route->config = *config;
    route_list_init(&route->queue);
    route_list_init(&route->moving);
    route->same_host = strncmp(config->endpoint, "ipc://", 6) == 0;
    int rc = choose_epoch(route);
    route->zmq_context = zmq_ctx_new();
    if (rc >= 0 && !route->zmq_context)
        rc = -ENOMEM;
    if (rc >= 0)
        rc = prefix_index_create(ROUTE_INDEX_ENTRIES_MAX, &route->index);
    if (rc >= 0)
        rc = loop_timer_add(config->loop, dispatch_run, route, &route->dispatch_timer);
    if (rc < 0) {
        error_set(err, rc, "cannot start routing: %s", strerror(-rc));
        goto fail;
    }
    rc = worker_link_open(route, err);
    if (rc < 0)
        goto fail;
    rc = liveness_start(route);
    if (rc < 0) {
        error_set(err, rc, "cannot start the heartbeat: %s", strerror(-rc));
        goto fail;
    }
    *ret_route = route;
    return 0;
fail:
    route_free(route);
    return rc;
}

void route_free(struct route *route)
{
    if (!route)
        return;
    ASSERT(route_list_is_empty(&route->queue) && route_list_is_empty(&route->moving));
    for (uint32_t i = 0; i < route->n_workers; i++)
        worker_free(route->workers[i]);
    store_feed_close_all(route);
    worker_link_close(route);
    loop_source_free(route->beat_timer);
    loop_source_free(route->dispatch_timer);
    if (route->zmq_context)
        zmq_ctx_term(route->zmq_context);
    prefix_index_free(route->index);
    free(route);
}

static int check_room(struct route *route, const struct route_job *job, uint32_t *ret_retry_after_s, struct error *err)
{
    const struct route_config *config = &route->config;
    uint64_t tokens = route->queued_tokens + job->prompt->n;
    /* A single prompt that is longer than the limit may still come in when nobody else waits. */
    bool full = route->n_queued >= config->queue_requests_max || (route->n_queued > 0 && tokens > config->queue_tokens_max);
    bool room = false;
    for (uint32_t i = 0; i < route->n_workers; i++)
        room |= worker_takes(route->workers[i]);
    if (!full || (room && route->n_queued == 0))
        return 0;
    route->counters.queue_rejected++;
    *ret_retry_after_s = route_retry_after_s(route);
    return error_set(err, -EBUSY, "%u requests with %llu prompt tokens are waiting; try again in %u s", route->n_queued,
                     (unsigned long long)route->queued_tokens, *ret_retry_after_s);
}

int route_submit(struct route *route, const struct route_job *job, struct route_request **ret_request, uint32_t *ret_retry_after_s, struct error *err)
{
    uint32_t context_length = route_context_length(route);
    struct route_request *request;
    int rc = context_length ? dispatch_check_length(job->prompt->n, job->max_tokens, context_length, err) : 0;
    if (rc >= 0 && !job->admitted)
        rc = check_room(route, job, ret_retry_after_s, err);
    if (rc < 0)
        return rc;
    rc = request_create(route, job, &request);
    if (rc < 0)
        return error_set(err, rc, "out of memory");
    request_queue(request, false);
    *ret_request = request;
    return 0;
}

void route_cancel(struct route_request *request)
{
    struct route *route = request->route;
    struct worker *worker = request->place == REQUEST_SENT ? request->worker : NULL;
    uint64_t wire_id = request->wire_id;
    route->counters.cancelled++;
    request_unlink(request);
    request_free(request);
    if (worker) {
        Tidepool__Engine__Cancel cancel = TIDEPOOL__ENGINE__CANCEL__INIT;
        cancel.epoch = route->epoch;
        worker_link_send(worker, ENGINE_CANCEL, wire_id, &cancel.base);
    }
    dispatch_kick(route);
}

uint32_t route_n_ready(const struct route *route)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < route->n_workers; i++)
        n += route->workers[i]->state == WORKER_READY;
    return n;
}

uint32_t route_context_length(const struct route *route)
{
    uint32_t longest = 0;
    for (uint32_t i = 0; i < route->n_workers; i++)
        if (route->workers[i]->state == WORKER_READY && route->workers[i]->context_length > longest)
            longest = route->workers[i]->context_length;
    return longest;
}

int route_fingerprints(const struct route *route, uint8_t (*ret_fingerprints)[FINGERPRINT_BYTES], int max)
{
    int n = 0;
    for (uint32_t i = 0; i < route->n_workers && n < max; i++) {
        const struct worker *worker = route->workers[i];
        bool known = worker->state != WORKER_READY || !worker->feed || !worker->prefix_reuse;
        for (int k = 0; k < n && !known; k++)
            known = memcmp(ret_fingerprints[k], worker->fingerprint, FINGERPRINT_BYTES) == 0;
        if (!known)
            memcpy(ret_fingerprints[n++], worker->fingerprint, FINGERPRINT_BYTES);
    }
    return n;
}

/* How long until the queue has gone down by one, from what requests have taken of late. */
uint32_t route_retry_after_s(const struct route *route)
{
    uint64_t places = 0;
    for (uint32_t i = 0; i < route->n_workers; i++)
        if (route->workers[i]->state == WORKER_READY)
            places += route->workers[i]->max_running;
    double seconds = places ? route->seconds_per_request * route->n_queued / (double)places : 5;
    if (seconds < 1)
        return 1;
    return seconds > RETRY_AFTER_S_MAX ? RETRY_AFTER_S_MAX : (uint32_t)seconds;
}

uint32_t route_n_queued(const struct route *route)
{
    return route->n_queued;
}

uint32_t route_n_running(const struct route *route)
{
    return route->n_running;
}

const struct route_counters *route_counters(const struct route *route)
{
    return &route->counters;
}

uint32_t route_n_workers(const struct route *route)
{
    return route->n_workers;
}

void route_worker_info(const struct route *route, uint32_t i, struct route_worker_info *ret)
{
    ASSERT(i < route->n_workers);
    const struct worker *worker = route->workers[i];
    int store = worker->feed ? store_feed_number(worker->feed) : -1;
    *ret = (struct route_worker_info){
        .name = worker->name, .state = worker_state_name(worker->state), .description = worker->description,
        .n_inflight = worker->n_inflight, .n_running = worker->n_running, .n_prefilling = worker->n_prefilling,
        .n_waiting = worker->n_waiting, .context_length = worker->context_length, .max_running = worker->max_running,
        .load_tokens = worker->load_tokens, .device_bytes = worker->device_bytes, .device_peak_bytes = worker->device_peak_bytes,
        .page_cache_bytes = worker->page_cache_bytes, .page_cache_used_bytes = worker->page_cache_used_bytes,
        .page_cache_hits = worker->page_cache_hits, .page_cache_misses = worker->page_cache_misses,
        .pool_bytes = worker->pool_bytes, .pool_used_bytes = worker->pool_used_bytes, .dispatched = worker->dispatched,
        .progress = worker->progress, .store_connected = worker->store_connected, .store = store,
        .store_blocks = store >= 0 ? prefix_index_store_blocks(route->index, store) : 0,
    };
}
