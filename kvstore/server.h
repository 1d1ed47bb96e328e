/* The store's sockets: listens on a unix socket in a folder of this user, checks who connects, hands the pool's descriptor out, runs a session a client.
 *
 * A client's end has two parts. Its socket closes: read leases end. Its process ends (pidfd): what it was writing is freed, not before, since
 * copies of a dying process may still land. A client that broke the protocol is cut off, but all of its leases stay until its process ends: it may
 * be a confused worker that goes on reading. */
#pragma once
#include "kvstore/event_stream.h"
#include "kvstore/pool.h"
#include "proto/base/error.h"
#include "proto/base/loop.h"

struct server;

struct server_config {
    const char *socket_path;      /* claimed (socket_claim.h) and free */
    const char *event_endpoint, *snapshot_endpoint;
    uint8_t store_uuid[16];
    uint64_t lease_timeout_us;
    int pool_fd;                  /* borrowed */
    struct pool *pool;            /* borrowed */
    struct event_stream *events;  /* borrowed */
};

enum { SERVER_CLIENTS_MAX = 512 };

int server_create(struct loop *loop, const struct server_config *config, struct server **ret_server, struct error *err);
/* Cuts all clients off and removes the socket. NULL is fine. */
void server_free(struct server *server);
