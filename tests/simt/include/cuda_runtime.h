/* The CUDA language as far as kernels/cuda uses it, for a C++ compiler: a .cu file includes <cuda_runtime.h> and, with this folder on the include path, its kernels
 * run on the emulator (tests/simt/README.md). The wrappers at the end stand for inline PTX; their real versions are in kernels/cuda/ptx.cuh. */
#pragma once
#include <cmath>
#include <cstring>
#include <cuda_runtime_api.h>
#include <memory>
#include <tuple>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#ifdef SIMT_SERIAL
#define __shared__ static /* one block runs at a time, and sanitizers watch the borders of plain statics */
#else
#define __shared__ static thread_local /* a block for each stream may run, each on its own thread */
#endif

struct uint3 { unsigned x, y, z; };
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
#ifdef SIMT_CHECK
/* A vector is copied in one piece, as the hardware does it: the checker would see four accesses of a compiler that takes it apart. */
extern "C" void *simt_memcpy(void *to, const void *from, size_t bytes);
#define SIMT_VECTOR(T)                                                                     \
    T(const T &from) { simt_memcpy(this, &from, sizeof from); }                            \
    T &operator=(const T &from) { simt_memcpy(this, &from, sizeof from); return *this; }
/* constexpr: static __shared__ arrays of them need no code to begin. */
#define SIMT_VECTOR2(T, E) constexpr T() : x(0), y(0) {} T(E x_, E y_) : x(x_), y(y_) {} SIMT_VECTOR(T)
#define SIMT_VECTOR4(T, E) constexpr T() : x(0), y(0), z(0), w(0) {} T(E x_, E y_, E z_, E w_) : x(x_), y(y_), z(z_), w(w_) {} SIMT_VECTOR(T)
#else
#define SIMT_VECTOR2(T, E)
#define SIMT_VECTOR4(T, E)
#endif
struct alignas(8) float2 { float x, y; SIMT_VECTOR2(float2, float) };
struct alignas(16) float4 { float x, y, z, w; SIMT_VECTOR4(float4, float) };
struct alignas(8) uint2 { unsigned x, y; SIMT_VECTOR2(uint2, unsigned) };
struct alignas(16) uint4 { unsigned x, y, z, w; SIMT_VECTOR4(uint4, unsigned) };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace simt {

/* What the running thread sees of itself. */
struct ThreadView {
    uint3 thread, block;
    dim3 block_dim, grid_dim;
    unsigned char *dynamic_shared;
};
extern thread_local const ThreadView *self;

struct LaunchShape {
    const char *name;
    const void *function;
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
    size_t pack_bytes;
};
/* `pack` holds the copied arguments, call(pack) is one thread's run of the kernel. */
cudaError_t enqueue_kernel(const LaunchShape &shape, std::shared_ptr<void> pack, void (*call)(void *));
/* Reports a pointer that the GPU could not follow among the argument's words. In a struct (not a plain pointer) some words are numbers and padding: there the check is
 * narrower. */
void check_argument(const LaunchShape &shape, int index, const void *argument, size_t bytes, bool is_pointer);

/* Arguments are copied at launch, as on the GPU. */
template <class... P, class... A> cudaError_t launch(LaunchShape shape, void (*kernel)(P...), A &&...args)
{
    struct Pack {
        std::tuple<std::decay_t<P>...> arguments;
        void (*kernel)(P...);
    };
    std::shared_ptr<Pack> pack(new Pack{std::tuple<std::decay_t<P>...>(static_cast<std::decay_t<P>>(args)...), kernel});
    shape.function = reinterpret_cast<const void *>(kernel);
    shape.pack_bytes = sizeof(Pack);
    std::apply([&](const auto &...argument) {
        int index = 0;
        (check_argument(shape, index++, &argument, sizeof argument, std::is_pointer<std::decay_t<decltype(argument)>>::value), ...);
    }, pack->arguments);
    return enqueue_kernel(shape, pack, [](void *p) { std::apply(static_cast<Pack *>(p)->kernel, static_cast<Pack *>(p)->arguments); });
}

/* ---- what blocks a thread ---- */
enum BarrierKind { BARRIER_PLAIN, BARRIER_COUNT, BARRIER_OR };
/* n_threads 0: all that live. Returns what the kind says of `predicate` over the threads that met. */
int barrier(int id, unsigned n_threads, BarrierKind kind, int predicate);

/* Lanes of a warp meet with the same function and mask; the last one runs it over everyone's argument. */
struct Meeting {
    uint32_t mask;
    void *argument[32];
};
typedef void (*MeetingFn)(Meeting &meeting);
void meet(MeetingFn fn, uint32_t mask, void *argument);

struct Exchange {
    uint64_t value, result;
    int lane, width;
};
void exchange_index(Meeting &), exchange_up(Meeting &), exchange_down(Meeting &), exchange_xor(Meeting &);
void vote_ballot(Meeting &), vote_any(Meeting &), vote_all(Meeting &), vote_none(Meeting &);
void reduce_add(Meeting &), reduce_max_unsigned(Meeting &), reduce_min_unsigned(Meeting &), reduce_max_signed(Meeting &), reduce_min_signed(Meeting &);

template <class T> T exchange(MeetingFn fn, uint32_t mask, T value, int lane, int width)
{
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "what a shuffle can carry");
    Exchange e = {0, 0, lane, width};
    memcpy(&e.value, &value, sizeof value);
    meet(fn, mask, &e);
    memcpy(&value, &e.result, sizeof value);
    return value;
}

