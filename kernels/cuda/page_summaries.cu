/* Summaries of slow sub-pages for the scorers minmax, mean and meanvar, in the model's own basis: the bytes of kernels/cpu/page_summaries.c. A sub-page a block, a dim a thread, which holds its 16
 * tokens in registers; the rotation is undone by butterflies through shared memory (16 KiB). Blocks, masks and `summaries` are device memory. */
#include "kernels/cuda/block_page.cuh"
#include "kernels/kv_page.h"
#include <errno.h>

enum { SUMMARY_MAX_DIM = 256 };

/* What fp16 cannot hold is held at its largest number. */
DEVICE uint16_t fp16_held(float x)
{
    return fp16_from_float(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x);
}

__global__ void __launch_bounds__(SUMMARY_MAX_DIM) page_summaries_kernel(const struct block_layout layout, enum page_scorer scorer, const struct slow_pages slow, int first, uint8_t *summaries,
                                                                              const uint8_t *slices, size_t slice_stride)
{
    __shared__ float x[SUBPAGE_TOKENS][SUMMARY_MAX_DIM];
    const int subpage = first + (int)blockIdx.x, c = (int)threadIdx.x, d = (int)layout.head_dim, block = d & -d, n_vectors = page_summary_vectors_of(scorer);
    const uint32_t tokens = slow.masks[subpage];
    uint16_t *summary = reinterpret_cast<uint16_t *>(summaries + (size_t)subpage * n_vectors * d * sizeof(uint16_t));
    float key[SUBPAGE_TOKENS];
    if (tokens == 0) {
        for (int v = 0; c < d && v < n_vectors; v++)
            summary[v * d + c] = 0;
        return;
    }
    const uint8_t *page = kv_summary_page(&layout, &slow, slices, slice_stride, first / BLOCK_SUBPAGES, subpage);
    UNROLL for (int t = 0; t < SUBPAGE_TOKENS; t++)
        key[t] = c < d ? bf16_to_float(page_key(subpage == 0 ? layout.sink : layout.page, page, t, c)) : 0.0f;
    for (int h = 1; h < block; h *= 2) {
        UNROLL for (int t = 0; t < SUBPAGE_TOKENS; t++)
            x[t][c] = key[t];
        __syncthreads();
        UNROLL for (int t = 0; t < SUBPAGE_TOKENS; t++)
            key[t] = c & h ? x[t][c ^ h] - key[t] : key[t] + x[t][c ^ h];
        __syncthreads();
    }
    const float scale = 1.0f / sqrtf((float)block), n = (float)__popc(tokens);
    float least = INFINITY, most = -INFINITY, sum = 0, squares = 0;
    UNROLL for (int t = 0; t < SUBPAGE_TOKENS; t++) {
        key[t] *= scale;
        if (tokens >> t & 1) {
            least = key[t] < least ? key[t] : least;
            most = key[t] > most ? key[t] : most;
            sum += key[t];
        }
    }
    const float mean = sum / n;
    UNROLL for (int t = 0; t < SUBPAGE_TOKENS; t++)
        if (tokens >> t & 1)
            squares = fmaf(key[t] - mean, key[t] - mean, squares);
    if (c >= d)
        return;
    const bool minmax = scorer == PAGE_SCORER_MINMAX;
    summary[c] = fp16_held(minmax ? least : mean);
    if (n_vectors == 2)
        summary[d + c] = fp16_held(minmax ? most : squares / n);
}

extern "C" int cuda_page_summaries(struct stream *s, const struct page_summary_params *p)
{
    const int n = p->slow.n_subpages - p->first;
    if (p->first < 0 || n < 0 || !p->layout || (unsigned)p->scorer >= PAGE_SCORER_COUNT || page_summary_vectors(p->scorer) == 0)
        return -EINVAL;
    if (p->layout->head_dim > SUMMARY_MAX_DIM)
        return -ENOTSUP;
    if (n == 0)
        return 0;
    return LAUNCH(page_summaries_kernel, (unsigned)n, (p->layout->head_dim + 31) / 32 * 32, 0, s, *p->layout, p->scorer, p->slow, p->first, p->summaries, p->slices, p->slice_stride);
}
