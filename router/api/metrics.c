#include "router/api/metrics.h"
#include "proto/base/base_assert.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define PREFIX "tidepool_"

static const double ttft_bounds[] = {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640};
static const double itl_bounds[] = {.001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5};
static const double latency_bounds[] = {.005, .01, .05, .1, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920};
static const double token_bounds[] = {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000};

static void histogram_init(struct histogram *h, const double *bounds, size_t n)
{
    ASSERT(n <= HISTOGRAM_BOUNDS_MAX);
    *h = (struct histogram){.bounds = bounds, .n_bounds = n};
}

void metrics_init(struct metrics *m)
{
    memset(m, 0, sizeof(*m));
    histogram_init(&m->ttft, ttft_bounds, ARRAY_LEN(ttft_bounds));
    histogram_init(&m->itl, itl_bounds, ARRAY_LEN(itl_bounds));
    struct histogram *const latencies[] = {&m->e2e, &m->queue, &m->prefill, &m->decode};
    for (size_t i = 0; i < ARRAY_LEN(latencies); i++)
        histogram_init(latencies[i], latency_bounds, ARRAY_LEN(latency_bounds));
    histogram_init(&m->prompt_size, token_bounds, ARRAY_LEN(token_bounds));
    histogram_init(&m->answer_size, token_bounds, ARRAY_LEN(token_bounds));
}

void metrics_observe(struct histogram *h, double value)
{
    size_t i = 0;
    while (i < h->n_bounds && value > h->bounds[i])
        i++;
    h->counts[i]++;
    h->n++;
    h->sum += value;
}

/* -- text -- */

void metrics_head(struct buf *out, const char *name, const char *type, const char *help)
{
    buf_printf(out, "# HELP %s%s %s\n# TYPE %s%s %s\n", PREFIX, name, help, PREFIX, name, type);
}

void metrics_sample(struct buf *out, const char *name, const char *labels, double value)
{
    buf_printf(out, *labels ? "%s%s{%s} %.9g\n" : "%s%s%s %.9g\n", PREFIX, name, labels, value);
}

void metrics_sample_int(struct buf *out, const char *name, const char *labels, uint64_t value)
{
    buf_printf(out, *labels ? "%s%s{%s} %" PRIu64 "\n" : "%s%s%s %" PRIu64 "\n", PREFIX, name, labels, value);
}

void metrics_label(struct buf *labels, const char *key, const char *value)
{
    buf_printf(labels, "%s%s=\"", labels->len ? "," : "", key);
    for (; *value; value++) {
        if (*value == '\n')
            buf_append(labels, "\\n", 2);
        else if (*value == '"' || *value == '\\')
            buf_printf(labels, "\\%c", *value);
        else
            buf_append(labels, value, 1);
    }
    buf_append(labels, "\"", 1);
}

static void write_counter(struct buf *out, const char *name, const char *help, uint64_t value)
{
    metrics_head(out, name, "counter", help);
    metrics_sample_int(out, name, "", value);
}

static void write_histogram(struct buf *out, const char *name, const char *help, const struct histogram *h)
{
    char full[96], labels[48];
    uint64_t below = 0;
    metrics_head(out, name, "histogram", help);
    snprintf(full, sizeof(full), "%s_bucket", name);
    for (size_t i = 0; i < h->n_bounds; i++) {
        below += h->counts[i];
        snprintf(labels, sizeof(labels), "le=\"%g\"", h->bounds[i]);
        metrics_sample_int(out, full, labels, below);
    }
    metrics_sample_int(out, full, "le=\"+Inf\"", h->n);
    snprintf(full, sizeof(full), "%s_sum", name);
    metrics_sample(out, full, "", h->sum);
    snprintf(full, sizeof(full), "%s_count", name);
    metrics_sample_int(out, full, "", h->n);
}

static void write_requests(const struct metrics *m, struct buf *out)
{
    static const char *const endpoints[ENDPOINTS] = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/metrics", "other"};
    metrics_head(out, "http_requests_total", "counter", "HTTP requests answered, by endpoint and class of status.");
    for (int e = 0; e < ENDPOINTS; e++)
        for (int c = 0; c < 6; c++) {
            char labels[96];
            snprintf(labels, sizeof(labels), "endpoint=\"%s\",status=\"%dxx\"", endpoints[e], c);
            if (m->requests[e][c])
                metrics_sample_int(out, "http_requests_total", labels, m->requests[e][c]);
        }
}

static void write_finished(const struct metrics *m, struct buf *out)
{
    static const char *const reasons[FINISHES] = {"stop", "length", "abort", "error"};
    metrics_head(out, "request_success_total", "counter", "Answers that ended, by reason.");
    for (int i = 0; i < FINISHES; i++) {
        char labels[48];
        snprintf(labels, sizeof(labels), "finished_reason=\"%s\"", reasons[i]);
        metrics_sample_int(out, "request_success_total", labels, m->finished[i]);
    }
}

void metrics_write(const struct metrics *m, struct buf *out)
{
    write_requests(m, out);
    write_finished(m, out);
    write_counter(out, "prompt_tokens_total", "Prompt tokens of requests that were prefilled.", m->prompt_tokens);
    write_counter(out, "generation_tokens_total", "Tokens generated.", m->generation_tokens);
    write_counter(out, "prefix_cache_queries_total", "Prompt tokens looked up in the pool.", m->prefix_queries);
    write_counter(out, "prefix_cache_hits_total", "Prompt tokens that came from the pool.", m->prefix_hits);
    write_counter(out, "pool_loaded_bytes_total", "Bytes of blocks in the pool that prompts started from.", m->bytes_loaded);
    write_counter(out, "pages_attended_bytes_total", "Bytes of the slow tier's sub-pages that decode steps attended, wherever they lay.", m->bytes_attended);
    write_counter(out, "pages_missed_bytes_total", "Of them those in the pool that the device's page cache did not have.", m->bytes_missed);
    write_counter(out, "pool_written_bytes_total", "Bytes that workers wrote to the pool.", m->pool_written_bytes);
    write_counter(out, "unknown_fields_total", "Fields of request bodies that were ignored.", m->unknown_fields);
    write_histogram(out, "time_to_first_token_seconds", "From a whole request to its first token.", &m->ttft);
    write_histogram(out, "inter_token_latency_seconds", "Between two tokens of an answer.", &m->itl);
    write_histogram(out, "e2e_request_latency_seconds", "From a whole request to the end of its answer.", &m->e2e);
    write_histogram(out, "request_queue_time_seconds", "Waiting in the worker for prefill to begin.", &m->queue);
    write_histogram(out, "request_prefill_time_seconds", "Prefill.", &m->prefill);
    write_histogram(out, "request_decode_time_seconds", "From the first token to the last.", &m->decode);
    write_histogram(out, "request_prompt_tokens", "Prompt tokens of a request.", &m->prompt_size);
    write_histogram(out, "request_generation_tokens", "Tokens of an answer.", &m->answer_size);
}
