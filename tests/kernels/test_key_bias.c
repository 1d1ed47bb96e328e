/* The terms of key biases in every op that takes them: against double, and the same bits in every way. */
#include "proto/base/base_assert.h"
#include "tests/kernels/bias_fixture.h"
#include "tests/kernels/kv_sequence.h"
#include <criterion/criterion.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS_MAX = 4 };

/* ---- prefill ---- */

struct prefill_case {
    int n_heads, n_kv_heads, d;
    int64_t pos0;
    int n_q;
    int n_pairs[HEADS_MAX];
};

struct prefill_data {
    struct prefill_case c;
    struct bias_fixture bias;
    int64_t n_keys, stride;
    float *q;
    uint16_t *k, *v;
};

static void prefill_make(struct prefill_data *t, struct prefill_case c, uint64_t seed)
{
    struct ref_rng rng = {seed};
    *t = (struct prefill_data){.c = c, .n_keys = c.pos0 + c.n_q};
    t->stride = t->n_keys * c.d;
    t->q = random_floats(&rng, (size_t)c.n_q * (size_t)c.n_heads * (size_t)c.d, 1);
    t->k = random_bf16(&rng, (size_t)(c.n_kv_heads * t->stride), 1);
    t->v = random_bf16(&rng, (size_t)(c.n_kv_heads * t->stride), 1);
    bias_fixture_make(&t->bias, &rng, c.n_kv_heads, c.d, (int)t->n_keys, c.n_pairs, 30);
}

static void prefill_free(struct prefill_data *t)
{
    bias_fixture_free(&t->bias);
    free(t->q), free(t->k), free(t->v);
}

static int prefill_run(const struct prefill_data *t, struct fixture *f, int device, const struct key_bias *bias, int first, int n_q, float *out, float *ml)
{
    const struct prefill_case *c = &t->c;
    struct attn_prefill_params p = {
        .q = t->q + (int64_t)first * c->n_heads * c->d, .pos0 = c->pos0 + first, .n_q = n_q, .k = t->k, .v = t->v, .head_stride = t->stride, .n_heads = c->n_heads,
        .n_kv_heads = c->n_kv_heads, .head_dim = c->d, .scale = 1 / sqrtf((float)c->d), .bias = bias, .out = out + (int64_t)first * c->n_heads * c->d,
        .ret_ml = ml ? ml + (int64_t)first * c->n_heads * 2 : NULL,
    };
    return f->ops->attn_prefill(f->devices[device].stream, &p);
}

static void check_prefill(const struct prefill_data *t, const float *out, const float *ml)
{
    const struct prefill_case *c = &t->c;
    const int group = c->n_heads / c->n_kv_heads;
    double *q = widen_floats(t->q, (size_t)c->n_q * (size_t)c->n_heads * (size_t)c->d), expected[256], *terms = aligned_zeros(sizeof(double) * (size_t)t->n_keys);
    double *k = widen_bf16(t->k, (size_t)(c->n_kv_heads * t->stride)), *v = widen_bf16(t->v, (size_t)(c->n_kv_heads * t->stride));
    for (int i = 0; i < c->n_q; i++)
        for (int h = 0; h < c->n_heads; h++) {
            const int64_t at = (int64_t)i * c->n_heads + h, kv = h / group * t->stride;
            for (int64_t p = 0; p <= c->pos0 + i; p++)
                terms[p] = bias_fixture_term(&t->bias, h / group, t->q + at * c->d, p) / sqrt(c->d);
            struct ref_attention_result r = ref_attention(q + at * c->d, k + kv, v + kv, NULL, terms, (int)c->pos0 + i + 1, c->d, 1 / sqrtf((float)c->d), expected);
            const double difference = max_difference(out + at * c->d, expected, (size_t)c->d);
            cr_assert_lt(difference, 1e-4, "query %d head %d: %g", i, h, difference);
            cr_assert_float_eq(ml[2 * at], r.m, 1e-5 * (1 + fabs(r.m)));
        }
    free(q), free(k), free(v), free(terms);
}

static const struct prefill_case prefill_cases[] = {
    {9, 3, 64, 300, 40, {1, 0, 5}},
    {4, 4, 32, 511, 1, {16, 1, 0, 2}},
    {8, 1, 128, 129, 33, {KEY_BIAS_PAIRS_MAX}},
    {2, 2, 256, 140, 5, {KEY_BIAS_PAIRS_MAX, 3}},
    {3, 3, 96, 0, 128, {0, 0, 2}},
};

