/* Command line of tidepool-plan (`tidepool plan`). Options that the worker has too have its names and defaults. */
#pragma once
#include "proto/base/options.h"
#include <stdbool.h>
#include <stdint.h>

enum { PLAN_WEIGHTS_STORED = 0 /* otherwise enum weight_dtype + 1 */ };

struct plan_options {
    const char *model, *selector, *scorer;
    int kv_format, fetch_unit, prefill, bridge, device, isa, weights;
    int64_t context, max_new, workers, tp, device_memory, budget, recent, fetch, chunk, max_running, threads;
    bool pool, json;
};

extern const struct option_set plan_option_set;
