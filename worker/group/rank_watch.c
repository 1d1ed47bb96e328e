#include "worker/group/rank_watch.h"

#include "kernels/collective.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { LOOK_MS = 100 };

struct rank_watch {
    pthread_t thread;
    struct pollfd *fds;        /* [n + 1], the thread's; the last one is stop_fd */
    int n;
    int gone_fd, stop_fd;
    _Atomic uint64_t grace_us; /* relaxed, as the next: a late look is as good */
    _Atomic int gone;          /* what it says is told by gone_fd */
    pthread_mutex_t mutex;     /* guards the three below, and nothing is waited for under it */
    const struct collective_ops *ops;
    struct collective *collective;
    bool tripped;
};

static void signal_fd(int fd)
{
    const uint64_t one = 1;
    while (write(fd, &one, sizeof(one)) < 0 && errno == EINTR)
        ;
}

void rank_watch_trip(struct rank_watch *w)
{
    pthread_mutex_lock(&w->mutex);
    if (!w->tripped && w->collective)
        w->ops->abort(w->collective);
    w->tripped = true;
    pthread_mutex_unlock(&w->mutex);
    signal_fd(w->gone_fd);
}

void rank_watch_collective(struct rank_watch *w, const struct collective_ops *ops, struct collective *collective)
{
    pthread_mutex_lock(&w->mutex);
    w->ops = ops;
    w->collective = collective;
    if (w->tripped && collective)
        ops->abort(collective);
    pthread_mutex_unlock(&w->mutex);
}

static uint64_t grace_us(struct rank_watch *w)
{
    return atomic_load_explicit(&w->grace_us, memory_order_relaxed);
}

/* Whoever does not end now hangs in something that the communicator's end does not reach. */
static void end_process_after_grace(struct rank_watch *w)
{
    struct pollfd stop = {.fd = w->stop_fd, .events = POLLIN};
    const uint64_t start_us = clock_now_us();
    while (!grace_us(w) || clock_now_us() < start_us + grace_us(w))
        if (poll(&stop, 1, LOOK_MS) > 0)
            return;
    LOG_ERROR("rank_hangs", LOG_INT("grace_ms", grace_us(w) / 1000), LOG_STR("note", "a rank of the group is gone and this one does not end by itself"));
    _exit(1);
}

static void *watch(void *arg)
{
    struct rank_watch *w = arg;
    for (;;) {
        if (poll(w->fds, (nfds_t)w->n + 1, -1) <= 0)
            continue;
        if (w->fds[w->n].revents)
            return NULL;
        for (int i = 0; i < w->n; i++) {
            if (!w->fds[i].revents)
                continue;
            atomic_store_explicit(&w->gone, i, memory_order_relaxed);
            rank_watch_trip(w);
            end_process_after_grace(w);
            return NULL;
        }
    }
}

static int start_thread(struct rank_watch *w)
{
    sigset_t all, before;
    sigfillset(&all);
    /* Signals are for the loop's thread. */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int rc = -pthread_create(&w->thread, NULL, watch, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}

static void watch_destroy(struct rank_watch *w)
{
    if (w->gone_fd >= 0)
        close(w->gone_fd);
    if (w->stop_fd >= 0)
        close(w->stop_fd);
    pthread_mutex_destroy(&w->mutex);
    free(w->fds);
    free(w);
}

int rank_watch_create(const struct rank_watch_config *config, struct rank_watch **ret_watch)
{
    struct rank_watch *w = calloc(1, sizeof(*w));
    if (!w)
        return -ENOMEM;
    pthread_mutex_init(&w->mutex, NULL);
    w->n = config->n;
    atomic_init(&w->grace_us, config->grace_us);
    atomic_init(&w->gone, -1);
    w->gone_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    w->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    w->fds = calloc((size_t)config->n + 1, sizeof(*w->fds));
    int rc = w->gone_fd < 0 || w->stop_fd < 0 ? -EMFILE : w->fds ? 0 : -ENOMEM;
    if (rc < 0)
        goto fail;
    for (int i = 0; i < config->n; i++)
        w->fds[i] = (struct pollfd){.fd = config->fds[i], .events = POLLRDHUP};
    w->fds[config->n] = (struct pollfd){.fd = w->stop_fd, .events = POLLIN};
    rc = start_thread(w);
    if (rc < 0)
        goto fail;
    *ret_watch = w;
    return 0;
fail:
    watch_destroy(w);
    return rc;
}

void rank_watch_free(struct rank_watch *w)
{
    if (!w)
        return;
    signal_fd(w->stop_fd);
    pthread_join(w->thread, NULL);
    watch_destroy(w);
}

void rank_watch_limit(struct rank_watch *w, uint64_t grace)
{
    atomic_store_explicit(&w->grace_us, grace, memory_order_relaxed);
}

int rank_watch_fd(const struct rank_watch *w)
{
    return w->gone_fd;
}

int rank_watch_gone(const struct rank_watch *w)
{
    return atomic_load_explicit(&w->gone, memory_order_relaxed);
}
