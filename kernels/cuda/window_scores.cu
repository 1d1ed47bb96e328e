/* Scores of the observation window (SnapKV) in two passes over the keys, on tensor cores; nothing of size window x keys exists. Kernels:
 *
 *   stats   (m, l) of each query row over 1,024 keys               grid [segments, strips of 16 queries by four, n_kv_heads]
 *   merge   m and 1 / l of whole rows
 *   sums    weights summed over the window, by query head          grid [tiles of 64 keys, n_kv_heads]: [n_heads, n_columns]
 *   pool    maximum over neighbours, sum over the group or all heads: [rows, n_scored]
 *   chunks  means over aligned chunks of positions
 *
 * Rows are (head of the group, query), each head's queries filled up to whole strips of 16. bf16 operands, sums in fixed orders: NMSE against the CPU up to 3e-6 in the tests.
 * Head dims 32, 64, 80, 96, 128; k on 16 bytes; the bounds of kernels.h. */
#include "kernels/cuda/attn_bias.cuh"
#include "kernels/cuda/attn_columns.cuh"
#include "kernels/cuda/elementwise.cuh"
#include <errno.h>

enum { SEGMENT_KEYS = 1024, POOL_MAX = 127, GROUP_MAX = 64, ROWS_MAX = 8192 };

struct window_args {
    struct window_score_params p;
    int group, n_strips, n_rows;       /* strips of a head; rows of a KV head: group * n_strips * 16 */
    int64_t n_segments, n_columns, n_scored;
    int64_t first_column, end_column;  /* those whose sums are needed */
    float *ml;                         /* [n_kv_heads, n_segments, n_rows, 2] */
    float *row_stats;                  /* [n_kv_heads, n_rows, 2]: m, 1 / l */
    float *sums;                       /* [n_heads, n_columns] */
    float *pooled;                     /* [n_kv_heads or 1, n_scored] */
    struct attn_bias bias;             /* rows [n_window, n_heads] */
};

/* The last key that query w sees. */
DEVICE int64_t last_visible(const struct window_args &a, int query)
{
    return a.p.n_keys - a.p.n_window + query;
}

/* The logit of a query and a key at `position`: seen or not, and with its bias. */
DEVICE float window_logit(const struct window_args &a, int kv_head, int head, int query, int64_t position, float s)
{
    if (query >= a.p.n_window || position > last_visible(a, query))
        return -INFINITY;
    return a.bias.ab ? bias_continue(a.bias.key, kv_head, a.bias.ab + ((int64_t)query * a.p.n_heads + head) * BIAS_LD, position, s) : s;
}

template <int D> DEVICE void load_keys(const struct window_args &a, struct columns_shared<D> *shared, int kv_head, int64_t first)
{
    const int n = a.p.n_keys - first < COLUMN_KEYS ? (int)(a.p.n_keys - first) : COLUMN_KEYS;
    __syncthreads(); /* the keys before have been read */
    attn_tile_copy<D>(shared->keys, a.p.k + kv_head * a.p.head_stride + first * D, n, COLUMN_KEYS);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
}

