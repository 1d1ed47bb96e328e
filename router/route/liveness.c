/* Who is alive. Heartbeats come from the engine's loop and carry a progress counter, since ZeroMQ's own are answered by its I/O thread while the
 * engine hangs. On one host the end of a worker's process is seen at once by its pidfd. */
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "router/route/route_private.h"

static void beat(struct worker *worker)
{
    Tidepool__Engine__Heartbeat message = TIDEPOOL__ENGINE__HEARTBEAT__INIT;
    message.epoch = worker->route->epoch;
    worker_link_send(worker, ENGINE_HEARTBEAT, 0, &message.base);
}

static void examine(struct worker *worker, uint64_t now)
{
    const struct route_config *config = &worker->route->config;
    if (worker->state == WORKER_LOST)
        return;
    if (now - worker->heard_us > ROUTE_BEATS_MISSED_MAX * 1000ull * config->heartbeat_ms) {
        worker_set_lost(worker, "silent");
        return;
    }
    if (worker->state == WORKER_READY && worker->busy && now - worker->progress_us > config->progress_timeout_us)
        worker_set_unhealthy(worker);
    beat(worker);
}

static void on_beat(void *arg)
{
    struct route *route = arg;
    uint64_t now = clock_now_us();
    for (uint32_t i = 0; i < route->n_workers; i++)
        examine(route->workers[i], now);
    dispatch_expire(route, now);
    store_feed_tick(route, now);
    loop_timer_arm(route->beat_timer, 1000ull * route->config.heartbeat_ms);
}

int liveness_start(struct route *route)
{
    int rc = loop_timer_add(route->config.loop, on_beat, route, &route->beat_timer);
    return rc < 0 ? rc : loop_timer_arm(route->beat_timer, 1000ull * route->config.heartbeat_ms);
}

static void on_pid_gone(pid_t pid, void *arg)
{
    (void)pid;
    worker_set_lost(arg, "its process has ended");
}

/* Best effort: a worker in another pid namespace is watched by its heartbeats alone. */
void liveness_watch_pid(struct worker *worker)
{
    if (!worker->route->same_host || worker->pid <= 0 || worker->pid_source)
        return;
    (void)loop_pid_add(worker->route->config.loop, worker->pid, on_pid_gone, worker, &worker->pid_source);
}
