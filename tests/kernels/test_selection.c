/* window_scores, topk, gather_rows; and what the ops take from the arena. */
#include "kernels/sample_one.h"
#include "proto/base/base_assert.h"
#include "tests/kernels/kv_fixture.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct window_case {
    int n_heads, n_kv_heads, d, n_window;
    int64_t n_keys;
    int pool;
    bool pool_after_group, all_heads;
    int chunk;
    int64_t first, last;
};

/* Mean over the window of one query head's attention, [n_columns]: the keys before the window. */
static void reference_mean(const struct window_case *c, const float *q, const uint16_t *k, int head, double *s)
{
    const int64_t n_columns = c->n_keys - c->n_window;
    double *a = aligned_zeros(sizeof(double) * (size_t)c->n_keys);
    memset(s, 0, sizeof(double) * (size_t)n_columns);
    for (int w = 0; w < c->n_window; w++) {
        int64_t n_visible = n_columns + w + 1;
        double m = -INFINITY, l = 0;
        for (int64_t i = 0; i < n_visible; i++) {
            a[i] = 0;
            for (int x = 0; x < c->d; x++)
                a[i] += (double)q[((int64_t)w * c->n_heads + head) * c->d + x] * ref_bf16_value(k[i * c->d + x]);
            a[i] /= sqrt(c->d);
            m = fmax(m, a[i]);
        }
        for (int64_t i = 0; i < n_visible; i++)
            l += exp(a[i] - m);
        for (int64_t i = 0; i < n_columns; i++)
            s[i] += exp(a[i] - m) / l / c->n_window;
    }
    free(a);
}

static void add_pooled(const double *s, int64_t n, int pool, double weight, double *to)
{
    for (int64_t i = 0; i < n; i++) {
        double max = 0;
        for (int64_t j = i - pool / 2; j <= i + pool / 2; j++)
            max = j >= 0 && j < n ? fmax(max, s[j]) : max;
        to[i] += max * weight;
    }
}

/* softmax, mean, pooling, mean over heads, mean over chunks as the formula says, W x S and all. scores [n_kv_heads or 1, last - first]. */
static void reference_scores(const struct window_case *c, const float *q, const uint16_t *k, int64_t stride, double *scores)
{
    const int group = c->n_heads / c->n_kv_heads;
    const int64_t n_columns = c->n_keys - c->n_window, n = c->last - c->first;
    double *s = aligned_zeros(sizeof(double) * (size_t)n_columns), *sum = aligned_zeros(sizeof(double) * (size_t)n_columns),
           *row = aligned_zeros(sizeof(double) * (size_t)n_columns);
    for (int kv = 0; kv < c->n_kv_heads; kv++) {
        const double weight = 1.0 / (c->all_heads ? c->n_heads : group);
        if (kv == 0 || !c->all_heads)
            memset(row, 0, sizeof(double) * (size_t)n_columns);
        memset(sum, 0, sizeof(double) * (size_t)n_columns);
        for (int h = 0; h < group; h++) {
            reference_mean(c, q, k + kv * stride, kv * group + h, s);
            for (int64_t i = 0; i < n_columns; i++)
                sum[i] += s[i];
            if (!c->pool_after_group)
                add_pooled(s, n_columns, c->pool, weight, row);
        }
        if (c->pool_after_group)
            add_pooled(sum, n_columns, c->pool, weight, row);
        for (int64_t i = c->first; i < c->last; i++) {
            const int64_t chunk = i / c->chunk * c->chunk, from = chunk > c->first ? chunk : c->first, to = chunk + c->chunk < c->last ? chunk + c->chunk : c->last;
            double mean = 0;
            for (int64_t j = from; j < to; j++)
                mean += row[j] / (double)(to - from);
            scores[(c->all_heads ? 0 : kv) * n + i - c->first] = mean;
        }
    }
    free(s), free(sum), free(row);
}

