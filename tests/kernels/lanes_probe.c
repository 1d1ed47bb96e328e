#include "tests/kernels/lanes_probe.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/vmath.h"

#define UNUSED_ARGS (void)a, (void)b, (void)c
#define FLOAT_PROBE(name, expr)                                                                                                                      \
    static void probe_##name(const float *a, const float *b, const float *c, void *ret)                                                             \
    {                                                                                                                                                \
        UNUSED_ARGS;                                                                                                                                 \
        v16_store(ret, (expr));                                                                                                                      \
    }
#define INT_PROBE(name, expr)                                                                                                                        \
    static void probe_##name(const float *a, const float *b, const float *c, void *ret)                                                             \
    {                                                                                                                                                \
        UNUSED_ARGS;                                                                                                                                 \
        v16i_store(ret, (expr));                                                                                                                     \
    }
#define A v16_load(a)
#define B v16_load(b)
#define C v16_load(c)
#define IA v16i_load(a)
#define IB v16i_load(b)

static v16 load_n_sum(const float *a)
{
    v16 sum = v16_zero();
    for (int n = 0; n <= LANES; n++)
        sum = v16_add(sum, v16_load_n(a, n));
    return sum;
}

static void probe_store_n(const float *a, const float *b, const float *c, void *ret)
{
    UNUSED_ARGS;
    float *r = ret;
    v16_store(r, B);
    v16_store_n(r, A, 3);
    v16_store_n(r + 4, A, 9);
    v16_store_n(r + 14, A, 0);
}

static void probe_store_bf16(const float *a, const float *b, const float *c, void *ret)
{
    UNUSED_ARGS;
    v16_store_bf16(ret, A);
    v16_store_bf16((uint16_t *)ret + LANES, B);
}

static void probe_store_fp16(const float *a, const float *b, const float *c, void *ret)
{
    UNUSED_ARGS;
    v16_store_fp16(ret, A);
    v16_store_fp16((uint16_t *)ret + LANES, B);
}

static void probe_store_u8(const float *a, const float *b, const float *c, void *ret)
{
    UNUSED_ARGS;
    for (int i = 0; i < 4; i++)
        v16i_store_u8((uint8_t *)ret + i * LANES, v16i_and(v16i_shr(IA, i * 8), v16i_set1(255)));
}

static void probe_scalars(const float *a, const float *b, const float *c, void *ret)
{
    UNUSED_ARGS;
    float *r = ret;
    v16_store(r, v16_zero());
    r[0] = v16_reduce_add(A);
    r[1] = v16_reduce_max(A);
    r[2] = vmath_expf(a[0]);
    r[3] = vmath_logf(b[0]);
}

/* Sixteen different vectors from three, held within bounds, so that one infinity does not hide everything. */
static void probe_reduce16(const float *a, const float *b, const float *c, void *ret)
{
    v16 x[LANES];
    for (int i = 0; i < LANES; i++) {
        v16 v = v16_load(i % 3 == 0 ? a : i % 3 == 1 ? b : c);
        v = v16_max(v16_min(v, v16_set1(100.0f)), v16_set1(-100.0f));
        x[i] = v16_mul(v, v16_set1(1.0f + 0.37f * (float)i));
    }
    v16_store(ret, v16_reduce_add16(x));
}

static v16i dot4(const float *a, const float *b, const float *c)
{
    /* Signed bytes are kept within 64 in magnitude, as the contract of the dot product asks. */
    v16i s = v16i_and(IB, v16i_set1(0x3F3F3F3F));
    v16i sign = v16i_and(IB, v16i_set1((int32_t)0x80808080));
    int8_t bytes[64];
    v16i_store(bytes, v16i_or(s, v16i_or(sign, v16i_shr(sign, 1))));
    return v16i_dot4_u8i8(v16i_load(c), (const uint8_t *)a, bytes);
}

