/* Linear probing with backward-shift deletion: no tombstones, so the table does not wear out under the steady turnover of a full pool.
 * Keys are BLAKE2b digests: their first bytes are the hash. */
#include "router/route/prefix_index.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { CAPACITY_MIN = 1024, LOAD_PERCENT_MAX = 75 };

struct entry {
    struct block_key key;
    uint64_t stores;    /* bit s: store s has it */
    uint64_t predicted; /* bit s: store s will, until predicted_until_us */
    uint64_t predicted_until_us;
};

struct prefix_index {
    struct entry *entries; /* [capacity]; free: both sets are empty */
    size_t capacity;       /* a power of two */
    size_t n;
    size_t max;
    size_t n_predicted;    /* predictions since the last rebuild: what a rebuild may free */
    uint64_t now_us;       /* as last told */
    size_t n_of_store[PREFIX_STORES_MAX];
};

static bool is_free(const struct entry *entry)
{
    return entry->stores == 0 && entry->predicted == 0;
}

static size_t home(const struct prefix_index *index, const struct block_key *key)
{
    uint64_t hash;
    memcpy(&hash, key->bytes, sizeof(hash));
    return hash & (index->capacity - 1);
}

int prefix_index_create(size_t entries_max, struct prefix_index **ret_index)
{
    struct prefix_index *index = calloc(1, sizeof(*index));
    if (!index)
        return -ENOMEM;
    index->max = entries_max;
    index->capacity = CAPACITY_MIN;
    index->entries = calloc(index->capacity, sizeof(struct entry));
    if (!index->entries) {
        free(index);
        return -ENOMEM;
    }
    *ret_index = index;
    return 0;
}

void prefix_index_free(struct prefix_index *index)
{
    if (!index)
        return;
    free(index->entries);
    free(index);
}

/* The key's entry, or the free slot where it would go. */
static struct entry *probe(const struct prefix_index *index, const struct block_key *key)
{
    size_t mask = index->capacity - 1;
    for (size_t i = home(index, key);; i = (i + 1) & mask) {
        struct entry *entry = &index->entries[i];
        if (is_free(entry) || memcmp(entry->key.bytes, key->bytes, BLOCK_KEY_BYTES) == 0)
            return entry;
    }
}

static int grow(struct prefix_index *index)
{
    struct prefix_index bigger = *index;
    bigger.capacity = index->capacity * 2;
    bigger.entries = calloc(bigger.capacity, sizeof(struct entry));
    if (!bigger.entries)
        return -ENOMEM;
    for (size_t i = 0; i < index->capacity; i++)
        if (!is_free(&index->entries[i]))
            *probe(&bigger, &index->entries[i].key) = index->entries[i];
    free(index->entries);
    *index = bigger;
    return 0;
}

/* Clears bits in every entry by building the table anew: the one walk that does not have to care about moved entries. */
static void rebuild(struct prefix_index *index, uint64_t keep_stores)
{
    struct prefix_index fresh = *index;
    fresh.n = fresh.n_predicted = 0;
    fresh.entries = calloc(fresh.capacity, sizeof(struct entry));
    if (!fresh.entries)
        return; /* stale hints stay; they only cost a worse choice */
    for (size_t i = 0; i < index->capacity; i++) {
        struct entry entry = index->entries[i];
        entry.stores &= keep_stores;
        entry.predicted &= keep_stores;
        if (entry.predicted_until_us < index->now_us)
            entry.predicted = 0;
        if (is_free(&entry))
            continue;
        *probe(&fresh, &entry.key) = entry;
        fresh.n++;
    }
    free(index->entries);
    *index = fresh;
}

static bool is_full(const struct prefix_index *index)
{
    return index->n >= index->max || (index->n + 1) * 100 > index->capacity * LOAD_PERCENT_MAX;
}

static int make_room(struct prefix_index *index)
{
    if (is_full(index) && index->n_predicted > index->n / 4)
        rebuild(index, ~0ull); /* predictions that have run out */
    if (index->n >= index->max)
        return -ENOSPC;
    return is_full(index) ? grow(index) : 0;
}

