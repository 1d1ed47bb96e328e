/* A few rows times a matrix, the GEMM of a decode step: bound by reading the weights, so these are expanded in registers and used at once. An output is one chain of
 * fma over the columns; chains go side by side, so that with the instructions that expand the latency of fma is hidden.
 *
 * For one row a Q4_1 weight costs two fma and about two more instructions per 16 rows: 0.7 ns with AVX-512 and 0.8 ns with AVX2 on a Zen 4 core at 3.7 GHz, which
 * is 12 to 14 GB/s of weights a core; Q8_0 reads 22 GB/s. */
#include "kernels/cpu/dequant.h"
#include "kernels/cpu/matmul_private.h"

/* Panels in registers at the same time. AVX2 has 16 registers: one row takes two panels (accumulators, minima and scales fill 12), more rows one. */
#if CPU_ISA_BUILD == 2
#define PANELS_AT_ONCE(rows) 2
#elif CPU_ISA_BUILD == 1
#define PANELS_AT_ONCE(rows) ((rows) == 1 ? 2 : 1)
#else
#define PANELS_AT_ONCE(rows) 1
#endif

struct direct_args {
    const uint8_t *group;
    int np; /* panels of the group */
    int64_t n_cols, ld_x;
    const float *x;
    float *acc;
};

/* 32 columns of P panels from panel p0 on for R rows. The accumulators rest in memory between two such pieces. */
ALWAYS_INLINE void direct_run(const enum weight_dtype dtype, const int R, const int P, const struct direct_args *a, int np, int p0, int64_t run)
{
    const float *x = a->x + run * RUN_COLS;
    float *acc = a->acc + p0 * PANEL_ROWS;
    v16 c[DIRECT_ROWS][GROUP_PANELS], b[DIRECT_ROWS];
    struct dequant q[GROUP_PANELS];
    UNROLL for (int p = 0; p < P; p++) {
        q[p] = dequant_open(dtype, a->group, np, p0 + p, run);
        UNROLL for (int r = 0; r < R; r++)
            c[r][p] = v16_load(acc + r * ACC_STRIDE + p * PANEL_ROWS);
    }
    for (int j = 0; j < 4; j++) {
        UNROLL for (int p = 0; p < P; p++) {
            if (j == 2)
                dequant_second_half(dtype, &q[p]);
            dequant_prefetch(dtype, a->group, np, run, P * j + p + 4 * p0);
        }
        UNROLL for (int i = 0; i < 8; i++) {
            UNROLL for (int r = 0; r < R; r++)
                b[r] = v16_set1(x[r * a->ld_x + 8 * j + i]);
            UNROLL for (int p = 0; p < P; p++) {
                v16 w = dequant_value(dtype, &q[p], j, i);
                UNROLL for (int r = 0; r < R; r++)
                    c[r][p] = v16_fma(b[r], w, c[r][p]);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int p = 0; p < P; p++)
            v16_store(acc + r * ACC_STRIDE + p * PANEL_ROWS, c[r][p]);
}

/* Columns beyond the last whole run of 32, one panel; only the float formats have them. */
ALWAYS_INLINE void direct_tail(const enum weight_dtype dtype, const int R, const struct direct_args *a, int p)
{
    int64_t run = a->n_cols / RUN_COLS;
    struct dequant q = dequant_open(dtype, a->group, a->np, p, run);
    for (int64_t c = run * RUN_COLS; c < a->n_cols; c++) {
        v16 w = dequant_value(dtype, &q, 0, 0);
        for (int r = 0; r < R; r++) {
            float *acc = a->acc + r * ACC_STRIDE + p * PANEL_ROWS;
            v16_store(acc, v16_fma(v16_set1(a->x[r * a->ld_x + c]), w, v16_load(acc)));
        }
        q.low += weight_formats[dtype].low / RUN_COLS;
    }
}

ALWAYS_INLINE void direct_group(const enum weight_dtype dtype, const int R, const struct direct_args *a)
{
    const int at_once = PANELS_AT_ONCE(R);
    for (int r = 0; r < R; r++)
        for (int p = 0; p < a->np; p++)
            v16_store(a->acc + r * ACC_STRIDE + p * PANEL_ROWS, v16_zero());
    for (int64_t run = 0; run < a->n_cols / RUN_COLS; run++) {
        if (a->np == GROUP_PANELS)
            for (int p = 0; p < GROUP_PANELS; p += at_once)
                direct_run(dtype, R, at_once, a, GROUP_PANELS, p, run);
        else
            direct_run(dtype, R, 1, a, 1, 0, run);
    }
    for (int p = 0; p < a->np && a->n_cols % RUN_COLS; p++)
        direct_tail(dtype, R, a, p);
}

#define DIRECT(D, R)                                                                                                                                 \
    static void direct_##D##_##R(const struct direct_args *a)                                                                                        \
    {                                                                                                                                                \
        direct_group(WEIGHT_##D, R, a);                                                                                                              \
    }
#define ENTRY(D, R) [WEIGHT_##D][R] = direct_##D##_##R,
#if CPU_ISA_BUILD == 2
#define EACH_ROWS(X, D) X(D, 1) X(D, 2) X(D, 3) X(D, 4)
#elif CPU_ISA_BUILD == 1
#define EACH_ROWS(X, D) X(D, 1) X(D, 2) X(D, 3)
#else
#define EACH_ROWS(X, D) X(D, 1)
#endif
#define EACH_DIRECT(D) EACH_ROWS(DIRECT, D)
#define EACH_ENTRY(D) EACH_ROWS(ENTRY, D)

DEQUANT_EACH_DTYPE(EACH_DIRECT)

void ISA(matmul_direct)(enum weight_dtype dtype, const uint8_t *group, int np, int64_t n_cols, const float *x, int64_t ld_x, int n_rows, float *acc)
{
    static void (*const fns[WEIGHT_DTYPE_COUNT][DIRECT_ROWS + 1])(const struct direct_args *) = {DEQUANT_EACH_DTYPE(EACH_ENTRY)};
    struct direct_args args = {.group = group, .np = np, .n_cols = n_cols, .ld_x = ld_x, .x = x, .acc = acc};
    fns[dtype][n_rows](&args);
}