/* One strip a warp. */
template <int D> __global__ void __launch_bounds__(COLUMN_THREADS) window_stats_kernel(const struct window_args a)
{
    DYNAMIC_SHARED(struct columns_shared<D>, shared);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, kv_head = (int)blockIdx.z, strip = (int)blockIdx.y * COLUMN_WARPS + warp;
    const bool there = strip < a.group * a.n_strips;
    const int h = there ? kv_head * a.group + strip / a.n_strips : 0, first = strip % a.n_strips * 16;
    const int64_t start = (int64_t)blockIdx.x * SEGMENT_KEYS, end = start + SEGMENT_KEYS < a.p.n_keys ? start + SEGMENT_KEYS : a.p.n_keys;
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};
    if (there)
        column_strip<D>(shared->strips[warp], a.p.q + (int64_t)h * D, (int64_t)a.p.n_heads * D, first, a.p.n_window);
    for (int64_t pos = start; pos < end; pos += COLUMN_KEYS) {
        float s[COLUMN_KEYS / 8][4];
        load_keys<D>(a, shared, kv_head, pos);
        if (!there)
            continue;
        column_logits<D>(shared->strips[warp], shared->keys, a.p.scale, first, [&](int query, int key, float x) { return window_logit(a, kv_head, h, query, pos + key, x); }, s);
        UNROLL for (int half = 0; half < 2; half++) {
            float top = m[half], sum = 0;
            UNROLL for (int n = 0; n < COLUMN_KEYS / 8; n++)
                top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
            for (int x = 1; x < 4; x *= 2)
                top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, x));
            UNROLL for (int n = 0; n < COLUMN_KEYS / 8; n++)
                sum += exp_nonpositive(s[n][2 * half] - top) + exp_nonpositive(s[n][2 * half + 1] - top);
            l[half] = fmaf(l[half], exp_nonpositive(m[half] - top), sum);
            m[half] = top;
        }
    }
    if (!there)
        return;
    UNROLL for (int half = 0; half < 2; half++) {
        for (int x = 1; x < 4; x *= 2)
            l[half] += __shfl_xor_sync(0xFFFFFFFFu, l[half], x);
        if (lane % 4 == 0) {
            float *ml = a.ml + 2 * (((int64_t)kv_head * a.n_segments + blockIdx.x) * a.n_rows + strip * 16 + lane / 4 + half * 8);
            ml[0] = m[half];
            ml[1] = l[half];
        }
    }
}

/* A row a thread. Rows that only fill a strip have seen nothing: their stats are never used. */
__global__ void window_merge_kernel(const struct window_args a)
{
    EACH_ELEMENT(i, (int64_t)a.p.n_kv_heads * a.n_rows)
    {
        const float *ml = a.ml + 2 * (i / a.n_rows * a.n_segments * a.n_rows + i % a.n_rows);
        float m = -INFINITY, l = 0;
        for (int64_t s = 0; s < a.n_segments; s++)
            m = fmaxf(m, ml[2 * s * a.n_rows]);
        for (int64_t s = 0; s < a.n_segments; s++)
            l = fmaf(exp_nonpositive(ml[2 * s * a.n_rows] - m), ml[2 * s * a.n_rows + 1], l);
        a.row_stats[2 * i] = m;
        a.row_stats[2 * i + 1] = 1.0f / l;
    }
}

template <int D> __global__ void __launch_bounds__(COLUMN_THREADS) window_sums_kernel(const struct window_args a)
{
    DYNAMIC_SHARED(struct columns_shared<D>, shared);
    const int warp = (int)threadIdx.x / 32, kv_head = (int)blockIdx.y;
    const int64_t pos = a.first_column / COLUMN_KEYS * COLUMN_KEYS + (int64_t)blockIdx.x * COLUMN_KEYS;
    load_keys<D>(a, shared, kv_head, pos);
    for (int h = 0; h < a.group; h++) {
        const int head = kv_head * a.group + h;
        float sums[COLUMN_KEYS / 8][2] = {};
        for (int strip = warp; strip < a.n_strips; strip += COLUMN_WARPS) {
            float s[COLUMN_KEYS / 8][4];
            column_strip<D>(shared->strips[warp], a.p.q + (int64_t)head * D, (int64_t)a.p.n_heads * D, strip * 16, a.p.n_window);
            column_logits<D>(shared->strips[warp], shared->keys, a.p.scale, strip * 16, [&](int query, int key, float x) { return window_logit(a, kv_head, head, query, pos + key, x); }, s);
            column_add(s, strip * 16, [&](int query) {
                const float *stats = a.row_stats + 2 * ((int64_t)kv_head * a.n_rows + h * a.n_strips * 16 + query);
                return query < a.p.n_window ? make_float2(stats[0], stats[1]) : make_float2(0, 0);
            }, sums);
        }
        const float total = column_total<D>(shared, sums);
        if (threadIdx.x < COLUMN_KEYS && pos + threadIdx.x < a.n_columns)
            a.sums[head * a.n_columns + pos + threadIdx.x] = total;
    }
}

