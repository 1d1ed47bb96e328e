/* The engine and the pool, with a store whose every answer the test decides: results must not depend on a single one of them. */
#include "tests/unit/engine_fixture.h"
#include "worker/cache/scorer.h"
#include "tests/unit/fake_kv_client.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { N_PROMPT = 900, N_DECODE = 300, N_TOKENS = N_PROMPT + N_DECODE, N_ROWS = N_DECODE + 1, PROMPT_BLOCKS = N_PROMPT / BLOCK_TOKENS };

static int32_t tokens[N_TOKENS];
static const struct fixture_run run = {.tokens = tokens, .n_prompt = N_PROMPT, .n_decode = N_DECODE};
static const struct fake_answers honest = {.lookup_max = -1, .full_from = -1};
static struct fixture f;
static struct kv_client *store;

static void setup(void)
{
    fixture_tokens(11, tokens, N_TOKENS);
    cr_assert(fixture_open(&f, (struct fixture_params){0}));
    store = fake_store_create();
}
static void teardown(void)
{
    fixture_expect_no_memory(&f);
    cr_expect(fake_store_n_leases(store) == 0 && fake_store_n_granted(store) == 0, "%d leases, %d half-written blocks left", fake_store_n_leases(store),
              fake_store_n_granted(store));
    fake_store_free(store);
    fixture_close(&f);
}
TestSuite(engine_pool, .init = setup, .fini = teardown);

static float *alone(const struct engine_config *config)
{
    struct engine *engine = fixture_engine(&f, config, NULL);
    float *logits = fixture_logits(engine, &run, NULL);
    engine_free(engine);
    return logits;
}

/* One run with the store; asynchronous answers come after every `pump_every` tokens (0: never before the end). */
static void run_with_store(const struct engine_config *config, const struct fixture_run *r, const float *want, int pump_every, const char *what,
                           struct sequence_stats *ret_stats)
{
    struct engine *engine = fixture_engine(&f, config, store);
    struct sequence *seq = fixture_prefilled(engine, r);
    struct error err;
    fixture_expect_same(want, sequence_logits(seq), 1, what);
    for (int i = 0; i < r->n_decode; i++) {
        fixture_decode(engine, seq, r->tokens[r->n_prompt + i]);
        fixture_expect_same(want + (size_t)(i + 1) * TINY_VOCAB, sequence_logits(seq), 1, what);
        if (pump_every && i % pump_every == 0 && fake_store_pump(store))
            cr_assert(coverage_check(seq, &err) >= 0, "%s", err.text);
    }
    sequence_stats(seq, ret_stats);
    sequence_free(seq);
    engine_free(engine);
    fake_store_pump(store);
}

Test(engine_pool, test_cold_and_warm_in_every_format)
{
    for (int format = 0; format < KV_FORMAT_COUNT; format++) {
        for (int order = PREFILL_LAYER_MAJOR; order <= PREFILL_CHUNK_MAJOR; order++) {
            struct engine_config config = fixture_config();
            struct sequence_stats cold, warm;
            config.format = format;
            float *want = alone(&config);
            config.order = order;
            run_with_store(&config, &run, want, 1, "cold", &cold);
            cr_expect(cold.n_cached == (order == PREFILL_LAYER_MAJOR ? 0 : 896 - 128));
            cr_expect(cold.private_blocks == 0);
            config.chunk = 70;
            run_with_store(&config, &run, want, 1, "warm", &warm);
            /* 900 tokens: 7 blocks, the last 32 tokens are observed, so 6 of them come from the pool. */
            cr_expect(warm.n_cached == 768, "%d tokens cached", warm.n_cached);
            cr_expect(warm.bytes_to_pool == 0, "%llu bytes written again", (unsigned long long)warm.bytes_to_pool);
            free(want);
        }
    }
}

