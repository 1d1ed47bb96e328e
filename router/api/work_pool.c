#include "router/api/work_pool.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { THREADS_MAX = 64 };

struct work_list {
    struct work *first, **last;
};

struct work_pool {
    pthread_mutex_t lock;  /* guards waiting, finished, stopping */
    pthread_cond_t wake;   /* something waits, or it is time to stop */
    struct work_list waiting, finished;
    bool stopping;
    int event_fd;          /* written when `finished` becomes non-empty */
    struct loop_source *event_source;
    pthread_t threads[THREADS_MAX];
    int n_threads;
};

static void list_init(struct work_list *list)
{
    list->first = NULL;
    list->last = &list->first;
}

static void list_push(struct work_list *list, struct work *work)
{
    work->next = NULL;
    *list->last = work;
    list->last = &work->next;
}

static struct work *list_pop(struct work_list *list)
{
    struct work *work = list->first;
    if (!work)
        return NULL;
    list->first = work->next;
    if (!list->first)
        list->last = &list->first;
    return work;
}

static void *thread_main(void *arg)
{
    struct work_pool *pool = arg;
    pthread_mutex_lock(&pool->lock);
    while (!pool->stopping) {
        struct work *work = list_pop(&pool->waiting);
        if (!work) {
            pthread_cond_wait(&pool->wake, &pool->lock);
            continue;
        }
        pthread_mutex_unlock(&pool->lock);
        work->run(work->arg);
        pthread_mutex_lock(&pool->lock);
        bool was_empty = pool->finished.first == NULL;
        list_push(&pool->finished, work);
        if (was_empty)
            (void)!eventfd_write(pool->event_fd, 1);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static void on_finished(int fd, int events, void *arg)
{
    (void)events;
    struct work_pool *pool = arg;
    struct work_list finished;
    eventfd_t count;
    (void)!eventfd_read(fd, &count);
    pthread_mutex_lock(&pool->lock);
    finished = pool->finished;
    if (!finished.first)
        list_init(&finished);
    list_init(&pool->finished);
    pthread_mutex_unlock(&pool->lock);
    for (struct work *work = finished.first, *next; work; work = next) {
        next = work->next; /* `done` may free it */
        work->done(work->arg);
    }
}

/* The threads leave signals to the loop. */
static int start_threads(struct work_pool *pool, int n)
{
    sigset_t all, before;
    int rc = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 0; i < n && rc == 0; i++) {
        rc = -pthread_create(&pool->threads[i], NULL, thread_main, pool);
        pool->n_threads += rc == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}

int work_pool_create(struct loop *loop, int n_threads, struct work_pool **ret_pool)
{
    ASSERT(n_threads >= 1 && n_threads <= THREADS_MAX);
    struct work_pool *pool = calloc(1, sizeof(*pool));
    if (!pool)
        return -ENOMEM;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    list_init(&pool->waiting);
    list_init(&pool->finished);
    pool->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int rc = pool->event_fd < 0 ? -errno : loop_fd_add(loop, pool->event_fd, LOOP_READ, on_finished, pool, &pool->event_source);
    if (rc >= 0)
        rc = start_threads(pool, n_threads);
    if (rc < 0) {
        work_pool_free(pool);
        return rc;
    }
    *ret_pool = pool;
    return 0;
}

void work_pool_free(struct work_pool *pool)
{
    if (!pool)
        return;
    pthread_mutex_lock(&pool->lock);
    pool->stopping = true;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->n_threads; i++)
        pthread_join(pool->threads[i], NULL);
    loop_source_free(pool->event_source);
    if (pool->event_fd >= 0)
        close(pool->event_fd);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

void work_pool_submit(struct work_pool *pool, struct work *work)
{
    pthread_mutex_lock(&pool->lock);
    list_push(&pool->waiting, work);
    pthread_cond_signal(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
}
