/* Prefill: each length with each chunk, cold (every block is coded and written to the pool) and warm (all but the last tokens come from it). */
#include "proto/option_choices.h"
#include "tests/bench/gpu/gpu_bench.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { QUESTION_TOKENS = 64 };

struct prefill_figures {
    double cold_s, warm_s;
    int warm_cached;
    uint64_t bytes_to_pool;
    struct device_memory_stats memory; /* of the cold run */
};

static int run_prompt(struct gpu_bench *b, struct engine *engine, const int32_t *tokens, int n, double *ret_s, struct sequence_stats *ret_stats, struct error *err)
{
    const struct sequence_request request = {.prompt = tokens, .n_prompt = n, .max_new = 1};
    struct sequence *seq;
    const double start = bench_seconds();
    int r = sequence_create(engine, &request, &seq, err);
    if (r < 0)
        return r;
    while ((r = sequence_prefill_step(seq)) > 0)
        ;
    if (r >= 0)
        r = b->dev->stream_sync(b->stream);
    *ret_s = bench_seconds() - start;
    sequence_stats(seq, ret_stats);
    sequence_free(seq);
    return r < 0 ? error_set(err, r, "prefill of %d tokens: %s", n, strerror(-r)) : 0;
}

static int measure(struct gpu_bench *b, int n, int chunk, enum bridge_place bridge, uint64_t document, struct prefill_figures *f, struct error *err)
{
    struct engine_config config = b->engine;
    struct engine *engine;
    struct sequence_stats stats;
    int32_t *tokens = malloc((size_t)n * sizeof(*tokens));
    if (!tokens)
        return error_set(err, -ENOMEM, "no memory for %d tokens", n);
    config.chunk = chunk;
    config.bridge = bridge;
    config.max_context = n + 1;
    config.max_batch = 1;
    int r = engine_create(&config, b->model, b->store, &engine, err);
    if (r < 0) {
        free(tokens);
        return r;
    }
    b->dev->reset_peaks(b->device);
    bench_prompt(b, document, 0, n, QUESTION_TOKENS, tokens);
    r = run_prompt(b, engine, tokens, n, &f->cold_s, &stats, err);
    f->bytes_to_pool = stats.bytes_to_pool;
    b->dev->memory_stats(b->device, &f->memory);
    if (r >= 0) {
        bench_prompt(b, document, 1, n, QUESTION_TOKENS, tokens);
        r = run_prompt(b, engine, tokens, n, &f->warm_s, &stats, err);
        f->warm_cached = stats.n_cached;
    }
    engine_free(engine);
    free(tokens);
    return r;
}

static void print_row(const struct gpu_bench *b, int n, int chunk, enum bridge_place bridge, const struct prefill_figures *f)
{
    char memory[512];
    bench_memory_text(&f->memory, memory, sizeof(memory));
    printf("| %d | %d | %s | %.3f | %.0f | %.3f | %d | %.2f | %s |\n", n, chunk, bridge_choices[bridge], f->cold_s, n / f->cold_s, f->warm_s, f->warm_cached, (double)f->bytes_to_pool / 1e9, memory);
    fflush(stdout);
    if (b->json)
        fprintf(stderr, "{\"figure\": \"prefill\", \"tokens\": %d, \"chunk\": %d, \"bridge\": \"%s\", \"cold_s\": %.6f, \"warm_s\": %.6f, \"warm_cached\": %d, \"bytes_to_pool\": %llu, \"peak_bytes\": %zu}\n", n,
                chunk, bridge_choices[bridge], f->cold_s, f->warm_s, f->warm_cached, (unsigned long long)f->bytes_to_pool, f->memory.total_peak - f->memory.now[MEM_WEIGHTS]);
}

/* The bridge has another place only on a device with memory of its own. */
int bench_prefill(struct gpu_bench *b, struct error *err)
{
    static const enum bridge_place places[] = {BRIDGE_DEVICE, BRIDGE_HOST};
    struct device_properties properties;
    uint64_t document = 0;
    int r = 0;
    int failed = 0;
    b->dev->properties(b->device, &properties);
    const int n_places = properties.host_memory ? 1 : 2;
    printf("\n| prompt | chunk | bridge | first token, s | tokens/s | warm, s | cached | GB to the pool | peak beyond the weights, MiB |\n|---|---|---|---|---|---|---|---|---|\n");
    for (int i = 0; r >= 0 && i < b->prefill_lengths.n * b->chunks.n * n_places; i++) {
        const int n = (int)b->prefill_lengths.values[i / (b->chunks.n * n_places)], chunk = (int)b->chunks.values[i / n_places % b->chunks.n];
        struct prefill_figures f = {0};
        char row[64];
        if (n_places > 1 && !b->bridges[i % n_places])
            continue;
        r = measure(b, n, chunk, places[i % n_places], ++document, &f, err);
        snprintf(row, sizeof(row), "%d | %d | %s", n, chunk, bridge_choices[places[i % n_places]]);
        if (r >= 0) {
            print_row(b, n, chunk, places[i % n_places], &f);
        } else if (bench_goes_on(r, row, err)) {
            failed = r;
            r = 0;
        }
    }
    return r >= 0 && failed < 0 ? error_set(err, failed, "prefill: a row failed, see the table") : r;
}
