/* Kernels of race_probe.c: each is right, or with `bug` has one fault that no order of whole steps may show. */
#pragma once
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
/* One warp; y[lane] = x[31 - lane] through shared memory. bug: a shuffle, a vote, nothing but the wait of cp.async, stands where a __syncwarp has to. */
int race_probe_reverse_shuffle(cudaStream_t s, const int *x, int *y, bool bug);
int race_probe_reverse_vote(cudaStream_t s, const int *x, int *y, bool bug);
int race_probe_reverse_async(cudaStream_t s, const int *x, int *y, bool bug);
/* The same by ldmatrix, for x and y of 64 halves; [8, 8], transposed by who reads what. */
int race_probe_rows(cudaStream_t s, const uint16_t *x, uint16_t *y, bool bug);
/* Two rounds through one buffer of shared memory. bug: nothing holds a lane back from overwriting what another has yet to read but a vote. */
int race_probe_rounds(cudaStream_t s, const int *x, int *y, bool bug);
/* *y = 7, said by one thread, or by all. */
int race_probe_same_value(cudaStream_t s, int *y, bool bug);
/* *y += 1 by each of n blocks. bug: not an atomic. */
int race_probe_count(cudaStream_t s, int n_blocks, int *y, bool bug);
/* Blocks leave sums in part, [n_blocks], the last one adds them up. bug: no fence. counter is 0 before. */
int race_probe_last_block(cudaStream_t s, int n_blocks, int *part, unsigned *counter, int *y, bool bug);
/* *y = the largest of x[0..n), none negative. bug: of 32 words of shared memory, of which n are written. */
int race_probe_largest(cudaStream_t s, const int *x, int n, int *y, bool bug);
/* *y = x[0] + ... + x[n - 1]. bug: x[n] is read too, and not used. */
int race_probe_sum(cudaStream_t s, const int *x, int n, int *y, bool bug);
/* Warp 0 writes what warp 1 reads, between named barriers. bug: the barrier of the readers is another one. */
int race_probe_warps(cudaStream_t s, const int *x, int *y, bool bug);
/* 64 threads add to a counter in shared memory, thread 0 says what it is. bug: after a barrier of its warp alone; the other warp adds 0. */
int race_probe_counter(cudaStream_t s, int *y, bool bug);
/* *y = **x. */
int race_probe_follow(cudaStream_t s, const int *const *x, int *y);
#ifdef __cplusplus
}
#endif
