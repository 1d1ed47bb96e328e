/* A partial of decode attention over bf16 rows [n, d] (the fast tier). Keys are transposed in registers to panels of 16 keys (kv_expand.h), so that a logit is one
 * chain of fma over d, and then over the pairs of key biases, the same expression as in attn_prefill; outputs are one chain over the rows, lanes across channels. */
#pragma once
#include "kernels/cpu/attn_bias.h"
#include "kernels/cpu/attn_weights.h"
#include "kernels/cpu/kv_expand.h"
#include "kernels/cpu/panel_gemm.h"

enum {
    ROWS_SEGMENT = 256, /* rows of one partial: segment borders are fixed, so that threads can share a sequence without changing a bit */
    ROWS_WIDE = CPU_ISA_BUILD == 2 ? 4 : 1, /* groups of 16 channels whose sums three or four heads keep in registers: with four, a row of 64 channels is read once */
    ROWS_AHEAD = 24,    /* a row of values is asked for so many rows before it is read; asking beyond the run does nothing */
    ROWS_PANELS = 4,    /* panels of 16 keys expanded at a time */
};

/* out[h][c] of `cols` * 16 channels from c on: chains over all rows in registers. */
SPECIALIZE void attn_rows_output(const uint16_t *v, int n, int d, const float *weights, const int heads, const int cols, float *out)
{
    v16 acc[ATTN_HEADS][4];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int j = 0; j < cols; j++)
            acc[h][j] = v16_zero();
    for (int i = 0; i < n; i++) {
        v16 x[4];
        __builtin_prefetch(v + (int64_t)(i + ROWS_AHEAD) * d, 0, 3);
        if (cols == 4)
            __builtin_prefetch(v + (int64_t)(i + ROWS_AHEAD) * d + 2 * LANES, 0, 3);
        UNROLL for (int j = 0; j < cols; j++)
            x[j] = v16_load_bf16(v + (int64_t)i * d + j * LANES);
        UNROLL for (int h = 0; h < heads; h++) {
            v16 w = v16_set1(weights[h * ROWS_SEGMENT + i]);
            UNROLL for (int j = 0; j < cols; j++)
                acc[h][j] = v16_fma(w, x[j], acc[h][j]);
        }
    }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int j = 0; j < cols; j++)
            v16_store(out + h * d + j * LANES, acc[h][j]);
}

/* `wide` columns at a time while they last, then single ones. More chains for few heads, so that their latency is hidden. */
SPECIALIZE void attn_rows_outputs(const uint16_t *v, int n, int d, const float *weights, const int heads, const int wide, float *out)
{
    int c = 0;
    for (; c + wide * LANES <= d; c += wide * LANES)
        attn_rows_output(v + c, n, d, weights, heads, wide, out + c);
    for (; c < d; c += LANES)
        attn_rows_output(v + c, n, d, weights, heads, 1, out + c);
}

SPECIALIZE void attn_rows_panels(const struct panel_gemm *g)
{
    switch (g->n_rows) {
    case 1:
        panel_gemm_few(g, 1, 4);
        break;
    case 2:
        panel_gemm_few(g, 2, 2);
        break;
    case 3:
        panel_gemm_few(g, 3, 2);
        break;
    default:
        panel_gemm_few(g, 4, PANEL_TILE_COLS);
        break;
    }
}

/* The 16 rows from `row` on, of which those beyond the run are not looked at again. */
SPECIALIZE void attn_rows_bias16(const struct attn_bias *bias, const struct kv_rows *rows, int row, const int heads, float *s)
{
    v16 logit[ATTN_HEADS];
    UNROLL for (int h = 0; h < heads; h++)
        logit[h] = v16_load(s + h * ROWS_SEGMENT);
    if (!rows->positions && (rows->pos0 + row) % LANES == 0) {
        attn_bias_sixteen(bias, (rows->pos0 + row) / LANES, heads, logit);
    } else {
        int32_t position[LANES];
        for (int i = 0; i < LANES; i++)
            position[i] = row + i >= rows->n ? 0 : rows->positions ? rows->positions[row + i] : rows->pos0 + row + i;
        attn_bias_scattered(bias, position, heads, logit);
    }
    UNROLL for (int h = 0; h < heads; h++)
        v16_store(s + h * ROWS_SEGMENT, logit[h]);
}

