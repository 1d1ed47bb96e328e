/* What the parts of tidepool-gpubench share: the opened device, model and pool, and how a figure is printed. */
#pragma once
#include "kernels/kernels.h"
#include "kvstore/client/kv_client.h"
#include "proto/base/error.h"
#include "worker/cache/engine.h"
#include "worker/model/model.h"
#include <stdbool.h>
#include <stdint.h>

enum { BENCH_LIST_MAX = 16 };

struct bench_list {
    int64_t values[BENCH_LIST_MAX];
    int n;
};

struct gpu_bench {
    const struct device_ops *dev;
    const struct kernel_ops *ops;
    struct device *device;
    struct stream *stream;
    struct model *model;
    struct kv_client *store;
    struct engine_config engine;       /* what the runs have in common */
    struct bench_list prefill_lengths, chunks, batches, fetches, page_caches;
    bool bridges[2];                   /* prefill with hidden states on the device, in host memory */
    int64_t decode_context, decode_steps;
    bool json;                         /* one object a figure beside the tables, on stderr */
};

/* n tokens that begin as those of every other prompt of the same document do and end in `tail` tokens of their own. */
void bench_prompt(const struct gpu_bench *b, uint64_t document, uint64_t question, int n, int tail, int32_t *ret_tokens);
double bench_seconds(void);
/* Whether the next measurement can be made after this error: not when the device has failed. Prints a row that says what failed, and leaves `err` for the next. */
bool bench_goes_on(int result, const char *row, struct error *err);
/* Peaks since the last reset, beyond the weights: "fast 512.0 + active_kv 512.0 + ... = 1100.2". */
void bench_memory_text(const struct device_memory_stats *stats, char *text, size_t size);

/* Time to the logits of the first token, peak memory, and what it takes when the prompt's blocks are in the pool. */
int bench_prefill(struct gpu_bench *b, struct error *err);
/* The hot ops alone, against a copy and a product of the same run, over n_keys keys. */
int bench_hot_ops(struct gpu_bench *b, int n_keys, struct error *err);
/* Tokens/s of sequences that share a document. */
int bench_decode(struct gpu_bench *b, struct error *err);
