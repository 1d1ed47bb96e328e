/* keydiff_scores and attn_column_sums: against their formulas in double, and every instruction set, thread count and cut into calls against each other with ==. */
#include "proto/base/base_assert.h"
#include "tests/kernels/kv_fixture.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- keydiff ---- */

static double length_of(const double *x, int d)
{
    double sum = 0;
    for (int c = 0; c < d; c++)
        sum += x[c] * x[c];
    return fmax(sqrt(sum), 1e-12);
}

/* One head: keys [n, d], scores [n]. */
static void reference_keydiff(const uint16_t *k, int64_t n, int d, double *scores)
{
    double *keys = widen_bf16(k, (size_t)n * (size_t)d), anchor[256] = {0};
    for (int64_t i = 0; i < n; i++) {
        const double length = length_of(keys + i * d, d);
        for (int c = 0; c < d; c++)
            anchor[c] += keys[i * d + c] / length / (double)n;
    }
    for (int64_t i = 0; i < n; i++) {
        const double lengths = length_of(keys + i * d, d) * length_of(anchor, d);
        scores[i] = 0;
        for (int c = 0; c < d; c++)
            scores[i] -= keys[i * d + c] * anchor[c] / lengths;
    }
    free(keys);
}

struct keydiff_case {
    int n_kv_heads, d;
    int64_t n_keys, first, last;
};

static void check_keydiff(const struct fixture *f, const struct keydiff_case *c, uint64_t seed)
{
    struct ref_rng rng = {seed};
    const int64_t stride = (c->n_keys + 3) * c->d, n = c->last - c->first;
    uint16_t *k = random_bf16(&rng, (size_t)(stride * c->n_kv_heads), 1);
    float *first = aligned_zeros(sizeof(float) * (size_t)(c->n_kv_heads * n + 1)), *scores = aligned_zeros(sizeof(float) * (size_t)(c->n_kv_heads * n + 1));
    double *expected = aligned_zeros(sizeof(double) * (size_t)c->n_keys);
    for (int64_t i = 0; i < stride * c->n_kv_heads; i += c->d) /* a common direction, as keys have */
        k[i] = ref_bf16_bits(3 + ref_gaussian(&rng));
    memset(k + c->n_keys / 2 * c->d, 0, sizeof(*k) * (size_t)c->d); /* a key of length 0 */
    struct keydiff_params p = {.k = k, .head_stride = stride, .n_keys = c->n_keys, .n_kv_heads = c->n_kv_heads, .head_dim = c->d, .first = c->first, .last = c->last};
    for (int dev = 0; dev < f->n; dev++) {
        p.scores = dev ? scores : first;
        cr_assert_eq(f->ops->keydiff_scores(f->devices[dev].stream, &p), 0);
        cr_assert(dev == 0 || memcmp(first, scores, sizeof(float) * (size_t)(c->n_kv_heads * n)) == 0);
        cr_assert_eq(p.scores[c->n_kv_heads * n], 0);
    }
    for (int h = 0; h < c->n_kv_heads; h++) {
        reference_keydiff(k + h * stride, c->n_keys, c->d, expected);
        for (int64_t i = 0; i < n; i++)
            cr_assert_float_eq(first[h * n + i], expected[c->first + i], 2e-6, "head %d key %d: %g, not %g", h, (int)(c->first + i), first[h * n + i],
                               expected[c->first + i]);
    }
    free(k), free(first), free(scores), free(expected);
}

Test(keydiff_scores, match_the_formula_everywhere)
{
    static const struct keydiff_case cases[] = {{3, 64, 300, 0, 300}, {1, 64, 1, 0, 1}, {2, 128, 2049, 4, 2000}, {5, 16, 1024, 1000, 1001}, {2, 80, 700, 699, 700}, {2, 256, 1500, 0, 9}};
    struct fixture f;
    fixture_open(&f);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        check_keydiff(&f, &cases[i], 5 + i);
    fixture_close(&f);
}

/* Nothing but keys of length 0, and keys whose length no float holds. */
Test(keydiff_scores, are_never_nan)
{
    struct fixture f;
    fixture_open(&f);
    uint16_t k[20 * 64] = {0};
    float scores[20];
    const struct keydiff_params p = {.k = k, .head_stride = 0, .n_keys = 20, .n_kv_heads = 1, .head_dim = 64, .last = 20, .scores = scores};
    cr_assert_eq(f.ops->keydiff_scores(f.devices[0].stream, &p), 0);
    for (int i = 0; i < 20; i++)
        cr_assert_eq(scores[i], 0);
    for (int i = 0; i < 20 * 64; i++)
        k[i] = ref_bf16_bits(i < 64 ? 1 : 3e38);
    cr_assert_eq(f.ops->keydiff_scores(f.devices[0].stream, &p), 0);
    for (int i = 0; i < 20; i++)
        cr_assert(isfinite(scores[i]));
    fixture_close(&f);
}

