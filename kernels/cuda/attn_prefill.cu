/* Attention of a chunk's queries over all keys before them, on tensor cores (attn_tile.cuh).
 *
 * A block of 4 warps has 64 rows of one KV head: of a block of 128 tokens the (query, head of the group) pairs in order make 2 * group such tiles, and a tile never crosses into the next
 * block, since each block's queries see that block exactly. Grid [row tiles * n_kv_heads], the tiles with the most keys first. Keys come in tiles of 64 by cp.async, two
 * stages: while one is attended the next arrives. A row never sees what lies behind its position, so its result does not depend on n_q; tiles of 64, not the CPU's blocks of 128,
 * and bf16 operands: NMSE against the CPU up to 2e-5 in the tests.
 * Shared memory: (64 + 2 * 128) (D + 8) * 2 bytes, 87,040 at D = 128: one block a multiprocessor with 100 KiB, two with 227. With few heads and few queries most
 * multiprocessors stay idle; the keys are not split yet.
 * Head dims 32, 64, 80, 96, 128; any group; k, v, own_k, own_v and their strides on 16 bytes. */
#include "kernels/cuda/attn_bias.cuh"
#include "kernels/cuda/attn_tile.cuh"
#include "kernels/cuda/cuda_private.h"
#include <errno.h>

enum { PREFILL_ROWS = 64, PREFILL_KEYS = 64, PREFILL_THREADS = 128 };

struct prefill_args {
    struct attn_prefill_params p;
    int group;
    int64_t origin;                /* of the first query's block: rows count from there */
    int64_t first_tile, last_tile; /* tiles that hold queries of the call */
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

template <int D> DEVICE void prefill_store(const struct prefill_args &a, const struct prefill_tile &t, const struct attn_tile_rows<D> &r, int warp_row)
{
    const int lane = (int)threadIdx.x % 32;
    UNROLL for (int half = 0; half < 2; half++) {
        const int row = warp_row + lane / 4 + half * 8;
        const int64_t query = prefill_query(a, t, row);
        if (query < 0 || query >= a.p.n_q)
            continue;
        const int64_t at = prefill_row_at(a, t, query, row);
        UNROLL for (int i = 0; i < D / 8; i++)
            UNROLL for (int c = 0; c < 2; c++)
                a.p.out[at * D + i * 8 + lane % 4 * 2 + c] = r.o[i][2 * half + c] / r.l[half];
        if (a.p.ret_ml && lane % 4 == 0) {
            a.p.ret_ml[2 * at] = r.m[half];
            a.p.ret_ml[2 * at + 1] = r.l[half];
        }
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
    const int n_tiles = (int)((end + PREFILL_KEYS - 1) / PREFILL_KEYS);
    auto start = [&](int tile) {
        const int64_t first = (int64_t)tile * PREFILL_KEYS;
        const int n = end - first < PREFILL_KEYS ? (int)(end - first) : PREFILL_KEYS;
        const bool own = a.p.own_k && first >= t.own;
        const int64_t at = own ? t.kv_head * a.p.own_stride + (first - a.origin) * D : t.kv_head * a.p.head_stride + first * D;
        uint16_t *to = tiles + tile % 2 * 2 * PREFILL_KEYS * (D + 8);
        attn_tile_copy<D>(to, (own ? a.p.own_k : a.p.k) + at, n, PREFILL_KEYS);
        attn_tile_copy<D>(to + PREFILL_KEYS * (D + 8), (own ? a.p.own_v : a.p.v) + at, n, PREFILL_KEYS);
    };
    for (int i = (int)threadIdx.x; i < PREFILL_ROWS * D; i += PREFILL_THREADS) {
        const int64_t query = prefill_query(a, t, i / D);
        queries[i / D * (D + 8) + i % D] = query < 0 || query >= a.p.n_q ? (uint16_t)0 : bf16_from_float(a.p.q[prefill_row_at(a, t, query, i / D) * D + i % D]);
    }
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
            const int64_t position = (int64_t)tile * PREFILL_KEYS + key, query = prefill_query(a, t, warp * 16 + row);
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
    prefill_store<D>(a, t, r, warp * 16);
}

template <int D> static int launch_prefill(struct stream *s, const struct prefill_args &a)
{
    const size_t shared = (size_t)(PREFILL_ROWS + 4 * PREFILL_KEYS) * (D + 8) * sizeof(uint16_t);
    const int r = cuda_error(cudaFuncSetAttribute((const void *)attn_prefill_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    if (r < 0)
        return r;
    const int64_t n_blocks = (a.last_tile - a.first_tile + 1) * a.p.n_kv_heads;
    if (n_blocks > INT32_MAX)
        return -ENOTSUP;
    return cuda_error(LAUNCH((attn_prefill_kernel<D>), (unsigned)n_blocks, PREFILL_THREADS, shared, s->cuda, a));
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

static struct prefill_args make_args(const struct attn_prefill_params *p)
{
    struct prefill_args a = {};
    a.p = *p;
    a.p.bias = nullptr; /* host memory */
    a.group = p->n_heads / p->n_kv_heads;
    a.origin = p->pos0 / BLOCK_TOKENS * BLOCK_TOKENS;
    a.first_tile = (p->pos0 - a.origin) * a.group / PREFILL_ROWS;
    a.last_tile = ((p->pos0 + p->n_q - a.origin) * a.group - 1) / PREFILL_ROWS;
    return a;
}

extern "C" int cuda_attn_prefill(struct stream *s, const struct attn_prefill_params *p)
{
    if (p->n_q < 1 || p->pos0 < 0 || p->n_kv_heads < 1 || p->n_heads < 1 || p->n_heads % p->n_kv_heads != 0 || !p->own_k != !p->own_v)
        return -EINVAL;
    if ((uintptr_t)p->k % 16 || (uintptr_t)p->v % 16 || p->head_stride % 8 || (uintptr_t)p->own_k % 16 || (uintptr_t)p->own_v % 16 || p->own_stride % 8)
        return -ENOTSUP;
    struct prefill_args a = make_args(p);
    if (!p->bias)
        return launch_any(s, a);
    void *ab;
    int r = stream_temp(s, bias_rows_bytes((int64_t)p->n_q * p->n_heads), &ab);
    if (r < 0)
        return r;
    a.bias.key = *p->bias;
    a.bias.ab = (float *)ab;
    r = bias_rows(s, a.bias, p->q, p->n_q, p->n_heads, a.group, p->head_dim, p->scale);
    return stream_temp_end(s, r < 0 ? r : launch_any(s, a));
}

extern "C" size_t cuda_attn_prefill_scratch(const struct op_bounds *b)
{
    return b->n_bias_pairs ? bias_rows_bytes((int64_t)b->n_queries * b->n_heads) : 0;
}
