#include "kernels/cpu/attn_pieces.h"
#include "proto/base/base_assert.h"
#include "tests/kernels/kv_sequence.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct decode_case {
    enum kv_format format;
    int group, d, n_blocks, n_recent, fetch;
    double kept_share;
};

static const struct decode_case cases[] = {
    {KV_FORMAT_BF16, 3, 64, 5, 37, INT_MAX, .2},  {KV_FORMAT_BF16, 1, 128, 2, 0, INT_MAX, 0},    {KV_FORMAT_BF16, 8, 32, 3, 300, 7, .5},
    {KV_FORMAT_K8V4, 3, 64, 6, 90, INT_MAX, .1},  {KV_FORMAT_K8V4, 3, 64, 6, 90, 20, .1},        {KV_FORMAT_K8V4, 1, 128, 9, 16, 17, .05},
    {KV_FORMAT_K8V4, 4, 96, 4, 256, 16, .3},      {KV_FORMAT_K8V4, 7, 160, 3, 1, 5, 0},          {KV_FORMAT_K8V4, 2, 256, 3, 257, 12, .5},
    {KV_FORMAT_K8V8, 5, 64, 4, 15, INT_MAX, .25}, {KV_FORMAT_K8V8, 3, 128, 9, 0, 24, 0},         {KV_FORMAT_K8V4, 3, 64, 1, 0, INT_MAX, 0},
    {KV_FORMAT_K8V4, 3, 64, 0, 600, 32, 0},       {KV_FORMAT_K8V4, 3, 64, 3, 40, 0, .1},
};

/* Queries as large as makes attention sharp: logits of a deviation of 3. */
static float *queries_make(const struct decode_case *c, uint64_t seed)
{
    struct ref_rng rng = {seed};
    return random_floats(&rng, (size_t)c->group * c->d, 3);
}

static float scale_of(const struct decode_case *c)
{
    return 1 / sqrtf((float)c->d);
}

static int decode(struct fixture *f, int device, const struct decode_case *c, const struct block_layout *layout, struct attn_decode_item *items, int n_items)
{
    struct attn_decode_params p = {.items = items, .n_items = n_items, .layout = layout, .group = c->group, .head_dim = c->d, .scale = scale_of(c)};
    return f->ops->attn_decode(f->devices[device].stream, &p);
}

/* The pages chosen must have, in double and by the index's own keys, as much mass as the best ones but for the rounding of the query. */
static void check_choice(const struct decode_case *c, const struct kv_sequence *s, const float *q, const struct attn_decode_item *item)
{
    double *mass = aligned_zeros(sizeof(double) * ((size_t)s->n_pages + 1)), *out = aligned_zeros(sizeof(double) * c->d), chosen_mass = 0, best_mass = 0;
    for (int h = 0; h < c->group; h++) {
        struct ref_attention_result fast = kv_sequence_attention(s, q + h * c->d, scale_of(c), (int32_t[]){0}, 0, out);
        double total = fast.l > 0 ? fast.l * exp(fast.m) : 0;
        for (int i = 0; i < s->n_pages; i++)
            total += exp(kv_sequence_index_lse(s, q + h * c->d, scale_of(c), i));
        for (int i = 0; i < s->n_pages; i++)
            mass[i] += exp(kv_sequence_index_lse(s, q + h * c->d, scale_of(c), i)) / total / c->group;
    }
    for (int i = 0; i < item->ret_n_chosen; i++) {
        cr_assert(i == 0 || item->ret_chosen[i] > item->ret_chosen[i - 1], "ascending");
        chosen_mass += mass[item->ret_chosen[i]];
        mass[item->ret_chosen[i]] += 2; /* chosen ones sort first below */
    }
    for (int i = 0; i < s->n_pages; i++)
        mass[i] -= mass[i] >= 2 ? 2 : 0;
    for (int i = 0; i < item->ret_n_chosen; i++) {
        int best = 0;
        for (int j = 1; j < s->n_pages; j++)
            best = mass[j] > mass[best] ? j : best;
        best_mass += mass[best];
        mass[best] = -1;
    }
    cr_assert_geq(chosen_mass, best_mass * 0.995, "mass %g of at best %g", chosen_mass, best_mass);
    free(mass);
    free(out);
}

