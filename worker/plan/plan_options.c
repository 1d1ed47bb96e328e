#include "worker/plan/plan_options.h"
#include "kernels/collective.h"
#include "proto/base/base_assert.h"
#include "proto/option_choices.h"

/* "stored", then in the order of enum weight_dtype. */
static const char *const weights[] = {"stored", "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q4_k", "q5_k", "q6_k", NULL};

#define FIELD(name) .offset = offsetof(struct plan_options, name)
static const struct option_spec specs[] = {
    {.name = "model", .kind = OPTION_STR, FIELD(model), .metavar = "NAME|PATH",
     .help = "a known model (Llama-3.1-8B, Llama-3.1-70B, Mistral-7B, Qwen2.5-32B, DeepSeek-R1-Distill-14B, SmolLM2-135M, SmolLM2-1.7B), a GGUF file, a config.json, or a folder with one"},
    {.name = "context", .kind = OPTION_INT, FIELD(context), .fallback = "0", .min = 0, .max = 1 << 24, .metavar = "N",
     .help = "tokens of prompt and answer; 0: as many as the model allows"},
    {.name = "max-new", .kind = OPTION_INT, FIELD(max_new), .fallback = "512", .min = 0, .max = 1 << 24, .metavar = "N", .help = "tokens of the answer, part of the context"},
    {.name = "workers", .kind = OPTION_INT, FIELD(workers), .fallback = "1", .min = 1, .max = 256, .metavar = "N", .help = "worker processes on the host, one a device"},
    {.name = "tp", .kind = OPTION_INT, FIELD(tp), .fallback = "1", .min = 1, .max = COLLECTIVE_MAX_RANKS, .metavar = "N",
     .help = "tensor parallelism: ranks of a worker, one a device; sizes are then those of one rank, the largest"},
    {.name = "device-memory", .kind = OPTION_BYTES, FIELD(device_memory), .fallback = "0", .min = 0, .max = INT64_MAX, .metavar = "BYTES",
     .help = "memory of one device, weights included: how many sequences fit; 0: not asked"},
    {.name = "weights", .kind = OPTION_ENUM, FIELD(weights), .fallback = "stored", .choices = weights,
     .help = "dtype of the matrices; stored: as in the files (bf16 for a model without files)"},
    {.name = "budget", .kind = OPTION_INT, FIELD(budget), .fallback = "256", .min = 0, .max = 1 << 20, .metavar = "N",
     .help = "fast tier: kept entries per layer and KV head"},
    {.name = "recent", .kind = OPTION_INT, FIELD(recent), .fallback = "128", .min = 0, .max = 1 << 20, .metavar = "N",
     .help = "fast tier: newest tokens per layer and KV head"},
    {.name = "fetch", .kind = OPTION_INT, FIELD(fetch), .fallback = "512", .min = 0, .max = INT32_MAX, .max_word = "all", .metavar = "N|all",
     .help = "slow tokens attended per step, layer and KV head"},
    {.name = "fetch-unit", .kind = OPTION_ENUM, FIELD(fetch_unit), .fallback = "16", .choices = fetch_unit_choices, .help = "slow tokens chosen together"},
    {.name = "scorer", .kind = OPTION_STR, FIELD(scorer), .fallback = "index2", .metavar = "NAME", .help = "who chooses the slow tokens: " SCORER_NAMES(", ") "; some keep summaries of each request on the device"},
    {.name = "selector", .kind = OPTION_STR, FIELD(selector), .fallback = "snapkv", .metavar = "NAME",
     .help = "who chooses the entries that stay in the fast tier: " SELECTOR_NAMES(", ")},
    {.name = "chunk", .kind = OPTION_INT, FIELD(chunk), .fallback = "512", .min = 1, .max = 1 << 16, .metavar = "N", .help = "prompt tokens computed at a time"},
    {.name = "prefill", .kind = OPTION_ENUM, FIELD(prefill), .fallback = "consistent", .choices = prefill_choices, .help = "values that prefill attends"},
    {.name = "bridge", .kind = OPTION_ENUM, FIELD(bridge), .fallback = "auto", .choices = bridge_choices,
     .help = "hidden states of a prompt between two layers: on the device, in pinned host memory, or there where the request does not fit into --device-memory otherwise"},
    {.name = "kv-format", .kind = OPTION_ENUM, FIELD(kv_format), .fallback = "k8v4", .choices = kv_format_choices, .help = "what the pool holds"},
    {.name = "pool", .kind = OPTION_BOOL, FIELD(pool), .fallback = "on", .help = "--pool=off: without a kvstore, so that every block stays on the worker's device"},
    {.name = "max-running", .kind = OPTION_INT, FIELD(max_running), .fallback = "8", .min = 1, .max = 256, .metavar = "N", .help = "sequences a worker decodes as one batch"},
    {.name = "device", .kind = OPTION_ENUM, FIELD(device), .fallback = "auto", .choices = device_choices, .help = "what computes, as for a worker of this host"},
    {.name = "threads", .kind = OPTION_INT, FIELD(threads), .fallback = "0", .min = 0, .max = 256, .metavar = "N", .help = "compute threads of a worker; 0: one a processor of this machine"},
    {.name = "isa", .kind = OPTION_ENUM, FIELD(isa), .fallback = "auto", .choices = isa_choices, .help = "instruction set of the CPU kernels"},
    {.name = "json", .kind = OPTION_BOOL, FIELD(json), .fallback = "off", .help = "print JSON, every size in bytes"},
};
#undef FIELD

const struct option_set plan_option_set = {
    .program = "tidepool plan",
    .summary = "Predicts the memory that a model and a context need, to the byte, from the model's configuration alone.",
    .examples = "  tidepool plan --model Llama-3.1-8B --context 131072 --budget 4096\n"
                "  tidepool plan --model Qwen2.5-32B --context 32768 --weights q4_k --device-memory 48G\n"
                "  tidepool plan --model models/SmolLM2-135M-Instruct.Q4_1.gguf --workers 2 --device-memory 2G --json\n"
                "  tidepool plan --model Llama-3.1-70B --context 131072 --tp 4 --device-memory 80G\n"
                "  tidepool plan --model /srv/models/llama/config.json --context 65536 --selector streaming\n",
    .specs = specs,
    .n_specs = ARRAY_LEN(specs),
};
