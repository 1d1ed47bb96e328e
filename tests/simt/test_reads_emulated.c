/* Who touches the pool: what crosses between it and the device goes by copies, many in a call, and of the kernels only the gather of decode steps reads it. Any other that does faults here. */
#include "tests/simt/pool_side.h"
#include "tests/simt/simt.h"
#include "worker/cache/scorer.h"
#include "worker/cache/selector.h"
#include <criterion/criterion.h>
#include <signal.h>
#include <stdlib.h>

kernel_backend_fn tidepool_cuda_backend;

/* Two blocks of the prompt, which can be found but for a selector that observes all queries; the answer's fourth token completes another. */
enum { PROMPT = 380, ANSWER = 10, KNOWN = 6, LAYERS = 2, CACHED = 256, BLOCKS = CACHED / BLOCK_TOKENS };

static int32_t tokens[PROMPT + ANSWER];
static const struct fixture_run prompt_only = {.tokens = tokens, .n_prompt = PROMPT};
static struct side side;

/* ---- copies to and from the pool, counted ---- */

static struct counted {
    int n_calls, n_batches, n_pieces; /* single copies, batches and what is in them */
} counted;
static const struct device_ops *real_ops;

static bool in_pool(const void *memory)
{
    return side.pool && (uint64_t)((const uint8_t *)memory - side.pool) < side.pool_bytes;
}

static int counted_copy(struct stream *stream, void *dst, const void *src, size_t bytes)
{
    counted.n_calls += in_pool(dst) || in_pool(src);
    return real_ops->copy(stream, dst, src, bytes);
}

static int counted_rows(struct stream *stream, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t n_rows)
{
    counted.n_calls += in_pool(dst) || in_pool(src);
    return real_ops->copy_rows(stream, dst, dst_pitch, src, src_pitch, width, n_rows);
}

static int counted_batch(struct stream *stream, const struct device_copy *copies, int n)
{
    counted.n_batches++;
    for (int i = 0; i < n; i++)
        counted.n_pieces += in_pool(copies[i].dst) || in_pool(copies[i].src);
    return real_ops->copy_batch(stream, copies, n);
}

static void expect_copies(const char *what, int n_calls, int n_batches, int n_pieces)
{
    cr_expect(counted.n_calls == n_calls && counted.n_batches == n_batches && counted.n_pieces == n_pieces, "%s: %d copies, %d batches of %d; expected %d, %d of %d", what, counted.n_calls,
              counted.n_batches, counted.n_pieces, n_calls, n_batches, n_pieces);
    counted = (struct counted){0};
}

static void setup(void)
{
    static struct kernel_backend backend;
    static struct device_ops ops;
    backend = *tidepool_cuda_backend();
    real_ops = backend.device;
    ops = *backend.device;
    ops.copy = counted_copy;
    ops.copy_rows = counted_rows;
    ops.copy_batch = counted_batch;
    backend.device = &ops;
    fixture_tokens(5, tokens, PROMPT + ANSWER);
    store_fixture_init(&side_store, "8M", 60);
    side_open(&side, &backend, LAYERS, 0);
    simt_registered_readers("gather_pages");
}
static void teardown(void)
{
    simt_registered_readers(NULL);
    side_close(&side);
    store_fixture_fini(&side_store);
}
TestSuite(reads_emulated, .init = setup, .fini = teardown, .timeout = 200);

/* Goes on with the first KNOWN tokens of an answer whose block is in the pool. */
static void expect_restored(const struct engine_config *config, const float *want)
{
    const struct sequence_request request = {.prompt = tokens, .n_prompt = PROMPT, .max_new = ANSWER, .answer = tokens + PROMPT, .n_answer = KNOWN};
    struct engine *engine = fixture_engine(&side.f, config, side.client);
    float row[TINY_VOCAB];
    struct sequence_stats stats;
    struct sequence *seq;
    struct error err;
    cr_assert(sequence_create(engine, &request, &seq, &err) >= 0, "%s", err.text);
    while (sequence_prefill_step(seq) > 0)
        ;
    sequence_stats(seq, &stats);
    cr_assert_eq(stats.n_restored, 4, "%d tokens restored", stats.n_restored);
    for (int i = stats.n_restored; i < KNOWN; i++) {
        fixture_decode(engine, seq, tokens[PROMPT + i]);
        fixture_read_logits(seq, row);
        fixture_expect_same(want + (size_t)(i + 1) * TINY_VOCAB, row, 1, "restored");
    }
    sequence_free(seq);
    engine_free(engine);
}

/* Without the pool, then writing to it, then from it: the same bits. And with a whole answer, going on with it. */
static void all_ways(struct engine_config config, int n_cached, int n_decode)
{
    const struct fixture_run run = {.tokens = tokens, .n_prompt = PROMPT, .n_decode = n_decode};
    struct sequence_stats stats;
    float *want = side_logits(&side, &config, &run, false, &stats);
    for (int warm = 0; warm < 2; warm++) {
        float *got = side_logits(&side, &config, &run, true, &stats);
        cr_expect_eq(stats.n_cached, warm ? n_cached : 0);
        cr_expect_eq(stats.private_blocks, 0, "warm %d: %d private blocks", warm, stats.private_blocks);
        cr_expect_gt(stats.page_misses, 0);
        fixture_expect_same(want, got, 1 + n_decode, warm ? "warm" : "cold");
        free(got);
    }
    if (n_decode == ANSWER)
        expect_restored(&config, want);
    free(want);
}

