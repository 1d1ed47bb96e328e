/* A layer's cached blocks become its full KV. Where the device has memory of its own their slices come in by copies, which take nothing from the kernels beside them: while a layer is computed
 * those of the next one come, in groups, into a ring that holds a whole layer where it can (engine_config.load_staging). Without room for a ring they come through the staging area
 * (slice_staging.c) when the layer's turn has come, some at a time while those before are decoded.
 *
 *   stream in   waits for `decoded` of the group's slot, copies its slices -> loaded
 *   compute     waits for `loaded`, decodes the slices                     -> decoded
 *
 * Full KV of one layer is resident, so decoding the next layer's has to wait for this one; slices are two to five times smaller, and wait in its place. */
#include "worker/cache/engine_private.h"
#include <errno.h>
#include <stdlib.h>

static int cached_blocks(const struct sequence *seq)
{
    return seq->n_cached / BLOCK_TOKENS;
}

int prefix_load_open(struct sequence *seq)
{
    const struct engine_sizes *s = &seq->engine->sizes;
    const struct model *m = seq->engine->model;
    struct prefix_loads *p = &seq->prefill.loads;
    int r = 0;
    if (!p->ring)
        return 0;
    p->n_groups = (cached_blocks(seq) + s->load_group - 1) / s->load_group;
    p->slots = calloc((size_t)min_int(p->n_groups, s->load_groups), sizeof(*p->slots));
    if (!p->slots)
        return -ENOMEM;
    p->n_slots = min_int(p->n_groups, s->load_groups);
    for (int i = 0; r >= 0 && i < p->n_slots; i++) {
        r = m->dev->event_create(m->device, &p->slots[i].loaded);
        if (r >= 0)
            r = m->dev->event_create(m->device, &p->slots[i].decoded);
    }
    return r;
}

void prefix_load_close(struct sequence *seq)
{
    const struct model *m = seq->engine->model;
    struct prefix_loads *p = &seq->prefill.loads;
    for (int i = 0; i < p->n_slots; i++) {
        m->dev->event_free(p->slots[i].loaded);
        m->dev->event_free(p->slots[i].decoded);
    }
    free(p->slots);
    *p = (struct prefix_loads){0};
}

static uint8_t *staged_slice(const struct sequence *seq, int group, int i)
{
    const struct engine_sizes *s = &seq->engine->sizes;
    return seq->prefill.loads.ring + ((size_t)(group % seq->prefill.loads.n_slots) * (size_t)s->load_group + (size_t)i) * s->load_slice;
}

/* The blocks of a group: the first of them, and how many. Groups are counted over all layers. */
static int group_blocks(const struct sequence *seq, int group, int *ret_first)
{
    *ret_first = group % seq->prefill.loads.n_groups * seq->engine->sizes.load_group;
    return min_int(cached_blocks(seq) - *ret_first, seq->engine->sizes.load_group);
}

/* Submits the copies of one more group. */
static int issue(struct sequence *seq)
{
    const struct engine *e = seq->engine;
    const struct device_ops *dev = e->model->dev;
    struct prefix_loads *p = &seq->prefill.loads;
    struct load_slot *slot = &p->slots[p->issued % p->n_slots];
    int first;
    const int n = group_blocks(seq, p->issued, &first), layer = p->issued / p->n_groups;
    int r = dev->stream_wait(e->in, slot->decoded);
    for (int i = 0; i < n; i++)
        e->copies[i] = slice_copy_in(seq, layer, first + i, staged_slice(seq, p->issued, i));
    if (r >= 0)
        r = dev->copy_batch(e->in, e->copies, n);
    if (r >= 0)
        r = dev->event_record(slot->loaded, e->in);
    p->issued++;
    return r;
}

/* Submits groups below `last` as far as the ring has slots. */
static int issue_below(struct sequence *seq, int last)
{
    struct prefix_loads *p = &seq->prefill.loads;
    int r = 0;
    while (r >= 0 && p->issued < min_int(last, p->done + p->n_slots))
        r = issue(seq);
    return r;
}

