/* What goes on beside the computation, on the emulated GPU over a real kvstore: cached blocks that come in and hidden states that come and go while layers are computed. A wait that is missing
 * shows as other bits under some order of the streams, so each run is made under several. */
#include "proto/block_layout.h"
#include "tests/simt/pool_side.h"
#include "tests/simt/simt.h"
#include "worker/cache/memory_plan.h"
#include "worker/cache/scorer.h"
#include "worker/cache/selector.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

kernel_backend_fn tidepool_cuda_backend;

/* Three of its blocks can be found; 36 tokens are left to compute then, in five chunks, so that a ring of three wraps. */
enum { PROMPT = 420, ANSWER = 2, CACHED = 384, LAYERS = 3, CHUNK = 8 };

static int32_t tokens[PROMPT + ANSWER];
static const struct fixture_run prompt_only = {.tokens = tokens, .n_prompt = PROMPT}, with_answer = {.tokens = tokens, .n_prompt = PROMPT, .n_decode = ANSWER};

static void setup(void)
{
    fixture_tokens(7, tokens, PROMPT + ANSWER);
    store_fixture_init(&side_store, "16M", 60);
}
static void teardown(void)
{
    store_fixture_fini(&side_store);
}
TestSuite(overlap_emulated, .init = setup, .fini = teardown, .timeout = 200);

static struct engine_config config_of(enum bridge_place bridge, size_t load_staging, int chunk)
{
    struct engine_config config = fixture_config();
    config.bridge = bridge;
    config.load_staging = load_staging;
    config.chunk = chunk;
    config.scorer = &scorer_minmax; /* summaries are read from the pool's blocks as soon as a layer is done */
    return config;
}

/* A selector that observes all queries starts from nothing, so the prompt's blocks are read from the pool chunk by chunk. */
static void behind_the_prefix(struct side *side)
{
    struct engine_config plain = config_of(BRIDGE_DEVICE, 0, 210), config = config_of(BRIDGE_DEVICE, 0, 130);
    struct sequence_stats stats;
    plain.selector = config.selector = &selector_h2o;
    float *want = side_logits(side, &plain, &prompt_only, false, &stats), *logits = side_logits(side, &config, &prompt_only, true, &stats);
    cr_expect(stats.n_cached == 0 && stats.bytes_loaded > 0);
    fixture_expect_same(want, logits, 1, "behind the prefix");
    free(logits);
    free(want);
}

/* Without pool and bridge, then cold and warm with all that overlaps: one slice an event, so that the ring of two wraps in each layer, and a ring for the whole layer. */
static void all_ways(uint64_t seed, bool threads)
{
    const struct {
        enum bridge_place bridge;
        size_t load_staging;
        int chunk, n_cached;
    } ways[] = {{BRIDGE_HOST, 0, 100, 0}, {BRIDGE_HOST, 1, CHUNK, CACHED}, {BRIDGE_HOST, 0, CHUNK, CACHED}, {BRIDGE_DEVICE, 1, 20, CACHED}};
    const struct engine_config plain = config_of(BRIDGE_DEVICE, 0, 210);
    struct sequence_stats stats;
    struct side side;
    simt_configure(seed, threads);
    side_open(&side, tidepool_cuda_backend(), LAYERS, 0);
    float *want = side_logits(&side, &plain, &with_answer, false, &stats);
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
        const struct engine_config config = config_of(ways[i].bridge, ways[i].load_staging, ways[i].chunk);
        float *logits = side_logits(&side, &config, &with_answer, true, &stats);
        cr_expect_eq(stats.n_cached, ways[i].n_cached, "way %zu: %d cached", i, stats.n_cached);
        fixture_expect_same(want, logits, 1 + ANSWER, "beside the computation");
        free(logits);
    }
    free(want);
    behind_the_prefix(&side);
    side_close(&side);
}

Test(overlap_emulated, natural_order)
{
    all_ways(0, false);
}
Test(overlap_emulated, streams_in_turns)
{
    all_ways(1, false);
}
Test(overlap_emulated, one_stream_after_the_other)
{
    all_ways(2, false);
}
Test(overlap_emulated, a_thread_for_each_stream)
{
    all_ways(3, true);
}

