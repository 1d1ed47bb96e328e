#include "kvstore/pool.h"

#include "proto/base/base_assert.h"
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>

static struct pool_block *block_of(struct ordered_node *node)
{
    return (struct pool_block *)((char *)node - offsetof(struct pool_block, lru));
}

int pool_init(struct pool *pool, uint64_t bytes, const struct pool_listener *listener)
{
    int rc;

    *pool = (struct pool){.listener = *listener};
    ordered_tree_init(&pool->lru);
    lease_table_init(&pool->leases, POOL_MAX_LEASES);
    rc = extent_pool_init(&pool->extents, bytes);
    if (rc < 0)
        return rc;
    rc = block_index_init(&pool->index);
    if (rc < 0)
        extent_pool_fini(&pool->extents);
    return rc;
}

void pool_fini(struct pool *pool)
{
    ASSERT(!pool->cursors && pool->leases.n_used == 0);
    while (pool->oldest) {
        struct pool_block *block = pool->oldest;
        pool->oldest = block->next;
        free(block);
    }
    block_index_fini(&pool->index);
    extent_pool_fini(&pool->extents);
    lease_table_fini(&pool->leases);
    *pool = (struct pool){0};
}

/* ---- blocks ---- */

/* Whether a block may be evicted changes with its leases, its children and its place in the index; each of these calls this. */
static void block_update_evictable(struct pool *pool, struct pool_block *block)
{
    bool evictable = block->node && block->sealed && block->n_leases == 0 && block->node->n_children == 0;

    if (evictable && !block->evictable) {
        block->lru.b = block->serial;
        ordered_tree_insert(&pool->lru, &block->lru);
    } else if (!evictable && block->evictable) {
        ordered_tree_remove(&pool->lru, &block->lru);
    }
    block->evictable = evictable;
}

static void sealed_list_add(struct pool *pool, struct pool_block *block)
{
    block->prev = pool->newest;
    block->next = NULL;
    *(pool->newest ? &pool->newest->next : &pool->oldest) = block;
    pool->newest = block;
    pool->n_blocks++;
}

static void sealed_list_remove(struct pool *pool, struct pool_block *block)
{
    for (struct pool_cursor *c = pool->cursors; c; c = c->next) {
        if (c->block == block)
            c->block = block->next;
    }
    *(block->prev ? &block->prev->next : &pool->oldest) = block->next;
    *(block->next ? &block->next->prev : &pool->newest) = block->prev;
    pool->n_blocks--;
}

/* Frees what nobody leases and no reader can find. */
static void block_free_if_unused(struct pool *pool, struct pool_block *block)
{
    if (block->node || block->n_leases)
        return;
    extent_pool_give(&pool->extents, block->extent);
    free(block);
}

/* Takes the block out of the index and away from its parent. The caller frees it, now or with the last lease. */
static void block_unlink(struct pool *pool, struct pool_block *block)
{
    struct chain_node *node = block->node, *parent = block->parent;

    if (block->sealed)
        sealed_list_remove(pool, block);
    node->block = NULL;
    block->node = NULL;
    block->parent = NULL;
    block_update_evictable(pool, block);
    if (parent) {
        parent->n_children--;
        if (parent->block)
            block_update_evictable(pool, parent->block);
        block_index_prune(&pool->index, parent);
    }
    block_index_prune(&pool->index, node);
}

/* A sealed block goes: readers are told, the extent follows when the last lease ends. */
static void block_drop(struct pool *pool, struct pool_block *block)
{
    pool->listener.evicted(pool->listener.arg, &block->node->key, &block->event_mark);
    block_unlink(pool, block);
    block_free_if_unused(pool, block);
}

/* ---- leases ---- */

static int block_lease(struct pool *pool, struct lease_owner *owner, struct pool_block *block, bool write, struct pool_extent *ret_extent)
{
    struct lease *lease;
    int rc;

    if (owner->n_leases >= POOL_MAX_LEASES_PER_OWNER)
        return -ENOSPC;
    rc = lease_add(&pool->leases, owner, block, write, &lease);
    if (rc < 0)
        return rc;
    if (block->n_leases++ == 0)
        pool->bytes_pinned += block->extent->bytes;
    block_update_evictable(pool, block);
    *ret_extent = (struct pool_extent){
        .offset = block->extent->offset,
        .length = block->length,
        .checksum = block->sealed ? block->checksum : 0,
        .lease = lease->id,
    };
    return 0;
}

