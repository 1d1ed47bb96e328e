#include "tests/kernels/plain_dequant.h"
#include "tests/kernels/kernel_test.h"
#include <math.h>
#include <string.h>

static const struct {
    const char *name;
    int cols, bytes;
} formats[WEIGHT_DTYPE_COUNT] = {
    [WEIGHT_F32] = {"F32", 1, 4},      [WEIGHT_F16] = {"F16", 1, 2},      [WEIGHT_BF16] = {"BF16", 1, 2},     [WEIGHT_Q8_0] = {"Q8_0", 32, 34},
    [WEIGHT_Q4_0] = {"Q4_0", 32, 18},  [WEIGHT_Q4_1] = {"Q4_1", 32, 20},  [WEIGHT_Q5_0] = {"Q5_0", 32, 22},   [WEIGHT_Q4_K] = {"Q4_K", 256, 144},
    [WEIGHT_Q5_K] = {"Q5_K", 256, 176}, [WEIGHT_Q6_K] = {"Q6_K", 256, 210},
};

const char *plain_dtype_name(enum weight_dtype dtype)
{
    return formats[dtype].name;
}

int plain_block_cols(enum weight_dtype dtype)
{
    return formats[dtype].cols;
}

size_t plain_row_bytes(enum weight_dtype dtype, int64_t n_cols)
{
    return (size_t)(n_cols / formats[dtype].cols * formats[dtype].bytes);
}

static double half_at(const uint8_t *p)
{
    int h = p[0] | p[1] << 8, exponent = h >> 10 & 31, fraction = h & 1023;
    double v = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return h & 0x8000 ? -v : v;
}

static double float_at(const uint8_t *p, int bytes)
{
    uint32_t u = 0;
    float f;
    memcpy((uint8_t *)&u + 4 - bytes, p, (size_t)bytes);
    memcpy(&f, &u, sizeof f);
    return (double)f;
}

/* ggml's nibble order inside a block of 32: the low nibbles first. */
static int nibble(const uint8_t *q, int c)
{
    return c < 16 ? q[c] & 15 : q[c - 16] >> 4;
}

static void k_scale(const uint8_t *s, int j, int *sc, int *m)
{
    if (j < 4) {
        *sc = s[j] & 63;
        *m = s[j + 4] & 63;
    } else {
        *sc = (s[j + 4] & 15) + (s[j - 4] >> 6) * 16;
        *m = (s[j + 4] >> 4) + (s[j] >> 6) * 16;
    }
}

static double q45_k(const uint8_t *b, int c, bool five)
{
    int sc, m, sub = c / 32, l = c % 32;
    const uint8_t *q = b + (five ? 48 : 16) + sub / 2 * 32;
    int code = sub % 2 ? q[l] >> 4 : q[l] & 15;
    if (five)
        code += (b[16 + l] >> sub & 1) * 16;
    k_scale(b + 4, sub, &sc, &m);
    return half_at(b) * sc * code - half_at(b + 2) * m;
}

static double q6_k(const uint8_t *b, int c)
{
    int n = c / 128, r = c % 128, l = r % 32, quarter = r / 32;
    int low = b[n * 64 + l + (quarter & 1) * 32];
    int code = (quarter >= 2 ? low >> 4 : low & 15) + (b[128 + n * 32 + l] >> 2 * quarter & 3) * 16;
    return half_at(b + 208) * (int8_t)b[192 + c / 16] * (code - 32);
}

double plain_weight(enum weight_dtype dtype, const uint8_t *row, int64_t col)
{
    const uint8_t *b = row + col / formats[dtype].cols * formats[dtype].bytes;
    int c = (int)(col % formats[dtype].cols);
    switch (dtype) {
    case WEIGHT_F32:
        return float_at(b, 4);
    case WEIGHT_BF16:
        return float_at(b, 2);
    case WEIGHT_F16:
        return half_at(b);
    case WEIGHT_Q8_0:
        return half_at(b) * (int8_t)b[2 + c];
    case WEIGHT_Q4_0:
        return half_at(b) * (nibble(b + 2, c) - 8);
    case WEIGHT_Q4_1:
        return half_at(b) * nibble(b + 4, c) + half_at(b + 2);
    case WEIGHT_Q5_0:
        return half_at(b) * (nibble(b + 6, c) + (b[2 + c / 8] >> c % 8 & 1) * 16 - 16);
    case WEIGHT_Q4_K:
        return q45_k(b, c, false);
    case WEIGHT_Q5_K:
        return q45_k(b, c, true);
    default:
        return q6_k(b, c);
    }
}

static void put_half(uint8_t *p, uint64_t bits)
{
    uint16_t h = (uint16_t)((bits & 0x83FF) | (bits >> 20 & 7) << 10); /* exponents 0..7: subnormals too */
    if ((h & 0x7C00) == 0 && bits >> 40 & 1)
        h |= 7 << 10;
    memcpy(p, &h, sizeof h);
}

/* Positions of the fp16 scales in a block: one, two or none. */
static int scale_positions(enum weight_dtype dtype, int at[2])
{
    at[0] = dtype == WEIGHT_Q6_K ? 208 : 0;
    at[1] = 2;
    if (dtype == WEIGHT_Q4_1 || dtype == WEIGHT_Q4_K || dtype == WEIGHT_Q5_K)
        return 2;
    return dtype == WEIGHT_F32 || dtype == WEIGHT_BF16 ? 0 : 1; /* an F16 value is treated like a scale */
}

void plain_fill_rows(enum weight_dtype dtype, uint8_t *rows, int64_t n_rows, int64_t n_cols, uint64_t seed)
{
    int at[2], n = scale_positions(dtype, at), bytes = formats[dtype].bytes;
    int64_t n_blocks = n_rows * n_cols / formats[dtype].cols;
    for (int64_t i = 0; i < n_blocks; i++) {
        uint8_t *b = rows + i * bytes;
        for (int j = 0; j < bytes; j++)
            b[j] = (uint8_t)kernel_test_bits(seed, (uint64_t)(i * bytes + j));
        for (int j = 0; j < n; j++)
            put_half(b + at[j], kernel_test_bits(seed + 1000, (uint64_t)(i * 2 + j)));
        float f = (float)kernel_test_uniform(seed, (uint64_t)i, -1.0, 1.0);
        if (dtype == WEIGHT_F32)
            memcpy(b, &f, 4);
        if (dtype == WEIGHT_BF16)
            memcpy(b, (uint8_t *)&f + 2, 2);
    }
}
