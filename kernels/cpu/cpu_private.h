/* What the files of kernels/cpu/ share: the device behind the opaque handles, and what an op needs of it. */
#pragma once
#include "kernels/cpu/cpu_arena.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/kernels.h"

/* Scratch of each compute thread: 64-byte aligned, contents undefined, for the time of one task. Held under MEM_WORKSPACE from open to close, and
 * part of what device_properties reports as fixed_bytes. An op whose scratch grows with its arguments takes it from the arena inside the op. */
enum { CPU_SCRATCH_BYTES = 512 << 10 };

/* The CPU has one stream, the calling thread and its pool; a handle only leads back to the device. */
struct stream {
    struct device *device;
};

struct device {
    struct cpu_arena arena;
    struct thread_pool *pool;
    const struct kernel_ops *ops; /* of the instruction set; one of the tables below */
    enum cpu_isa isa;
    uint8_t *scratch;             /* [n_threads, CPU_SCRATCH_BYTES], in the arena */
};

/* One table an instruction set (isa_ops.c, compiled three times); cpu_kernels.c passes each call on to the device's. */
extern const struct kernel_ops cpu_ops_plain, cpu_ops_avx2, cpu_ops_avx512;

static inline int cpu_threads(const struct stream *s)
{
    return thread_pool_size(s->device->pool);
}

static inline void *cpu_scratch(const struct stream *s, int thread)
{
    return s->device->scratch + (size_t)thread * CPU_SCRATCH_BYTES;
}

/* fn(arg, task, thread) for every task in [0, n_tasks). */
static inline void cpu_run(struct stream *s, int64_t n_tasks, pool_task *fn, void *arg)
{
    pool_run(s->device->pool, n_tasks, fn, arg);
}
