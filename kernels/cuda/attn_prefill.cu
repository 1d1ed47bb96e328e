/* Attention of a chunk's queries over all keys before them, on tensor cores (attn_tile.cuh).
 *
 * A block of 4 warps has 64 rows of one KV head: of a block of 128 tokens the (query, head of the group) pairs in order make 2 * group such tiles, and a tile never crosses into the next
 * block, since each block's queries see that block exactly. Grid [row tiles * n_kv_heads], the tiles with the most keys first. Keys come in tiles of 64 by cp.async, two
 * stages: while one is attended the next arrives. A row never sees what lies behind its position, so its result does not depend on n_q; tiles of 64, not the CPU's blocks of 128,
 * and bf16 operands: NMSE against the CPU up to 2e-5 in the tests.
 * Where the call's tiles are too few for the multiprocessors, ranges of keys are attended apart and merged (attn_merge.cu). A long prefix, the keys before the first query's block, which all
 * queries see, is cuDNN's where the library is there and the model has no key biases (cudnn_attention.h); this kernel then attends the rest, and merges both where it writes its result.
 * Shared memory: (64 + 2 * 128) (D + 8) * 2 bytes, 87,040 at D = 128: one block a multiprocessor with 100 KiB, two with 227.
 * Head dims 32, 64, 80, 96, 128; any group; k, v, own_k, own_v and their strides on 16 bytes. */
#include "kernels/cuda/attn_bias.cuh"
#include "kernels/cuda/attn_merge.cuh"
#include "kernels/cuda/attn_tile.cuh"
#include "kernels/cuda/cuda_private.h"
#include "kernels/cuda/cudnn_attention.h"
#include <errno.h>

enum {
    PREFILL_ROWS = 64,
    PREFILL_KEYS = 64,
    PREFILL_THREADS = 128,
    PREFILL_BLOCKS = 2,          /* of this kernel on a multiprocessor */
    SPLIT_KEYS_MIN = 1024,       /* keys of a split, at least: what it costs is then a few per cent */
    PREFILL_SPLITS_MAX = 32,
    PREFIX_KEYS_MIN = 1024,      /* cuDNN's: below, one call more is not worth it, */
    PREFIX_QUERIES_MIN = 128,    /*   nor for a few queries */
    PREFIX_QUERIES_CLASS = 256,  /* plans are for this many queries, or 2, 4, 8 ... times as many */
};

struct prefill_args {
    struct attn_prefill_params p;
    int group;
    int64_t origin;                /* of the first query's block: rows count from there */
    int64_t first_tile, last_tile; /* tiles that hold queries of the call */
    int64_t first_key;             /* keys from here on are attended: 0 or the origin */
    int n_splits;
    int64_t split_keys;            /* by one split, blockIdx.y; a multiple of PREFILL_KEYS */
    float *part_o, *part_ml;       /* partials of the splits [n_splits][n_q, n_heads]{d, 2}; NULL: there is one, and it is the result, merged with the prefix's: */
    const bf16_t *prefix_o;        /* [n_q, n_heads, d] divided by l; NULL: none */
    const float *prefix_lse;       /* m + log l at [head * prefix_stride + query] */
    int64_t prefix_stride;
    struct attn_bias bias;         /* rows [n_q, n_heads] */
};

/* One tile of rows: query (first_row + r) / group of the block at `own`, head (first_row + r) % group. */
struct prefill_tile {
    int64_t own;
    int first_row, kv_head;
};

/* The row's query, counted from the call's first; outside 0 .. n_q - 1 for rows that nobody asks for. */
DEVICE int64_t prefill_query(const struct prefill_args &a, const struct prefill_tile &t, int row)
{
    return t.own + (t.first_row + row) / a.group - a.p.pos0;
}

DEVICE int64_t prefill_row_at(const struct prefill_args &a, const struct prefill_tile &t, int64_t query, int row)
{
    return query * a.p.n_heads + t.kv_head * a.group + (t.first_row + row) % a.group;
}

