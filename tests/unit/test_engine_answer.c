/* An answer that another worker began: what the pool has of it is taken as it lies, the rest is decoded again, and what comes is the same to the bit. And private blocks that
 * find their way to the pool later. */
#include "tests/unit/engine_fixture.h"
#include "tests/unit/fake_kv_client.h"
#include "worker/cache/scorer.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { N_TOTAL = 1100 };

static int32_t tokens[N_TOTAL];
static const struct fake_answers honest = {.lookup_max = -1, .full_from = -1};
static struct fixture f;
static struct kv_client *store;

static void setup(void)
{
    fixture_tokens(31, tokens, N_TOTAL);
    cr_assert(fixture_open(&f, (struct fixture_params){0}));
    store = fake_store_create();
}
static void teardown(void)
{
    fixture_expect_no_memory(&f);
    cr_expect(fake_store_n_leases(store) == 0 && fake_store_n_granted(store) == 0);
    fake_store_free(store);
    fixture_close(&f);
}
TestSuite(engine_answer, .init = setup, .fini = teardown, .timeout = 200);

/* Decodes n tokens behind a prompt and keeps the logits; the store answers after every token. */
static float *first_worker(const struct engine_config *config, int n_prompt, int n)
{
    struct engine *engine = fixture_engine(&f, config, store);
    struct sequence *seq = fixture_prefilled(engine, &(struct fixture_run){.tokens = tokens, .n_prompt = n_prompt, .n_decode = n});
    float *logits = malloc((size_t)(n + 1) * TINY_VOCAB * sizeof(float));
    cr_assert(logits);
    memcpy(logits, sequence_logits(seq), TINY_VOCAB * sizeof(float));
    for (int i = 0; i < n; i++) {
        fixture_decode(engine, seq, tokens[n_prompt + i]);
        memcpy(logits + (size_t)(i + 1) * TINY_VOCAB, sequence_logits(seq), TINY_VOCAB * sizeof(float));
        fake_store_pump(store);
    }
    sequence_free(seq);
    engine_free(engine);
    return logits;
}

/* Goes on with the first `known` of those n tokens; returns how many of them were restored. */
static int second_worker(const struct engine_config *config, int n_prompt, int n_new, int known, const float *want)
{
    struct engine *engine = fixture_engine(&f, config, store);
    const struct sequence_request request = {
        .prompt = tokens, .n_prompt = n_prompt, .max_new = n_new, .answer = tokens + n_prompt, .n_answer = known};
    struct sequence *seq;
    struct sequence_stats stats;
    struct error err = {""};
    int n, r = sequence_create(engine, &request, &seq, &err);
    cr_assert(r >= 0, "%s", err.text);
    while ((r = sequence_prefill_step(seq)) > 0)
        ;
    cr_assert(r == 0 && coverage_check(seq, &err) >= 0, "%d, %s", r, err.text);
    sequence_tokens(seq, &n);
    sequence_stats(seq, &stats);
    cr_assert(n == n_prompt + stats.n_restored && stats.n_restored >= 0 && (known == 0 || stats.n_restored < known));
    if (stats.n_restored == 0)
        fixture_expect_same(want, sequence_logits(seq), 1, "prompt");
    for (int i = stats.n_restored; i < n_new; i++) {
        fixture_decode(engine, seq, tokens[n_prompt + i]);
        fixture_expect_same(want + (size_t)(i + 1) * TINY_VOCAB, sequence_logits(seq), 1, "goes on");
        fake_store_pump(store);
        cr_assert(coverage_check(seq, &err) >= 0, "%s", err.text);
    }
    sequence_free(seq);
    engine_free(engine);
    return stats.n_restored;
}

/* All complete blocks below the last known token. */
static int restorable(int n_prompt, int known)
{
    const int end = (n_prompt + known - 1) / BLOCK_TOKENS * BLOCK_TOKENS;
    return known > 0 && end > n_prompt ? end - n_prompt : 0;
}

