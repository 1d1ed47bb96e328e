/* One answer by the ranks of a tensor-parallel group, each a process of its own, on any backend. Failures are Criterion assertions of the caller. */
#pragma once
#include "kernels/backend.h"
#include "proto/block_key.h"
#include "worker/cache/engine.h"

enum { RANK_RUN_SHORTER = 37, RANK_RUN_SEQUENCES = 4 };

struct rank_run {
    const char *path;            /* of the model */
    const struct kernel_backend *backend;
    struct engine_config config;
    const int32_t *prompt;
    int n_prompt, n_decode;      /* greedy */
    int n_sequences;             /* decoded as one batch; 0: one. Sequence i has RANK_RUN_SHORTER * i tokens of the prompt less. The first one's prompt is judged too. */
    int n_ranks;                 /* 1: this very process, whole model, no group */
};

/* What one rank has; all ranks have the same bits, or rank_run fails. */
struct rank_answer {
    int32_t *tokens;             /* [n_rows], n_rows = n_sequences * (n_decode + 1), sequence after sequence */
    float *logits;               /* [n_rows, n_vocab] */
    float *logprobs;             /* [n_logprobs] of the first prompt */
    int n_rows, n_vocab, n_logprobs;
    uint8_t fingerprint[FINGERPRINT_BYTES]; /* of rank 0's blocks */
    void *memory;
    size_t bytes;
};

void rank_run(const struct rank_run *run, struct rank_answer *ret_answer);
void rank_answer_free(struct rank_answer *answer);
/* The same tokens, and log-probabilities within `logprob_tolerance`; returns the largest KL divergence of a row from the other's, in nats. */
double rank_answers_compare(const struct rank_answer *want, const struct rank_answer *got, double logprob_tolerance);
