/* Columns of rows [n_rows] of ld floats that each rank has a part of, to and from the contiguous form that NCCL gathers: parts [n_ranks][n_rows][width], where a rank with fewer than `width` columns
 * leaves the rest of its rows as they are. An element a thread. */
#include "kernels/cuda/gather_columns.cuh"
#include "kernels/cuda/elementwise.cuh"

__global__ void pack_columns_kernel(const struct gather_columns g, float *parts)
{
    EACH_ELEMENT(i, g.n_rows * g.width)
    {
        const int64_t row = i / g.width, c = i % g.width;
        if (c < g.n[g.rank])
            parts[g.rank * g.n_rows * g.width + i] = g.rows[row * g.ld + g.first[g.rank] + c];
    }
}

__global__ void unpack_columns_kernel(const struct gather_columns g, const float *parts)
{
    EACH_ELEMENT(i, g.n_ranks * g.n_rows * g.width)
    {
        const int64_t rank = i / (g.n_rows * g.width), row = i / g.width % g.n_rows, c = i % g.width;
        if (rank != g.rank && c < g.n[rank])
            g.rows[row * g.ld + g.first[rank] + c] = parts[i];
    }
}

extern "C" int cuda_pack_columns(struct stream *s, const struct gather_columns *g, float *parts)
{
    return LAUNCH(pack_columns_kernel, blocks_for(g->n_rows * g->width), BLOCK_THREADS, 0, s, *g, parts);
}

extern "C" int cuda_unpack_columns(struct stream *s, const struct gather_columns *g, const float *parts)
{
    return LAUNCH(unpack_columns_kernel, blocks_for(g->n_ranks * g->n_rows * g->width), BLOCK_THREADS, 0, s, *g, parts);
}
