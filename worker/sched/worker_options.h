/* Command line of tidepool-worker. */
#pragma once
#include "proto/base/options.h"
#include <stdint.h>

struct worker_options {
    const char *model, *router, *store, *name, *selector, *scorer, *tp_leader, *tp_listen;
    int kv_format, fetch_unit, weights, prefill, prefill_order, bridge, device, isa, log_level, log_format;
    int64_t budget, recent, fetch, chunk, threads, max_running, max_queue, context, memory_limit, page_cache, gpu, tp, tp_rank, tp_timeout;
    bool reuse_generated;
};

extern const struct option_set worker_option_set;
