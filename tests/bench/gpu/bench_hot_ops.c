/* The ops that take the time, alone, in the model's shape: bytes or operations a second, beside what a copy and a large product reach on the same device in the same run. Calls follow one
 * another without a wait between them, so what a launch costs is in the figure. Inputs are random. */
#include "kernels/sample_one.h"
#include "proto/base/base_assert.h"
#include "tests/bench/gpu/gpu_bench.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PIECES_MAX = 64, CHUNK = 2048, ROWS = 4096, SEQUENCES = 64, FETCH_PAGES = 32, WINDOW = 32, PRODUCT = 4096 };

struct hot {
    struct gpu_bench *b;
    struct error *err;
    int failed; /* of a row that did not end the rest */
    void *pieces[PIECES_MAX]; /* device memory, freed at the end */
    int n_pieces;
    uint64_t random;
    int n_heads, n_kv_heads, d, n_keys, n_blocks;
    double copy_rate, product_rate; /* the ceilings: bytes and operations a second; 0: not measured */
    /* What the ops read and write. */
    struct weight product;            /* [PRODUCT, PRODUCT] */
    float *q, *y;
    void *out, *x;
    bf16_t *k, *v, *own_k, *own_v;
    int32_t *bad;
    uint8_t *extents;
    struct block_layout layout;
    struct block_params *blocks;      /* [n_blocks] */
    struct kv_block *table;           /* device */
    uint16_t *masks;                  /* device */
    struct attn_decode_item *items;   /* [SEQUENCES * n_kv_heads] */
};

/* ---- memory ---- */

static void *room(struct hot *h, size_t bytes, int *r)
{
    void *memory = NULL;
    if (*r >= 0) {
        ASSERT(h->n_pieces < PIECES_MAX);
        *r = h->b->dev->alloc(h->b->device, MEM_WORKSPACE, bytes, &memory);
        if (*r >= 0)
            h->pieces[h->n_pieces++] = memory;
        else
            error_set(h->err, *r, "no memory for %zu bytes on the device", bytes);
    }
    return memory;
}

static uint32_t draw(struct hot *h)
{
    h->random = h->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(h->random >> 32);
}

/* Fills device memory from a piece of random values again and again, each time from another place of it. */
static int fill(struct hot *h, void *to, size_t bytes, bool bf16)
{
    enum { PIECE = 1 << 20, SHIFTS = 997 };
    static uint8_t piece[PIECE + 64 * SHIFTS];
    int r = 0;
    for (size_t i = 0; i < sizeof(piece); i += 4) {
        float values[2];
        for (int j = 0; j < 2; j++)
            values[j] = ((float)draw(h) * 0x1p-31f - 1.0f) + ((float)draw(h) * 0x1p-31f - 1.0f);
        uint32_t bits[2];
        memcpy(bits, values, sizeof(bits));
        const uint32_t pair = bits[0] >> 16 | (bits[1] & 0xffff0000u);
        memcpy(piece + i, bf16 ? &pair : &bits[0], 4);
    }
    for (size_t at = 0, shift = 0; r >= 0 && at < bytes; at += PIECE, shift = (shift + 61) % SHIFTS)
        r = h->b->dev->copy(h->b->stream, (uint8_t *)to + at, piece + 64 * shift, bytes - at < PIECE ? bytes - at : PIECE);
    return r < 0 ? r : h->b->dev->stream_sync(h->b->stream);
}

static void *random_room(struct hot *h, size_t bytes, bool bf16, int *r)
{
    void *memory = room(h, bytes, r);
    if (*r >= 0)
        *r = fill(h, memory, bytes, bf16);
    return memory;
}

/* ---- time ---- */

/* Seconds a call: warm-up, then rounds of as many calls as take about 30 ms; the median of five. */
static int seconds_of(struct hot *h, int (*call)(struct hot *), double *ret_s)
{
    enum { ROUNDS = 5 };
    double rounds[ROUNDS];
    int n = 1, r = 0;
    for (int i = 0; r >= 0 && i < 2; i++) {
        const double start = bench_seconds();
        r = call(h);
        if (r >= 0)
            r = h->b->dev->stream_sync(h->b->stream);
        const double s = bench_seconds() - start;
        n = s > 0.03 ? 1 : s < 0.0003 ? 100 : (int)(0.03 / s);
    }
    for (int round = 0; r >= 0 && round < ROUNDS; round++) {
        const double start = bench_seconds();
        for (int i = 0; r >= 0 && i < n; i++)
            r = call(h);
        if (r >= 0)
            r = h->b->dev->stream_sync(h->b->stream);
        rounds[round] = (bench_seconds() - start) / n;
        for (int i = round; i > 0 && rounds[i] < rounds[i - 1]; i--) {
            const double other = rounds[i];
            rounds[i] = rounds[i - 1];
            rounds[i - 1] = other;
        }
    }
    *ret_s = rounds[ROUNDS / 2];
    return r;
}

