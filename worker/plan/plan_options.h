/* Command line of tidepool-plan (`tidepool plan`): the worker's options that change what memory is needed, and its own. */
#pragma once
#include "proto/engine_options.h"

enum { PLAN_WEIGHTS_STORED = 0 /* otherwise enum weight_dtype + 1 */ };

struct plan_options {
    const char *model;
    int weights;
    int64_t max_new, workers, device_memory;
    bool pool, json;
    struct engine_options engine;
};

extern const struct option_set plan_option_set;
