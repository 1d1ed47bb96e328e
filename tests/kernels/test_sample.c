#include "kernels/cpu/philox.h"
#include "kernels/sample_one.h"
#include "proto/base/base_assert.h"
#include "tests/kernels/kv_fixture.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static struct sample_params defaults(void)
{
    return (struct sample_params){.temperature = 1, .top_p = 1, .repetition_penalty = 1};
}

/* Philox4x32-10 on the counters and keys of Random123's known-answer file. */
Test(sample, philox_known_answers)
{
    static const struct { uint32_t counter[4], key[2], expected[4]; } known[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}, {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < ARRAY_LEN(known); i++) {
        struct philox_block b = philox4x32_10(known[i].counter, known[i].key);
        cr_assert_eq(memcmp(b.word, known[i].expected, sizeof b.word), 0);
    }
    cr_assert_eq(philox_uniform(0, 0), (double)(((uint64_t)0xe169c58d << 32 | 0x6627e8d5) >> 11) * 0x1p-53);
}

/* The distribution that the op draws from, by sorting, in double: probabilities [n]. */
struct ranked {
    double p;
    int32_t id;
};

static int by_rank(const void *a, const void *b)
{
    const struct ranked *x = a, *y = b;
    return x->p > y->p ? -1 : x->p < y->p ? 1 : x->id < y->id ? -1 : 1;
}

static void reference_distribution(const double *logits, int n, const struct sample_params *p, double *ret)
{
    struct ranked *r = aligned_zeros(sizeof *r * (size_t)n);
    double max = -INFINITY, total = 0, reached = 0;
    int kept = n;
    for (int i = 0; i < n; i++)
        max = fmax(max, logits[i]);
    for (int i = 0; i < n; i++) {
        r[i] = (struct ranked){exp((logits[i] - max) / p->temperature), i};
        if (r[i].p < p->min_p)
            r[i].p = 0;
    }
    qsort(r, (size_t)n, sizeof *r, by_rank);
    if (p->top_k > 0 && p->top_k < n)
        kept = p->top_k;
    for (int i = 0; i < kept; i++)
        total += r[i].p;
    for (int i = 0; i < kept && p->top_p < 1; i++) {
        reached += r[i].p;
        if (reached >= p->top_p * total) {
            kept = i + 1;
            total = reached;
        }
    }
    memset(ret, 0, sizeof *ret * (size_t)n);
    for (int i = 0; i < kept; i++)
        ret[r[i].id] = r[i].p / total;
    free(r);
}

/* Chi-square of n_draws against the distribution, cells of less than 5 expected joined; draws of impossible tokens fail. Returns z, about N(0, 1). */
static double chi_square(struct fixture *f, int device, const float *logits, int n, struct sample_params p, const double *expected, int n_draws)
{
    int *count = aligned_zeros(sizeof *count * (size_t)n);
    double chi = 0, rest_expected = 0, rest = 0;
    int cells = 0;
    for (int i = 0; i < n_draws; i++) {
        struct sample_result r = {0};
        p.position = (uint64_t)i;
        cr_assert_eq(sample_one(f->ops, f->devices[device].stream, logits, n, &p, &r), 0);
        cr_assert(expected[r.token] > 0, "token %d was filtered", r.token);
        count[r.token]++;
    }
    for (int i = 0; i < n; i++) {
        double e = expected[i] * n_draws;
        if (e < 5) {
            rest_expected += e;
            rest += count[i];
            continue;
        }
        chi += (count[i] - e) * (count[i] - e) / e;
        cells++;
    }
    if (rest_expected > 5) {
        chi += (rest - rest_expected) * (rest - rest_expected) / rest_expected;
        cells++;
    }
    free(count);
    return cells > 1 ? (chi - (cells - 1)) / sqrt(2.0 * (cells - 1)) : 0;
}

