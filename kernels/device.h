/* A device: memory with tags, streams, events, copies. Filled in by a backend (kernels/cpu/, kernels/cuda/) as one const table.
 * On the CPU a stream is the device's thread pool, work is done when the call returns, and events are free. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct device;
struct stream;
struct device_event;

/* Every allocation says what it is for; `tidepool plan` predicts the peak by these tags. */
enum mem_tag {
    MEM_WEIGHTS,   /* packed weights */
    MEM_FAST,      /* fast tiers: kept and recent entries of running sequences */
    MEM_TABLES,    /* block tables of running sequences, and masks of their slow tokens */
    MEM_SUMMARIES, /* page summaries of running sequences, for scorers that need them */
    MEM_ACTIVE_KV, /* full K and V of the layer that is being prefilled */
    MEM_BRIDGE,    /* hidden states of the prompt between two layers */
    MEM_WORKSPACE, /* activations of a chunk or a decode step, scratch of ops */
    MEM_STAGING,   /* blocks on their way to or from the pool, and blocks that the pool did not take */
    MEM_INDEX,     /* device copies of key indexes (GPU) */
    MEM_PAGE_CACHE, /* fetched sub-pages (GPU) */
    MEM_LIBRARIES,  /* what cuBLAS, cuDNN and NCCL have taken for themselves, as far as the driver's free memory tells (GPU); nothing is allocated under it */
    MEM_TAG_COUNT,
};
const char *mem_tag_name(enum mem_tag tag);

struct device_memory_stats {
    size_t now[MEM_TAG_COUNT];  /* bytes held */
    size_t peak[MEM_TAG_COUNT]; /* most ever held under this tag */
    size_t total_now, total_peak;
    uint64_t n_allocations;     /* held now */
};

/* Instruction sets of the CPU backend; AUTO takes the best that the processor has. */
enum cpu_isa { CPU_ISA_AUTO, CPU_ISA_PLAIN, CPU_ISA_AVX2, CPU_ISA_AVX512 };

struct device_config {
    int n_threads;       /* CPU: compute threads, the caller's included; 1..256 */
    enum cpu_isa isa;    /* CPU: which versions of the ops; all give the same bits */
    int ordinal;         /* CUDA device */
    size_t memory_limit; /* bytes the arena may hold; 0: no limit */
};

struct device_properties {
    char name[128]; /* e.g. "cpu avx512 2 threads" */
    size_t memory_bytes;
    size_t fixed_bytes; /* held under MEM_WORKSPACE from open to close: scratch of the compute threads; on a GPU cuBLAS' workspace */
    size_t library_bytes; /* held under MEM_LIBRARIES so far */
    int n_threads;
    enum cpu_isa isa;
    bool host_memory;   /* its memory is the host's: the host reads and writes it, and ops write to the pool */
    uint8_t arithmetic; /* devices of the same number give the same bits for the same model, so that blocks of one serve the other; 0: the CPU's */
};

struct device_copy {
    void *dst;
    const void *src;
    size_t bytes;
};

/* What became of the steps of a stream. */
struct step_stats {
    uint64_t captures, replays, eager; /* graphs made (and launched), launched again, steps without one */
};

typedef bool host_progress_fn(size_t done_bytes, void *arg);

