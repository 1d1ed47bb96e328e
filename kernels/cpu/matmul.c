/* y_i = x W_i^T for up to four weights over the same x, in one fork-join. A task is one or two groups of a weight (32 rows each) for a range of rows of x: a few rows go through
 * matmul_direct.c, more through panels that are expanded once for the range. Both make the same chain for an output, so neither the path nor the split can be seen in
 * the result. */
#include "kernels/cpu/matmul_private.h"
#include "kernels/cpu/ops.h"
#include <errno.h>
#include <stdbool.h>

enum { OUTS_MAX = 4 };

/* How the work is cut. */
struct matmul_split {
    int unit_groups;    /* groups of a weight in a task, 1 or TASK_GROUPS */
    int64_t n_units;    /* of all weights */
    int64_t n_ranges;   /* of rows of x */
    int64_t range_rows; /* rows in a range */
};

struct matmul_args {
    struct stream *s;
    const float *x;
    int64_t n, ld_x, n_cols;
    const struct matmul_out *outs;
    int n_outs;
    struct matmul_split split;
};

/* A task's part of the result. */
struct matmul_part {
    const struct matmul_out *out;
    int64_t group;       /* of the weight; the first one */
    int n_groups;
    int64_t row, n_rows; /* of x */
};

_Static_assert(sizeof(float) * (TASK_GROUPS * GROUP_PANELS * PANEL_STRIDE + TILE_ROWS_MAX * ACC_STRIDE) <= CPU_SCRATCH_BYTES, "panels and accumulators of a task");

static int64_t units_of(const struct weight *w, int unit_groups)
{
    return (weight_n_groups(w->n_rows) + unit_groups - 1) / unit_groups;
}

/* Tasks are claimed one by one, in ascending order. Numbering the units so that neighbours in that order lie a span apart makes each of n_threads threads walk
 * through adjacent memory, which is what prefetching likes. */
static int64_t unit_of_task(int64_t task, int64_t n_units, int64_t n_threads)
{
    int64_t thread = task % n_threads, larger = n_units % n_threads;
    return thread * (n_units / n_threads) + (thread < larger ? thread : larger) + task / n_threads;
}

static struct matmul_part part_find(const struct matmul_args *a, int64_t task)
{
    const struct matmul_split *split = &a->split;
    int64_t unit = unit_of_task(task % split->n_units, split->n_units, cpu_threads(a->s)), row = task / split->n_units * split->range_rows;
    const struct matmul_out *out = a->outs;
    for (; unit >= units_of(out->w, split->unit_groups); out++)
        unit -= units_of(out->w, split->unit_groups);
    int64_t group = unit * split->unit_groups, groups_left = weight_n_groups(out->w->n_rows) - group;
    return (struct matmul_part){
        .out = out,
        .group = group,
        .n_groups = groups_left < split->unit_groups ? (int)groups_left : split->unit_groups,
        .row = row,
        .n_rows = a->n - row < split->range_rows ? a->n - row : split->range_rows,
    };
}

static const uint8_t *part_group(const struct matmul_part *part, int g)
{
    const struct weight *w = part->out->w;
    return (const uint8_t *)w->packed + weight_group_offset(&weight_formats[w->dtype], w->n_cols, part->group + g);
}

/* Chain, then bias, then residual: n columns of one panel. */
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
    int64_t begin = part->group * GROUP_ROWS, end = begin + part->n_groups * GROUP_ROWS;
    if (end > out->w->n_rows)
        end = out->w->n_rows;
    for (int64_t r = 0; r < part->n_rows; r++, acc += ACC_STRIDE)
        for (int64_t col = begin; col < end; col += PANEL_ROWS) {
            int64_t at = (part->row + r) * out->ld_y + col;
            int n = end - col < PANEL_ROWS ? (int)(end - col) : PANEL_ROWS;
            panel_finish(acc + (col - begin), out->bias ? out->bias + col : NULL, out->residual ? out->residual + at : NULL, n, out->y + at);
        }
}

