/* Every position in exactly one tier, whatever the lengths and budgets, after the prompt and after every token. */
#include "tests/unit/engine_fixture.h"
#include <criterion/criterion.h>
#include <stdlib.h>

enum { MAX_TOKENS = 1400 };
static int32_t tokens[MAX_TOKENS];

static int below(uint64_t *state, int n)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (int)((*state >> 33) % (uint64_t)n);
}

static void run_case(struct fixture *f, const struct engine_config *config, int n_prompt, int n_decode)
{
    struct engine *engine = fixture_engine(f, config, NULL);
    struct sequence *seq = fixture_prefilled(engine, &(struct fixture_run){.tokens = tokens, .n_prompt = n_prompt, .n_decode = n_decode});
    for (int i = 0; i < n_decode; i++) {
        fixture_decode(engine, seq, tokens[n_prompt + i]);
        const int n = n_prompt + i + 1, first = coverage_recent_first(seq);
        cr_assert(n - first >= (n < config->recent ? n : config->recent), "%d recent of %d", n - first, n);
        cr_assert(config->answer_stays ? first <= n_prompt : n - first < config->recent + BLOCK_TOKENS);
    }
    const int32_t one = 0;
    cr_assert(engine_decode(engine, &seq, &one, 1) < 0, "no room was promised for one more");
    sequence_free(seq);
    engine_free(engine);
    fixture_expect_no_memory(f);
}

Test(engine_coverage, test_exact_once_random_cases)
{
    static const int budgets[] = {0, 1, 4, 5, 20, 36, 37, 64, 200, 5000};
    struct fixture f;
    uint64_t state = 99;
    cr_assert(fixture_open(&f, (struct fixture_params){.n_layers = 2}));
    fixture_tokens(3, tokens, MAX_TOKENS);
    for (int i = 0; i < 160; i++) {
        struct engine_config config = fixture_config();
        config.budget = budgets[below(&state, 10)];
        config.recent = below(&state, 3) ? below(&state, 300) : 128 * below(&state, 3);
        config.answer_stays = below(&state, 4) == 0;
        config.fetch = below(&state, 4) ? below(&state, 200) : INT32_MAX;
        config.chunk = 1 + below(&state, 300);
        config.selector = fixture_selectors[i % FIXTURE_SELECTORS];
        config.format = below(&state, KV_FORMAT_COUNT);
        config.order = below(&state, 2);
        config.values = below(&state, 2);
        run_case(&f, &config, 1 + below(&state, 900), below(&state, 300));
    }
    fixture_close(&f);
}

Test(engine_coverage, test_exact_once_at_borders)
{
    static const int lengths[] = {1, 2, 4, 5, 31, 32, 33, 36, 127, 128, 129, 159, 160, 161, 255, 256, 257, 383, 384, 512};
    struct fixture f;
    cr_assert(fixture_open(&f, (struct fixture_params){.n_layers = 1}));
    fixture_tokens(4, tokens, MAX_TOKENS);
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        for (int recent = 0; recent <= 128; recent += 32) {
            struct engine_config config = fixture_config();
            config.recent = recent;
            run_case(&f, &config, lengths[i], 140);
        }
    }
    fixture_close(&f);
}

/* With answer_stays the window never lets go of what stands behind the prompt, and everything is attended all the same. */
Test(engine_coverage, test_answer_stays_in_the_window)
{
    struct fixture f;
    struct engine_config config = fixture_config();
    struct sequence_stats stats;
    cr_assert(fixture_open(&f, (struct fixture_params){.n_layers = 1}));
    fixture_tokens(8, tokens, MAX_TOKENS);
    config.recent = 0;
    config.answer_stays = true;
    config.fetch = INT32_MAX;
    struct engine *engine = fixture_engine(&f, &config, NULL);
    struct sequence *seq = fixture_prefilled(engine, &(struct fixture_run){.tokens = tokens, .n_prompt = 512, .n_decode = 300});
    for (int i = 0; i < 300; i++)
        fixture_decode(engine, seq, tokens[512 + i]);
    sequence_stats(seq, &stats);
    cr_assert_eq(coverage_recent_first(seq), 512);
    /* Step i attends the prompt, the answer so far and itself, in each KV head. */
    cr_assert_eq(stats.tokens_attended, TINY_KV_HEADS * (300 * 512 + 300 * 301 / 2), "%llu", (unsigned long long)stats.tokens_attended);
    sequence_free(seq);
    engine_free(engine);
    fixture_expect_no_memory(&f);
    fixture_close(&f);
}

/* Sinks and the newest prompt tokens count inside the budget; those in the recent window take no row. */
Test(engine_coverage, test_kept_rows_and_budget)
{
    struct fixture f;
    struct engine_config config = fixture_config();
    int n;
    cr_assert(fixture_open(&f, (struct fixture_params){.n_layers = 1}));
    fixture_tokens(5, tokens, MAX_TOKENS);
    config.budget = 100;
    config.recent = 0;
    struct engine *engine = fixture_engine(&f, &config, NULL);

    /* 512 tokens, no recent rows at all: the newest 32 are kept. */
    struct sequence *seq = fixture_prefilled(engine, &(struct fixture_run){.tokens = tokens, .n_prompt = 512, .n_decode = 1});
    const int32_t *kept = coverage_kept(seq, 0, 1, &n);
    cr_assert(n == 100 && coverage_recent_first(seq) == 512);
    for (int i = 0; i < SELECT_SINKS; i++)
        cr_assert(kept[i] == i);
    for (int i = 0; i < SELECT_MANDATORY; i++)
        cr_assert(kept[n - 1 - i] == 511 - i);
    sequence_free(seq);

    /* 522 tokens, 10 of the newest 32 are recent. */
    seq = fixture_prefilled(engine, &(struct fixture_run){.tokens = tokens, .n_prompt = 522, .n_decode = 1});
    kept = coverage_kept(seq, 0, 0, &n);
    cr_assert(n == 90 && kept[n - 1] == 511 && kept[n - 22] == 490);
    sequence_free(seq);
    engine_free(engine);
    fixture_close(&f);
}