/* Block first + i of a call. */
static struct block_params *decoded_block(struct sequence *seq, int layer, int first, int i)
{
    const int64_t offset = (int64_t)(first + i) * BLOCK_TOKENS * seq->engine->model->config.head_dim;
    struct block_params *p = &seq->engine->slices[i];
    *p = sequence_block_params(seq, layer, first + i, prefill_k(seq, layer) + offset, prefill_v(seq, layer) + offset, prefill_head_stride(seq));
    return p;
}

static int decode_blocks(struct sequence *seq, int n)
{
    const struct model *m = seq->engine->model;
    return m->ops->block_decode(m->stream, seq->engine->slices, n);
}

/* Blocks first..first+n-1 of the layer, from where they lie. */
static int decode_in_place(struct sequence *seq, int layer, int first, int n)
{
    for (int i = 0; i < n; i++)
        decoded_block(seq, layer, first, i);
    return decode_blocks(seq, n);
}

/* The same by way of the staging area; n <= n_chunk_blocks. */
static int decode_staged(struct sequence *seq, int layer, int first, int n)
{
    struct engine *e = seq->engine;
    for (int i = 0; i < n; i++) {
        e->copies[i] = slice_copy_in(seq, layer, first + i, slice_staging_at(e, i));
        decoded_block(seq, layer, first, i)->slice = slice_staging_at(e, i);
    }
    int r = slice_staging_read(e, n);
    if (r >= 0)
        r = decode_blocks(seq, n);
    return slice_staging_end(e, r);
}

static int decode_without_ring(struct sequence *seq, int layer, int first, int last)
{
    const int most = seq->engine->n_chunk_blocks;
    int r = 0;
    if (!seq->engine->staging.slices)
        return decode_in_place(seq, layer, first, last - first);
    for (; r >= 0 && first < last; first += most)
        r = decode_staged(seq, layer, first, min_int(last - first, most));
    return r;
}

/* The next group of the layer, whose copies have been submitted. */
static int decode_group(struct sequence *seq, int layer)
{
    const struct model *m = seq->engine->model;
    struct prefix_loads *p = &seq->prefill.loads;
    struct load_slot *slot = &p->slots[p->done % p->n_slots];
    int first;
    const int n = group_blocks(seq, p->done, &first);
    int r = m->dev->stream_wait(m->stream, slot->loaded);
    for (int i = 0; i < n; i++)
        decoded_block(seq, layer, first, i)->slice = staged_slice(seq, p->done, i);
    if (r >= 0)
        r = decode_blocks(seq, n);
    if (r >= 0)
        r = m->dev->event_record(slot->decoded, m->stream);
    p->done++;
    return r;
}

int prefix_load_unit(struct sequence *seq, int layer, int index)
{
    struct prefix_loads *p = &seq->prefill.loads;
    const int first = index * PREFIX_LOAD_BLOCKS, last = min_int(first + PREFIX_LOAD_BLOCKS, cached_blocks(seq));
    if (!p->ring)
        return decode_without_ring(seq, layer, first, last);
    const int end = layer * p->n_groups + (last + seq->engine->sizes.load_group - 1) / seq->engine->sizes.load_group;
    int r = 0;
    while (r >= 0 && p->done < end) {
        r = issue_below(seq, (layer + 1) * p->n_groups);
        if (r >= 0)
            r = decode_group(seq, layer);
    }
    return r;
}

/* Spread over the chunks, so that the host's submitting does not hold up the next chunk, nor the copies those of the bridge. */
int prefix_load_ahead(struct sequence *seq, int layer)
{
    struct prefix_loads *p = &seq->prefill.loads;
    const int n_layers = seq->engine->model->config.n_layers, n_chunks = seq->prefill.n_chunks;
    if (!p->ring || layer == n_layers - 1)
        return 0;
    return issue_below(seq, min_int(p->issued + (p->n_groups + n_chunks - 1) / n_chunks, (layer + 2) * p->n_groups));
}
