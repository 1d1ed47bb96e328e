#include "worker/plan/plan_options.h"
#include "proto/base/base_assert.h"

/* "stored", then in the order of enum weight_dtype. */
static const char *const weights[] = {"stored", "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q4_k", "q5_k", "q6_k", NULL};

#define FIELD(name) .offset = offsetof(struct plan_options, name)
static const struct option_spec specs[] = {
    {.name = "model", .kind = OPTION_STR, FIELD(model), .metavar = "NAME|PATH",
     .help = "a known model (Llama-3.1-8B, Llama-3.1-70B, Mistral-7B, Qwen2.5-32B, DeepSeek-R1-Distill-14B, SmolLM2-135M, SmolLM2-1.7B), a GGUF file, a config.json, or a folder with one"},
    {.name = "max-new", .kind = OPTION_INT, FIELD(max_new), .fallback = "512", .min = 0, .max = 1 << 24, .metavar = "N", .help = "tokens of the answer, part of the context"},
    {.name = "workers", .kind = OPTION_INT, FIELD(workers), .fallback = "1", .min = 1, .max = 256, .metavar = "N", .help = "worker processes on the host, one a device"},
    {.name = "device-memory", .kind = OPTION_BYTES, FIELD(device_memory), .fallback = "0", .min = 0, .max = INT64_MAX, .metavar = "BYTES",
     .help = "memory of one device, weights included: how many sequences fit; 0: not asked"},
    {.name = "weights", .kind = OPTION_ENUM, FIELD(weights), .fallback = "stored", .choices = weights,
     .help = "dtype of the matrices; stored: as in the files (bf16 for a model without files)"},
    {.name = "pool", .kind = OPTION_BOOL, FIELD(pool), .fallback = "on", .help = "--pool=off: without a kvstore, so that every block stays on the worker's device"},
    {.name = "json", .kind = OPTION_BOOL, FIELD(json), .fallback = "off", .help = "print JSON, every size in bytes"},
};
#undef FIELD

static const struct option_group groups[] = {ENGINE_OPTION_GROUP(struct plan_options, ENGINE_OPTION_SIZING)};

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
    .groups = groups,
    .n_groups = ARRAY_LEN(groups),
};
