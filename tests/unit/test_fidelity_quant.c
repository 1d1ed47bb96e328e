/* The lab's quantizers and bases, each against a plain reference in double precision. */
#include "bench/fidelity/lab/lab_keys.h"
#include "bench/fidelity/lab/lab_quant.h"
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint32_t state = 1;

/* Roughly normal. */
static float random_float(void)
{
    double sum = 0;
    for (int i = 0; i < 6; i++) {
        state = state * 1664525u + 1013904223u;
        sum += (state >> 8) / 16777216.0 - 0.5;
    }
    return (float)(sum * 1.4142);
}

static float *random_rows(int64_t n)
{
    float *x = malloc((size_t)n * sizeof(*x));
    cr_assert(x);
    for (int64_t i = 0; i < n; i++)
        x[i] = random_float();
    return x;
}

/* ---- uniform codes ---- */

/* 10 bits behind the leading one; below 2^-14 multiples of 2^-24. */
static double fp16_of(double x)
{
    if (x == 0)
        return 0;
    int e = ilogb(x);
    const double unit = ldexp(1, (e < -14 ? -14 : e) - 10);
    return nearbyint(x / unit) * unit;
}

static double coded(double x, double min, double max, int bits)
{
    const int levels = (1 << bits) - 1;
    const double lo = fp16_of(min), step = fp16_of((max - lo) / levels);
    if (step <= 0)
        return lo;
    double code = nearbyint((x - lo) / step);
    code = code < 0 ? 0 : code > levels ? levels : code;
    return lo + step * code;
}

/* Value i of `before` is coded with those for which `together` says so. */
static void check_codes(const float *before, const float *after, int n, int d, int bits, bool (*together)(int i, int j, int d, int group), int group)
{
    for (int i = 0; i < n * d; i++) {
        double min = INFINITY, max = -INFINITY;
        for (int j = 0; j < n * d; j++)
            if (together(i, j, d, group)) {
                min = fmin(min, (double)before[j]);
                max = fmax(max, (double)before[j]);
            }
        /* A value half-way between two codes may fall either way in fp32. */
        const double want = coded((double)before[i], min, max, bits), step = (max - min) / ((1 << bits) - 1);
        const double off = fabs((double)after[i] - want);
        const bool tie = fabs(fabs((double)before[i] - want) - step / 2) < 1e-3 * step;
        cr_assert(off < 1e-5 || (tie && off < 1.01 * step), "value %d: %g, want %g", i, (double)after[i], want);
    }
}

static bool same_channel_group(int i, int j, int d, int group)
{
    return i % d == j % d && i / d / group == j / d / group;
}

static bool same_token_group(int i, int j, int d, int group)
{
    return i / d == j / d && i % d / group == j % d / group;
}

Test(fidelity_quant, test_channels_as_the_reference_with_a_short_last_group)
{
    enum { N = 70, D = 8 };
    for (int bits = 2; bits <= 4; bits += 2) {
        float *x = random_rows(N * D), y[N * D];
        memcpy(y, x, sizeof(y));
        lab_quant_channels(y, N, D, 32, bits);
        check_codes(x, y, N, D, bits, same_channel_group, 32);
        free(x);
    }
}

Test(fidelity_quant, test_tokens_as_the_reference_in_groups_and_whole)
{
    enum { N = 9, D = 64 };
    for (int group = 32; group <= 64; group *= 2)
        for (int bits = 2; bits <= 8; bits += 2) {
            float *x = random_rows(N * D), y[N * D];
            memcpy(y, x, sizeof(y));
            lab_quant_tokens(y, N, D, group, bits);
            check_codes(x, y, N, D, bits, same_token_group, group);
            free(x);
        }
}

Test(fidelity_quant, test_constant_groups_read_back)
{
    float x[64];
    for (int i = 0; i < 64; i++)
        x[i] = i < 32 ? 0.0f : -2.5f;
    lab_quant_tokens(x, 1, 64, 32, 2);
    for (int i = 0; i < 64; i++)
        cr_assert(x[i] == (i < 32 ? 0.0f : -2.5f));
}

