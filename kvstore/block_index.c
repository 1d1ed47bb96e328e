#include "kvstore/block_index.h"

#include "proto/base/base_assert.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <xxhash.h>

enum { FIRST_BUCKETS = 1024, MOVED_PER_INSERTION = 4 };

int block_index_init(struct block_index *index)
{
    uint64_t seed;
    struct chain_node **buckets;

    if (getrandom(&seed, sizeof seed, 0) != (ssize_t)sizeof seed)
        return -errno;
    buckets = calloc(FIRST_BUCKETS, sizeof(struct chain_node *));
    if (!buckets)
        return -ENOMEM;
    *index = (struct block_index){.buckets = buckets, .n_buckets = FIRST_BUCKETS, .seed = seed};
    return 0;
}

static void free_chains(struct chain_node **buckets, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        while (buckets[i]) {
            struct chain_node *node = buckets[i];
            buckets[i] = node->next;
            free(node);
        }
    }
    free(buckets);
}

void block_index_fini(struct block_index *index)
{
    free_chains(index->buckets, index->n_buckets);
    free_chains(index->old, index->n_old);
    *index = (struct block_index){0};
}

static uint64_t key_hash(const struct block_index *index, const struct block_key *key)
{
    return XXH3_64bits_withSeed(key->bytes, sizeof key->bytes, index->seed);
}

/* The bucket that holds a hash now: in the old table if it has not moved yet. */
static struct chain_node **bucket_of(const struct block_index *index, uint64_t hash)
{
    if (index->old) {
        size_t slot = hash & (index->n_old - 1);
        if (slot >= index->n_moved)
            return &index->old[slot];
    }
    return &index->buckets[hash & (index->n_buckets - 1)];
}

static void move_some(struct block_index *index)
{
    for (int i = 0; i < MOVED_PER_INSERTION && index->old; i++) {
        struct chain_node *node = index->old[index->n_moved];
        index->old[index->n_moved++] = NULL;
        while (node) {
            struct chain_node *next = node->next;
            struct chain_node **bucket = &index->buckets[node->hash & (index->n_buckets - 1)];
            node->next = *bucket;
            *bucket = node;
            node = next;
        }
        if (index->n_moved == index->n_old) {
            free(index->old);
            index->old = NULL;
            index->n_old = index->n_moved = 0;
        }
    }
}

/* Without memory for a larger table chains grow longer; nothing else changes. */
static void grow(struct block_index *index)
{
    struct chain_node **larger;

    if (index->old || index->n_nodes < index->n_buckets)
        return;
    larger = calloc(index->n_buckets * 2, sizeof(struct chain_node *));
    if (!larger)
        return;
    index->old = index->buckets;
    index->n_old = index->n_buckets;
    index->n_moved = 0;
    index->buckets = larger;
    index->n_buckets *= 2;
}

static struct chain_node *find_hashed(const struct block_index *index, const struct block_key *key, uint64_t hash)
{
    struct chain_node *node = *bucket_of(index, hash);

    while (node && (node->hash != hash || memcmp(&node->key, key, sizeof *key) != 0))
        node = node->next;
    return node;
}

struct chain_node *block_index_find(const struct block_index *index, const struct block_key *key)
{
    return find_hashed(index, key, key_hash(index, key));
}

int block_index_get(struct block_index *index, const struct block_key *key, uint32_t position, struct chain_node **ret_node)
{
    uint64_t hash = key_hash(index, key);
    struct chain_node *node = find_hashed(index, key, hash);
    struct chain_node **bucket;

    if (!node) {
        node = calloc(1, sizeof *node);
        if (!node)
            return -ENOMEM;
        grow(index);
        move_some(index);
        node->key = *key;
        node->hash = hash;
        node->position = position;
        bucket = bucket_of(index, hash);
        node->next = *bucket;
        *bucket = node;
        index->n_nodes++;
    }
    *ret_node = node;
    return 0;
}

void block_index_prune(struct block_index *index, struct chain_node *node)
{
    struct chain_node **link;

    if (node->block || node->n_children)
        return;
    link = bucket_of(index, node->hash);
    while (*link != node) {
        ASSERT(*link);
        link = &(*link)->next;
    }
    *link = node->next;
    index->n_nodes--;
    free(node);
}
