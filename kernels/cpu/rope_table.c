/* table[i][j] = (cos, sin)(positions[i] * inv_freq[j]) * factor, in double (kernels/rope_angle.h) and rounded to fp32 once. */
#include "kernels/cpu/ops.h"
#include "kernels/rope_angle.h"
#include <errno.h>

struct rope_table_args {
    const double *inv_freq;
    const int32_t *positions;
    float *table;
    double factor;
    int n_freq;
};

static void rope_table_row(void *arg, int64_t i, int thread)
{
    const struct rope_table_args *a = arg;
    float *row = a->table + i * a->n_freq * 2;
    (void)thread;
    for (int j = 0; j < a->n_freq; j++) {
        double c, s;
        rope_cos_sin((double)a->positions[i] * a->inv_freq[j], &c, &s);
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