/* Rows not asked for and the keys outside first .. last-1 stay untouched: scores has a guard behind. */
static void check_window_case(const struct fixture *f, const struct window_case *c, uint64_t seed)
{
    struct ref_rng rng = {seed};
    const int64_t stride = (c->n_keys + 3) * c->d;
    const size_t n = (size_t)((c->all_heads ? 1 : c->n_kv_heads) * (c->last - c->first));
    float *q = random_floats(&rng, (size_t)c->n_window * c->n_heads * c->d, 2), *first = aligned_zeros(sizeof(float) * (n + 1)), *scores = aligned_zeros(sizeof(float) * (n + 1));
    uint16_t *k = random_bf16(&rng, (size_t)(stride * c->n_kv_heads), 1);
    double *expected = aligned_zeros(sizeof(double) * n);
    reference_scores(c, q, k, stride, expected);
    struct window_score_params p = {.q = q, .n_window = c->n_window, .k = k, .head_stride = stride, .n_keys = c->n_keys, .n_heads = c->n_heads,
                                    .n_kv_heads = c->n_kv_heads, .head_dim = c->d, .scale = 1 / sqrtf((float)c->d), .first = c->first, .last = c->last,
                                    .pool = c->pool, .pool_after_group = c->pool_after_group, .all_heads = c->all_heads, .chunk = c->chunk};
    for (int dev = 0; dev < f->n; dev++) {
        p.scores = dev ? scores : first;
        cr_assert_eq(f->ops->window_scores(f->devices[dev].stream, &p), 0);
        for (size_t j = 0; dev == 0 && j < n; j++)
            cr_assert_float_eq(first[j], expected[j], 2e-5 * expected[j] + 1e-9, "seed %d, %zu: %g, not %g", (int)seed, j, first[j], expected[j]);
        cr_assert(dev == 0 || memcmp(first, scores, sizeof(float) * n) == 0);
        cr_assert_eq(p.scores[n], 0);
    }
    free(q), free(k), free(first), free(scores), free(expected);
}

Test(window_scores, match_the_formula_everywhere)
{
    static const struct window_case cases[] = {
        {9, 3, 64, 32, 300, 7, false, false, 1, 0, 268},    {9, 3, 64, 32, 1100, 7, false, false, 1, 4, 1068}, {8, 2, 96, 16, 2061, 5, true, false, 1, 0, 2045},
        {4, 4, 128, 8, 1032, 1, false, false, 1, 0, 1024},  {3, 1, 80, 20, 21, 7, false, false, 1, 0, 1},      {2, 1, 64, 1, 2, 127, false, false, 1, 0, 1},
        {6, 2, 32, 13, 1137, 127, true, false, 1, 0, 1124}, {6, 2, 32, 13, 3000, 127, false, false, 1, 1023, 1025}, {6, 2, 64, 1, 2100, 1, false, true, 1, 4, 1900},
        {6, 2, 64, 32, 2100, 1, false, true, 16, 4, 2061},  {8, 4, 32, 5, 1500, 9, true, true, 64, 1050, 1051}, {4, 2, 64, 32, 1200, 7, false, false, 1024, 4, 1168},
    };
    struct fixture f;
    fixture_open(&f);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        check_window_case(&f, &cases[i], 60 + i);
    fixture_close(&f);
}

