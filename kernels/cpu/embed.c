/* Rows of a packed matrix in fp32, one a task. A group holds 32 rows side by side, so all of them are expanded and one is taken: 32 times the arithmetic, and still
 * little beside the layers. */
#include "kernels/cpu/matmul_private.h"
#include "kernels/cpu/ops.h"
#include <errno.h>

struct embed_args {
    struct stream *s;
    const struct weight *w;
    const int32_t *ids;
    float *y;
};

static void embed_row(void *arg, int64_t i, int thread)
{
    const struct embed_args *a = arg;
    const struct weight *w = a->w;
    int64_t row = a->ids[i], group = row / GROUP_ROWS;
    const uint8_t *packed = (const uint8_t *)w->packed + weight_group_offset(&weight_formats[w->dtype], w->n_cols, group);
    int np = weight_group_panels(w->n_rows, group), p = (int)(row % GROUP_ROWS / PANEL_ROWS), lane = (int)(row % PANEL_ROWS);
    float *panels = cpu_scratch(a->s, thread), *y = a->y + i * w->n_cols;
    for (int64_t col = 0; col < w->n_cols; col += TILE_COLS) {
        int n = w->n_cols - col < TILE_COLS ? (int)(w->n_cols - col) : TILE_COLS;
        ISA(weight_expand)(w->dtype, packed, np, col, n, panels);
        for (int c = 0; c < n; c++)
            y[col + c] = panels[p * PANEL_STRIDE + c * PANEL_ROWS + lane];
    }
}

int ISA(embed)(struct stream *s, const struct weight *w, const int32_t *ids, int n, float *y)
{
    if (n < 0 || (unsigned)w->dtype >= WEIGHT_DTYPE_COUNT)
        return -EINVAL;
    for (int i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= w->n_rows)
            return -EINVAL;
    struct embed_args args = {.s = s, .w = w, .ids = ids, .y = y};
    cpu_run(s, n, embed_row, &args);
    return 0;
}
