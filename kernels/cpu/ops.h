/* The external functions of the op files, one set an instruction set; kernels.h has their contracts. Only isa_ops.c and the op files include this. */
#pragma once
#include "kernels/cpu/cpu_private.h"
#include "kernels/cpu/lanes.h"

int ISA(rmsnorm)(struct stream *s, const float *x, const float *gamma, float eps, int64_t n, int64_t dim, float *y);
int ISA(silu_mul)(struct stream *s, const float *gate, const float *up, int64_t n, int64_t dim, float *out);
