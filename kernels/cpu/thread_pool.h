/* A pool of compute threads for short fork-joins: a decode step has some 200 of them, so a run on a hot pool costs about a microsecond.
 *
 * pool_run splits [0, n_tasks) over the calling thread and the others; tasks are claimed one by one in ascending order. Which thread runs a task is not
 * determined, so results must not depend on it. The caller works too and never waits for a thread that has not started on this run: on a machine whose
 * cores are taken by others a run is finished by whoever gets to it.
 *
 * Idle threads spin for some 20 microseconds (the gap between two ops), then sleep on a futex. One thread at a time calls pool_run. */
#pragma once
#include <stdint.h>

enum { POOL_MAX_THREADS = 256 };

struct thread_pool;

/* `task` in [0, n_tasks); `thread` in [0, n_threads), the same for all tasks that one thread runs (0 is the caller). */
typedef void pool_task(void *arg, int64_t task, int thread);

/* Starts n_threads - 1 threads (1 <= n_threads <= POOL_MAX_THREADS), all signals blocked. -EINVAL, -ENOMEM, -EAGAIN. */
int thread_pool_create(int n_threads, struct thread_pool **ret_pool);
void thread_pool_free(struct thread_pool *pool); /* joins the threads; NULL is fine; never during a run */
int thread_pool_size(const struct thread_pool *pool);
/* Returns when every task has returned. Writes made before the call are seen by the tasks, theirs by the caller afterwards. */
void pool_run(struct thread_pool *pool, int64_t n_tasks, pool_task *fn, void *arg);
