/* Decoding: sequences with a question each behind one document. For each fetch budget and size of the page cache an engine; its batches grow, so that every sequence is prefilled once. */
#include "tests/bench/gpu/gpu_bench.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { QUESTION_TOKENS = 64, WARM_STEPS = 4, DOCUMENT = 1000 };

struct decode_run {
    struct gpu_bench *b;
    struct engine *engine;
    struct sequence **seqs; /* [n_seqs] prefilled */
    int32_t *next;
    struct sample_row *rows;
    int n_seqs, max_batch, max_new;
    struct error *err;
};

struct traffic {
    uint64_t hits, misses, bytes_missed, bytes_attended;
};

static struct traffic traffic_of(const struct decode_run *run)
{
    struct traffic t = {0};
    for (int i = 0; i < run->n_seqs; i++) {
        struct sequence_stats s;
        sequence_stats(run->seqs[i], &s);
        t.hits += s.page_hits;
        t.misses += s.page_misses;
        t.bytes_missed += s.bytes_missed;
        t.bytes_attended += s.bytes_attended;
    }
    return t;
}

static int add_sequence(struct decode_run *run)
{
    struct gpu_bench *b = run->b;
    const int n = (int)b->decode_context;
    int32_t *tokens = malloc((size_t)n * sizeof(*tokens));
    if (!tokens)
        return error_set(run->err, -ENOMEM, "no memory for %d tokens", n);
    bench_prompt(b, DOCUMENT, (uint64_t)run->n_seqs, n, QUESTION_TOKENS, tokens);
    const struct sequence_request request = {.prompt = tokens, .n_prompt = n, .max_new = run->max_new};
    int r = sequence_create(run->engine, &request, &run->seqs[run->n_seqs], run->err);
    free(tokens);
    if (r < 0)
        return r;
    struct sequence *seq = run->seqs[run->n_seqs++];
    while ((r = sequence_prefill_step(seq)) > 0)
        ;
    return r < 0 ? error_set(run->err, r, "prefill of sequence %d: %s", run->n_seqs, strerror(-r)) : 0;
}

/* The next token of each sequence, greedy. */
static int next_tokens(struct decode_run *run)
{
    const struct gpu_bench *b = run->b;
    for (int i = 0; i < run->n_seqs; i++) {
        run->rows[i] = (struct sample_row){.logits = sequence_logits(run->seqs[i]), .params = {.top_p = 1, .repetition_penalty = 1}};
        if (!run->rows[i].logits)
            return -ERANGE;
    }
    int r = b->ops->sample(b->stream, run->rows, run->n_seqs, b->model->config.n_vocab);
    for (int i = 0; r >= 0 && i < run->n_seqs; i++) {
        r = run->rows[i].status;
        run->next[i] = run->rows[i].result.token;
    }
    return r;
}

/* As a server does: the next tokens are known when the logits are. */
static int steps(struct decode_run *run, int n)
{
    struct gpu_bench *b = run->b;
    int r = 0;
    for (int step = 0; r >= 0 && step < n; step++) {
        r = next_tokens(run);
        if (r >= 0)
            r = engine_decode(run->engine, run->seqs, run->next, run->n_seqs);
    }
    if (r >= 0)
        r = b->dev->stream_sync(b->stream);
    return r < 0 ? error_set(run->err, r, "decoding %d sequences: %s", run->n_seqs, strerror(-r)) : 0;
}

