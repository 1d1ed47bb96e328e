/* Scores of the observation window in two passes over the keys (SnapKV's scores by TideKV's blockwise scan): first the maximum and the sum of each (query, head)
 * row, then the weights, summed over the window, pooled, averaged over the group or over all heads. Logits are computed twice; nothing of size window x keys exists.
 *
 * A task is one KV head (in the second pass also: all heads, one after the other) with a segment of keys whose borders are fixed; the first pass leaves a partial (m, l) for each
 * segment, which every task of the second merges in order. For the pooling a task of the second pass computes a halo of keys on both sides. Segments without a key to
 * score have no task in the second pass.
 * Logits and weights as in attn_prefill: one chain over d, own exp; sums over keys in 16 lanes, over the window and the group in order. */
#include "kernels/cpu/key_bias.h"
#include "kernels/cpu/kv_expand.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/panel_gemm.h"
#include "kernels/cpu/vmath.h"
#include <errno.h>

enum {
    SEGMENT_KEYS = 1024,
    CHUNK_KEYS = 64,                /* keys expanded at a time */
    POOL_MAX = 127,
    HALO_MAX = 64,                  /* POOL_MAX / 2, in whole panels */
    SPAN_MAX = SEGMENT_KEYS + 2 * HALO_MAX,
    STRIP_ROWS = 24,
    GROUP_MAX = 64,
    ROWS_MAX = 8192,                /* window * group */
};

struct window_args {
    const struct window_score_params *p;
    const struct stream *stream;
    int group, n_rows;   /* rows are (query, head of the group): n_window * group */
    int64_t n_segments;
    int64_t first_segment, n_scored_segments; /* with keys to score */
    float *ml;           /* [n_kv_heads, n_segments, n_rows, 2] */
    float *q;            /* [n_kv_heads, n_rows, d], scale applied */
    int n_ab;            /* most marked pairs of a KV head, times 2 */
    float *ab;           /* [n_kv_heads, n_rows, n_ab], of which a head uses the first 2 n of each row */
};

/* A thread's scratch. */
struct window_scratch {
    float keys[CHUNK_KEYS * KV_MAX_DIM];
    float waves[2 * KEY_BIAS_PAIRS_MAX * CHUNK_KEYS];
    float s[STRIP_ROWS * CHUNK_KEYS];
    float pooled[SEGMENT_KEYS];
    float m[ROWS_MAX], inverse[ROWS_MAX]; /* 1 / l */
    float sum[]; /* [group, SPAN_MAX] */
};

_Static_assert(sizeof(struct window_scratch) + sizeof(float) * GROUP_MAX * SPAN_MAX <= CPU_SCRATCH_BYTES, "fits the scratch of a thread");

/* Keys [pos, pos + CHUNK_KEYS) as panels; those from n_keys on are zeros. Returns how many panels hold any. */
static int expand_chunk(const struct window_args *a, int kv_head, int64_t pos, struct window_scratch *w)
{
    const struct window_score_params *p = a->p;
    int n = p->n_keys - pos < CHUNK_KEYS ? (int)(p->n_keys - pos) : CHUNK_KEYS, n_panels = (n + LANES - 1) / LANES;
    kv_expand_keys(p->k + kv_head * p->head_stride + pos * p->head_dim, p->head_dim, n, n_panels, p->head_dim, w->keys);
    struct bias_pairs bias = bias_pairs_of(p->bias, kv_head);
    bias_panels(&bias, pos / LANES, n_panels, w->waves);
    return n_panels;
}

