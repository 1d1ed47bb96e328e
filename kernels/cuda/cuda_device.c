/* The GPU as a device: an arena, streams with a ring for small arguments, and a cuBLAS handle with its workspace. */
#include "kernels/cuda/cuda_private.h"
#include "kernels/cuda/cudnn_attention.h"
#include "kernels/cuda/library_memory.h"
#include "kernels/cuda/nccl_collective.h"
#include "kernels/cuda/step.h"
#include "kernels/cuda/submit.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Pages are pinned at 10 to 20 GiB a second, so that is how often progress is told and a shutdown heard. A driver is said to get slow beyond 64 GiB a call. */
static const size_t register_piece = (size_t)1 << 30;

int cuda_error(cudaError_t error)
{
    if (error != cudaSuccess)
        cudaGetLastError(); /* the thread's record of it, which LAUNCH would take for its own error; one that stays with the device is given by every call all the same */
    switch (error) {
    case cudaSuccess:
        return 0;
    case cudaErrorMemoryAllocation:
        return -ENOMEM;
    case cudaErrorInvalidValue:
    case cudaErrorInvalidConfiguration:
        return -EINVAL;
    case cudaErrorNotSupported:
        return -ENOTSUP;
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorInitializationError:
        return -ENODEV;
    default:
        return -EIO;
    }
}

int cublas_error(cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return 0;
    case CUBLAS_STATUS_ALLOC_FAILED:
        return -ENOMEM;
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return -ENOTSUP;
    case CUBLAS_STATUS_INVALID_VALUE:
        return -EINVAL;
    default:
        return -EIO;
    }
}

/* ---- waiting ---- */

/* With a communicator nobody blocks in the driver before what it may wait for has been looked at (nccl_collective.h). */
int device_wait_stream(const struct device *device, cudaStream_t stream)
{
    return device->collective ? nccl_wait_stream(device->collective, stream) : cuda_error(cudaStreamSynchronize(stream));
}

int device_wait_event(const struct device *device, cudaEvent_t event)
{
    return device->collective ? nccl_wait_event(device->collective, event) : cuda_error(cudaEventSynchronize(event));
}

static void wait_device(const struct device *device)
{
    if (device->collective)
        nccl_wait_all(device->collective);
    cuda_error(cudaDeviceSynchronize());
}

/* ---- device ---- */

static void device_close(struct device *device)
{
    if (!device)
        return;
    ASSERT(!device->collective);
    cudnn_attention_close(device->cudnn);
    if (device->blas)
        cublasDestroy(device->blas);
    if (device->blas_event)
        cudaEventDestroy(device->blas_event);
    cuda_arena_free(&device->arena, device->blas_workspace);
    for (int i = 0; i < CUDA_MAX_REGISTERED; i++)
        ASSERT(!device->registered[i].base);
    cuda_arena_fini(&device->arena);
    pthread_mutex_destroy(&device->registered_lock);
    free(device);
}

static int device_count(void)
{
    int n = 0;
    return cuda_error(cudaGetDeviceCount(&n)) == 0 ? n : 0;
}

static int open_libraries(struct device *device)
{
    struct library_mark mark;
    library_memory_begin(device, &mark);
    int r = cublas_error(cublasCreate(&device->blas));
    if (r == 0)
        device->cudnn = cudnn_attention_open(device, &device->cudnn_version);
    library_memory_end(device, &mark);
    return r == 0 && !device->cudnn && cudnn_attention_required() ? -ENOTSUP : r;
}

static int device_init(struct device *device)
{
    if (device->ordinal >= device_count())
        return -ENODEV;
    int r = cuda_error(cudaSetDevice(device->ordinal));
    if (r == 0)
        r = cuda_error(cudaGetDeviceProperties(&device->properties, device->ordinal));
    if (r == 0 && device->properties.major < 8)
        r = -ENODEV; /* bf16 tensor cores and cp.async came with sm_80 */
    if (r == 0)
        r = cuda_arena_alloc(&device->arena, MEM_WORKSPACE, CUDA_BLAS_WORKSPACE_BYTES, &device->blas_workspace);
    if (r == 0)
        r = cuda_error(cudaEventCreateWithFlags(&device->blas_event, cudaEventDisableTiming));
    return r < 0 ? r : open_libraries(device);
}

