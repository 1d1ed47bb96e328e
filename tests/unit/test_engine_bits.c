/* What must not change a result by one bit: chunk size, threads, instruction set, batch, order of prefill. */
#include "tests/unit/engine_fixture.h"
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_PROMPT = 700, N_DECODE = 150, N_TOKENS = N_PROMPT + N_DECODE };

static int32_t tokens[N_TOKENS];
static const struct fixture_run long_run = {.tokens = tokens, .n_prompt = N_PROMPT, .n_decode = N_DECODE};

static void setup(void)
{
    fixture_tokens(1, tokens, N_TOKENS);
}
TestSuite(engine_bits, .init = setup);

static float *logits_of(struct fixture_params params, const struct engine_config *config)
{
    return fixture_run_logits(params, config, &long_run);
}

static void expect_same(const float *want, struct fixture_params params, const struct engine_config *config, const char *what)
{
    fixture_expect_run_same(want, params, config, &long_run, what);
}

static void check_chunks(struct engine_config config)
{
    static const int chunks[] = {1, 64, 100, 128, 512, TINY_CONTEXT};
    float *want = logits_of((struct fixture_params){0}, &config);
    for (size_t i = 0; i < sizeof(chunks) / sizeof(chunks[0]); i++) {
        char what[32];
        snprintf(what, sizeof(what), "chunk %d", chunks[i]);
        config.chunk = chunks[i];
        expect_same(want, (struct fixture_params){0}, &config, what);
    }
    free(want);
}

Test(engine_bits, test_logits_chunk_sizes)
{
    for (int format = 0; format < KV_FORMAT_COUNT; format++) {
        struct engine_config config = fixture_config();
        config.format = format;
        check_chunks(config);
    }
}

Test(engine_bits, test_logits_chunk_sizes_with_exact_prefill)
{
    struct engine_config config = fixture_config();
    config.values = PREFILL_EXACT;
    check_chunks(config);
}

Test(engine_bits, test_logits_threads)
{
    struct engine_config config = fixture_config();
    float *want = logits_of((struct fixture_params){.n_threads = 1}, &config);
    expect_same(want, (struct fixture_params){.n_threads = 2}, &config, "2 threads");
    expect_same(want, (struct fixture_params){.n_threads = 3}, &config, "3 threads");
    free(want);
}

Test(engine_bits, test_logits_instruction_sets)
{
    for (int format = 0; format < KV_FORMAT_COUNT; format++) {
        struct engine_config config = fixture_config();
        config.format = format;
        float *want = logits_of((struct fixture_params){.isa = CPU_ISA_PLAIN}, &config);
        expect_same(want, (struct fixture_params){.isa = CPU_ISA_AVX2}, &config, "avx2");
        expect_same(want, (struct fixture_params){.isa = CPU_ISA_AVX512}, &config, "avx512");
        free(want);
    }
}

Test(engine_bits, test_logits_prefill_order)
{
    for (int values = PREFILL_CONSISTENT; values <= PREFILL_EXACT; values++) {
        struct engine_config config = fixture_config();
        config.values = values;
        float *want = logits_of((struct fixture_params){0}, &config);
        config.order = PREFILL_CHUNK_MAJOR;
        expect_same(want, (struct fixture_params){0}, &config, "chunk-major");
        free(want);
    }
}

/* Exact and consistent prefill are the same thing when blocks are exact, and not otherwise. */
Test(engine_bits, test_logits_exact_prefill_in_bf16)
{
    struct engine_config config = fixture_config();
    config.format = KV_FORMAT_BF16;
    float *want = logits_of((struct fixture_params){0}, &config);
    config.values = PREFILL_EXACT;
    expect_same(want, (struct fixture_params){0}, &config, "exact in bf16");
    free(want);

    config.format = KV_FORMAT_K8V4;
    want = logits_of((struct fixture_params){0}, &config);
    config.values = PREFILL_CONSISTENT;
    float *consistent = logits_of((struct fixture_params){0}, &config);
    cr_assert(memcmp(want, consistent, TINY_VOCAB * sizeof(float)) != 0);
    free(want);
    free(consistent);
}