/* The device's part of a bridge on the host, and the staging of cached slices, are what was planned. */
Test(overlap_emulated, peaks_are_planned_to_the_byte)
{
    const struct engine_config config = config_of(BRIDGE_HOST, 0, 100);
    struct device_memory_stats stats;
    struct memory_plan plan;
    struct block_layout layout;
    struct error err;
    struct side side;
    side_open(&side, tidepool_cuda_backend(), LAYERS, 0);
    struct model *m = &side.f.model;
    const struct memory_plan_params params = {
        .model = &m->config, .engine = config, .dev = m->dev, .ops = m->ops, .device = m->device, .stream = m->stream, .n_prompt = PROMPT, .pool = true};
    cr_assert(memory_plan_init(&params, &plan, &err) >= 0, "%s", err.text);
    cr_expect_eq(plan.peak[MEM_BRIDGE], (size_t)2 * 100 * TINY_DIM * sizeof(float));
    cr_expect_eq(plan.host_bridge, (size_t)PROMPT * TINY_DIM * sizeof(float));
    cr_assert_eq(block_layout_init(&layout, config.format, LAYERS, TINY_KV_HEADS, TINY_HEAD_DIM), 0);
    for (int warm = 0; warm < 2; warm++) {
        struct engine *engine = fixture_engine(&side.f, &config, side.client);
        m->dev->reset_peaks(m->device);
        struct sequence *seq = fixture_prefilled(engine, &prompt_only);
        m->dev->memory_stats(m->device, &stats);
        const size_t slices = warm ? CACHED / BLOCK_TOKENS * ((layout.slice_bytes[1] + 63) / 64 * 64) : 0, bridge = (size_t)(warm ? PROMPT - CACHED : 200) * TINY_DIM * sizeof(float);
        cr_expect_eq(stats.peak[MEM_STAGING], plan.peak[MEM_STAGING] + slices, "warm %d: %zu", warm, stats.peak[MEM_STAGING]);
        cr_expect_eq(stats.peak[MEM_BRIDGE], bridge, "warm %d: %zu", warm, stats.peak[MEM_BRIDGE]);
        sequence_free(seq);
        engine_free(engine);
    }
    side_close(&side);
}

/* A sequence that ends after any of its units, with copies of all sorts on their way: when its blocks are given back nothing writes to them any more, and those that are there are whole. */
static void cancelled(uint64_t seed, bool threads)
{
    const struct engine_config config = config_of(BRIDGE_HOST, 1, CHUNK), cold = config_of(BRIDGE_HOST, 0, 100);
    const struct sequence_request request = {.prompt = tokens, .n_prompt = PROMPT, .max_new = 1};
    struct sequence_stats stats;
    struct error err;
    struct side side;
    simt_configure(seed, threads);
    side_open(&side, tidepool_cuda_backend(), LAYERS, 0);
    free(side_logits(&side, &cold, &prompt_only, true, &stats));
    float *want = side_logits(&side, &cold, &prompt_only, true, &stats);
    struct engine *engine = fixture_engine(&side.f, &config, side.client);
    uint8_t *before = malloc(side.pool_bytes);
    for (int n_units = 0;; n_units += 3) {
        struct sequence *seq;
        int r = 1;
        cr_assert(sequence_create(engine, &request, &seq, &err) >= 0, "%s", err.text);
        for (int i = 0; r > 0 && i < n_units; i++)
            r = sequence_prefill_step(seq);
        cr_assert(r >= 0);
        sequence_free(seq);
        memcpy(before, side.pool, side.pool_bytes);
        cr_assert_eq(side.f.dev->stream_sync(side.f.stream), 0);
        cr_expect_eq(memcmp(before, side.pool, side.pool_bytes), 0, "%d units", n_units);
        if (r == 0)
            break;
    }
    free(before);
    engine_free(engine);
    float *logits = side_logits(&side, &config, &prompt_only, true, &stats);
    cr_expect_eq(stats.n_cached, CACHED);
    fixture_expect_same(want, logits, 1, "after cancellations");
    free(logits);
    free(want);
    side_close(&side);
}

