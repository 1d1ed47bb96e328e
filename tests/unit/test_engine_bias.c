/* A model with key biases of 60 sigma in a slow and in a fast RoPE pair: the engine is held to full attention in double, and to itself in every way that must not matter. */
#include "proto/base/base_assert.h"
#include "tests/unit/fake_kv_client.h"
#include "tests/unit/tiny_reference.h"
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_PROMPT = 600, N_DECODE = 180, N_TOKENS = N_PROMPT + N_DECODE, N_ROWS = N_DECODE + 1 };
#define SIGMAS 60.0f
#define NEARLY_NONE 1e-3f /* the same model but for what is measured */

static int32_t tokens[N_TOKENS];
static const struct fixture_run run = {.tokens = tokens, .n_prompt = N_PROMPT, .n_decode = N_DECODE};

static void setup(void)
{
    fixture_tokens(21, tokens, N_TOKENS);
}
TestSuite(engine_bias, .init = setup);

/* ---- against full attention ---- */

static double mean_kl(struct fixture *f, const double *want, const struct engine_config *config)
{
    struct engine *engine = fixture_engine(f, config, NULL);
    float *got = fixture_logits(engine, &run, NULL);
    const double mean = tiny_reference_mean_kl(want + (size_t)(N_PROMPT - 1) * TINY_VOCAB, got, N_ROWS, NULL);
    free(got);
    engine_free(engine);
    return mean;
}

struct kl_of_formats {
    double exact, coded, fetched;
};

static struct kl_of_formats measure(float sigmas)
{
    double *want = malloc(sizeof(double) * N_TOKENS * TINY_VOCAB);
    struct engine_config config = fixture_config();
    struct kl_of_formats r;
    struct fixture f;
    cr_assert(want && fixture_open(&f, (struct fixture_params){.key_bias = sigmas}));
    tiny_reference_logits(&f, tokens, N_TOKENS, want);
    config.format = KV_FORMAT_BF16;
    config.fetch = INT32_MAX;
    r.exact = mean_kl(&f, want, &config);
    config.format = KV_FORMAT_K8V4;
    r.coded = mean_kl(&f, want, &config);
    config.fetch = 128;
    r.fetched = mean_kl(&f, want, &config);
    fixture_expect_no_memory(&f);
    fixture_close(&f);
    free(want);
    return r;
}

Test(engine_bias, test_costs_what_a_model_without_biases_costs)
{
    const struct kl_of_formats without = measure(NEARLY_NONE), with = measure(SIGMAS);
    fprintf(stderr, "KL to full attention, without and with key biases: k8v4 %.2g %.2g, fetch 128 %.2g %.2g; bf16 with them %.2g\n", without.coded, with.coded,
            without.fetched, with.fetched, with.exact);
    cr_expect(with.exact < 3e-9, "KL %g", with.exact);
    /* The bias bends attention, so the two do not cost the same; coding the biases with the keys costs 120 times as much. */
    cr_expect(with.coded < 2 * without.coded, "KL %g, not %g", with.coded, without.coded);
    cr_expect(with.fetched < 5 * without.fetched, "KL %g, not %g", with.fetched, without.fetched);
}

/* ---- against itself ---- */

Test(engine_bias, test_logits_are_the_same_in_every_way)
{
    struct engine_config config = fixture_config();
    config.budget = 100;
    float *want = fixture_run_logits((struct fixture_params){.isa = CPU_ISA_PLAIN, .key_bias = SIGMAS}, &config, &run);
    config.chunk = 1;
    fixture_expect_run_same(want, (struct fixture_params){.isa = CPU_ISA_AVX2, .n_threads = 2, .key_bias = SIGMAS}, &config, &run, "AVX2, 2 threads, chunk 1");
    config.chunk = 300;
    config.order = PREFILL_CHUNK_MAJOR;
    fixture_expect_run_same(want, (struct fixture_params){.isa = CPU_ISA_AVX512, .n_threads = 3, .key_bias = SIGMAS}, &config, &run, "AVX-512, 3 threads, chunk-major");
    free(want);
}

Test(engine_bias, test_cold_and_warm)
{
    for (int format = 0; format < KV_FORMAT_COUNT; format++) {
        struct engine_config config = fixture_config();
        struct kv_client *store = fake_store_create();
        struct sequence_stats stats[2];
        float *logits[2];
        struct fixture f;
        config.format = format;
        cr_assert(fixture_open(&f, (struct fixture_params){.key_bias = SIGMAS}));
        for (int warm = 0; warm < 2; warm++) {
            struct engine *engine = fixture_engine(&f, &config, store);
            logits[warm] = fixture_logits(engine, &run, &stats[warm]);
            engine_free(engine);
            fake_store_pump(store);
        }
        cr_expect(stats[0].n_cached == 0 && stats[1].n_cached == N_PROMPT / BLOCK_TOKENS * BLOCK_TOKENS, "%d, %d tokens cached", stats[0].n_cached, stats[1].n_cached);
        fixture_expect_same(logits[0], logits[1], N_ROWS, kv_format_name(format));
        free(logits[0]), free(logits[1]);
        fake_store_free(store);
        fixture_expect_no_memory(&f);
        fixture_close(&f);
    }
}

/* ---- which pairs ---- */

static void fingerprint(struct fixture_params params, uint8_t ret[FINGERPRINT_BYTES], int *ret_pairs)
{
    struct fixture f;
    cr_assert(fixture_open(&f, params));
    model_fingerprint(&f.model, KV_FORMAT_K8V4, 1, 0, ret);
    *ret_pairs = f.model.key_bias.n_pairs;
    for (int l = 0; f.model.key_bias.layers && l < f.model.config.n_layers; l++)
        for (int h = 0; h < TINY_KV_HEADS; h++) {
            const struct layer_key_bias *b = &f.model.key_bias.layers[l];
            cr_expect(b->first[h] == 2 * h && b->pair[2 * h] == 1 && b->pair[2 * h + 1] == TINY_HEAD_DIM / 2 - 2);
        }
    fixture_close(&f);
}

/* The two pairs are marked in every head and the small biases are not; which pairs are kept out of the blocks is part of the blocks' identity. */
Test(engine_bias, test_marks_the_large_pairs)
{
    uint8_t with[FINGERPRINT_BYTES], without[FINGERPRINT_BYTES];
    int n_with, n_without;
    fingerprint((struct fixture_params){.key_bias = SIGMAS}, with, &n_with);
    fingerprint((struct fixture_params){0}, without, &n_without);
    cr_expect(n_with == 3 * TINY_KV_HEADS * 2 && n_without == 0, "%d and %d pairs", n_with, n_without);
    cr_expect(memcmp(with, without, FINGERPRINT_BYTES) != 0);
}
