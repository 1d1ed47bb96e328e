#include "router/text/word_cache.h"
#include <assert.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

/* Every word is atomic, so that a torn read is a value to reject and not undefined behaviour. */
struct entry {
    _Atomic uint32_t sequence; /* odd while a writer is inside */
    _Atomic uint32_t shape;    /* key length in the low byte, number of ids above it; 0: empty */
    _Atomic uint64_t key[4];
    _Atomic uint64_t ids[3];   /* two a word */
};
static_assert(sizeof(struct entry) == 64, "one cache line");

struct word_cache {
    struct entry *entries; /* [1 << log2_entries] */
    unsigned shift;        /* the index is the top bits of the hash */
};

int word_cache_create(unsigned log2_entries, struct word_cache **ret_cache)
{
    struct word_cache *cache = malloc(sizeof *cache);
    size_t bytes = sizeof(struct entry) << log2_entries;
    if (!cache)
        return -ENOMEM;
    cache->entries = aligned_alloc(64, bytes);
    cache->shift = 64 - log2_entries;
    if (!cache->entries) {
        free(cache);
        return -ENOMEM;
    }
    memset((void *)cache->entries, 0, bytes);
    *ret_cache = cache;
    return 0;
}

void word_cache_free(struct word_cache *cache)
{
    if (!cache)
        return;
    free(cache->entries);
    free(cache);
}

void word_cache_prefetch(const struct word_cache *cache, uint64_t hash)
{
    __builtin_prefetch(&cache->entries[hash >> cache->shift]);
}

size_t word_cache_get(const struct word_cache *cache, const struct short_key *key, size_t len, uint64_t hash, int32_t ids[WORD_CACHE_IDS_MAX])
{
    struct entry *e = &cache->entries[hash >> cache->shift];
    /* Acquire pairs with the writer's final release: an even number seen here means its words are visible. */
    uint32_t before = atomic_load_explicit(&e->sequence, memory_order_acquire);
    uint32_t shape = atomic_load_explicit(&e->shape, memory_order_relaxed);
    uint64_t differs = (before & 1) | ((shape & 0xff) ^ len);
    for (int i = 0; i < 4; i++)
        differs |= atomic_load_explicit(&e->key[i], memory_order_relaxed) ^ key->w[i];
    if (differs)
        return 0;
    for (int i = 0; i < 3; i++) {
        uint64_t pair = atomic_load_explicit(&e->ids[i], memory_order_relaxed);
        memcpy(ids + 2 * i, &pair, sizeof pair);
    }
    /* The fence keeps the reads above it before the second look at the number. */
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&e->sequence, memory_order_relaxed) == before ? shape >> 8 : 0;
}

void word_cache_put(struct word_cache *cache, const struct short_key *key, size_t len, uint64_t hash, const int32_t ids[], size_t n)
{
    struct entry *e = &cache->entries[hash >> cache->shift];
    uint32_t before = atomic_load_explicit(&e->sequence, memory_order_relaxed);
    if (before & 1 || !atomic_compare_exchange_strong_explicit(&e->sequence, &before, before + 1, memory_order_acquire, memory_order_relaxed))
        return;
    /* The odd number must be visible before any word changes. */
    atomic_thread_fence(memory_order_release);
    int32_t padded[WORD_CACHE_IDS_MAX] = {0};
    memcpy(padded, ids, n * sizeof *ids);
    atomic_store_explicit(&e->shape, (uint32_t)(len | n << 8), memory_order_relaxed);
    for (int i = 0; i < 4; i++)
        atomic_store_explicit(&e->key[i], key->w[i], memory_order_relaxed);
    for (int i = 0; i < 3; i++) {
        uint64_t pair;
        memcpy(&pair, padded + 2 * i, sizeof pair);
        atomic_store_explicit(&e->ids[i], pair, memory_order_relaxed);
    }
    atomic_store_explicit(&e->sequence, before + 2, memory_order_release);
}
