/* Which instruction sets this processor and operating system have. Any thread. */
#pragma once
#include "kernels/device.h"
#include <stdbool.h>

/* PLAIN always. AVX2 means AVX2, FMA and F16C; AVX512 means F, BW, VL, DQ and VNNI (Ice Lake, Zen 4 and later) on top of it. */
bool cpu_isa_supported(enum cpu_isa isa);
enum cpu_isa cpu_isa_best(void);
const char *cpu_isa_name(enum cpu_isa isa); /* "auto", "plain", "avx2", "avx512" */