Test(sample, draws_follow_the_distribution)
{
    enum { N = 300, DRAWS = 20000 };
    static const struct { float temperature, top_p, min_p; int top_k; } settings[] = {
        {1, 1, 0, 0}, {.7f, 1, 0, 20}, {1, .9f, 0, 0}, {1.5f, .8f, 0, 50}, {1, 1, .05f, 0}, {2, .95f, .01f, 100}, {.01f, 1, 0, 0}, {1, 0, 0, 0}, {1, 1, 0, 1},
    };
    struct fixture f;
    fixture_open(&f);
    struct ref_rng rng = {11};
    float *logits = random_floats(&rng, N, 2);
    double *wide = widen_floats(logits, N), expected[N];
    for (size_t i = 0; i < ARRAY_LEN(settings); i++) {
        struct sample_params p = defaults();
        p.temperature = settings[i].temperature, p.top_p = settings[i].top_p, p.min_p = settings[i].min_p, p.top_k = settings[i].top_k;
        p.seed = 40 + i;
        reference_distribution(wide, N, &p, expected);
        double z = chi_square(&f, f.n - 1, logits, N, p, expected, DRAWS);
        cr_assert_lt(z, 4.5, "setting %zu: z %g", i, z);
    }
    free(logits);
    free(wide);
    fixture_close(&f);
}

static void expect_same(const struct sample_result *a, const struct sample_result *b)
{
    cr_assert_eq(a->token, b->token);
    cr_assert_eq(a->logprob, b->logprob);
    cr_assert_eq(a->n_top, b->n_top);
    for (int i = 0; i < a->n_top; i++) {
        cr_assert_eq(a->top[i].token, b->top[i].token);
        cr_assert_eq(a->top[i].logprob, b->top[i].logprob);
    }
}

/* The same token and the same log-probabilities to the last bit everywhere, odd sizes included. */
Test(sample, all_ways_give_the_same_bits)
{
    static const int sizes[] = {1, 15, 17, 1000, 1024, 1025, 49152};
    struct fixture f;
    fixture_open(&f);
    for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
        struct ref_rng rng = {21 + i};
        float *logits = random_floats(&rng, (size_t)sizes[i], 4);
        for (int draw = 0; draw < 12; draw++) {
            struct sample_params p = defaults();
            struct sample_result first, r;
            p.seed = 5, p.position = (uint64_t)draw, p.n_top = draw, p.temperature = draw % 4 ? .6f + .2f * (float)(draw % 4) : 0;
            p.top_k = draw % 3 == 1 ? 40 : 0, p.top_p = draw % 2 ? .9f : 1, p.min_p = draw % 5 == 4 ? .02f : 0;
            for (int dev = 0; dev < f.n; dev++) {
                cr_assert_eq(sample_one(f.ops, f.devices[dev].stream, logits, sizes[i], &p, dev ? &r : &first), 0);
                if (dev)
                    expect_same(&first, &r);
            }
        }
        free(logits);
    }
    fixture_close(&f);
}

/* Thresholds on a large vocabulary where hundreds of thousands of tokens tie or are nearly alike: exact counts of what may be drawn. */
Test(sample, filters_are_exact_among_ties)
{
    enum { N = 5000 };
    struct fixture f;
    fixture_open(&f);
    float *logits = aligned_zeros(sizeof(float) * N); /* all equal: order of id decides */
    double expected[N];
    for (int k = 1; k <= 64; k *= 4) {
        struct sample_params p = defaults();
        p.top_k = k;
        for (int i = 0; i < N; i++)
            expected[i] = i < k ? 1.0 / k : 0;
        cr_assert_lt(chi_square(&f, f.n - 1, logits, N, p, expected, 3000), 4.5);
        p = defaults();
        p.top_p = (float)k / N * 0.9999f;
        cr_assert_lt(chi_square(&f, f.n - 1, logits, N, p, expected, 3000), 4.5);
    }
    free(logits);
    fixture_close(&f);
}

