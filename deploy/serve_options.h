/* The options of `tidepool serve`. Most belong to the programs that it starts: `targets` says to which ones a value is handed on, under the same name. */
#pragma once
#include "proto/base/options.h"

enum serve_target { SERVE_ROUTER = 1, SERVE_WORKER = 2, SERVE_KVSTORE = 4 };

struct serve_options {
    const char *model, *host, *api_key, *api_key_file, *served_model_name, *chat_template, *runtime_dir, *port_file;
    int64_t workers, port, threads, tp, gpu, drain_timeout;
    int64_t pool_size, budget, recent, fetch, chunk, context, max_running, max_queue, memory_limit, page_cache;
    int kv_format, selector, fetch_unit, scorer, prefill, prefill_order, bridge, device, weights, isa, policy, log_level, log_format;
    bool reuse_generated;
};

extern const struct option_set serve_option_set;
/* Targets of serve_option_set.specs[i]: a set of serve_target. */
int serve_option_targets(size_t i);
