/* The one emulated device, error names, and a GEMM of plain loops in place of cuBLAS. */
#include "tests/simt/simt_private.h"
#include <cstdio>
#include <cublas_v2.h>

using namespace simt;

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    if (device == 0)
        device_set();
    return set_error(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *ret, int device)
{
    if (device != 0)
        return set_error(cudaErrorInvalidDevice);
    *ret = {};
    snprintf(ret->name, sizeof ret->name, "emulated sm_80");
    ret->totalGlobalMem = DEVICE_BYTES;
    ret->major = 8;
    ret->multiProcessorCount = 4;
    ret->sharedMemPerBlockOptin = SHARED_LIMIT;
    ret->canUseHostPointerForRegisteredMem = ret->hostRegisterReadOnlySupported = 1;
    return cudaSuccess;
}

#define EACH_ERROR(X)                                                                                                                                            \
    X(cudaSuccess) X(cudaErrorInvalidValue) X(cudaErrorMemoryAllocation) X(cudaErrorInitializationError) X(cudaErrorInvalidConfiguration) X(cudaErrorInsufficientDriver) X(cudaErrorCallRequiresNewerDriver) X(cudaErrorNoDevice) \
    X(cudaErrorInvalidDevice) X(cudaErrorNotReady) X(cudaErrorIllegalAddress) X(cudaErrorHostMemoryAlreadyRegistered) X(cudaErrorHostMemoryNotRegistered)          \
    X(cudaErrorLaunchFailure) X(cudaErrorNotSupported) X(cudaErrorStreamCaptureUnsupported) X(cudaErrorStreamCaptureInvalidated) X(cudaErrorStreamCaptureMerge) X(cudaErrorStreamCaptureUnmatched) \
    X(cudaErrorStreamCaptureUnjoined) X(cudaErrorStreamCaptureIsolation) X(cudaErrorCapturedEvent) X(cudaErrorStreamCaptureWrongThread)

const char *cudaGetErrorName(cudaError_t error)
{
    switch (error) {
#define NAME(e) \
    case e:     \
        return #e;
        EACH_ERROR(NAME)
#undef NAME
    }
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error)
{
    return cudaGetErrorName(error);
}

struct simt_cublas {
    cudaStream_t stream;
    void *workspace;
    size_t workspace_bytes;
};

cublasStatus_t cublasCreate(cublasHandle_t *handle)
{
    *handle = new simt_cublas{};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy(cublasHandle_t handle)
{
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream)
{
    handle->stream = stream;
    handle->workspace = nullptr; /* back to the library's own */
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void *workspace, size_t bytes)
{
    if ((uintptr_t)workspace % 256)
        return CUBLAS_STATUS_INVALID_VALUE;
    handle->workspace = workspace;
    handle->workspace_bytes = bytes;
    return CUBLAS_STATUS_SUCCESS;
}

static float bf16_value(const uint16_t *x)
{
    const uint32_t bits = (uint32_t)*x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* c[m, n] = alpha op(a) op(b) + beta c, column-major. The shapes and types that kernels/cuda asks for; the real library's rule that a leading dimension covers its
 * column is kept. */
cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n, int k, const void *alpha_, const void *a_, cudaDataType atype, int lda,
                            const void *b_, cudaDataType btype, int ldb, const void *beta_, void *c_, cudaDataType ctype, int ldc, cublasComputeType_t compute, cublasGemmAlgo_t)
{
    const float alpha = *(const float *)alpha_, beta = *(const float *)beta_;
    const uint16_t *a = (const uint16_t *)a_, *b = (const uint16_t *)b_;
    float *c = (float *)c_;
    if (transa != CUBLAS_OP_T || transb != CUBLAS_OP_N || atype != CUDA_R_16BF || btype != CUDA_R_16BF || ctype != CUDA_R_32F || compute != CUBLAS_COMPUTE_32F)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (m < 0 || n < 0 || k < 0 || lda < k || ldb < k || ldc < m || !handle->stream)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (!handle->workspace)
        report("cublasGemmEx", "without a workspace of the caller's, which the library would allocate");
    void *workspace = handle->workspace;
    const size_t workspace_bytes = handle->workspace_bytes < 4096 ? handle->workspace_bytes : 4096; /* some of it: enough to see who else uses it */
    const cudaError_t error = enqueue(handle->stream, "cublasGemmEx", [=] {
        memset(workspace, 0xA5, workspace_bytes);
        check::range_written(workspace, workspace_bytes);
        for (int i = 0; k > 0 && i < m; i++)
            check::range_read(a + (size_t)i * lda, sizeof *a * (size_t)k);
        for (int j = 0; k > 0 && j < n; j++)
            check::range_read(b + (size_t)j * ldb, sizeof *b * (size_t)k);
        for (int j = 0; m > 0 && j < n; j++) {
            if (beta != 0)
                check::range_read(c + (size_t)j * ldc, sizeof *c * (size_t)m);
            check::range_written(c + (size_t)j * ldc, sizeof *c * (size_t)m);
        }
        for (int j = 0; j < n; j++)
            for (int i = 0; i < m; i++) {
                float sum = 0;
                for (int l = 0; l < k; l++)
                    sum += bf16_value(a + (size_t)i * lda + l) * bf16_value(b + (size_t)j * ldb + l);
                float *y = c + (size_t)j * ldc + i;
                *y = alpha * sum + (beta != 0 ? beta * *y : 0); /* beta 0: what c held, NaN too, is not read */
            }
    });
    return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