Test(sample, greedy_takes_the_lowest_of_the_largest)
{
    struct fixture f;
    fixture_open(&f);
    float logits[100];
    for (int i = 0; i < 100; i++)
        logits[i] = (float)(i % 10);
    logits[3] = NAN;
    logits[4] = -INFINITY;
    struct sample_params p = defaults();
    struct sample_result r = {0};
    p.temperature = 0;
    p.n_top = 12;
    for (int dev = 0; dev < f.n; dev++) {
        cr_assert_eq(sample_one(f.ops, f.devices[dev].stream, logits, 100, &p, &r), 0);
        cr_assert_eq(r.token, 9);
        cr_assert_eq(r.n_top, 12);
        for (int i = 0; i < 10; i++)
            cr_assert_eq(r.top[i].token, 9 + 10 * i, "ties in order of id");
        cr_assert_eq(r.top[10].token, 8);
        logits[50] = INFINITY;
        cr_assert_eq(sample_one(f.ops, f.devices[dev].stream, logits, 100, &p, &r), 0);
        cr_assert_eq(r.token, 50);
        cr_assert_eq(r.logprob, 0);
        logits[50] = 0;
    }
    fixture_close(&f);
}

/* Log-probabilities are those of the raw logits, whatever was done to them before drawing. */
Test(sample, logprobs_are_of_the_raw_logits)
{
    enum { N = 2000 };
    struct fixture f;
    fixture_open(&f);
    struct ref_rng rng = {3};
    float *logits = random_floats(&rng, N, 3);
    double total = 0;
    for (int i = 0; i < N; i++)
        total += exp(logits[i]);
    struct logit_bias bias = {17, 100};
    struct sample_params p = defaults();
    struct sample_result r = {0};
    p.bias = &bias, p.n_bias = 1, p.n_top = 32, p.temperature = 3;
    cr_assert_eq(sample_one(f.ops, f.devices[f.n - 1].stream, logits, N, &p, &r), 0);
    cr_assert_eq(r.token, 17);
    cr_assert_float_eq(r.logprob, logits[17] - log(total), 2e-5);
    for (int i = 0; i < 32; i++) {
        int better = 0;
        cr_assert_float_eq(r.top[i].logprob, logits[r.top[i].token] - log(total), 2e-5);
        for (int j = 0; j < N; j++)
            better += logits[j] > logits[r.top[i].token];
        cr_assert_eq(better, i);
    }
    free(logits);
    fixture_close(&f);
}

static int32_t greedy(struct fixture *f, const float *logits, int n, struct sample_params p)
{
    struct sample_result r = {0};
    p.temperature = 0;
    return sample_one(f->ops, f->devices[f->n - 1].stream, logits, n, &p, &r) == 0 ? r.token : -1;
}

Test(sample, penalties_bias_and_bans)
{
    struct fixture f;
    fixture_open(&f);
    const float logits[] = {5, 4, -1, -1.5f, 4.5f};
    struct sample_params p = defaults();
    cr_assert_eq(greedy(&f, logits, 5, p), 0);
    struct token_count counts[] = {{0, 0, 2}, {4, 1, 0}};
    p.counts = counts, p.n_counts = 2;
    cr_assert_eq(greedy(&f, logits, 5, p), 0, "all off");
    p.presence_penalty = .6f; /* 5 - .6 < 4.5; a prompt token pays nothing */
    cr_assert_eq(greedy(&f, logits, 5, p), 4);
    p.presence_penalty = 0, p.frequency_penalty = .3f; /* 5 - 2 * .3 */
    cr_assert_eq(greedy(&f, logits, 5, p), 4);
    p.frequency_penalty = 0, p.repetition_penalty = 1.3f; /* 3.85, and 3.46 for the token of the prompt */
    cr_assert_eq(greedy(&f, logits, 5, p), 1);
    const float negative[] = {-2, -2.2f};
    p.counts = (struct token_count[]){{0, 0, 1}}, p.n_counts = 1; /* -2.6 */
    cr_assert_eq(greedy(&f, negative, 2, p), 1);
    p = defaults();
    const int32_t banned[] = {0, 4};
    p.banned = banned, p.n_banned = 2;
    cr_assert_eq(greedy(&f, logits, 5, p), 1);
    struct logit_bias bias[] = {{2, 3}, {2, 3}, {0, 50}};
    p.bias = bias, p.n_bias = 3; /* both entries count; a ban outweighs any bias */
    cr_assert_eq(greedy(&f, logits, 5, p), 2);
    fixture_close(&f);
}