/* ---- non-uniform levels ---- */

/* The four levels of a normal variable (Max 1960): +-0.4528, +-1.5104. */
Test(fidelity_quant, test_lloyd_finds_the_levels_of_a_normal_variable)
{
    enum { HALF = 2048 };
    static double weight[2 * HALF + 1];
    float levels[4];
    for (int i = 0; i <= 2 * HALF; i++) {
        const double x = 5.0 * (i - HALF) / HALF; /* five sigma are -1 .. 1 */
        weight[i] = exp(-x * x / 2);
    }
    lab_lloyd(weight, HALF, 4, levels);
    const double want[4] = {-1.5104, -0.4528, 0.4528, 1.5104};
    for (int i = 0; i < 4; i++)
        cr_expect_float_eq(5 * (double)levels[i], want[i], 0.01, "level %d: %g", i, 5 * (double)levels[i]);
}

Test(fidelity_quant, test_lloyd_with_fewer_values_than_levels)
{
    enum { HALF = 16 };
    double weight[2 * HALF + 1] = {[0] = 3, [2 * HALF] = 1};
    float levels[8];
    lab_lloyd(weight, HALF, 8, levels);
    bool low = false, high = false;
    for (int i = 0; i < 8; i++) {
        low |= levels[i] == -1.0f;
        high |= levels[i] == 1.0f;
        cr_assert(levels[i] == levels[i] && (i == 0 || levels[i] >= levels[i - 1]));
    }
    cr_assert(low && high);
}

static double mean_square(const float *a, const float *b, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
    return sum / n;
}

static int count_distinct(const float *x, int n)
{
    int distinct = 0;
    for (int i = 0; i < n; i++) {
        bool seen = false;
        for (int j = 0; j < i; j++)
            seen |= x[i] == x[j];
        distinct += !seen;
    }
    return distinct;
}

Test(fidelity_quant, test_nuq_has_few_levels_and_beats_the_uniform_code)
{
    enum { VECTORS = 6, LENGTH = 400 };
    for (int bits = 3; bits <= 4; bits++) {
        float *x = random_rows(VECTORS * LENGTH), y[VECTORS * LENGTH], u[VECTORS * LENGTH];
        for (int i = 0; i < LENGTH; i++)
            x[2 * LENGTH + i] = x[2 * LENGTH + i] * 100 + 7; /* each vector has its own scale */
        memcpy(y, x, sizeof(y));
        memcpy(u, x, sizeof(u));
        lab_quant_nuq(y, VECTORS, LENGTH, NULL, bits);
        lab_quant_tokens(u, VECTORS, LENGTH, LENGTH, bits);
        for (int v = 0; v < VECTORS; v++) {
            const int at = v * LENGTH;
            cr_expect(count_distinct(y + at, LENGTH) <= 1 << bits);
            cr_expect(mean_square(x + at, y + at, LENGTH) < mean_square(x + at, u + at, LENGTH), "vector %d at %d bits", v, bits);
            /* What a value became is the nearest of what its vector's values became. */
            for (int i = 0; i < LENGTH; i++)
                for (int j = 0; j < LENGTH; j++)
                    cr_assert(fabsf(x[at + i] - y[at + i]) <= fabsf(x[at + i] - y[at + j]) * 1.0001f + 1e-4f);
        }
        free(x);
    }
}

Test(fidelity_quant, test_nuq_keeps_outliers_and_they_do_not_widen_the_range)
{
    enum { LENGTH = 300 };
    uint8_t outlier[LENGTH] = {[5] = 1, [200] = 1};
    float *x = random_rows(LENGTH), y[LENGTH], wide[LENGTH];
    x[5] = 1000;
    x[200] = -1000;
    memcpy(y, x, sizeof(y));
    memcpy(wide, x, sizeof(wide));
    lab_quant_nuq(y, 1, LENGTH, outlier, 4);
    lab_quant_nuq(wide, 1, LENGTH, NULL, 4);
    cr_expect(y[5] == 1000 && y[200] == -1000);
    cr_expect(mean_square(x, y, LENGTH) < mean_square(x, wide, LENGTH) / 2, "%g %g", mean_square(x, y, LENGTH), mean_square(x, wide, LENGTH));
    free(x);
}

