/* GEMMs of SmolLM2-135M and of one 4096 x 4096 matrix in each weight format, against the machine's own limits measured in the same run.
 * Every figure is the best of many short runs: on a shared machine the others' load is noise that only ever adds time. Where even that is not enough,
 * --cpu-time counts the processor time of the one thread instead (--threads=1 is implied). */
#include "kernels/cpu/cpu_isa.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/kernels.h"
#include "tests/bench/bench_floor.h"
#include <dirent.h>
#include <errno.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { DIM = 576, KV_DIM = 192, FFN_DIM = 1536, N_LAYERS = 30, N_VOCAB = 49152, MAX_ROWS = 512, SQUARE = 4096 };

struct bench {
    const struct device_ops *device_ops;
    const struct kernel_ops *ops;
    struct device *device;
    struct stream *stream;
    enum cpu_isa isa;
    int n_threads, n_repeats;
    clockid_t clock;
    double peak_gflops, read_gbs;
    float *x, *y; /* [MAX_ROWS, SQUARE] each; y as large as the vocabulary */
    uint8_t *file; /* random bytes to pack weights from */
    size_t file_bytes;
};

static void fail(const char *what, int rc)
{
    fprintf(stderr, "%s: %s\n", what, strerror(-rc));
    exit(1);
}

static void *allocate(struct bench *b, enum mem_tag tag, size_t bytes)
{
    void *memory;
    int rc = b->device_ops->alloc(b->device, tag, bytes, &memory);
    if (rc < 0)
        fail("memory", rc);
    return memory;
}

