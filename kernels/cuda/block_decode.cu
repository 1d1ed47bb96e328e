/* Reads one layer's slices of blocks back to bf16: page_read, a block of 128 threads for each (KV head, sub-page), grid [8, n_kv_heads, n]. The bits of kernels/cpu/block_decode.c. */
#include "kernels/cuda/block_page.cuh"

__global__ void __launch_bounds__(128) block_decode_kernel(const struct block_layout layout, const struct block_job *jobs)
{
    const struct block_job &job = jobs[blockIdx.z];
    const uint32_t subpage = blockIdx.x, head = blockIdx.y;
    const struct subpage_layout l = page_layout(layout, job.first && subpage == 0);
    const int64_t at = head * job.head_stride + (int64_t)subpage * SUBPAGE_TOKENS * layout.head_dim;
    page_read(l, job.slice + block_subpage_offset(&layout, job.first, head, subpage), (int)layout.head_dim, job.k + at, job.v + at);
    index_copy(layout, job, head, subpage);
}

extern "C" int cuda_block_decode(struct stream *s, const struct block_params *blocks, int n)
{
    const struct block_job *jobs;
    if (n <= 0)
        return n < 0 ? -EINVAL : 0;
    const int r = block_jobs(s, blocks, n, &jobs);
    if (r < 0)
        return r;
    return LAUNCH(block_decode_kernel, dim3(BLOCK_SUBPAGES, blocks->layout->n_kv_heads, (unsigned)n), 128, 0, s, *blocks->layout, jobs);
}