static int measure_batch(struct decode_run *run, int64_t fetch, int64_t cache)
{
    const struct gpu_bench *b = run->b;
    int r = steps(run, WARM_STEPS);
    if (r < 0)
        return r;
    const struct traffic before = traffic_of(run);
    struct step_stats steps_before, steps_after;
    engine_step_stats(run->engine, &steps_before);
    const double start = bench_seconds();
    r = steps(run, (int)b->decode_steps);
    if (r < 0)
        return r;
    const double seconds = bench_seconds() - start, tokens = (double)(b->decode_steps * run->n_seqs);
    const struct traffic after = traffic_of(run);
    engine_step_stats(run->engine, &steps_after);
    const double replayed = (double)(steps_after.replays - steps_before.replays) / (double)b->decode_steps;
    const uint64_t pages = after.hits - before.hits + after.misses - before.misses;
    const double hit_rate = pages ? (double)(after.hits - before.hits) / (double)pages : 0;
    printf("| %lld | %.1f | %d | %.1f | %.2f | %.2f | %.2f | %.3f | %.2f |\n", (long long)fetch, (double)cache / (1 << 30), run->n_seqs, tokens / seconds, seconds * 1e3 / (double)b->decode_steps,
           (double)(after.bytes_attended - before.bytes_attended) / tokens / 1e6, (double)(after.bytes_missed - before.bytes_missed) / tokens / 1e6, hit_rate, replayed);
    fflush(stdout);
    if (b->json)
        fprintf(stderr, "{\"figure\": \"decode\", \"context\": %lld, \"fetch\": %lld, \"page_cache\": %lld, \"batch\": %d, \"tokens_per_s\": %.3f, \"bytes_missed_per_token\": %.0f, \"hit_rate\": %.4f, \"replayed\": %.4f}\n",
                (long long)b->decode_context, (long long)fetch, (long long)cache, run->n_seqs, tokens / seconds, (double)(after.bytes_missed - before.bytes_missed) / tokens, hit_rate, replayed);
    return 0;
}

static int run_batches(struct decode_run *run, int64_t fetch, int64_t cache)
{
    const struct gpu_bench *b = run->b;
    int r = 0;
    for (int i = 0; r >= 0 && i < b->batches.n; i++) {
        while (r >= 0 && run->n_seqs < (int)b->batches.values[i])
            r = add_sequence(run);
        if (r >= 0)
            r = measure_batch(run, fetch, cache);
    }
    return r;
}

static int run_engine(struct gpu_bench *b, int64_t fetch, int64_t cache, struct error *err)
{
    const int max_batch = (int)b->batches.values[b->batches.n - 1];
    struct decode_run run = {.b = b, .max_batch = max_batch, .max_new = b->batches.n * (int)(b->decode_steps + WARM_STEPS), .err = err};
    struct engine_config config = b->engine;
    config.chunk = (int)b->chunks.values[b->chunks.n - 1];
    config.fetch = (int)fetch;
    config.page_cache = (size_t)cache;
    config.max_batch = max_batch;
    config.max_context = (int)b->decode_context + run.max_new;
    run.seqs = calloc((size_t)max_batch, sizeof(*run.seqs));
    run.next = calloc((size_t)max_batch, sizeof(*run.next));
    run.rows = calloc((size_t)max_batch, sizeof(*run.rows));
    int r = run.seqs && run.next && run.rows ? engine_create(&config, b->model, b->store, &run.engine, err) : error_set(err, -ENOMEM, "no memory for %d sequences", max_batch);
    if (r >= 0)
        r = run_batches(&run, fetch, cache);
    for (int i = 0; i < run.n_seqs; i++)
        sequence_free(run.seqs[i]);
    engine_free(run.engine);
    free(run.rows);
    free(run.next);
    free(run.seqs);
    return r;
}

int bench_decode(struct gpu_bench *b, struct error *err)
{
    int r = 0, failed = 0;
    if (b->batches.n == 0)
        return 0;
    printf("\nDecoding behind %lld tokens, a document and a question of %d tokens each\n\n", (long long)b->decode_context, QUESTION_TOKENS);
    printf("| fetch | page cache, GiB | sequences | tokens/s | step, ms | MB attended a token | MB over the bus a token | hit rate | replayed |\n|---|---|---|---|---|---|---|---|---|\n");
    for (int i = 0; r >= 0 && i < b->fetches.n; i++)
        for (int j = 0; r >= 0 && j < b->page_caches.n; j++) {
            char row[64];
            r = run_engine(b, b->fetches.values[i], b->page_caches.values[j], err);
            snprintf(row, sizeof(row), "%lld | %.1f", (long long)b->fetches.values[i], (double)b->page_caches.values[j] / (1 << 30));
            if (r < 0 && bench_goes_on(r, row, err)) {
                failed = r;
                r = 0;
            }
        }
    return r >= 0 && failed < 0 ? error_set(err, failed, "decode: a row failed, see the table") : r;
}
