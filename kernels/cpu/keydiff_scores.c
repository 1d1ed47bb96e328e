/* How far each key points away from the mean direction of all keys of its KV head (KeyDiff): two passes over the keys, no scratch beyond the stack.
 *
 *     u[i] = k[i] / max(|k[i]|, 1e-12),  anchor = sum of u[i] over all keys (its length drops out),  score[i] = -(u[i] . anchor / max(|anchor|, 1e-12))
 *
 * A task is one KV head. Sums over channels run in 16 lanes; the anchor is a chain over the keys in segments of 1024, and a chain over the segments. */
#include "kernels/cpu/ops.h"
#include <errno.h>

enum { KEYDIFF_MAX_DIM = 256, KEYDIFF_SEGMENT = 1024 };

struct keydiff_args {
    const struct keydiff_params *p;
};

static float unit_scale(float sum_of_squares)
{
    const float length = sqrtf(sum_of_squares);
    return 1.0f / (length > 1e-12f ? length : 1e-12f);
}

/* u of one key. */
static void unit_key(const bf16_t *key, int d, float *u)
{
    v16 sum = v16_zero();
    for (int c = 0; c < d; c += LANES) {
        const v16 x = v16_load_bf16(key + c);
        sum = v16_fma(x, x, sum);
    }
    const v16 scale = v16_set1(unit_scale(v16_reduce_add(sum)));
    for (int c = 0; c < d; c += LANES)
        v16_store(u + c, v16_mul(v16_load_bf16(key + c), scale));
}

static void add_to(float *to, const float *x, int d)
{
    for (int c = 0; c < d; c += LANES)
        v16_store(to + c, v16_add(v16_load(to + c), v16_load(x + c)));
}

/* The anchor, of length 1. */
static void make_anchor(const struct keydiff_params *p, const bf16_t *keys, float *anchor)
{
    const int d = p->head_dim;
    float part[KEYDIFF_MAX_DIM], u[KEYDIFF_MAX_DIM];
    v16 sum = v16_zero();
    for (int c = 0; c < d; c++)
        anchor[c] = part[c] = 0;
    for (int64_t i = 0; i < p->n_keys; i++) {
        unit_key(keys + i * d, d, u);
        add_to(part, u, d);
        if ((i + 1) % KEYDIFF_SEGMENT == 0 || i + 1 == p->n_keys) {
            add_to(anchor, part, d);
            for (int c = 0; c < d; c++)
                part[c] = 0;
        }
    }
    for (int c = 0; c < d; c += LANES)
        sum = v16_fma(v16_load(anchor + c), v16_load(anchor + c), sum);
    const v16 scale = v16_set1(unit_scale(v16_reduce_add(sum)));
    for (int c = 0; c < d; c += LANES)
        v16_store(anchor + c, v16_mul(v16_load(anchor + c), scale));
}

static void keydiff_head(void *arg, int64_t head, int thread)
{
    const struct keydiff_params *p = ((const struct keydiff_args *)arg)->p;
    const bf16_t *keys = p->k + head * p->head_stride;
    const int d = p->head_dim;
    float anchor[KEYDIFF_MAX_DIM], u[KEYDIFF_MAX_DIM];
    float *scores = p->scores + head * (p->last - p->first);
    (void)thread;
    make_anchor(p, keys, anchor);
    for (int64_t i = p->first; i < p->last; i++) {
        v16 sum = v16_zero();
        unit_key(keys + i * d, d, u);
        for (int c = 0; c < d; c += LANES)
            sum = v16_fma(v16_load(u + c), v16_load(anchor + c), sum);
        scores[i - p->first] = -v16_reduce_add(sum);
    }
}

int ISA(keydiff_scores)(struct stream *s, const struct keydiff_params *p)
{
    if (p->n_kv_heads < 1 || p->first < 0 || p->first >= p->last || p->last > p->n_keys)
        return -EINVAL;
    if (p->head_dim < LANES || p->head_dim > KEYDIFF_MAX_DIM || p->head_dim % LANES != 0)
        return -ENOTSUP;
    struct keydiff_args a = {.p = p};
    cpu_run(s, p->n_kv_heads, keydiff_head, &a);
    return 0;
}
