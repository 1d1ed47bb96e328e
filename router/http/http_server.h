/* The HTTP/1.1 server: libevent's evhttp on the process's loop, with the care that it needs (README.md of this folder). One thread, the loop's.
 * A request that is complete and well-formed becomes an http_exchange, which is given to the handler; everything else is answered here. */
#pragma once
#include "proto/base/error.h"
#include "proto/base/loop.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct http_server;
struct http_exchange;

/* Takes over the exchange: it must be answered, now or later (http_exchange.h). */
typedef void http_handler(struct http_exchange *exchange, void *arg);

struct http_config {
    const char *host;             /* address or name to bind */
    uint16_t port;                /* 0: any free one */
    size_t headers_bytes_max;
    size_t body_bytes_max;
    uint32_t request_timeout_s;   /* from the first byte of a request to its last */
    uint32_t idle_timeout_s;      /* of a connection between requests, and of a write that makes no progress */
    uint32_t keepalive_s;         /* silence after which a stream gets a comment line */
    size_t stream_backlog_max;    /* bytes that a slow reader may leave unread before it is on notice */
    uint32_t stream_stall_s;      /* how long it may stay above that before it is cut */
    const char *allowed_origins;  /* CORS: origins separated by commas, or "*"; NULL or "": none */
    http_handler *handler;
    void *arg;
};

/* Binds and listens. -EADDRINUSE and the like with a text that names the address. Strings of the config are borrowed for the server's life. */
int http_server_create(struct loop *loop, const struct http_config *config, struct http_server **ret_server, struct error *err);
/* Cuts every connection (exchanges get their gone callback). NULL is fine. */
void http_server_free(struct http_server *server);
/* The port that is bound. */
uint16_t http_server_port(const struct http_server *server);
/* From now on every reply closes its connection; new ones are still accepted, for probes. */
void http_server_drain(struct http_server *server);
/* Exchanges that have not ended. */
size_t http_server_n_open(const struct http_server *server);
/* Connections with a request in hand or a reply that is not yet sent; walks all of them. */
size_t http_server_n_active(const struct http_server *server);
/* Streams that were cut because their reader was too slow, since the start. */
uint64_t http_server_n_cut(const struct http_server *server);