static double seconds_now(const struct bench *b)
{
    struct timespec t;
    clock_gettime(b->clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- floors ---- */

struct floor_args {
    enum cpu_isa isa;
    const char *memory;
    volatile float sink;
};

/* Short windows, each over memory that 240 MiB of other reads have pushed out of the caches. */
enum { FMA_ROUNDS = 20000, READ_TASK = 1 << 20, READ_TASKS = 16, READ_WINDOWS = 16, READ_BYTES = READ_TASK * READ_TASKS * READ_WINDOWS };

static void fma_task(void *arg, int64_t task, int thread)
{
    struct floor_args *a = arg;
    (void)task;
    (void)thread;
    a->sink = a->isa == CPU_ISA_AVX512 ? bench_fma_avx512(FMA_ROUNDS) : a->isa == CPU_ISA_AVX2 ? bench_fma_avx2(FMA_ROUNDS) : bench_fma_plain(FMA_ROUNDS / 50);
}

static void read_task(void *arg, int64_t task, int thread)
{
    struct floor_args *a = arg;
    const char *p = a->memory + task * READ_TASK;
    (void)thread;
    int sum = a->isa == CPU_ISA_AVX512 ? bench_read_avx512(p, READ_TASK) : a->isa == CPU_ISA_AVX2 ? bench_read_avx2(p, READ_TASK) : bench_read_plain(p, READ_TASK);
    a->sink = (float)sum;
}

static double best_seconds(const struct bench *b, int repeats, struct thread_pool *pool, int64_t n_tasks, pool_task *fn, void *arg)
{
    double best = 1e9;
    for (int i = 0; i < repeats; i++) {
        double t0 = seconds_now(b);
        pool_run(pool, n_tasks, fn, arg);
        double t = seconds_now(b) - t0;
        best = t < best ? t : best;
    }
    return best;
}

/* Each thread on a processor of its own: under load the scheduler would at times put all on one. */
static void pin_threads(void)
{
    DIR *dir = opendir("/proc/self/task");
    int n_cpus = 0;
    cpu_set_t allowed;
    if (!dir || sched_getaffinity(0, sizeof allowed, &allowed) < 0)
        fail("affinity", -errno);
    for (struct dirent *e = readdir(dir); e; e = readdir(dir)) {
        cpu_set_t one;
        int tid = atoi(e->d_name), cpu = 0;
        for (int skip = n_cpus; tid > 0 && cpu < CPU_SETSIZE; cpu++)
            if (CPU_ISSET(cpu, &allowed) && skip-- == 0)
                break;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        if (tid > 0 && cpu < CPU_SETSIZE && sched_setaffinity(tid, sizeof one, &one) == 0)
            n_cpus++;
    }
    closedir(dir);
}

static void unpin(void)
{
    cpu_set_t all;
    memset(&all, 0xFF, sizeof all);
    sched_setaffinity(0, sizeof all, &all);
}

static void measure_floors(struct bench *b)
{
    struct thread_pool *pool;
    int rc = thread_pool_create(b->n_threads, &pool);
    if (rc < 0)
        fail("threads", rc);
    pin_threads();
    struct floor_args args = {.isa = b->isa, .memory = malloc(READ_BYTES)};
    if (!args.memory)
        fail("memory", -ENOMEM);
    char *memory = (void *)(uintptr_t)args.memory;
    memset(memory, 1, READ_BYTES);
    long rounds = b->isa == CPU_ISA_PLAIN ? FMA_ROUNDS / 50 : FMA_ROUNDS;
    double fma_s = best_seconds(b, 50 * b->n_repeats, pool, b->n_threads * 4, fma_task, &args);
    b->peak_gflops = 2.0 * 16 * BENCH_FMA_CHAINS * (double)rounds * b->n_threads * 4 / fma_s * 1e-9;
    double read_s = 1e9;
    for (int i = 0; i < 2 * b->n_repeats * READ_WINDOWS; i++) {
        args.memory = memory + (size_t)(i % READ_WINDOWS) * READ_TASK * READ_TASKS;
        double t = best_seconds(b, 1, pool, READ_TASKS, read_task, &args);
        read_s = t < read_s ? t : read_s;
    }
    b->read_gbs = (double)READ_TASK * READ_TASKS / read_s * 1e-9;
    thread_pool_free(pool);
    unpin();
    free(memory);
    printf("\n%s, %d thread%s: fma peak %.1f GFLOP/s, memory read %.1f GB/s\n", cpu_isa_name(b->isa), b->n_threads, b->n_threads == 1 ? "" : "s", b->peak_gflops,
           b->read_gbs);
}

/* ---- weights ---- */

static struct weight weight_make(struct bench *b, enum weight_dtype dtype, int64_t n_rows, int64_t n_cols)
{
    size_t bytes = b->ops->weight_bytes(dtype, n_rows, n_cols);
    void *packed = allocate(b, MEM_WEIGHTS, bytes);
    int rc = b->ops->weight_pack(b->stream, dtype, n_rows, n_cols, b->file, packed);
    if (rc < 0)
        fail("weight_pack", rc);
    return (struct weight){.dtype = dtype, .n_rows = n_rows, .n_cols = n_cols, .packed = packed};
}

static void weight_free(struct bench *b, struct weight *w)
{
    b->device_ops->free(b->device, (void *)(uintptr_t)w->packed);
}

/* One fork-join of the model: up to three weights over the same x. */
struct step {
    const char *name;
    int n_outs;
    int64_t n_rows[3], n_cols;
};

static const struct step steps[] = {
    {.name = "q k v", .n_outs = 3, .n_rows = {DIM, KV_DIM, KV_DIM}, .n_cols = DIM},
    {.name = "attention out", .n_outs = 1, .n_rows = {DIM}, .n_cols = DIM},
    {.name = "gate up", .n_outs = 2, .n_rows = {FFN_DIM, FFN_DIM}, .n_cols = DIM},
    {.name = "down", .n_outs = 1, .n_rows = {DIM}, .n_cols = FFN_DIM},
};
enum { N_STEPS = sizeof steps / sizeof steps[0] };

struct layer {
    struct weight w[N_STEPS][3];
};

static double weight_count(const struct step *s)
{
    double rows = 0;
    for (int i = 0; i < s->n_outs; i++)
        rows += (double)s->n_rows[i];
    return rows * (double)s->n_cols;
}

static void step_run(struct bench *b, const struct step *s, struct weight *w, int64_t n)
{
    struct matmul_out outs[3];
    float *y = b->y;
    for (int i = 0; i < s->n_outs; i++) {
        outs[i] = (struct matmul_out){.w = &w[i], .y = y, .ld_y = s->n_rows[i]};
        y += n * s->n_rows[i];
    }
    int rc = b->ops->matmul(b->stream, b->x, n, s->n_cols, outs, s->n_outs);
    if (rc < 0)
        fail("matmul", rc);
}

/* Sum over the layers of the best time of each step. One pass walks through 66 MB, so a decode step's weights come from memory. */
static void layers_measure(struct bench *b, struct layer *layers, int64_t n, int repeats, double total[N_STEPS])
{
    double best[N_LAYERS][N_STEPS];
    for (int r = 0; r < repeats; r++)
        for (int l = 0; l < N_LAYERS; l++)
            for (int s = 0; s < N_STEPS; s++) {
                double t0 = seconds_now(b);
                step_run(b, &steps[s], layers[l].w[s], n);
                double t = seconds_now(b) - t0;
                best[l][s] = r == 0 || t < best[l][s] ? t : best[l][s];
            }
    for (int s = 0; s < N_STEPS; s++) {
        total[s] = 0;
        for (int l = 0; l < N_LAYERS; l++)
            total[s] += best[l][s];
    }
}

static void print_row(const struct bench *b, const char *what, int64_t n, double flop, double bytes, double seconds)
{
    double gflops = flop / seconds * 1e-9, gbs = bytes / seconds * 1e-9;
    printf("  %-16s %5lld rows %9.3f ms %8.1f GFLOP/s (%3.0f %%) %7.1f GB/s of weights (%3.0f %%)\n", what, (long long)n, seconds * 1e3, gflops,
           100 * gflops / b->peak_gflops, gbs, 100 * gbs / b->read_gbs);
}

static void bench_model(struct bench *b)
{
    struct layer *layers = calloc(N_LAYERS, sizeof *layers);
    if (!layers)
        fail("memory", -ENOMEM);
    for (int l = 0; l < N_LAYERS; l++)
        for (int s = 0; s < N_STEPS; s++)
            for (int i = 0; i < steps[s].n_outs; i++)
                layers[l].w[s][i] = weight_make(b, WEIGHT_Q4_1, steps[s].n_rows[i], steps[s].n_cols);
    static const int64_t rows[] = {1, 2, 3, 4, 6, 8, 16, 32, 128, 512};
    printf("SmolLM2-135M, Q4_1, all 30 layers\n");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        double best[N_STEPS], total = 0, flop = 0, bytes = 0;
        if (b->isa == CPU_ISA_PLAIN && rows[i] > 8)
            break;
        layers_measure(b, layers, rows[i], rows[i] <= 8 ? 4 * b->n_repeats : b->n_repeats, best);
        for (int s = 0; s < N_STEPS; s++) {
            double f = 2.0 * weight_count(&steps[s]) * (double)rows[i] * N_LAYERS, w = 0.625 * weight_count(&steps[s]) * N_LAYERS;
            if (rows[i] == 1 || rows[i] == 512)
                print_row(b, steps[s].name, rows[i], f, w, best[s]);
            total += best[s];
            flop += f;
            bytes += w;
        }
        print_row(b, "all layers", rows[i], flop, bytes, total);
        printf("  %-16s %5lld rows: %.0f tokens/s for these GEMMs alone\n", "", (long long)rows[i], (double)rows[i] / total);
    }
    for (int l = 0; l < N_LAYERS; l++)
        for (int s = 0; s < N_STEPS; s++)
            for (int i = 0; i < steps[s].n_outs; i++)
                weight_free(b, &layers[l].w[s][i]);
    free(layers);
}

static double matrix_measure(struct bench *b, const struct weight *w, int64_t n, int repeats)
{
    struct matmul_out out = {.w = w, .y = b->y, .ld_y = w->n_rows};
    double best = 1e9;
    for (int r = 0; r < repeats; r++) {
        double t0 = seconds_now(b);
        int rc = b->ops->matmul(b->stream, b->x, n, w->n_cols, &out, 1);
        double t = seconds_now(b) - t0;
        if (rc < 0)
            fail("matmul", rc);
        best = t < best ? t : best;
    }
    return best;
}

static void bench_matrix(struct bench *b, const char *name, enum weight_dtype dtype, int64_t n_rows, int64_t n_cols, const int64_t *rows, int n_sizes)
{
    struct weight w = weight_make(b, dtype, n_rows, n_cols);
    double bytes = (double)b->ops->weight_bytes(dtype, n_rows, n_cols);
    for (int i = 0; i < n_sizes; i++) {
        if (b->isa == CPU_ISA_PLAIN && rows[i] > 1)
            break;
        double t = matrix_measure(b, &w, rows[i], b->n_repeats);
        print_row(b, name, rows[i], 2.0 * (double)n_rows * (double)n_cols * (double)rows[i], bytes, t);
    }
    weight_free(b, &w);
}

static void bench_formats(struct bench *b)
{
    static const struct {
        const char *name;
        enum weight_dtype dtype;
    } formats[] = {
        {"F32", WEIGHT_F32},   {"F16", WEIGHT_F16},   {"BF16", WEIGHT_BF16}, {"Q8_0", WEIGHT_Q8_0}, {"Q4_0", WEIGHT_Q4_0},
        {"Q4_1", WEIGHT_Q4_1}, {"Q5_0", WEIGHT_Q5_0}, {"Q4_K", WEIGHT_Q4_K}, {"Q5_K", WEIGHT_Q5_K}, {"Q6_K", WEIGHT_Q6_K},
    };
    static const int64_t rows[] = {1, 8, 128};
    printf("%d x %d\n", SQUARE, SQUARE);
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++)
        bench_matrix(b, formats[i].name, formats[i].dtype, SQUARE, SQUARE, rows, 3);
}

