/* Server-sent events. What arrives for a stream in one turn of the loop is gathered and leaves as one chunk, so the cost per token falls when
 * the load rises. Readers that do not keep up are on notice above a limit of unread bytes and are cut after a while, or at once
 * far above it, so that memory stays bounded; others are not affected. */
#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include "router/http/http_private.h"
#include <string.h>

enum { BACKLOG_CUT_FACTOR = 8 }; /* times stream_backlog_max: cut without notice */

static struct bufferevent *stream_bev(const struct http_exchange *exchange)
{
    return evhttp_connection_get_bufferevent(exchange->evcon);
}

void http_stream_begin(struct http_exchange *exchange)
{
    ASSERT(!exchange->streaming);
    http_exchange_set_common_headers(exchange);
    http_exchange_add_header(exchange, "Content-Type", "text/event-stream; charset=utf-8");
    http_exchange_add_header(exchange, "Cache-Control", "no-cache");
    http_exchange_add_header(exchange, "X-Accel-Buffering", "no"); /* nginx would hold the events back */
    exchange->streaming = true;
    exchange->quiet_since_us = clock_now_us();
    http_list_add(&exchange->server->streams, &exchange->streams);
    /* While it writes, evhttp reads ahead, without a limit and with a timeout; hang-ups are seen on the descriptor, so reading may
     * stop, and a client that listens has nothing to say. */
    struct timeval timeout = {.tv_sec = exchange->server->config.idle_timeout_s};
    bufferevent_setwatermark(stream_bev(exchange), EV_READ, 0, HTTP_PIPELINED_BYTES_MAX);
    bufferevent_set_timeouts(stream_bev(exchange), NULL, &timeout);
    evhttp_send_reply_start(exchange->req, 200, "OK");
}

bool http_stream_begun(const struct http_exchange *exchange)
{
    return exchange->streaming;
}

static void mark_dirty(struct http_exchange *exchange)
{
    if (http_list_linked(&exchange->dirty))
        return;
    http_list_add(&exchange->server->dirty, &exchange->dirty);
    loop_timer_arm(exchange->server->flush_timer, 0);
}

void http_stream_event(struct http_exchange *exchange, const void *data, size_t len)
{
    ASSERT(exchange->streaming);
    struct buf *out = &exchange->pending;
    if (exchange->overflowed || buf_reserve(out, len + 8) < 0) {
        exchange->overflowed = true; /* cut at the end of the turn: never under the caller's feet */
    } else {
        buf_append(out, "data: ", 6);
        buf_append(out, data, len);
        buf_append(out, "\n\n", 2);
    }
    mark_dirty(exchange);
}

/* Moves the pending bytes into evhttp's output as one chunk. */
static bool send_pending(struct http_exchange *exchange)
{
    if (exchange->pending.len == 0)
        return true;
    struct evbuffer *chunk = evbuffer_new();
    bool ok = chunk && evbuffer_add(chunk, exchange->pending.data, exchange->pending.len) == 0;
    if (ok)
        evhttp_send_reply_chunk(exchange->req, chunk);
    if (chunk)
        evbuffer_free(chunk);
    buf_clear(&exchange->pending);
    exchange->quiet_since_us = clock_now_us();
    return ok;
}

static size_t backlog(const struct http_exchange *exchange)
{
    return evbuffer_get_length(bufferevent_get_output(stream_bev(exchange)));
}

/* True if the reader is to be cut. */
static bool too_slow(struct http_exchange *exchange, uint64_t now)
{
    const struct http_config *config = &exchange->server->config;
    size_t unread = backlog(exchange);
    if (unread <= config->stream_backlog_max) {
        exchange->stalled_since_us = 0;
        return false;
    }
    if (!exchange->stalled_since_us)
        exchange->stalled_since_us = now;
    return unread > config->stream_backlog_max * BACKLOG_CUT_FACTOR ||
           now - exchange->stalled_since_us > (uint64_t)config->stream_stall_s * 1000000;
}

static void cut_slow(struct http_exchange *exchange)
{
    exchange->server->n_cut++;
    http_exchange_cut(exchange);
}

void http_stream_flush_dirty(struct http_server *server)
{
    while (http_list_linked(&server->dirty)) {
        struct http_exchange *exchange = HTTP_LIST_OWNER(server->dirty.next, dirty);
        http_list_remove(&exchange->dirty);
        if (exchange->overflowed || !send_pending(exchange) || too_slow(exchange, exchange->quiet_since_us))
            cut_slow(exchange);
    }
}

void http_stream_end(struct http_exchange *exchange)
{
    ASSERT(exchange->streaming);
    if (exchange->overflowed || !send_pending(exchange)) {
        exchange->gone = NULL; /* the caller has finished with it */
        cut_slow(exchange);
        return;
    }
    struct evhttp_request *req = exchange->req;
    http_exchange_detach(exchange);
    evhttp_send_reply_end(req);
}

static void keep_alive(struct http_exchange *exchange)
{
    static const char comment[] = ": keep-alive\n\n";
    if (buf_append(&exchange->pending, comment, sizeof(comment) - 1) == 0)
        mark_dirty(exchange);
}

void http_stream_sweep(struct http_server *server)
{
    uint64_t now = clock_now_us();
    uint64_t quiet_us_max = (uint64_t)server->config.keepalive_s * 1000000;
    struct http_link *link = server->streams.next;
    while (link != &server->streams) {
        struct http_exchange *exchange = HTTP_LIST_OWNER(link, streams);
        link = link->next; /* a gone callback frees this exchange only */
        if (too_slow(exchange, now))
            cut_slow(exchange);
        else if (quiet_us_max && now - exchange->quiet_since_us >= quiet_us_max)
            keep_alive(exchange);
    }
}