static double tolerance_of(enum kv_format format)
{
    return format == KV_FORMAT_BF16 ? 2e-5 : 2e-3; /* the query's two digits: 1.2e-4 of its largest dim, times the key */
}

/* What is attended, and how exactly: the rows and the pages reported as chosen, each once, nothing else. */
Test(attn_decode, attends_rows_and_chosen_pages_exactly_once)
{
    struct fixture f;
    fixture_open(&f);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const struct decode_case *c = &cases[i];
        struct kv_sequence s;
        kv_sequence_make(&s, &f, c->format, c->d, c->n_blocks, c->n_recent, c->kept_share, 50 + i);
        float *q = queries_make(c, 90 + i), *out = aligned_zeros(sizeof(float) * (size_t)c->group * c->d);
        int32_t *chosen = aligned_zeros(sizeof(int32_t) * ((size_t)s.n_pages + 1));
        double *expected = aligned_zeros(sizeof(double) * c->d);
        struct attn_decode_item item = kv_sequence_item(&s, q, out, c->fetch, chosen);
        cr_assert_eq(decode(&f, f.n - 1, c, &s.layout, &item, 1), 0);
        cr_assert_eq(item.ret_n_chosen, s.n_pages < c->fetch ? s.n_pages : c->fetch);
        kv_sequence_to_pages(&s, chosen, item.ret_n_chosen);
        for (int h = 0; h < c->group; h++) {
            kv_sequence_attention(&s, q + h * c->d, scale_of(c), chosen, item.ret_n_chosen, expected);
            double difference = max_difference(out + h * c->d, expected, (size_t)c->d);
            cr_assert_lt(difference, tolerance_of(c->format), "case %zu head %d: %g", i, h, difference);
        }
        if (c->fetch < s.n_pages)
            check_choice(c, &s, q, &item);
        free(q), free(out), free(chosen), free(expected);
        kv_sequence_free(&s);
    }
    fixture_close(&f);
}

/* Weights in two digits beside 4-bit values: with a query that its digits hold exactly nothing else is between the op and the sum in double, and it must be far below
 * what coding the values does (1e-3 and more). Sharp and flat attention. */
Test(attn_decode, weights_of_4_bit_values_lose_nothing)
{
    struct fixture f;
    fixture_open(&f);
    for (int d = 32; d <= 256; d *= 2)
        for (int sharp = 0; sharp < 2; sharp++) {
            const struct decode_case c = {KV_FORMAT_K8V4, 5, d, 5, 0, INT_MAX, 0};
            struct kv_sequence s;
            kv_sequence_make(&s, &f, c.format, d, c.n_blocks, 0, .1, 700 + (uint64_t)d);
            float *q = queries_make(&c, 30 + (uint64_t)d), *out = aligned_zeros(sizeof(float) * (size_t)(c.group * d));
            double *expected = aligned_zeros(sizeof(double) * (size_t)d), error = 0, total = 0;
            for (int i = 0; i < c.group * d; i++) {
                const float digits = fminf(fmaxf(rintf(q[i] * 400), -4064), 4064);
                q[i] = (i % d ? digits : 4064) * (sharp ? 0x1p-8f : 0x1p-12f);
            }
            struct attn_decode_item item = kv_sequence_item(&s, q, out, c.fetch, NULL);
            cr_assert_eq(decode(&f, f.n - 1, &c, &s.layout, &item, 1), 0);
            for (int h = 0; h < c.group; h++) {
                kv_sequence_attention(&s, q + h * d, scale_of(&c), NULL, 0, expected);
                for (int i = 0; i < d; i++) {
                    error += pow((double)out[h * d + i] - expected[i], 2);
                    total += expected[i] * expected[i];
                }
            }
            cr_assert_lt(error / total, 3e-7, "d %d %s: %g", d, sharp ? "sharp" : "flat", error / total);
            free(q), free(out), free(expected);
            kv_sequence_free(&s);
        }
    fixture_close(&f);
}

