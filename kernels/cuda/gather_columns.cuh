/* gather_columns.cu's calls, for nccl_collective.c: C, and C++ for the .cu file. */
#pragma once
#include "kernels/cuda/cuda_private.h"
#ifdef __cplusplus
extern "C" {
#endif

struct gather_columns {
    float *rows;               /* [n_rows] of ld floats, device */
    int64_t n_rows, ld, width;
    int rank, n_ranks;
    int32_t n[COLLECTIVE_MAX_RANKS];     /* columns of each rank, <= width */
    int64_t first[COLLECTIVE_MAX_RANKS]; /* where they begin in a row */
};

int cuda_pack_columns(struct stream *s, const struct gather_columns *g, float *parts);
int cuda_unpack_columns(struct stream *s, const struct gather_columns *g, const float *parts);

#ifdef __cplusplus
}
#endif