/* One row of the table. `work` is bytes or operations. */
static int measure(struct hot *h, const char *name, int (*call)(struct hot *), double work, bool operations)
{
    double s = 0;
    int r = seconds_of(h, call, &s);
    if (r == -ENOTSUP) {
        printf("| %s | not for this shape | | |\n", name);
        return 0;
    }
    if (r < 0) {
        error_set(h->err, r, "%s: %s", name, strerror(-r));
        if (!bench_goes_on(r, name, h->err))
            return r;
        h->failed = r;
        return 0;
    }
    const double rate = work / s, ceiling = operations ? h->product_rate : h->copy_rate;
    printf("| %s | %.1f | %.3f %s | %.0f %% |\n", name, s * 1e6, rate / 1e12, operations ? "TFLOP/s" : "TB/s", ceiling > 0 ? rate / ceiling * 100 : 100.0);
    fflush(stdout);
    if (h->b->json)
        fprintf(stderr, "{\"figure\": \"op\", \"op\": \"%s\", \"us\": %.3f, \"per_s\": %.6g, \"of\": \"%s\"}\n", name, s * 1e6, rate, operations ? "product" : "copy");
    if (!h->copy_rate)
        h->copy_rate = rate;
    else if (operations && !h->product_rate)
        h->product_rate = rate;
    return 0;
}

/* ---- calls ---- */

static size_t kv_bytes(const struct hot *h)
{
    return (size_t)h->n_kv_heads * (size_t)h->n_keys * (size_t)h->d * sizeof(bf16_t);
}

static int call_copy(struct hot *h)
{
    return h->b->dev->copy(h->b->stream, h->v, h->k, kv_bytes(h));
}

static int call_product(struct hot *h)
{
    const struct matmul_out out = {.w = &h->product, .y = h->y, .ld_y = PRODUCT};
    return h->b->ops->matmul(h->b->stream, h->x, PRODUCT, PRODUCT, &out, 1);
}

static int call_mlp(struct hot *h, int n)
{
    const struct model_layer_weights *w = &h->b->model->weights.layers[0];
    const int ffn = h->b->model->config.ffn_dim, dim = h->b->model->config.dim;
    const struct matmul_out outs[] = {{.w = &w->gate.w, .y = h->y, .ld_y = ffn}, {.w = &w->up.w, .y = h->y + (size_t)n * (size_t)ffn, .ld_y = ffn}};
    return h->b->ops->matmul(h->b->stream, h->x, n, dim, outs, 2);
}

static int call_mlp_chunk(struct hot *h)
{
    return call_mlp(h, CHUNK);
}

static int call_mlp_decode(struct hot *h)
{
    return call_mlp(h, 8);
}

static int call_prefill(struct hot *h)
{
    const struct attn_prefill_params p = {
        .q = h->q, .pos0 = h->n_keys - CHUNK, .n_q = CHUNK, .k = h->k, .v = h->v, .head_stride = (int64_t)h->n_keys * h->d, .own_k = h->own_k, .own_v = h->own_v,
        .own_stride = (int64_t)CHUNK * h->d, .n_heads = h->n_heads, .n_kv_heads = h->n_kv_heads, .head_dim = h->d, .scale = h->b->model->config.attention_scale, .out = h->out};
    return h->b->ops->attn_prefill(h->b->stream, &p);
}

/* The first chunk of a prompt: causal, without a prefix, so that it is the own kernel's wherever longer prefixes are the library's. */
static int call_first_chunk(struct hot *h)
{
    const struct attn_prefill_params p = {
        .q = h->q, .n_q = CHUNK, .k = h->k, .v = h->v, .head_stride = (int64_t)h->n_keys * h->d, .own_k = h->own_k, .own_v = h->own_v, .own_stride = (int64_t)CHUNK * h->d,
        .n_heads = h->n_heads, .n_kv_heads = h->n_kv_heads, .head_dim = h->d, .scale = h->b->model->config.attention_scale, .out = h->out};
    return h->b->ops->attn_prefill(h->b->stream, &p);
}

