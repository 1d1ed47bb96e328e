/* Faults that the fast build of the emulator misses or finds by luck, and the checked build always: race_probe SCENARIO right|bug. Exit status 0: the values are right, 1: they are wrong, 2: no such
 * scenario; a report aborts. planted_bugs.py runs it in both builds. */
#include "tests/simt/race_probe.cuh"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 64 };

static cudaStream_t a, b; /* two streams that nothing orders */
static int numbers[N];    /* 1, 2, ... */

static void need(cudaError_t error, const char *what)
{
    if (error == cudaSuccess)
        return;
    printf("race_probe: %s: %s\n", what, cudaGetErrorName(error));
    exit(3);
}

static void *device_room(size_t bytes)
{
    void *memory;
    need(cudaMalloc(&memory, bytes), "cudaMalloc");
    return memory;
}

static void *pinned_room(size_t bytes)
{
    void *memory;
    need(cudaHostAlloc(&memory, bytes, cudaHostAllocDefault), "cudaHostAlloc");
    return memory;
}

static cudaEvent_t event_new(void)
{
    cudaEvent_t event;
    need(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    return event;
}

static void copy(void *dst, const void *src, size_t bytes, cudaStream_t s)
{
    need(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, s), "cudaMemcpyAsync");
}

/* On stream a, and over when it returns. */
static int *uploaded(const void *src, size_t bytes)
{
    int *memory = device_room(bytes);
    copy(memory, src, bytes, a);
    need(cudaStreamSynchronize(a), "cudaStreamSynchronize");
    return memory;
}

static int *zeros(size_t n)
{
    static const int zero[N];
    return uploaded(zero, n * sizeof(int));
}

static bool holds(const int *device, int expected)
{
    int value;
    copy(&value, device, sizeof value, a);
    return value == expected;
}

static bool is_reversed(const int *device)
{
    int y[32];
    copy(y, device, sizeof y, a);
    for (int i = 0; i < 32; i++)
        if (y[i] != numbers[31 - i])
            return false;
    return true;
}

/* ---- threads of a block ---- */
static bool reversed_by(int (*probe)(cudaStream_t, const int *, int *, bool), bool bug)
{
    int *y = zeros(32);
    need(probe(a, uploaded(numbers, sizeof numbers), y, bug), "launch");
    return is_reversed(y);
}

static bool shuffle_for_syncwarp(bool bug)
{
    return reversed_by(race_probe_reverse_shuffle, bug);
}

static bool vote_for_syncwarp(bool bug)
{
    return reversed_by(race_probe_reverse_vote, bug);
}

static bool wait_for_syncwarp(bool bug)
{
    return reversed_by(race_probe_reverse_async, bug);
}

static bool named_barrier_of_another(bool bug)
{
    return reversed_by(race_probe_warps, bug);
}

static bool syncwarp_before_ldmatrix(bool bug)
{
    uint16_t x[N], y[N];
    for (int i = 0; i < N; i++)
        x[i] = (uint16_t)(i * 3 + 1);
    uint16_t *dy = (uint16_t *)zeros(N / 2);
    need(race_probe_rows(a, (uint16_t *)uploaded(x, sizeof x), dy, bug), "launch");
    copy(y, dy, sizeof y, a);
    return memcmp(x, y, sizeof x) == 0;
}

static bool overwritten_in_the_next_round(bool bug)
{
    int *y = zeros(N);
    need(race_probe_rounds(a, uploaded(numbers, sizeof numbers), y, bug), "launch");
    return is_reversed(y) && holds(y + 32, numbers[63]);
}

static bool all_write_the_same(bool bug)
{
    int *y = zeros(1);
    need(race_probe_same_value(a, y, bug), "launch");
    return holds(y, 7);
}

static bool atomic_and_plain(bool bug)
{
    int *y = zeros(1);
    need(race_probe_counter(a, y, bug), "launch");
    return holds(y, 64);
}

/* ---- blocks ---- */
static bool blocks_count(bool bug)
{
    int *y = zeros(1);
    need(race_probe_count(a, 5, y, bug), "launch");
    return holds(y, 5);
}

static bool last_block_sums(bool bug)
{
    int *y = zeros(1), *part = zeros(8), *counter = zeros(1);
    need(race_probe_last_block(a, 8, part, (unsigned *)counter, y, bug), "launch");
    return holds(y, 36);
}

/* ---- memory ---- */
static bool shared_never_written(bool bug)
{
    int *y = zeros(1);
    need(race_probe_largest(a, uploaded(numbers, sizeof numbers), 20, y, bug), "launch");
    return holds(y, 20);
}

static bool device_never_written(bool bug)
{
    int *x = device_room(8 * sizeof *x), *again = device_room(8 * sizeof *x), *y = zeros(1);
    copy(x, numbers, (bug ? 7 : 8) * sizeof *x, a);
    copy(again, x, 8 * sizeof *x, a);
    need(race_probe_sum(a, again, bug ? 7 : 8, y, bug), "launch"); /* reads one more and does not use it */
    return holds(y, bug ? 28 : 36);
}

static bool behind_the_end(bool bug)
{
    int *x = uploaded(numbers, 10 * sizeof *x), *y = zeros(1);
    need(race_probe_sum(a, x, 10, y, bug), "launch");
    return holds(y, 55);
}

