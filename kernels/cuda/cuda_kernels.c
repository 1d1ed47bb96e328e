/* The CUDA backend's tables. */
#include "kernels/backend.h"
#include "kernels/cuda/cuda_private.h"
#include "kernels/cuda/nccl_collective.h"
#include "kernels/cuda/weight_stored.h"
#include "proto/base/base_assert.h"

/* Ops run one at a time: the most that one of them takes. */
static size_t scratch_bytes(struct stream *s, const struct op_bounds *bounds)
{
    const size_t parts[] = {cuda_sample_scratch(bounds), cuda_attn_decode_scratch(bounds), cuda_window_scores_scratch(bounds), cuda_attn_prefill_scratch(s, bounds), cuda_keydiff_scores_scratch(bounds)};
    size_t most = 0;
    for (size_t i = 0; i < ARRAY_LEN(parts); i++)
        most = parts[i] > most ? parts[i] : most;
    return most ? most + CUDA_TEMP_ALIGN : 0;
}

/* Products expand weights there. */
static size_t stored_scratch_bytes(struct stream *s, const struct op_bounds *bounds)
{
    const size_t others = scratch_bytes(s, bounds), products = CUDA_EXPANDED_BYTES + CUDA_TEMP_ALIGN;
    return others > products ? others : products;
}

static size_t step_bytes(const struct op_bounds *b, int n_layers)
{
    const size_t n = b->n_items > 0 ? (size_t)(b->n_items / b->n_kv_heads) : 0; /* tokens */
    const size_t layer = stream_args_rounded(n * sizeof(struct kv_dst)) + stream_args_rounded(cuda_attn_decode_args(b->n_items));
    return 2 * stream_args_rounded(n * sizeof(int32_t)) + stream_args_rounded((size_t)b->head_dim / 2 * sizeof(double)) + (size_t)n_layers * layer;
}

const struct kernel_ops *cuda_kernel_ops(void)
{
    static const struct kernel_ops ops = {
        .input_bytes = sizeof(bf16_t),
        .matmul_rows = 2048, /* cuBLAS on an H200: 641 TFLOP/s at 512, 741 at 2,048 */
        .matmul_outputs = 132 << 15, /* a tile of 128 x 256 for each multiprocessor of an H100 or H200 */
        .weight_bytes = cuda_weight_bytes,
        .weight_pack = cuda_weight_pack,
        .matmul = cuda_matmul,
        .embed = cuda_embed,
        .rmsnorm = cuda_rmsnorm,
        .silu_mul = cuda_silu_mul,
        .rope_table = cuda_rope_table,
        .qkv_finish = cuda_qkv_finish,
        .attn_prefill = cuda_attn_prefill,
        .attn_decode = cuda_attn_decode,
        .page_summaries = cuda_page_summaries,
        .window_scores = cuda_window_scores,
        .keydiff_scores = cuda_keydiff_scores,
        .merge_scores = cuda_merge_scores,
        .attn_column_sums = cuda_attn_column_sums,
        .topk = cuda_topk,
        .gather_rows = cuda_gather_rows,
        .block_encode = cuda_block_encode,
        .block_decode = cuda_block_decode,
        .page_cache_bytes = cuda_page_cache_bytes,
        .page_cache_open = cuda_page_cache_open,
        .page_cache_close = cuda_page_cache_close,
        .page_cache_resize = cuda_page_cache_resize,
        .page_cache_stats = cuda_page_cache_stats,
        .page_cache_fetch = cuda_page_cache_fetch,
        .scratch_bytes = scratch_bytes,
        .step_bytes = step_bytes,
        .sample = cuda_sample,
    };
    return &ops;
}

/* The same, but for the ops that see weights. */
static const struct kernel_ops *stored_kernel_ops(void)
{
    static struct kernel_ops ops;
    ops = *cuda_kernel_ops();
    ops.weight_bytes = cuda_stored_weight_bytes;
    ops.weight_pack = cuda_stored_weight_pack;
    ops.matmul = cuda_stored_matmul;
    ops.embed = cuda_stored_embed;
    ops.scratch_bytes = stored_scratch_bytes;
    return &ops;
}

__attribute__((visibility("default"))) const struct kernel_backend *tidepool_cuda_backend(void);

const struct kernel_backend *tidepool_cuda_backend(void)
{
    static struct kernel_backend backend;
    backend = (struct kernel_backend){
        .abi = KERNEL_BACKEND_ABI,
        .table_bytes = KERNEL_BACKEND_TABLE_BYTES,
        .name = "cuda",
        .device = cuda_device_ops(),
        .ops = cuda_kernel_ops(),
        .stored_ops = stored_kernel_ops(),
        .collective = nccl_collective_ops(),
        .missing = "",
    };
    return &backend;
}
