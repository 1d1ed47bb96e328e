/* A partial of decode attention over bf16 rows [n, d] (the fast tier). Keys are transposed in registers to panels of 16 keys (kv_expand.h), so that a logit is one
 * chain of fma over d, the same expression as in attn_prefill; outputs are one chain over the rows, lanes across channels. */
#pragma once
#include "kernels/cpu/attn_weights.h"
#include "kernels/cpu/kv_expand.h"
#include "kernels/cpu/panel_gemm.h"

enum {
    ROWS_SEGMENT = 256, /* rows of one partial: segment borders are fixed, so that threads can share a sequence without changing a bit */
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

static void attn_rows_logits(const float *q, int heads, int d, const uint16_t *k, int n, float *s)
{
    float panels[ROWS_PANELS * LANES * KV_MAX_DIM] __attribute__((aligned(64)));
    for (int i = 0; i < n; i += ROWS_PANELS * LANES) {
        int left = n - i, n_panels = left >= ROWS_PANELS * LANES ? ROWS_PANELS : (left + LANES - 1) / LANES;
        kv_expand_keys(k + (int64_t)i * d, d, left, n_panels, d, panels);
        struct panel_gemm g = {.a = q, .ld_a = d, .n_rows = heads, .b = panels, .panel_stride = (int64_t)LANES * d, .n_panels = n_panels, .n_k = d,
                               .c = s + i, .ld_c = ROWS_SEGMENT};
        attn_rows_panels(&g);
    }
    for (int h = 0; h < heads; h++)
        for (int i = n; i % LANES != 0; i++)
            s[h * ROWS_SEGMENT + i] = -INFINITY;
}

/* q [heads, d], scale applied, heads <= ATTN_HEADS; k, v [n, d], n <= ROWS_SEGMENT. ml [heads, 2], o [heads, d]. */
static void attn_rows(const float *q, int heads, int d, const uint16_t *k, const uint16_t *v, int n, float *ml, float *o)
{
    float s[ATTN_HEADS * ROWS_SEGMENT] __attribute__((aligned(64)));
    attn_rows_logits(q, heads, d, k, n, s);
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
        attn_rows_outputs(v, n, d, s, 3, ATTN_WIDE, o);
        break;
    default:
        attn_rows_outputs(v, n, d, s, 4, ATTN_WIDE, o);
        break;
    }
}