static int device_open(const struct device_config *config, struct device **ret_device)
{
    if (config->ordinal < 0)
        return -EINVAL;
    struct device *device = calloc(1, sizeof *device);
    if (!device)
        return -ENOMEM;
    device->ordinal = config->ordinal;
    pthread_mutex_init(&device->registered_lock, NULL);
    cuda_arena_init(&device->arena, config->memory_limit);
    int r = device_init(device);
    if (r < 0) {
        device_close(device);
        return r;
    }
    *ret_device = device;
    return 0;
}

static void device_properties(const struct device *device, struct device_properties *ret)
{
    const struct cudaDeviceProp *p = &device->properties;
    *ret = (struct device_properties){
        .memory_bytes = device->arena.limit ? device->arena.limit : p->totalGlobalMem,
        .fixed_bytes = CUDA_BLAS_WORKSPACE_BYTES,
        .library_bytes = device->library_bytes,
        .n_threads = 1,
        .isa = CPU_ISA_AUTO,
        .host_memory = false,
        /* cuBLAS chooses its kernels by the architecture. */
        .arithmetic = (uint8_t)(p->major * 10 + p->minor),
    };
    const int n = snprintf(ret->name, sizeof ret->name, "cuda %.80s sm_%d%d", p->name, p->major, p->minor);
    if (device->cudnn)
        snprintf(ret->name + n, sizeof ret->name - (size_t)n, " cudnn %zu", device->cudnn_version);
}

static int device_alloc(struct device *device, enum mem_tag tag, size_t bytes, void **ret_memory)
{
    return cuda_arena_alloc(&device->arena, tag, bytes, ret_memory);
}

/* Work on the memory may have been submitted and not be done: the owner need not wait first. cudaFree waits for the whole device too, but does not promise it. */
static void device_free(struct device *device, void *memory)
{
    if (memory)
        wait_device(device);
    cuda_arena_free(&device->arena, memory);
}

static void device_memory_stats(const struct device *device, struct device_memory_stats *ret)
{
    *ret = device->arena.stats;
    ret->now[MEM_LIBRARIES] += device->library_bytes;
    ret->peak[MEM_LIBRARIES] += device->library_bytes;
    ret->total_now += device->library_bytes;
    ret->total_peak += device->library_bytes;
}

static size_t device_free_memory(const struct device *device)
{
    (void)device;
    return cuda_free_memory();
}

static void device_reset_peaks(struct device *device)
{
    cuda_arena_reset_peaks(&device->arena);
}

/* ---- registered and pinned memory ---- */

static void unregister_pieces(uint8_t *base, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += register_piece)
        cuda_error(cudaHostUnregister(base + at));
}

static int register_pieces(uint8_t *base, size_t bytes, unsigned flags, host_progress_fn *progress, void *arg)
{
    for (size_t at = 0, piece; at < bytes; at += piece) {
        piece = bytes - at < register_piece ? bytes - at : register_piece;
        int r = cuda_error(cudaHostRegister(base + at, piece, flags));
        if (r == 0 && progress && !progress(at + piece, arg)) {
            r = -ECANCELED;
            cuda_error(cudaHostUnregister(base + at));
        }
        if (r < 0) {
            unregister_pieces(base, at);
            return r;
        }
    }
    return 0;
}

/* The owner's copies look the registered ranges up. */
static int registered_add(struct device *device, void *base, size_t bytes)
{
    int slot = 0, r = 0;
    pthread_mutex_lock(&device->registered_lock);
    while (slot < CUDA_MAX_REGISTERED && device->registered[slot].base)
        slot++;
    if (slot < CUDA_MAX_REGISTERED) {
        device->registered[slot].base = base;
        device->registered[slot].bytes = bytes;
    } else {
        r = -ENOMEM;
    }
    pthread_mutex_unlock(&device->registered_lock);
    return r;
}

/* 0: there is none at that base. */
static size_t registered_take(struct device *device, const void *base)
{
    size_t bytes = 0;
    pthread_mutex_lock(&device->registered_lock);
    for (int i = 0; i < CUDA_MAX_REGISTERED; i++)
        if (device->registered[i].base == base) {
            bytes = device->registered[i].bytes;
            device->registered[i].base = NULL;
        }
    pthread_mutex_unlock(&device->registered_lock);
    return bytes;
}

