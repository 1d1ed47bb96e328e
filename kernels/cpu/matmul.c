/* y_i = x W_i^T for up to four weights over the same x, in one fork-join. A task is one group (64 rows of a weight) for a range of rows of x: a few rows
 * go through matmul_direct.c, more through panels that are expanded once for the range. Both make the same chain for an output, so neither the path nor the split
 * can be seen in the result. */
#include "kernels/cpu/matmul_private.h"
#include "kernels/cpu/ops.h"
#include <errno.h>
#include <stdbool.h>

enum { OUTS_MAX = 4 };

struct matmul_args {
    struct stream *s;
    const float *x;
    int64_t n, ld_x, n_cols;
    const struct matmul_out *outs;
    int n_outs;
    int64_t n_groups;   /* of all weights */
    int64_t range_rows; /* rows of x in a task */
};

/* A task's part of the result. */
struct matmul_part {
    const struct matmul_out *out;
    int64_t group;       /* of the weight */
    const uint8_t *packed;
    int np;
    int64_t row, n_rows; /* of x */
};

_Static_assert(sizeof(float) * (GROUP_PANELS * PANEL_STRIDE + TILE_ROWS_MAX * ACC_STRIDE) <= CPU_SCRATCH_BYTES, "panels and accumulators of a task");

/* Tasks are claimed one by one, in ascending order. Numbering the groups so that neighbours in that order lie a span apart makes each of n_threads threads walk
 * through adjacent groups, which is what prefetching likes. */
static int64_t group_of_task(int64_t task, int64_t n_groups, int64_t n_threads)
{
    int64_t thread = task % n_threads, larger = n_groups % n_threads;
    return thread * (n_groups / n_threads) + (thread < larger ? thread : larger) + task / n_threads;
}

static struct matmul_part part_find(const struct matmul_args *a, int64_t task)
{
    int64_t group = group_of_task(task % a->n_groups, a->n_groups, cpu_threads(a->s)), row = task / a->n_groups * a->range_rows;
    const struct matmul_out *out = a->outs;
    while (group >= weight_n_groups(out->w->n_rows)) {
        group -= weight_n_groups(out->w->n_rows);
        out++;
    }
    const struct weight *w = out->w;
    return (struct matmul_part){
        .out = out,
        .group = group,
        .packed = (const uint8_t *)w->packed + weight_group_offset(&weight_formats[w->dtype], w->n_cols, group),
        .np = weight_group_panels(w->n_rows, group),
        .row = row,
        .n_rows = a->n - row < a->range_rows ? a->n - row : a->range_rows,
    };
}

/* Chain, then bias, then residual; `y` columns [0, n) of one panel. */
static void panel_finish(const float *acc, const float *bias, const float *residual, int n, float *y)
{
    v16 v = v16_load(acc);
    if (bias)
        v = v16_add(v, v16_load_n(bias, n));
    if (residual)
        v = v16_add(v, v16_load_n(residual, n));
    v16_store_n(y, v, n);
}

static void part_finish(const struct matmul_part *part, const float *acc)
{
    const struct matmul_out *out = part->out;
    int64_t col0 = part->group * GROUP_ROWS, n_left = out->w->n_rows - col0;
    for (int64_t r = 0; r < part->n_rows; r++) {
        int64_t at = (part->row + r) * out->ld_y + col0;
        for (int p = 0; p < part->np; p++) {
            int64_t col = p * PANEL_ROWS;
            int n = n_left - col < PANEL_ROWS ? (int)(n_left - col) : PANEL_ROWS;
            panel_finish(acc + r * ACC_STRIDE + col, out->bias ? out->bias + col0 + col : NULL, out->residual ? out->residual + at + col : NULL, n,
                         out->y + at + col);
        }
    }
}

static void part_tiles(const struct matmul_args *a, const struct matmul_part *part, const float *x, float *panels, float *acc)
{
    int tile_cols = part->n_rows <= TILE_ROWS_FEW ? TILE_COLS_FEW : TILE_COLS;
    struct expand_range range = {.p1 = part->np};
    for (; range.col < a->n_cols; range.col += tile_cols) {
        range.n_cols = a->n_cols - range.col < tile_cols ? (int)(a->n_cols - range.col) : tile_cols;
        ISA(weight_expand)(part->out->w->dtype, part->packed, part->np, &range, panels);
        ISA(matmul_tiles)(x + range.col, a->ld_x, (int)part->n_rows, panels, part->np, range.n_cols, range.col == 0, acc);
    }
}

static void matmul_task(void *arg, int64_t task, int thread)
{
    const struct matmul_args *a = arg;
    struct matmul_part part = part_find(a, task);
    float *panels = cpu_scratch(a->s, thread), *acc = panels + GROUP_PANELS * PANEL_STRIDE;
    const float *x = a->x + part.row * a->ld_x;
    if (part.n_rows <= DIRECT_ROWS)
        ISA(matmul_direct)(part.out->w->dtype, part.packed, part.np, a->n_cols, x, a->ld_x, (int)part.n_rows, acc);
    else
        part_tiles(a, &part, x, panels, acc);
    part_finish(&part, acc);
}

/* Rows of x in a task: as many as the accumulators hold, fewer where that leaves too few tasks to keep the threads evenly busy. Expanding for fewer than
 * 64 rows would cost more than the imbalance. */
static int64_t range_rows_choose(int64_t n, int64_t n_groups, int n_threads)
{
    enum { ROWS_MIN = 64, TASKS_PER_THREAD = 8 };
    int64_t ranges = (n + TILE_ROWS_MAX - 1) / TILE_ROWS_MAX;
    while (n_threads > 1 && n_groups * ranges < (int64_t)n_threads * TASKS_PER_THREAD && n / (ranges + 1) >= ROWS_MIN)
        ranges++;
    return (n + ranges - 1) / ranges;
}

static bool outs_are_valid(const struct matmul_args *a)
{
    if (a->n_outs < 1 || a->n_outs > OUTS_MAX || a->n < 0)
        return false;
    for (int i = 0; i < a->n_outs; i++) {
        const struct matmul_out *out = &a->outs[i];
        if (out->w->n_cols != a->n_cols || out->ld_y < out->w->n_rows || (unsigned)out->w->dtype >= WEIGHT_DTYPE_COUNT)
            return false;
    }
    return a->ld_x >= a->n_cols;
}

int ISA(matmul)(struct stream *s, const float *x, int64_t n, int64_t ld_x, const struct matmul_out *outs, int n_outs)
{
    struct matmul_args a = {.s = s, .x = x, .n = n, .ld_x = ld_x, .outs = outs, .n_outs = n_outs, .n_cols = n_outs > 0 ? outs[0].w->n_cols : 0};
    if (!outs_are_valid(&a))
        return -EINVAL;
    if (n == 0)
        return 0;
    for (int i = 0; i < n_outs; i++)
        a.n_groups += weight_n_groups(outs[i].w->n_rows);
    a.range_rows = range_rows_choose(n, a.n_groups, cpu_threads(s));
    cpu_run(s, a.n_groups * ((n + a.range_rows - 1) / a.range_rows), matmul_task, &a);
    return 0;
}
