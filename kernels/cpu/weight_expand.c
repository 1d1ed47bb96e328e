/* Weights of panels in fp32, for the tiles of matmul_tiles.c (once for up to 512 rows, into a buffer that the second-level cache holds) and for embed.c. */
#include "kernels/cpu/dequant.h"
#include "kernels/cpu/matmul_private.h"

/* The last run of a float matrix is filled up with zeros in memory, so that whole runs may be expanded; a tile reads no more than n_cols of them. */
ALWAYS_INLINE void expand_run(const enum weight_dtype dtype, const uint8_t *group, int np, int p, int64_t run, float *out)
{
    struct dequant q = dequant_open(dtype, group, np, p, run);
    for (int j = 0; j < 4; j++) {
        if (j == 2)
            dequant_second_half(dtype, &q);
        dequant_prefetch(dtype, group, np, run, 4 * p + j);
        UNROLL for (int i = 0; i < 8; i++)
            v16_store(out + (8 * j + i) * PANEL_ROWS, dequant_value(dtype, &q, j, i));
    }
}

ALWAYS_INLINE void expand_any(const enum weight_dtype dtype, const uint8_t *group, int np, int64_t run, int n_runs, float *panels)
{
    for (int i = 0; i < n_runs; i++)
        for (int p = 0; p < np; p++)
            expand_run(dtype, group, np, p, run + i, panels + p * PANEL_STRIDE + i * RUN_COLS * PANEL_ROWS);
}

#define EXPAND(D)                                                                                                                                    \
    static void expand_##D(const uint8_t *group, int np, int64_t run, int n_runs, float *panels)                                                     \
    {                                                                                                                                                \
        expand_any(WEIGHT_##D, group, np, run, n_runs, panels);                                                                                      \
    }
DEQUANT_EACH_DTYPE(EXPAND)

void ISA(weight_expand)(enum weight_dtype dtype, const uint8_t *group, int np, int64_t col, int n_cols, float *panels)
{
#define ENTRY(D) [WEIGHT_##D] = expand_##D,
    static void (*const fns[WEIGHT_DTYPE_COUNT])(const uint8_t *, int, int64_t, int, float *) = {DEQUANT_EACH_DTYPE(ENTRY)};
    fns[dtype](group, np, col / RUN_COLS, (n_cols + RUN_COLS - 1) / RUN_COLS, panels);
}
