/* Attention, block coding, selection and sampling of the CPU backend against the machine's fma peak and memory speed, measured in the same run, on one thread.
 * Times are processor time of the thread (with more threads: time of the clock, against one thread's limits), the best of many short runs: others' load on a
 * shared machine only ever adds. Memory-bound rows walk through more
 * bytes than the caches hold; figures in percent compare with the read bandwidth or the fma peak printed above them.
 *   bench_attention [avx2|avx512|plain] [repeats] [threads] */
#include "kernels/cpu/attn_pieces.h"
#include "kernels/kernels.h"
#include "kernels/sample_one.h"
#include "tests/bench/bench_floor.h"
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { COLD_BYTES = 96 << 20, WINDOW_BYTES = 16 << 20, FMA_ROUNDS = 20000 };

struct bench {
    enum cpu_isa isa;
    int repeats;
    struct device *device;
    struct stream *stream;
    const struct kernel_ops *ops;
    double peak_gflops, read_gbs;
    uint32_t random;
};

static clockid_t bench_clock = CLOCK_THREAD_CPUTIME_ID;

static double now(void)
{
    struct timespec t;
    clock_gettime(bench_clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void expect(int rc, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "%s: %s\n", what, strerror(-rc));
    exit(1);
}

static void *memory(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    expect(p ? 0 : -12, "memory");
    return p;
}

static float noise(struct bench *b)
{
    b->random = b->random * 1664525u + 1013904223u;
    return (float)(b->random >> 8) * 0x1p-23f - 1.0f;
}

static float *floats(struct bench *b, size_t n, float scale)
{
    float *x = memory(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = scale * noise(b);
    return x;
}

static bf16_t *halves(struct bench *b, size_t n)
{
    bf16_t *x = memory(n * sizeof *x);
    for (size_t i = 0; i < n; i++) {
        float f = noise(b);
        uint32_t u;
        memcpy(&u, &f, sizeof u);
        x[i] = (bf16_t)(u >> 16);
    }
    return x;
}

typedef void bench_fn(void *arg, int run);

/* The best of b->repeats runs of fn, each with its own number so that it can take other memory. */
static double best_of(const struct bench *b, bench_fn *fn, void *arg)
{
    double best = 1e9;
    for (int i = 0; i < b->repeats; i++) {
        double t0 = now();
        fn(arg, i);
        double t = now() - t0;
        best = t < best ? t : best;
    }
    return best;
}

/* ---- floors ---- */

struct floor_args {
    enum cpu_isa isa;
    const char *cold;
    volatile float sink;
};

static void run_fma(void *arg, int run)
{
    struct floor_args *a = arg;
    (void)run;
    a->sink = a->isa == CPU_ISA_AVX512 ? bench_fma_avx512(FMA_ROUNDS) : a->isa == CPU_ISA_AVX2 ? bench_fma_avx2(FMA_ROUNDS) : bench_fma_plain(FMA_ROUNDS / 50);
}

static void run_read(void *arg, int run)
{
    struct floor_args *a = arg;
    const char *p = a->cold + (size_t)run * WINDOW_BYTES % COLD_BYTES;
    a->sink = (float)(a->isa == CPU_ISA_AVX512 ? bench_read_avx512(p, WINDOW_BYTES) : a->isa == CPU_ISA_AVX2 ? bench_read_avx2(p, WINDOW_BYTES) : bench_read_plain(p, WINDOW_BYTES));
}

static void measure_floors(struct bench *b)
{
    char *cold = memory(COLD_BYTES);
    memset(cold, 1, COLD_BYTES);
    struct floor_args a = {.isa = b->isa, .cold = cold};
    double rounds = b->isa == CPU_ISA_PLAIN ? FMA_ROUNDS / 50 : FMA_ROUNDS;
    b->peak_gflops = 2.0 * 16 * BENCH_FMA_CHAINS * rounds / best_of(b, run_fma, &a) * 1e-9;
    b->read_gbs = WINDOW_BYTES / best_of(b, run_read, &a) * 1e-9;
    printf("%s: fma peak %.1f GFLOP/s, memory read %.1f GB/s, one thread\n", b->isa == CPU_ISA_AVX512 ? "avx512" : b->isa == CPU_ISA_AVX2 ? "avx2" : "plain",
           b->peak_gflops, b->read_gbs);
    free(cold);
}

/* ---- prefill ---- */

struct prefill_run {
    struct bench *b;
    struct attn_prefill_params p;
};

static void run_prefill(void *arg, int run)
{
    struct prefill_run *r = arg;
    (void)run;
    expect(r->b->ops->attn_prefill(r->b->stream, &r->p), "attn_prefill");
}

static void bench_prefill(struct bench *b, const char *model, int n_heads, int n_kv_heads, int d, int64_t n_tokens)
{
    int64_t pos0 = n_tokens / BLOCK_TOKENS * BLOCK_TOKENS - BLOCK_TOKENS, stride = n_tokens * d;
    bf16_t *k = halves(b, (size_t)(n_kv_heads * stride)), *v = halves(b, (size_t)(n_kv_heads * stride));
    float *q = floats(b, (size_t)BLOCK_TOKENS * n_heads * d, 2), *out = memory(sizeof(float) * BLOCK_TOKENS * n_heads * d);
    struct prefill_run r = {b, {.q = q, .pos0 = pos0, .n_q = BLOCK_TOKENS, .k = k, .v = v, .head_stride = stride, .n_heads = n_heads, .n_kv_heads = n_kv_heads,
                                .head_dim = d, .scale = 1 / sqrtf((float)d), .out = out}};
    double t = best_of(b, run_prefill, &r), keys = (double)pos0 + (BLOCK_TOKENS + 1) / 2.0;
    double gflops = 4.0 * BLOCK_TOKENS * n_heads * keys * d / t * 1e-9;
    printf("  attn_prefill %-12s 128 queries at %6lld: %9.3f ms %7.1f GFLOP/s (%3.0f %% of peak)\n", model, (long long)pos0, t * 1e3, gflops, 100 * gflops / b->peak_gflops);
    free(k), free(v), free(q), free(out);
}

/* ---- decode ---- */

/* Pages of one KV head over many blocks, more than the caches hold if asked to. */
struct page_pool {
    struct block_layout layout;
    uint8_t *slices;
    struct kv_page *pages;
    int n_pages;
    /* As the slow tier of a sequence: none of the blocks was coded as the first one of it, so it begins with one that has no slow token. */
    struct kv_block *blocks;
    uint16_t *masks;
};

static void pool_make(struct bench *b, struct page_pool *p, enum kv_format format, int d, int n_blocks)
{
    expect(block_layout_init(&p->layout, format, 1, 1, (uint32_t)d), "layout");
    size_t bytes = p->layout.slice_bytes[0];
    p->slices = memory(bytes * (size_t)n_blocks);
    p->pages = memory(sizeof *p->pages * (size_t)n_blocks * BLOCK_SUBPAGES);
    p->blocks = memory(sizeof *p->blocks * (size_t)(n_blocks + 1));
    p->masks = memory(sizeof *p->masks * (size_t)(n_blocks + 1) * BLOCK_SUBPAGES);
    p->blocks[0] = (struct kv_block){0};
    memset(p->masks, 0, sizeof *p->masks * BLOCK_SUBPAGES);
    memset(p->masks + BLOCK_SUBPAGES, 0xFF, sizeof *p->masks * (size_t)n_blocks * BLOCK_SUBPAGES);
    p->n_pages = n_blocks * BLOCK_SUBPAGES;
    bf16_t *k = halves(b, (size_t)BLOCK_TOKENS * d), *v = halves(b, (size_t)BLOCK_TOKENS * d);
    int32_t n_bad = 0;
    for (int i = 0; i < n_blocks; i++) {
        uint8_t *slice = p->slices + bytes * (size_t)i;
        struct block_params params = {.layout = &p->layout, .slice = slice, .k = k, .v = v, .head_stride = (int64_t)BLOCK_TOKENS * d};
        if (i == 0)
            expect(b->ops->block_encode(b->stream, &params, 1, false, &n_bad), "block_encode");
        else
            memcpy(slice, p->slices, bytes);
        p->blocks[i + 1] = (struct kv_block){.data = slice};
        for (uint32_t s = 0; s < BLOCK_SUBPAGES; s++)
            p->pages[i * BLOCK_SUBPAGES + (int)s] = (struct kv_page){.page = slice + block_subpage_offset(&p->layout, false, 0, s),
                                                                    .index = slice + block_index_offset(&p->layout, false, 0, s), .tokens = 0xFFFF,
                                                                    .subpage = i * BLOCK_SUBPAGES + (int)s};
    }
    free(k), free(v);
}

static struct slow_pages pool_slow(const struct page_pool *p)
{
    return (struct slow_pages){.blocks = p->blocks, .masks = p->masks, .n_subpages = p->n_pages + BLOCK_SUBPAGES, .n_pages = p->n_pages};
}

static void pool_free(struct page_pool *p)
{
    free(p->slices);
    free(p->pages);
    free(p->blocks);
    free(p->masks);
}

struct pages_run {
    const struct attn_pieces *pieces;
    struct page_pool *pool;
    const float *q;
    int group, n_pages; /* of one run */
    float *scratch;
};

static void run_pages(void *arg, int run)
{
    struct pages_run *r = arg;
    int first = (int)((int64_t)run * r->n_pages % (r->pool->n_pages - r->n_pages + 1));
    for (int i = 0; i < r->n_pages; i += r->pieces->pages_max)
        r->pieces->pages(r->q, r->group, 0.125f, &r->pool->layout, r->pool->pages + first + i, r->n_pages - i < r->pieces->pages_max ? r->n_pages - i : r->pieces->pages_max,
                         r->scratch, r->scratch + 2 * r->group + 64);
}

static void run_index(void *arg, int run)
{
    struct pages_run *r = arg;
    int first = (int)((int64_t)run * r->n_pages % (r->pool->n_pages - r->n_pages + 1));
    for (int i = 0; i < r->n_pages; i += r->pieces->index_pages_max)
        r->pieces->index(r->q, r->group, 0.125f, &r->pool->layout, r->pool->pages + first + i,
                         r->n_pages - i < r->pieces->index_pages_max ? r->n_pages - i : r->pieces->index_pages_max, r->scratch, r->scratch + 2 * r->group + 64);
}

static void print_bytes(const struct bench *b, const char *what, int d, int group, bool cold, double ns_a_page, double bytes)
{
    double gbs = bytes / ns_a_page;
    printf("  %-14s d %3d group %d %-6s %8.1f ns a page %7.2f GB/s (%3.0f %% of read)\n", what, d, group, cold ? "memory" : "cache", ns_a_page, gbs, 100 * gbs / b->read_gbs);
}

static void bench_pages(struct bench *b, enum kv_format format, int d, int group, bool cold)
{
    struct page_pool pool;
    int n_blocks = cold ? 6000 * 64 / d : 24;
    pool_make(b, &pool, format, d, n_blocks);
    float *q = floats(b, (size_t)group * d, 2), *scratch = memory(sizeof(float) * (size_t)(group * (d + 2) + 64 * group + 256));
    struct pages_run r = {cpu_attn_pieces(b->isa), &pool, q, group, cold ? 2048 : 128, scratch};
    double t = best_of(b, run_pages, &r) / r.n_pages * 1e9;
    char name[32];
    snprintf(name, sizeof name, "pages %s", kv_format_name(format));
    print_bytes(b, name, d, group, cold, t, pool.layout.page.bytes);
    if (format == KV_FORMAT_K8V4) {
        t = best_of(b, run_index, &r) / r.n_pages * 1e9;
        print_bytes(b, "index", d, group, cold, t, pool.layout.index_entry_bytes);
    }
    free(q), free(scratch);
    pool_free(&pool);
}

struct rows_run {
    const struct attn_pieces *pieces;
    const float *q;
    const bf16_t *k, *v;
    int group, d;
    float *scratch;
};

static void run_rows(void *arg, int run)
{
    struct rows_run *r = arg;
    (void)run;
    r->pieces->rows(r->q, r->group, r->d, 0.125f, r->k, r->v, r->pieces->rows_max, r->scratch, r->scratch + 2 * r->group);
}

static void bench_rows(struct bench *b, int d, int group)
{
    struct rows_run r = {.pieces = cpu_attn_pieces(b->isa), .group = group, .d = d, .q = floats(b, (size_t)group * d, 2)};
    bf16_t *k = halves(b, (size_t)r.pieces->rows_max * d), *v = halves(b, (size_t)r.pieces->rows_max * d);
    r.k = k, r.v = v, r.scratch = memory(sizeof(float) * (size_t)(group * (d + 2)));
    double ns = best_of(b, run_rows, &r) / r.pieces->rows_max * 1e9, gbs = 4.0 * d / ns;
    printf("  rows bf16      d %3d group %d cache  %8.1f ns a row  %7.2f GB/s (%3.0f %% of read)\n", d, group, ns, gbs, 100 * gbs / b->read_gbs);
    free((void *)(uintptr_t)r.q), free(k), free(v), free(r.scratch);
}

struct decode_run {
    struct bench *b;
    struct attn_decode_params p;
};

static void run_decode(void *arg, int run)
{
    struct decode_run *r = arg;
    (void)run;
    expect(r->b->ops->attn_decode(r->b->stream, &r->p), "attn_decode");
}

/* One layer of SmolLM2-135M: 3 KV heads, each its own memory. */
static void bench_decode(struct bench *b, int n_tokens, int budget, int fetch_pages)
{
    enum { HEADS = 3, GROUP = 3, D = 64 };
    struct page_pool pools[HEADS];
    struct attn_decode_item items[HEADS];
    float *q = floats(b, HEADS * GROUP * D, 2), out[HEADS * GROUP * D];
    bf16_t *rows = halves(b, (size_t)2 * HEADS * (size_t)(budget + 1) * D);
    for (int h = 0; h < HEADS; h++) {
        pool_make(b, &pools[h], KV_FORMAT_K8V4, D, (n_tokens - budget) / BLOCK_TOKENS);
        items[h] = (struct attn_decode_item){.q = q + h * GROUP * D, .out = out + h * GROUP * D, .rows = {{rows + (size_t)2 * h * budget * D, rows + (size_t)(2 * h + 1) * budget * D, budget}, {0}},
                                             .slow = pool_slow(&pools[h]), .fetch_pages = fetch_pages};
    }
    struct decode_run r = {b, {.items = items, .n_items = HEADS, .layout = &pools[0].layout, .group = GROUP, .head_dim = D, .scale = 0.125f}};
    double t = best_of(b, run_decode, &r);
    printf("  attn_decode SmolLM2 layer, %6d tokens, %4d rows, fetch %s%d: %8.1f us (30 layers %.2f ms)\n", n_tokens, budget, fetch_pages == INT_MAX ? "all of " : "",
           fetch_pages == INT_MAX ? n_tokens - budget : fetch_pages * SUBPAGE_TOKENS, t * 1e6, 30 * t * 1e3);
    for (int h = 0; h < HEADS; h++)
        pool_free(&pools[h]);
    free(q), free(rows);
}

/* ---- the rest ---- */

struct block_run {
    struct bench *b;
    struct block_params p;
    bool decode;
    int32_t n_bad;
};

static void run_block(void *arg, int run)
{
    struct block_run *r = arg;
    (void)run;
    expect(r->decode ? r->b->ops->block_decode(r->b->stream, &r->p, 1) : r->b->ops->block_encode(r->b->stream, &r->p, 1, false, &r->n_bad), "block");
}

static void bench_block(struct bench *b, enum kv_format format)
{
    struct block_layout layout;
    expect(block_layout_init(&layout, format, 1, 3, 64), "layout");
    bf16_t *k = halves(b, 3 * BLOCK_TOKENS * 64), *v = halves(b, 3 * BLOCK_TOKENS * 64);
    uint8_t *slice = memory(layout.slice_bytes[0]);
    struct block_run r = {b, {.layout = &layout, .slice = slice, .k = k, .v = v, .head_stride = BLOCK_TOKENS * 64}, false, 0};
    double encode = best_of(b, run_block, &r);
    r.decode = true;
    double decode = best_of(b, run_block, &r);
    printf("  block %-5s 3 KV heads d 64: encode %7.1f us, decode %7.1f us\n", kv_format_name(format), encode * 1e6, decode * 1e6);
    free(k), free(v), free(slice);
}

struct window_run {
    struct bench *b;
    struct window_score_params p;
};

static void run_window(void *arg, int run)
{
    struct window_run *r = arg;
    (void)run;
    expect(r->b->ops->window_scores(r->b->stream, &r->p), "window_scores");
}

struct topk_run {
    struct bench *b;
    const float *scores;
    int32_t *indices;
    int64_t n;
};

static void run_topk(void *arg, int run)
{
    struct topk_run *r = arg;
    (void)run;
    expect(r->b->ops->topk(r->b->stream, r->scores, 3, r->n, 512, r->indices), "topk");
}

static void bench_selection(struct bench *b, int64_t n)
{
    bf16_t *k = halves(b, (size_t)(3 * n) * 64);
    float *q = floats(b, 32 * 9 * 64, 2), *scores = memory(sizeof(float) * (size_t)(3 * n));
    int32_t *indices = memory(sizeof(int32_t) * 3 * 512);
    struct window_run w = {b, {.q = q, .n_window = 32, .k = k, .head_stride = n * 64, .n_keys = n, .n_heads = 9, .n_kv_heads = 3, .head_dim = 64, .scale = 0.125f, .first = 4, .last = n - 32, .pool = 7, .chunk = 1, .scores = scores}};
    double t = best_of(b, run_window, &w), gflops = 2 * 2.0 * 32 * 9 * 64 * (double)n / t * 1e-9;
    printf("  window_scores SmolLM2, window 32, %lld keys: %8.3f ms %7.1f GFLOP/s (%3.0f %% of peak)\n", (long long)n, t * 1e3, gflops, 100 * gflops / b->peak_gflops);
    struct topk_run r = {b, scores, indices, n};
    printf("  topk 512 of %lld, 3 rows: %8.1f us\n", (long long)n, best_of(b, run_topk, &r) * 1e6);
    free(k), free(q), free(scores), free(indices);
}

struct sample_run {
    struct bench *b;
    const float *logits;
    int n_vocab;
    struct sample_params p;
};

static void run_sample(void *arg, int run)
{
    struct sample_run *r = arg;
    struct sample_result result;
    r->p.position = (uint64_t)run;
    expect(sample_one(r->b->ops, r->b->stream, r->logits, r->n_vocab, &r->p, &result), "sample");
}

/* Logits with a peak, as models give them, and flat ones, the worst case. */
static void bench_sample(struct bench *b, int n_vocab, bool peaked)
{
    float *logits = floats(b, (size_t)n_vocab, 1);
    for (int i = 0; i < n_vocab; i++)
        logits[i] = peaked ? 12 * logits[i] * logits[i] * logits[i] + 3 * noise(b) : logits[i];
    struct sample_run r = {b, logits, n_vocab, {.temperature = 0, .top_p = 1, .repetition_penalty = 1}};
    double greedy = best_of(b, run_sample, &r);
    r.p.temperature = 1;
    double plain = best_of(b, run_sample, &r);
    r.p.top_p = 0.9f;
    double top_p = best_of(b, run_sample, &r);
    r.p.top_k = 50;
    r.p.n_top = 20;
    double all = best_of(b, run_sample, &r);
    printf("  sample %6d %-6s greedy %6.0f us, temperature %6.0f us, top-p %6.0f us, top-k top-p 20 logprobs %6.0f us\n", n_vocab, peaked ? "peaked" : "flat", greedy * 1e6,
           plain * 1e6, top_p * 1e6, all * 1e6);
    free(logits);
}

static void bench_decodes(struct bench *b)
{
    bench_rows(b, 64, 1);
    bench_rows(b, 64, 3);
    bench_rows(b, 128, 4);
    bench_pages(b, KV_FORMAT_K8V4, 64, 1, false);
    bench_pages(b, KV_FORMAT_K8V4, 64, 3, false);
    bench_pages(b, KV_FORMAT_K8V4, 128, 4, false);
    bench_pages(b, KV_FORMAT_K8V8, 64, 3, false);
    bench_pages(b, KV_FORMAT_BF16, 64, 3, false);
    bench_pages(b, KV_FORMAT_K8V4, 64, 3, true);
    bench_pages(b, KV_FORMAT_K8V4, 128, 4, true);
    bench_decode(b, 2048, 512, 32);
    bench_decode(b, 8000, 512, 32);
    bench_decode(b, 8000, 512, INT_MAX);
    bench_decode(b, 32768, 512, 32);
}

int main(int argc, char **argv)
{
    static const char *const names[] = {"auto", "plain", "avx2", "avx512"};
    struct bench b = {.isa = CPU_ISA_AVX2, .repeats = argc > 2 ? atoi(argv[2]) : 40, .ops = cpu_kernel_ops(), .random = 7};
    for (int i = 1; argc > 1 && i < 4; i++)
        if (strcmp(argv[1], names[i]) == 0)
            b.isa = (enum cpu_isa)i;
    if (b.repeats < 1)
        b.repeats = 1;
    int n_threads = argc > 3 ? atoi(argv[3]) : 1;
    if (n_threads > 1)
        bench_clock = CLOCK_MONOTONIC;
    expect(cpu_device_ops()->open(&(struct device_config){.n_threads = n_threads, .isa = b.isa}, &b.device), "device");
    expect(cpu_device_ops()->stream_create(b.device, &b.stream), "stream");
    measure_floors(&b);
    for (int64_t n = 512; n <= 8192; n *= 4)
        bench_prefill(&b, "SmolLM2", 9, 3, 64, n);
    bench_prefill(&b, "Llama 8B", 32, 8, 128, 2048);
    bench_decodes(&b);
    bench_block(&b, KV_FORMAT_K8V4);
    bench_block(&b, KV_FORMAT_BF16);
    bench_selection(&b, 8000);
    for (int n = 49152; n <= 262144; n = n == 49152 ? 131072 : n * 2) {
        bench_sample(&b, n, true);
        bench_sample(&b, n, false);
    }
    cpu_device_ops()->stream_free(b.stream);
    cpu_device_ops()->close(b.device);
    return 0;
}
