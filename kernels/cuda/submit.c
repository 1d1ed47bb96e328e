#include "kernels/cuda/submit.h"
#include <errno.h>

int submit_copy(struct stream *s, void *dst, const void *src, size_t bytes)
{
    return cuda_error(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, s->cuda));
}

int submit_copy_rows(struct stream *s, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t n_rows)
{
    return cuda_error(cudaMemcpy2DAsync(dst, dst_pitch, src, src_pitch, width, n_rows, cudaMemcpyDefault, s->cuda));
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
    return cuda_error(cudaMemsetAsync(dst, value, bytes, s->cuda));
}

int submit_record(struct stream *s, cudaEvent_t event)
{
    return cuda_error(cudaEventRecord(event, s->cuda));
}

int submit_wait(struct stream *s, cudaEvent_t event)
{
    return cuda_error(cudaStreamWaitEvent(s->cuda, event, 0));
}

/* y row-major is [n_rows, n] column-major: y' = W x'. The handle is the device's; a new stream takes its workspace away. */
int submit_gemm(struct stream *s, const struct gemm_shape *g)
{
    struct device *device = s->device;
    const float one = 1;
    int r = 0;
    if (device->blas_stream != s->cuda) {
        device->blas_stream = NULL;
        r = cublas_error(cublasSetStream(device->blas, s->cuda));
        if (r == 0)
            r = cublas_error(cublasSetWorkspace(device->blas, device->blas_workspace, CUDA_BLAS_WORKSPACE_BYTES));
        if (r < 0)
            return r;
        device->blas_stream = s->cuda;
    }
    return cublas_error(cublasGemmEx(device->blas, CUBLAS_OP_T, CUBLAS_OP_N, (int)g->n_rows, (int)g->n, (int)g->n_cols, &one, g->w, CUDA_R_16BF, (int)g->ld, g->x, CUDA_R_16BF, (int)g->ld, &g->add, g->y,
                                     CUDA_R_32F, (int)g->ld_y, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

int submit_directly(struct stream *s)
{
    (void)s;
    return 0;
}