Test(keydiff_scores, refuse_impossible_shapes)
{
    struct fixture f;
    fixture_open(&f);
    uint16_t k[2 * 64] = {0};
    float scores[2];
    const struct keydiff_params good = {.k = k, .head_stride = 128, .n_keys = 2, .n_kv_heads = 1, .head_dim = 64, .last = 2, .scores = scores};
    struct keydiff_params p[] = {good, good, good, good, good, good};
    static const int expected[] = {0, -EINVAL, -EINVAL, -EINVAL, -ENOTSUP, -ENOTSUP};
    p[1].last = 3, p[2].first = 2, p[3].n_kv_heads = 0, p[4].head_dim = 40, p[5].head_dim = 272;
    for (size_t i = 0; i < ARRAY_LEN(p); i++)
        cr_assert_eq(f.ops->keydiff_scores(f.devices[0].stream, &p[i]), expected[i], "shape %zu", i);
    fixture_close(&f);
}

/* ---- column sums ---- */

struct column_case {
    int n_heads, n_kv_heads, d, n;
};

struct column_data {
    struct column_case c;
    int64_t stride;
    float *q, *out, *ml;
    uint16_t *k, *v;
};

static void column_data_make(struct column_data *t, struct column_case c, uint64_t seed)
{
    struct ref_rng rng = {seed};
    *t = (struct column_data){.c = c, .stride = (int64_t)(c.n + 2) * c.d};
    t->q = random_floats(&rng, (size_t)c.n * c.n_heads * c.d, 2);
    t->k = random_bf16(&rng, (size_t)(t->stride * c.n_kv_heads), 1);
    t->v = random_bf16(&rng, (size_t)(t->stride * c.n_kv_heads), 1);
    t->out = aligned_zeros(sizeof(float) * (size_t)BLOCK_TOKENS * c.n_heads * c.d);
    t->ml = aligned_zeros(sizeof(float) * (size_t)BLOCK_TOKENS * c.n_heads * 2);
}

static void column_data_free(struct column_data *t)
{
    free(t->q), free(t->k), free(t->v), free(t->out), free(t->ml);
}

/* The whole prompt in calls of at most `step` queries that stay within a block. */
static void column_run(const struct column_data *t, const struct fixture *f, int dev, int step, float *sums)
{
    const struct column_case *c = &t->c;
    for (int pos = 0, n; pos < c->n; pos += n) {
        const int left_in_block = BLOCK_TOKENS - pos % BLOCK_TOKENS;
        n = step < left_in_block ? step : left_in_block;
        n = n < c->n - pos ? n : c->n - pos;
        const struct attn_prefill_params p = {.q = t->q + (int64_t)pos * c->n_heads * c->d, .pos0 = pos, .n_q = n, .k = t->k, .v = t->v, .head_stride = t->stride,
                                              .n_heads = c->n_heads, .n_kv_heads = c->n_kv_heads, .head_dim = c->d, .scale = 1 / sqrtf((float)c->d), .out = t->out, .ret_ml = t->ml};
        cr_assert_eq(f->ops->attn_prefill(f->devices[dev].stream, &p), 0);
        const struct column_sum_params sum = {.attn = &p, .sums = sums, .sum_stride = c->n + 1};
        cr_assert_eq(f->ops->attn_column_sums(f->devices[dev].stream, &sum), 0);
    }
}

/* sums [n_kv_heads, n + 1]. */
static void reference_columns(const struct column_data *t, double *sums)
{
    const struct column_case *c = &t->c;
    double *a = aligned_zeros(sizeof(double) * (size_t)c->n);
    for (int h = 0; h < c->n_heads; h++)
        for (int i = 0; i < c->n; i++) {
            double m = -INFINITY, l = 0;
            const int kv = h / (c->n_heads / c->n_kv_heads);
            for (int j = 0; j <= i; j++) {
                a[j] = 0;
                for (int x = 0; x < c->d; x++)
                    a[j] += (double)t->q[((int64_t)i * c->n_heads + h) * c->d + x] * ref_bf16_value(t->k[kv * t->stride + (int64_t)j * c->d + x]) / sqrt(c->d);
                m = fmax(m, a[j]);
            }
            for (int j = 0; j <= i; j++)
                l += exp(a[j] - m);
            for (int j = 0; j <= i; j++)
                sums[kv * (c->n + 1) + j] += exp(a[j] - m) / l;
        }
    free(a);
}

/* ---- rows from parts ---- */

