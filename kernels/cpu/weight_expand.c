/* Weights of a panel in fp32, for the tiles of matmul_tiles.c (once for up to 512 rows, into a buffer that the second-level cache holds) and for embed.c. */
#include "kernels/cpu/dequant.h"
#include "kernels/cpu/matmul_private.h"

/* The last run of a float matrix is filled up with zeros in memory, so that whole runs may be expanded; a tile reads n_cols of them. */
ALWAYS_INLINE void expand_panel(const enum weight_dtype dtype, const uint8_t *group, int np, int p, int64_t run, int n_runs, float *out)
{
    for (int i = 0; i < n_runs; i++, out += RUN_COLS * PANEL_ROWS) {
        struct dequant q = dequant_open(dtype, group, np, p, run + i);
        for (int j = 0; j < 4; j++) {
            if (j == 2)
                dequant_second_half(dtype, &q);
            UNROLL for (int c = 0; c < 8; c++)
                v16_store(out + (8 * j + c) * PANEL_ROWS, dequant_value(dtype, &q, j, c));
        }
    }
}

#define EXPAND(D)                                                                                                                                    \
    static void expand_##D(const uint8_t *group, int np, int p, int64_t run, int n_runs, float *out)                                                \
    {                                                                                                                                                \
        expand_panel(WEIGHT_##D, group, np, p, run, n_runs, out);                                                                                    \
    }
DEQUANT_EACH_DTYPE(EXPAND)

void ISA(weight_expand)(enum weight_dtype dtype, const uint8_t *group, int np, int p, int64_t col, int n_cols, float *panel)
{
#define ENTRY(D) [WEIGHT_##D] = expand_##D,
    static void (*const fns[WEIGHT_DTYPE_COUNT])(const uint8_t *, int, int, int64_t, int, float *) = {DEQUANT_EACH_DTYPE(ENTRY)};
    fns[dtype](group, np, p, col / RUN_COLS, (n_cols + RUN_COLS - 1) / RUN_COLS, panel);
}
