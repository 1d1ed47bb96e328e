/* Shared by the files of the scheduler only. */
#pragma once
#include "worker/sched/scheduler.h"
#include "worker/sched/token_counts.h"

enum { SCHED_PREFILLS_MAX = 2 };

struct job {
    struct job *prev, *next;      /* in one of the scheduler's lists, in order of arrival */
    struct job_params params;
    struct sequence *sequence;    /* from the start of the prefill on */
    struct token_counts counts;   /* filled when a penalty is on */
    int n_answer;                 /* tokens of the answer that are known: replayed or sampled */
    int32_t next_token;           /* the next one to append */
    struct sample_row *row;       /* of the step at work, where the next token is drawn; else NULL */
    uint64_t submitted_us, started_us, prefilled_us, progress_us;
};

struct job_list {
    struct job *first, *last;
    int n;
};

struct scheduler {
    struct scheduler_config config;
    struct job_list waiting, prefilling, running;
    struct job *unit_last;        /* the prefill that had the last unit, or NULL */
    struct sequence **batch;      /* [max_running] scratch of a decode step */
    int32_t *batch_tokens;
    struct job **batch_jobs;
    struct sample_row *rows;      /* [max_running] what a step draws */
    uint64_t progress;
    bool draining;
};

void job_list_add(struct job_list *list, struct job *job);
void job_list_remove(struct job_list *list, struct job *job);
/* Prompt tokens that a job in `prefilling` has still to compute, by its units. */
uint64_t job_prompt_left(const struct job *job);
/* Frees the job, which is in no list. With retire_answer nobody will go on with its answer. */
void job_free(struct scheduler *s, struct job *job, bool retire_answer);
/* Takes the job from its list, tells the sink and frees it. */
void job_fail(struct scheduler *s, struct job_list *list, struct job *job, enum job_failure failure, const char *text);
/* An error of the engine: the job fails; -ENOMEM, -EINVAL, -ENOTSUP and -ERANGE concern the job alone (0), others the device (the error). */
int job_engine_failed(struct scheduler *s, struct job_list *list, struct job *job, int error, const char *what);

/* sched_prefill.c: each returns 0 or the error of a broken device */
int sched_start_waiting(struct scheduler *s);
int sched_prefill_unit(struct scheduler *s);

/* sched_decode.c */
int sched_decode_step(struct scheduler *s);
/* 0, or the error of a broken device. The prompt is done, and with it the tokens of the answer whose blocks the pool had. The job is in `running`. */
int sched_begin(struct scheduler *s, struct job *job);