/* What admission counts with: no op holds more than scratch_bytes says for its bounds. */
Test(scratch, stays_within_its_bounds)
{
    enum { HEADS = 6, KV_HEADS = 2, D = 64, KEYS = 3000, WINDOW = 16, VOCAB = 70000, ITEMS = 40, PAGES = 188 };
    struct fixture f;
    fixture_open(&f);
    const struct fixture_device *device = &f.devices[f.n - 1];
    struct ref_rng rng = {9};
    float *q = random_floats(&rng, ITEMS * HEADS * D, 1), *out = aligned_zeros(sizeof(float) * ITEMS * HEADS * D), *logits = aligned_zeros(sizeof(float) * VOCAB);
    float *scores = aligned_zeros(sizeof(float) * KV_HEADS * KEYS);
    uint16_t *k = random_bf16(&rng, (size_t)KV_HEADS * KEYS * D, 1);
    struct block_layout layout;
    cr_assert_eq(block_layout_init(&layout, KV_FORMAT_K8V4, 1, 1, D), 0);
    uint8_t *slice = aligned_zeros(layout.slice_bytes[1]);
    struct kv_block blocks[PAGES / BLOCK_SUBPAGES + 1];
    uint16_t masks[PAGES];
    struct attn_decode_item items[ITEMS];
    for (size_t i = 0; i < ARRAY_LEN(blocks); i++)
        blocks[i] = (struct kv_block){.data = slice};
    memset(masks, 0xFF, sizeof masks);
    for (int i = 0; i < ITEMS; i++)
        items[i] = (struct attn_decode_item){.q = q + i * HEADS / KV_HEADS * D, .out = out + i * HEADS / KV_HEADS * D, .rows = {{k, k, 700}, {k, k, i}},
                                             .slow = {.blocks = blocks, .masks = masks, .n_subpages = PAGES - i, .n_pages = PAGES - i}, .fetch_pages = 32};
    struct window_score_params window = {.q = q, .n_window = WINDOW, .k = k, .head_stride = KEYS * D, .n_keys = KEYS, .n_heads = HEADS, .n_kv_heads = KV_HEADS,
                                         .head_dim = D, .scale = 0.125f, .last = KEYS - WINDOW, .pool = 7, .chunk = 1, .scores = scores};
    struct attn_decode_params decode = {.items = items, .n_items = ITEMS, .layout = &layout, .group = HEADS / KV_HEADS, .head_dim = D, .scale = 0.125f};
    struct logit_bias bias = {5, 0.5f};
    struct sample_params sample = {.temperature = 1, .top_p = .99f, .top_k = 60000, .repetition_penalty = 1, .bias = &bias, .n_bias = 1}; /* all logits tie */
    struct sample_result result;
    const struct op_bounds bounds[3] = {
        {.n_heads = HEADS, .n_kv_heads = KV_HEADS, .head_dim = D, .n_items = ITEMS, .n_rows = {700, ITEMS}, .n_pages = PAGES, .fetch_pages = 32},
        {.n_heads = HEADS, .n_kv_heads = KV_HEADS, .head_dim = D, .n_keys = KEYS, .n_window = WINDOW},
        {.n_heads = HEADS, .n_kv_heads = KV_HEADS, .head_dim = D, .n_vocab = VOCAB, .n_samples = 1},
    };
    for (int op = 0; op < 3; op++) {
        struct device_memory_stats before, after;
        cpu_device_ops()->reset_peaks(device->device);
        cpu_device_ops()->memory_stats(device->device, &before);
        int r = op == 0 ? f.ops->attn_decode(device->stream, &decode) : op == 1 ? f.ops->window_scores(device->stream, &window)
                                                                             : sample_one(f.ops, device->stream, logits, VOCAB, &sample, &result);
        cr_assert_eq(r, 0);
        cpu_device_ops()->memory_stats(device->device, &after);
        size_t held = after.peak[MEM_WORKSPACE] - before.now[MEM_WORKSPACE];
        cr_assert(held > 0 && held <= f.ops->scratch_bytes(device->stream, &bounds[op]), "op %d held %zu bytes", op, held);
        cr_assert_eq(after.now[MEM_WORKSPACE], before.now[MEM_WORKSPACE]);
    }
    free(q), free(out), free(logits), free(scores), free(k), free(slice);
    fixture_close(&f);
}

Test(window_scores, refuse_impossible_shapes)
{
    struct fixture f;
    fixture_open(&f);
    float q[64] = {0}, scores[4];
    uint16_t k[3 * 64] = {0};
    const struct window_score_params good = {.q = q, .n_window = 1, .k = k, .head_stride = 64, .n_keys = 3, .n_heads = 1, .n_kv_heads = 1, .head_dim = 64,
                                             .scale = 1, .last = 2, .pool = 7, .chunk = 1, .scores = scores};
    struct window_score_params p[] = {good, good, good, good, good, good, good, good, good, good};
    static const int expected[] = {0, -EINVAL, -EINVAL, -EINVAL, -EINVAL, -EINVAL, -EINVAL, -ENOTSUP, -ENOTSUP, -ENOTSUP};
    p[1].pool = 4, p[2].n_window = 2, p[3].last = 3, p[4].first = -1, p[5].first = 2, p[6].chunk = 0, p[7].chunk = 10, p[8].pool = 129, p[9].head_dim = 20;
    for (size_t i = 0; i < ARRAY_LEN(p); i++)
        cr_assert_eq(f.ops->window_scores(f.devices[0].stream, &p[i]), expected[i], "shape %zu", i);
    cr_assert_float_eq(scores[0], 1.0f / 3, 1e-6);
    fixture_close(&f);
}

static const float *sort_scores;

