/* RoPE of queries and keys, then Hadamard/sqrt(b) in blocks of b, the largest power of two that divides head_dim; K and V to bf16. The bits of kernels/cpu/qkv_finish.c.
 *
 * A block is one head of one token, a thread one dim: grid [n, n_heads + 2 n_kv_heads] (queries, keys, values). Each distance of the butterflies is one exchange, by shuffles inside a warp, and
 * beyond through shared memory, two buffers in turn. Shared memory: 2 d floats. */
#include "kernels/cuda/elementwise.cuh"
#include <errno.h>

enum { QKV_MAX_DIM = 256 };

/* Dim c of a head after RoPE; 0 from d on. By whole warps. */
DEVICE float rope_value(const float *x, const float *rope, enum rope_style style, int d, int c)
{
    const bool interleaved = style == ROPE_INTERLEAVED, there = c < d, second = interleaved ? c % 2 : c >= d / 2;
    const int pair = interleaved ? c / 2 : second ? c - d / 2 : c;
    const float own = there ? x[c] : 0.0f, next = __shfl_xor_sync(0xFFFFFFFFu, own, 1);
    if (!there)
        return 0.0f;
    const float other = interleaved ? next : x[second ? pair : pair + d / 2], x0 = second ? other : own, x1 = second ? own : other;
    const float2 angle = reinterpret_cast<const float2 *>(rope)[pair]; /* cosine, sine */
    return second ? fmaf(x0, angle.y, x1 * angle.x) : fmaf(x0, angle.x, -(x1 * angle.y));
}

__global__ void __launch_bounds__(QKV_MAX_DIM) qkv_finish_kernel(float *q, const float *k, const float *v, const float *rope, enum rope_style style, const struct kv_dst *dst, int n_heads,
                                                                  int n_kv_heads, int d)
{
    __shared__ float x[2][QKV_MAX_DIM];
    const int64_t token = blockIdx.x;
    const int head = (int)blockIdx.y, c = (int)threadIdx.x, block = d & -d;
    if (head >= n_heads + n_kv_heads) {
        const int h = head - n_heads - n_kv_heads;
        if (c < d)
            dst[token].v[h * dst[token].head_stride + c] = bf16_from_float(v[(token * n_kv_heads + h) * d + c]);
        return;
    }
    const int kv_head = head - n_heads;
    const float *from = kv_head < 0 ? q + (token * n_heads + head) * d : k + (token * n_kv_heads + kv_head) * d;
    float value = rope_value(from, rope + token * d, style, d, c);
    int side = 0;
    for (int h = 1; h < 32 && h < block; h *= 2) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, value, h);
        value = c & h ? other - value : value + other;
    }
    if (block <= 32)
        __syncthreads(); /* the whole head has been read: it is written next */
    for (int h = 32; h < block; h *= 2, side ^= 1) {
        x[side][c] = value;
        __syncthreads(); /* the other side was read before this barrier, so that writing it next is safe */
        const float other = x[side][c ^ h];
        value = c & h ? other - value : value + other;
    }
    value *= 1.0f / sqrtf((float)block);
    if (c < d && kv_head < 0)
        q[(token * n_heads + head) * d + c] = value; /* of this block alone, and every thread has read it before the first barrier */
    else if (c < d)
        dst[token].k[kv_head * dst[token].head_stride + c] = bf16_from_float(value);
}

/* dst is host memory and names device memory. */
extern "C" int cuda_qkv_finish(struct stream *s, const struct qkv_params *p)
{
    const void *dst;
    if (p->n < 0 || p->n_heads < 1 || p->n_kv_heads < 1)
        return -EINVAL;
    if (p->head_dim < 16 || p->head_dim > QKV_MAX_DIM || p->head_dim % 16 != 0 || p->n_heads + 2 * p->n_kv_heads > 65535 || (uintptr_t)p->rope % sizeof(float2))
        return -ENOTSUP;
    if (p->n == 0)
        return 0;
    const int r = stream_args(s, p->dst, sizeof *p->dst * (size_t)p->n, &dst);
    if (r < 0)
        return r;
    const unsigned threads = (unsigned)(p->head_dim + 31) / 32 * 32;
    return LAUNCH(qkv_finish_kernel, dim3((unsigned)p->n, (unsigned)(p->n_heads + 2 * p->n_kv_heads)), threads, 0, s, p->q, p->k, p->v, p->rope, p->style,
                             (const struct kv_dst *)dst, p->n_heads, p->n_kv_heads, p->head_dim);
}
