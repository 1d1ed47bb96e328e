#include "proto/block_layout.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* Totals worked out by hand from the table in block_layout.h: a K8V4 sub-page is 26 d + 64 bytes, K8V8 34 d + 64, BF16 64 d, an index entry 4 d + 64. */
static const struct {
    enum kv_format format;
    uint32_t n_layers, n_kv_heads, head_dim;
    uint32_t page_bytes, index_bytes;
    uint64_t block_bytes, first_block_bytes;
} totals[] = {
    {KV_FORMAT_K8V4, 30, 3, 64, 1728, 320, 1474560, 1687680},    {KV_FORMAT_K8V8, 30, 3, 64, 2240, 320, 1843200, 2010240},
    {KV_FORMAT_BF16, 30, 3, 64, 4096, 320, 3179520, 3179520},    {KV_FORMAT_K8V4, 32, 8, 128, 3392, 576, 8126464, 9355264},
    {KV_FORMAT_K8V8, 32, 8, 128, 4416, 576, 10223616, 11190272}, {KV_FORMAT_BF16, 32, 8, 128, 8192, 576, 17956864, 17956864},
    {KV_FORMAT_K8V4, 1, 1, 32, 896, 192, 8704, 9856},            {KV_FORMAT_K8V4, 1, 1, 256, 6720, 1088, 62464, 72128},
};

Test(block_layout, test_totals_are_those_of_the_table)
{
    for (size_t i = 0; i < sizeof(totals) / sizeof(totals[0]); i++) {
        struct block_layout l;
        cr_assert_eq(block_layout_init(&l, totals[i].format, totals[i].n_layers, totals[i].n_kv_heads, totals[i].head_dim), 0);
        cr_assert_eq(l.page.bytes, totals[i].page_bytes, "row %zu", i);
        cr_assert_eq(l.sink.bytes, 64 * totals[i].head_dim);
        cr_assert_eq(l.index_entry_bytes, totals[i].index_bytes);
        cr_assert_eq(l.block_bytes[0], totals[i].block_bytes, "row %zu: %lu", i, (unsigned long)l.block_bytes[0]);
        cr_assert_eq(l.block_bytes[1], totals[i].first_block_bytes, "row %zu: %lu", i, (unsigned long)l.block_bytes[1]);
        cr_assert_eq(l.block_bytes[0], (uint64_t)l.n_layers * l.n_kv_heads * l.head_bytes[0]);
    }
}

/* Counts how often each byte of an extent is claimed. */
struct claims {
    uint8_t *count;
    uint64_t bytes;
};

static void claim(struct claims *c, uint64_t offset, uint64_t n)
{
    cr_assert_leq(offset + n, c->bytes);
    for (uint64_t i = 0; i < n; i++)
        c->count[offset + i]++;
}

static void claim_subpage(struct claims *c, const struct subpage_layout *p, uint64_t at, uint32_t d)
{
    cr_assert_eq((at + p->keys) % 64, 0);
    cr_assert_eq((at + p->values) % 64, 0);
    if (p->format == KV_FORMAT_BF16) {
        claim(c, at + p->keys, 16 * d * 2);
        claim(c, at + p->values, 16 * d * 2);
        return;
    }
    cr_assert_eq((at + p->key_step) % 64, 0);
    cr_assert_eq((at + p->value_step) % 32, 0);
    claim(c, at + p->keys, 16 * d);
    claim(c, at + p->key_step, 32);
    claim(c, at + p->key_min, 32);
    claim(c, at + p->values, p->format == KV_FORMAT_K8V4 ? 8 * d : 16 * d);
    claim(c, at + p->value_step, d / 32 * 32);
    claim(c, at + p->value_min, d / 32 * 32);
}

static void claim_block(struct claims *c, const struct block_layout *l, bool first)
{
    for (uint32_t layer = 0; layer < l->n_layers; layer++) {
        uint64_t slice = block_slice_offset(l, first, layer);
        cr_assert_eq(slice % 64, 0);
        for (uint32_t head = 0; head < l->n_kv_heads; head++) {
            for (uint32_t s = 0; s < BLOCK_SUBPAGES; s++) {
                uint64_t index = slice + block_index_offset(l, first, head, s);
                cr_assert_eq(index % 64, 0);
                claim(c, index, 4 * l->head_dim);
                claim(c, index + l->index_step, 32);
                claim(c, index + l->index_min, 32);
                claim_subpage(c, block_subpage_layout(l, first, s), slice + block_subpage_offset(l, first, head, s), l->head_dim);
            }
        }
    }
}

