/* One row times a matrix, the GEMM of a decode step: bound by reading the weights, so these are expanded in registers. An output is one chain of fma over the
 * columns; four panels at a time (four or eight chains) hide its latency. */
#include "kernels/cpu/dequant.h"
#include "kernels/cpu/matmul_private.h"

/* Columns beyond the last whole run of 32; only the float formats have them. */
ALWAYS_INLINE v16 matvec_tail(const enum weight_dtype dtype, const struct dequant *q, int n, const float *x, v16 acc)
{
    for (int c = 0; c < n; c++) {
        struct dequant column = *q;
        column.low += (size_t)c * (size_t)(weight_formats[dtype].low / RUN_COLS);
        acc = v16_fma(v16_set1(x[c]), dequant_value(dtype, &column, 0, 0), acc);
    }
    return acc;
}

/* Panels p0 .. p0 + P - 1 of a group of np. */
ALWAYS_INLINE void matvec_panels(const enum weight_dtype dtype, const int P, const uint8_t *group, int np, int p0, int64_t n_cols, const float *x, float *y)
{
    v16 acc[GROUP_PANELS];
    struct dequant q[GROUP_PANELS];
    int64_t runs = n_cols / RUN_COLS;
    int tail = (int)(n_cols % RUN_COLS);
    UNROLL for (int p = 0; p < P; p++)
        acc[p] = v16_zero();
    for (int64_t run = 0; run < runs; run++, x += RUN_COLS) {
        UNROLL for (int p = 0; p < P; p++)
            q[p] = dequant_open(dtype, group, np, p0 + p, run);
        for (int j = 0; j < 4; j++) {
            if (j == 2)
                UNROLL for (int p = 0; p < P; p++)
                    dequant_second_half(dtype, &q[p]);
            UNROLL for (int i = 0; i < 8; i++)
                UNROLL for (int p = 0; p < P; p++)
                    acc[p] = v16_fma(v16_set1(x[8 * j + i]), dequant_value(dtype, &q[p], j, i), acc[p]);
        }
    }
    UNROLL for (int p = 0; p < P; p++) {
        if (tail) {
            q[p] = dequant_open(dtype, group, np, p0 + p, runs);
            acc[p] = matvec_tail(dtype, &q[p], tail, x, acc[p]);
        }
        v16_store(y + p * PANEL_ROWS, acc[p]);
    }
}

ALWAYS_INLINE void matvec_any(const enum weight_dtype dtype, const uint8_t *group, int np, int64_t n_cols, const float *x, float *y)
{
    if (np == GROUP_PANELS) {
        matvec_panels(dtype, GROUP_PANELS, group, GROUP_PANELS, 0, n_cols, x, y);
        return;
    }
    for (int p = 0; p < np; p++)
        matvec_panels(dtype, 1, group, np, p, n_cols, x, y + p * PANEL_ROWS);
}

#define MATVEC(D)                                                                                                                                    \
    static void matvec_##D(const uint8_t *group, int np, int64_t n_cols, const float *x, float *y)                                                   \
    {                                                                                                                                                \
        matvec_any(WEIGHT_##D, group, np, n_cols, x, y);                                                                                             \
    }
DEQUANT_EACH_DTYPE(MATVEC)

void ISA(matvec_group)(enum weight_dtype dtype, const uint8_t *group, int np, int64_t n_cols, const float *x, float *y)
{
#define ENTRY(D) [WEIGHT_##D] = matvec_##D,
    static void (*const fns[WEIGHT_DTYPE_COUNT])(const uint8_t *, int, int64_t, const float *, float *) = {DEQUANT_EACH_DTYPE(ENTRY)};
    fns[dtype](group, np, n_cols, x, y);
}
