/* Scorers and fetch units in the engine: they change what is attended and nothing else. Summaries are checked after every step by coverage_check. */
#include "tests/unit/engine_fixture.h"
#include "worker/cache/scorer.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { N_PROMPT = 600, N_DECODE = 140, N_TOKENS = N_PROMPT + N_DECODE, N_ROWS = N_DECODE + 1, N_LAYERS = 2 };

static const struct scorer_ops *const scorers[] = {&scorer_index2, &scorer_minmax, &scorer_mean, &scorer_meanvar, &scorer_recent, &scorer_oracle};
enum { N_SCORERS = sizeof(scorers) / sizeof(scorers[0]) };
static int32_t tokens[N_TOKENS];

static float *logits_of(struct fixture_params params, const struct engine_config *config, struct sequence_stats *ret_stats)
{
    struct fixture f;
    if (!fixture_open(&f, params))
        cr_assert(fixture_open(&f, (struct fixture_params){.n_layers = N_LAYERS, .isa = CPU_ISA_PLAIN}));
    fixture_tokens(11, tokens, N_TOKENS);
    struct engine *engine = fixture_engine(&f, config, NULL);
    float *logits = fixture_logits(engine, &(struct fixture_run){.tokens = tokens, .n_prompt = N_PROMPT, .n_decode = N_DECODE}, ret_stats);
    engine_free(engine);
    fixture_expect_no_memory(&f);
    fixture_close(&f);
    return logits;
}

static struct engine_config config_of(int scorer, int unit)
{
    struct engine_config config = fixture_config();
    config.scorer = scorers[scorer];
    config.fetch_unit = unit;
    return config;
}

/* Chunks, threads, order and instruction set (kernel tests have them all) change no bit, whoever scores. */
Test(engine_scorers, test_logits_are_the_same_bits_every_way)
{
    for (int i = 0; i < N_SCORERS; i++) {
        for (int unit = SUBPAGE_TOKENS; unit <= BLOCK_TOKENS; unit += BLOCK_TOKENS - SUBPAGE_TOKENS) {
            struct engine_config config = config_of(i, unit);
            float *want = logits_of((struct fixture_params){.n_layers = N_LAYERS}, &config, NULL);
            config.chunk = 200;
            config.order = PREFILL_CHUNK_MAJOR;
            float *got = logits_of((struct fixture_params){.n_layers = N_LAYERS, .n_threads = 3, .isa = CPU_ISA_AVX2}, &config, NULL);
            fixture_expect_same(want, got, N_ROWS, scorers[i]->name);
            free(want);
            free(got);
        }
    }
}

/* Each scorer chooses otherwise than the default, and blocks otherwise than sub-pages; with everything attended nobody chooses. */
Test(engine_scorers, test_scorers_matter_unless_all_is_attended)
{
    struct engine_config config = config_of(0, SUBPAGE_TOKENS);
    const size_t bytes = (size_t)N_ROWS * TINY_VOCAB * sizeof(float);
    float *base = logits_of((struct fixture_params){.n_layers = N_LAYERS}, &config, NULL);
    config.fetch = INT32_MAX;
    float *all = logits_of((struct fixture_params){.n_layers = N_LAYERS}, &config, NULL);
    for (int i = 0; i < N_SCORERS; i++) {
        config = config_of(i, i ? SUBPAGE_TOKENS : BLOCK_TOKENS);
        float *got = logits_of((struct fixture_params){.n_layers = N_LAYERS}, &config, NULL);
        cr_expect(memcmp(base, got, bytes) != 0, "%s", scorers[i]->name);
        free(got);
        config.fetch = INT32_MAX;
        config.fetch_unit = BLOCK_TOKENS;
        got = logits_of((struct fixture_params){.n_layers = N_LAYERS}, &config, NULL);
        fixture_expect_same(all, got, N_ROWS, scorers[i]->name);
        free(got);
    }
    free(all);
    free(base);
}

/* Sub-pages a step: the prompt leaves 4 blocks to the slow tier, and one more leaves while decoding. */
Test(engine_scorers, test_budget_is_in_whole_units)
{
    struct engine_config config = config_of(0, BLOCK_TOKENS);
    struct sequence_stats stats;
    config.budget = 0;
    config.fetch = 129; /* two blocks */
    free(logits_of((struct fixture_params){.n_layers = N_LAYERS}, &config, &stats));
    cr_assert_eq(stats.pages_attended, (uint64_t)N_DECODE * N_LAYERS * TINY_KV_HEADS * 2 * BLOCK_SUBPAGES);
    config.fetch_unit = SUBPAGE_TOKENS;
    free(logits_of((struct fixture_params){.n_layers = N_LAYERS}, &config, &stats));
    cr_assert_eq(stats.pages_attended, (uint64_t)N_DECODE * N_LAYERS * TINY_KV_HEADS * 9);
}

Test(engine_scorers, test_configuration_is_checked_and_reported)
{
    struct fixture f;
    struct engine_config config = fixture_config();
    struct engine *engine;
    struct engine_retrieval r;
    struct error err;
    cr_assert(fixture_open(&f, (struct fixture_params){.n_layers = N_LAYERS}));
    config.fetch_unit = 64;
    cr_assert_eq(engine_create(&config, &f.model, NULL, &engine, &err), -EINVAL);
    cr_assert(strstr(err.text, "fetch_unit is 64"), "%s", err.text);
    config.fetch_unit = 0;
    config.scorer = NULL;
    config.fetch = 100;
    engine = fixture_engine(&f, &config, NULL);
    engine_retrieval(engine, &r);
    cr_expect(r.fetch_tokens == 112 && r.step_bytes == (uint64_t)N_LAYERS * TINY_KV_HEADS * 7 * r.subpage_bytes && r.index_bytes > 0 && r.summary_bytes == 0);
    engine_free(engine);
    config.fetch_unit = BLOCK_TOKENS;
    config.scorer = &scorer_mean;
    engine = fixture_engine(&f, &config, NULL);
    engine_retrieval(engine, &r);
    cr_expect(r.fetch_tokens == 128 && r.step_bytes == (uint64_t)N_LAYERS * TINY_KV_HEADS * 8 * r.subpage_bytes && r.index_bytes == 0);
    cr_expect(r.summary_bytes == TINY_HEAD_DIM * sizeof(fp16_t));
    engine_free(engine);
    config.fetch = INT32_MAX;
    engine = fixture_engine(&f, &config, NULL);
    engine_retrieval(engine, &r);
    cr_expect(r.fetch_tokens == INT32_MAX && r.step_bytes == (uint64_t)N_LAYERS * TINY_KV_HEADS * TINY_CONTEXT / SUBPAGE_TOKENS * r.subpage_bytes);
    engine_free(engine);
    fixture_close(&f);
}

Test(engine_scorers, test_scorers_are_found_by_name)
{
    for (int i = 0; i < N_SCORERS; i++) {
        cr_expect_eq(scorer_find(scorers[i]->name), scorers[i]);
        cr_expect(strstr(scorer_names(), scorers[i]->name));
        cr_expect_eq(scorers[i]->measuring_only, scorers[i] == &scorer_oracle);
    }
    cr_expect_null(scorer_find("nobody"));
}
