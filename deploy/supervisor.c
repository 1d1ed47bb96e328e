#include "deploy/supervisor.h"

#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    BACKOFF_MIN_US = 100 * 1000,
    BACKOFF_MAX_US = 10 * 1000 * 1000,
    STABLE_US = 30 * 1000 * 1000, /* a child that ran this long starts again with the shortest back-off */
    EXIT_CONFIG = 2,
};

struct child {
    struct supervisor *owner;
    char name[64];
    char **argv;
    int stop_stage;
    pid_t pid;                 /* 0: down */
    uint64_t started_us, backoff_us;
    int unready_starts;        /* since it was last ready */
    struct loop_source *exit_source, *restart_timer;
};

struct supervisor {
    struct loop *loop;
    struct supervisor_config config;
    struct child children[SUPERVISOR_CHILDREN_MAX];
    int n_children;
    bool stopping, killing, reported;
    int stage;
    int status;
    char reason[256];
    struct loop_source *stop_timer;
};

static void child_restart_due(void *arg);
static void child_ended(pid_t pid, void *arg);
static void stop_timeout(void *arg);

int supervisor_create(struct loop *loop, const struct supervisor_config *config, struct supervisor **ret_supervisor)
{
    struct supervisor *s = calloc(1, sizeof(*s));
    if (!s)
        return -ENOMEM;
    s->loop = loop;
    s->config = *config;
    int r = loop_timer_add(loop, stop_timeout, s, &s->stop_timer);
    if (r < 0) {
        free(s);
        return r;
    }
    *ret_supervisor = s;
    return 0;
}

static void argv_free(char **argv)
{
    for (char **a = argv; a && *a; a++)
        free(*a);
    free(argv);
}

static char **argv_copy(const char *const *argv)
{
    size_t n = 0;
    while (argv[n])
        n++;
    char **copy = calloc(n + 1, sizeof(*copy));
    for (size_t i = 0; copy && i < n; i++) {
        copy[i] = strdup(argv[i]);
        if (!copy[i]) {
            argv_free(copy);
            return NULL;
        }
    }
    return copy;
}

static void child_fini(struct child *c)
{
    if (c->pid > 0) {
        kill(c->pid, SIGKILL);
        waitpid(c->pid, NULL, 0);
    }
    loop_source_free(c->exit_source);
    loop_source_free(c->restart_timer);
    argv_free(c->argv);
}

void supervisor_free(struct supervisor *s)
{
    if (!s)
        return;
    for (int i = 0; i < s->n_children; i++)
        child_fini(&s->children[i]);
    loop_source_free(s->stop_timer);
    free(s);
}

/* In the child, between fork and exec: only async-signal-safe calls. */
static void child_exec(struct child *c, pid_t parent)
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    /* An own process group: a Ctrl-C at the terminal reaches the launcher alone, which stops the children in order. */
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent)
        _exit(1);
    execv(c->argv[0], c->argv);
    _exit(127);
}

static int child_spawn(struct child *c)
{
    pid_t parent = getpid();
    pid_t pid = fork();
    if (pid < 0)
        return -errno;
    if (pid == 0)
        child_exec(c, parent);
    int r = loop_pid_add(c->owner->loop, pid, child_ended, c, &c->exit_source);
    if (r < 0) {
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        return r;
    }
    c->pid = pid;
    c->started_us = clock_now_us();
    c->unready_starts++;
    LOG_INFO("child_started", LOG_STR("child", c->name), LOG_INT("pid", pid));
    return 0;
}

int supervisor_start(struct supervisor *s, const char *name, const char *const *argv, int stop_stage)
{
    if (s->n_children == SUPERVISOR_CHILDREN_MAX)
        return -ENOSPC;
    struct child *c = &s->children[s->n_children];
    memset(c, 0, sizeof(*c));
    c->owner = s;
    c->stop_stage = stop_stage;
    c->backoff_us = BACKOFF_MIN_US;
    snprintf(c->name, sizeof(c->name), "%s", name);
    int r = -ENOMEM;
    c->argv = argv_copy(argv);
    if (!c->argv)
        goto fail;
    r = loop_timer_add(s->loop, child_restart_due, c, &c->restart_timer);
    if (r < 0)
        goto fail;
    r = child_spawn(c);
    if (r < 0)
        goto fail;
    return s->n_children++;
fail:
    child_fini(c);
    return r;
}

void supervisor_set_ready(struct supervisor *s, uint64_t uptime_us)
{
    uint64_t now = clock_now_us();
    for (int i = 0; i < s->n_children; i++)
        if (s->children[i].pid > 0 && now - s->children[i].started_us >= uptime_us)
            s->children[i].unready_starts = 0;
}

