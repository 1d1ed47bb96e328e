/* Rows of the real engine. */
#include "bench/fidelity/engine_method.h"
#include "proto/base/base_assert.h"

#define SPLITS(...)                                        \
    .splits = (const struct fidelity_split[]){__VA_ARGS__}, \
    .n_splits = (int)ARRAY_LEN(((const struct fidelity_split[]){__VA_ARGS__}))

#define ENGINE(...) .run = engine_method_run, .arg = &(const struct engine_method){__VA_ARGS__}, .arg_bytes = sizeof(struct engine_method)

/* Dropping never reads the slow tier, so the exact format gives it its best. */
#define DROP(selector_name, ...) \
    {.name = selector_name, .text = "kept by " selector_name ", the rest is gone", .group = GROUP_DROP, ENGINE(.selector = selector_name, .format = KV_FORMAT_BF16), \
     .sweep = true, .tasks = ON_ALL, __VA_ARGS__}
#define DEMOTE(selector_name, ...) \
    {.name = selector_name, .text = "kept by " selector_name ", the rest fetched by the 2-bit index, 16 tokens at a time, K8V4", .group = GROUP_DEMOTE, \
     ENGINE(.selector = selector_name), .sweep = true, .fetch_per_budget = 1, .tasks = ON_ALL, __VA_ARGS__}
/* What is kept is the same; who finds the rest, and how many tokens at a time, is not. */
#define SCORER(scorer_name) \
    {.name = scorer_name "-16", .text = "snapkv, K8V4, pages of 16 tokens found by " scorer_name, .group = GROUP_SCORER, \
     ENGINE(.selector = "snapkv", .scorer = scorer_name), SPLITS({256, 256}, {256, 512}), .n_task_splits = 1, .tasks = ON_KL | ON_RECALL, .importance = 1}, \
    {.name = scorer_name "-128", .text = "snapkv, K8V4, blocks of 128 tokens found by " scorer_name, .group = GROUP_SCORER, \
     ENGINE(.selector = "snapkv", .scorer = scorer_name, .fetch_unit = BLOCK_TOKENS), SPLITS({256, 256}), .tasks = ON_KL, .importance = 1}

/* 768 tokens attended: B kept in bf16, and the memory of the 512 - B others in a page cache of K8V4, in which 2.37 times as many fit (head dim 64). */
#define MEMORY(row_name, cache_tokens, ...) \
    {.name = row_name, .text = "snapkv, with a page cache of " #cache_tokens " tokens", .group = GROUP_SPLIT, \
     ENGINE(.selector = "snapkv", .page_cache = cache_tokens), SPLITS(__VA_ARGS__), .tasks = ON_KL, .importance = 1}