/* The same bits from every instruction set, thread count and batch: each case alone on each device, and all of one shape as items of one call. */
Test(attn_decode, all_ways_give_the_same_bits)
{
    struct fixture f;
    fixture_open(&f);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const struct decode_case *c = &cases[i];
        size_t n_out = (size_t)c->group * c->d;
        struct kv_sequence s[3];
        struct attn_decode_item items[3];
        float *q[3], *out[3], *alone = aligned_zeros(n_out * sizeof *alone);
        int32_t *chosen[3];
        for (int j = 0; j < 3; j++) {
            kv_sequence_make(&s[j], &f, c->format, c->d, c->n_blocks + (c->n_blocks > 0) * j, c->n_recent * j, c->kept_share, 500 + 3 * i + j);
            q[j] = queries_make(c, 900 + 3 * i + j);
            out[j] = aligned_zeros(n_out * sizeof(float));
            chosen[j] = aligned_zeros(sizeof(int32_t) * ((size_t)s[j].n_pages + 1));
        }
        for (int dev = 0; dev < f.n; dev++) {
            for (int j = 0; j < 3; j++) {
                items[j] = kv_sequence_item(&s[j], q[j], out[j], c->fetch, chosen[j]);
                memset(out[j], 0xFF, n_out * sizeof(float));
            }
            cr_assert_eq(decode(&f, dev, c, &s[0].layout, items, 3), 0);
            for (int j = 0; j < 3; j++) {
                struct attn_decode_item item = kv_sequence_item(&s[j], q[j], alone, c->fetch, NULL);
                cr_assert_eq(decode(&f, 0, c, &s[j].layout, &item, 1), 0);
                cr_assert_eq(memcmp(alone, out[j], n_out * sizeof *alone), 0, "case %zu item %d isa %d", i, j, f.devices[dev].isa);
                cr_assert_eq(item.ret_n_chosen, items[j].ret_n_chosen);
            }
        }
        for (int j = 0; j < 3; j++) {
            free(q[j]), free(out[j]), free(chosen[j]);
            kv_sequence_free(&s[j]);
        }
        free(alone);
    }
    fixture_close(&f);
}

/* T0: with everything attended, the bf16 format is full attention: the same as attn_prefill over the same tokens but for the rounding of fp32 sums. */
Test(attn_decode, bf16_with_all_pages_equals_prefill)
{
    enum { D = 64, GROUP = 3, BLOCKS = 3, TOKENS = BLOCKS * BLOCK_TOKENS };
    struct fixture f;
    fixture_open(&f);
    struct decode_case c = {.format = KV_FORMAT_BF16, .group = GROUP, .d = D};
    struct kv_sequence s;
    kv_sequence_make(&s, &f, c.format, D, BLOCKS, 0, 0, 4);
    uint16_t *k = aligned_zeros(TOKENS * D * 2), *v = aligned_zeros(TOKENS * D * 2);
    for (int b = 0; b < BLOCKS; b++) {
        struct block_params p = {.layout = &s.layout, .first = b == 0, .slice = s.pool + (size_t)b * s.layout.slice_bytes[1], .k = k + b * BLOCK_TOKENS * D,
                                 .v = v + b * BLOCK_TOKENS * D, .head_stride = BLOCK_TOKENS * D};
        cr_assert_eq(f.ops->block_decode(f.devices[0].stream, &p, 1), 0);
    }
    float *q = queries_make(&c, 6), out[GROUP * D], full[GROUP * D];
    struct attn_decode_item item = kv_sequence_item(&s, q, out, INT_MAX, NULL);
    cr_assert_eq(decode(&f, f.n - 1, &c, &s.layout, &item, 1), 0);
    struct attn_prefill_params p = {.q = q, .pos0 = TOKENS - 1, .n_q = 1, .k = k, .v = v, .head_stride = TOKENS * D, .n_heads = GROUP, .n_kv_heads = 1, .head_dim = D,
                                    .scale = scale_of(&c), .out = full};
    cr_assert_eq(f.ops->attn_prefill(f.devices[f.n - 1].stream, &p), 0);
    for (int i = 0; i < GROUP * D; i++)
        cr_assert_float_eq(out[i], full[i], 2e-6);
    free(k), free(v), free(q);
    kv_sequence_free(&s);
    fixture_close(&f);
}

