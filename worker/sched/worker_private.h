/* Shared by worker.c, worker_events.c and worker_ranks.c only. */
#pragma once
#include "kernels/collective.h"
#include "worker/cache/engine.h"
#include "worker/group/rank_follower.h"
#include "worker/group/rank_message.h"
#include "worker/model/model.h"
#include "worker/sched/pool_registration.h"
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
    struct pool_registration *registration; /* of the store's mappings */
    struct kv_client *store;       /* NULL: no pool */
    struct engine *engine;
    struct scheduler *scheduler;
    struct router_link *link;
    struct loop_source *signals[3];
    struct job_limits limits;
    bool draining, stopped;
    /* with --tp */
    struct rank_group *group;       /* the leader's; else NULL */
    struct rank_follower *follower; /* a follower's; else NULL */
    const struct collective_ops *collective_ops;
    struct collective *collective;
    uint8_t communicator[COLLECTIVE_ID_BYTES];
    char settings[RANK_SETTINGS_MAX + 1];
    int follower_result;
    /* what Ready says, filled in once */
    uint8_t fingerprint[32];
    uint32_t eos_ids[MODEL_MAX_EOS];
    char model_id[128], description[256];
    struct kv_store_info store_info; /* of the last Ready */
};

/* The store is connected, and the device reads its pool. */
bool worker_pool_there(const struct worker *worker, const struct kv_store_info *info);

/* worker_events.c */
struct scheduler_sink worker_sink(struct worker *worker);
struct router_link_events worker_link_events(struct worker *worker);
/* worker_ranks.c: what --tp adds, in the order in which it happens; nothing with --tp 1, but for the check of the options. */
int worker_ranks_start(struct worker *worker, struct error *err); /* before threads: the leader starts its followers, or listens */
int worker_ranks_meet(struct worker *worker, struct error *err);  /* with the device: all are there */
int worker_ranks_load(struct worker *worker, struct error *err);  /* with the model: all have it, and the communicator is open */
const struct engine_peers *worker_ranks_peers(struct worker *worker);
int worker_ranks_ready(struct worker *worker, struct error *err); /* with the engine: all have one, before the router hears of the worker */
int worker_follow(struct worker *worker);       /* a follower's worker_run */
void worker_ranks_stop(struct worker *worker);  /* before the engine goes */
void worker_ranks_free(struct worker *worker);  /* after it */
/* worker_events.c: what this worker holds, all its ranks together as they last said. */
void worker_usage(struct worker *worker, struct rank_usage *ret_usage);
/* worker_events.c: refuses new requests; the process ends when the running ones have. */
void worker_drain(struct worker *worker, const char *why);
