/* The pool's blocks of a sequence on a device with memory of its own: each that can become slow has an identity there and, where the scorer reads it, a copy of its key index, shared with
 * all sequences that use the block (device_blocks.h). The ops that code and decode a block leave it there, layer by layer; of one that neither does here it comes in one copy. Every sequence
 * sees to it itself: whoever had the block before may be at an earlier layer, and may go before it gets any further. The bytes are the same, and the model's stream keeps writes
 * and reads apart. */
#include "worker/cache/engine_private.h"

int device_index_take(struct sequence *seq, int block)
{
    struct engine *e = seq->engine;
    struct sequence_block *b = &seq->blocks[block];
    if (!e->device_blocks || block >= sequence_slow_blocks(seq) || (b->place != BLOCK_GRANTED && b->place != BLOCK_SEALED))
        return 0;
    if (b->place == BLOCK_GRANTED)
        return device_blocks_add(e->device_blocks, &seq->keys[block], &b->device);
    return device_blocks_use(e->device_blocks, &seq->keys[block], seq->leases[block].checksum, &b->device);
}

uint8_t *device_index_rows(const struct sequence *seq, int layer, int block)
{
    const struct device_block *device = seq->blocks[block].device;
    return device && device->index ? device->index + block_index_copy_offset(&seq->engine->layout, (uint32_t)layer, 0, 0) : NULL;
}

/* As rows: one a layer and KV head, of all its sub-pages. */
int device_index_load(struct sequence *seq, int block)
{
    const struct engine *e = seq->engine;
    const struct model *m = e->model;
    const struct block_layout *layout = &e->layout;
    const size_t row = (size_t)BLOCK_SUBPAGES * layout->index_entry_bytes;
    uint8_t *index = device_index_rows(seq, 0, block);
    if (!index)
        return 0;
    return m->dev->copy_rows(m->stream, index, row, seq->blocks[block].data + block_index_offset(layout, block == 0, 0, 0), layout->head_bytes[block == 0], row,
                             (size_t)layout->n_layers * layout->n_kv_heads);
}

void device_index_seal(struct sequence *seq, int block)
{
    if (seq->blocks[block].device)
        device_blocks_seal(seq->blocks[block].device, seq->leases[block].checksum);
}

void device_index_drop(struct sequence *seq, int block)
{
    if (seq->blocks[block].device)
        device_blocks_drop(seq->engine->device_blocks, seq->blocks[block].device);
    seq->blocks[block].device = NULL;
}