/* Logits of rows [row, row + n) against a chunk, -INFINITY where the query is earlier than the key: [n, CHUNK_KEYS]. */
static void chunk_logits(const struct window_args *a, int kv_head, int64_t pos, int row, int n, int n_panels, struct window_scratch *w)
{
    static const float lane[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const struct window_score_params *p = a->p;
    int d = p->head_dim;
    struct panel_gemm g = {.a = a->q + ((int64_t)kv_head * a->n_rows + row) * d, .ld_a = d, .n_rows = n, .b = w->keys, .panel_stride = (int64_t)LANES * d,
                           .n_panels = n_panels, .n_k = d, .c = w->s, .ld_c = CHUNK_KEYS};
    panel_gemm_run(&g, false);
    int n_k = 2 * bias_pairs_of(p->bias, kv_head).n;
    if (n_k) {
        struct panel_gemm terms = {.a = a->ab + ((int64_t)kv_head * a->n_rows + row) * a->n_ab, .ld_a = a->n_ab, .n_rows = n, .b = w->waves,
                                   .panel_stride = (int64_t)LANES * n_k, .n_panels = n_panels, .n_k = n_k, .c = w->s, .ld_c = CHUNK_KEYS};
        panel_gemm_run(&terms, true);
    }
    for (int r = 0; r < n; r++) {
        int64_t last = p->n_keys - p->n_window + (row + r) / a->group - pos; /* the last visible key of the chunk */
        for (int k = 0; k < n_panels * LANES; k += LANES)
            if (last < k + LANES - 1) {
                v16m visible = v16_le(v16_load(lane), v16_set1(last < k ? -1.0f : (float)(last - k)));
                float *s = w->s + r * CHUNK_KEYS + k;
                v16_store(s, v16_select(visible, v16_load(s), v16_set1(-INFINITY)));
            }
    }
}

/* Moves (m, l) of each row on by the n_keys logits of one chunk. */
static void chunk_stats(const float *s, int n_rows, int n_keys, float *ml)
{
    for (int r = 0; r < n_rows; r++) {
        v16 max = v16_set1(ml[2 * r]), sum = v16_zero();
        for (int k = 0; k < n_keys; k += LANES)
            max = v16_max(max, v16_load(s + r * CHUNK_KEYS + k));
        float m = v16_reduce_max(max);
        if (m == -INFINITY)
            continue;
        for (int k = 0; k < n_keys; k += LANES)
            sum = v16_add(sum, v16_exp_nonpositive(v16_sub(v16_load(s + r * CHUNK_KEYS + k), v16_set1(m))));
        float shrink = ml[2 * r] == m ? 1.0f : vmath_expf(ml[2 * r] - m);
        ml[2 * r + 1] = fmaf(ml[2 * r + 1], shrink, v16_reduce_add(sum));
        ml[2 * r] = m;
    }
}

static void stats_task(void *arg, int64_t task, int thread)
{
    const struct window_args *a = arg;
    struct window_scratch *w = cpu_scratch(a->stream, thread);
    int kv_head = (int)(task / a->n_segments);
    int64_t start = task % a->n_segments * SEGMENT_KEYS, end = start + SEGMENT_KEYS < a->p->n_keys ? start + SEGMENT_KEYS : a->p->n_keys;
    float *ml = a->ml + task * a->n_rows * 2;
    for (int r = 0; r < a->n_rows; r++) {
        ml[2 * r] = -INFINITY;
        ml[2 * r + 1] = 0;
    }
    for (int64_t pos = start; pos < end; pos += CHUNK_KEYS) {
        int n_panels = expand_chunk(a, kv_head, pos, w);
        for (int row = 0; row < a->n_rows; row += STRIP_ROWS) {
            int n = a->n_rows - row < STRIP_ROWS ? a->n_rows - row : STRIP_ROWS;
            chunk_logits(a, kv_head, pos, row, n, n_panels, w);
            chunk_stats(w->s, n, n_panels * LANES, ml + 2 * row);
        }
    }
}

/* (m, 1 / l) of whole rows from the segments'. */
static void merge_stats(const struct window_args *a, int kv_head, struct window_scratch *w)
{
    const float *ml = a->ml + (int64_t)kv_head * a->n_segments * a->n_rows * 2;
    int64_t stride = (int64_t)a->n_rows * 2;
    for (int r = 0; r < a->n_rows; r++, ml += 2) {
        float m = -INFINITY, l = 0;
        for (int64_t i = 0; i < a->n_segments; i++)
            m = ml[i * stride] > m ? ml[i * stride] : m;
        for (int64_t i = 0; i < a->n_segments; i++)
            if (ml[i * stride] > -INFINITY)
                l = fmaf(vmath_expf(ml[i * stride] - m), ml[i * stride + 1], l);
        w->m[r] = m;
        w->inverse[r] = 1.0f / l;
    }
}

/* sum[head][k] += weights of rows [row, row + n) for the chunk's keys, which start at column `at`. */
static void chunk_weights(const struct window_args *a, int row, int n, int n_keys, int at, struct window_scratch *w)
{
    for (int r = 0; r < n; r++) {
        float *to = w->sum + (row + r) % a->group * SPAN_MAX + at;
        const float *s = w->s + r * CHUNK_KEYS;
        v16 m = v16_set1(w->m[row + r]), inverse = v16_set1(w->inverse[row + r]);
        for (int k = 0; k < n_keys; k += LANES) {
            v16 weight = v16_mul(v16_exp_nonpositive(v16_sub(v16_load(s + k), m)), inverse);
            v16_store(to + k, v16_add(v16_load(to + k), weight));
        }
    }
}

/* Of one task of the second pass; columns count from the span's first key. */
struct window_span {
    int64_t pos;    /* of column 0 */
    int start, n;   /* columns that are scored */
    int valid;      /* columns 0 .. valid-1 lie before the window and enter the pooling */
};

/* out[i] (+)= max of x[i - half .. i + half], cut to [0, n_valid). */
static void pool_max(const float *x, int n_valid, int start, int n, int half, bool add, float *out)
{
    for (int i = 0; i < n; i++) {
        int from = start + i - half > 0 ? start + i - half : 0, to = start + i + half < n_valid ? start + i + half : n_valid - 1;
        float max = x[from];
        for (int j = from + 1; j <= to; j++)
            max = x[j] > max ? x[j] : max;
        out[i] = add ? out[i] + max : max;
    }
}

/* Adds a KV head's weight sums, pooled, to the columns that are scored; `add` is false for the first head of a row of scores. */
static void pool_group(const struct window_args *a, const struct window_span *span, bool add, struct window_scratch *w)
{
    const struct window_score_params *p = a->p;
    if (p->pool_after_group)
        for (int h = 1; h < a->group; h++)
            for (int i = 0; i < span->valid; i++)
                w->sum[i] += w->sum[h * SPAN_MAX + i];
    for (int h = 0; h < (p->pool_after_group ? 1 : a->group); h++)
        pool_max(w->sum + h * SPAN_MAX, span->valid, span->start, span->n, p->pool / 2, add || h > 0, w->pooled);
}

/* Sums over the window and its heads to means, then to means over chunks. Segments end where chunks do. */
static void write_scores(const struct window_args *a, const struct window_span *span, struct window_scratch *w, float *scores)
{
    const struct window_score_params *p = a->p;
    const float scale = 1.0f / ((float)p->n_window * (float)(p->all_heads ? p->n_heads : a->group));
    for (int i = 0, end; i < span->n; i = end) {
        const int in_chunk = (int)((span->pos + span->start + i) % p->chunk);
        float sum = 0;
        end = i + p->chunk - in_chunk < span->n ? i + p->chunk - in_chunk : span->n;
        for (int j = i; j < end; j++)
            sum += w->pooled[j] * scale;
        for (int j = i; j < end; j++)
            scores[j] = sum / (float)(end - i);
    }
}

/* Pooled weight sums of one KV head for the columns of the span. */
static void score_head(const struct window_args *a, int kv_head, const struct window_span *span, bool add, struct window_scratch *w)
{
    memset(w->sum, 0, sizeof *w->sum * (size_t)a->group * SPAN_MAX);
    merge_stats(a, kv_head, w);
    for (int at = 0; at < span->valid; at += CHUNK_KEYS) {
        int n_panels = expand_chunk(a, kv_head, span->pos + at, w);
        for (int row = 0; row < a->n_rows; row += STRIP_ROWS) {
            int n_strip = a->n_rows - row < STRIP_ROWS ? a->n_rows - row : STRIP_ROWS;
            chunk_logits(a, kv_head, span->pos + at, row, n_strip, n_panels, w);
            chunk_weights(a, row, n_strip, n_panels * LANES, at, w);
        }
    }
    pool_group(a, span, add, w);
}

static void score_task(void *arg, int64_t task, int thread)
{
    const struct window_args *a = arg;
    const struct window_score_params *p = a->p;
    struct window_scratch *w = cpu_scratch(a->stream, thread);
    const int64_t n_scored = p->last - p->first, n_columns = p->n_keys - p->n_window, halo = (p->pool / 2 + LANES - 1) / LANES * LANES;
    const int64_t segment = (a->first_segment + task % a->n_scored_segments) * SEGMENT_KEYS;
    const int64_t start = segment > p->first ? segment : p->first, end = segment + SEGMENT_KEYS < p->last ? segment + SEGMENT_KEYS : p->last;
    const int64_t pos = segment > halo ? segment - halo : 0, valid_end = end + halo < n_columns ? end + halo : n_columns;
    const struct window_span span = {.pos = pos, .start = (int)(start - pos), .n = (int)(end - start), .valid = (int)(valid_end - pos)};
    const int row = (int)(task / a->n_scored_segments), head_end = p->all_heads ? p->n_kv_heads : row + 1;
    for (int head = row; head < head_end; head++)
        score_head(a, head, &span, head > row, w);
    write_scores(a, &span, w, p->scores + row * n_scored + start - p->first);
}

/* q with the scale applied, in the order of the rows, and what it makes of the key biases. */
static void scale_queries(struct window_args *a)
{
    const struct window_score_params *p = a->p;
    int d = p->head_dim;
    float *to = a->q, *ab = a->ab;
    for (int kv_head = 0; kv_head < p->n_kv_heads; kv_head++) {
        struct bias_pairs bias = bias_pairs_of(p->bias, kv_head);
        for (int r = 0; r < a->n_rows; r++, to += d, ab += a->n_ab) {
            const float *q = p->q + ((int64_t)(r / a->group) * p->n_heads + kv_head * a->group + r % a->group) * d;
            for (int c = 0; c < d; c += LANES)
                v16_store(to + c, v16_mul(v16_load(q + c), v16_set1(p->scale)));
            bias_coefficients(&bias, to, d, ab);
        }
    }
}

static int check(const struct window_score_params *p)
{
    if (p->n_window < 1 || p->first < 0 || p->first >= p->last || p->last > p->n_keys - p->n_window || p->n_kv_heads < 1 || p->n_heads < 1 ||
        p->n_heads % p->n_kv_heads != 0 || p->pool < 1 || p->pool % 2 == 0 || p->chunk < 1)
        return -EINVAL;
    int group = p->n_heads / p->n_kv_heads;
    if (p->head_dim < LANES || p->head_dim > KV_MAX_DIM || p->head_dim % LANES != 0 || p->pool > POOL_MAX || group > GROUP_MAX || p->n_window > ROWS_MAX / group ||
        SEGMENT_KEYS % p->chunk != 0)
        return -ENOTSUP;
    return 0;
}

/* The scaled queries, (m, l) of each query in each segment, and the queries' (A, B). */
static size_t scratch_floats(const struct window_args *a, size_t *ret_q_floats, size_t *ret_ml_floats)
{
    const struct window_score_params *p = a->p;
    const size_t n_rows = (size_t)p->n_kv_heads * (size_t)a->n_rows;
    *ret_q_floats = n_rows * (size_t)p->head_dim;
    *ret_ml_floats = n_rows * (size_t)a->n_segments * 2;
    return *ret_q_floats + *ret_ml_floats + n_rows * (size_t)a->n_ab;
}

static int most_pairs(const struct window_score_params *p)
{
    int most = 0;
    for (int h = 0; h < p->n_kv_heads; h++)
        most = bias_pairs_of(p->bias, h).n > most ? bias_pairs_of(p->bias, h).n : most;
    return most;
}

static struct window_args make_args(struct stream *s, const struct window_score_params *p)
{
    const int group = p->n_heads / p->n_kv_heads;
    return (struct window_args){
        .p = p, .stream = s, .group = group, .n_segments = (p->n_keys + SEGMENT_KEYS - 1) / SEGMENT_KEYS, .n_rows = p->n_window * group};
}

size_t ISA(window_scores_scratch)(const struct op_bounds *b)
{
    const struct window_score_params p = {
        .n_window = b->n_window, .n_keys = b->n_keys, .n_heads = b->n_heads, .n_kv_heads = b->n_kv_heads, .head_dim = b->head_dim};
    size_t q_floats, ml_floats;
    if (b->n_window == 0)
        return 0;
    struct window_args a = make_args(NULL, &p);
    a.n_ab = 2 * b->n_bias_pairs;
    return sizeof(float) * scratch_floats(&a, &q_floats, &ml_floats);
}

int ISA(window_scores)(struct stream *s, const struct window_score_params *p)
{
    int r = check(p);
    if (r < 0)
        return r;
    struct window_args a = make_args(s, p);
    a.n_ab = 2 * most_pairs(p);
    size_t q_floats, ml_floats, n_floats = scratch_floats(&a, &q_floats, &ml_floats);
    void *memory;
    r = cpu_op_alloc(s, sizeof(float) * n_floats, &memory);
    if (r < 0)
        return r;
    a.first_segment = p->first / SEGMENT_KEYS;
    a.n_scored_segments = (p->last - 1) / SEGMENT_KEYS - a.first_segment + 1;
    a.q = memory;
    a.ml = a.q + q_floats;
    a.ab = a.ml + ml_floats;
    scale_queries(&a);
    cpu_run(s, p->n_kv_heads * a.n_segments, stats_task, &a);
    cpu_run(s, (p->all_heads ? 1 : p->n_kv_heads) * a.n_scored_segments, score_task, &a);
    cpu_op_free(s, memory);
    return 0;
}
