/* lanes.h and vmath.h: the vector versions against plain C with ==, and plain C against double precision. */
#include "kernels/cpu/cpu_isa.h"
#include "kernels/cpu/half.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/lanes_probe.h"
#include <criterion/criterion.h>
#include <math.h>

enum { ROUNDS = 20000 };

/* Special values, small and large magnitudes, ordinary ones and random bits, mixed. */
static float input(uint64_t seed, uint64_t i)
{
    static const float special[] = {0.0f,     -0.0f,     INFINITY, -INFINITY, NAN,      1.0f,     -1.0f,      0x1p-126f, 0x1p-149f, -0x1p-130f,
                                    88.7228f, -87.3365f, 88.5f,    -103.0f,   0x1p127f, 65519.0f, 65520.0f,   0x1p-25f,  0x1p-24f,  0x1.8p-24f,
                                    0.5f,     1.5f,      2.5f,     -3.5f,     0x1p22f,  0x1p-14f, 0x1.ffcp15f, 0.70710677f, 1.4142135f, 3.0f};
    uint64_t kind = kernel_test_bits(seed ^ 77, i) % 4;
    if (kind == 0)
        return special[kernel_test_bits(seed, i) % (sizeof special / sizeof special[0])];
    if (kind == 1)
        return (float)kernel_test_uniform(seed, i, -100.0, 100.0);
    if (kind == 2)
        return (float)kernel_test_uniform(seed, i, -2.0, 2.0);
    return float_from_bits((uint32_t)kernel_test_bits(seed, i));
}

static bool same(uint32_t a, uint32_t b, bool is_float)
{
    return a == b || (is_float && isnan(float_from_bits(a)) && isnan(float_from_bits(b)));
}

/* NaNs compare equal whatever their payload: x86 takes it from the first operand, and a compiler may swap those of a commutative instruction. */
static void compare(const struct lanes_probe *plain, const struct lanes_probe *other, uint64_t seed)
{
    float a[16], b[16], c[16];
    uint32_t expected[16], actual[16];
    bool is_float = strncmp(plain->name, "int_", 4) != 0 && strncmp(plain->name, "store_", 6) != 0;
    for (int i = 0; i < 16; i++) {
        a[i] = input(seed, (uint64_t)i);
        b[i] = input(seed, (uint64_t)i + 16);
        c[i] = input(seed, (uint64_t)i + 32);
    }
    plain->fn(a, b, c, expected);
    other->fn(a, b, c, actual);
    for (int i = 0; i < 16; i++)
        cr_assert(same(expected[i], actual[i], is_float), "%s lane %d of (%a, %a, %a) is %08x, plain C gives %08x", plain->name, i, a[i], b[i], c[i],
                  actual[i], expected[i]);
}

static void compare_all(enum cpu_isa isa, const struct lanes_probe *probes)
{
    if (!cpu_isa_supported(isa))
        cr_skip_test("%s is not on this machine", cpu_isa_name(isa));
    for (size_t p = 0; p < lanes_n_probes_plain; p++)
        for (uint64_t round = 0; round < ROUNDS; round++)
            compare(&lanes_probes_plain[p], &probes[p], round);
}

Test(lanes, test_avx2_agrees_with_plain)
{
    compare_all(CPU_ISA_AVX2, lanes_probes_avx2);
}

Test(lanes, test_avx512_agrees_with_plain)
{
    compare_all(CPU_ISA_AVX512, lanes_probes_avx512);
}

static const struct lanes_probe *find(const char *name)
{
    for (size_t p = 0; p < lanes_n_probes_plain; p++)
        if (strcmp(lanes_probes_plain[p].name, name) == 0)
            return &lanes_probes_plain[p];
    cr_assert_fail("no probe %s", name);
    return NULL;
}

/* Distance from the exact value in units of the result's last place. */
static double error_ulp(float actual, double exact)
{
    int exponent;
    frexp(exact, &exponent);
    return fabs((double)actual - exact) / ldexp(1.0, (exponent < -125 ? -125 : exponent) - 24);
}

