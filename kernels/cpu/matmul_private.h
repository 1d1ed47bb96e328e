/* The parts of a matmul, one set an instruction set. All make the same chain for an output: fma over the columns in ascending order, from 0. */
#pragma once
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/weight_layout.h"
#include <stdbool.h>

/* Rows of x up to which weights are expanded in registers instead of in panels; chosen by measurement. */
#if CPU_ISA_BUILD == 2
enum { DIRECT_ROWS = 4 };
#elif CPU_ISA_BUILD == 1
enum { DIRECT_ROWS = 3 };
#else
enum { DIRECT_ROWS = 1 };
#endif

enum {
    TILE_COLS = 256,                             /* columns of a panel that are expanded at a time; a multiple of 32 */
    TILE_COLS_FEW = 32,                          /* the same for up to TILE_ROWS_FEW rows: panels that the first-level cache holds */
    TILE_ROWS_FEW = 32,
    TILE_ROWS_MAX = 512,                         /* rows of x in one task */
    TASK_GROUPS = 2,                             /* groups of a weight in one task, at most */
    PANEL_STRIDE = (TILE_COLS + 1) * PANEL_ROWS, /* floats between two expanded panels; the odd line keeps them apart in the cache's sets */
    ACC_STRIDE = TASK_GROUPS * GROUP_ROWS,       /* floats between the accumulators of two rows */
};

/* acc[r][p] (ACC_STRIDE floats a row, 16 a panel) = rows [0, n_rows) of x (row stride ld_x) times the np panels of a group; 1 <= n_rows <= DIRECT_ROWS. */
void ISA(matmul_direct)(enum weight_dtype dtype, const uint8_t *group, int np, int64_t n_cols, const float *x, int64_t ld_x, int n_rows, float *acc);

/* Columns [col, col + n_cols), rounded up to whole runs of 32, of a group's panels in fp32: [n_cols, 16] each, PANEL_STRIDE apart. col is a multiple of 32. */
void ISA(weight_expand)(enum weight_dtype dtype, const uint8_t *group, int np, int64_t col, int n_cols, float *panels);

/* acc[r][p] (ACC_STRIDE floats a row, 16 a panel) continues with x [n_rows, n_cols] (row stride ld_x) times np expanded panels, each PANEL_STRIDE floats after
 * the one before; `first`: it starts from 0. */
void ISA(matmul_tiles)(const float *x, int64_t ld_x, int n_rows, const float *panels, int np, int n_cols, bool first, float *acc);
