/* tidepool-worker: one process a device. Everything is in worker/sched/worker.h. */
#include "proto/base/log.h"
#include "worker/sched/worker.h"
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

/* One line with every option as it is in effect. */
static void log_options(const struct worker_options *options)
{
    char values[64][256];
    struct log_field fields[64];
    struct option option;
    size_t n = 0;

    for (size_t i = 0; options_at(&worker_option_set, i, options, &option); i++) {
        ASSERT(n < ARRAY_LEN(fields));
        if (options_format(&option, values[n], sizeof values[n]) < 0)
            continue;
        fields[n] = LOG_STR(option.spec->name, values[n]);
        n++;
    }
    log_write(LOG_LEVEL_INFO, "configuration", fields, n);
}

/* Starting again would not help: the launcher gives up on status 2. */
static bool is_config_error(int rc)
{
    return rc == -EINVAL || rc == -ENOENT || rc == -EACCES || rc == -ENOTSUP || rc == -EISDIR || rc == -E2BIG || rc == -ENODEV || rc == -ENXIO;
}

int main(int argc, char **argv)
{
    static char process[32] = "worker"; /* lives as long as the log */
    struct worker_options options;
    struct worker *worker = NULL;
    struct error err = {""};
    int status, rc = options_parse(&worker_option_set, argc, argv, &options, NULL, &err);

    if (rc == 1)
        return 0;
    if (rc < 0) {
        fprintf(stderr, "tidepool-worker: %s\n", err.text);
        return 2;
    }
    if (options.tp_rank)
        snprintf(process, sizeof process, "worker.%d", (int)options.tp_rank);
    log_init(process, (enum log_level)options.log_level, (enum log_format)options.log_format);
    signal(SIGPIPE, SIG_IGN);
    log_options(&options);
    rc = worker_create(&options, &worker, &err);
    if (rc < 0) {
        LOG_ERROR("start_failed", LOG_STR("error", err.text));
        return is_config_error(rc) ? 2 : 1;
    }
    status = worker_run(worker);
    worker_free(worker);
    LOG_INFO("stopped", LOG_INT("status", status));
    return status;
}