/* Whoever wrote the blocks: each selector after the others. Column sums of all queries leave no prefix to take. */
Test(engine_pool, test_cold_and_warm_with_every_selector)
{
    for (int i = 0; i < FIXTURE_SELECTORS; i++) {
        struct engine_config config = fixture_config();
        struct sequence_stats stats;
        config.selector = fixture_selectors[i];
        float *want = alone(&config);
        run_with_store(&config, &run, want, 1, config.selector->name, &stats);
        /* 900 tokens: 7 blocks, the last of them holds the first observed queries of a window of 32. */
        const int reusable = config.selector->all_queries ? 0 : config.selector->n_window > 1 ? 768 : 896;
        cr_expect(stats.n_cached == (i == 0 ? 0 : reusable), "%s: %d tokens cached", config.selector->name, stats.n_cached);
        if (config.selector->all_queries) {
            fake_store_drop_from(store, 0);
            run_with_store(&config, &run, want, 1, "column sums", &stats);
            cr_expect(stats.n_cached == 0 && stats.bytes_to_pool > 0);
            /* With nothing to choose there is nothing to observe. */
            config.budget = 36;
            free(want);
            want = alone(&config);
            run_with_store(&config, &run, want, 1, "no choice", &stats);
            cr_expect(stats.n_cached == 896, "%d tokens cached", stats.n_cached);
        }
        free(want);
    }
}

/* Summaries are made from the blocks, whoever wrote them. */
Test(engine_pool, test_cold_and_warm_with_summaries)
{
    struct engine_config config = fixture_config();
    struct sequence_stats stats;
    config.scorer = &scorer_meanvar;
    config.fetch_unit = BLOCK_TOKENS;
    float *want = alone(&config);
    run_with_store(&config, &run, want, 1, "cold", &stats);
    config.chunk = 70;
    run_with_store(&config, &run, want, 1, "warm", &stats);
    cr_expect(stats.n_cached == 768, "%d tokens cached", stats.n_cached);
    free(want);
}

Test(engine_pool, test_part_of_the_prefix_is_gone)
{
    struct engine_config config = fixture_config();
    struct sequence_stats stats;
    float *want = alone(&config);
    run_with_store(&config, &run, want, 1, "cold", &stats);
    for (int from = PROMPT_BLOCKS; from >= 0; from--) {
        fake_store_drop_from(store, (uint32_t)from);
        run_with_store(&config, &run, want, 7, "partly warm", &stats);
        cr_expect(stats.n_cached == (from < 6 ? from : 6) * BLOCK_TOKENS, "%d cached of %d blocks", stats.n_cached, from);
    }
    free(want);
}

/* Blocks that are there past the hit run are read, not written again. */
Test(engine_pool, test_blocks_that_exist_behind_a_hole)
{
    struct engine_config config = fixture_config();
    struct sequence_stats stats;
    float *want = alone(&config);
    run_with_store(&config, &run, want, 1, "cold", &stats);
    for (int max = 0; max < 4; max++) {
        fake_store_answer(store, (struct fake_answers){.lookup_max = max, .full_from = -1});
        run_with_store(&config, &run, want, 1, "behind a hole", &stats);
        cr_expect(stats.n_cached == max * BLOCK_TOKENS && stats.bytes_to_pool == 0);
    }
    free(want);
}

Test(engine_pool, test_store_that_refuses)
{
    static const struct {
        const char *what;
        struct fake_answers answers;
    } cases[] = {
        {"full", {.lookup_max = -1, .full_from = 0}},
        {"full from block 3", {.lookup_max = -1, .full_from = 3}},
        {"full for blocks made while decoding", {.lookup_max = -1, .full_from = PROMPT_BLOCKS}},
        {"busy", {.lookup_max = -1, .full_from = -1, .busy_every = 1}},
        {"half busy", {.lookup_max = -1, .full_from = -1, .busy_every = 2}},
        {"lookups time out", {.lookup_error = -ETIMEDOUT, .full_from = -1}},
        {"reservations time out", {.lookup_max = -1, .full_from = -1, .reserve_error = -ETIMEDOUT}},
        {"gone", {.lookup_error = -ENOTCONN, .full_from = -1, .reserve_error = -ENOTCONN, .seal_error = -ENOTCONN}},
        {"seals fail", {.lookup_max = -1, .full_from = -1, .seal_error = -ENOTCONN}},
    };
    struct engine_config config = fixture_config();
    float *want = alone(&config);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        for (int pump_every = 0; pump_every < 2; pump_every++) {
            struct sequence_stats stats;
            fake_store_answer(store, cases[i].answers);
            run_with_store(&config, &run, want, pump_every, cases[i].what, &stats);
            fake_store_answer(store, honest);
            cr_assert(fake_store_n_leases(store) == 0 && fake_store_n_granted(store) == 0, "%s", cases[i].what);
            fake_store_drop_from(store, 0);
        }
    }
    free(want);
}

