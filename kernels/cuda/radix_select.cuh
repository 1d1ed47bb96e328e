/* Exact selection of the k largest floats by one block, without sorting: kernels/cpu/radix_select.h on a GPU. The k-th largest key is found byte by byte from the top, by
 * histograms of 256 bins in shared memory; then one pass collects indices in ascending order, threads finding their places by prefix sums over the block.
 * Larger value first, then lower index; NaN counts as -infinity, -0 as +0. All integers, so order and number of threads change nothing. */
#pragma once
#include "kernels/cuda/math.cuh"

enum { RADIX_BINS = 256 };

struct radix_shared {
    unsigned bins[RADIX_BINS];
    unsigned prefix, left;            /* of the key found so far; elements still to take among those that agree with it */
    unsigned warp_greater[32], warp_equal[32];
};

DEVICE uint32_t radix_key(float x)
{
    if (!(x == x))
        x = -INFINITY;
    const uint32_t u = __float_as_uint(x + 0.0f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* Counts this lane's element in its bin; by whole warps. Neighbours mostly share their upper bits, and atomics on one word take turns: the bin of the first lane is added once for all of its kind. */
DEVICE void radix_count(unsigned *bins, bool counts, unsigned bin)
{
    const unsigned lanes = __ballot_sync(0xFFFFFFFFu, counts);
    if (lanes == 0)
        return;
    const int leader = __ffs((int)lanes) - 1;
    const unsigned first = __shfl_sync(0xFFFFFFFFu, bin, leader), same = __ballot_sync(0xFFFFFFFFu, counts && bin == first);
    if ((int)threadIdx.x % 32 == leader)
        atomicAdd(&bins[first], (unsigned)__popc(same));
    else if (counts && bin != first)
        atomicAdd(&bins[bin], 1u);
}

/* The bin, counted from the largest, in which `left` elements are reached; left becomes what is to be taken from it. Warp 0. */
DEVICE void radix_choose_bin(struct radix_shared *r, int shift)
{
    const int lane = (int)threadIdx.x;
    unsigned own = 0, up_to = 0; /* bins 255 - 8 lane, ... of this lane; everything up to its last one */
    for (int i = 0; i < 8; i++)
        own += r->bins[255 - 8 * lane - i];
    up_to = own;
    for (int n = 1; n < 32; n *= 2) {
        const unsigned before = __shfl_up_sync(0xFFFFFFFFu, up_to, (unsigned)n);
        up_to += lane >= n ? before : 0;
    }
    unsigned left = r->left;
    __syncwarp();
    if (up_to >= left && up_to - own < left) { /* true of exactly one lane */
        int bin = 255 - 8 * lane;
        left -= up_to - own;
        while (left > r->bins[bin])
            left -= r->bins[bin--];
        r->prefix |= (unsigned)bin << shift;
        r->left = left;
    }
}

/* All threads of the block, a multiple of 32; 1 <= k <= n < 2^31. Afterwards r->prefix is the k-th largest key and r->left how many elements with it belong to the k largest. */
DEVICE void radix_find(struct radix_shared *r, const float *x, int64_t n, int64_t k)
{
    if (threadIdx.x == 0) {
        r->prefix = 0;
        r->left = (unsigned)k;
    }
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int b = (int)threadIdx.x; b < RADIX_BINS; b += (int)blockDim.x)
            r->bins[b] = 0;
        __syncthreads();
        const uint64_t above = (uint64_t)r->prefix >> (shift + 8);
        for (int64_t first = 0; first < n; first += blockDim.x) {
            const int64_t i = first + threadIdx.x;
            const uint32_t key = i < n ? radix_key(x[i]) : 0;
            radix_count(r->bins, i < n && (uint64_t)key >> (shift + 8) == above, key >> shift & 255);
        }
        __syncthreads();
        if (threadIdx.x < 32)
            radix_choose_bin(r, shift);
        __syncthreads();
    }
}

/* Indices of the k largest, ascending, after radix_find. */
DEVICE void radix_collect(struct radix_shared *r, const float *x, int64_t n, int32_t *indices)
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, n_warps = (int)blockDim.x / 32;
    const uint32_t key = r->prefix, n_equal = r->left;
    uint32_t n_greater_before = 0, n_equal_before = 0; /* of all chunks so far */
    for (int64_t first = 0; first < n; first += blockDim.x) {
        const int64_t i = first + threadIdx.x;
        const uint32_t u = i < n ? radix_key(x[i]) : 0;
        const bool greater = i < n && u > key, equal = i < n && u == key;
        const unsigned greater_lanes = __ballot_sync(0xFFFFFFFFu, greater), equal_lanes = __ballot_sync(0xFFFFFFFFu, equal), before = (1u << lane) - 1;
        if (lane == 0) {
            r->warp_greater[warp] = (unsigned)__popc(greater_lanes);
            r->warp_equal[warp] = (unsigned)__popc(equal_lanes);
        }
        __syncthreads();
        uint32_t g = n_greater_before + (unsigned)__popc(greater_lanes & before), e = n_equal_before + (unsigned)__popc(equal_lanes & before);
        for (int w = 0; w < n_warps; w++) {
            g += w < warp ? r->warp_greater[w] : 0;
            e += w < warp ? r->warp_equal[w] : 0;
            n_greater_before += r->warp_greater[w];
            n_equal_before += r->warp_equal[w];
        }
        /* Of the equal ones the first n_equal are taken, so this many stand before. */
        if (greater || (equal && e < n_equal))
            indices[g + (e < n_equal ? e : n_equal)] = (int32_t)i;
        __syncthreads();
    }
}