Test(sample, refuses_what_cannot_be)
{
    struct fixture f;
    fixture_open(&f);
    struct stream *s = f.devices[0].stream;
    float logits[4] = {1, 2, 3, 4}, none[2] = {-INFINITY, NAN};
    struct sample_result r = {0};
    struct sample_params p = defaults();
    cr_assert_eq(sample_one(f.ops, s, none, 2, &p, &r), -EINVAL);
    p.banned = (int32_t[]){0, 1, 2, 3}, p.n_banned = 4;
    cr_assert_eq(sample_one(f.ops, s, logits, 4, &p, &r), -EINVAL);
    p.banned = (int32_t[]){4}, p.n_banned = 1;
    cr_assert_eq(sample_one(f.ops, s, logits, 4, &p, &r), -EINVAL);
    p = defaults(), p.temperature = -1;
    cr_assert_eq(sample_one(f.ops, s, logits, 4, &p, &r), -EINVAL);
    p = defaults(), p.temperature = NAN;
    cr_assert_eq(sample_one(f.ops, s, logits, 4, &p, &r), -EINVAL);
    p = defaults(), p.top_p = 1.5f;
    cr_assert_eq(sample_one(f.ops, s, logits, 4, &p, &r), -EINVAL);
    p = defaults(), p.n_top = 33;
    cr_assert_eq(sample_one(f.ops, s, logits, 4, &p, &r), -EINVAL);
    p = defaults(), p.repetition_penalty = 0;
    cr_assert_eq(sample_one(f.ops, s, logits, 4, &p, &r), -EINVAL);
    p = defaults(), p.temperature = 1e-42f; /* so cold that 1 / t overflows: the largest is certain */
    cr_assert_eq(sample_one(f.ops, s, logits, 4, &p, &r), 0);
    cr_assert_eq(r.token, 3);
    fixture_close(&f);
}

/* Rows with every option, alone and together: options come and go at different rates. */
static struct sample_params mixed(int i, const struct logit_bias *bias, const struct token_count *counts, const int32_t *ids)
{
    struct sample_params p = defaults();
    p.seed = (uint64_t)i, p.position = 3 + (uint64_t)i, p.n_top = i % 4;
    p.temperature = i % 3 == 2 ? 0 : .5f + .1f * (float)i;
    p.top_k = i % 4 == 1 ? 30 : 0, p.top_p = i % 5 == 0 ? .8f : 1, p.min_p = i % 7 == 3 ? .01f : 0;
    p.bias = bias, p.n_bias = i % 2 ? 2 : 0;
    p.counts = counts, p.n_counts = 2, p.presence_penalty = i % 6 == 4 ? 2 : 0, p.repetition_penalty = i % 8 == 5 ? 1.5f : 1;
    p.banned = ids, p.n_banned = i % 4 == 3 ? 3 : 0;
    p.given = i % 9 == 8 ? ids : NULL;
    return p;
}

