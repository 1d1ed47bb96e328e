/* RoPE of queries and keys, then Hadamard/sqrt(b) in blocks of b, the largest power of two that divides head_dim; K and V rounded to bf16 where they belong. One token a task.
 *
 * RoPE of a pair: (fma(x0, c, -(x1 s)), fma(x0, s, x1 c)). The Hadamard butterflies go from distance 1 up; each output is a + b or b - a, rounded once. */
#include "kernels/cpu/hadamard.h"
#include "kernels/cpu/ops.h"
#include <errno.h>
#include <string.h>

enum { HEAD_DIM_MAX = 256 };

ALWAYS_INLINE void rope_interleaved(const float *x, const float *rope, int d, float *y)
{
    for (int i = 0; i < d / 2; i++) {
        const float c = rope[2 * i], s = rope[2 * i + 1], x0 = x[2 * i], x1 = x[2 * i + 1];
        y[2 * i] = fmaf(x0, c, -(x1 * s));
        y[2 * i + 1] = fmaf(x0, s, x1 * c);
    }
}

ALWAYS_INLINE void rope_halves(const float *x, const float *rope, int d, float *y)
{
    const int h = d / 2;
    for (int i = 0; i < h; i++) {
        const float c = rope[2 * i], s = rope[2 * i + 1], x0 = x[i], x1 = x[i + h];
        y[i] = fmaf(x0, c, -(x1 * s));
        y[i + h] = fmaf(x0, s, x1 * c);
    }
}

/* One head: RoPE and rotation into y[d]. */
ALWAYS_INLINE void rotate_head(const struct qkv_params *p, const float *x, const float *rope, float *y)
{
    const int d = p->head_dim, b = d & -d;
    if (p->style == ROPE_INTERLEAVED)
        rope_interleaved(x, rope, d, y);
    else
        rope_halves(x, rope, d, y);
    for (int i = 0; i < d; i += b)
        hadamard(y + i, b);
}

ALWAYS_INLINE void store_bf16(bf16_t *dst, const float *x, int d)
{
    for (int i = 0; i < d; i += LANES)
        v16_store_bf16(dst + i, v16_load(x + i));
}

static void qkv_finish_token(void *arg, int64_t i, int thread)
{
    const struct qkv_params *p = arg;
    const int d = p->head_dim;
    const float *rope = p->rope + i * d;
    float y[HEAD_DIM_MAX];
    (void)thread;
    for (int h = 0; h < p->n_heads; h++) {
        float *q = p->q + (i * p->n_heads + h) * d;
        rotate_head(p, q, rope, y);
        memcpy(q, y, (size_t)d * sizeof *q);
    }
    for (int h = 0; h < p->n_kv_heads; h++) {
        const int64_t row = (i * p->n_kv_heads + h) * d, at = h * p->dst[i].head_stride;
        rotate_head(p, p->k + row, rope, y);
        store_bf16(p->dst[i].k + at, y, d);
        store_bf16(p->dst[i].v + at, p->v + row, d);
    }
}

int ISA(qkv_finish)(struct stream *s, const struct qkv_params *p)
{
    if (p->n < 0 || p->n_heads < 1 || p->n_kv_heads < 1)
        return -EINVAL;
    if (p->head_dim < LANES || p->head_dim > HEAD_DIM_MAX || p->head_dim % LANES != 0)
        return -ENOTSUP;
    cpu_run(s, p->n, qkv_finish_token, (void *)p);
    return 0;
}