static void part_direct(const struct matmul_args *a, const struct matmul_part *part, const float *x, float *acc)
{
    const struct weight *w = part->out->w;
    for (int g = 0; g < part->n_groups; g++)
        ISA(matmul_direct)(w->dtype, part_group(part, g), weight_group_panels(w->n_rows, part->group + g), a->n_cols, x, a->ld_x, (int)part->n_rows,
                           acc + g * GROUP_ROWS);
}

static void part_tiles(const struct matmul_args *a, const struct matmul_part *part, const float *x, float *panels, float *acc)
{
    const struct weight *w = part->out->w;
    int tile_cols = part->n_rows <= TILE_ROWS_FEW ? TILE_COLS_FEW : TILE_COLS;
    for (int64_t col = 0; col < a->n_cols; col += tile_cols) {
        int n = a->n_cols - col < tile_cols ? (int)(a->n_cols - col) : tile_cols, np = 0;
        for (int g = 0; g < part->n_groups; g++) {
            int group_np = weight_group_panels(w->n_rows, part->group + g);
            ISA(weight_expand)(w->dtype, part_group(part, g), group_np, col, n, panels + np * PANEL_STRIDE);
            np += group_np;
        }
        ISA(matmul_tiles)(x + col, a->ld_x, (int)part->n_rows, panels, np, n, col == 0, acc);
    }
}

static void matmul_task(void *arg, int64_t task, int thread)
{
    const struct matmul_args *a = arg;
    struct matmul_part part = part_find(a, task);
    float *panels = cpu_scratch(a->s, thread), *acc = panels + TASK_GROUPS * GROUP_PANELS * PANEL_STRIDE;
    const float *x = a->x + part.row * a->ld_x;
    if (part.n_rows <= DIRECT_ROWS)
        part_direct(a, &part, x, acc);
    else
        part_tiles(a, &part, x, panels, acc);
    part_finish(&part, acc);
}

/* True when the threads, each taking one task after the other, are idle for less than a sixteenth of the time. */
static bool split_is_even(const struct matmul_split *split, int64_t n_groups, int n_threads)
{
    int64_t n_tasks = split->n_units * split->n_ranges, rounds = (n_tasks + n_threads - 1) / n_threads;
    return rounds * n_threads * split->unit_groups * 15 <= n_groups * split->n_ranges * 16;
}

/* The coarsest split that keeps all threads busy. Panels expanded for fewer than 64 rows, where there are more, would cost more than an idle thread. */
static struct matmul_split split_choose(const struct matmul_args *a, int n_threads)
{
    enum { RANGE_ROWS_MIN = 64 };
    struct matmul_split split = {.unit_groups = TASK_GROUPS};
    int64_t n_groups = 0, ranges_min = (a->n + TILE_ROWS_MAX - 1) / TILE_ROWS_MAX;
    for (int i = 0; i < a->n_outs; i++)
        n_groups += weight_n_groups(a->outs[i].w->n_rows);
    for (;; split.unit_groups /= 2) {
        split.n_units = 0;
        for (int i = 0; i < a->n_outs; i++)
            split.n_units += units_of(a->outs[i].w, split.unit_groups);
        for (int64_t r = ranges_min; r == ranges_min || (r <= 2 * n_threads * ranges_min && a->n / r >= RANGE_ROWS_MIN); r++) {
            split.range_rows = (a->n + r - 1) / r;
            split.n_ranges = (a->n + split.range_rows - 1) / split.range_rows;
            if (split_is_even(&split, n_groups, n_threads))
                return split;
        }
        if (split.unit_groups == 1)
            return split;
    }
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

int ISA(matmul)(struct stream *s, const void *x, int64_t n, int64_t ld_x, const struct matmul_out *outs, int n_outs)
{
    struct matmul_args a = {.s = s, .x = x, .n = n, .ld_x = ld_x, .outs = outs, .n_outs = n_outs, .n_cols = n_outs > 0 ? outs[0].w->n_cols : 0};
    if (!outs_are_valid(&a))
        return -EINVAL;
    if (n == 0)
        return 0;
    a.split = split_choose(&a, cpu_threads(s));
    cpu_run(s, a.split.n_units * a.split.n_ranges, matmul_task, &a);
    return 0;
}