static int call_encode(struct hot *h)
{
    return h->b->ops->block_encode(h->b->stream, h->blocks, CHUNK / BLOCK_TOKENS, false, h->bad);
}

static int call_decode_blocks(struct hot *h)
{
    return h->b->ops->block_decode(h->b->stream, h->blocks, CHUNK / BLOCK_TOKENS);
}

static int call_window(struct hot *h)
{
    const struct window_score_params p = {
        .q = h->q, .n_window = WINDOW, .k = h->k, .head_stride = (int64_t)h->n_keys * h->d, .n_keys = h->n_keys, .n_heads = h->n_heads, .n_kv_heads = h->n_kv_heads, .head_dim = h->d,
        .scale = h->b->model->config.attention_scale, .first = 4, .last = h->n_keys - WINDOW, .pool = 7, .chunk = 1, .scores = h->y};
    return h->b->ops->window_scores(h->b->stream, &p);
}

/* A step of one layer: SEQUENCES sequences of one document, `rows` fast rows each, and the slow tier up to sub-page n_subpages. */
static int call_attend(struct hot *h, int rows, int n_subpages, int fetch_pages)
{
    const int group = h->n_heads / h->n_kv_heads;
    for (int i = 0; i < SEQUENCES * h->n_kv_heads; i++) {
        const int head = i % h->n_kv_heads;
        const int64_t first = ((int64_t)head * h->n_keys + (int64_t)(i / h->n_kv_heads) * ROWS % (h->n_keys - ROWS + 1)) * h->d;
        h->items[i] = (struct attn_decode_item){
            .q = h->q + (int64_t)i * group * h->d, .out = matmul_input_at(h->b->ops, h->out, (int64_t)i * group * h->d), .rows = {{.k = h->k + first, .v = h->v + first, .n = rows}},
            .slow = {.blocks = h->table, .masks = h->masks, .n_subpages = n_subpages, .n_pages = n_subpages, .kv_head = head}, .fetch_pages = fetch_pages};
    }
    struct attn_decode_params p = {.items = h->items, .n_items = SEQUENCES * h->n_kv_heads, .layout = &h->layout, .group = group, .head_dim = h->d,
                                   .scale = h->b->model->config.attention_scale, .scorer = PAGE_SCORER_INDEX2};
    return h->b->ops->attn_decode(h->b->stream, &p);
}

static int call_rows(struct hot *h)
{
    return call_attend(h, ROWS, 0, INT32_MAX);
}

static int call_pages(struct hot *h)
{
    return call_attend(h, 0, FETCH_PAGES * 4, INT32_MAX);
}

static int call_search(struct hot *h)
{
    return call_attend(h, 0, h->n_blocks * BLOCK_SUBPAGES, FETCH_PAGES);
}

static int call_sample(struct hot *h)
{
    static const struct sample_params drawn = {.temperature = 1, .top_k = 50, .top_p = 0.9f, .repetition_penalty = 1, .seed = 1};
    struct sample_result result;
    return sample_one(h->b->ops, h->b->stream, h->y, h->b->model->config.n_vocab, &drawn, &result);
}

/* ---- setting up ---- */

static int64_t most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int make_inputs(struct hot *h)
{
    const struct model_config *c = &h->b->model->config;
    const size_t queries = (size_t)most(CHUNK, SEQUENCES) * (size_t)h->n_heads * (size_t)h->d * sizeof(float);
    const size_t x = (size_t)most(PRODUCT * (int64_t)PRODUCT, (int64_t)CHUNK * c->dim) * sizeof(float);
    const size_t y = (size_t)most(most(PRODUCT * (int64_t)PRODUCT, (int64_t)2 * CHUNK * c->ffn_dim), most((int64_t)h->n_kv_heads * h->n_keys, c->n_vocab)) * sizeof(float);
    const size_t own = (size_t)h->n_kv_heads * CHUNK * (size_t)h->d * sizeof(bf16_t);
    int r = 0;
    h->q = random_room(h, queries, false, &r);
    h->out = room(h, queries, &r);
    h->x = random_room(h, x, h->b->ops->input_bytes == sizeof(bf16_t), &r);
    h->y = random_room(h, y, false, &r);
    h->k = random_room(h, kv_bytes(h), true, &r);
    h->v = random_room(h, kv_bytes(h), true, &r);
    h->own_k = random_room(h, own, true, &r);
    h->own_v = random_room(h, own, true, &r);
    h->bad = room(h, sizeof(*h->bad), &r);
    void *packed = room(h, h->b->ops->weight_bytes(WEIGHT_BF16, PRODUCT, PRODUCT), &r);
    bf16_t *file = calloc((size_t)PRODUCT * PRODUCT, sizeof(*file));
    if (!file)
        return error_set(h->err, -ENOMEM, "no memory for a product");
    for (size_t i = 0; i < (size_t)PRODUCT * PRODUCT; i++)
        file[i] = (bf16_t)(0x3c00 + (draw(h) & 0x83ff)); /* either sign, about 1/64 */
    if (r >= 0)
        r = h->b->ops->weight_pack(h->b->stream, WEIGHT_BF16, PRODUCT, PRODUCT, file, packed);
    if (r >= 0)
        r = h->b->dev->stream_sync(h->b->stream);
    free(file);
    h->product = (struct weight){.dtype = WEIGHT_BF16, .n_rows = PRODUCT, .n_cols = PRODUCT, .packed = packed};
    return r;
}

