#include "worker/sched/scheduler_private.h"

#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- lists ---- */

void job_list_add(struct job_list *list, struct job *job)
{
    job->prev = list->last;
    job->next = NULL;
    *(list->last ? &list->last->next : &list->first) = job;
    list->last = job;
    list->n++;
}

void job_list_remove(struct job_list *list, struct job *job)
{
    *(job->prev ? &job->prev->next : &list->first) = job->next;
    *(job->next ? &job->next->prev : &list->last) = job->prev;
    job->prev = job->next = NULL;
    list->n--;
}

static struct job *job_list_find(const struct job_list *list, uint64_t id)
{
    struct job *job = list->first;

    while (job && job->params.id != id)
        job = job->next;
    return job;
}

/* ---- ends ---- */

void job_free(struct scheduler *s, struct job *job, bool retire_answer)
{
    group_sequence_free(s->config.group, job->sequence, retire_answer);
    token_counts_fini(&job->counts);
    job_params_free(&job->params);
    free(job);
}

static void job_remove(struct scheduler *s, struct job_list *list, struct job *job)
{
    job_list_remove(list, job);
    if (s->unit_last == job)
        s->unit_last = NULL;
}

void job_fail(struct scheduler *s, struct job_list *list, struct job *job, enum job_failure failure, const char *text)
{
    uint64_t id = job->params.id;

    job_remove(s, list, job);
    job_free(s, job, false);
    s->config.sink.failed(s->config.sink.arg, id, failure, text);
}

int job_engine_failed(struct scheduler *s, struct job_list *list, struct job *job, int error, const char *what)
{
    const char *why = error == -ERANGE ? "the model made numbers that are none, or too large for the format of the cache" : strerror(-error);
    char text[160];

    snprintf(text, sizeof text, "%s: %s", what, why);
    job_fail(s, list, job, JOB_FAILED_INTERNAL, text);
    return error == -ENOMEM || error == -EINVAL || error == -ENOTSUP || error == -ERANGE ? 0 : error;
}

static void list_fail(struct scheduler *s, struct job_list *list, enum job_failure failure, const char *text)
{
    while (list->first)
        job_fail(s, list, list->first, failure, text);
}

/* The router is gone or this worker is about to be: others may go on with what has not ended, so the answers' blocks stay. */
static void list_cancel(struct scheduler *s, struct job_list *list)
{
    while (list->first) {
        struct job *job = list->first;
        job_remove(s, list, job);
        job_free(s, job, false);
    }
}

bool scheduler_cancel(struct scheduler *s, uint64_t id)
{
    struct job_list *const lists[] = {&s->running, &s->prefilling, &s->waiting};

    for (size_t i = 0; i < ARRAY_LEN(lists); i++) {
        struct job *job = job_list_find(lists[i], id);
        if (!job)
            continue;
        job_remove(s, lists[i], job);
        job_free(s, job, true);
        return true;
    }
    return false;
}

void scheduler_cancel_all(struct scheduler *s)
{
    list_cancel(s, &s->waiting);
    list_cancel(s, &s->prefilling);
    list_cancel(s, &s->running);
}

void scheduler_drain(struct scheduler *s)
{
    s->draining = true;
    list_fail(s, &s->waiting, JOB_FAILED_DRAINING, "the worker is shutting down");
}

/* ---- life ---- */

int scheduler_create(const struct scheduler_config *config, struct scheduler **ret_scheduler)
{
    struct scheduler *s = calloc(1, sizeof *s);
    size_t n = (size_t)config->max_running;

    ASSERT(config->max_running >= 1 && config->max_queue >= 0);
    if (!s)
        return -ENOMEM;
    s->config = *config;
    s->batch = calloc(n, sizeof *s->batch);
    s->batch_tokens = calloc(n, sizeof *s->batch_tokens);
    s->batch_jobs = calloc(n, sizeof *s->batch_jobs);
    s->rows = calloc(n, sizeof *s->rows);
    if (!s->batch || !s->batch_tokens || !s->batch_jobs || !s->rows) {
        scheduler_free(s);
        return -ENOMEM;
    }
    *ret_scheduler = s;
    return 0;
}

void scheduler_free(struct scheduler *s)
{
    if (!s)
        return;
    scheduler_cancel_all(s);
    free(s->rows);
    free(s->batch_jobs);
    free(s->batch_tokens);
    free(s->batch);
    free(s);
}

/* ---- work ---- */

static void refuse(struct scheduler *s, struct job_params *params, enum job_failure failure, const char *text)
{
    uint64_t id = params->id;

    job_params_free(params);
    s->config.sink.failed(s->config.sink.arg, id, failure, text);
}

void scheduler_submit(struct scheduler *s, struct job_params *params)
{
    struct error err = {""};
    struct job *job;
    char text[80];

    if (s->draining) {
        refuse(s, params, JOB_FAILED_DRAINING, "the worker is shutting down");
        return;
    }
    /* Those that can start with the next step do not count as waiting. */
    if (s->waiting.n >= s->config.max_queue + s->config.max_running - s->prefilling.n - s->running.n) {
        snprintf(text, sizeof text, "%d requests wait already", s->waiting.n);
        refuse(s, params, JOB_FAILED_OVERLOADED, text);
        return;
    }
    if (engine_admits(s->config.engine, params->n_prompt, params->max_tokens, &err) == -E2BIG) {
        refuse(s, params, JOB_FAILED_TOO_LONG, err.text);
        return;
    }
    job = calloc(1, sizeof *job);
    if (!job) {
        refuse(s, params, JOB_FAILED_OVERLOADED, "no memory for another request");
        return;
    }
    job->params = *params;
    job->submitted_us = clock_now_us();
    *params = (struct job_params){0};
    job_list_add(&s->waiting, job);
}

bool scheduler_has_work(const struct scheduler *s)
{
    return s->waiting.n || s->prefilling.n || s->running.n;
}

int scheduler_step(struct scheduler *s)
{
    int rc = sched_start_waiting(s);

    if (rc == 0)
        rc = sched_prefill_unit(s);
    if (rc == 0)
        rc = sched_decode_step(s);
    s->progress++;
    if (rc < 0) {
        list_fail(s, &s->running, JOB_FAILED_INTERNAL, "the worker's device failed");
        list_fail(s, &s->prefilling, JOB_FAILED_INTERNAL, "the worker's device failed");
        list_fail(s, &s->waiting, JOB_FAILED_INTERNAL, "the worker's device failed");
    }
    return rc;
}

uint64_t job_prompt_left(const struct job *job)
{
    struct sequence_stats stats;

    sequence_stats(job->sequence, &stats);
    if (stats.units_total <= 0)
        return 0;
    return (uint64_t)(stats.n_prompt - stats.n_cached) * (uint64_t)(stats.units_total - stats.units_done) / (uint64_t)stats.units_total;
}

void scheduler_load(const struct scheduler *s, struct scheduler_load *ret)
{
    *ret = (struct scheduler_load){
        .n_running = s->running.n,
        .n_prefilling = s->prefilling.n,
        .n_waiting = s->waiting.n,
        .progress = s->progress,
    };
    for (const struct job *job = s->waiting.first; job; job = job->next)
        ret->waiting_tokens += (uint64_t)job->params.n_prompt;
    for (const struct job *job = s->prefilling.first; job; job = job->next)
        ret->waiting_tokens += job_prompt_left(job);
}
