/* Hot ops at the shapes of Llama-3.1-8B for the access profiler: profile_ops [OP]... (all, without arguments), in the checked build. Heads of 128 in groups of 4, rows of 4,096 and 14,336; few heads,
 * tokens and blocks, because what an access costs by its shape does not depend on how many there are. Results are looked at by ops_test, not here. */
#include "kernels/backend.h"
#include "kernels/sample_one.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

kernel_backend_fn tidepool_cuda_backend;
extern size_t cuda_stored_weight_bytes(enum weight_dtype dtype, int64_t n_rows, int64_t n_cols);

enum { D = 128, GROUP = 4, KV_HEADS = 2, HEADS = KV_HEADS * GROUP, DIM = 4096, FFN = 14336, KEYS = 1024, BLOCKS = KEYS / BLOCK_TOKENS, SUBPAGES = BLOCKS * BLOCK_SUBPAGES, QUERIES = 64, SEQUENCES = 4,
       ITEMS = SEQUENCES * KV_HEADS, VOCAB = 32768, PIECES = 64 };
#define SCALE 0.088388f /* 1 / sqrt(D) */

static const struct device_ops *dev;
static const struct kernel_ops *ops;
static struct device *device;
static struct stream *stream;
static void *pieces[PIECES];
static int n_pieces;
static uint64_t random_state = 1;

static void need(int r, const char *what)
{
    if (r >= 0)
        return;
    printf("profile_ops: %s: %s\n", what, strerror(-r));
    exit(1);
}

static void *room(size_t bytes)
{
    need(n_pieces < PIECES ? 0 : -ENOSPC, "an op with fewer arrays");
    need(dev->alloc(device, MEM_WORKSPACE, bytes, &pieces[n_pieces]), "device memory");
    return pieces[n_pieces++];
}

static void *upload(const void *src, size_t bytes)
{
    void *memory = room(bytes);
    need(dev->copy(stream, memory, src, bytes), "copy");
    need(dev->stream_sync(stream), "copy");
    return memory;
}

static void *host_room(size_t bytes)
{
    void *memory = calloc(1, bytes);
    need(memory ? 0 : -ENOMEM, "host memory");
    return memory;
}

static double uniform(void)
{
    uint64_t z = random_state += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-52 - 1;
}

