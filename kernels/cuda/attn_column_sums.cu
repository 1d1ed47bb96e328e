/* What each key got from the queries of one block (H2O): the weights of attn_prefill once more, from its (m, l), added to the sums of the calls before. A block has 64 keys of one KV head and
 * goes over all queries of the group's heads: grid [key tiles, n_kv_heads].
 * bf16 operands; the order of a sum is fixed but not the CPU's chain. Head dims 32, 64, 80, 96, 128; k on 16 bytes. */
#include "kernels/cuda/attn_bias.cuh"
#include "kernels/cuda/attn_columns.cuh"
#include <errno.h>

struct column_args {
    struct attn_prefill_params p;
    float *sums;
    int64_t sum_stride;
    int group;
    struct attn_bias bias; /* rows [n_q, n_heads] */
};

template <int D> __global__ void __launch_bounds__(COLUMN_THREADS) attn_column_sums_kernel(const struct column_args a)
{
    DYNAMIC_SHARED(struct columns_shared<D>, shared);
    const int kv_head = (int)blockIdx.y, warp = (int)threadIdx.x / 32;
    const int64_t first_key = (int64_t)blockIdx.x * COLUMN_KEYS, n_keys = a.p.pos0 + a.p.n_q;
    const int n = n_keys - first_key < COLUMN_KEYS ? (int)(n_keys - first_key) : COLUMN_KEYS;
    const int64_t own = a.p.pos0 / BLOCK_TOKENS * BLOCK_TOKENS;
    float sums[COLUMN_KEYS / 8][2] = {};
    attn_tile_copy<D>(shared->keys, a.p.own_k && first_key >= own ? a.p.own_k + kv_head * a.p.own_stride + (first_key - own) * D : a.p.k + kv_head * a.p.head_stride + first_key * D, n,
                      COLUMN_KEYS);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    for (int h = kv_head * a.group; h < (kv_head + 1) * a.group; h++)
        for (int first = warp * 16; first < a.p.n_q; first += COLUMN_WARPS * 16) {
            float s[COLUMN_KEYS / 8][4];
            column_strip<D>(shared->strips[warp], a.p.q + h * D, (int64_t)a.p.n_heads * D, first, a.p.n_q);
            column_logits<D>(shared->strips[warp], shared->keys, a.p.scale, first, [&](int query, int key, float logit) {
                if (query >= a.p.n_q || first_key + key > a.p.pos0 + query)
                    return -INFINITY;
                return a.bias.ab ? bias_continue(a.bias.key, kv_head, a.bias.ab + ((int64_t)query * a.p.n_heads + h) * BIAS_LD, first_key + key, logit) : logit;
            }, s);
            column_add(s, first, [&](int query) {
                const float *ml = a.p.ret_ml + 2 * ((int64_t)(query < a.p.n_q ? query : 0) * a.p.n_heads + h);
                return make_float2(ml[0], 1.0f / ml[1]);
            }, sums);
        }
    const float total = column_total<D>(shared, sums);
    if ((int)threadIdx.x < n) { /* keys of this call's own queries begin at 0 */
        float *to = a.sums + kv_head * a.sum_stride + first_key + threadIdx.x;
        *to = (first_key + (int)threadIdx.x < a.p.pos0 ? *to : 0.0f) + total;
    }
}

template <int D> static int launch(struct stream *s, const struct column_args &a)
{
    const size_t shared = sizeof(struct columns_shared<D>);
    const int r = submit_shared_bytes(s, attn_column_sums_kernel<D>, shared);
    if (r < 0)
        return r;
    return LAUNCH((attn_column_sums_kernel<D>), dim3((unsigned)ceil_div64(a.p.pos0 + a.p.n_q, COLUMN_KEYS), (unsigned)a.p.n_kv_heads), COLUMN_THREADS, shared, s, a);
}

static int launch_any(struct stream *s, const struct column_args &a)
{
    COLUMNS_EACH_DIM(a.p.head_dim, launch, s, a)
}

extern "C" int cuda_attn_column_sums(struct stream *s, const struct column_sum_params *p)
{
    const struct attn_prefill_params *q = p->attn;
    if (q->n_q < 1 || q->pos0 < 0 || q->pos0 / BLOCK_TOKENS != (q->pos0 + q->n_q - 1) / BLOCK_TOKENS || q->n_kv_heads < 1 || q->n_heads < 1 || q->n_heads % q->n_kv_heads != 0 || !q->ret_ml || p->sum_stride < q->pos0 + q->n_q)
        return -EINVAL;
    if ((uintptr_t)q->k % 16 || q->head_stride % 8 || (uintptr_t)q->own_k % 16 || q->own_stride % 8 || q->n_kv_heads > 65535)
        return -ENOTSUP;
    struct column_args a = {*q, p->sums, p->sum_stride, q->n_heads / q->n_kv_heads, {}};
    a.p.bias = nullptr; /* host memory */
    if (!q->bias)
        return launch_any(s, a);
    void *ab;
    int r = stream_temp(s, bias_rows_bytes((int64_t)q->n_q * q->n_heads), &ab);
    if (r < 0)
        return r;
    a.bias.key = *q->bias;
    a.bias.ab = (float *)ab;
    r = bias_rows(s, a.bias, q->q, q->n_q, q->n_heads, a.group, q->head_dim, q->scale);
    return stream_temp_end(s, r < 0 ? r : launch_any(s, a));
}
