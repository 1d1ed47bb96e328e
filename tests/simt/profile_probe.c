/* Runs kernels whose accesses have known costs, for profile_check.py. */
#include "tests/simt/profile_kernels.cuh"
#include <stdio.h>
#include <stdlib.h>

enum { N = 1024 };

static void need(int error)
{
    if (error == cudaSuccess)
        return;
    printf("profile_probe: %s\n", cudaGetErrorName((cudaError_t)error));
    exit(1);
}

int main(void)
{
    cudaStream_t s;
    void *x, *y, *pinned;
    need(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    need(cudaMalloc(&x, N * sizeof(float)));
    need(cudaMalloc(&y, N * sizeof(float)));
    need(cudaHostAlloc(&pinned, N * sizeof(float), cudaHostAllocDefault));
    for (int i = 0; i < N; i++)
        ((float *)pinned)[i] = (float)i;
    need(cudaMemcpyAsync(x, pinned, N * sizeof(float), cudaMemcpyDefault, s));
    need(profile_run(s, x, y));
    need(profile_run_host(s, pinned, y));
    need(cudaStreamSynchronize(s));
    need(cudaStreamDestroy(s));
    need(cudaFree(x));
    need(cudaFree(y));
    need(cudaFreeHost(pinned));
    return 0;
}
