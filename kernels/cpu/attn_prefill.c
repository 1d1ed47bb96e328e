/* Attention of a chunk's queries over everything before them (FlashAttention's online softmax, block by block of 128 keys).
 *
 * A task is one KV head with a tile of queries of one block, all heads of the group, so that a block of K and V is expanded to fp32 panels (kv_expand.h) once for all
 * rows of the tile. For each block and each 24 rows: logits (panel_gemm), row maxima, exp, output (panel_gemm). Scratch of a thread holds everything.
 *
 * Per row, for blocks in ascending order: s = sum over d of (q scale) k, one chain, which the terms of key biases continue (key_bias.h); m' = max(m, max s); p = exp(s - m'); l = l exp(m - m') + sum p (16 lanes);
 * o = (o exp(m - m')), then one chain of fma over the keys. So a row never sees the tile it is in. Keys beyond the last query of a tile may be left out of the
 * own block: they would add p = 0, which changes nothing but the sign of a zero, and that is removed at the end. */
#include "kernels/cpu/key_bias.h"
#include "kernels/cpu/kv_expand.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/panel_gemm.h"
#include "kernels/cpu/vmath.h"
#include <errno.h>

enum {
    TILE_ROWS = 192,           /* (query, head) pairs of a task, at most: expanding K and V, some 6 % of the time at 96, is paid once for all */
    TILE_VALUES = 192 * 128,   /* of q and of o, so that larger heads still fit the scratch */
    MIN_TILE_ROWS = 24,
    STRIP_ROWS = 24,           /* rows whose logits are alive at a time: 12 KiB, next to a panel in the first-level cache */
    PANEL_GROUP = 2 * LANES,   /* visible keys are rounded up to this */
};

struct prefill_args {
    const struct attn_prefill_params *p;
    const struct stream *stream;
    int group;
    int64_t first_block, last_block; /* of the queries */
    int tile_queries, n_tiles;       /* of one block */
};

/* The tile of one task, in the thread's scratch. Row r is query r / group, head r % group. */
struct prefill_tile {
    const struct attn_prefill_params *p;
    int group, n_rows, d;
    int64_t pos0;  /* of the tile's first query */
    float *keys;   /* [8 panels][d][16] */
    float *values; /* [d / 16 panels][128][16] */
    float *q, *o;  /* [n_rows, d] */
    float *s;      /* [STRIP_ROWS, 128] */
    float *m, *l;  /* [n_rows] */
    struct bias_pairs bias;
    float *waves;  /* [8 panels][2 pairs][16] */
    float *ab;     /* [n_rows, 2 pairs] */
};

/* (A, B) of as many rows as a tile of this head dim may have. */
#define TILE_AB(d) (2 * KEY_BIAS_PAIRS_MAX * (TILE_VALUES / (d) < TILE_ROWS ? TILE_VALUES / (d) : TILE_ROWS))
#define TILE_FLOATS(d) \
    (2 * BLOCK_TOKENS * (d) + 2 * TILE_VALUES + STRIP_ROWS * BLOCK_TOKENS + 2 * TILE_ROWS + 2 * KEY_BIAS_PAIRS_MAX * BLOCK_TOKENS + TILE_AB(d))
/* The sum is convex in d beyond 128 and grows before it. */
_Static_assert(sizeof(float) * TILE_FLOATS(KV_MAX_DIM) <= CPU_SCRATCH_BYTES && sizeof(float) * TILE_FLOATS(TILE_VALUES / TILE_ROWS) <= CPU_SCRATCH_BYTES,
               "a tile fits the scratch of a thread");