Test(block_layout, test_parts_cover_each_byte_of_an_extent_once)
{
    static const uint32_t dims[] = {32, 64, 96, 128, 256}, heads[] = {1, 3, 8};
    for (int format = 0; format < KV_FORMAT_COUNT; format++) {
        for (size_t i = 0; i < 5 * 3 * 2; i++) {
            struct block_layout l;
            bool first = i & 1;
            cr_assert_eq(block_layout_init(&l, (enum kv_format)format, 2, heads[i / 2 % 3], dims[i / 6]), 0);
            struct claims c = {calloc(1, l.block_bytes[first]), l.block_bytes[first]};
            claim_block(&c, &l, first);
            for (uint64_t b = 0; b < c.bytes; b++)
                cr_assert_eq(c.count[b], 1, "%s d=%u first=%d byte %lu", kv_format_name(l.format), l.head_dim, first, (unsigned long)b);
            free(c.count);
        }
    }
}

/* The offsets, byte for byte, for the head dims of the models in use. */
Test(block_layout, test_offsets_are_those_of_the_c_types)
{
    struct block_layout l;
#define CHECK(d, name, format)                                                            \
    cr_assert_eq(block_layout_init(&l, format, 1, 1, d), 0);                              \
    cr_assert_eq(l.page.keys, offsetof(SUBPAGE_##name(d), key_codes));                    \
    cr_assert_eq(l.page.key_step, offsetof(SUBPAGE_##name(d), key_step));                 \
    cr_assert_eq(l.page.key_min, offsetof(SUBPAGE_##name(d), key_min));                   \
    cr_assert_eq(l.page.values, offsetof(SUBPAGE_##name(d), value_codes));                \
    cr_assert_eq(l.page.value_step, offsetof(SUBPAGE_##name(d), value_step));             \
    cr_assert_eq(l.page.value_min, offsetof(SUBPAGE_##name(d), value_min));               \
    cr_assert_eq(l.page.bytes, sizeof(SUBPAGE_##name(d)));                                \
    cr_assert_eq(l.sink.values, offsetof(SUBPAGE_BF16(d), values));                       \
    cr_assert_eq(l.sink.bytes, sizeof(SUBPAGE_BF16(d)));                                  \
    cr_assert_eq(l.index_step, offsetof(INDEX_ENTRY(d), key_step));                       \
    cr_assert_eq(l.index_min, offsetof(INDEX_ENTRY(d), key_min));                         \
    cr_assert_eq(l.index_entry_bytes, sizeof(INDEX_ENTRY(d)))
    CHECK(32, K8V4, KV_FORMAT_K8V4);
    CHECK(64, K8V4, KV_FORMAT_K8V4);
    CHECK(64, K8V8, KV_FORMAT_K8V8);
    CHECK(96, K8V8, KV_FORMAT_K8V8);
    CHECK(128, K8V4, KV_FORMAT_K8V4);
    CHECK(128, K8V8, KV_FORMAT_K8V8);
    CHECK(256, K8V4, KV_FORMAT_K8V4);
    cr_assert_eq(offsetof(SUBPAGE_K8V4(128), key_step), 2048);
    cr_assert_eq(offsetof(SUBPAGE_K8V4(128), key_min), 2080);
    cr_assert_eq(offsetof(SUBPAGE_K8V4(128), value_codes), 2112);
    cr_assert_eq(offsetof(SUBPAGE_K8V4(128), value_step), 3136);
    cr_assert_eq(offsetof(SUBPAGE_K8V4(128), value_min), 3264);
}

Test(block_layout, test_sizes_out_of_range_are_refused)
{
    static const struct {
        int format;
        uint32_t n_layers, n_kv_heads, head_dim;
    } bad[] = {{0, 0, 1, 64}, {0, 513, 1, 64}, {0, 1, 0, 64}, {0, 1, 257, 64}, {0, 1, 1, 0}, {0, 1, 1, 16}, {0, 1, 1, 80}, {0, 1, 1, 288}, {3, 1, 1, 64}, {-1, 1, 1, 64}, {0, UINT32_MAX, UINT32_MAX, UINT32_MAX}};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct block_layout l = {.n_layers = 77};
        cr_assert_eq(block_layout_init(&l, (enum kv_format)bad[i].format, bad[i].n_layers, bad[i].n_kv_heads, bad[i].head_dim), -EINVAL, "row %zu", i);
        cr_assert_eq(l.n_layers, 77, "outputs only on success");
    }
    struct block_layout l;
    cr_assert_eq(block_layout_init(&l, KV_FORMAT_BF16, 512, 256, 256), 0);
    cr_assert_eq(l.block_bytes[0], (uint64_t)512 * 256 * 8 * (1088 + 16384));
}

Test(block_layout, test_format_names)
{
    cr_assert_str_eq(kv_format_name(KV_FORMAT_K8V4), "k8v4");
    cr_assert_str_eq(kv_format_name(KV_FORMAT_K8V8), "k8v8");
    cr_assert_str_eq(kv_format_name(KV_FORMAT_BF16), "bf16");
    cr_assert_str_eq(kv_format_name(KV_FORMAT_COUNT), "unknown");
}
