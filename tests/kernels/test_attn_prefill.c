#include "tests/kernels/kv_fixture.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct prefill_case {
    int n_heads, n_kv_heads, d;
    int64_t pos0;
    int n_q;
};

struct prefill_data {
    struct prefill_case c;
    int64_t n_keys, stride;
    float *q;
    uint16_t *k, *v; /* with a NaN tail that must not be read */
};

static void data_make(struct prefill_data *t, struct prefill_case c, uint64_t seed)
{
    struct ref_rng rng = {seed};
    *t = (struct prefill_data){.c = c, .n_keys = c.pos0 + c.n_q};
    t->stride = (t->n_keys + 5) * c.d;
    t->q = random_floats(&rng, (size_t)c.n_q * c.n_heads * c.d, 2);
    t->k = random_bf16(&rng, (size_t)(c.n_kv_heads * t->stride), 1);
    t->v = random_bf16(&rng, (size_t)(c.n_kv_heads * t->stride), 1);
    for (int h = 0; h < c.n_kv_heads; h++)
        for (int64_t i = t->n_keys * c.d; i < t->stride; i++)
            t->k[h * t->stride + i] = t->v[h * t->stride + i] = 0x7FC0;
}

static void data_free(struct prefill_data *t)
{
    free(t->q);
    free(t->k);
    free(t->v);
}

static int data_run(const struct prefill_data *t, struct fixture *f, int device, int first, int n_q, float *out, float *ml)
{
    const struct prefill_case *c = &t->c;
    struct attn_prefill_params p = {
        .q = t->q + (int64_t)first * c->n_heads * c->d, .pos0 = c->pos0 + first, .n_q = n_q, .k = t->k, .v = t->v, .head_stride = t->stride, .n_heads = c->n_heads,
        .n_kv_heads = c->n_kv_heads, .head_dim = c->d, .scale = 1 / sqrtf((float)c->d), .out = out + (int64_t)first * c->n_heads * c->d,
        .ret_ml = ml ? ml + (int64_t)first * c->n_heads * 2 : NULL,
    };
    return f->ops->attn_prefill(f->devices[device].stream, &p);
}

static void check_accuracy(const struct prefill_data *t, const float *out, const float *ml)
{
    const struct prefill_case *c = &t->c;
    double *q = widen_floats(t->q, (size_t)c->n_q * c->n_heads * c->d), *expected = aligned_zeros(sizeof(double) * c->d);
    double *k = widen_bf16(t->k, (size_t)(c->n_kv_heads * t->stride)), *v = widen_bf16(t->v, (size_t)(c->n_kv_heads * t->stride));
    for (int i = 0; i < c->n_q; i++)
        for (int h = 0; h < c->n_heads; h++) {
            int64_t at = (int64_t)i * c->n_heads + h, kv = h / (c->n_heads / c->n_kv_heads) * t->stride;
            struct ref_attention_result r = ref_attention(q + at * c->d, k + kv, v + kv, NULL, NULL, (int)c->pos0 + i + 1, c->d, 1 / sqrtf((float)c->d), expected);
            cr_assert_lt(max_difference(out + at * c->d, expected, (size_t)c->d), 2e-5 + 2e-6 * max_magnitude(expected, (size_t)c->d));
            cr_assert_float_eq(ml[2 * at], r.m, 1e-5 * (1 + fabs(r.m)));
            cr_assert_float_eq(ml[2 * at + 1], r.l, 1e-4 * r.l);
        }
    free(q);
    free(k);
    free(v);
    free(expected);
}

static const struct prefill_case cases[] = {
    {9, 3, 64, 0, 1},     {9, 3, 64, 0, 128},  {9, 3, 64, 127, 1},  {9, 3, 64, 128, 17}, {3, 3, 80, 250, 6},   {8, 2, 96, 300, 40},
    {8, 1, 128, 129, 33}, {4, 4, 32, 511, 1},  {2, 2, 256, 140, 5}, {14, 2, 64, 384, 128}, {1, 1, 16, 120, 8}, {6, 2, 112, 200, 31},
};

