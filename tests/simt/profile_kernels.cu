#include "tests/simt/profile_kernels.cuh"
#include "kernels/cuda/ptx.cuh"

/* Neighbours read neighbours. */
__global__ void coalesced(const float *x, float *y)
{
    y[threadIdx.x] = x[threadIdx.x];
}

/* A sector of its own for each lane. */
__global__ void strided(const float *x, float *y)
{
    y[threadIdx.x] = x[8 * threadIdx.x];
}

/* One sector more than the bytes need. */
__global__ void misaligned(const float *x, float *y)
{
    y[threadIdx.x] = x[threadIdx.x + 1];
}

__global__ void broadcast(const float *x, float *y)
{
    y[threadIdx.x] = x[0];
}

/* A warp and a half, three rounds, without anything that joins the lanes. */
__global__ void rounds(const float *x, float *y)
{
    float sum = 0;
    for (int i = 0; i < 3; i++)
        sum += x[48 * i + threadIdx.x];
    y[threadIdx.x] = sum;
}

/* Lanes of the upper half leave out the first round: a vote in each round keeps the others' rounds apart. */
__global__ void ragged(const float *x, float *y)
{
    float sum = 0;
    for (int i = 0; i < 2; i++) {
        if (i > 0 || threadIdx.x < 16)
            sum += x[32 * i + threadIdx.x];
        __any_sync(0xFFFFFFFFu, 1);
    }
    y[threadIdx.x] = sum;
}

/* Columns of a tile [32, 32], its rows `ld` words apart. */
template <int LD> __device__ void transpose(const float *x, float *y)
{
    __shared__ float tile[32 * LD];
    for (int i = 0; i < 32; i++)
        tile[i * LD + threadIdx.x] = x[32 * i + threadIdx.x];
    __syncthreads();
    for (int i = 0; i < 32; i++)
        y[32 * i + threadIdx.x] = tile[threadIdx.x * LD + i];
}

__global__ void transpose_conflicting(const float *x, float *y)
{
    transpose<32>(x, y);
}

__global__ void transpose_padded(const float *x, float *y)
{
    transpose<33>(x, y);
}

/* 16 bytes a lane, global and shared, and back. */
__global__ void wide(const float *x, float *y)
{
    __shared__ uint4 tile[32];
    tile[threadIdx.x] = reinterpret_cast<const uint4 *>(x)[threadIdx.x];
    __syncthreads();
    reinterpret_cast<uint4 *>(y)[threadIdx.x] = tile[31 - threadIdx.x];
}

/* Rows of 8 bytes a lane, 16 bytes apart: the lanes of a half fill every other pair of banks twice. */
__global__ void pairs(const float *x, float *y)
{
    __shared__ __align__(16) float tile[128];
    reinterpret_cast<float2 *>(tile)[2 * threadIdx.x] = reinterpret_cast<const float2 *>(x)[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = tile[4 * threadIdx.x];
}

/* Rows of a tile of 16-bit values [32, ld] by cp.async, then by ldmatrix. */
template <int LD> __device__ void matrix(const uint16_t *x, uint32_t *y)
{
    __shared__ __align__(128) uint16_t tile[32 * LD];
    copy_async16(tile + threadIdx.x * LD, x + 8 * threadIdx.x, true);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    uint32_t r[4];
    load_matrix_x4(r, tile + threadIdx.x * LD);
    y[threadIdx.x] = r[0] + r[1] + r[2] + r[3];
}

__global__ void matrix_conflicting(const uint16_t *x, uint32_t *y)
{
    matrix<64>(x, y);
}

__global__ void matrix_padded(const uint16_t *x, uint32_t *y)
{
    matrix<72>(x, y);
}

/* All lanes count in one word, then each in its own. */
__global__ void counters(const float *x, float *y)
{
    __shared__ unsigned count[33];
    count[threadIdx.x] = 0;
    if (threadIdx.x == 0)
        count[32] = 0;
    __syncthreads();
    atomicAdd(&count[32], x[0] > 0 ? 1u : 2u);
    atomicAdd(&count[threadIdx.x], 1u);
    __syncthreads();
    y[threadIdx.x] = (float)(count[32] + count[threadIdx.x]);
}

extern "C" int profile_run(cudaStream_t s, const float *x, float *y)
{
    int r = LAUNCH_ON(coalesced, 1, 32, 0, s, x, y) | LAUNCH_ON(strided, 1, 32, 0, s, x, y) | LAUNCH_ON(misaligned, 1, 32, 0, s, x, y) | LAUNCH_ON(broadcast, 1, 32, 0, s, x, y) |
            LAUNCH_ON(rounds, 1, 48, 0, s, x, y) | LAUNCH_ON(ragged, 1, 32, 0, s, x, y) | LAUNCH_ON(transpose_conflicting, 1, 32, 0, s, x, y) | LAUNCH_ON(transpose_padded, 1, 32, 0, s, x, y) |
            LAUNCH_ON(wide, 1, 32, 0, s, x, y) | LAUNCH_ON(pairs, 1, 32, 0, s, x, y) | LAUNCH_ON(counters, 1, 32, 0, s, x, y);
    r |= LAUNCH_ON(matrix_conflicting, 1, 32, 0, s, (const uint16_t *)x, (uint32_t *)y) | LAUNCH_ON(matrix_padded, 1, 32, 0, s, (const uint16_t *)x, (uint32_t *)y);
    return r;
}

extern "C" int profile_run_host(cudaStream_t s, const float *x, float *y)
{
    return LAUNCH_ON(misaligned, 1, 32, 0, s, x, y);
}