static const struct fidelity_method methods[] = {
    {.name = "full", .text = "full attention, bf16: what all rows are compared with", .group = GROUP_REFERENCE, ENGINE(.selector = "streaming", .format = KV_FORMAT_BF16),
     SPLITS({0, FIDELITY_ALL}), .tasks = ON_ALL, .cost = 10},
    {.name = "k8v8", .text = "full attention, keys and values in 8 bits, prefill consistent with them", .group = GROUP_REFERENCE,
     ENGINE(.selector = "streaming", .format = KV_FORMAT_K8V8), SPLITS({0, FIDELITY_ALL}), .tasks = ON_KL, .cost = 9, .importance = 1},
    {.name = "k8v4", .text = "full attention, keys in 8 bits, values in 4, prefill consistent with them", .group = GROUP_REFERENCE, ENGINE(.selector = "streaming"),
     SPLITS({0, FIDELITY_ALL}), .tasks = ON_ALL, .cost = 10},
    {.name = "k8v4-exact-prefill", .text = "the same, but prefill attends the exact values", .group = GROUP_REFERENCE,
     ENGINE(.selector = "streaming", .values = PREFILL_EXACT), SPLITS({0, FIDELITY_ALL}), .tasks = ON_KL, .cost = 9, .importance = 1},

    {.name = "snapkv", .text = "snapkv, K8V4, 2-bit index, 16 tokens at a time", .group = GROUP_DEFAULT, ENGINE(.selector = "snapkv"),
     SPLITS({256, 256}, {256, 512}, {256, 1024}), .tasks = ON_ALL},
    {.name = "snapkv-small", .text = "snapkv with other budgets", .group = GROUP_DEFAULT, ENGINE(.selector = "snapkv"),
     SPLITS({128, 512}, {512, 512}), .tasks = ON_KL, .importance = 1},
    {.name = "served", .text = "as `tidepool serve` runs: at least 128 recent tokens beside the budget, the answer's blocks become slow", .group = GROUP_DEFAULT,
     ENGINE(.selector = "snapkv", .recent = 128, .answer_leaves = true), SPLITS({256, 512}), .tasks = ON_ALL},

    DROP("snapkv"),
    DROP("pyramidkv", .importance = 1),
    DROP("adakv", .importance = 1),
    DROP("chunkkv", .importance = 1),
    DROP("tova", .importance = 1),
    DROP("keydiff", .importance = 1),
    DROP("h2o", .importance = 1, .cost = 8),
    DROP("streaming", .importance = 1),

    DEMOTE("snapkv"),
    DEMOTE("pyramidkv", .importance = 1),
    DEMOTE("adakv", .importance = 1),
    DEMOTE("chunkkv", .importance = 1),
    DEMOTE("tova", .importance = 1),
    DEMOTE("keydiff", .importance = 1),
    DEMOTE("h2o", .importance = 2, .cost = 8),
    DEMOTE("streaming", .importance = 1),

    {.name = "index2-16", .text = "snapkv, K8V4, pages of 16 tokens found by index2, the top two bits of the key codes", .group = GROUP_SCORER, ENGINE(.selector = "snapkv"),
     SPLITS({256, 256}, {256, 512}), .n_task_splits = 1, .tasks = ON_KL | ON_RECALL, .importance = 1},
    {.name = "index2-128", .text = "snapkv, K8V4, blocks of 128 tokens found by index2", .group = GROUP_SCORER,
     ENGINE(.selector = "snapkv", .fetch_unit = BLOCK_TOKENS), SPLITS({256, 256}), .tasks = ON_KL, .importance = 1},
    SCORER("minmax"),
    SCORER("mean"),
    SCORER("meanvar"),
    SCORER("recent"),
    SCORER("oracle"),
    {.name = "k8v8", .text = "snapkv, 2-bit index, keys and values in 8 bits", .group = GROUP_SCORER, ENGINE(.selector = "snapkv", .format = KV_FORMAT_K8V8),
     SPLITS({256, 256}), .tasks = ON_KL, .importance = 1},
    {.name = "bf16", .text = "snapkv, 2-bit index, exact slow tier", .group = GROUP_SCORER, ENGINE(.selector = "snapkv", .format = KV_FORMAT_BF16),
     SPLITS({256, 256}), .tasks = ON_KL, .importance = 1},

    {.name = "equal-512", .text = "snapkv, 512 tokens kept or fetched", .group = GROUP_SPLIT, ENGINE(.selector = "snapkv"),
     SPLITS({0, 512}, {36, 480}, {128, 384}, {256, 256}, {384, 128}), .tasks = ON_KL, .importance = 1},
    {.name = "equal-768", .text = "snapkv, 768 tokens kept or fetched", .group = GROUP_SPLIT, ENGINE(.selector = "snapkv"),
     SPLITS({0, 768}), .tasks = ON_KL, .importance = 1},

    MEMORY("memory-512", 0, {512, 256}),
    MEMORY("memory-384", 304, {384, 384}),
    MEMORY("memory-256", 608, {256, 512}),
    MEMORY("memory-128", 912, {128, 640}),
    MEMORY("memory-36", 1120, {36, 736}),
    MEMORY("cache-1024", 1024, {256, 512}),
    MEMORY("cache-2048", 2048, {256, 512}),
    MEMORY("cache-4096", 4096, {256, 512}),
};

const struct fidelity_methods engine_methods = {.methods = methods, .n = (int)ARRAY_LEN(methods)};
