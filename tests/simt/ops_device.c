/* The device itself: memory by tag, limits, streams that wait for each other, registered host memory. */
#include "tests/simt/ops_test.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static void memory_is_counted_by_tag(struct ops_test *t)
{
    const struct device_ops *ops = t->gpu_backend->device;
    struct device_memory_stats before, now;
    void *pieces[200];
    ops->memory_stats(t->gpu_device, &before);
    for (int i = 0; i < 200; i++)
        ops_test_true(t, "alloc", ops->alloc(t->gpu_device, i % 2 ? MEM_FAST : MEM_INDEX, 100, &pieces[i]) == 0);
    ops->memory_stats(t->gpu_device, &now);
    ops_test_true(t, "bytes of a tag", now.now[MEM_FAST] == before.now[MEM_FAST] + 100 * 100 && now.total_now == before.total_now + 200 * 100);
    for (int i = 0; i < 200; i += 2)
        ops->free(t->gpu_device, pieces[i]);
    for (int i = 1; i < 200; i += 2)
        ops->free(t->gpu_device, pieces[i]);
    ops->memory_stats(t->gpu_device, &now);
    ops_test_true(t, "all of it is given back", now.total_now == before.total_now && now.n_allocations == before.n_allocations && now.peak[MEM_FAST] >= 10000);
    ops->reset_peaks(t->gpu_device);
    ops->memory_stats(t->gpu_device, &now);
    ops_test_true(t, "peaks are reset", now.total_peak == now.total_now);
    ops_test_true(t, "no such tag", ops->alloc(t->gpu_device, MEM_TAG_COUNT, 1, &pieces[0]) == -EINVAL);
}

static void a_limit_holds(struct ops_test *t)
{
    const struct device_ops *ops = t->gpu_backend->device;
    struct device_properties p;
    struct device *device;
    void *memory;
    ops->properties(t->gpu_device, &p);
    ops_test_true(t, "open with a limit", ops->open(&(struct device_config){.n_threads = 1, .memory_limit = p.fixed_bytes + 1000}, &device) == 0);
    ops_test_true(t, "beyond the limit", ops->alloc(device, MEM_FAST, 1001, &memory) == -ENOMEM);
    ops_test_true(t, "at the limit", ops->alloc(device, MEM_FAST, 1000, &memory) == 0);
    ops->free(device, memory);
    ops->close(device);
    ops_test_true(t, "a limit below the fixed part", ops->open(&(struct device_config){.n_threads = 1, .memory_limit = 1000}, &device) == -ENOMEM);
    ops_test_true(t, "no such device", ops->open(&(struct device_config){.n_threads = 1, .ordinal = 99}, &device) == -ENODEV);
}

/* Rows with gaps between them, from host memory to the device and back; nothing between them is touched. */
static void rows_are_copied(struct ops_test *t)
{
    enum { ROWS = 7, WIDTH = 100, HOST = 160, DEVICE = 128 };
    const struct device_ops *ops = t->gpu_backend->device;
    uint8_t from[ROWS * HOST], to[ROWS * HOST], *room = ops_test_room(t, ROWS * DEVICE);
    bool same = true;
    for (int i = 0; i < ROWS * HOST; i++) {
        from[i] = (uint8_t)(i * 7);
        to[i] = 0;
    }
    ops_test_true(t, "rows to the device", ops->copy_rows(t->gpu, room, DEVICE, from, HOST, WIDTH, ROWS) == 0);
    ops_test_true(t, "rows to the host", ops->copy_rows(t->gpu, to, HOST, room, DEVICE, WIDTH, ROWS) == 0 && ops->stream_sync(t->gpu) == 0);
    for (int i = 0; i < ROWS * HOST; i++)
        same &= to[i] == (i % HOST < WIDTH ? from[i] : 0);
    ops_test_true(t, "rows and nothing between them", same);
    uint8_t *gaps = ops_test_download(t, room, ROWS * DEVICE);
    for (int i = 0; i < (ROWS - 1) * DEVICE; i++)
        same &= i % DEVICE < WIDTH || gaps[i] == 0xFF;
    ops_test_true(t, "gaps on the device", same);
    ops_test_true(t, "no rows", ops->copy_rows(t->gpu, room, DEVICE, from, HOST, WIDTH, 0) == 0);
    free(gaps);
}

