/* The page cache on the device (device_page_cache.h). A round is five kernels on the gather stream, none of which needs the host to know what the others found:
 *
 *   clear     the table of the round, the counters, the next epoch
 *   request   a thread a request: its page is an entry of an open-addressed table (CAS), so that pages asked for several times are one; the first to come puts the entry on the list of its set
 *             (page_cache_requests_kernel here, decode_requests_kernel for attention)
 *   resolve   a warp a set that has a list: hits, then misses in ascending order of tags, which makes what stays a function of the calls alone
 *   answer    a thread a request: where its page is to be read, whether it was missing, and whether it is still to come
 *   gather    gather_pages.cu: copies what is missing
 *
 * Two rounds are in flight at most: while the compute stream attends the pages of one, the next is looked up. So each has its own answers and its own staging, and slots of a round and of the one
 * before are pinned, by their stamps; comparisons are for equality, so an epoch that wraps pins a slot too many for one round and nothing else. */
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/page_cache.cuh"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { RESOLVE_WARPS = 8, RESOLVE_BLOCKS_MAX = 512 };

/* ---- kernels ---- */

__global__ void __launch_bounds__(BLOCK_THREADS) page_cache_clear_kernel(const struct page_cache_args a)
{
    EACH_ELEMENT(i, (int64_t)a.mask + 1) {
        a.tags[i] = 0;
        a.first[i] = 0xFFFFFFFFu;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        a.state->epoch++;
        a.state->n_touched = a.state->n_copies = a.state->n_staged[PAGE_CLASS_PAGE] = a.state->n_staged[PAGE_CLASS_SINK] = 0;
    }
}

__global__ void __launch_bounds__(BLOCK_THREADS) page_cache_requests_kernel(const struct page_cache_args a, const struct fetch_page *pages, unsigned n)
{
    const unsigned i = blockIdx.x * BLOCK_THREADS + threadIdx.x;
    page_requests_count(a, i < n && pages[i].id != 0);
    if (i >= n)
        return;
    const struct fetch_page &p = pages[i];
    page_request(a, i, p.id, page_tag(p.id, p.layer, p.kv_head, p.subpage), p.page, p.sink);
}

/* A missing page without a slot: staged, or read where it lies. By one lane. */
DEVICE uint8_t *stage_page(const struct page_cache_args &a, int page_class)
{
    const unsigned at = atomicAdd(&a.state->n_staged[page_class], 1u);
    return at < a.n_staging[page_class] ? a.staging[page_class] + (size_t)at * a.shape.bytes[page_class] : nullptr;
}

/* Entry e is missing and gets `dst`; NULL: nothing. By one lane. */
DEVICE void miss_page(const struct page_cache_args &a, unsigned e, uint8_t *dst)
{
    const unsigned long long source = a.sources[e];
    const int page_class = (int)(source & 1);
    const uint8_t *src = reinterpret_cast<const uint8_t *>((uintptr_t)(source & ~1ull));
    atomicAdd(&a.state->total.misses[page_class], 1ull);
    if (!dst)
        atomicAdd(&a.state->total.in_place, 1ull);
    else
        a.copies[atomicAdd(&a.state->n_copies, 1u)] = {src, dst, a.shape.bytes[page_class], 0};
    a.places[e] = (unsigned long long)(uintptr_t)(dst ? dst : src) | PAGE_MISSED | (dst ? PAGE_ARRIVES : 0);
}

/* The tables of one set; lane w < WAYS holds way w of it. */
struct page_set_view {
    uint64_t *tags;
    uint32_t *stamps, *clock;
    unsigned *head;
    uint8_t *slots;
    uint32_t bytes;
    int page_class;
};

DEVICE struct page_set_view set_view(const struct page_cache_args &a, uint32_t set)
{
    const uint32_t n = page_sets(&a.shape), local = set % n, n_pages = a.shape.n_sets[PAGE_CLASS_PAGE];
    uint8_t *extent = a.state->extents[set / n];
    struct page_set_view v;
    v.page_class = local >= n_pages ? PAGE_CLASS_SINK : PAGE_CLASS_PAGE;
    v.bytes = a.shape.bytes[v.page_class];
    v.tags = reinterpret_cast<uint64_t *>(extent) + (size_t)local * DEVICE_PAGE_WAYS;
    v.stamps = reinterpret_cast<uint32_t *>(extent + a.shape.stamps) + (size_t)local * DEVICE_PAGE_WAYS;
    v.clock = reinterpret_cast<uint32_t *>(extent + a.shape.clock) + local;
    v.head = reinterpret_cast<unsigned *>(extent + a.shape.heads) + local;
    v.slots = extent + a.shape.slots[v.page_class] + (size_t)(v.page_class == PAGE_CLASS_SINK ? local - n_pages : local) * DEVICE_PAGE_WAYS * v.bytes;
    return v;
}

