/* Launchers of simt_probe.cu's kernels; pointers are device memory. Each returns the runtime's error. */
#pragma once
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
int probe_run_block_sum(cudaStream_t s, const float *x, int n, int n_threads, float *sum, bool bug);
int probe_run_warp(cudaStream_t s, const int *x, int *out /* [5, 32] */);
int probe_run_mma(cudaStream_t s, const uint16_t *a, const uint16_t *b, float *c);
int probe_run_mma_s8(cudaStream_t s, const int8_t *a, const int8_t *b, int32_t *c);
int probe_run_pipeline(cudaStream_t s, const float *x, int n_tiles, float *y, int bug);
int probe_run_bugs(cudaStream_t s, float *x, int n, int bug);
int probe_run_count(cudaStream_t s, unsigned n_blocks, unsigned *counter, float *x, float value);
#ifdef __cplusplus
}
#endif
