/* What the CUDA language lacks, as small functions over inline PTX (sm_80), and the launch macro below LAUNCH (submit.cuh). Kernels use these instead of PTX and instead of <<<>>>, so that
 * the emulator (a stand-in <cuda_runtime.h> that brings its own versions of all of this) can run the same sources; tests compile them with both.
 * Fragment layouts are those of the PTX ISA. */
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#ifdef __CUDACC__
/* In front of a loop whose indices must be constants, so that arrays stay in registers. */
#define UNROLL _Pragma("unroll")
/* The value is the launch's cudaError_t. */
#define LAUNCH_ON(kernel, grid, block, shared_bytes, stream, ...) (kernel<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__), cudaGetLastError())
#define DYNAMIC_SHARED(type, name)                              \
    extern __shared__ __align__(128) unsigned char dynamic_shared_[]; \
    type *name = reinterpret_cast<type *>(dynamic_shared_)

static __device__ __forceinline__ unsigned shared_address(const void *p)
{
    return (unsigned)__cvta_generic_to_shared(p);
}

/* 16 bytes to shared memory; zeros where !valid, and then `global` is not read. */
static __device__ __forceinline__ void copy_async16(void *shared, const void *global, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(valid ? 16 : 0) : "memory");
}

static __device__ __forceinline__ void copy_async_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until at most N groups of this thread are on their way. */
template <int N> static __device__ __forceinline__ void copy_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

static __device__ __forceinline__ void named_barrier(int id, int n_threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
}

static __device__ __forceinline__ void load_matrix_x4(uint32_t r[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

static __device__ __forceinline__ void load_matrix_x4_transposed(uint32_t r[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

/* Two bf16 in a register, the first in the lower half: bf16_from_float (math.cuh) of both but for which NaN a NaN becomes, in one instruction instead of a dozen. */
static __device__ __forceinline__ uint32_t bf16_pair(float low, float high)
{
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* d = a b + c: fragments of 16 x 16, 16 x 8, 16 x 8. */
static __device__ __forceinline__ void mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

/* The same for int8 operands, 16 x 32 and 32 x 8, with int32 sums. */
static __device__ __forceinline__ void mma_s8(int32_t d[4], const uint32_t a[4], const uint32_t b[2], const int32_t c[4])
{
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
#endif
