/* Deadlines on whole requests. evhttp's timeout starts again with every byte, so a client that sends one byte every few seconds (slowloris)
 * would hold a connection for ever, and evhttp tells nobody about connections that have not made a request yet.
 *
 * So connections are watched from outside: the bufferevent factory notes each new one, and a table by descriptor holds its state. evhttp may
 * close a connection at any time without a word; a descriptor's entry is known to be the same connection by its socket's inode number,
 * which the kernel does not give out again. At its deadline a connection is shut down, which evhttp sees as the end of its input. */
#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include "router/http/http_private.h"
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>

enum {
    KEEPALIVE_IDLE_S = 10,
    KEEPALIVE_INTERVAL_S = 5,
    KEEPALIVE_PROBES = 3,
    UNACKED_TIMEOUT_MS = 25000, /* a peer that vanished without a FIN is cut in less than 30 s */
    FLUSH_TIMEOUT_S = 300,      /* for the last bytes of a reply */
};

enum conn_state { CONN_IDLE, CONN_READING, CONN_BUSY, CONN_FLUSHING, CONN_SHUT };

struct conn {
    struct http_conns *conns;
    struct bufferevent *bev; /* referenced until adopted, then not touched */
    struct conn *next_new;
    int fd;
    ino_t inode;
    enum conn_state state;
    bool saw_nul;
    uint64_t deadline_us; /* CONN_READING and CONN_FLUSHING */
};

struct http_conns {
    struct http_server *server;
    struct event *adopt_event;
    struct conn *new_conns; /* made in this loop turn, descriptor not yet known */
    struct conn **by_fd;    /* [n_fds] */
    int n_fds;
};

static void start_reading(struct conn *conn)
{
    conn->state = CONN_READING;
    conn->deadline_us = clock_now_us() + (uint64_t)conn->conns->server->config.request_timeout_s * 1000000;
}

static bool added_has_nul(struct evbuffer *buffer, size_t n_added)
{
    struct evbuffer_ptr from;
    return evbuffer_ptr_set(buffer, &from, evbuffer_get_length(buffer) - n_added, EVBUFFER_PTR_SET) == 0 &&
           evbuffer_search(buffer, "", 1, &from).pos >= 0;
}

static void on_input(struct evbuffer *buffer, const struct evbuffer_cb_info *info, void *arg)
{
    struct conn *conn = arg;
    if (info->n_added > 0 && !conn->saw_nul)
        conn->saw_nul = added_has_nul(buffer, info->n_added);
    if (conn->state != CONN_IDLE || info->n_added == 0)
        return;
    start_reading(conn);
}

struct bufferevent *http_conns_accept(struct event_base *base, void *arg)
{
    struct http_conns *conns = arg;
    struct bufferevent *bev = bufferevent_socket_new(base, -1, BEV_OPT_CLOSE_ON_FREE);
    struct conn *conn = bev ? calloc(1, sizeof(*conn)) : NULL;
    if (!conn || !evbuffer_add_cb(bufferevent_get_input(bev), on_input, conn)) {
        free(conn);
        if (bev)
            bufferevent_free(bev);
        return NULL; /* evhttp makes one itself, which lives without a deadline */
    }
    conn->conns = conns;
    conn->bev = bev;
    conn->fd = -1;
    bufferevent_incref(bev);
    conn->next_new = conns->new_conns;
    conns->new_conns = conn;
    event_active(conns->adopt_event, EV_TIMEOUT, 0);
    return bev;
}

static void set_socket_options(int fd)
{
    const struct { int level, name, value; } options[] = {
        {IPPROTO_TCP, TCP_NODELAY, 1},
        {SOL_SOCKET, SO_KEEPALIVE, 1},
        {IPPROTO_TCP, TCP_KEEPIDLE, KEEPALIVE_IDLE_S},
        {IPPROTO_TCP, TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S},
        {IPPROTO_TCP, TCP_KEEPCNT, KEEPALIVE_PROBES},
        {IPPROTO_TCP, TCP_USER_TIMEOUT, UNACKED_TIMEOUT_MS},
    };
    for (size_t i = 0; i < ARRAY_LEN(options); i++) /* best effort: a socket without them still works */
        (void)setsockopt(fd, options[i].level, options[i].name, &options[i].value, sizeof(options[i].value));
}

static bool socket_inode(int fd, ino_t *ret_inode)
{
    struct stat st;
    if (fstat(fd, &st) < 0 || !S_ISSOCK(st.st_mode))
        return false;
    *ret_inode = st.st_ino;
    return true;
}

static int table_grow(struct http_conns *conns, int fd)
{
    if (fd < conns->n_fds)
        return 0;
    int n = fd + 256;
    struct conn **by_fd = realloc(conns->by_fd, (size_t)n * sizeof(struct conn *));
    if (!by_fd)
        return -ENOMEM;
    memset(by_fd + conns->n_fds, 0, (size_t)(n - conns->n_fds) * sizeof(struct conn *));
    conns->by_fd = by_fd;
    conns->n_fds = n;
    return 0;
}

