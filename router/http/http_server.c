/* Listener, limits and dispatch. */
#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include "router/http/http_private.h"
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum { SWEEP_US = 1000000, ACCEPT_PAUSE_US = 200000 };

static void reply_preflight(struct http_exchange *exchange)
{
    if (!http_exchange_header(exchange, "Access-Control-Request-Method")) {
        http_exchange_add_header(exchange, "Allow", "GET, HEAD, POST, OPTIONS");
    } else {
        http_exchange_add_header(exchange, "Access-Control-Allow-Methods", "GET, POST, OPTIONS");
        http_exchange_add_header(exchange, "Access-Control-Allow-Headers",
                                 "Authorization, Content-Type, X-Request-Id, api-key, x-api-key");
        http_exchange_add_header(exchange, "Access-Control-Max-Age", "600");
    }
    http_reply(exchange, 204, NULL, "", 0);
}

static void refuse(struct http_exchange *exchange, int status, const char *message)
{
    http_exchange_add_header(exchange, "Connection", "close");
    http_reply_error(exchange, status, NULL, NULL, message);
}

static void on_request(struct evhttp_request *req, void *arg)
{
    struct http_server *server = arg;
    struct http_exchange *exchange = http_exchange_create(server, req);
    if (!exchange)
        return;
    struct bufferevent *bev = evhttp_connection_get_bufferevent(evhttp_request_get_connection(req));
    const char *why = http_guard_check(req);
    if (!why && http_conns_saw_nul(server->conns, bufferevent_getfd(bev)))
        why = "the request has a NUL byte";
    if (why)
        refuse(exchange, 400, why);
    else if (evbuffer_get_length(evhttp_request_get_input_buffer(req)) > server->config.body_bytes_max)
        refuse(exchange, 413, "the body is larger than this server accepts (--max-body)");
    else if (http_exchange_method(exchange) == HTTP_OPTIONS)
        reply_preflight(exchange);
    else
        server->config.handler(exchange, server->config.arg);
}

/* The servers of this process. evhttp has taken the listener's argument for itself, so an accept error has to find its server here. */
static struct http_server *servers;

/* Out of descriptors: accept reports the same error again at once for ever, so it pauses; open streams go on. */
static void on_accept_error(struct evconnlistener *listener, void *arg)
{
    (void)arg;
    struct http_server *server = servers;
    while (server && server->listener != listener)
        server = server->next;
    ASSERT(server);
    evconnlistener_disable(listener);
    loop_timer_arm(server->resume_timer, ACCEPT_PAUSE_US);
}

static void on_resume(void *arg)
{
    struct http_server *server = arg;
    evconnlistener_enable(server->listener);
}

static void on_flush(void *arg)
{
    http_stream_flush_dirty(arg);
}

static void on_sweep(void *arg)
{
    struct http_server *server = arg;
    http_conns_sweep(server->conns);
    http_stream_sweep(server);
    loop_timer_arm(server->sweep_timer, SWEEP_US);
}

static int bind_listener(struct http_server *server, struct error *err)
{
    const struct http_config *config = &server->config;
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE};
    struct addrinfo *found = NULL;
    char port[8];
    snprintf(port, sizeof(port), "%u", config->port);
    int rc = getaddrinfo(config->host, port, &hints, &found);
    if (rc != 0)
        return error_set(err, -EINVAL, "--host %s: %s", config->host, gai_strerror(rc));
    errno = 0;
    server->listener = evconnlistener_new_bind(loop_event_base(server->loop), NULL, NULL, LEV_OPT_CLOSE_ON_FREE | LEV_OPT_CLOSE_ON_EXEC | LEV_OPT_REUSEABLE,
                                               HTTP_BACKLOG, found->ai_addr, (int)found->ai_addrlen);
    rc = errno ? -errno : -ENOMEM;
    freeaddrinfo(found);
    if (!server->listener)
        return error_set(err, rc, "cannot listen on %s port %u: %s", config->host, config->port, strerror(-rc));
    return 0;
}

