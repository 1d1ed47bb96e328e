/* The real server on a loopback port, with clients on the same loop: what they send is what the network would bring. */
#include "proto/base/clock.h"
#include "router/http/http_auth.h"
#include "router/http/http_exchange.h"
#include "router/http/http_server.h"
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum { GUARD_US = 10000000 };

struct client {
    int fd;
    struct loop_source *source;
    char got[1 << 20];
    size_t n;
    bool eof;
};

static struct loop *loop;
static struct loop_source *guard;
static struct http_server *server;
static struct http_exchange *held; /* what the handler keeps for the test */
static int n_handled, n_gone;
static bool timed_out;
static char seen_id[200], seen_body[200];
static enum { ANSWER, HOLD } mode;

static void on_gone(struct http_exchange *exchange, void *arg)
{
    (void)arg;
    cr_assert_eq(exchange, held);
    held = NULL;
    n_gone++;
    loop_stop(loop);
}

static void handler(struct http_exchange *exchange, void *arg)
{
    (void)arg;
    char *body;
    size_t len;
    n_handled++;
    snprintf(seen_id, sizeof(seen_id), "%s", http_exchange_id(exchange));
    cr_assert_eq(http_exchange_take_body(exchange, &body, &len), 0);
    snprintf(seen_body, sizeof(seen_body), "%s", body);
    free(body);
    if (mode == ANSWER) {
        http_reply(exchange, 200, NULL, "{\"ok\":true}", 11);
        return;
    }
    held = exchange;
    http_exchange_set_gone(exchange, on_gone, NULL);
    loop_stop(loop);
}

static void on_guard(void *arg)
{
    (void)arg;
    timed_out = true;
    loop_stop(loop);
}

/* In the place of the server that setup has started. */
static void start(const struct http_config *config)
{
    struct error err;
    http_server_free(server);
    cr_assert_eq(http_server_create(loop, config, &server, &err), 0, "%s", err.text);
}

static struct http_config defaults(void)
{
    return (struct http_config){.host = "127.0.0.1", .headers_bytes_max = 8192, .body_bytes_max = 4096, .request_timeout_s = 30, .idle_timeout_s = 30,
                                .keepalive_s = 15, .stream_backlog_max = 65536, .stream_stall_s = 20, .handler = handler};
}

static void setup(void)
{
    struct http_config config = defaults();
    signal(SIGPIPE, SIG_IGN);
    cr_assert_eq(loop_create(&loop), 0);
    cr_assert_eq(loop_timer_add(loop, on_guard, NULL, &guard), 0);
    start(&config);
}

static void teardown(void)
{
    http_server_free(server);
    loop_source_free(guard);
    loop_free(loop);
}

TestSuite(http_server, .init = setup, .fini = teardown, .timeout = 60);

/* -- clients -- */

static void on_client(int fd, int events, void *arg)
{
    (void)events;
    struct client *c = arg;
    ssize_t n = read(fd, c->got + c->n, sizeof(c->got) - 1 - c->n);
    if (n > 0) {
        c->n += (size_t)n;
        c->got[c->n] = 0;
    } else {
        c->eof = true;
        loop_source_free(c->source);
        c->source = NULL;
    }
    loop_stop(loop);
}

