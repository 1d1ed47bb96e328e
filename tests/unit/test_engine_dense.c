/* With exact blocks and everything fetched the engine is plain full attention, whatever is kept where. */
#include "tests/unit/tiny_reference.h"
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { N_PROMPT = 600, N_DECODE = 200, N_TOKENS = N_PROMPT + N_DECODE };

static int32_t tokens[N_TOKENS];
static double want[N_TOKENS * TINY_VOCAB];
static struct fixture f;

static void setup(void)
{
    fixture_tokens(8, tokens, N_TOKENS);
    cr_assert(fixture_open(&f, (struct fixture_params){0}));
    tiny_reference_logits(&f, tokens, N_TOKENS, want);
}
static void teardown(void)
{
    fixture_close(&f);
}
TestSuite(engine_dense, .init = setup, .fini = teardown);

/* Mean and largest KL over the prompt's end and every decoded token. */
static double mean_kl(const struct engine_config *config, double *ret_max)
{
    struct engine *engine = fixture_engine(&f, config, NULL);
    float *got = fixture_logits(engine, &(struct fixture_run){.tokens = tokens, .n_prompt = N_PROMPT, .n_decode = N_DECODE}, NULL);
    const double mean = tiny_reference_mean_kl(want + (size_t)(N_PROMPT - 1) * TINY_VOCAB, got, N_DECODE + 1, ret_max);
    free(got);
    engine_free(engine);
    return mean;
}

Test(engine_dense, test_all_fetched_in_bf16_is_full_attention)
{
    static const int budgets[] = {0, 50, 300}, recents[] = {0, 40, 300};
    for (int i = 0; i < 3; i++) {
        struct engine_config config = fixture_config();
        double max;
        config.format = KV_FORMAT_BF16;
        config.fetch = INT32_MAX;
        config.budget = budgets[i];
        config.recent = recents[i];
        const double mean = mean_kl(&config, &max);
        fprintf(stderr, "budget %d recent %d: KL to full attention %.2g, at most %.2g\n", budgets[i], recents[i], mean, max);
        cr_expect(mean < 3e-9 && max < 1e-6, "budget %d recent %d: KL %g, at most %g", budgets[i], recents[i], mean, max);
    }
}

/* However the layers and heads share the kept rows, what is kept and what is slow make the whole. */
Test(engine_dense, test_all_fetched_is_full_attention_with_every_selector)
{
    for (int i = 0; i < FIXTURE_SELECTORS; i++) {
        struct engine_config config = fixture_config();
        double max;
        config.format = KV_FORMAT_BF16;
        config.fetch = INT32_MAX;
        config.budget = 150;
        config.selector = fixture_selectors[i];
        const double mean = mean_kl(&config, &max);
        cr_expect(mean < 3e-9 && max < 1e-6, "%s: KL %g, at most %g", config.selector->name, mean, max);
    }
}

/* Formats cost more the fewer bits they have, and dropping costs far more than any of them. */
Test(engine_dense, test_formats_and_dropping_in_order)
{
    struct engine_config config = fixture_config();
    double max;
    config.fetch = INT32_MAX;
    config.budget = 40;
    config.format = KV_FORMAT_K8V8;
    const double k8v8 = mean_kl(&config, &max);
    config.format = KV_FORMAT_K8V4;
    const double k8v4 = mean_kl(&config, &max);
    config.fetch = 128;
    const double fetched = mean_kl(&config, &max);
    config.fetch = 0;
    const double dropped = mean_kl(&config, &max);
    fprintf(stderr, "KL to full attention: k8v8 %.2g, k8v4 %.2g, fetch 128 %.2g, dropped %.2g\n", k8v8, k8v4, fetched, dropped);
    cr_expect(k8v8 < k8v4 && k8v4 < fetched && fetched < dropped);
}

Test(engine_dense, test_prompt_logprobs)
{
    struct engine_config config = fixture_config();
    config.format = KV_FORMAT_BF16;
    struct engine *engine = fixture_engine(&f, &config, NULL);
    struct sequence *seq = fixture_prefilled(engine, &(struct fixture_run){.tokens = tokens, .n_prompt = N_PROMPT, .prompt_logprobs = true});
    const float *got = sequence_prompt_logprobs(seq);
    cr_assert(got);
    for (int i = 0; i + 1 < N_PROMPT; i++) {
        const double *row = want + (size_t)i * TINY_VOCAB;
        double max = -INFINITY, sum = 0;
        for (int t = 0; t < TINY_VOCAB; t++)
            max = fmax(max, row[t]);
        for (int t = 0; t < TINY_VOCAB; t++)
            sum += exp(row[t] - max);
        const double expected = row[tokens[i + 1]] - max - log(sum);
        cr_assert(fabs(expected - (double)got[i]) < 2e-2, "position %d: %g, want %g", i, (double)got[i], expected);
    }
    sequence_free(seq);
    engine_free(engine);
}
