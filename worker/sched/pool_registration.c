#include "worker/sched/pool_registration.h"

#include "proto/base/clock.h"
#include "proto/base/log.h"
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { PROGRESS_LOG_US = 1000000 };

struct mapping {
    struct mapping *next;
    struct pool_registration *owner;
    void *base;
    size_t bytes;
    bool registered;
    bool running;            /* there is a thread to join */
    pthread_t thread;
    atomic_bool stop;        /* asked of the thread; nothing else depends on it, so relaxed */
    atomic_bool done;        /* stored last by the thread (release): then `result` is there */
    int result;
    uint64_t started_us, logged_us;
};

struct pool_registration {
    struct pool_registration_config config;
    bool at_once;            /* the device's memory is the host's */
    struct mapping *mappings; /* the newest first */
    int wake_fd;             /* eventfd: a thread is done */
    struct loop_source *wake, *retry;
};

/* ---- the thread ---- */

static bool on_progress(size_t done_bytes, void *arg)
{
    struct mapping *m = arg;
    uint64_t now_us = clock_now_us();

    if (now_us - m->logged_us >= PROGRESS_LOG_US && done_bytes < m->bytes) {
        m->logged_us = now_us;
        LOG_INFO("pool_registering", LOG_INT("pool_bytes", m->bytes), LOG_INT("done_bytes", done_bytes), LOG_INT("took_ms", (now_us - m->started_us) / 1000));
    }
    return !atomic_load_explicit(&m->stop, memory_order_relaxed);
}

static void *thread_main(void *arg)
{
    struct mapping *m = arg;
    const struct pool_registration_config *c = &m->owner->config;
    const uint64_t one = 1;

    m->result = c->dev->host_register(c->device, m->base, m->bytes, on_progress, m);
    atomic_store_explicit(&m->done, true, memory_order_release);
    /* The counter cannot be full: each thread adds one. */
    ssize_t ignored = write(m->owner->wake_fd, &one, sizeof one);
    (void)ignored;
    return NULL;
}

static int thread_start(struct mapping *m)
{
    sigset_t all, old;
    int rc;

    m->started_us = m->logged_us = clock_now_us();
    atomic_store_explicit(&m->stop, false, memory_order_relaxed);
    atomic_store_explicit(&m->done, false, memory_order_relaxed);
    LOG_INFO("pool_registering", LOG_INT("pool_bytes", m->bytes), LOG_INT("done_bytes", 0));
    /* Signals are the loop's. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    rc = -pthread_create(&m->thread, NULL, thread_main, m);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    m->running = rc == 0;
    return rc;
}

/* ---- ends ---- */

static void log_result(const struct pool_registration *r, const struct mapping *m, int result)
{
    if (result < 0)
        LOG_ERROR("pool_not_registered", LOG_STR("device", r->config.dev->name), LOG_INT("pool_bytes", m->bytes), LOG_STR("error", strerror(-result)),
                  LOG_STR("note", "the worker goes on without the pool and tries again"));
    else
        LOG_INFO("pool_registered", LOG_STR("device", r->config.dev->name), LOG_INT("pool_bytes", m->bytes), LOG_INT("took_ms", (clock_now_us() - m->started_us) / 1000));
}

static void thread_end(struct mapping *m)
{
    pthread_join(m->thread, NULL);
    m->running = false;
    m->registered = m->result >= 0;
}

static void on_wake(int fd, int events, void *arg)
{
    struct pool_registration *r = arg;
    uint64_t n;
    ssize_t ignored = read(fd, &n, sizeof n);

    (void)ignored;
    (void)events;
    for (struct mapping *m = r->mappings; m; m = m->next) {
        if (!m->running || !atomic_load_explicit(&m->done, memory_order_acquire))
            continue;
        thread_end(m);
        if (m == r->mappings && !m->registered)
            loop_timer_arm(r->retry, r->config.retry_us);
        if (m == r->mappings && m->registered)
            r->config.registered(r->config.arg);
        log_result(r, m, m->result);
    }
}

static void on_retry(void *arg)
{
    struct pool_registration *r = arg;
    struct mapping *m = r->mappings;

    if (m && !m->registered && !m->running && thread_start(m) < 0)
        loop_timer_arm(r->retry, r->config.retry_us);
}

/* ---- life ---- */

int pool_registration_create(const struct pool_registration_config *config, struct pool_registration **ret)
{
    struct pool_registration *r = calloc(1, sizeof *r);
    struct device_properties properties;
    int rc;

    if (!r)
        return -ENOMEM;
    r->config = *config;
    config->dev->properties(config->device, &properties);
    r->at_once = properties.host_memory;
    r->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    rc = r->wake_fd < 0 ? -errno : loop_fd_add(config->loop, r->wake_fd, LOOP_READ, on_wake, r, &r->wake);
    if (rc == 0)
        rc = loop_timer_add(config->loop, on_retry, r, &r->retry);
    if (rc < 0) {
        pool_registration_free(r);
        return rc;
    }
    *ret = r;
    return 0;
}

void pool_registration_free(struct pool_registration *r)
{
    if (!r)
        return;
    while (r->mappings)
        pool_registration_remove(r, r->mappings->base);
    loop_source_free(r->retry);
    loop_source_free(r->wake);
    if (r->wake_fd >= 0)
        close(r->wake_fd);
    free(r);
}

int pool_registration_add(struct pool_registration *r, void *base, size_t bytes)
{
    struct mapping *m = calloc(1, sizeof *m);
    int rc;

    if (!m)
        return -ENOMEM;
    *m = (struct mapping){.owner = r, .base = base, .bytes = bytes, .next = r->mappings};
    if (r->at_once) {
        rc = r->config.dev->host_register(r->config.device, base, bytes, NULL, NULL);
        m->registered = rc >= 0;
    } else {
        rc = thread_start(m);
    }
    if (rc < 0) {
        log_result(r, m, rc);
        free(m);
        return rc;
    }
    r->mappings = m;
    return 0;
}

void pool_registration_remove(struct pool_registration *r, void *base)
{
    struct mapping **link = &r->mappings;

    while (*link && (*link)->base != base)
        link = &(*link)->next;
    struct mapping *m = *link;
    if (!m)
        return;
    if (m->running) {
        atomic_store_explicit(&m->stop, true, memory_order_relaxed);
        thread_end(m);
    }
    if (m->registered)
        r->config.dev->host_unregister(r->config.device, base);
    *link = m->next;
    free(m);
}

bool pool_registration_ready(const struct pool_registration *r)
{
    return r->mappings && r->mappings->registered;
}
