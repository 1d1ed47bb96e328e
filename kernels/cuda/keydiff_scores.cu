/* KeyDiff: how far each key points away from the mean direction of all keys of its KV head. u = k / max(|k|, 1e-12); anchor = sum of u, made a unit vector; score = -(u . anchor).
 *
 * Three kernels: sums of u over segments of 1,024 keys (a block of eight warps each, a warp a key, a lane every 32nd dim), the anchor from them, scores. The anchor's sum has a fixed
 * order of its own. Partial sums lie in the op's scratch. */
#include "kernels/cuda/elementwise.cuh"
#include <errno.h>

enum { KEYDIFF_MAX_DIM = 256, LANE_DIMS = KEYDIFF_MAX_DIM / 32, KEYDIFF_SEGMENT = 1024, KEYDIFF_WARPS = 8 };

struct keydiff_args {
    struct keydiff_params p;
    int64_t n_segments;
    float *parts;  /* [n_kv_heads, n_segments, d] */
    float *anchor; /* [n_kv_heads, d] */
};

DEVICE float unit_scale(float sum_of_squares)
{
    const float length = sqrtf(sum_of_squares);
    return 1.0f / (length > 1e-12f ? length : 1e-12f);
}

/* u of one key by a warp: dims lane, lane + 32, ... */
DEVICE void unit_key(const bf16_t *key, int d, float u[LANE_DIMS])
{
    const int lane = (int)threadIdx.x % 32;
    float sum = 0;
    UNROLL for (int i = 0; i < LANE_DIMS; i++) {
        u[i] = lane + 32 * i < d ? bf16_to_float(key[lane + 32 * i]) : 0.0f;
        sum = fmaf(u[i], u[i], sum);
    }
    const float scale = unit_scale(warp_sum(sum));
    UNROLL for (int i = 0; i < LANE_DIMS; i++)
        u[i] *= scale;
}

__global__ void __launch_bounds__(KEYDIFF_WARPS * 32) keydiff_parts_kernel(const struct keydiff_args a)
{
    __shared__ float part[KEYDIFF_WARPS][KEYDIFF_MAX_DIM];
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, d = a.p.head_dim;
    const int64_t start = (int64_t)blockIdx.x * KEYDIFF_SEGMENT, end = start + KEYDIFF_SEGMENT < a.p.n_keys ? start + KEYDIFF_SEGMENT : a.p.n_keys;
    const bf16_t *keys = a.p.k + blockIdx.y * a.p.head_stride;
    float sum[LANE_DIMS] = {}, u[LANE_DIMS];
    for (int64_t i = start + warp; i < end; i += KEYDIFF_WARPS) {
        unit_key(keys + i * d, d, u);
        UNROLL for (int j = 0; j < LANE_DIMS; j++)
            sum[j] += u[j];
    }
    UNROLL for (int j = 0; j < LANE_DIMS; j++)
        part[warp][lane + 32 * j] = sum[j];
    __syncthreads();
    for (int c = (int)threadIdx.x; c < d; c += KEYDIFF_WARPS * 32) {
        float total = 0;
        for (int w = 0; w < KEYDIFF_WARPS; w++)
            total += part[w][c];
        a.parts[((int64_t)blockIdx.y * a.n_segments + blockIdx.x) * d + c] = total;
    }
}

/* A KV head a block, a dim a thread. */
__global__ void __launch_bounds__(KEYDIFF_MAX_DIM) keydiff_anchor_kernel(const struct keydiff_args a)
{
    __shared__ float part[32];
    const int c = (int)threadIdx.x, d = a.p.head_dim;
    float sum = 0;
    for (int64_t i = 0; c < d && i < a.n_segments; i++)
        sum += a.parts[((int64_t)blockIdx.x * a.n_segments + i) * d + c];
    const float scale = unit_scale(block_sum(sum * sum, part));
    if (c < d)
        a.anchor[(int64_t)blockIdx.x * d + c] = sum * scale;
}

__global__ void __launch_bounds__(KEYDIFF_WARPS * 32) keydiff_scores_kernel(const struct keydiff_args a)
{
    const int lane = (int)threadIdx.x % 32, d = a.p.head_dim;
    const int64_t i = a.p.first + (int64_t)blockIdx.x * KEYDIFF_WARPS + threadIdx.x / 32;
    float u[LANE_DIMS], sum = 0;
    if (i >= a.p.last)
        return;
    unit_key(a.p.k + blockIdx.y * a.p.head_stride + i * d, d, u);
    UNROLL for (int j = 0; j < LANE_DIMS; j++)
        sum = fmaf(u[j], lane + 32 * j < d ? a.anchor[(int64_t)blockIdx.y * d + lane + 32 * j] : 0.0f, sum);
    sum = warp_sum(sum);
    if (lane == 0)
        a.p.scores[(int64_t)blockIdx.y * (a.p.last - a.p.first) + i - a.p.first] = -sum;
}

static size_t parts_bytes(int n_kv_heads, int64_t n_keys, int head_dim)
{
    return (size_t)n_kv_heads * (size_t)(ceil_div64(n_keys, KEYDIFF_SEGMENT) + 1) * (size_t)head_dim * sizeof(float);
}

extern "C" size_t cuda_keydiff_scores_scratch(const struct op_bounds *b)
{
    return parts_bytes(b->n_kv_heads, b->n_keys, b->head_dim);
}

extern "C" int cuda_keydiff_scores(struct stream *s, const struct keydiff_params *p)
{
    void *scratch;
    if (p->n_kv_heads < 1 || p->first < 0 || p->first >= p->last || p->last > p->n_keys)
        return -EINVAL;
    const int64_t n_segments = ceil_div64(p->n_keys, KEYDIFF_SEGMENT);
    if (p->head_dim < 16 || p->head_dim > KEYDIFF_MAX_DIM || p->head_dim % 16 != 0 || p->n_kv_heads > 65535)
        return -ENOTSUP;
    int r = stream_temp(s, parts_bytes(p->n_kv_heads, p->n_keys, p->head_dim), &scratch);
    if (r < 0)
        return r;
    float *parts = (float *)scratch;
    const struct keydiff_args a = {*p, n_segments, parts, parts + p->n_kv_heads * n_segments * p->head_dim};
    const unsigned heads = (unsigned)p->n_kv_heads;
    r = LAUNCH(keydiff_parts_kernel, dim3((unsigned)n_segments, heads), KEYDIFF_WARPS * 32, 0, s, a);
    if (r == 0)
        r = LAUNCH(keydiff_anchor_kernel, heads, KEYDIFF_MAX_DIM, 0, s, a);
    if (r == 0)
        r = LAUNCH(keydiff_scores_kernel, dim3((unsigned)ceil_div64(p->last - p->first, KEYDIFF_WARPS), heads), KEYDIFF_WARPS * 32, 0, s, a);
    return stream_temp_end(s, r);
}