/* A writes, B copies after the event, then A may overwrite only after B's event. */
static void events_order_streams(struct ops_test *t)
{
    enum { N = 1000, ROUNDS = 5 };
    const struct device_ops *ops = t->gpu_backend->device;
    struct stream *other;
    struct device_event *written, *read;
    float *gate = ops_test_floats(t, N, 1), *up = ops_test_floats(t, N, 1), *expected = ops_test_alloc(N * sizeof(float));
    float *dgate = ops_test_upload(t, gate, N * sizeof(float)), *dup = ops_test_upload(t, up, N * sizeof(float));
    void *dout = ops_test_room_inputs(t, N), *copies = ops_test_room_inputs(t, ROUNDS * N);
    ops_test_true(t, "stream and events", ops->stream_create(t->gpu_device, &other) == 0 && ops->event_create(t->gpu_device, &written) == 0 && ops->event_create(t->gpu_device, &read) == 0);
    for (int i = 0; i < ROUNDS; i++) {
        if (i > 0)
            ops->stream_wait(t->gpu, read);
        t->gpu_ops->silu_mul(t->gpu, i % 2 ? dup : dgate, dup, 1, N, dout, N);
        ops->event_record(written, t->gpu);
        ops->stream_wait(other, written);
        ops->copy(other, matmul_input_at(t->gpu_ops, copies, i * N), dout, N * t->gpu_ops->input_bytes);
        ops->event_record(read, other);
    }
    ops_test_true(t, "sync", ops->stream_sync(other) == 0);
    for (int i = 0; i < ROUNDS; i++) {
        float *copy = ops_test_download_inputs(t, matmul_input_at(t->gpu_ops, copies, i * N), N);
        t->cpu_ops->silu_mul(t->cpu, i % 2 ? up : gate, up, 1, N, expected, N);
        ops_test_round_inputs(t, expected, N);
        ops_test_same(t, "a copy on another stream", expected, copy, N * sizeof(float));
        free(copy);
    }
    ops->event_free(written);
    ops->event_free(read);
    ops->stream_free(other);
    free(gate), free(up), free(expected);
}

