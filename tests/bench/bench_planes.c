/* Should the pool hold the index's bits twice, or as planes of two and six bits? Times the key logits of K8V4 sub-pages both ways, each in its own layout, from the caches and
 * from memory, and says what each stores. One thread, processor time, the best of many runs; both give the same integers, which is checked.
 *   bench_planes [repeats] */
#include "tests/bench/planes_dot.h"
#include "proto/block_layout.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef void dot_fn(const struct planes_pages *, const int32_t *, int32_t *);

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void *memory(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    if (!p) {
        fprintf(stderr, "bench_planes: no memory for %zu bytes\n", bytes);
        exit(1);
    }
    return p;
}

/* One page's codes in the three forms. */
static void code_page(const uint8_t *codes, int d, uint8_t *index, uint8_t *planes)
{
    memset(index, 0, (size_t)d * 4);
    memset(planes, 0, (size_t)d * 12);
    for (int g = 0; g < d / 16; g++)
        for (int j = 0; j < 4; j++)
            for (int byte = 0; byte < 64; byte++) {
                const uint8_t code = codes[64 * (4 * g + j) + byte], low = code & 63;
                index[64 * g + byte] |= (uint8_t)(code >> 6 << (2 * j));
                for (int k = 0; k < 3; k++)
                    planes[64 * (3 * g + k) + byte] |= j < 3 ? (uint8_t)(j == k ? low : 0) : (uint8_t)((low >> (4 - 2 * k) & 3) << 6);
            }
}

struct both {
    struct planes_pages codes, planes;
    int32_t *q, *ret[2];
};

static void both_make(struct both *b, const struct block_layout *l, int n, int d)
{
    const size_t less = (size_t)d * 4, page = l->page.bytes, entry = l->index_entry_bytes;
    uint8_t *codes = memory((size_t)n * page), *planes = memory((size_t)n * (page - less)), *index = memory((size_t)n * entry);
    memset(codes, 0, (size_t)n * page);
    memset(planes, 0, (size_t)n * (page - less));
    memset(index, 0, (size_t)n * entry);
    uint32_t random = 7;
    for (int i = 0; i < n; i++) {
        uint8_t *keys = codes + (size_t)i * page;
        for (int c = 0; c < 16 * d; c++)
            keys[c] = (uint8_t)((random = random * 1664525u + 1013904223u) >> 24);
        code_page(keys, d, index + (size_t)i * entry, planes + (size_t)i * (page - less));
    }
    b->codes = (struct planes_pages){.keys = codes, .index = index, .key_stride = page, .index_stride = entry, .page_bytes = page, .n = n, .d = d};
    b->planes = (struct planes_pages){.keys = planes, .index = index, .key_stride = page - less, .index_stride = entry, .page_bytes = page - less, .n = n, .d = d};
    b->q = memory(sizeof(*b->q) * (size_t)(PLANES_HEADS * d));
    for (int c = 0; c < PLANES_HEADS * d; c++)
        b->q[c] = (int32_t)((random = random * 1664525u + 1013904223u) >> 19) % 8129 - 4064;
    for (int k = 0; k < 2; k++)
        b->ret[k] = memory(sizeof(int32_t) * (size_t)n * PLANES_HEADS * SUBPAGE_TOKENS);
}

static void both_free(struct both *b)
{
    free((void *)(uintptr_t)b->codes.keys);
    free((void *)(uintptr_t)b->planes.keys);
    free((void *)(uintptr_t)b->codes.index);
    free(b->q);
    free(b->ret[0]);
    free(b->ret[1]);
}

static double best_ns(dot_fn *fn, const struct planes_pages *p, const int32_t *q, int32_t *ret, int repeats)
{
    double best = 1e9;
    for (int i = 0; i < repeats; i++) {
        const double start = now();
        fn(p, q, ret);
        const double s = now() - start;
        best = s < best ? s : best;
    }
    return best / p->n * 1e9;
}

static void run(const char *isa, dot_fn *codes, dot_fn *planes, const struct block_layout *l, int d, bool cold, int repeats)
{
    struct both b;
    both_make(&b, l, cold ? 65536 * 64 / d : 96, d);
    const double one = best_ns(codes, &b.codes, b.q, b.ret[0], repeats), two = best_ns(planes, &b.planes, b.q, b.ret[1], repeats);
    if (memcmp(b.ret[0], b.ret[1], sizeof(int32_t) * (size_t)b.codes.n * PLANES_HEADS * SUBPAGE_TOKENS) != 0) {
        fprintf(stderr, "bench_planes: the two forms differ\n");
        exit(1);
    }
    printf("| %s | %d | %s | %.1f | %.1f | %.2f |\n", isa, d, cold ? "memory" : "cache", one, two, two / one);
    both_free(&b);
}

int main(int argc, char **argv)
{
    const int repeats = argc > 1 && atoi(argv[1]) > 0 ? atoi(argv[1]) : 30;
    struct block_layout layout[2];
    for (int i = 0; i < 2; i++) {
        if (block_layout_init(&layout[i], KV_FORMAT_K8V4, 1, 1, i ? 128 : 64) < 0)
            return 1;
        const double page = layout[i].page.bytes, entry = layout[i].index_entry_bytes, less = 4.0 * (i ? 128 : 64);
        printf("d %d: a sub-page and its index entry take %.0f bytes, %.0f as planes (%.1f %% less); a fetch moves %.0f or %.0f (%.1f %% less)\n", i ? 128 : 64, page + entry,
               page + entry - less, 100 * less / (page + entry), page, page - less, 100 * less / page);
    }
    printf("\n| key logits, 3 heads | d | from | codes, ns a page | planes | ratio |\n|---|---|---|---|---|---|\n");
    for (int cold = 0; cold < 2; cold++)
        for (int i = 0; i < 2; i++) {
            if (__builtin_cpu_supports("avx512vnni"))
                run("AVX-512", bench_codes_avx512, bench_planes_avx512, &layout[i], i ? 128 : 64, cold, repeats);
            if (__builtin_cpu_supports("avx2"))
                run("AVX2", bench_codes_avx2, bench_planes_avx2, &layout[i], i ? 128 : 64, cold, repeats);
        }
    return 0;
}
