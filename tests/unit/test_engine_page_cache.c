/* The page cache in the engine: what is loaded, attended and fetched is counted apart, and no size of the cache changes a bit. */
#include "tests/unit/engine_fixture.h"
#include "tests/unit/fake_kv_client.h"
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { N_PROMPT = 900, N_DECODE = 60, N_TOKENS = N_PROMPT + N_DECODE, N_ROWS = N_DECODE + 1 };

static int32_t tokens[N_TOKENS];
static const struct fixture_run run = {.tokens = tokens, .n_prompt = N_PROMPT, .n_decode = N_DECODE};
static struct fixture f;
static struct kv_client *store;

static void setup(void)
{
    fixture_tokens(21, tokens, N_TOKENS);
    cr_assert(fixture_open(&f, (struct fixture_params){0}));
    store = fake_store_create();
    fake_store_answer(store, (struct fake_answers){.lookup_max = -1, .full_from = -1});
}
static void teardown(void)
{
    fixture_expect_no_memory(&f);
    fake_store_free(store);
    fixture_close(&f);
}
TestSuite(engine_page_cache, .init = setup, .fini = teardown);

static struct engine_config config_of(size_t page_cache)
{
    struct engine_config config = fixture_config();
    config.page_cache = page_cache;
    config.budget = 0; /* the sinks' sub-page is slow too */
    return config;
}

static struct sequence_stats run_on(struct engine *engine, const float *want)
{
    struct sequence_stats stats;
    float *logits = fixture_logits(engine, &run, &stats);
    if (want)
        fixture_expect_same(want, logits, N_ROWS, "logits");
    free(logits);
    return stats;
}

static void expect_sums(const struct sequence_stats *s)
{
    cr_expect(s->page_hits + s->page_misses == s->pages_attended, "every page lies in the pool");
    cr_expect(s->bytes_missed <= s->bytes_attended && (s->page_misses > 0) == (s->bytes_missed > 0));
}

Test(engine_page_cache, test_private_blocks_are_no_traffic)
{
    const struct engine_config config = config_of(1 << 20);
    struct engine *engine = fixture_engine(&f, &config, NULL);
    const struct sequence_stats s = run_on(engine, NULL);
    cr_expect(s.bytes_attended > 0 && s.bytes_missed == 0 && s.page_hits == 0 && s.page_misses == 0 && s.bytes_loaded == 0);
    engine_free(engine);
}

Test(engine_page_cache, test_no_size_changes_a_bit)
{
    static const size_t sizes[] = {0, 1000, 5000, 50000, 200000, 10 << 20, PAGE_CACHE_AUTO};
    struct engine_config config = config_of(0);
    struct engine *engine = fixture_engine(&f, &config, NULL);
    float *want = fixture_logits(engine, &run, NULL);
    uint64_t missed = 0, attended = 0;
    engine_free(engine);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        config.page_cache = sizes[i];
        engine = fixture_engine(&f, &config, store);
        const struct sequence_stats s = run_on(engine, want);
        struct page_cache_stats cache;
        engine_page_cache_stats(engine, &cache);
        expect_sums(&s);
        cr_expect(cache.capacity_bytes <= sizes[i] && (cache.hits > 0) == (s.page_hits > 0));
        if (i == 0) {
            attended = s.bytes_attended;
            cr_expect(s.bytes_missed == attended && s.page_hits == 0, "without a cache everything is fetched");
        } else if (sizes[i] != PAGE_CACHE_AUTO) {
            cr_expect(s.bytes_attended == attended && (i == 1 || s.bytes_missed <= missed), "%zu: %zu bytes missed", sizes[i], (size_t)s.bytes_missed);
        } else {
            cr_expect(cache.capacity_bytes == 0 && s.bytes_missed == attended, "nothing says what would be left");
        }
        missed = s.bytes_missed;
        engine_free(engine);
    }
    free(want);
}