/* What ops take for the time of a call, set aside as an engine does it: without, each call would allocate and wait. */
static int set_scratch(struct hot *h)
{
    const struct op_bounds bounds = {.n_heads = h->n_heads, .n_kv_heads = h->n_kv_heads, .head_dim = h->d, .n_vocab = h->b->model->config.n_vocab, .n_items = SEQUENCES * h->n_kv_heads, .n_rows = {ROWS},
                                     .n_pages = h->n_blocks * BLOCK_SUBPAGES, .fetch_pages = FETCH_PAGES * 4, .scorer = PAGE_SCORER_INDEX2, .n_keys = h->n_keys, .n_queries = CHUNK, .n_window = WINDOW};
    const size_t bytes = h->b->ops->scratch_bytes(h->b->stream, &bounds);
    int r = 0;
    void *memory = room(h, bytes, &r);
    if (r >= 0)
        h->b->dev->stream_scratch(h->b->stream, memory, bytes);
    return r;
}

/* A document of coded blocks in device memory. */
static int make_blocks(struct hot *h)
{
    int r = block_layout_init(&h->layout, h->b->engine.format, 1, (uint32_t)h->n_kv_heads, (uint32_t)h->d);
    if (r < 0)
        return error_set(h->err, r, "no block layout for this shape");
    const size_t first = (h->layout.block_bytes[1] + 255) / 256 * 256, stride = (h->layout.block_bytes[0] + 255) / 256 * 256, n_subpages = (size_t)h->n_blocks * BLOCK_SUBPAGES;
    struct kv_block *table = calloc((size_t)h->n_blocks, sizeof(*table));
    uint16_t *masks = malloc(n_subpages * sizeof(*masks));
    h->blocks = calloc((size_t)h->n_blocks, sizeof(*h->blocks));
    h->items = calloc((size_t)SEQUENCES * (size_t)h->n_kv_heads, sizeof(*h->items));
    h->extents = room(h, first + stride * (size_t)h->n_blocks, &r);
    h->table = room(h, (size_t)h->n_blocks * sizeof(*table), &r);
    h->masks = room(h, n_subpages * sizeof(*masks), &r);
    if (r >= 0 && (!table || !masks || !h->blocks || !h->items))
        r = error_set(h->err, -ENOMEM, "no memory for %d blocks", h->n_blocks);
    for (int i = 0; r >= 0 && i < h->n_blocks; i++) {
        const int64_t at = (int64_t)i * BLOCK_TOKENS * h->d;
        uint8_t *extent = i ? h->extents + first + stride * (size_t)(i - 1) : h->extents;
        h->blocks[i] = (struct block_params){.layout = &h->layout, .first = i == 0, .slice = extent, .k = h->k + at, .v = h->v + at, .head_stride = (int64_t)h->n_keys * h->d};
        table[i].data = extent;
    }
    for (size_t i = 0; r >= 0 && i < n_subpages; i++)
        masks[i] = 0xffff;
    for (int i = 0; r >= 0 && i < h->n_blocks; i += CHUNK / BLOCK_TOKENS)
        r = h->b->ops->block_encode(h->b->stream, h->blocks + i, h->n_blocks - i < CHUNK / BLOCK_TOKENS ? h->n_blocks - i : CHUNK / BLOCK_TOKENS, false, h->bad);
    if (r >= 0)
        r = h->b->dev->copy(h->b->stream, h->table, table, (size_t)h->n_blocks * sizeof(*table));
    if (r >= 0)
        r = h->b->dev->copy(h->b->stream, h->masks, masks, n_subpages * sizeof(*masks));
    if (r >= 0)
        r = h->b->dev->stream_sync(h->b->stream);
    free(masks);
    free(table);
    return r;
}

