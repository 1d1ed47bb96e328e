/* One worker process put together: device, model, client of the store, engine, scheduler, link to the router, and the loop that drives them. One thread:
 * between units of computation the loop is polled; when there is nothing to compute, it waits. */
#pragma once
#include "proto/base/error.h"
#include "worker/sched/worker_options.h"

struct worker;

/* Blocks while the model is loaded. -EINVAL (an option), or an error of the part that failed, named in the text. */
int worker_create(const struct worker_options *options, struct worker **ret_worker, struct error *err);
/* Runs until it has drained (SIGTERM, SIGINT, or the router's Drain), or is stopped by a second signal. Returns the exit status: 0, or 1 when the device
 * or the loop failed or requests were cut off. */
int worker_run(struct worker *worker);
void worker_free(struct worker *worker); /* NULL is fine */
