/* The page cache by itself: lists of pages are fetched, step after step, and every answer has to be the page's bytes; what was found and what went is held to a plain model of the cache. */
#include "kernels/cuda/page_cache_shape.h"
#include "tests/simt/ops_test.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { LAYERS = 2, HEADS = 2, BLOCKS = 12, WAYS = DEVICE_PAGE_WAYS, MODEL_EXTENTS = 4, MODEL_SETS = 64, CALL_MAX = 300 };

struct cache_case {
    enum kv_format format;
    int d, n_pages, steps;
    size_t extent_sets;                    /* an extent has about so many sets of pages */
    int n_extents[3];                      /* in the first, second and last third of the steps */
    int hot;                               /* of the blocks that pages are drawn from, so many are drawn mostly */
};

static const struct cache_case cases[] = {
    {KV_FORMAT_K8V4, 64, 40, 6, 0, {0, 0, 0}, 12},   /* all are staged */
    {KV_FORMAT_K8V4, 128, 120, 12, 1, {1, 1, 1}, 6}, /* a set that overflows in each call */
    {KV_FORMAT_K8V8, 96, 50, 15, 2, {2, 3, 1}, 3},
    {KV_FORMAT_BF16, 32, 100, 12, 20, {1, 4, 2}, 4}, /* sinks are pages */
    {KV_FORMAT_K8V4, 64, 300, 9, 60, {1, 0, 2}, 8},
};

/* ---- the model ---- */
struct model_set {
    uint64_t tags[WAYS];
    uint32_t stamps[WAYS], clock;
};

struct model {
    struct page_cache_shape shape;
    uint32_t epoch, n_extents;
    struct model_set sets[MODEL_EXTENTS * MODEL_SETS];
    int n_staging[PAGE_CLASSES];
    struct device_page_cache_stats stats;
};

struct model_page { /* a distinct page of a call */
    uint64_t tag;
    int page_class, first; /* request */
    bool missed;
};

static int by_tag(const void *a, const void *b)
{
    const struct model_page *x = a, *y = b;
    return x->tag < y->tag ? -1 : x->tag > y->tag;
}

static struct model_set *model_set(struct model *m, const struct model_page *p)
{
    return &m->sets[page_set(&m->shape, p->tag, p->page_class, m->n_extents)];
}

static bool model_hit(struct model *m, const struct model_page *p)
{
    struct model_set *s = model_set(m, p);
    for (int w = 0; w < WAYS; w++)
        if (s->tags[w] == p->tag) {
            s->stamps[w] = m->epoch;
            s->clock |= 1u << w;
            return true;
        }
    return false;
}

/* Whether it found a slot. */
static bool model_place(struct model *m, const struct model_page *p)
{
    struct model_set *s = model_set(m, p);
    uint32_t empty = 0, pinned = 0;
    for (int w = 0; w < WAYS; w++) {
        empty |= (uint32_t)(s->tags[w] == 0) << w;
        pinned |= (uint32_t)(s->stamps[w] == m->epoch || s->stamps[w] == m->epoch - 1) << w;
    }
    const int way = page_victim(&s->clock, empty, empty ? 0 : pinned);
    if (way < 0)
        return false;
    m->stats.evictions += s->tags[way] != 0;
    s->tags[way] = p->tag;
    s->stamps[way] = m->epoch;
    return true;
}

