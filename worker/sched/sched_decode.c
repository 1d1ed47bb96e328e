/* The answer: replay, sampling, decode steps and the end. */
#include "worker/sched/scheduler_private.h"

#include "proto/base/clock.h"
#include <errno.h>

static bool has_penalty(const struct sample_params *p)
{
    return p->presence_penalty != 0 || p->frequency_penalty != 0 || p->repetition_penalty != 1;
}

static bool is_stop(const struct job_params *p, int32_t token)
{
    for (int i = 0; i < p->n_stop_ids; i++) {
        if (p->stop_ids[i] == token)
            return true;
    }
    return false;
}

/* ---- the end ---- */

static void finish(struct scheduler *s, struct job *job, enum job_end end, int32_t stop_id)
{
    uint64_t id = job->params.id;
    struct sequence_stats stats;
    struct job_finished finished;

    group_sequence_stats(s->config.group, job->sequence, &stats);
    finished = (struct job_finished){
        .end = end,
        .stop_id = stop_id,
        .n_tokens = job->n_answer,
        .bytes_loaded = stats.bytes_loaded,
        .bytes_to_pool = stats.bytes_to_pool,
        .pages_attended = stats.pages_attended,
        .bytes_attended = stats.bytes_attended,
        .page_hits = stats.page_hits,
        .page_misses = stats.page_misses,
        .bytes_missed = stats.bytes_missed,
        .decode_us = clock_now_us() - job->prefilled_us,
    };
    job_list_remove(&s->running, job);
    job_free(s, job, true);
    s->config.sink.finished(s->config.sink.arg, id, &finished);
}

/* Takes `token` as the next one of the answer. Returns whether the job goes on. */
static bool answer_add(struct scheduler *s, struct job *job, int32_t token)
{
    const struct job_params *p = &job->params;

    bool stop = is_stop(p, token) && job->n_answer >= p->min_tokens;

    job->n_answer++;
    job->next_token = token;
    if (stop) {
        finish(s, job, JOB_END_STOP, token);
        return false;
    }
    if (job->n_answer >= p->max_tokens) {
        finish(s, job, JOB_END_LENGTH, 0);
        return false;
    }
    if (has_penalty(&p->sampling) && token_counts_add_output(&job->counts, token) < 0) {
        job_fail(s, &s->running, job, JOB_FAILED_INTERNAL, "no memory for the penalties");
        return false;
    }
    return true;
}

/* ---- sampling ---- */

static int counts_begin(struct job *job)
{
    const struct job_params *p = &job->params;

    for (int i = 0; i < p->n_prompt && has_penalty(&p->sampling); i++) {
        int rc = token_counts_add_prompt(&job->counts, p->prompt[i]);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static void row_begin(struct job *job, struct sample_row *row)
{
    const struct job_params *p = &job->params;

    *row = (struct sample_row){.logits = sequence_logits(job->sequence), .params = p->sampling};
    row->params.position = (uint64_t)p->n_prompt + (uint64_t)job->n_answer;
    row->params.counts = job->counts.counts;
    row->params.n_counts = job->counts.n;
    if (job->n_answer < p->min_tokens) {
        row->params.banned = p->stop_ids;
        row->params.n_banned = p->n_stop_ids;
    }
    job->row = row;
}

/* Draws the next token of each job for which it is time, all at once. A job without logits has no row. */
static void sample(struct scheduler *s, struct job *const *jobs, int n)
{
    int n_rows = 0, rc;

    for (int i = 0; i < n; i++) {
        jobs[i]->row = NULL;
        if (jobs[i]->n_answer >= jobs[i]->params.n_generated && sequence_logits(jobs[i]->sequence))
            row_begin(jobs[i], &s->rows[n_rows++]);
    }
    rc = n_rows ? s->config.ops->sample(s->config.stream, s->rows, n_rows, s->config.n_vocab) : 0;
    for (int i = 0; rc < 0 && i < n_rows; i++)
        s->rows[i].status = rc;
}

/* Takes the next token, replayed or drawn: tells the sink of a drawn one, and ends the job when the answer is complete. 0, or the error of a broken device. */
static int take_token(struct scheduler *s, struct job *job)
{
    const struct job_params *p = &job->params;
    int index = job->n_answer, rc;

    if (index < p->n_generated) {
        (void)answer_add(s, job, p->generated[index]);
        return 0;
    }
    /* Logits that are no numbers leave nothing to draw from; bans alone never do. */
    rc = job->row ? job->row->status : -ERANGE;
    if (rc == -EINVAL)
        rc = -ERANGE;
    if (rc < 0)
        return job_engine_failed(s, &s->running, job, rc, "sampling");
    s->config.sink.token(s->config.sink.arg, p->id, index, &job->row->result);
    (void)answer_add(s, job, job->row->result.token);
    return 0;
}

/* After the prompt or a token of each of them. */
static int advance(struct scheduler *s, struct job *const *jobs, int n)
{
    int rc = 0;

    sample(s, jobs, n);
    for (int i = 0; rc == 0 && i < n; i++)
        rc = take_token(s, jobs[i]);
    return rc;
}

int sched_begin(struct scheduler *s, struct job *job)
{
    struct sequence_stats stats;
    bool running = true;

    if (counts_begin(job) < 0) {
        job_fail(s, &s->running, job, JOB_FAILED_INTERNAL, "no memory for the penalties");
        return 0;
    }
    sequence_stats(job->sequence, &stats);
    for (int i = 0; running && i < stats.n_restored; i++)
        running = answer_add(s, job, job->params.generated[i]);
    return running ? advance(s, &job, 1) : 0;
}

/* ---- steps ---- */

static int step_failed(struct scheduler *s, int error)
{
    if (error == -ENOMEM) {
        /* The sequences are as they were. The youngest gives way, so that the others can go on. */
        return job_engine_failed(s, &s->running, s->running.last, error, "decode");
    }
    while (s->running.first) {
        int rc = job_engine_failed(s, &s->running, s->running.first, error, "decode");
        if (rc < 0)
            return rc;
    }
    return 0;
}

int sched_decode_step(struct scheduler *s)
{
    int n = 0, rc;

    for (struct job *job = s->running.first; job; job = job->next) {
        s->batch_jobs[n] = job;
        s->batch[n] = job->sequence;
        s->batch_tokens[n++] = job->next_token;
    }
    if (!n)
        return 0;
    rc = group_decode(s->config.group, s->config.engine, s->batch, s->batch_tokens, n);
    if (rc < 0)
        return step_failed(s, rc);
    return advance(s, s->batch_jobs, n);
}
