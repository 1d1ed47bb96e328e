/* The emulator: what CUDA promises holds, and planted bugs are found. Each test is a process of its own, so that a report may abort it. */
#include "tests/simt/simt_probe.cuh"
#include "tests/simt/simt.h"
#include <criterion/criterion.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>

enum { SEEDS = 6 };

static cudaStream_t stream_make(void)
{
    cudaStream_t s;
    cr_assert_eq(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), cudaSuccess);
    return s;
}

static void *device_make(cudaStream_t s, const void *src, size_t bytes)
{
    void *p;
    cr_assert_eq(cudaMalloc(&p, bytes), cudaSuccess);
    if (src)
        cr_assert_eq(cudaMemcpyAsync(p, src, bytes, cudaMemcpyDefault, s), cudaSuccess);
    return p;
}

static void host_read(cudaStream_t s, void *dst, const void *src, size_t bytes)
{
    cr_assert_eq(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, s), cudaSuccess);
    cr_assert_eq(cudaStreamSynchronize(s), cudaSuccess);
}

static void count_up(float *x, int n)
{
    for (int i = 0; i < n; i++)
        x[i] = (float)(i % 97);
}

/* Sums of a block under `seed`; the right one is returned in ret_expected. */
static float block_sum(uint64_t seed, bool bug, float *ret_expected)
{
    float x[300], sum;
    simt_configure(seed, false);
    cudaStream_t s = stream_make();
    count_up(x, 300);
    *ret_expected = 0;
    for (int i = 0; i < 300; i++)
        *ret_expected += x[i];
    float *dx = device_make(s, x, sizeof x), *dsum = device_make(s, NULL, sizeof sum);
    cr_assert_eq(probe_run_block_sum(s, dx, 300, 512, dsum, bug), cudaSuccess);
    host_read(s, &sum, dsum, sizeof sum);
    cudaFree(dx);
    cudaFree(dsum);
    cudaStreamDestroy(s);
    return sum;
}

Test(simt, barriers_order_shared_memory)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        float expected, sum = block_sum(seed, false, &expected);
        cr_assert_float_eq(sum, expected, 0);
    }
}

Test(simt, a_missing_barrier_is_found)
{
    int n_found = 0;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        float expected, sum = block_sum(seed, true, &expected);
        n_found += sum != expected;
    }
    cr_assert_gt(n_found, 0);
}

Test(simt, warps_exchange_values)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        int x[32], out[160], scan = 0, odd = 0, max = 0;
        simt_configure(seed, false);
        cudaStream_t s = stream_make();
        for (int i = 0; i < 32; i++) {
            x[i] = i * 7 % 31 - 9;
            odd |= (int)((unsigned)(x[i] & 1) << i);
            max = x[i] > max ? x[i] : max;
        }
        int *dx = device_make(s, x, sizeof x), *dout = device_make(s, NULL, sizeof out);
        cr_assert_eq(probe_run_warp(s, dx, dout), cudaSuccess);
        host_read(s, out, dout, sizeof out);
        for (int i = 0; i < 32; i++) {
            scan += x[i];
            cr_assert_eq(out[i], scan);
            cr_assert_eq(out[32 + i], x[i ^ 5]);
            cr_assert_eq(out[64 + i], odd);
            cr_assert_eq(out[96 + i], max);
            cr_assert_eq(out[128 + i], x[i / 8 * 8 + (i + 3) % 8]);
        }
        cudaStreamDestroy(s);
    }
}

