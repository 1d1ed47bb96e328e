/* How a weight matrix lies in memory once it is packed for the CPU.
 *
 * 16 rows are a panel: a vector holds one column of it. Two panels are a group, whose blocks alternate, so that a decode step that works on two panels at once (it
 * must, to hide the latency of its chains) reads one ascending stream. The last group of a matrix may have one panel; rows beyond the matrix are zeros.
 *
 *   packed  = [group 0][group 1] ...
 *   group   = [block 0][block 1] ...                      a block is 32 columns (256 for the K formats) of np panels
 *   block   = [scales a][scales b][run 0][run 1] ...      a run is 32 columns: one in a block, or eight
 *   run     = [sub-scales][low][high]                     each part for all the panels
 *
 *   low:  4-bit formats   uint32 [4][16]   32 columns of 16 rows: word [j][r] has columns 8j..8j+7 of row r, the first in its low nibble
 *         Q8_0            int8 [32][16];  F32, F16, BF16: the values, [32][16] (columns beyond the matrix are zeros)
 *   high: Q5_0, Q5_K      uint32 [16]      the fifth bits of 32 columns, column c at bit c
 *         Q6_K            uint32 [2][16]   the upper two bits, columns 16j..16j+15 in word j, two bits each
 *   scales a: d, fp16 [16]; scales b: m (Q4_1) or dmin (K formats), fp16 [16]
 *   sub-scales: Q4_K, Q5_K: uint8 sc[16], then uint8 m[16], of 32 columns; Q6_K: int8 sc[16] of 16 columns
 *
 * Values (what every version computes, to the bit; d, dmin, sc and m are exact in fp32, and so are their products):
 *   Q4_0 fma(q, d, -8d)   Q4_1 fma(q, d, m)   Q5_0 fma(q, d, -16d)   Q8_0 q * d
 *   Q4_K, Q5_K fma(q, d * sc, -(dmin * m))    Q6_K fma(q, d * sc, -32 * (d * sc))
 *
 * Source of the stored formats: the GGUF specification and ggml-quants. */
#pragma once
#include "kernels/kernels.h"
#include <stddef.h>
#include <stdint.h>

enum { PANEL_ROWS = 16, GROUP_PANELS = 2, GROUP_ROWS = PANEL_ROWS * GROUP_PANELS, RUN_COLS = 32 };
/* Vector loads may read this far beyond the last part of a matrix. */
enum { WEIGHT_TAIL_BYTES = 64 };

struct weight_format {
    int file_cols;  /* columns of a block in the file, which n_cols is a multiple of */
    int file_bytes; /* of that block in one row */
    int block_cols; /* columns of a packed block: 32 or 256 */
    /* Bytes for one panel: of 32 columns (low, high, sub-scales) or of the whole block (a, b). */
    int low, high, scale_a, scale_b, sub;
};

static const struct weight_format weight_formats[WEIGHT_DTYPE_COUNT] = {
    [WEIGHT_F32] = {.file_cols = 1, .file_bytes = 4, .block_cols = 32, .low = 2048},
    [WEIGHT_F16] = {.file_cols = 1, .file_bytes = 2, .block_cols = 32, .low = 1024},
    [WEIGHT_BF16] = {.file_cols = 1, .file_bytes = 2, .block_cols = 32, .low = 1024},
    [WEIGHT_Q8_0] = {.file_cols = 32, .file_bytes = 34, .block_cols = 32, .low = 512, .scale_a = 32},
    [WEIGHT_Q4_0] = {.file_cols = 32, .file_bytes = 18, .block_cols = 32, .low = 256, .scale_a = 32},
    [WEIGHT_Q4_1] = {.file_cols = 32, .file_bytes = 20, .block_cols = 32, .low = 256, .scale_a = 32, .scale_b = 32},
    [WEIGHT_Q5_0] = {.file_cols = 32, .file_bytes = 22, .block_cols = 32, .low = 256, .high = 64, .scale_a = 32},
    [WEIGHT_Q4_K] = {.file_cols = 256, .file_bytes = 144, .block_cols = 256, .low = 256, .scale_a = 32, .scale_b = 32, .sub = 32},
    [WEIGHT_Q5_K] = {.file_cols = 256, .file_bytes = 176, .block_cols = 256, .low = 256, .high = 64, .scale_a = 32, .scale_b = 32, .sub = 32},
    [WEIGHT_Q6_K] = {.file_cols = 256, .file_bytes = 210, .block_cols = 256, .low = 256, .high = 128, .scale_a = 32, .sub = 32},
};

/* Where the parts of 32 columns of one panel are: bytes from the start of the group. */
struct weight_run {
    int64_t low, high, scale_a, scale_b, sub;
};

/* Runs of 32 columns in a packed block. */
static inline int weight_block_runs(const struct weight_format *f)
{
    return f->block_cols / RUN_COLS;
}

static inline int64_t weight_n_blocks(const struct weight_format *f, int64_t n_cols)
{
    return (n_cols + f->block_cols - 1) / f->block_cols;
}

/* Of one panel. */
static inline int64_t weight_block_bytes(const struct weight_format *f)
{
    return (int64_t)weight_block_runs(f) * (f->low + f->high + f->sub) + f->scale_a + f->scale_b;
}

static inline int64_t weight_n_panels(int64_t n_rows)
{
    return (n_rows + PANEL_ROWS - 1) / PANEL_ROWS;
}

static inline int64_t weight_n_groups(int64_t n_rows)
{
    return (n_rows + GROUP_ROWS - 1) / GROUP_ROWS;
}

/* Panels of a group: 2, or 1 in the last one. */
static inline int weight_group_panels(int64_t n_rows, int64_t group)
{
    int64_t left = weight_n_panels(n_rows) - group * GROUP_PANELS;
    return left < GROUP_PANELS ? (int)left : GROUP_PANELS;
}

/* Bytes from the start of the matrix. */
static inline int64_t weight_group_offset(const struct weight_format *f, int64_t n_cols, int64_t group)
{
    return group * GROUP_PANELS * weight_n_blocks(f, n_cols) * weight_block_bytes(f);
}

/* The run `run` (counted from the matrix's first column) of panel `p` in a group of np panels. With np, p and f constant this folds to a few additions. */
static inline __attribute__((always_inline)) struct weight_run weight_run_at(const struct weight_format *f, int np, int p, int64_t run)
{
    int runs = weight_block_runs(f);
    int64_t at = run / runs * np * weight_block_bytes(f);
    struct weight_run r;
    r.scale_a = at + p * f->scale_a;
    at += np * f->scale_a;
    r.scale_b = at + p * f->scale_b;
    at += np * f->scale_b + run % runs * np * (f->sub + f->low + f->high);
    r.sub = at + p * f->sub;
    at += np * f->sub;
    r.low = at + p * f->low;
    at += np * f->low;
    r.high = at + p * f->high;
    return r;
}
