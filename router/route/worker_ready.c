/* Ready: a worker introduces itself, or says it again because it has not heard from us. */
#include "proto/base/capped_alloc.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "router/route/route_private.h"
#include <stdio.h>
#include <string.h>

enum { MAX_RUNNING_MAX = 65536, CONTEXT_MAX = 1 << 27 };

static bool is_printable(const char *text, size_t max)
{
    size_t n = strlen(text);
    if (n > max)
        return false;
    for (size_t i = 0; i < n; i++)
        if (text[i] < 0x20 || text[i] == 0x7f)
            return false;
    return true;
}

static bool is_endpoint(const char *text)
{
    return !*text || (is_printable(text, ROUTE_ENDPOINT_MAX) && (strncmp(text, "ipc://", 6) == 0 || strncmp(text, "tcp://", 6) == 0));
}

/* NULL if every field is within its bounds. */
static const char *check(const struct route *route, const Tidepool__Engine__Ready *ready)
{
    if (!*ready->name || !is_printable(ready->name, ROUTE_NAME_MAX))
        return "name";
    if (ready->boot_uuid.len != 16)
        return "boot_uuid";
    if (ready->fingerprint.len != FINGERPRINT_BYTES)
        return "fingerprint";
    if (ready->context_length == 0 || ready->context_length > CONTEXT_MAX)
        return "context_length";
    if (ready->vocab_size < route->config.vocab_size)
        return "vocab_size is smaller than the router's tokenizer";
    if (ready->n_eos_ids > ROUTE_EOS_MAX)
        return "eos_ids";
    if (ready->max_running == 0 || ready->max_running > MAX_RUNNING_MAX)
        return "max_running";
    if (ready->store_uuid.len != 0 && ready->store_uuid.len != 16)
        return "store_uuid";
    if (!is_endpoint(ready->store_event_endpoint) || !is_endpoint(ready->store_snapshot_endpoint))
        return "store endpoints";
    return NULL;
}

static struct worker *find_by_name(struct route *route, const char *name, const struct worker *except)
{
    for (uint32_t i = 0; i < route->n_workers; i++)
        if (route->workers[i] != except && route->workers[i]->state != WORKER_LOST && strcmp(route->workers[i]->name, name) == 0)
            return route->workers[i];
    return NULL;
}

static void copy_ready(struct worker *worker, const Tidepool__Engine__Ready *ready)
{
    snprintf(worker->name, sizeof(worker->name), "%s", ready->name);
    snprintf(worker->description, sizeof(worker->description), "%s", is_printable(ready->description, ROUTE_DESCRIPTION_MAX) ? ready->description : "");
    memcpy(worker->boot_uuid, ready->boot_uuid.data, 16);
    memcpy(worker->fingerprint, ready->fingerprint.data, FINGERPRINT_BYTES);
    worker->context_length = ready->context_length;
    worker->vocab_size = ready->vocab_size;
    worker->max_running = ready->max_running;
    worker->n_eos_ids = (uint32_t)ready->n_eos_ids;
    for (size_t i = 0; i < ready->n_eos_ids; i++)
        worker->eos_ids[i] = ready->eos_ids[i];
    worker->prefix_reuse = ready->prefix_reuse;
    worker->pid = (pid_t)ready->pid;
    worker->feed = NULL;
    if (*ready->store_event_endpoint && *ready->store_snapshot_endpoint)
        worker->feed = store_feed_get(worker->route, ready->store_event_endpoint, ready->store_snapshot_endpoint);
}

static void acknowledge(struct worker *worker)
{
    Tidepool__Engine__ReadyAck ack = TIDEPOOL__ENGINE__READY_ACK__INIT;
    ack.epoch = worker->route->epoch;
    ack.heartbeat_ms = worker->route->config.heartbeat_ms;
    worker_link_send(worker, ENGINE_READY_ACK, 0, &ack.base);
}

/* A worker that says Ready has no request of ours: it was started, or it has cancelled all after a silence. */
static void accept_ready(struct route *route, struct worker *worker, const Tidepool__Engine__Ready *ready)
{
    bool was_known = worker->state != WORKER_LOST;
    if (was_known && worker->n_inflight > 0 && worker->heard_us + 2000ull * route->config.heartbeat_ms < clock_now_us())
        worker_set_lost(worker, "it started over");
    copy_ready(worker, ready);
    worker->heard_us = worker->progress_us = clock_now_us();
    worker->malformed = 0;
    if (worker->state != WORKER_READY)
        LOG_INFO("worker_ready", LOG_STR("worker", worker->name), LOG_INT("pid", worker->pid), LOG_INT("context_length", worker->context_length),
                 LOG_INT("max_running", worker->max_running), LOG_INT("store", worker->feed ? store_feed_number(worker->feed) : -1),
                 LOG_STR("description", worker->description));
    worker->state = WORKER_READY;
    liveness_watch_pid(worker);
    acknowledge(worker);
    dispatch_kick(route);
}

static void take_ready(struct route *route, const uint8_t *identity, size_t n_identity, const Tidepool__Engine__Ready *ready)
{
    struct worker *worker = worker_find(route, identity, n_identity);
    struct worker *namesake = find_by_name(route, ready->name, worker);
    if (namesake) { /* dead and not yet noticed, or a second one by mistake: it says Ready again, and by then we know */
        LOG_WARN("worker_refused", LOG_STR("worker", ready->name), LOG_STR("why", "another worker of this name is alive"));
        return;
    }
    worker_forget_lost(route, ready->name, worker);
    if (!worker)
        worker = worker_add(route, identity, n_identity);
    if (!worker) {
        LOG_WARN("worker_refused", LOG_STR("worker", ready->name), LOG_STR("why", "too many workers"));
        return;
    }
    accept_ready(route, worker, ready);
}

void worker_on_ready(struct route *route, const uint8_t *identity, size_t n_identity, const uint8_t *body, size_t len)
{
    struct capped_alloc alloc;
    capped_alloc_init(&alloc, ROUTE_UNPACK_BYTES_MAX);
    Tidepool__Engine__Ready *ready = tidepool__engine__ready__unpack(&alloc.pb, len, body);
    const char *why = ready && n_identity <= ROUTE_IDENTITY_MAX ? check(route, ready) : "malformed";
    if (why) {
        route->counters.malformed++;
        LOG_WARN("worker_refused", LOG_STR("worker", ready && is_printable(ready->name, ROUTE_NAME_MAX) ? ready->name : "unknown"), LOG_STR("why", why));
    } else {
        take_ready(route, identity, n_identity, ready);
    }
    tidepool__engine__ready__free_unpacked(ready, &alloc.pb);
}
