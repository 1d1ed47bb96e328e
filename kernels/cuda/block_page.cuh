/* Reads sub-pages back, by proto/block_layout.h: fma(step, code, min) rounded to bf16, the values that prefill attends and block_decode gives. */
#pragma once
#include "kernels/cuda/cuda_private.h"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/submit.cuh"
#include <errno.h>

/* A block_params for device code; an op's array of them goes through the stream's ring. */
struct block_job {
    uint8_t *slice;
    bf16_t *k, *v;
    const bf16_t *exact_k, *exact_v; /* never NULL */
    int64_t head_stride, exact_stride;
    uint8_t *index; /* or NULL */
    int32_t first;
};

enum { BLOCK_JOBS_MAX = 16384 }; /* of one call */

static inline int block_jobs(struct stream *s, const struct block_params *blocks, int n, const struct block_job **ret_jobs)
{
    void *host, *device;
    if (n > BLOCK_JOBS_MAX)
        return -ENOTSUP;
    int r = stream_args_room(s, sizeof(struct block_job) * (size_t)n, &host, &device);
    if (r < 0)
        return r;
    struct block_job *jobs = (struct block_job *)host;
    for (int i = 0; i < n; i++) {
        const struct block_params *p = &blocks[i];
        if (((uintptr_t)p->k | (uintptr_t)p->v | (uintptr_t)p->exact_k | (uintptr_t)p->exact_v) % 16 || p->head_stride % 8 || (p->exact_k && p->exact_stride % 8))
            return -ENOTSUP;
        const bool apart = p->exact_k != nullptr;
        const struct block_job job = {p->slice, p->k, p->v, apart ? p->exact_k : p->k, apart ? p->exact_v : p->v, p->head_stride, apart ? p->exact_stride : p->head_stride, p->index, p->first};
        jobs[i] = job;
    }
    r = stream_args_send(s, device, host, sizeof(struct block_job) * (size_t)n);
    if (r == 0)
        *ret_jobs = (const struct block_job *)device;
    return r;
}

/* The copy of a slice's index entry, by all threads of the block, where one is wanted. Entries are multiples of 64 bytes, on 64 bytes. */
DEVICE void index_copy(const struct block_layout &layout, const struct block_job &job, uint32_t head, uint32_t subpage)
{
    if (!job.index)
        return;
    const uint4 *from = reinterpret_cast<const uint4 *>(job.slice + block_index_offset(&layout, job.first, head, subpage));
    uint4 *to = reinterpret_cast<uint4 *>(job.index + block_index_copy_offset(&layout, 0, head, subpage));
    for (uint32_t i = threadIdx.x; i < layout.index_entry_bytes / sizeof(uint4); i += blockDim.x)
        to[i] = from[i];
}

/* page_summary_vectors for device code. */
DEVICE int page_summary_vectors_of(enum page_scorer scorer)
{
    return scorer == PAGE_SCORER_MINMAX || scorer == PAGE_SCORER_MEANVAR ? 2 : scorer == PAGE_SCORER_MEAN;
}

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

/* By value, for registers. */
DEVICE struct subpage_layout page_layout(const struct block_layout &layout, bool sink)
{
    struct subpage_layout l = layout.page;
    if (sink)
        l = layout.sink;
    return l;
}

/* ---- whole sub-pages as rows [16, ld] of bf16, on 16 bytes, by `n` threads of which this is number i: a warp, or a block ----
 * A thread loads 16 bytes and stores 8 or 16. Of keys, words of four tokens lie side by side; those of a half warp's threads (two fours of tokens, eight words) go to rows that are D + 8 elements apart in
 * 32 different banks. */

DEVICE void page_scales2(uint32_t word, float scales[2])
{
    scales[0] = fp16_to_float((uint16_t)word);
    scales[1] = fp16_to_float((uint16_t)(word >> 16));
}

DEVICE void page_scales4(const uint8_t *at, float scales[4])
{
    const uint2 words = *reinterpret_cast<const uint2 *>(at);
    page_scales2(words.x, scales);
    page_scales2(words.y, scales + 2);
}

DEVICE void page_scales8(const uint8_t *at, float scales[8])
{
    const uint4 words = *reinterpret_cast<const uint4 *>(at);
    page_scales2(words.x, scales);
    page_scales2(words.y, scales + 2);
    page_scales2(words.z, scales + 4);
    page_scales2(words.w, scales + 6);
}

DEVICE uint2 page_values4(const float x[4])
{
    return make_uint2(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]));
}

/* Four codes of a word. */
DEVICE uint2 page_word(uint32_t word, float step, float min)
{
    float x[4];
    UNROLL for (int i = 0; i < 4; i++)
        x[i] = fmaf(step, (float)(word >> 8 * i & 255), min);
    return page_values4(x);
}

DEVICE void page_coded_keys(const struct subpage_layout &l, const uint8_t *page, int d, int ld, uint16_t *k, int i, int n)
{
    const int t = 4 * (i / 16 % 2 * 2 + i % 2);
    float step[4], min[4];
    page_scales4(page + l.key_step + t * sizeof(uint16_t), step);
    page_scales4(page + l.key_min + t * sizeof(uint16_t), min);
    for (int g = i / 32 * 8 + i % 16 / 2; g < d / 4; g += n / 32 * 8) {
        const uint4 words = *reinterpret_cast<const uint4 *>(page + l.keys + (g * SUBPAGE_TOKENS + t) * 4);
        const uint32_t word[4] = {words.x, words.y, words.z, words.w};
        UNROLL for (int j = 0; j < 4; j++)
            *reinterpret_cast<uint2 *>(k + (t + j) * ld + 4 * g) = page_word(word[j], step[j], min[j]);
    }
}