Test(engine_answer, test_goes_on_to_the_bit_in_every_format_and_window)
{
    enum { N_NEW = 440 };
    static const int prompts[] = {300, 384, 500}, knowns[] = {1, 83, 84, 85, 200, 212, 213, 400}, recents[] = {0, 40, 128, 300};
    static const struct scorer_ops *const scorers[] = {&scorer_index2, &scorer_minmax, &scorer_mean, &scorer_meanvar, &scorer_recent};
    for (int format = 0; format < KV_FORMAT_COUNT; format++) {
        for (size_t i = 0; i < sizeof(recents) / sizeof(recents[0]); i++) {
            const int n_prompt = prompts[(i + (size_t)format) % 3];
            struct engine_config config = fixture_config();
            config.format = format;
            config.recent = recents[i];
            config.scorer = scorers[(i + 2 * (size_t)format) % 5];
            config.fetch_unit = i % 2 ? BLOCK_TOKENS : SUBPAGE_TOKENS;
            float *want = first_worker(&config, n_prompt, N_NEW);
            for (size_t k = i % 2; k < sizeof(knowns) / sizeof(knowns[0]); k += 2) {
                const int n = second_worker(&config, n_prompt, N_NEW, knowns[k], want);
                cr_assert(n == restorable(n_prompt, knowns[k]), "%d tokens restored of %d behind %d", n, knowns[k], n_prompt);
                cr_assert(knowns[k] - n <= BLOCK_TOKENS || knowns[k] - n <= BLOCK_TOKENS + n_prompt % BLOCK_TOKENS);
            }
            free(want);
            fake_store_drop_from(store, 0);
        }
    }
}

/* What an answer's blocks are good for when it is over makes no difference while it is made. */
Test(engine_answer, test_goes_on_when_the_answer_will_be_reused)
{
    struct engine_config config = fixture_config();
    config.reuse_generated = true;
    float *want = first_worker(&config, 300, 800);
    cr_expect(second_worker(&config, 300, 800, 700, want) == restorable(300, 700));
    config.reuse_generated = false;
    cr_expect(second_worker(&config, 300, 800, 700, want) == restorable(300, 700));
    free(want);
}

/* The blocks that are left are a run from the start of the answer, however the store came to lose the others. */
Test(engine_answer, test_part_of_the_answer_is_gone)
{
    enum { N_PROMPT = 300, KNOWN = 700 };
    struct engine_config config = fixture_config();
    float *want = first_worker(&config, N_PROMPT, N_TOTAL - N_PROMPT);
    for (uint32_t from = N_TOTAL / BLOCK_TOKENS; from >= 1; from--) {
        fake_store_drop_from(store, from);
        const int n = second_worker(&config, N_PROMPT, N_TOTAL - N_PROMPT, KNOWN, want);
        const int end = (int)from * BLOCK_TOKENS < (N_PROMPT + KNOWN - 1) / BLOCK_TOKENS * BLOCK_TOKENS ? (int)from * BLOCK_TOKENS : 896;
        cr_expect(n == (end > N_PROMPT ? end - N_PROMPT : 0), "%d tokens restored when block %u is the first that is gone", n, from);
    }
    fake_store_answer(store, (struct fake_answers){.lookup_error = -ETIMEDOUT, .full_from = -1});
    cr_expect(second_worker(&config, N_PROMPT, N_TOTAL - N_PROMPT, KNOWN, want) == 0);
    fake_store_answer(store, honest);
    free(want);
}