/* Whether the process may write at this address; true where that cannot be found out. */
static bool is_writable(const void *address)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    unsigned long long first, end;
    char line[512], rights[5];
    bool found = false;
    while (maps && !found && fgets(line, sizeof line, maps))
        found = sscanf(line, "%llx-%llx %4s", &first, &end, rights) == 3 && (uintptr_t)address >= first && (uintptr_t)address < end;
    if (maps)
        fclose(maps);
    return !found || rights[1] == 'w';
}

/* Blocks leave by DMA, so a mapping that may be written is registered for writing. One that may only be read has to be registered as such, and which error says so otherwise differs between
 * drivers, so the mapping is asked. Kernels follow the host's addresses. */
static int device_host_register(struct device *device, void *base, size_t bytes, host_progress_fn *progress, void *arg)
{
    if (!base || bytes == 0)
        return -EINVAL;
    const bool writable = is_writable(base);
    if (!device->properties.canUseHostPointerForRegisteredMem || (!writable && !device->properties.hostRegisterReadOnlySupported))
        return -ENOTSUP;
    int r = cuda_error(cudaSetDevice(device->ordinal)); /* of this thread */
    if (r == 0)
        r = register_pieces(base, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped | (writable ? 0 : cudaHostRegisterReadOnly), progress, arg);
    if (r < 0)
        return r;
    r = registered_add(device, base, bytes);
    if (r < 0)
        unregister_pieces(base, bytes);
    return r;
}

static void device_host_unregister(struct device *device, void *base)
{
    const size_t bytes = base ? registered_take(device, base) : 0;
    if (!bytes)
        return;
    wait_device(device); /* work that reads or writes it may have been submitted and not be done */
    unregister_pieces(base, bytes);
}

static int device_host_alloc(struct device *device, size_t bytes, void **ret_memory)
{
    void *memory;
    (void)device;
    int r = cuda_error(cudaHostAlloc(&memory, bytes ? bytes : 1, cudaHostAllocDefault));
    if (r == 0)
        *ret_memory = memory;
    return r;
}

static void device_host_free(struct device *device, void *memory)
{
    if (!memory)
        return;
    wait_device(device);
    cudaFreeHost(memory);
}

/* ---- streams ---- */

static void stream_free(struct stream *s)
{
    if (!s)
        return;
    ASSERT(s->n_sides == 0);
    cuda_steps_close(s);
    if (s->cuda) {
        device_wait_stream(s->device, s->cuda);
        if (s->device->collective)
            nccl_forget_stream(s->device->collective, s);
        cudaStreamDestroy(s->cuda);
    }
    if (s->device->blas_owner == s)
        s->device->blas_owner = NULL;
    if (s->device->blas_stream == s->cuda)
        s->device->blas_stream = NULL;
    cudaFreeHost(s->args_host);
    cuda_arena_free(&s->device->arena, s->args_device);
    free(s);
}

static int stream_open(struct device *device, int priority, struct stream **ret_stream)
{
    struct stream *s = calloc(1, sizeof *s);
    if (!s)
        return -ENOMEM;
    s->device = device;
    s->main = s;
    int r = cuda_error(cudaStreamCreateWithPriority(&s->cuda, cudaStreamNonBlocking, priority));
    if (r < 0) {
        free(s);
        return r;
    }
    *ret_stream = s;
    return 0;
}

static int stream_create(struct device *device, struct stream **ret_stream)
{
    struct stream *s;
    void *memory = NULL;
    int r = stream_open(device, 0, &s);
    if (r < 0)
        return r;
    r = cuda_error(cudaHostAlloc(&memory, CUDA_ARGS_BYTES, cudaHostAllocDefault));
    if (r < 0)
        goto fail;
    s->args_host = memory;
    r = cuda_arena_alloc(&device->arena, MEM_WORKSPACE, CUDA_ARGS_BYTES, &memory);
    if (r < 0)
        goto fail;
    s->args_device = memory;
    *ret_stream = s;
    return 0;
fail:
    stream_free(s);
    return r;
}

