#include "proto/engine_options.h"
#include "proto/option_choices.h"

#define FIELD(name) .offset = offsetof(struct engine_options, name)
#define SIZING .tags = ENGINE_OPTION_SIZING
#define COMMON .tags = ENGINE_OPTION_COMMON
#define SIZING_AND_COMMON .tags = ENGINE_OPTION_SIZING | ENGINE_OPTION_COMMON

const struct option_spec engine_option_specs[] = {
    {.name = "kv-format", .kind = OPTION_ENUM, FIELD(kv_format), SIZING_AND_COMMON, .fallback = "k8v4", .choices = kv_format_choices,
     .help = "what the pool holds: 8-bit keys and 4-bit values, 8 and 8, or bf16 (exact)"},
    {.name = "selector", .kind = OPTION_ENUM, FIELD(selector), SIZING_AND_COMMON, .fallback = "snapkv", .choices = selector_choices,
     .help = "who chooses the entries that stay in the fast tier"},
    {.name = "budget", .kind = OPTION_INT, FIELD(budget), SIZING_AND_COMMON, .fallback = "256", .min = 0, .max = 1 << 20, .metavar = "N",
     .help = "fast tier: kept entries per layer and KV head"},
    {.name = "recent", .kind = OPTION_INT, FIELD(recent), SIZING_AND_COMMON, .fallback = "128", .min = 0, .max = 1 << 20, .metavar = "N",
     .help = "fast tier: newest tokens per layer and KV head"},
    {.name = "fetch", .kind = OPTION_INT, FIELD(fetch), SIZING_AND_COMMON, .fallback = "512", .min = 0, .max = INT32_MAX, .max_word = "all", .metavar = "N|all",
     .help = "slow tokens attended per step, layer and KV head"},
    {.name = "fetch-unit", .kind = OPTION_ENUM, FIELD(fetch_unit), SIZING_AND_COMMON, .fallback = "16", .choices = fetch_unit_choices,
     .help = "slow tokens chosen together: a sub-page or a whole block; --fetch is rounded up to it"},
    {.name = "scorer", .kind = OPTION_ENUM, FIELD(scorer), SIZING_AND_COMMON, .fallback = "index2", .choices = scorer_choices,
     .help = "who chooses the slow tokens; some keep summaries of each request on the device; oracle is for measuring only"},
    {.name = "chunk", .kind = OPTION_INT, FIELD(chunk), SIZING_AND_COMMON, .fallback = "512", .min = 1, .max = 1 << 16, .metavar = "N",
     .help = "prompt tokens computed at a time"},
    {.name = "prefill", .kind = OPTION_ENUM, FIELD(prefill), SIZING_AND_COMMON, .fallback = "consistent", .choices = prefill_choices,
     .help = "attend earlier blocks as the pool holds them (prefixes are reusable bit for bit), or exactly"},
    {.name = "prefill-order", .kind = OPTION_ENUM, FIELD(prefill_order), COMMON, .fallback = "layer", .choices = prefill_order_choices,
     .help = "layer-major, or the chunk-major baseline"},
    {.name = "context", .kind = OPTION_INT, FIELD(context), SIZING_AND_COMMON, .fallback = "0", .min = 0, .max = 1 << 24, .metavar = "N",
     .help = "longest prompt and answer in tokens; 0: the model's own"},
    {.name = "max-running", .kind = OPTION_INT, FIELD(max_running), SIZING_AND_COMMON, .fallback = "8", .min = 1, .max = 256, .metavar = "N",
     .help = "sequences a worker decodes as one batch"},
    {.name = "reuse-generated", .kind = OPTION_BOOL, FIELD(reuse_generated), COMMON, .fallback = "off",
     .help = "blocks made while decoding may serve other prompts"},
    {.name = "tp", .kind = OPTION_INT, FIELD(tp), SIZING, .fallback = "1", .min = 1, .max = ENGINE_RANKS_MAX, .metavar = "N",
     .help = "tensor parallelism: ranks of a worker that share the model's heads, one process and GPU each"},
    {.name = "device", .kind = OPTION_ENUM, FIELD(device), SIZING, .fallback = "auto", .choices = device_choices,
     .help = "what a worker computes on: a GPU where this build and this host have one, else the CPU; or one of them"},
    {.name = "bridge", .kind = OPTION_ENUM, FIELD(bridge), SIZING, .fallback = "auto", .choices = bridge_choices,
     .help = "hidden states of a prompt between two layers: on the device, in pinned host memory, or there only where the device's memory is short; nothing but the device on a CPU"},
    {.name = "memory-limit", .kind = OPTION_BYTES, FIELD(memory_limit), .fallback = "0", .min = 0, .max = INT64_MAX, .metavar = "BYTES",
     .help = "device memory of a worker beyond the weights; 0: no limit on a CPU, nine tenths of a GPU's memory less the weights"},
    {.name = "page-cache", .kind = OPTION_BYTES, FIELD(page_cache), .fallback = "auto", .min = 0, .max = INT64_MAX, .max_word = "auto", .metavar = "BYTES|auto",
     .help = "device memory of a worker for fetched sub-pages, at most what requests leave of --memory-limit; auto: all of that"},
    {.name = "weights", .kind = OPTION_ENUM, FIELD(weights), .fallback = "auto", .choices = weights_choices,
     .help = "quantized weights on a GPU: expanded once to bf16, or kept as stored and expanded for each product; auto: the latter when bf16 would take over 3/4 of its memory"},
    {.name = "threads", .kind = OPTION_INT, FIELD(threads), SIZING, .fallback = "0", .min = 0, .max = 256, .metavar = "N",
     .help = "compute threads of a worker; 0: one a processor, shared out where `tidepool serve` starts several workers"},
    {.name = "isa", .kind = OPTION_ENUM, FIELD(isa), SIZING, .fallback = "auto", .choices = isa_choices,
     .help = "instruction set of the CPU kernels; all give the same bits"},
    {.name = NULL},
};
