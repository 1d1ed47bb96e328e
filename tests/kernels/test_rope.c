/* rope_table and qkv_finish against double precision, and every instruction set against plain C with ==. */
#include "kernels/cpu/half.h"
#include "tests/kernels/kernel_test.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N_TOKENS = 7, D_MAX = 256 };

Test(rope, test_table_is_rounded_cos_and_sin)
{
    enum { N_FREQ = 64 };
    static const int32_t positions[N_TOKENS] = {0, 1, 127, 5000, 131071, 262143, 1000000};
    double inv_freq[N_FREQ];
    static float table[N_TOKENS * N_FREQ * 2], other[N_TOKENS * N_FREQ * 2];
    struct device *device;
    struct stream *stream;
    for (int j = 0; j < N_FREQ; j++)
        inv_freq[j] = pow(500000.0, -(double)j / N_FREQ);
    KERNEL_TEST_EACH_ISA(isa)
    {
        if (!kernel_test_open(isa, 2, &device, &stream))
            continue;
        float *out = isa == CPU_ISA_PLAIN ? table : other;
        cr_assert_eq(cpu_kernel_ops()->rope_table(stream, inv_freq, N_FREQ, 0.9, positions, N_TOKENS, out), 0);
        if (isa != CPU_ISA_PLAIN)
            kernel_test_expect_same("rope_table", table, other, N_TOKENS * N_FREQ * 2);
        kernel_test_close(device, stream);
    }
    for (int i = 0; i < N_TOKENS; i++)
        for (int j = 0; j < N_FREQ; j++) {
            const double angle = positions[i] * inv_freq[j];
            cr_expect_float_eq(table[(i * N_FREQ + j) * 2], 0.9 * cos(angle), 6e-8, "cos of %g", angle);
            cr_expect_float_eq(table[(i * N_FREQ + j) * 2 + 1], 0.9 * sin(angle), 6e-8, "sin of %g", angle);
        }
}

/* RoPE and rotation of one head by their definitions. */
static void head_by_definition(enum rope_style style, const float *x, const float *rope, int d, double *ret_y)
{
    const int b = d & -d;
    double r[D_MAX];
    for (int i = 0; i < d / 2; i++) {
        const int at0 = style == ROPE_INTERLEAVED ? 2 * i : i, at1 = style == ROPE_INTERLEAVED ? 2 * i + 1 : i + d / 2;
        r[at0] = (double)x[at0] * rope[2 * i] - (double)x[at1] * rope[2 * i + 1];
        r[at1] = (double)x[at0] * rope[2 * i + 1] + (double)x[at1] * rope[2 * i];
    }
    for (int i = 0; i < d; i++) {
        double sum = 0;
        for (int j = 0; j < b; j++)
            sum += __builtin_parity((unsigned)(i % b & j)) ? -r[i / b * b + j] : r[i / b * b + j];
        ret_y[i] = sum / sqrt(b);
    }
}

struct shape {
    enum rope_style style;
    int n_heads, n_kv_heads, d;
};

struct outputs {
    float *q;
    bf16_t *k, *v;
};

static void run(struct stream *stream, struct shape s, const float *q, const float *k, const float *v, const float *rope, struct outputs out)
{
    struct kv_dst dst[N_TOKENS];
    /* Token i goes to row N_TOKENS - 1 - i of each head: places need not be in order. */
    for (int i = 0; i < N_TOKENS; i++)
        dst[i] = (struct kv_dst){.k = out.k + (N_TOKENS - 1 - i) * s.d, .v = out.v + (N_TOKENS - 1 - i) * s.d, .head_stride = (int64_t)N_TOKENS * s.d};
    memcpy(out.q, q, sizeof *q * (size_t)(N_TOKENS * s.n_heads * s.d));
    struct qkv_params p = {.q = out.q, .k = k, .v = v, .rope = rope, .style = s.style, .dst = dst, .n = N_TOKENS, .n_heads = s.n_heads, .n_kv_heads = s.n_kv_heads, .head_dim = s.d};
    cr_assert_eq(cpu_kernel_ops()->qkv_finish(stream, &p), 0);
}