/* What a row's o is multiplied by, and what its prefix's, and the sum that both are divided by. */
struct prefill_end {
    float own, prefix, max, sum;
};

DEVICE struct prefill_end prefill_end_of(const struct prefill_args &a, int64_t query, int head, float m, float l)
{
    struct prefill_end e = {1, 0, m, l};
    if (!a.prefix_o)
        return e;
    const float prefix = a.prefix_lse[head * a.prefix_stride + query];
    e.max = fmaxf(prefix, m);
    e.prefix = merge_weight(prefix, e.max); /* its l is 1 */
    e.own = merge_weight(m, e.max);
    e.sum = fmaf(l, e.own, e.prefix);
    return e;
}

/* Two neighbours of a row, merged with the prefix's. */
DEVICE uint32_t prefill_pair(const struct prefill_args &a, const struct prefill_end &e, int64_t at, const float *o)
{
    if (!a.prefix_o)
        return bf16_pair(o[0] / e.sum, o[1] / e.sum);
    const uint32_t prefix = *reinterpret_cast<const uint32_t *>(a.prefix_o + at);
    return bf16_pair(fmaf(o[0], e.own, bf16_to_float((bf16_t)prefix) * e.prefix) / e.sum, fmaf(o[1], e.own, bf16_to_float((bf16_t)(prefix >> 16)) * e.prefix) / e.sum);
}

template <int D> DEVICE void prefill_store(const struct prefill_args &a, const struct prefill_tile &t, const struct attn_tile_rows<D> &r, int warp_row)
{
    const int lane = (int)threadIdx.x % 32;
    bf16_t *out = (bf16_t *)a.p.out;
    UNROLL for (int half = 0; half < 2; half++) {
        const int row = warp_row + lane / 4 + half * 8;
        const int64_t query = prefill_query(a, t, row);
        if (query < 0 || query >= a.p.n_q)
            continue;
        const int64_t at = prefill_row_at(a, t, query, row);
        const struct prefill_end e = prefill_end_of(a, query, (int)(at % a.p.n_heads), r.m[half], r.l[half]);
        UNROLL for (int i = 0; i < D / 8; i++) {
            const int64_t pair = at * D + i * 8 + lane % 4 * 2;
            *reinterpret_cast<uint32_t *>(out + pair) = prefill_pair(a, e, pair, &r.o[i][2 * half]);
        }
        if (a.p.ret_ml && lane % 4 == 0)
            *reinterpret_cast<float2 *>(a.p.ret_ml + 2 * at) = make_float2(e.max, e.sum);
    }
}

/* Of one split of the keys. */
template <int D> DEVICE void prefill_store_part(const struct prefill_args &a, const struct prefill_tile &t, const struct attn_tile_rows<D> &r, int warp_row)
{
    const int lane = (int)threadIdx.x % 32;
    UNROLL for (int half = 0; half < 2; half++) {
        const int row = warp_row + lane / 4 + half * 8;
        const int64_t query = prefill_query(a, t, row);
        if (query < 0 || query >= a.p.n_q)
            continue;
        const int64_t at = prefill_row_at(a, t, query, row) + (int64_t)blockIdx.y * a.p.n_q * a.p.n_heads;
        float *to = a.part_o + at * D;
        UNROLL for (int i = 0; i < D / 8; i++)
            *reinterpret_cast<float2 *>(to + i * 8 + lane % 4 * 2) = make_float2(r.o[i][2 * half], r.o[i][2 * half + 1]);
        if (lane % 4 == 0)
            *reinterpret_cast<float2 *>(a.part_ml + 2 * at) = make_float2(r.m[half], r.l[half]);
    }
}

