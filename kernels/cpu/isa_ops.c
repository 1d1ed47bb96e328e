/* The ops of one instruction set; compiled once for each, like every op file. */
#include "kernels/cpu/cpu_private.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/ops.h"

const struct kernel_ops ISA(cpu_ops) = {
    .rmsnorm = ISA(rmsnorm),
    .silu_mul = ISA(silu_mul),
};
