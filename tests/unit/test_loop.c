#include "proto/base/clock.h"
#include "proto/base/loop.h"
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zmq.h>

static struct loop *loop;

/* Every test would wait for ever if its event never came; this timer ends it as a failure. */
static struct loop_source *deadline;
static bool deadline_hit;

static void on_deadline(void *arg)
{
    (void)arg;
    deadline_hit = true;
    loop_stop(loop);
}

static void setup(void)
{
    cr_assert_eq(loop_create(&loop), 0);
    cr_assert_eq(loop_timer_add(loop, on_deadline, NULL, &deadline), 0);
    cr_assert_eq(loop_timer_arm(deadline, 30000000), 0);
}

static void teardown(void)
{
    loop_source_free(deadline);
    loop_free(loop);
    cr_assert(!deadline_hit);
}

static void stop_now(void *arg)
{
    (void)arg;
    loop_stop(loop);
}

TestSuite(loop, .init = setup, .fini = teardown);

/* ---- timers ---- */

/* Keeps the loop turning, so that a timer that is due too early is found out at once. */
static struct loop_source *ticker;

static void tick(void *arg)
{
    (void)arg;
    loop_timer_arm(ticker, 0);
}

Test(loop, test_timer_never_fires_early)
{
    struct loop_source *timer;
    cr_assert_eq(loop_timer_add(loop, stop_now, NULL, &timer), 0);
    cr_assert_eq(loop_timer_add(loop, tick, NULL, &ticker), 0);
    loop_timer_arm(ticker, 0);
    for (uint64_t us = 0; us < 5000; us += 131) {
        uint64_t start = clock_now_us();
        cr_assert_eq(loop_timer_arm(timer, us), 0);
        cr_assert_eq(loop_run(loop), 0);
        cr_assert_geq(clock_now_us() - start, us);
    }
    loop_source_free(ticker);
    loop_source_free(timer);
}

static struct loop_source *late;
static uint64_t late_armed_us;

static void busy_then_arm(void *arg)
{
    (void)arg;
    uint64_t start = clock_now_us();
    while (clock_now_us() - start < 5000)
        ;
    late_armed_us = clock_now_us();
    loop_timer_arm(late, 2000);
    loop_timer_arm(ticker, 0);
}

/* The delay counts from the call, not from the start of the callback that makes it. */
Test(loop, test_timer_armed_late_in_a_callback_is_not_early)
{
    struct loop_source *timer;
    cr_assert_eq(loop_timer_add(loop, stop_now, NULL, &late), 0);
    cr_assert_eq(loop_timer_add(loop, busy_then_arm, NULL, &timer), 0);
    cr_assert_eq(loop_timer_add(loop, tick, NULL, &ticker), 0);
    loop_timer_arm(timer, 0);
    cr_assert_eq(loop_run(loop), 0);
    cr_assert_geq(clock_now_us() - late_armed_us, 2000);
    loop_source_free(late);
    loop_source_free(ticker);
    loop_source_free(timer);
}

static int n_fired[3];
static struct loop_source *timers[3];

static void count_timer(void *arg)
{
    n_fired[(int *)arg - n_fired]++;
}

Test(loop, test_timer_rearm_moves_and_disarm_cancels)
{
    for (int i = 0; i < 3; i++)
        cr_assert_eq(loop_timer_add(loop, i == 2 ? stop_now : count_timer, &n_fired[i], &timers[i]), 0);
    loop_timer_arm(timers[0], 1000);
    loop_timer_arm(timers[0], 2000);
    loop_timer_arm(timers[1], 1000);
    loop_timer_disarm(timers[1]);
    loop_timer_arm(timers[2], 5000);
    cr_assert_eq(loop_run(loop), 0);
    cr_assert_eq(n_fired[0], 1);
    cr_assert_eq(n_fired[1], 0);
    for (int i = 0; i < 3; i++)
        loop_source_free(timers[i]);
}

static void free_own_timer(void *arg)
{
    loop_source_free(*(struct loop_source **)arg);
    loop_stop(loop);
}

Test(loop, test_timer_may_free_itself)
{
    static struct loop_source *timer;
    loop_timer_add(loop, free_own_timer, &timer, &timer);
    loop_timer_arm(timer, 0);
    cr_assert_eq(loop_run(loop), 0);
}

Test(loop, test_stop_before_run_is_not_lost)
{
    loop_stop(loop);
    cr_assert_eq(loop_run(loop), 0);
    struct loop_source *timer;
    loop_timer_add(loop, stop_now, NULL, &timer);
    loop_timer_arm(timer, 0);
    cr_assert_eq(loop_run(loop), 0);
    loop_source_free(timer);
}

/* ---- descriptors ---- */

