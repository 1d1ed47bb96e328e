/* A cache of pieces of text and the ids they become: a fixed array of one-cache-line entries, each under a sequence lock of its own. Any number of
 * threads read and write at once and never wait: a reader that meets a writer sees a miss, a writer that meets a writer drops its entry. */
#pragma once
#include "router/text/short_key.h"
#include <stddef.h>
#include <stdint.h>

#define WORD_CACHE_IDS_MAX 6

struct word_cache;

int word_cache_create(unsigned log2_entries, struct word_cache **ret_cache); /* -ENOMEM */
void word_cache_free(struct word_cache *cache);
/* Fetches the line that the next two calls with this hash look at. */
void word_cache_prefetch(const struct word_cache *cache, uint64_t hash);
/* The number of ids copied to ids[0..WORD_CACHE_IDS_MAX) (all of them are written), or 0 for a miss. `len` is 1 to SHORT_KEY_MAX. */
size_t word_cache_get(const struct word_cache *cache, const struct short_key *key, size_t len, uint64_t hash, int32_t ids[WORD_CACHE_IDS_MAX]);
/* n is 1 to WORD_CACHE_IDS_MAX. */
void word_cache_put(struct word_cache *cache, const struct short_key *key, size_t len, uint64_t hash, const int32_t ids[], size_t n);