/* One run against attention in double, and the other instruction sets and thread counts against that run, to the last bit. */
Test(attn_prefill, matches_reference_and_itself)
{
    struct fixture f;
    fixture_open(&f);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct prefill_data t;
        data_make(&t, cases[i], 77 + i);
        size_t n_out = (size_t)t.c.n_q * t.c.n_heads * t.c.d, n_ml = (size_t)t.c.n_q * t.c.n_heads * 2;
        float *out = aligned_zeros(n_out * sizeof *out), *ml = aligned_zeros(n_ml * sizeof *ml);
        float *other = aligned_zeros(n_out * sizeof *out), *other_ml = aligned_zeros(n_ml * sizeof *ml);
        cr_assert_eq(data_run(&t, &f, 0, 0, t.c.n_q, out, ml), 0);
        check_accuracy(&t, out, ml);
        for (int v = 1; v < f.n; v++) {
            memset(other, 0xFF, n_out * sizeof *other);
            cr_assert_eq(data_run(&t, &f, v, 0, t.c.n_q, other, other_ml), 0);
            cr_assert_eq(memcmp(out, other, n_out * sizeof *out), 0, "case %zu, isa %d, %d threads", i, f.devices[v].isa, f.devices[v].n_threads);
            cr_assert_eq(memcmp(ml, other_ml, n_ml * sizeof *ml), 0);
        }
        free(out);
        free(ml);
        free(other);
        free(other_ml);
        data_free(&t);
    }
    fixture_close(&f);
}

/* A query's result depends on nothing but its own keys: all at once, one by one, in lots of 7. */
Test(attn_prefill, does_not_depend_on_the_number_of_queries)
{
    struct fixture f;
    struct prefill_data t;
    fixture_open(&f);
    data_make(&t, (struct prefill_case){9, 3, 64, 384, 128}, 5);
    size_t n_out = (size_t)t.c.n_q * t.c.n_heads * t.c.d;
    float *all = aligned_zeros(n_out * sizeof *all), *parts = aligned_zeros(n_out * sizeof *parts);
    for (int v = f.n > 1; v < f.n; v++) {
        cr_assert_eq(data_run(&t, &f, v, 0, 128, all, NULL), 0);
        for (int lot = 1; lot <= 7; lot += 6) {
            memset(parts, 0xFF, n_out * sizeof *parts);
            for (int i = 0; i < 128; i += lot)
                cr_assert_eq(data_run(&t, &f, v, i, 128 - i < lot ? 128 - i : lot, parts, NULL), 0);
            cr_assert_eq(memcmp(all, parts, n_out * sizeof *all), 0, "lots of %d", lot);
        }
    }
    free(all);
    free(parts);
    data_free(&t);
    fixture_close(&f);
}

