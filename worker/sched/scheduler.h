/* The order of work on one device: which requests wait, which prompt is prefilled, when the running sequences take a step, what is sampled and when an
 * answer ends. Knows nothing of messages; what happens is told to a sink. One thread: that of the engine and the loop.
 *
 *  - Requests start in order of arrival, when the engine has memory for all they can ever need. While the one in front waits for memory nobody overtakes it.
 *  - One prompt is prefilled at a time, in units of one chunk of one layer. While a long one is under way, a waiting prompt of at most a quarter of what is left
 *    may be prefilled beside it, unit by unit in turn: so short questions do not wait for a whole document, and it loses at most half the time.
 *  - After each unit all running sequences take one decode step as one batch.
 *  - Tokens that another worker generated come from the pool as far as it has their blocks, the others are fed through the decode path; then sampling goes on with the very
 *    next position. */
#pragma once
#include "worker/cache/engine.h"
#include "worker/group/rank_group.h"
#include "worker/sched/job_params.h"

struct scheduler;

enum job_failure { JOB_FAILED_INVALID, JOB_FAILED_TOO_LONG, JOB_FAILED_OVERLOADED, JOB_FAILED_INTERNAL, JOB_FAILED_DRAINING };
enum job_end { JOB_END_STOP, JOB_END_LENGTH };

struct job_prefilled {
    int n_prompt, n_cached;
    int n_known, n_restored;       /* tokens of the answer that another worker made, and those of them whose blocks came from the pool */
    uint64_t bytes_loaded, queue_us, prefill_us;
    const int32_t *prompt;         /* [n_prompt] */
    const float *prompt_logprobs;  /* [n_prompt - 1] of prompt[1..], or NULL */
};

struct job_finished {
    enum job_end end;
    int32_t stop_id;               /* for JOB_END_STOP */
    int n_tokens;                  /* of the answer */
    uint64_t bytes_loaded, bytes_to_pool, decode_us;
    uint64_t pages_attended, bytes_attended, page_hits, page_misses, bytes_missed; /* sequence_stats */
};

/* Called from scheduler_step and scheduler_submit; must not call the scheduler. Each job ends with exactly one of finished and failed, or with
 * scheduler_cancel and no further call. */
struct scheduler_sink {
    void (*prefill_progress)(void *arg, uint64_t id, int done, int total); /* at most once a second */
    void (*prefilled)(void *arg, uint64_t id, const struct job_prefilled *prefilled);
    void (*token)(void *arg, uint64_t id, int index, const struct sample_result *token); /* index in the answer */
    void (*finished)(void *arg, uint64_t id, const struct job_finished *finished);
    void (*failed)(void *arg, uint64_t id, enum job_failure failure, const char *text);
    void *arg;
};

struct scheduler_config {
    struct engine *engine;         /* borrowed, like group, ops and stream */
    struct rank_group *group;      /* the other ranks, which make the engine's calls too; NULL: there are none */
    const struct kernel_ops *ops;
    struct stream *stream;
    int n_vocab;
    int max_running;               /* sequences decoded or prefilled at a time, at most the engine's max_batch */
    int max_queue;                 /* requests that wait; more are refused */
    struct scheduler_sink sink;
};

struct scheduler_load {
    int n_running, n_prefilling, n_waiting;
    uint64_t waiting_tokens;       /* prompt tokens not yet prefilled */
    uint64_t progress;             /* steps since the start */
};

int scheduler_create(const struct scheduler_config *config, struct scheduler **ret_scheduler); /* -ENOMEM */
void scheduler_free(struct scheduler *scheduler); /* cancels all; NULL is fine */
/* Takes the params over, also when the job fails at once (then the sink hears of it). */
void scheduler_submit(struct scheduler *scheduler, struct job_params *params);
/* Ends the job wherever it is, since nobody wants its answer; false if there is none of that id. */
bool scheduler_cancel(struct scheduler *scheduler, uint64_t id);
void scheduler_cancel_all(struct scheduler *scheduler); /* another worker may go on with the answers */
/* From now on every submitted job, and those that wait, fail with JOB_FAILED_DRAINING; what runs is finished. */
void scheduler_drain(struct scheduler *scheduler);
/* Whether scheduler_step has something to do. */
bool scheduler_has_work(const struct scheduler *scheduler);
/* Starts what can start, one unit of prefill, one decode step. 0, or the error of a broken device: all jobs have failed, the process should end. */
int scheduler_step(struct scheduler *scheduler);
void scheduler_load(const struct scheduler *scheduler, struct scheduler_load *ret);