static void bench_run(struct bench *b)
{
    static const int64_t one = 1;
    measure_floors(b);
    int rc = b->device_ops->open(&(struct device_config){.n_threads = b->n_threads, .isa = b->isa}, &b->device);
    if (rc == 0)
        rc = b->device_ops->stream_create(b->device, &b->stream);
    if (rc < 0)
        fail("device", rc);
    pin_threads();
    b->x = allocate(b, MEM_WORKSPACE, sizeof *b->x * MAX_ROWS * SQUARE);
    b->y = allocate(b, MEM_WORKSPACE, sizeof *b->y * MAX_ROWS * SQUARE);
    for (size_t i = 0; i < (size_t)MAX_ROWS * SQUARE; i++)
        b->x[i] = (float)(i * 2654435761u % 65536) / 65536.0f - 0.5f;
    bench_model(b);
    bench_matrix(b, "lm head, Q8_0", WEIGHT_Q8_0, N_VOCAB, DIM, &one, 1);
    bench_formats(b);
    b->device_ops->free(b->device, b->x);
    b->device_ops->free(b->device, b->y);
    b->device_ops->stream_free(b->stream);
    b->device_ops->close(b->device);
    unpin();
}

/* Bytes that make finite weights in every format: fp16 and bf16 values of magnitude about 0.01 throughout. */
static void file_fill(struct bench *b)
{
    b->file_bytes = (size_t)SQUARE * SQUARE * 4;
    b->file = malloc(b->file_bytes);
    if (!b->file)
        fail("memory", -ENOMEM);
    for (size_t i = 0; i < b->file_bytes; i += 2) {
        b->file[i] = (uint8_t)(i * 2654435761u >> 13);
        b->file[i + 1] = 0x21;
    }
}