/* Entries that a way of the set holds get it; the others' places become 0. Returns how many others there are. By the warp. */
DEVICE int resolve_hits(const struct page_cache_args &a, const struct page_set_view &v, uint64_t tag, uint32_t epoch, uint32_t *stamp, uint32_t *clock)
{
    const int lane = (int)threadIdx.x % 32;
    int n_missing = 0;
    for (unsigned e = *v.head; e != 0; e = a.next[e - 1]) {
        const uint32_t found = __ballot_sync(0xFFFFFFFFu, tag == a.tags[e - 1]);
        const int way = __ffs((int)found) - 1;
        if (lane == 0)
            a.places[e - 1] = found ? (unsigned long long)(uintptr_t)(v.slots + (size_t)way * v.bytes) : 0;
        if (found)
            *clock |= 1u << way;
        else
            n_missing++;
        if (lane == way)
            *stamp = epoch;
    }
    __syncwarp();
    return n_missing;
}

/* The entry without a place that has the lowest tag. There is one. */
DEVICE unsigned lowest_missing(const struct page_cache_args &a, const struct page_set_view &v)
{
    unsigned best = 0;
    for (unsigned e = *v.head; e != 0; e = a.next[e - 1])
        if (a.places[e - 1] == 0 && (best == 0 || a.tags[e - 1] < a.tags[best - 1]))
            best = e;
    return best - 1;
}

DEVICE void resolve_set(const struct page_cache_args &a, uint32_t set)
{
    const int lane = (int)threadIdx.x % 32;
    const struct page_set_view v = set_view(a, set);
    const uint32_t epoch = a.state->epoch;
    uint64_t tag = lane < DEVICE_PAGE_WAYS ? v.tags[lane] : 0;
    uint32_t stamp = lane < DEVICE_PAGE_WAYS ? v.stamps[lane] : epoch, clock = *v.clock;
    int n_missing = resolve_hits(a, v, tag, epoch, &stamp, &clock);
    for (; n_missing > 0; n_missing--) {
        const uint32_t pinned = __ballot_sync(0xFFFFFFFFu, stamp == epoch || stamp == epoch - 1), empty = __ballot_sync(0xFFFFFFFFu, lane < DEVICE_PAGE_WAYS && tag == 0);
        const int way = page_victim(&clock, empty, empty ? 0 : pinned);
        if (way < 0)
            break;
        const unsigned e = lowest_missing(a, v);
        __syncwarp(); /* every lane has found it before it gets its place */
        if (lane == way) {
            miss_page(a, e, v.slots + (size_t)way * v.bytes);
            if (tag != 0)
                atomicAdd(&a.state->total.evictions, 1ull);
            else
                atomicAdd(&a.state->n_filled[set / page_sets(&a.shape)][v.page_class], 1u);
            tag = a.tags[e];
            stamp = epoch;
        }
        __syncwarp();
    }
    for (unsigned e = *v.head; n_missing > 0 && e != 0; e = a.next[e - 1])
        if (lane == 0 && a.places[e - 1] == 0)
            miss_page(a, e - 1, stage_page(a, v.page_class));
    if (lane < DEVICE_PAGE_WAYS) {
        v.tags[lane] = tag;
        v.stamps[lane] = stamp;
    }
    __syncwarp(); /* nobody reads the list any more */
    if (lane == 0) {
        *v.clock = clock;
        *v.head = 0;
    }
}

__global__ void __launch_bounds__(RESOLVE_WARPS * 32) page_cache_resolve_kernel(const struct page_cache_args a)
{
    const unsigned n = a.state->n_touched, n_extents = a.state->n_extents;
    for (unsigned i = blockIdx.x * RESOLVE_WARPS + threadIdx.x / 32; i < n; i += gridDim.x * RESOLVE_WARPS) {
        if (n_extents > 0)
            resolve_set(a, a.touched[i]);
        else if (threadIdx.x % 32 == 0)
            miss_page(a, a.touched[i], stage_page(a, (int)(a.sources[a.touched[i]] & 1)));
    }
}

