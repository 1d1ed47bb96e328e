#include "worker/cache/device_blocks.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { INDEX_SPARES = 1 /* empty slabs: they are large */ };

struct entry {
    struct device_block block; /* the first member: what users hold */
    struct device_piece piece; /* block.index */
    struct block_key key;
    uint64_t checksum;
    int n_users;
    bool sealed;
    struct entry *chain;            /* of its hash */
    struct entry *older, *newer;    /* among those without users */
};

struct device_blocks {
    struct device_slabs *slabs;     /* of indices, or NULL */
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

static int take_index(struct device_blocks *t, struct entry *e)
{
    const int r = t->slabs ? device_slabs_take(t->slabs, &e->piece) : 0;
    if (r >= 0)
        e->block.index = e->piece.memory;
    return r;
}

static int add(struct device_blocks *t, const struct block_key *key, struct entry **ret_entry)
{
    struct entry *e = calloc(1, sizeof(*e)), **chain = chain_of(t, key);
    const int r = e ? take_index(t, e) : -ENOMEM;
    if (r < 0) {
        free(e);
        return r;
    }
    e->block.id = ++t->last_id;
    e->key = *key;
    e->n_users = 1;
    e->chain = *chain;
    *chain = e;
    t->n_used++;
    *ret_entry = e;
    return 0;
}

int device_blocks_create(const struct device_ops *dev, struct device *device, size_t index_bytes, int slab_pieces, struct device_blocks **ret_blocks)
{
    struct device_blocks *t = calloc(1, sizeof(*t));
    if (!t)
        return -ENOMEM;
    const int r = index_bytes ? device_slabs_create(dev, device, MEM_INDEX, index_bytes, slab_pieces, INDEX_SPARES, &t->slabs) : 0;
    if (r < 0) {
        free(t);
        return r;
    }
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
    device_slabs_free(t->slabs);
    free(t);
}

static struct entry *find(struct device_blocks *t, const struct block_key *key, uint64_t checksum)
{
    struct entry *e = *chain_of(t, key);
    while (e && !(e->sealed && e->checksum == checksum && memcmp(&e->key, key, sizeof(*key)) == 0))
        e = e->chain;
    return e;
}

int device_blocks_use(struct device_blocks *t, const struct block_key *key, uint64_t checksum, struct device_block **ret_block)
{
    struct entry *e = find(t, key, checksum);
    const bool known = e, shared = e && e->n_users > 0;
    const int r = shared ? 0 : known ? take_index(t, e) : add(t, key, &e);
    if (r < 0)
        return r;
    if (shared) {
        e->n_users++;
    } else if (known) {
        unlink_unused(t, e);
        e->n_users = 1;
        t->n_used++;
    } else {
        e->sealed = true;
        e->checksum = checksum;
    }
    *ret_block = &e->block;
    return 0;
}

int device_blocks_add(struct device_blocks *t, const struct block_key *key, struct device_block **ret_block)
{
    struct entry *e;
    const int r = add(t, key, &e);
    if (r >= 0)
        *ret_block = &e->block;
    return r;
}

void device_blocks_seal(struct device_block *block, uint64_t checksum)
{
    struct entry *e = (struct entry *)block;
    e->sealed = true;
    e->checksum = checksum;
}

void device_blocks_drop(struct device_blocks *t, struct device_block *block)
{
    struct entry *e = (struct entry *)block;
    if (!e || --e->n_users > 0)
        return;
    if (t->slabs)
        device_slabs_give(t->slabs, e->piece);
    e->piece = (struct device_piece){0};
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

struct device_slabs *device_blocks_slabs(const struct device_blocks *t)
{
    return t ? t->slabs : NULL;
}