static void lease_end(struct pool *pool, struct lease *lease)
{
    struct pool_block *block = lease->block;
    bool write = lease->write;

    lease_remove(&pool->leases, lease);
    if (--block->n_leases == 0)
        pool->bytes_pinned -= block->extent->bytes;
    if (write) {
        pool->n_unsealed--;
        if (block->node)
            block_unlink(pool, block);
    } else {
        block->lru.a = pool->tick;
        block_update_evictable(pool, block);
    }
    block_free_if_unused(pool, block);
}

int pool_lookup(struct pool *pool, struct lease_owner *owner, const struct block_key *keys, int n, struct pool_extent *ret_extents)
{
    int run = 0;

    pool->tick++;
    while (run < n) {
        struct chain_node *node = block_index_find(&pool->index, &keys[run]);
        if (!node || !node->block || !node->block->sealed)
            break;
        if (block_lease(pool, owner, node->block, false, &ret_extents[run]) < 0)
            break;
        run++;
    }
    pool->counters.lookups++;
    pool->counters.lookup_hits += (uint64_t)run;
    pool->counters.lookup_misses += (uint64_t)(n - run);
    return run;
}

/* ---- putting a block ---- */

/* Takes an extent, evicting until one is large enough. Nothing is evicted for a request that all unleased blocks together could not serve. */
static int take_evicting(struct pool *pool, uint64_t length, struct extent **ret_extent)
{
    uint64_t bytes = extent_round(length);
    int rc;

    if (!bytes || bytes > pool->extents.bytes - pool->bytes_pinned)
        return -ENOSPC;
    while ((rc = extent_pool_take(&pool->extents, length, ret_extent)) == -ENOSPC) {
        struct ordered_node *oldest = ordered_tree_first(&pool->lru);
        if (!oldest)
            return -ENOSPC;
        pool->counters.evicted++;
        block_drop(pool, block_of(oldest));
    }
    return rc;
}

/* Finds the parent's node, or makes one that waits for the parent. Positions grow by one along every link, so that chains cannot close into a
 * ring that would never be evicted; a client that claims otherwise gets no link. */
static int parent_find(struct pool *pool, const struct pool_reserve_request *request, uint32_t position, struct chain_node **ret_parent)
{
    struct chain_node *parent = NULL;
    int rc;

    if (!request->first && position > 0) {
        rc = block_index_get(&pool->index, &request->parent, position - 1, &parent);
        if (rc < 0)
            return rc;
        if (parent->position != position - 1)
            parent = NULL;
    }
    *ret_parent = parent;
    return 0;
}

/* Hangs a new unsealed block with a write lease into the index. */
static int block_create(struct pool *pool, struct lease_owner *owner, const struct pool_reserve_request *request, struct extent *extent,
                        struct pool_extent *ret_extent)
{
    struct pool_block *block = calloc(1, sizeof *block);
    struct chain_node *node = NULL, *parent = NULL;
    int rc = -ENOMEM;

    if (!block)
        return rc;
    block->extent = extent;
    block->length = request->length;
    rc = block_index_get(&pool->index, &request->key, request->position, &node);
    if (rc < 0)
        goto fail;
    rc = parent_find(pool, request, node->position, &parent);
    if (rc < 0)
        goto fail;
    rc = block_lease(pool, owner, block, true, ret_extent);
    if (rc < 0)
        goto fail;
    block->node = node;
    node->block = block;
    block->parent = parent;
    if (parent) {
        parent->n_children++;
        if (parent->block)
            block_update_evictable(pool, parent->block);
    }
    pool->n_unsealed++;
    return 0;
fail:
    if (parent)
        block_index_prune(&pool->index, parent);
    if (node)
        block_index_prune(&pool->index, node);
    free(block);
    return rc;
}

