/* The tile: R rows of x times P expanded panels, R * P accumulators in registers. For each column one vector a panel and one broadcast a row are loaded, for
 * R * P fma: AVX2 takes 6 rows x 1 panel (12 of 16 registers), AVX-512 12 x 2 (24 of 32). Fewer rows take more panels, so that eight chains or more hide the
 * latency of fma. */
#include "kernels/cpu/matmul_private.h"
#include <stdbool.h>

#if CPU_ISA_BUILD == 2
enum { R_MAX = 12, P_MAX = 4 };
#define TILE_EACH_SHAPE(X) X(1, 4) X(2, 4) X(3, 4) X(4, 4) X(5, 4) X(6, 4) X(7, 2) X(8, 2) X(9, 2) X(10, 2) X(11, 2) X(12, 2)
#elif CPU_ISA_BUILD == 1
enum { R_MAX = 6, P_MAX = 4 };
#define TILE_EACH_SHAPE(X) X(1, 4) X(2, 2) X(3, 2) X(4, 1) X(5, 1) X(6, 1)
#else
enum { R_MAX = 4, P_MAX = 1 };
#define TILE_EACH_SHAPE(X) X(1, 1) X(2, 1) X(3, 1) X(4, 1)
#endif

struct tile_args {
    const float *x, *panels;
    float *acc;
    int64_t ld_x;
    int n_cols;
    bool first;
};

ALWAYS_INLINE void tile(const int R, const int P, const struct tile_args *t)
{
    const float *x = t->x, *panels = t->panels;
    int64_t ld_x = t->ld_x;
    v16 c[R_MAX][P_MAX], w[P_MAX];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int p = 0; p < P; p++)
            c[r][p] = t->first ? v16_zero() : v16_load(t->acc + r * ACC_STRIDE + p * PANEL_ROWS);
    for (int k = t->n_cols; k > 0; k--, x++, panels += PANEL_ROWS) {
        UNROLL for (int p = 0; p < P; p++)
            w[p] = v16_load(panels + p * PANEL_STRIDE);
        UNROLL for (int r = 0; r < R; r++) {
            v16 a = v16_set1(x[r * ld_x]);
            UNROLL for (int p = 0; p < P; p++)
                c[r][p] = v16_fma(a, w[p], c[r][p]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int p = 0; p < P; p++)
            v16_store(t->acc + r * ACC_STRIDE + p * PANEL_ROWS, c[r][p]);
}

#define TILE(R, P)                                                                                                                                   \
    static void tile_##R(const struct tile_args *t)                                                                                                  \
    {                                                                                                                                                \
        tile(R, P, t);                                                                                                                               \
    }                                                                                                                                                \
    static void tile_##R##_single(const struct tile_args *t)                                                                                         \
    {                                                                                                                                                \
        tile(R, 1, t);                                                                                                                               \
    }
TILE_EACH_SHAPE(TILE)

struct tile_shape {
    int n_panels;
    void (*fn)(const struct tile_args *t);     /* n_panels at once */
    void (*single)(const struct tile_args *t); /* one panel, for what is left of a group */
};

#define ENTRY(R, P) [R] = {.n_panels = P, .fn = tile_##R, .single = tile_##R##_single},
static const struct tile_shape shapes[R_MAX + 1] = {TILE_EACH_SHAPE(ENTRY)};

static void tile_panels(const struct tile_shape *shape, struct tile_args t, int np)
{
    int p = 0;
    for (; p + shape->n_panels <= np; p += shape->n_panels) {
        shape->fn(&t);
        t.panels += shape->n_panels * PANEL_STRIDE;
        t.acc += shape->n_panels * PANEL_ROWS;
    }
    for (; p < np; p++) {
        shape->single(&t);
        t.panels += PANEL_STRIDE;
        t.acc += PANEL_ROWS;
    }
}

void ISA(matmul_tiles)(const float *x, int64_t ld_x, int n_rows, const float *panels, int np, int n_cols, bool first, float *acc)
{
    /* Tiles of nearly equal height: 8 rows are 4 + 4 rather than 6 + 2. */
    int n_tiles = (n_rows + R_MAX - 1) / R_MAX;
    for (int i = 0, row = 0; i < n_tiles; i++) {
        int rows = (n_rows - row + n_tiles - i - 1) / (n_tiles - i);
        struct tile_args t = {.x = x + row * ld_x, .panels = panels, .acc = acc + row * ACC_STRIDE, .ld_x = ld_x, .n_cols = n_cols, .first = first};
        tile_panels(&shapes[rows], t, np);
        row += rows;
    }
}