/* Pages that are equal in every bit: the lower indices are taken. Behind block 0, which has no slow token, come pages of two kinds: every third one is the other. */
Test(attn_decode, ties_go_to_the_lower_page)
{
    enum { D = 64, PAGES = 150, SUBPAGES = BLOCK_SUBPAGES + PAGES, PERIOD = 3 /* blocks */ };
    struct fixture f;
    fixture_open(&f);
    struct decode_case c = {.format = KV_FORMAT_K8V4, .group = 3, .d = D};
    struct kv_sequence s;
    kv_sequence_make(&s, &f, c.format, D, PERIOD + 1, 10, 0, 7);
    struct kv_block blocks[(SUBPAGES + BLOCK_SUBPAGES - 1) / BLOCK_SUBPAGES] = {{.data = s.pool}};
    uint16_t masks[SUBPAGES] = {0}, *k = aligned_zeros(sizeof *k * BLOCK_TOKENS * D), *v = aligned_zeros(sizeof *v * BLOCK_TOKENS * D);
    for (int b = 0; b < PERIOD; b++) {
        for (int row = 0; row < BLOCK_TOKENS; row++) {
            const int page = b * BLOCK_SUBPAGES + row / SUBPAGE_TOKENS, from = (page % 3 == 2) * SUBPAGE_TOKENS + row % SUBPAGE_TOKENS;
            for (int i = 0; i < D; i++) {
                k[row * D + i] = ref_bf16_bits(sin(from * 7.3 + i));
                v[row * D + i] = ref_bf16_bits(cos(from + i * 3.1));
            }
        }
        int32_t n_bad = 0;
        struct block_params p = {.layout = &s.layout, .slice = s.pool + s.layout.slice_bytes[1] * (size_t)(b + 1), .k = k, .v = v, .head_stride = BLOCK_TOKENS * D};
        cr_assert_eq(f.ops->block_encode(f.devices[0].stream, &p, 1, false, &n_bad), 0);
    }
    for (size_t b = 1; b < ARRAY_LEN(blocks); b++)
        blocks[b].data = s.pool + s.layout.slice_bytes[1] * (1 + (b - 1) % PERIOD);
    memset(masks + BLOCK_SUBPAGES, 0xFF, sizeof *masks * PAGES);
    float *q = queries_make(&c, 8), out[3 * D];
    int32_t chosen[70];
    for (int dev = 0; dev < f.n; dev++) {
        struct attn_decode_item item = kv_sequence_item(&s, q, out, 70, chosen);
        item.slow = (struct slow_pages){.blocks = blocks, .masks = masks, .n_subpages = SUBPAGES, .n_pages = PAGES};
        cr_assert_eq(decode(&f, dev, &c, &s.layout, &item, 1), 0);
        int n[2] = {0, 0}, last[2] = {-1, -1};
        for (int i = 0; i < 70; i++) {
            const int page = chosen[i] - BLOCK_SUBPAGES, kind = page % 3 == 2;
            n[kind]++;
            last[kind] = page;
        }
        cr_assert(n[0] == 70 || n[1] == 50, "all of the better kind first");
        int partial = n[0] == 70 ? 0 : n[0] > 0 ? 0 : 1; /* of this kind not all were taken: the first n of them */
        cr_assert_eq(last[partial], partial ? 3 * n[1] - 1 : (n[0] - 1) / 2 * 3 + (n[0] - 1) % 2);
    }
    free(q), free(k), free(v);
    kv_sequence_free(&s);
    fixture_close(&f);
}

/* An index of its own is read in place of the block's: the same bytes give the same bits, whatever lies in the blocks. */
Test(attn_decode, an_index_copy_is_read_instead)
{
    struct fixture f;
    fixture_open(&f);
    const struct decode_case *c = &cases[4];
    struct kv_sequence s;
    kv_sequence_make(&s, &f, c->format, c->d, c->n_blocks, c->n_recent, c->kept_share, 3);
    const size_t n_out = (size_t)c->group * c->d, bytes = block_index_bytes(&s.layout);
    float *q = queries_make(c, 4), *out = aligned_zeros(sizeof(float) * n_out), *again = aligned_zeros(sizeof(float) * n_out);
    uint8_t *copies = aligned_zeros(bytes * (size_t)c->n_blocks);
    struct attn_decode_item item = kv_sequence_item(&s, q, out, c->fetch, NULL);
    cr_assert_eq(decode(&f, f.n - 1, c, &s.layout, &item, 1), 0);
    for (int b = 0; b < c->n_blocks; b++) {
        uint8_t *index = s.pool + s.layout.slice_bytes[1] * (size_t)b + block_index_offset(&s.layout, b == 0, 0, 0);
        s.blocks[b].index = memcpy(copies + bytes * (size_t)b, index, bytes);
        memset(index, 0xFF, bytes);
    }
    item.out = again;
    cr_assert_eq(decode(&f, f.n - 1, c, &s.layout, &item, 1), 0);
    cr_assert_eq(memcmp(out, again, sizeof(float) * n_out), 0);
    free(q), free(out), free(again), free(copies);
    kv_sequence_free(&s);
    fixture_close(&f);
}

