/* LAUNCH(kernel, grid, block, shared_bytes, stream, arguments...) on a struct stream: 0 or a negative errno. */
#pragma once
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/submit.h"

#define LAUNCH(kernel, grid, block, shared_bytes, s, ...) cuda_error(LAUNCH_ON(kernel, grid, block, shared_bytes, (s)->cuda, __VA_ARGS__))

/* Before the launch of a kernel with that much dynamic shared memory. */
template <class K> static inline int submit_shared_bytes(struct stream *, K *kernel, size_t bytes)
{
    return cuda_error(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}