/* Queries of several blocks in one call are as with a call for each block, which sees its own block's rows apart from the others'. */
Test(attn_prefill, a_chunk_is_as_block_by_block)
{
    static const struct prefill_case chunks[] = {{9, 3, 64, 0, 300}, {9, 3, 64, 250, 129}, {4, 1, 80, 130, 2}, {8, 2, 96, 127, 130}, {2, 2, 128, 383, 2}};
    struct fixture f;
    fixture_open(&f);
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        struct prefill_data t, own;
        data_make(&t, chunks[i], 40 + i);
        data_make(&own, chunks[i], 50 + i);
        const struct prefill_case *c = &chunks[i];
        const int64_t origin = c->pos0 / 128 * 128, row = (int64_t)c->n_heads * c->d;
        const size_t n_out = (size_t)(c->n_q * row), n_ml = (size_t)(c->n_q * c->n_heads * 2);
        float *all = aligned_zeros(n_out * sizeof *all), *parts = aligned_zeros(n_out * sizeof *parts), *ml = aligned_zeros(n_ml * sizeof *ml), *ml_parts = aligned_zeros(n_ml * sizeof *ml);
        struct attn_prefill_params p = {.pos0 = c->pos0, .n_q = c->n_q, .q = t.q, .k = t.k, .v = t.v, .head_stride = t.stride, .own_k = own.k + origin * c->d, .own_v = own.v + origin * c->d,
                                        .own_stride = own.stride, .n_heads = c->n_heads, .n_kv_heads = c->n_kv_heads, .head_dim = c->d, .scale = 1 / sqrtf((float)c->d), .out = all, .ret_ml = ml};
        uint16_t *k = aligned_zeros((size_t)(t.stride * c->n_kv_heads) * 2), *v = aligned_zeros((size_t)(t.stride * c->n_kv_heads) * 2);
        for (int dev = 0; dev < f.n; dev++) {
            cr_assert_eq(f.ops->attn_prefill(f.devices[dev].stream, &p), 0);
            for (int done = 0, n; done < c->n_q; done += n) {
                const int64_t pos = c->pos0 + done, start = pos / 128 * 128, end = start + 128 < t.n_keys ? start + 128 : t.n_keys;
                n = (int)(end - pos);
                memcpy(k, t.k, (size_t)(t.stride * c->n_kv_heads) * 2), memcpy(v, t.v, (size_t)(t.stride * c->n_kv_heads) * 2);
                for (int h = 0; h < c->n_kv_heads; h++) {
                    memcpy(k + h * t.stride + start * c->d, own.k + h * t.stride + start * c->d, (size_t)((end - start) * c->d) * 2);
                    memcpy(v + h * t.stride + start * c->d, own.v + h * t.stride + start * c->d, (size_t)((end - start) * c->d) * 2);
                }
                struct attn_prefill_params part = p;
                part.q = t.q + done * row, part.pos0 = pos, part.n_q = n, part.k = k, part.v = v, part.own_k = part.own_v = NULL;
                part.out = parts + done * row, part.ret_ml = ml_parts + (int64_t)done * c->n_heads * 2;
                cr_assert_eq(f.ops->attn_prefill(f.devices[dev].stream, &part), 0);
            }
            cr_assert_eq(memcmp(all, parts, n_out * sizeof *all), 0, "chunk %zu, device %d", i, dev);
            cr_assert_eq(memcmp(ml, ml_parts, n_ml * sizeof *ml), 0, "chunk %zu, device %d", i, dev);
        }
        free(all), free(parts), free(ml), free(ml_parts), free(k), free(v);
        data_free(&t), data_free(&own);
    }
    fixture_close(&f);
}

/* A key far above all others, met late, makes everything before it vanish, and one met first makes everything after vanish. */
Test(attn_prefill, large_logits_stay_finite)
{
    struct fixture f;
    struct prefill_data t;
    fixture_open(&f);
    for (int place = 0; place <= 300; place += 150) {
        data_make(&t, (struct prefill_case){2, 1, 64, 300, 1}, 9);
        for (int c = 0; c < 64; c++)
            t.k[place * 64 + c] = ref_bf16_bits(t.q[c] > 0 ? 3e4 : -3e4);
        float *out = aligned_zeros(2 * 64 * sizeof *out), ml[4];
        cr_assert_eq(data_run(&t, &f, f.n - 1, 0, 1, out, ml), 0);
        double *value = widen_bf16(t.v + place * 64, 64);
        cr_assert_lt(max_difference(out, value, 64), 1e-6);
        cr_assert_eq(ml[1], 1.0f);
        free(value);
        free(out);
        data_free(&t);
    }
    fixture_close(&f);
}

Test(attn_prefill, refuses_impossible_shapes)
{
    struct fixture f;
    float q[64] = {0}, out[64];
    uint16_t kv[64] = {0};
    fixture_open(&f);
    struct attn_prefill_params good = {.q = q, .n_q = 1, .k = kv, .v = kv, .head_stride = 64, .n_heads = 1, .n_kv_heads = 1, .head_dim = 64, .scale = 1, .out = out};
    struct attn_prefill_params p = good;
    cr_assert_eq(f.ops->attn_prefill(f.devices[0].stream, &p), 0);
    p = good, p.n_q = 0;
    cr_assert_eq(f.ops->attn_prefill(f.devices[0].stream, &p), -EINVAL);
    p = good, p.own_k = kv;
    cr_assert_eq(f.ops->attn_prefill(f.devices[0].stream, &p), -EINVAL);
    p = good, p.n_heads = 3, p.n_kv_heads = 2;
    cr_assert_eq(f.ops->attn_prefill(f.devices[0].stream, &p), -EINVAL);
    p = good, p.head_dim = 40;
    cr_assert_eq(f.ops->attn_prefill(f.devices[0].stream, &p), -ENOTSUP);
    p = good, p.head_dim = 512;
    cr_assert_eq(f.ops->attn_prefill(f.devices[0].stream, &p), -ENOTSUP);
    fixture_close(&f);
}
