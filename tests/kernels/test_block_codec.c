#include "proto/base/base_assert.h"
#include "tests/kernels/kv_fixture.h"
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* One layer's slice and the K and V that go in and come out. */
struct block_data {
    struct block_layout layout;
    bool first;
    int d, n_heads;
    size_t n_values;
    uint16_t *k, *v;
};

static void data_make(struct block_data *b, enum kv_format format, int n_heads, int d, bool first, uint64_t seed)
{
    struct ref_rng rng = {seed};
    *b = (struct block_data){.first = first, .d = d, .n_heads = n_heads, .n_values = (size_t)n_heads * BLOCK_TOKENS * d};
    cr_assert_eq(block_layout_init(&b->layout, format, 1, (uint32_t)n_heads, (uint32_t)d), 0);
    b->k = random_bf16(&rng, b->n_values, 3);
    b->v = random_bf16(&rng, b->n_values, 0.2);
}

static void data_free(struct block_data *b)
{
    free(b->k);
    free(b->v);
}

static uint16_t *copy_bf16(const uint16_t *x, size_t n)
{
    uint16_t *y = aligned_zeros(n * sizeof *y);
    memcpy(y, x, n * sizeof *y);
    return y;
}

static uint8_t *slice_make(const struct block_data *b)
{
    uint8_t *slice = aligned_zeros(b->layout.slice_bytes[b->first]);
    memset(slice, 0xA5, b->layout.slice_bytes[b->first]);
    return slice;
}

static struct block_params params(const struct block_data *b, uint8_t *slice, uint16_t *k, uint16_t *v)
{
    return (struct block_params){.layout = &b->layout, .first = b->first, .slice = slice, .k = k, .v = v, .head_stride = (int64_t)BLOCK_TOKENS * b->d};
}

/* The number of values that the block cannot hold. */
static int encode(struct fixture *f, int device, const struct block_params *p, bool attended)
{
    int32_t n_bad = 1000; /* it is added to */
    cr_assert_eq(f->ops->block_encode(f->devices[device].stream, p, 1, attended, &n_bad), 0);
    return n_bad - 1000;
}

static const struct { enum kv_format format; int n_heads, d; bool first; } shapes[] = {
    {KV_FORMAT_K8V4, 3, 64, true}, {KV_FORMAT_K8V4, 2, 128, false}, {KV_FORMAT_K8V8, 1, 96, true}, {KV_FORMAT_K8V8, 2, 256, false},
    {KV_FORMAT_BF16, 2, 64, true}, {KV_FORMAT_BF16, 1, 32, false},  {KV_FORMAT_K8V4, 1, 32, true}, {KV_FORMAT_K8V4, 1, 160, false},
};

/* Checks one row's codes against the rule, independently: the fp16 scales, and each value within half a step. */
static void check_row(const double *x, const double *decoded, int n, double levels, double step, double min)
{
    double low = INFINITY, high = -INFINITY;
    for (int c = 0; c < n; c++) {
        low = fmin(low, x[c]);
        high = fmax(high, x[c]);
    }
    cr_assert_eq(min, ref_fp16_value(ref_fp16_bits(low)));
    cr_assert_float_eq(step, (high - min) / levels, (high - min) / levels * 0x1p-10 + 0x1p-24);
    /* Beyond half a step: what the rounding of minimum and step leaves at the ends of the range. */
    double tolerance = step / 2 + fabs(low - min) + levels * fabs(step - (high - min) / levels) + 1e-6 * (fabs(low) + fabs(high));
    for (int c = 0; c < n; c++)
        cr_assert_leq(fabs(decoded[c] - x[c]), tolerance, "%g read back as %g, step %g", x[c], decoded[c], step);
}

static double scale_at(const uint8_t *bytes, uint32_t offset, int i)
{
    uint16_t h;
    memcpy(&h, bytes + offset + 2 * i, 2);
    return ref_fp16_value(h);
}

