/* The options of `tidepool serve`. Those that belong to a program that it starts are handed on to it under the same name: its own table says which, and the engine's are the workers'. */
#pragma once
#include "proto/engine_options.h"

enum serve_target { SERVE_ROUTER = 1, SERVE_WORKER = 2, SERVE_KVSTORE = 4 };

struct serve_options {
    const char *model, *host, *api_key, *api_key_file, *served_model_name, *chat_template, *runtime_dir, *port_file;
    int64_t workers, port, gpu, drain_timeout, pool_size, max_queue;
    int policy, log_level, log_format;
    struct engine_options engine;
};

extern const struct option_set serve_option_set;
/* Targets of the i-th option of serve_option_set: a set of serve_target. */
int serve_option_targets(size_t i);
