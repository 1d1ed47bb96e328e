/* Which prompts are prefilled: starting jobs, and the units of work on their prompts. */
#include "worker/sched/scheduler_private.h"

#include "proto/base/clock.h"
#include <errno.h>

enum { PROGRESS_INTERVAL_US = 1000000, SHORT_PROMPT_RATIO = 4 };

/* ---- starting ---- */

/* Tries to start one waiting job. 1: started or ended, 0: it has to wait for memory, negative: the device, or the group of ranks, is at its end. */
static int start(struct scheduler *s, struct job *job)
{
    const struct job_params *p = &job->params;
    const struct sequence_request request = {
        .prompt = p->prompt,
        .n_prompt = p->n_prompt,
        .max_new = p->max_tokens,
        .answer = p->generated,
        .n_answer = p->n_generated,
        .salt = p->salt,
        .n_salt = (size_t)p->n_salt,
        .no_cache = p->no_cache,
        .prompt_logprobs = p->prompt_logprobs,
    };
    struct error err = {""};
    int rc = engine_admits(s->config.engine, p->n_prompt, p->max_tokens, &err);

    if (rc == 0)
        return 0;
    if (rc > 0)
        rc = group_sequence_create(s->config.group, s->config.engine, &request, &job->sequence, &err);
    if (rc == -EAGAIN)
        return 0;
    if (rc == -EIO)
        return rc;
    if (rc < 0) {
        job_fail(s, &s->waiting, job, rc == -E2BIG ? JOB_FAILED_TOO_LONG : rc == -EINVAL ? JOB_FAILED_INVALID : JOB_FAILED_OVERLOADED, err.text);
        return 1;
    }
    job_list_remove(&s->waiting, job);
    job_list_add(&s->prefilling, job);
    job->started_us = job->progress_us = clock_now_us();
    return 1;
}

/* The first waiting job whose prompt is short beside what is left of the one under way. */
static struct job *short_job(const struct scheduler *s)
{
    uint64_t left = job_prompt_left(s->prefilling.first);
    struct job *job = s->waiting.first;

    while (job && (uint64_t)job->params.n_prompt * SHORT_PROMPT_RATIO > left)
        job = job->next;
    return job;
}

int sched_start_waiting(struct scheduler *s)
{
    while (s->waiting.first && s->prefilling.n < SCHED_PREFILLS_MAX && s->prefilling.n + s->running.n < s->config.max_running) {
        struct job *job = s->prefilling.first ? short_job(s) : s->waiting.first;
        if (!job)
            return 0;
        const int rc = start(s, job);
        if (rc < 0)
            return rc;
        if (rc > 0)
            continue;
        if (s->prefilling.n + s->running.n > 0)
            return 0;
        /* Nothing runs whose end could free memory. */
        job_fail(s, &s->waiting, job, JOB_FAILED_OVERLOADED, "no device memory for the request");
    }
    return 0;
}

/* ---- units ---- */

static void tell_prefilled(struct scheduler *s, struct job *job)
{
    struct sequence_stats stats;
    struct job_prefilled prefilled;

    group_sequence_stats(s->config.group, job->sequence, &stats);
    job->prefilled_us = clock_now_us();
    prefilled = (struct job_prefilled){
        .n_prompt = stats.n_prompt,
        .n_cached = stats.n_cached,
        .n_known = job->params.n_generated,
        .n_restored = stats.n_restored,
        .bytes_loaded = stats.bytes_loaded,
        .queue_us = job->started_us - job->submitted_us,
        .prefill_us = job->prefilled_us - job->started_us,
        .prompt = job->params.prompt,
        .prompt_logprobs = sequence_prompt_logprobs(job->sequence),
    };
    s->config.sink.prefilled(s->config.sink.arg, job->params.id, &prefilled);
}

static void tell_progress(struct scheduler *s, struct job *job)
{
    uint64_t now = clock_now_us();
    struct sequence_stats stats;

    if (now - job->progress_us < PROGRESS_INTERVAL_US)
        return;
    job->progress_us = now;
    sequence_stats(job->sequence, &stats);
    s->config.sink.prefill_progress(s->config.sink.arg, job->params.id, stats.units_done, stats.units_total);
}

int sched_prefill_unit(struct scheduler *s)
{
    struct job *job = s->unit_last && s->unit_last->next ? s->unit_last->next : s->prefilling.first;
    int rc;

    if (!job)
        return 0;
    s->unit_last = job;
    rc = group_sequence_prefill_step(s->config.group, job->sequence);
    if (rc < 0)
        return job_engine_failed(s, &s->prefilling, job, rc, "prefill");
    if (rc > 0) {
        tell_progress(s, job);
        return 0;
    }
    s->unit_last = NULL;
    job_list_remove(&s->prefilling, job);
    job_list_add(&s->running, job);
    tell_prefilled(s, job);
    return sched_begin(s, job);
}
