#include "deploy/serve_options.h"

#include "proto/base/base_assert.h"
#include "proto/base/log.h"

static const char *const policies[] = {"prefix", "least-loaded", "round-robin", NULL};

/* Who the option is handed on to; one without is the launcher's own. */
#define TO(targets) .tags = (targets)
#define FIELD(f) .offset = offsetof(struct serve_options, f)

static const struct option_spec specs[] = {
    {.name = "model", .kind = OPTION_STR, FIELD(model), TO(SERVE_ROUTER | SERVE_WORKER), .metavar = "PATH", .help = "GGUF file, or a folder with config.json, *.safetensors and tokenizer.json"},
    {.name = "workers", .kind = OPTION_INT, FIELD(workers), .fallback = "1", .min = 1, .max = 32, .metavar = "N", .help = "worker processes"},
    {.name = "host", .kind = OPTION_STR, FIELD(host), TO(SERVE_ROUTER), .fallback = "127.0.0.1", .metavar = "ADDRESS", .help = "address the API listens on"},
    {.name = "port", .kind = OPTION_INT, FIELD(port), TO(SERVE_ROUTER), .fallback = "8080", .min = 0, .max = 65535, .metavar = "N", .help = "port of the API; 0 takes a free one"},
    {.name = "port-file", .kind = OPTION_STR, FIELD(port_file), .optional = true, .metavar = "PATH", .help = "write the port here once the API listens"},
    {.name = "served-model-name", .kind = OPTION_STR, FIELD(served_model_name), TO(SERVE_ROUTER), .optional = true, .metavar = "NAME", .help = "model name in the API; default: from the file's name"},
    {.name = "chat-template", .kind = OPTION_STR, FIELD(chat_template), TO(SERVE_ROUTER), .optional = true, .metavar = "PATH", .help = "Jinja2 template instead of the model's own"},
    {.name = "api-key", .kind = OPTION_STR, FIELD(api_key), .optional = true, .metavar = "KEY", .help = "require this key; prefer TIDEPOOL_API_KEY or --api-key-file, flags are visible to others"},
    {.name = "api-key-file", .kind = OPTION_STR, FIELD(api_key_file), TO(SERVE_ROUTER), .optional = true, .metavar = "PATH", .help = "file with one accepted key a line"},
    {.name = "policy", .kind = OPTION_ENUM, FIELD(policy), TO(SERVE_ROUTER), .fallback = "prefix", .choices = policies, .help = "choice of worker"},
    {.name = "max-queue", .kind = OPTION_INT, FIELD(max_queue), TO(SERVE_ROUTER), .fallback = "128", .min = 0, .max = 1000000, .metavar = "N", .help = "requests that may wait; beyond: 429 with Retry-After"},
    {.name = "pool-size", .kind = OPTION_BYTES, FIELD(pool_size), TO(SERVE_KVSTORE), .fallback = "2G", .min = 1 << 20, .max = INT64_MAX, .metavar = "BYTES", .help = "host memory of the shared pool of KV blocks"},
    {.name = "gpu", .kind = OPTION_INT, FIELD(gpu), .fallback = "0", .min = 0, .max = 1023, .metavar = "N", .help = "the first of the host's GPUs to use; each rank of each worker takes the next one"},
    {.name = "drain-timeout", .kind = OPTION_INT, FIELD(drain_timeout), TO(SERVE_ROUTER), .fallback = "30", .min = 0, .max = 3600, .metavar = "SECONDS", .help = "how long running requests may take to end after SIGTERM"},
    {.name = "runtime-dir", .kind = OPTION_STR, FIELD(runtime_dir), .optional = true, .metavar = "PATH", .help = "folder for sockets; default: a new one of mode 0700, removed at the end"},
    {.name = "log-level", .kind = OPTION_ENUM, FIELD(log_level), TO(SERVE_ROUTER | SERVE_WORKER | SERVE_KVSTORE), .fallback = "info", .choices = log_level_choices, .help = "least important lines that are logged"},
    {.name = "log-format", .kind = OPTION_ENUM, FIELD(log_format), TO(SERVE_ROUTER | SERVE_WORKER | SERVE_KVSTORE), .fallback = "logfmt", .choices = log_format_choices, .help = "log lines as logfmt or JSON"},
};

static const struct option_group groups[] = {ENGINE_OPTION_GROUP(struct serve_options, 0)};

const struct option_set serve_option_set = {
    .program = "tidepool serve",
    .summary = "Serves a model over an OpenAI-compatible API: one router, N workers and one kvstore, watched and restarted.",
    .examples = "  tidepool serve --model models/SmolLM2-135M-Instruct.Q4_1.gguf --workers 2\n"
                "  tidepool serve --model /srv/llama-3.1-8b --pool-size 16G --budget 512 --fetch 1024 --port 8000\n"
                "  TIDEPOOL_MODEL=model.gguf TIDEPOOL_FETCH=all tidepool serve\n"
                "  tidepool serve --config /etc/tidepool.conf        # lines of `name = value`\n",
    .specs = specs,
    .n_specs = ARRAY_LEN(specs),
    .groups = groups,
    .n_groups = ARRAY_LEN(groups),
};

int serve_option_targets(size_t i)
{
    return i < ARRAY_LEN(specs) ? (int)specs[i].tags : SERVE_WORKER;
}