/* The largest of f(column) around `column`, within the scored columns. */
template <class F> DEVICE float pool_max(const struct window_args &a, int64_t column, F f)
{
    const int64_t half = a.p.pool / 2, from = column > half ? column - half : 0, to = column + half < a.n_columns - 1 ? column + half : a.n_columns - 1;
    float most = f(from);
    for (int64_t i = from + 1; i <= to; i++)
        most = fmaxf(most, f(i));
    return most;
}

DEVICE float pool_group(const struct window_args &a, int kv_head, int64_t column)
{
    const float *sums = a.sums + (int64_t)kv_head * a.group * a.n_columns;
    float total = 0;
    if (a.p.pool_after_group)
        return pool_max(a, column, [&](int64_t i) {
            float sum = 0;
            for (int h = 0; h < a.group; h++)
                sum += sums[h * a.n_columns + i];
            return sum;
        });
    for (int h = 0; h < a.group; h++)
        total += pool_max(a, column, [&](int64_t i) { return sums[h * a.n_columns + i]; });
    return total;
}

__global__ void window_pool_kernel(const struct window_args a)
{
    const int n_out = a.p.all_heads ? 1 : a.p.n_kv_heads;
    EACH_ELEMENT(i, n_out * a.n_scored)
    {
        const int row = (int)(i / a.n_scored), end = a.p.all_heads ? a.p.n_kv_heads : row + 1;
        float total = 0;
        for (int kv_head = row; kv_head < end; kv_head++)
            total += pool_group(a, kv_head, a.p.first + i % a.n_scored);
        a.pooled[i] = total / ((float)a.p.n_window * (float)(a.p.all_heads ? a.p.n_heads : a.group));
    }
}

/* A chunk a thread. */
__global__ void window_chunks_kernel(const struct window_args a)
{
    const int64_t chunk = a.p.chunk, first_chunk = a.p.first / chunk, n_chunks = (a.p.last - 1) / chunk - first_chunk + 1;
    const int n_out = a.p.all_heads ? 1 : a.p.n_kv_heads;
    EACH_ELEMENT(i, n_out * n_chunks)
    {
        const int64_t at = (first_chunk + i % n_chunks) * chunk, from = (at > a.p.first ? at : a.p.first) - a.p.first, to = (at + chunk < a.p.last ? at + chunk : a.p.last) - a.p.first;
        const float *pooled = a.pooled + i / n_chunks * a.n_scored;
        float *scores = a.p.scores + i / n_chunks * a.n_scored, sum = 0;
        for (int64_t j = from; j < to; j++)
            sum += pooled[j];
        for (int64_t j = from; j < to; j++)
            scores[j] = sum / (float)(to - from);
    }
}

/* ---- host ---- */

static int check(const struct window_score_params *p)
{
    if (p->n_window < 1 || p->first < 0 || p->first >= p->last || p->last > p->n_keys - p->n_window || p->n_kv_heads < 1 || p->n_heads < 1 || p->n_heads % p->n_kv_heads != 0 || p->pool < 1 ||
        p->pool % 2 == 0 || p->chunk < 1)
        return -EINVAL;
    const int group = p->n_heads / p->n_kv_heads;
    if (p->pool > POOL_MAX || group > GROUP_MAX || p->n_window > ROWS_MAX / group || SEGMENT_KEYS % p->chunk != 0 || (uintptr_t)p->k % 16 || p->head_stride % 8 || p->n_kv_heads > 65535)
        return -ENOTSUP;
    return 0;
}

