/* Hidden states between layers. In pinned host memory they come and go chunk by chunk, each by one copy: while a chunk is computed the one before leaves, and in its
 * place the next one comes in: the device holds two at any length. Both ways together take less than a chunk of a large model (of Llama-3.1-8B 0.7 ms of 1,024 tokens' 0.9 and more a layer).
 *
 *   stream in    waits for `vacant` of the slot, copies a chunk in         -> loaded
 *   compute      waits for `loaded` (in layer 0 `vacant`), runs the layer  -> computed (in the last layer vacant)
 *   stream out   waits for `computed`, copies the chunk out                -> vacant
 *
 * What a chunk comes from has left by then: there are more chunks than slots, they leave in order, and the slot's last user left behind it. */
#include "worker/cache/engine_private.h"

int bridge_open(struct sequence *seq)
{
    const struct model *m = seq->engine->model;
    struct bridge *b = &seq->prefill.bridge;
    const size_t bytes = sequence_plan_host_bridge_bytes(seq->engine, &seq->plan, seq->prefill.n_new);
    void *memory;
    if (bytes == 0)
        return 0;
    int r = m->dev->host_alloc(m->device, bytes, &memory);
    if (r < 0)
        return r;
    b->host = memory;
    for (int i = 0; r >= 0 && i < BRIDGE_CHUNKS; i++) {
        r = m->dev->event_create(m->device, &b->slots[i].loaded);
        if (r >= 0)
            r = m->dev->event_create(m->device, &b->slots[i].computed);
        if (r >= 0)
            r = m->dev->event_create(m->device, &b->slots[i].vacant);
    }
    return r;
}

void bridge_close(struct sequence *seq)
{
    const struct model *m = seq->engine->model;
    struct bridge *b = &seq->prefill.bridge;
    m->dev->host_free(m->device, b->host);
    for (int i = 0; i < BRIDGE_CHUNKS; i++) {
        m->dev->event_free(b->slots[i].loaded);
        m->dev->event_free(b->slots[i].computed);
        m->dev->event_free(b->slots[i].vacant);
    }
    *b = (struct bridge){0};
}

/* Chunks are counted over all layers, in the order in which they are computed. */
static int chunk_number(const struct sequence *seq, int layer, int chunk)
{
    return layer * seq->prefill.n_chunks + chunk;
}

static float *slot_rows(const struct sequence *seq, int number)
{
    const struct engine *e = seq->engine;
    return seq->prefill.bridge.rows + (int64_t)(number % BRIDGE_CHUNKS) * e->config.chunk * e->model->config.dim;
}

/* A chunk's rows in host memory. */
static float *host_rows(const struct sequence *seq, int chunk, size_t *ret_bytes)
{
    const struct engine *e = seq->engine;
    const int first = chunk * e->config.chunk, left = seq->prefill.n_new - first;
    *ret_bytes = (size_t)(left < e->config.chunk ? left : e->config.chunk) * (size_t)e->model->config.dim * sizeof(float);
    return seq->prefill.bridge.host + (int64_t)first * e->model->config.dim;
}

float *bridge_rows(const struct sequence *seq, int layer, int chunk)
{
    const struct engine *e = seq->engine;
    if (seq->prefill.bridge.host)
        return slot_rows(seq, chunk_number(seq, layer, chunk));
    return seq->prefill.bridge.rows + (e->config.order == PREFILL_LAYER_MAJOR ? (int64_t)chunk * e->config.chunk * e->model->config.dim : 0);
}

static int load(struct sequence *seq, int number)
{
    const struct engine *e = seq->engine;
    const struct device_ops *dev = e->model->dev;
    struct bridge *b = &seq->prefill.bridge;
    size_t bytes;
    const float *from = host_rows(seq, number % seq->prefill.n_chunks, &bytes);
    int r = dev->stream_wait(e->in, b->slots[number % BRIDGE_CHUNKS].vacant);
    if (r >= 0)
        r = dev->copy(e->in, slot_rows(seq, number), from, bytes);
    return r >= 0 ? dev->event_record(b->slots[number % BRIDGE_CHUNKS].loaded, e->in) : r;
}

/* Layer 0's rows are made from tokens, and only have to wait until the slot's last ones have left. */
int bridge_begin(struct sequence *seq, int layer, int chunk)
{
    const struct engine *e = seq->engine;
    const struct model *m = e->model;
    struct bridge *b = &seq->prefill.bridge;
    const int number = chunk_number(seq, layer, chunk), next = number + 1, slot = number % BRIDGE_CHUNKS;
    if (!b->host)
        return 0;
    int r = m->dev->stream_wait(m->stream, layer ? b->slots[slot].loaded : b->slots[slot].vacant);
    if (r >= 0 && next >= seq->prefill.n_chunks && next < m->config.n_layers * seq->prefill.n_chunks)
        r = load(seq, next);
    return r;
}

int bridge_end(struct sequence *seq, int layer, int chunk)
{
    const struct engine *e = seq->engine;
    const struct model *m = e->model;
    struct bridge *b = &seq->prefill.bridge;
    const int number = chunk_number(seq, layer, chunk), slot = number % BRIDGE_CHUNKS;
    size_t bytes;
    if (!b->host)
        return 0;
    if (layer == m->config.n_layers - 1)
        return m->dev->event_record(b->slots[slot].vacant, m->stream);
    float *to = host_rows(seq, chunk, &bytes);
    int r = m->dev->event_record(b->slots[slot].computed, m->stream);
    if (r >= 0)
        r = m->dev->stream_wait(e->out, b->slots[slot].computed);
    if (r >= 0)
        r = m->dev->copy(e->out, to, slot_rows(seq, number), bytes);
    return r >= 0 ? m->dev->event_record(b->slots[slot].vacant, e->out) : r;
}
