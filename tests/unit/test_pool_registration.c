/* The pool's registration beside the worker's loop, on a device whose pinning the test lets go piece by piece. */
#include "proto/base/clock.h"
#include "worker/sched/pool_registration.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>

enum { PIECES = 4, WAIT_US = 30000000 };

/* The device: what it has pinned, and how many pieces it may pin. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int allowed, n_failures, n_registered, n_calls, n_pieces;
static bool host_memory, endless; /* endless: it pins without leave, and there is always one more piece */

static struct loop *loop;
static struct pool_registration *registration;
static int n_told;
static char pools[2][4096];

static void properties(const struct device *device, struct device_properties *ret)
{
    (void)device;
    *ret = (struct device_properties){.host_memory = host_memory};
}

/* Waits for leave before each piece. */
static int host_register(struct device *device, void *base, size_t bytes, host_progress_fn *progress, void *arg)
{
    int rc = 0;
    (void)device;
    cr_assert(base && bytes == sizeof pools[0]);
    pthread_mutex_lock(&lock);
    n_calls++;
    for (int i = 0; rc == 0 && i < PIECES; i += !endless) {
        while (allowed == 0 && !endless)
            pthread_cond_wait(&changed, &lock);
        allowed -= !endless;
        n_pieces++;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
        if (progress && !progress(bytes / PIECES * (size_t)(i + 1), arg))
            rc = -ECANCELED;
        pthread_mutex_lock(&lock);
    }
    if (rc == 0 && n_failures > 0) {
        n_failures--;
        rc = -ENOMEM;
    }
    n_registered += rc == 0;
    pthread_mutex_unlock(&lock);
    return rc;
}

static void host_unregister(struct device *device, void *base)
{
    (void)device;
    (void)base;
    n_registered--;
}

static const struct device_ops dev = {.name = "fake", .properties = properties, .host_register = host_register, .host_unregister = host_unregister};

static void on_registered(void *arg)
{
    (void)arg;
    n_told++;
}

static void begin(bool at_once)
{
    host_memory = at_once;
    cr_assert_eq(loop_create(&loop), 0);
    const struct pool_registration_config config = {.dev = &dev, .loop = loop, .retry_us = 1000, .registered = on_registered};
    cr_assert_eq(pool_registration_create(&config, &registration), 0);
}

static void end(void)
{
    pool_registration_free(registration);
    loop_free(loop);
    cr_expect_eq(n_registered, 0, "%d are still registered", n_registered);
}

static void allow_later(int n)
{
    pthread_mutex_lock(&lock);
    allowed += n;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* Leave for n pieces; returns when they are pinned. */
static void allow(int n)
{
    allow_later(n);
    pthread_mutex_lock(&lock);
    while (allowed > 0)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

static void run_until(int told)
{
    const uint64_t end_us = clock_now_us() + WAIT_US;
    while (n_told < told) {
        cr_assert(clock_now_us() < end_us, "told %d times", n_told);
        cr_assert_eq(loop_poll(loop), 0);
    }
}

Test(pool_registration, test_it_is_there_when_the_last_piece_is)
{
    begin(false);
    cr_assert_eq(pool_registration_add(registration, pools[0], sizeof pools[0]), 0);
    cr_expect(!pool_registration_ready(registration));
    allow(PIECES - 1);
    cr_assert_eq(loop_poll(loop), 0);
    cr_expect(!pool_registration_ready(registration) && n_told == 0);
    allow(1);
    run_until(1);
    cr_expect(pool_registration_ready(registration) && n_registered == 1);
    pool_registration_remove(registration, pools[0]);
    cr_expect(!pool_registration_ready(registration) && n_registered == 0);
    end();
}

/* As in a shutdown: it ends after a piece, whichever is under way, and nobody is told. */
Test(pool_registration, test_it_can_end_in_the_middle)
{
    begin(false);
    endless = true;
    cr_assert_eq(pool_registration_add(registration, pools[0], sizeof pools[0]), 0);
    pool_registration_remove(registration, pools[0]);
    cr_expect(n_calls == 1 && n_pieces > 0 && n_registered == 0, "%d pieces", n_pieces);
    cr_assert_eq(loop_poll(loop), 0);
    cr_expect_eq(n_told, 0);
    end();
}

/* Freed with a mapping that is there, and with one that is complete and nobody has been told of. */
Test(pool_registration, test_what_is_left_is_unregistered)
{
    begin(false);
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(pool_registration_add(registration, pools[i], sizeof pools[i]), 0);
        allow(PIECES);
        if (i == 0)
            run_until(1);
    }
    end();
}

Test(pool_registration, test_the_newest_mapping_counts)
{
    begin(false);
    cr_assert_eq(pool_registration_add(registration, pools[0], sizeof pools[0]), 0);
    allow(PIECES);
    run_until(1);
    cr_assert_eq(pool_registration_add(registration, pools[1], sizeof pools[1]), 0);
    cr_expect(!pool_registration_ready(registration), "the store has another pool");
    pool_registration_remove(registration, pools[0]);
    cr_expect(!pool_registration_ready(registration));
    allow(PIECES);
    run_until(2);
    cr_expect(pool_registration_ready(registration));
    end();
}

Test(pool_registration, test_a_pool_that_is_not_taken_is_tried_again)
{
    begin(false);
    n_failures = 2;
    cr_assert_eq(pool_registration_add(registration, pools[0], sizeof pools[0]), 0);
    allow_later(3 * PIECES);
    run_until(1);
    cr_expect(n_calls == 3 && pool_registration_ready(registration), "%d calls", n_calls);
    end();
}

Test(pool_registration, test_the_host_needs_no_thread)
{
    begin(true);
    allowed = PIECES;
    cr_assert_eq(pool_registration_add(registration, pools[0], sizeof pools[0]), 0);
    cr_expect(pool_registration_ready(registration) && n_told == 0);
    pool_registration_remove(registration, pools[0]);
    allowed = PIECES;
    n_failures = 1;
    cr_expect_eq(pool_registration_add(registration, pools[0], sizeof pools[0]), -ENOMEM);
    cr_expect(!pool_registration_ready(registration));
    end();
}