/* What was attended is added to the caller's counts; blocks without an id are not fetched. */
Test(attn_decode, counts_what_it_attends)
{
    struct fixture f;
    fixture_open(&f);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const struct decode_case *c = &cases[i];
        struct kv_sequence s;
        kv_sequence_make(&s, &f, c->format, c->d, c->n_blocks, c->n_recent, c->kept_share, 20 + i);
        float *q = queries_make(c, 30 + i), *out = aligned_zeros(sizeof(float) * (size_t)c->group * c->d);
        int32_t *chosen = aligned_zeros(sizeof(int32_t) * ((size_t)s.n_pages + 1));
        struct page_counts counts = {.pages = 3, .bytes_missed = 1}, expected = counts;
        struct attn_decode_item item = kv_sequence_item(&s, q, out, c->fetch, chosen);
        item.ret_counts = &counts;
        for (int b = 0; b < c->n_blocks; b++)
            s.blocks[b].id = b % 2 ? (uint64_t)b : 0;
        cr_assert_eq(decode(&f, f.n - 1, c, &s.layout, &item, 1), 0);
        for (int j = 0; j < item.ret_n_chosen; j++) {
            const uint32_t bytes = chosen[j] == 0 ? s.layout.sink.bytes : s.layout.page.bytes;
            const bool missed = chosen[j] / BLOCK_SUBPAGES % 2;
            expected.pages++;
            expected.tokens += (uint32_t)__builtin_popcount(s.masks[chosen[j]]);
            expected.misses += missed;
            expected.bytes += bytes;
            expected.bytes_missed += missed ? bytes : 0;
        }
        cr_assert_eq(memcmp(&counts, &expected, sizeof counts), 0, "case %zu", i);
        free(q), free(out), free(chosen);
        kv_sequence_free(&s);
    }
    fixture_close(&f);
}

Test(attn_decode, nothing_to_attend_gives_zeros)
{
    struct fixture f;
    fixture_open(&f);
    struct decode_case c = {.format = KV_FORMAT_K8V4, .group = 2, .d = 64};
    struct kv_sequence s;
    kv_sequence_make(&s, &f, c.format, 64, 2, 3, 0, 7);
    float *q = queries_make(&c, 8), out[2 * 64];
    for (int with_empty_pages = 0; with_empty_pages < 2; with_empty_pages++) {
        struct attn_decode_item item = kv_sequence_item(&s, q, out, with_empty_pages ? 4 : INT_MAX, NULL);
        item.rows[0].n = item.rows[1].n = 0;
        s.n_pages = item.slow.n_pages = 0;
        item.slow.n_subpages = with_empty_pages ? item.slow.n_subpages : 0;
        memset(s.masks, 0, sizeof *s.masks * (size_t)s.n_blocks * BLOCK_SUBPAGES);
        memset(out, 0xFF, sizeof out);
        cr_assert_eq(decode(&f, f.n - 1, &c, &s.layout, &item, 1), 0);
        for (int i = 0; i < 2 * 64; i++)
            cr_assert_eq(out[i], 0);
    }
    memset(q, 0, sizeof(float) * 2 * 64); /* a query of zeros attends all alike */
    struct attn_decode_item item = kv_sequence_item(&s, q, out, INT_MAX, NULL);
    double expected[64];
    cr_assert_eq(decode(&f, f.n - 1, &c, &s.layout, &item, 1), 0);
    kv_sequence_attention(&s, q, scale_of(&c), NULL, 0, expected);
    cr_assert_lt(max_difference(out, expected, 64), 1e-6);
    free(q);
    kv_sequence_free(&s);
    fixture_close(&f);
}

