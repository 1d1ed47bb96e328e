/* Decode attention: items of several sequences, whose blocks are coded by the CPU and lie in device memory. Item i is about layer 1 and KV head i of the layout. */
#include "tests/simt/ops_test.h"
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ITEMS = 3, LAYERS = 2, LAYER = 1, MAX_BLOCKS = 8 };

struct decode_case {
    enum kv_format format;
    int group, d, n_blocks, n_kept, n_recent, fetch;
    double kept_share; /* of a page's tokens that are not slow */
    enum page_scorer scorer;
    bool blocks, biased;
};

static const struct decode_case cases[] = {
    {KV_FORMAT_K8V4, 3, 64, 3, 70, 40, INT_MAX, .2, PAGE_SCORER_INDEX2, false, false}, {KV_FORMAT_K8V4, 4, 128, 6, 300, 17, 20, .1, PAGE_SCORER_INDEX2, false, false},
    {KV_FORMAT_K8V8, 16, 96, 2, 1, 0, 5, .4, PAGE_SCORER_INDEX2, false, false},        {KV_FORMAT_BF16, 1, 64, 2, 0, 3, 1, 0, PAGE_SCORER_INDEX2, false, false},
    {KV_FORMAT_K8V4, 2, 64, 5, 600, 5, 33, .3, PAGE_SCORER_RECENT, false, false},      {KV_FORMAT_K8V4, 3, 64, 5, 9, 5, 11, .3, PAGE_SCORER_MINMAX, false, false},
    {KV_FORMAT_K8V8, 2, 96, 3, 9, 5, 7, .3, PAGE_SCORER_MEAN, false, false},           {KV_FORMAT_K8V4, 7, 128, 3, 9, 5, 7, .3, PAGE_SCORER_MEANVAR, false, false},
    {KV_FORMAT_K8V4, 1, 64, 3, 9, 5, 7, .3, PAGE_SCORER_ORACLE, false, false},         {KV_FORMAT_K8V4, 3, 64, 6, 9, 5, 16, .2, PAGE_SCORER_INDEX2, true, false},
    {KV_FORMAT_K8V4, 2, 64, 6, 9, 5, 24, .2, PAGE_SCORER_RECENT, true, false},  {KV_FORMAT_K8V4, 2, 64, 2, 9, 5, 16, .2, PAGE_SCORER_INDEX2, true, false},
    {KV_FORMAT_K8V4, 7, 64, 2, 20, 20, 0, .1, PAGE_SCORER_INDEX2, false, false},
    {KV_FORMAT_K8V4, 5, 80, 0, 257, 256, 8, 0, PAGE_SCORER_INDEX2, false, false}, {KV_FORMAT_K8V4, 2, 64, 0, 1, 0, 8, 0, PAGE_SCORER_INDEX2, false, false},
    {KV_FORMAT_K8V4, 1, 128, 0, 0, 0, 8, 0, PAGE_SCORER_INDEX2, false, false},   {KV_FORMAT_K8V4, 3, 64, 3, 70, 40, 7, .2, PAGE_SCORER_INDEX2, false, true},
    {KV_FORMAT_K8V8, 2, 96, 2, 9, 40, 5, .2, PAGE_SCORER_MEANVAR, false, true},  {KV_FORMAT_K8V4, 4, 128, 3, 9, 40, 8, .2, PAGE_SCORER_MINMAX, true, true},
    {KV_FORMAT_BF16, 5, 64, 2, 9, 40, 5, .2, PAGE_SCORER_ORACLE, false, true},
};

/* One item on both sides. What the CPU's points at is the host's, what the GPU's points at the device's. */
struct decode_pair {
    struct attn_decode_item cpu, gpu;
    uint8_t *pool;
    struct kv_block blocks[MAX_BLOCKS], gpu_blocks[MAX_BLOCKS]; /* both in host memory */
    uint16_t masks[MAX_BLOCKS * BLOCK_SUBPAGES];
    struct page_counts counts, *gpu_counts;
    uint16_t *k, *v;
    uint8_t *summaries;
    float *q, *out;
    int32_t cpu_chosen[64], gpu_chosen[64];
};