/* ret_missed[i]: request i is counted as a miss. */
static void model_call(struct model *m, const struct fetch_page *pages, int n, bool *ret_missed)
{
    struct model_page distinct[CALL_MAX];
    int n_distinct = 0, staged[PAGE_CLASSES] = {0};
    m->epoch += n > 0;
    for (int i = 0; i < n; i++) {
        const uint64_t tag = page_tag(pages[i].id, pages[i].layer, pages[i].kv_head, pages[i].subpage);
        int j = 0;
        ret_missed[i] = false;
        if (pages[i].id == 0)
            continue;
        while (j < n_distinct && distinct[j].tag != tag)
            j++;
        if (j < n_distinct) {
            m->stats.hits++;
            continue;
        }
        distinct[n_distinct++] = (struct model_page){.tag = tag, .page_class = page_class_of(&m->shape, pages[i].sink), .first = i};
    }
    for (int j = 0; j < n_distinct; j++) {
        distinct[j].missed = m->n_extents == 0 || !model_hit(m, &distinct[j]);
        ret_missed[distinct[j].first] = distinct[j].missed;
        m->stats.hits += !distinct[j].missed;
    }
    qsort(distinct, (size_t)n_distinct, sizeof *distinct, by_tag);
    for (int j = 0; j < n_distinct; j++) {
        const int c = distinct[j].page_class;
        if (!distinct[j].missed)
            continue;
        m->stats.misses++;
        m->stats.bytes_missed += m->shape.bytes[c];
        if (m->n_extents == 0 || !model_place(m, &distinct[j]))
            m->stats.in_place += staged[c]++ >= m->n_staging[c];
    }
}

static void model_resize(struct model *m, int n_extents)
{
    for (uint32_t i = m->n_extents < (uint32_t)n_extents ? m->n_extents : (uint32_t)n_extents; i < MODEL_EXTENTS; i++)
        memset(&m->sets[i * page_sets(&m->shape)], 0, page_sets(&m->shape) * sizeof *m->sets);
    m->n_extents = (uint32_t)n_extents;
}

static void model_bytes(struct model *m)
{
    m->stats.used_bytes = m->stats.capacity_bytes = 0;
    for (uint32_t i = 0; i < m->n_extents * page_sets(&m->shape); i++) {
        const int c = i % page_sets(&m->shape) >= m->shape.n_sets[PAGE_CLASS_PAGE];
        m->stats.capacity_bytes += WAYS * m->shape.bytes[c];
        for (int w = 0; w < WAYS; w++)
            m->stats.used_bytes += m->sets[i].tags[w] ? m->shape.bytes[c] : 0;
    }
}

/* ---- the test ---- */
struct cache_test {
    struct ops_test *t;
    const struct cache_case *c;
    struct block_layout layout;
    struct model model;
    struct device_page_cache *cache;
    uint8_t *pool, *private_block; /* registered; a block 1 in device memory, */
    uint8_t *private_copy;         /*   and its bytes */
    size_t pool_bytes;
    void *extents[MODEL_EXTENTS];
    struct fetch_page *pages;      /* device */
    const uint8_t **answers;       /* device */
};

static size_t extent_bytes(const struct cache_case *c, const struct block_layout *layout)
{
    const size_t set = WAYS * (layout->page.bytes + 12) + 8, sinks = WAYS * (layout->sink.bytes + 12) + 8;
    return c->extent_sets ? c->extent_sets * set + sinks + 6 * 256 : 0;
}

