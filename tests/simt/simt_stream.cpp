/* Streams are queues of operations, in order; an event is done when the operations recorded before it are.
 *
 * Threads: each stream has a thread that runs its operations as soon as they may, with random pauses between. Lazy: nothing runs until the host waits; then the stream with the
 * highest priority goes first. Priorities are drawn at each wait, so that one stream runs as far as it can before the next (what was submitted first often runs last), and with odd
 * seeds after each operation too, so that streams that share something interleave. */
#include "tests/simt/simt_stream_private.h"
#include <algorithm>
#include <atomic>
#include <unistd.h>

enum { QUERY_OPERATIONS = 32 };

namespace simt {

Streams &streams()
{
    static Streams &s = *new Streams();
    return s;
}

static thread_local cudaError_t last_error;

cudaError_t set_error(cudaError_t error)
{
    if (error != cudaSuccess)
        last_error = error;
    return error;
}

static std::atomic<bool> broken;

cudaError_t device_error()
{
    return broken ? set_error(cudaErrorLaunchFailure) : cudaSuccess;
}

static std::atomic<bool> devices_are_set;
static thread_local bool device_is_set;

void device_set()
{
    devices_are_set = device_is_set = true;
}

void need_device(const char *call)
{
    if (devices_are_set && !device_is_set)
        report("a thread that has set no device calls the runtime", call);
}

static bool runnable(const simt_stream *s)
{
    return !s->queue.empty() && (!s->queue.front().wait || s->queue.front().wait->done);
}

/* The lock is held; the operation runs without it. */
static void run_first(simt_stream *s, std::unique_lock<std::mutex> &lock)
{
    simt_operation operation = std::move(s->queue.front());
    s->queue.pop_front();
    lock.unlock();
    if (operation.run) {
        check::operation_begin(operation.id);
        operation.run();
        check::operation_end();
    }
    lock.lock();
    if (operation.record)
        operation.record->done = true;
    s->n_done++;
    streams().changed.notify_all();
}

static void stream_main(simt_stream *s, uint64_t seed)
{
    Random random = {seed};
    std::unique_lock<std::mutex> lock(streams().lock);
    for (;;) {
        streams().changed.wait(lock, [&] { return s->quit || runnable(s); });
        if (s->quit && s->queue.empty())
            break;
        if (!runnable(s))
            continue;
        if (options().seed && random.next() % 2) {
            lock.unlock();
            usleep((useconds_t)(random.next() % 200)); /* lets other streams go first; nothing waits for this */
            lock.lock();
        }
        run_first(s, lock);
    }
    lock.unlock();
    executor_free();
}

static void draw_priorities(Streams &all)
{
    for (simt_stream *s : all.all)
        s->priority = options().seed ? Random{all.random.next() ^ options().seed}.next() : 0;
}

/* One operation of the stream that goes first among those that can run. */
static bool run_any(std::unique_lock<std::mutex> &lock)
{
    simt_stream *best = nullptr;
    for (simt_stream *s : streams().all)
        if (runnable(s) && (!best || s->priority > best->priority))
            best = s;
    if (best)
        run_first(best, lock);
    return best;
}

template <class Done> static void wait_until(Done done, std::unique_lock<std::mutex> &lock)
{
    Streams &all = streams();
    if (options().threads) {
        all.changed.wait(lock, done);
        return;
    }
    if (done())
        return;
    memory_unlock();
    draw_priorities(all);
    while (!done()) {
        if (!run_any(lock))
            report("deadlock", "the host waits and no stream can run");
        if (options().seed % 2)
            draw_priorities(all);
    }
    memory_lock();
}

/* A host that asks again and again hears in the end that it is done: lazily, each question runs some operations. `clock`: what the host is ordered after then. */
template <class Done> static cudaError_t query(Done done, const check::Clock &clock)
{
    Streams &all = streams();
    std::unique_lock<std::mutex> lock(all.lock);
    if (!done() && !options().threads) {
        memory_unlock();
        draw_priorities(all);
        for (int i = 0; i < QUERY_OPERATIONS && !done() && run_any(lock); i++)
            if (options().seed % 2)
                draw_priorities(all);
        memory_lock();
    }
    if (!done())
        return cudaErrorNotReady;
    check::host_waited(clock);
    return cudaSuccess;
}

void submit_locked(simt_stream *stream, simt_operation operation)
{
    if (operation.wait)
        check::stream_waits(stream->order, operation.wait->clock);
    if (operation.run)
        operation.id = check::submitted(stream->order, operation.name);
    if (operation.record)
        operation.record->clock = stream->order.clock;
    stream->queue.push_back(std::move(operation));
    stream->n_submitted++;
    streams().changed.notify_all();
}

/* What was submitted before the device broke still runs. */
static cudaError_t submit(cudaStream_t stream, simt_operation operation)
{
    need_device(operation.name);
    std::lock_guard<std::mutex> guard(streams().lock);
    if (broken)
        return device_error();
    if (!stream)
        report("the default stream is used", operation.name);
    if (is_captured(stream, operation))
        return capture_operation(stream, std::move(operation));
    submit_locked(stream, std::move(operation));
    return cudaSuccess;
}

cudaError_t enqueue(cudaStream_t stream, const char *name, std::function<void()> run)
{
    return submit(stream, {name, std::move(run), nullptr, nullptr, {}});
}

static cudaError_t wait_stream(cudaStream_t stream)
{
    std::unique_lock<std::mutex> lock(streams().lock);
    const cudaError_t forbidden = capture_forbids(stream);
    if (forbidden != cudaSuccess)
        return forbidden;
    const uint64_t target = stream->n_submitted;
    const check::Clock clock = stream->order.clock;
    wait_until([&] { return stream->n_done >= target; }, lock);
    check::host_waited(clock);
    return device_error();
}

bool launch_breaks(const char *name)
{
    if (options().fail_launch > 0 && strstr(name, options().fail_kernel.c_str()) && --options().fail_launch == 0)
        broken = true;
    return broken;
}

int dynamic_shared_limit(const void *function)
{
    std::lock_guard<std::mutex> guard(streams().lock);
    auto it = streams().shared_limits.find(function);
    return it == streams().shared_limits.end() ? (int)SHARED_STATIC_LIMIT : it->second;
}

cudaError_t enqueue_kernel(const LaunchShape &shape, std::shared_ptr<void> pack, void (*call)(void *))
{
    const dim3 g = shape.grid, b = shape.block;
    const uint64_t n_threads = (uint64_t)b.x * b.y * b.z;
    if (last_error != cudaSuccess && !broken)
        report("a launch would be blamed for an earlier error that nobody took", std::string(shape.name) + ", " + cudaGetErrorName(last_error));
    if (shape.pack_bytes > MAX_PARAMETER_BYTES)
        report("a kernel with more than 4 KiB of parameters", shape.name);
    if (n_threads == 0 || n_threads > MAX_THREADS || b.z > 64 || g.x == 0 || g.y == 0 || g.z == 0 || g.x > INT32_MAX || g.y > 65535 || g.z > 65535)
        return set_error(cudaErrorInvalidConfiguration);
    if (shape.shared_bytes > (size_t)dynamic_shared_limit(shape.function))
        return set_error(cudaErrorInvalidValue);
    uint64_t serial;
    {
        std::lock_guard<std::mutex> guard(streams().lock);
        serial = ++streams().n_kernels;
        if (!shape.stream || !shape.stream->capture)
            launch_breaks(shape.name);
    }
    return enqueue(shape.stream, shape.name, [=] { run_kernel(Kernel{shape, pack, call, serial}); });
}

void copy_now(void *dst, const void *src, size_t bytes)
{
    check::range_copied(dst, src, bytes);
    memcpy(dst, src, bytes);
}

/* A copy or memset must stay inside its allocation. */
void check_range(const char *what, const void *address, size_t bytes)
{
    size_t left = 0;
    const MemoryKind kind = memory_find(address, &left);
    if (kind == MEMORY_UNKNOWN && memory_is_device_address(address))
        report(what, "device memory that is freed or was never allocated");
    if (kind != MEMORY_UNKNOWN && bytes > left)
        report(what, std::to_string(bytes) + " bytes where the allocation has " + std::to_string(left) + " left");
}

} /* namespace simt */