/* Codes n_blocks blocks of random tokens in one layer; the other holds what no test wrote. */
static void pool_make(struct ops_test *t, const struct decode_case *c, const struct block_layout *layout, struct decode_pair *p)
{
    const size_t extent = layout->block_bytes[1], head = (size_t)(BLOCK_TOKENS * c->d);
    p->pool = ops_test_alloc(extent * (size_t)(c->n_blocks + 1));
    int32_t n_bad = 0;
    for (int b = 0; b < c->n_blocks; b++) {
        uint16_t *k = ops_test_bf16(t, ITEMS * head, 1), *v = ops_test_bf16(t, ITEMS * head, 1);
        const struct block_params params = {.layout = layout, .first = b == 0, .slice = p->pool + extent * (size_t)b + block_slice_offset(layout, b == 0, LAYER), .k = k, .v = v,
                                            .head_stride = BLOCK_TOKENS * c->d};
        t->cpu_ops->block_encode(t->cpu, &params, 1, false, &n_bad);
        free(k), free(v);
    }
}

/* Device copies of the blocks' indices; where they lie in the blocks there is nothing any more. */
static void index_take(struct ops_test *t, const struct decode_case *c, const struct block_layout *layout, uint8_t *pool, struct kv_block *blocks)
{
    const size_t entries = BLOCK_SUBPAGES * layout->index_entry_bytes;
    uint8_t *copy = ops_test_alloc(block_index_bytes(layout));
    for (int b = 0; b < c->n_blocks; b++) {
        for (uint32_t h = 0; h < ITEMS; h++) {
            uint8_t *index = pool + layout->block_bytes[1] * (size_t)b + block_slice_offset(layout, b == 0, LAYER) + block_index_offset(layout, b == 0, h, 0);
            memcpy(copy + block_index_copy_offset(layout, LAYER, h, 0), index, entries);
            memset(index, 0xFF, entries);
        }
        blocks[b].index = ops_test_upload(t, copy, block_index_bytes(layout));
    }
    free(copy);
}

/* Item 1 reads the indices of its blocks where they lie. */
static void blocks_make(struct ops_test *t, const struct decode_case *c, const struct block_layout *layout, int i, struct decode_pair *p)
{
    const size_t extent = layout->block_bytes[1], bytes = extent * (size_t)(c->n_blocks + 1);
    struct kv_block *gpu = p->gpu_blocks;
    uint8_t *pool = ops_test_alloc(bytes);
    memcpy(pool, p->pool, bytes);
    if (i != 1)
        index_take(t, c, layout, pool, gpu);
    const uint8_t *gpu_pool = ops_test_upload(t, pool, bytes);
    for (int b = 0; b < c->n_blocks; b++) {
        gpu[b].data = gpu_pool + extent * (size_t)b;
        gpu[b].id = b % 2 ? 7 + (uint64_t)b : 0;
        p->blocks[b] = (struct kv_block){.data = p->pool + extent * (size_t)b, .id = gpu[b].id};
    }
    p->cpu.slow.blocks = p->blocks;
    p->gpu.slow.blocks = ops_test_upload(t, gpu, sizeof p->gpu_blocks);
    free(pool);
}

/* Sub-page 9 has no slow token, and where there are blocks enough nothing of block 2. */
static int masks_make(struct ops_test *t, const struct decode_case *c, struct decode_pair *p)
{
    int n_pages = 0;
    for (int i = 0; i < c->n_blocks * BLOCK_SUBPAGES; i++) {
        p->masks[i] = 0;
        for (int bit = 0; bit < SUBPAGE_TOKENS; bit++)
            p->masks[i] |= (uint16_t)((ops_test_uniform(t, 0, 1) >= c->kept_share) << bit);
        if (i == 9 || (c->n_blocks > 3 && i / BLOCK_SUBPAGES == 2))
            p->masks[i] = 0;
        n_pages += p->masks[i] != 0;
    }
    return n_pages;
}

