/* Partials (m, l, o) of the same rows to one, by their log-sum-exp, in the order of the parts, rounded to bf16: a warp a row, a lane every 32nd dim. Memory-bound. */
#include "kernels/cuda/attn_merge.cuh"
#include "kernels/cuda/elementwise.cuh"

enum { MERGE_WARPS = 4 };

__global__ void __launch_bounds__(MERGE_WARPS * 32) attn_merge_kernel(const struct attn_merge_params p)
{
    const int64_t row = (int64_t)blockIdx.x * MERGE_WARPS + threadIdx.x / 32;
    const int lane = (int)threadIdx.x % 32;
    if (row >= p.n_rows)
        return;
    float max = -INFINITY, sum = 0;
    for (int i = 0; i < p.n_parts; i++)
        max = fmaxf(max, p.ml[2 * (i * p.n_rows + row)]);
    for (int i = 0; i < p.n_parts; i++)
        sum = fmaf(p.ml[2 * (i * p.n_rows + row) + 1], merge_weight(p.ml[2 * (i * p.n_rows + row)], max), sum);
    for (int c = lane; c < p.d; c += 32) {
        float o = 0;
        for (int i = 0; i < p.n_parts; i++) {
            const float *ml = p.ml + 2 * (i * p.n_rows + row);
            if (ml[1] > 0)
                o = fmaf(p.o[(i * p.n_rows + row) * p.d + c], merge_weight(ml[0], max), o);
        }
        p.out[row * p.d + c] = bf16_from_float(o / sum);
    }
    if (p.ret_ml && lane == 0) {
        p.ret_ml[2 * row] = max;
        p.ret_ml[2 * row + 1] = sum;
    }
}

int attn_merge(struct stream *s, const struct attn_merge_params *p)
{
    return LAUNCH(attn_merge_kernel, (unsigned)ceil_div64(p->n_rows, MERGE_WARPS), MERGE_WARPS * 32, 0, s, *p);
}

__global__ void attn_round_kernel(const float *q, int64_t n, bf16_t *out)
{
    EACH_ELEMENT(i, n)
    {
        out[i] = bf16_from_float(q[i]);
    }
}

int attn_round_queries(struct stream *s, const float *q, int64_t n, bf16_t *out)
{
    return LAUNCH(attn_round_kernel, blocks_for(n), BLOCK_THREADS, 0, s, q, n, out);
}
