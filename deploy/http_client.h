/* A small asynchronous HTTP/1.1 client over libevent's evhttp, for the launcher's own questions to the router: one request a connection, the body as it
 * arrives. One thread, the loop's. */
#pragma once
#include "proto/base/loop.h"
#include <stddef.h>
#include <stdint.h>

enum { HTTP_CLIENT_BODY_MAX = 64 << 20 };

struct http_request;

struct http_handler {
    /* A piece of the body of an answer with this status; may come many times. */
    void (*on_data)(int status, const char *data, size_t len, void *arg);
    /* Exactly once, last: the status, or a negative errno when there was no answer (-ETIMEDOUT, -ECONNREFUSED, -EPIPE when it broke off). */
    void (*on_done)(int status, void *arg);
    void *arg;
};

/* `body` NULL: GET, else POST as application/json (copied). `bearer` may be NULL. `timeout_s` is of silence, not in all. */
int http_request_start(struct loop *loop, const char *host, uint16_t port, const char *path, const char *bearer, const char *body, size_t n_body,
                       int timeout_s, const struct http_handler *handler, struct http_request **ret_request);
/* Ends it without a callback; the server sees a closed connection. Also frees a finished one. Not from a callback of this request (evhttp still
 * uses the connection then). NULL is fine. */
void http_request_free(struct http_request *request);
