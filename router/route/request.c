/* Requests: where they are, their wire ids, their tokens so far, and their end. */
#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "router/route/route_private.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* -- the table by wire id: ids are consecutive, so their low bits spread them -- */

static struct route_request **bucket(struct route *route, uint64_t wire_id)
{
    return &route->by_wire_id[wire_id % ROUTE_WIRE_BUCKETS];
}

struct route_request *request_find(struct route *route, uint64_t wire_id)
{
    struct route_request *request = *bucket(route, wire_id);
    while (request && request->wire_id != wire_id)
        request = request->wire_next;
    return request;
}

void request_table_add(struct route_request *request)
{
    struct route_request **head = bucket(request->route, request->wire_id);
    request->wire_next = *head;
    *head = request;
}

void request_table_remove(struct route_request *request)
{
    struct route_request **at = bucket(request->route, request->wire_id);
    while (*at != request)
        at = &(*at)->wire_next;
    *at = request->wire_next;
}

/* -- life -- */

static int copy_ids(const uint32_t *ids, uint32_t n, uint32_t **ret_copy)
{
    *ret_copy = malloc((n + 1) * sizeof(uint32_t));
    if (!*ret_copy)
        return -ENOMEM;
    if (n)
        memcpy(*ret_copy, ids, n * sizeof(uint32_t));
    return 0;
}

static int copy_bias(struct route_sampling *sampling)
{
    struct route_logit_bias *copy = malloc((sampling->n_logit_bias + 1) * sizeof(*copy));
    if (!copy)
        return -ENOMEM;
    if (sampling->n_logit_bias)
        memcpy(copy, sampling->logit_bias, sampling->n_logit_bias * sizeof(*copy));
    sampling->logit_bias = copy;
    return 0;
}

int request_create(struct route *route, const struct route_job *job, struct route_request **ret_request)
{
    struct route_request *request = calloc(1, sizeof(*request));
    uint32_t *stop_ids = NULL;
    if (!request || copy_ids(job->stop_ids, job->n_stop_ids, &stop_ids) < 0)
        goto fail;
    request->route = route;
    request->job = *job;
    request->job.stop_ids = stop_ids;
    if (copy_bias(&request->job.sampling) < 0)
        goto fail;
    snprintf(request->id, sizeof(request->id), "%s", job->id);
    request->job.id = request->id;
    prompt_ref(job->prompt);
    request->submitted_us = clock_now_us();
    route_list_init(&request->link);
    *ret_request = request;
    return 0;
fail:
    free(stop_ids);
    free(request);
    return -ENOMEM;
}

void request_free(struct route_request *request)
{
    if (!request)
        return;
    prompt_unref(request->job.prompt);
    free((void *)request->job.stop_ids);
    free(request->job.sampling.logit_bias);
    free(request->generated);
    free(request->eos_ids);
    free(request);
}

void request_queue(struct route_request *request, bool front)
{
    struct route *route = request->route;
    request->place = REQUEST_QUEUED;
    request->queued_us = clock_now_us();
    route->n_queued++;
    route->queued_tokens += request->job.prompt->n;
    route_list_insert(front ? &route->queue : route->queue.prev, &request->link);
    dispatch_kick(route);
}

void request_unlink(struct route_request *request)
{
    struct route *route = request->route;
    route_list_remove(&request->link);
    if (request->place == REQUEST_QUEUED) {
        route->n_queued--;
        route->queued_tokens -= request->job.prompt->n;
    }
    if (request->place == REQUEST_SENT) {
        struct worker *worker = request->worker;
        worker->n_inflight--;
        worker->load_tokens -= request->load_tokens;
        route->n_running--;
        request->load_tokens = 0;
        request->worker = NULL;
        request_table_remove(request);
    }
}

int request_append(struct route_request *request, uint32_t token)
{
    if (request->n_generated == request->cap_generated) {
        uint32_t cap = request->cap_generated ? request->cap_generated * 2 : 64;
        uint32_t *bigger = realloc(request->generated, cap * sizeof(uint32_t));
        if (!bigger)
            return -ENOMEM;
        request->generated = bigger;
        request->cap_generated = cap;
    }
    request->generated[request->n_generated++] = token;
    return 0;
}

static bool contains(const uint32_t *ids, uint32_t n, uint32_t id)
{
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] == id)
            return true;
    return false;
}

bool request_is_stop(const struct route_request *request, uint32_t token)
{
    return contains(request->eos_ids, request->n_eos_ids, token);
}

/* -- the end -- */

static void learn_duration(struct route_request *request)
{
    double seconds = (double)(clock_now_us() - request->submitted_us) / 1e6;
    double *average = &request->route->seconds_per_request;
    *average = *average == 0 ? seconds : *average * 0.9 + seconds * 0.1;
}

void request_finish(struct route_request *request, const struct route_finished *finished)
{
    learn_duration(request);
    request_unlink(request);
    dispatch_kick(request->route);
    request->job.events->on_finished(finished, request->job.arg);
    request_free(request);
}

void request_fail(struct route_request *request, enum route_failure failure, const char *text)
{
    request_unlink(request);
    dispatch_kick(request->route);
    request->job.events->on_failed(failure, text, request->job.arg);
    request_free(request);
}

/* What the worker generated was complete when it died: only its last word is missing. */
static bool finish_here(struct route_request *request)
{
    bool full = request->max_tokens > 0 && request->n_generated >= request->max_tokens;
    if (!full && !request->ended)
        return false;
    struct route_finished finished = {
        .stopped = request->ended, .completion_tokens = request->n_generated, .retries = request->retries, .worker = ""};
    request_finish(request, &finished);
    return true;
}

void request_retry(struct route_request *request, const char *why)
{
    struct route *route = request->route;
    if (finish_here(request))
        return;
    if (request->retries >= route->config.retries_max) {
        request_fail(request, ROUTE_LOST, why);
        return;
    }
    request->retries++;
    route->counters.retried++;
    LOG_WARN("request_retried", LOG_STR("req", request->id), LOG_STR("why", why), LOG_INT("generated", request->n_generated),
             LOG_INT("retries", request->retries));
    request_unlink(request);
    request_queue(request, true);
}

void request_settle_moved(struct route *route)
{
    /* From the back, so that the oldest ends up at the front of the queue. */
    while (!route_list_is_empty(&route->moving))
        request_retry(ROUTE_REQUEST_OF(route->moving.prev), "its worker is gone");
}
