#include "proto/base/loop.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <event2/event.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <zmq.h>

/* Hang-ups are watched in an epoll of our own, nested in libevent's: libevent reports EPOLLERR (a connection reset) as readable and
 * writable only, so that an event that waits for EV_CLOSED alone would never fire and the loop would spin on the ready descriptor. */
struct loop {
    struct event_base *base;
    struct event *hangup_event; /* hangup_epoll is readable */
    int hangup_epoll;
    bool stopping; /* loop_stop was called; libevent forgets a break that comes before its loop starts */
};

enum source_kind { SOURCE_FD, SOURCE_TIMER, SOURCE_SIGNAL, SOURCE_PID, SOURCE_ZMQ };

struct loop_source {
    enum source_kind kind;
    struct loop *loop;
    struct event *event;
    struct event *again; /* SOURCE_ZMQ: comes back in the next turn while messages are pending */
    void *zmq_socket;
    int fd;       /* SOURCE_FD: the caller's; SOURCE_PID: the pidfd, owned; SOURCE_SIGNAL: the signal */
    int events;   /* SOURCE_FD: LOOP_* asked for */
    pid_t pid;
    bool *freed;  /* SOURCE_ZMQ: set when the callback frees its own source */
    union {
        loop_fd_cb *fd;
        loop_cb *plain;
        loop_signal_cb *signal;
        loop_child_cb *child;
    } cb;
    void *arg;
};

/* ---- the loop ---- */

static void hangup_ready(evutil_socket_t epoll, short what, void *arg);

static struct event_base *base_create(void)
{
    struct event_config *config = event_config_new();
    if (!config)
        return NULL;
    struct event_base *base = NULL;
    /* Timers never fire early: microseconds instead of coarse ticks, and the clock is read anew when a timer is armed late in a
     * long callback. One thread owns the loop, so it needs no locks. */
    if (event_config_set_flag(config, EVENT_BASE_FLAG_PRECISE_TIMER) == 0 && event_config_set_flag(config, EVENT_BASE_FLAG_NO_CACHE_TIME) == 0 &&
        event_config_set_flag(config, EVENT_BASE_FLAG_NOLOCK) == 0)
        base = event_base_new_with_config(config);
    event_config_free(config);
    return base;
}

int loop_create(struct loop **ret_loop)
{
    int rc = -ENOMEM;
    struct loop *loop = calloc(1, sizeof(*loop));
    if (!loop)
        return -ENOMEM;
    loop->hangup_epoll = -1;
    loop->base = base_create();
    if (!loop->base)
        goto fail;
    loop->hangup_epoll = epoll_create1(EPOLL_CLOEXEC);
    if (loop->hangup_epoll < 0) {
        rc = -errno;
        goto fail;
    }
    loop->hangup_event = event_new(loop->base, loop->hangup_epoll, EV_READ | EV_PERSIST, hangup_ready, loop);
    if (!loop->hangup_event || event_add(loop->hangup_event, NULL) < 0)
        goto fail;
    *ret_loop = loop;
    return 0;
fail:
    loop_free(loop);
    return rc;
}

void loop_free(struct loop *loop)
{
    if (!loop)
        return;
    if (loop->hangup_event)
        event_free(loop->hangup_event);
    if (loop->hangup_epoll >= 0)
        close(loop->hangup_epoll);
    if (loop->base)
        event_base_free(loop->base);
    free(loop);
}

struct event_base *loop_event_base(struct loop *loop)
{
    return loop->base;
}

int loop_run(struct loop *loop)
{
    int rc = 0;
    while (!loop->stopping && rc >= 0)
        rc = event_base_loop(loop->base, EVLOOP_NO_EXIT_ON_EMPTY);
    loop->stopping = false;
    return rc < 0 ? -EIO : 0;
}

int loop_poll(struct loop *loop)
{
    return event_base_loop(loop->base, EVLOOP_NONBLOCK) < 0 ? -EIO : 0;
}

void loop_stop(struct loop *loop)
{
    loop->stopping = true;
    event_base_loopbreak(loop->base);
}

/* ---- sources ---- */

static int source_create(struct loop *loop, enum source_kind kind, void *arg, struct loop_source **ret_source)
{
    struct loop_source *source = calloc(1, sizeof(*source));
    if (!source)
        return -ENOMEM;
    source->kind = kind;
    source->loop = loop;
    source->arg = arg;
    source->fd = -1;
    *ret_source = source;
    return 0;
}

