#include "deploy/http_client.h"

#include "proto/base/base_assert.h"
#include <errno.h>
#include <event2/buffer.h>
#include <event2/event.h>
#include <event2/http.h>
#include <event2/keyvalq_struct.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

struct http_request {
    struct evhttp_connection *connection;
    struct http_handler handler;
    int error; /* from the error callback, before on_done */
    bool done;
};

static void deliver(struct http_request *r, struct evhttp_request *req)
{
    struct evbuffer *in = evhttp_request_get_input_buffer(req);
    size_t n = evbuffer_get_length(in);
    if (n > 0)
        r->handler.on_data(evhttp_request_get_response_code(req), (const char *)evbuffer_pullup(in, -1), n, r->handler.arg);
    evbuffer_drain(in, n);
}

static void on_chunk(struct evhttp_request *req, void *arg)
{
    deliver(arg, req);
}

static void on_error(enum evhttp_request_error error, void *arg)
{
    struct http_request *r = arg;
    r->error = error == EVREQ_HTTP_TIMEOUT ? -ETIMEDOUT : -EPIPE;
}

static void on_complete(struct evhttp_request *req, void *arg)
{
    struct http_request *r = arg;
    int status = req ? evhttp_request_get_response_code(req) : 0;
    if (req && status > 0)
        deliver(r, req);
    if (r->error < 0)
        status = r->error;
    else if (status <= 0)
        status = -ECONNREFUSED;
    r->done = true;
    r->handler.on_done(status, r->handler.arg);
}

static int fill_headers(struct evhttp_request *req, const char *host, uint16_t port, const char *bearer, const char *body, size_t n_body)
{
    struct evkeyvalq *headers = evhttp_request_get_output_headers(req);
    char text[512];
    snprintf(text, sizeof(text), "%s:%u", host, port);
    int r = evhttp_add_header(headers, "Host", text);
    r |= evhttp_add_header(headers, "Connection", "close");
    if (bearer) {
        snprintf(text, sizeof(text), "Bearer %s", bearer);
        r |= evhttp_add_header(headers, "Authorization", text);
    }
    if (body) {
        r |= evhttp_add_header(headers, "Content-Type", "application/json");
        r |= evbuffer_add(evhttp_request_get_output_buffer(req), body, n_body);
    }
    return r ? -ENOMEM : 0;
}

int http_request_start(struct loop *loop, const char *host, uint16_t port, const char *path, const char *bearer, const char *body, size_t n_body,
                       int timeout_s, const struct http_handler *handler, struct http_request **ret_request)
{
    struct http_request *r = calloc(1, sizeof(*r));
    struct evhttp_request *req = NULL;
    if (!r)
        return -ENOMEM;
    r->handler = *handler;
    r->connection = evhttp_connection_base_new(loop_event_base(loop), NULL, host, port);
    req = evhttp_request_new(on_complete, r);
    if (!r->connection || !req)
        goto fail;
    evhttp_connection_set_timeout(r->connection, timeout_s);
    evhttp_connection_set_max_body_size(r->connection, HTTP_CLIENT_BODY_MAX);
    evhttp_request_set_chunked_cb(req, on_chunk);
    evhttp_request_set_error_cb(req, on_error);
    if (fill_headers(req, host, port, bearer, body, n_body) < 0)
        goto fail;
    /* make_request owns req from here, also when it fails. */
    struct evhttp_request *owned = req;
    req = NULL;
    if (evhttp_make_request(r->connection, owned, body ? EVHTTP_REQ_POST : EVHTTP_REQ_GET, path) < 0)
        goto fail;
    *ret_request = r;
    return 0;
fail:
    if (req)
        evhttp_request_free(req);
    if (r->connection)
        evhttp_connection_free(r->connection);
    free(r);
    return -ENOMEM;
}

void http_request_free(struct http_request *r)
{
    if (!r)
        return;
    evhttp_connection_free(r->connection);
    free(r);
}