using namespace simt;

cudaError_t cudaGetLastError(void)
{
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *ret_stream, unsigned)
{
    Streams &all = streams();
    simt_stream *s = new simt_stream();
    need_device("cudaStreamCreate");
    std::lock_guard<std::mutex> guard(all.lock);
    all.all.push_back(s);
    if (options().threads)
        s->thread = std::thread(stream_main, s, options().seed * 31 + all.all.size());
    *ret_stream = s;
    return cudaSuccess;
}

/* Priorities say what is likely; what happens is drawn all the same. */
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *ret_stream, unsigned flags, int)
{
    return cudaStreamCreateWithFlags(ret_stream, flags);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

/* What was submitted still runs, as on the device. */
cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    Streams &all = streams();
    if (wait_stream(stream) == cudaErrorStreamCaptureUnsupported)
        report("a stream is destroyed while it captures", "");
    {
        std::lock_guard<std::mutex> guard(all.lock);
        stream->quit = true;
        all.all.erase(std::find(all.all.begin(), all.all.end(), stream));
        all.changed.notify_all();
    }
    if (stream->thread.joinable())
        stream->thread.join();
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    return wait_stream(stream);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    {
        std::lock_guard<std::mutex> guard(streams().lock);
        const cudaError_t forbidden = capture_forbids(stream);
        if (forbidden != cudaSuccess)
            return forbidden;
    }
    return query([&] { return stream->n_done >= stream->n_submitted; }, stream->order.clock);
}

