/* Attention. The GPU rounds queries, weights and values to bf16, so results are held to the CPU's by 1e-4 (measured: up to 2e-5). */
#include "tests/simt/ops_test.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double attention_limit = 1e-4;

/* Queries are as large as makes attention sharp: logits of a deviation of 3. */
static void prefill(struct ops_test *t, int64_t pos0, int n_q, int n_heads, int n_kv_heads, int d, bool biased)
{
    struct key_bias cpu_bias, gpu_bias;
    const size_t n_keys = (size_t)pos0 + (size_t)n_q, stride = n_keys * (size_t)d + 64, kv_bytes = stride * (size_t)n_kv_heads * 2;
    const size_t count = (size_t)(n_q * n_heads * d), rows = (size_t)(n_q * n_heads);
    float *q = ops_test_floats(t, count, 3), *out = ops_test_alloc(count * sizeof *out), *ml = ops_test_alloc(rows * 2 * sizeof *ml);
    uint16_t *k = ops_test_bf16(t, kv_bytes / 2, 1), *v = ops_test_bf16(t, kv_bytes / 2, 1);
    struct attn_prefill_params p = {.q = q, .pos0 = pos0, .n_q = n_q, .k = k, .v = v, .head_stride = (int64_t)stride, .n_heads = n_heads, .n_kv_heads = n_kv_heads,
                                    .head_dim = d, .scale = 1 / sqrtf((float)d), .out = out, .ret_ml = ml};
    ops_test_bias_make(t, n_kv_heads, d, (int)n_keys, &cpu_bias, &gpu_bias);
    p.bias = biased ? &cpu_bias : NULL;
    for (int h = 0; h < n_kv_heads; h++) /* nothing behind the last key may be attended */
        memset(k + (size_t)h * stride + n_keys * (size_t)d, 0xFF, 128), memset(v + (size_t)h * stride + n_keys * (size_t)d, 0xFF, 128);
    t->cpu_ops->attn_prefill(t->cpu, &p);
    p.bias = biased ? &gpu_bias : NULL;
    p.q = ops_test_upload(t, q, count * sizeof *q), p.k = ops_test_upload(t, k, kv_bytes), p.v = ops_test_upload(t, v, kv_bytes);
    p.out = ops_test_room_inputs(t, count), p.ret_ml = ops_test_room(t, rows * 2 * sizeof *ml);
    ops_test_true(t, "attn_prefill", t->gpu_ops->attn_prefill(t->gpu, &p) == 0);
    float *gpu_out = ops_test_download_inputs(t, p.out, count), *gpu_ml = ops_test_download(t, p.ret_ml, rows * 2 * sizeof *ml);
    const char *shape = ops_test_shape("attn_prefill pos %d n_q %d heads %d/%d d %d biased %d", (int)pos0, n_q, n_heads, n_kv_heads, d, biased);
    ops_test_nmse(t, shape, out, gpu_out, count, attention_limit);
    for (size_t i = 0; i < rows; i++) { /* m and l depend on where m is found; their sum does not */
        ml[i] = ml[2 * i] + logf(ml[2 * i + 1]);
        gpu_ml[i] = gpu_ml[2 * i] + logf(gpu_ml[2 * i + 1]);
    }
    ops_test_nmse(t, shape, ml, gpu_ml, rows, attention_limit);
    free(q), free(out), free(ml), free(k), free(v), free(gpu_out), free(gpu_ml);
    ops_test_bias_free(&cpu_bias);
}

/* A chunk in one call, the queries' own blocks apart; every row beyond the last of each array is NaN, and so are the last own block's in K and V, which nobody attends there: a library that
 * multiplied what lies behind a prefix by 0 would show. */