/* The same places, for words of two dims. */
DEVICE void page_bf16_keys(const struct subpage_layout &l, const uint8_t *page, int d, int ld, uint16_t *k, int i, int n)
{
    const int t = 4 * (i / 16 % 2 * 2 + i % 2);
    for (int g = i / 32 * 8 + i % 16 / 2; g < d / 4; g += n / 32 * 8) {
        const uint4 *words = reinterpret_cast<const uint4 *>(page + l.keys + (2 * g * SUBPAGE_TOKENS + t) * 4);
        const uint4 low = words[0], high = words[SUBPAGE_TOKENS / 4];
        *reinterpret_cast<uint2 *>(k + t * ld + 4 * g) = make_uint2(low.x, high.x);
        *reinterpret_cast<uint2 *>(k + (t + 1) * ld + 4 * g) = make_uint2(low.y, high.y);
        *reinterpret_cast<uint2 *>(k + (t + 2) * ld + 4 * g) = make_uint2(low.z, high.z);
        *reinterpret_cast<uint2 *>(k + (t + 3) * ld + 4 * g) = make_uint2(low.w, high.w);
    }
}

/* Four channels of eight tokens: those of a word in its low nibbles, four more in the high ones. */
DEVICE void page_nibble_values(const struct subpage_layout &l, const uint8_t *page, int d, int ld, uint16_t *v, int i, int n)
{
    for (; i < 2 * (d / 4); i += n) {
        const int t = i / (d / 4) * 8, c = i % (d / 4) * 4;
        const uint8_t *scales = page + (c / VALUE_GROUP * SUBPAGE_TOKENS + t) * sizeof(uint16_t);
        const uint4 words = *reinterpret_cast<const uint4 *>(page + l.values + (t / 8 * d + c) * 4);
        const uint32_t word[4] = {words.x, words.y, words.z, words.w};
        float step[8], min[8];
        page_scales8(scales + l.value_step, step);
        page_scales8(scales + l.value_min, min);
        UNROLL for (int j = 0; j < 8; j++) {
            float x[4];
            UNROLL for (int m = 0; m < 4; m++)
                x[m] = fmaf(step[j], (float)(word[m] >> (j % 4 * 8 + j / 4 * 4) & 15), min[j]);
            *reinterpret_cast<uint2 *>(v + (t + j) * ld + c) = page_values4(x);
        }
    }
}

DEVICE void page_byte_values(const struct subpage_layout &l, const uint8_t *page, int d, int ld, uint16_t *v, int i, int n)
{
    for (; i < SUBPAGE_TOKENS * (d / 8); i += n) {
        const int t = i / (d / 8), c = i % (d / 8) * 8, at = c / VALUE_GROUP * SUBPAGE_TOKENS + t;
        const float step = fp16_to_float(page_fp16(page, l.value_step, at)), min = fp16_to_float(page_fp16(page, l.value_min, at));
        const uint2 words = *reinterpret_cast<const uint2 *>(page + l.values + t * d + c), low = page_word(words.x, step, min), high = page_word(words.y, step, min);
        *reinterpret_cast<uint4 *>(v + t * ld + c) = make_uint4(low.x, low.y, high.x, high.y);
    }
}

DEVICE void page_bf16_values(const struct subpage_layout &l, const uint8_t *page, int d, int ld, uint16_t *v, int i, int n)
{
    for (; i < SUBPAGE_TOKENS * (d / 8); i += n) {
        const int t = i / (d / 8), c = i % (d / 8) * 8;
        *reinterpret_cast<uint4 *>(v + t * ld + c) = *reinterpret_cast<const uint4 *>(page + l.values + (t * d + c) * sizeof(uint16_t));
    }
}

DEVICE void page_rows(const struct subpage_layout &l, const uint8_t *page, int d, int ld, uint16_t *k, uint16_t *v, int i, int n)
{
    if (l.format == KV_FORMAT_BF16) {
        page_bf16_keys(l, page, d, ld, k, i, n);
        page_bf16_values(l, page, d, ld, v, i, n);
        return;
    }
    page_coded_keys(l, page, d, ld, k, i, n);
    if (l.format == KV_FORMAT_K8V4)
        page_nibble_values(l, page, d, ld, v, i, n);
    else
        page_byte_values(l, page, d, ld, v, i, n);
}

/* To rows [16, d], by all threads of the block. */
DEVICE void page_read(const struct subpage_layout &l, const uint8_t *page, int d, uint16_t *k, uint16_t *v)
{
    page_rows(l, page, d, d, k, v, (int)threadIdx.x, (int)blockDim.x);
}

/* To shared rows [16, ld], by one warp. The same values. */
DEVICE void page_to_tile(const struct subpage_layout &l, const uint8_t *page, int d, int ld, uint16_t *k, uint16_t *v)
{
    page_rows(l, page, d, ld, k, v, (int)threadIdx.x % 32, 32);
}