static void accuracy(const char *name, double (*exact)(double), double lo, double hi, double limit_ulp)
{
    const struct lanes_probe *probe = find(name);
    double worst = 0;
    for (uint64_t i = 0; i < 200000; i += 16) {
        float x[16], y[16];
        for (uint64_t l = 0; l < 16; l++)
            x[l] = (float)kernel_test_uniform(5, i + l, lo, hi);
        probe->fn(x, x, x, y);
        for (int l = 0; l < 16; l++) {
            double e = error_ulp(y[l], exact((double)x[l]));
            worst = e > worst ? e : worst;
        }
    }
    cr_assert_lt(worst, limit_ulp, "%s is off by %.3f units in the last place", name, worst);
}

Test(lanes, test_exp_is_accurate)
{
    accuracy("exp", exp, -87.3, 88.7, 1.0);
    accuracy("exp", exp, -0.5, 0.5, 1.0);
}

Test(lanes, test_log_is_accurate)
{
    accuracy("log", log, 1e-6, 4.0, 1.0);
    accuracy("log", log, 0.9, 1.1, 1.0);
    accuracy("log", log, 1e-3, 1e30, 1.0);
}

Test(lanes, test_exp_and_log_at_the_edges)
{
    float x[16] = {INFINITY, -INFINITY, 0.0f, -0.0f, -88.0f, 89.0f, NAN, 1.0f}, y[16];
    find("exp")->fn(x, x, x, y);
    cr_assert(isinf(y[0]) && y[1] == 0.0f && y[2] == 1.0f && y[3] == 1.0f && y[4] == 0.0f && isinf(y[5]) && isnan(y[6]));
    float z[16] = {INFINITY, -INFINITY, 0.0f, -0.0f, -1.0f, 1.0f, NAN, 0x1p-149f};
    find("log")->fn(z, z, z, y);
    cr_assert(isinf(y[0]) && y[0] > 0 && isnan(y[1]) && isinf(y[2]) && y[2] < 0 && isinf(y[3]) && isnan(y[4]) && y[5] == 0.0f && isnan(y[6]));
    cr_assert_float_eq(y[7], (float)log(0x1p-149), 1e-5f);
}

Test(lanes, test_reduce_add_is_the_documented_tree)
{
    float x[16], r[16];
    kernel_test_fill(x, 16, 9, -1.0f, 1.0f);
    find("scalars")->fn(x, x, x, r);
    float s[4];
    for (int i = 0; i < 4; i++)
        s[i] = (x[i] + x[i + 8]) + (x[i + 4] + x[i + 12]);
    cr_assert_eq(r[0], (s[0] + s[2]) + (s[1] + s[3]));
}

Test(half, test_every_fp16_survives_the_way_through_fp32)
{
    for (uint32_t h = 0; h < 65536; h++) {
        float x = fp16_to_float((uint16_t)h);
        bool is_nan = (h & 0x7C00) == 0x7C00 && (h & 0x3FF);
        cr_assert_eq(fp16_from_float(x), is_nan ? (h | 0x200) : h, "%04x", h);
        if (!is_nan && (h & 0x7C00) != 0x7C00) {
            double exact = ldexp((double)((h & 0x3FF) | (h & 0x7C00 ? 0x400 : 0)), (h & 0x7C00 ? (int)(h >> 10 & 31) : 1) - 25);
            cr_assert_eq((double)x, h & 0x8000 ? -exact : exact, "%04x", h);
        }
    }
}

Test(half, test_bf16_rounds_to_nearest_even)
{
    cr_assert_eq(bf16_from_float(1.0f), 0x3F80);
    cr_assert_eq(bf16_from_float(float_from_bits(0x3F808000)), 0x3F80);
    cr_assert_eq(bf16_from_float(float_from_bits(0x3F818000)), 0x3F82);
    cr_assert_eq(bf16_from_float(float_from_bits(0x3F808001)), 0x3F81);
    cr_assert_eq(bf16_from_float(float_from_bits(0x7F7FFFFF)), 0x7F80);
    cr_assert_eq(bf16_from_float(float_from_bits(0x7F800001)), 0x7FC0);
}
