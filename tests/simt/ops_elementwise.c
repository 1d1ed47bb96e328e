/* RMSNorm, SiLU, RoPE, the end of the projections. */
#include "tests/simt/ops_test.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static void rmsnorm(struct ops_test *t, int n, int dim)
{
    const size_t bytes = sizeof(float) * (size_t)n * (size_t)dim;
    float *x = ops_test_floats(t, (size_t)n * (size_t)dim, 2), *gamma = ops_test_floats(t, (size_t)dim, 1), *expected = ops_test_alloc(bytes);
    float *dx = ops_test_upload(t, x, bytes), *dgamma = ops_test_upload(t, gamma, sizeof(float) * (size_t)dim);
    t->cpu_ops->rmsnorm(t->cpu, x, gamma, 1e-5f, n, dim, expected);
    void *dy = ops_test_room_inputs(t, (size_t)n * (size_t)dim);
    ops_test_true(t, "rmsnorm", t->gpu_ops->rmsnorm(t->gpu, dx, dgamma, 1e-5f, n, dim, dy) == 0);
    float *actual = ops_test_download_inputs(t, dy, (size_t)n * (size_t)dim);
    ops_test_round_inputs(t, expected, (size_t)n * (size_t)dim);
    ops_test_nmse(t, ops_test_shape("rmsnorm [%d, %d]", n, dim), expected, actual, (size_t)n * (size_t)dim, 1e-7); /* the last bit of a sum may turn a rounding */
    free(x), free(gamma), free(expected), free(actual);
}

/* What lies between the rows stays. */
static void silu_mul(struct ops_test *t, int n, int dim, int ld)
{
    const size_t count = (size_t)n * (size_t)dim, bytes = sizeof(float) * count, out_count = (size_t)n * (size_t)ld;
    float *gate = ops_test_floats(t, count, 20), *up = ops_test_floats(t, count, 1), *expected = ops_test_floats(t, out_count, 1);
    void *out = ops_test_upload_inputs(t, expected, out_count);
    gate[0] = -200, gate[count / 2] = 200, gate[count - 1] = -0.0f;
    float *dgate = ops_test_upload(t, gate, bytes), *dup = ops_test_upload(t, up, bytes);
    t->cpu_ops->silu_mul(t->cpu, gate, up, n, dim, expected, ld);
    ops_test_true(t, "silu_mul", t->gpu_ops->silu_mul(t->gpu, dgate, dup, n, dim, out, ld) == 0);
    float *actual = ops_test_download_inputs(t, out, out_count);
    ops_test_round_inputs(t, expected, out_count);
    ops_test_same(t, ops_test_shape("silu_mul [%d, %d], rows of %d", n, dim, ld), expected, actual, sizeof(float) * out_count);
    free(gate), free(up), free(expected), free(actual);
}

static void rope_table(struct ops_test *t, int n, int n_freq)
{
    double inv_freq[128];
    int32_t positions[64];
    const size_t bytes = sizeof(float) * (size_t)n * (size_t)n_freq * 2;
    for (int j = 0; j < n_freq; j++)
        inv_freq[j] = pow(10000, -(double)j / n_freq);
    for (int i = 0; i < n; i++)
        positions[i] = i * 2111 + i % 3;
    float *expected = ops_test_alloc(bytes), *table = ops_test_room(t, bytes);
    t->cpu_ops->rope_table(t->cpu, inv_freq, n_freq, 1.25, positions, n, expected);
    ops_test_true(t, "rope_table", t->gpu_ops->rope_table(t->gpu, inv_freq, n_freq, 1.25, positions, n, table) == 0);
    memset(positions, 0, sizeof positions); /* host arrays have been read when the call returns */
    float *actual = ops_test_download(t, table, bytes);
    ops_test_same(t, ops_test_shape("rope_table [%d, %d]", n, n_freq), expected, actual, bytes);
    free(expected), free(actual);
}

