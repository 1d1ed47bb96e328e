/* The ops of one instruction set; compiled once for each, like every op file. */
#include "kernels/cpu/cpu_private.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/ops.h"

/* The ops that are not named here work in the threads' own scratch. */
static size_t scratch_bytes(struct stream *s, const struct op_bounds *b)
{
    const size_t decode = ISA(attn_decode_scratch)(b), window = ISA(window_scores_scratch)(b), sample = ISA(sample_scratch)(s, b);
    const size_t most = decode > window ? decode : window;
    return cpu_op_round(most > sample ? most : sample);
}

const struct kernel_ops ISA(cpu_ops) = {
    .matmul = ISA(matmul),
    .embed = ISA(embed),
    .rmsnorm = ISA(rmsnorm),
    .silu_mul = ISA(silu_mul),
    .rope_table = ISA(rope_table),
    .qkv_finish = ISA(qkv_finish),
    .attn_prefill = ISA(attn_prefill),
    .attn_decode = ISA(attn_decode),
    .page_summaries = ISA(page_summaries),
    .window_scores = ISA(window_scores),
    .keydiff_scores = ISA(keydiff_scores),
    .merge_scores = ISA(merge_scores),
    .attn_column_sums = ISA(attn_column_sums),
    .sample = ISA(sample),
    .topk = ISA(topk),
    .gather_rows = ISA(gather_rows),
    .block_encode = ISA(block_encode),
    .block_decode = ISA(block_decode),
    .scratch_bytes = scratch_bytes,
};
