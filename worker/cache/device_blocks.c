#include "worker/cache/device_blocks.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct entry {
    struct device_block block; /* the first member: what users hold */
    struct block_key key;
    uint64_t checksum;
    int n_users;
    bool sealed;
    struct entry *chain;            /* of its hash */
    struct entry *older, *newer;    /* among those without users */
};

struct device_blocks {
    const struct device_ops *dev;
    struct device *device;
    size_t index_bytes;
    uint64_t last_id;
    int n_used, n_remembered;
    struct entry *oldest, *newest;  /* without users */
    struct entry *chains[DEVICE_BLOCKS_CHAINS];
};

/* Keys are hashes already. */
static struct entry **chain_of(struct device_blocks *t, const struct block_key *key)
{
    uint32_t hash;
    memcpy(&hash, key->bytes, sizeof(hash));
    return &t->chains[hash % DEVICE_BLOCKS_CHAINS];
}

static void forget(struct device_blocks *t, struct entry *e)
{
    struct entry **at = chain_of(t, &e->key);
    while (*at != e)
        at = &(*at)->chain;
    *at = e->chain;
    free(e);
}

static void unlink_unused(struct device_blocks *t, struct entry *e)
{
    *(e->older ? &e->older->newer : &t->oldest) = e->newer;
    *(e->newer ? &e->newer->older : &t->newest) = e->older;
    e->older = e->newer = NULL;
    t->n_remembered--;
}

static void link_unused(struct device_blocks *t, struct entry *e)
{
    e->older = t->newest;
    *(t->newest ? &t->newest->newer : &t->oldest) = e;
    t->newest = e;
    t->n_remembered++;
}

static void alloc_index(struct device_blocks *t, struct entry *e)
{
    void *index = NULL;
    if (t->index_bytes && t->dev->alloc(t->device, MEM_INDEX, t->index_bytes, &index) >= 0)
        e->block.index = index;
}

static struct entry *add(struct device_blocks *t, const struct block_key *key)
{
    struct entry *e = calloc(1, sizeof(*e)), **chain = chain_of(t, key);
    if (!e)
        return NULL;
    e->block.id = ++t->last_id;
    e->key = *key;
    e->n_users = 1;
    e->chain = *chain;
    *chain = e;
    t->n_used++;
    alloc_index(t, e);
    return e;
}

int device_blocks_create(const struct device_ops *dev, struct device *device, size_t index_bytes, struct device_blocks **ret_blocks)
{
    struct device_blocks *t = calloc(1, sizeof(*t));
    if (!t)
        return -ENOMEM;
    t->dev = dev;
    t->device = device;
    t->index_bytes = index_bytes;
    *ret_blocks = t;
    return 0;
}

void device_blocks_free(struct device_blocks *t)
{
    if (!t)
        return;
    ASSERT(t->n_used == 0);
    while (t->oldest) {
        struct entry *e = t->oldest;
        unlink_unused(t, e);
        forget(t, e);
    }
    free(t);
}

static struct entry *find(struct device_blocks *t, const struct block_key *key, uint64_t checksum)
{
    struct entry *e = *chain_of(t, key);
    while (e && !(e->sealed && e->checksum == checksum && memcmp(&e->key, key, sizeof(*key)) == 0))
        e = e->chain;
    return e;
}

int device_blocks_use(struct device_blocks *t, const struct block_key *key, uint64_t checksum, struct device_block **ret_block, bool *ret_new)
{
    struct entry *e = find(t, key, checksum);
    const bool shared = e && e->n_users > 0;
    if (!e) {
        e = add(t, key);
        if (!e)
            return -ENOMEM;
        e->sealed = true;
        e->checksum = checksum;
    } else if (shared) {
        e->n_users++;
    } else {
        unlink_unused(t, e);
        e->n_users = 1;
        t->n_used++;
        alloc_index(t, e);
    }
    *ret_block = &e->block;
    *ret_new = !shared;
    return 0;
}

int device_blocks_add(struct device_blocks *t, const struct block_key *key, struct device_block **ret_block)
{
    struct entry *e = add(t, key);
    if (!e)
        return -ENOMEM;
    *ret_block = &e->block;
    return 0;
}

void device_blocks_seal(struct device_blocks *t, struct device_block *block, uint64_t checksum)
{
    struct entry *e = (struct entry *)block;
    (void)t;
    e->sealed = true;
    e->checksum = checksum;
}

void device_blocks_drop(struct device_blocks *t, struct device_block *block)
{
    struct entry *e = (struct entry *)block;
    if (!e || --e->n_users > 0)
        return;
    t->dev->free(t->device, e->block.index);
    e->block.index = NULL;
    t->n_used--;
    /* What was never sealed is found by nobody. */
    if (!e->sealed) {
        forget(t, e);
        return;
    }
    link_unused(t, e);
    if (t->n_remembered > DEVICE_BLOCKS_REMEMBERED) {
        e = t->oldest;
        unlink_unused(t, e);
        forget(t, e);
    }
}
