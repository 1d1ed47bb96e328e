#include "router/router_options.h"
#include "proto/base/base_assert.h"
#include "proto/base/log.h"

static const char *const policies[] = {"prefix", "least-loaded", "round-robin", NULL};
static const char *const isolations[] = {"none", "key", NULL};

#define STR(option, field, fallback_, metavar_, help_) \
    {.name = option, .kind = OPTION_STR, .offset = offsetof(struct router_options, field), .fallback = fallback_, .metavar = metavar_, .help = help_}
#define OPTIONAL_STR(option, field, metavar_, help_) \
    {.name = option, .kind = OPTION_STR, .offset = offsetof(struct router_options, field), .optional = true, .metavar = metavar_, .help = help_}
#define INT(option, field, fallback_, min_, max_, metavar_, help_) \
    {.name = option, .kind = OPTION_INT, .offset = offsetof(struct router_options, field), .fallback = fallback_, .min = min_, .max = max_, .metavar = metavar_, .help = help_}
#define BYTES(option, field, fallback_, min_, max_, help_) \
    {.name = option, .kind = OPTION_BYTES, .offset = offsetof(struct router_options, field), .fallback = fallback_, .min = min_, .max = max_, .metavar = "BYTES", .help = help_}
#define ENUM(option, field, fallback_, choices_, help_) \
    {.name = option, .kind = OPTION_ENUM, .offset = offsetof(struct router_options, field), .fallback = fallback_, .choices = choices_, .help = help_}

static const struct option_spec specs[] = {
    STR("model", model, NULL, "PATH", "GGUF file or folder with tokenizer.json: tokenizer, chat template and the model's name"),
    STR("endpoint", endpoint, NULL, "URL", "where workers connect, e.g. ipc:///run/tidepool/router.sock or tcp://127.0.0.1:7070"),
    OPTIONAL_STR("served-model-name", served_model_name, "NAME", "model name in the API; default: the file's name"),
    OPTIONAL_STR("chat-template", chat_template, "PATH", "Jinja2 template instead of the model's own"),
    STR("host", host, "127.0.0.1", "ADDRESS", "address the API listens on"),
    INT("port", port, "8080", 0, 65535, "N", "port of the API; 0 takes a free one"),
    OPTIONAL_STR("port-file", port_file, "PATH", "write the port here once the API listens"),
    OPTIONAL_STR("api-key", api_key, "KEYS", "require one of these keys, separated by commas; prefer TIDEPOOL_API_KEY or --api-key-file"),
    OPTIONAL_STR("api-key-file", api_key_file, "PATH", "file with one accepted key a line"),
    OPTIONAL_STR("allowed-origins", allowed_origins, "LIST", "CORS: origins separated by commas, or *; default: none"),
    ENUM("policy", policy, "prefix", policies, "choice of worker"),
    ENUM("cache-isolation", cache_isolation, "key", isolations, "key: callers with different API keys do not share cached prefixes; none: all callers do"),
    INT("max-queue", max_queue, "128", 0, 1000000, "N", "requests that may wait; beyond: 429 with Retry-After"),
    INT("max-queue-tokens", max_queue_tokens, "8000000", 1, INT64_MAX, "N", "prompt tokens that may wait; beyond: 429 with Retry-After"),
    INT("worker-wait", worker_wait, "30", 0, 86400, "SECONDS", "how long a request waits while no worker is ready; then 503"),
    INT("queue-timeout", queue_timeout, "600", 1, 86400, "SECONDS", "how long a request waits in all; then 503"),
    INT("retries", retries, "3", 0, 100, "N", "times a request may move to another worker"),
    INT("lookahead", lookahead, "2", 0, 1024, "N", "requests given to a worker beyond what it decodes as one batch"),
    INT("heartbeat-ms", heartbeat_ms, "1000", 10, 60000, "MS", "interval of heartbeats; five missed ones mean gone"),
    INT("progress-timeout", progress_timeout, "60", 1, 86400, "SECONDS", "a busy worker without progress for so long is unhealthy"),
    BYTES("max-body", max_body, "16M", 1024, 1 << 30, "largest request body"),
    INT("request-timeout", request_timeout, "30", 1, 3600, "SECONDS", "how long a request may take to arrive; then 408"),
    INT("idle-timeout", idle_timeout, "75", 1, 3600, "SECONDS", "how long a connection may be idle between requests"),
    INT("keepalive", keepalive, "15", 1, 3600, "SECONDS", "silence after which a stream gets a comment line"),
    BYTES("stream-backlog", stream_backlog, "1M", 4096, 1 << 30, "unread bytes above which a slow reader of a stream is on notice"),
    INT("stream-stall", stream_stall, "20", 1, 3600, "SECONDS", "how long it may stay there before it is cut"),
    INT("drain-timeout", drain_timeout, "30", 0, 3600, "SECONDS", "how long running requests may take to end after SIGTERM"),
    INT("work-threads", work_threads, "2", 1, 64, "N", "threads that parse bodies and tokenize prompts"),
    INT("template-timeout", template_timeout, "10", 1, 600, "SECONDS", "how long a chat template may take"),
    ENUM("log-level", log_level, "info", log_level_choices, "least important lines that are logged"),
    ENUM("log-format", log_format, "logfmt", log_format_choices, "log lines as logfmt or JSON"),
};

const struct option_set router_option_set = {
    .program = "tidepool-router",
    .summary = "Speaks the OpenAI API, tokenizes, and gives requests to the workers that connect to it.",
    .examples = "  tidepool-router --model model.gguf --endpoint ipc:///run/tidepool/router.sock\n"
                "  tidepool-router --model /srv/llama-3.1-8b --endpoint tcp://10.0.0.1:7070 --host 0.0.0.0 --api-key-file /etc/tidepool/keys\n"
                "  TIDEPOOL_API_KEY=secret-key-1 tidepool-router --config /etc/tidepool/router.conf     # lines of `name = value`\n",
    .specs = specs,
    .n_specs = ARRAY_LEN(specs),
};

const char *router_policy_name(const struct router_options *options)
{
    return policies[options->policy];
}