static void attn_rows_bias(const struct attn_bias *bias, const struct kv_rows *rows, int first, int n, int heads, float *s)
{
    for (int i = 0; i < n; i += LANES)
        switch (heads) {
        case 1:
            attn_rows_bias16(bias, rows, first + i, 1, s + i);
            break;
        case 2:
            attn_rows_bias16(bias, rows, first + i, 2, s + i);
            break;
        case 3:
            attn_rows_bias16(bias, rows, first + i, 3, s + i);
            break;
        default:
            attn_rows_bias16(bias, rows, first + i, 4, s + i);
            break;
        }
}

/* Asks for rows first..first+n-1 into the second-level cache: the first has too few miss buffers for so much at once. */
static inline void attn_rows_prefetch(const uint16_t *rows, int first, int n, int d)
{
    const char *p = (const char *)(rows + (int64_t)first * d);
    for (int64_t byte = 0; byte < (int64_t)n * d * (int64_t)sizeof(*rows); byte += 64)
        __builtin_prefetch(p + byte, 0, 2);
}

/* Few panels at a time: expanding the next one overlaps with the chains of this one, and memory with both. One head alone has too few chains for that. */
static void attn_rows_logits(const float *q, int heads, int d, const uint16_t *k, int n, float *s)
{
    float panels[ROWS_PANELS * LANES * KV_MAX_DIM] __attribute__((aligned(64)));
    const int step = ROWS_PANELS / heads * LANES > LANES ? ROWS_PANELS / heads * LANES : LANES;
    for (int i = 0; i < n; i += step) {
        int left = n - i, own = left < step ? left : step, n_panels = (own + LANES - 1) / LANES;
        attn_rows_prefetch(k, i + own, left - own < step ? left - own : step, d);
        kv_expand_keys(k + (int64_t)i * d, d, left, n_panels, d, panels);
        struct panel_gemm g = {.a = q, .ld_a = d, .n_rows = heads, .b = panels, .panel_stride = (int64_t)LANES * d, .n_panels = n_panels, .n_k = d,
                               .c = s + i, .ld_c = ROWS_SEGMENT};
        attn_rows_panels(&g);
    }
}

static void attn_rows_pad(int heads, int n, float *s)
{
    for (int h = 0; h < heads; h++)
        for (int i = n; i % LANES != 0; i++)
            s[h * ROWS_SEGMENT + i] = -INFINITY;
}

/* q [heads, d], scale applied, heads <= ATTN_HEADS; rows first .. first + n - 1, n <= ROWS_SEGMENT. ml [heads, 2], o [heads, d]. */
static void attn_rows(const float *q, int heads, int d, const struct bias_pairs *pairs, const struct kv_rows *rows, int first, int n, float *ml, float *o)
{
    float s[ATTN_HEADS * ROWS_SEGMENT] __attribute__((aligned(64)));
    const uint16_t *v = rows->v + (int64_t)first * d;
    attn_rows_logits(q, heads, d, rows->k + (int64_t)first * d, n, s);
    if (pairs->n) {
        struct attn_bias bias;
        attn_bias_init(&bias, pairs, q, heads, d);
        attn_rows_bias(&bias, rows, first, n, heads, s);
    }
    attn_rows_pad(heads, n, s);
    for (int h = 0; h < heads; h++)
        attn_weights(s + h * ROWS_SEGMENT, (n + LANES - 1) / LANES * LANES, ml + 2 * h);
    switch (heads) {
    case 1:
        attn_rows_outputs(v, n, d, s, 1, 4, o);
        break;
    case 2:
        attn_rows_outputs(v, n, d, s, 2, 2, o);
        break;
    case 3:
        attn_rows_outputs(v, n, d, s, 3, ROWS_WIDE, o);
        break;
    default:
        attn_rows_outputs(v, n, d, s, 4, ROWS_WIDE, o);
        break;
    }
}