Test(key_bias, prefill_matches_reference_and_itself)
{
    struct fixture f;
    fixture_open(&f);
    for (size_t i = 0; i < ARRAY_LEN(prefill_cases); i++) {
        struct prefill_data t;
        prefill_make(&t, prefill_cases[i], 7 + i);
        const size_t n_out = (size_t)t.c.n_q * (size_t)t.c.n_heads * (size_t)t.c.d, n_ml = (size_t)t.c.n_q * (size_t)t.c.n_heads * 2;
        float *out = aligned_zeros(n_out * sizeof(float)), *ml = aligned_zeros(n_ml * sizeof(float)), *other = aligned_zeros(n_out * sizeof(float));
        cr_assert_eq(prefill_run(&t, &f, 0, &t.bias.bias, 0, t.c.n_q, out, ml), 0);
        check_prefill(&t, out, ml);
        for (int v = 1; v < f.n; v++) {
            memset(other, 0xFF, n_out * sizeof(float));
            for (int q = 0; q < t.c.n_q; q += 9) /* in lots: a query does not see its neighbours */
                cr_assert_eq(prefill_run(&t, &f, v, &t.bias.bias, q, t.c.n_q - q < 9 ? t.c.n_q - q : 9, other, NULL), 0);
            cr_assert_eq(memcmp(out, other, n_out * sizeof(float)), 0, "case %zu, isa %d, %d threads", i, f.devices[v].isa, f.devices[v].n_threads);
        }
        free(out), free(ml), free(other);
        prefill_free(&t);
    }
    fixture_close(&f);
}

/* H2O's sums: a prompt's blocks in order, each call with the (m, l) of its attention. */
static void column_sums(const struct prefill_data *t, struct fixture *f, int device, float *sums)
{
    const struct prefill_case *c = &t->c;
    const size_t n_out = BLOCK_TOKENS * (size_t)c->n_heads * (size_t)c->d;
    float *out = aligned_zeros(n_out * sizeof(float)), *ml = aligned_zeros(BLOCK_TOKENS * (size_t)c->n_heads * 2 * sizeof(float));
    for (int pos = 0; pos < c->n_q; pos += BLOCK_TOKENS) {
        struct attn_prefill_params p = {
            .q = t->q + (int64_t)pos * c->n_heads * c->d, .pos0 = pos, .n_q = c->n_q - pos < BLOCK_TOKENS ? c->n_q - pos : BLOCK_TOKENS, .k = t->k, .v = t->v,
            .head_stride = t->stride, .n_heads = c->n_heads, .n_kv_heads = c->n_kv_heads, .head_dim = c->d, .scale = 1 / sqrtf((float)c->d), .bias = &t->bias.bias, .out = out,
            .ret_ml = ml,
        };
        const struct column_sum_params columns = {.attn = &p, .sums = sums, .sum_stride = c->n_q};
        cr_assert_eq(f->ops->attn_prefill(f->devices[device].stream, &p), 0);
        cr_assert_eq(f->ops->attn_column_sums(f->devices[device].stream, &columns), 0);
    }
    free(out), free(ml);
}

Test(key_bias, column_sums_match_reference_and_themselves)
{
    enum { N = 300 };
    struct fixture f;
    struct prefill_data t;
    fixture_open(&f);
    prefill_make(&t, (struct prefill_case){4, 2, 64, 0, N, {3, KEY_BIAS_PAIRS_MAX}}, 19);
    float *first = aligned_zeros(sizeof(float) * 2 * N), *sums = aligned_zeros(sizeof(float) * 2 * N);
    double *expected = aligned_zeros(sizeof(double) * 2 * N);
    for (int i = 0; i < N; i++)
        for (int h = 0; h < 4; h++) {
            const float *q = t.q + (i * 4 + h) * 64;
            double p[N], m = -INFINITY, l = 0;
            for (int j = 0; j <= i; j++) {
                p[j] = bias_fixture_term(&t.bias, h / 2, q, j);
                for (int x = 0; x < 64; x++)
                    p[j] += (double)q[x] * ref_bf16_value(t.k[h / 2 * t.stride + j * 64 + x]);
                p[j] /= 8;
                m = fmax(m, p[j]);
            }
            for (int j = 0; j <= i; j++)
                l += exp(p[j] - m);
            for (int j = 0; j <= i; j++)
                expected[h / 2 * N + j] += exp(p[j] - m) / l;
        }
    for (int dev = 0; dev < f.n; dev++) {
        column_sums(&t, &f, dev, dev ? sums : first);
        for (int j = 0; dev == 0 && j < 2 * N; j++)
            cr_assert_float_eq(first[j], expected[j], 1e-4 * expected[j] + 1e-6, "%d: %g, not %g", j, first[j], expected[j]);
        cr_assert(dev == 0 || memcmp(first, sums, sizeof(float) * 2 * N) == 0);
    }
    free(first), free(sums), free(expected);
    prefill_free(&t);
    fixture_close(&f);
}

