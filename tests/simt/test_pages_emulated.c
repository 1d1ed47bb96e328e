/* The page cache of the emulated GPU under the engine, over a real pool: what was fetched is found again by whoever asks the same, no size of the cache changes a bit, and sequences come first. */
#include "tests/simt/pool_side.h"
#include <criterion/criterion.h>
#include <stdlib.h>

kernel_backend_fn tidepool_cuda_backend;

enum { PROMPT = 300, STEPS = 5 };

static int32_t tokens[PROMPT + STEPS];
static const struct fixture_run run = {.tokens = tokens, .n_prompt = PROMPT, .n_decode = STEPS};
static struct engine_config config;
static struct side side;

static void setup(void)
{
    fixture_tokens(5, tokens, PROMPT + STEPS);
    store_fixture_init(&side_store, "8M", 60);
    config = fixture_config();
    config.recent = 0;
    side_open(&side, tidepool_cuda_backend(), 2, 0);
}
static void teardown(void)
{
    side_close(&side);
    store_fixture_fini(&side_store);
}
TestSuite(pages_emulated, .init = setup, .fini = teardown, .timeout = 200);

Test(pages_emulated, the_second_question_fetches_nothing)
{
    struct sequence_stats first, second, without;
    struct page_cache_stats cache;
    config.page_cache = 4 << 20;
    struct engine *engine = fixture_engine(&side.f, &config, side.client);
    float *cold = fixture_logits(engine, &run, &first), *warm = fixture_logits(engine, &run, &second);
    engine_page_cache_stats(engine, &cache);
    engine_free(engine);
    cr_expect(first.n_cached == 0 && first.page_misses > 0 && first.page_hits > 0 && first.bytes_missed > 0, "%d cached, %d missed", first.n_cached, (int)first.page_misses);
    cr_expect(second.n_cached > 0 && second.page_misses == 0 && second.bytes_missed == 0 && second.page_hits == first.page_hits + first.page_misses, "%d missed", (int)second.page_misses);
    cr_expect(cache.hits == first.page_hits + second.page_hits && cache.misses == first.page_misses && cache.evictions == 0);
    cr_expect(cache.used_bytes == first.bytes_missed && cache.capacity_bytes > cache.used_bytes && cache.capacity_bytes <= config.page_cache, "%zu of %zu bytes used, %zu missed",
              cache.used_bytes, cache.capacity_bytes, (size_t)first.bytes_missed);
    fixture_expect_same(cold, warm, 1 + STEPS, "the second question");

    config.page_cache = 0;
    engine = fixture_engine(&side.f, &config, side.client);
    float *staged = fixture_logits(engine, &run, &without);
    engine_free(engine);
    cr_expect(without.page_hits == 0 && without.page_misses == first.page_hits + first.page_misses, "without slots everything is fetched");
    fixture_expect_same(cold, staged, 1 + STEPS, "without slots");
    fixture_expect_no_memory(&side.f);
    free(cold), free(warm), free(staged);
}

/* With room for one sequence and a little more, the cache has all of it between sequences and the little while one is there. */
Test(pages_emulated, sequences_come_first)
{
    struct page_cache_stats alone, beside, after;
    struct device_memory_stats memory;
    struct engine *engine = fixture_engine(&side.f, &config, side.client);
    const size_t sequence = engine_sequence_bytes(engine, PROMPT, STEPS);
    config.page_cache = PAGE_CACHE_AUTO;
    config.memory_limit = engine_workspace_bytes(engine) + sequence + (1 << 20);
    engine_free(engine);
    engine = fixture_engine(&side.f, &config, side.client);
    side.f.dev->reset_peaks(side.f.device);
    engine_page_cache_stats(engine, &alone);
    struct sequence *seq = fixture_prefilled(engine, &run);
    engine_page_cache_stats(engine, &beside);
    fixture_decode(engine, seq, tokens[PROMPT]);
    sequence_free(seq);
    engine_page_cache_stats(engine, &after);
    side.f.dev->memory_stats(side.f.device, &memory);
    cr_expect(alone.capacity_bytes > sequence / 2 && beside.capacity_bytes < alone.capacity_bytes && after.capacity_bytes == alone.capacity_bytes, "%zu, %zu, %zu", alone.capacity_bytes,
              beside.capacity_bytes, after.capacity_bytes);
    cr_expect(memory.total_peak <= side.f.at_start.total_now + config.memory_limit, "%zu of %zu", memory.total_peak, side.f.at_start.total_now + config.memory_limit);
    engine_free(engine);
    fixture_expect_no_memory(&side.f);
}