/* The key's entry, new and empty if it was not there; NULL when there is no room. */
static struct entry *find_or_insert(struct prefix_index *index, const struct block_key *key, int *ret_error)
{
    struct entry *entry = probe(index, key);
    if (!is_free(entry))
        return entry;
    *ret_error = make_room(index);
    if (*ret_error < 0)
        return NULL;
    entry = probe(index, key);
    *entry = (struct entry){.key = *key};
    index->n++; /* the caller sets a bit at once */
    return entry;
}

/* Frees a slot and moves later members of the run back, so that no probe meets a hole. */
static void erase(struct prefix_index *index, struct entry *entry)
{
    size_t mask = index->capacity - 1;
    size_t hole = (size_t)(entry - index->entries);
    index->n--;
    for (size_t i = (hole + 1) & mask; !is_free(&index->entries[i]); i = (i + 1) & mask) {
        size_t from_home = (i - home(index, &index->entries[i].key)) & mask;
        if (from_home >= ((i - hole) & mask)) {
            index->entries[hole] = index->entries[i];
            hole = i;
        }
    }
    index->entries[hole] = (struct entry){0};
}

int prefix_index_add(struct prefix_index *index, int store, const struct block_key *key)
{
    ASSERT(store >= 0 && store < PREFIX_STORES_MAX);
    int error = 0;
    struct entry *entry = find_or_insert(index, key, &error);
    if (!entry)
        return error;
    uint64_t bit = 1ull << store;
    index->n_of_store[store] += !(entry->stores & bit);
    entry->stores |= bit;
    entry->predicted &= ~bit;
    return 0;
}

void prefix_index_remove(struct prefix_index *index, int store, const struct block_key *key)
{
    ASSERT(store >= 0 && store < PREFIX_STORES_MAX);
    struct entry *entry = probe(index, key);
    if (is_free(entry))
        return;
    uint64_t bit = 1ull << store;
    index->n_of_store[store] -= (entry->stores & bit) != 0;
    entry->stores &= ~bit;
    entry->predicted &= ~bit;
    if (is_free(entry))
        erase(index, entry);
}

void prefix_index_drop(struct prefix_index *index, int store)
{
    ASSERT(store >= 0 && store < PREFIX_STORES_MAX);
    index->n_of_store[store] = 0;
    rebuild(index, ~(1ull << store));
}

void prefix_index_predict(struct prefix_index *index, int store, const struct block_key *keys, size_t n, uint64_t now_us, uint64_t ttl_us)
{
    ASSERT(store >= 0 && store < PREFIX_STORES_MAX);
    uint64_t bit = 1ull << store;
    index->now_us = now_us;
    for (size_t i = 0; i < n; i++) {
        int error = 0;
        struct entry *entry = find_or_insert(index, &keys[i], &error);
        if (!entry)
            return;
        if (entry->stores & bit)
            continue;
        entry->predicted |= bit;
        entry->predicted_until_us = now_us + ttl_us;
        index->n_predicted++;
    }
}

void prefix_index_match(const struct prefix_index *index, const struct block_key *keys, size_t n, uint64_t now_us, int n_stores,
                        uint32_t *ret_blocks)
{
    uint64_t alive = n_stores >= 64 ? ~0ull : (1ull << n_stores) - 1;
    memset(ret_blocks, 0, (size_t)n_stores * sizeof(*ret_blocks));
    for (size_t i = 0; i < n && alive; i++) {
        const struct entry *entry = probe(index, &keys[i]);
        uint64_t have = entry->stores | (entry->predicted_until_us >= now_us ? entry->predicted : 0);
        alive &= have;
        for (uint64_t set = alive; set; set &= set - 1)
            ret_blocks[__builtin_ctzll(set)]++;
    }
}

size_t prefix_index_store_blocks(const struct prefix_index *index, int store)
{
    return index->n_of_store[store];
}

size_t prefix_index_entries(const struct prefix_index *index)
{
    return index->n;
}
