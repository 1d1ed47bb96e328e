/* Workers and their states. A worker is known by its ZeroMQ identity (name and boot uuid), so one that restarts is another worker. */
#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "router/route/route_private.h"
#include <stdlib.h>
#include <string.h>

struct worker *worker_find(struct route *route, const uint8_t *identity, size_t n)
{
    for (uint32_t i = 0; i < route->n_workers; i++) {
        struct worker *worker = route->workers[i];
        if (worker->n_identity == n && memcmp(worker->identity, identity, n) == 0)
            return worker;
    }
    return NULL;
}

static void forget_worker(struct route_link *requests, const struct worker *worker)
{
    for (struct route_link *link = requests->next; link != requests; link = link->next)
        if (ROUTE_REQUEST_OF(link)->avoid == worker)
            ROUTE_REQUEST_OF(link)->avoid = NULL;
}

/* A slot for a new worker: a free one, or that of the lost worker that was silent the longest. */
static int find_slot(struct route *route)
{
    int oldest = -1;
    if (route->n_workers < ROUTE_WORKERS_MAX)
        return (int)route->n_workers++;
    for (uint32_t i = 0; i < route->n_workers; i++)
        if (route->workers[i]->state == WORKER_LOST && route->workers[i]->n_inflight == 0 &&
            (oldest < 0 || route->workers[i]->heard_us < route->workers[oldest]->heard_us))
            oldest = (int)i;
    if (oldest >= 0)
        worker_free(route->workers[oldest]);
    return oldest;
}

struct worker *worker_add(struct route *route, const uint8_t *identity, size_t n)
{
    ASSERT(n <= ROUTE_IDENTITY_MAX);
    struct worker *worker = calloc(1, sizeof(*worker));
    if (!worker)
        return NULL;
    int slot = find_slot(route);
    if (slot < 0) {
        free(worker);
        return NULL;
    }
    worker->route = route;
    worker->state = WORKER_LOST; /* until its Ready is taken */
    memcpy(worker->identity, identity, n);
    worker->n_identity = n;
    worker->heard_us = worker->progress_us = clock_now_us();
    worker->out_last = &worker->out_first;
    route_list_init(&worker->requests);
    route->workers[slot] = worker;
    return worker;
}

void worker_free(struct worker *worker)
{
    if (!worker)
        return;
    ASSERT(route_list_is_empty(&worker->requests));
    forget_worker(&worker->route->queue, worker);
    forget_worker(&worker->route->moving, worker);
    worker_link_drop_backlog(worker);
    loop_source_free(worker->pid_source);
    free(worker);
}

void worker_forget_lost(struct route *route, const char *name, const struct worker *except)
{
    for (uint32_t i = 0; i < route->n_workers;) {
        struct worker *worker = route->workers[i];
        if (worker != except && worker->state == WORKER_LOST && strcmp(worker->name, name) == 0) {
            worker_free(worker);
            route->workers[i] = route->workers[--route->n_workers];
        } else {
            i++;
        }
    }
}

bool worker_takes(const struct worker *worker)
{
    return worker->state == WORKER_READY && worker->n_inflight < worker->max_running + worker->route->config.lookahead;
}

const char *worker_state_name(enum worker_state state)
{
    switch (state) {
    case WORKER_READY: return "ready";
    case WORKER_UNHEALTHY: return "unhealthy";
    case WORKER_DRAINING: return "draining";
    case WORKER_LOST: return "lost";
    }
    return "?";
}

/* The requests are handled later, one at a time, since each may end others. */
static void move_requests(struct worker *worker)
{
    while (!route_list_is_empty(&worker->requests)) {
        struct route_request *request = ROUTE_REQUEST_OF(worker->requests.next);
        request_unlink(request);
        request->place = REQUEST_MOVING;
        request->avoid = worker;
        route_list_insert(worker->route->moving.prev, &request->link);
    }
    dispatch_kick(worker->route);
}

void worker_set_lost(struct worker *worker, const char *why)
{
    if (worker->state == WORKER_LOST)
        return;
    LOG_WARN("worker_lost", LOG_STR("worker", worker->name), LOG_STR("why", why), LOG_INT("requests", worker->n_inflight));
    worker->state = WORKER_LOST;
    worker->route->counters.workers_lost++;
    worker_link_drop_backlog(worker);
    loop_source_free(worker->pid_source);
    worker->pid_source = NULL;
    move_requests(worker);
}

void worker_set_unhealthy(struct worker *worker)
{
    LOG_WARN("worker_unhealthy", LOG_STR("worker", worker->name), LOG_INT("progress", worker->progress), LOG_INT("requests", worker->n_inflight));
    worker->state = WORKER_UNHEALTHY;
    worker->route->counters.unhealthy++;
    /* It may come back: it must not go on with what others do now. */
    for (struct route_link *link = worker->requests.next; link != &worker->requests && worker->state == WORKER_UNHEALTHY;) {
        struct route_request *request = ROUTE_REQUEST_OF(link);
        link = link->next;
        Tidepool__Engine__Cancel cancel = TIDEPOOL__ENGINE__CANCEL__INIT;
        cancel.epoch = worker->route->epoch;
        worker_link_send(worker, ENGINE_CANCEL, request->wire_id, &cancel.base);
    }
    move_requests(worker);
}
