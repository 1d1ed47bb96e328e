/* Reads one value of a sub-page back, by proto/block_layout.h: fma(step, code, min) rounded to bf16, the value that prefill attends and block_decode gives. */
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

/* Four codes of a word as bf16 values to four places `stride` apart. */
DEVICE void page_store4(uint16_t *to, int stride, uint32_t word, float step, float min)
{
    UNROLL for (int i = 0; i < 4; i++)
        to[i * stride] = bf16_from_float(fmaf(step, (float)(word >> 8 * i & 255), min));
}

/* A whole sub-page to shared rows [16, ld], by one warp, a 32-bit word of codes a lane. Values as page_read gives them. */
DEVICE void page_to_tile(const struct subpage_layout &l, const uint8_t *page, int d, int ld, uint16_t *k, uint16_t *v)
{
    const int lane = (int)threadIdx.x % 32;
    const uint32_t *key_words = reinterpret_cast<const uint32_t *>(page + l.keys), *value_words = reinterpret_cast<const uint32_t *>(page + l.values);
    if (l.format == KV_FORMAT_BF16) {
        for (int i = lane; i < SUBPAGE_TOKENS * d / 2; i += 32) {
            *reinterpret_cast<uint32_t *>(k + i % SUBPAGE_TOKENS * ld + i / SUBPAGE_TOKENS * 2) = key_words[i];
            *reinterpret_cast<uint32_t *>(v + 2 * i / d * ld + 2 * i % d) = value_words[i];
        }
        return;
    }
    for (int i = lane; i < SUBPAGE_TOKENS * d / 4; i += 32) {
        const int t = i % SUBPAGE_TOKENS; /* the same in every round: 32 is a multiple of 16 */
        page_store4(k + t * ld + i / SUBPAGE_TOKENS * 4, 1, key_words[i], fp16_to_float(page_fp16(page, l.key_step, t)), fp16_to_float(page_fp16(page, l.key_min, t)));
    }
    if (l.format == KV_FORMAT_K8V8) {
        for (int i = lane; i < SUBPAGE_TOKENS * d / 4; i += 32) {
            const int t = 4 * i / d, c = 4 * i % d, at = c / VALUE_GROUP * SUBPAGE_TOKENS + t;
            page_store4(v + t * ld + c, 1, value_words[i], fp16_to_float(page_fp16(page, l.value_step, at)), fp16_to_float(page_fp16(page, l.value_min, at)));
        }
        return;
    }
    for (int i = lane; i < 2 * d; i += 32) { /* a channel's codes of eight tokens: four in the low nibbles, four in the high ones */
        const int t0 = i / d * 8, c = i % d;
        const uint32_t word = value_words[i];
        UNROLL for (int j = 0; j < 8; j++) {
            const int t = t0 + j, at = c / VALUE_GROUP * SUBPAGE_TOKENS + t;
            const uint32_t code = word >> (j % 4 * 8 + j / 4 * 4) & 15;
            v[t * ld + c] = bf16_from_float(fmaf(fp16_to_float(page_fp16(page, l.value_step, at)), (float)code, fp16_to_float(page_fp16(page, l.value_min, at))));
        }
    }
}
