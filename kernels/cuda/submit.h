/* Everything that ops submit to a stream goes through here: copies, fills, events, GEMMs, and kernels by LAUNCH (submit.cuh). C, and C++ for the .cu files. In a step (step.h) it is noted, and
 * submitted or not, as the pass wants.
 * Each returns 0 or the negative errno of the CUDA error. */
#pragma once
#include "kernels/cuda/step.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Neither device memory nor pinned or registered: the driver makes a copy of it, or blocks. */
bool submit_is_pageable(const void *memory);

int submit_copy(struct stream *s, void *dst, const void *src, size_t bytes);
int submit_copy_rows(struct stream *s, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t n_rows);
/* n > 0 copies in no order. -ENOTSUP: the runtime or the driver has no such call. */
int submit_copies(struct stream *s, void *const *dsts, const void *const *srcs, const size_t *bytes, size_t n);
int submit_fill(struct stream *s, void *dst, int value, size_t bytes);
int submit_record(struct stream *s, cudaEvent_t event);
int submit_wait(struct stream *s, cudaEvent_t event);

enum submit_kind { SUBMIT_KERNEL, SUBMIT_COPY, SUBMIT_COPY_ROWS, SUBMIT_FILL, SUBMIT_RECORD, SUBMIT_WAIT, SUBMIT_GEMM };

/* y [n, n_rows] = x [n, n_cols] w^T + add * y; both operands bf16. */
struct gemm_shape {
    const bf16_t *x, *w;
    int64_t n, n_rows, n_cols, ld_x, ld_w;
    float *y;
    int64_t ld_y;
    double add; /* of a float */
};
int submit_gemm(struct stream *s, const struct gemm_shape *g);

/* Before anything else is submitted to s->cuda: by a library, or what cannot be part of a graph. -EAGAIN: not in this pass. */
static inline int submit_directly(struct stream *s)
{
    return step_block(s);
}

#ifdef __cplusplus
}
#endif
