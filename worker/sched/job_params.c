#include "worker/sched/job_params.h"

#include <stdlib.h>

void job_params_free(struct job_params *params)
{
    free(params->prompt);
    free(params->generated);
    free(params->stop_ids);
    free(params->bias);
    free(params->salt);
    *params = (struct job_params){0};
}
