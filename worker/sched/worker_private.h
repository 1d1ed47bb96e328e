/* Shared by worker.c and worker_events.c only. */
#pragma once
#include "worker/cache/engine.h"
#include "worker/model/model.h"
#include "worker/sched/router_link.h"
#include "worker/sched/scheduler.h"
#include "worker/sched/worker.h"

struct worker {
    const struct worker_options *options;
    const struct device_ops *dev;
    const struct kernel_ops *ops;
    struct device *device;
    struct stream *stream;
    struct model *model;
    struct loop *loop;
    struct kv_client *store;       /* NULL: no pool */
    struct engine *engine;
    struct scheduler *scheduler;
    struct router_link *link;
    struct loop_source *signals[3];
    struct job_limits limits;
    bool draining, stopped;
    /* what Ready says, filled in once */
    uint8_t fingerprint[32];
    uint32_t eos_ids[MODEL_MAX_EOS];
    char model_id[128], description[256];
    struct kv_store_info store_info; /* of the last Ready */
};

/* worker_events.c */
struct scheduler_sink worker_sink(struct worker *worker);
struct router_link_events worker_link_events(struct worker *worker);
/* Refuses new requests; the process ends when the running ones have. */
void worker_drain(struct worker *worker, const char *why);