/* Of several requests for a missing page the lowest is counted as the miss; all of them wait for its copy. */
__global__ void __launch_bounds__(BLOCK_THREADS) page_cache_answer_kernel(const struct page_cache_args a, unsigned n)
{
    EACH_ELEMENT(i, n) {
        if (a.entries[i] == 0)
            continue;
        const unsigned long long place = a.places[a.entries[i] - 1], first = a.first[a.entries[i] - 1] == i ? PAGE_MISSED : 0;
        a.pages[i] = reinterpret_cast<const uint8_t *>((uintptr_t)(place & (~(unsigned long long)PAGE_MISSED | first)));
    }
}

/* ---- rounds ---- */

/* With slots for many times a call's pages nearly all find one, and the call is one round; else no more pages are looked up at a time than can be staged. */
int page_cache_round_pages(const struct device_page_cache *c, int64_t n_call)
{
    const int64_t slots = (int64_t)c->n_extents * c->args.shape.n_sets[PAGE_CLASS_PAGE] * DEVICE_PAGE_WAYS, n = n_call < c->n_pages ? n_call : c->n_pages;
    return (int)(slots >= 8 * n || n < (int64_t)c->args.n_staging[PAGE_CLASS_PAGE] ? n : (int64_t)c->args.n_staging[PAGE_CLASS_PAGE]);
}

/* What the compute stream has submitted comes first on the gather stream, too. */
static int follow_stream(struct device_page_cache *c)
{
    const int r = submit_record(c->stream, c->chosen);
    return r == 0 ? submit_wait(c->gather, c->chosen) : r;
}

int page_cache_begin_round(struct device_page_cache *c, int round, int n, struct page_cache_args *ret_args)
{
    const int side = round % PAGE_ROUNDS;
    struct page_cache_args a = c->args;
    a.entries = c->entries[side];
    a.pages = c->pages[side];
    for (int i = 0; i < PAGE_CLASSES; i++)
        a.staging[i] = c->staging[side][i];
    while (a.mask / 2 + 1 >= 2 * (unsigned)n) /* a call of few pages clears and searches a small table */
        a.mask /= 2;
    *ret_args = a;
    /* The table is this stream's alone, so clearing it waits for nothing. */
    int r = LAUNCH(page_cache_clear_kernel, blocks_for((int64_t)a.mask + 1), BLOCK_THREADS, 0, c->gather, a);
    if (r < 0)
        return r;
    if (round == 0) /* what is chosen is known then, and the pages of the calls before have been attended */
        r = follow_stream(c);
    else if (round >= PAGE_ROUNDS)
        r = submit_wait(c->gather, c->attended[side]);
    return r;
}

int page_cache_fetch_round(struct device_page_cache *c, const struct page_cache_args *args, int round, int n)
{
    const int64_t blocks = ceil_div64(n, RESOLVE_WARPS);
    int r = LAUNCH(page_cache_resolve_kernel, (unsigned)(blocks < (int64_t)RESOLVE_BLOCKS_MAX ? blocks : (int64_t)RESOLVE_BLOCKS_MAX), RESOLVE_WARPS * 32, 0, c->gather, *args);
    if (r == 0)
        r = LAUNCH(page_cache_answer_kernel, blocks_for(n), BLOCK_THREADS, 0, c->gather, *args, (unsigned)n);
    if (r == 0)
        r = submit_record(c->gather, c->answered[round % PAGE_ROUNDS]);
    if (r == 0)
        r = gather_pages(args, n, c->gather);
    return r == 0 ? submit_record(c->gather, c->fetched[round % PAGE_ROUNDS]) : r;
}

int page_cache_wait_answers(struct device_page_cache *c, int round)
{
    return submit_wait(c->stream, c->answered[round % PAGE_ROUNDS]);
}

int page_cache_wait(struct device_page_cache *c, int round)
{
    return submit_wait(c->stream, c->fetched[round % PAGE_ROUNDS]);
}

int page_cache_end_round(struct device_page_cache *c, int round)
{
    return submit_record(c->stream, c->attended[round % PAGE_ROUNDS]);
}

/* ---- the cache ---- */

/* Takes the next 256-byte aligned piece. With a NULL base only the size is counted. */
static uint8_t *take(uint8_t *base, size_t *used, size_t bytes)
{
    uint8_t *piece = base ? base + *used : nullptr;
    *used += (bytes + 255) & ~(size_t)255;
    return piece;
}

