/* The pool's blocks of a sequence on a device with memory of its own: each that can become slow has an identity there and, where the scorer reads it, a copy of its key index, shared with
 * all sequences that use the block (device_blocks.h). A block that this sequence writes brings its index along, layer by layer, out of the staged slice; of one that is in the pool already
 * the index comes in one copy, unless it is there. All of it is submitted to the stream that decodes, in front of the first step. */
#include "worker/cache/engine_private.h"

/* A block's index as rows: one a layer and KV head, of all its sub-pages. */
static size_t row_bytes(const struct block_layout *layout)
{
    return (size_t)BLOCK_SUBPAGES * layout->index_entry_bytes;
}

static int copy_rows(const struct sequence *seq, int block, uint8_t *index, const uint8_t *from, size_t n_rows)
{
    const struct engine *e = seq->engine;
    const struct model *m = e->model;
    const size_t row = row_bytes(&e->layout);
    return m->dev->copy_rows(m->stream, index, row, from + block_index_offset(&e->layout, block == 0, 0, 0), e->layout.head_bytes[block == 0], row, n_rows);
}

int device_index_take(struct sequence *seq, int block)
{
    struct engine *e = seq->engine;
    struct sequence_block *b = &seq->blocks[block];
    bool is_new = false;
    int r;
    if (!e->device_blocks || block >= sequence_slow_blocks(seq) || (b->place != BLOCK_GRANTED && b->place != BLOCK_SEALED))
        return 0;
    if (b->place == BLOCK_GRANTED)
        r = device_blocks_add(e->device_blocks, &seq->keys[block], &b->device);
    else
        r = device_blocks_use(e->device_blocks, &seq->keys[block], seq->leases[block].checksum, &b->device, &is_new);
    if (r < 0 || !is_new || !b->device->index)
        return r;
    return copy_rows(seq, block, b->device->index, b->data, (size_t)e->layout.n_layers * e->layout.n_kv_heads);
}

int device_index_fill(struct sequence *seq, int layer, int block, const uint8_t *slice)
{
    const struct block_layout *layout = &seq->engine->layout;
    const struct device_block *device = seq->blocks[block].device;
    if (!device || !device->index)
        return 0;
    return copy_rows(seq, block, device->index + block_index_copy_offset(layout, (uint32_t)layer, 0, 0), slice, layout->n_kv_heads);
}

void device_index_seal(struct sequence *seq, int block)
{
    if (seq->blocks[block].device)
        device_blocks_seal(seq->engine->device_blocks, seq->blocks[block].device, seq->leases[block].checksum);
}

void device_index_drop(struct sequence *seq, int block)
{
    if (seq->blocks[block].device)
        device_blocks_drop(seq->engine->device_blocks, seq->blocks[block].device);
    seq->blocks[block].device = NULL;
}
