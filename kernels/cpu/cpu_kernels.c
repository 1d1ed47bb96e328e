/* The CPU's op table: each slot passes the call on to the table of the device's instruction set. */
#include "kernels/cpu/cpu_private.h"
#include "kernels/cpu/weight_pack.h"
#include <errno.h>

static int matmul(struct stream *s, const void *x, int64_t n, int64_t ld_x, const struct matmul_out *outs, int n_outs)
{
    return s->device->ops->matmul(s, x, n, ld_x, outs, n_outs);
}

static int embed(struct stream *s, const struct weight *w, const int32_t *ids, int n, float *y)
{
    return s->device->ops->embed(s, w, ids, n, y);
}

static int rmsnorm(struct stream *s, const float *x, const float *gamma, float eps, int64_t n, int64_t dim, void *y)
{
    return s->device->ops->rmsnorm(s, x, gamma, eps, n, dim, y);
}

static int silu_mul(struct stream *s, const float *gate, const float *up, int64_t n, int64_t dim, void *out, int64_t ld_out)
{
    return s->device->ops->silu_mul(s, gate, up, n, dim, out, ld_out);
}

static int rope_table(struct stream *s, const double *inv_freq, int n_freq, double factor, const int32_t *positions, int n, float *table)
{
    return s->device->ops->rope_table(s, inv_freq, n_freq, factor, positions, n, table);
}

static int qkv_finish(struct stream *s, const struct qkv_params *p)
{
    return s->device->ops->qkv_finish(s, p);
}

static int attn_prefill(struct stream *s, const struct attn_prefill_params *p)
{
    return s->device->ops->attn_prefill(s, p);
}

static int attn_decode(struct stream *s, struct attn_decode_params *p)
{
    return s->device->ops->attn_decode(s, p);
}

static int page_summaries(struct stream *s, const struct page_summary_params *p)
{
    return s->device->ops->page_summaries(s, p);
}

static int window_scores(struct stream *s, const struct window_score_params *p)
{
    return s->device->ops->window_scores(s, p);
}

static int keydiff_scores(struct stream *s, const struct keydiff_params *p)
{
    return s->device->ops->keydiff_scores(s, p);
}

static int merge_scores(struct stream *s, const struct score_merge_params *p)
{
    return s->device->ops->merge_scores(s, p);
}

static int attn_column_sums(struct stream *s, const struct column_sum_params *p)
{
    return s->device->ops->attn_column_sums(s, p);
}

static int sample(struct stream *s, struct sample_row *rows, int n, int n_vocab)
{
    return s->device->ops->sample(s, rows, n, n_vocab);
}

static int topk(struct stream *s, const float *scores, int n_rows, int64_t n, int64_t k, int32_t *indices)
{
    return s->device->ops->topk(s, scores, n_rows, n, k, indices);
}

static int gather_rows(struct stream *s, const bf16_t *k, const bf16_t *v, const int32_t *indices, int64_t n, int head_dim, bf16_t *dst_k, bf16_t *dst_v)
{
    return s->device->ops->gather_rows(s, k, v, indices, n, head_dim, dst_k, dst_v);
}

static int block_encode(struct stream *s, const struct block_params *blocks, int n, bool attended, int32_t *bad)
{
    return s->device->ops->block_encode(s, blocks, n, attended, bad);
}

static int block_decode(struct stream *s, const struct block_params *blocks, int n)
{
    return s->device->ops->block_decode(s, blocks, n);
}

/* Pages are read where they lie. */
static size_t page_cache_bytes(const struct device_page_cache_config *config)
{
    (void)config;
    return 0;
}

static int page_cache_open(struct stream *s, const struct device_page_cache_config *config, void *memory, struct device_page_cache **ret_cache)
{
    (void)s, (void)config, (void)memory, (void)ret_cache;
    return -ENOTSUP;
}

static void page_cache_close(struct device_page_cache *cache)
{
    (void)cache;
}

static int page_cache_resize(struct device_page_cache *cache, void *const *extents, int n_extents)
{
    (void)cache, (void)extents, (void)n_extents;
    return -ENOTSUP;
}

static int page_cache_stats(struct device_page_cache *cache, struct device_page_cache_stats *ret)
{
    (void)cache, (void)ret;
    return -ENOTSUP;
}

static int page_cache_fetch(struct device_page_cache *cache, const struct fetch_page *pages, int n, const uint8_t **ret_pages)
{
    (void)cache, (void)pages, (void)n, (void)ret_pages;
    return -ENOTSUP;
}

static size_t scratch_bytes(struct stream *s, const struct op_bounds *bounds)
{
    return s->device->ops->scratch_bytes(s, bounds);
}

static size_t step_bytes(const struct op_bounds *bounds, int n_layers)
{
    (void)bounds, (void)n_layers;
    return 0;
}

const struct kernel_ops *cpu_kernel_ops(void)
{
    static const struct kernel_ops ops = {
        .input_bytes = sizeof(float),
        .matmul_rows = 512, /* amortize the expansion of a weight panel */
        .matmul_outputs = SIZE_MAX,
        .weight_bytes = cpu_weight_bytes,
        .weight_pack = cpu_weight_pack,
        .matmul = matmul,
        .embed = embed,
        .rmsnorm = rmsnorm,
        .silu_mul = silu_mul,
        .rope_table = rope_table,
    .qkv_finish = qkv_finish,
    .attn_prefill = attn_prefill,
        .attn_decode = attn_decode,
        .page_summaries = page_summaries,
        .window_scores = window_scores,
        .keydiff_scores = keydiff_scores,
        .merge_scores = merge_scores,
        .attn_column_sums = attn_column_sums,
        .sample = sample,
        .topk = topk,
        .gather_rows = gather_rows,
        .block_encode = block_encode,
        .block_decode = block_decode,
        .page_cache_bytes = page_cache_bytes,
        .page_cache_open = page_cache_open,
        .page_cache_close = page_cache_close,
        .page_cache_resize = page_cache_resize,
        .page_cache_stats = page_cache_stats,
        .page_cache_fetch = page_cache_fetch,
        .scratch_bytes = scratch_bytes,
        .step_bytes = step_bytes,
    };
    return &ops;
}