static void check_subpage(const struct block_data *b, const uint8_t *slice, int head, int subpage)
{
    const struct subpage_layout *l = block_subpage_layout(&b->layout, b->first, (uint32_t)subpage);
    const uint8_t *page = slice + block_subpage_offset(&b->layout, b->first, (uint32_t)head, (uint32_t)subpage);
    const uint8_t *entry = slice + block_index_offset(&b->layout, b->first, (uint32_t)head, (uint32_t)subpage);
    double key[256], value[256], index_key[256];
    for (int t = 0; t < SUBPAGE_TOKENS; t++) {
        size_t at = ((size_t)head * BLOCK_TOKENS + (size_t)subpage * SUBPAGE_TOKENS + (size_t)t) * b->d;
        double *k = widen_bf16(b->k + at, (size_t)b->d), *v = widen_bf16(b->v + at, (size_t)b->d);
        ref_page_key(l, page, b->d, t, key);
        ref_page_value(l, page, b->d, t, value);
        ref_index_key(&b->layout, entry, t, index_key);
        double step = scale_at(entry, b->layout.index_step, t), min = scale_at(entry, b->layout.index_min, t);
        for (int c = 0; c < b->d; c++) /* a 2-bit code reads as the middle of its quarter of 64 codes */
            cr_assert_leq(fabs(index_key[c] - k[c]), 32.5 * step + 1e-3 * fabs(min) + 256 * 0x1p-11 * step);
        if (l->format == KV_FORMAT_BF16) {
            cr_assert_eq(memcmp(key, k, sizeof(double) * b->d), 0);
            cr_assert_eq(memcmp(value, v, sizeof(double) * b->d), 0);
        } else {
            cr_assert_eq(step, scale_at(page, l->key_step, t));
            cr_assert_eq(min, scale_at(page, l->key_min, t));
            check_row(k, key, b->d, 255, step, min);
            for (int c = 0; c < b->d; c += VALUE_GROUP)
                check_row(v + c, value + c, VALUE_GROUP, l->format == KV_FORMAT_K8V4 ? 15 : 255, scale_at(page, l->value_step, c / VALUE_GROUP * 16 + t),
                          scale_at(page, l->value_min, c / VALUE_GROUP * 16 + t));
        }
        free(k);
        free(v);
    }
}

Test(block_codec, follows_the_table_of_record)
{
    struct fixture f;
    fixture_open(&f);
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        struct block_data b;
        data_make(&b, shapes[i].format, shapes[i].n_heads, shapes[i].d, shapes[i].first, 3 + i);
        uint8_t *slice = slice_make(&b);
        struct block_params p = params(&b, slice, b.k, b.v);
        cr_assert_eq(encode(&f, 0, &p, false), 0);
        for (int h = 0; h < b.n_heads; h++)
            for (int s = 0; s < BLOCK_SUBPAGES; s++)
                check_subpage(&b, slice, h, s);
        free(slice);
        data_free(&b);
    }
    fixture_close(&f);
}

/* The same bytes and the same values from every instruction set and number of threads; what `attended` leaves, what block_decode gives and bf16 of the
 * reference's reading are one; and the input is left alone without `attended`. */
Test(block_codec, all_ways_give_the_same_bits)
{
    struct fixture f;
    fixture_open(&f);
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        struct block_data b;
        data_make(&b, shapes[i].format, shapes[i].n_heads, shapes[i].d, shapes[i].first, 30 + i);
        size_t bytes = b.layout.slice_bytes[b.first];
        uint8_t *expected = slice_make(&b);
        struct block_params p = params(&b, expected, b.k, b.v);
        cr_assert_eq(encode(&f, 0, &p, false), 0);
        for (int dev = 0; dev < f.n; dev++) {
            uint8_t *slice = aligned_zeros(bytes);
            uint16_t *k = copy_bf16(b.k, b.n_values), *v = copy_bf16(b.v, b.n_values), *k2 = copy_bf16(b.k, b.n_values), *v2 = copy_bf16(b.v, b.n_values);
            p = params(&b, slice, k, v);
            cr_assert_eq(encode(&f, dev, &p, false), 0);
            cr_assert_eq(memcmp(slice, expected, bytes), 0);
            cr_assert_eq(memcmp(k, b.k, b.n_values * 2), 0);
            cr_assert_eq(encode(&f, dev, &p, true), 0);
            cr_assert_eq(memcmp(slice, expected, bytes), 0);
            p = params(&b, slice, k2, v2);
            cr_assert_eq(f.ops->block_decode(f.devices[dev].stream, &p, 1), 0);
            cr_assert_eq(memcmp(k, k2, b.n_values * 2), 0);
            cr_assert_eq(memcmp(v, v2, b.n_values * 2), 0);
            for (int t = 0; t < BLOCK_TOKENS; t++) {
                double key[256], value[256];
                const struct subpage_layout *l = block_subpage_layout(&b.layout, b.first, (uint32_t)t / 16);
                const uint8_t *page = slice + block_subpage_offset(&b.layout, b.first, 0, (uint32_t)t / 16);
                ref_page_key(l, page, b.d, t % 16, key);
                ref_page_value(l, page, b.d, t % 16, value);
                for (int c = 0; c < b.d; c++) {
                    cr_assert_eq(k[t * b.d + c], ref_bf16_bits(key[c]));
                    cr_assert_eq(v[t * b.d + c], ref_bf16_bits(value[c]));
                }
            }
            free(slice), free(k), free(v), free(k2), free(v2);
        }
        free(expected);
        data_free(&b);
    }
    fixture_close(&f);
}

