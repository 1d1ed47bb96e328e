/* Command-line options of tidepool-router. */
#pragma once
#include "proto/base/options.h"

struct router_options {
    const char *model, *served_model_name, *chat_template, *endpoint;
    const char *host, *port_file, *api_key, *api_key_file, *allowed_origins;
    int64_t port;
    int policy, cache_isolation, log_level, log_format;
    int64_t max_queue, max_queue_tokens, worker_wait, queue_timeout, retries, lookahead;
    int64_t heartbeat_ms, progress_timeout;
    int64_t max_body, request_timeout, idle_timeout, keepalive, stream_backlog, stream_stall, drain_timeout;
    int64_t work_threads, template_timeout;
};

extern const struct option_set router_option_set;
/* Value of --policy as policy_find takes it. */
const char *router_policy_name(const struct router_options *options);