/* The tile of this block of threads, and the key behind the last that any of its rows sees. */
DEVICE struct prefill_tile prefill_tile_of(const struct prefill_args &a, int64_t *ret_end)
{
    const int64_t tile = a.last_tile - blockIdx.x / a.p.n_kv_heads;
    const int per_block = BLOCK_TOKENS / PREFILL_ROWS * a.group;
    struct prefill_tile t;
    t.own = a.origin + tile / per_block * BLOCK_TOKENS;
    t.first_row = (int)(tile % per_block) * PREFILL_ROWS;
    t.kv_head = (int)(blockIdx.x % a.p.n_kv_heads);
    const int64_t last = t.own + (t.first_row + PREFILL_ROWS - 1) / a.group, end = a.p.pos0 + a.p.n_q;
    *ret_end = (last < end ? last : end - 1) + 1; /* behind the last key */
    return t;
}

template <int D> __global__ void __launch_bounds__(PREFILL_THREADS) attn_prefill_kernel(const struct prefill_args a)
{
    DYNAMIC_SHARED(uint16_t, shared);
    uint16_t *queries = shared, *tiles = queries + PREFILL_ROWS * (D + 8); /* [2][keys, values][64, D + 8] */
    const int warp = (int)threadIdx.x / 32;
    int64_t end;
    const struct prefill_tile t = prefill_tile_of(a, &end);
    const int64_t from = a.first_key + (int64_t)blockIdx.y * a.split_keys, to = end < from + a.split_keys ? end : from + a.split_keys;
    const int n_tiles = to > from ? (int)((to - from + PREFILL_KEYS - 1) / PREFILL_KEYS) : 0;
    auto start = [&](int tile) {
        const int64_t first = from + (int64_t)tile * PREFILL_KEYS;
        const int n = end - first < PREFILL_KEYS ? (int)(end - first) : PREFILL_KEYS;
        const bool own = a.p.own_k && first >= t.own;
        const int64_t at = own ? t.kv_head * a.p.own_stride + (first - a.origin) * D : t.kv_head * a.p.head_stride + first * D;
        uint16_t *tile_to = tiles + tile % 2 * 2 * PREFILL_KEYS * (D + 8);
        attn_tile_copy<D>(tile_to, (own ? a.p.own_k : a.p.k) + at, n, PREFILL_KEYS);
        attn_tile_copy<D>(tile_to + PREFILL_KEYS * (D + 8), (own ? a.p.own_v : a.p.v) + at, n, PREFILL_KEYS);
    };
    for (int i = (int)threadIdx.x; i < PREFILL_ROWS * D; i += PREFILL_THREADS) {
        const int64_t query = prefill_query(a, t, i / D);
        queries[i / D * (D + 8) + i % D] = query < 0 || query >= a.p.n_q ? (uint16_t)0 : bf16_from_float(a.p.q[prefill_row_at(a, t, query, i / D) * D + i % D]);
    }
    if (n_tiles > 0)
        start(0);
    copy_async_commit();
    __syncthreads();
    struct attn_tile_rows<D> r;
    attn_tile_init<D>(r);
    attn_tile_queries<D>(r, queries + warp * 16 * (D + 8));
    for (int tile = 0; tile < n_tiles; tile++) {
        const uint16_t *keys = tiles + tile % 2 * 2 * PREFILL_KEYS * (D + 8);
        if (tile + 1 < n_tiles)
            start(tile + 1);
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        attn_tile_step<D, PREFILL_KEYS>(r, keys, keys + PREFILL_KEYS * (D + 8), a.p.scale, [&](int row, int key, float s) {
            const int64_t position = from + (int64_t)tile * PREFILL_KEYS + key, query = prefill_query(a, t, warp * 16 + row);
            if (position > a.p.pos0 + query)
                return -INFINITY;
            if (!a.bias.ab || query < 0 || query >= a.p.n_q)
                return s;
            return bias_continue(a.bias.key, t.kv_head, a.bias.ab + prefill_row_at(a, t, query, warp * 16 + row) * BIAS_LD, position, s);
        });
        __syncthreads(); /* the next round copies over this tile */
    }
    copy_async_wait<0>();
    attn_tile_sum<D>(r);
    if (a.part_o)
        prefill_store_part<D>(a, t, r, warp * 16);
    else
        prefill_store<D>(a, t, r, warp * 16);
}

