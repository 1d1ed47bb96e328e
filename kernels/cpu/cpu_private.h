/* What the files of kernels/cpu/ share: the device behind the opaque handles, and what an op needs of it. */
#pragma once
#include "kernels/cpu/cpu_arena.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/kernels.h"

/* Scratch of each compute thread: 64-byte aligned, contents undefined, for the time of one task. Held under MEM_WORKSPACE from open to close, and
 * part of what device_properties reports as fixed_bytes. An op whose scratch grows with its arguments takes it with cpu_op_alloc inside the op. */
enum { CPU_SCRATCH_BYTES = 512 << 10 };

/* The CPU's streams are the calling thread and its pool; a handle leads back to the device, and has the piece that its owner has set aside for ops. */
struct stream {
    struct device *device;
    uint8_t *scratch; /* [scratch_bytes] or NULL; the first scratch_used are handed out */
    size_t scratch_bytes, scratch_used;
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

/* Memory for the time of an op's call, 64-byte aligned: of the stream's scratch, or where that has no room (or there is none) of the arena. Given back in reverse
 * order. Part of kernel_ops.scratch_bytes, each piece rounded up with cpu_op_round. -ENOMEM. */
int cpu_op_alloc(struct stream *s, size_t bytes, void **ret_memory);
void cpu_op_free(struct stream *s, void *memory); /* NULL is fine */
static inline size_t cpu_op_round(size_t bytes)
{
    return (bytes + 63) & ~(size_t)63;
}

/* fn(arg, task, thread) for every task in [0, n_tasks). */
static inline void cpu_run(struct stream *s, int64_t n_tasks, pool_task *fn, void *arg)
{
    pool_run(s->device->pool, n_tasks, fn, arg);
}