FLOAT_PROBE(add, v16_add(A, B))
FLOAT_PROBE(sub, v16_sub(A, B))
FLOAT_PROBE(mul, v16_mul(A, B))
FLOAT_PROBE(div, v16_div(A, B))
FLOAT_PROBE(fma, v16_fma(A, B, C))
FLOAT_PROBE(min, v16_min(A, B))
FLOAT_PROBE(max, v16_max(A, B))
FLOAT_PROBE(neg, v16_neg(A))
FLOAT_PROBE(abs, v16_abs(A))
FLOAT_PROBE(sqrt, v16_sqrt(v16_abs(A)))
FLOAT_PROBE(select_eq, v16_select(v16_eq(A, B), A, C))
FLOAT_PROBE(select_lt, v16_select(v16_lt(A, B), A, C))
FLOAT_PROBE(select_le, v16_select(v16_le(A, B), A, C))
FLOAT_PROBE(swap1, v16_swap1(A))
FLOAT_PROBE(swap2, v16_swap2(A))
FLOAT_PROBE(swap4, v16_swap4(A))
FLOAT_PROBE(swap8, v16_swap8(A))
FLOAT_PROBE(load_n, load_n_sum(a))
FLOAT_PROBE(load_bf16, v16_load_bf16((const uint16_t *)a))
FLOAT_PROBE(load_fp16, v16_load_fp16((const uint16_t *)a))
FLOAT_PROBE(from_i32, v16_from_i32(IA))
FLOAT_PROBE(exp, v16_exp(A))
FLOAT_PROBE(exp_nonpositive, v16_exp_nonpositive(v16_neg(v16_abs(A))))
FLOAT_PROBE(log, v16_log(A))
INT_PROBE(int_add, v16i_add(IA, IB))
INT_PROBE(int_sub, v16i_sub(IA, IB))
INT_PROBE(int_mul, v16i_mul(IA, IB))
INT_PROBE(int_and, v16i_and(IA, IB))
INT_PROBE(int_or, v16i_or(IA, IB))
INT_PROBE(int_xor, v16i_xor(IA, IB))
INT_PROBE(int_shl, v16i_shl(IA, 5))
INT_PROBE(int_shr, v16i_shr(IA, 7))
INT_PROBE(int_sar, v16i_sar(IA, 9))
INT_PROBE(int_eq, v16i_select(v16i_eq(v16i_and(IA, v16i_set1(1)), v16i_zero()), IA, IB))
INT_PROBE(int_load_u8, v16i_load_u8((const uint8_t *)a))
INT_PROBE(int_load_i8, v16i_load_i8((const int8_t *)a))
INT_PROBE(int_to_i32, v16_to_i32(v16_min(v16_max(A, v16_set1(-4194304.0f)), v16_set1(4194304.0f))))
INT_PROBE(int_bits, v16_bits(v16_from_bits(v16_bits(A))))
INT_PROBE(int_dot4, dot4(a, b, c))

#define ENTRY(n) {.name = #n, .fn = probe_##n}
const struct lanes_probe ISA(lanes_probes)[] = {
    ENTRY(add), ENTRY(sub), ENTRY(mul), ENTRY(div), ENTRY(fma), ENTRY(min), ENTRY(max), ENTRY(neg), ENTRY(abs), ENTRY(sqrt), ENTRY(select_eq),
    ENTRY(select_lt), ENTRY(select_le), ENTRY(swap1), ENTRY(swap2), ENTRY(swap4), ENTRY(swap8), ENTRY(load_n), ENTRY(load_bf16), ENTRY(load_fp16),
    ENTRY(from_i32), ENTRY(exp), ENTRY(exp_nonpositive), ENTRY(log), ENTRY(int_add), ENTRY(int_sub), ENTRY(int_mul), ENTRY(int_and), ENTRY(int_or),
    ENTRY(int_xor), ENTRY(int_shl), ENTRY(int_shr), ENTRY(int_sar), ENTRY(int_eq), ENTRY(int_load_u8), ENTRY(int_load_i8), ENTRY(int_to_i32), ENTRY(int_bits),
    ENTRY(int_dot4), ENTRY(store_n), ENTRY(store_bf16), ENTRY(store_fp16), ENTRY(store_u8), ENTRY(scalars), ENTRY(reduce16),
};
#if CPU_ISA_BUILD == 0
const size_t lanes_n_probes_plain = sizeof lanes_probes_plain / sizeof lanes_probes_plain[0];
#endif
