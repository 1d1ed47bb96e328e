/* Counters and histograms of this process, written as Prometheus text (exposition format 0.0.4). Units stand in the names, counters end in _total.
 * Loop thread only. Latencies come from the monotonic clock. */
#pragma once
#include "proto/base/buf.h"
#include <stddef.h>
#include <stdint.h>

enum { HISTOGRAM_BOUNDS_MAX = 32 };

struct histogram {
    const double *bounds; /* [n_bounds], ascending, static */
    size_t n_bounds;
    uint64_t counts[HISTOGRAM_BOUNDS_MAX + 1]; /* not cumulative */
    uint64_t n;
    double sum;
};

enum metrics_endpoint {
    ENDPOINT_CHAT, ENDPOINT_COMPLETIONS, ENDPOINT_MODELS, ENDPOINT_TOKENIZE, ENDPOINT_DETOKENIZE, ENDPOINT_METRICS, ENDPOINT_OTHER, ENDPOINTS,
};
enum metrics_finish { FINISHED_STOP, FINISHED_LENGTH, FINISHED_CANCELLED, FINISHED_ERROR, FINISHES };

struct metrics {
    uint64_t requests[ENDPOINTS][6];  /* by hundreds of the status: [2] = 2xx ... */
    uint64_t finished[FINISHES];      /* answers (n of them a request) */
    uint64_t prompt_tokens, generation_tokens;
    uint64_t prefix_queries, prefix_hits; /* tokens */
    uint64_t bytes_loaded, bytes_attended, bytes_missed, pool_written_bytes;
    uint64_t unknown_fields;
    struct histogram ttft, itl, e2e, queue, prefill, decode; /* seconds */
    struct histogram prompt_size, answer_size;               /* tokens */
};

void metrics_init(struct metrics *m);
void metrics_observe(struct histogram *h, double value);
/* Names as in vLLM with the prefix tidepool_, so that dashboards carry over. Appends. */
void metrics_write(const struct metrics *m, struct buf *out);

/* Parts for metrics of others: HELP and TYPE lines, then samples. `labels` without braces, or "". */
void metrics_head(struct buf *out, const char *name, const char *type, const char *help);
void metrics_sample(struct buf *out, const char *name, const char *labels, double value);
void metrics_sample_int(struct buf *out, const char *name, const char *labels, uint64_t value);
/* key="value" with the value escaped, behind a comma if `labels` is not empty. */
void metrics_label(struct buf *labels, const char *key, const char *value);
