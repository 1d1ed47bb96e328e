/* Kernels of profile_probe.c, each once: what their accesses cost is known (profile_check.py). */
#pragma once
#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif
/* x and y [1024], device memory on 128 bytes. */
int profile_run(cudaStream_t s, const float *x, float *y);
/* `misaligned` once more, with x in pinned memory. */
int profile_run_host(cudaStream_t s, const float *x, float *y);
#ifdef __cplusplus
}
#endif