struct pipe_end {
    struct loop_source *source, *other;
    int events; /* all that were seen */
    int n_calls;
};

static void on_fd(int fd, int events, void *arg)
{
    struct pipe_end *end = arg;
    char byte;
    end->events |= events;
    end->n_calls++;
    if (events & LOOP_READ)
        end->n_calls += recv(fd, &byte, 1, MSG_DONTWAIT) < 0;
    if (events & LOOP_CLOSED)
        loop_fd_set_events(end->source, 0);
    loop_stop(loop);
}

Test(loop, test_fd_read_is_level_triggered)
{
    int fds[2];
    struct pipe_end end = {0};
    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    cr_assert_eq(loop_fd_add(loop, fds[0], LOOP_READ, on_fd, &end, &end.source), 0);
    cr_assert_eq(write(fds[1], "abc", 3), 3);
    for (int i = 0; i < 3; i++)
        loop_run(loop);
    cr_assert_eq(end.n_calls, 3, "one byte a call, called until all are read");
    loop_poll(loop);
    cr_assert_eq(end.n_calls, 3);
    loop_source_free(end.source);
    close(fds[0]);
    close(fds[1]);
}

Test(loop, test_fd_set_events_turns_watching_on_and_off)
{
    int fds[2];
    struct pipe_end end = {0};
    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    cr_assert_eq(loop_fd_add(loop, fds[0], 0, on_fd, &end, &end.source), 0);
    cr_assert_eq(write(fds[1], "a", 1), 1);
    loop_poll(loop);
    cr_assert_eq(end.n_calls, 0);
    cr_assert_eq(loop_fd_set_events(end.source, LOOP_WRITE), 0);
    loop_poll(loop);
    cr_assert_eq(end.events, LOOP_WRITE);
    cr_assert_eq(loop_fd_set_events(end.source, LOOP_READ), 0);
    loop_poll(loop);
    cr_assert_eq(end.events, LOOP_WRITE | LOOP_READ);
    cr_assert_eq(loop_fd_set_events(end.source, LOOP_CLOSED), 0);
    loop_poll(loop);
    cr_assert_eq(end.n_calls, 2);
    close(fds[1]);
    loop_poll(loop);
    cr_assert_eq(end.events, LOOP_WRITE | LOOP_READ | LOOP_CLOSED);
    loop_source_free(end.source);
    close(fds[0]);
}

Test(loop, test_closed_is_seen_while_unread_bytes_wait)
{
    int fds[2];
    struct pipe_end end = {0};
    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    cr_assert_eq(write(fds[1], "pipelined", 9), 9);
    cr_assert_eq(loop_fd_add(loop, fds[0], LOOP_CLOSED, on_fd, &end, &end.source), 0);
    loop_poll(loop);
    cr_assert_eq(end.n_calls, 0, "bytes to read are not a hang-up");
    close(fds[1]);
    loop_run(loop);
    cr_assert_eq(end.events, LOOP_CLOSED);
    cr_assert_eq(end.n_calls, 1);
    loop_source_free(end.source);
    close(fds[0]);
}

static void tcp_pair(int fds[2])
{
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(addr);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    cr_assert_eq(bind(listener, (struct sockaddr *)&addr, len), 0);
    cr_assert_eq(listen(listener, 1), 0);
    cr_assert_eq(getsockname(listener, (struct sockaddr *)&addr, &len), 0);
    fds[1] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    cr_assert_eq(connect(fds[1], (struct sockaddr *)&addr, len), 0);
    fds[0] = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    cr_assert_geq(fds[0], 0);
    close(listener);
}

/* A reset reaches epoll as an error, which libevent shows as readable and writable only. */
Test(loop, test_closed_is_seen_after_a_reset)
{
    int fds[2];
    struct pipe_end end = {0};
    tcp_pair(fds);
    cr_assert_eq(loop_fd_add(loop, fds[0], LOOP_CLOSED, on_fd, &end, &end.source), 0);
    struct linger reset = {.l_onoff = 1, .l_linger = 0};
    setsockopt(fds[1], SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    close(fds[1]);
    loop_run(loop);
    cr_assert_eq(end.events, LOOP_CLOSED);
    loop_source_free(end.source);
    close(fds[0]);
}

Test(loop, test_closed_twice_on_one_fd_is_refused)
{
    int fds[2];
    struct pipe_end end = {0}, other = {0};
    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    cr_assert_eq(loop_fd_add(loop, fds[0], LOOP_CLOSED, on_fd, &end, &end.source), 0);
    cr_assert_eq(loop_fd_add(loop, fds[0], LOOP_READ | LOOP_CLOSED, on_fd, &other, &other.source), -EEXIST);
    close(fds[1]);
    loop_run(loop);
    cr_assert_eq(end.events, LOOP_CLOSED, "the first one still watches");
    loop_source_free(end.source);
    close(fds[0]);
}

static void free_both(int fd, int events, void *arg)
{
    (void)fd;
    (void)events;
    struct pipe_end *end = arg;
    end->n_calls++;
    loop_source_free(end->source);
    loop_source_free(end->other);
    loop_stop(loop);
}

/* Both are ready in the same turn; whoever comes first frees both, and the other must not be called. */
static void check_free_of_ready(int events)
{
    int a[2], b[2];
    struct pipe_end end = {0};
    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, a), 0);
    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, b), 0);
    cr_assert_eq(loop_fd_add(loop, a[0], events, free_both, &end, &end.source), 0);
    cr_assert_eq(loop_fd_add(loop, b[0], events, free_both, &end, &end.other), 0);
    close(a[1]);
    close(b[1]);
    loop_run(loop);
    loop_poll(loop);
    cr_assert_eq(end.n_calls, 1);
    close(a[0]);
    close(b[0]);
}

