/* y[i] = row ids[i] of a packed matrix (bf16, cuda_weight_ld columns apart); an element a thread. */
#include "kernels/cuda/elementwise.cuh"
#include <errno.h>

__global__ void embed_kernel(const bf16_t *rows, int64_t ld, const int32_t *ids, int n, int64_t n_cols, float *y)
{
    EACH_ELEMENT(i, n * n_cols)
    {
        y[i] = bf16_to_float(rows[ids[i / n_cols] * ld + i % n_cols]);
    }
}

/* ids are host memory. */
extern "C" int cuda_embed(struct stream *s, const struct weight *w, const int32_t *ids, int n, float *y)
{
    const void *ids_device;
    if (n < 0 || (unsigned)w->dtype >= WEIGHT_DTYPE_COUNT)
        return -EINVAL;
    for (int i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= w->n_rows)
            return -EINVAL;
    if (n == 0)
        return 0;
    const int r = stream_args(s, ids, sizeof *ids * (size_t)n, &ids_device);
    if (r < 0)
        return r;
    return cuda_error(LAUNCH(embed_kernel, blocks_for(n * w->n_cols), BLOCK_THREADS, 0, s->cuda, (const bf16_t *)w->packed, cuda_weight_ld(w->n_cols), (const int32_t *)ids_device, n,
                             w->n_cols, y));
}
