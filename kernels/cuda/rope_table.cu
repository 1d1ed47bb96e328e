/* table[i][j] = (cos, sin)(positions[i] * inv_freq[j]) * factor, angles and series in double: the bits of kernels/cpu/rope_table.c, whose head comment has the
 * mathematics. An angle a thread. */
#include "kernels/cuda/elementwise.cuh"
#include <errno.h>

DEVICE double sin_series(double x)
{
    const double z = x * x;
    double p = 1.0 / 355687428096000.0; /* 1 / 17! */
    p = p * z - 1.0 / 1307674368000.0;
    p = p * z + 1.0 / 6227020800.0;
    p = p * z - 1.0 / 39916800.0;
    p = p * z + 1.0 / 362880.0;
    p = p * z - 1.0 / 5040.0;
    p = p * z + 1.0 / 120.0;
    p = p * z - 1.0 / 6.0;
    return x + x * z * p;
}

DEVICE double cos_series(double x)
{
    const double z = x * x;
    double p = 1.0 / 20922789888000.0; /* 1 / 16! */
    p = p * z - 1.0 / 87178291200.0;
    p = p * z + 1.0 / 479001600.0;
    p = p * z - 1.0 / 3628800.0;
    p = p * z + 1.0 / 40320.0;
    p = p * z - 1.0 / 720.0;
    p = p * z + 1.0 / 24.0;
    p = p * z - 1.0 / 2.0;
    return 1.0 + z * p;
}

__global__ void rope_table_kernel(const double *inv_freq, int n_freq, double factor, const int32_t *positions, int n, float *table)
{
    EACH_ELEMENT(i, (int64_t)n * n_freq)
    {
        const double x = (double)positions[i / n_freq] * inv_freq[i % n_freq];
        const double magic = 0x1.8p52, turns = (x * 0x1.45f306dc9c883p-1 + magic) - magic;
        const double r = (x - turns * 0x1.921fb544p+0) - turns * 0x1.0b4611a626331p-34;
        const double c = cos_series(r), s = sin_series(r);
        const int quadrant = (int)((int64_t)turns & 3);
        const double cosine = quadrant == 0 ? c : quadrant == 1 ? -s : quadrant == 2 ? -c : s;
        const double sine = quadrant == 0 ? s : quadrant == 1 ? c : quadrant == 2 ? -s : -c;
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
    return cuda_error(LAUNCH(rope_table_kernel, blocks_for((int64_t)n * n_freq), BLOCK_THREADS, 0, s->cuda, (const double *)freq_device, n_freq, factor,
                             (const int32_t *)positions_device, n, table));
}