Test(overlap_emulated, cancelled_in_turns)
{
    cancelled(5, false);
}
Test(overlap_emulated, cancelled_with_threads)
{
    cancelled(0, true);
}

/* A prompt that ends while its blocks leave: those whose last layer was computed are sealed when they have left, and found by the next run of it; nothing else is. */
Test(overlap_emulated, cancelled_while_blocks_leave)
{
    const struct engine_config config = config_of(BRIDGE_HOST, 0, BLOCK_TOKENS), plain = config_of(BRIDGE_DEVICE, 0, 210);
    const int per_layer = 5; /* units: four chunks, and the selection */
    struct sequence_stats stats;
    struct error err;
    struct side side;
    simt_configure(1, false);
    side_open(&side, tidepool_cuda_backend(), 2, 0);
    for (int n_chunks = 1; n_chunks <= 3; n_chunks += 2) {
        const struct sequence_request request = {.prompt = tokens, .n_prompt = PROMPT};
        struct sequence *seq;
        fixture_tokens(100 + (uint64_t)n_chunks, tokens, PROMPT); /* found by nobody before */
        struct engine *engine = fixture_engine(&side.f, &config, side.client);
        cr_assert(sequence_create(engine, &request, &seq, &err) >= 0, "%s", err.text);
        for (int i = 0; i < per_layer + n_chunks; i++)
            cr_assert_eq(sequence_prefill_step(seq), 1);
        sequence_free(seq);
        engine_free(engine);
        float *want = side_logits(&side, &plain, &prompt_only, false, &stats);
        float *logits = side_logits(&side, &config, &prompt_only, true, &stats);
        cr_expect_eq(stats.n_cached, n_chunks * BLOCK_TOKENS, "%d chunks: %d cached", n_chunks, stats.n_cached);
        fixture_expect_same(want, logits, 1, "after a cancellation");
        free(logits);
        free(want);
    }
    side_close(&side);
}

/* Auto is the device where the request fits there, the host where it does not, and what does not fit either way is refused. */
Test(overlap_emulated, auto_takes_the_host_when_memory_is_short)
{
    struct engine_config config = config_of(BRIDGE_DEVICE, 0, 64);
    struct device_memory_stats stats;
    struct error err;
    struct side side;
    side_open(&side, tidepool_cuda_backend(), 2, 0);
    struct engine *engine = fixture_engine(&side.f, &config, NULL);
    const size_t fixed = engine_workspace_bytes(engine), on_device = engine_sequence_bytes(engine, PROMPT, 0);
    engine_free(engine);
    float *want = side_logits(&side, &config, &prompt_only, false, &(struct sequence_stats){0});
    config.bridge = BRIDGE_HOST;
    engine = fixture_engine(&side.f, &config, NULL);
    const size_t on_host = engine_sequence_bytes(engine, PROMPT, 0);
    engine_free(engine);
    cr_assert_gt(on_device, on_host);
    config.bridge = BRIDGE_AUTO;
    for (int i = 0; i < 3; i++) {
        config.memory_limit = fixed + (i == 0 ? on_device : i == 1 ? on_device - 1 : on_host - 1);
        engine = fixture_engine(&side.f, &config, NULL);
        const int r = engine_admits(engine, PROMPT, 0, &err);
        cr_expect_eq(r, i < 2 ? 1 : -E2BIG, "%d: %d", i, r);
        cr_expect_eq(engine_sequence_bytes(engine, PROMPT, 0), i == 0 ? on_device : on_host);
        side.f.dev->reset_peaks(side.f.device);
        if (r == 1) {
            float *logits = fixture_logits(engine, &prompt_only, NULL);
            fixture_expect_same(want, logits, 1, "auto");
            free(logits);
        }
        side.f.dev->memory_stats(side.f.device, &stats);
        cr_expect_eq(stats.peak[MEM_BRIDGE], i == 2 ? 0 : (size_t)(i == 0 ? PROMPT : 2 * 64) * TINY_DIM * sizeof(float));
        engine_free(engine);
    }
    free(want);
    side_close(&side);
}