/* The copy and the large product come first: the others are compared with them. */
static int measure_all(struct hot *h)
{
    const struct model_config *c = &h->b->model->config;
    const double mlp = 2.0 * c->ffn_dim * c->dim, kv = (double)kv_bytes(h), pairs = (double)CHUNK * (h->n_keys - CHUNK) + (double)CHUNK * CHUNK / 2;
    const double page = h->layout.page.bytes, items = (double)SEQUENCES * h->n_kv_heads, index = h->layout.index_entry_bytes, chunk_kv = 4.0 * CHUNK * h->n_kv_heads * h->d;
    const double slices = (double)(CHUNK / BLOCK_TOKENS) * h->layout.slice_bytes[0];
    const struct {
        const char *name;
        int (*call)(struct hot *);
        double work;
        bool operations;
    } rows[] = {
        {"copy, read + write", call_copy, 2 * kv, false},
        {"matmul, 4,096 cubed", call_product, 2.0 * PRODUCT * PRODUCT * PRODUCT, true},
        {"matmul, gate and up of 2,048 tokens", call_mlp_chunk, 2.0 * CHUNK * mlp, true},
        {"matmul, gate and up of 8 tokens, bytes of bf16 weights", call_mlp_decode, 2 * mlp, false},
        {"attn_prefill, 2,048 queries over all keys", call_prefill, 4.0 * pairs * h->n_heads * h->d, true},
        {"attn_prefill, 2,048 queries over themselves", call_first_chunk, 2.0 * CHUNK * CHUNK * h->n_heads * h->d, true},
        {"block_encode, 2,048 tokens, read + write", call_encode, chunk_kv + slices, false},
        {"block_decode, 2,048 tokens, read + write", call_decode_blocks, chunk_kv + slices, false},
        {"window_scores, 32 queries, keys read twice", call_window, 2 * kv, false},
        {"attn_decode, 64 x 4,096 fast rows", call_rows, items * ROWS * 4.0 * h->d, false},
        {"attn_decode, 64 x 128 sub-pages", call_pages, items * FETCH_PAGES * 4 * page, false},
        {"attn_decode, 64 searches of the index, 32 sub-pages each; bytes as if nobody shared", call_search, items * (h->n_blocks * (double)BLOCK_SUBPAGES * index + FETCH_PAGES * page), false},
        {"sample, one row", call_sample, 4.0 * c->n_vocab, false},
    };
    int r = 0;
    for (size_t i = 0; r >= 0 && i < ARRAY_LEN(rows); i++)
        r = measure(h, rows[i].name, rows[i].call, rows[i].work, rows[i].operations);
    return r;
}

int bench_hot_ops(struct gpu_bench *b, int n_keys, struct error *err)
{
    const struct model_config *c = &b->model->config;
    struct hot h = {.b = b, .err = err, .random = 1, .n_heads = c->n_heads, .n_kv_heads = c->n_kv_heads, .d = c->head_dim, .n_keys = n_keys / BLOCK_TOKENS * BLOCK_TOKENS};
    h.n_blocks = h.n_keys / BLOCK_TOKENS;
    if (h.n_keys < ROWS || h.n_keys < CHUNK)
        return error_set(err, -EINVAL, "--ops-context %d: at least %d", n_keys, ROWS);
    int r = make_inputs(&h);
    if (r >= 0)
        r = make_blocks(&h);
    if (r >= 0)
        r = set_scratch(&h);
    if (r >= 0) {
        printf("\nOps of one layer, %d keys\n\n| op | us | rate | of the copy's or the product's |\n|---|---|---|---|\n", h.n_keys);
        r = measure_all(&h);
    }
    b->dev->stream_scratch(b->stream, NULL, 0);
    while (h.n_pieces > 0)
        b->dev->free(b->device, h.pieces[--h.n_pieces]);
    free(h.items);
    free(h.blocks);
    if (r >= 0 && h.failed < 0)
        return error_set(err, h.failed, "ops: a row failed, see the table");
    return r < 0 && !err->text[0] ? error_set(err, r, "ops: %s", strerror(-r)) : r;
}