template <int D> static int launch_prefill(struct stream *s, const struct prefill_args &a)
{
    const size_t shared = (size_t)(PREFILL_ROWS + 4 * PREFILL_KEYS) * (D + 8) * sizeof(uint16_t);
    const int r = submit_shared_bytes(s, attn_prefill_kernel<D>, shared);
    if (r < 0)
        return r;
    const int64_t n_blocks = (a.last_tile - a.first_tile + 1) * a.p.n_kv_heads;
    if (n_blocks > INT32_MAX)
        return -ENOTSUP;
    return LAUNCH((attn_prefill_kernel<D>), dim3((unsigned)n_blocks, (unsigned)a.n_splits), PREFILL_THREADS, shared, s, a);
}

static int launch_any(struct stream *s, const struct prefill_args &a)
{
    switch (a.p.head_dim) {
    case 32: return launch_prefill<32>(s, a);
    case 64: return launch_prefill<64>(s, a);
    case 80: return launch_prefill<80>(s, a);
    case 96: return launch_prefill<96>(s, a);
    case 128: return launch_prefill<128>(s, a);
    default: return -ENOTSUP;
    }
}

/* Pieces of the op's scratch, each CUDA_TEMP_ALIGN aligned. `memory` NULL: only the sizes. */
struct prefill_scratch {
    size_t used;
    uint8_t *memory;
};

static void *scratch_piece(struct prefill_scratch *s, size_t bytes)
{
    void *piece = s->memory ? s->memory + s->used : nullptr;
    s->used += (bytes + CUDA_TEMP_ALIGN - 1) / CUDA_TEMP_ALIGN * CUDA_TEMP_ALIGN;
    return piece;
}

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Splits of `n_keys` keys when there are n_tiles tiles of all heads. */
static int choose_splits(const struct stream *s, int64_t n_tiles, int64_t n_keys)
{
    const int64_t room = PREFILL_BLOCKS * (int64_t)s->device->properties.multiProcessorCount;
    const int64_t n = min64(min64(room / n_tiles, n_keys / SPLIT_KEYS_MIN), PREFILL_SPLITS_MAX);
    return n < 1 ? 1 : (int)n;
}

static int64_t prefix_queries(int64_t n_q)
{
    int64_t n = PREFIX_QUERIES_CLASS;
    while (n < n_q)
        n *= 2;
    return n;
}

/* The prefix by cuDNN. */
struct prefill_prefix {
    struct cudnn_attention_shape shape;
    struct cudnn_attention_run run;
    bf16_t *q;
};

static void prefix_scratch(struct prefill_prefix *x, struct prefill_scratch *scratch)
{
    const size_t rows = (size_t)x->shape.max_queries * (size_t)x->shape.n_heads, bytes = rows * (size_t)x->shape.head_dim * sizeof(bf16_t);
    x->q = (bf16_t *)scratch_piece(scratch, bytes);
    x->run.q = x->q;
    x->run.o = scratch_piece(scratch, bytes);
    x->run.stats = (float *)scratch_piece(scratch, rows * sizeof(float));
    x->run.workspace = scratch_piece(scratch, CUDNN_ATTENTION_WORKSPACE);
}

static bool prefix_wanted(const struct stream *s, const struct prefill_args &a)
{
    return s->device->cudnn && !a.bias.ab && a.origin >= PREFIX_KEYS_MIN && a.p.n_q >= PREFIX_QUERIES_MIN && a.p.head_stride % a.p.head_dim == 0 && a.p.head_dim % 8 == 0;
}