static void qkv_finish(struct ops_test *t, int n, int n_heads, int n_kv_heads, int d, enum rope_style style)
{
    const size_t q_count = (size_t)(n * n_heads * d), kv_count = (size_t)(n * n_kv_heads * d), stride = (size_t)(n * d) + 8;
    const size_t q_bytes = q_count * sizeof(float), kv_bytes = kv_count * sizeof(float), row_bytes = stride * (size_t)n_kv_heads * 2;
    float *q = ops_test_floats(t, q_count, 1), *k = ops_test_floats(t, kv_count, 1), *v = ops_test_floats(t, kv_count, 1), *rope = ops_test_floats(t, (size_t)(n * d), .7);
    uint16_t *ek = ops_test_alloc(row_bytes), *ev = ops_test_alloc(row_bytes), *gk = ops_test_room(t, row_bytes), *gv = ops_test_room(t, row_bytes);
    struct kv_dst *cpu_dst = ops_test_alloc(sizeof *cpu_dst * (size_t)n), *gpu_dst = ops_test_alloc(sizeof *gpu_dst * (size_t)n);
    struct qkv_params p = {.k = k, .v = v, .rope = rope, .style = style, .n = n, .n_heads = n_heads, .n_kv_heads = n_kv_heads, .head_dim = d};
    float *dq = ops_test_upload(t, q, q_bytes);
    for (int i = 0; i < n; i++) { /* tokens in reverse order */
        const int at = (n - 1 - i) * d;
        cpu_dst[i] = (struct kv_dst){.k = ek + at, .v = ev + at, .head_stride = (int64_t)stride};
        gpu_dst[i] = (struct kv_dst){.k = gk + at, .v = gv + at, .head_stride = (int64_t)stride};
    }
    p.q = q, p.dst = cpu_dst;
    t->cpu_ops->qkv_finish(t->cpu, &p);
    p.q = dq, p.dst = gpu_dst, p.k = ops_test_upload(t, k, kv_bytes), p.v = ops_test_upload(t, v, kv_bytes), p.rope = ops_test_upload(t, rope, sizeof(float) * (size_t)(n * d));
    ops_test_true(t, "qkv_finish", t->gpu_ops->qkv_finish(t->gpu, &p) == 0);
    memset(gpu_dst, 0, sizeof *gpu_dst * (size_t)n);
    float *actual_q = ops_test_download(t, dq, q_bytes);
    uint16_t *actual_k = ops_test_download(t, gk, row_bytes), *actual_v = ops_test_download(t, gv, row_bytes);
    const char *shape = ops_test_shape("qkv_finish n %d heads %d/%d d %d style %d", n, n_heads, n_kv_heads, d, (int)style);
    ops_test_same(t, shape, q, actual_q, q_bytes);
    ops_test_same(t, shape, ek, actual_k, row_bytes);
    ops_test_same(t, shape, ev, actual_v, row_bytes);
    free(q), free(k), free(v), free(rope), free(ek), free(ev), free(cpu_dst), free(gpu_dst), free(actual_q), free(actual_k), free(actual_v);
}

void test_ops_elementwise(struct ops_test *t)
{
    rmsnorm(t, 1, 1);
    rmsnorm(t, 3, 577);
    rmsnorm(t, 5, 1024);
    silu_mul(t, 1, 3, 3);
    silu_mul(t, 7, 301, 310);
    silu_mul(t, 3, 1100, 1100);
    silu_mul(t, 4, 36, 52);
    rope_table(t, 1, 16);
    rope_table(t, 13, 48);
    qkv_finish(t, 3, 3, 1, 64, ROPE_HALVES);
    qkv_finish(t, 2, 4, 2, 80, ROPE_INTERLEAVED);
    qkv_finish(t, 2, 7, 1, 96, ROPE_HALVES);
    qkv_finish(t, 5, 2, 2, 128, ROPE_INTERLEAVED);
    qkv_finish(t, 1, 1, 1, 256, ROPE_HALVES);
    struct qkv_params odd = {.n = 1, .n_heads = 1, .n_kv_heads = 1, .head_dim = 24};
    ops_test_true(t, "a head dim without a kernel", t->gpu_ops->qkv_finish(t->gpu, &odd) == -ENOTSUP);
    ops_test_true(t, "nothing to do", t->gpu_ops->silu_mul(t->gpu, NULL, NULL, 0, 5, NULL, 5) == 0);
    ops_test_true(t, "no such shape", t->gpu_ops->rmsnorm(t->gpu, NULL, NULL, 0, -1, 5, NULL) == -EINVAL);
}