/* The store dies at every unit of the prompt: what is written stays readable, what is not yet is private. */
Test(engine_pool, test_store_dies_during_prefill)
{
    struct engine_config config = fixture_config();
    config.chunk = 256; /* few units, of every kind */
    float *want = alone(&config);
    int n_units = 1;
    for (int stop = 0; stop < n_units; stop++) {
        struct engine *engine = fixture_engine(&f, &config, store);
        struct sequence *seq;
        struct sequence_stats stats;
        const struct sequence_request request = {.prompt = tokens, .n_prompt = N_PROMPT, .max_new = N_DECODE};
        cr_assert(sequence_create(engine, &request, &seq, NULL) >= 0);
        sequence_stats(seq, &stats);
        n_units = stats.units_total;
        for (int i = 0; i < n_units; i++) {
            if (i == stop)
                fake_store_answer(store, (struct fake_answers){.lookup_error = -ENOTCONN, .reserve_error = -ENOTCONN, .seal_error = -ENOTCONN});
            cr_assert(sequence_prefill_step(seq) >= 0);
        }
        fixture_expect_same(want, sequence_logits(seq), 1, "store dies");
        for (int i = 0; i < N_DECODE; i++) {
            fixture_decode(engine, seq, tokens[N_PROMPT + i]);
            fixture_expect_same(want + (size_t)(i + 1) * TINY_VOCAB, sequence_logits(seq), 1, "store dies");
        }
        sequence_free(seq);
        engine_free(engine);
        fake_store_answer(store, honest);
        cr_assert(fake_store_n_leases(store) == 0);
        fake_store_drop_from(store, 0);
    }
    free(want);
}

Test(engine_pool, test_cancel_gives_back_leases_at_every_unit)
{
    struct engine_config config = fixture_config();
    config.chunk = 256; /* few units, of every kind */
    struct engine *engine = fixture_engine(&f, &config, store);
    int n_units = 1;
    for (int stop = 0; stop <= n_units; stop++) {
        struct sequence *seq;
        struct sequence_stats stats;
        const struct sequence_request request = {.prompt = tokens, .n_prompt = N_PROMPT, .max_new = N_DECODE};
        cr_assert(sequence_create(engine, &request, &seq, NULL) >= 0);
        sequence_stats(seq, &stats);
        n_units = stats.units_total;
        for (int i = 0; i < stop && i < n_units; i++)
            cr_assert(sequence_prefill_step(seq) >= 0);
        sequence_free(seq);
        cr_assert(fake_store_n_leases(store) == 0 && fake_store_n_granted(store) == 0);
        fake_store_drop_from(store, 0);
    }
    engine_free(engine);
}

/* The answer to a reservation comes after the sequence is gone. */
Test(engine_pool, test_cancel_with_an_answer_outstanding)
{
    struct engine_config config = fixture_config();
    struct engine *engine = fixture_engine(&f, &config, store);
    struct sequence *seq = fixture_prefilled(engine, &run);
    const int before = fake_store_n_blocks(store);
    for (int i = 0; i < N_DECODE; i++)
        fixture_decode(engine, seq, tokens[N_PROMPT + i]);
    cr_assert(fake_store_n_pending(store) > 0);
    sequence_free(seq);
    engine_free(engine);
    cr_assert(fake_store_pump(store) > 0);
    cr_expect(fake_store_n_blocks(store) == before);
}

/* Another prompt with the same tokens split elsewhere makes other bytes for the same answer: neither may take the other's. */
Test(engine_pool, test_generated_blocks_of_another_split)
{
    static const struct fixture_run other = {.tokens = tokens, .n_prompt = N_PROMPT - 200, .n_decode = N_DECODE + 200};
    static const struct fixture_run near = {.tokens = tokens, .n_prompt = N_PROMPT + 3, .n_decode = N_DECODE - 3};
    struct engine_config config = fixture_config();
    struct sequence_stats stats;
    struct engine *engine = fixture_engine(&f, &config, NULL);
    float *want = fixture_logits(engine, &run, NULL), *want_other = fixture_logits(engine, &other, NULL);
    float *want_near = fixture_logits(engine, &near, NULL);
    engine_free(engine);

    run_with_store(&config, &run, want, 1, "one split", &stats);
    cr_expect(stats.private_blocks == 0);
    run_with_store(&config, &other, want_other, 1, "another split", &stats);
    cr_expect(stats.private_blocks == 0);
    run_with_store(&config, &near, want_near, 1, "another split in the same block", &stats);
    cr_expect(stats.private_blocks == 0, "keys of generated blocks tell where the prompt ended");
    run_with_store(&config, &other, want_other, 1, "the same again", &stats);
    cr_expect(stats.private_blocks == 0 && stats.bytes_to_pool == 0, "a replay finds its own blocks");

    free(want);
    free(want_other);
    free(want_near);
}

