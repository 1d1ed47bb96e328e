#include "kvstore/extent_pool.h"

#include "proto/base/base_assert.h"
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>

static struct extent *extent_of(struct ordered_node *node)
{
    return (struct extent *)((char *)node - offsetof(struct extent, by_size));
}

uint64_t extent_round(uint64_t bytes)
{
    if (bytes > UINT64_MAX - EXTENT_GRANULE)
        return 0;
    return (bytes + EXTENT_GRANULE - 1) / EXTENT_GRANULE * EXTENT_GRANULE;
}

static void free_list_add(struct extent_pool *pool, struct extent *e)
{
    e->taken = false;
    e->by_size.a = e->bytes;
    e->by_size.b = e->offset;
    ordered_tree_insert(&pool->free, &e->by_size);
    pool->n_free++;
}

static void free_list_remove(struct extent_pool *pool, struct extent *e)
{
    ordered_tree_remove(&pool->free, &e->by_size);
    pool->n_free--;
}

int extent_pool_init(struct extent_pool *pool, uint64_t bytes)
{
    struct extent *all;

    bytes = bytes / EXTENT_GRANULE * EXTENT_GRANULE;
    if (!bytes)
        return -EINVAL;
    all = calloc(1, sizeof *all);
    if (!all)
        return -ENOMEM;
    *pool = (struct extent_pool){.first = all, .bytes = bytes};
    ordered_tree_init(&pool->free);
    all->bytes = bytes;
    free_list_add(pool, all);
    return 0;
}

void extent_pool_fini(struct extent_pool *pool)
{
    while (pool->first) {
        struct extent *e = pool->first;
        pool->first = e->next;
        free(e);
    }
    *pool = (struct extent_pool){0};
}

/* Leaves `bytes` in `e` and makes the rest a free extent behind it. */
static int extent_cut(struct extent_pool *pool, struct extent *e, uint64_t bytes)
{
    struct extent *rest = calloc(1, sizeof *rest);

    if (!rest)
        return -ENOMEM;
    rest->offset = e->offset + bytes;
    rest->bytes = e->bytes - bytes;
    rest->prev = e;
    rest->next = e->next;
    if (rest->next)
        rest->next->prev = rest;
    e->next = rest;
    e->bytes = bytes;
    free_list_add(pool, rest);
    return 0;
}

int extent_pool_take(struct extent_pool *pool, uint64_t bytes, struct extent **ret_extent)
{
    struct ordered_node *node;
    struct extent *e;

    if (!bytes)
        return -EINVAL;
    bytes = extent_round(bytes);
    node = bytes ? ordered_tree_at_least(&pool->free, bytes, 0) : NULL;
    if (!node)
        return -ENOSPC;
    e = extent_of(node);
    free_list_remove(pool, e);
    if (e->bytes > bytes && extent_cut(pool, e, bytes) < 0) {
        free_list_add(pool, e);
        return -ENOMEM;
    }
    e->taken = true;
    pool->bytes_taken += bytes;
    pool->n_taken++;
    *ret_extent = e;
    return 0;
}

/* Joins `e` with its free right neighbour. */
static void extent_absorb_next(struct extent_pool *pool, struct extent *e)
{
    struct extent *next = e->next;

    free_list_remove(pool, next);
    e->bytes += next->bytes;
    e->next = next->next;
    if (e->next)
        e->next->prev = e;
    free(next);
}

void extent_pool_give(struct extent_pool *pool, struct extent *e)
{
    ASSERT(e->taken);
    pool->bytes_taken -= e->bytes;
    pool->n_taken--;
    if (e->next && !e->next->taken)
        extent_absorb_next(pool, e);
    if (e->prev && !e->prev->taken) {
        struct extent *prev = e->prev;
        free_list_remove(pool, prev);
        free_list_add(pool, e); /* so that `e` can be absorbed like any free extent */
        extent_absorb_next(pool, prev);
        e = prev;
    }
    free_list_add(pool, e);
}

uint64_t extent_pool_largest(const struct extent_pool *pool)
{
    const struct ordered_node *node = ordered_tree_last(&pool->free);

    return node ? node->a : 0;
}