/* Sums are in the order of the parts, so the formula in floats gives the very bits. */
static void check_merge(const struct fixture *f, int n_rows, const int32_t *row_first, int64_t n_columns, int64_t first, int64_t last, int pool)
{
    const int n_parts = row_first[n_rows];
    const int64_t n = last - first;
    struct ref_rng rng = {5};
    float *parts = random_floats(&rng, (size_t)(n_parts * n_columns), 1), *share = random_floats(&rng, (size_t)n_parts, 1);
    float *expected = aligned_zeros((size_t)(n_rows * n) * sizeof(float)), *actual = aligned_zeros((size_t)(n_rows * n) * sizeof(float));
    for (int row = 0; row < n_rows; row++)
        for (int64_t i = first; i < last; i++) {
            float most = -INFINITY;
            for (int64_t j = i - pool / 2; j <= i + pool / 2; j++) {
                float sum = 0;
                for (int part = row_first[row]; j >= 0 && j < n_columns && part < row_first[row + 1]; part++)
                    sum += share[part] * parts[part * n_columns + j];
                most = j >= 0 && j < n_columns && sum > most ? sum : most;
            }
            expected[row * n + i - first] = most;
        }
    for (int dev = 0; dev < f->n; dev++) {
        memset(actual, 0xFF, (size_t)(n_rows * n) * sizeof(float));
        const struct score_merge_params p = {
            .parts = parts, .share = share, .row_first = row_first, .n_rows = n_rows, .n_columns = n_columns, .first = first, .last = last, .pool = pool, .scores = actual};
        cr_assert_eq(f->ops->merge_scores(f->devices[dev].stream, &p), 0);
        cr_assert(memcmp(expected, actual, (size_t)(n_rows * n) * sizeof(float)) == 0, "%d rows of %d columns", n_rows, (int)n_columns);
    }
    free(parts), free(share), free(expected), free(actual);
}

Test(merge_scores, match_the_formula_everywhere)
{
    struct fixture f;
    fixture_open(&f);
    check_merge(&f, 1, (const int32_t[]){0, 1}, 1, 0, 1, 1);
    check_merge(&f, 1, (const int32_t[]){0, 3}, 2500, 4, 2400, 1);
    check_merge(&f, 3, (const int32_t[]){0, 2, 3, 7}, 1100, 2, 1099, 7);
    check_merge(&f, 2, (const int32_t[]){0, 1, 2}, 70, 0, 70, 127);
    struct score_merge_params p = {.share = (const float[]){1, 1}, .row_first = (const int32_t[]){0, 1, 1}, .n_rows = 2, .n_columns = 9, .last = 9, .pool = 1};
    cr_expect_eq(f.ops->merge_scores(f.devices[0].stream, &p), -EINVAL);
    p.n_rows = 1, p.pool = 129;
    cr_expect_eq(f.ops->merge_scores(f.devices[0].stream, &p), -ENOTSUP);
    fixture_close(&f);
}

Test(attn_column_sums, match_the_formula_everywhere)
{
    static const struct column_case cases[] = {{9, 3, 64, 330}, {4, 1, 32, 129}, {2, 2, 128, 520}, {8, 2, 80, 5}, {1, 1, 256, 257}, {1, 1, 16, 1}};
    static const int steps[] = {BLOCK_TOKENS, 1, 37, 100};
    struct fixture f;
    fixture_open(&f);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const struct column_case *c = &cases[i];
        const size_t n = (size_t)(c->n_kv_heads * (c->n + 1));
        struct column_data t;
        column_data_make(&t, *c, 900 + i);
        float *first = aligned_zeros(sizeof(float) * n), *sums = aligned_zeros(sizeof(float) * n);
        double *expected = aligned_zeros(sizeof(double) * n);
        column_run(&t, &f, 0, steps[0], first);
        reference_columns(&t, expected);
        for (size_t j = 0; j < n; j++)
            cr_assert_float_eq(first[j], expected[j], 2e-5 * (expected[j] + 1e-3), "case %zu, %zu: %g, not %g", i, j, first[j], expected[j]);
        for (int run = 1; run < 4 + f.n; run++) { /* other cuts on the first device, then the other devices */
            const int step = run < 4 ? steps[run] : steps[0], dev = run < 4 ? 0 : run - 3;
            if (dev >= f.n)
                break;
            memset(sums, 0xff, sizeof(float) * n); /* what was there before does not count */
            for (int h = 0; h < c->n_kv_heads; h++)
                sums[h * (c->n + 1) + c->n] = 0;
            column_run(&t, &f, dev, step, sums);
            cr_assert(memcmp(first, sums, sizeof(float) * n) == 0, "case %zu, step %d, device %d", i, step, dev);
        }
        free(first), free(sums), free(expected);
        column_data_free(&t);
    }
    fixture_close(&f);
}

Test(attn_column_sums, refuse_impossible_shapes)
{
    struct fixture f;
    fixture_open(&f);
    float q[64] = {0}, ml[2] = {0, 1}, sums[1];
    uint16_t k[64] = {0};
    const struct attn_prefill_params attn = {.q = q, .n_q = 1, .k = k, .head_stride = 64, .n_heads = 1, .n_kv_heads = 1, .head_dim = 64, .scale = 1, .ret_ml = ml};
    struct attn_prefill_params a[] = {attn, attn, attn, attn, attn};
    static const int expected[] = {0, -EINVAL, -EINVAL, -EINVAL, -ENOTSUP};
    a[1].ret_ml = NULL, a[2].n_q = 0, a[3].pos0 = 1, a[4].head_dim = 24;
    for (size_t i = 0; i < ARRAY_LEN(a); i++) {
        const struct column_sum_params p = {.attn = &a[i], .sums = sums, .sum_stride = 1};
        cr_assert_eq(f.ops->attn_column_sums(f.devices[0].stream, &p), expected[i], "shape %zu", i);
    }
    cr_assert_eq(sums[0], 1);
    fixture_close(&f);
}