/* The next turn of a conversation starts from what decoding has left, if it may: when the answer is over its blocks have a prompt's keys. A pool that is full for some of
 * them leaves a shorter prefix, one that goes away none. */
Test(engine_pool, test_reuse_of_generated_blocks)
{
    struct engine_config config = fixture_config();
    static const struct {
        bool reuse;
        struct fake_answers answers;
        int n_cached;
    } cases[] = {
        {false, {.lookup_max = -1, .full_from = -1}, 256},
        {true, {.lookup_max = -1, .full_from = -1}, 768},
        {true, {.lookup_max = -1, .full_from = 4}, 512},
        {true, {.lookup_max = -1, .full_from = -1, .reserve_error = -ETIMEDOUT}, 256},
        {true, {.lookup_max = -1, .full_from = -1, .reserve_error = -ENOTCONN}, 256},
        {true, {.lookup_max = -1, .full_from = -1, .seal_error = -ENOTCONN}, 256},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        config.reuse_generated = cases[i].reuse;
        struct engine *engine = fixture_engine(&f, &config, store);
        struct sequence *seq = fixture_prefilled(engine, &(struct fixture_run){.tokens = tokens, .n_prompt = 300, .n_decode = 600});
        struct sequence_stats stats;
        for (int t = 0; t < 600; t++) {
            fixture_decode(engine, seq, tokens[300 + t]);
            fake_store_pump(store);
        }
        cr_assert(fake_store_n_blocks(store) == 900 / BLOCK_TOKENS);
        fake_store_answer(store, cases[i].answers);
        sequence_retire_answer(seq);
        sequence_free(seq);
        while (fake_store_pump(store))
            ;
        fake_store_answer(store, honest);
        cr_expect(fake_store_n_blocks(store) == (cases[i].reuse ? cases[i].n_cached == 768 ? 7 : cases[i].n_cached / BLOCK_TOKENS : 2), "case %d: %d blocks", (int)i,
                  fake_store_n_blocks(store));
        seq = fixture_prefilled(engine, &run);
        sequence_stats(seq, &stats);
        sequence_free(seq);
        cr_expect(stats.n_cached == cases[i].n_cached, "case %d: %d cached", (int)i, stats.n_cached);
        engine_free(engine);
        fake_store_drop_from(store, 0);
    }
}

Test(engine_pool, test_exact_prefill_does_not_reuse)
{
    struct engine_config config = fixture_config();
    struct sequence_stats stats;
    uint8_t a[FINGERPRINT_BYTES], b[FINGERPRINT_BYTES];
    config.values = PREFILL_EXACT;
    float *want = alone(&config);
    for (int i = 0; i < 2; i++) {
        run_with_store(&config, &run, want, 1, "exact", &stats);
        cr_expect(stats.n_cached == 0);
    }
    struct engine *engine = fixture_engine(&f, &config, NULL);
    engine_fingerprint(engine, a);
    engine_free(engine);
    config.values = PREFILL_CONSISTENT;
    engine = fixture_engine(&f, &config, NULL);
    engine_fingerprint(engine, b);
    engine_free(engine);
    cr_expect(memcmp(a, b, sizeof(a)) != 0);
    free(want);
}

Test(engine_pool, test_no_cache_leaves_the_store_alone)
{
    struct engine_config config = fixture_config();
    struct engine *engine = fixture_engine(&f, &config, store);
    float *want = alone(&config);
    float *got = fixture_logits(engine, &(struct fixture_run){.tokens = tokens, .n_prompt = N_PROMPT, .n_decode = N_DECODE, .no_cache = true}, NULL);
    fixture_expect_same(want, got, N_ROWS, "no cache");
    cr_expect(fake_store_n_blocks(store) == 0 && fake_store_n_pending(store) == 0);
    engine_free(engine);
    free(want);
    free(got);
}

