/* Reads one value of a sub-page back, by proto/block_layout.h: fma(step, code, min) rounded to bf16, the value that prefill attends and block_decode gives. */
#pragma once
#include "kernels/cuda/cuda_private.h"
#include "kernels/cuda/math.cuh"

/* What a block keeps of one sub-page: 16 tokens by d dims, two bf16 neighbours (c, c + 1) at a time. */
DEVICE uint16_t page_fp16(const uint8_t *page, uint32_t offset, int i)
{
    return reinterpret_cast<const uint16_t *>(page + offset)[i];
}

DEVICE uint16_t page_value16(uint8_t code, uint16_t step, uint16_t min)
{
    return bf16_from_float(fmaf(fp16_to_float(step), (float)code, fp16_to_float(min)));
}

/* Key dim c of token t. */
DEVICE uint16_t page_key(const struct subpage_layout &l, const uint8_t *page, int t, int c)
{
    if (l.format == KV_FORMAT_BF16)
        return page_fp16(page, l.keys, (c / 2 * SUBPAGE_TOKENS + t) * 2 + c % 2);
    return page_value16(page[l.keys + (c / 4 * SUBPAGE_TOKENS + t) * 4 + c % 4], page_fp16(page, l.key_step, t), page_fp16(page, l.key_min, t));
}

/* Value dim c of token t. */
DEVICE uint16_t page_value(const struct subpage_layout &l, const uint8_t *page, int d, int t, int c)
{
    uint8_t code;
    if (l.format == KV_FORMAT_BF16)
        return page_fp16(page, l.values, t * d + c);
    if (l.format == KV_FORMAT_K8V8)
        code = page[l.values + t * d + c];
    else
        code = page[l.values + (t / 8 * d + c) * 4 + t % 4] >> (t % 8 / 4 * 4) & 15;
    const int at = c / VALUE_GROUP * SUBPAGE_TOKENS + t;
    return page_value16(code, page_fp16(page, l.value_step, at), page_fp16(page, l.value_min, at));
}

/* A whole sub-page to rows [16, d], by all threads of the block. */
DEVICE void page_read(const struct subpage_layout &l, const uint8_t *page, int d, uint16_t *k, uint16_t *v)
{
    for (int i = (int)threadIdx.x; i < SUBPAGE_TOKENS * d; i += (int)blockDim.x) {
        k[i] = page_key(l, page, i / d, i % d);
        v[i] = page_value(l, page, d, i / d, i % d);
    }
}