Test(simt, matrix_products_follow_the_fragment_layout)
{
    uint16_t a[256], b[128];
    float fa[256], fb[128], c[128];
    int8_t ia[16 * 32], ib[8 * 32];
    int32_t ic[128];
    cudaStream_t s = stream_make();
    for (int i = 0; i < 256; i++) {
        fa[i] = (float)(i * 37 % 64 - 31);
        uint32_t bits;
        memcpy(&bits, &fa[i], 4);
        a[i] = (uint16_t)(bits >> 16);
    }
    for (int i = 0; i < 128; i++) {
        fb[i] = (float)(i * 29 % 32 - 15);
        uint32_t bits;
        memcpy(&bits, &fb[i], 4);
        b[i] = (uint16_t)(bits >> 16);
    }
    for (int i = 0; i < 16 * 32; i++)
        ia[i] = (int8_t)(i * 91 % 256 - 128);
    for (int i = 0; i < 8 * 32; i++)
        ib[i] = (int8_t)(i * 57 % 256 - 128);
    uint16_t *da = device_make(s, a, sizeof a), *db = device_make(s, b, sizeof b);
    int8_t *dia = device_make(s, ia, sizeof ia), *dib = device_make(s, ib, sizeof ib);
    float *dc = device_make(s, NULL, sizeof c);
    int32_t *dic = device_make(s, NULL, sizeof ic);
    cr_assert_eq(probe_run_mma(s, da, db, dc), cudaSuccess);
    cr_assert_eq(probe_run_mma_s8(s, dia, dib, dic), cudaSuccess);
    host_read(s, c, dc, sizeof c);
    host_read(s, ic, dic, sizeof ic);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++) {
            float sum = 0;
            int32_t isum = 0;
            for (int k = 0; k < 16; k++)
                sum += fa[i * 16 + k] * fb[j * 16 + k];
            for (int k = 0; k < 32; k++)
                isum += ia[i * 32 + k] * ib[j * 32 + k];
            cr_assert_float_eq(c[i * 8 + j], sum, 0);
            cr_assert_eq(ic[i * 8 + j], isum);
        }
}

/* Whether the pipeline gave the right values. */
static bool pipeline_is_right(uint64_t seed, int bug)
{
    enum { TILES = 5 };
    float x[TILES * 128], y[TILES * 128];
    simt_configure(seed, false);
    cudaStream_t s = stream_make();
    count_up(x, TILES * 128);
    float *dx = device_make(s, x, sizeof x), *dy = device_make(s, NULL, sizeof y);
    cr_assert_eq(probe_run_pipeline(s, dx, TILES, dy, bug), cudaSuccess);
    host_read(s, y, dy, sizeof y);
    cudaStreamDestroy(s);
    for (int i = 0; i < TILES * 128; i++)
        if (!(y[i] == 2 * x[i]))
            return false;
    return true;
}

Test(simt, asynchronous_copies_land_by_the_wait)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++)
        cr_assert(pipeline_is_right(seed, 0), "seed %d", (int)seed);
}

Test(simt, a_missing_wait_and_an_early_reuse_are_found)
{
    for (int bug = 1; bug <= 2; bug++) {
        int n_found = 0;
        for (uint64_t seed = 0; seed < SEEDS; seed++)
            n_found += !pipeline_is_right(seed, bug);
        cr_assert_gt(n_found, 0, "bug %d", bug);
    }
}

static void run_bug(int bug)
{
    cudaStream_t s = stream_make();
    float *x = device_make(s, NULL, 64 * sizeof *x);
    probe_run_bugs(s, x, 64, bug);
    cudaStreamSynchronize(s);
}

Test(simt, a_divergent_barrier_is_reported, .signal = SIGABRT) { run_bug(0); }
Test(simt, a_lane_that_never_comes_is_reported, .signal = SIGABRT) { run_bug(1); }
Test(simt, an_access_out_of_bounds_is_reported, .signal = SIGABRT) { run_bug(2); }

Test(simt, a_kernel_argument_in_host_memory_is_reported, .signal = SIGABRT)
{
    cudaStream_t s = stream_make();
    int x[32], *out = device_make(s, NULL, 160 * sizeof *out);
    probe_run_warp(s, x, out);
}

Test(simt, the_host_cannot_touch_device_memory, .signal = SIGABRT)
{
    cudaStream_t s = stream_make();
    int *x = device_make(s, NULL, 16);
    cudaMemsetAsync(x, 0, 16, s);
    cudaStreamSynchronize(s);
    cr_assert_eq(*(volatile int *)x, 0);
}

Test(simt, freed_memory_is_not_touched, .signal = SIGABRT)
{
    cudaStream_t s = stream_make();
    float *x = device_make(s, NULL, 64 * sizeof *x);
    unsigned zero = 0, *counter = device_make(s, &zero, sizeof zero);
    probe_run_count(s, 1, counter, x, 1);
    cudaFree(x); /* before the kernel has run */
    cudaStreamSynchronize(s);
}