static void read_port(struct http_server *server)
{
    struct sockaddr_storage addr;
    socklen_t len = sizeof(addr);
    ASSERT(getsockname(evconnlistener_get_fd(server->listener), (struct sockaddr *)&addr, &len) == 0);
    server->port = ntohs(addr.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&addr)->sin6_port : ((struct sockaddr_in *)&addr)->sin_port);
}

/* Bodies are checked against the limit here, for an answer in the API's shape; evhttp's own limit, which answers with a page of HTML, is
 * there for memory. */
static void set_limits(struct http_server *server)
{
    const struct http_config *config = &server->config;
    evhttp_set_max_headers_size(server->evhttp, (ev_ssize_t)config->headers_bytes_max);
    evhttp_set_max_body_size(server->evhttp, (ev_ssize_t)(config->body_bytes_max + config->body_bytes_max / 4));
    evhttp_set_timeout(server->evhttp, (int)config->idle_timeout_s);
    evhttp_set_allowed_methods(server->evhttp, EVHTTP_REQ_GET | EVHTTP_REQ_HEAD | EVHTTP_REQ_POST | EVHTTP_REQ_OPTIONS);
    evhttp_set_default_content_type(server->evhttp, NULL);
}

static int start_evhttp(struct http_server *server, struct error *err)
{
    server->evhttp = evhttp_new(loop_event_base(server->loop));
    if (!server->evhttp)
        return error_set(err, -ENOMEM, "out of memory");
    set_limits(server);
    evhttp_set_gencb(server->evhttp, on_request, server);
    evhttp_set_bevcb(server->evhttp, http_conns_accept, server->conns);
    int rc = bind_listener(server, err);
    if (rc < 0)
        return rc;
    read_port(server);
    if (!evhttp_bind_listener(server->evhttp, server->listener)) {
        evconnlistener_free(server->listener);
        return error_set(err, -ENOMEM, "out of memory");
    }
    evconnlistener_set_error_cb(server->listener, on_accept_error);
    return 0;
}

int http_server_create(struct loop *loop, const struct http_config *config, struct http_server **ret_server, struct error *err)
{
    struct http_server *server = calloc(1, sizeof(*server));
    if (!server)
        return error_set(err, -ENOMEM, "out of memory");
    server->loop = loop;
    server->config = *config;
    server->next = servers;
    servers = server;
    http_list_init(&server->open);
    http_list_init(&server->dirty);
    http_list_init(&server->streams);
    int rc = getrandom(&server->id_salt, sizeof(server->id_salt), 0) == sizeof(server->id_salt) ? 0 : -EIO;
    if (rc < 0 || (rc = http_conns_create(server, &server->conns)) < 0 ||
        (rc = loop_timer_add(loop, on_resume, server, &server->resume_timer)) < 0 ||
        (rc = loop_timer_add(loop, on_flush, server, &server->flush_timer)) < 0 ||
        (rc = loop_timer_add(loop, on_sweep, server, &server->sweep_timer)) < 0) {
        error_set(err, rc, "cannot create the HTTP server: %s", strerror(-rc));
        goto fail;
    }
    rc = start_evhttp(server, err);
    if (rc < 0)
        goto fail;
    loop_timer_arm(server->sweep_timer, SWEEP_US);
    *ret_server = server;
    return 0;
fail:
    http_server_free(server);
    return rc;
}

void http_server_free(struct http_server *server)
{
    if (!server)
        return;
    while (http_list_linked(&server->open))
        http_exchange_cut(HTTP_LIST_OWNER(server->open.next, open));
    if (server->evhttp)
        evhttp_free(server->evhttp);
    http_conns_free(server->conns);
    struct http_server **at = &servers;
    while (*at != server)
        at = &(*at)->next;
    *at = server->next;
    loop_source_free(server->resume_timer);
    loop_source_free(server->flush_timer);
    loop_source_free(server->sweep_timer);
    free(server);
}

uint16_t http_server_port(const struct http_server *server)
{
    return server->port;
}

void http_server_drain(struct http_server *server)
{
    server->draining = true;
}

size_t http_server_n_open(const struct http_server *server)
{
    return server->n_open;
}

size_t http_server_n_active(const struct http_server *server)
{
    return http_conns_n_active(server->conns);
}

uint64_t http_server_n_cut(const struct http_server *server)
{
    return server->n_cut;
}