static void tile_init(struct prefill_tile *t, const struct prefill_args *a, int kv_head, int query, int n_queries, float *scratch)
{
    const struct attn_prefill_params *p = a->p;
    int d = p->head_dim;
    *t = (struct prefill_tile){.p = p, .group = a->group, .n_rows = n_queries * a->group, .d = d, .pos0 = p->pos0 + query};
    t->keys = scratch;
    t->values = t->keys + BLOCK_TOKENS * d;
    t->q = t->values + BLOCK_TOKENS * d;
    t->o = t->q + TILE_VALUES;
    t->s = t->o + TILE_VALUES;
    t->m = t->s + STRIP_ROWS * BLOCK_TOKENS;
    t->l = t->m + TILE_ROWS;
    t->waves = t->l + TILE_ROWS;
    t->ab = t->waves + 2 * KEY_BIAS_PAIRS_MAX * BLOCK_TOKENS;
    t->bias = bias_pairs_of(p->bias, kv_head);
    v16 scale = v16_set1(p->scale);
    for (int r = 0; r < t->n_rows; r++) {
        const float *q = p->q + ((int64_t)(query + r / a->group) * p->n_heads + kv_head * a->group + r % a->group) * d;
        for (int c = 0; c < d; c += LANES) {
            v16_store(t->q + r * d + c, v16_mul(v16_load(q + c), scale));
            v16_store(t->o + r * d + c, v16_zero());
        }
        bias_coefficients(&t->bias, t->q + r * d, d, t->ab + r * 2 * t->bias.n);
        t->m[r] = -INFINITY;
        t->l[r] = 0;
    }
}

/* Logits of keys after `last_visible` become -INFINITY. */
static void mask_future(float *s, int n_keys, int last_visible)
{
    static const float lane[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int k = (last_visible + 1) / LANES * LANES; k < n_keys; k += LANES) {
        v16m visible = v16_le(v16_load(lane), v16_set1((float)(last_visible - k)));
        v16_store(s + k, v16_select(visible, v16_load(s + k), v16_set1(-INFINITY)));
    }
}

/* Logits of a strip become weights; m, l and o of its rows move to the new maxima. */
static void strip_softmax(struct prefill_tile *t, int row, int n_rows, int n_keys)
{
    float m_new[STRIP_ROWS + LANES], shrink[STRIP_ROWS + LANES];
    for (int r = 0; r < n_rows; r++) {
        const float *s = t->s + r * BLOCK_TOKENS;
        v16 m = v16_load(s);
        for (int k = LANES; k < n_keys; k += LANES)
            m = v16_max(m, v16_load(s + k));
        float m_block = v16_reduce_max(m), m_old = t->m[row + r];
        m_new[r] = m_block > m_old ? m_block : m_old;
        shrink[r] = m_old - m_new[r];
    }
    for (int r = 0; r < n_rows; r += LANES)
        v16_store(shrink + r, v16_exp_nonpositive(v16_load_n(shrink + r, n_rows - r < LANES ? n_rows - r : LANES)));
    for (int r = 0; r < n_rows; r++) {
        float *s = t->s + r * BLOCK_TOKENS;
        v16 m = v16_set1(m_new[r]), sum = v16_zero();
        for (int k = 0; k < n_keys; k += LANES) {
            v16 w = v16_exp_nonpositive(v16_sub(v16_load(s + k), m));
            v16_store(s + k, w);
            sum = v16_add(sum, w);
        }
        t->m[row + r] = m_new[r];
        t->l[row + r] = fmaf(t->l[row + r], shrink[r], v16_reduce_add(sum));
        if (shrink[r] == 1.0f) /* the usual case once the largest key has been met */
            continue;
        float *o = t->o + (row + r) * t->d;
        for (int c = 0; c < t->d; c += LANES)
            v16_store(o + c, v16_mul(v16_load(o + c), v16_set1(shrink[r])));
    }
}

/* Asks for part `strip` of `n_strips` of the next block's rows, so that expanding them does not wait for memory: the pieces spread over the arithmetic of this block. */
static void prefetch_next(const bf16_t *next, int64_t n_values, int strip, int n_strips)
{
    const char *from = (const char *)(next + n_values * strip / n_strips), *to = (const char *)(next + n_values * (strip + 1) / n_strips);
    for (; from < to; from += 64)
        __builtin_prefetch(from, 0, 2);
}

/* Continues the logits' chains of a strip by the terms of the key biases. */
static void strip_bias(struct prefill_tile *t, int row, int n_rows, int n_keys)
{
    int n_k = 2 * t->bias.n;
    struct panel_gemm g = {.a = t->ab + row * n_k, .ld_a = n_k, .n_rows = n_rows, .b = t->waves, .panel_stride = (int64_t)LANES * n_k, .n_panels = n_keys / LANES,
                           .n_k = n_k, .c = t->s, .ld_c = BLOCK_TOKENS};
    panel_gemm_run(&g, true);
}

