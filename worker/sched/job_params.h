/* What a request asks for, checked and in the worker's own types. Plain data; whoever holds it frees it. */
#pragma once
#include "kernels/kernels.h"
#include "proto/base/error.h"
#include <stdbool.h>
#include <stdint.h>

struct job_params {
    uint64_t id;
    int32_t *prompt;             /* [n_prompt], n_prompt >= 1; owned, as all pointers here */
    int n_prompt;
    int32_t *generated;          /* [n_generated] tokens of the answer that another worker made */
    int n_generated;
    int max_tokens, min_tokens;  /* of the answer, `generated` included */
    int32_t *stop_ids;           /* [n_stop_ids] */
    int n_stop_ids;
    struct sample_params sampling; /* bias points to `bias`; position, counts and banned are filled in by the scheduler */
    struct logit_bias *bias;
    uint8_t *salt;
    int n_salt;
    bool no_cache, prompt_logprobs;
};

/* What the model allows. */
struct job_limits {
    int n_vocab;
    int max_context;             /* tokens, prompt and answer */
};

enum { JOB_STOP_IDS_MAX = 256, JOB_BIAS_MAX = 4096, JOB_SALT_MAX = 1024, JOB_TOP_LOGPROBS_MAX = 20 };

void job_params_free(struct job_params *params); /* its fields; a zeroed struct is fine */