static void slow_make(struct ops_test *t, const struct decode_case *c, const struct block_layout *layout, int i, struct decode_pair *p)
{
    pool_make(t, c, layout, p);
    const int n_pages = masks_make(t, c, p);
    p->cpu.slow = p->gpu.slow = (struct slow_pages){.n_subpages = c->n_blocks * BLOCK_SUBPAGES, .n_pages = n_pages, .layer = LAYER, .kv_head = i};
    p->cpu.slow.masks = p->masks;
    p->gpu.slow.masks = ops_test_upload(t, p->masks, sizeof p->masks);
    blocks_make(t, c, layout, i, p);
}

static void pair_make(struct ops_test *t, const struct decode_case *c, const struct block_layout *layout, int i, struct decode_pair *p)
{
    const size_t d = (size_t)c->d, q_bytes = (size_t)c->group * d * sizeof(float), n_rows = (size_t)(c->n_kept + c->n_recent), row_bytes = n_rows * d * 2;
    const size_t summary_bytes = page_summary_bytes(c->scorer, c->d) * MAX_BLOCKS * BLOCK_SUBPAGES, recent = (size_t)c->n_kept * d;
    memset(p, 0, sizeof *p);
    p->q = ops_test_floats(t, q_bytes / sizeof(float), 3);
    p->out = ops_test_alloc(q_bytes);
    p->k = ops_test_bf16(t, n_rows * d + 8, 1), p->v = ops_test_bf16(t, n_rows * d + 8, 1);
    p->summaries = ops_test_alloc(summary_bytes);
    p->counts = (struct page_counts){.tokens = 1000};
    p->gpu_counts = ops_test_upload(t, &p->counts, sizeof p->counts);
    uint16_t *gk = ops_test_upload(t, p->k, row_bytes + 16), *gv = ops_test_upload(t, p->v, row_bytes + 16);
    p->cpu = (struct attn_decode_item){.q = p->q, .out = p->out, .rows = {{.k = p->k, .v = p->v, .n = c->n_kept}, {.k = p->k + recent, .v = p->v + recent, .n = c->n_recent}},
                                       .summaries = p->summaries, .fetch_pages = c->fetch, .ret_chosen = p->cpu_chosen, .ret_counts = &p->counts};
    p->gpu = (struct attn_decode_item){.q = ops_test_upload(t, p->q, q_bytes), .out = ops_test_room_inputs(t, (size_t)(c->group * c->d)), .rows = {{.k = gk, .v = gv, .n = c->n_kept}, {.k = gk + recent, .v = gv + recent, .n = c->n_recent}},
                                       .fetch_pages = c->fetch, .ret_chosen = p->gpu_chosen, .ret_counts = p->gpu_counts};
    slow_make(t, c, layout, i, p);
    if (summary_bytes > 0)
        t->cpu_ops->page_summaries(t->cpu, &(struct page_summary_params){.scorer = c->scorer, .layout = layout, .slow = p->cpu.slow, .summaries = p->summaries});
    p->gpu.summaries = ops_test_upload(t, p->summaries, summary_bytes);
}

static void pair_free(struct decode_pair *p)
{
    free(p->pool), free(p->summaries), free(p->k), free(p->v), free(p->q), free(p->out);
}

