/* Reads one sub-page (16 tokens of one KV head, bytes of proto/block_layout.h) back to bf16 rows [16, d]: the values that prefill attends and that block_decode
 * gives, bf16 of fma(step, code, min). */
#pragma once
#include "kernels/cpu/kv_expand.h"
#include "kernels/cpu/lanes.h"
#include "kernels/kernels.h"

/* 16 bytes of codes to bf16: fma(step, code, min), rounded. */
SPECIALIZE void page_read16(const uint8_t *codes, uint16_t step, uint16_t min, bf16_t *x)
{
    v16_store_bf16(x, v16_fma(v16_set1(fp16_to_float(step)), v16_from_i32(v16i_load_u8(codes)), v16_set1(fp16_to_float(min))));
}

static void page_read_key_codes(const struct subpage_layout *l, const uint8_t *page, int d, bf16_t *k)
{
    const uint16_t *step = (const uint16_t *)(page + l->key_step), *min = (const uint16_t *)(page + l->key_min);
    uint8_t codes[KV_MAX_DIM];
    for (int t = 0; t < SUBPAGE_TOKENS; t++) {
        for (int g = 0; g < d / 4; g++)
            memcpy(codes + 4 * g, page + l->keys + (g * SUBPAGE_TOKENS + t) * 4, 4);
        for (int c = 0; c < d; c += LANES)
            page_read16(codes + c, step[t], min[t], k + t * d + c);
    }
}

static void page_read_keys(const struct subpage_layout *l, const uint8_t *page, int d, bf16_t *k)
{
    const bf16_t *keys = (const bf16_t *)(page + l->keys);
    if (l->format != KV_FORMAT_BF16) {
        page_read_key_codes(l, page, d, k);
        return;
    }
    for (int t = 0; t < SUBPAGE_TOKENS; t++)
        for (int c = 0; c < d; c++)
            k[t * d + c] = keys[(c / 2 * SUBPAGE_TOKENS + t) * 2 + c % 2];
}

static inline __attribute__((unused)) void page_read_values(const struct subpage_layout *l, const uint8_t *page, int d, bf16_t *v)
{
    if (l->format == KV_FORMAT_BF16) {
        memcpy(v, page + l->values, sizeof(bf16_t) * SUBPAGE_TOKENS * (size_t)d);
        return;
    }
    const uint16_t *step = (const uint16_t *)(page + l->value_step), *min = (const uint16_t *)(page + l->value_min);
    uint8_t codes[KV_MAX_DIM];
    for (int t = 0; t < SUBPAGE_TOKENS; t++) {
        if (l->format == KV_FORMAT_K8V8)
            memcpy(codes, page + l->values + t * d, (size_t)d);
        for (int c = 0; l->format == KV_FORMAT_K8V4 && c < d; c++)
            codes[c] = page[l->values + (t / 8 * d + c) * 4 + t % 4] >> (t % 8 / 4 * 4) & 15;
        for (int c = 0; c < d; c += LANES) {
            int at = c / VALUE_GROUP * SUBPAGE_TOKENS + t;
            page_read16(codes + c, step[at], min[at], v + t * d + c);
        }
    }
}

static inline __attribute__((unused)) void page_read(const struct subpage_layout *l, const uint8_t *page, int d, bf16_t *k, bf16_t *v)
{
    page_read_keys(l, page, d, k);
    page_read_values(l, page, d, v);
}

/* The copy of a slice's index entry, where one is wanted. */
static inline __attribute__((unused)) void index_copy(const struct block_params *p, uint32_t head, uint32_t subpage)
{
    if (p->index)
        memcpy(p->index + block_index_copy_offset(p->layout, 0, head, subpage), p->slice + block_index_offset(p->layout, p->first, head, subpage), p->layout->index_entry_bytes);
}