static void setup(struct cache_test *x)
{
    struct ops_test *t = x->t;
    const struct device_page_cache_config config = {.layout = &x->layout, .n_pages = x->c->n_pages, .extent_bytes = extent_bytes(x->c, &x->layout)};
    const size_t fixed = t->gpu_ops->page_cache_bytes(&config);
    x->pool_bytes = (x->layout.block_bytes[1] * (BLOCKS + 1) + 4095) / 4096 * 4096;
    x->pool = mmap(NULL, x->pool_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    x->private_copy = ops_test_alloc(x->layout.block_bytes[0]);
    for (size_t i = 0; i < x->pool_bytes; i++)
        x->pool[i] = (uint8_t)ops_test_uniform(t, 0, 256);
    for (size_t i = 0; i < x->layout.block_bytes[0]; i++)
        x->private_copy[i] = (uint8_t)ops_test_uniform(t, 0, 256);
    ops_test_true(t, "register", t->gpu_backend->device->host_register(t->gpu_device, x->pool, x->pool_bytes, NULL, NULL) == 0);
    x->private_block = ops_test_upload(t, x->private_copy, x->layout.block_bytes[0]);
    x->pages = ops_test_room(t, sizeof *x->pages * CALL_MAX);
    x->answers = ops_test_room(t, sizeof *x->answers * CALL_MAX);
    ops_test_true(t, "page_cache_open", fixed > 0 && t->gpu_ops->page_cache_open(t->gpu, &config, ops_test_room(t, fixed), &x->cache) == 0);
    x->model.epoch = 2;
    x->model.shape.bytes[PAGE_CLASS_PAGE] = x->layout.page.bytes;
    x->model.shape.bytes[PAGE_CLASS_SINK] = x->layout.sink.bytes;
    x->model.n_staging[PAGE_CLASS_PAGE] = x->c->n_pages;
    x->model.n_staging[PAGE_CLASS_SINK] = (x->c->n_pages + 15) / 16;
    if (config.extent_bytes == 0)
        return;
    ops_test_true(t, "shape", page_cache_shape_init(&x->model.shape, &x->layout, config.extent_bytes) == 0 && page_sets(&x->model.shape) <= MODEL_SETS);
    for (int i = 0; i < MODEL_EXTENTS; i++)
        x->extents[i] = ops_test_room(t, config.extent_bytes);
}

/* A random page: some private, more of the hot blocks than of the others, sinks among them. ret_bytes: where the host finds what is in it. */
static struct fetch_page draw(struct cache_test *x, const uint8_t **ret_bytes)
{
    struct ops_test *t = x->t;
    const bool is_private = ops_test_uniform(t, 0, 1) < .05, is_hot = ops_test_uniform(t, 0, 1) < .8;
    const int block = is_private ? 1 : (int)ops_test_uniform(t, 0, is_hot ? x->c->hot : BLOCKS), layer = (int)ops_test_uniform(t, 0, LAYERS), head = (int)ops_test_uniform(t, 0, HEADS),
              subpage = (int)ops_test_uniform(t, 0, BLOCK_SUBPAGES);
    const bool first = block == 0;
    const uint64_t at = block_slice_offset(&x->layout, first, (uint32_t)layer) + block_subpage_offset(&x->layout, first, (uint32_t)head, (uint32_t)subpage);
    const uint8_t *data = x->pool + (size_t)block * x->layout.block_bytes[1];
    *ret_bytes = is_private ? x->private_copy + at : data + at;
    return (struct fetch_page){.id = is_private ? 0 : DEVICE_PAGE_ID_MAX - (uint64_t)block * 1000003, .page = is_private ? x->private_block + at : data + at, .layer = (uint16_t)layer,
                               .kv_head = (uint16_t)head, .subpage = (uint8_t)subpage, .sink = first && subpage == 0};
}

/* Every answer is the page's bytes, and counted as a miss where the model says so. */
static void step(struct cache_test *x, int n)
{
    struct ops_test *t = x->t;
    const struct device_ops *dev = t->gpu_backend->device;
    struct fetch_page pages[CALL_MAX];
    const uint8_t *bytes[CALL_MAX];
    bool missed[CALL_MAX], as_model = true, same = true;
    for (int i = 0; i < n; i++)
        pages[i] = draw(x, &bytes[i]);
    dev->copy(t->gpu, x->pages, pages, sizeof *pages * (size_t)n);
    model_call(&x->model, pages, n, missed);
    ops_test_true(t, "page_cache_fetch", t->gpu_ops->page_cache_fetch(x->cache, x->pages, n, x->answers) == 0);
    const uintptr_t *answers = ops_test_download(t, x->answers, sizeof *answers * (size_t)n);
    void *memory = NULL;
    ops_test_true(t, "pinned memory", dev->host_alloc(t->gpu_device, (size_t)(n + 1) * x->layout.sink.bytes, &memory) == 0); /* no wait for each copy */
    uint8_t *copies = memory;
    for (int i = 0; i < n; i++)
        dev->copy(t->gpu, copies + (size_t)i * x->layout.sink.bytes, (const void *)(answers[i] & ~(uintptr_t)3), pages[i].sink ? x->layout.sink.bytes : x->layout.page.bytes);
    dev->stream_sync(t->gpu);
    for (int i = 0; i < n; i++) {
        as_model &= (answers[i] & 1) == missed[i];
        same &= memcmp(copies + (size_t)i * x->layout.sink.bytes, bytes[i], pages[i].sink ? x->layout.sink.bytes : x->layout.page.bytes) == 0;
    }
    ops_test_true(t, "each answer is the page", same);
    ops_test_true(t, "misses as in the model", as_model);
    dev->host_free(t->gpu_device, copies);
    free((void *)answers);
}

static void run_case(struct ops_test *t, const struct cache_case *c)
{
    struct cache_test x = {.t = t, .c = c};
    struct device_page_cache_stats stats;
    block_layout_init(&x.layout, c->format, LAYERS, HEADS, (uint32_t)c->d);
    setup(&x);
    for (int i = 0; i < c->steps; i++) {
        const int n_extents = c->n_extents[3 * i / c->steps];
        if (n_extents != (int)x.model.n_extents) {
            ops_test_true(t, "page_cache_resize", t->gpu_ops->page_cache_resize(x.cache, x.extents, n_extents) == 0);
            model_resize(&x.model, n_extents);
        }
        step(&x, i == 1 ? 0 : i == 2 ? 1 : (int)ops_test_uniform(t, c->n_pages / 2, c->n_pages + 1));
    }
    model_bytes(&x.model);
    ops_test_true(t, "page_cache_stats", t->gpu_ops->page_cache_stats(x.cache, &stats) == 0);
    ops_test_same(t, ops_test_shape("statistics, %s d %d, %zu sets, %d extents", kv_format_name(c->format), c->d, c->extent_sets, c->n_extents[2]), &x.model.stats, &stats, sizeof stats);
    ops_test_true(t, "more than the cache was opened for", t->gpu_ops->page_cache_fetch(x.cache, x.pages, c->n_pages + 1, x.answers) == -EINVAL);
    ops_test_true(t, "more extents than there can be", t->gpu_ops->page_cache_resize(x.cache, x.extents, DEVICE_PAGE_EXTENTS_MAX + 1) == -EINVAL);
    t->gpu_ops->page_cache_close(x.cache);
    t->gpu_backend->device->host_unregister(t->gpu_device, x.pool);
    munmap(x.pool, x.pool_bytes);
    free(x.private_copy);
    ops_test_free_buffers(t);
}

/* Each extent gets its share, and when one more comes only about its share of the pages moves. */
static void extents_are_stable(struct ops_test *t)
{
    enum { N = 20000 };
    for (uint32_t n = 1; n < 64; n = 2 * n + 1) {
        int moved = 0, in_last = 0, elsewhere = 0;
        for (int i = 0; i < N; i++) {
            const uint64_t hash = page_hash(page_tag(1 + (uint64_t)i / 64, 3, 1, (uint32_t)i % 8));
            const uint32_t before = page_extent(hash, n), after = page_extent(hash, n + 1);
            moved += before != after;
            in_last += after == n;
            elsewhere += before != after && after != n;
        }
        ops_test_true(t, "a new extent gets its share", abs(in_last - N / (int)(n + 1)) < N / (int)(n + 1) / 4 && moved == in_last && elsewhere == 0);
    }
}

void test_ops_page_cache(struct ops_test *t)
{
    struct block_layout layout;
    struct device_page_cache_config config = {.layout = &layout, .n_pages = 1, .extent_bytes = 1000};
    block_layout_init(&layout, KV_FORMAT_K8V4, 1, 1, 64);
    ops_test_true(t, "an extent without room for a set", t->gpu_ops->page_cache_bytes(&config) == 0);
    extents_are_stable(t);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        run_case(t, &cases[i]);
}