/* What was attended is part of an answer's keys: another budget, window, fetch or end of the prompt does not find them. Nor are they found where exact rows are in no block. */
Test(engine_answer, test_blocks_of_another_configuration_are_not_taken)
{
    enum { N_PROMPT = 300, N_NEW = 240, KNOWN = 220 };
    struct engine_config config = fixture_config();
    for (int change = 0; change < 7; change++) {
        struct engine_config other = fixture_config();
        if (change == 0)
            other.budget = 128;
        else if (change == 1)
            other.recent = 64;
        else if (change == 2)
            other.fetch = 128;
        else if (change == 3)
            other.selector = &selector_streaming;
        else if (change == 4)
            other.values = PREFILL_EXACT;
        else if (change == 5)
            other.scorer = &scorer_meanvar;
        else
            other.fetch_unit = BLOCK_TOKENS;
        float *own = first_worker(&config, N_PROMPT, N_NEW), *want;
        fake_store_drop_from(store, 0);
        want = first_worker(&other, N_PROMPT, N_NEW);
        fake_store_drop_from(store, 0);
        free(first_worker(&config, N_PROMPT, N_NEW));
        cr_expect(second_worker(&other, N_PROMPT, N_NEW, KNOWN, want) == 0, "change %d", change);
        cr_expect(second_worker(&config, N_PROMPT, N_NEW, KNOWN, own) > 0);
        free(own);
        free(want);
        fake_store_drop_from(store, 0);
    }
    float *want = first_worker(&config, N_PROMPT + 1, N_NEW);
    fake_store_drop_from(store, 0);
    free(first_worker(&config, N_PROMPT, N_NEW));
    cr_expect(second_worker(&config, N_PROMPT + 1, N_NEW, KNOWN, want) == 0);
    free(want);
}

Test(engine_answer, test_answer_that_makes_no_sense_is_refused)
{
    struct engine_config config = fixture_config();
    struct engine *engine = fixture_engine(&f, &config, store);
    const int32_t wrong[] = {1, TINY_VOCAB};
    struct sequence *seq;
    cr_expect(sequence_create(engine, &(struct sequence_request){.prompt = tokens, .n_prompt = 9, .max_new = 1, .answer = tokens, .n_answer = 2}, &seq, NULL) == -EINVAL);
    cr_expect(sequence_create(engine, &(struct sequence_request){.prompt = tokens, .n_prompt = 9, .max_new = 2, .answer = wrong, .n_answer = 2}, &seq, NULL) == -EINVAL);
    cr_expect(sequence_create(engine, &(struct sequence_request){.prompt = tokens, .n_prompt = 9, .max_new = 2, .n_answer = -1}, &seq, NULL) == -EINVAL);
    engine_free(engine);
}

/* ---- private blocks and a store that comes to its senses ---- */

enum { LATE_PROMPT = 900, LATE_DECODE = N_TOTAL - LATE_PROMPT };

static struct sequence_stats stats_of(const struct sequence *seq)
{
    struct sequence_stats stats;
    sequence_stats(seq, &stats);
    return stats;
}

static const struct fixture_run late_run = {.tokens = tokens, .n_prompt = LATE_PROMPT, .n_decode = LATE_DECODE};

/* The store refuses while the prompt is computed and for `away` tokens of the answer. */
static void late_store(struct fake_answers refusal, int away, bool reuse_generated, const float *want, const char *what)
{
    struct engine_config config = fixture_config();
    config.reuse_generated = reuse_generated;
    struct engine *engine = fixture_engine(&f, &config, store);
    fake_store_answer(store, refusal);
    struct sequence *seq = fixture_prefilled(engine, &late_run);
    const int refused = stats_of(seq).private_blocks;
    cr_assert(refused > 0, "%s", what);
    for (int i = 0; i < LATE_DECODE; i++) {
        const int before = stats_of(seq).private_blocks;
        struct error err;
        if (i == away)
            fake_store_answer(store, honest);
        fixture_decode(engine, seq, tokens[LATE_PROMPT + i]);
        fixture_expect_same(want + (size_t)(i + 1) * TINY_VOCAB, sequence_logits(seq), 1, what);
        cr_assert(fake_store_n_pending(store) <= 2, "%s: one retry, and one block that is new", what);
        fake_store_pump(store);
        cr_assert(stats_of(seq).private_blocks >= before - 2 && coverage_check(seq, &err) >= 0, "%s", what);
    }
    cr_expect(stats_of(seq).private_blocks == 0, "%s: %d blocks are private, %d were", what, stats_of(seq).private_blocks, refused);
    cr_expect(fake_store_n_blocks(store) == N_TOTAL / BLOCK_TOKENS, "%s: %d blocks", what, fake_store_n_blocks(store));
    sequence_free(seq);

    /* They are what another prompt starts from. */
    struct sequence_stats warm;
    float *got = fixture_logits(engine, &late_run, &warm);
    fixture_expect_same(want, got, 1, what);
    cr_expect(warm.n_cached == 768, "%s: %d cached", what, warm.n_cached);
    free(got);
    engine_free(engine);
    fake_store_pump(store);
    fake_store_drop_from(store, 0);
}