/* More items than one wave's scratch holds. */
Test(attn_decode, many_items_go_in_waves)
{
    enum { N = 600 };
    struct fixture f;
    fixture_open(&f);
    struct decode_case c = {.format = KV_FORMAT_K8V4, .group = 4, .d = 64};
    struct kv_sequence s;
    kv_sequence_make(&s, &f, c.format, 64, 5, 20, .1, 7);
    struct ref_rng rng = {5};
    float *q = random_floats(&rng, (size_t)N * 4 * 64, 3), *out = aligned_zeros(sizeof(float) * N * 4 * 64), alone[4 * 64];
    struct attn_decode_item *items = aligned_zeros(sizeof *items * N);
    for (int i = 0; i < N; i++)
        items[i] = kv_sequence_item(&s, q + i * 256, out + i * 256, i % 3 ? 8 : INT_MAX, NULL);
    cr_assert_eq(decode(&f, f.n - 1, &c, &s.layout, items, N), 0);
    for (int i = 0; i < N; i += 7) {
        struct attn_decode_item item = kv_sequence_item(&s, q + i * 256, alone, i % 3 ? 8 : INT_MAX, NULL);
        cr_assert_eq(decode(&f, f.n > 1, &c, &s.layout, &item, 1), 0);
        cr_assert_eq(memcmp(alone, out + i * 256, sizeof alone), 0);
    }
    struct device_memory_stats stats;
    cpu_device_ops()->memory_stats(f.devices[f.n - 1].device, &stats);
    struct device_properties properties;
    cpu_device_ops()->properties(f.devices[f.n - 1].device, &properties);
    cr_assert_leq(stats.peak[MEM_WORKSPACE], properties.fixed_bytes + (1 << 20), "scratch is bounded");
    free(q), free(out), free(items);
    kv_sequence_free(&s);
    fixture_close(&f);
}

Test(attn_decode, refuses_impossible_arguments)
{
    struct fixture f;
    fixture_open(&f);
    struct decode_case c = {.format = KV_FORMAT_K8V4, .group = 1, .d = 64};
    struct kv_sequence s;
    kv_sequence_make(&s, &f, c.format, 64, 1, 3, 0, 7);
    float q[64] = {0}, out[64] = {5};
    struct attn_decode_item item = kv_sequence_item(&s, q, out, -1, NULL);
    cr_assert_eq(decode(&f, 0, &c, &s.layout, &item, 1), -EINVAL);
    item.fetch_pages = 1;
    cr_assert_eq(decode(&f, 0, &c, NULL, &item, 1), -EINVAL);
    c.d = 32;
    cr_assert_eq(decode(&f, 0, &c, &s.layout, &item, 1), -EINVAL);
    c.d = 64;
    item.slow.n_pages = item.slow.n_subpages + 1;
    cr_assert_eq(decode(&f, 0, &c, &s.layout, &item, 1), -EINVAL);
    c.d = 72;
    item.slow.n_pages = 0;
    cr_assert_eq(decode(&f, 0, &c, &s.layout, &item, 1), -ENOTSUP);
    cr_assert_eq(out[0], 5);
    kv_sequence_free(&s);
    fixture_close(&f);
}

/* ---- pieces ---- */

/* Partials of parts merge to the whole; empty ones do not matter; nothing but empty ones stay empty. */
Test(attn_pieces, merge_is_exact_about_empty_partials)
{
    struct fixture f;
    fixture_open(&f);
    for (int dev = 0; dev < f.n; dev++) {
        const struct attn_pieces *pieces = cpu_attn_pieces(f.devices[dev].isa);
        float ml[8] = {-INFINITY, 0, 2, 3, -INFINITY, 0, 2 + logf(2), 1}, o[4 * 16], out[16], m, l;
        for (int i = 0; i < 64; i++)
            o[i] = i < 16 || (i >= 32 && i < 48) ? 0 : i < 32 ? 6 : 4;
        pieces->merge(ml, o, 4, 16, out, &m, &l);
        cr_assert_eq(m, 2 + logf(2));
        cr_assert_float_eq(l, 3 * 0.5 + 1, 1e-6);
        cr_assert_float_eq(out[7], (6 * 0.5 + 4) / 2.5, 1e-6);
        float empty_ml[4] = {-INFINITY, 0, -INFINITY, 0};
        memset(o, 0, sizeof o);
        pieces->merge(empty_ml, o, 2, 16, out, &m, &l);
        cr_assert_eq(m, -INFINITY);
        cr_assert_eq(l, 0);
        cr_assert_eq(out[3], 0);
        pieces->merge(NULL, NULL, 0, 16, out, &m, &l);
        cr_assert_eq(l, 0);
    }
    fixture_close(&f);
}

