/* The supervisor with real children: shells that sleep, fail or write. */
#include "deploy/supervisor.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct world {
    struct loop *loop;
    struct supervisor *supervisor;
    struct loop_source *timer;
    int stopped, status;
    char reason[256];
    int child;
    pid_t first_pid;
};

static void on_stopped(int status, const char *reason, void *arg)
{
    struct world *w = arg;
    w->stopped++;
    w->status = status;
    snprintf(w->reason, sizeof(w->reason), "%s", reason);
    loop_stop(w->loop);
}

static void world_init(struct world *w, loop_cb *tick)
{
    const struct supervisor_config config = {.on_stopped = on_stopped, .arg = w, .stop_timeout_us = 200 * 1000};
    memset(w, 0, sizeof(*w));
    cr_assert_eq(loop_create(&w->loop), 0);
    cr_assert_eq(supervisor_create(w->loop, &config, &w->supervisor), 0);
    cr_assert_eq(loop_timer_add(w->loop, tick, w, &w->timer), 0);
}

static void world_fini(struct world *w)
{
    loop_source_free(w->timer);
    supervisor_free(w->supervisor);
    loop_free(w->loop);
}

static int start_shell(struct world *w, const char *script, int stage)
{
    const char *argv[] = {"/bin/sh", "-c", script, NULL};
    return supervisor_start(w->supervisor, "shell", argv, stage);
}

static void kill_then_await_restart(void *arg)
{
    struct world *w = arg;
    pid_t pid = supervisor_pid(w->supervisor, w->child);
    if (pid > 0 && w->first_pid == 0) {
        w->first_pid = pid;
        kill(pid, SIGKILL);
    } else if (pid > 0 && pid != w->first_pid) {
        supervisor_stop(w->supervisor);
        return;
    }
    loop_timer_arm(w->timer, 5000);
}

Test(supervisor, test_killed_child_is_restarted, .timeout = 20)
{
    struct world w;
    world_init(&w, kill_then_await_restart);
    w.child = start_shell(&w, "exec sleep 1000", 0);
    cr_assert_eq(w.child, 0);
    loop_timer_arm(w.timer, 1000);
    loop_run(w.loop);
    cr_expect_eq(w.stopped, 1);
    cr_expect_eq(w.status, 0);
    cr_expect_eq(supervisor_pid(w.supervisor, w.child), 0);
    world_fini(&w);
}

static void nothing(void *arg)
{
    (void)arg;
}

Test(supervisor, test_configuration_error_is_not_retried, .timeout = 20)
{
    struct world w;
    world_init(&w, nothing);
    start_shell(&w, "exec sleep 1000", 1);
    start_shell(&w, "exit 2", 0);
    loop_run(w.loop);
    cr_expect_eq(w.status, 2);
    cr_expect(strstr(w.reason, "configuration"), "%s", w.reason);
    cr_expect_eq(supervisor_pid(w.supervisor, 0), 0, "the other child was stopped too");
    world_fini(&w);
}

Test(supervisor, test_child_that_never_starts_ends_it, .timeout = 30)
{
    struct world w;
    world_init(&w, nothing);
    start_shell(&w, "exit 1", 0);
    loop_run(w.loop);
    cr_expect_eq(w.status, 1);
    cr_expect(strstr(w.reason, "ready"), "%s", w.reason);
    world_fini(&w);
}

Test(supervisor, test_missing_program_is_named, .timeout = 20)
{
    struct world w;
    const char *argv[] = {"/nonexistent/program", NULL};
    world_init(&w, nothing);
    supervisor_start(w.supervisor, "ghost", argv, 0);
    loop_run(w.loop);
    cr_expect_eq(w.status, 1);
    cr_expect(strstr(w.reason, "ghost"), "%s", w.reason);
    world_fini(&w);
}

static void stop_now(void *arg)
{
    struct world *w = arg;
    supervisor_stop(w->supervisor);
}

/* Stage 1 writes only when stage 0 has ended: the file's lines show the order. */
Test(supervisor, test_stages_stop_in_order, .timeout = 20)
{
    struct world w;
    char path[] = "/tmp/supervisor-test-XXXXXX", script[2][256], text[16] = "";
    int fd = mkstemp(path);
    cr_assert_geq(fd, 0);
    for (int i = 0; i < 2; i++)
        snprintf(script[i], sizeof(script[i]), "trap 'printf %d >>%s; exit 0' TERM; printf r >>%s; while :; do sleep 0.01; done", i, path, path);
    world_init(&w, stop_now);
    start_shell(&w, script[1], 1);
    start_shell(&w, script[0], 0);
    while (strlen(text) < 2) { /* both have set their traps */
        ssize_t n = pread(fd, text, sizeof(text) - 1, 0);
        text[n > 0 ? n : 0] = '\0';
        usleep(1000);
    }
    loop_timer_arm(w.timer, 1);
    loop_run(w.loop);
    ssize_t n = pread(fd, text, sizeof(text) - 1, 0);
    text[n > 0 ? n : 0] = '\0';
    cr_expect_str_eq(text, "rr01");
    close(fd);
    unlink(path);
    world_fini(&w);
}

Test(supervisor, test_child_that_ignores_sigterm_is_killed, .timeout = 20)
{
    struct world w;
    world_init(&w, stop_now);
    start_shell(&w, "trap '' TERM; while :; do sleep 0.01; done", 0);
    loop_timer_arm(w.timer, 100 * 1000);
    loop_run(w.loop);
    cr_expect_eq(w.stopped, 1);
    cr_expect_eq(w.status, 0);
    world_fini(&w);
}