Test(reads_emulated, blocks_of_the_prefix_and_of_the_answer)
{
    struct engine_config config = fixture_config();
    config.recent = 0; /* the restored block is slow at once */
    all_ways(config, CACHED, ANSWER);
}

/* A selector that observes all queries starts from nothing; what is in the pool already is read as the prompt gets there. */
Test(reads_emulated, blocks_behind_the_prefix_and_summaries)
{
    struct engine_config config = fixture_config();
    config.selector = &selector_h2o;
    config.scorer = &scorer_minmax;
    config.chunk = 150;
    config.recent = 40; /* the restored block is in the window */
    all_ways(config, 0, ANSWER);
}

Test(reads_emulated, exact_values)
{
    struct engine_config config = fixture_config();
    config.values = PREFILL_EXACT;
    config.recent = 0;
    for (int i = 0; i < 2; i++) {
        config.scorer = i ? &scorer_meanvar : &scorer_index2;
        all_ways(config, 0, 2);
        fixture_tokens(6, tokens, PROMPT + ANSWER); /* which nobody has seen */
    }
}

/* Where memory is short there is no ring for the prefix: then it comes through the staging area of the chunks. */
Test(reads_emulated, a_prefix_without_a_ring)
{
    struct engine_config config = fixture_config();
    struct device_memory_stats with, without;
    struct sequence_stats stats;
    float *logits[3];
    config.bridge = BRIDGE_HOST;
    config.chunk = 32;
    struct engine *engine = fixture_engine(&side.f, &config, side.client);
    const size_t enough = engine_workspace_bytes(engine) + engine_sequence_bytes(engine, PROMPT, 0);
    engine_free(engine);
    logits[0] = side_logits(&side, &config, &prompt_only, true, &stats);
    side.f.dev->reset_peaks(side.f.device);
    logits[1] = side_logits(&side, &config, &prompt_only, true, &stats);
    cr_expect_eq(stats.n_cached, CACHED);
    side.f.dev->memory_stats(side.f.device, &with);
    config.memory_limit = enough;
    side.f.dev->reset_peaks(side.f.device);
    logits[2] = side_logits(&side, &config, &prompt_only, true, &stats);
    cr_expect_eq(stats.n_cached, CACHED);
    side.f.dev->memory_stats(side.f.device, &without);
    cr_expect(without.peak[MEM_STAGING] < with.peak[MEM_STAGING], "%zu bytes, with a ring %zu", without.peak[MEM_STAGING], with.peak[MEM_STAGING]);
    fixture_expect_same(logits[0], logits[1], 1, "a ring");
    fixture_expect_same(logits[0], logits[2], 1, "no ring");
    for (int i = 0; i < 3; i++)
        free(logits[i]);
}

/* A chunk's slices leave by one call and a group of cached ones comes by one; indices cost none. */
Test(reads_emulated, few_calls_copy_many_slices)
{
    struct engine_config config = fixture_config();
    struct sequence_stats stats;
    config.recent = 0;
    config.chunk = 400;
    free(side_logits(&side, &config, &prompt_only, true, &stats));
    expect_copies("cold", 0, LAYERS, LAYERS * BLOCKS);
    free(side_logits(&side, &config, &prompt_only, true, &stats));
    cr_expect_eq(stats.n_cached, CACHED);
    expect_copies("warm", 0, LAYERS, LAYERS * BLOCKS);
    config.selector = &selector_h2o;
    free(side_logits(&side, &config, &prompt_only, true, &stats));
    expect_copies("behind the prefix", 0, LAYERS, LAYERS * BLOCKS);
}

static uint64_t allocations(void)
{
    struct device_memory_stats stats;
    side.f.dev->memory_stats(side.f.device, &stats);
    return stats.n_allocations;
}

/* Decodes the answer. Where the answer's block is made, and where it has moved to the pool, nothing is allocated or given back when `same`: either may wait for the device. */
static void decode_answer(struct engine *engine, struct sequence *seq, bool same)
{
    const uint64_t before = allocations();
    struct sequence_stats stats;
    for (int i = 0; i < ANSWER; i++) {
        fixture_decode(engine, seq, tokens[PROMPT + i]);
        loop_poll(side_store.loop);
        cr_expect(!same || allocations() == before, "step %d", i);
    }
    sequence_stats(seq, &stats);
    cr_expect(stats.private_blocks == 0, "the block has moved");
}

Test(reads_emulated, steps_use_memory_again)
{
    struct engine_config config = fixture_config();
    config.recent = 0;
    struct engine *engine = fixture_engine(&side.f, &config, side.client);
    const struct fixture_run run = {.tokens = tokens, .n_prompt = PROMPT, .n_decode = ANSWER};
    struct sequence *first = fixture_prefilled(engine, &run), *second = fixture_prefilled(engine, &run);
    decode_answer(engine, first, false);
    decode_answer(engine, second, true);
    sequence_free(first);
    sequence_free(second);
    struct device_memory_stats stats;
    side.f.dev->memory_stats(side.f.device, &stats);
    cr_expect_eq(stats.now[MEM_INDEX], 0);
    engine_free(engine);
}

/* The test tested: with a kernel that reads the pool where it lies it does not pass. */
Test(reads_emulated, any_other_kernel_faults, .signal = SIGABRT)
{
    const struct engine_config config = fixture_config();
    const struct fixture_run one_step = {.tokens = tokens, .n_prompt = PROMPT, .n_decode = 1};
    struct sequence_stats stats;
    simt_registered_readers("nobody");
    free(side_logits(&side, &config, &one_step, true, &stats));
}