/* Coding what was read back loses at most half a step more (the extremes move, so that codes may), and in bf16 nothing at all. */
Test(block_codec, coding_twice_stays_close)
{
    struct fixture f;
    fixture_open(&f);
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        struct block_data b;
        data_make(&b, shapes[i].format, shapes[i].n_heads, shapes[i].d, shapes[i].first, 300 + i);
        uint8_t *slice = slice_make(&b);
        uint16_t *k = copy_bf16(b.k, b.n_values), *v = copy_bf16(b.v, b.n_values);
        struct block_params p = params(&b, slice, k, v);
        encode(&f, f.n - 1, &p, true);
        uint16_t *k_once = copy_bf16(k, b.n_values), *v_once = copy_bf16(v, b.n_values);
        encode(&f, f.n - 1, &p, true);
        if (shapes[i].format == KV_FORMAT_BF16) {
            cr_assert_eq(memcmp(k, k_once, b.n_values * 2), 0);
            cr_assert_eq(memcmp(v, v_once, b.n_values * 2), 0);
        }
        for (size_t j = 0; j < b.n_values; j++) {
            double step_bound = 8 * 3.0 / 255 + 12 * 0x1p-8; /* half a step of the widest row, and a bf16 rounding */
            cr_assert_leq(fabs(ref_bf16_value(k[j]) - ref_bf16_value(k_once[j])), step_bound);
            cr_assert_leq(fabs(ref_bf16_value(v[j]) - ref_bf16_value(v_once[j])), 8 * 0.2 / 15);
        }
        free(slice), free(k), free(v), free(k_once), free(v_once);
        data_free(&b);
    }
    fixture_close(&f);
}

/* Rows that have no range, one that has nearly none, extremes of bf16, zeros of both signs, infinities and NaN. */
static int set_odd_rows(struct block_data *b)
{
    int d = b->d, n_bad = 0;
    uint16_t *k = b->k + 20 * d; /* sub-page 1: coded also in a first block */
    uint16_t *v = b->v + 20 * d;
    for (int c = 0; c < d; c++) {
        k[c] = v[c] = ref_bf16_bits(0.1);                                        /* constant */
        k[d + c] = v[d + c] = c % 2 ? 0x8000 : 0;                                /* zeros */
        k[2 * d + c] = v[2 * d + c] = ref_bf16_bits(1e-7);                       /* below fp16's subnormal step */
        k[3 * d + c] = v[3 * d + c] = (uint16_t)(c == 5 ? 0x7F80 : c == 6 ? 0xFF80 : c == 7 ? 0x7FC1 : 0x3F80); /* inf, -inf, NaN, 1 */
        k[4 * d + c] = v[4 * d + c] = (uint16_t)(c % 2 ? 0x7F7F : 0xFF7F);       /* the largest finite */
        k[5 * d + c] = v[5 * d + c] = 0x7FC0;                                    /* NaN alone */
    }
    n_bad += 2 * 3 + 2 * d + (b->layout.format == KV_FORMAT_BF16 ? 0 : 2 * d); /* beyond fp16, where codes cannot follow */
    b->k[d - 1] = 0xFF80; /* in the first sub-page */
    return n_bad + 1;
}