/* One block of keys whose first `n_visible` the tile's last query sees; `own`: the position of the tile's first query in it, or -1 if it is an earlier block; n_next: values of K and of V
 * in the next block. */
static void tile_block(struct prefill_tile *t, int n_visible, int own, const bf16_t *next_k, const bf16_t *next_v, int64_t n_next)
{
    int n_keys = (n_visible + PANEL_GROUP - 1) / PANEL_GROUP * PANEL_GROUP, d = t->d;
    for (int row = 0; row < t->n_rows; row += STRIP_ROWS) {
        int n = t->n_rows - row < STRIP_ROWS ? t->n_rows - row : STRIP_ROWS;
        struct panel_gemm logits = {.a = t->q + row * d, .ld_a = d, .n_rows = n, .b = t->keys, .panel_stride = (int64_t)LANES * d,
                                    .n_panels = n_keys / LANES, .n_k = d, .c = t->s, .ld_c = BLOCK_TOKENS};
        prefetch_next(next_k, n_next, row / STRIP_ROWS, (t->n_rows + STRIP_ROWS - 1) / STRIP_ROWS);
        prefetch_next(next_v, n_next, row / STRIP_ROWS, (t->n_rows + STRIP_ROWS - 1) / STRIP_ROWS);
        panel_gemm_run(&logits, false);
        if (t->bias.n)
            strip_bias(t, row, n, n_keys);
        for (int r = 0; own >= 0 && r < n; r++)
            mask_future(t->s + r * BLOCK_TOKENS, n_keys, own + (row + r) / t->group);
        strip_softmax(t, row, n, n_keys);
        struct panel_gemm output = {.a = t->s, .ld_a = BLOCK_TOKENS, .n_rows = n, .b = t->values, .panel_stride = (int64_t)LANES * n_keys,
                                    .n_panels = d / LANES, .n_k = n_keys, .c = t->o + row * d, .ld_c = d};
        panel_gemm_run(&output, true);
    }
}

static void tile_finish(const struct prefill_tile *t, int kv_head, int query)
{
    const struct attn_prefill_params *p = t->p;
    float *out = p->out;
    for (int r = 0; r < t->n_rows; r++) {
        int64_t at = (int64_t)(query + r / t->group) * p->n_heads + kv_head * t->group + r % t->group;
        v16 l = v16_set1(t->l[r]);
        for (int c = 0; c < t->d; c += LANES)
            v16_store(out + at * t->d + c, v16_add(v16_div(v16_load(t->o + r * t->d + c), l), v16_zero()));
        if (p->ret_ml) {
            p->ret_ml[2 * at] = t->m[r];
            p->ret_ml[2 * at + 1] = t->l[r];
        }
    }
}

/* Rows of the block at `pos` for a tile whose own block begins at `own`. */
static const bf16_t *block_rows(const struct attn_prefill_params *p, const bf16_t *rows, const bf16_t *own_rows, int kv_head, int64_t pos, int64_t own)
{
    if (pos == own && own_rows)
        return own_rows + kv_head * p->own_stride + (own - p->pos0 / BLOCK_TOKENS * BLOCK_TOKENS) * p->head_dim;
    return rows + kv_head * p->head_stride + pos * p->head_dim;
}