Test(loop, test_fd_callback_may_free_itself_and_others)
{
    check_free_of_ready(LOOP_READ);
    check_free_of_ready(LOOP_CLOSED);
    check_free_of_ready(LOOP_READ | LOOP_CLOSED);
}

Test(loop, test_fd_add_of_a_bad_fd_fails)
{
    struct loop_source *source = NULL;
    cr_assert_eq(loop_fd_add(loop, 1000, LOOP_READ, on_fd, NULL, &source), -EBADF);
    cr_assert_eq(loop_fd_add(loop, 1000, LOOP_CLOSED, on_fd, NULL, &source), -EBADF);
    cr_assert_null(source);
}

/* ---- signals and processes ---- */

static int seen_signal;
static pid_t seen_pid;

static void on_signal(int signal, void *arg)
{
    (void)arg;
    seen_signal = signal;
    loop_stop(loop);
}

static void on_child(pid_t pid, void *arg)
{
    (void)arg;
    seen_pid = pid;
    loop_stop(loop);
}

Test(loop, test_signal_is_delivered_each_time)
{
    struct loop_source *source;
    cr_assert_eq(loop_signal_add(loop, SIGUSR1, on_signal, NULL, &source), 0);
    for (int i = 0; i < 2; i++) {
        seen_signal = 0;
        raise(SIGUSR1);
        loop_run(loop);
        cr_assert_eq(seen_signal, SIGUSR1);
    }
    loop_source_free(source);
}

Test(loop, test_pid_end_is_seen_and_not_reaped)
{
    struct loop_source *source;
    int fds[2];
    cr_assert_eq(pipe(fds), 0);
    pid_t pid = fork();
    if (pid == 0) {
        char byte;
        close(fds[1]);
        _exit(read(fds[0], &byte, 1) == 0 ? 7 : 1);
    }
    cr_assert_eq(loop_pid_add(loop, pid, on_child, NULL, &source), 0);
    loop_poll(loop);
    cr_assert_eq(seen_pid, 0);
    close(fds[1]);
    loop_run(loop);
    cr_assert_eq(seen_pid, pid);
    loop_source_free(source);
    int status;
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_assert_eq(WEXITSTATUS(status), 7);
    cr_assert_eq(loop_pid_add(loop, pid, on_child, NULL, &source), -ESRCH);
    close(fds[0]);
}

/* ---- ZeroMQ ---- */

enum { ZMQ_BATCH = 50, ZMQ_MESSAGES = 1000 };

struct zmq_peer {
    void *socket;
    struct loop_source *source;
    int n_received, n_calls, n_batch_max;
    bool echo, free_in_callback;
};

static void on_zmq(void *arg)
{
    struct zmq_peer *peer = arg;
    int n = 0, value;
    while (n < ZMQ_BATCH && zmq_recv(peer->socket, &value, sizeof(value), ZMQ_DONTWAIT) == sizeof(value)) {
        cr_assert_eq(value, peer->n_received);
        peer->n_received++;
        n++;
        if (peer->echo)
            cr_assert_eq(zmq_send(peer->socket, &value, sizeof(value), ZMQ_DONTWAIT), (int)sizeof(value));
    }
    peer->n_calls++;
    if (n > peer->n_batch_max)
        peer->n_batch_max = n;
    if (peer->free_in_callback) {
        loop_source_free(peer->source);
        peer->source = NULL;
        loop_stop(loop);
    }
    if (peer->n_received == ZMQ_MESSAGES)
        loop_stop(loop);
}

static void *context;
#define TCP "tcp://127.0.0.1:*"

