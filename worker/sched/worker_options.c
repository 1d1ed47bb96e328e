#include "worker/sched/worker_options.h"

#include "kernels/collective.h"
#include "proto/base/base_assert.h"
#include "proto/base/log.h"
#include "proto/option_choices.h"

#define FIELD(name) .offset = offsetof(struct worker_options, name)
static const struct option_spec specs[] = {
    {.name = "model", .kind = OPTION_STR, FIELD(model), .metavar = "PATH",
     .help = "GGUF file, or a folder with config.json and *.safetensors"},
    {.name = "router", .kind = OPTION_STR, FIELD(router), .optional = true, .metavar = "ENDPOINT", .help = "ZeroMQ endpoint of the router; required but for followers (--tp-rank)"},
    {.name = "store", .kind = OPTION_STR, FIELD(store), .optional = true, .metavar = "PATH",
     .help = "unix socket of the kvstore; without it nothing is shared"},
    {.name = "name", .kind = OPTION_STR, FIELD(name), .fallback = "worker-0", .metavar = "NAME", .help = "name among the router's workers"},
    {.name = "kv-format", .kind = OPTION_ENUM, FIELD(kv_format), .fallback = "k8v4", .choices = kv_format_choices,
     .help = "what the pool holds: 8-bit keys and 4-bit values, 8 and 8, or bf16 (exact)"},
    {.name = "selector", .kind = OPTION_STR, FIELD(selector), .fallback = "snapkv", .metavar = "NAME",
     .help = "who chooses the entries that stay in the fast tier: " SELECTOR_NAMES(", ")},
    {.name = "budget", .kind = OPTION_INT, FIELD(budget), .fallback = "256", .min = 0, .max = 1 << 20, .metavar = "N",
     .help = "fast tier: kept entries per layer and KV head"},
    {.name = "recent", .kind = OPTION_INT, FIELD(recent), .fallback = "128", .min = 0, .max = 1 << 20, .metavar = "N",
     .help = "fast tier: newest tokens per layer and KV head"},
    {.name = "fetch", .kind = OPTION_INT, FIELD(fetch), .fallback = "512", .min = 0, .max = INT32_MAX, .max_word = "all", .metavar = "N|all",
     .help = "slow tokens attended per step, layer and KV head"},
    {.name = "fetch-unit", .kind = OPTION_ENUM, FIELD(fetch_unit), .fallback = "16", .choices = fetch_unit_choices,
     .help = "slow tokens chosen together: a sub-page or a whole block; --fetch is rounded up to it"},
    {.name = "scorer", .kind = OPTION_STR, FIELD(scorer), .fallback = "index2", .metavar = "NAME",
     .help = "who chooses the slow tokens: " SCORER_NAMES(", ") " (for measuring only)"},
    {.name = "chunk", .kind = OPTION_INT, FIELD(chunk), .fallback = "512", .min = 1, .max = 1 << 16, .metavar = "N",
     .help = "prompt tokens computed at a time"},
    {.name = "prefill", .kind = OPTION_ENUM, FIELD(prefill), .fallback = "consistent", .choices = prefill_choices,
     .help = "attend earlier blocks as the pool holds them (prefixes are reusable bit for bit), or exactly"},
    {.name = "prefill-order", .kind = OPTION_ENUM, FIELD(prefill_order), .fallback = "layer", .choices = prefill_order_choices,
     .help = "layer-major, or the chunk-major baseline"},
    {.name = "bridge", .kind = OPTION_ENUM, FIELD(bridge), .fallback = "auto", .choices = bridge_choices,
     .help = "hidden states of a prompt between two layers: on the device, in pinned host memory, or there only where --memory-limit is short; nothing but the device on a CPU"},
    {.name = "device", .kind = OPTION_ENUM, FIELD(device), .fallback = "auto", .choices = device_choices,
     .help = "what computes: a GPU where this build and this host have one, else the CPU; or one of them"},
    {.name = "gpu", .kind = OPTION_INT, FIELD(gpu), .fallback = "0", .min = 0, .max = 1023, .metavar = "N",
     .help = "which of the host's GPUs; followers that the worker starts take the next ones"},
    {.name = "weights", .kind = OPTION_ENUM, FIELD(weights), .fallback = "auto", .choices = weights_choices,
     .help = "quantized weights on a GPU: expanded once to bf16, or kept as stored and expanded for each product; auto: the latter when bf16 would take over 3/4 of its memory"},
    {.name = "threads", .kind = OPTION_INT, FIELD(threads), .fallback = "0", .min = 0, .max = 256, .metavar = "N",
     .help = "compute threads; 0: one a processor"},
    {.name = "isa", .kind = OPTION_ENUM, FIELD(isa), .fallback = "auto", .choices = isa_choices,
     .help = "instruction set of the CPU kernels; all give the same bits"},
    {.name = "max-running", .kind = OPTION_INT, FIELD(max_running), .fallback = "8", .min = 1, .max = 256, .metavar = "N",
     .help = "sequences decoded as one batch"},
    {.name = "max-queue", .kind = OPTION_INT, FIELD(max_queue), .fallback = "64", .min = 0, .max = 100000, .metavar = "N",
     .help = "requests that may wait in this worker"},
    {.name = "context", .kind = OPTION_INT, FIELD(context), .fallback = "0", .min = 0, .max = 1 << 24, .metavar = "N",
     .help = "longest prompt and answer in tokens; 0: the model's own"},
    {.name = "memory-limit", .kind = OPTION_BYTES, FIELD(memory_limit), .fallback = "0", .min = 0, .max = INT64_MAX, .metavar = "BYTES",
     .help = "device memory beyond the weights; 0: no limit on a CPU, nine tenths of a GPU's memory less the weights"},
    {.name = "page-cache", .kind = OPTION_BYTES, FIELD(page_cache), .fallback = "auto", .min = 0, .max = INT64_MAX, .max_word = "auto", .metavar = "BYTES|auto",
     .help = "device memory for fetched sub-pages, at most what requests leave of --memory-limit; auto: all of that"},
    {.name = "reuse-generated", .kind = OPTION_BOOL, FIELD(reuse_generated), .fallback = "off",
     .help = "blocks made while decoding may serve other prompts"},
    {.name = "tp", .kind = OPTION_INT, FIELD(tp), .fallback = "1", .min = 1, .max = COLLECTIVE_MAX_RANKS, .metavar = "N",
     .help = "tensor parallelism: ranks that share the model's heads, one process and GPU each; the worker is rank 0 and starts the others"},
    {.name = "tp-listen", .kind = OPTION_STR, FIELD(tp_listen), .optional = true, .metavar = "PATH",
     .help = "with --tp: the other ranks are not started but come to this unix socket"},
    {.name = "tp-rank", .kind = OPTION_INT, FIELD(tp_rank), .fallback = "0", .min = 0, .max = COLLECTIVE_MAX_RANKS - 1, .metavar = "N",
     .help = "be a follower: rank 1 to N-1 of a group of --tp N whose leader is at --tp-leader"},
    {.name = "tp-leader", .kind = OPTION_STR, FIELD(tp_leader), .optional = true, .metavar = "PATH", .help = "with --tp-rank: the leader's --tp-listen"},
    {.name = "tp-timeout", .kind = OPTION_INT, FIELD(tp_timeout), .fallback = "60", .min = 1, .max = 3600, .metavar = "SECONDS",
     .help = "how long ranks wait for one another, to join and at work, before the group is given up"},
    {.name = "log-level", .kind = OPTION_ENUM, FIELD(log_level), .fallback = "info", .choices = log_level_choices, .help = "least level that is logged"},
    {.name = "log-format", .kind = OPTION_ENUM, FIELD(log_format), .fallback = "logfmt", .choices = log_format_choices, .help = "form of a log line"},
};
#undef FIELD

const struct option_set worker_option_set = {
    .program = "tidepool-worker",
    .summary = "Runs a model for a router: layer-major prefill, a fast tier of fixed size, the rest in the host's pool.",
    .examples = "  tidepool-worker --model models/SmolLM2-135M-Instruct.Q4_1.gguf \\\n"
                "      --router ipc:///run/user/1000/tidepool/router.sock --store /run/user/1000/tidepool/kvstore.sock\n"
                "  tidepool-worker --model /models/llama --router tcp://10.0.0.1:5555 --name gpu-0 --budget 4096 --fetch all\n"
                "  tidepool-worker --model /models/llama-70b --router tcp://10.0.0.1:5555 --tp 2 --gpu 2    # on GPUs 2 and 3\n",
    .specs = specs,
    .n_specs = ARRAY_LEN(specs),
};