/* Prompts that share a prefix, of other lengths than the run that filled the pool. */
Test(engine_pool, test_shared_prefix_of_another_prompt)
{
    static const int lengths[] = {128, 129, 160, 161, 256 + 31, 256 + 32, 256 + 33, 640, 899};
    struct engine_config config = fixture_config();
    struct engine *cold = fixture_engine(&f, &config, NULL), *warm = fixture_engine(&f, &config, store);
    sequence_free(fixture_prefilled(warm, &run));
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        const struct fixture_run r = {.tokens = tokens, .n_prompt = lengths[i], .n_decode = 20};
        struct sequence_stats stats;
        float *want = fixture_logits(cold, &r, NULL), *got = fixture_logits(warm, &r, &stats);
        fixture_expect_same(want, got, 21, "shared prefix");
        cr_expect(stats.n_cached <= lengths[i] - 1 && stats.n_cached % BLOCK_TOKENS == 0);
        if (lengths[i] >= 640)
            cr_expect(stats.n_cached == (lengths[i] - SELECT_MANDATORY) / BLOCK_TOKENS * BLOCK_TOKENS, "%d of %d cached", stats.n_cached, lengths[i]);
        free(want);
        free(got);
    }
    engine_free(cold);
    engine_free(warm);
}

/* NaN in an answer ends that sequence when its block is complete, and that block alone stays out of the pool: its logits are NULL then, and the other sequence of the batch does not notice. */
Test(engine_pool, test_numbers_that_are_none_reach_no_block)
{
    enum { POISON = 7, N = 100, STEPS = BLOCK_TOKENS - N };
    struct engine_config config = fixture_config();
    struct sequence *seqs[2];
    int32_t clean[2 * BLOCK_TOKENS];
    for (int i = 0; i < 2 * BLOCK_TOKENS; i++)
        clean[i] = tokens[i] + (tokens[i] == POISON);
    fixture_poison_token(&f, POISON);
    struct engine *engine = fixture_engine(&f, &config, store);
    const struct fixture_run short_run = {.tokens = clean, .n_prompt = N, .n_decode = STEPS};
    static float want[STEPS * TINY_VOCAB];
    struct sequence *alone = fixture_prefilled(engine, &short_run);
    for (int step = 0; step < STEPS; step++) {
        fixture_decode(engine, alone, clean[N + step]);
        memcpy(want + step * TINY_VOCAB, sequence_logits(alone), TINY_VOCAB * sizeof(float));
    }
    fake_store_pump(store);
    sequence_free(alone);
    const int n_blocks = fake_store_n_blocks(store);
    for (int i = 0; i < 2; i++)
        seqs[i] = fixture_prefilled(engine, &short_run);
    for (int step = 0; step < STEPS; step++) {
        const int32_t next[2] = {clean[N + step], step == 3 ? POISON : clean[N + step]};
        cr_assert(sequence_logits(seqs[1]) != NULL);
        cr_assert_eq(engine_decode(engine, seqs, next, 2), 0);
        fixture_expect_same(want + step * TINY_VOCAB, sequence_logits(seqs[0]), 1, "beside it");
    }
    cr_expect(sequence_logits(seqs[1]) == NULL && sequence_logits(seqs[0]) != NULL);
    fake_store_pump(store);
    cr_expect_eq(fake_store_n_blocks(store), n_blocks);
    sequence_free(seqs[0]), sequence_free(seqs[1]);
    engine_free(engine);
}

/* Another salt is another tenant. */
Test(engine_pool, test_salt_separates_tenants)
{
    struct engine_config config = fixture_config();
    struct engine *engine = fixture_engine(&f, &config, store);
    for (int i = 0; i < 4; i++) {
        const struct sequence_request request = {.prompt = tokens, .n_prompt = N_PROMPT, .salt = i % 2 ? "a" : "b", .n_salt = 1};
        struct sequence *seq;
        struct sequence_stats stats;
        cr_assert(sequence_create(engine, &request, &seq, NULL) >= 0);
        while (sequence_prefill_step(seq) > 0)
            ;
        sequence_stats(seq, &stats);
        cr_expect(stats.n_cached == (i < 2 ? 0 : 768));
        sequence_free(seq);
    }
    engine_free(engine);
}