/* Counts and pieces of the fixed memory; returns its size. */
static size_t cache_layout(struct device_page_cache *c, const struct device_page_cache_config *config, uint8_t *base)
{
    struct page_cache_args *a = &c->args;
    size_t used = 0, table = 1;
    c->n_pages = config->n_pages < (int)DEVICE_PAGE_CALL_MAX ? config->n_pages : (int)DEVICE_PAGE_CALL_MAX;
    while (table < 2 * (size_t)c->n_pages)
        table *= 2;
    a->mask = (unsigned)(table - 1);
    const int n_staged = config->n_staged ? config->n_staged : (int)DEVICE_PAGE_STAGED_MAX;
    a->n_staging[PAGE_CLASS_PAGE] = (unsigned)(c->n_pages < n_staged ? c->n_pages : n_staged);
    a->n_staging[PAGE_CLASS_SINK] = page_class_of(&a->shape, true) == PAGE_CLASS_SINK ? (unsigned)ceil_div64(a->n_staging[PAGE_CLASS_PAGE], 16) : 0;
    a->state = (struct page_cache_state *)take(base, &used, sizeof *a->state);
    a->tags = (unsigned long long *)take(base, &used, table * sizeof *a->tags);
    a->first = (unsigned *)take(base, &used, table * sizeof *a->first);
    a->next = (unsigned *)take(base, &used, table * sizeof *a->next);
    a->sources = (unsigned long long *)take(base, &used, table * sizeof *a->sources);
    a->places = (unsigned long long *)take(base, &used, table * sizeof *a->places);
    a->touched = (unsigned *)take(base, &used, (size_t)c->n_pages * sizeof *a->touched);
    a->copies = (struct page_copy *)take(base, &used, (size_t)c->n_pages * sizeof *a->copies);
    for (int side = 0; side < PAGE_ROUNDS; side++) {
        c->entries[side] = (unsigned *)take(base, &used, (size_t)c->n_pages * sizeof(unsigned));
        c->pages[side] = (const uint8_t **)take(base, &used, (size_t)c->n_pages * sizeof(uint8_t *));
        for (int i = 0; i < PAGE_CLASSES; i++)
            c->staging[side][i] = take(base, &used, (size_t)a->n_staging[i] * a->shape.bytes[i]);
    }
    return used;
}

/* -EINVAL. */
static int cache_init(struct device_page_cache *c, const struct device_page_cache_config *config)
{
    if (config->n_pages < 1 || config->n_staged < 0)
        return -EINVAL;
    if (config->extent_bytes)
        return page_cache_shape_init(&c->args.shape, config->layout, config->extent_bytes) < 0 ? -EINVAL : 0;
    c->args.shape.bytes[PAGE_CLASS_PAGE] = config->layout->page.bytes;
    c->args.shape.bytes[PAGE_CLASS_SINK] = config->layout->sink.bytes;
    return 0;
}

extern "C" size_t cuda_page_cache_bytes(const struct device_page_cache_config *config)
{
    struct device_page_cache c = {};
    return cache_init(&c, config) < 0 ? 0 : cache_layout(&c, config, nullptr);
}

static int streams_create(struct device_page_cache *c)
{
    int r = stream_side_open(c->stream, &c->gather); /* of high priority: copies that wait behind the compute stream's blocks would come too late */
    if (r == 0)
        r = cuda_error(cudaEventCreateWithFlags(&c->chosen, cudaEventDisableTiming));
    for (int i = 0; r == 0 && i < PAGE_ROUNDS; i++) {
        r = cuda_error(cudaEventCreateWithFlags(&c->answered[i], cudaEventDisableTiming));
        if (r == 0)
            r = cuda_error(cudaEventCreateWithFlags(&c->fetched[i], cudaEventDisableTiming));
        if (r == 0)
            r = cuda_error(cudaEventCreateWithFlags(&c->attended[i], cudaEventDisableTiming));
    }
    return r;
}

extern "C" void cuda_page_cache_close(struct device_page_cache *c)
{
    if (!c)
        return;
    stream_side_close(c->gather);
    if (c->chosen)
        cudaEventDestroy(c->chosen);
    for (int i = 0; i < PAGE_ROUNDS; i++) {
        if (c->answered[i])
            cudaEventDestroy(c->answered[i]);
        if (c->fetched[i])
            cudaEventDestroy(c->fetched[i]);
        if (c->attended[i])
            cudaEventDestroy(c->attended[i]);
    }
    cudaFreeHost(c->host);
    free(c);
}

