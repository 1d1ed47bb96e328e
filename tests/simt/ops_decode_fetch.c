/* Decode attention through the page cache: blocks lie in a registered pool, sequences share them, and whatever is cached, staged or read in place, in however many rounds, the result has the bits
 * of reading every page where it lies, which attends the fast rows in one launch and not in two. All steps of a run are submitted before any result is looked at, op by
 * op or replayed (device_ops.step_begin), or in turns. */
#include "tests/simt/ops_test.h"
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { SEQUENCES = 3, HEADS = 2, ITEMS = SEQUENCES * HEADS, LAYER = 1, LAYERS = 2, BLOCKS = 6, SUBPAGES = BLOCKS * BLOCK_SUBPAGES, STEPS = 2, RUNS = 3, KEPT = 270, RECENT = 20 };

struct fetch_case {
    enum kv_format format;
    int d, group, fetch;
    enum page_scorer scorer;
    bool blocks;
};

static const struct fetch_case cases[] = {
    {KV_FORMAT_K8V4, 64, 3, 20, PAGE_SCORER_INDEX2, false},
    {KV_FORMAT_K8V8, 96, 2, INT_MAX, PAGE_SCORER_INDEX2, false},
    {KV_FORMAT_BF16, 32, 4, 16, PAGE_SCORER_INDEX2, true},
    {KV_FORMAT_K8V4, 128, 1, 17, PAGE_SCORER_RECENT, false},
};

struct fetch_test {
    struct ops_test *t;
    const struct fetch_case *c;
    struct block_layout layout;
    uint8_t *pool;
    size_t pool_bytes;
    struct attn_decode_item items[ITEMS];
    float *q[STEPS];      /* device, [ITEMS, group, d], */
    void *out[STEPS];     /*   and so is this, of the input type */
    struct page_counts *counts;      /* device, [STEPS, SEQUENCES] */
};

/* Which calls of a run are steps of the device. */
enum with_steps { STEPS_NONE, STEPS_ALL, STEPS_FIRST };

/* What a run leaves. */
struct fetch_result {
    void *out[STEPS];
    struct page_counts counts[STEPS][SEQUENCES];
};

static void pool_make(struct fetch_test *x)
{
    struct ops_test *t = x->t;
    const size_t head = (size_t)(BLOCK_TOKENS * x->c->d);
    int32_t n_bad = 0;
    x->pool_bytes = (x->layout.block_bytes[1] * BLOCKS + 4095) / 4096 * 4096;
    x->pool = mmap(NULL, x->pool_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int b = 0; b < BLOCKS; b++) {
        uint16_t *k = ops_test_bf16(t, HEADS * head, 1), *v = ops_test_bf16(t, HEADS * head, 1);
        const struct block_params params = {.layout = &x->layout, .first = b == 0, .slice = x->pool + x->layout.block_bytes[1] * (size_t)b + block_slice_offset(&x->layout, b == 0, LAYER),
                                            .k = k, .v = v, .head_stride = BLOCK_TOKENS * x->c->d};
        t->cpu_ops->block_encode(t->cpu, &params, 1, false, &n_bad);
        free(k), free(v);
    }
    ops_test_true(t, "register", t->gpu_backend->device->host_register(t->gpu_device, x->pool, x->pool_bytes, NULL, NULL) == 0);
}

/* The last sequence has a block of its own. */
static const struct kv_block *table_make(struct fetch_test *x, int sequence)
{
    struct kv_block table[BLOCKS];
    for (int b = 0; b < BLOCKS; b++) {
        const uint8_t *data = x->pool + x->layout.block_bytes[1] * (size_t)b;
        const bool own = sequence == SEQUENCES - 1 && b == 3;
        table[b] = (struct kv_block){.data = own ? ops_test_upload(x->t, data, x->layout.block_bytes[0]) : data, .id = own ? 0 : DEVICE_PAGE_ID_MAX - 77 * (uint64_t)b};
    }
    return ops_test_upload(x->t, table, sizeof table);
}

static void items_make(struct fetch_test *x)
{
    struct ops_test *t = x->t;
    const size_t rows = KEPT + RECENT, d = (size_t)x->c->d;
    for (int i = 0; i < ITEMS; i++) {
        uint16_t *k = ops_test_bf16(t, rows * d, 1), *v = ops_test_bf16(t, rows * d, 1), masks[SUBPAGES], *gk = ops_test_upload(t, k, rows * d * 2), *gv = ops_test_upload(t, v, rows * d * 2);
        int n_pages = 0;
        for (int j = 0; j < SUBPAGES; j++) {
            masks[j] = ops_test_uniform(t, 0, 1) < .1 ? 0 : (uint16_t)ops_test_uniform(t, 1, 65536);
            n_pages += masks[j] != 0;
        }
        x->items[i] = (struct attn_decode_item){
            .rows = {{.k = gk, .v = gv, .n = KEPT}, {.k = gk + KEPT * d, .v = gv + KEPT * d, .n = i == 1 ? 0 : RECENT}},
            .slow = {.blocks = i % HEADS ? x->items[i - 1].slow.blocks : table_make(x, i / HEADS), .masks = ops_test_upload(t, masks, sizeof masks), .n_subpages = SUBPAGES, .n_pages = n_pages,
                     .layer = LAYER, .kv_head = i % HEADS},
            .fetch_pages = x->c->fetch,
        };
        free(k), free(v);
    }
    for (int s = 0; s < STEPS; s++) { /* two sequences ask for the same */
        const size_t n = (size_t)x->c->group * d;
        float *q = ops_test_floats(t, ITEMS * n, 3);
        memcpy(q + HEADS * n, q, HEADS * n * sizeof *q);
        x->q[s] = ops_test_upload(t, q, ITEMS * n * sizeof *q);
        free(q);
    }
}

