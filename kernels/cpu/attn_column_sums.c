/* What each key got from the queries of one block (H2O's accumulated attention): the weights of attn_prefill once more, from its (m, l), summed over queries and group.
 *
 * A task is one KV head with a segment of keys, which it expands to fp32 panels once; the queries pass over it in strips of 24 rows. A key's sum is one chain over
 * (query, head of the group) in that order, continued from call to call, so neither the cut into calls nor that into segments or strips is visible in it. Logits as in
 * attn_prefill, to the bit: one chain over d of (q scale) k, then over the terms of key biases. */
#include "kernels/cpu/key_bias.h"
#include "kernels/cpu/kv_expand.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/panel_gemm.h"
#include "kernels/cpu/vmath.h"
#include <errno.h>

enum {
    SEGMENT_KEYS = 256,
    STRIP_ROWS = 24,
};

struct column_args {
    const struct column_sum_params *p;
    const struct stream *stream;
    int group;
    int64_t n_segments;
};

/* A thread's scratch. */
struct column_scratch {
    float keys[SEGMENT_KEYS * KV_MAX_DIM]; /* [panels][d][16] */
    float waves[SEGMENT_KEYS * 2 * KEY_BIAS_PAIRS_MAX]; /* [panels][2 pairs][16] */
    float q[STRIP_ROWS * KV_MAX_DIM];
    float ab[STRIP_ROWS * 2 * KEY_BIAS_PAIRS_MAX];
    float s[STRIP_ROWS * SEGMENT_KEYS];
    float sums[SEGMENT_KEYS];
};

_Static_assert(sizeof(struct column_scratch) <= CPU_SCRATCH_BYTES, "fits the scratch of a thread");

/* Rows [row, row + n) of the KV head, row r being query r / group, head r % group, with the scale applied. */
static void load_queries(const struct column_args *a, int kv_head, int row, int n, float *q)
{
    const struct attn_prefill_params *p = a->p->attn;
    const int d = p->head_dim;
    const v16 scale = v16_set1(p->scale);
    for (int r = row; r < row + n; r++, q += d) {
        const float *from = p->q + ((int64_t)(r / a->group) * p->n_heads + kv_head * a->group + r % a->group) * d;
        for (int c = 0; c < d; c += LANES)
            v16_store(q + c, v16_mul(v16_load(from + c), scale));
    }
}

