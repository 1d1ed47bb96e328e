/* Attention of up to 128 queries of one block over all keys before them, on tensor cores (attn_tile.cuh).
 *
 * A block of 4 warps has 64 rows, (query, head of the group) pairs in order, of one KV head: grid [row tiles, n_kv_heads]. Keys come in tiles of 64 by cp.async, two
 * stages: while one is attended the next arrives. A row never sees what lies behind its position, so its result does not depend on n_q; tiles of 64, not the CPU's blocks of 128,
 * and bf16 operands: NMSE against the CPU up to 2e-5 in the tests.
 * Shared memory: (64 + 2 * 128) (D + 8) * 2 bytes, 87,040 at D = 128: one block a multiprocessor with 100 KiB, two with 227. With few heads and few queries most
 * multiprocessors stay idle; the keys are not split yet.
 * Head dims 32, 64, 80, 96, 128; any group; k, v and their strides on 16 bytes. */
#include "kernels/cuda/attn_bias.cuh"
#include "kernels/cuda/attn_tile.cuh"
#include "kernels/cuda/cuda_private.h"
#include <errno.h>

enum { PREFILL_ROWS = 64, PREFILL_KEYS = 64, PREFILL_THREADS = 128 };

struct prefill_args {
    struct attn_prefill_params p;
    int group, n_rows; /* n_q * group */
    struct attn_bias bias; /* rows [n_q, n_heads] */
};

template <int D> DEVICE void prefill_store(const struct prefill_args &a, const struct attn_tile_rows<D> &r, int first_row, int kv_head)
{
    const int lane = (int)threadIdx.x % 32;
    UNROLL for (int half = 0; half < 2; half++) {
        const int row = first_row + lane / 4 + half * 8;
        if (row >= a.n_rows)
            continue;
        const int64_t at = (int64_t)(row / a.group) * a.p.n_heads + kv_head * a.group + row % a.group;
        UNROLL for (int i = 0; i < D / 8; i++)
            UNROLL for (int c = 0; c < 2; c++)
                a.p.out[at * D + i * 8 + lane % 4 * 2 + c] = r.o[i][2 * half + c] / r.l[half];
        if (a.p.ret_ml && lane % 4 == 0) {
            a.p.ret_ml[2 * at] = r.m[half];
            a.p.ret_ml[2 * at + 1] = r.l[half];
        }
    }
}

template <int D> __global__ void __launch_bounds__(PREFILL_THREADS) attn_prefill_kernel(const struct prefill_args a)
{
    DYNAMIC_SHARED(uint16_t, shared);
    uint16_t *queries = shared, *tiles = queries + PREFILL_ROWS * (D + 8); /* [2][keys, values][64, D + 8] */
    const int warp = (int)threadIdx.x / 32, kv_head = (int)blockIdx.y, first_row = (int)blockIdx.x * PREFILL_ROWS, group = a.group;
    const int n_rows = a.n_rows - first_row < PREFILL_ROWS ? a.n_rows - first_row : PREFILL_ROWS;
    const uint16_t *k = a.p.k + kv_head * a.p.head_stride, *v = a.p.v + kv_head * a.p.head_stride;
    const int64_t end = a.p.pos0 + (first_row + n_rows - 1) / group + 1; /* behind the last key that any row sees */
    const int n_tiles = (int)((end + PREFILL_KEYS - 1) / PREFILL_KEYS);
    auto start = [&](int tile) {
        const int64_t first = (int64_t)tile * PREFILL_KEYS;
        const int n = end - first < PREFILL_KEYS ? (int)(end - first) : PREFILL_KEYS;
        uint16_t *to = tiles + tile % 2 * 2 * PREFILL_KEYS * (D + 8);
        attn_tile_copy<D>(to, k + first * D, n, PREFILL_KEYS);
        attn_tile_copy<D>(to + PREFILL_KEYS * (D + 8), v + first * D, n, PREFILL_KEYS);
    };
    attn_tile_round<D>(queries, n_rows, PREFILL_ROWS, [&](int row) {
        return a.p.q + ((int64_t)((first_row + row) / group) * a.p.n_heads + kv_head * group + (first_row + row) % group) * D;
    });
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
            const int64_t position = (int64_t)tile * PREFILL_KEYS + key;
            const int at = first_row + warp * 16 + row;
            if (position > a.p.pos0 + at / group)
                return -INFINITY;
            if (!a.bias.ab || at >= a.n_rows)
                return s;
            return bias_continue(a.bias.key, kv_head, a.bias.ab + ((int64_t)(at / group) * a.p.n_heads + kv_head * group + at % group) * BIAS_LD, position, s);
        });
        __syncthreads(); /* the next round copies over this tile */
    }
    copy_async_wait<0>();
    attn_tile_sum<D>(r);
    prefill_store<D>(a, r, first_row + warp * 16, kv_head);
}

template <int D> static int launch_prefill(struct stream *s, const struct prefill_args &a)
{
    const size_t shared = (size_t)(PREFILL_ROWS + 4 * PREFILL_KEYS) * (D + 8) * sizeof(uint16_t);
    const int r = cuda_error(cudaFuncSetAttribute((const void *)attn_prefill_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    if (r < 0)
        return r;
    return cuda_error(LAUNCH((attn_prefill_kernel<D>), dim3((unsigned)(a.n_rows + PREFILL_ROWS - 1) / PREFILL_ROWS, (unsigned)a.p.n_kv_heads), PREFILL_THREADS, shared, s->cuda, a));
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

extern "C" int cuda_attn_prefill(struct stream *s, const struct attn_prefill_params *p)
{
    if (p->n_q < 1 || p->n_q > BLOCK_TOKENS || p->pos0 < 0 || p->pos0 / BLOCK_TOKENS != (p->pos0 + p->n_q - 1) / BLOCK_TOKENS || p->n_kv_heads < 1 || p->n_heads < 1 ||
        p->n_heads % p->n_kv_heads != 0)
        return -EINVAL;
    if ((uintptr_t)p->k % 16 || (uintptr_t)p->v % 16 || p->head_stride % 8 || p->n_kv_heads > 65535)
        return -ENOTSUP;
    struct prefill_args a = {*p, p->n_heads / p->n_kv_heads, p->n_q * (p->n_heads / p->n_kv_heads), {}};
    a.p.bias = nullptr; /* host memory */
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
    return b->n_bias_pairs ? bias_rows_bytes((int64_t)BLOCK_TOKENS * b->n_heads) : 0;
}