inline uint32_t vote(MeetingFn fn, uint32_t mask, uint32_t value)
{
    Exchange e = {value, 0, 0, 32};
    meet(fn, mask, &e);
    return (uint32_t)e.result;
}

struct MatrixMultiply {
    void *d;
    const uint32_t *a, *b;
    const void *c;
};
void multiply_bf16(Meeting &), multiply_s8(Meeting &);
struct MatrixLoad {
    uint32_t *registers;
    const void *row;
};
void load_matrix(Meeting &), load_matrix_transposed(Meeting &);

void copy_async(void *dst, const void *src, unsigned n_bytes, unsigned n_valid);
void copy_commit();
void copy_wait(unsigned n_groups_left);

} /* namespace simt */

#define threadIdx (::simt::self->thread)
#define blockIdx (::simt::self->block)
#define blockDim (::simt::self->block_dim)
#define gridDim (::simt::self->grid_dim)

#define LAUNCH_ON(kernel, grid, block, shared_bytes, stream, ...) \
    ::simt::launch(::simt::LaunchShape{#kernel, nullptr, dim3(grid), dim3(block), (size_t)(shared_bytes), (stream), 0}, kernel, ##__VA_ARGS__)
#define UNROLL
#define DYNAMIC_SHARED(type, name) type *name = reinterpret_cast<type *>(::simt::self->dynamic_shared)

/* ---- barriers and fences ---- */
inline void __syncthreads() { simt::barrier(0, 0, simt::BARRIER_PLAIN, 0); }
inline int __syncthreads_count(int p) { return simt::barrier(0, 0, simt::BARRIER_COUNT, p != 0); }
inline int __syncthreads_or(int p) { return simt::barrier(0, 0, simt::BARRIER_OR, p != 0); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { simt::vote(simt::vote_none, mask, 0); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_ACQ_REL); } /* the checked build tells the two by their order */

/* ---- warp ---- */
template <class T> T __shfl_sync(unsigned m, T v, int lane, int width = 32) { return simt::exchange(simt::exchange_index, m, v, lane, width); }
template <class T> T __shfl_up_sync(unsigned m, T v, unsigned n, int width = 32) { return simt::exchange(simt::exchange_up, m, v, (int)n, width); }
template <class T> T __shfl_down_sync(unsigned m, T v, unsigned n, int width = 32) { return simt::exchange(simt::exchange_down, m, v, (int)n, width); }
template <class T> T __shfl_xor_sync(unsigned m, T v, int x, int width = 32) { return simt::exchange(simt::exchange_xor, m, v, x, width); }
inline unsigned __ballot_sync(unsigned m, int p) { return simt::vote(simt::vote_ballot, m, p != 0); }
inline int __any_sync(unsigned m, int p) { return (int)simt::vote(simt::vote_any, m, p != 0); }
inline int __all_sync(unsigned m, int p) { return (int)simt::vote(simt::vote_all, m, p != 0); }
inline unsigned __reduce_add_sync(unsigned m, unsigned v) { return simt::vote(simt::reduce_add, m, v); }
inline unsigned __reduce_max_sync(unsigned m, unsigned v) { return simt::vote(simt::reduce_max_unsigned, m, v); }
inline unsigned __reduce_min_sync(unsigned m, unsigned v) { return simt::vote(simt::reduce_min_unsigned, m, v); }
inline int __reduce_max_sync(unsigned m, int v) { return (int)simt::vote(simt::reduce_max_signed, m, (unsigned)v); }
inline int __reduce_min_sync(unsigned m, int v) { return (int)simt::vote(simt::reduce_min_signed, m, (unsigned)v); }

/* ---- atomics ---- */
inline int atomicAdd(int *p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
inline unsigned atomicAdd(unsigned *p, unsigned v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
inline unsigned long long atomicAdd(unsigned long long *p, unsigned long long v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
template <class T> T atomicMax(T *p, T v)
{
    T old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
    while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    return old;
}
template <class T> T atomicMin(T *p, T v)
{
    T old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
    while (old > v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    return old;
}
inline unsigned atomicExch(unsigned *p, unsigned v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }
template <class T> T atomicCAS(T *p, T expected, T v)
{
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
}

/* ---- arithmetic that the host's headers lack ---- */
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
inline float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline int __dp4a(int a, int b, int c)
{
    for (int i = 0; i < 32; i += 8)
        c += (int8_t)(a >> i) * (int8_t)(b >> i);
    return c;
}
template <class T> T __ldg(const T *p) { return *p; }
template <class A, class B> auto min(A a, B b) { return a < b ? a : b; }
template <class A, class B> auto max(A a, B b) { return a > b ? a : b; }

/* ---- what is inline PTX on the device: kernels/cuda/ptx.cuh ---- */
inline void copy_async16(void *shared, const void *global, bool valid) { simt::copy_async(shared, global, 16, valid ? 16 : 0); }
inline void copy_async_commit() { simt::copy_commit(); }
template <int N> void copy_async_wait() { simt::copy_wait(N); }
inline void named_barrier(int id, int n_threads) { simt::barrier(id, (unsigned)n_threads, simt::BARRIER_PLAIN, 0); }
inline void load_matrix_x4(uint32_t r[4], const void *row)
{
    simt::MatrixLoad load = {r, row};
    simt::meet(simt::load_matrix, 0xFFFFFFFFu, &load);
}
inline void load_matrix_x4_transposed(uint32_t r[4], const void *row)
{
    simt::MatrixLoad load = {r, row};
    simt::meet(simt::load_matrix_transposed, 0xFFFFFFFFu, &load);
}
inline uint32_t bf16_pair(float low, float high)
{
    const float values[2] = {low, high};
    uint32_t pair = 0;
    for (int i = 0; i < 2; i++) {
        const uint32_t u = __float_as_uint(values[i]), bits = values[i] != values[i] ? 0x7FFFu : (u + 0x7FFFu + (u >> 16 & 1)) >> 16;
        pair |= bits << 16 * i;
    }
    return pair;
}
/* d = a b + c, fragments of 16 x 16, 16 x 8 and 16 x 8. */
inline void mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4])
{
    simt::MatrixMultiply m = {d, a, b, c};
    simt::meet(simt::multiply_bf16, 0xFFFFFFFFu, &m);
}
/* The same for int8 operands, 16 x 32 and 32 x 8, and int32 sums. */
inline void mma_s8(int32_t d[4], const uint32_t a[4], const uint32_t b[2], const int32_t c[4])
{
    simt::MatrixMultiply m = {d, a, b, c};
    simt::meet(simt::multiply_s8, 0xFFFFFFFFu, &m);
}
