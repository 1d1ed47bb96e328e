#include "kernels/cpu/thread_pool.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

struct tally {
    atomic_int *seen;    /* [n_tasks] */
    atomic_int in_thread[POOL_MAX_THREADS];
    int n_threads;
};

static void tally_task(void *arg, int64_t task, int thread)
{
    struct tally *t = arg;
    atomic_fetch_add(&t->seen[task], 1);
    cr_assert(thread >= 0 && thread < t->n_threads);
    /* A thread index belongs to one thread at a time: scratch is keyed by it. */
    cr_assert_eq(atomic_fetch_add(&t->in_thread[thread], 1), 0);
    atomic_fetch_sub(&t->in_thread[thread], 1);
}

static void run_once(struct thread_pool *pool, int64_t n_tasks)
{
    struct tally *t = calloc(1, sizeof *t);
    t->seen = calloc((size_t)n_tasks + 1, sizeof *t->seen);
    t->n_threads = thread_pool_size(pool);
    pool_run(pool, n_tasks, tally_task, t);
    for (int64_t i = 0; i < n_tasks; i++)
        cr_assert_eq(t->seen[i], 1, "task %lld ran %d times", (long long)i, t->seen[i]);
    free(t->seen);
    free(t);
}

Test(thread_pool, test_every_task_runs_once)
{
    static const int sizes[] = {1, 2, 3, 8, 40};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        struct thread_pool *pool;
        cr_assert_eq(thread_pool_create(sizes[i], &pool), 0);
        cr_assert_eq(thread_pool_size(pool), sizes[i]);
        static const int64_t counts[] = {0, 1, 2, 3, 7, 100, 1000};
        for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++)
            run_once(pool, counts[c]);
        thread_pool_free(pool);
    }
}

struct sum_args {
    const int64_t *in; /* [n] */
    int64_t *out;
};

static void sum_task(void *arg, int64_t task, int thread)
{
    struct sum_args *a = arg;
    (void)thread;
    a->out[task] = a->in[task] + 1;
}

/* Thousands of runs back to back: each must see what the one before wrote, whoever ran it. */
Test(thread_pool, test_runs_see_the_results_of_earlier_runs)
{
    enum { N = 16, RUNS = 20000 };
    int64_t values[2][N] = {0};
    struct thread_pool *pool;
    cr_assert_eq(thread_pool_create(4, &pool), 0);
    for (int run = 0; run < RUNS; run++) {
        struct sum_args args = {.in = values[run % 2], .out = values[1 - run % 2]};
        pool_run(pool, N, sum_task, &args);
    }
    for (int i = 0; i < N; i++)
        cr_assert_eq(values[0][i], RUNS);
    thread_pool_free(pool);
}

static void meet_task(void *arg, int64_t task, int thread)
{
    atomic_int *present = arg;
    (void)task;
    (void)thread;
    atomic_fetch_add(present, 1);
    while (atomic_load(present) < 3)
        ;
}

/* Three tasks that wait for each other end only if three threads work at once, sleepers included. */
Test(thread_pool, test_threads_work_at_the_same_time, .timeout = 60)
{
    struct thread_pool *pool;
    cr_assert_eq(thread_pool_create(3, &pool), 0);
    for (int i = 0; i < 20; i++) {
        atomic_int present = 0;
        pool_run(pool, 3, meet_task, &present);
    }
    thread_pool_free(pool);
}

Test(thread_pool, test_create_rejects_sizes_out_of_range)
{
    struct thread_pool *pool;
    cr_assert_eq(thread_pool_create(0, &pool), -EINVAL);
    cr_assert_eq(thread_pool_create(POOL_MAX_THREADS + 1, &pool), -EINVAL);
    thread_pool_free(NULL);
}
