/* Launch shapes that several ops use. */
#pragma once
#include "kernels/cuda/cuda_private.h"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/submit.cuh"

enum { BLOCK_THREADS = 256 };

/* Blocks for n elements, one a thread; loops over more than fit. */
static inline unsigned blocks_for(int64_t n)
{
    const int64_t blocks = ceil_div64(n, BLOCK_THREADS), most = 1 << 20;
    return (unsigned)(blocks < most ? blocks : most);
}

#define EACH_ELEMENT(i, n) for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (int64_t)gridDim.x * blockDim.x)