static void zmq_setup(struct zmq_peer *a, struct zmq_peer *b, const char *bind_to)
{
    context = zmq_ctx_new();
    int linger = 0, hwm = 2 * ZMQ_MESSAGES;
    char endpoint[256];
    size_t len = sizeof(endpoint);
    struct zmq_peer *peers[2] = {a, b};
    for (int i = 0; i < 2; i++) {
        peers[i]->socket = zmq_socket(context, ZMQ_PAIR);
        zmq_setsockopt(peers[i]->socket, ZMQ_LINGER, &linger, sizeof(linger));
        zmq_setsockopt(peers[i]->socket, ZMQ_SNDHWM, &hwm, sizeof(hwm));
        zmq_setsockopt(peers[i]->socket, ZMQ_RCVHWM, &hwm, sizeof(hwm));
    }
    cr_assert_eq(zmq_bind(a->socket, bind_to), 0);
    cr_assert_eq(zmq_getsockopt(a->socket, ZMQ_LAST_ENDPOINT, endpoint, &len), 0);
    cr_assert_eq(zmq_connect(b->socket, endpoint), 0);
}

static void zmq_teardown(struct zmq_peer *a, struct zmq_peer *b)
{
    loop_source_free(a->source);
    loop_source_free(b->source);
    zmq_close(a->socket);
    zmq_close(b->socket);
    zmq_ctx_term(context);
}

static void send_all(struct zmq_peer *peer)
{
    for (int i = 0; i < ZMQ_MESSAGES; i++)
        cr_assert_eq(zmq_send(peer->socket, &i, sizeof(i), 0), (int)sizeof(i));
}

Test(loop, test_zmq_receives_all_in_bounded_batches)
{
    struct zmq_peer a = {0}, b = {0};
    zmq_setup(&a, &b, TCP);
    send_all(&b);
    cr_assert_eq(loop_zmq_add(loop, a.socket, on_zmq, &a, &a.source), 0);
    loop_run(loop);
    cr_assert_eq(a.n_received, ZMQ_MESSAGES);
    cr_assert_leq(a.n_batch_max, ZMQ_BATCH);
    cr_assert_geq(a.n_calls, ZMQ_MESSAGES / ZMQ_BATCH);
    zmq_teardown(&a, &b);
}

/* Both directions at once: sends inside and outside of callbacks consume edges of ZMQ_FD. */
Test(loop, test_zmq_echo_loses_no_edge)
{
    struct zmq_peer a = {.echo = true}, b = {0};
    zmq_setup(&a, &b, TCP);
    cr_assert_eq(loop_zmq_add(loop, a.socket, on_zmq, &a, &a.source), 0);
    cr_assert_eq(loop_zmq_add(loop, b.socket, on_zmq, &b, &b.source), 0);
    for (int i = 0; i < ZMQ_MESSAGES; i++) {
        cr_assert_eq(zmq_send(b.socket, &i, sizeof(i), 0), (int)sizeof(i));
        loop_zmq_kick(b.source);
        if (i % 7 == 0)
            loop_poll(loop);
    }
    while (b.n_received < ZMQ_MESSAGES && !deadline_hit)
        loop_run(loop);
    cr_assert_eq(a.n_received, ZMQ_MESSAGES);
    cr_assert_eq(b.n_received, ZMQ_MESSAGES);
    zmq_teardown(&a, &b);
}

Test(loop, test_zmq_callback_may_free_its_source)
{
    struct zmq_peer a = {.free_in_callback = true}, b = {0};
    zmq_setup(&a, &b, TCP);
    send_all(&b);
    cr_assert_eq(loop_zmq_add(loop, a.socket, on_zmq, &a, &a.source), 0);
    loop_run(loop);
    loop_poll(loop);
    cr_assert_eq(a.n_calls, 1);
    zmq_teardown(&a, &b);
}

static struct loop_source *busy_timer;
static int n_other;

static void count_other(void *arg)
{
    (void)arg;
    n_other++;
    loop_timer_arm(busy_timer, 0);
}

/* While a socket has a thousand messages pending (inproc: all of them at once), other sources still get their turns. */
Test(loop, test_zmq_backlog_does_not_starve_timers)
{
    struct zmq_peer a = {0}, b = {0};
    zmq_setup(&a, &b, "inproc://backlog");
    send_all(&b);
    loop_timer_add(loop, count_other, NULL, &busy_timer);
    loop_timer_arm(busy_timer, 0);
    cr_assert_eq(loop_zmq_add(loop, a.socket, on_zmq, &a, &a.source), 0);
    loop_run(loop);
    cr_assert_eq(a.n_calls, ZMQ_MESSAGES / ZMQ_BATCH);
    cr_assert_geq(n_other, a.n_calls - 1);
    loop_source_free(busy_timer);
    zmq_teardown(&a, &b);
}
