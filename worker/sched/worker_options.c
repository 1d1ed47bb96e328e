#include "worker/sched/worker_options.h"

#include "kernels/collective.h"
#include "proto/base/base_assert.h"
#include "proto/base/log.h"
#include <assert.h>

static_assert((int)ENGINE_RANKS_MAX == (int)COLLECTIVE_MAX_RANKS, "--tp takes as many ranks as there can be");

#define OF_RANK .tags = WORKER_OPTION_OF_RANK
#define FIELD(name) .offset = offsetof(struct worker_options, name)
static const struct option_spec specs[] = {
    {.name = "model", .kind = OPTION_STR, FIELD(model), .metavar = "PATH",
     .help = "GGUF file, or a folder with config.json and *.safetensors"},
    {.name = "router", .kind = OPTION_STR, FIELD(router), OF_RANK, .optional = true, .metavar = "ENDPOINT", .help = "ZeroMQ endpoint of the router; required but for followers (--tp-rank)"},
    {.name = "store", .kind = OPTION_STR, FIELD(store), .optional = true, .metavar = "PATH",
     .help = "unix socket of the kvstore; without it nothing is shared"},
    {.name = "name", .kind = OPTION_STR, FIELD(name), OF_RANK, .fallback = "worker-0", .metavar = "NAME", .help = "name among the router's workers"},
    {.name = "gpu", .kind = OPTION_INT, FIELD(gpu), OF_RANK, .fallback = "0", .min = 0, .max = 1023, .metavar = "N",
     .help = "which of the host's GPUs; followers that the worker starts take the next ones"},
    {.name = "max-queue", .kind = OPTION_INT, FIELD(max_queue), .fallback = "64", .min = 0, .max = 100000, .metavar = "N",
     .help = "requests that may wait in this worker"},
    {.name = "tp-listen", .kind = OPTION_STR, FIELD(tp_listen), OF_RANK, .optional = true, .metavar = "PATH",
     .help = "with --tp: the other ranks are not started but come to this unix socket"},
    {.name = "tp-rank", .kind = OPTION_INT, FIELD(tp_rank), OF_RANK, .fallback = "0", .min = 0, .max = COLLECTIVE_MAX_RANKS - 1, .metavar = "N",
     .help = "be a follower: rank 1 to N-1 of a group of --tp N whose leader is at --tp-leader"},
    {.name = "tp-leader", .kind = OPTION_STR, FIELD(tp_leader), OF_RANK, .optional = true, .metavar = "PATH", .help = "with --tp-rank: the leader's --tp-listen"},
    {.name = "tp-timeout", .kind = OPTION_INT, FIELD(tp_timeout), .fallback = "60", .min = 1, .max = 3600, .metavar = "SECONDS",
     .help = "how long ranks wait for one another, to join and at work, before the group is given up"},
    {.name = "log-level", .kind = OPTION_ENUM, FIELD(log_level), .fallback = "info", .choices = log_level_choices, .help = "least level that is logged"},
    {.name = "log-format", .kind = OPTION_ENUM, FIELD(log_format), .fallback = "logfmt", .choices = log_format_choices, .help = "form of a log line"},
};
#undef FIELD

static const struct option_group groups[] = {ENGINE_OPTION_GROUP(struct worker_options, 0)};

const struct option_set worker_option_set = {
    .program = "tidepool-worker",
    .summary = "Runs a model for a router: layer-major prefill, a fast tier of fixed size, the rest in the host's pool.",
    .examples = "  tidepool-worker --model models/SmolLM2-135M-Instruct.Q4_1.gguf \\\n"
                "      --router ipc:///run/user/1000/tidepool/router.sock --store /run/user/1000/tidepool/kvstore.sock\n"
                "  tidepool-worker --model /models/llama --router tcp://10.0.0.1:5555 --name gpu-0 --budget 4096 --fetch all\n"
                "  tidepool-worker --model /models/llama-70b --router tcp://10.0.0.1:5555 --tp 2 --gpu 2    # on GPUs 2 and 3\n",
    .specs = specs,
    .n_specs = ARRAY_LEN(specs),
    .groups = groups,
    .n_groups = ARRAY_LEN(groups),
};
