/* Collectives: what the ranks of a tensor-parallel group say to one another while they compute. One process a rank (threads of one process will do on the CPU), one communicator a rank.
 * A backend fills one const table: ranks of one host over shared memory (kernels/cpu/shm_collective.c, for the CPU backend), NCCL (kernels/cuda/nccl_collective.c, found with dlopen).
 *
 * Every rank makes the same calls in the same order with the same sizes: which calls, follows from what the group computes, never from what a rank finds locally. Calls come from the
 * thread that owns the device, but for `abort`. Like ops, collectives are asynchronous on the stream (CPU: done on return).
 *
 * Sums are fp32 and have the same bits on every rank; over shared memory ((rank 0 + rank 1) + rank 2) + ... besides, whatever the sizes.
 *
 * Failure: a rank that died, hangs or left shows as -ECONNRESET or -ETIMEDOUT (over shared memory one that makes other calls as -EPROTO), from the call itself or, where work is asynchronous, from stream_sync on its stream; at the latest
 * deadline_us after the wait began. From then on the communicator is broken: every call returns that error at once, data is undefined, and the group can only be closed and built anew. A rank that
 * fails for reasons of its own calls `abort`, so that nobody has to wait for the deadline. */
#pragma once
#include "kernels/device.h"
#include "proto/base/error.h"
#include <stddef.h>
#include <stdint.h>

enum {
    COLLECTIVE_ID_BYTES = 128,
    COLLECTIVE_MAX_RANKS = 64,
};

struct collective;

struct collective_config {
    struct device *device;        /* of the backend that the table belongs to; outlives the communicator */
    int rank, n_ranks;            /* 0 <= rank < n_ranks, 2 <= n_ranks <= COLLECTIVE_MAX_RANKS */
    uint8_t id[COLLECTIVE_ID_BYTES]; /* the leader's make_id, sent to every rank; used for one communicator a rank, once */
    int64_t gather_columns;       /* the longest row that all_gather is called with, >= 1 */
    uint64_t deadline_us;         /* of every wait for other ranks, opening included; > 0 */
};

struct collective_ops {
    const char *name; /* "shared memory", "nccl" */
    /* Leader only. The process keeps what the id stands for until it opens rank 0 with it, or ends. -EINVAL (n_ranks), -ENOTSUP (no NCCL library, or one too old), -ENOMEM, the errno of a system call. */
    int (*make_id)(int n_ranks, uint8_t ret_id[COLLECTIVE_ID_BYTES], struct error *err);
    /* Returns when all ranks are there. -EINVAL (the configuration, or an id that names no such group), -ENOTSUP, -ENOMEM, -ETIMEDOUT (not all ranks came), -ECONNRESET (one died). */
    int (*open)(const struct collective_config *config, struct collective **ret_collective, struct error *err);
    /* Waits for nobody; work that is under way on a stream is cut off, so sync first. NULL is fine. */
    void (*close)(struct collective *collective);
    /* data[i] = sum over ranks of data[i], for i < n; in place, device memory, n > 0. */
    int (*all_reduce)(struct collective *collective, struct stream *stream, float *data, int64_t n);
    /* Rows [n_rows] of ld floats in device memory, n_rows > 0. Rank r has written columns first[r] .. first[r + 1] - 1 of its own rows (perhaps none); afterwards every rank has the columns 0 ..
     * first[n_ranks] - 1 of all of them. first: host, [n_ranks + 1], ascending from 0, the last at most ld and gather_columns; read before the call returns. */
    int (*all_gather)(struct collective *collective, struct stream *stream, float *rows, int64_t n_rows, int64_t ld, const int64_t *first);
    /* 0, or the error that broke the communicator. Never blocks. */
    int (*status)(struct collective *collective);
    /* Any thread, any time before close; does not block. Breaks the communicator with -ECONNRESET: who waits in a call or in stream_sync wakes up, here and, over shared memory, on every rank. */
    void (*abort)(struct collective *collective);
    /* What a communicator holds, from open to close: device memory of the arena (MEM_WORKSPACE), and memory of the host, the whole group's. What NCCL allocates for itself is in neither, but under MEM_LIBRARIES from open on. Pure. */
    size_t (*device_bytes)(int n_ranks, int64_t gather_columns);
    size_t (*host_bytes)(int n_ranks);
};

/* The CPU's, over shared memory. */
const struct collective_ops *shm_collective_ops(void);