static struct prefill_prefix prefix_of(const struct prefill_args &a)
{
    struct prefill_prefix x = {};
    x.shape.n_heads = a.p.n_heads;
    x.shape.n_kv_heads = a.p.n_kv_heads;
    x.shape.head_dim = a.p.head_dim;
    x.shape.max_queries = prefix_queries(a.p.n_q);
    x.shape.max_keys = a.p.head_stride / a.p.head_dim;
    x.shape.scale = a.p.scale;
    x.run.k = a.p.k;
    x.run.v = a.p.v;
    return x;
}

static int prefix_forward(struct stream *s, const struct prefill_args &a, struct prefill_prefix *x)
{
    const int32_t lengths[2] = {a.p.n_q, (int32_t)a.origin};
    const void *device;
    int r = stream_args(s, lengths, sizeof lengths, &device);
    if (r == 0)
        r = attn_round_queries(s, a.p.q, (int64_t)a.p.n_q * a.p.n_heads * a.p.head_dim, x->q);
    if (r < 0)
        return r;
    x->run.lengths = (const int32_t *)device;
    x->run.stream = s->cuda;
    r = submit_directly(s);
    return r < 0 ? r : cudnn_attention_forward(s->device->cudnn, &x->shape, &x->run);
}

static int merge_parts(struct stream *s, const struct prefill_args &a)
{
    struct attn_merge_params m = {};
    m.o = a.part_o;
    m.ml = a.part_ml;
    m.n_parts = a.n_splits;
    m.out = (bf16_t *)a.p.out;
    m.ret_ml = a.p.ret_ml;
    m.n_rows = (int64_t)a.p.n_q * a.p.n_heads;
    m.d = a.p.head_dim;
    return attn_merge(s, &m);
}

/* -ENOTSUP when cuDNN cannot; nothing is written then. */
static int attend_with_prefix(struct stream *s, struct prefill_args a)
{
    struct prefill_prefix prefix = prefix_of(a);
    struct prefill_scratch scratch = {};
    void *memory;
    prefix_scratch(&prefix, &scratch);
    int r = stream_temp(s, scratch.used, &memory);
    if (r < 0)
        return r;
    scratch.memory = (uint8_t *)memory;
    scratch.used = 0;
    prefix_scratch(&prefix, &scratch);
    a.prefix_o = (const bf16_t *)prefix.run.o;
    a.prefix_lse = prefix.run.stats;
    a.prefix_stride = prefix.shape.max_queries;
    a.first_key = a.origin;
    r = prefix_forward(s, a, &prefix);
    if (r == 0)
        r = launch_any(s, a);
    return stream_temp_end(s, r);
}

static int attend_in_splits(struct stream *s, struct prefill_args a, struct prefill_scratch scratch)
{
    const size_t rows = (size_t)a.n_splits * (size_t)a.p.n_q * (size_t)a.p.n_heads;
    a.part_o = (float *)scratch_piece(&scratch, rows * (size_t)a.p.head_dim * sizeof(float));
    a.part_ml = (float *)scratch_piece(&scratch, rows * 2 * sizeof(float));
    const int r = launch_any(s, a);
    return r < 0 ? r : merge_parts(s, a);
}

static size_t splits_bytes(int64_t n_rows, int head_dim)
{
    struct prefill_scratch scratch = {};
    scratch_piece(&scratch, (size_t)n_rows * (size_t)head_dim * sizeof(float));
    scratch_piece(&scratch, (size_t)n_rows * 2 * sizeof(float));
    return scratch.used;
}

static struct prefill_args make_args(const struct stream *s, const struct attn_prefill_params *p)
{
    struct prefill_args a = {};
    a.p = *p;
    a.p.bias = nullptr; /* host memory */
    a.group = p->n_heads / p->n_kv_heads;
    a.origin = p->pos0 / BLOCK_TOKENS * BLOCK_TOKENS;
    a.first_tile = (p->pos0 - a.origin) * a.group / PREFILL_ROWS;
    a.last_tile = ((p->pos0 + p->n_q - a.origin) * a.group - 1) / PREFILL_ROWS;
    const int64_t n_keys = p->pos0 + p->n_q;
    a.n_splits = choose_splits(s, (a.last_tile - a.first_tile + 1) * p->n_kv_heads, n_keys);
    a.split_keys = ceil_div64(ceil_div64(n_keys, a.n_splits), PREFILL_KEYS) * PREFILL_KEYS;
    return a;
}