/* Puts a new connection under its descriptor. The entry that was there belongs to a connection whose descriptor was closed. */
static void adopt(struct http_conns *conns, struct conn *conn)
{
    struct bufferevent *bev = conn->bev;
    int fd = bufferevent_getfd(bev);
    conn->bev = NULL;
    conn->fd = fd;
    if (fd >= 0 && socket_inode(fd, &conn->inode) && table_grow(conns, fd) == 0) {
        free(conns->by_fd[fd]);
        conns->by_fd[fd] = conn;
        set_socket_options(fd);
    } else { /* it was never connected, or memory is out: without an entry it has no deadline but evhttp's */
        evbuffer_remove_cb(bufferevent_get_input(bev), on_input, conn);
        free(conn);
    }
    bufferevent_decref(bev);
}

static void adopt_new(evutil_socket_t fd, short what, void *arg)
{
    (void)fd;
    (void)what;
    struct http_conns *conns = arg;
    while (conns->new_conns) {
        struct conn *conn = conns->new_conns;
        conns->new_conns = conn->next_new;
        adopt(conns, conn);
    }
}

int http_conns_create(struct http_server *server, struct http_conns **ret_conns)
{
    struct http_conns *conns = calloc(1, sizeof(*conns));
    if (!conns)
        return -ENOMEM;
    conns->server = server;
    conns->adopt_event = event_new(loop_event_base(server->loop), -1, 0, adopt_new, conns);
    if (!conns->adopt_event) {
        free(conns);
        return -ENOMEM;
    }
    *ret_conns = conns;
    return 0;
}

/* After evhttp has been freed, when no input callback can come any more. */
void http_conns_free(struct http_conns *conns)
{
    if (!conns)
        return;
    adopt_new(-1, 0, conns);
    event_free(conns->adopt_event);
    for (int i = 0; i < conns->n_fds; i++)
        free(conns->by_fd[i]);
    free(conns->by_fd);
    free(conns);
}

static struct conn *conn_at(struct http_conns *conns, int fd)
{
    adopt_new(-1, 0, conns); /* a request may be complete in the turn in which its connection was accepted */
    return fd >= 0 && fd < conns->n_fds ? conns->by_fd[fd] : NULL;
}

void http_conns_busy(struct http_conns *conns, int fd)
{
    struct conn *conn = conn_at(conns, fd);
    if (conn)
        conn->state = CONN_BUSY;
}

bool http_conns_saw_nul(struct http_conns *conns, int fd)
{
    const struct conn *conn = conn_at(conns, fd);
    return conn && conn->saw_nul;
}

void http_conns_flushing(struct http_conns *conns, int fd)
{
    struct conn *conn = conn_at(conns, fd);
    if (!conn)
        return;
    conn->state = CONN_FLUSHING;
    conn->deadline_us = clock_now_us() + FLUSH_TIMEOUT_S * 1000000ull;
}

void http_conns_idle(struct http_conns *conns, int fd, bool more)
{
    struct conn *conn = conn_at(conns, fd);
    if (!conn)
        return;
    conn->state = CONN_IDLE;
    if (more)
        start_reading(conn);
}

#define TOO_SLOW_BODY                                                                                                     \
    "{\"error\":{\"message\":\"the request did not arrive in time\",\"type\":\"invalid_request_error\",\"param\":null,"      \
    "\"code\":\"request_timeout\"}}"

static void shut(struct conn *conn)
{
    char reply[512];
    int n = snprintf(reply, sizeof(reply),
                     "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
                     "Content-Length: %zu\r\n\r\n" TOO_SLOW_BODY,
                     sizeof(TOO_SLOW_BODY) - 1);
    ASSERT(n > 0 && (size_t)n < sizeof(reply));
    /* Nothing of ours is queued while a request is being read, so this cannot land inside a reply. */
    if (conn->state == CONN_READING)
        (void)!send(conn->fd, reply, (size_t)n, MSG_DONTWAIT | MSG_NOSIGNAL);
    (void)shutdown(conn->fd, SHUT_RDWR);
    conn->state = CONN_SHUT;
}

void http_conns_sweep(struct http_conns *conns)
{
    uint64_t now = clock_now_us();
    for (int fd = 0; fd < conns->n_fds; fd++) {
        struct conn *conn = conns->by_fd[fd];
        if (!conn || (conn->state != CONN_READING && conn->state != CONN_FLUSHING) || now < conn->deadline_us)
            continue;
        ino_t inode;
        if (socket_inode(fd, &inode) && inode == conn->inode) {
            shut(conn);
        } else { /* closed long ago */
            conns->by_fd[fd] = NULL;
            free(conn);
        }
    }
}

size_t http_conns_n_active(const struct http_conns *conns)
{
    size_t n = 0;
    ino_t inode;
    for (int fd = 0; fd < conns->n_fds; fd++) {
        const struct conn *conn = conns->by_fd[fd];
        if (conn && (conn->state == CONN_BUSY || conn->state == CONN_FLUSHING) && socket_inode(fd, &inode) && inode == conn->inode)
            n++;
    }
    return n;
}
