/* The page cache: slots of device memory for sub-pages that were fetched from the pool, one cache a device, shared by all sequences. A sub-page is known by its block's key, layer
 * and KV head, so what one sequence fetched serves every other with the same prefix. Keys are content addresses: an entry never goes stale and is never taken out but to make
 * room. Eviction is second-chance (the clock): a slot that was used since the hand last came by is passed over once.
 *
 * This is the bookkeeping alone: keys, slots, the hand. Who owns the memory of the slots fills a slot after a miss. On the CPU pages are read where they lie in the pool and no slot
 * has memory; the cache then says what a device with so much memory would have had to fetch. What is attended never depends on it.
 *
 * Owner thread only; nothing here allocates after creation. Host memory: 48 bytes and up to 8 of table a slot, touched as slots fill for the first time. A page costs about 35 ns. */
#pragma once
#include "proto/block_key.h"
#include "proto/block_layout.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct page_cache;

/* A piece of one slot's size of a sub-page. Only the sinks' sub-page (bf16) has more than one `part`. */
struct page_ref {
    const struct block_key *block;
    uint32_t place; /* page_place() */
};

static inline uint32_t page_place(int layer, int kv_head, int subpage, int part)
{
    return (uint32_t)layer << 20 | (uint32_t)kv_head << 10 | (uint32_t)(subpage % BLOCK_SUBPAGES) << 7 | (uint32_t)part; /* bounds of proto/block_layout.h; parts are few */
}

struct page_cache_stats {
    uint64_t hits, misses, evictions; /* since creation, in slots */
    size_t capacity_bytes, used_bytes;
};

/* Slots of slot_bytes, never more than max_bytes (nor 2^26 slots) in all, which is also the capacity to begin with. -EINVAL (no slot fits), -ENOMEM. */
int page_cache_create(size_t slot_bytes, size_t max_bytes, struct page_cache **ret_cache);
void page_cache_free(struct page_cache *cache); /* NULL is fine */
/* Uses at most `bytes` from now on; slots beyond are given up at once, those that come back are empty. */
void page_cache_resize(struct page_cache *cache, size_t bytes);
/* The pages of the next calls are needed together, those of the calls before are not any more: a slot that was handed out since is never taken for another page. */
void page_cache_begin(struct page_cache *cache);
/* Finds n pages or makes room for them. ret_slots[i]: the slot, or -1 when all slots are taken by pages that are needed together with it. Returns the misses, -1s included, and
 * sets ret_missed[i]: the slot's bytes have to be fetched (or, with -1, the page, to somewhere else). */
int page_cache_take(struct page_cache *cache, const struct page_ref *pages, int n, int32_t *ret_slots, bool *ret_missed);
void page_cache_stats(const struct page_cache *cache, struct page_cache_stats *ret);
