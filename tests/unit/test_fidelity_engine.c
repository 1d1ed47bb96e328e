/* Rows of the engine over a small random model: full attention is itself, formats come close, dropping does not, and what is counted is what was attended. */
#include "bench/fidelity/engine_method.h"
#include "bench/fidelity/row_list.h"
#include "tests/unit/engine_fixture.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <string.h>

enum { N_PROMPT = 512, N_FED = 150, N_CASES = 2 };
static int32_t tokens[N_CASES][N_PROMPT + N_FED + 1];
static struct fixture f;
static struct case_set set;

static void setup(void)
{
    cr_assert(fixture_open(&f, (struct fixture_params){.n_layers = 2}));
    case_set_init(&set, TASK_KL);
    for (int i = 0; i < N_CASES; i++) {
        fixture_tokens(30 + (uint64_t)i, tokens[i], N_PROMPT + N_FED + 1);
        cr_assert_eq(case_set_add(&set, tokens[i], N_PROMPT, i ? N_FED : 40, &(struct case_info){.sample = i}), 0);
    }
    cr_assert_eq(case_set_alloc_reference(&set, TINY_VOCAB), 0);
}
static void teardown(void)
{
    case_set_fini(&set);
    fixture_expect_no_memory(&f);
    fixture_close(&f);
}
TestSuite(fidelity_engine, .init = setup, .fini = teardown, .timeout = 100);

static struct row_result run(const struct engine_method *arg, int budget, int fetch, bool is_reference)
{
    const struct fidelity_method method = {.name = "m", .run = engine_method_run, .arg = arg};
    struct error err = {""};
    const struct fidelity_run r = {.model = &f.model, .cases = set.cases, .n_cases = set.n, .budget = budget, .fetch = fetch, .err = &err};
    struct task_scores scores;
    struct fidelity_sink sink;
    struct row_result result;
    cr_assert_eq(fidelity_sink_init(&sink, &set, TINY_VOCAB, is_reference, &scores), 0);
    cr_assert_eq(method.run(&method, &r, &sink), 0, "%s", err.text);
    cr_assert_eq(fidelity_sink_finish(&sink, NULL), 0);
    row_result_init(&result);
    row_result_add(&result, &set, &scores, 2, TINY_KV_HEADS);
    fidelity_sink_fini(&sink);
    task_scores_fini(&scores);
    return result;
}

static const struct engine_method exact = {.selector = "snapkv", .format = KV_FORMAT_BF16};
static const struct engine_method k8v4 = {.selector = "snapkv", .format = KV_FORMAT_K8V4};

/* The continuation's own tokens are attended by all: half of N_FED and 40 on the average, weighted by steps. */
static double own_tokens(void)
{
    return (40 * 41 / 2.0 + N_FED * (N_FED + 1) / 2.0) / (40 + N_FED);
}

Test(fidelity_engine, test_methods_come_in_the_expected_order)
{
    const struct row_result full = run(&exact, 0, FIDELITY_ALL, true), again = run(&exact, 100, FIDELITY_ALL, false);
    const struct row_result coded = run(&k8v4, 0, FIDELITY_ALL, false), demoted = run(&k8v4, 64, 128, false), dropped = run(&exact, 64, 0, false);
    cr_assert(full.kl == 0 && full.top1 == 1);
    cr_assert(again.kl < 1e-8, "what is kept and what is fetched is attended alike: %g", again.kl);
    cr_assert(coded.kl > 0 && coded.kl < demoted.kl && demoted.kl < dropped.kl, "%g %g %g", coded.kl, demoted.kl, dropped.kl);
}

Test(fidelity_engine, test_counts_are_what_was_attended)
{
    const struct row_result full = run(&exact, 0, FIDELITY_ALL, true), dropped = run(&exact, 64, 0, false), demoted = run(&k8v4, 64, 128, false);
    cr_assert_float_eq(full.attended, N_PROMPT + own_tokens(), 1e-6, "%f", full.attended);
    cr_assert_float_eq(dropped.attended, 64 + own_tokens(), 1e-6, "%f", dropped.attended);
    cr_assert(demoted.attended <= 64 + 128 + own_tokens() && demoted.attended > 64 + own_tokens(), "%f", demoted.attended);
    cr_assert(dropped.bytes_fetched == 0 && demoted.bytes_fetched > 0 && demoted.bytes_fetched < full.bytes_fetched);
}

static double fast_bytes(const struct row_result *r)
{
    for (int i = 0; i < r->n_values; i++)
        if (strcmp(r->values[i].name, FIDELITY_FAST_BYTES) == 0)
            return r->values[i].value;
    return NAN;
}

/* Kept rows, and of the other tokens what finds them where there is a choice: index entries of 192 bytes, means of 64. */
Test(fidelity_engine, test_fast_memory_is_what_is_kept_and_what_finds_the_rest)
{
    static const struct engine_method by_mean = {.selector = "snapkv", .scorer = "mean"}, by_oracle = {.selector = "snapkv", .scorer = "oracle"};
    const double heads = 2 * TINY_KV_HEADS, row = 2 * TINY_HEAD_DIM * sizeof(bf16_t);
    const struct row_result full = run(&exact, 0, FIDELITY_ALL, true), kept = run(&exact, FIDELITY_ALL, 0, false), dropped = run(&exact, 64, 0, false);
    const struct row_result demoted = run(&k8v4, 64, 128, false), mean = run(&by_mean, 64, 128, false), oracle = run(&by_oracle, 64, 128, false);
    cr_expect(fast_bytes(&full) == 0 && isnan(fast_bytes(&oracle)));
    cr_expect_float_eq(fast_bytes(&kept), heads * row, 1e-9);
    cr_expect_float_eq(fast_bytes(&dropped), heads * row * 64 / N_PROMPT, 1e-9);
    cr_expect_float_eq(fast_bytes(&demoted), heads * (row * 64 + (N_PROMPT - 64) / 16 * 192) / N_PROMPT, 1e-9, "%f", fast_bytes(&demoted));
    cr_expect_float_eq(fast_bytes(&mean), heads * (row * 64 + (N_PROMPT - 64) / 16 * 64) / N_PROMPT, 1e-9, "%f", fast_bytes(&mean));
}

Test(fidelity_engine, test_a_method_that_there_is_not_says_so)
{
    const struct engine_method none = {.selector = "nosuch"};
    const struct fidelity_method method = {.name = "m", .run = engine_method_run, .arg = &none};
    struct error err = {""};
    const struct fidelity_run r = {.model = &f.model, .cases = set.cases, .n_cases = set.n, .err = &err};
    cr_assert_eq(method.run(&method, &r, NULL), -ENOTSUP);
    cr_assert(strstr(err.text, "nosuch"));
}
