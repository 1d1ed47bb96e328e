/* The CPU as a device: an arena, a pool of threads, and an instruction set chosen once, at open. */
#include "kernels/cpu/cpu_isa.h"
#include "kernels/cpu/cpu_private.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *mem_tag_name(enum mem_tag tag)
{
    static const char *const names[MEM_TAG_COUNT] = {
        [MEM_WEIGHTS] = "weights", [MEM_FAST] = "fast",           [MEM_TABLES] = "tables",   [MEM_SUMMARIES] = "summaries", [MEM_ACTIVE_KV] = "active_kv",
        [MEM_BRIDGE] = "bridge",   [MEM_WORKSPACE] = "workspace", [MEM_STAGING] = "staging", [MEM_INDEX] = "index",         [MEM_PAGE_CACHE] = "page_cache",
        [MEM_LIBRARIES] = "libraries",
    };
    return (unsigned)tag < MEM_TAG_COUNT ? names[tag] : "unknown";
}

static const struct kernel_ops *isa_ops(enum cpu_isa isa)
{
    switch (isa) {
    case CPU_ISA_AVX512:
        return &cpu_ops_avx512;
    case CPU_ISA_AVX2:
        return &cpu_ops_avx2;
    default:
        return &cpu_ops_plain;
    }
}

static void device_close(struct device *device)
{
    if (!device)
        return;
    cpu_arena_free(&device->arena, device->scratch);
    thread_pool_free(device->pool);
    cpu_arena_fini(&device->arena);
    free(device);
}

static int device_open(const struct device_config *config, struct device **ret_device)
{
    if (config->n_threads < 1 || config->n_threads > POOL_MAX_THREADS || (unsigned)config->isa > CPU_ISA_AVX512)
        return -EINVAL;
    if (!cpu_isa_supported(config->isa))
        return -ENODEV;
    struct device *device = calloc(1, sizeof *device);
    if (!device)
        return -ENOMEM;
    cpu_arena_init(&device->arena, config->memory_limit);
    device->isa = config->isa == CPU_ISA_AUTO ? cpu_isa_best() : config->isa;
    device->ops = isa_ops(device->isa);
    void *scratch = NULL;
    int rc = thread_pool_create(config->n_threads, &device->pool);
    if (rc < 0)
        goto fail;
    rc = cpu_arena_alloc(&device->arena, MEM_WORKSPACE, (size_t)config->n_threads * CPU_SCRATCH_BYTES, &scratch);
    if (rc < 0)
        goto fail;
    device->scratch = scratch;
    *ret_device = device;
    return 0;
fail:
    device_close(device);
    return rc;
}

static int device_count(void)
{
    return 1;
}

static size_t device_free_memory(const struct device *device)
{
    (void)device;
    return SIZE_MAX;
}

static void device_properties(const struct device *device, struct device_properties *ret)
{
    int n_threads = thread_pool_size(device->pool);
    size_t physical = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    *ret = (struct device_properties){
        .memory_bytes = device->arena.limit ? device->arena.limit : physical,
        .fixed_bytes = (size_t)n_threads * CPU_SCRATCH_BYTES,
        .n_threads = n_threads,
        .isa = device->isa,
        .host_memory = true,
        .arithmetic = 0,
    };
    snprintf(ret->name, sizeof ret->name, "cpu %s %d thread%s", cpu_isa_name(device->isa), n_threads, n_threads == 1 ? "" : "s");
}

static int device_alloc(struct device *device, enum mem_tag tag, size_t bytes, void **ret_memory)
{
    return cpu_arena_alloc(&device->arena, tag, bytes, ret_memory);
}

static void device_free(struct device *device, void *memory)
{
    cpu_arena_free(&device->arena, memory);
}

static void device_memory_stats(const struct device *device, struct device_memory_stats *ret)
{
    *ret = device->arena.stats;
}

static void device_reset_peaks(struct device *device)
{
    cpu_arena_reset_peaks(&device->arena);
}

/* The CPU reads any memory that is mapped. */
static int device_host_register(struct device *device, void *base, size_t bytes, host_progress_fn *progress, void *arg)
{
    (void)device;
    if (!base || bytes == 0)
        return -EINVAL;
    return !progress || progress(bytes, arg) ? 0 : -ECANCELED;
}

static void device_host_unregister(struct device *device, void *base)
{
    (void)device;
    (void)base;
}

static int device_host_alloc(struct device *device, size_t bytes, void **ret_memory)
{
    (void)device;
    void *memory = NULL;
    if (posix_memalign(&memory, 64, bytes ? bytes : 1) != 0)
        return -ENOMEM;
    *ret_memory = memory;
    return 0;
}

static void device_host_free(struct device *device, void *memory)
{
    (void)device;
    free(memory);
}