static int copy_stream_create(struct device *device, struct stream **ret_stream)
{
    int least, greatest, r = cuda_error(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    return r < 0 ? r : stream_open(device, greatest, ret_stream);
}

int stream_side_open(struct stream *main, struct stream **ret_side)
{
    struct stream *side;
    if (main->n_sides == STREAM_SIDES_MAX)
        return -ENOTSUP;
    int r = copy_stream_create(main->device, &side);
    if (r < 0)
        return r;
    side->main = main;
    main->sides[main->n_sides++] = side;
    *ret_side = side;
    return 0;
}

void stream_side_close(struct stream *side)
{
    struct stream *main = side ? side->main : NULL;
    for (int i = 0; main && i < main->n_sides; i++)
        if (main->sides[i] == side)
            main->sides[i] = main->sides[--main->n_sides];
    stream_free(side);
}

int stream_wait_idle(struct stream *s)
{
    const int r = step_block(s);
    if (r < 0)
        return r;
    return device_wait_stream(s->device, s->cuda);
}

static int stream_sync(struct stream *s)
{
    return stream_wait_idle(s);
}

/* The same places whenever the calls are the same. */
static int step_args_room(struct stream *s, struct step *step, size_t rounded, void **ret_host, void **ret_device)
{
    if (rounded > step->args_bytes - step->args_used)
        return step_block(s);
    *ret_host = step->args_host + step->args_used;
    *ret_device = step->args_device + step->args_used;
    step->args_used += rounded;
    return 0;
}

int stream_args_room(struct stream *s, size_t bytes, void **ret_host, void **ret_device)
{
    const size_t rounded = stream_args_rounded(bytes);
    struct step *step = step_noting(s);
    ASSERT(s->args_host); /* no ops on a stream for copies */
    if (bytes > CUDA_ARGS_MAX_BYTES)
        return -ENOTSUP;
    if (step)
        return step_args_room(s, step, rounded, ret_host, ret_device);
    if (rounded > CUDA_ARGS_BYTES - s->args_used) {
        int r = stream_wait_idle(s);
        if (r < 0)
            return r;
        s->args_used = 0;
    }
    *ret_host = s->args_host + s->args_used;
    *ret_device = s->args_device + s->args_used;
    s->args_used += rounded;
    return 0;
}

int stream_args_send(struct stream *s, void *device, const void *host, size_t bytes)
{
    return step_noting(s) ? 0 : submit_copy(s, device, host, bytes); /* a step's go together (step.c) */
}

int stream_args(struct stream *s, const void *src, size_t bytes, const void **ret_device)
{
    void *host, *device;
    int r = stream_args_room(s, bytes, &host, &device);
    if (r < 0)
        return r;
    memcpy(host, src, bytes);
    r = stream_args_send(s, device, host, bytes);
    if (r == 0)
        *ret_device = device;
    return r;
}

static void stream_scratch(struct stream *s, void *memory, size_t bytes)
{
    s->scratch = memory;
    s->scratch_bytes = memory ? bytes : 0;
    s->scratch_used = 0;
}

int stream_temp(struct stream *s, size_t bytes, void **ret_memory)
{
    const size_t aligned = -(uintptr_t)s->scratch & (CUDA_TEMP_ALIGN - 1);
    ASSERT(!s->overflow && s->scratch_used == 0);
    if (s->scratch && aligned + bytes <= s->scratch_bytes) {
        s->scratch_used = aligned + bytes;
        *ret_memory = s->scratch + aligned;
        return 0;
    }
    int r = step_block(s);
    if (r == 0)
        r = cuda_arena_alloc(&s->device->arena, MEM_WORKSPACE, bytes, &s->overflow);
    if (r == 0)
        *ret_memory = s->overflow;
    return r;
}

/* Memory of the arena goes back, so its use must be over: that wait is the price of not setting scratch aside. */
int stream_temp_end(struct stream *s, int result)
{
    s->scratch_used = 0;
    if (s->overflow) {
        int r = stream_wait_idle(s);
        cuda_arena_free(&s->device->arena, s->overflow);
        s->overflow = NULL;
        if (result >= 0 && r < 0)
            return r;
    }
    return result;
}

int stream_take_blas(struct stream *s)
{
    struct device *device = s->device;
    int r = 0;
    if (device->blas_owner && device->blas_owner != s) {
        r = step_block(s); /* whose it is then changes between two steps of the same record */
        if (r == 0)
            r = submit_record(device->blas_owner, device->blas_event);
        if (r == 0)
            r = submit_wait(s, device->blas_event);
    }
    if (r < 0)
        return r;
    device->blas_owner = s;
    return 0;
}

/* ---- events and copies ---- */

static int event_create(struct device *device, struct device_event **ret_event)
{
    struct device_event *event = malloc(sizeof *event);
    if (!event)
        return -ENOMEM;
    event->device = device;
    int r = cuda_error(cudaEventCreateWithFlags(&event->cuda, cudaEventDisableTiming));
    if (r < 0) {
        free(event);
        return r;
    }
    *ret_event = event;
    return 0;
}

static void event_free(struct device_event *event)
{
    if (event)
        cudaEventDestroy(event->cuda);
    free(event);
}

static int event_record(struct device_event *event, struct stream *stream)
{
    ASSERT(event->device == stream->device);
    const int r = submit_directly(stream); /* who waits for it waits outside the step */
    return r < 0 ? r : submit_record(stream, event->cuda);
}

static int stream_wait(struct stream *stream, struct device_event *event)
{
    ASSERT(event->device == stream->device);
    const int r = submit_directly(stream);
    return r < 0 ? r : submit_wait(stream, event->cuda);
}

static int event_query(struct device_event *event)
{
    struct collective *collective = event->device->collective;
    const cudaError_t error = cudaEventQuery(event->cuda);
    if (error == cudaErrorNotReady) {
        cudaGetLastError();
        return collective ? nccl_collective_ops()->status(collective) : 0; /* whoever asks again and again must hear of a broken group */
    }
    return error == cudaSuccess ? 1 : cuda_error(error);
}

static int event_sync(struct device_event *event)
{
    return device_wait_event(event->device, event->cuda);
}

size_t device_registered_left(struct device *device, const void *address)
{
    size_t left = SIZE_MAX;
    pthread_mutex_lock(&device->registered_lock);
    for (int i = 0; i < CUDA_MAX_REGISTERED; i++) {
        const size_t at = (size_t)((uintptr_t)address - (uintptr_t)device->registered[i].base);
        if (device->registered[i].base && at < device->registered[i].bytes)
            left = register_piece - at % register_piece;
    }
    pthread_mutex_unlock(&device->registered_lock);
    return left;
}

/* A copy must not cross from one registered piece into the next. To pageable memory the driver blocks until the stream has come to it. */
static int stream_copy(struct stream *stream, void *dst, const void *src, size_t bytes)
{
    int r = stream->device->collective && submit_is_pageable(dst) ? stream_wait_idle(stream) : 0;
    for (size_t at = 0, n; r == 0 && at < bytes; at += n) {
        const size_t to = device_registered_left(stream->device, (uint8_t *)dst + at), from = device_registered_left(stream->device, (const uint8_t *)src + at), most = to < from ? to : from;
        n = bytes - at < most ? bytes - at : most;
        r = submit_copy(stream, (uint8_t *)dst + at, (const uint8_t *)src + at, n);
    }
    return r;
}

static int stream_copy_rows(struct stream *stream, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t n_rows)
{
    int r = 0;
    if (width == 0 || n_rows == 0)
        return 0;
    const size_t dst_span = (n_rows - 1) * dst_pitch + width, src_span = (n_rows - 1) * src_pitch + width;
    if (device_registered_left(stream->device, dst) >= dst_span && device_registered_left(stream->device, src) >= src_span && !submit_is_pageable(dst))
        return submit_copy_rows(stream, dst, dst_pitch, src, src_pitch, width, n_rows);
    for (size_t i = 0; r == 0 && i < n_rows; i++)
        r = stream_copy(stream, (uint8_t *)dst + i * dst_pitch, (const uint8_t *)src + i * src_pitch, width);
    return r;
}

const struct device_ops *cuda_device_ops(void)
{
    static const struct device_ops ops = {
        .name = "cuda",
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
        .copy_stream_create = copy_stream_create,
        .stream_free = stream_free,
        .stream_scratch = stream_scratch,
        .stream_sync = stream_sync,
        .event_create = event_create,
        .event_free = event_free,
        .event_record = event_record,
        .stream_wait = stream_wait,
        .event_query = event_query,
        .event_sync = event_sync,
        .steps_open = cuda_steps_open,
        .steps_close = cuda_steps_close,
        .step_begin = cuda_step_begin,
        .step_end = cuda_step_end,
        .step_stats = cuda_step_stats,
        .copy = stream_copy,
        .copy_rows = stream_copy_rows,
        .copy_batch = stream_copy_batch,
    };
    return &ops;
}