enum pool_reserve_status pool_reserve(struct pool *pool, struct lease_owner *owner, const struct pool_reserve_request *request,
                                      struct pool_extent *ret_extent)
{
    struct chain_node *node = block_index_find(&pool->index, &request->key);
    struct extent *extent;

    if (node && node->block && !node->block->sealed)
        return POOL_RESERVE_BUSY;
    if (node && node->block && block_lease(pool, owner, node->block, false, ret_extent) == 0)
        return POOL_RESERVE_EXISTS;
    if (node && node->block)
        goto full;
    if (take_evicting(pool, request->length, &extent) < 0)
        goto full;
    if (block_create(pool, owner, request, extent, ret_extent) < 0) {
        extent_pool_give(&pool->extents, extent);
        goto full;
    }
    return POOL_RESERVE_GRANTED;
full:
    pool->counters.rejected_full++;
    return POOL_RESERVE_FULL;
}

bool pool_seal(struct pool *pool, struct lease_owner *owner, uint64_t id, uint64_t checksum)
{
    struct lease *lease = lease_find(&pool->leases, owner, id);
    struct pool_block *block;

    if (!lease || !lease->write || !lease->block->node)
        return false;
    block = lease->block;
    lease_set_read(lease);
    block->checksum = checksum;
    block->sealed = true;
    block->serial = ++pool->serial;
    pool->n_unsealed--;
    pool->counters.stored++;
    sealed_list_add(pool, block);
    pool->listener.stored(pool->listener.arg, &block->node->key, &block->event_mark);
    return true;
}

bool pool_release(struct pool *pool, struct lease_owner *owner, uint64_t id)
{
    struct lease *lease = lease_find(&pool->leases, owner, id);

    if (!lease)
        return false;
    pool->tick++;
    lease_end(pool, lease);
    return true;
}

bool pool_discard(struct pool *pool, struct lease_owner *owner, uint64_t id)
{
    struct lease *lease = lease_find(&pool->leases, owner, id);
    /* In the index, so that the end of its last lease does not free it. */
    struct pool_block *block = lease && !lease->write && lease->block->node ? lease->block : NULL;

    if (!pool_release(pool, owner, id))
        return false;
    if (block && block->evictable) {
        pool->counters.discarded++;
        block_drop(pool, block);
    }
    return true;
}

bool pool_report_corrupt(struct pool *pool, struct lease_owner *owner, uint64_t id)
{
    struct lease *lease = lease_find(&pool->leases, owner, id);

    if (!lease || lease->write)
        return false;
    if (lease->block->node) {
        pool->counters.corrupt++;
        block_drop(pool, lease->block);
    }
    return true;
}

/* ---- owners ---- */

void pool_owner_detach(struct pool *pool, struct lease_owner *owner, bool keep_reads)
{
    struct lease *lease = lease_first(&pool->leases, owner);

    pool->tick++;
    while (lease) {
        struct lease *next = lease_next(&pool->leases, lease);
        if (!lease->write) {
            if (!keep_reads)
                lease_end(pool, lease);
        } else if (lease->block->node) {
            block_unlink(pool, lease->block);
        }
        lease = next;
    }
}

void pool_owner_end(struct pool *pool, struct lease_owner *owner)
{
    struct lease *lease;

    pool->tick++;
    while ((lease = lease_first(&pool->leases, owner)))
        lease_end(pool, lease);
}

/* ---- walking ---- */

void pool_cursor_open(struct pool *pool, struct pool_cursor *cursor)
{
    *cursor = (struct pool_cursor){.block = pool->oldest, .next = pool->cursors};
    if (pool->cursors)
        pool->cursors->prev = cursor;
    pool->cursors = cursor;
}

int pool_cursor_read(struct pool_cursor *cursor, struct block_key *ret_keys, int max)
{
    int n = 0;

    while (n < max && cursor->block) {
        ret_keys[n++] = cursor->block->node->key;
        cursor->block = cursor->block->next;
    }
    return n;
}

void pool_cursor_close(struct pool *pool, struct pool_cursor *cursor)
{
    *(cursor->prev ? &cursor->prev->next : &pool->cursors) = cursor->next;
    if (cursor->next)
        cursor->next->prev = cursor->prev;
}
