#include "bench/fidelity/lab/lab_search.h"
#include "kernels/cpu/half.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* One KV head's buffers. */
struct search_head {
    void *packed;          /* the summaries as a weight */
    float *scores;         /* [n_new, n_units] of one query head */
    float *shares;         /* [n_new, n_units] */
};

static int fini(const struct model *m, struct search_head *s, int r)
{
    m->dev->free(m->device, s->shares);
    m->dev->free(m->device, s->scores);
    m->dev->free(m->device, s->packed);
    return r;
}

static int init(const struct lab_layer *l, const struct lab_search *p, struct search_head *ret)
{
    const struct model *m = l->context->model;
    const size_t bytes = (size_t)l->n_new * (size_t)p->n_units * sizeof(float);
    struct search_head s = {0};
    int r = m->dev->alloc(m->device, MEM_WORKSPACE, m->ops->weight_bytes(WEIGHT_F32, p->n_units, p->width), &s.packed);
    if (r >= 0)
        r = m->dev->alloc(m->device, MEM_WORKSPACE, bytes, (void **)&s.scores);
    if (r >= 0)
        r = m->dev->alloc(m->device, MEM_WORKSPACE, bytes, (void **)&s.shares);
    if (r < 0)
        return fini(m, &s, r);
    *ret = s;
    return 0;
}

/* Softmax of a query head's row, in place, and into the aggregate of its group. */
static void add_share(const struct lab_search *p, const float *bias, float *score, float *share)
{
    float max = -INFINITY, sum = 0;
    for (int u = 0; u < p->n_units; u++) {
        score[u] = score[u] * p->scale + (bias ? bias[u] : 0);
        max = score[u] > max ? score[u] : max;
    }
    if (max == -INFINITY)
        return;
    for (int u = 0; u < p->n_units; u++)
        sum += score[u] = expf(score[u] - max);
    for (int u = 0; u < p->n_units; u++) {
        const float x = score[u] / sum;
        if (p->group == LAB_GROUP_MEAN)
            share[u] += x;
        else
            share[u] = x > share[u] ? x : share[u];
    }
}

static int search_head(const struct lab_layer *l, const struct lab_search *p, struct search_head *s, int head, int32_t *ret_chosen)
{
    const struct model *m = l->context->model;
    const float *bias = p->bias ? p->bias + (int64_t)head * p->n_units : NULL;
    const struct weight w = {.dtype = WEIGHT_F32, .n_rows = p->n_units, .n_cols = p->width, .packed = s->packed};
    const struct matmul_out out = {.w = &w, .y = s->scores, .ld_y = p->n_units};
    int r = m->ops->weight_pack(m->stream, WEIGHT_F32, p->n_units, p->width, p->summary + (int64_t)head * p->n_units * p->width, s->packed);
    for (int64_t i = 0; i < l->n_new; i++)
        for (int u = 0; u < p->n_units; u++)
            s->shares[i * p->n_units + u] = bias && bias[u] == -INFINITY ? -1.0f : 0.0f;
    for (int g = 0; r >= 0 && g < l->group; g++) {
        const float *x = p->queries + (int64_t)(head * l->group + g) * p->width;
        r = m->ops->matmul(m->stream, x, l->n_new, (int64_t)l->n_heads * p->width, &out, 1);
        for (int64_t i = 0; r >= 0 && i < l->n_new; i++)
            add_share(p, bias, s->scores + i * p->n_units, s->shares + i * p->n_units);
    }
    if (r >= 0)
        r = m->ops->topk(m->stream, s->shares, l->n_new, p->n_units, p->n_choose, ret_chosen);
    return r;
}

int lab_search(const struct lab_layer *l, const struct lab_search *p, int32_t *ret_chosen)
{
    const struct model *m = l->context->model;
    struct search_head s;
    if (p->n_choose < 0 || p->n_choose > p->n_units || p->n_units < 1)
        return -EINVAL;
    int r = init(l, p, &s);
    if (r < 0)
        return r;
    for (int h = 0; r >= 0 && h < l->n_kv_heads; h++)
        r = search_head(l, p, &s, h, ret_chosen + (int64_t)h * l->n_new * p->n_choose);
    return fini(m, &s, r);
}

void lab_unit_means(const struct lab_layer *l, int unit, const uint8_t *skip, float *ret, int *ret_count)
{
    const int n_units = (l->n_rows + unit - 1) / unit;
    for (int64_t i = 0; i < (int64_t)l->n_kv_heads * n_units; i++) {
        const int head = (int)(i / n_units), first = (int)(i % n_units) * unit, end = first + unit < l->n_rows ? first + unit : l->n_rows;
        float *mean = ret + i * l->head_dim;
        int n = 0;
        memset(mean, 0, (size_t)l->head_dim * sizeof *mean);
        for (int row = first; row < end; row++) {
            const bf16_t *k = l->k + ((int64_t)head * l->n_rows + row) * l->head_dim;
            if (skip && skip[(int64_t)head * l->n_rows + row])
                continue;
            n++;
            for (int c = 0; c < l->head_dim; c++)
                mean[c] += bf16_to_float(k[c]);
        }
        for (int c = 0; n && c < l->head_dim; c++)
            mean[c] /= (float)n;
        if (ret_count)
            ret_count[i] = n;
    }
}