/* A writer on one stream, a reader on the other, with and without an event between them. */
static float read_after_write(uint64_t seed, bool threads, bool wait)
{
    float value = -1, one = 1;
    unsigned zero = 0;
    cudaEvent_t event;
    simt_configure(seed, threads);
    cudaStream_t writer = stream_make(), reader = stream_make();
    float *x = device_make(writer, &(float){0}, sizeof *x), *y = device_make(writer, NULL, sizeof *y);
    unsigned *counter = device_make(writer, &zero, sizeof zero);
    cudaStreamSynchronize(writer);
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    probe_run_count(writer, 1, counter, x, one);
    cudaEventRecord(event, writer);
    if (wait)
        cudaStreamWaitEvent(reader, event, 0);
    cudaMemcpyAsync(y, x, sizeof *x, cudaMemcpyDefault, reader);
    host_read(reader, &value, y, sizeof value);
    cudaStreamSynchronize(writer);
    cudaEventDestroy(event);
    cudaStreamDestroy(writer);
    cudaStreamDestroy(reader);
    return value;
}

Test(simt, events_order_streams)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        cr_assert_float_eq(read_after_write(seed, false, true), 1, 0);
        cr_assert_float_eq(read_after_write(seed, true, true), 1, 0);
    }
}

Test(simt, a_missing_stream_wait_is_found)
{
    int n_found = 0;
    for (uint64_t seed = 1; seed <= 12; seed++)
        n_found += read_after_write(seed, false, false) != 1;
    cr_assert_gt(n_found, 0);
}

Test(simt, many_blocks_count_once_each)
{
    for (int threads = 0; threads < 2; threads++) {
        unsigned zero = 0, count;
        simt_configure(3, threads);
        cudaStream_t s = stream_make();
        unsigned *counter = device_make(s, &zero, sizeof zero);
        float *x = device_make(s, NULL, 100 * sizeof *x);
        cudaMemsetAsync(x, 0, 100 * sizeof *x, s);
        cr_assert_eq(probe_run_count(s, 100, counter, x, 1), cudaSuccess);
        host_read(s, &count, counter, sizeof count);
        cr_assert_eq(count, 6400);
        cudaStreamDestroy(s);
    }
}

Test(simt, limits_of_a_launch_are_kept)
{
    cudaStream_t s = stream_make();
    float *x = device_make(s, NULL, 16 * sizeof *x);
    cr_assert_eq(probe_run_block_sum(s, x, 16, 2048, x, false), cudaErrorInvalidConfiguration);
    cr_assert_eq(cudaGetLastError(), cudaErrorInvalidConfiguration);
    cr_assert_eq(cudaGetLastError(), cudaSuccess);
    simt_fail_malloc(2);
    void *a, *b;
    cr_assert_eq(cudaMalloc(&a, 16), cudaSuccess);
    cr_assert_eq(cudaMalloc(&b, 16), cudaErrorMemoryAllocation);
    cr_assert_null(b);
}

/* Whoever launches asks for the last error of the thread. */
Test(simt, an_error_that_nobody_took_is_reported_at_the_next_launch, .signal = SIGABRT)
{
    cudaStream_t s = stream_make();
    unsigned *counter = device_make(s, NULL, sizeof *counter);
    float *x = device_make(s, NULL, 64 * sizeof *x);
    cr_assert_eq(cudaHostUnregister(x), cudaErrorHostMemoryNotRegistered);
    probe_run_count(s, 1, counter, x, 1);
}

static void *make_stream(void *arg)
{
    *(cudaStream_t *)arg = stream_make();
    return NULL;
}

Test(simt, a_thread_that_sets_no_device_is_reported, .signal = SIGABRT)
{
    cudaStream_t s;
    pthread_t thread;
    cr_assert_eq(cudaSetDevice(0), cudaSuccess);
    make_stream(&s);
    cr_assert_eq(pthread_create(&thread, NULL, make_stream, &s), 0);
    pthread_join(thread, NULL);
}

Test(simt, a_mapping_that_is_read_only_is_registered_as_such)
{
    void *memory = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(memory, MAP_FAILED);
    cr_assert_eq(cudaHostRegister(memory, 4096, cudaHostRegisterMapped), cudaErrorInvalidValue);
    cr_assert_eq(cudaHostRegister(memory, 4096, cudaHostRegisterMapped | cudaHostRegisterReadOnly), cudaSuccess);
    cr_assert_eq(cudaHostUnregister(memory), cudaSuccess);
}

/* ---- graphs ---- */

/* x, copied on another stream to y, and that back to z: as a graph, with its join or without. */
struct copy_graph {
    cudaStream_t s, side;
    cudaEvent_t fork, join;
    int *x, *y, *z;
    cudaGraphExec_t exec;
};