/* Eight sequences of different lengths in one batch against each alone. Prefill of one runs between decode steps of the others. */
Test(engine_bits, test_logits_alone_and_in_a_batch)
{
    enum { BATCH = 8, STEPS = 140, LONGEST = 90 + 7 * 67 };
    static int32_t ids[BATCH][LONGEST + STEPS];
    struct fixture f;
    struct engine_config config = fixture_config();
    struct sequence *batch[BATCH];
    float *want[BATCH];

    cr_assert(fixture_open(&f, (struct fixture_params){.n_threads = 2}));
    struct engine *engine = fixture_engine(&f, &config, NULL);
    for (int i = 0; i < BATCH; i++) {
        const int n = 90 + 67 * i;
        fixture_tokens((uint64_t)i + 5, ids[i], n + STEPS);
        want[i] = fixture_logits(engine, &(struct fixture_run){.tokens = ids[i], .n_prompt = n, .n_decode = STEPS}, NULL);
    }
    for (int i = 0; i < BATCH; i++) {
        batch[i] = fixture_prefilled(engine, &(struct fixture_run){.tokens = ids[i], .n_prompt = 90 + 67 * i, .n_decode = STEPS});
        cr_assert(memcmp(sequence_logits(batch[i]), want[i], TINY_VOCAB * sizeof(float)) == 0, "prompt %d", i);
    }
    for (int step = 0; step < STEPS; step++) {
        int32_t next[BATCH];
        for (int i = 0; i < BATCH; i++)
            next[i] = ids[i][90 + 67 * i + step];
        cr_assert(engine_decode(engine, batch, next, BATCH) >= 0);
        for (int i = 0; i < BATCH; i++)
            cr_assert(memcmp(sequence_logits(batch[i]), want[i] + (step + 1) * TINY_VOCAB, TINY_VOCAB * sizeof(float)) == 0, "step %d sequence %d", step, i);
    }
    for (int i = 0; i < BATCH; i++) {
        sequence_free(batch[i]);
        free(want[i]);
    }
    engine_free(engine);
    fixture_expect_no_memory(&f);
    fixture_close(&f);
}

/* Units of two prompts and decode steps of a third interleave in every order that a scheduler may choose. */
Test(engine_bits, test_logits_interleaved_prefill)
{
    static int32_t ids[3][600];
    struct fixture f;
    struct engine_config config = fixture_config();
    float *want[3];
    struct sequence *seqs[3];

    cr_assert(fixture_open(&f, (struct fixture_params){0}));
    struct engine *engine = fixture_engine(&f, &config, NULL);
    for (int i = 0; i < 3; i++) {
        fixture_tokens((uint64_t)i + 50, ids[i], 600);
        want[i] = fixture_logits(engine, &(struct fixture_run){.tokens = ids[i], .n_prompt = 400 + i, .n_decode = 1}, NULL);
    }
    seqs[2] = fixture_prefilled(engine, &(struct fixture_run){.tokens = ids[2], .n_prompt = 402, .n_decode = 100});
    for (int i = 0; i < 2; i++) {
        const struct sequence_request request = {.prompt = ids[i], .n_prompt = 400 + i, .max_new = 1};
        cr_assert(sequence_create(engine, &request, &seqs[i], NULL) >= 0);
    }
    int left = 2;
    for (int turn = 0; left > 0; turn++) {
        cr_assert(turn < 100);
        for (int i = 0; i < 2; i++) {
            const int r = sequence_logits(seqs[i]) ? 1 : sequence_prefill_step(seqs[i]);
            cr_assert(r >= 0);
            left -= r == 0;
        }
        cr_assert(engine_decode(engine, &seqs[2], &ids[2][402 + turn], 1) >= 0);
        if (turn == 0)
            fixture_expect_same(want[2] + TINY_VOCAB, sequence_logits(seqs[2]), 1, "decode between units");
    }
    for (int i = 0; i < 2; i++)
        fixture_expect_same(want[i], sequence_logits(seqs[i]), 1, "interleaved prompt");
    for (int i = 0; i < 3; i++) {
        sequence_free(seqs[i]);
        free(want[i]);
    }
    engine_free(engine);
    fixture_close(&f);
}