extern "C" int cuda_page_cache_open(struct stream *s, const struct device_page_cache_config *config, void *memory, struct device_page_cache **ret_cache)
{
    struct device_page_cache *c = (struct device_page_cache *)calloc(1, sizeof *c);
    void *host = nullptr;
    if (!c)
        return -ENOMEM;
    c->stream = s;
    c->extent_bytes = config->extent_bytes;
    int r = cache_init(c, config);
    if (r == 0)
        r = streams_create(c);
    if (r == 0)
        r = cuda_error(cudaHostAlloc(&host, sizeof *c->host, cudaHostAllocDefault));
    if (r < 0) {
        cuda_page_cache_close(c);
        return r;
    }
    c->host = (struct page_cache_state *)host;
    cache_layout(c, config, (uint8_t *)memory);
    memset(c->host, 0, sizeof *c->host);
    c->host->epoch = 2; /* so that a slot with the stamp 0 is not pinned */
    r = follow_stream(c);
    if (r == 0)
        r = submit_copy(c->gather, c->args.state, c->host, sizeof *c->host);
    if (r < 0) {
        cuda_page_cache_close(c);
        return r;
    }
    *ret_cache = c;
    return 0;
}

/* What the device's state is, when its lookups are done. */
static int state_read(struct device_page_cache *c)
{
    const int r = submit_copy(c->gather, c->host, c->args.state, sizeof *c->host);
    return r == 0 ? stream_wait_idle(c->gather) : r;
}

extern "C" int cuda_page_cache_resize(struct device_page_cache *c, void *const *extents, int n_extents)
{
    if (n_extents < 0 || n_extents > DEVICE_PAGE_EXTENTS_MAX || (n_extents > 0 && c->extent_bytes == 0))
        return -EINVAL;
    int r = follow_stream(c);
    if (r == 0)
        r = state_read(c);
    for (int i = 0; r == 0 && i < DEVICE_PAGE_EXTENTS_MAX; i++) {
        if (i < n_extents && i < (int)c->n_extents && extents[i] == c->extents[i])
            continue;
        memset(c->host->n_filled[i], 0, sizeof c->host->n_filled[i]);
        c->host->extents[i] = i < n_extents ? (uint8_t *)extents[i] : nullptr;
        if (i < n_extents)
            r = submit_fill(c->gather, extents[i], 0, c->args.shape.slots[PAGE_CLASS_PAGE]);
    }
    c->host->n_extents = (uint32_t)n_extents;
    if (r == 0)
        r = submit_copy(c->gather, c->args.state, c->host, sizeof *c->host);
    if (r == 0)
        r = stream_wait_idle(c->gather);
    if (r < 0)
        return r;
    c->n_extents = (uint32_t)n_extents;
    for (int i = 0; i < n_extents; i++)
        c->extents[i] = extents[i];
    return 0;
}

extern "C" int cuda_page_cache_stats(struct device_page_cache *c, struct device_page_cache_stats *ret)
{
    const struct page_cache_shape *shape = &c->args.shape;
    const int r = state_read(c);
    if (r < 0)
        return r;
    const struct page_cache_state *s = c->host;
    struct device_page_cache_stats stats = {};
    stats.misses = s->total.misses[0] + s->total.misses[1];
    stats.hits = s->total.requests - stats.misses;
    stats.evictions = s->total.evictions;
    stats.in_place = s->total.in_place;
    for (int i = 0; i < PAGE_CLASSES; i++) {
        stats.bytes_missed += s->total.misses[i] * shape->bytes[i];
        stats.capacity_bytes += (size_t)s->n_extents * shape->n_sets[i] * DEVICE_PAGE_WAYS * shape->bytes[i];
        for (uint32_t e = 0; e < s->n_extents; e++)
            stats.used_bytes += (size_t)s->n_filled[e][i] * shape->bytes[i];
    }
    *ret = stats;
    return 0;
}

extern "C" int cuda_page_cache_fetch(struct device_page_cache *c, const struct fetch_page *pages, int n, const uint8_t **ret_pages)
{
    struct page_cache_args a;
    if (n < 0 || n > c->n_pages)
        return -EINVAL;
    if (n == 0)
        return 0;
    int r = page_cache_begin_round(c, 0, n, &a);
    if (r < 0)
        return r;
    a.pages = ret_pages;
    r = LAUNCH(page_cache_requests_kernel, blocks_for(n), BLOCK_THREADS, 0, c->gather, a, pages, (unsigned)n);
    if (r == 0)
        r = page_cache_fetch_round(c, &a, 0, n);
    if (r == 0)
        r = page_cache_wait(c, 0);
    return r;
}
