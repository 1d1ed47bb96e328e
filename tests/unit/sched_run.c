#include "tests/unit/sched_run.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct run_job *job_of(void *arg, uint64_t id)
{
    cr_assert_lt(id, RUN_JOBS_MAX);
    return &((struct run *)arg)->jobs[id];
}

static void on_progress(void *arg, uint64_t id, int done, int total)
{
    cr_assert(done >= 0 && done <= total);
    (void)job_of(arg, id);
}

static void on_prefilled(void *arg, uint64_t id, const struct job_prefilled *prefilled)
{
    struct run_job *job = job_of(arg, id);

    cr_assert(!job->prefilled && !job->finished && !job->failed);
    job->prefilled = true;
    job->prefill = *prefilled;
    job->order = ++((struct run *)arg)->n_prefilled;
}

static void on_token(void *arg, uint64_t id, int index, const struct sample_result *token)
{
    struct run_job *job = job_of(arg, id);

    cr_assert(job->prefilled && !job->finished && !job->failed);
    if (job->n_tokens == 0)
        job->first_index = index;
    cr_assert_eq(index, job->first_index + job->n_tokens);
    job->tokens[job->n_tokens++] = *token;
}

static void on_finished(void *arg, uint64_t id, const struct job_finished *finished)
{
    struct run_job *job = job_of(arg, id);

    cr_assert(job->prefilled && !job->finished && !job->failed);
    job->finished = true;
    job->finish = *finished;
}

static void on_failed(void *arg, uint64_t id, enum job_failure failure, const char *text)
{
    struct run_job *job = job_of(arg, id);

    cr_assert(!job->finished && !job->failed);
    job->failed = true;
    job->failure = failure;
    snprintf(job->text, sizeof job->text, "%s", text);
}

void run_open(struct run *run, struct fixture *f, const struct engine_config *config, int max_running, int max_queue)
{
    run_open_with_store(run, f, config, NULL, max_running, max_queue);
}

void run_open_with_store(struct run *run, struct fixture *f, const struct engine_config *config, struct kv_client *store, int max_running, int max_queue)
{
    memset(run, 0, sizeof *run);
    run->fixture = f;
    run->engine = fixture_engine(f, config, store);
    const struct scheduler_config sched = {
        .engine = run->engine,
        .ops = f->model.ops,
        .stream = f->stream,
        .n_vocab = TINY_VOCAB,
        .max_running = max_running,
        .max_queue = max_queue,
        .sink = {on_progress, on_prefilled, on_token, on_finished, on_failed, run},
    };
    cr_assert_eq(scheduler_create(&sched, &run->scheduler), 0);
}

void run_close(struct run *run)
{
    scheduler_free(run->scheduler);
    engine_free(run->engine);
    fixture_expect_no_memory(run->fixture);
}

struct job_params run_params(uint64_t id, int n_prompt, int max_tokens)
{
    struct job_params p = {.id = id, .n_prompt = n_prompt, .max_tokens = max_tokens};

    p.prompt = malloc((size_t)n_prompt * sizeof *p.prompt);
    cr_assert_not_null(p.prompt);
    fixture_tokens(id, p.prompt, n_prompt);
    p.sampling = (struct sample_params){.top_p = 1, .repetition_penalty = 1};
    return p;
}

void run_submit(struct run *run, struct job_params params)
{
    scheduler_submit(run->scheduler, &params);
}

void run_step(struct run *run, int n)
{
    while (n-- > 0)
        cr_assert_eq(scheduler_step(run->scheduler), 0);
}

void run_until_end(struct run *run, uint64_t id)
{
    while (!run->jobs[id].finished && !run->jobs[id].failed) {
        cr_assert(scheduler_has_work(run->scheduler));
        run_step(run, 1);
    }
}

void run_all(struct run *run)
{
    while (scheduler_has_work(run->scheduler))
        run_step(run, 1);
}
