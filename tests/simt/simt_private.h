/* Inside the emulator. One OS thread runs one block at a time: an Executor, made on first use, owns its fibers. */
#pragma once
#include "tests/simt/simt.h"
#include "tests/simt/simt_check.h"
#include <cuda_runtime.h>
#include <functional>
#include <memory>
#include <string>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#define SIMT_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SIMT_ASAN 1
#endif
#endif

namespace simt {

enum { WARP = 32, MAX_THREADS = 1024, MAX_PARAMETER_BYTES = 4096, MAX_WARPS = MAX_THREADS / WARP, N_BARRIERS = 16, N_MEETINGS = 4, SHARED_STATIC_LIMIT = 48 << 10, SHARED_LIMIT = 163 << 10 /* of sm_80 */ };
#ifdef SIMT_ASAN
enum { FIBER_STACK_BYTES = 256 << 10 };
#else
enum { FIBER_STACK_BYTES = 64 << 10 };
#endif

/* SplitMix64: orders are a function of the seed alone. */
struct Random {
    uint64_t state;
    uint64_t next()
    {
        uint64_t z = state += 0x9E3779B97F4A7C15ull;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ z >> 27) * 0x94D049BB133111EBull;
        return z ^ z >> 31;
    }
};

/* ---- what one launch runs ---- */
struct Kernel {
    LaunchShape shape;
    std::shared_ptr<void> pack;
    void (*call)(void *);
    uint64_t serial; /* of the launch: part of the random orders */
};
void run_kernel(const Kernel &kernel);

/* ---- fibers ---- */
enum FiberState { FIBER_NEW, FIBER_READY, FIBER_RUNNING, FIBER_BLOCKED, FIBER_DONE };

struct AsyncCopy {
    void *dst;
    const void *src;
    unsigned n_bytes, n_valid;
    const void *called_from;
};

struct Fiber {
    ThreadView view; /* what `self` points to */
    unsigned linear, lane, warp;
    FiberState state;
    void *stack_pointer, *stack;
    const char *waits_at; /* "barrier 0", "warp collective" */
    const void *called_from; /* the collective that it is in */
    std::vector<AsyncCopy> open;
    std::vector<std::vector<AsyncCopy>> groups;
};

struct MeetingSlot {
    bool used;
    MeetingFn fn;
    uint32_t arrived;
    Meeting meeting;
};

struct Warp {
    uint32_t present, ready, exited; /* by lane; ready: new or waiting for their turn */
    MeetingSlot slots[N_MEETINGS];
};

struct Barrier {
    unsigned n_arrived, n_needed; /* needed 0: all that live */
    BarrierKind kind;
    int sum;
    std::vector<Fiber *> waiting;
    int result;
};

struct Executor {
    Fiber fibers[MAX_THREADS];
    Warp warps[MAX_WARPS];
    Barrier barriers[N_BARRIERS];
    unsigned n_threads, n_live;
    uint32_t ready_warps;
    Random random;
    const Kernel *kernel;
    Fiber *current;
    void *main_stack_pointer;
    std::vector<void *> free_stacks;
};
extern thread_local Executor *executor;
void executor_free(); /* at the end of an OS thread */

void fiber_switch_in(Fiber *fiber, void **save);   /* from the executor's own stack or another fiber's */
void fibers_run();                                  /* all threads of the block, to their end */
void fiber_ready(Fiber *fiber);
void fiber_block(const char *what);                /* the current one; returns when it has been made ready and chosen */
void fiber_yield();
void barriers_after_exit();
void meetings_after_exit(Fiber *fiber);
void copies_at_exit(Fiber *fiber);
std::string fiber_name(const Fiber *fiber);

/* ---- reports ---- */
/* A bug of the code under test: a line on stderr, then abort. */
[[noreturn]] void report(const char *what, const std::string &detail);

/* ---- memory ---- */
enum MemoryKind : int { MEMORY_UNKNOWN, MEMORY_DEVICE, MEMORY_PINNED, MEMORY_REGISTERED };
MemoryKind memory_find(const void *address, size_t *ret_bytes_left);
bool memory_is_device_address(const void *address); /* in the region that device memory comes from, allocated or not */
bool memory_is_read_only(const void *address);
void memory_unlock(); /* device memory may be touched: an operation runs */
void registered_close(); /* registered memory may not be touched, */
void registered_open();  /* and may again */
void memory_lock();   /* and may not: the host goes on (lazy mode only) */

/* What a library takes of the device's memory for itself, and gives back: no address, but the driver has so much less. */
void library_memory(ptrdiff_t bytes);
enum : size_t { DEVICE_BYTES = (size_t)512 << 20 }; /* a worker may take nine tenths of it for its page cache, and all of that is written once */

/* ---- streams ---- */
cudaError_t enqueue(cudaStream_t stream, const char *name, std::function<void()> run);
void copy_now(void *dst, const void *src, size_t bytes); /* as an operation, or a part of one */
/* Reports what is not inside its allocation. */
void check_range(const char *what, const void *address, size_t bytes);
/* Error of this host thread, as cudaGetLastError gives it. */
cudaError_t set_error(cudaError_t error);
int dynamic_shared_limit(const void *function);

struct Options {
    uint64_t seed;  /* 0: threads and streams in order; else random orders, early and late asynchronous copies */
    bool threads;   /* a thread for each stream; else lazy: nothing runs before the host waits */
    int fail_malloc; /* the n-th cudaMalloc from now on fails; 0: none */
    std::string fail_kernel; /* the launch of such a kernel that breaks the device, */
    int fail_launch = 0;     /* the n-th from now on; 0: none */
    const char *registered_readers = nullptr; /* kernels that may touch registered memory; nullptr: all */
    size_t others_bytes = 0; /* of the device's memory that another process holds */
    bool refuse_batches = false; /* cudaMemcpyBatchAsync is not supported */
};
Options &options();
/* What every call returns: an error that stays, once the device is broken. */
cudaError_t device_error();
/* A thread that calls the runtime has the first device until it sets another. In a program that sets devices at all, one that has not is reported: it would use the wrong one where there are
 * several. */
void device_set();
void need_device(const char *call);

} /* namespace simt */
