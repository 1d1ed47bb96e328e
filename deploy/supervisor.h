/* Keeps child processes running: starts them, restarts one that dies with a back-off that doubles, stops them in stages. One thread, the loop's.
 * Children get SIGTERM when this process dies, whatever kills it. A child that exits with status 2 says that its configuration is wrong: it is not
 * restarted, and neither is one that never became ready in SUPERVISOR_START_TRIES starts; both end the supervisor with a reason. */
#pragma once
#include "proto/base/error.h"
#include "proto/base/loop.h"
#include <stdbool.h>
#include <sys/types.h>

enum { SUPERVISOR_CHILDREN_MAX = 64, SUPERVISOR_START_TRIES = 5 };

struct supervisor;

struct supervisor_config {
    /* Called when everything has stopped (status 0), or when a child cannot be kept running (non-zero, `reason` names it; the others are stopped first). */
    void (*on_stopped)(int status, const char *reason, void *arg);
    void *arg;
    uint64_t stop_timeout_us; /* a stage that has not ended by then is killed */
};

int supervisor_create(struct loop *loop, const struct supervisor_config *config, struct supervisor **ret_supervisor);
/* Kills what still runs and reaps it. NULL is fine. */
void supervisor_free(struct supervisor *supervisor);

/* Starts a child. argv is NULL-terminated and copied. Stages stop in ascending order, each after the one before has ended. Returns the
 * child's number, or -ENOSPC, -ENOMEM, or the errno of starting it. */
int supervisor_start(struct supervisor *supervisor, const char *name, const char *const *argv, int stop_stage);
/* The system answers: the start counters of all children that have run for `uptime_us` are cleared. */
void supervisor_set_ready(struct supervisor *supervisor, uint64_t uptime_us);
/* From its next start on, the child gets `to` in place of the argument `from`. -ENOENT, -ENOMEM. */
int supervisor_replace_arg(struct supervisor *supervisor, int child, const char *from, const char *to);
pid_t supervisor_pid(const struct supervisor *supervisor, int child); /* 0 while it is down */
/* SIGTERM stage by stage; a second call kills everything at once. */
void supervisor_stop(struct supervisor *supervisor);
