/* table[i][j] = (cos, sin)(positions[i] * inv_freq[j]) * factor. Angles and series in double, rounded to fp32 once, so that every build and every libm gives the same
 * bits. Reduction: x - n * pi/2 with pi/2 in a part of 33 bits, whose product with n < 2^20 is exact, and a remainder: good for angles below 1.6 million. Series: Taylor
 * on [-pi/4, pi/4]; the first term left out is below 1e-17. */
#include "kernels/cpu/ops.h"
#include <errno.h>

struct rope_table_args {
    const double *inv_freq;
    const int32_t *positions;
    float *table;
    double factor;
    int n_freq;
};

static double sin_series(double x)
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

static double cos_series(double x)
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

static void cos_sin(double x, double *ret_cos, double *ret_sin)
{
    /* Adding and taking away 1.5 * 2^52 rounds to the nearest integer. */
    const double magic = 0x1.8p52, n = (x * 0x1.45f306dc9c883p-1 + magic) - magic;
    const double r = (x - n * 0x1.921fb544p+0) - n * 0x1.0b4611a626331p-34;
    const double c = cos_series(r), s = sin_series(r);
    switch ((int64_t)n & 3) {
    case 0: *ret_cos = c, *ret_sin = s; break;
    case 1: *ret_cos = -s, *ret_sin = c; break;
    case 2: *ret_cos = -c, *ret_sin = -s; break;
    default: *ret_cos = s, *ret_sin = -c; break;
    }
}

static void rope_table_row(void *arg, int64_t i, int thread)
{
    const struct rope_table_args *a = arg;
    float *row = a->table + i * a->n_freq * 2;
    (void)thread;
    for (int j = 0; j < a->n_freq; j++) {
        double c, s;
        cos_sin((double)a->positions[i] * a->inv_freq[j], &c, &s);
        row[2 * j] = (float)(c * a->factor);
        row[2 * j + 1] = (float)(s * a->factor);
    }
}

int ISA(rope_table)(struct stream *s, const double *inv_freq, int n_freq, double factor, const int32_t *positions, int n, float *table)
{
    if (n < 0 || n_freq < 1)
        return -EINVAL;
    struct rope_table_args args = {.inv_freq = inv_freq, .positions = positions, .table = table, .factor = factor, .n_freq = n_freq};
    cpu_run(s, n, rope_table_row, &args);
    return 0;
}