cudaError_t cudaDeviceSynchronize(void)
{
    Streams &all = streams();
    std::unique_lock<std::mutex> lock(all.lock);
    const cudaError_t forbidden = capture_forbids_any();
    if (forbidden != cudaSuccess)
        return forbidden;
    wait_until([&] {
        for (const simt_stream *s : all.all)
            if (s->n_done < s->n_submitted)
                return false;
        return true;
    }, lock);
    for (const simt_stream *s : all.all)
        check::host_waited(s->order.clock);
    return device_error();
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *ret_event, unsigned)
{
    *ret_event = new simt_event();
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    if (broken)
        return device_error();
    event->mark = std::make_shared<simt_mark>();
    return submit(stream, {"event record", nullptr, nullptr, event->mark, {}});
}

/* An event that was never recorded counts as done. */
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    if (!event->mark && !broken)
        return cudaSuccess;
    return submit(stream, {"event wait", nullptr, event->mark, nullptr, {}});
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    const std::shared_ptr<simt_mark> mark = event->mark;
    if (broken)
        return device_error();
    if (mark && mark->capture)
        return set_error(cudaErrorCapturedEvent);
    return mark ? query([&] { return mark->done; }, mark->clock) : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    std::unique_lock<std::mutex> lock(streams().lock);
    const std::shared_ptr<simt_mark> mark = event->mark;
    if (!mark)
        return device_error();
    if (mark->capture)
        return set_error(cudaErrorCapturedEvent);
    wait_until([&] { return mark->done; }, lock);
    check::host_waited(mark->clock);
    return device_error();
}

/* Pageable memory is staged by the driver: a source has been read when the call returns, and a destination has been written. Pinned memory is read and written when the stream comes to it. */
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind, cudaStream_t stream)
{
    size_t left;
    if (bytes == 0)
        return cudaSuccess;
    check_range("a copy writes beyond its destination", dst, bytes);
    check_range("a copy reads beyond its source", src, bytes);
    if (memory_is_read_only(dst))
        report("a copy writes to memory that was registered read-only", "");
    const bool src_pageable = memory_find(src, &left) == MEMORY_UNKNOWN, dst_pageable = memory_find(dst, &left) == MEMORY_UNKNOWN;
    if ((src_pageable || dst_pageable) && stream && stream->capture)
        report("a copy of pageable memory is captured", "");
    cudaError_t error;
    if (src_pageable) {
        auto staged = std::make_shared<std::vector<char>>((const char *)src, (const char *)src + bytes);
        error = enqueue(stream, "copy", [=] { copy_now(dst, staged->data(), bytes); });
    } else {
        error = enqueue(stream, "copy", [=] { copy_now(dst, src, bytes); });
    }
    return error == cudaSuccess && dst_pageable ? wait_stream(stream) : error;
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t n_rows, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    if (dst_pitch < width || src_pitch < width)
        return cudaErrorInvalidValue;
    cudaError_t error = cudaSuccess;
    for (size_t i = 0; error == cudaSuccess && i < n_rows; i++)
        error = cudaMemcpyAsync((char *)dst + i * dst_pitch, (const char *)src + i * src_pitch, width, kind, stream);
    return error;
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream)
{
    if (bytes == 0)
        return cudaSuccess;
    check_range("a memset writes beyond its destination", dst, bytes);
    return enqueue(stream, "memset", [=] {
        check::range_written(dst, bytes);
        memset(dst, value, bytes);
    });
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute, int value)
{
    std::lock_guard<std::mutex> guard(streams().lock);
    if (value < 0 || value > SHARED_LIMIT)
        return set_error(cudaErrorInvalidValue);
    streams().shared_limits[function] = std::max(value, (int)SHARED_STATIC_LIMIT);
    return cudaSuccess;
}
