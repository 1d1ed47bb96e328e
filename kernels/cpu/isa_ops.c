/* The ops of one instruction set; compiled once for each, like every op file. */
#include "kernels/cpu/cpu_private.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/ops.h"

const struct kernel_ops ISA(cpu_ops) = {
    .matmul = ISA(matmul),
    .embed = ISA(embed),
    .rmsnorm = ISA(rmsnorm),
    .silu_mul = ISA(silu_mul),
    .attn_prefill = ISA(attn_prefill),
    .attn_decode = ISA(attn_decode),
    .window_scores = ISA(window_scores),
    .sample = ISA(sample),
    .topk = ISA(topk),
    .gather_rows = ISA(gather_rows),
    .block_encode = ISA(block_encode),
    .block_decode = ISA(block_decode),
};