struct device_ops {
    const char *name; /* "cpu", "cuda" */
    /* How many there are on this host, their ordinals 0 to one less; any thread, before open too. 0: none, or no driver. */
    int (*count)(void);
    /* Owner thread only, blocks. -ENODEV (no such device or instruction set), -ENOMEM, -EINVAL. */
    int (*open)(const struct device_config *config, struct device **ret_device);
    void (*close)(struct device *device); /* NULL is fine; asserts that nothing is allocated */
    void (*properties)(const struct device *device, struct device_properties *ret);
    /* 64-byte aligned, contents undefined (debug builds: filled with 0xFF). -ENOMEM also beyond memory_limit. Owner thread only. */
    int (*alloc)(struct device *device, enum mem_tag tag, size_t bytes, void **ret_memory);
    void (*free)(struct device *device, void *memory); /* NULL is fine */
    void (*memory_stats)(const struct device *device, struct device_memory_stats *ret);
    void (*reset_peaks)(struct device *device); /* peak = now */
    /* Bytes of the device's memory that anybody could still allocate, after what this process and others hold. SIZE_MAX where it is the host's, of which nobody can say. Owner thread only. */
    size_t (*free_memory)(const struct device *device);
    /* Makes host memory (the pool) readable by kernels, and copies to and from it asynchronous; a no-op on the CPU. Writable where the mapping is. In pieces: behind each one `progress`
     * (NULL: nobody) is told how many bytes are done, and may end it: -ECANCELED, and nothing stays registered. The only call beside properties that any thread may make, whatever the
     * owner does meanwhile; the owner uses the memory when it has heard that the call returned 0. -ENOMEM, -EINVAL. */
    int (*host_register)(struct device *device, void *base, size_t bytes, host_progress_fn *progress, void *arg);
    void (*host_unregister)(struct device *device, void *base); /* waits for the device; a base that is not registered is fine */
    /* Host memory of the device's owner that copies reach asynchronously (pinned); on the CPU plain memory. 64-byte aligned, contents undefined; not counted by tags. -ENOMEM. */
    int (*host_alloc)(struct device *device, size_t bytes, void **ret_memory);
    void (*host_free)(struct device *device, void *memory); /* waits for the device; NULL is fine */

    int (*stream_create)(struct device *device, struct stream **ret_stream);
    /* For copies and events alone, no ops: takes no device memory, and goes first where the device has to choose. */
    int (*copy_stream_create)(struct device *device, struct stream **ret_stream);
    void (*stream_free)(struct stream *stream); /* NULL is fine */
    int (*stream_sync)(struct stream *stream); /* waits; a sticky device error is negative */
    /* From now on ops on this stream take what they need for the time of a call (kernel_ops.scratch_bytes) from this piece of device memory, which stays the caller's and must
     * outlive its use; what does not fit, and everything after (NULL, 0), comes from the arena. So that a peak is what was planned, and no step allocates. */
    void (*stream_scratch)(struct stream *stream, void *memory, size_t bytes);
    /* Steps: runs of ops that are the same from time to time but for what they read as small arguments, such as the steps of decoding. A device may keep what they submit and replay it. Opened with a
     * piece of device memory (kernel_ops.step_bytes), the caller's until steps_close, which comes before memory that the ops use is freed. Without that step_begin and
     * step_end do nothing. -EINVAL, -ENOMEM. */
    int (*steps_open)(struct stream *stream, void *memory, size_t bytes);
    void (*steps_close)(struct stream *stream); /* waits for steps under way; fine without steps_open */
    int (*step_begin)(struct stream *stream);
    /* `result`: of the ops between. 1: the caller runs the same ops once more, and ends the step again, for this time nothing was submitted. 0: the step is submitted. Negative: the ops' error, or
     * one of its own; the step is over. Ops that wait, and copies from or to pageable memory, end early with -EAGAIN the first time. */
    int (*step_end)(struct stream *stream, int result);
    void (*step_stats)(const struct stream *stream, struct step_stats *ret);
    int (*event_create)(struct device *device, struct device_event **ret_event);
    void (*event_free)(struct device_event *event);
    int (*event_record)(struct device_event *event, struct stream *stream);
    int (*stream_wait)(struct stream *stream, struct device_event *event);
    /* Of the newest recording: 1 it is done (so is an event that was never recorded), 0 not yet; negative: the device has failed. */
    int (*event_query)(struct device_event *event);
    int (*event_sync)(struct device_event *event); /* waits for it */
    /* Any direction; asynchronous on the stream for CUDA. */
    int (*copy)(struct stream *stream, void *dst, const void *src, size_t bytes);
    /* n_rows rows of `width` bytes, `pitch` bytes apart (at least `width`) on each side, as `copy`. */
    int (*copy_rows)(struct stream *stream, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t n_rows);
    /* Many copies in one call, as few calls of the driver as it allows. They are made in no order, so none touches what another writes; host memory is registered, or of host_alloc. */
    int (*copy_batch)(struct stream *stream, const struct device_copy *copies, int n);
};

const struct device_ops *cpu_device_ops(void);