/* What one sequence fetched the next one finds, as far as it attends the same pages: all of them, since it does the same. */
Test(engine_page_cache, test_sequences_share_it)
{
    const struct engine_config config = config_of(10 << 20);
    struct engine *engine = fixture_engine(&f, &config, store);
    const struct sequence_stats first = run_on(engine, NULL), second = run_on(engine, NULL);
    struct page_cache_stats cache;
    engine_page_cache_stats(engine, &cache);
    expect_sums(&first);
    cr_expect(first.bytes_loaded == 0 && first.page_misses > 0 && first.page_hits > 0);
    cr_expect(second.bytes_loaded > 0 && second.page_misses == 0 && second.bytes_missed == 0 && second.page_hits == second.pages_attended);
    cr_expect(cache.used_bytes >= first.bytes_missed && cache.evictions == 0);
    engine_free(engine);
}

/* Every slow sub-page is fetched once: 7 blocks of the 960 tokens become slow, in each layer and KV head; the sinks' is bf16. */
Test(engine_page_cache, test_each_page_is_fetched_once)
{
    struct engine_config config = config_of(10 << 20);
    config.fetch = INT32_MAX;
    struct engine *engine = fixture_engine(&f, &config, store);
    const struct sequence_stats s = run_on(engine, NULL);
    struct engine_retrieval r;
    engine_retrieval(engine, &r);
    cr_expect_eq(s.page_misses, 3 * TINY_KV_HEADS * 7 * BLOCK_SUBPAGES, "%llu", (unsigned long long)s.page_misses);
    cr_expect_eq(s.bytes_missed, 3 * TINY_KV_HEADS * ((7 * BLOCK_SUBPAGES - 1) * r.subpage_bytes + SUBPAGE_TOKENS * TINY_HEAD_DIM * 2 * sizeof(bf16_t)));
    engine_free(engine);
}

/* Other tokens are other pages. */
Test(engine_page_cache, test_other_prompts_find_nothing)
{
    const struct engine_config config = config_of(10 << 20);
    struct engine *engine = fixture_engine(&f, &config, store);
    const struct sequence_stats first = run_on(engine, NULL);
    tokens[0] = (tokens[0] + 1) % TINY_VOCAB;
    const struct sequence_stats other = run_on(engine, NULL);
    cr_expect(first.page_misses > 0 && other.page_misses > 0 && other.bytes_loaded == 0);
    tokens[0] = (tokens[0] + TINY_VOCAB - 1) % TINY_VOCAB;
    const struct sequence_stats again = run_on(engine, NULL);
    cr_expect(again.page_misses == 0);
    engine_free(engine);
}

/* The cache takes what admission leaves, gives it up to a sequence, and gets it back. */
Test(engine_page_cache, test_admission_comes_first)
{
    struct engine_config config = config_of(PAGE_CACHE_AUTO);
    struct page_cache_stats stats;
    struct engine *probe = fixture_engine(&f, &config, store);
    const size_t fixed = engine_workspace_bytes(probe), sequence = engine_sequence_bytes(probe, N_PROMPT, N_DECODE);
    struct engine_retrieval r;
    engine_retrieval(probe, &r);
    engine_free(probe);
    config.memory_limit = fixed + sequence + 40 * r.subpage_bytes;
    struct engine *engine = fixture_engine(&f, &config, store);
    engine_page_cache_stats(engine, &stats);
    cr_expect_eq(stats.capacity_bytes, (sequence / r.subpage_bytes + 40) * r.subpage_bytes);
    struct sequence *seq = fixture_prefilled(engine, &run);
    fixture_decode(engine, seq, tokens[N_PROMPT]);
    engine_page_cache_stats(engine, &stats);
    cr_expect(stats.used_bytes > 0 && stats.capacity_bytes < sequence + 40 * r.subpage_bytes);
    cr_expect(engine_admits(engine, N_PROMPT, N_DECODE, NULL) == 0, "what the first one holds is not the cache's to give");
    sequence_free(seq);
    engine_page_cache_stats(engine, &stats);
    cr_expect_eq(stats.capacity_bytes / r.subpage_bytes, (sequence + 40 * r.subpage_bytes) / r.subpage_bytes);
    cr_expect(engine_admits(engine, N_PROMPT, N_DECODE, NULL) == 1);
    config.page_cache = 3 * r.subpage_bytes + 5;
    engine_free(engine);
    engine = fixture_engine(&f, &config, store);
    engine_page_cache_stats(engine, &stats);
    cr_expect_eq(stats.capacity_bytes, 3 * r.subpage_bytes, "or less, if so configured");
    engine_free(engine);
}
