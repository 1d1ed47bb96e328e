#include "deploy/serve_options.h"

#include "proto/base/base_assert.h"
#include "proto/base/log.h"
#include "proto/option_choices.h"

static const char *const policies[] = {"prefix", "least-loaded", "round-robin", NULL};

#define FIELD(f) .offset = offsetof(struct serve_options, f)

static const struct option_spec specs[] = {
    {.name = "model", .kind = OPTION_STR, FIELD(model), .metavar = "PATH", .help = "GGUF file, or a folder with config.json, *.safetensors and tokenizer.json"},
    {.name = "workers", .kind = OPTION_INT, FIELD(workers), .fallback = "1", .min = 1, .max = 32, .metavar = "N", .help = "worker processes"},
    {.name = "host", .kind = OPTION_STR, FIELD(host), .fallback = "127.0.0.1", .metavar = "ADDRESS", .help = "address the API listens on"},
    {.name = "port", .kind = OPTION_INT, FIELD(port), .fallback = "8080", .min = 0, .max = 65535, .metavar = "N", .help = "port of the API; 0 takes a free one"},
    {.name = "port-file", .kind = OPTION_STR, FIELD(port_file), .optional = true, .metavar = "PATH", .help = "write the port here once the API listens"},
    {.name = "served-model-name", .kind = OPTION_STR, FIELD(served_model_name), .optional = true, .metavar = "NAME", .help = "model name in the API; default: from the file's name"},
    {.name = "chat-template", .kind = OPTION_STR, FIELD(chat_template), .optional = true, .metavar = "PATH", .help = "Jinja2 template instead of the model's own"},
    {.name = "api-key", .kind = OPTION_STR, FIELD(api_key), .optional = true, .metavar = "KEY", .help = "require this key; prefer TIDEPOOL_API_KEY or --api-key-file, flags are visible to others"},
    {.name = "api-key-file", .kind = OPTION_STR, FIELD(api_key_file), .optional = true, .metavar = "PATH", .help = "file with one accepted key a line"},
    {.name = "policy", .kind = OPTION_ENUM, FIELD(policy), .fallback = "prefix", .choices = policies, .help = "choice of worker"},
    {.name = "max-queue", .kind = OPTION_INT, FIELD(max_queue), .fallback = "128", .min = 0, .max = 1000000, .metavar = "N", .help = "requests that may wait; beyond: 429 with Retry-After"},
    {.name = "pool-size", .kind = OPTION_BYTES, FIELD(pool_size), .fallback = "2G", .min = 1 << 20, .max = INT64_MAX, .metavar = "BYTES", .help = "host memory of the shared pool of KV blocks"},
    {.name = "kv-format", .kind = OPTION_ENUM, FIELD(kv_format), .fallback = "k8v4", .choices = kv_format_choices, .help = "what the pool holds: 8-bit keys and 4-bit values, 8 and 8, or bf16 (exact)"},
    {.name = "selector", .kind = OPTION_ENUM, FIELD(selector), .fallback = "snapkv", .choices = selector_choices, .help = "who chooses the entries that stay in the fast tier"},
    {.name = "budget", .kind = OPTION_INT, FIELD(budget), .fallback = "256", .min = 0, .max = 1 << 20, .metavar = "N", .help = "fast tier: kept entries per layer and KV head"},
    {.name = "recent", .kind = OPTION_INT, FIELD(recent), .fallback = "128", .min = 0, .max = 1 << 20, .metavar = "N", .help = "fast tier: newest tokens per layer and KV head"},
    {.name = "fetch", .kind = OPTION_INT, FIELD(fetch), .fallback = "512", .min = 0, .max = INT32_MAX, .max_word = "all", .metavar = "N|all", .help = "slow tokens attended per step, layer and KV head"},
    {.name = "fetch-unit", .kind = OPTION_ENUM, FIELD(fetch_unit), .fallback = "16", .choices = fetch_unit_choices, .help = "slow tokens chosen together: a sub-page or a whole block; --fetch is rounded up to it"},
    {.name = "scorer", .kind = OPTION_ENUM, FIELD(scorer), .fallback = "index2", .choices = scorer_choices, .help = "who chooses the slow tokens; oracle is for measuring only"},
    {.name = "chunk", .kind = OPTION_INT, FIELD(chunk), .fallback = "512", .min = 1, .max = 1 << 16, .metavar = "N", .help = "prompt tokens computed at a time"},
    {.name = "prefill", .kind = OPTION_ENUM, FIELD(prefill), .fallback = "consistent", .choices = prefill_choices, .help = "attend earlier blocks as the pool holds them (prefixes are reusable bit for bit), or exactly"},
    {.name = "prefill-order", .kind = OPTION_ENUM, FIELD(prefill_order), .fallback = "layer", .choices = prefill_order_choices, .help = "layer-major, or the chunk-major baseline"},
    {.name = "bridge", .kind = OPTION_ENUM, FIELD(bridge), .fallback = "auto", .choices = bridge_choices, .help = "hidden states of a prompt between two layers: on the device, in pinned host memory, or there only where --memory-limit is short; nothing but the device on a CPU"},
    {.name = "context", .kind = OPTION_INT, FIELD(context), .fallback = "0", .min = 0, .max = 1 << 24, .metavar = "N", .help = "longest prompt and answer in tokens; 0: the model's own"},
    {.name = "max-running", .kind = OPTION_INT, FIELD(max_running), .fallback = "8", .min = 1, .max = 256, .metavar = "N", .help = "sequences a worker decodes as one batch"},
    {.name = "memory-limit", .kind = OPTION_BYTES, FIELD(memory_limit), .fallback = "0", .min = 0, .max = INT64_MAX, .metavar = "BYTES", .help = "device memory of a worker beyond the weights; 0: no limit on a CPU, nine tenths of a GPU's memory less the weights"},
    {.name = "page-cache", .kind = OPTION_BYTES, FIELD(page_cache), .fallback = "auto", .min = 0, .max = INT64_MAX, .max_word = "auto", .metavar = "BYTES|auto", .help = "device memory of a worker for fetched sub-pages, at most what requests leave of --memory-limit; auto: all of that"},
    {.name = "reuse-generated", .kind = OPTION_BOOL, FIELD(reuse_generated), .fallback = "off", .help = "blocks made while decoding may serve other prompts"},
    {.name = "threads", .kind = OPTION_INT, FIELD(threads), .fallback = "0", .min = 0, .max = 256, .metavar = "N", .help = "compute threads of a worker; 0: the processors shared out among the workers"},
    {.name = "device", .kind = OPTION_ENUM, FIELD(device), .fallback = "auto", .choices = device_choices, .help = "what a worker computes on: a GPU where this build and this host have one, else the CPU; or one of them"},
    {.name = "tp", .kind = OPTION_INT, FIELD(tp), .fallback = "1", .min = 1, .max = 64, .metavar = "N", .help = "tensor parallelism: ranks of a worker, one process and GPU each"},
    {.name = "gpu", .kind = OPTION_INT, FIELD(gpu), .fallback = "0", .min = 0, .max = 1023, .metavar = "N", .help = "the first of the host's GPUs to use; each rank of each worker takes the next one"},
    {.name = "weights", .kind = OPTION_ENUM, FIELD(weights), .fallback = "auto", .choices = weights_choices, .help = "quantized weights on a GPU: expanded once to bf16, or kept as stored and expanded for each product; auto: the latter when bf16 would take over 3/4 of its memory"},
    {.name = "isa", .kind = OPTION_ENUM, FIELD(isa), .fallback = "auto", .choices = isa_choices, .help = "instruction set of the CPU kernels; all give the same bits"},
    {.name = "drain-timeout", .kind = OPTION_INT, FIELD(drain_timeout), .fallback = "30", .min = 0, .max = 3600, .metavar = "SECONDS", .help = "how long running requests may take to end after SIGTERM"},
    {.name = "runtime-dir", .kind = OPTION_STR, FIELD(runtime_dir), .optional = true, .metavar = "PATH", .help = "folder for sockets; default: a new one of mode 0700, removed at the end"},
    {.name = "log-level", .kind = OPTION_ENUM, FIELD(log_level), .fallback = "info", .choices = log_level_choices, .help = "least important lines that are logged"},
    {.name = "log-format", .kind = OPTION_ENUM, FIELD(log_format), .fallback = "logfmt", .choices = log_format_choices, .help = "log lines as logfmt or JSON"},
};

