#include "kernels/cuda/submit.h"
#include "kernels/cuda/step.h"
#include <errno.h>

/* Notes the submission where a step wants it. Whether that is all there is to do. */
static bool noted(struct stream *s, enum submit_kind kind, const void *what, size_t bytes)
{
    struct step *step = step_noting(s);
    if (!step)
        return false;
    step_note_begin(step, s, kind);
    step_note(step, what, bytes);
    return step->mode == STEP_QUIET;
}

bool submit_is_pageable(const void *memory)
{
    struct cudaPointerAttributes attributes;
    return cuda_error(cudaPointerGetAttributes(&attributes, memory)) == 0 && attributes.type == cudaMemoryTypeUnregistered;
}

/* A graph would read such memory, and wait for it, when it is launched. */
static int block_pageable(struct stream *s, const void *dst, const void *src)
{
    struct step *step = step_noting(s);
    return step && step->mode == STEP_QUIET && (submit_is_pageable(dst) || submit_is_pageable(src)) ? step_block(s) : 0;
}

int submit_copy(struct stream *s, void *dst, const void *src, size_t bytes)
{
    const uintptr_t what[] = {(uintptr_t)dst, (uintptr_t)src, bytes};
    const int r = block_pageable(s, dst, src);
    if (r < 0)
        return r;
    return noted(s, SUBMIT_COPY, what, sizeof what) ? 0 : cuda_error(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, s->cuda));
}

int submit_copy_rows(struct stream *s, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t n_rows)
{
    const uintptr_t what[] = {(uintptr_t)dst, dst_pitch, (uintptr_t)src, src_pitch, width, n_rows};
    const int r = block_pageable(s, dst, src);
    if (r < 0)
        return r;
    return noted(s, SUBMIT_COPY_ROWS, what, sizeof what) ? 0 : cuda_error(cudaMemcpy2DAsync(dst, dst_pitch, src, src_pitch, width, n_rows, cudaMemcpyDefault, s->cuda));
}

/* CUDA 12.8 has the call with other arguments. */
#if CUDART_VERSION >= 13000
int submit_copies(struct stream *s, void *const *dsts, const void *const *srcs, const size_t *bytes, size_t n)
{
    struct cudaMemcpyAttributes attributes = {.srcAccessOrder = cudaMemcpySrcAccessOrderStream, .flags = cudaMemcpyFlagPreferOverlapWithCompute};
    size_t first = 0;
    int r = submit_directly(s);
    if (r < 0)
        return r;
    const cudaError_t error = cudaMemcpyBatchAsync(dsts, srcs, bytes, n, &attributes, &first, 1, s->cuda);
    if (error != cudaErrorNotSupported && error != cudaErrorCallRequiresNewerDriver && error != cudaErrorInsufficientDriver)
        return cuda_error(error);
    cudaGetLastError();
    return -ENOTSUP;
}
#else
int submit_copies(struct stream *s, void *const *dsts, const void *const *srcs, const size_t *bytes, size_t n)
{
    (void)s, (void)dsts, (void)srcs, (void)bytes, (void)n;
    return -ENOTSUP;
}
#endif

int submit_fill(struct stream *s, void *dst, int value, size_t bytes)
{
    const uintptr_t what[] = {(uintptr_t)dst, (uintptr_t)value, bytes};
    return noted(s, SUBMIT_FILL, what, sizeof what) ? 0 : cuda_error(cudaMemsetAsync(dst, value, bytes, s->cuda));
}

int submit_record(struct stream *s, cudaEvent_t event)
{
    return noted(s, SUBMIT_RECORD, &event, sizeof event) ? 0 : cuda_error(cudaEventRecord(event, s->cuda));
}

int submit_wait(struct stream *s, cudaEvent_t event)
{
    return noted(s, SUBMIT_WAIT, &event, sizeof event) ? 0 : cuda_error(cudaStreamWaitEvent(s->cuda, event, 0));
}

/* cuBLAS takes the workspace away with every new stream. */
static int blas_take(struct stream *s)
{
    struct device *device = s->device;
    if (device->blas_stream == s->cuda)
        return 0;
    device->blas_stream = NULL;
    int r = cublas_error(cublasSetStream(device->blas, s->cuda));
    if (r == 0)
        r = cublas_error(cublasSetWorkspace(device->blas, device->blas_workspace, CUDA_BLAS_WORKSPACE_BYTES));
    if (r == 0)
        device->blas_stream = s->cuda;
    return r;
}

/* y row-major is [n_rows, n] column-major: y' = W x'. */
int submit_gemm(struct stream *s, const struct gemm_shape *g)
{
    const float one = 1, add = (float)g->add;
    if (noted(s, SUBMIT_GEMM, g, sizeof *g))
        return 0;
    const int r = blas_take(s);
    return r < 0 ? r : cublas_error(cublasGemmEx(s->device->blas, CUBLAS_OP_T, CUBLAS_OP_N, (int)g->n_rows, (int)g->n, (int)g->n_cols, &one, g->w, CUDA_R_16BF, (int)g->ld_w, g->x, CUDA_R_16BF,
                                                 (int)g->ld_x, &add, g->y, CUDA_R_32F, (int)g->ld_y, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}