static float *floats(size_t n)
{
    float *x = host_room(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = (float)uniform();
    float *device_x = upload(x, n * sizeof *x);
    free(x);
    return device_x;
}

static bf16_t *bf16s(size_t n)
{
    bf16_t *x = host_room(n * sizeof *x);
    for (size_t i = 0; i < n; i++) {
        const float f = (float)uniform();
        uint32_t u;
        memcpy(&u, &f, sizeof u);
        x[i] = (bf16_t)(u >> 16);
    }
    bf16_t *device_x = upload(x, n * sizeof *x);
    free(x);
    return device_x;
}

/* ---- rows of activations ---- */
static void op_elementwise(void)
{
    float *x = floats(4 * FFN), *gamma = floats(DIM);
    void *y = room(4 * FFN * ops->input_bytes);
    need(ops->rmsnorm(stream, x, gamma, 1e-5f, 4, DIM, y), "rmsnorm");
    need(ops->silu_mul(stream, x, x + FFN, 1, FFN, y, FFN), "silu_mul");
}

static void op_qkv_finish(void)
{
    enum { N = 4 };
    struct kv_dst dst[N];
    double inv_freq[D / 2];
    int32_t positions[N];
    bf16_t *k = room(KV_HEADS * N * D * sizeof *k), *v = room(KV_HEADS * N * D * sizeof *v);
    for (int i = 0; i < D / 2; i++)
        inv_freq[i] = pow(500000, -2.0 * i / D);
    for (int i = 0; i < N; i++) {
        dst[i] = (struct kv_dst){.k = k + i * D, .v = v + i * D, .head_stride = N * D};
        positions[i] = 1000 + i;
    }
    float *rope = room(N * D * sizeof *rope);
    need(ops->rope_table(stream, inv_freq, D / 2, 1, positions, N, rope), "rope_table");
    for (enum rope_style style = ROPE_INTERLEAVED; style <= ROPE_HALVES; style++) {
        const struct qkv_params p = {.q = floats(N * HEADS * D), .k = floats(N * KV_HEADS * D), .v = floats(N * KV_HEADS * D), .rope = rope, .style = style, .dst = dst, .n = N, .n_heads = HEADS,
                                     .n_kv_heads = KV_HEADS, .head_dim = D};
        need(ops->qkv_finish(stream, &p), "qkv_finish");
    }
}

/* ---- weights ---- */
static void pack(enum weight_dtype dtype, int64_t n_rows)
{
    const size_t bytes = cuda_stored_weight_bytes(dtype, n_rows, DIM);
    uint8_t *file = host_room(bytes);
    for (size_t i = 0; i < bytes; i++)
        file[i] = (uint8_t)(16 + i % 17); /* scales of any format come out finite */
    need(ops->weight_pack(stream, dtype, n_rows, DIM, file, room(ops->weight_bytes(dtype, n_rows, DIM))), "weight_pack");
    need(dev->stream_sync(stream), "weight_pack");
    free(file);
}

static void op_weights(void)
{
    static const enum weight_dtype dtypes[] = {WEIGHT_BF16, WEIGHT_Q8_0, WEIGHT_Q4_0, WEIGHT_Q4_1, WEIGHT_Q5_0, WEIGHT_Q4_K, WEIGHT_Q5_K, WEIGHT_Q6_K};
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        pack(dtypes[i], 4);
}

static void op_matmul(void)
{
    const int32_t ids[2] = {3, 17};
    const struct weight w = {.dtype = WEIGHT_BF16, .n_rows = 32, .n_cols = DIM, .packed = bf16s(32 * DIM)};
    bf16_t *x = bf16s(2 * DIM);
    float *y = room(2 * DIM * sizeof *y);
    const struct matmul_out out = {.w = &w, .y = y, .ld_y = 32, .bias = floats(32)};
    need(ops->matmul(stream, x, 2, DIM, &out, 1), "matmul");
    need(ops->embed(stream, &w, ids, 2, y), "embed");
}

/* ---- blocks ---- */
static void block_layout(struct block_layout *ret)
{
    need(block_layout_init(ret, KV_FORMAT_K8V4, 1, KV_HEADS, D), "block_layout_init");
}

/* BLOCKS blocks of random keys and values, coded; where each one's slice is. */
static void encoded(struct block_layout *layout, uint8_t *slices[BLOCKS], struct block_params params[BLOCKS], bool attended)
{
    block_layout(layout);
    bf16_t *k = bf16s((size_t)KV_HEADS * KEYS * D), *v = bf16s((size_t)KV_HEADS * KEYS * D);
    int32_t *bad = upload(&(int32_t){0}, sizeof *bad);
    for (int i = 0; i < BLOCKS; i++) {
        slices[i] = room(layout->slice_bytes[i == 0]);
        params[i] = (struct block_params){.layout = layout, .first = i == 0, .slice = slices[i], .k = k + (size_t)i * BLOCK_TOKENS * D, .v = v + (size_t)i * BLOCK_TOKENS * D, .head_stride = KEYS * D};
    }
    need(ops->block_encode(stream, params, BLOCKS, attended, bad), "block_encode");
}

static void op_blocks(void)
{
    struct block_layout layout;
    uint8_t *slices[BLOCKS];
    struct block_params params[BLOCKS];
    encoded(&layout, slices, params, true);
    need(ops->block_decode(stream, params, BLOCKS), "block_decode");
}

/* ---- attention ---- */
static void op_prefill(void)
{
    bf16_t *k = bf16s((size_t)KV_HEADS * KEYS * D), *v = bf16s((size_t)KV_HEADS * KEYS * D);
    const struct attn_prefill_params p = {.q = floats(QUERIES * HEADS * D), .pos0 = KEYS - QUERIES, .n_q = QUERIES, .k = k, .v = v, .head_stride = KEYS * D, .n_heads = HEADS, .n_kv_heads = KV_HEADS,
                                          .head_dim = D, .scale = SCALE, .out = room(QUERIES * HEADS * D * ops->input_bytes), .ret_ml = room(QUERIES * HEADS * 2 * sizeof(float))};
    need(ops->attn_prefill(stream, &p), "attn_prefill");
    float *sums = floats(KV_HEADS * KEYS);
    const struct column_sum_params c = {.attn = &p, .sums = sums, .sum_stride = KEYS};
    need(ops->attn_column_sums(stream, &c), "attn_column_sums");
}

static void decode(struct attn_decode_item *items, const struct block_layout *layout, enum page_scorer scorer, struct device_page_cache *cache)
{
    struct attn_decode_params p = {.items = items, .n_items = ITEMS, .layout = layout, .group = GROUP, .head_dim = D, .scale = SCALE, .scorer = scorer, .page_cache = cache};
    need(ops->attn_decode(stream, &p), "attn_decode");
    need(dev->stream_sync(stream), "attn_decode");
}

static void decode_items(struct attn_decode_item items[ITEMS])
{
    memset(items, 0, ITEMS * sizeof *items);
    float *q = floats(ITEMS * GROUP * D);
    void *out = room(ITEMS * GROUP * D * ops->input_bytes);
    for (int i = 0; i < ITEMS; i++) {
        items[i].q = q + i * GROUP * D;
        items[i].out = matmul_input_at(ops, out, i * GROUP * D);
        items[i].slow.kv_head = i % KV_HEADS;
    }
}

static void op_decode_rows(void)
{
    struct attn_decode_item items[ITEMS];
    struct block_layout layout;
    bf16_t *k = bf16s((size_t)KEYS * D), *v = bf16s((size_t)KEYS * D);
    block_layout(&layout);
    decode_items(items);
    for (int i = 0; i < ITEMS; i++)
        items[i].rows[0] = (struct kv_rows){.k = k, .v = v, .n = KEYS};
    decode(items, &layout, PAGE_SCORER_RECENT, NULL);
}

/* A document that the sequences share: its blocks where `slices` are, with ids or without. */
static void decode_document(struct attn_decode_item items[ITEMS], uint8_t *const slices[BLOCKS], bool ids, int fetch_pages)
{
    struct kv_block table[BLOCKS];
    uint16_t masks[SUBPAGES];
    for (int b = 0; b < BLOCKS; b++)
        table[b] = (struct kv_block){.data = slices[b], .id = ids ? (uint64_t)b + 1 : 0};
    for (int i = 0; i < SUBPAGES; i++)
        masks[i] = 0xffff;
    const struct kv_block *blocks = upload(table, sizeof table);
    const uint16_t *device_masks = upload(masks, sizeof masks);
    decode_items(items);
    for (int i = 0; i < ITEMS; i++) {
        items[i].slow = (struct slow_pages){.blocks = blocks, .masks = device_masks, .n_subpages = SUBPAGES, .n_pages = SUBPAGES, .kv_head = i % KV_HEADS};
        items[i].fetch_pages = fetch_pages;
    }
}

static void op_decode_pages(void)
{
    struct attn_decode_item items[ITEMS];
    struct block_layout layout;
    uint8_t *slices[BLOCKS];
    struct block_params params[BLOCKS];
    encoded(&layout, slices, params, false);
    decode_document(items, slices, false, 32);
    decode(items, &layout, PAGE_SCORER_INDEX2, NULL);
}

/* The same with its blocks in a registered pool, through the page cache, twice: missed, then found. */
static void op_decode_fetch(void)
{
    struct attn_decode_item items[ITEMS];
    struct block_layout layout;
    uint8_t *slices[BLOCKS];
    struct block_params params[BLOCKS];
    encoded(&layout, slices, params, false);
    const size_t stride = (layout.slice_bytes[1] + 4095) / 4096 * 4096;
    uint8_t *pool = mmap(NULL, stride * BLOCKS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    need(pool == MAP_FAILED ? -ENOMEM : 0, "a pool");
    for (int i = 0; i < BLOCKS; i++) {
        need(dev->copy(stream, pool + stride * (size_t)i, slices[i], layout.slice_bytes[i == 0]), "copy");
        slices[i] = pool + stride * (size_t)i;
    }
    need(dev->stream_sync(stream), "copy");
    need(dev->host_register(device, pool, stride * BLOCKS, NULL, NULL), "host_register");
    const struct device_page_cache_config config = {.layout = &layout, .n_pages = 1024, .extent_bytes = 4 << 20};
    struct device_page_cache *cache;
    void *extent = room(config.extent_bytes);
    need(ops->page_cache_open(stream, &config, room(ops->page_cache_bytes(&config)), &cache), "page_cache_open");
    need(ops->page_cache_resize(cache, &extent, 1), "page_cache_resize");
    decode_document(items, slices, true, 32);
    decode(items, &layout, PAGE_SCORER_RECENT, cache);
    decode(items, &layout, PAGE_SCORER_RECENT, cache);
    ops->page_cache_close(cache);
    dev->host_unregister(device, pool);
    munmap(pool, stride * BLOCKS);
}

/* ---- what is kept ---- */
static void op_scores(void)
{
    enum { WINDOW = 32 };
    bf16_t *k = bf16s((size_t)KV_HEADS * KEYS * D), *v = bf16s((size_t)KV_HEADS * KEYS * D);
    float *scores = room(KV_HEADS * KEYS * sizeof *scores);
    int32_t *indices = room(KV_HEADS * KEYS * sizeof *indices);
    const struct window_score_params w = {.q = floats(WINDOW * HEADS * D), .n_window = WINDOW, .k = k, .head_stride = KEYS * D, .n_keys = KEYS, .n_heads = HEADS, .n_kv_heads = KV_HEADS, .head_dim = D,
                                          .scale = SCALE, .last = KEYS - WINDOW, .pool = 7, .chunk = 1, .scores = scores};
    const struct keydiff_params kd = {.k = k, .head_stride = KEYS * D, .n_keys = KEYS, .n_kv_heads = KV_HEADS, .head_dim = D, .last = KEYS, .scores = scores};
    need(ops->window_scores(stream, &w), "window_scores");
    need(ops->topk(stream, scores, KV_HEADS, KEYS - WINDOW, 256, indices), "topk");
    need(ops->gather_rows(stream, k, v, indices, 256, D, bf16s(256 * D), bf16s(256 * D)), "gather_rows");
    need(ops->keydiff_scores(stream, &kd), "keydiff_scores");
}

static void op_sample(void)
{
    const struct sample_params drawn = {.temperature = 1, .top_k = 50, .top_p = 0.9f, .repetition_penalty = 1, .seed = 1};
    struct sample_result result;
    need(sample_one(ops, stream, floats(VOCAB), VOCAB, &drawn, &result), "sample");
}

static const struct {
    const char *name;
    void (*run)(void);
} runs[] = {
    {"elementwise", op_elementwise}, {"qkv_finish", op_qkv_finish}, {"weights", op_weights}, {"matmul", op_matmul}, {"blocks", op_blocks}, {"prefill", op_prefill},
    {"decode_rows", op_decode_rows}, {"decode_pages", op_decode_pages}, {"decode_fetch", op_decode_fetch}, {"scores", op_scores}, {"sample", op_sample},
};

int main(int argc, char **argv)
{
    const struct kernel_backend *backend = tidepool_cuda_backend();
    int n_run = 0;
    dev = backend->device;
    ops = backend->ops;
    need(dev->open(&(struct device_config){.n_threads = 1}, &device), "device");
    need(dev->stream_create(device, &stream), "stream");
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        bool named = argc < 2;
        for (int a = 1; a < argc; a++)
            named |= strcmp(argv[a], runs[i].name) == 0;
        if (!named)
            continue;
        runs[i].run();
        need(dev->stream_sync(stream), runs[i].name);
        for (; n_pieces > 0; n_pieces--)
            dev->free(device, pieces[n_pieces - 1]);
        n_run++;
    }
    dev->stream_free(stream);
    dev->close(device);
    return n_run > 0 ? 0 : 2;
}
