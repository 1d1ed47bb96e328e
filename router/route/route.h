/* The routing core: workers, their health, the queue, the choice of worker, and what happens when one fails. One thread, the loop's.
 *
 * A request is submitted once and ends with exactly one of on_finished and on_failed, or with route_cancel. Between, it may move from worker to
 * worker (at most retries_max times): its owner sees tokens without gap or repeat and does not notice but for the time. */
#pragma once
#include "proto/base/buf.h"
#include "proto/base/error.h"
#include "proto/base/loop.h"
#include "router/route/policy.h"
#include "router/route/prompt.h"
#include <stdbool.h>
#include <stdint.h>

struct route;
struct route_request;

enum { ROUTE_TOP_LOGPROBS_MAX = 20 };

struct route_config {
    struct loop *loop;
    const char *endpoint;         /* ZeroMQ, bound: ipc:///path or tcp://address:port */
    const struct policy_ops *policy;
    uint32_t queue_requests_max;  /* waiting, not yet with a worker */
    uint64_t queue_tokens_max;    /* prompt tokens of those */
    uint64_t worker_wait_us;      /* how long a request waits while no worker is ready */
    uint64_t queue_timeout_us;    /* how long it waits in all before its first token */
    uint32_t heartbeat_ms;
    uint64_t progress_timeout_us; /* a busy worker without progress for so long is unhealthy */
    uint32_t retries_max;         /* a request; 0: none */
    uint32_t lookahead;           /* requests given to a worker beyond what it decodes as one batch */
    uint32_t vocab_size;          /* tokens the router may send; a worker with fewer is refused */
    uint64_t rng_seed;            /* 0: from the system; fixes the epoch in tests */
};

struct route_top { uint32_t id; float logprob; };
struct route_token {
    uint32_t id;
    float logprob;
    bool ends;                    /* a stop id: the answer ends with it */
    uint32_t n_top;
    const struct route_top *top;  /* [n_top], likeliest first; valid during the call */
};

struct route_logit_bias { uint32_t id; float bias; };

struct route_sampling {
    float temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty;
    int32_t top_k;
    uint64_t seed;
    bool logprobs;
    uint32_t n_logprobs;
    struct route_logit_bias *logit_bias; /* [n_logit_bias] */
    uint32_t n_logit_bias;
};

struct route_prefilled {
    uint32_t prompt_tokens, cached_tokens;
    uint64_t bytes_loaded, queue_us, prefill_us; /* the worker's */
    const struct route_token *prompt_logprobs; /* [n_prompt_logprobs], of prompt[1..]; valid during the call */
    uint32_t n_prompt_logprobs;
    const char *worker;           /* its name; valid during the call */
};

struct route_finished {
    bool stopped;                 /* by a stop id; else by max_tokens */
    uint32_t completion_tokens;
    uint64_t bytes_loaded, bytes_to_pool, bytes_attended, bytes_missed, decode_us;
    uint32_t retries;             /* times the request moved */
    const char *worker;           /* the last one's name; valid during the call */
};

enum route_failure {
    ROUTE_INVALID,   /* the worker refuses the request's values */
    ROUTE_TOO_LONG,  /* prompt and answer do not fit the context */
    ROUTE_NO_WORKER, /* none was ready in time */
    ROUTE_TIMEOUT,   /* waited too long */
    ROUTE_LOST,      /* failed on every worker it was tried on */
};

/* Any of these may end or cancel other requests, and on_finished and on_failed free this one when they return. */
struct route_events {
    void (*on_prefilled)(const struct route_prefilled *prefilled, void *arg); /* once, before any token */
    void (*on_tokens)(const struct route_token *tokens, uint32_t n, void *arg);
    void (*on_finished)(const struct route_finished *finished, void *arg);
    void (*on_failed)(enum route_failure failure, const char *text, void *arg);
};

struct route_job {
    const char *id;               /* for logs; copied */
    struct prompt *prompt;        /* a reference is taken */
    uint32_t max_tokens;          /* 0: what is left of the context */
    uint32_t min_tokens;
    const uint32_t *stop_ids;     /* [n_stop_ids], copied; the model's own are added unless ignore_eos */
    uint32_t n_stop_ids;
    bool ignore_eos, prompt_logprobs, no_cache;
    bool admitted;                /* belongs to a request that the queue has let in already */
    struct route_sampling sampling; /* logit_bias is copied */
    const struct route_events *events;
    void *arg;
};

/* Binds the endpoint. */
int route_create(const struct route_config *config, struct route **ret_route, struct error *err);
/* Every request must have ended. NULL is fine. */
void route_free(struct route *route);

/* Queues a request; no callback comes before this returns. -EBUSY: the queue is full, ask again after *ret_retry_after_s; -EMSGSIZE: too long for
 * every worker (text in err); -ENOMEM. */
int route_submit(struct route *route, const struct route_job *job, struct route_request **ret_request, uint32_t *ret_retry_after_s, struct error *err);
/* Ends a request at any stage without callbacks; its worker stops within one step. */
void route_cancel(struct route_request *request);

/* Workers that take requests now. */
uint32_t route_n_ready(const struct route *route);
/* Longest context of the ready workers, 0 without any. */
uint32_t route_context_length(const struct route *route);
/* Distinct fingerprints of the ready workers, for hashing prompts beforehand. Returns how many were written, <= max. */
int route_fingerprints(const struct route *route, uint8_t (*ret_fingerprints)[FINGERPRINT_BYTES], int max);
/* Seconds that a client should wait before it asks again. */
uint32_t route_retry_after_s(const struct route *route);
uint32_t route_n_queued(const struct route *route);
uint32_t route_n_running(const struct route *route);

struct route_counters {
    uint64_t dispatched, retried, cancelled, workers_lost, unhealthy, malformed, dropped_late, queue_rejected, store_gaps, snapshots;
};
const struct route_counters *route_counters(const struct route *route);

struct route_worker_info { /* strings are borrowed until the loop goes on */
    const char *name, *state, *description;
    uint32_t n_inflight, n_running, n_prefilling, n_waiting, context_length, max_running;
    uint64_t load_tokens, device_bytes, device_peak_bytes, pool_bytes, pool_used_bytes, dispatched, progress;
    uint64_t page_cache_bytes, page_cache_used_bytes, page_cache_hits, page_cache_misses;
    bool store_connected;
    int store;                    /* number, or -1 */
    size_t store_blocks;          /* known of its store */
};
uint32_t route_n_workers(const struct route *route);
void route_worker_info(const struct route *route, uint32_t i, struct route_worker_info *ret);