static void decode(struct ops_test *t, const struct decode_case *c)
{
    struct block_layout layout = {0};
    struct decode_pair pairs[ITEMS];
    struct attn_decode_item cpu[ITEMS], gpu[ITEMS];
    struct key_bias cpu_bias, gpu_bias;
    int32_t positions[700];
    if (c->n_blocks > 0)
        ops_test_true(t, "layout", block_layout_init(&layout, c->format, LAYERS, ITEMS, (uint32_t)c->d) == 0);
    for (int i = 0; i < ITEMS; i++) {
        pair_make(t, c, &layout, i, &pairs[i]);
        cpu[i] = pairs[i].cpu;
        gpu[i] = pairs[i].gpu;
    }
    gpu[1].rows[1].n = cpu[1].rows[1].n = c->n_recent / 2; /* items differ */
    for (int i = 0; i < 700; i++)
        positions[i] = i * 37 % 600;
    int32_t *gpu_positions = ops_test_upload(t, positions, sizeof positions);
    ops_test_bias_make(t, ITEMS, c->d, 700, &cpu_bias, &gpu_bias);
    for (int i = 0; i < ITEMS; i++) { /* kept rows lie anywhere, recent ones behind each other */
        cpu[i].rows[0].positions = positions, gpu[i].rows[0].positions = gpu_positions;
        cpu[i].rows[1].pos0 = gpu[i].rows[1].pos0 = 16 * i + 5;
    }
    struct attn_decode_params p = {.items = cpu, .n_items = ITEMS, .layout = c->n_blocks ? &layout : NULL, .group = c->group, .head_dim = c->d, .scale = 1 / sqrtf((float)c->d), .scorer = c->scorer, .fetch_blocks = c->blocks, .bias = c->biased ? &cpu_bias : NULL};
    t->cpu_ops->attn_decode(t->cpu, &p);
    p.items = gpu, p.bias = c->biased ? &gpu_bias : NULL;
    ops_test_true(t, "attn_decode", t->gpu_ops->attn_decode(t->gpu, &p) == 0);
    for (int i = 0; i < ITEMS; i++) {
        float *out = ops_test_download_inputs(t, gpu[i].out, (size_t)(c->group * c->d));
        struct page_counts *counts = ops_test_download(t, pairs[i].gpu_counts, sizeof *counts);
        const char *shape = ops_test_shape("attn_decode %s group %d d %d blocks %d rows %d+%d fetch %d scorer %d blocks %d biased %d", kv_format_name(c->format), c->group, c->d, c->n_blocks, c->n_kept, c->n_recent,
                                           c->fetch, (int)c->scorer, c->blocks, c->biased);
        ops_test_true(t, shape, cpu[i].ret_n_chosen == gpu[i].ret_n_chosen);
        ops_test_same(t, shape, cpu[i].ret_chosen, gpu[i].ret_chosen, sizeof(int32_t) * (size_t)cpu[i].ret_n_chosen);
        ops_test_same(t, shape, &pairs[i].counts, counts, sizeof *counts);
        ops_test_nmse(t, shape, cpu[i].out, out, (size_t)(c->group * c->d), 2e-4);
        free(out), free(counts);
        pair_free(&pairs[i]);
    }
    ops_test_bias_free(&cpu_bias);
}