/* ---- bases ---- */

static double bf16_ulp(double x)
{
    return x == 0 ? 1e-30 : ldexp(1, ilogb(x) - 7);
}

/* RoPE of `style`, then Sylvester's matrix in blocks of the largest power of two that divides d. */
static void cached_reference(const double *x, const float *rope, int d, enum rope_style style, double *y)
{
    double turned[256];
    for (int i = 0; i < d / 2; i++) {
        const int a = style == ROPE_INTERLEAVED ? 2 * i : i, b = style == ROPE_INTERLEAVED ? 2 * i + 1 : i + d / 2;
        const double c = (double)rope[2 * i], s = (double)rope[2 * i + 1];
        turned[a] = x[a] * c - x[b] * s;
        turned[b] = x[a] * s + x[b] * c;
    }
    const int block = d & -d;
    for (int i = 0; i < d; i++) {
        y[i] = 0;
        for (int j = 0; j < block; j++)
            y[i] += (__builtin_popcount((unsigned)(i % block & j)) & 1 ? -1 : 1) * turned[i / block * block + j] / sqrt(block);
    }
}

static void check_bases(int d, enum rope_style style, float factor)
{
    enum { N = 5 };
    float *x = random_rows(N * d), *rope = malloc((size_t)(N * d) * sizeof(*rope)), *back = malloc((size_t)(N * d) * sizeof(*back));
    bf16_t *rows = malloc((size_t)(N * d) * sizeof(*rows)), *again = malloc((size_t)(N * d) * sizeof(*again));
    cr_assert(rope && back && rows && again);
    for (int i = 0; i < N * d / 2; i++) {
        rope[2 * i] = factor * cosf((float)i * 0.7f);
        rope[2 * i + 1] = factor * sinf((float)i * 0.7f);
    }
    memcpy(back, x, (size_t)(N * d) * sizeof(*back));
    lab_keys_write(back, N, d, LAB_BEFORE_ROPE, style, rope, rows);
    for (int row = 0; row < N; row++) {
        double plain[256], want[256];
        for (int i = 0; i < d; i++)
            plain[i] = (double)x[row * d + i];
        cached_reference(plain, rope + row * d, d, style, want);
        for (int i = 0; i < d; i++) {
            const uint32_t bits = (uint32_t)rows[row * d + i] << 16;
            float got;
            memcpy(&got, &bits, sizeof(got));
            cr_assert_float_eq((double)got, want[i], 0.51 * bf16_ulp(want[i]) + 1e-5);
        }
    }
    lab_keys_read(rows, N, d, LAB_BEFORE_ROPE, style, rope, back);
    for (int i = 0; i < N * d; i++)
        cr_assert_float_eq((double)back[i], (double)x[i], 0.03);
    for (int basis = LAB_ROTATED; basis <= LAB_BEFORE_ROPE; basis++) {
        lab_keys_read(rows, N, d, (enum lab_basis)basis, style, rope, back);
        lab_keys_write(back, N, d, (enum lab_basis)basis, style, rope, again);
        for (int i = 0; i < N * d; i++)
            cr_assert(abs((int)again[i] - (int)rows[i]) <= 1 || (rows[i] & 0x7FFF) < 0x3500, "basis %d", basis);
    }
    free(again);
    free(rows);
    free(back);
    free(rope);
    free(x);
}

Test(fidelity_quant, test_bases_there_and_back)
{
    check_bases(64, ROPE_INTERLEAVED, 1);
    check_bases(64, ROPE_HALVES, 1);
    check_bases(96, ROPE_HALVES, 1);
    check_bases(32, ROPE_INTERLEAVED, 1.2f); /* YaRN's attention factor */
}
