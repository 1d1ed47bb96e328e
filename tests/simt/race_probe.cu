#include "tests/simt/race_probe.cuh"
#include "kernels/cuda/ptx.cuh"

static const unsigned ALL = 0xFFFFFFFFu;

__global__ void reverse_shuffle(const int *x, int *y, bool bug)
{
    __shared__ int part[32];
    const int lane = (int)threadIdx.x;
    part[lane] = x[lane];
    if (!bug)
        __syncwarp();
    const int first = __shfl_sync(ALL, x[lane], 0);
    y[lane] = part[31 - lane] + first - x[0];
}

__global__ void reverse_vote(const int *x, int *y, bool bug)
{
    __shared__ int part[32];
    const int lane = (int)threadIdx.x;
    part[lane] = x[lane];
    if (bug)
        __any_sync(ALL, lane == 0);
    else
        __syncwarp();
    y[lane] = part[31 - lane];
}

__global__ void reverse_async(const int *x, int *y, bool bug)
{
    __shared__ __align__(16) int part[32];
    const int lane = (int)threadIdx.x;
    if (lane < 8)
        copy_async16(part + 4 * lane, x + 4 * lane, true);
    copy_async_commit();
    copy_async_wait<0>();
    if (bug)
        __any_sync(ALL, 1);
    else
        __syncwarp();
    y[lane] = part[31 - lane];
}

/* Four matrices, of which the first is looked at. */
__global__ void rows(const uint16_t *x, uint16_t *y, bool bug)
{
    __shared__ __align__(16) uint16_t part[32][8];
    const int lane = (int)threadIdx.x;
    for (int c = 0; c < 8; c++)
        part[lane][c] = x[lane % 8 * 8 + c];
    if (!bug)
        __syncwarp();
    uint32_t r[4];
    load_matrix_x4(r, part[lane]);
    y[2 * lane] = (uint16_t)r[0];
    y[2 * lane + 1] = (uint16_t)(r[0] >> 16);
}

__global__ void rounds(const int *x, int *y, bool bug)
{
    __shared__ int part[32];
    const int lane = (int)threadIdx.x;
    for (int round = 0; round < 2; round++) {
        part[lane] = x[32 * round + lane];
        __syncwarp();
        y[32 * round + lane] = part[31 - lane];
        if (bug)
            __any_sync(ALL, 1);
        else
            __syncwarp();
    }
}

__global__ void same_value(int *y, bool bug)
{
    if (bug || threadIdx.x == 0)
        *y = 7;
}

__global__ void count(int *y, bool bug)
{
    if (bug)
        *y = *y + 1;
    else
        atomicAdd(y, 1);
}

__global__ void last_block(int *part, unsigned *counter, int *y, bool bug)
{
    part[blockIdx.x] = (int)blockIdx.x + 1;
    if (!bug)
        __threadfence();
    if (atomicAdd(counter, 1u) != gridDim.x - 1)
        return;
    if (!bug)
        __threadfence();
    int sum = 0;
    for (unsigned i = 0; i < gridDim.x; i++)
        sum += part[i];
    *y = sum;
}

__global__ void largest(const int *x, int n, int *y, bool bug)
{
    __shared__ int part[32];
    const int lane = (int)threadIdx.x;
    if (lane < n || !bug)
        part[lane] = lane < n ? x[lane] : -1;
    __syncthreads();
    if (lane > 0)
        return;
    int most = -1;
    for (int i = 0; i < 32; i++)
        most = max(most, part[i]);
    *y = most;
}

__global__ void sum(const int *x, int n, int *y, bool bug)
{
    int total = 0;
    for (int i = 0; i < n + (bug ? 1 : 0); i++) {
        const int v = x[i];
        total += i < n ? v : v > 1000; /* the emulator fills memory with -1 */
    }
    *y = total;
}

__global__ void warps(const int *x, int *y, bool bug)
{
    __shared__ int part[32];
    const int t = (int)threadIdx.x, lane = t % 32;
    if (t < 32)
        part[lane] = x[lane];
    named_barrier(bug ? 1 + t / 32 : 1, bug ? 32 : 64);
    if (t >= 32)
        y[lane] = part[31 - lane];
}

__global__ void counter(int *y, bool bug)
{
    __shared__ int n;
    if (threadIdx.x == 0)
        n = 0;
    __syncthreads();
    atomicAdd(&n, bug && threadIdx.x >= 32 ? 0 : 1);
    if (bug)
        __syncwarp();
    else
        __syncthreads();
    if (threadIdx.x == 0)
        *y = n * (bug ? 2 : 1);
}

__global__ void follow(const int *const *x, int *y)
{
    *y = **x;
}

int race_probe_reverse_shuffle(cudaStream_t s, const int *x, int *y, bool bug) { return LAUNCH_ON(reverse_shuffle, 1, 32, 0, s, x, y, bug); }
int race_probe_reverse_vote(cudaStream_t s, const int *x, int *y, bool bug) { return LAUNCH_ON(reverse_vote, 1, 32, 0, s, x, y, bug); }
int race_probe_reverse_async(cudaStream_t s, const int *x, int *y, bool bug) { return LAUNCH_ON(reverse_async, 1, 32, 0, s, x, y, bug); }
int race_probe_rows(cudaStream_t s, const uint16_t *x, uint16_t *y, bool bug) { return LAUNCH_ON(rows, 1, 32, 0, s, x, y, bug); }
int race_probe_rounds(cudaStream_t s, const int *x, int *y, bool bug) { return LAUNCH_ON(rounds, 1, 32, 0, s, x, y, bug); }
int race_probe_same_value(cudaStream_t s, int *y, bool bug) { return LAUNCH_ON(same_value, 1, 64, 0, s, y, bug); }
int race_probe_count(cudaStream_t s, int n_blocks, int *y, bool bug) { return LAUNCH_ON(count, (unsigned)n_blocks, 1, 0, s, y, bug); }
int race_probe_last_block(cudaStream_t s, int n_blocks, int *part, unsigned *n, int *y, bool bug) { return LAUNCH_ON(last_block, (unsigned)n_blocks, 1, 0, s, part, n, y, bug); }
int race_probe_largest(cudaStream_t s, const int *x, int n, int *y, bool bug) { return LAUNCH_ON(largest, 1, 32, 0, s, x, n, y, bug); }
int race_probe_sum(cudaStream_t s, const int *x, int n, int *y, bool bug) { return LAUNCH_ON(sum, 1, 1, 0, s, x, n, y, bug); }
int race_probe_warps(cudaStream_t s, const int *x, int *y, bool bug) { return LAUNCH_ON(warps, 1, 64, 0, s, x, y, bug); }
int race_probe_counter(cudaStream_t s, int *y, bool bug) { return LAUNCH_ON(counter, 1, 64, 0, s, y, bug); }
int race_probe_follow(cudaStream_t s, const int *const *x, int *y) { return LAUNCH_ON(follow, 1, 1, 0, s, x, y); }