static void chunk(struct ops_test *t, int64_t pos0, int n_q, int n_heads, int n_kv_heads, int d, bool biased)
{
    struct key_bias cpu_bias, gpu_bias;
    const int64_t origin = pos0 / BLOCK_TOKENS * BLOCK_TOKENS;
    const size_t last_block = (size_t)(pos0 + n_q - 1) / BLOCK_TOKENS * BLOCK_TOKENS * (size_t)d;
    const size_t n_keys = (size_t)pos0 + (size_t)n_q, pad = (size_t)d, stride = n_keys * (size_t)d + pad, own_stride = (n_keys - (size_t)origin) * (size_t)d + pad;
    const size_t bytes = stride * (size_t)n_kv_heads * 2, own_bytes = own_stride * (size_t)n_kv_heads * 2, count = (size_t)(n_q * n_heads * d);
    float *q = ops_test_floats(t, count, 3), *out = ops_test_alloc(count * sizeof *out);
    uint16_t *k = ops_test_bf16(t, bytes / 2, 1), *v = ops_test_bf16(t, bytes / 2, 1), *own_k = ops_test_bf16(t, own_bytes / 2, 1), *own_v = ops_test_bf16(t, own_bytes / 2, 1);
    for (int h = 0; h < n_kv_heads; h++) {
        memset(k + (size_t)h * stride + last_block, 0xFF, 2 * (stride - last_block)), memset(v + (size_t)h * stride + last_block, 0xFF, 2 * (stride - last_block));
        memset(own_k + (size_t)(h + 1) * own_stride - pad, 0xFF, 2 * pad), memset(own_v + (size_t)(h + 1) * own_stride - pad, 0xFF, 2 * pad);
    }
    struct attn_prefill_params p = {.q = q, .pos0 = pos0, .n_q = n_q, .k = k, .v = v, .head_stride = (int64_t)stride, .own_k = own_k, .own_v = own_v, .own_stride = (int64_t)own_stride,
                                    .n_heads = n_heads, .n_kv_heads = n_kv_heads, .head_dim = d, .scale = 1 / sqrtf((float)d), .out = out};
    ops_test_bias_make(t, n_kv_heads, d, (int)n_keys, &cpu_bias, &gpu_bias);
    p.bias = biased ? &cpu_bias : NULL;
    t->cpu_ops->attn_prefill(t->cpu, &p);
    p.bias = biased ? &gpu_bias : NULL;
    p.q = ops_test_upload(t, q, count * sizeof *q), p.k = ops_test_upload(t, k, bytes), p.v = ops_test_upload(t, v, bytes), p.out = ops_test_room_inputs(t, count);
    p.own_k = ops_test_upload(t, own_k, own_bytes), p.own_v = ops_test_upload(t, own_v, own_bytes);
    ops_test_true(t, "attn_prefill", t->gpu_ops->attn_prefill(t->gpu, &p) == 0);
    float *gpu_out = ops_test_download_inputs(t, p.out, count);
    ops_test_nmse(t, ops_test_shape("attn_prefill of a chunk, pos %d n_q %d heads %d/%d d %d biased %d", (int)pos0, n_q, n_heads, n_kv_heads, d, biased), out, gpu_out, count, attention_limit);
    free(q), free(out), free(k), free(v), free(own_k), free(own_v), free(gpu_out);
    ops_test_bias_free(&cpu_bias);
}

void test_ops_attention(struct ops_test *t)
{
    chunk(t, 0, 300, 3, 1, 64, false);
    chunk(t, 250, 129, 4, 2, 80, false);
    chunk(t, 0, 127, 16, 1, 96, false);
    chunk(t, 130, 1, 7, 1, 128, false);
    chunk(t, 383, 2, 2, 2, 128, false);
    chunk(t, 100, 60, 6, 2, 64, true);
    ops_test_free_buffers(t);
    prefill(t, 0, 1, 1, 1, 64, false);
    prefill(t, 0, 128, 3, 1, 64, false);
    prefill(t, 128, 17, 4, 2, 80, false);
    prefill(t, 384, 5, 7, 1, 96, true);
    prefill(t, 300, 3, 16, 1, 128, false);
    prefill(t, 255, 1, 2, 2, 128, false);
    prefill(t, 128, 30, 6, 3, 64, true);
    ops_test_free_buffers(t);
    struct attn_prefill_params odd = {.n_q = 1, .n_heads = 1, .n_kv_heads = 1, .head_dim = 48};
    ops_test_true(t, "a head dim without a kernel", t->gpu_ops->attn_prefill(t->gpu, &odd) == -ENOTSUP);
    odd.n_q = 0;
    ops_test_true(t, "no queries", t->gpu_ops->attn_prefill(t->gpu, &odd) == -EINVAL);
}

/* Prefixes that are cuDNN's (from 1,024 keys and 128 queries on), and keys in splits, for few tiles. */
void test_ops_prefix(struct ops_test *t)
{
    chunk(t, 1100, 129, 2, 1, 64, false);
    chunk(t, 1152, 300, 2, 2, 80, false);
    chunk(t, 1030, 128, 2, 1, 128, false);
    chunk(t, 1024, 130, 1, 1, 64, true);
    chunk(t, 1024, 128, 1, 1, 96, false); /* which the emulator's cuDNN does not execute */
    ops_test_free_buffers(t);
    chunk(t, 2300, 5, 4, 1, 64, false);
    chunk(t, 3071, 70, 1, 1, 96, false);
    chunk(t, 2100, 3, 2, 1, 64, true);
    prefill(t, 2048, 1, 4, 2, 80, false);
}
