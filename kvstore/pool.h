/* What the store knows of the pool: which blocks lie where, who leases them, what goes first when room is needed. No I/O and no pool memory: offsets
 * only. One thread.
 *
 * A block is written (one write lease), then sealed and immutable (any number of read leases), then dropped: evicted, or reported corrupt. A
 * dropped or abandoned block leaves the index at once; its extent is given back when its last lease ends. Only sealed blocks without leases and
 * without children are evicted, least recently used first, so a chain goes from its leaves to its root. */
#pragma once
#include "kvstore/block_index.h"
#include "kvstore/extent_pool.h"
#include "kvstore/lease_table.h"
#include "kvstore/ordered_tree.h"
#include <stdbool.h>
#include <stdint.h>

struct pool_block {
    struct chain_node *node;           /* NULL: no longer in the index */
    struct chain_node *parent;         /* whose n_children counts this block; NULL for a first block */
    struct extent *extent;
    uint64_t length, checksum;         /* checksum: valid once sealed */
    uint32_t n_leases;
    bool sealed;
    bool evictable;                    /* in pool.lru */
    struct ordered_node lru;           /* (tick of the last use, serial) */
    uint64_t serial;                   /* order of sealing */
    uint64_t event_mark;               /* the listener's, see pool_listener */
    struct pool_block *prev, *next;    /* sealed blocks in order of sealing */
};

/* Who is told of blocks that readers can find, in order. `mark` is kept with the block for the listener's own use and starts as 0. */
struct pool_listener {
    void (*stored)(void *arg, const struct block_key *key, uint64_t *mark);
    void (*evicted)(void *arg, const struct block_key *key, const uint64_t *mark);
    void *arg;
};

struct pool_counters {
    uint64_t lookups, lookup_hits, lookup_misses; /* calls, blocks, blocks */
    uint64_t stored, evicted, discarded, rejected_full, corrupt; /* blocks */
};

/* Walks the sealed blocks in order of sealing while the pool changes. */
struct pool_cursor {
    struct pool_block *block; /* next to visit, NULL at the end */
    struct pool_cursor *prev, *next;
};

struct pool {
    struct extent_pool extents;
    struct block_index index;
    struct lease_table leases;
    struct ordered_tree lru;          /* sealed, no leases, no children */
    struct pool_block *oldest, *newest; /* sealed and in the index */
    struct pool_cursor *cursors;
    struct pool_listener listener;
    struct pool_counters counters;
    uint64_t tick, serial;
    uint64_t n_blocks, n_unsealed;    /* sealed and in the index; being written */
    uint64_t bytes_pinned;            /* extents with leases */
};

enum { POOL_MAX_LEASES = 1 << 23, POOL_MAX_LEASES_PER_OWNER = 1 << 20 };

struct pool_extent {
    uint64_t offset, length, checksum, lease; /* as in store.proto */
};

enum pool_reserve_status { POOL_RESERVE_GRANTED, POOL_RESERVE_EXISTS, POOL_RESERVE_BUSY, POOL_RESERVE_FULL };

struct pool_reserve_request {
    struct block_key key, parent;
    bool first; /* no parent */
    uint32_t position;
    uint64_t length;
};

/* -EINVAL, -ENOMEM. `listener` is copied; its functions may not call the pool. */
int pool_init(struct pool *pool, uint64_t bytes, const struct pool_listener *listener);
void pool_fini(struct pool *pool); /* owners and cursors are gone by then */

/* Takes a read lease on each block of the longest sealed run from the start of keys[n]; returns its length. A run also ends where no more
 * leases can be had. */
int pool_lookup(struct pool *pool, struct lease_owner *owner, const struct block_key *keys, int n, struct pool_extent *ret_extents);
/* Phase one of a put. ret_extent is written for GRANTED and EXISTS. A block that can never fit, and lack of memory, are FULL as well. */
enum pool_reserve_status pool_reserve(struct pool *pool, struct lease_owner *owner, const struct pool_reserve_request *request,
                                      struct pool_extent *ret_extent);
/* Phase two: the write lease becomes a read lease. False if `lease` is no write lease of this owner. */
bool pool_seal(struct pool *pool, struct lease_owner *owner, uint64_t lease, uint64_t checksum);
/* Ends a lease; an unsealed block is dropped and its extent freed. False if it is no lease of this owner. */
bool pool_release(struct pool *pool, struct lease_owner *owner, uint64_t lease);
/* The same for a block that its owner knows to be of no more use: sealed, without leases and without children in the pool, it is dropped. */
bool pool_discard(struct pool *pool, struct lease_owner *owner, uint64_t lease);
/* Drops the block of a read lease from the index; the lease stays. False if it is no read lease of this owner. */
bool pool_report_corrupt(struct pool *pool, struct lease_owner *owner, uint64_t lease);

/* Ends the read leases of an owner. Its unsealed blocks leave the index, so that others can write those keys elsewhere, but keep their extents:
 * the owner may still be writing there. */
void pool_owner_detach(struct pool *pool, struct lease_owner *owner, bool keep_reads);
/* Ends all leases of an owner. */
void pool_owner_end(struct pool *pool, struct lease_owner *owner);

void pool_cursor_open(struct pool *pool, struct pool_cursor *cursor);
/* Copies up to max keys; 0 at the end. Blocks sealed after the opening may be among them. */
int pool_cursor_read(struct pool_cursor *cursor, struct block_key *ret_keys, int max);
void pool_cursor_close(struct pool *pool, struct pool_cursor *cursor);