static int by_score(const void *a, const void *b)
{
    int32_t i = *(const int32_t *)a, j = *(const int32_t *)b;
    float x = isnan(sort_scores[i]) ? -INFINITY : sort_scores[i], y = isnan(sort_scores[j]) ? -INFINITY : sort_scores[j];
    return x > y ? -1 : x < y ? 1 : i < j ? -1 : 1;
}

static int by_index(const void *a, const void *b)
{
    return *(const int32_t *)a < *(const int32_t *)b ? -1 : 1;
}

/* Scores of every kind: ties, both zeros, infinities, NaN, subnormals, all equal. */
static float odd_score(struct ref_rng *rng, int kind)
{
    static const float special[] = {0, -0.0f, INFINITY, -INFINITY, NAN, 1e-42f, -1e-42f, 3.4e38f, -3.4e38f, 1};
    switch (kind) {
    case 0:
        return (float)ref_gaussian(rng);
    case 1:
        return (float)(int)(5 * ref_uniform(rng));
    case 2:
        return special[(int)(10 * ref_uniform(rng))];
    case 3:
        return 0.25f;
    default:
        return (float)exp(-40 * ref_uniform(rng));
    }
}

Test(topk, equals_a_sort)
{
    static const int64_t sizes[] = {1, 2, 17, 256, 1000, 8001};
    struct fixture f;
    fixture_open(&f);
    struct ref_rng rng = {12};
    for (size_t i = 0; i < ARRAY_LEN(sizes); i++)
        for (int kind = 0; kind < 5; kind++) {
            int64_t n = sizes[i], ks[] = {0, 1, n / 3, n - 1, n};
            float *scores = aligned_zeros(sizeof(float) * (size_t)(2 * n));
            int32_t *sorted = aligned_zeros(sizeof(int32_t) * (size_t)n), *indices = aligned_zeros(sizeof(int32_t) * (size_t)(2 * n + 1));
            for (int64_t j = 0; j < 2 * n; j++)
                scores[j] = odd_score(&rng, kind);
            for (size_t j = 0; j < ARRAY_LEN(ks); j++) {
                cr_assert_eq(f.ops->topk(f.devices[f.n - 1].stream, scores, 2, n, ks[j], indices), 0);
                for (int row = 0; row < 2; row++) {
                    sort_scores = scores + row * n;
                    for (int32_t x = 0; x < n; x++)
                        sorted[x] = x;
                    qsort(sorted, (size_t)n, sizeof *sorted, by_score);
                    qsort(sorted, (size_t)ks[j], sizeof *sorted, by_index);
                    cr_assert_eq(memcmp(sorted, indices + row * ks[j], sizeof *sorted * (size_t)ks[j]), 0, "n %ld k %ld kind %d", (long)n, (long)ks[j], kind);
                }
            }
            free(scores), free(sorted), free(indices);
        }
    float one = 1;
    int32_t index;
    cr_assert_eq(f.ops->topk(f.devices[0].stream, &one, 1, 1, 2, &index), -EINVAL);
    fixture_close(&f);
}

Test(gather_rows, copies_the_rows)
{
    enum { ROWS = 1000, D = 80 };
    struct fixture f;
    fixture_open(&f);
    struct ref_rng rng = {12};
    uint16_t *k = random_bf16(&rng, ROWS * D, 1), *v = random_bf16(&rng, ROWS * D, 1), *dk = aligned_zeros(ROWS * D * 2), *dv = aligned_zeros(ROWS * D * 2);
    int32_t indices[ROWS];
    for (int i = 0; i < ROWS; i++)
        indices[i] = (int32_t)(ROWS * ref_uniform(&rng));
    for (int dev = 0; dev < f.n; dev++) {
        memset(dk, 0, ROWS * D * 2);
        cr_assert_eq(f.ops->gather_rows(f.devices[dev].stream, k, v, indices, ROWS - 3, D, dk, dv), 0);
        for (int i = 0; i < ROWS - 3; i++) {
            cr_assert_eq(memcmp(dk + i * D, k + indices[i] * D, D * 2), 0);
            cr_assert_eq(memcmp(dv + i * D, v + indices[i] * D, D * 2), 0);
        }
        cr_assert_eq(dk[(ROWS - 3) * D], 0);
    }
    free(k), free(v), free(dk), free(dv);
    fixture_close(&f);
}
