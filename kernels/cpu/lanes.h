/* Sixteen lanes of fp32 or int32: the arithmetic in which every op of the CPU backend is written once.
 *
 * Each op file is compiled three times, for plain C, AVX2 and AVX-512 (CMakeLists.txt sets CPU_ISA_BUILD and the flags). `v16` is an array of 16 floats, two
 * __m256 or one __m512, and each function below does the same thing to each lane, so that the three builds agree with ==. External functions of an op file
 * are named by ISA(): ISA(rmsnorm) is rmsnorm_plain, rmsnorm_avx2 or rmsnorm_avx512. Everything else in these files is `static`: a function that the linker
 * may pick from another build would bring instructions that the processor lacks.
 *
 * Rules that keep the bits equal: an element's value must not depend on the lane it is in; sums over elements go to lane i % 16 in the order of i, and end in
 * v16_reduce_add; a multiply and an add are fused where the source says v16_fma, and nowhere else. `min` and `max` return their second argument when either
 * is NaN or both are zeros, as the x86 instructions do.
 *
 * What each header provides (x, a, b, c are v16; i is v16i; m is the mask v16m):
 *   v16_zero, v16_set1, v16_load, v16_store           any alignment
 *   v16_load_n, v16_store_n                           first n lanes, 0..16; the other lanes read as 0, memory beyond is not touched
 *   v16_load_bf16, v16_load_fp16, v16_store_bf16, v16_store_fp16   16 uint16; round to nearest even
 *   v16_add, sub, mul, div, fma(a, b, c) = a * b + c, min, max, neg, abs, sqrt
 *   v16_eq, v16_lt, v16_le -> v16m; v16_select(m, a, b) = m ? a : b; v16m_bits(m): bit i is lane i
 *   v16_swap1, 2, 4, 8                                lane i takes lane i ^ 1, 2, 4, 8
 *   v16_reduce_add, v16_reduce_max -> float           the tree: lane i + lane i+8, then +4, +2, +1
 *   v16_reduce_add16(x[16]) -> v16                    lane i is v16_reduce_add(x[i])
 *   v16i_zero, set1, load, store, add, sub, mul (low 32 bits), and, or, xor, shl, shr (logical), sar (shift counts 0..31), eq, select
 *   v16i_load_u8, v16i_load_i8                        16 bytes, widened
 *   v16i_store_u8                                     16 bytes; lanes must be in 0..255
 *   v16_bits, v16_from_bits                           the same bits as another type
 *   v16_from_i32                                      exact up to 2^24, else nearest even
 *   v16_to_i32                                        nearest even; |x| <= 2^22
 *   v16i_dot4_u8i8(acc, u, s)                         acc[i] += sum_j u8[4i+j] * s8[4i+j] over 64 bytes each; pairs must stay within int16:
 *                                                     with u <= 255, |s| <= 64 */
#pragma once
#include "kernels/cpu/half.h"
#include <math.h>
#include <stddef.h>
#include <stdint.h>

/* Vector code needs its small functions inlined. The plain version is the reference and need not be fast, and sanitizers blow inlined bodies up a hundredfold: there it
 * would only cost minutes of compile time. */
#if defined(__SANITIZE_ADDRESS__) || defined(TIDEPOOL_SANITIZED)
#define ALWAYS_INLINE static __attribute__((noinline, unused))
#elif CPU_ISA_BUILD == 0
#define ALWAYS_INLINE static inline __attribute__((unused))
#else
#define ALWAYS_INLINE static inline __attribute__((always_inline, unused))
#endif
#define LANES 16

/* In front of a loop with a small constant count that must become straight code, so that its vectors stay in registers. */
#if CPU_ISA_BUILD == 0
#define UNROLL /* arrays of 16 floats gain nothing */
#elif defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

/* For functions whose constant arguments (heads, rows, columns) are to be compiled in. Plain C takes them as they come: a copy for each would cost compile time and gain nothing. */
#if CPU_ISA_BUILD == 0
#define SPECIALIZE static __attribute__((unused))
#else
#define SPECIALIZE ALWAYS_INLINE
#endif

#if CPU_ISA_BUILD == 0
#define ISA(name) name##_plain
#include "kernels/cpu/lanes_plain.h"
#elif CPU_ISA_BUILD == 1
#define ISA(name) name##_avx2
#include "kernels/cpu/lanes_avx2.h"
#elif CPU_ISA_BUILD == 2
#define ISA(name) name##_avx512
#include "kernels/cpu/lanes_avx512.h"
#else
#error "CPU_ISA_BUILD must be 0 (plain), 1 (AVX2) or 2 (AVX-512)"
#endif
