/* Command line of tidepool-worker. */
#pragma once
#include "proto/engine_options.h"

/* A tag beside those of the engine's options: a follower that its leader starts has it otherwise, or not at all. */
enum { WORKER_OPTION_OF_RANK = 4 };

struct worker_options {
    const char *model, *router, *store, *name, *tp_leader, *tp_listen;
    int log_level, log_format;
    int64_t max_queue, gpu, tp_rank, tp_timeout;
    struct engine_options engine;
};

extern const struct option_set worker_option_set;
