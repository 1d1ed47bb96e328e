/* Slices of the prompt's blocks on their way to the pool. A chunk's slices are coded into one half of the staging area (slice_staging.c) and leave from there while the next chunk is computed. When the
 * last layer's have left, and no value was out of range, the blocks are sealed; nobody waits for that before the prompt is done.
 *
 *   compute      behind the last layer: copies the count of bad values out     -> the seal's `left`, recorded
 *   stream out   waits for it                                                  -> `left` again, which the host asks for between units
 *
 * Copies leave in order, so seals do too, whatever sequence they are of. A copy is a slice: 196 KiB and more for 8 KV heads of 128; small models have smaller ones, and can afford it. */
#include "worker/cache/engine_private.h"

int block_writes_open(struct engine *e)
{
    const struct model *m = e->model;
    struct block_writes *w = &e->writes;
    void *memory;
    int r = m->dev->host_alloc(m->device, WRITE_SEALS * sizeof(*w->n_bad), &memory);
    if (r < 0)
        return r;
    w->n_bad = memory;
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
    m->dev->host_free(m->device, w->n_bad);
    *w = (struct block_writes){0};
}

int block_writes_leave(struct sequence *seq, int layer, int first, int n)
{
    struct engine *e = seq->engine;
    int n_copies = 0;
    for (int b = first; b < first + n; b++)
        if (seq->blocks[b].place == BLOCK_GRANTED)
            e->copies[n_copies++] = (struct device_copy){.dst = seq->blocks[b].data + block_slice_offset(&e->layout, b == 0, (uint32_t)layer), .src = slice_staging_at(e, b - first),
                                                         .bytes = e->layout.slice_bytes[b == 0]};
    return n_copies ? slice_staging_leave(e, n_copies) : slice_staging_end(e, 0);
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
