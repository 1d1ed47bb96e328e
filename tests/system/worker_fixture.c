#include "tests/system/worker_fixture.h"

#include "tests/system/tiny_gguf.h"
#include <criterion/criterion.h>
#include <stdio.h>

enum { ARGUMENTS_MAX = 32 };

static const char *const no_options[] = {NULL};

void worker_fixture_init(struct worker_fixture *f)
{
    folder_make(f->folder);
    snprintf(f->endpoint, sizeof f->endpoint, "ipc://%s/router.sock", f->folder);
    snprintf(f->store_socket, sizeof f->store_socket, "%s/kvstore.sock", f->folder);
    snprintf(f->model, sizeof f->model, "%s/tiny.gguf", f->folder);
    tiny_gguf_write(f->model);
    f->program = "tidepool-worker";
    f->options = no_options;
    driver_open(&f->driver, f->endpoint);
}

void worker_fixture_fini(struct worker_fixture *f)
{
    for (int i = 0; i < FIXTURE_WORKERS_MAX; i++)
        child_end(&f->workers[i]);
    child_end(&f->store);
    driver_close(&f->driver);
    folder_remove(f->folder);
}

void worker_fixture_store(struct worker_fixture *f, const char *pool_size)
{
    const char *argv[] = {program_path("tidepool-kvstore"), "--socket", f->store_socket, "--pool-size", pool_size, NULL};

    child_start(&f->store, argv, 0);
    cr_assert(child_wait_line(&f->store, "event=store_ready", FIXTURE_WAIT_MS));
}

static int append(const char **argv, int n, const char *const *options)
{
    while (*options) {
        cr_assert_lt(n, ARGUMENTS_MAX - 1);
        argv[n++] = *options++;
    }
    return n;
}

struct child *worker_fixture_start(struct worker_fixture *f, int i, const char *const *more)
{
    char name[16];
    const char *argv[ARGUMENTS_MAX] = {program_path(f->program), "--model", f->model, "--store", f->store_socket, "--threads", "1", "--chunk", "128", "--name", name};
    int n = append(argv, 11, f->options);

    append(argv, n, more);
    snprintf(name, sizeof name, "w%d", i);
    child_start(&f->workers[i], argv, 0);
    return &f->workers[i];
}

struct driver_worker *worker_fixture_ready(struct worker_fixture *f, int i)
{
    char name[16];

    snprintf(name, sizeof name, "w%d", i);
    return driver_worker(&f->driver, name);
}
