/* Slices of the prompt's blocks on their way to the pool. A chunk's slices are coded into one half of the staging area and leave from there by one copy each while the next chunk is computed: a
 * kernel that writes to host memory slows down all others, and copies take next to nothing. When the last layer's have left, and no value was out of range, the blocks are sealed;
 * nobody waits for that before the prompt is done.
 *
 *   compute      waits for `left` of the half, codes a chunk's slices into it  -> coded
 *   stream out   waits for `coded`, copies the slices out                      -> left
 *   compute      copies the slices' indices to where they stay (device_index.c)
 *   compute      behind the last layer: copies the count of bad values out     -> the seal's `left`, recorded
 *   stream out   waits for it                                                  -> `left` again, which the host asks for between units
 *
 * Copies leave in order, so seals do too, whatever sequence they are of. A copy is a slice: 196 KiB and more for 8 KV heads of 128; small models have smaller ones, and can afford it. */
#include "worker/cache/engine_private.h"
#include <errno.h>

int block_writes_open(struct engine *e)
{
    const struct model *m = e->model;
    struct block_writes *w = &e->writes;
    void *memory;
    int r = m->dev->host_alloc(m->device, WRITE_SEALS * sizeof(*w->n_bad), &memory);
    if (r < 0)
        return r;
    w->n_bad = memory;
    for (int i = 0; r >= 0 && i < WRITE_HALVES; i++) {
        r = m->dev->event_create(m->device, &w->halves[i].coded);
        if (r >= 0)
            r = m->dev->event_create(m->device, &w->halves[i].left);
    }
    for (int i = 0; r >= 0 && i < WRITE_SEALS; i++)
        r = m->dev->event_create(m->device, &w->seals[i].left);
    return r;
}

void block_writes_close(struct engine *e)
{
    const struct model *m = e->model;
    struct block_writes *w = &e->writes;
    for (int i = 0; i < WRITE_SEALS; i++)
        m->dev->event_free(w->seals[i].left);
    for (int i = 0; i < WRITE_HALVES; i++) {
        m->dev->event_free(w->halves[i].coded);
        m->dev->event_free(w->halves[i].left);
    }
    m->dev->host_free(m->device, w->n_bad);
    *w = (struct block_writes){0};
}

/* ---- slices ---- */

uint8_t *block_writes_slice(const struct engine *e, int i)
{
    return e->staging + ((size_t)e->writes.half * (size_t)e->n_chunk_blocks + (size_t)i) * e->sizes.slice;
}

int block_writes_begin(struct engine *e)
{
    return e->model->dev->stream_wait(e->model->stream, e->writes.halves[e->writes.half].left);
}

int block_writes_end(struct sequence *seq, int layer, int first, int n)
{
    struct engine *e = seq->engine;
    const struct model *m = e->model;
    struct write_half *half = &e->writes.halves[e->writes.half];
    int r = m->dev->event_record(half->coded, m->stream);
    if (r >= 0)
        r = m->dev->stream_wait(e->out, half->coded);
    for (int b = first; r >= 0 && b < first + n; b++)
        if (seq->blocks[b].place == BLOCK_GRANTED)
            r = m->dev->copy(e->out, seq->blocks[b].data + block_slice_offset(&e->layout, b == 0, (uint32_t)layer), block_writes_slice(e, b - first), e->layout.slice_bytes[b == 0]);
    if (r >= 0)
        r = m->dev->event_record(half->left, e->out);
    for (int b = first; r >= 0 && b < first + n; b++)
        if (seq->blocks[b].place == BLOCK_GRANTED)
            r = device_index_fill(seq, layer, b, block_writes_slice(e, b - first));
    e->writes.half = (e->writes.half + 1) % WRITE_HALVES;
    return r;
}

int block_writes_join(struct engine *e)
{
    int r = 0;
    for (int i = 0; e->out && r >= 0 && i < WRITE_HALVES; i++)
        r = e->model->dev->stream_wait(e->model->stream, e->writes.halves[i].left);
    return r;
}

/* ---- seals ---- */

/* The oldest one has left. */
static void seal_oldest(struct engine *e)
{
    struct block_writes *w = &e->writes;
    const struct write_seal *s = &w->seals[w->first_seal];
    if (s->seq && w->n_bad[w->first_seal] == 0)
        sequence_blocks_seal(s->seq, s->first, s->n);
    w->first_seal = (w->first_seal + 1) % WRITE_SEALS;
    w->n_seals--;
}

int block_writes_poll(struct engine *e)
{
    struct block_writes *w = &e->writes;
    int r = 1;
    while (w->n_seals && (r = e->model->dev->event_query(w->seals[w->first_seal].left)) > 0)
        seal_oldest(e);
    return r < 0 ? r : 0;
}

static int wait_for_oldest(struct engine *e)
{
    const int r = e->model->dev->event_sync(e->writes.seals[e->writes.first_seal].left);
    if (r >= 0)
        seal_oldest(e);
    return r;
}

static bool has_seals(const struct sequence *seq)
{
    const struct block_writes *w = &seq->engine->writes;
    for (int i = 0; i < w->n_seals; i++)
        if (w->seals[(w->first_seal + i) % WRITE_SEALS].seq == seq)
            return true;
    return false;
}

int block_writes_finish(struct sequence *seq)
{
    int r = 0;
    while (r >= 0 && has_seals(seq))
        r = wait_for_oldest(seq->engine);
    return r;
}

void block_writes_forget(struct sequence *seq)
{
    struct block_writes *w = &seq->engine->writes;
    if (block_writes_finish(seq) >= 0)
        return;
    for (int i = 0; i < WRITE_SEALS; i++)
        if (w->seals[i].seq == seq)
            w->seals[i].seq = NULL;
}

int block_writes_seal(struct sequence *seq, int first, int n)
{
    struct engine *e = seq->engine;
    const struct device_ops *dev = e->model->dev;
    struct block_writes *w = &e->writes;
    int r = w->n_seals == WRITE_SEALS ? wait_for_oldest(e) : 0;
    if (r < 0)
        return r;
    const int at = (w->first_seal + w->n_seals) % WRITE_SEALS;
    r = dev->copy(e->model->stream, &w->n_bad[at], seq->bad, sizeof(*w->n_bad));
    if (r >= 0)
        r = dev->event_record(w->seals[at].left, e->model->stream);
    if (r >= 0)
        r = dev->stream_wait(e->out, w->seals[at].left);
    if (r >= 0)
        r = dev->event_record(w->seals[at].left, e->out);
    if (r < 0)
        return r;
    w->seals[at].seq = seq;
    w->seals[at].first = first;
    w->seals[at].n = n;
    w->n_seals++;
    return 0;
}