/* Options that stand here are handed on; the others are the launcher's own. */
static const struct {
    const char *name;
    int targets;
} targets[] = {
    {"model", SERVE_ROUTER | SERVE_WORKER},
    {"host", SERVE_ROUTER},
    {"port", SERVE_ROUTER},
    {"served-model-name", SERVE_ROUTER},
    {"chat-template", SERVE_ROUTER},
    {"api-key-file", SERVE_ROUTER},
    {"policy", SERVE_ROUTER},
    {"max-queue", SERVE_ROUTER},
    {"drain-timeout", SERVE_ROUTER},
    {"pool-size", SERVE_KVSTORE},
    {"kv-format", SERVE_WORKER},
    {"selector", SERVE_WORKER},
    {"budget", SERVE_WORKER},
    {"recent", SERVE_WORKER},
    {"fetch", SERVE_WORKER},
    {"fetch-unit", SERVE_WORKER},
    {"scorer", SERVE_WORKER},
    {"chunk", SERVE_WORKER},
    {"prefill", SERVE_WORKER},
    {"prefill-order", SERVE_WORKER},
    {"bridge", SERVE_WORKER},
    {"context", SERVE_WORKER},
    {"max-running", SERVE_WORKER},
    {"memory-limit", SERVE_WORKER},
    {"page-cache", SERVE_WORKER},
    {"reuse-generated", SERVE_WORKER},
    {"device", SERVE_WORKER},
    {"weights", SERVE_WORKER},
    {"isa", SERVE_WORKER},
    {"tp", SERVE_WORKER},
    {"log-level", SERVE_ROUTER | SERVE_WORKER | SERVE_KVSTORE},
    {"log-format", SERVE_ROUTER | SERVE_WORKER | SERVE_KVSTORE},
};

const struct option_set serve_option_set = {
    .program = "tidepool serve",
    .summary = "Serves a model over an OpenAI-compatible API: one router, N workers and one kvstore, watched and restarted.",
    .examples = "  tidepool serve --model models/SmolLM2-135M-Instruct.Q4_1.gguf --workers 2\n"
                "  tidepool serve --model /srv/llama-3.1-8b --pool-size 16G --budget 512 --fetch 1024 --port 8000\n"
                "  TIDEPOOL_MODEL=model.gguf TIDEPOOL_FETCH=all tidepool serve\n"
                "  tidepool serve --config /etc/tidepool.conf        # lines of `name = value`\n",
    .specs = specs,
    .n_specs = ARRAY_LEN(specs),
};

int serve_option_targets(size_t i)
{
    ASSERT(i < ARRAY_LEN(specs));
    for (size_t t = 0; t < ARRAY_LEN(targets); t++)
        if (__builtin_strcmp(targets[t].name, specs[i].name) == 0)
            return targets[t].targets;
    return 0;
}