int main(int argc, char **argv)
{
    struct bench b = {.device_ops = cpu_device_ops(), .ops = cpu_kernel_ops(), .n_repeats = 5, .clock = CLOCK_MONOTONIC};
    int threads = 0;
    enum cpu_isa only = CPU_ISA_AUTO;
    for (int i = 1; i < argc; i++) {
        if (sscanf(argv[i], "--threads=%d", &threads) == 1 || sscanf(argv[i], "--repeats=%d", &b.n_repeats) == 1)
            continue;
        if (strcmp(argv[i], "--cpu-time") == 0) {
            b.clock = CLOCK_THREAD_CPUTIME_ID;
            threads = 1;
            continue;
        }
        for (enum cpu_isa isa = CPU_ISA_PLAIN; isa <= CPU_ISA_AVX512; isa++)
            if (strncmp(argv[i], "--isa=", 6) == 0 && strcmp(argv[i] + 6, cpu_isa_name(isa)) == 0)
                only = isa;
        if (only == CPU_ISA_AUTO) {
            fprintf(stderr, "usage: %s [--isa=plain|avx2|avx512] [--threads=N] [--repeats=N] [--cpu-time]\n", argv[0]);
            return 2;
        }
    }
    file_fill(&b);
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (b.isa = CPU_ISA_AVX2; b.isa <= CPU_ISA_AVX512; b.isa++)
        for (b.n_threads = threads ? threads : 1; b.n_threads <= (threads ? threads : 2); b.n_threads++)
            if ((only == CPU_ISA_AUTO || only == b.isa) && cpu_isa_supported(b.isa))
                bench_run(&b);
    if (only == CPU_ISA_PLAIN) {
        b.isa = CPU_ISA_PLAIN;
        b.n_threads = threads ? threads : 1;
        bench_run(&b);
    }
    free(b.file);
    return 0;
}