static struct client *dial(void)
{
    struct client *c = calloc(1, sizeof(*c));
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_port = htons(http_server_port(server)), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    cr_assert_eq(connect(c->fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
    cr_assert_eq(loop_fd_add(loop, c->fd, LOOP_READ, on_client, c, &c->source), 0);
    return c;
}

static void hang_up(struct client *c)
{
    loop_source_free(c->source);
    close(c->fd);
    free(c);
}

static void say_n(struct client *c, const char *text, size_t n)
{
    cr_assert_eq(send(c->fd, text, n, MSG_NOSIGNAL), (ssize_t)n);
}

static void say(struct client *c, const char *text)
{
    say_n(c, text, strlen(text));
}

static void run(void)
{
    timed_out = false;
    loop_timer_arm(guard, GUARD_US);
    loop_run(loop);
    cr_assert_not(timed_out, "nothing happened");
}

static void until_text(struct client *c, const char *text)
{
    while (!strstr(c->got, text)) {
        cr_assert_not(c->eof, "closed before \"%s\": %s", text, c->got);
        run();
    }
}

static void until_closed(struct client *c)
{
    while (!c->eof)
        run();
}

static void until_held(void)
{
    while (!held)
        run();
}

static int status_of(const struct client *c)
{
    int status = 0;
    sscanf(c->got, "HTTP/1.1 %d", &status);
    return status;
}

#define POST_BEGIN "POST /v1/x HTTP/1.1\r\nHost: a\r\n"

/* -- plain requests -- */

Test(http_server, test_http_server_answers_and_keeps_the_connection)
{
    struct client *c = dial();
    say(c, POST_BEGIN "X-Request-Id: my.id-1\r\nContent-Length: 5\r\n\r\nhello");
    until_text(c, "{\"ok\":true}");
    cr_assert_eq(status_of(c), 200);
    cr_assert(strstr(c->got, "X-Request-Id: my.id-1\r\n"));
    cr_assert(strstr(c->got, "Content-Type: application/json\r\n"));
    cr_assert_str_eq(seen_body, "hello");
    c->n = c->got[0] = 0;
    say(c, "GET /health HTTP/1.1\r\nHost: a\r\nX-Request-Id: bad id\r\n\r\n");
    until_text(c, "{\"ok\":true}");
    cr_assert_eq(n_handled, 2);
    cr_assert_eq(strncmp(seen_id, "req-", 4), 0, "an id that is not fit to print is replaced");
    hang_up(c);
}

Test(http_server, test_http_server_takes_requests_byte_by_byte_and_chunked)
{
    struct client *c = dial();
    const char *request = "POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n";
    for (const char *p = request; *p; p++) {
        say_n(c, p, 1);
        loop_poll(loop);
    }
    until_text(c, "{\"ok\":true}");
    cr_assert_str_eq(seen_body, "abcdefg");
    hang_up(c);
}

Test(http_server, test_http_server_answers_pipelined_requests_in_order)
{
    struct client *c = dial();
    say(c, "GET /a HTTP/1.1\r\nHost: a\r\nX-Request-Id: one\r\n\r\nGET /b HTTP/1.1\r\nHost: a\r\nX-Request-Id: two\r\n\r\n");
    until_text(c, "X-Request-Id: two");
    cr_assert_lt(strstr(c->got, "X-Request-Id: one"), strstr(c->got, "X-Request-Id: two"));
    cr_assert_eq(n_handled, 2);
    hang_up(c);
}

Test(http_server, test_http_server_head_has_no_body)
{
    struct client *c = dial();
    say(c, "HEAD /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    until_closed(c);
    cr_assert_eq(status_of(c), 200);
    cr_assert_str_eq(strstr(c->got, "\r\n\r\n"), "\r\n\r\n");
    hang_up(c);
}

/* -- what is refused: 400 and close, and never a second request -- */

static void refused(const char *request, size_t n)
{
    struct client *c = dial();
    say_n(c, request, n);
    until_closed(c);
    int status = status_of(c);
    cr_assert(status >= 400 && status < 500, "status %d for %s", status, request);
    cr_assert_eq(n_handled, 0, "the handler was called for %s", request);
    cr_assert_null(strstr(c->got + 1, "HTTP/1.1 2"));
    hang_up(c);
}

#define REFUSED(text) refused(text, sizeof(text) - 1)
#define SMUGGLED "GET /admin HTTP/1.1\r\nHost: a\r\n\r\n"

Test(http_server, test_http_server_refuses_two_content_lengths)
{
    REFUSED(POST_BEGIN "Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello" SMUGGLED);
    REFUSED(POST_BEGIN "Content-Length: 5\r\nContent-Length: 0\r\n\r\nhello" SMUGGLED);
    REFUSED(POST_BEGIN "content-length: 0\r\nContent-Length: 5\r\n\r\nhello" SMUGGLED);
}

Test(http_server, test_http_server_refuses_content_lengths_that_are_no_number)
{
    REFUSED(POST_BEGIN "Content-Length: +5\r\n\r\nhello" SMUGGLED);
    REFUSED(POST_BEGIN "Content-Length: 5, 5\r\n\r\nhello" SMUGGLED);
    REFUSED(POST_BEGIN "Content-Length: 0x5\r\n\r\nhello" SMUGGLED);
    REFUSED(POST_BEGIN "Content-Length: 99999999999999999999999\r\n\r\nhello" SMUGGLED);
}

Test(http_server, test_http_server_refuses_unknown_transfer_encodings)
{
    REFUSED(POST_BEGIN "Transfer-Encoding: gzip\r\n\r\n" SMUGGLED);
    REFUSED(POST_BEGIN "Transfer-Encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n" SMUGGLED);
    REFUSED(POST_BEGIN "Transfer-Encoding: xchunked\r\n\r\n" SMUGGLED);
    REFUSED(POST_BEGIN "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" SMUGGLED);
}

Test(http_server, test_http_server_refuses_length_together_with_encoding)
{
    REFUSED(POST_BEGIN "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" SMUGGLED);
}

Test(http_server, test_http_server_refuses_header_names_that_are_no_token)
{
    REFUSED(POST_BEGIN "Content-Length : 5\r\n\r\nhello" SMUGGLED);
    REFUSED(POST_BEGIN "X\ty: 1\r\n\r\n" SMUGGLED);
    REFUSED(POST_BEGIN ": empty\r\n\r\n" SMUGGLED);
    REFUSED(POST_BEGIN "no colon at all\r\n\r\n" SMUGGLED);
}

Test(http_server, test_http_server_refuses_nul_and_control_bytes)
{
    REFUSED(POST_BEGIN "X: a\0b\r\n\r\n" SMUGGLED);
    REFUSED(POST_BEGIN "Transfer-Encoding: chunked\0, gzip\r\n\r\n0\r\n\r\n" SMUGGLED);
    REFUSED("GET /a\0b HTTP/1.1\r\nHost: a\r\n\r\n" SMUGGLED);
    REFUSED(POST_BEGIN "X: a\x01" "b\r\n\r\n" SMUGGLED);
}

Test(http_server, test_http_server_refuses_missing_or_repeated_host)
{
    REFUSED("GET / HTTP/1.1\r\n\r\n" SMUGGLED);
    REFUSED("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n" SMUGGLED);
}

Test(http_server, test_http_server_refuses_bodies_and_headers_beyond_the_limits)
{
    char big[9000];
    memset(big, 'a', sizeof(big));
    struct client *c = dial();
    say(c, POST_BEGIN "Content-Length: 4500\r\n\r\n");
    say_n(c, big, 4500);
    until_closed(c);
    cr_assert_eq(status_of(c), 413);
    cr_assert(strstr(c->got, "\"type\":\"invalid_request_error\""));
    hang_up(c);
    c = dial();
    say(c, POST_BEGIN "Content-Length: 100000000\r\n\r\n");
    until_closed(c);
    cr_assert_eq(status_of(c), 413);
    hang_up(c);
    c = dial();
    say(c, POST_BEGIN "X: ");
    say_n(c, big, sizeof(big));
    until_closed(c);
    hang_up(c);
    cr_assert_eq(n_handled, 0);
}

Test(http_server, test_http_server_refuses_chunks_that_are_giant_or_extended)
{
    REFUSED(POST_BEGIN "Transfer-Encoding: chunked\r\n\r\nfffffffffffffff\r\n");
    REFUSED(POST_BEGIN "Transfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n" SMUGGLED);
    REFUSED(POST_BEGIN "Transfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\n\r\n" SMUGGLED);
}

/* -- clients that leave -- */

Test(http_server, test_http_server_tells_at_once_when_the_client_leaves_before_the_reply)
{
    mode = HOLD;
    struct client *c = dial();
    say(c, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n");
    until_held();
    hang_up(c);
    while (n_gone == 0)
        run();
    cr_assert_eq(http_server_n_open(server), 0);
}

Test(http_server, test_http_server_tells_when_the_client_resets_before_the_reply)
{
    mode = HOLD;
    struct client *c = dial();
    struct linger linger = {.l_onoff = 1, .l_linger = 0};
    say(c, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n");
    until_held();
    setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger));
    hang_up(c);
    while (n_gone == 0)
        run();
}

Test(http_server, test_http_server_tells_when_the_client_leaves_a_stream)
{
    mode = HOLD;
    struct client *c = dial();
    say(c, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n");
    until_held();
    http_stream_begin(held);
    http_stream_event(held, "{}", 2);
    until_text(c, "data: {}\n\n");
    hang_up(c);
    while (n_gone == 0)
        run();
    cr_assert_eq(http_server_n_open(server), 0);
}

Test(http_server, test_http_server_freeing_tells_the_exchanges)
{
    mode = HOLD;
    struct client *c = dial();
    say(c, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n");
    until_held();
    http_server_free(server);
    server = NULL;
    cr_assert_eq(n_gone, 1);
    hang_up(c);
}

/* -- streams -- */

static int count(const char *text, const char *what)
{
    int n = 0;
    for (; (text = strstr(text, what)); text += strlen(what))
        n++;
    return n;
}

Test(http_server, test_http_server_gathers_the_events_of_a_turn_into_one_chunk)
{
    mode = HOLD;
    struct client *c = dial();
    say(c, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n");
    until_held();
    http_stream_begin(held);
    for (int i = 0; i < 3; i++)
        http_stream_event(held, "{\"n\":1}", 7);
    until_text(c, "data: {\"n\":1}\n\ndata: {\"n\":1}\n\ndata: {\"n\":1}\n\n");
    cr_assert(strstr(c->got, "Content-Type: text/event-stream; charset=utf-8\r\n"));
    cr_assert(strstr(c->got, "\r\n2d\r\ndata: "), "one chunk of 45 bytes: %s", c->got);
    struct http_exchange *exchange = held;
    http_exchange_set_gone(exchange, NULL, NULL);
    http_stream_event(exchange, "[DONE]", 6);
    http_stream_end(exchange);
    until_text(c, "data: [DONE]\n\n\r\n0\r\n\r\n");
    mode = ANSWER;
    say(c, "GET /again HTTP/1.1\r\nHost: a\r\n\r\n");
    until_text(c, "{\"ok\":true}");
    cr_assert_eq(count(c->got, "HTTP/1.1 200"), 2, "the connection serves on after a stream");
    hang_up(c);
}

Test(http_server, test_http_server_stream_survives_the_idle_timeout_and_gets_keep_alives)
{
    struct http_config config = defaults();
    config.idle_timeout_s = 1;
    config.keepalive_s = 1;
    start(&config);
    mode = HOLD;
    struct client *c = dial();
    say(c, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n");
    until_held();
    http_stream_begin(held);
    while (count(c->got, ": keep-alive\n\n") < 3)
        run();
    cr_assert_eq(n_gone, 0);
    hang_up(c);
}

Test(http_server, test_http_server_cuts_a_reader_that_does_not_read)
{
    static char big[65536];
    mode = HOLD;
    struct client *c = dial();
    loop_source_free(c->source); /* does not read */
    c->source = NULL;
    say(c, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n");
    until_held();
    memset(big, 'x', sizeof(big));
    http_stream_begin(held);
    for (int i = 0; i < 2000 && n_gone == 0; i++) {
        http_stream_event(held, big, sizeof(big));
        loop_poll(loop);
    }
    cr_assert_eq(n_gone, 1);
    cr_assert_eq(http_server_n_cut(server), 1);
    hang_up(c);
}

/* -- slow requests -- */

static void trickle(const char *begin)
{
    struct http_config config = defaults();
    config.request_timeout_s = 1;
    start(&config);
    struct client *c = dial();
    uint64_t since = clock_now_us();
    say(c, begin);
    /* A byte now and then keeps evhttp's own timeout from ever coming. */
    while (!c->eof && clock_now_us() - since < GUARD_US) {
        struct loop_source *tick;
        (void)!send(c->fd, "a", 1, MSG_NOSIGNAL);
        loop_timer_add(loop, on_guard, NULL, &tick);
        loop_timer_arm(tick, 100000);
        loop_run(loop);
        loop_source_free(tick);
    }
    cr_assert(c->eof, "the slow request was never ended");
    cr_assert_eq(status_of(c), 408, "%s", c->got);
    cr_assert_eq(n_handled, 0);
    hang_up(c);
}

Test(http_server, test_http_server_ends_trickling_headers_with_408)
{
    trickle("GET /x HTTP/1.1\r\nX-");
}

Test(http_server, test_http_server_ends_trickling_bodies_with_408)
{
    trickle("POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 4000\r\n\r\n");
}

/* -- descriptors -- */

Test(http_server, test_http_server_survives_running_out_of_descriptors)
{
    struct rlimit limit;
    struct client *c = dial();
    say(c, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n");
    until_text(c, "{\"ok\":true}");
    struct client *waiting = dial();
    getrlimit(RLIMIT_NOFILE, &limit);
    int fd = dup(c->fd);
    close(fd);
    struct rlimit tight = {.rlim_cur = (rlim_t)fd, .rlim_max = limit.rlim_max};
    setrlimit(RLIMIT_NOFILE, &tight);
    say(waiting, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n");
    c->n = c->got[0] = 0;
    say(c, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n");
    until_text(c, "{\"ok\":true}"); /* who is connected is served on */
    cr_assert_eq(waiting->n, 0);
    setrlimit(RLIMIT_NOFILE, &limit);
    until_text(waiting, "{\"ok\":true}");
    hang_up(c);
    hang_up(waiting);
}

/* -- CORS -- */

Test(http_server, test_http_server_cors_is_off_unless_configured)
{
    struct client *c = dial();
    say(c, "GET /x HTTP/1.1\r\nHost: a\r\nOrigin: http://b\r\n\r\n");
    until_text(c, "{\"ok\":true}");
    cr_assert_null(strstr(c->got, "Access-Control-Allow-Origin"));
    hang_up(c);
}

Test(http_server, test_http_server_cors_answers_allowed_origins_only)
{
    struct http_config config = defaults();
    config.allowed_origins = "http://a,http://b";
    start(&config);
    struct client *c = dial();
    say(c, "OPTIONS /x HTTP/1.1\r\nHost: a\r\nOrigin: http://b\r\nAccess-Control-Request-Method: POST\r\n\r\n");
    until_text(c, "\r\n\r\n");
    cr_assert_eq(status_of(c), 204);
    cr_assert(strstr(c->got, "Access-Control-Allow-Origin: http://b\r\n"));
    c->n = c->got[0] = 0;
    say(c, "GET /x HTTP/1.1\r\nHost: a\r\nOrigin: http://bb\r\n\r\n");
    until_text(c, "{\"ok\":true}");
    cr_assert_null(strstr(c->got, "Access-Control-Allow-Origin"));
    hang_up(c);
}

/* -- keys -- */

Test(http_auth, test_http_auth_finds_keys_and_nothing_else)
{
    struct http_auth *auth;
    struct error err;
    cr_assert_geq(sodium_init(), 0);
    cr_assert_eq(http_auth_create("first-key-1,second-key-2", NULL, &auth, &err), 0);
    cr_assert_eq(http_auth_find(auth, "first-key-1"), 1);
    cr_assert_eq(http_auth_find(auth, "second-key-2"), 2);
    cr_assert_eq(http_auth_find(auth, "second-key-"), 0);
    cr_assert_eq(http_auth_find(auth, "second-key-22"), 0);
    cr_assert_eq(http_auth_find(auth, ""), 0);
    cr_assert_eq(http_auth_find(auth, NULL), 0);
    unsigned char one[32], two[32], none[32], zero[32] = {0};
    http_auth_tenant_id(auth, 1, one);
    http_auth_tenant_id(auth, 2, two);
    http_auth_tenant_id(auth, 0, none);
    cr_assert_arr_neq(one, two, 32);
    cr_assert_arr_eq(none, zero, 32);
    http_auth_free(auth);
}

Test(http_auth, test_http_auth_refuses_keys_that_are_none)
{
    struct http_auth *auth;
    struct error err;
    cr_assert_geq(sodium_init(), 0);
    cr_assert_eq(http_auth_create("short", NULL, &auth, &err), -EINVAL);
    cr_assert_eq(http_auth_create(",", NULL, &auth, &err), -EINVAL, "a list without a key must not open the server");
    cr_assert_eq(http_auth_create(NULL, "/nonexistent/keys", &auth, &err), -ENOENT);
}
