#include "proto/block_layout.h"
#include "proto/base/base_assert.h"
#include <assert.h>
#include <errno.h>
#include <stddef.h>

enum { LAYERS_MAX = 512, KV_HEADS_MAX = 256, HEAD_DIM_MAX = 256, PART_ALIGN = 64 };
enum { ROW_FP16_BYTES = 2 * SUBPAGE_TOKENS }; /* one fp16 a token */

const char *kv_format_name(enum kv_format format)
{
    switch (format) {
    case KV_FORMAT_K8V4:
        return "k8v4";
    case KV_FORMAT_K8V8:
        return "k8v8";
    case KV_FORMAT_BF16:
        return "bf16";
    case KV_FORMAT_COUNT:
        break;
    }
    return "unknown";
}

static struct subpage_layout bf16_page(uint32_t d)
{
    uint32_t part = SUBPAGE_TOKENS * d * 2;
    return (struct subpage_layout){.format = KV_FORMAT_BF16, .keys = 0, .values = part, .bytes = 2 * part};
}

static struct subpage_layout coded_page(enum kv_format format, uint32_t d)
{
    uint32_t key_codes = SUBPAGE_TOKENS * d;
    uint32_t value_codes = format == KV_FORMAT_K8V4 ? key_codes / 2 : key_codes;
    uint32_t value_scales = d / VALUE_GROUP * ROW_FP16_BYTES;
    struct subpage_layout p = {.format = format, .keys = 0, .key_step = key_codes};
    p.key_min = p.key_step + ROW_FP16_BYTES;
    p.values = p.key_min + ROW_FP16_BYTES;
    p.value_step = p.values + value_codes;
    p.value_min = p.value_step + value_scales;
    p.bytes = p.value_min + value_scales;
    return p;
}

/* The arithmetic above against the compiler's layout of the same table, for the head dims in use and both ends of the range. */
#define CHECK_CODED(d, name) \
    static_assert(offsetof(SUBPAGE_##name(d), key_step) == 16 * (d), "key_step"); \
    static_assert(offsetof(SUBPAGE_##name(d), key_min) == 16 * (d) + 32, "key_min"); \
    static_assert(offsetof(SUBPAGE_##name(d), value_codes) == 16 * (d) + 64, "value_codes"); \
    static_assert(sizeof(SUBPAGE_##name(d)) % PART_ALIGN == 0, "sub-page alignment")
#define CHECK_DIM(d) \
    CHECK_CODED(d, K8V4); \
    static_assert(offsetof(SUBPAGE_K8V4(d), value_step) == 24 * (d) + 64, "value_step"); \
    static_assert(offsetof(SUBPAGE_K8V4(d), value_min) == 25 * (d) + 64, "value_min"); \
    static_assert(sizeof(SUBPAGE_K8V4(d)) == 26 * (d) + 64, "k8v4 sub-page"); \
    CHECK_CODED(d, K8V8); \
    static_assert(offsetof(SUBPAGE_K8V8(d), value_step) == 32 * (d) + 64, "value_step"); \
    static_assert(offsetof(SUBPAGE_K8V8(d), value_min) == 33 * (d) + 64, "value_min"); \
    static_assert(sizeof(SUBPAGE_K8V8(d)) == 34 * (d) + 64, "k8v8 sub-page"); \
    static_assert(offsetof(SUBPAGE_BF16(d), values) == 32 * (d), "bf16 values"); \
    static_assert(sizeof(SUBPAGE_BF16(d)) == 64 * (d), "bf16 sub-page"); \
    static_assert(offsetof(INDEX_ENTRY(d), key_step) == 4 * (d), "index step"); \
    static_assert(offsetof(INDEX_ENTRY(d), key_min) == 4 * (d) + 32, "index min"); \
    static_assert(sizeof(INDEX_ENTRY(d)) == 4 * (d) + 64 && sizeof(INDEX_ENTRY(d)) % PART_ALIGN == 0, "index entry")
CHECK_DIM(32);
CHECK_DIM(64);
CHECK_DIM(96);
CHECK_DIM(128);
CHECK_DIM(256);

int block_layout_init(struct block_layout *ret_layout, enum kv_format format, uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim)
{
    if ((unsigned)format >= KV_FORMAT_COUNT || n_layers < 1 || n_layers > LAYERS_MAX || n_kv_heads < 1 || n_kv_heads > KV_HEADS_MAX)
        return -EINVAL;
    if (head_dim < VALUE_GROUP || head_dim > HEAD_DIM_MAX || head_dim % VALUE_GROUP)
        return -EINVAL;
    struct block_layout l = {.format = format, .n_layers = n_layers, .n_kv_heads = n_kv_heads, .head_dim = head_dim};
    l.sink = bf16_page(head_dim);
    l.page = format == KV_FORMAT_BF16 ? l.sink : coded_page(format, head_dim);
    l.index_step = SUBPAGE_TOKENS * head_dim / 4;
    l.index_min = l.index_step + ROW_FP16_BYTES;
    l.index_entry_bytes = l.index_min + ROW_FP16_BYTES;
    for (int first = 0; first < 2; first++) {
        uint32_t page0 = first ? l.sink.bytes : l.page.bytes;
        l.head_bytes[first] = BLOCK_SUBPAGES * l.index_entry_bytes + page0 + (BLOCK_SUBPAGES - 1) * l.page.bytes;
        l.slice_bytes[first] = n_kv_heads * l.head_bytes[first];
        l.block_bytes[first] = (uint64_t)n_layers * l.slice_bytes[first];
    }
    *ret_layout = l;
    return 0;
}
