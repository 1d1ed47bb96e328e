/* What a configuration needs of a device and of the host, from the model's configuration alone: no weights, no engine. The numbers are those of engine.h: the same functions size what
 * an engine allocates and decide what it admits, so a plan is what a run takes, to the byte. */
#pragma once
#include "worker/cache/engine.h"
#include "worker/model/model_config.h"

struct memory_plan_params {
    const struct model_config *model;
    const struct device_ops *dev; /* an open device of the kind that will run it; nothing of it is allocated */
    const struct kernel_ops *ops;
    const struct collective_ops *collective; /* for the configuration of one rank (model_shard.h): how its group talks; else NULL */
    struct device *device;
    struct stream *stream;
    struct engine_config engine;  /* memory_limit is not used, and so BRIDGE_AUTO is the device */
    int n_prompt, max_new;        /* one request without cached prefix, n_prompt + max_new <= engine.max_context */
    bool pool;                    /* the pool takes the prompt's blocks; those of the answer are counted on the device, should it be full when they are made */
};

/* Device bytes are beyond the weights. */
struct memory_plan {
    size_t prefill[MEM_TAG_COUNT]; /* held while the prompt is computed */
    size_t decode[MEM_TAG_COUNT];  /* held at the end of the answer */
    size_t peak[MEM_TAG_COUNT];    /* the larger of the two, tag by tag */
    size_t peak_total;             /* most held at one time */
    size_t fixed;                  /* the engine's and the device's own share: engine_workspace_bytes */
    size_t sequence;               /* one more sequence from its start on: engine_sequence_bytes */
    size_t running;                /* and once its prompt is done */
    size_t host_engine, host_sequence; /* bookkeeping in host memory */
    size_t host_bridge;            /* pinned host memory while the prompt is computed */
    size_t block_bytes[2];         /* in the pool; [1]: block 0 of a sequence */
    size_t pool_bytes;             /* the request's full blocks */
    int n_kept, recent_rows;       /* rows of the fast tier per layer and KV head */
};

/* How many such sequences a limit allows. */
struct memory_fit {
    size_t running;    /* whose prompts are done */
    size_t prefilling; /* in all, when one of them is at its prompt; 0: not even one can start */
    size_t page_cache; /* bytes that one running alone leaves to the page cache */
};

/* -EINVAL and -E2BIG name the field. */
int memory_plan_init(const struct memory_plan_params *params, struct memory_plan *ret_plan, struct error *err);
/* `limit`: device bytes beyond the weights. */
struct memory_fit memory_plan_fit(const struct memory_plan *plan, size_t limit);
/* The longest context (answer of max_new included) of which one request can start within the limit, in an engine that allows no longer one; 0: none. Errors as memory_plan_init. */
int memory_plan_longest(const struct memory_plan_params *params, size_t limit, int *ret_context, struct error *err);
