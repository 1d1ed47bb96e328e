/* What a device knows of the pool's blocks that its sequences use: an identity for its page cache, and a copy of the key index, one for all sequences that share the block. For devices
 * with memory of their own; a CPU reads both where they lie.
 *
 * A block is known by its key and the checksum of its bytes: on a GPU two runs of the same tokens need not agree in the last bit, so a key alone does not say which bytes. One that is
 * being written has no checksum yet and is nobody else's. Identities are serial numbers. That of a block without users is remembered, the newest ones of them, so that the pages that were fetched
 * of it are found again by the next turn of a conversation; its index is given back at once. Indices are pieces of slabs (device_slabs.h): they are written and read in the order of the
 * model's stream alone, so one that is given back may be another block's at once.
 *
 * Owner thread only. Host memory: a table of 512 KiB, and about 150 bytes a block in use and each of up to DEVICE_BLOCKS_REMEMBERED others. */
#pragma once
#include "proto/block_key.h"
#include "worker/cache/device_slabs.h"

enum { DEVICE_BLOCKS_REMEMBERED = 1 << 16, DEVICE_BLOCKS_CHAINS = 1 << 16, DEVICE_BLOCKS_HOST_BYTES = DEVICE_BLOCKS_CHAINS * sizeof(void *) };

struct device_blocks;

struct device_block {
    uint64_t id;    /* > 0, never given out twice */
    uint8_t *index; /* [index_bytes] of MEM_INDEX; NULL when index_bytes is 0 */
};

/* index_bytes: of one block's index, and how many of them a slab has; 0: none is kept. */
int device_blocks_create(const struct device_ops *dev, struct device *device, size_t index_bytes, int slab_pieces, struct device_blocks **ret_blocks);
void device_blocks_free(struct device_blocks *blocks); /* NULL is fine; asserts that no block has users */
/* A sealed block. Whether its index has been written, and how far, nobody knows. -ENOMEM. */
int device_blocks_use(struct device_blocks *blocks, const struct block_key *key, uint64_t checksum, struct device_block **ret_block);
/* A block that its user writes, index included. -ENOMEM. */
int device_blocks_add(struct device_blocks *blocks, const struct block_key *key, struct device_block **ret_block);
/* It is complete and sealed: from now on others may find it. */
void device_blocks_seal(struct device_block *block, uint64_t checksum);
/* One user less. What was submitted with its index was submitted to the model's stream. NULL is fine. */
void device_blocks_drop(struct device_blocks *blocks, struct device_block *block);
/* The indices' slabs; NULL when index_bytes is 0, or there are no device_blocks (NULL). */
struct device_slabs *device_blocks_slabs(const struct device_blocks *blocks);
