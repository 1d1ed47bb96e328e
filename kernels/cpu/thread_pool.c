/* The word `state` says everything that threads must agree on:
 *
 *   bits 0..9    threads (without the caller) that work on the current run
 *   bit  10      OPEN: the run may be joined
 *   bit  11      CALLER_WAITS: whoever leaves last wakes the caller
 *   bits 12..31  number of the run
 *
 * A thread joins by adding one while OPEN is set, claims tasks until none is left, and leaves by subtracting one. The caller clears OPEN when no task is left
 * to claim and waits until nobody works: then the run's fields may be written again. A thread that comes too late finds OPEN clear and misses nothing.
 * The number tells a thread that it has already been in this run; when it wraps, at worst a thread sits out one run.
 *
 * Sleepers and the caller wait on the same futex word with different bits, so that each wake-up reaches the right ones. */
#include "kernels/cpu/thread_pool.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { WORKERS = (1 << 10) - 1, OPEN = 1 << 10, CALLER_WAITS = 1 << 11, RUN_ONE = 1 << 12 };
enum { WAKE_SLEEPERS = 1, WAKE_CALLER = 2 };
enum { SPIN_NS = 20000 };

struct pool_thread {
    struct thread_pool *pool;
    pthread_t id;
    int index;
};

struct thread_pool {
    /* Each on its own cache line: `state` is polled by all, `next` is taken by all, the rest is written once a run. */
    _Alignas(64) atomic_uint state;
    _Alignas(64) atomic_int_fast64_t next; /* first task that nobody has claimed */
    _Alignas(64) pool_task *fn;
    void *arg;
    int64_t n_tasks;
    _Alignas(64) atomic_int n_sleepers;
    atomic_bool stop;
    int n_threads;  /* caller included */
    int n_started;  /* threads to join */
    int n_spins;    /* turns of pause that take about SPIN_NS */
    struct pool_thread threads[];
};

static void futex_wait(atomic_uint *word, unsigned expected, unsigned bits)
{
    syscall(SYS_futex, word, FUTEX_WAIT_BITSET_PRIVATE, expected, NULL, NULL, bits);
}

static void futex_wake(atomic_uint *word, unsigned bits)
{
    syscall(SYS_futex, word, FUTEX_WAKE_BITSET_PRIVATE, POOL_MAX_THREADS, NULL, NULL, bits);
}

/* A pause takes 5 to 50 ns depending on the processor. */
static int spins_calibrate(void)
{
    enum { TRIAL = 2000 };
    struct timespec t0, t1;
    clock_gettime(CLOCK_MONOTONIC, &t0);
    for (int i = 0; i < TRIAL; i++)
        _mm_pause();
    clock_gettime(CLOCK_MONOTONIC, &t1);
    int64_t ns = (int64_t)(t1.tv_sec - t0.tv_sec) * 1000000000 + (t1.tv_nsec - t0.tv_nsec);
    int64_t spins = (int64_t)TRIAL * SPIN_NS / (ns > 0 ? ns : 1);
    return spins < 64 ? 64 : spins > 20000 ? 20000 : (int)spins;
}

static void tasks_run(struct thread_pool *pool, int thread)
{
    int64_t n = pool->n_tasks;
    for (;;) {
        /* Relaxed: the order of the data is made by `state`, this only hands out numbers. */
        int64_t task = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
        if (task >= n)
            return;
        pool->fn(pool->arg, task, thread);
    }
}

/* True when this thread now works on a run other than `*last_run`. */
static bool run_join(struct thread_pool *pool, unsigned *last_run)
{
    unsigned s = atomic_load_explicit(&pool->state, memory_order_relaxed);
    while ((s & OPEN) && s / RUN_ONE != *last_run) {
        /* Acquire pairs with the release of the caller that opened the run. */
        if (atomic_compare_exchange_weak_explicit(&pool->state, &s, s + 1, memory_order_acquire, memory_order_relaxed)) {
            *last_run = s / RUN_ONE;
            return true;
        }
    }
    return false;
}

static void run_leave(struct thread_pool *pool)
{
    /* Release hands this thread's results to the caller. */
    unsigned s = atomic_fetch_sub_explicit(&pool->state, 1, memory_order_release) - 1;
    if ((s & CALLER_WAITS) && (s & WORKERS) == 0)
        futex_wake(&pool->state, WAKE_CALLER);
}

