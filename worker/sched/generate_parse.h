/* From the wire's Generate to job_params: every field is checked, the text of an error names it with its value. */
#pragma once
#include "proto/wire/engine.pb-c.h"
#include "worker/sched/job_params.h"

/* -EINVAL (a field is out of its range), -E2BIG (prompt and answer exceed the context), -ENOMEM. The caller frees the params with job_params_free. */
int generate_parse(const Tidepool__Engine__Generate *message, uint64_t id, const struct job_limits *limits, struct job_params *ret_params,
                   struct error *err);