/* A table of pointers in device memory, which the check of the arguments does not see. */
static bool pointer_to_host_in_a_table(bool bug)
{
    int *in_host = malloc(sizeof *in_host), *y = zeros(1);
    *in_host = numbers[0];
    const int *table[1] = {bug ? in_host : uploaded(numbers, sizeof numbers)};
    need(race_probe_follow(a, (const int *const *)uploaded(table, sizeof table), y), "launch");
    const bool right = holds(y, 1);
    free(in_host);
    return right;
}

/* ---- streams and the host ---- */

/* b reads what a writes. */
static bool stream_wait_missing(bool bug)
{
    int *x = zeros(1), *y = zeros(1), value;
    cudaEvent_t written = event_new();
    need(race_probe_same_value(a, x, false), "launch");
    need(cudaEventRecord(written, a), "cudaEventRecord");
    if (!bug)
        need(cudaStreamWaitEvent(b, written, 0), "cudaStreamWaitEvent");
    copy(y, x, sizeof *y, b);
    copy(&value, y, sizeof value, b);
    cudaEventDestroy(written);
    return value == 7;
}

static bool event_recorded_too_early(bool bug)
{
    int *x = zeros(1), *y = zeros(1), value;
    cudaEvent_t written = event_new();
    if (bug)
        need(cudaEventRecord(written, a), "cudaEventRecord");
    need(race_probe_same_value(a, x, false), "launch");
    if (!bug)
        need(cudaEventRecord(written, a), "cudaEventRecord");
    need(cudaStreamWaitEvent(b, written, 0), "cudaStreamWaitEvent");
    copy(y, x, sizeof *y, b);
    copy(&value, y, sizeof value, b);
    cudaEventDestroy(written);
    return value == 7;
}

/* The piece is written anew while the copy from it may be on its way; the host has waited for the other stream. */
static bool staging_reused_early(bool bug)
{
    int *staging = pinned_room(sizeof *staging), *x = zeros(1), *y = zeros(1);
    memcpy(staging, &numbers[4], sizeof *staging);
    copy(x, staging, sizeof *x, a);
    need(race_probe_same_value(b, y, false), "launch");
    need(cudaStreamSynchronize(bug ? b : a), "cudaStreamSynchronize");
    memcpy(staging, &numbers[5], sizeof *staging);
    const bool right = holds(x, numbers[4]);
    need(cudaStreamSynchronize(b), "cudaStreamSynchronize");
    need(cudaFreeHost(staging), "cudaFreeHost");
    return right;
}

/* The host reads what a copy brings, after it has waited for the other stream. */
static bool host_reads_too_early(bool bug)
{
    int *answer = pinned_room(sizeof *answer), *x = uploaded(&numbers[8], sizeof *x), *y = zeros(1), value;
    copy(answer, x, sizeof *x, a);
    need(race_probe_same_value(b, y, false), "launch");
    need(cudaStreamSynchronize(bug ? b : a), "cudaStreamSynchronize");
    memcpy(&value, answer, sizeof value);
    need(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    need(cudaFreeHost(answer), "cudaFreeHost");
    return value == numbers[8];
}

static bool freed_early(bool bug)
{
    int *x = uploaded(numbers, sizeof numbers), *y = zeros(1), *z = zeros(1);
    need(race_probe_sum(a, x, 10, y, false), "launch");
    need(race_probe_same_value(b, z, false), "launch");
    need(cudaStreamSynchronize(bug ? b : a), "cudaStreamSynchronize");
    need(cudaFree(x), "cudaFree");
    return holds(y, 55);
}

/* Both streams add to one word, and the sum is right in every order. */
static bool streams_share_a_word(bool bug)
{
    int *x = zeros(1);
    need(race_probe_count(a, 1, x, true), "launch");
    need(race_probe_count(bug ? b : a, 1, x, true), "launch");
    need(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return holds(x, 2);
}

static const struct scenario { const char *name; bool (*run)(bool bug); } scenarios[] = {
    {"shuffle_for_syncwarp", shuffle_for_syncwarp},
    {"vote_for_syncwarp", vote_for_syncwarp},
    {"wait_for_syncwarp", wait_for_syncwarp},
    {"syncwarp_before_ldmatrix", syncwarp_before_ldmatrix},
    {"overwritten_in_the_next_round", overwritten_in_the_next_round},
    {"named_barrier_of_another", named_barrier_of_another},
    {"all_write_the_same", all_write_the_same},
    {"atomic_and_plain", atomic_and_plain},
    {"blocks_count", blocks_count},
    {"last_block_sums", last_block_sums},
    {"shared_never_written", shared_never_written},
    {"device_never_written", device_never_written},
    {"behind_the_end", behind_the_end},
    {"pointer_to_host_in_a_table", pointer_to_host_in_a_table},
    {"stream_wait_missing", stream_wait_missing},
    {"event_recorded_too_early", event_recorded_too_early},
    {"staging_reused_early", staging_reused_early},
    {"host_reads_too_early", host_reads_too_early},
    {"freed_early", freed_early},
    {"streams_share_a_word", streams_share_a_word},
};

int main(int argc, char **argv)
{
    const size_t n = sizeof scenarios / sizeof *scenarios;
    if (argc == 1)
        for (size_t i = 0; i < n; i++)
            printf("%s\n", scenarios[i].name);
    if (argc != 3)
        return argc == 1 ? 0 : 2;
    for (int i = 0; i < N; i++)
        numbers[i] = i + 1;
    need(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking), "cudaStreamCreate");
    need(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking), "cudaStreamCreate");
    for (size_t i = 0; i < n; i++)
        if (strcmp(argv[1], scenarios[i].name) == 0)
            return !scenarios[i].run(strcmp(argv[2], "bug") == 0);
    return 2;
}