/* Queries query .. query + n_queries - 1 of the call, in the block that begins at `own`. */
static void run_tile(const struct prefill_args *a, int kv_head, int64_t own, int query, int n_queries, int thread)
{
    const struct attn_prefill_params *p = a->p;
    const int d = p->head_dim;
    struct prefill_tile t;
    tile_init(&t, a, kv_head, query, n_queries, cpu_scratch(a->stream, thread));
    const int64_t end = t.pos0 + n_queries;
    for (int64_t pos = 0; pos < end; pos += BLOCK_TOKENS) {
        int n_visible = end - pos < BLOCK_TOKENS ? (int)(end - pos) : BLOCK_TOKENS;
        int n_keys = (n_visible + PANEL_GROUP - 1) / PANEL_GROUP * PANEL_GROUP;
        kv_expand_keys(block_rows(p, p->k, p->own_k, kv_head, pos, own), d, n_visible, n_keys / LANES, d, t.keys);
        kv_expand_values(block_rows(p, p->v, p->own_v, kv_head, pos, own), d, n_visible, n_keys, d, t.values);
        bias_panels(&t.bias, pos / LANES, n_keys / LANES, t.waves);
        int64_t next = pos + n_visible, n_next = end - next < BLOCK_TOKENS ? end - next : BLOCK_TOKENS;
        tile_block(&t, n_visible, pos == own ? (int)(t.pos0 - pos) : -1, block_rows(p, p->k, p->own_k, kv_head, next, own), block_rows(p, p->v, p->own_v, kv_head, next, own), n_next * d);
    }
    tile_finish(&t, kv_head, query);
}

/* The last block first: its tiles take longest, so that the threads end together. */
static void prefill_task(void *arg, int64_t task, int thread)
{
    const struct prefill_args *a = arg;
    const struct attn_prefill_params *p = a->p;
    const int64_t per_block = (int64_t)p->n_kv_heads * a->n_tiles, block = a->last_block - task / per_block, end = p->pos0 + p->n_q;
    const int64_t start = a->first_block == a->last_block ? p->pos0 : block * BLOCK_TOKENS;
    const int64_t from = start + task % a->n_tiles * a->tile_queries, block_end = (block + 1) * BLOCK_TOKENS;
    int64_t first = from > p->pos0 ? from : p->pos0, last = from + a->tile_queries < block_end ? from + a->tile_queries : block_end;
    last = last < end ? last : end;
    if (first < last)
        run_tile(a, (int)(task % per_block / a->n_tiles), block * BLOCK_TOKENS, (int)(first - p->pos0), (int)(last - first), thread);
}

/* Tiles as large as may be, but halved while the last round of tasks would leave more than a tenth of the threads' time idle. */
static void choose_tiles(struct prefill_args *a, int n_kv_heads, int max_rows, int n_threads)
{
    const int64_t n_blocks = a->last_block - a->first_block + 1;
    int n_q = n_blocks == 1 ? a->p->n_q : BLOCK_TOKENS;
    a->tile_queries = max_rows / a->group < n_q ? max_rows / a->group : n_q;
    for (;;) {
        a->n_tiles = (n_q + a->tile_queries - 1) / a->tile_queries;
        a->tile_queries = (n_q + a->n_tiles - 1) / a->n_tiles; /* of equal size */
        int64_t tasks = n_blocks * a->n_tiles * n_kv_heads, rounds = (tasks + n_threads - 1) / n_threads;
        if (10 * tasks >= 9 * rounds * n_threads || a->tile_queries * a->group < 2 * MIN_TILE_ROWS)
            return;
        a->tile_queries = (a->tile_queries + 1) / 2;
    }
}

int ISA(attn_prefill)(struct stream *s, const struct attn_prefill_params *p)
{
    if (p->n_q < 1 || p->pos0 < 0 || p->n_kv_heads < 1 || p->n_heads < 1 || p->n_heads % p->n_kv_heads != 0 || !p->own_k != !p->own_v)
        return -EINVAL;
    int group = p->n_heads / p->n_kv_heads, d = p->head_dim;
    if (d < LANES || d > KV_MAX_DIM || d % LANES != 0)
        return -ENOTSUP;
    int max_rows = TILE_VALUES / d < TILE_ROWS ? TILE_VALUES / d : TILE_ROWS;
    if (group > max_rows)
        return -ENOTSUP;
    struct prefill_args a = {.p = p, .stream = s, .group = group, .first_block = p->pos0 / BLOCK_TOKENS, .last_block = (p->pos0 + p->n_q - 1) / BLOCK_TOKENS};
    choose_tiles(&a, p->n_kv_heads, max_rows, cpu_threads(s));
    cpu_run(s, (a.last_block - a.first_block + 1) * a.n_tiles * p->n_kv_heads, prefill_task, &a);
    return 0;
}