static struct attn_decode_params params_of(struct fetch_test *x, struct device_page_cache *cache)
{
    return (struct attn_decode_params){.items = x->items, .n_items = ITEMS, .layout = &x->layout, .group = x->c->group, .head_dim = x->c->d, .scale = 1 / sqrtf((float)x->c->d),
                                       .scorer = x->c->scorer, .fetch_blocks = x->c->blocks, .page_cache = cache};
}

static int decode(struct fetch_test *x, struct attn_decode_params *p, bool as_step)
{
    const struct device_ops *dev = x->t->gpu_backend->device;
    int r = as_step ? dev->step_begin(x->t->gpu) : 0;
    if (r < 0 || !as_step)
        return r < 0 ? r : x->t->gpu_ops->attn_decode(x->t->gpu, p);
    do
        r = dev->step_end(x->t->gpu, x->t->gpu_ops->attn_decode(x->t->gpu, p));
    while (r == 1);
    return r;
}

/* One call a step, then the results. */
static void run(struct fetch_test *x, struct device_page_cache *cache, enum with_steps with, struct fetch_result *ret)
{
    struct ops_test *t = x->t;
    const size_t n = (size_t)(x->c->group * x->c->d), bytes = ITEMS * n * x->t->gpu_ops->input_bytes;
    struct page_counts zeros[STEPS][SEQUENCES] = {{{0}}};
    x->counts = ops_test_upload(t, zeros, sizeof zeros);
    for (int s = 0; s < STEPS; s++)
        x->out[s] = ops_test_room(t, bytes);
    for (int s = 0; s < STEPS; s++) {
        for (int i = 0; i < ITEMS; i++) {
            x->items[i].q = x->q[s] + (size_t)i * n;
            x->items[i].out = matmul_input_at(t->gpu_ops, x->out[s], i * (int64_t)n);
            x->items[i].ret_counts = x->counts + s * SEQUENCES + i / HEADS;
        }
        struct attn_decode_params p = params_of(x, cache);
        ops_test_true(t, "attn_decode", decode(x, &p, with == STEPS_ALL || (with == STEPS_FIRST && s == 0)) == 0);
    }
    for (int s = 0; s < STEPS; s++)
        ret->out[s] = ops_test_download(t, x->out[s], bytes);
    struct page_counts *counts = ops_test_download(t, x->counts, sizeof zeros);
    memcpy(ret->counts, counts, sizeof zeros);
    free(counts);
}

static void result_free(struct fetch_result *r)
{
    for (int s = 0; s < STEPS; s++)
        free(r->out[s]);
}

/* The same bits, the same pages; what has an id was found or missed, and the cache's own sums are those of the sequences. Returns the misses. */
static uint64_t compare(struct fetch_test *x, const char *what, const struct fetch_result *expected, const struct fetch_result *actual)
{
    uint64_t misses = 0;
    for (int s = 0; s < STEPS; s++) {
        ops_test_same(x->t, what, expected->out[s], actual->out[s], x->t->gpu_ops->input_bytes * (size_t)(ITEMS * x->c->group * x->c->d));
        for (int i = 0; i < SEQUENCES; i++) {
            const struct page_counts *e = &expected->counts[s][i], *a = &actual->counts[s][i];
            ops_test_true(x->t, what, a->pages == e->pages && a->tokens == e->tokens && a->bytes == e->bytes && a->hits + a->misses == e->misses && a->bytes_missed <= e->bytes_missed &&
                                      a->bytes_missed >= (uint64_t)a->misses * x->layout.page.bytes && e->hits == 0);
            misses += a->misses;
        }
    }
    return misses;
}

/* With scratch of its own and room for the arguments. */
static void steps_open(struct fetch_test *x)
{
    struct ops_test *t = x->t;
    const struct device_ops *dev = t->gpu_backend->device;
    const struct op_bounds bounds = {.n_heads = HEADS * x->c->group, .n_kv_heads = HEADS, .head_dim = x->c->d, .n_items = ITEMS, .n_rows = {KEPT, RECENT}, .n_pages = SUBPAGES,
                                     .fetch_pages = x->c->fetch, .scorer = x->c->scorer, .fetch_blocks = x->c->blocks};
    const size_t scratch = t->gpu_ops->scratch_bytes(t->gpu, &bounds), args = t->gpu_ops->step_bytes(&bounds, 1);
    dev->stream_scratch(t->gpu, ops_test_room(t, scratch), scratch);
    ops_test_true(t, "steps_open", dev->steps_open(t->gpu, ops_test_room(t, args), args) == 0);
}