/* A layer without marked pairs gives the bits of no bias at all. */
Test(key_bias, no_pairs_change_nothing)
{
    struct fixture f;
    struct prefill_data t;
    fixture_open(&f);
    prefill_make(&t, (struct prefill_case){9, 3, 64, 256, 128, {0, 0, 0}}, 3);
    const size_t n_out = 128 * 9 * 64;
    float *with = aligned_zeros(n_out * sizeof(float)), *without = aligned_zeros(n_out * sizeof(float));
    cr_assert_eq(prefill_run(&t, &f, f.n - 1, &t.bias.bias, 0, 128, with, NULL), 0);
    cr_assert_eq(prefill_run(&t, &f, f.n - 1, NULL, 0, 128, without, NULL), 0);
    cr_assert_eq(memcmp(with, without, n_out * sizeof(float)), 0);
    free(with), free(without);
    prefill_free(&t);
    fixture_close(&f);
}

/* ---- the selector's window ---- */

/* Mean over the window and the group of the softmax weights; no pooling. */
static void reference_window(const struct prefill_data *t, int n_window, double *scores)
{
    const struct prefill_case *c = &t->c;
    const int64_t n_columns = t->n_keys - n_window;
    const int group = c->n_heads / c->n_kv_heads;
    double *p = aligned_zeros(sizeof(double) * (size_t)t->n_keys);
    memset(scores, 0, sizeof(double) * (size_t)(c->n_kv_heads * n_columns));
    for (int w = 0; w < n_window; w++)
        for (int h = 0; h < c->n_heads; h++) {
            const int64_t visible = n_columns + w + 1;
            const float *q = t->q + ((int64_t)w * c->n_heads + h) * c->d;
            double m = -INFINITY, l = 0;
            for (int64_t i = 0; i < visible; i++) {
                p[i] = bias_fixture_term(&t->bias, h / group, q, i);
                for (int x = 0; x < c->d; x++)
                    p[i] += (double)q[x] * ref_bf16_value(t->k[h / group * t->stride + i * c->d + x]);
                p[i] /= sqrt(c->d);
                m = fmax(m, p[i]);
            }
            for (int64_t i = 0; i < visible; i++)
                l += exp(p[i] - m);
            for (int64_t i = 0; i < n_columns; i++)
                scores[h / group * n_columns + i] += exp(p[i] - m) / l / n_window / group;
        }
    free(p);
}

Test(key_bias, window_scores_match_reference_and_themselves)
{
    enum { WINDOW = 16 };
    static const struct prefill_case cases[] = {{6, 3, 64, 1084, WINDOW, {4, 0, 1}}, {4, 1, 128, 200, WINDOW, {KEY_BIAS_PAIRS_MAX}}};
    struct fixture f;
    fixture_open(&f);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct prefill_data t;
        prefill_make(&t, cases[i], 40 + i);
        const struct prefill_case *c = &t.c;
        const int64_t n_columns = t.n_keys - WINDOW;
        const size_t n = (size_t)(c->n_kv_heads * n_columns);
        float *first = aligned_zeros(sizeof(float) * n), *scores = aligned_zeros(sizeof(float) * n);
        double *expected = aligned_zeros(sizeof(double) * n);
        reference_window(&t, WINDOW, expected);
        struct window_score_params p = {.q = t.q, .n_window = WINDOW, .k = t.k, .head_stride = t.stride, .n_keys = t.n_keys, .n_heads = c->n_heads,
                                        .n_kv_heads = c->n_kv_heads, .head_dim = c->d, .scale = 1 / sqrtf((float)c->d), .bias = &t.bias.bias, .last = n_columns, .pool = 1, .chunk = 1};
        for (int dev = 0; dev < f.n; dev++) {
            p.scores = dev ? scores : first;
            cr_assert_eq(f.ops->window_scores(f.devices[dev].stream, &p), 0);
            for (size_t j = 0; dev == 0 && j < n; j++)
                cr_assert_float_eq(first[j], expected[j], 1e-4 * expected[j] + 1e-8, "case %zu, %zu: %g, not %g", i, j, first[j], expected[j]);
            cr_assert(dev == 0 || memcmp(first, scores, sizeof(float) * n) == 0);
        }
        free(first), free(scores), free(expected);
        prefill_free(&t);
    }
    fixture_close(&f);
}

