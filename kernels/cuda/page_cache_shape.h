/* Where a page has its place in the page cache: tags, hashes, and how an extent is laid out. Plain arithmetic, for kernels and for the tests' model of the cache alike.
 *
 * An extent holds sets of two classes, pages and sinks (whose BF16 sub-page is larger; where it is not, sinks are pages):
 *   uint64 tags[sets][WAYS]    0: empty
 *   uint32 stamps[sets][WAYS]  round in which the slot was last handed out
 *   uint32 clock[sets]         bits 0-15: slots used since the hand came by; from 16 on: the hand
 *   uint32 heads[sets]         during a round: the pages that fell on the set, a list; 0 between rounds
 *   slots of pages, slots of sinks, on 256 bytes
 * The extent of a page is drawn by jump consistent hashing (Lamping and Veach, 2014), so that pages of extents that stay are found again when others come or go. */
#pragma once
#include "kernels/device_page_cache.h"

#ifdef __CUDACC__
#define PAGE_CACHE_INLINE static __host__ __device__ inline
#else
#define PAGE_CACHE_INLINE static inline
#endif

enum { PAGE_CLASS_PAGE, PAGE_CLASS_SINK, PAGE_CLASSES };

struct page_cache_shape {
    uint32_t bytes[PAGE_CLASSES];  /* of a slot */
    uint32_t n_sets[PAGE_CLASSES]; /* of an extent; sinks: 0 where they are pages */
    uint64_t stamps, clock, heads, slots[PAGE_CLASSES]; /* offsets in an extent; the tables end at slots[0] */
};

PAGE_CACHE_INLINE uint64_t page_tag(uint64_t id, uint32_t layer, uint32_t kv_head, uint32_t subpage)
{
    return id << 20 | (uint64_t)layer << 11 | kv_head << 3 | subpage;
}

/* The finisher of SplitMix64. */
PAGE_CACHE_INLINE uint64_t page_hash(uint64_t tag)
{
    tag = (tag ^ tag >> 30) * 0xBF58476D1CE4E5B9u;
    tag = (tag ^ tag >> 27) * 0x94D049BB133111EBu;
    return tag ^ tag >> 31;
}

PAGE_CACHE_INLINE uint32_t page_extent(uint64_t hash, uint32_t n_extents)
{
    int64_t b = 0, j = 0;
    while (j < (int64_t)n_extents) {
        b = j;
        hash = hash * 2862933555777941757u + 1;
        j = (int64_t)((double)(b + 1) * ((double)((int64_t)1 << 31) / (double)((hash >> 33) + 1)));
    }
    return (uint32_t)b;
}

PAGE_CACHE_INLINE uint32_t page_sets(const struct page_cache_shape *s)
{
    return s->n_sets[PAGE_CLASS_PAGE] + s->n_sets[PAGE_CLASS_SINK];
}

/* Counted over all extents; within an extent sinks' sets follow those of pages. */
PAGE_CACHE_INLINE uint32_t page_set(const struct page_cache_shape *s, uint64_t tag, int page_class, uint32_t n_extents)
{
    const uint64_t hash = page_hash(tag);
    const uint32_t in_class = (uint32_t)((hash & 0xFFFFFFFFu) * s->n_sets[page_class] >> 32);
    return page_extent(hash, n_extents) * page_sets(s) + (page_class == PAGE_CLASS_SINK ? s->n_sets[PAGE_CLASS_PAGE] : 0) + in_class;
}

PAGE_CACHE_INLINE int page_class_of(const struct page_cache_shape *s, bool sink)
{
    return sink && s->bytes[PAGE_CLASS_SINK] > s->bytes[PAGE_CLASS_PAGE] ? PAGE_CLASS_SINK : PAGE_CLASS_PAGE;
}

PAGE_CACHE_INLINE uint64_t page_round256(uint64_t bytes)
{
    return (bytes + 255) & ~(uint64_t)255;
}

/* Sinks get a thirty-second of an extent: one page of a block 0 is one, and it is up to three times as long. 0, or -1 where not a set of each fits. */
PAGE_CACHE_INLINE int page_cache_shape_init(struct page_cache_shape *s, const struct block_layout *layout, size_t extent_bytes)
{
    const uint64_t tables = DEVICE_PAGE_WAYS * (sizeof(uint64_t) + sizeof(uint32_t)) + 2 * sizeof(uint32_t), padding = 6 * 256;
    s->bytes[PAGE_CLASS_PAGE] = layout->page.bytes;
    s->bytes[PAGE_CLASS_SINK] = layout->sink.bytes;
    const uint64_t set[PAGE_CLASSES] = {tables + (uint64_t)DEVICE_PAGE_WAYS * s->bytes[0], tables + (uint64_t)DEVICE_PAGE_WAYS * s->bytes[1]};
    s->n_sets[PAGE_CLASS_SINK] = 0;
    if (page_class_of(s, true) == PAGE_CLASS_SINK)
        s->n_sets[PAGE_CLASS_SINK] = extent_bytes / 32 < set[1] ? 1 : (uint32_t)(extent_bytes / 32 / set[1]);
    const uint64_t sinks = s->n_sets[PAGE_CLASS_SINK] * set[1] + padding;
    if (extent_bytes < sinks + set[0] || (extent_bytes - sinks) / set[0] > 1 << 24)
        return -1;
    s->n_sets[PAGE_CLASS_PAGE] = (uint32_t)((extent_bytes - sinks) / set[0]);
    const uint64_t n = page_sets(s);
    s->stamps = page_round256(n * DEVICE_PAGE_WAYS * sizeof(uint64_t));
    s->clock = page_round256(s->stamps + n * DEVICE_PAGE_WAYS * sizeof(uint32_t));
    s->heads = page_round256(s->clock + n * sizeof(uint32_t));
    s->slots[PAGE_CLASS_PAGE] = page_round256(s->heads + n * sizeof(uint32_t));
    s->slots[PAGE_CLASS_SINK] = page_round256(s->slots[PAGE_CLASS_PAGE] + (uint64_t)s->n_sets[PAGE_CLASS_PAGE] * DEVICE_PAGE_WAYS * s->bytes[0]);
    return 0;
}

/* The slot that the hand stops at: the first empty one, else the first that is neither pinned nor used, taking the mark of used ones that it passes; then behind it. -1: all are pinned. */
PAGE_CACHE_INLINE int page_victim(uint32_t *clock, uint32_t empty, uint32_t pinned)
{
    const uint32_t all = (1u << DEVICE_PAGE_WAYS) - 1;
    uint32_t used = *clock & all, hand = *clock >> 16;
    int victim = -1;
    for (int looks = 0; victim < 0 && looks < 2 * DEVICE_PAGE_WAYS; looks++) {
        const uint32_t way = 1u << hand;
        if (empty ? empty & way : ~pinned & ~used & way)
            victim = (int)hand;
        else if (!empty && !(pinned & way))
            used &= ~way;
        hand = (hand + 1) % DEVICE_PAGE_WAYS;
    }
    if (victim >= 0)
        *clock = (used & ~(1u << victim)) | hand << 16;
    return victim;
}
