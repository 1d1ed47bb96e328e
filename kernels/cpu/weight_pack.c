/* From the file's bytes to panels. Each row's block is first taken apart into plain codes and scales, then spread over the planes of its panel; one task
 * packs one group, so a matrix is packed at about the speed of reading it. */
#include "kernels/cpu/weight_pack.h"
#include "kernels/cpu/weight_layout.h"
#include <errno.h>
#include <stdbool.h>
#include <string.h>

/* One block of one row, taken apart. */
struct row_block {
    uint8_t code[256];
    uint16_t a, b;         /* fp16 bits */
    uint8_t sub[16][2];    /* of each 32 columns: sc and m, or the two sc of Q6_K */
};

static uint16_t u16_at(const uint8_t *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* 32 nibbles: byte j holds columns j (low) and j + 16 (high). */
static void nibbles_split(const uint8_t *q, uint8_t *code)
{
    for (int j = 0; j < 16; j++) {
        code[j] = q[j] & 15;
        code[j + 16] = q[j] >> 4;
    }
}

static void parse_q5_0(const uint8_t *src, struct row_block *b)
{
    uint32_t high;
    b->a = u16_at(src);
    memcpy(&high, src + 2, sizeof high);
    nibbles_split(src + 6, b->code);
    for (int j = 0; j < 32; j++)
        b->code[j] |= (uint8_t)((high >> j & 1) << 4);
}

/* The eight pairs (sc, m) of six bits each, in twelve bytes. */
static void parse_k_scales(const uint8_t *s, struct row_block *b)
{
    for (int j = 0; j < 4; j++) {
        b->sub[j][0] = s[j] & 63;
        b->sub[j][1] = s[j + 4] & 63;
        b->sub[j + 4][0] = (uint8_t)((s[j + 8] & 15) | s[j] >> 6 << 4);
        b->sub[j + 4][1] = (uint8_t)(s[j + 8] >> 4 | s[j + 4] >> 6 << 4);
    }
}

/* `high`: the fifth bits [32], or NULL. */
static void parse_k_codes(const uint8_t *q, const uint8_t *high, struct row_block *b)
{
    for (int sub = 0; sub < 8; sub++)
        for (int j = 0; j < 32; j++) {
            uint8_t code = sub % 2 ? q[sub / 2 * 32 + j] >> 4 : q[sub / 2 * 32 + j] & 15;
            if (high)
                code |= (uint8_t)((high[j] >> sub & 1) << 4);
            b->code[sub * 32 + j] = code;
        }
}

static void parse_q6_k(const uint8_t *src, struct row_block *b)
{
    const uint8_t *low = src, *high = src + 128, *scales = src + 192;
    for (int c = 0; c < 256; c++) {
        int half = c / 128, quarter = c % 128 / 32, j = c % 32;
        uint8_t l = low[half * 64 + quarter % 2 * 32 + j];
        uint8_t h = (uint8_t)(high[half * 32 + j] >> 2 * quarter & 3);
        b->code[c] = (uint8_t)((quarter < 2 ? l & 15 : l >> 4) | h << 4);
    }
    for (int j = 0; j < 16; j++)
        b->sub[j / 2][j % 2] = scales[j];
    b->a = u16_at(src + 208);
}

static void block_parse(enum weight_dtype dtype, const uint8_t *src, struct row_block *b)
{
    switch (dtype) {
    case WEIGHT_Q8_0:
        b->a = u16_at(src);
        memcpy(b->code, src + 2, 32);
        break;
    case WEIGHT_Q4_0:
        b->a = u16_at(src);
        nibbles_split(src + 2, b->code);
        break;
    case WEIGHT_Q4_1:
        b->a = u16_at(src);
        b->b = u16_at(src + 2);
        nibbles_split(src + 4, b->code);
        break;
    case WEIGHT_Q5_0:
        parse_q5_0(src, b);
        break;
    case WEIGHT_Q4_K:
    case WEIGHT_Q5_K:
        b->a = u16_at(src);
        b->b = u16_at(src + 2);
        parse_k_scales(src + 4, b);
        parse_k_codes(src + (dtype == WEIGHT_Q4_K ? 16 : 48), dtype == WEIGHT_Q4_K ? NULL : src + 16, b);
        break;
    default: /* Q6_K; the float formats do not come here */
        parse_q6_k(src, b);
        break;
    }
}

static void run_write_codes(enum weight_dtype dtype, uint8_t *low, uint32_t *high, int row, const uint8_t *code)
{
    if (dtype == WEIGHT_Q8_0) {
        for (int c = 0; c < RUN_COLS; c++)
            low[c * PANEL_ROWS + row] = code[c];
        return;
    }
    uint32_t *words = (uint32_t *)low;
    for (int c = 0; c < RUN_COLS; c++)
        words[c / 8 * PANEL_ROWS + row] |= (uint32_t)(code[c] & 15) << c % 8 * 4;
    if (dtype == WEIGHT_Q5_0 || dtype == WEIGHT_Q5_K)
        for (int c = 0; c < RUN_COLS; c++)
            high[row] |= (uint32_t)(code[c] >> 4) << c;
    if (dtype == WEIGHT_Q6_K)
        for (int c = 0; c < RUN_COLS; c++)
            high[c / 16 * PANEL_ROWS + row] |= (uint32_t)(code[c] >> 4) << c % 16 * 2;
}

struct pack_args {
    enum weight_dtype dtype;
    const struct weight_format *format;
    int64_t n_rows, n_cols;
    const uint8_t *src;
    uint8_t *packed;
};

/* Where a row goes: group (its first byte, its panels), panel in it, row of the panel. */
struct row_place {
    uint8_t *group;
    int np, p, row;
};

static void pack_block(const struct pack_args *a, const struct row_place *at, int64_t block, const uint8_t *src)
{
    struct row_block b;
    block_parse(a->dtype, src, &b);
    int runs = weight_block_runs(a->format);
    for (int i = 0; i < runs; i++) {
        struct weight_run run = weight_run_at(a->format, at->np, at->p, block * runs + i);
        run_write_codes(a->dtype, at->group + run.low, (uint32_t *)(at->group + run.high), at->row, b.code + i * RUN_COLS);
        ((uint16_t *)(at->group + run.scale_a))[at->row] = b.a;
        if (a->format->scale_b)
            ((uint16_t *)(at->group + run.scale_b))[at->row] = b.b;
        if (a->format->sub) {
            at->group[run.sub + at->row] = b.sub[i][0];
            at->group[run.sub + PANEL_ROWS + at->row] = b.sub[i][1];
        }
    }
}

static void pack_floats(const struct pack_args *a, const struct row_place *at, const uint8_t *src)
{
    size_t size = (size_t)a->format->file_bytes;
    for (int64_t c = 0; c < a->n_cols; c++) {
        struct weight_run run = weight_run_at(a->format, at->np, at->p, c / RUN_COLS);
        uint8_t *column = at->group + run.low + (size_t)(c % RUN_COLS) * PANEL_ROWS * size;
        memcpy(column + (size_t)at->row * size, src + (size_t)c * size, size);
    }
}

static void pack_group(void *arg, int64_t g, int thread)
{
    const struct pack_args *a = arg;
    const struct weight_format *f = a->format;
    struct row_place at = {.group = a->packed + weight_group_offset(f, a->n_cols, g), .np = weight_group_panels(a->n_rows, g)};
    int64_t row_bytes = a->n_cols / f->file_cols * f->file_bytes, n_blocks = weight_n_blocks(f, a->n_cols);
    (void)thread;
    memset(at.group, 0, (size_t)(at.np * n_blocks * weight_block_bytes(f)));
    for (int r = 0; r < at.np * PANEL_ROWS && g * GROUP_ROWS + r < a->n_rows; r++) {
        const uint8_t *src = a->src + (g * GROUP_ROWS + r) * row_bytes;
        at.p = r / PANEL_ROWS;
        at.row = r % PANEL_ROWS;
        if (f->file_cols == 1)
            pack_floats(a, &at, src);
        else
            for (int64_t b = 0; b < n_blocks; b++)
                pack_block(a, &at, b, src + b * f->file_bytes);
    }
}

static bool shape_is_valid(enum weight_dtype dtype, int64_t n_rows, int64_t n_cols)
{
    enum { DIM_MAX = 1 << 28 }; /* keeps every product of sizes within 63 bits */
    return (unsigned)dtype < WEIGHT_DTYPE_COUNT && n_rows >= 1 && n_rows <= DIM_MAX && n_cols >= 1 && n_cols <= DIM_MAX &&
           n_cols % weight_formats[dtype].file_cols == 0;
}

size_t cpu_weight_bytes(enum weight_dtype dtype, int64_t n_rows, int64_t n_cols)
{
    if (!shape_is_valid(dtype, n_rows, n_cols))
        return 0;
    const struct weight_format *f = &weight_formats[dtype];
    return (size_t)(weight_n_panels(n_rows) * weight_n_blocks(f, n_cols) * weight_block_bytes(f) + WEIGHT_TAIL_BYTES);
}

int cpu_weight_pack(struct stream *s, enum weight_dtype dtype, int64_t n_rows, int64_t n_cols, const void *src, void *packed)
{
    if (!shape_is_valid(dtype, n_rows, n_cols) || !src || !packed)
        return -EINVAL;
    struct pack_args args = {
        .dtype = dtype,
        .format = &weight_formats[dtype],
        .n_rows = n_rows,
        .n_cols = n_cols,
        .src = src,
        .packed = packed,
    };
    memset((uint8_t *)packed + cpu_weight_bytes(dtype, n_rows, n_cols) - WEIGHT_TAIL_BYTES, 0, WEIGHT_TAIL_BYTES);
    cpu_run(s, weight_n_groups(n_rows), pack_group, &args);
    return 0;
}