/* Adds one row's weights for the segment's first n_visible keys; those in the last panel that it does not see get 0. */
static void add_row(const float *s, int n_visible, float m, float l, float *sums)
{
    static const float lane[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const v16 max = v16_set1(m), inverse = v16_set1(1.0f / l);
    for (int k = 0; k < n_visible; k += LANES) {
        const v16m visible = v16_lt(v16_load(lane), v16_set1((float)(n_visible - k)));
        const v16 weight = v16_mul(v16_exp_nonpositive(v16_sub(v16_load(s + k), max)), inverse);
        v16_store(sums + k, v16_add(v16_load(sums + k), v16_select(visible, weight, v16_zero())));
    }
}

/* Continues the logits' chains of n rows, whose queries are in w->q, by the terms of the key biases. */
static void strip_bias(const struct bias_pairs *bias, int n, int n_panels, int d, struct column_scratch *w)
{
    const int n_k = 2 * bias->n;
    for (int r = 0; r < n; r++)
        bias_coefficients(bias, w->q + r * d, d, w->ab + r * n_k);
    const struct panel_gemm g = {.a = w->ab, .ld_a = n_k, .n_rows = n, .b = w->waves, .panel_stride = (int64_t)LANES * n_k, .n_panels = n_panels, .n_k = n_k,
                                 .c = w->s, .ld_c = SEGMENT_KEYS};
    panel_gemm_run(&g, true);
}

static void segment_rows(const struct column_args *a, int kv_head, int64_t start, int n_panels, struct column_scratch *w)
{
    const struct attn_prefill_params *p = a->p->attn;
    const int d = p->head_dim, n_rows = p->n_q * a->group;
    const struct bias_pairs bias = bias_pairs_of(p->bias, kv_head);
    bias_panels(&bias, start / LANES, n_panels, w->waves);
    for (int row = 0; row < n_rows; row += STRIP_ROWS) {
        const int n = n_rows - row < STRIP_ROWS ? n_rows - row : STRIP_ROWS;
        load_queries(a, kv_head, row, n, w->q);
        const struct panel_gemm g = {.a = w->q, .ld_a = d, .n_rows = n, .b = w->keys, .panel_stride = (int64_t)LANES * d, .n_panels = n_panels, .n_k = d,
                                     .c = w->s, .ld_c = SEGMENT_KEYS};
        panel_gemm_run(&g, false);
        if (bias.n)
            strip_bias(&bias, n, n_panels, d, w);
        for (int r = 0; r < n; r++) {
            const int query = (row + r) / a->group;
            const float *ml = p->ret_ml + 2 * ((int64_t)query * p->n_heads + kv_head * a->group + (row + r) % a->group);
            const int64_t visible = p->pos0 + query + 1 - start;
            add_row(w->s + r * SEGMENT_KEYS, visible < n_panels * LANES ? (int)visible : n_panels * LANES, ml[0], ml[1], w->sums);
        }
    }
}

/* Keys start .. start + n - 1, block by block, since the queries' own may lie elsewhere. */
static void load_keys(const struct attn_prefill_params *p, int kv_head, int64_t start, int n, float *keys)
{
    const int d = p->head_dim;
    const int64_t own = p->pos0 / BLOCK_TOKENS * BLOCK_TOKENS;
    for (int i = 0; i < n; i += BLOCK_TOKENS) {
        const int rows = n - i < BLOCK_TOKENS ? n - i : BLOCK_TOKENS;
        const bf16_t *k = p->own_k && start + i == own ? p->own_k + kv_head * p->own_stride : p->k + kv_head * p->head_stride + (start + i) * d;
        kv_expand_keys(k, d, rows, (rows + LANES - 1) / LANES, d, keys + (int64_t)i * d);
    }
}

static void column_task(void *arg, int64_t task, int thread)
{
    const struct column_args *a = arg;
    const struct attn_prefill_params *p = a->p->attn;
    struct column_scratch *w = cpu_scratch(a->stream, thread);
    const int kv_head = (int)(task / a->n_segments);
    const int64_t start = task % a->n_segments * SEGMENT_KEYS, n_keys = p->pos0 + p->n_q;
    const int n = n_keys - start < SEGMENT_KEYS ? (int)(n_keys - start) : SEGMENT_KEYS, n_panels = (n + LANES - 1) / LANES;
    float *sums = a->p->sums + kv_head * a->p->sum_stride + start;
    /* Keys of this call's own queries begin at 0. */
    for (int i = 0; i < n_panels * LANES; i++)
        w->sums[i] = start + i < p->pos0 ? sums[i] : 0;
    load_keys(p, kv_head, start, n, w->keys);
    segment_rows(a, kv_head, start, n_panels, w);
    memcpy(sums, w->sums, (size_t)n * sizeof(*sums));
}

int ISA(attn_column_sums)(struct stream *s, const struct column_sum_params *p)
{
    const struct attn_prefill_params *q = p->attn;
    if (q->n_q < 1 || q->pos0 < 0 || q->pos0 / BLOCK_TOKENS != (q->pos0 + q->n_q - 1) / BLOCK_TOKENS || q->n_kv_heads < 1 || q->n_heads < 1 || q->n_heads % q->n_kv_heads != 0 || !q->ret_ml ||
        p->sum_stride < q->pos0 + q->n_q)
        return -EINVAL;
    if (q->head_dim < LANES || q->head_dim > KV_MAX_DIM || q->head_dim % LANES != 0)
        return -ENOTSUP;
    struct column_args a = {.p = p, .stream = s, .group = q->n_heads / q->n_kv_heads, .n_segments = (q->pos0 + q->n_q + SEGMENT_KEYS - 1) / SEGMENT_KEYS};
    cpu_run(s, q->n_kv_heads * a.n_segments, column_task, &a);
    return 0;
}