/* Creates the libevent event and arms it; timers are armed later. */
static int source_start(struct loop_source *source, evutil_socket_t fd, short what, event_callback_fn cb)
{
    source->event = event_new(source->loop->base, fd, what, cb, source);
    if (!source->event)
        return -ENOMEM;
    if (!(what & (EV_READ | EV_WRITE | EV_SIGNAL)))
        return 0;
    errno = 0;
    if (event_add(source->event, NULL) < 0)
        return errno ? -errno : -ENOMEM;
    return 0;
}

void loop_source_free(struct loop_source *source)
{
    if (!source)
        return;
    if (source->freed)
        *source->freed = true;
    if (source->kind == SOURCE_FD && (source->events & LOOP_CLOSED))
        epoll_ctl(source->loop->hangup_epoll, EPOLL_CTL_DEL, source->fd, NULL);
    if (source->event)
        event_free(source->event);
    if (source->again)
        event_free(source->again);
    if (source->kind == SOURCE_PID && source->fd >= 0)
        close(source->fd);
    free(source);
}

/* ---- descriptors ---- */

static void fd_ready(evutil_socket_t fd, short what, void *arg)
{
    struct loop_source *source = arg;
    int events = ((what & EV_READ) ? LOOP_READ : 0) | ((what & EV_WRITE) ? LOOP_WRITE : 0);
    source->cb.fd((int)fd, events, source->arg);
}

/* One hang-up a call: a callback may free other sources, which must not stand in a list that is still being walked. What else is
 * ready keeps the nested epoll readable, and the kernel hands ready descriptors out in turn. */
static void hangup_ready(evutil_socket_t epoll, short what, void *arg)
{
    (void)what;
    (void)arg;
    struct epoll_event ready;
    if (epoll_wait((int)epoll, &ready, 1, 0) != 1)
        return;
    struct loop_source *source = ready.data.ptr;
    source->cb.fd(source->fd, LOOP_CLOSED, source->arg);
}

static short libevent_events(int events)
{
    return (short)(((events & LOOP_READ) ? EV_READ : 0) | ((events & LOOP_WRITE) ? EV_WRITE : 0) | EV_PERSIST);
}

static int hangup_watch(struct loop_source *source, bool on)
{
    struct epoll_event ev = {.events = EPOLLRDHUP, .data.ptr = source};
    if (epoll_ctl(source->loop->hangup_epoll, on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, source->fd, &ev) < 0)
        return -errno;
    return 0;
}

int loop_fd_add(struct loop *loop, int fd, int events, loop_fd_cb *cb, void *arg, struct loop_source **ret_source)
{
    ASSERT(fd >= 0 && (events & ~(LOOP_READ | LOOP_WRITE | LOOP_CLOSED)) == 0);
    struct loop_source *source = NULL;
    int rc = source_create(loop, SOURCE_FD, arg, &source);
    if (rc < 0)
        return rc;
    source->fd = fd;
    source->cb.fd = cb;
    rc = source_start(source, fd, libevent_events(events), fd_ready);
    if (rc < 0)
        goto fail;
    source->events = events & ~LOOP_CLOSED;
    if (events & LOOP_CLOSED) {
        rc = hangup_watch(source, true);
        if (rc < 0)
            goto fail;
        source->events |= LOOP_CLOSED;
    }
    *ret_source = source;
    return 0;
fail:
    loop_source_free(source);
    return rc;
}

int loop_fd_set_events(struct loop_source *source, int events)
{
    ASSERT(source->kind == SOURCE_FD);
    ASSERT((events & ~(LOOP_READ | LOOP_WRITE | LOOP_CLOSED)) == 0);
    int changed = source->events ^ events;
    if (changed & LOOP_CLOSED) {
        int rc = hangup_watch(source, events & LOOP_CLOSED);
        if (rc < 0)
            return rc;
        source->events ^= LOOP_CLOSED;
    }
    if (!(changed & (LOOP_READ | LOOP_WRITE)))
        return 0;
    event_del(source->event);
    source->events &= LOOP_CLOSED;
    if (!(events & (LOOP_READ | LOOP_WRITE)))
        return 0;
    event_assign(source->event, source->loop->base, source->fd, libevent_events(events), fd_ready, source);
    errno = 0;
    if (event_add(source->event, NULL) < 0)
        return errno ? -errno : -ENOMEM;
    source->events = events;
    return 0;
}

/* ---- timers, signals, processes ---- */

static void timer_ready(evutil_socket_t fd, short what, void *arg)
{
    (void)fd;
    (void)what;
    struct loop_source *source = arg;
    source->cb.plain(source->arg);
}