/* Biases and splits: what either needs of the scratch is one piece. */
static int attend(struct stream *s, struct prefill_args a, const struct attn_prefill_params *p)
{
    struct prefill_scratch scratch = {};
    const size_t split = a.n_splits > 1 ? splits_bytes((int64_t)a.n_splits * p->n_q * p->n_heads, p->head_dim) : 0;
    const size_t bias = p->bias ? bias_rows_bytes((int64_t)p->n_q * p->n_heads) : 0;
    void *memory;
    if (split + bias == 0)
        return launch_any(s, a);
    scratch_piece(&scratch, bias);
    int r = stream_temp(s, scratch.used + split, &memory);
    if (r < 0)
        return r;
    scratch.memory = (uint8_t *)memory;
    if (p->bias) {
        a.bias.key = *p->bias;
        a.bias.ab = (float *)memory;
        r = bias_rows(s, a.bias, p->q, p->n_q, p->n_heads, a.group, p->head_dim, p->scale);
    }
    if (r == 0)
        r = a.n_splits > 1 ? attend_in_splits(s, a, scratch) : launch_any(s, a);
    return stream_temp_end(s, r);
}

extern "C" int cuda_attn_prefill(struct stream *s, const struct attn_prefill_params *p)
{
    if (p->n_q < 1 || p->pos0 < 0 || p->n_kv_heads < 1 || p->n_heads < 1 || p->n_heads % p->n_kv_heads != 0 || !p->own_k != !p->own_v)
        return -EINVAL;
    if ((uintptr_t)p->out % sizeof(float2) || (uintptr_t)p->ret_ml % sizeof(float2) || (uintptr_t)p->k % 16 || (uintptr_t)p->v % 16 || p->head_stride % 8 || (uintptr_t)p->own_k % 16 || (uintptr_t)p->own_v % 16 || p->own_stride % 8)
        return -ENOTSUP;
    const struct prefill_args a = make_args(s, p);
    if (!p->bias && prefix_wanted(s, a)) {
        struct prefill_args chunk = a;
        chunk.n_splits = 1;
        chunk.split_keys = ceil_div64(p->pos0 + p->n_q, PREFILL_KEYS) * PREFILL_KEYS;
        const int r = attend_with_prefix(s, chunk);
        if (r != -ENOTSUP)
            return r;
    }
    return attend(s, a, p);
}

/* The most of the three ways. Splits are made only while their tiles are fewer than the device has room for. */
extern "C" size_t cuda_attn_prefill_scratch(const struct stream *s, const struct op_bounds *b)
{
    const int64_t room_rows = PREFILL_BLOCKS * (int64_t)s->device->properties.multiProcessorCount * PREFILL_ROWS, rows = (int64_t)b->n_queries * b->n_heads;
    const size_t splits = b->n_keys >= 2 * SPLIT_KEYS_MIN ? splits_bytes(min64(room_rows, rows * PREFILL_SPLITS_MAX), b->head_dim) : 0;
    const size_t bias = b->n_bias_pairs ? bias_rows_bytes(rows) + CUDA_TEMP_ALIGN : 0;
    if (!s->device->cudnn || b->n_keys < PREFIX_KEYS_MIN || b->n_queries < PREFIX_QUERIES_MIN)
        return splits + bias;
    struct prefill_prefix prefix = {};
    struct prefill_scratch scratch = {};
    prefix.shape.n_heads = b->n_heads;
    prefix.shape.head_dim = b->head_dim;
    prefix.shape.max_queries = prefix_queries(b->n_queries);
    prefix_scratch(&prefix, &scratch);
    return scratch.used > splits + bias ? scratch.used : splits + bias;
}