/* The index's sums against its own keys in double: only the query's rounding to +-127 is between them. */
Test(attn_pieces, index_sums_match_the_index_keys)
{
    struct fixture f;
    fixture_open(&f);
    for (int d = 32; d <= 256; d += 96 - (d == 32) * 64) {
        struct decode_case c = {.format = KV_FORMAT_K8V4, .group = 5, .d = d};
        struct kv_sequence s;
        kv_sequence_make(&s, &f, c.format, d, 6, 0, .3, (uint64_t)d);
        float *q = queries_make(&c, 3), expected_ml[10], expected[5 * 64];
        for (int dev = 0; dev < f.n; dev++) {
            const struct attn_pieces *pieces = cpu_attn_pieces(f.devices[dev].isa);
            float ml[10], sums[5 * 64];
            int n = s.n_pages < 45 ? s.n_pages : 45;
            pieces->index(q, 5, scale_of(&c), &s.layout, s.pages, n, ml, sums);
            for (int h = 0; dev == 0 && h < 5; h++)
                for (int i = 0; i < n; i++)
                    cr_assert_float_eq(logf(sums[h * n + i]) + ml[2 * h], kv_sequence_index_lse(&s, q + h * d, scale_of(&c), i), 0.12);
            if (dev == 0) {
                memcpy(expected_ml, ml, sizeof ml);
                memcpy(expected, sums, sizeof sums);
            }
            cr_assert_eq(memcmp(expected_ml, ml, sizeof ml), 0);
            cr_assert_eq(memcmp(expected, sums, sizeof(float) * 5 * (size_t)n), 0);
        }
        free(q);
        kv_sequence_free(&s);
    }
    fixture_close(&f);
}

/* The index as a guide: of what the best eighth of the pages has by true mass, its choice has most. Gaussian keys with logits of a deviation of 3 are hard for it: two bits
 * leave an error of 1.1 in a logit. Pages chosen blindly would have a seventh. */
Test(attn_pieces, index_mass_finds_the_true_mass)
{
    struct fixture f;
    fixture_open(&f);
    struct decode_case c = {.format = KV_FORMAT_K8V4, .group = 1, .d = 64};
    struct kv_sequence s;
    kv_sequence_make(&s, &f, c.format, 64, 16, 0, 0, 77);
    const struct attn_pieces *pieces = cpu_attn_pieces(f.devices[f.n - 1].isa);
    double share = 0;
    for (int trial = 0; trial < 20; trial++) {
        float *q = queries_make(&c, 1000 + (uint64_t)trial), out[64], ml[2];
        int32_t chosen[16];
        double true_mass[128], found = 0, best = 0;
        struct attn_decode_item item = kv_sequence_item(&s, q, out, 16, chosen);
        cr_assert_eq(decode(&f, f.n - 1, &c, &s.layout, &item, 1), 0); /* every sub-page is a page */
        for (int i = 0; i < s.n_pages; i++) {
            float o[64];
            pieces->pages(q, 1, scale_of(&c), &s.layout, &s.pages[i], 1, ml, o);
            true_mass[i] = ml[1] * exp(ml[0]);
        }
        for (int i = 0; i < 16; i++)
            found += true_mass[chosen[i]];
        for (int i = 0; i < 16; i++) {
            int top = 0;
            for (int j = 1; j < s.n_pages; j++)
                top = true_mass[j] > true_mass[top] ? j : top;
            best += true_mass[top];
            true_mass[top] = -1;
        }
        share += found / best / 20;
        free(q);
    }
    cr_assert_gt(share, 0.8, "%g of what the best pages have", share);
    kv_sequence_free(&s);
    fixture_close(&f);
}