int loop_timer_add(struct loop *loop, loop_cb *cb, void *arg, struct loop_source **ret_source)
{
    struct loop_source *source = NULL;
    int rc = source_create(loop, SOURCE_TIMER, arg, &source);
    if (rc < 0)
        return rc;
    source->cb.plain = cb;
    rc = source_start(source, -1, 0, timer_ready);
    if (rc < 0) {
        loop_source_free(source);
        return rc;
    }
    *ret_source = source;
    return 0;
}

int loop_timer_arm(struct loop_source *source, uint64_t delay_us)
{
    ASSERT(source->kind == SOURCE_TIMER);
    struct timeval tv = {.tv_sec = (time_t)(delay_us / 1000000), .tv_usec = (suseconds_t)(delay_us % 1000000)};
    return event_add(source->event, &tv) < 0 ? -ENOMEM : 0;
}

void loop_timer_disarm(struct loop_source *source)
{
    ASSERT(source->kind == SOURCE_TIMER);
    event_del(source->event);
}

static void signal_ready(evutil_socket_t signal, short what, void *arg)
{
    (void)what;
    struct loop_source *source = arg;
    source->cb.signal((int)signal, source->arg);
}

int loop_signal_add(struct loop *loop, int signal, loop_signal_cb *cb, void *arg, struct loop_source **ret_source)
{
    struct loop_source *source = NULL;
    int rc = source_create(loop, SOURCE_SIGNAL, arg, &source);
    if (rc < 0)
        return rc;
    source->cb.signal = cb;
    rc = source_start(source, signal, EV_SIGNAL | EV_PERSIST, signal_ready);
    if (rc < 0) {
        loop_source_free(source);
        return rc;
    }
    *ret_source = source;
    return 0;
}

static void pid_ready(evutil_socket_t pidfd, short what, void *arg)
{
    (void)pidfd;
    (void)what;
    struct loop_source *source = arg;
    source->cb.child(source->pid, source->arg);
}

int loop_pid_add(struct loop *loop, pid_t pid, loop_child_cb *cb, void *arg, struct loop_source **ret_source)
{
    struct loop_source *source = NULL;
    int rc = source_create(loop, SOURCE_PID, arg, &source);
    if (rc < 0)
        return rc;
    source->cb.child = cb;
    source->pid = pid;
    source->fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (source->fd < 0) {
        rc = -errno;
        goto fail;
    }
    rc = source_start(source, source->fd, EV_READ, pid_ready);
    if (rc < 0)
        goto fail;
    *ret_source = source;
    return 0;
fail:
    loop_source_free(source);
    return rc;
}

/* ---- ZeroMQ ---- */

static bool zmq_readable(void *socket)
{
    int events = 0;
    size_t size = sizeof(events);
    if (zmq_getsockopt(socket, ZMQ_EVENTS, &events, &size) < 0)
        return false;
    return events & ZMQ_POLLIN;
}

/* A timer of zero, not event_active: an event made active from a callback runs in the same turn and would starve the others. */
static void zmq_run_again(struct loop_source *source)
{
    static const struct timeval now = {0, 0};
    event_add(source->again, &now);
}

static void zmq_ready(evutil_socket_t fd, short what, void *arg)
{
    (void)fd;
    (void)what;
    struct loop_source *source = arg;
    if (!zmq_readable(source->zmq_socket))
        return;
    bool freed = false;
    source->freed = &freed;
    source->cb.plain(source->arg);
    if (freed)
        return;
    source->freed = NULL;
    if (zmq_readable(source->zmq_socket))
        zmq_run_again(source);
}

int loop_zmq_add(struct loop *loop, void *zmq_socket, loop_cb *cb, void *arg, struct loop_source **ret_source)
{
    int fd = -1;
    size_t size = sizeof(fd);
    if (zmq_getsockopt(zmq_socket, ZMQ_FD, &fd, &size) < 0)
        return -zmq_errno();
    struct loop_source *source = NULL;
    int rc = source_create(loop, SOURCE_ZMQ, arg, &source);
    if (rc < 0)
        return rc;
    source->zmq_socket = zmq_socket;
    source->cb.plain = cb;
    rc = source_start(source, fd, EV_READ | EV_PERSIST, zmq_ready);
    if (rc < 0)
        goto fail;
    rc = -ENOMEM;
    source->again = event_new(loop->base, -1, 0, zmq_ready, source);
    if (!source->again)
        goto fail;
    /* What arrived before now has spent its edge. */
    zmq_run_again(source);
    *ret_source = source;
    return 0;
fail:
    loop_source_free(source);
    return rc;
}

void loop_zmq_kick(struct loop_source *source)
{
    ASSERT(source->kind == SOURCE_ZMQ);
    if (zmq_readable(source->zmq_socket))
        zmq_run_again(source);
}
