/* The parts of a matmul, one set an instruction set. All make the same chain for an output: fma over the columns in ascending order, from 0. */
#pragma once
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/weight_layout.h"
#include <stdbool.h>

enum {
    TILE_COLS = 256,                               /* columns of a panel that are expanded at a time; a multiple of 32 */
    TILE_ROWS_MAX = 512,                           /* rows of x in one task */
    PANEL_STRIDE = (TILE_COLS + 1) * PANEL_ROWS,   /* floats between two expanded panels; the odd line keeps them apart in the cache's sets */
    ACC_STRIDE = GROUP_ROWS,                       /* floats between the accumulators of two rows */
};

/* y[p][r] = x . row r of panel p, for one row x [n_cols] and the np panels of a group at `group`. y: [np, 16]. */
void ISA(matvec_group)(enum weight_dtype dtype, const uint8_t *group, int np, int64_t n_cols, const float *x, float *y);

/* Columns [col, col + n_cols) of panel p in fp32: [n_cols, 16], rounded up to whole runs of 32 columns. col is a multiple of 32. */
void ISA(weight_expand)(enum weight_dtype dtype, const uint8_t *group, int np, int p, int64_t col, int n_cols, float *panel);

/* acc[r][p] (ACC_STRIDE floats a row, 16 a panel) continues with x [n_rows, n_cols] (row stride ld_x) times np expanded panels, each PANEL_STRIDE floats after
 * the one before; `first`: it starts from 0. */
void ISA(matmul_tiles)(const float *x, int64_t ld_x, int n_rows, const float *panels, int np, int n_cols, bool first, float *acc);