/* Items of one KV head, more than a tile of queries holds, over two documents and one that begins as the first and goes on as the second; tokens are kept in two ways. Each is as alone. */
static void shared_blocks(struct ops_test *t, int group, bool biased)
{
    enum { N = 25, D = 64, BLOCKS = 5 };
    const struct decode_case c = {KV_FORMAT_K8V4, group, D, BLOCKS, 3, 5, 9, .2, PAGE_SCORER_INDEX2, false, false};
    const size_t q_bytes = (size_t)(group * D) * sizeof(float);
    struct block_layout layout;
    struct decode_pair pairs[2];
    struct attn_decode_item cpu[N], gpu[N];
    struct kv_block mixed[MAX_BLOCKS], gpu_mixed[MAX_BLOCKS];
    struct key_bias cpu_bias, gpu_bias;
    int32_t cpu_chosen[N][16], gpu_chosen[N][16];
    ops_test_true(t, "layout", block_layout_init(&layout, c.format, LAYERS, ITEMS, D) == 0);
    for (int i = 0; i < 2; i++)
        pair_make(t, &c, &layout, 2 * i, &pairs[i]);
    memcpy(mixed, pairs[0].blocks, sizeof mixed), memcpy(gpu_mixed, pairs[0].gpu_blocks, sizeof mixed);
    memcpy(mixed + 2, pairs[1].blocks + 2, 3 * sizeof *mixed), memcpy(gpu_mixed + 2, pairs[1].gpu_blocks + 2, 3 * sizeof *mixed);
    const struct kv_block *const cpu_tables[] = {pairs[0].blocks, pairs[1].blocks, mixed};
    const struct kv_block *const gpu_tables[] = {pairs[0].gpu.slow.blocks, pairs[1].gpu.slow.blocks, ops_test_upload(t, gpu_mixed, sizeof gpu_mixed)};
    ops_test_bias_make(t, ITEMS, D, 700, &cpu_bias, &gpu_bias);
    for (int i = 0; i < N; i++) {
        cpu[i] = pairs[i % 2].cpu, gpu[i] = pairs[i % 2].gpu;
        cpu[i].slow.blocks = cpu_tables[i % 5 % 3], gpu[i].slow.blocks = gpu_tables[i % 5 % 3];
        cpu[i].slow.kv_head = gpu[i].slow.kv_head = i / 20; /* the last five have a head of their own */
        cpu[i].q = ops_test_floats(t, q_bytes / sizeof(float), 3), cpu[i].out = ops_test_alloc(q_bytes);
        gpu[i].q = ops_test_upload(t, cpu[i].q, q_bytes), gpu[i].out = ops_test_room_inputs(t, q_bytes / sizeof(float));
        cpu[i].ret_chosen = cpu_chosen[i], gpu[i].ret_chosen = gpu_chosen[i];
        cpu[i].ret_counts = gpu[i].ret_counts = NULL;
    }
    struct attn_decode_params p = {.items = cpu, .n_items = N, .layout = &layout, .group = group, .head_dim = D, .scale = 0.125f, .bias = biased ? &cpu_bias : NULL};
    t->cpu_ops->attn_decode(t->cpu, &p);
    p.items = gpu, p.bias = biased ? &gpu_bias : NULL;
    ops_test_true(t, "attn_decode", t->gpu_ops->attn_decode(t->gpu, &p) == 0);
    for (int i = 0; i < N; i++) {
        float *out = ops_test_download_inputs(t, gpu[i].out, q_bytes / sizeof(float));
        const char *shape = ops_test_shape("attn_decode of %d sharing blocks, group %d, biased %d, item %d", (int)N, group, biased, i);
        ops_test_same(t, shape, cpu_chosen[i], gpu_chosen[i], sizeof(int32_t) * (size_t)c.fetch);
        ops_test_nmse(t, shape, cpu[i].out, out, (size_t)(group * D), 2e-4);
        free(out), free((void *)(uintptr_t)cpu[i].q), free(cpu[i].out);
    }
    for (int i = 0; i < 2; i++)
        pair_free(&pairs[i]);
    ops_test_bias_free(&cpu_bias);
    ops_test_free_buffers(t);
}