Test(sample, rows_of_a_call_are_as_alone)
{
    enum { N = 3001, ROWS = 30 };
    static const struct logit_bias bias[] = {{7, 3}, {2000, 5}};
    static const struct token_count counts[] = {{7, 1, 2}, {40, 0, 1}};
    static const int32_t ids[] = {2000, 1, 2};
    struct fixture f;
    fixture_open(&f);
    struct ref_rng rng = {5};
    float *logits = random_floats(&rng, (size_t)N * 7, 3);
    struct sample_result alone[ROWS];
    for (int i = 0; i < ROWS; i++) {
        struct sample_params p = mixed(i, bias, counts, ids);
        cr_assert_eq(sample_one(f.ops, f.devices[0].stream, logits + i % 7 * N, N, &p, &alone[i]), 0);
        cr_assert(!p.given || alone[i].token == ids[0]);
    }
    for (int dev = 0; dev < f.n; dev++) {
        struct sample_row rows[ROWS];
        for (int i = 0; i < ROWS; i++)
            rows[i] = (struct sample_row){.logits = logits + i % 7 * N, .params = mixed(i, bias, counts, ids), .status = 1};
        rows[11].params.top_p = 2;                /* refused */
        rows[17].params.banned = (int32_t[]){-1}; /* refused */
        rows[17].params.n_banned = 1;
        cr_assert_eq(f.ops->sample(f.devices[dev].stream, rows, ROWS, N), 0);
        for (int i = 0; i < ROWS; i++) {
            cr_assert_eq(rows[i].status, i == 11 || i == 17 ? -EINVAL : 0, "row %d", i);
            if (rows[i].status == 0)
                expect_same(&alone[i], &rows[i].result);
        }
    }
    cr_assert_eq(f.ops->sample(f.devices[0].stream, NULL, 0, N), 0);
    cr_assert_eq(f.ops->sample(f.devices[0].stream, NULL, -1, N), -EINVAL);
    cr_assert_eq(f.ops->sample(f.devices[0].stream, NULL, 0, 0), -EINVAL);
    free(logits);
    fixture_close(&f);
}

/* More candidates in a cut than a thread's scratch holds: rows take turns, and each has all it needs. */
Test(sample, rows_with_many_ties_are_as_alone)
{
    enum { N = 40000, ROWS = 9 };
    struct fixture f;
    fixture_open(&f);
    float *logits = aligned_zeros(sizeof(float) * N);
    for (int dev = 0; dev < f.n; dev++) {
        struct sample_row rows[ROWS];
        for (int i = 0; i < ROWS; i++) {
            rows[i] = (struct sample_row){.logits = logits, .params = defaults()};
            rows[i].params.seed = (uint64_t)i, rows[i].params.top_p = .1f * (float)(i + 1);
        }
        cr_assert_eq(f.ops->sample(f.devices[dev].stream, rows, ROWS, N), 0);
        for (int i = 0; i < ROWS; i++) {
            struct sample_result alone;
            cr_assert_eq(rows[i].status, 0);
            cr_assert_lt(rows[i].result.token, N / 10 * (i + 1) + 2);
            cr_assert_eq(sample_one(f.ops, f.devices[0].stream, logits, N, &rows[i].params, &alone), 0);
            expect_same(&alone, &rows[i].result);
        }
    }
    free(logits);
    fixture_close(&f);
}

/* What is given is not drawn, and nothing that would keep it from being drawn matters. */
Test(sample, a_given_token_has_its_own_log_probability)
{
    enum { N = 500 };
    struct fixture f;
    fixture_open(&f);
    struct ref_rng rng = {8};
    float *logits = random_floats(&rng, N, 3);
    double total = 0;
    for (int i = 0; i < N; i++)
        total += exp(logits[i]);
    const int32_t token = 123, outside = N;
    struct sample_params p = defaults();
    struct sample_result r = {0};
    p.given = p.banned = &token, p.n_banned = 1, p.top_k = 1;
    cr_assert_eq(sample_one(f.ops, f.devices[0].stream, logits, N, &p, &r), 0);
    cr_assert_eq(r.token, token);
    cr_assert_float_eq(r.logprob, logits[token] - log(total), 2e-5);
    p.given = &outside;
    cr_assert_eq(sample_one(f.ops, f.devices[0].stream, logits, N, &p, &r), -EINVAL);
    free(logits);
    fixture_close(&f);
}
