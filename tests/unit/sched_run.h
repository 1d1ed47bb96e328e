/* A scheduler over the small random model, and a record of what it told its sink. */
#pragma once
#include "tests/unit/engine_fixture.h"
#include "worker/sched/scheduler.h"

enum { RUN_JOBS_MAX = 64, RUN_TOKENS_MAX = 512 };

struct run_job {
    int n_tokens, first_index;     /* tokens heard, index of the first */
    struct sample_result tokens[RUN_TOKENS_MAX];
    bool prefilled, finished, failed;
    struct job_prefilled prefill;  /* its pointers are not kept */
    struct job_finished finish;
    enum job_failure failure;
    char text[512];
    int order;                     /* n-th job whose prompt was done */
};

struct run {
    struct fixture *fixture;
    struct engine *engine;
    struct scheduler *scheduler;
    struct run_job jobs[RUN_JOBS_MAX]; /* by id */
    int n_prefilled;
};

void run_open(struct run *run, struct fixture *f, const struct engine_config *config, int max_running, int max_queue);
void run_open_with_store(struct run *run, struct fixture *f, const struct engine_config *config, struct kv_client *store, int max_running, int max_queue);
/* Checks that nothing is held. */
void run_close(struct run *run);
/* A job with a prompt of fixture_tokens(id), greedy. The caller changes what it wants and submits. */
struct job_params run_params(uint64_t id, int n_prompt, int max_tokens);
void run_submit(struct run *run, struct job_params params);
void run_step(struct run *run, int n);
/* Steps until the job has ended. */
void run_until_end(struct run *run, uint64_t id);
void run_all(struct run *run);
