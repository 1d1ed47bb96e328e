/* Reads one layer's slice of a block back to bf16: page_read, a block of 128 threads for each (KV head, sub-page), grid [8, n_kv_heads]. The bits of kernels/cpu/block_decode.c. */
#include "kernels/cuda/block_page.cuh"

__global__ void __launch_bounds__(128) block_decode_kernel(const struct block_layout layout, bool first, const uint8_t *slice, bf16_t *k, bf16_t *v, int64_t head_stride)
{
    const uint32_t subpage = blockIdx.x, head = blockIdx.y;
    const struct subpage_layout &l = first && subpage == 0 ? layout.sink : layout.page;
    const int64_t at = head * head_stride + (int64_t)subpage * SUBPAGE_TOKENS * layout.head_dim;
    page_read(l, slice + block_subpage_offset(&layout, first, head, subpage), (int)layout.head_dim, k + at, v + at);
}

extern "C" int cuda_block_decode(struct stream *s, const struct block_params *p)
{
    return cuda_error(LAUNCH(block_decode_kernel, dim3(BLOCK_SUBPAGES, p->layout->n_kv_heads), 128, 0, s->cuda, *p->layout, p->first, p->slice, p->k, p->v, p->head_stride));
}
