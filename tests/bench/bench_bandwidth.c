/* Decode attention against the machine's memory: GB/s of each part of attn_decode over more bytes than the caches hold, beside the read bandwidth that the same number
 * of threads reach on the same machine in the same run. Wall-clock time, the best of several rounds, floor and kernels interleaved.
 *   bench_bandwidth [--threads N] [--isa auto|avx2|avx512|plain] [--rounds N] [--tokens N] [--json] */
#include "kernels/kernels.h"
#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include "proto/base/options.h"
#include "proto/option_choices.h"
#include "tests/bench/bench_floor.h"
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_THREADS = 64, MAX_LAYERS = 256, FLOOR_BYTES = 64 << 20 /* a thread */ };

struct options {
    int64_t threads, rounds, tokens, layers, kv_heads, group, head_dim;
    int isa;
    bool json;
};

#define FIELD(f) offsetof(struct options, f)
static const struct option_spec specs[] = {
    {.name = "threads", .kind = OPTION_INT, .offset = FIELD(threads), .fallback = "2", .min = 1, .max = MAX_THREADS, .metavar = "N", .help = "compute threads"},
    {.name = "rounds", .kind = OPTION_INT, .offset = FIELD(rounds), .fallback = "20", .min = 1, .max = 10000, .metavar = "N", .help = "the best of N counts"},
    {.name = "tokens", .kind = OPTION_INT, .offset = FIELD(tokens), .fallback = "8192", .min = 128, .max = 1 << 20, .metavar = "N", .help = "tokens of a sequence"},
    {.name = "layers", .kind = OPTION_INT, .offset = FIELD(layers), .fallback = "30", .min = 1, .max = MAX_LAYERS, .metavar = "N", .help = "layers"},
    {.name = "kv-heads", .kind = OPTION_INT, .offset = FIELD(kv_heads), .fallback = "3", .min = 1, .max = 64, .metavar = "N", .help = "KV heads of a layer"},
    {.name = "group", .kind = OPTION_INT, .offset = FIELD(group), .fallback = "3", .min = 1, .max = 16, .metavar = "N", .help = "query heads a KV head"},
    {.name = "head-dim", .kind = OPTION_INT, .offset = FIELD(head_dim), .fallback = "64", .min = 32, .max = 256, .metavar = "N", .help = "channels of a head"},
    {.name = "isa", .kind = OPTION_ENUM, .offset = FIELD(isa), .fallback = "auto", .choices = isa_choices, .help = "instruction set"},
    {.name = "json", .kind = OPTION_BOOL, .offset = FIELD(json), .fallback = "off", .help = "one JSON object instead of text"},
};
static const struct option_set option_set = {
    .program = "bench_bandwidth",
    .summary = "Measures decode attention over the slow and the fast tier against the memory's read bandwidth.",
    .examples = "  bench_bandwidth --threads 2\n  bench_bandwidth --layers 32 --kv-heads 8 --group 4 --head-dim 128 --tokens 4096\n",
    .specs = specs,
    .n_specs = ARRAY_LEN(specs),
};

static void expect(int r, const char *what)
{
    if (r >= 0)
        return;
    fprintf(stderr, "bench_bandwidth: %s: %s\n", what, strerror(-r));
    exit(1);
}

/* ---- the floor: every thread reads a region of its own ---- */

struct reader {
    pthread_barrier_t *start;
    const char *memory;
    enum cpu_isa isa;
    int rounds;
    volatile int sink;
    double best_s;
};

static void *read_region(void *arg)
{
    struct reader *r = arg;
    r->best_s = 1e9;
    for (int i = 0; i < r->rounds; i++) {
        pthread_barrier_wait(r->start);
        const uint64_t start = clock_now_ns();
        r->sink = r->isa == CPU_ISA_AVX512 ? bench_read_avx512(r->memory, FLOOR_BYTES)
                  : r->isa == CPU_ISA_AVX2 ? bench_read_avx2(r->memory, FLOOR_BYTES)
                                           : bench_read_plain(r->memory, FLOOR_BYTES);
        pthread_barrier_wait(r->start); /* the slowest thread counts */
        const double s = (double)(clock_now_ns() - start) * 1e-9;
        r->best_s = s < r->best_s ? s : r->best_s;
    }
    return NULL;
}