/* Sleeps unless a run is open already. */
static void thread_sleep(struct thread_pool *pool, unsigned last_run)
{
    /* Sequentially consistent on both sides: either the caller sees the sleeper, or the sleeper sees the open run. */
    atomic_fetch_add(&pool->n_sleepers, 1);
    unsigned s = atomic_load(&pool->state);
    if (!((s & OPEN) && s / RUN_ONE != last_run) && !atomic_load(&pool->stop))
        futex_wait(&pool->state, s, WAKE_SLEEPERS);
    atomic_fetch_sub(&pool->n_sleepers, 1);
}

static void *thread_main(void *arg)
{
    struct pool_thread *self = arg;
    struct thread_pool *pool = self->pool;
    unsigned last_run = 0;
    int spins = 0;
    while (!atomic_load_explicit(&pool->stop, memory_order_relaxed)) {
        if (run_join(pool, &last_run)) {
            tasks_run(pool, self->index);
            run_leave(pool);
            spins = 0;
        } else if (++spins < pool->n_spins) {
            _mm_pause();
        } else {
            thread_sleep(pool, last_run);
            spins = 0;
        }
    }
    return NULL;
}

/* Nobody may join any more; waits until all who have joined have left. */
static void run_close(struct thread_pool *pool)
{
    unsigned s = atomic_fetch_and_explicit(&pool->state, ~(unsigned)OPEN, memory_order_acq_rel) & ~(unsigned)OPEN;
    for (int spins = 0; (s & WORKERS) && spins < pool->n_spins; spins++) {
        _mm_pause();
        s = atomic_load_explicit(&pool->state, memory_order_acquire);
    }
    if ((s & WORKERS) == 0)
        return;
    s = atomic_fetch_or(&pool->state, CALLER_WAITS) | CALLER_WAITS;
    while (s & WORKERS) {
        futex_wait(&pool->state, s, WAKE_CALLER);
        s = atomic_load(&pool->state);
    }
    atomic_fetch_and(&pool->state, ~(unsigned)CALLER_WAITS);
}

void pool_run(struct thread_pool *pool, int64_t n_tasks, pool_task *fn, void *arg)
{
    if (pool->n_threads == 1 || n_tasks <= 1) {
        for (int64_t task = 0; task < n_tasks; task++)
            fn(arg, task, 0);
        return;
    }
    pool->fn = fn;
    pool->arg = arg;
    pool->n_tasks = n_tasks;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    unsigned s = atomic_load_explicit(&pool->state, memory_order_relaxed);
    atomic_store(&pool->state, (s / RUN_ONE + 1) * RUN_ONE | OPEN);
    if (atomic_load(&pool->n_sleepers) > 0)
        futex_wake(&pool->state, WAKE_SLEEPERS);
    tasks_run(pool, 0);
    run_close(pool);
}

int thread_pool_size(const struct thread_pool *pool)
{
    return pool->n_threads;
}

static int threads_start(struct thread_pool *pool)
{
    sigset_t all, old;
    sigfillset(&all);
    int rc = pthread_sigmask(SIG_SETMASK, &all, &old);
    for (int i = 1; i < pool->n_threads && rc == 0; i++) {
        struct pool_thread *thread = &pool->threads[i];
        *thread = (struct pool_thread){.pool = pool, .index = i};
        rc = pthread_create(&thread->id, NULL, thread_main, thread);
        if (rc == 0)
            pool->n_started = i;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return -rc;
}

int thread_pool_create(int n_threads, struct thread_pool **ret_pool)
{
    if (n_threads < 1 || n_threads > POOL_MAX_THREADS)
        return -EINVAL;
    size_t bytes = (sizeof(struct thread_pool) + (size_t)n_threads * sizeof(struct pool_thread) + 63) & ~(size_t)63;
    struct thread_pool *pool = aligned_alloc(64, bytes);
    if (!pool)
        return -ENOMEM;
    *pool = (struct thread_pool){.n_threads = n_threads, .n_spins = spins_calibrate()};
    int rc = threads_start(pool);
    if (rc < 0) {
        thread_pool_free(pool);
        return rc;
    }
    *ret_pool = pool;
    return 0;
}

void thread_pool_free(struct thread_pool *pool)
{
    if (!pool)
        return;
    atomic_store(&pool->stop, true);
    /* A changed word makes a futex wait that is about to begin return at once. */
    atomic_fetch_add(&pool->state, RUN_ONE);
    futex_wake(&pool->state, WAKE_SLEEPERS);
    for (int i = 1; i <= pool->n_started; i++)
        pthread_join(pool->threads[i].id, NULL);
    free(pool);
}