Test(block_codec, odd_rows_are_defined)
{
    struct fixture f;
    fixture_open(&f);
    for (int format = 0; format < KV_FORMAT_COUNT; format++)
        for (int first = 0; first < 2; first++) {
            struct block_data b;
            data_make(&b, (enum kv_format)format, 1, 64, first, 8);
            int n_bad = set_odd_rows(&b);
            uint8_t *expected = NULL;
            for (int dev = 0; dev < f.n; dev++) {
                uint8_t *slice = slice_make(&b);
                uint16_t *k = copy_bf16(b.k, b.n_values), *v = copy_bf16(b.v, b.n_values);
                struct block_params p = params(&b, slice, k, v);
                cr_assert_eq(encode(&f, dev, &p, true), n_bad);
                for (size_t j = 0; j < b.n_values; j++)
                    cr_assert((k[j] & 0x7F80) != 0x7F80 && (v[j] & 0x7F80) != 0x7F80, "all that is read back is finite");
                const uint16_t *row = k + 20 * 64;
                bool coded = format != KV_FORMAT_BF16;
                cr_assert_float_eq(ref_bf16_value(row[0]), 0.1, 1e-3);
                cr_assert_eq(ref_bf16_value(row[64]), 0);
                cr_assert_float_eq(ref_bf16_value(row[2 * 64]), 1e-7, 3e-8);
                cr_assert_float_eq(ref_bf16_value(row[3 * 64 + 5]), 65504, 600);
                cr_assert_float_eq(ref_bf16_value(row[3 * 64 + 6]), -65504, 600);
                cr_assert_float_eq(ref_bf16_value(row[3 * 64 + 7]), 0, coded ? 300 : 0);
                if (coded)
                    cr_assert_float_eq(ref_bf16_value(row[4 * 64 + 1]), 65504, 600);
                else
                    cr_assert_eq(row[4 * 64 + 1], 0x7F7F);
                cr_assert_eq(ref_bf16_value(row[5 * 64 + 3]), 0);
                if (expected)
                    cr_assert_eq(memcmp(slice, expected, b.layout.slice_bytes[first]), 0);
                else
                    expected = slice, slice = NULL;
                free(slice), free(k), free(v);
            }
            free(expected);
            data_free(&b);
        }
    fixture_close(&f);
}

/* Blocks of one call are coded as if alone, from rows that lie elsewhere and stay as they are. */
Test(block_codec, many_blocks_from_exact_rows)
{
    enum { BLOCKS = 3 };
    struct fixture f;
    fixture_open(&f);
    struct block_data b[BLOCKS];
    struct block_params one[BLOCKS], many[BLOCKS];
    uint8_t *slices[2][BLOCKS];
    uint16_t *rows[4][BLOCKS]; /* alone: k, v in place; together: k, v apart from the exact ones */
    int n_alone = 0;
    int32_t n_bad = 0;
    for (int i = 0; i < BLOCKS; i++) {
        data_make(&b[i], KV_FORMAT_K8V4, 2, 64, i == 0, 70 + (uint64_t)i);
        b[i].k[i * 64 * 20] = 0x7F80;
        for (int j = 0; j < 4; j++)
            rows[j][i] = j < 2 ? copy_bf16(j % 2 ? b[i].v : b[i].k, b[i].n_values) : aligned_zeros(b[i].n_values * 2);
        for (int j = 0; j < 2; j++)
            slices[j][i] = slice_make(&b[i]);
        one[i] = params(&b[i], slices[0][i], rows[0][i], rows[1][i]);
        many[i] = params(&b[i], slices[1][i], rows[2][i], rows[3][i]);
        many[i].layout = &b[0].layout;
        many[i].exact_k = b[i].k, many[i].exact_v = b[i].v, many[i].exact_stride = (int64_t)BLOCK_TOKENS * 64;
        n_alone += encode(&f, f.n - 1, &one[i], true);
    }
    cr_assert_eq(f.ops->block_encode(f.devices[f.n - 1].stream, many, BLOCKS, true, &n_bad), 0);
    cr_expect(n_alone == BLOCKS && n_bad == BLOCKS, "%d alone, %d together", n_alone, n_bad);
    for (int i = 0; i < BLOCKS; i++) {
        cr_expect_eq(memcmp(slices[0][i], slices[1][i], b[i].layout.slice_bytes[b[i].first]), 0, "block %d", i);
        cr_expect(memcmp(rows[0][i], rows[2][i], b[i].n_values * 2) == 0 && memcmp(rows[1][i], rows[3][i], b[i].n_values * 2) == 0, "block %d", i);
        memset(rows[2][i], 0, b[i].n_values * 2);
    }
    cr_assert_eq(f.ops->block_decode(f.devices[f.n - 1].stream, many, BLOCKS), 0);
    for (int i = 0; i < BLOCKS; i++) {
        cr_expect(memcmp(rows[0][i], rows[2][i], b[i].n_values * 2) == 0, "block %d", i);
        for (int j = 0; j < 4; j++)
            free(rows[j][i]);
        free(slices[0][i]), free(slices[1][i]);
        data_free(&b[i]);
    }
    fixture_close(&f);
}