/* One step more: the cache's statistics, which the gather stream reads, come behind it without any other wait. */
static void steps_close(struct fetch_test *x, struct device_page_cache *cache, enum with_steps with)
{
    struct ops_test *t = x->t;
    const struct device_ops *dev = t->gpu_backend->device;
    const uint64_t n = 1 + (with == STEPS_ALL ? RUNS * STEPS : RUNS);
    struct device_page_cache_stats at_once = {0}, after = {0};
    struct step_stats stats;
    struct attn_decode_params p = params_of(x, cache);
    ops_test_true(t, "attn_decode", decode(x, &p, true) == 0);
    ops_test_true(t, "page_cache_stats", t->gpu_ops->page_cache_stats(cache, &at_once) == 0 && dev->stream_sync(t->gpu) == 0 && t->gpu_ops->page_cache_stats(cache, &after) == 0);
    ops_test_true(t, "statistics come behind the step", at_once.hits == after.hits && at_once.misses == after.misses);
    dev->step_stats(t->gpu, &stats);
    dev->steps_close(t->gpu);
    dev->stream_scratch(t->gpu, NULL, 0);
    ops_test_true(t, "all steps but two are replayed", stats.eager == 1 && stats.captures == 1 && stats.replays == n - 2);
}

/* `sets` of pages an extent, 0: none; `staged` pages a round, if need be. */
static void through_cache(struct fetch_test *x, size_t sets, int staged, enum with_steps with, const struct fetch_result *expected)
{
    struct ops_test *t = x->t;
    const size_t set = DEVICE_PAGE_WAYS * (x->layout.page.bytes + 12) + 8, sinks = DEVICE_PAGE_WAYS * (x->layout.sink.bytes + 12) + 8;
    const struct device_page_cache_config config = {.layout = &x->layout, .n_pages = ITEMS * SUBPAGES, .n_staged = staged, .extent_bytes = sets ? sets * set + sinks + 6 * 256 : 0};
    struct device_page_cache *cache;
    struct device_page_cache_stats stats;
    struct fetch_result actual;
    uint64_t misses = 0;
    ops_test_true(t, "page_cache_open", t->gpu_ops->page_cache_open(t->gpu, &config, ops_test_room(t, t->gpu_ops->page_cache_bytes(&config)), &cache) == 0);
    if (sets) {
        void *extent = ops_test_room(t, config.extent_bytes);
        ops_test_true(t, "page_cache_resize", t->gpu_ops->page_cache_resize(cache, &extent, 1) == 0);
    }
    if (with != STEPS_NONE)
        steps_open(x);
    for (int i = 0; i < (with == STEPS_NONE ? 2 : RUNS); i++) {
        const char *what = ops_test_shape("%s d %d group %d fetch %d, %zu sets, %d staged, steps %d, run %d", kv_format_name(x->c->format), x->c->d, x->c->group, x->c->fetch, sets, staged, with, i);
        run(x, cache, with, &actual);
        const uint64_t missed = compare(x, what, expected, &actual);
        ops_test_true(t, "with room for all of them pages are fetched once", sets < 100 || i == 0 || missed == 0);
        misses += missed;
        result_free(&actual);
    }
    ops_test_true(t, "page_cache_stats", t->gpu_ops->page_cache_stats(cache, &stats) == 0);
    ops_test_true(t, "statistics are the sums of all", stats.misses == misses && stats.in_place == 0);
    if (with != STEPS_NONE)
        steps_close(x, cache, with);
    t->gpu_ops->page_cache_close(cache);
}

void test_ops_decode_fetch(struct ops_test *t)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct fetch_test x = {.t = t, .c = &cases[i]};
        struct fetch_result expected;
        block_layout_init(&x.layout, cases[i].format, LAYERS, HEADS, (uint32_t)cases[i].d);
        pool_make(&x);
        items_make(&x);
        run(&x, NULL, STEPS_NONE, &expected);
        through_cache(&x, 0, 16, i == 0 ? STEPS_ALL : STEPS_NONE, &expected);
        if (i % 2 == 0)
            through_cache(&x, 1, 32, i == 0 ? STEPS_FIRST : STEPS_NONE, &expected);
        through_cache(&x, 200, 0, i == 2 ? STEPS_ALL : STEPS_NONE, &expected);
        result_free(&expected);
        t->gpu_backend->device->host_unregister(t->gpu_device, x.pool);
        munmap(x.pool, x.pool_bytes);
        ops_test_free_buffers(t);
    }
}
