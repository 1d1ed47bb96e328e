/* The extents of the pool: which bytes of it are taken. Sizes are arbitrary, rounded up to 4 KiB; the smallest free extent that is large enough
 * is taken (lowest offset first among equals), and freed neighbours are joined at once. Each call is O(log number of free extents).
 * All of it is private memory of the store: nothing about an extent lies in the pool itself. Not thread-safe. */
#pragma once
#include "kvstore/ordered_tree.h"
#include <stdbool.h>
#include <stdint.h>

enum { EXTENT_GRANULE = 4096 };

struct extent {
    struct ordered_node by_size; /* in extent_pool.free while free: (bytes, offset) */
    struct extent *prev, *next;  /* neighbours by address, taken or free */
    uint64_t offset, bytes;      /* multiples of EXTENT_GRANULE */
    bool taken;
};

struct extent_pool {
    struct ordered_tree free;
    struct extent *first; /* by address */
    uint64_t bytes;       /* of the whole pool */
    uint64_t bytes_taken;
    uint64_t n_taken, n_free; /* extents */
};

/* One free extent of `bytes` (rounded down to the granule, at least one). -EINVAL, -ENOMEM. */
int extent_pool_init(struct extent_pool *pool, uint64_t bytes);
void extent_pool_fini(struct extent_pool *pool); /* a zeroed pool is fine; taken extents become invalid */
/* Takes at least `bytes` > 0. -EINVAL, -ENOSPC (no free extent is large enough), -ENOMEM. The extent belongs to the pool. */
int extent_pool_take(struct extent_pool *pool, uint64_t bytes, struct extent **ret_extent);
void extent_pool_give(struct extent_pool *pool, struct extent *extent); /* the extent is invalid afterwards */
/* Bytes of the largest free extent, 0 if the pool is full. */
uint64_t extent_pool_largest(const struct extent_pool *pool);
/* Bytes that a request occupies; 0 when it cannot be represented. */
uint64_t extent_round(uint64_t bytes);