/* Counts, and pieces of the scratch from `memory` on; NULL: counts alone. ret_floats: the scratch's size. */
static struct window_args make_args(const struct window_score_params *p, float *memory, size_t *ret_floats)
{
    const size_t kv_heads = (size_t)p->n_kv_heads;
    struct window_args a = {};
    a.p = *p;
    a.p.bias = nullptr; /* host memory */
    a.group = p->n_heads / p->n_kv_heads;
    a.n_strips = (p->n_window + 15) / 16;
    a.n_rows = a.group * a.n_strips * 16;
    a.n_segments = ceil_div64(p->n_keys, SEGMENT_KEYS);
    a.n_columns = p->n_keys - p->n_window;
    a.n_scored = p->last - p->first;
    a.first_column = p->first > p->pool / 2 ? p->first - p->pool / 2 : 0;
    a.end_column = p->last + p->pool / 2 < a.n_columns ? p->last + p->pool / 2 : a.n_columns;
    const size_t ml = kv_heads * (size_t)a.n_segments * (size_t)a.n_rows * 2, stats = kv_heads * (size_t)a.n_rows * 2, sums = (size_t)p->n_heads * (size_t)a.n_columns;
    const size_t ab = p->bias ? bias_rows_bytes((int64_t)p->n_window * p->n_heads) / sizeof(float) : 0;
    *ret_floats = ml + stats + sums + kv_heads * (size_t)a.n_scored + ab;
    if (p->bias)
        a.bias.key = *p->bias;
    if (memory) {
        a.ml = memory;
        a.row_stats = a.ml + ml;
        a.sums = a.row_stats + stats;
        a.pooled = a.sums + sums;
        a.bias.ab = ab ? a.pooled + kv_heads * (size_t)a.n_scored : nullptr;
    }
    return a;
}

extern "C" size_t cuda_window_scores_scratch(const struct op_bounds *b)
{
    struct window_score_params p = {};
    size_t n_floats;
    if (b->n_window == 0 || b->n_keys <= b->n_window)
        return 0;
    p.n_window = b->n_window;
    p.n_keys = b->n_keys;
    p.n_heads = b->n_heads;
    p.n_kv_heads = b->n_kv_heads;
    p.last = b->n_keys;
    p.pool = 1;
    make_args(&p, nullptr, &n_floats);
    return n_floats * sizeof(float) + (b->n_bias_pairs ? bias_rows_bytes((int64_t)b->n_window * b->n_heads) : 0);
}

template <int D> static int launch(struct stream *s, const struct window_args &a)
{
    const size_t shared = sizeof(struct columns_shared<D>);
    const unsigned heads = (unsigned)a.p.n_kv_heads, strip_blocks = (unsigned)(a.group * a.n_strips + COLUMN_WARPS - 1) / COLUMN_WARPS;
    const unsigned tiles = (unsigned)(ceil_div64(a.end_column, COLUMN_KEYS) - a.first_column / COLUMN_KEYS);
    int r = submit_shared_bytes(s, window_stats_kernel<D>, shared);
    if (r == 0)
        r = submit_shared_bytes(s, window_sums_kernel<D>, shared);
    if (r == 0)
        r = bias_rows(s, a.bias, a.p.q, a.p.n_window, a.p.n_heads, a.group, D, a.p.scale);
    if (r == 0)
        r = LAUNCH((window_stats_kernel<D>), dim3((unsigned)a.n_segments, strip_blocks, heads), COLUMN_THREADS, shared, s, a);
    if (r == 0)
        r = LAUNCH(window_merge_kernel, blocks_for((int64_t)heads * a.n_rows), BLOCK_THREADS, 0, s, a);
    if (r == 0)
        r = LAUNCH((window_sums_kernel<D>), dim3(tiles, heads), COLUMN_THREADS, shared, s, a);
    if (r == 0)
        r = LAUNCH(window_pool_kernel, blocks_for(heads * a.n_scored), BLOCK_THREADS, 0, s, a);
    if (r == 0)
        r = LAUNCH(window_chunks_kernel, blocks_for(heads * a.n_scored), BLOCK_THREADS, 0, s, a);
    return r;
}

static int launch_any(struct stream *s, const struct window_args &a)
{
    COLUMNS_EACH_DIM(a.p.head_dim, launch, s, a)
}

extern "C" int cuda_window_scores(struct stream *s, const struct window_score_params *p)
{
    void *scratch;
    size_t n_floats;
    int r = check(p);
    if (r < 0)
        return r;
    make_args(p, nullptr, &n_floats);
    r = stream_temp(s, n_floats * sizeof(float), &scratch);
    if (r < 0)
        return r;
    return stream_temp_end(s, launch_any(s, make_args(p, (float *)scratch, &n_floats)));
}
