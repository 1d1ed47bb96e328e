/* Blocks of a launch one after the other, their barriers, and what is reported. */
#include "tests/simt/simt_private.h"
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <sys/mman.h>

namespace simt {

thread_local const ThreadView *self;
thread_local Executor *executor;
static std::atomic<uint64_t> threads_run;

Options &options()
{
    static Options o = [] {
        const char *seed = getenv("SIMT_SEED"), *threads = getenv("SIMT_THREADS");
        Options read = {seed ? strtoull(seed, nullptr, 10) : 0, !check::ENABLED && threads && *threads == '1', 0, "", 0};
        const char *fail = getenv("SIMT_FAIL_LAUNCH"), *colon = fail ? strchr(fail, ':') : nullptr;
        if (colon) {
            read.fail_kernel.assign(fail, colon);
            read.fail_launch = atoi(colon + 1);
        }
        const char *others = getenv("SIMT_OTHERS_BYTES");
        read.others_bytes = others ? strtoull(others, nullptr, 10) : 0;
        return read;
    }();
    return o;
}

void report(const char *what, const std::string &detail)
{
    fprintf(stderr, "simt: %s: %s (SIMT_SEED=%llu SIMT_THREADS=%d)\n", what, detail.c_str(), (unsigned long long)options().seed, (int)options().threads);
    fflush(stderr);
    abort();
}

std::string fiber_name(const Fiber *f)
{
    const ThreadView &v = f->view;
    char text[160];
    snprintf(text, sizeof text, "thread (%u,%u,%u) of block (%u,%u,%u)", v.thread.x, v.thread.y, v.thread.z, v.block.x, v.block.y, v.block.z);
    return text;
}

/* Dynamic shared memory: a mapping for each OS thread whose end is a guard page, so that the block's bytes end at it (but for alignment to 128). */
static unsigned char *shared_memory(size_t bytes)
{
    static thread_local unsigned char *mapping;
    enum { PAGE = 4096, ROOM = (SHARED_LIMIT + PAGE - 1) / PAGE * PAGE };
    if (!mapping) {
        void *m = mmap(nullptr, ROOM + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (m == MAP_FAILED || mprotect((char *)m + ROOM, PAGE, PROT_NONE) != 0)
            report("no memory for dynamic shared memory", "");
        mapping = (unsigned char *)m;
    }
    unsigned char *memory = mapping + ROOM - (bytes + 127) / 128 * 128;
    memset(memory, 0xFF, (size_t)(mapping + ROOM - memory)); /* NaN in every float format, -1 in integers: what was never written shows */
    return memory;
}

static void block_init(Executor *e, const Kernel &k, uint3 index)
{
    const dim3 b = k.shape.block;
    const uint64_t linear = index.x + (uint64_t)k.shape.grid.x * (index.y + (uint64_t)k.shape.grid.y * index.z);
    unsigned char *shared = shared_memory(k.shape.shared_bytes);
    e->kernel = &k;
    e->n_threads = e->n_live = b.x * b.y * b.z;
    e->random.state = options().seed ? options().seed * 0x9E3779B97F4A7C15ull + k.serial * 0xBF58476D1CE4E5B9ull + linear + 1 : 0;
    e->ready_warps = 0;
    for (Barrier &barrier : e->barriers)
        barrier.n_arrived = 0;
    for (unsigned w = 0; w < (e->n_threads + WARP - 1) / WARP; w++) {
        const unsigned left = e->n_threads - w * WARP;
        Warp &warp = e->warps[w];
        warp.present = left >= WARP ? ~0u : (1u << left) - 1;
        warp.exited = ~warp.present;
        warp.ready = 0;
        for (MeetingSlot &slot : warp.slots)
            slot.used = false;
    }
    for (unsigned i = 0; i < e->n_threads; i++) {
        Fiber &f = e->fibers[i];
        f.view = {{i % b.x, i / b.x % b.y, i / (b.x * b.y)}, index, b, k.shape.grid, shared};
        f.linear = i;
        f.lane = i % WARP;
        f.warp = i / WARP;
        f.state = FIBER_NEW;
        fiber_ready(&f);
    }
    check::block_begin(*e, k.shape.function, shared, k.shape.shared_bytes);
}

/* Blocks in order, or from a random one on and backwards or forwards: an order that some GPU could take. */
void run_kernel(const Kernel &k)
{
#ifdef SIMT_SERIAL
    static std::mutex one_block;
    std::lock_guard<std::mutex> lock(one_block);
#endif
    const dim3 g = k.shape.grid;
    const uint64_t n = (uint64_t)g.x * g.y * g.z;
    Random random = {options().seed + k.serial};
    const uint64_t first = options().seed ? random.next() % n : 0;
    const bool backwards = options().seed && random.next() % 2;
    if (!executor)
        executor = new Executor();
    const char *readers = options().threads ? nullptr : options().registered_readers;
    const bool closed = readers && !strstr(k.shape.name, readers);
    if (closed)
        registered_close();
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t at = (first + (backwards ? n - i : i)) % n;
        block_init(executor, k, {(unsigned)(at % g.x), (unsigned)(at / g.x % g.y), (unsigned)(at / g.x / g.y)});
        fibers_run();
    }
    if (closed)
        registered_open();
    threads_run += n * k.shape.block.x * k.shape.block.y * k.shape.block.z;
}

/* ---- barriers ---- */
static void barrier_open(Barrier &b)
{
    b.result = b.kind == BARRIER_OR ? b.sum != 0 : b.sum;
    b.n_arrived = 0;
    std::vector<Fiber *> waiting;
    waiting.swap(b.waiting);
    check::barrier_opened(waiting, b.n_needed == 0 || waiting.size() == executor->n_threads); /* __syncthreads is after those that have exited, too */
    for (Fiber *f : waiting)
        fiber_ready(f);
}

static bool barrier_is_full(const Barrier &b)
{
    return b.n_arrived > 0 && b.n_arrived >= (b.n_needed ? b.n_needed : executor->n_live);
}

void barriers_after_exit()
{
    for (Barrier &b : executor->barriers)
        if (barrier_is_full(b))
            barrier_open(b);
}

int barrier(int id, unsigned n_threads, BarrierKind kind, int predicate)
{
    Executor *e = executor;
    Barrier &b = e->barriers[id];
    if (b.n_arrived == 0) {
        b.n_needed = n_threads;
        b.kind = kind;
        b.sum = 0;
    } else if (b.n_needed != n_threads || b.kind != kind) {
        report("threads meet at one barrier with different counts or kinds", std::string(e->kernel->shape.name) + ", " + fiber_name(e->current));
    }
    b.n_arrived++;
    b.sum += predicate;
    b.waiting.push_back(e->current);
    if (barrier_is_full(b)) {
        barrier_open(b); /* this thread too: somebody else may go first */
        fiber_yield();
    } else {
        fiber_block(id == 0 ? "__syncthreads" : "a named barrier");
    }
    return b.result;
}

} /* namespace simt */

void simt_configure(uint64_t seed, bool threads)
{
    simt::options().seed = seed;
    simt::options().threads = threads && !simt::check::ENABLED; /* the checker has one operation at a time */
    if (simt::options().threads)
        simt::memory_unlock();
}

void simt_registered_readers(const char *name)
{
    simt::options().registered_readers = name;
}

void simt_fail_malloc(int n)
{
    simt::options().fail_malloc = n;
}

void simt_fail_launch(const char *name, int n)
{
    simt::options().fail_kernel = name;
    simt::options().fail_launch = n;
}

uint64_t simt_threads_run(void)
{
    return simt::threads_run;
}