/* A mapping as a store's client has it: of a sealed memfd, to be written or only read. */
static void *pool_mapping(struct ops_test *t, const void *content, size_t bytes, bool writable)
{
    const int fd = memfd_create("ops_test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ops_test_true(t, "memfd", fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 && pwrite(fd, content, bytes, 0) == (ssize_t)bytes &&
                                  fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
    void *pool = mmap(NULL, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    ops_test_true(t, "mmap", pool != MAP_FAILED);
    close(fd);
    return pool;
}

static void kernels_read_registered_memory(struct ops_test *t, bool writable)
{
    enum { ROWS = 64, D = 64, BYTES = ROWS * D * 2 * 2 };
    const struct device_ops *ops = t->gpu_backend->device;
    uint16_t *rows = ops_test_bf16(t, 2 * ROWS * D, 1), *pool = pool_mapping(t, rows, BYTES, writable);
    int32_t indices[ROWS];
    for (int i = 0; i < ROWS; i++)
        indices[i] = ROWS - 1 - i;
    int32_t *dindices = ops_test_upload(t, indices, sizeof indices);
    uint16_t *k = ops_test_room(t, BYTES / 2), *v = ops_test_room(t, BYTES / 2);
    ops_test_true(t, "register", ops->host_register(t->gpu_device, pool, BYTES, NULL, NULL) == 0);
    ops_test_true(t, "gather", t->gpu_ops->gather_rows(t->gpu, pool, pool + ROWS * D, dindices, ROWS, D, k, v) == 0);
    uint16_t *hk = ops_test_download(t, k, BYTES / 2), *hv = ops_test_download(t, v, BYTES / 2);
    for (int i = 0; i < ROWS; i++) {
        ops_test_same(t, "key row", rows + indices[i] * D, hk + i * D, D * 2);
        ops_test_same(t, "value row", rows + (ROWS + indices[i]) * D, hv + i * D, D * 2);
    }
    ops->host_unregister(t->gpu_device, pool);
    ops_test_true(t, "register again", ops->host_register(t->gpu_device, pool, BYTES, NULL, NULL) == 0);
    ops->host_unregister(t->gpu_device, pool);
    munmap(pool, BYTES);
    free(rows), free(hk), free(hv);
}

/* In pinned host memory and back, in pieces, on a stream for copies alone: what the host reads after the event's wait is what was written. */
static void copies_go_through_host_memory(struct ops_test *t)
{
    enum { N = 3000 };
    const struct device_ops *ops = t->gpu_backend->device;
    struct device_memory_stats before, now;
    struct stream *copies;
    struct device_event *never, *out;
    void *host;
    float *x = ops_test_floats(t, N, 1), *from = ops_test_upload(t, x, N * sizeof(float)), *to = ops_test_room(t, N * sizeof(float));
    ops->memory_stats(t->gpu_device, &before);
    ops_test_true(t, "stream", ops->copy_stream_create(t->gpu_device, &copies) == 0);
    ops_test_true(t, "events", ops->event_create(t->gpu_device, &never) == 0 && ops->event_create(t->gpu_device, &out) == 0);
    ops_test_true(t, "host memory", ops->host_alloc(t->gpu_device, N * sizeof(float), &host) == 0);
    ops->memory_stats(t->gpu_device, &now);
    ops_test_true(t, "it takes nothing of the device", now.total_now == before.total_now);
    ops_test_true(t, "an event that was never recorded", ops->event_query(never) == 1 && ops->event_sync(never) == 0);
    ops_test_true(t, "uploaded", ops->stream_sync(t->gpu) == 0); /* the other stream does not wait for it */
    for (int i = 0; i < 3; i++)
        ops->copy(copies, (float *)host + i * N / 3, from + i * N / 3, N / 3 * sizeof(float));
    ops->event_record(out, copies);
    ops_test_true(t, "not an error", ops->event_query(out) >= 0);
    ops_test_true(t, "event_sync", ops->event_sync(out) == 0 && ops->event_query(out) == 1);
    ops_test_same(t, "device to host", x, host, N * sizeof(float));
    ops->copy(copies, to, host, N * sizeof(float));
    ops->host_free(t->gpu_device, host); /* waits */
    float *back = ops_test_download(t, to, N * sizeof(float));
    ops_test_same(t, "host to device", x, back, N * sizeof(float));
    ops->event_free(out), ops->event_free(never);
    ops->stream_free(copies);
    free(x), free(back);
}

/* More pieces than one call of the driver takes, of all sizes and none, to the device, on it and back; nothing beside them is touched. */
static void copies_go_in_batches(struct ops_test *t)
{
    enum { N = 600, STEP = 96 };
    const struct device_ops *ops = t->gpu_backend->device;
    struct device_copy in[N], over[N], out[N];
    void *memory;
    uint8_t *room = ops_test_room(t, N * STEP), *other = ops_test_room(t, N * STEP);
    ops_test_true(t, "host memory", ops->host_alloc(t->gpu_device, 2 * N * STEP, &memory) == 0);
    uint8_t *from = memory, *to = from + N * STEP;
    for (int i = 0; i < N * STEP; i++) {
        from[i] = (uint8_t)(i * 7 + i / 256);
        to[i] = 0x55;
    }
    for (int i = 0; i < N; i++) { /* each turns the order round, so that no copy lies where it came from */
        const size_t at = (size_t)i * STEP, opposite = (size_t)(N - 1 - i) * STEP, bytes = (size_t)(i % (STEP + 1));
        in[i] = (struct device_copy){.dst = room + opposite, .src = from + at, .bytes = bytes};
        over[i] = (struct device_copy){.dst = other + at, .src = room + opposite, .bytes = bytes};
        out[i] = (struct device_copy){.dst = to + opposite, .src = other + at, .bytes = bytes};
    }
    ops_test_true(t, "batches", ops->copy_batch(t->gpu, in, N) == 0 && ops->copy_batch(t->gpu, over, N) == 0 && ops->copy_batch(t->gpu, out, N) == 0 && ops->copy_batch(t->gpu, in, 0) == 0);
    ops_test_true(t, "sync", ops->stream_sync(t->gpu) == 0);
    bool same = true;
    for (int i = 0; i < N; i++)
        for (size_t j = 0; j < STEP; j++)
            same &= to[(size_t)(N - 1 - i) * STEP + j] == (j < (size_t)(i % (STEP + 1)) ? from[(size_t)i * STEP + j] : 0x55);
    ops_test_true(t, "copies and nothing beside them", same);
    ops->host_free(t->gpu_device, memory);
}

struct progress {
    size_t last, stop_at;
    int n;
};

static bool on_progress(size_t done_bytes, void *arg)
{
    struct progress *p = arg;
    p->n++;
    p->last = done_bytes;
    return done_bytes < p->stop_at;
}

/* The address space is reserved and not touched: where pages have to be pinned it is too much to ask, and then nothing is checked. */
static void registration_is_told_and_may_be_ended(struct ops_test *t)
{
    const size_t piece = (size_t)1 << 30, bytes = 2 * piece + 4096;
    const struct device_ops *ops = t->gpu_backend->device;
    struct progress p = {.stop_at = 2 * piece};
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ops_test_true(t, "mmap", memory != MAP_FAILED);
    if (ops->host_register(t->gpu_device, memory, bytes, on_progress, &p) != -ENOMEM) {
        ops_test_true(t, "ended by the second piece", p.n == 2 && p.last == 2 * piece);
        ops->host_unregister(t->gpu_device, memory);
        p = (struct progress){.stop_at = SIZE_MAX};
        ops_test_true(t, "nothing was left registered", ops->host_register(t->gpu_device, memory, bytes, on_progress, &p) == 0 && p.n == 3 && p.last == bytes);
        ops->host_unregister(t->gpu_device, memory);
    }
    munmap(memory, bytes);
}

void test_ops_device(struct ops_test *t)
{
    memory_is_counted_by_tag(t);
    a_limit_holds(t);
    events_order_streams(t);
    rows_are_copied(t);
    kernels_read_registered_memory(t, true);
    kernels_read_registered_memory(t, false);
    copies_go_through_host_memory(t);
    copies_go_in_batches(t);
    registration_is_told_and_may_be_ended(t);
}