static cudaError_t copy_graph_make(struct copy_graph *g, bool joined)
{
    cudaGraph_t graph;
    g->s = stream_make();
    g->side = stream_make();
    cudaEventCreateWithFlags(&g->fork, cudaEventDisableTiming);
    cudaEventCreateWithFlags(&g->join, cudaEventDisableTiming);
    g->x = device_make(g->s, NULL, sizeof(int));
    g->y = device_make(g->s, NULL, sizeof(int));
    g->z = device_make(g->s, NULL, sizeof(int));
    cr_assert_eq(cudaStreamBeginCapture(g->s, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    cudaEventRecord(g->fork, g->s);
    cudaStreamWaitEvent(g->side, g->fork, 0);
    cudaMemcpyAsync(g->y, g->x, sizeof(int), cudaMemcpyDefault, g->side);
    cudaEventRecord(g->join, g->side);
    if (joined)
        cudaStreamWaitEvent(g->s, g->join, 0);
    cudaMemcpyAsync(g->z, g->y, sizeof(int), cudaMemcpyDefault, g->s);
    const cudaError_t error = cudaStreamEndCapture(g->s, &graph);
    if (error == cudaSuccess) {
        cr_assert_eq(cudaGraphInstantiate(&g->exec, graph, 0), cudaSuccess);
        cudaGraphDestroy(graph);
    }
    return error;
}

static void copy_graph_end(struct copy_graph *g)
{
    cudaEventDestroy(g->fork);
    cudaEventDestroy(g->join);
}

Test(simt, a_graph_is_launched_again_and_again)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        struct copy_graph g;
        simt_configure(seed, seed % 3 == 2);
        cr_assert_eq(copy_graph_make(&g, true), cudaSuccess);
        for (int i = 1; i < 4; i++) {
            int value = 0;
            cudaMemcpyAsync(g.x, &i, sizeof i, cudaMemcpyDefault, g.s);
            cr_assert_eq(cudaGraphLaunch(g.exec, g.s), cudaSuccess);
            host_read(g.s, &value, g.z, sizeof value);
            cr_expect_eq(value, i);
        }
        cr_assert_eq(cudaGraphExecDestroy(g.exec), cudaSuccess);
        copy_graph_end(&g);
    }
}

Test(simt, a_stream_that_does_not_join_makes_no_graph)
{
    struct copy_graph g;
    cr_assert_eq(copy_graph_make(&g, false), cudaErrorStreamCaptureUnjoined);
    copy_graph_end(&g);
}

Test(simt, a_capture_ends_where_it_is_waited_for)
{
    cudaGraph_t graph;
    cudaEvent_t before, within;
    cudaStream_t s = stream_make(), other = stream_make();
    void *memory;
    cudaEventCreateWithFlags(&before, cudaEventDisableTiming);
    cudaEventCreateWithFlags(&within, cudaEventDisableTiming);
    cudaEventRecord(before, other);
    for (int use = 0; use < 4; use++) {
        cr_assert_eq(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal), cudaSuccess);
        cr_expect_eq(use == 0 ? cudaStreamSynchronize(s) : use == 1 ? cudaStreamQuery(s) : use == 2 ? cudaMalloc(&memory, 16) : cudaStreamWaitEvent(s, before, 0),
                     use == 3 ? cudaErrorStreamCaptureIsolation : cudaErrorStreamCaptureUnsupported, "use %d", use);
        cr_expect_eq(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
    }
    cr_assert_eq(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    cudaEventRecord(within, s);
    cr_expect_eq(cudaEventSynchronize(within), cudaErrorCapturedEvent);
    cr_assert_eq(cudaStreamEndCapture(s, &graph), cudaSuccess);
    cr_expect_eq(cudaStreamWaitEvent(other, within, 0), cudaErrorCapturedEvent);
    cudaGraphDestroy(graph);
    cudaEventDestroy(before);
    cudaEventDestroy(within);
}

Test(simt, a_graph_destroyed_while_it_runs_is_reported, .signal = SIGABRT)
{
    struct copy_graph g;
    int one = 1;
    copy_graph_make(&g, true);
    cudaMemcpyAsync(g.x, &one, sizeof one, cudaMemcpyDefault, g.s);
    cudaGraphLaunch(g.exec, g.s);
    cudaGraphExecDestroy(g.exec);
}

Test(simt, a_captured_copy_of_pageable_memory_is_reported, .signal = SIGABRT)
{
    int one = 1;
    cudaStream_t s = stream_make();
    int *x = device_make(s, NULL, sizeof one);
    cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal);
    cudaMemcpyAsync(x, &one, sizeof one, cudaMemcpyDefault, s);
}
