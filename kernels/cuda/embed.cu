/* y[i] = row ids[i] of a packed matrix (bf16, cuda_weight_ld columns apart; in the stored form the file's rows, rounded to bf16 all the same); an element a thread. */
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/weight_stored.h"
#include "kernels/cuda/weight_value.cuh"
#include <errno.h>

__global__ void embed_kernel(const bf16_t *rows, int64_t ld, const int32_t *ids, int n, int64_t n_cols, float *y)
{
    EACH_ELEMENT(i, n * n_cols)
    {
        y[i] = bf16_to_float(rows[ids[i / n_cols] * ld + i % n_cols]);
    }
}

__global__ void embed_stored_kernel(enum weight_dtype dtype, struct weight_file_block file, const uint8_t *rows, const int32_t *ids, int n, int64_t n_cols, float *y)
{
    EACH_ELEMENT(i, n * n_cols)
    {
        const int64_t c = i % n_cols;
        const uint8_t *block = rows + (ids[i / n_cols] * (n_cols / file.cols) + c / file.cols) * file.bytes;
        y[i] = bf16_to_float(bf16_from_float(weight_value(dtype, block, (int)(c % file.cols))));
    }
}

/* ids are host memory; ret_ids is their copy on the device. */
static int check_ids(struct stream *s, const struct weight *w, const int32_t *ids, int n, const int32_t **ret_ids)
{
    const void *ids_device;
    if (n < 0 || (unsigned)w->dtype >= WEIGHT_DTYPE_COUNT)
        return -EINVAL;
    for (int i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= w->n_rows)
            return -EINVAL;
    const int r = n == 0 ? 0 : stream_args(s, ids, sizeof *ids * (size_t)n, &ids_device);
    if (r == 0 && n > 0)
        *ret_ids = (const int32_t *)ids_device;
    return r;
}

extern "C" int cuda_embed(struct stream *s, const struct weight *w, const int32_t *ids, int n, float *y)
{
    const int32_t *ids_device;
    const int r = check_ids(s, w, ids, n, &ids_device);
    if (r < 0 || n == 0)
        return r;
    return LAUNCH(embed_kernel, blocks_for(n * w->n_cols), BLOCK_THREADS, 0, s, (const bf16_t *)w->packed, cuda_weight_ld(w->n_cols), ids_device, n, w->n_cols, y);
}

extern "C" int cuda_stored_embed(struct stream *s, const struct weight *w, const int32_t *ids, int n, float *y)
{
    const int32_t *ids_device;
    if ((unsigned)w->dtype < WEIGHT_DTYPE_COUNT && !cuda_weight_stays(w->dtype))
        return cuda_embed(s, w, ids, n, y);
    const int r = check_ids(s, w, ids, n, &ids_device);
    if (r < 0 || n == 0)
        return r;
    return LAUNCH(embed_stored_kernel, blocks_for(n * w->n_cols), BLOCK_THREADS, 0, s, w->dtype, weight_file_block_of(w->dtype), (const uint8_t *)w->packed, ids_device, n,
                             w->n_cols, y);
}
