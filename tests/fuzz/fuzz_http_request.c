/* Any bytes on a connection to the real server: it answers or closes, and every exchange that it hands out ends. The first byte says how the
 * handler behaves: answer, stream and end, or hold until the client is gone. */
#include "proto/base/clock.h"
#include "router/http/http_exchange.h"
#include "router/http/http_server.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { HANG_US = 5000000 };

static struct loop *loop;
static struct http_server *server;
static int behaviour;

static void on_gone(struct http_exchange *exchange, void *arg)
{
    (void)exchange;
    (void)arg;
}

static void handler(struct http_exchange *exchange, void *arg)
{
    (void)arg;
    char *body;
    size_t len;
    if (http_exchange_take_body(exchange, &body, &len) == 0)
        free(body);
    (void)http_exchange_header(exchange, "Authorization");
    (void)http_exchange_path(exchange);
    if (behaviour == 0) {
        http_reply_error(exchange, 404, "x", NULL, "no");
    } else if (behaviour == 1) {
        http_stream_begin(exchange);
        http_stream_event(exchange, "{}", 2);
        http_stream_end(exchange);
    } else {
        http_exchange_set_gone(exchange, on_gone, NULL);
    }
}

static void start(void)
{
    struct error err;
    const struct http_config config = {.host = "127.0.0.1", .headers_bytes_max = 4096, .body_bytes_max = 4096, .request_timeout_s = 5, .idle_timeout_s = 5,
                                       .keepalive_s = 15, .stream_backlog_max = 65536, .stream_stall_s = 5, .allowed_origins = "*", .handler = handler};
    signal(SIGPIPE, SIG_IGN);
    if (loop_create(&loop) < 0 || http_server_create(loop, &config, &server, &err) < 0)
        abort();
}

static int dial(void)
{
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_port = htons(http_server_port(server)), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct linger linger = {.l_onoff = 1}; /* a reset leaves no port in TIME_WAIT */
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger));
    if (connect(fd, (struct sockaddr *)&addr, sizeof(addr)) < 0)
        abort();
    return fd;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!loop)
        start();
    if (size < 2)
        return 0;
    behaviour = data[0] % 3;
    size_t half = 1 + (size - 1) * (data[1] % 8) / 8; /* in two pieces */
    int fd = dial();
    loop_poll(loop);
    (void)!send(fd, data + 1, half - 1, MSG_NOSIGNAL);
    for (int i = 0; i < 4; i++)
        loop_poll(loop);
    (void)!send(fd, data + half, size - half, MSG_NOSIGNAL);
    for (int i = 0; i < 8; i++)
        loop_poll(loop);
    close(fd);
    uint64_t until = clock_now_us() + HANG_US; /* on a busy machine the reset may take a while to arrive */
    while (http_server_n_open(server) > 0 && clock_now_us() < until)
        loop_poll(loop);
    if (http_server_n_open(server) > 0)
        abort();
    return 0;
}