static int stream_create(struct device *device, struct stream **ret_stream)
{
    struct stream *stream = calloc(1, sizeof *stream);
    if (!stream)
        return -ENOMEM;
    stream->device = device;
    *ret_stream = stream;
    return 0;
}

static void stream_free(struct stream *stream)
{
    free(stream);
}

/* Work is done when its call returns, so there is nothing to wait for. */
static int stream_sync(struct stream *stream)
{
    (void)stream;
    return 0;
}

static void stream_scratch(struct stream *stream, void *memory, size_t bytes)
{
    ASSERT(stream->scratch_used == 0);
    stream->scratch = memory;
    stream->scratch_bytes = bytes;
}

/* Ops are calls: there is nothing to keep of a step. */
static int steps_open(struct stream *stream, void *memory, size_t bytes)
{
    (void)stream, (void)memory, (void)bytes;
    return 0;
}

static void steps_close(struct stream *stream)
{
    (void)stream;
}

static int step_begin(struct stream *stream)
{
    (void)stream;
    return 0;
}

static int step_end(struct stream *stream, int result)
{
    (void)stream;
    return result < 0 ? result : 0;
}

static void step_stats(const struct stream *stream, struct step_stats *ret)
{
    (void)stream;
    *ret = (struct step_stats){0};
}

int cpu_op_alloc(struct stream *s, size_t bytes, void **ret_memory)
{
    const size_t rounded = cpu_op_round(bytes);
    if (rounded < bytes || rounded > s->scratch_bytes - s->scratch_used)
        return cpu_arena_alloc(&s->device->arena, MEM_WORKSPACE, bytes, ret_memory);
    *ret_memory = s->scratch + s->scratch_used;
    s->scratch_used += rounded;
    return 0;
}

void cpu_op_free(struct stream *s, void *memory)
{
    uint8_t *piece = memory;
    if (piece && s->scratch && piece >= s->scratch && piece < s->scratch + s->scratch_bytes)
        s->scratch_used = (size_t)(piece - s->scratch);
    else
        cpu_arena_free(&s->device->arena, memory);
}

struct device_event {
    struct device *device;
};

static int event_create(struct device *device, struct device_event **ret_event)
{
    struct device_event *event = malloc(sizeof *event);
    if (!event)
        return -ENOMEM;
    event->device = device;
    *ret_event = event;
    return 0;
}

static void event_free(struct device_event *event)
{
    free(event);
}

static int event_record(struct device_event *event, struct stream *stream)
{
    ASSERT(event->device == stream->device);
    return 0;
}

static int stream_wait(struct stream *stream, struct device_event *event)
{
    ASSERT(event->device == stream->device);
    return 0;
}

static int event_query(struct device_event *event)
{
    (void)event;
    return 1;
}

static int event_sync(struct device_event *event)
{
    (void)event;
    return 0;
}

static int stream_copy(struct stream *stream, void *dst, const void *src, size_t bytes)
{
    (void)stream;
    memcpy(dst, src, bytes);
    return 0;
}

static int stream_copy_rows(struct stream *stream, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t n_rows)
{
    (void)stream;
    for (size_t i = 0; i < n_rows; i++)
        memcpy((uint8_t *)dst + i * dst_pitch, (const uint8_t *)src + i * src_pitch, width);
    return 0;
}

static int stream_copy_batch(struct stream *stream, const struct device_copy *copies, int n)
{
    (void)stream;
    for (int i = 0; i < n; i++)
        memcpy(copies[i].dst, copies[i].src, copies[i].bytes);
    return 0;
}

const struct device_ops *cpu_device_ops(void)
{
    static const struct device_ops ops = {
        .name = "cpu",
        .count = device_count,
        .open = device_open,
        .close = device_close,
        .properties = device_properties,
        .alloc = device_alloc,
        .free = device_free,
        .memory_stats = device_memory_stats,
        .reset_peaks = device_reset_peaks,
        .free_memory = device_free_memory,
        .host_register = device_host_register,
        .host_unregister = device_host_unregister,
        .host_alloc = device_host_alloc,
        .host_free = device_host_free,
        .stream_create = stream_create,
        .copy_stream_create = stream_create,
        .stream_free = stream_free,
        .stream_sync = stream_sync,
        .stream_scratch = stream_scratch,
        .steps_open = steps_open,
        .steps_close = steps_close,
        .step_begin = step_begin,
        .step_end = step_end,
        .step_stats = step_stats,
        .event_create = event_create,
        .event_free = event_free,
        .event_record = event_record,
        .stream_wait = stream_wait,
        .event_query = event_query,
        .event_sync = event_sync,
        .copy = stream_copy,
        .copy_rows = stream_copy_rows,
        .copy_batch = stream_copy_batch,
    };
    return &ops;
}