static double read_gbs(enum cpu_isa isa, int n_threads, char *memory, int rounds)
{
    struct reader readers[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    pthread_barrier_t start;
    expect(-pthread_barrier_init(&start, NULL, (unsigned)n_threads), "barrier");
    for (int i = 0; i < n_threads; i++) {
        readers[i] = (struct reader){.start = &start, .memory = memory + (size_t)i * FLOOR_BYTES, .isa = isa, .rounds = rounds};
        expect(-pthread_create(&threads[i], NULL, read_region, &readers[i]), "thread");
    }
    double s = 0;
    for (int i = 0; i < n_threads; i++) {
        pthread_join(threads[i], NULL);
        s = readers[i].best_s > s ? readers[i].best_s : s;
    }
    pthread_barrier_destroy(&start);
    return (double)n_threads * FLOOR_BYTES / s * 1e-9;
}

/* ---- the slow and the fast tier of one sequence, all layers ---- */

struct tier {
    struct block_layout layout;
    uint8_t *blocks;
    bf16_t *rows; /* [n_items][k, v][tokens, d] */
    float *q, *out;
    struct kv_block *table; /* none of the blocks was coded as a first one, so the first place is that of a block without slow tokens */
    uint16_t *masks;
    struct attn_decode_item *items;
    int n_items, n_pages, n_tokens;
};

struct bench {
    struct options o;
    const struct device_ops *dev;
    const struct kernel_ops *ops;
    struct device *device;
    struct stream *stream;
    struct device_properties properties;
    uint32_t random;
};

static float noise(struct bench *b)
{
    b->random = b->random * 1664525u + 1013904223u;
    return (float)(b->random >> 8) * 0x1p-23f - 1.0f;
}

static void *device_alloc(struct bench *b, size_t bytes)
{
    void *memory;
    expect(b->dev->alloc(b->device, MEM_WORKSPACE, bytes, &memory), "memory");
    return memory;
}

static void *host_alloc(size_t n, size_t size)
{
    void *memory = calloc(n, size);
    expect(memory ? 0 : -12, "memory");
    return memory;
}

/* Blocks lie as in a pool: one extent a block, layer after layer. Their bytes are one coded block, copied. */
static void make_blocks(struct bench *b, struct tier *t)
{
    const int d = (int)b->o.head_dim, n_blocks = t->n_tokens / BLOCK_TOKENS;
    const size_t n = (size_t)(b->o.kv_heads * BLOCK_TOKENS * d), extent = t->layout.block_bytes[0];
    bf16_t *kv = device_alloc(b, 2 * n * sizeof(*kv));
    for (size_t i = 0; i < 2 * n; i++) {
        const float x = noise(b);
        uint32_t bits;
        memcpy(&bits, &x, sizeof(bits));
        kv[i] = (bf16_t)(bits >> 16);
    }
    t->blocks = device_alloc(b, extent * (size_t)n_blocks);
    int32_t n_bad = 0;
    for (int l = 0; l < b->o.layers; l++) {
        const struct block_params p = {.layout = &t->layout, .slice = t->blocks + block_slice_offset(&t->layout, false, (uint32_t)l), .k = kv, .v = kv + n,
                                       .head_stride = (int64_t)BLOCK_TOKENS * d};
        expect(b->ops->block_encode(b->stream, &p, 1, false, &n_bad), "block_encode");
    }
    for (int i = 1; i < n_blocks; i++)
        memcpy(t->blocks + extent * (size_t)i, t->blocks, extent);
    b->dev->free(b->device, kv);
}

/* All sub-pages have slow tokens in every layer and head, so one row of masks does for all. */
static void make_table(struct tier *t)
{
    const int n_blocks = t->n_tokens / BLOCK_TOKENS;
    t->table = host_alloc((size_t)n_blocks + 1, sizeof(*t->table));
    t->masks = host_alloc((size_t)(n_blocks + 1) * BLOCK_SUBPAGES, sizeof(*t->masks));
    for (int i = 0; i < n_blocks; i++)
        t->table[i + 1].data = t->blocks + t->layout.block_bytes[0] * (size_t)i;
    memset(t->masks + BLOCK_SUBPAGES, 0xFF, (size_t)t->n_pages * sizeof(*t->masks));
}

static void make_tier(struct bench *b, enum kv_format format, struct tier *t)
{
    const struct options *o = &b->o;
    const size_t d = (size_t)o->head_dim, q = (size_t)o->group * d;
    *t = (struct tier){.n_items = (int)(o->layers * o->kv_heads), .n_tokens = (int)(o->tokens / BLOCK_TOKENS * BLOCK_TOKENS)};
    t->n_pages = t->n_tokens / SUBPAGE_TOKENS;
    expect(block_layout_init(&t->layout, format, (uint32_t)o->layers, (uint32_t)o->kv_heads, (uint32_t)d), "layout");
    make_blocks(b, t);
    t->q = device_alloc(b, (size_t)t->n_items * q * sizeof(float));
    t->out = device_alloc(b, (size_t)t->n_items * q * sizeof(float));
    for (size_t i = 0; i < (size_t)t->n_items * q; i++)
        t->q[i] = 2 * noise(b);
    make_table(t);
    t->items = host_alloc((size_t)t->n_items, sizeof(*t->items));
    for (int i = 0; i < t->n_items; i++)
        t->items[i] = (struct attn_decode_item){.q = t->q + (size_t)i * q, .out = t->out + (size_t)i * q};
}

static void make_rows(struct bench *b, struct tier *t)
{
    const size_t n = (size_t)t->n_tokens * (size_t)b->o.head_dim;
    t->rows = device_alloc(b, (size_t)t->n_items * 2 * n * sizeof(*t->rows));
    for (size_t i = 0; i < 2 * n; i++)
        t->rows[i] = (bf16_t)(0x3f80 + (int)(8 * noise(b)));
    for (int i = 1; i < t->n_items; i++)
        memcpy(t->rows + (size_t)i * 2 * n, t->rows, 2 * n * sizeof(*t->rows));
}

static void free_tier(struct bench *b, struct tier *t)
{
    b->dev->free(b->device, t->blocks);
    b->dev->free(b->device, t->rows);
    b->dev->free(b->device, t->q);
    b->dev->free(b->device, t->out);
    free(t->table);
    free(t->masks);
    free(t->items);
}

enum part { PART_PAGES, PART_INDEX, PART_ROWS };

static double seconds(const struct bench *b)
{
    struct timespec t;
    clock_gettime(b->o.threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* One layer a call, as a decode step does. best_s [layers]. */
static void run_part(struct bench *b, struct tier *t, enum part part, double *best_s)
{
    const struct options *o = &b->o;
    const size_t n = (size_t)t->n_tokens * (size_t)o->head_dim;
    for (int i = 0; i < t->n_items; i++) {
        struct attn_decode_item *item = &t->items[i];
        item->slow = (struct slow_pages){0};
        if (part != PART_ROWS)
            item->slow = (struct slow_pages){.blocks = t->table, .masks = t->masks, .n_subpages = t->n_pages + BLOCK_SUBPAGES, .n_pages = t->n_pages, .layer = i / (int)o->kv_heads, .kv_head = i % (int)o->kv_heads};
        item->fetch_pages = part == PART_PAGES ? INT_MAX : 1;
        item->rows[0] = part == PART_ROWS ? (struct kv_rows){.k = t->rows + (size_t)i * 2 * n, .v = t->rows + ((size_t)i * 2 + 1) * n, .n = t->n_tokens} : (struct kv_rows){0};
    }
    for (int l = 0; l < o->layers; l++) {
        const double start = seconds(b);
        struct attn_decode_params p = {.items = t->items + l * o->kv_heads, .n_items = (int)o->kv_heads, .layout = &t->layout, .group = (int)o->group,
                                       .head_dim = (int)o->head_dim, .scale = 1 / sqrtf((float)o->head_dim)};
        expect(b->ops->attn_decode(b->stream, &p), "attn_decode");
        const double s = seconds(b) - start;
        best_s[l] = s < best_s[l] ? s : best_s[l];
    }
}

static void print_part(struct bench *b, const char *what, struct tier *t, enum part part, double bytes, const char *end)
{
    enum cpu_isa isa = b->properties.isa;
    double best_s[MAX_LAYERS], best = 0, floor = 0;
    for (int l = 0; l < MAX_LAYERS; l++)
        best_s[l] = 1e9;
    char *memory = malloc((size_t)b->o.threads * FLOOR_BYTES);
    expect(memory ? 0 : -12, "memory");
    memset(memory, 1, (size_t)b->o.threads * FLOOR_BYTES);
    for (int i = 0; i < b->o.rounds; i++) {
        run_part(b, t, part, best_s);
        if (i % 4 == 0) {
            const double gbs = read_gbs(isa, (int)b->o.threads, memory, 2);
            floor = gbs > floor ? gbs : floor;
        }
    }
    free(memory);
    for (int l = 0; l < b->o.layers; l++)
        best += best_s[l];
    const double gbs = bytes / best * 1e-9;
    if (b->o.json)
        printf("{\"what\": \"%s\", \"bytes\": %.0f, \"ms\": %.4f, \"gbs\": %.3f, \"read_gbs\": %.3f, \"ratio\": %.4f}%s", what, bytes, best * 1e3, gbs, floor, gbs / floor, end);
    else
        printf("| %-18s | %7.1f | %7.3f | %6.2f | %6.2f | %4.0f %% |\n", what, bytes / 1e6, best * 1e3, gbs, floor, 100 * gbs / floor);
    fflush(stdout);
}

static void run_format(struct bench *b, enum kv_format format)
{
    struct tier t;
    char what[32];
    make_tier(b, format, &t);
    const double pages = (double)t.n_items * t.n_pages;
    snprintf(what, sizeof(what), "sub-pages %s", kv_format_name(format));
    print_part(b, what, &t, PART_PAGES, pages * t.layout.page.bytes, ", ");
    if (format == KV_FORMAT_K8V4) {
        print_part(b, "index", &t, PART_INDEX, pages * t.layout.index_entry_bytes, ", ");
        make_rows(b, &t);
        print_part(b, "fast rows bf16", &t, PART_ROWS, (double)t.n_items * 2 * t.n_tokens * (double)b->o.head_dim * sizeof(bf16_t), ", ");
    }
    free_tier(b, &t);
}

int main(int argc, char **argv)
{
    struct bench b = {.dev = cpu_device_ops(), .ops = cpu_kernel_ops(), .random = 7};
    struct error err = {0};
    const int r = options_parse(&option_set, argc, argv, &b.o, NULL, &err);
    if (r > 0)
        return 0;
    if (r < 0) {
        fprintf(stderr, "bench_bandwidth: %s\n", err.text);
        return 1;
    }
    expect(b.dev->open(&(struct device_config){.n_threads = (int)b.o.threads, .isa = (enum cpu_isa)b.o.isa}, &b.device), "device");
    expect(b.dev->stream_create(b.device, &b.stream), "stream");
    b.dev->properties(b.device, &b.properties);
    if (b.o.json)
        printf("[");
    else
        printf("%s: %lld layers, %lld KV heads, group %lld, d %lld, %lld tokens, best of %lld\n| %-18s | %7s | %7s | %6s | %6s | %6s |\n|---|---|---|---|---|---|\n",
               b.properties.name, (long long)b.o.layers, (long long)b.o.kv_heads, (long long)b.o.group, (long long)b.o.head_dim, (long long)b.o.tokens, (long long)b.o.rounds,
               "decode attention", "MB", "ms", "GB/s", "read", "ratio");
    run_format(&b, KV_FORMAT_K8V4);
    run_format(&b, KV_FORMAT_K8V8);
    run_format(&b, KV_FORMAT_BF16);
    if (b.o.json)
        printf("null]\n");
    b.dev->stream_free(b.stream);
    b.dev->close(b.device);
    return 0;
}
