/* Command line of tidepool-worker. */
#pragma once
#include "proto/base/options.h"
#include <stdint.h>

struct worker_options {
    const char *model, *router, *store, *name, *selector, *scorer;
    int kv_format, fetch_unit, prefill, prefill_order, bridge, device, isa, log_level, log_format;
    int64_t budget, recent, fetch, chunk, threads, max_running, max_queue, context, memory_limit, page_cache;
    bool reuse_generated;
};

extern const struct option_set worker_option_set;
