/* Real workers and a real store with a driver in the router's place, all in one folder with a small random model. A test starts the processes that it wants; fini ends them, however far they came.
 * Failures are Criterion assertions. */
#pragma once
#include "tests/system/child_process.h"
#include "tests/system/router_driver.h"

/* Waits are as long as the driver's: whatever hangs is caught by the test's own timeout. */
enum { FIXTURE_WORKERS_MAX = 3, FIXTURE_WAIT_MS = DRIVER_WAIT_MS };

struct worker_fixture {
    char folder[64], endpoint[96], store_socket[96];
    /* Of the workers that are started from here on; at first the small model, tidepool-worker and none. */
    char model[96];
    const char *program;        /* as program_path takes it */
    const char *const *options; /* further ones with their values, ended by NULL */
    struct driver driver;
    struct child store, workers[FIXTURE_WORKERS_MAX];
};

void worker_fixture_init(struct worker_fixture *f);
void worker_fixture_fini(struct worker_fixture *f);
/* Starts the store, or the next one at the same place after that one was ended. `pool_size` as the option takes it. */
void worker_fixture_store(struct worker_fixture *f, const char *pool_size);
/* Starts worker i, named "w<i>", with the model, the store, one thread, chunks of 128, the fixture's options and `more`, ended by NULL. Of an option given twice the later one holds. */
struct child *worker_fixture_start(struct worker_fixture *f, int i, const char *const *more);
/* Worker i, once the driver has heard that it is ready. */
struct driver_worker *worker_fixture_ready(struct worker_fixture *f, int i);
