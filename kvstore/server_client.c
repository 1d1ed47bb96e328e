#include "kvstore/server_private.h"

#include "proto/base/clock.h"
#include "proto/base/log.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { READ_BYTES = 64 << 10, HELLO_TIMEOUT_US = 5000000 };

/* ---- the end of a client ---- */

static void disconnect(struct server_client *client)
{
    loop_source_free(client->fd_source);
    client->fd_source = NULL;
    if (client->fd >= 0) {
        close(client->fd);
        client->fd = -1;
        client->server->n_connected--;
    }
}

void server_client_free(struct server_client *client)
{
    struct server *server = client->server;

    disconnect(client);
    loop_source_free(client->pid_source);
    pool_owner_end(server->pool, &client->session.owner);
    session_fini(&client->session);
    server->n_unresponsive -= client->unresponsive;
    server->n_clients--;
    *(client->prev ? &client->prev->next : &server->clients) = client->next;
    if (client->next)
        client->next->prev = client->prev;
    free(client);
    server_stats_changed(server);
}

/* The socket goes; the client stays as long as leases have to wait for its process. */
static void client_end(struct server_client *client, bool keep_reads)
{
    struct session *session = &client->session;

    LOG_INFO("client_gone", LOG_STR("client", session->name), LOG_INT("pid", client->pid), LOG_INT("writes_waiting", session->owner.n_writes),
             LOG_STR("reason", session->state == SESSION_FAILED ? session->failure : "closed"));
    pool_owner_detach(client->server->pool, &session->owner, keep_reads);
    disconnect(client);
    server_stats_changed(client->server);
    if (session->owner.n_leases == 0)
        server_client_free(client);
}

static void process_ended(pid_t pid, void *arg)
{
    struct server_client *client = arg;

    if (client->session.owner.n_leases)
        LOG_INFO("client_process_ended", LOG_STR("client", client->session.name), LOG_INT("pid", pid),
                 LOG_INT("leases", client->session.owner.n_leases), LOG_INT("writes", client->session.owner.n_writes));
    server_client_free(client);
}

/* ---- bytes ---- */

static ssize_t send_some(struct server_client *client)
{
    struct buf *out = &client->session.out;
    int fds[2] = {client->server->pool_fd, client->server->stats_fd};
    union {
        char bytes[CMSG_SPACE(sizeof fds)];
        struct cmsghdr align;
    } control = {{0}};
    struct iovec iov = {.iov_base = out->data, .iov_len = out->len};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

    if (client->fds_pending) {
        struct cmsghdr *c;
        msg.msg_control = control.bytes;
        msg.msg_controllen = sizeof control.bytes;
        c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof fds);
        memcpy(CMSG_DATA(c), fds, sizeof fds);
    }
    ssize_t n = sendmsg(client->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
    return n < 0 ? -errno : n;
}

/* Sends what can be sent. Negative: the socket is broken. */
static int flush(struct server_client *client)
{
    struct buf *out = &client->session.out;

    while (out->len) {
        ssize_t n = send_some(client);
        if (n == -EINTR)
            continue;
        if (n == -EAGAIN)
            return 0;
        if (n < 0)
            return (int)n;
        client->fds_pending = false;
        buf_consume(out, (size_t)n);
    }
    return 0;
}

/* Answers go out, and requests that waited for room are handled, until the client has to read or to write more. */
static int pump(struct server_client *client)
{
    struct session *session = &client->session;

    do {
        int rc = flush(client);
        if (rc < 0)
            return rc;
        if (session->out.len >= SESSION_OUT_PAUSE)
            return 0;
        (void)session_resume(session);
    } while (session->out.len >= SESSION_OUT_PAUSE);
    return flush(client);
}

static int receive(struct server_client *client)
{
    enum session_state before = client->session.state;
    uint8_t data[READ_BYTES];
    ssize_t n = recv(client->fd, data, sizeof data, MSG_DONTWAIT);

    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : -errno;
    if (n == 0)
        return -ECONNRESET;
    client->heard_us = clock_now_us();
    (void)session_receive(&client->session, data, (size_t)n);
    if (before == SESSION_NEW && client->session.state == SESSION_WELCOMED) {
        client->fds_pending = true;
        LOG_INFO("client_connected", LOG_STR("client", client->session.name), LOG_INT("pid", client->pid));
    }
    return 0;
}

static void client_ready(int fd, int events, void *arg)
{
    struct server_client *client = arg;
    struct session *session = &client->session;
    int rc = 0;

    (void)fd;
    if ((events & LOOP_READ) && session_wants_input(session))
        rc = receive(client);
    if (rc == 0)
        rc = pump(client);
    server_stats_changed(client->server);
    if (rc < 0) {
        client_end(client, session->state == SESSION_FAILED);
        return;
    }
    if (session->state == SESSION_FAILED && session->out.len == 0) {
        LOG_WARN("client_protocol_error", LOG_STR("client", session->name), LOG_INT("pid", client->pid), LOG_STR("error", session->failure));
        client_end(client, true);
        return;
    }
    loop_fd_set_events(client->fd_source, (session_wants_input(session) ? LOOP_READ : 0) | (session->out.len ? LOOP_WRITE : 0));
}

/* ---- life ---- */

int server_client_create(struct server *server, int fd, pid_t pid)
{
    struct server_client *client = calloc(1, sizeof *client);
    int rc;

    if (!client) {
        close(fd);
        return -ENOMEM;
    }
    client->server = server;
    client->fd = fd;
    client->pid = pid;
    client->connected_us = client->heard_us = clock_now_us();
    session_init(&client->session, &server->env);
    client->next = server->clients;
    if (client->next)
        client->next->prev = client;
    server->clients = client;
    server->n_clients++;
    server->n_connected++;
    rc = loop_pid_add(server->loop, pid, process_ended, client, &client->pid_source);
    if (rc == 0)
        rc = loop_fd_add(server->loop, fd, LOOP_READ, client_ready, client, &client->fd_source);
    if (rc < 0)
        server_client_free(client);
    return rc;
}

void server_client_tick(struct server_client *client, uint64_t now_us)
{
    struct session *session = &client->session;
    bool silent = session->owner.n_leases && now_us - client->heard_us > client->server->lease_timeout_us;

    if (client->fd >= 0 && session->state != SESSION_WELCOMED && now_us - client->connected_us > HELLO_TIMEOUT_US) {
        client_end(client, true);
        return;
    }
    if (silent == client->unresponsive)
        return;
    client->unresponsive = silent;
    client->server->n_unresponsive += silent ? 1 : -1;
    server_stats_changed(client->server);
    if (silent)
        LOG_WARN("client_unresponsive", LOG_STR("client", session->name), LOG_INT("pid", client->pid), LOG_INT("leases", session->owner.n_leases),
                 LOG_INT("writes", session->owner.n_writes), LOG_INT("silent_ms", (now_us - client->heard_us) / 1000));
    else
        LOG_INFO("client_responsive", LOG_STR("client", session->name), LOG_INT("pid", client->pid));
}
