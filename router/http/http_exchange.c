/* The life of one exchange. There is one teardown path: every loss of the connection ends in evhttp's close callback (on_close), whoever
 * noticed it first. evhttp notices by itself only while it writes; before a reply starts it does not read, so a hang-up is watched on the
 * descriptor and answered by freeing the connection, which calls the close callback as well. */
#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include "proto/base/json_write.h"
#include "router/http/http_private.h"
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static int exchange_fd(const struct http_exchange *exchange)
{
    return bufferevent_getfd(evhttp_connection_get_bufferevent(exchange->evcon));
}

static void exchange_free(struct http_exchange *exchange)
{
    loop_source_free(exchange->closed);
    http_list_remove(&exchange->open);
    http_list_remove(&exchange->dirty);
    http_list_remove(&exchange->streams);
    exchange->server->n_open--;
    buf_fini(&exchange->pending);
    free(exchange);
}

static void on_close(struct evhttp_connection *evcon, void *arg)
{
    (void)evcon;
    struct http_exchange *exchange = arg;
    struct evhttp_request *req = exchange->req;
    /* After an error while writing, evhttp has let go of the request: then it is ours to free. */
    if (evhttp_request_get_connection(req) == NULL)
        evhttp_request_free(req);
    exchange->req = NULL;
    if (exchange->gone)
        exchange->gone(exchange, exchange->gone_arg);
    exchange_free(exchange);
}

void http_exchange_cut(struct http_exchange *exchange)
{
    evhttp_connection_free(exchange->evcon); /* calls on_close */
}

static void on_hangup(int fd, int events, void *arg)
{
    (void)fd;
    (void)events;
    http_exchange_cut(arg);
}

/* The reply has been sent; evhttp frees the request next and goes on with the connection. */
static void on_complete(struct evhttp_request *req, void *arg)
{
    struct http_server *server = arg;
    struct evhttp_connection *evcon = evhttp_request_get_connection(req);
    struct bufferevent *bev = evhttp_connection_get_bufferevent(evcon);
    struct timeval timeout = {.tv_sec = server->config.idle_timeout_s};
    bufferevent_setwatermark(bev, EV_READ, 0, 0);
    bufferevent_set_timeouts(bev, &timeout, &timeout);
    http_conns_idle(server->conns, bufferevent_getfd(bev), evbuffer_get_length(bufferevent_get_input(bev)) > 0);
}

void http_exchange_detach(struct http_exchange *exchange)
{
    evhttp_connection_set_closecb(exchange->evcon, NULL, NULL);
    http_conns_flushing(exchange->server->conns, exchange_fd(exchange));
    exchange_free(exchange);
}

static bool request_id_is_fit(const char *id)
{
    size_t n = id ? strlen(id) : 0;
    if (n == 0 || n > HTTP_REQUEST_ID_MAX)
        return false;
    for (; *id; id++)
        if (!isalnum((unsigned char)*id) && !strchr("._:-", *id))
            return false;
    return true;
}

static void set_request_id(struct http_exchange *exchange)
{
    struct http_server *server = exchange->server;
    const char *theirs = http_exchange_header(exchange, "X-Request-Id");
    if (request_id_is_fit(theirs))
        snprintf(exchange->id, sizeof(exchange->id), "%s", theirs);
    else
        snprintf(exchange->id, sizeof(exchange->id), "req-%08" PRIx32 "%08" PRIx64, (uint32_t)server->id_salt, ++server->next_id);
}

struct http_exchange *http_exchange_create(struct http_server *server, struct evhttp_request *req)
{
    struct http_exchange *exchange = calloc(1, sizeof(*exchange));
    if (!exchange)
        goto fail;
    exchange->server = server;
    exchange->req = req;
    exchange->evcon = evhttp_request_get_connection(req);
    exchange->start_us = clock_now_us();
    buf_init(&exchange->pending, HTTP_STREAM_PENDING_MAX);
    int fd = exchange_fd(exchange);
    if (loop_fd_add(server->loop, fd, LOOP_CLOSED, on_hangup, exchange, &exchange->closed) < 0)
        goto fail;
    http_list_add(&server->open, &exchange->open);
    server->n_open++;
    http_conns_busy(server->conns, fd);
    evhttp_connection_set_closecb(exchange->evcon, on_close, exchange);
    evhttp_request_set_on_complete_cb(req, on_complete, server);
    set_request_id(exchange);
    return exchange;
fail:
    free(exchange);
    evhttp_send_error(req, 503, NULL);
    return NULL;
}

/* -- the request -- */

enum http_method http_exchange_method(const struct http_exchange *exchange)
{
    switch (evhttp_request_get_command(exchange->req)) {
    case EVHTTP_REQ_POST: return HTTP_POST;
    case EVHTTP_REQ_HEAD: return HTTP_HEAD;
    case EVHTTP_REQ_OPTIONS: return HTTP_OPTIONS;
    default: return HTTP_GET; /* http_server.c allows no other */
    }
}

