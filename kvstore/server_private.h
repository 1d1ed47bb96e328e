/* Shared by server.c and server_client.c only. */
#pragma once
#include "proto/wire/stats_page.h"
#include "kvstore/server.h"
#include "kvstore/session.h"
#include <sys/types.h>

struct server {
    struct loop *loop;
    struct pool *pool;
    struct event_stream *events;
    struct session_env env;
    char *socket_path, *event_endpoint, *snapshot_endpoint;
    uint64_t lease_timeout_us;
    int pool_fd, stats_fd, listen_fd;
    struct stats_page *stats;       /* mapped */
    struct loop_source *listen_source, *tick_timer, *stats_timer;
    struct server_client *clients;
    int n_clients, n_connected, n_unresponsive;
    bool stats_pending, bound;
};

struct server_client {
    struct server *server;
    struct server_client *prev, *next;
    int fd;                         /* -1: the socket is gone, leases wait for the end of the process */
    pid_t pid;
    struct loop_source *fd_source, *pid_source;
    struct session session;
    bool fds_pending;               /* the descriptors go with the next byte */
    bool unresponsive;
    uint64_t connected_us, heard_us;
};

/* Takes over `fd`, closed on failure too. */
int server_client_create(struct server *server, int fd, pid_t pid);
void server_client_free(struct server_client *client); /* ends its leases */
/* Once a second: handshakes that do not come, clients that went silent. */
void server_client_tick(struct server_client *client, uint64_t now_us);
/* The pool or the clients changed: the statistics page is rewritten before the loop waits. */
void server_stats_changed(struct server *server);
