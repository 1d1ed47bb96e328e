#include "bench/fidelity/lab/drift.h"
#include "bench/fidelity/logit_metrics.h"
#include <errno.h>
#include <math.h>
#include <string.h>

static void compare_hidden(const struct lab_context *a, const struct lab_context *b, struct drift *ret)
{
    const int dim = a->model->config.dim;
    double difference = 0, norm = 0, cosine = 0;
    for (int i = 0; i < a->n_tokens; i++) {
        const float *x = a->hidden + (int64_t)i * dim, *y = b->hidden + (int64_t)i * dim;
        double xx = 0, yy = 0, xy = 0;
        for (int c = 0; c < dim; c++) {
            const double u = (double)x[c], v = (double)y[c];
            difference += (u - v) * (u - v);
            xx += u * u;
            yy += v * v;
            xy += u * v;
        }
        norm += xx;
        cosine += xx > 0 && yy > 0 ? xy / sqrt(xx * yy) : xx == yy;
    }
    ret->relative_l2 = norm > 0 ? sqrt(difference / norm) : 0;
    ret->cosine = cosine / a->n_tokens;
}

enum { BATCH = 16 }; /* positions whose logits are made together */

struct batch {
    struct model_workspace ws;
    float *x;      /* [2 * BATCH, dim]: the reference's, then the other's */
    float *logits; /* [2 * BATCH, n_vocab] */
};

/* Positions last, last - DRIFT_EVERY, ...: n of them. */
static int compare_batch(const struct lab_context *a, const struct lab_context *b, int last, int n, struct batch *batch, struct drift *sum)
{
    const struct model *m = a->model;
    const int dim = m->config.dim, n_vocab = m->config.n_vocab;
    for (int i = 0; i < n; i++) {
        const int64_t at = (int64_t)(last - i * DRIFT_EVERY) * dim;
        memcpy(batch->x + (int64_t)i * dim, a->hidden + at, (size_t)dim * sizeof(float));
        memcpy(batch->x + (int64_t)(n + i) * dim, b->hidden + at, (size_t)dim * sizeof(float));
    }
    int r = model_logits(m, batch->x, 2 * n, &batch->ws, batch->logits);
    for (int i = 0; r >= 0 && i < n; i++) {
        const float *p = batch->logits + (int64_t)i * n_vocab, *q = p + (int64_t)n * n_vocab;
        struct divergence d;
        logits_divergence(p, logits_lse(p, n_vocab), q, logits_lse(q, n_vocab), n_vocab, &d);
        sum->kl += d.kl;
        sum->jsd += d.jsd;
        sum->top1 += logits_argmax(p, n_vocab) == logits_argmax(q, n_vocab);
    }
    return r;
}

/* Backwards from the last position, which is the one that the answer starts from. */
static int compare_positions(const struct lab_context *a, const struct lab_context *b, struct batch *batch, struct drift *ret)
{
    const int n = (a->n_tokens - 1) / DRIFT_EVERY + 1;
    int r = 0;
    for (int done = 0; r >= 0 && done < n; done += BATCH)
        r = compare_batch(a, b, a->n_tokens - 1 - done * DRIFT_EVERY, n - done < BATCH ? n - done : BATCH, batch, ret);
    ret->kl /= n;
    ret->jsd /= n;
    ret->top1 /= n;
    return r;
}

static int batch_init(const struct model *m, struct batch *batch)
{
    int r = model_workspace_init(&batch->ws, m, 2 * BATCH, 0);
    if (r >= 0)
        r = m->dev->alloc(m->device, MEM_WORKSPACE, (size_t)m->config.dim * 2 * BATCH * sizeof(float), (void **)&batch->x);
    if (r >= 0)
        r = m->dev->alloc(m->device, MEM_WORKSPACE, (size_t)m->config.n_vocab * 2 * BATCH * sizeof(float), (void **)&batch->logits);
    return r;
}

static void batch_fini(const struct model *m, struct batch *batch)
{
    m->dev->free(m->device, batch->logits);
    m->dev->free(m->device, batch->x);
    if (batch->ws.memory)
        model_workspace_fini(&batch->ws, m);
}

int drift_measure(const struct lab_context *a, const struct lab_context *b, struct drift *ret)
{
    struct batch batch = {0};
    struct drift d = {0};
    if (a->n_tokens != b->n_tokens || a->model != b->model)
        return -EINVAL;
    compare_hidden(a, b, &d);
    int r = batch_init(a->model, &batch);
    if (r >= 0)
        r = compare_positions(a, b, &batch, &d);
    batch_fini(a->model, &batch);
    if (r >= 0)
        *ret = d;
    return r;
}