/* ---- decode ---- */

struct decode_case {
    enum kv_format format;
    int group, d, n_blocks, n_recent, fetch, n_pairs;
    double kept_share;
};

static const struct decode_case decode_cases[] = {
    {KV_FORMAT_BF16, 3, 64, 5, 37, INT_MAX, 2, .2},  {KV_FORMAT_K8V4, 3, 64, 6, 90, INT_MAX, 3, .1}, {KV_FORMAT_K8V4, 5, 128, 9, 16, 17, 1, .05},
    {KV_FORMAT_K8V8, 2, 96, 4, 300, 16, 7, .4},      {KV_FORMAT_K8V4, 1, 256, 3, 257, 12, KEY_BIAS_PAIRS_MAX, .5}, {KV_FORMAT_K8V4, 4, 64, 3, 40, 0, 2, .1},
};

static int decode(struct fixture *f, int device, const struct decode_case *c, const struct kv_sequence *s, const float *q, float *out, int32_t *chosen, int *ret_n)
{
    struct attn_decode_item item = kv_sequence_item(s, q, out, c->fetch, chosen);
    struct attn_decode_params p = {.items = &item, .n_items = 1, .layout = &s->layout, .group = c->group, .head_dim = c->d, .scale = 1 / sqrtf((float)c->d),
                                   .bias = kv_sequence_key_bias(s)};
    int r = f->ops->attn_decode(f->devices[device].stream, &p);
    *ret_n = item.ret_n_chosen;
    kv_sequence_to_pages(s, chosen, *ret_n);
    return r;
}

/* Kept rows anywhere, recent rows, pages: each position's own term in each. test_page_scorers.c holds the choice of pages. */
Test(key_bias, decode_matches_reference_and_itself)
{
    struct fixture f;
    fixture_open(&f);
    for (size_t i = 0; i < ARRAY_LEN(decode_cases); i++) {
        const struct decode_case *c = &decode_cases[i];
        const size_t n_out = (size_t)c->group * (size_t)c->d;
        struct ref_rng rng = {90 + i};
        struct kv_sequence s;
        kv_sequence_make(&s, &f, c->format, c->d, c->n_blocks, c->n_recent, c->kept_share, 50 + i);
        kv_sequence_bias(&s, c->n_pairs, 8, 70 + i);
        float *q = random_floats(&rng, n_out, 2), *out = aligned_zeros(sizeof(float) * n_out), *other = aligned_zeros(sizeof(float) * n_out);
        int32_t *chosen = aligned_zeros(sizeof(int32_t) * ((size_t)s.n_pages + 1)), *others = aligned_zeros(sizeof(int32_t) * ((size_t)s.n_pages + 1));
        double expected[256];
        int n, n_other;
        cr_assert_eq(decode(&f, 0, c, &s, q, out, chosen, &n), 0);
        for (int h = 0; h < c->group; h++) {
            kv_sequence_attention(&s, q + h * c->d, 1 / sqrtf((float)c->d), chosen, n, expected);
            const double difference = max_difference(out + h * c->d, expected, (size_t)c->d);
            cr_assert_lt(difference, c->format == KV_FORMAT_BF16 ? 3e-5 : 2e-3, "case %zu head %d: %g", i, h, difference);
        }
        for (int dev = 1; dev < f.n; dev++) {
            cr_assert_eq(decode(&f, dev, c, &s, q, other, others, &n_other), 0);
            cr_assert(n == n_other && memcmp(chosen, others, sizeof(int32_t) * (size_t)n) == 0);
            cr_assert_eq(memcmp(out, other, sizeof(float) * n_out), 0, "case %zu isa %d", i, f.devices[dev].isa);
        }
        free(q), free(out), free(other), free(chosen), free(others);
        kv_sequence_free(&s);
    }
    fixture_close(&f);
}
