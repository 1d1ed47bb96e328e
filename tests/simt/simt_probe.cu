/* Small kernels that test_simt.c runs: each uses one thing that the emulator gives, and each planted bug is one that it must find. */
#include "tests/simt/simt_probe.cuh"
#include "kernels/cuda/ptx.cuh"

/* Sum over the block by shared memory, tree by tree. `bug`: the barrier inside the loop is missing. */
__global__ void probe_block_sum(const float *x, int n, float *sum, bool bug)
{
    DYNAMIC_SHARED(float, part);
    const int t = (int)threadIdx.x;
    part[t] = t < n ? x[t] : 0;
    __syncthreads();
    for (int h = (int)blockDim.x / 2; h > 0; h /= 2) {
        if (t < h)
            part[t] += part[t + h];
        if (!bug)
            __syncthreads();
    }
    if (t == 0)
        *sum = part[0];
}

__global__ void probe_warp(const int *x, int *out)
{
    const int lane = (int)threadIdx.x;
    int v = x[lane], scan = v;
    for (int n = 1; n < 32; n *= 2) {
        const int below = __shfl_up_sync(0xFFFFFFFFu, scan, (unsigned)n);
        scan += lane >= n ? below : 0;
    }
    out[lane] = scan;
    out[32 + lane] = __shfl_xor_sync(0xFFFFFFFFu, v, 5);
    out[64 + lane] = (int)__ballot_sync(0xFFFFFFFFu, v & 1);
    out[96 + lane] = __reduce_max_sync(0xFFFFFFFFu, v);
    out[128 + lane] = __shfl_sync(0xFFFFFFFFu, v, lane + 3, 8);
}

/* One warp: c = a b for a [16, 16] and b [8, 16] (column-major), by ldmatrix and mma.sync. */
__global__ void probe_mma(const uint16_t *a, const uint16_t *b, float *c)
{
    __shared__ __align__(16) uint16_t sa[16 * 16], sb[8 * 16];
    const int lane = (int)threadIdx.x;
    for (int i = lane; i < 256; i += 32)
        sa[i] = a[i];
    for (int i = lane; i < 128; i += 32)
        sb[i] = b[i];
    __syncthreads();
    uint32_t fa[4], fb[4]; /* of fb the first two are used */
    const float zero[4] = {0, 0, 0, 0};
    float d[4];
    load_matrix_x4(fa, sa + lane % 16 * 16 + lane / 16 * 8);
    load_matrix_x4(fb, sb + lane % 8 * 16 + lane / 8 % 2 * 8);
    mma_bf16(d, fa, fb, zero);
    for (int r = 0; r < 4; r++)
        c[(lane / 4 + r / 2 * 8) * 8 + lane % 4 * 2 + r % 2] = d[r];
}

__global__ void probe_mma_s8(const int8_t *a, const int8_t *b, int32_t *c)
{
    const int lane = (int)threadIdx.x, g = lane / 4, t = lane % 4;
    const uint32_t *wa = reinterpret_cast<const uint32_t *>(a), *wb = reinterpret_cast<const uint32_t *>(b);
    const uint32_t fa[4] = {wa[g * 8 + t], wa[(g + 8) * 8 + t], wa[g * 8 + 4 + t], wa[(g + 8) * 8 + 4 + t]}, fb[2] = {wb[g * 8 + t], wb[g * 8 + 4 + t]};
    int32_t d[4] = {0, 0, 0, 0};
    mma_s8(d, fa, fb, d);
    for (int r = 0; r < 4; r++)
        c[(g + r / 2 * 8) * 8 + t * 2 + r % 2] = d[r];
}

/* y = 2 x through a double-buffered pipeline of cp.async; tiles of 4 * 32 floats, one warp. bug 1: no wait before use. bug 2: nothing holds a lane
 * back from copying into the buffer that others still read. */
__global__ void probe_pipeline(const float *x, int n_tiles, float *y, int bug)
{
    __shared__ float4 tile[2][32];
    const int lane = (int)threadIdx.x;
    copy_async16(&tile[0][lane], x + 4 * lane, true);
    copy_async_commit();
    for (int i = 0; i < n_tiles; i++) {
        copy_async16(&tile[(i + 1) % 2][lane], x + (i + 1) % n_tiles * 128 + 4 * lane, i + 1 < n_tiles);
        copy_async_commit();
        if (bug != 1)
            copy_async_wait<1>();
        __syncwarp();
        const float4 v = tile[i % 2][31 - lane]; /* of another lane */
        float *to = y + i * 128 + 4 * (31 - lane);
        to[0] = 2 * v.x, to[1] = 2 * v.y, to[2] = 2 * v.z, to[3] = 2 * v.w;
        if (bug != 2)
            __syncwarp();
    }
    copy_async_wait<0>();
}

__global__ void probe_bugs(float *x, int n, int bug)
{
    const int t = (int)threadIdx.x;
    if (bug == 0 && t < 7) /* divergent barrier */
        named_barrier(1, 32);
    if (bug == 1 && t != 3) /* a lane of the mask never comes */
        __shfl_sync(0xFFFFFFFFu, t, 0);
    if (bug == 2) /* beyond the end */
        x[n + 1024 + t] = 1;
}

__global__ void probe_count(unsigned *counter, float *x, float value)
{
    atomicAdd(counter, 1u);
    if (threadIdx.x == 0)
        x[blockIdx.x] += value;
}

extern "C" {

int probe_run_block_sum(cudaStream_t s, const float *x, int n, int n_threads, float *sum, bool bug)
{
    return LAUNCH_ON(probe_block_sum, 1, (unsigned)n_threads, (size_t)n_threads * sizeof(float), s, x, n, sum, bug);
}

int probe_run_warp(cudaStream_t s, const int *x, int *out)
{
    return LAUNCH_ON(probe_warp, 1, 32, 0, s, x, out);
}

int probe_run_mma(cudaStream_t s, const uint16_t *a, const uint16_t *b, float *c)
{
    return LAUNCH_ON(probe_mma, 1, 32, 0, s, a, b, c);
}

int probe_run_mma_s8(cudaStream_t s, const int8_t *a, const int8_t *b, int32_t *c)
{
    return LAUNCH_ON(probe_mma_s8, 1, 32, 0, s, a, b, c);
}

int probe_run_pipeline(cudaStream_t s, const float *x, int n_tiles, float *y, int bug)
{
    return LAUNCH_ON(probe_pipeline, 1, 32, 0, s, x, n_tiles, y, bug);
}

int probe_run_bugs(cudaStream_t s, float *x, int n, int bug)
{
    return LAUNCH_ON(probe_bugs, 1, 32, 0, s, x, n, bug);
}

int probe_run_count(cudaStream_t s, unsigned n_blocks, unsigned *counter, float *x, float value)
{
    return LAUNCH_ON(probe_count, n_blocks, 64, 0, s, counter, x, value);
}

}