Test(engine_answer, test_private_blocks_move_when_the_store_is_back)
{
    static const struct {
        const char *what;
        struct fake_answers answers;
    } cases[] = {
        {"gone", {.lookup_error = -ENOTCONN, .full_from = -1, .reserve_error = -ENOTCONN, .seal_error = -ENOTCONN}},
        {"full", {.lookup_max = -1, .full_from = 0}},
        {"full from block 3", {.lookup_max = -1, .full_from = 3}},
        {"busy", {.lookup_max = -1, .full_from = -1, .busy_every = 1}},
        {"half busy", {.lookup_max = -1, .full_from = -1, .busy_every = 2}},
        {"late", {.lookup_error = -ETIMEDOUT, .full_from = -1, .reserve_error = -ETIMEDOUT}},
    };
    const struct engine_config config = fixture_config();
    struct engine *alone = fixture_engine(&f, &config, NULL);
    float *want = fixture_logits(alone, &late_run, NULL);
    engine_free(alone);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        for (int away = 0; away <= 60; away += 30)
            late_store(cases[i].answers, away, away == 30, want, cases[i].what);
    free(want);
}

/* The longer a store refuses, the less often it is asked; and what admission had promised for the blocks is free again when they have moved. */
Test(engine_answer, test_retries_become_rare_and_moved_blocks_free_their_memory)
{
    struct engine_config config = fixture_config();
    struct error err;
    struct engine *engine = fixture_engine(&f, &config, store);
    config.memory_limit = engine_workspace_bytes(engine) + engine_sequence_bytes(engine, LATE_PROMPT, LATE_DECODE) + 4 * 1000 * 1000;
    engine_free(engine);
    engine = fixture_engine(&f, &config, store);
    fake_store_answer(store, (struct fake_answers){.lookup_max = -1, .full_from = 0});
    struct sequence *seq = fixture_prefilled(engine, &(struct fixture_run){.tokens = tokens, .n_prompt = LATE_PROMPT, .n_decode = LATE_DECODE});
    int asked = 0;
    for (int i = 0; i < 120; i++) {
        fixture_decode(engine, seq, tokens[LATE_PROMPT + i]);
        asked += fake_store_pump(store);
    }
    cr_expect(asked >= 3 && asked <= 6, "asked %d times in 120 steps", asked);
    struct device_memory_stats before, after;
    f.dev->memory_stats(f.device, &before);
    fake_store_answer(store, honest);
    for (int i = 120; i < LATE_DECODE; i++) {
        fixture_decode(engine, seq, tokens[LATE_PROMPT + i]);
        fake_store_pump(store);
    }
    f.dev->memory_stats(f.device, &after);
    cr_expect(stats_of(seq).private_blocks == 0 && before.now[MEM_STAGING] > 0 && after.now[MEM_STAGING] == 0);
    sequence_free(seq);
    cr_expect(engine_admits(engine, LATE_PROMPT, LATE_DECODE, &err) == 1, "%s", err.text);
    engine_free(engine);
}
