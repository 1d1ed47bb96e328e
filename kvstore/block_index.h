/* The private index of the pool: block keys to chain nodes. A node exists while its key names a block, or while a block in the pool names the key
 * as its parent; so children find a parent that is stored after them, and eviction knows who still has children. Chained hash table, XXH3 with a
 * secret seed (keys come from clients); growing moves a few buckets with each insertion, so that no call is O(n). Not thread-safe. */
#pragma once
#include "proto/block_key.h"
#include <stddef.h>
#include <stdint.h>

struct pool_block;

struct chain_node {
    struct block_key key;
    uint64_t hash;
    struct chain_node *next;  /* in its bucket */
    struct pool_block *block; /* NULL: known as a parent only */
    uint32_t n_children;      /* blocks that name this node as their parent */
    uint32_t position;        /* of the block in its sequence, as first heard; never changes while the node exists */
};

struct block_index {
    struct chain_node **buckets; /* [n_buckets], a power of two */
    struct chain_node **old;     /* [n_old] while growing, else NULL: buckets below n_moved are empty */
    size_t n_buckets, n_old, n_moved;
    size_t n_nodes;
    uint64_t seed;
};

/* -ENOMEM, or the error of getrandom. */
int block_index_init(struct block_index *index);
void block_index_fini(struct block_index *index); /* frees the nodes; a zeroed index is fine */
struct chain_node *block_index_find(const struct block_index *index, const struct block_key *key);
/* Finds the node or adds one at `position`. -ENOMEM. */
int block_index_get(struct block_index *index, const struct block_key *key, uint32_t position, struct chain_node **ret_node);
/* Frees the node if it has neither a block nor children. */
void block_index_prune(struct block_index *index, struct chain_node *node);
