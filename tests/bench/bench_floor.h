/* What the machine can do at most with an instruction set: the floor that kernels are measured against, taken in the same run. */
#pragma once
#include <stddef.h>

/* Runs `rounds` x BENCH_FMA_CHAINS fma of 16 lanes in independent chains; returns something that depends on all of them. */
enum { BENCH_FMA_CHAINS = 12 };
float bench_fma_plain(long rounds);
float bench_fma_avx2(long rounds);
float bench_fma_avx512(long rounds);
/* Reads `bytes` (a multiple of 256) once. */
int bench_read_plain(const void *memory, size_t bytes);
int bench_read_avx2(const void *memory, size_t bytes);
int bench_read_avx512(const void *memory, size_t bytes);