/* More sub-pages than the choice has threads, twice over; all blocks but the first are one in memory, and of every third sub-page nothing is slow. */
static void many_pages(struct ops_test *t, enum page_scorer scorer, int fetch, bool blocks)
{
    enum { D = 32, BLOCKS = 150, SUBPAGES = BLOCKS * BLOCK_SUBPAGES };
    const struct decode_case c = {KV_FORMAT_K8V4, 1, D, 2, 3, 5, fetch, .2, scorer, blocks, false};
    struct block_layout layout;
    struct decode_pair pair;
    struct kv_block *table = ops_test_alloc(sizeof *table * BLOCKS);
    uint16_t *masks = ops_test_alloc(sizeof *masks * SUBPAGES);
    int32_t *cpu_chosen = ops_test_alloc(sizeof *cpu_chosen * SUBPAGES), *gpu_chosen = ops_test_alloc(sizeof *gpu_chosen * SUBPAGES);
    ops_test_true(t, "layout", block_layout_init(&layout, c.format, LAYERS, ITEMS, D) == 0);
    pair_make(t, &c, &layout, 0, &pair);
    struct attn_decode_item cpu = pair.cpu, gpu = pair.gpu;
    cpu.slow.n_subpages = SUBPAGES, cpu.slow.n_pages = 0;
    for (int i = 0; i < SUBPAGES; i++) {
        masks[i] = i % 3 == 1 ? 0 : (uint16_t)(0x8421 * (i % 7 + 1) | 1);
        cpu.slow.n_pages += masks[i] != 0;
    }
    gpu.slow.n_subpages = SUBPAGES, gpu.slow.n_pages = cpu.slow.n_pages;
    for (int b = 0; b < BLOCKS; b++)
        table[b] = pair.gpu_blocks[b > 0];
    gpu.slow.blocks = ops_test_upload(t, table, sizeof *table * BLOCKS), gpu.slow.masks = ops_test_upload(t, masks, sizeof *masks * SUBPAGES);
    for (int b = 0; b < BLOCKS; b++)
        table[b] = pair.blocks[b > 0];
    cpu.slow.blocks = table, cpu.slow.masks = masks;
    cpu.ret_chosen = cpu_chosen, gpu.ret_chosen = gpu_chosen;
    struct attn_decode_params p = {.items = &cpu, .n_items = 1, .layout = &layout, .group = 1, .head_dim = D, .scale = 0.2f, .scorer = scorer, .fetch_blocks = blocks};
    t->cpu_ops->attn_decode(t->cpu, &p);
    p.items = &gpu;
    ops_test_true(t, "attn_decode", t->gpu_ops->attn_decode(t->gpu, &p) == 0);
    float *out = ops_test_download_inputs(t, gpu.out, D);
    const char *shape = ops_test_shape("attn_decode of %d pages, scorer %d, fetch %d, blocks %d", cpu.slow.n_pages, (int)scorer, fetch, blocks);
    ops_test_true(t, shape, cpu.ret_n_chosen == gpu.ret_n_chosen);
    ops_test_same(t, shape, cpu_chosen, gpu_chosen, sizeof *cpu_chosen * (size_t)cpu.ret_n_chosen);
    ops_test_nmse(t, shape, cpu.out, out, D, 2e-4);
    free(out), free(table), free(masks), free(cpu_chosen), free(gpu_chosen);
    pair_free(&pair);
    ops_test_free_buffers(t);
}

void test_ops_decode(struct ops_test *t)
{
    const struct device_ops *ops = t->gpu_backend->device;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        /* With scratch set aside nothing is allocated. */
        const struct op_bounds bounds = {.n_heads = cases[i].group, .n_kv_heads = 1, .head_dim = cases[i].d, .n_vocab = 1, .n_items = ITEMS, .n_rows = {cases[i].n_kept, cases[i].n_recent},
                                         .n_pages = cases[i].n_blocks * BLOCK_SUBPAGES, .fetch_pages = cases[i].fetch, .scorer = cases[i].scorer, .fetch_blocks = cases[i].blocks, .n_bias_pairs = cases[i].biased ? 3 : 0};
        const size_t bytes = t->gpu_ops->scratch_bytes(t->gpu, &bounds);
        struct device_memory_stats stats;
        if (i % 2 == 0)
            ops->stream_scratch(t->gpu, ops_test_room(t, bytes), bytes);
        ops->reset_peaks(t->gpu_device);
        decode(t, &cases[i]);
        ops->memory_stats(t->gpu_device, &stats);
        /* The test's own buffers are still there: a piece that came and went would show in the peak. */
        ops_test_true(t, "scratch_bytes is what a call takes", i % 2 == 0 ? stats.total_peak == stats.total_now : stats.total_peak <= stats.total_now + bytes);
        ops->stream_scratch(t->gpu, NULL, 0);
        ops_test_free_buffers(t);
    }
    many_pages(t, PAGE_SCORER_RECENT, 40, false);
    many_pages(t, PAGE_SCORER_INDEX2, 64, true);
    shared_blocks(t, 4, false);
    shared_blocks(t, 3, true);
    struct attn_decode_params p = {.n_items = 0, .group = 17, .head_dim = 64};
    ops_test_true(t, "a group without a kernel", t->gpu_ops->attn_decode(t->gpu, &p) == -ENOTSUP);
}
