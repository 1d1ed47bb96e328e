/* Small fp32 products over panels of 16 columns: c[r][16 p + j] (+)= sum over k ascending of a[r][k] * b[p][k][j], one chain of fma for each output.
 * Attention uses it twice for each (query tile, block of keys): logits (k runs over the head dim, columns are keys) and output (k runs over keys,
 * columns are channels). Rows of `a` are broadcast, so an output depends on its own row and column only: blocking and row count cannot matter. */
#pragma once
#include "kernels/cpu/lanes.h"
#include <stdbool.h>

/* Accumulators of the full tile: 12 of 16 AVX2 registers, 24 of 32 AVX-512 registers. */
#if CPU_ISA_BUILD == 2
enum { PANEL_TILE_ROWS = 12, PANEL_TILE_COLS = 2 };
#else
enum { PANEL_TILE_ROWS = 6, PANEL_TILE_COLS = 1 };
#endif
enum { PANEL_MAX_COLS = 4 }; /* of a tile with few rows, so that enough chains run side by side */

struct panel_gemm {
    const float *a; /* [n_rows, n_k], row stride ld_a */
    int64_t ld_a;
    int n_rows;
    const float *b; /* [n_panels][n_k][16], panels `panel_stride` floats apart */
    int64_t panel_stride;
    int n_panels, n_k;
    float *c;       /* [n_rows, 16 n_panels], row stride ld_c */
    int64_t ld_c;
};

SPECIALIZE void panel_gemm_tile(const struct panel_gemm *g, int row, int panel, const int rows, const int cols, const bool accumulate)
{
    const float *a = g->a + row * g->ld_a, *b = g->b + panel * g->panel_stride;
    float *c = g->c + row * g->ld_c + panel * LANES;
    int64_t ld_a = g->ld_a, stride = g->panel_stride, ld_c = g->ld_c;
    v16 acc[PANEL_TILE_ROWS][PANEL_MAX_COLS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < cols; p++)
            acc[r][p] = accumulate ? v16_load(c + r * ld_c + p * LANES) : v16_zero();
    for (int k = 0; k < g->n_k; k++) {
        v16 column[PANEL_MAX_COLS];
        UNROLL for (int p = 0; p < cols; p++)
            column[p] = v16_load(b + p * stride + (int64_t)k * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            v16 x = v16_set1(a[r * ld_a + k]);
            UNROLL for (int p = 0; p < cols; p++)
                acc[r][p] = v16_fma(x, column[p], acc[r][p]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < cols; p++)
            v16_store(c + r * ld_c + p * LANES, acc[r][p]);
}

/* All rows of one group of panels. What a full tile leaves is done by tiles of 8, 4, 2 and 1 rows. */
SPECIALIZE void panel_gemm_column(const struct panel_gemm *g, int panel, const int cols, const bool accumulate)
{
    int row = 0;
    for (; row + PANEL_TILE_ROWS <= g->n_rows; row += PANEL_TILE_ROWS)
        panel_gemm_tile(g, row, panel, PANEL_TILE_ROWS, cols, accumulate);
    if (PANEL_TILE_ROWS > 8 && row + 8 <= g->n_rows) {
        panel_gemm_tile(g, row, panel, PANEL_TILE_ROWS > 8 ? 8 : 1, cols, accumulate);
        row += 8;
    }
    if (row + 4 <= g->n_rows) {
        panel_gemm_tile(g, row, panel, 4, cols, accumulate);
        row += 4;
    }
    if (row + 2 <= g->n_rows) {
        panel_gemm_tile(g, row, panel, 2, cols, accumulate);
        row += 2;
    }
    if (row < g->n_rows)
        panel_gemm_tile(g, row, panel, 1, cols, accumulate);
}

/* `accumulate`: the chains start from c instead of 0. */
SPECIALIZE void panel_gemm_run(const struct panel_gemm *g, const bool accumulate)
{
    int panel = 0;
    for (; panel + PANEL_TILE_COLS <= g->n_panels; panel += PANEL_TILE_COLS)
        panel_gemm_column(g, panel, PANEL_TILE_COLS, accumulate);
    for (; panel < g->n_panels; panel++)
        panel_gemm_column(g, panel, 1, accumulate);
}

/* The same without `accumulate` for a few rows, `rows` = n_rows, `cols` panels at a time. */
SPECIALIZE void panel_gemm_few(const struct panel_gemm *g, const int rows, const int cols)
{
    int panel = 0;
    for (; panel + cols <= g->n_panels; panel += cols)
        panel_gemm_tile(g, 0, panel, rows, cols, false);
    for (; panel < g->n_panels; panel++)
        panel_gemm_tile(g, 0, panel, rows, 1, false);
}