const char *http_exchange_path(const struct http_exchange *exchange)
{
    const struct evhttp_uri *uri = evhttp_request_get_evhttp_uri(exchange->req);
    const char *path = uri ? evhttp_uri_get_path(uri) : NULL;
    return path && *path ? path : "/";
}

const char *http_exchange_header(const struct http_exchange *exchange, const char *name)
{
    return evhttp_find_header(evhttp_request_get_input_headers(exchange->req), name);
}

const char *http_exchange_id(const struct http_exchange *exchange)
{
    return exchange->id;
}

uint64_t http_exchange_start_us(const struct http_exchange *exchange)
{
    return exchange->start_us;
}

int http_exchange_take_body(struct http_exchange *exchange, char **ret_body, size_t *ret_len)
{
    struct evbuffer *input = evhttp_request_get_input_buffer(exchange->req);
    size_t len = evbuffer_get_length(input);
    char *body = malloc(len + 1);
    if (!body)
        return -ENOMEM;
    ASSERT(evbuffer_remove(input, body, len) == (int)len);
    body[len] = 0;
    *ret_body = body;
    *ret_len = len;
    return 0;
}

void http_exchange_set_gone(struct http_exchange *exchange, http_gone_cb *cb, void *arg)
{
    exchange->gone = cb;
    exchange->gone_arg = arg;
}

/* -- the reply -- */

void http_exchange_add_header(struct http_exchange *exchange, const char *name, const char *value)
{
    evhttp_add_header(evhttp_request_get_output_headers(exchange->req), name, value);
}

static bool origin_is_allowed(const char *allowed, const char *origin)
{
    size_t n = strlen(origin);
    for (const char *p = allowed; p && *p;) {
        size_t len = strcspn(p, ",");
        if ((len == 1 && *p == '*') || (len == n && strncasecmp(p, origin, n) == 0))
            return true;
        p += len + (p[len] == ',');
    }
    return false;
}

void http_exchange_set_common_headers(struct http_exchange *exchange)
{
    struct http_server *server = exchange->server;
    http_exchange_add_header(exchange, "X-Request-Id", exchange->id);
    if (server->draining)
        http_exchange_add_header(exchange, "Connection", "close");
    const char *origin = http_exchange_header(exchange, "Origin");
    if (origin && origin_is_allowed(server->config.allowed_origins, origin)) {
        http_exchange_add_header(exchange, "Access-Control-Allow-Origin", origin);
        http_exchange_add_header(exchange, "Vary", "Origin");
        http_exchange_add_header(exchange, "Access-Control-Expose-Headers", "X-Request-Id, Retry-After");
    }
}

static const char *status_text(int status)
{
    static const struct { int status; const char *text; } texts[] = {
        {200, "OK"}, {204, "No Content"}, {400, "Bad Request"}, {401, "Unauthorized"}, {404, "Not Found"},
        {405, "Method Not Allowed"}, {413, "Content Too Large"}, {429, "Too Many Requests"},
        {500, "Internal Server Error"}, {501, "Not Implemented"}, {503, "Service Unavailable"},
    };
    for (size_t i = 0; i < ARRAY_LEN(texts); i++)
        if (texts[i].status == status)
            return texts[i].text;
    return "Status";
}

void http_reply(struct http_exchange *exchange, int status, const char *content_type, const void *body, size_t len)
{
    ASSERT(!exchange->streaming);
    http_exchange_set_common_headers(exchange);
    struct evbuffer *out = evbuffer_new();
    if (status != 204)
        http_exchange_add_header(exchange, "Content-Type", content_type ? content_type : "application/json");
    bool head = http_exchange_method(exchange) == HTTP_HEAD;
    if (!out || (!head && evbuffer_add(out, body, len) < 0)) {
        if (out)
            evbuffer_free(out);
        exchange->gone = NULL;       /* the caller has finished with it */
        http_exchange_cut(exchange); /* out of memory */
        return;
    }
    struct evhttp_request *req = exchange->req;
    http_exchange_detach(exchange);
    evhttp_send_reply(req, status, status_text(status), out);
    evbuffer_free(out);
}

const char *http_error_type(int status)
{
    switch (status) {
    case 401: return "authentication_error";
    case 404: return "not_found_error";
    case 429: return "rate_limit_error";
    case 500: return "server_error";
    case 501: return "not_supported_error";
    case 503: return "unavailable_error";
    default: return "invalid_request_error";
    }
}

void http_reply_error(struct http_exchange *exchange, int status, const char *param, const char *code, const char *message)
{
    struct buf text;
    struct json_writer w;
    buf_init(&text, 65536);
    json_write_begin(&w, &text);
    json_write_object(&w);
    json_write_kobject(&w, "error");
    json_write_kstr(&w, "message", message);
    json_write_kstr(&w, "type", http_error_type(status));
    json_write_key(&w, "param");
    param ? json_write_str(&w, param) : json_write_null(&w);
    json_write_key(&w, "code");
    code ? json_write_str(&w, code) : json_write_null(&w);
    json_write_object_end(&w);
    json_write_object_end(&w);
    if (json_write_end(&w) < 0)
        buf_clear(&text);
    http_reply(exchange, status, NULL, text.data, text.len);
    buf_fini(&text);
}