int supervisor_replace_arg(struct supervisor *s, int child, const char *from, const char *to)
{
    ASSERT(child >= 0 && child < s->n_children);
    for (char **a = s->children[child].argv; *a; a++) {
        if (strcmp(*a, from) != 0)
            continue;
        char *copy = strdup(to);
        if (!copy)
            return -ENOMEM;
        free(*a);
        *a = copy;
        return 0;
    }
    return -ENOENT;
}

pid_t supervisor_pid(const struct supervisor *s, int child)
{
    ASSERT(child >= 0 && child < s->n_children);
    return s->children[child].pid;
}

static bool stage_is_down(const struct supervisor *s, int stage)
{
    for (int i = 0; i < s->n_children; i++)
        if (s->children[i].stop_stage == stage && s->children[i].pid > 0)
            return false;
    return true;
}

static int last_stage(const struct supervisor *s)
{
    int last = 0;
    for (int i = 0; i < s->n_children; i++)
        if (s->children[i].stop_stage > last)
            last = s->children[i].stop_stage;
    return last;
}

static void signal_stage(struct supervisor *s, int stage, int signal)
{
    for (int i = 0; i < s->n_children; i++)
        if (s->children[i].stop_stage == stage && s->children[i].pid > 0)
            kill(s->children[i].pid, signal);
}

/* Moves on while stages are down; reports once when all are. */
static void stop_advance(struct supervisor *s)
{
    int last = last_stage(s);
    while (s->stage <= last && stage_is_down(s, s->stage)) {
        s->stage++;
        if (s->stage <= last) {
            signal_stage(s, s->stage, s->killing ? SIGKILL : SIGTERM);
            loop_timer_arm(s->stop_timer, s->config.stop_timeout_us);
        }
    }
    if (s->stage > last && !s->reported) {
        s->reported = true;
        loop_timer_disarm(s->stop_timer);
        s->config.on_stopped(s->status, s->reason, s->config.arg);
    }
}

static void stop_timeout(void *arg)
{
    struct supervisor *s = arg;
    LOG_WARN("stop_timeout", LOG_INT("stage", s->stage), LOG_STR("action", "kill"));
    signal_stage(s, s->stage, SIGKILL);
}

void supervisor_stop(struct supervisor *s)
{
    if (s->stopping) {
        s->killing = true;
        for (int stage = 0; stage <= last_stage(s); stage++)
            signal_stage(s, stage, SIGKILL);
        return;
    }
    s->stopping = true;
    for (int i = 0; i < s->n_children; i++)
        loop_timer_disarm(s->children[i].restart_timer);
    signal_stage(s, s->stage, SIGTERM);
    loop_timer_arm(s->stop_timer, s->config.stop_timeout_us);
    stop_advance(s);
}

static void give_up(struct supervisor *s, const struct child *c, int status, const char *why)
{
    s->status = status;
    snprintf(s->reason, sizeof(s->reason), "%s %s", c->name, why);
    supervisor_stop(s);
}

static void log_exit(const struct child *c, int status)
{
    if (WIFSIGNALED(status))
        LOG_WARN("child_ended", LOG_STR("child", c->name), LOG_INT("signal", WTERMSIG(status)));
    else
        LOG_WARN("child_ended", LOG_STR("child", c->name), LOG_INT("status", WEXITSTATUS(status)));
}

static void schedule_restart(struct child *c)
{
    if (clock_now_us() - c->started_us >= STABLE_US)
        c->backoff_us = BACKOFF_MIN_US;
    LOG_INFO("child_restart", LOG_STR("child", c->name), LOG_INT("delay_us", c->backoff_us));
    loop_timer_arm(c->restart_timer, c->backoff_us);
    c->backoff_us = c->backoff_us * 2 < BACKOFF_MAX_US ? c->backoff_us * 2 : BACKOFF_MAX_US;
}

static void child_ended(pid_t pid, void *arg)
{
    struct child *c = arg;
    struct supervisor *s = c->owner;
    int status = 0;
    waitpid(pid, &status, 0);
    c->pid = 0;
    loop_source_free(c->exit_source);
    c->exit_source = NULL;
    if (s->stopping) {
        stop_advance(s);
        return;
    }
    log_exit(c, status);
    if (WIFEXITED(status) && WEXITSTATUS(status) == EXIT_CONFIG)
        give_up(s, c, EXIT_CONFIG, "refused its configuration; its message stands above");
    else if (WIFEXITED(status) && WEXITSTATUS(status) == 127)
        give_up(s, c, 1, "could not be started: is the program beside tidepool?");
    else if (c->unready_starts >= SUPERVISOR_START_TRIES)
        give_up(s, c, 1, "did not become ready in 5 starts; its messages stand above");
    else
        schedule_restart(c);
}

static void child_restart_due(void *arg)
{
    struct child *c = arg;
    if (c->owner->stopping || c->pid > 0)
        return;
    int r = child_spawn(c);
    if (r < 0) {
        LOG_ERROR("child_start_failed", LOG_STR("child", c->name), LOG_STR("error", strerror(-r)));
        schedule_restart(c);
    }
}
