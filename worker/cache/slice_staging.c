/* Slices between the pool and the device, in memory of the device: two halves of as many slices as a chunk completes blocks, used in turn, so that one is filled or leaves while the other is at work.
 * A kernel that reads the pool word by word, or writes to it, slows down all others beside it; copies take next to nothing.
 *
 *   stream in    waits for `used` of the half, and for the newest `left`, for what comes in may be a block that has just gone out; copies slices in by one call   -> loaded
 *   compute      waits for `loaded`, where it writes for `left`; reads and writes the half -> used
 *   stream out   waits for `used`, copies slices out by one call                          -> left
 *
 * A half is loaded, if at all, before `begin`; until then nothing of it is at work, so whoever fails in between leaves nothing behind that the next user would not wait for. Behind `begin` comes an end,
 * whatever fails. */
#include "worker/cache/engine_private.h"

int slice_staging_open(struct engine *e)
{
    const struct model *m = e->model;
    struct slice_staging *s = &e->staging;
    void *memory;
    int r = m->dev->alloc(m->device, MEM_STAGING, e->sizes.staging, &memory);
    if (r < 0)
        return r;
    s->slices = memory;
    for (int i = 0; r >= 0 && i < STAGING_HALVES; i++) {
        r = m->dev->event_create(m->device, &s->halves[i].loaded);
        if (r >= 0)
            r = m->dev->event_create(m->device, &s->halves[i].used);
        if (r >= 0)
            r = m->dev->event_create(m->device, &s->halves[i].left);
    }
    return r;
}

void slice_staging_close(struct engine *e)
{
    const struct model *m = e->model;
    struct slice_staging *s = &e->staging;
    for (int i = 0; i < STAGING_HALVES; i++) {
        m->dev->event_free(s->halves[i].loaded);
        m->dev->event_free(s->halves[i].used);
        m->dev->event_free(s->halves[i].left);
    }
    m->dev->free(m->device, s->slices);
    *s = (struct slice_staging){0};
}

static struct staging_half *half_at_work(struct engine *e)
{
    return &e->staging.halves[e->staging.half];
}

uint8_t *slice_staging_at(const struct engine *e, int i)
{
    return e->staging.slices + ((size_t)e->staging.half * (size_t)e->n_chunk_blocks + (size_t)i) * e->sizes.slice;
}

struct device_copy slice_copy_in(const struct sequence *seq, int layer, int block, uint8_t *to)
{
    const struct block_layout *layout = &seq->engine->layout;
    return (struct device_copy){.dst = to, .src = seq->blocks[block].data + block_slice_offset(layout, block == 0, (uint32_t)layer), .bytes = layout->slice_bytes[block == 0]};
}

int slice_staging_load(struct engine *e, int n)
{
    const struct device_ops *dev = e->model->dev;
    struct staging_half *half = half_at_work(e);
    int r = dev->stream_wait(e->in, half->used);
    if (r >= 0)
        r = dev->stream_wait(e->in, e->staging.halves[e->staging.newest].left);
    if (r >= 0)
        r = dev->copy_batch(e->in, e->copies, n);
    return r < 0 ? r : dev->event_record(half->loaded, e->in);
}

int slice_staging_begin(struct engine *e, bool writes)
{
    const struct device_ops *dev = e->model->dev;
    struct staging_half *half = half_at_work(e);
    int r = dev->stream_wait(e->model->stream, half->loaded);
    if (r >= 0 && writes)
        r = dev->stream_wait(e->model->stream, half->left);
    return r;
}

int slice_staging_read(struct engine *e, int n)
{
    const int r = slice_staging_load(e, n);
    return r < 0 ? r : slice_staging_begin(e, false);
}

static void next_half(struct engine *e)
{
    e->staging.half = (e->staging.half + 1) % STAGING_HALVES;
}

int slice_staging_end(struct engine *e, int result)
{
    const int r = e->model->dev->event_record(half_at_work(e)->used, e->model->stream);
    next_half(e);
    return result < 0 ? result : r;
}

int slice_staging_leave(struct engine *e, int n)
{
    const struct device_ops *dev = e->model->dev;
    struct staging_half *half = half_at_work(e);
    int r = dev->event_record(half->used, e->model->stream);
    if (r >= 0)
        r = dev->stream_wait(e->out, half->used);
    if (r >= 0)
        r = dev->copy_batch(e->out, e->copies, n);
    if (r >= 0)
        r = dev->event_record(half->left, e->out);
    e->staging.newest = e->staging.half;
    next_half(e);
    return r;
}