static struct outputs outputs_make(struct shape s)
{
    return (struct outputs){calloc((size_t)(N_TOKENS * s.n_heads * s.d), sizeof(float)), calloc((size_t)(N_TOKENS * s.n_kv_heads * s.d), sizeof(bf16_t)),
                            calloc((size_t)(N_TOKENS * s.n_kv_heads * s.d), sizeof(bf16_t))};
}

static void outputs_free(struct outputs o)
{
    free(o.q);
    free(o.k);
    free(o.v);
}

static void check_against_definition(struct shape s, const float *q, const float *k, const float *v, const float *rope, struct outputs out)
{
    double y[D_MAX];
    for (int i = 0; i < N_TOKENS; i++) {
        for (int h = 0; h < s.n_heads; h++) {
            const int at = (i * s.n_heads + h) * s.d;
            head_by_definition(s.style, q + at, rope + i * s.d, s.d, y);
            for (int c = 0; c < s.d; c++)
                cr_assert_float_eq(out.q[at + c], y[c], 2e-6, "q of token %d head %d dim %d", i, h, c);
        }
        for (int h = 0; h < s.n_kv_heads; h++) {
            const int at = (i * s.n_kv_heads + h) * s.d, to = (h * N_TOKENS + N_TOKENS - 1 - i) * s.d;
            head_by_definition(s.style, k + at, rope + i * s.d, s.d, y);
            for (int c = 0; c < s.d; c++) {
                cr_assert_float_eq(bf16_to_float(out.k[to + c]), y[c], 1e-6 + fabs(y[c]) / 256, "k of token %d head %d dim %d", i, h, c);
                cr_assert_eq(out.v[to + c], bf16_from_float(v[at + c]));
            }
        }
    }
}

static void check_shape(struct shape s)
{
    const int n_q = N_TOKENS * s.n_heads * s.d, n_k = N_TOKENS * s.n_kv_heads * s.d;
    float *q = malloc(sizeof *q * (size_t)n_q), *k = malloc(sizeof *k * (size_t)n_k), *v = malloc(sizeof *v * (size_t)n_k);
    float rope[N_TOKENS * D_MAX];
    struct outputs plain = outputs_make(s), other = outputs_make(s);
    struct device *device;
    struct stream *stream;
    kernel_test_fill(q, n_q, 1, -2, 2);
    kernel_test_fill(k, n_k, 2, -2, 2);
    kernel_test_fill(v, n_k, 3, -2, 2);
    for (int i = 0; i < N_TOKENS * s.d / 2; i++) {
        const double angle = kernel_test_uniform(4, (uint64_t)i, -3, 3);
        rope[2 * i] = (float)cos(angle);
        rope[2 * i + 1] = (float)sin(angle);
    }
    KERNEL_TEST_EACH_ISA(isa)
    {
        if (!kernel_test_open(isa, 2, &device, &stream))
            continue;
        run(stream, s, q, k, v, rope, isa == CPU_ISA_PLAIN ? plain : other);
        if (isa != CPU_ISA_PLAIN) {
            kernel_test_expect_same("q", plain.q, other.q, n_q);
            cr_expect_arr_eq(plain.k, other.k, sizeof(bf16_t) * (size_t)n_k);
            cr_expect_arr_eq(plain.v, other.v, sizeof(bf16_t) * (size_t)n_k);
        }
        kernel_test_close(device, stream);
    }
    check_against_definition(s, q, k, v, rope, plain);
    outputs_free(plain);
    outputs_free(other);
    free(q);
    free(k);
    free(v);
}

Test(rope, test_queries_and_keys_match_the_definition)
{
    static const int dims[] = {32, 64, 80, 96, 128, 256};
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++) {
        check_shape((struct shape){ROPE_INTERLEAVED, 3, 1, dims[i]});
        check_shape((struct shape){ROPE_HALVES, 4, 2, dims[i]});
    }
}

Test(rope, test_head_dim_without_kernel_is_not_supported)
{
    struct device *device;
    struct stream *stream;
    cr_assert(kernel_test_open(CPU_ISA_PLAIN, 1, &device, &stream));
    struct qkv_params p = {.n_heads = 1, .n_kv_heads = 1, .head_dim = 40};
    cr_expect_eq(cpu_kernel_ops()->qkv_finish(stream, &p), -ENOTSUP);
    kernel_test_close(device, stream);
}
