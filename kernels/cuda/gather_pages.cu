/* The gather: scattered sub-pages of the registered pool into device memory. A warp a page, 16 bytes a load, GATHER_LOADS loads of a lane on their way together; few blocks, because on an H200
 * eight of them read 46 of the 55 GB/s that PCIe has and slow a memory-bound kernel beside them by 6 %, where 32 read no more and slow it by 42 % (shared notes, docs/design.md).
 * The grid is fixed and the number of copies is read from device memory, so nothing here needs the host. */
#include "kernels/cuda/page_cache.cuh"

enum { GATHER_BLOCKS = 8, GATHER_THREADS = 512, GATHER_LOADS = 8 };

DEVICE void copy_page(const struct page_copy &copy, int lane)
{
    const uint4 *src = reinterpret_cast<const uint4 *>(copy.src);
    uint4 *dst = reinterpret_cast<uint4 *>(copy.dst);
    const int n = (int)(copy.bytes / sizeof(uint4));
    for (int first = lane; first < n; first += 32 * GATHER_LOADS) {
        uint4 piece[GATHER_LOADS];
        UNROLL for (int i = 0; i < GATHER_LOADS; i++)
            if (first + 32 * i < n)
                piece[i] = src[first + 32 * i];
        UNROLL for (int i = 0; i < GATHER_LOADS; i++)
            if (first + 32 * i < n)
                dst[first + 32 * i] = piece[i];
    }
}

__global__ void __launch_bounds__(GATHER_THREADS) gather_pages_kernel(const struct page_cache_args a)
{
    const unsigned lane = threadIdx.x % 32, warps = gridDim.x * (GATHER_THREADS / 32), n_copies = a.state->n_copies;
    for (unsigned i = blockIdx.x * (GATHER_THREADS / 32) + threadIdx.x / 32; i < n_copies; i += warps)
        copy_page(a.copies[i], (int)lane);
}

int gather_pages(const struct page_cache_args *args, int n, struct stream *stream)
{
    /* No more blocks than pages could keep busy. */
    const int64_t blocks = ceil_div64(n, GATHER_THREADS / 32);
    return LAUNCH(gather_pages_kernel, (unsigned)(blocks < (int64_t)GATHER_BLOCKS ? blocks : (int64_t)GATHER_BLOCKS), GATHER_THREADS, 0, stream, *args);
}
