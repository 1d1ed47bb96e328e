/* table[i][j] = (cos, sin)(positions[i] * inv_freq[j]) * factor, in double (kernels/rope_angle.h): the bits of kernels/cpu/rope_table.c. An angle a thread. */
#include "kernels/cuda/elementwise.cuh"
#include "kernels/rope_angle.h"
#include <errno.h>

__global__ void rope_table_kernel(const double *inv_freq, int n_freq, double factor, const int32_t *positions, int n, float *table)
{
    EACH_ELEMENT(i, (int64_t)n * n_freq)
    {
        double cosine, sine;
        rope_cos_sin((double)positions[i / n_freq] * inv_freq[i % n_freq], &cosine, &sine);
        table[2 * i] = (float)(cosine * factor);
        table[2 * i + 1] = (float)(sine * factor);
    }
}

/* inv_freq and positions are host memory. */
extern "C" int cuda_rope_table(struct stream *s, const double *inv_freq, int n_freq, double factor, const int32_t *positions, int n, float *table)
{
    const void *freq_device, *positions_device;
    if (n < 0 || n_freq < 1)
        return -EINVAL;
    if (n == 0)
        return 0;
    int r = stream_args(s, inv_freq, sizeof *inv_freq * (size_t)n_freq, &freq_device);
    if (r == 0)
        r = stream_args(s, positions, sizeof *positions * (size_t)n, &positions_device);
    if (r < 0)
        return r;
    return LAUNCH(rope_table_kernel, blocks_for((int64_t)n * n_freq), BLOCK_THREADS, 0, s, (const double *)freq_device, n_freq, factor,
                             (const int32_t *)positions_device, n, table);
}