/* Private blocks count against the limit once the store has refused them. */
Test(engine_pool, test_admission_when_the_pool_is_full)
{
    struct engine_config config = fixture_config();
    struct error err;
    struct sequence *seq;
    struct engine *engine = fixture_engine(&f, &config, store);
    const size_t fixed = engine_workspace_bytes(engine), need = engine_sequence_bytes(engine, N_PROMPT, 0);
    engine_free(engine);
    config.memory_limit = fixed + need;
    engine = fixture_engine(&f, &config, store);
    const struct sequence_request request = {.prompt = tokens, .n_prompt = N_PROMPT};
    cr_assert(sequence_create(engine, &request, &seq, &err) >= 0, "%s", err.text);
    sequence_free(seq);
    fake_store_answer(store, (struct fake_answers){.lookup_max = -1, .full_from = 5});
    cr_expect(sequence_create(engine, &request, &seq, &err) == -E2BIG);
    engine_free(engine);
}

/* A pool that the device does not read yet: nothing is asked of the store, a block on its way when another mapping came is not taken, and all goes on when the pool is there. */
Test(engine_pool, test_a_pool_that_may_not_be_used_is_none)
{
    const struct engine_config config = fixture_config();
    const struct sequence_request request = {.prompt = tokens, .n_prompt = N_PROMPT, .max_new = N_DECODE};
    struct sequence_stats stats;
    struct sequence *seq;
    float *want = alone(&config);
    fake_store_answer(store, honest);
    struct engine *engine = fixture_engine(&f, &config, store);
    engine_use_pool(engine, false);
    seq = fixture_prefilled(engine, &run);
    fixture_expect_same(want, sequence_logits(seq), 1, "not there");
    cr_expect(fake_store_n_leases(store) == 0 && fake_store_n_blocks(store) == 0);
    sequence_free(seq);

    engine_use_pool(engine, true);
    cr_assert(sequence_create(engine, &request, &seq, NULL) >= 0);
    while (sequence_prefill_step(seq) > 0)
        ;
    cr_expect_eq(fake_store_n_blocks(store), PROMPT_BLOCKS);
    for (int i = 0; i < N_DECODE; i++) {
        fixture_decode(engine, seq, tokens[N_PROMPT + i]);
        fixture_expect_same(want + (size_t)(i + 1) * TINY_VOCAB, sequence_logits(seq), 1, "in between");
        if (fake_store_n_pending(store) > 0 && i < 150) {
            engine_use_pool(engine, false);
            fake_store_pump(store);
            cr_expect(fake_store_n_granted(store) == 0 && fake_store_n_blocks(store) == PROMPT_BLOCKS, "granted on a mapping that the device does not know");
        }
        if (i == 150) {
            sequence_stats(seq, &stats);
            cr_expect(stats.private_blocks > 0 && fake_store_n_pending(store) == 0);
            engine_use_pool(engine, true);
        }
        if (i > 150)
            fake_store_pump(store);
    }
    sequence_stats(seq, &stats);
    cr_expect_eq(stats.private_blocks, 0, "%d stayed", stats.private_blocks);
    sequence_free(seq);
    engine_free(engine);
    free(want);
}

/* A request whose blocks only the pool has room for waits while the pool is on its way, and is not told that it can never run. */
Test(engine_pool, test_a_request_waits_for_a_pool_that_is_on_its_way)
{
    struct engine_config config = fixture_config();
    const struct sequence_request request = {.prompt = tokens, .n_prompt = N_PROMPT};
    struct sequence *seq;
    struct error err;
    fake_store_answer(store, honest);
    struct engine *engine = fixture_engine(&f, &config, store);
    config.memory_limit = engine_workspace_bytes(engine) + engine_sequence_bytes(engine, N_PROMPT, 0);
    engine_free(engine);
    engine = fixture_engine(&f, &config, store);
    engine_use_pool(engine, false);
    cr_expect_eq(sequence_create(engine, &request, &seq, &err), -EAGAIN);
    engine_use_pool(engine, true);
    cr_assert_eq(sequence_create(engine, &request, &seq, &err), 0, "%s", err.text);
    sequence_free(seq);
    engine_free(engine);
}
