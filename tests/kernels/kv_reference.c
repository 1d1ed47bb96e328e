#include "tests/kernels/kv_reference.h"
#include "proto/base/base_assert.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint64_t next_u64(struct ref_rng *rng)
{
    uint64_t x = rng->state;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    rng->state = x;
    return x * 0x2545F4914F6CDD1Dull;
}

double ref_uniform(struct ref_rng *rng)
{
    return (double)(next_u64(rng) >> 11) * 0x1p-53;
}

double ref_gaussian(struct ref_rng *rng)
{
    double sum = -6;
    for (int i = 0; i < 12; i++)
        sum += ref_uniform(rng);
    return sum;
}

double ref_bf16_value(uint16_t bits)
{
    uint32_t u = (uint32_t)bits << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

uint16_t ref_bf16_bits(double x)
{
    float f = (float)x;
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    if (f != f)
        return 0x7FC0;
    return (uint16_t)((u + 0x7FFF + ((u >> 16) & 1)) >> 16);
}

double ref_fp16_value(uint16_t bits)
{
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double sign = bits & 0x8000 ? -1 : 1;
    if (exponent == 31)
        return fraction ? NAN : sign * INFINITY;
    if (exponent == 0)
        return sign * ldexp(fraction, -24);
    return sign * ldexp(1024 + fraction, exponent - 25);
}

uint16_t ref_fp16_bits(double x)
{
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    double a = fabs(x);
    if (a != a)
        return 0x7E00;
    if (a >= 65520)
        return sign | 0x7C00;
    int exponent = a < 0x1p-14 ? -14 : ilogb(a);
    double units = nearbyint(ldexp(a, 10 - exponent)); /* of the last place; 2048 carries into the exponent by itself */
    return sign | (uint16_t)(units + (a < 0x1p-14 ? 0 : (exponent + 14) * 1024));
}

struct ref_attention_result ref_attention(const double *q, const double *keys, const double *values, const bool *visible, const double *terms, int n,
                                          int d, double scale, double *out)
{
    struct ref_attention_result r = {-INFINITY, 0};
    double *logits = malloc(sizeof *logits * (size_t)(n > 0 ? n : 1));
    ASSERT(logits);
    for (int i = 0; i < n; i++) {
        logits[i] = 0;
        for (int c = 0; c < d; c++)
            logits[i] += q[c] * keys[(long)i * d + c];
        logits[i] = logits[i] * scale + (terms ? terms[i] : 0);
        if ((!visible || visible[i]) && logits[i] > r.m)
            r.m = logits[i];
    }
    memset(out, 0, sizeof *out * (size_t)d);
    for (int i = 0; i < n; i++) {
        if (visible && !visible[i])
            continue;
        double p = exp(logits[i] - r.m);
        r.l += p;
        for (int c = 0; c < d; c++)
            out[c] += p * values[(long)i * d + c];
    }
    for (int c = 0; r.l > 0 && c < d; c++)
        out[c] /= r.l;
    free(logits);
    return r;
}

static double fp16_at(const uint8_t *bytes, uint32_t offset, int i)
{
    uint16_t bits;
    memcpy(&bits, bytes + offset + 2 * i, sizeof bits);
    return ref_fp16_value(bits);
}

static double bf16_at(const uint8_t *bytes, uint32_t offset, int i)
{
    uint16_t bits;
    memcpy(&bits, bytes + offset + 2 * i, sizeof bits);
    return ref_bf16_value(bits);
}

void ref_page_key(const struct subpage_layout *l, const uint8_t *page, int d, int token, double *key)
{
    for (int c = 0; c < d; c++) {
        if (l->format == KV_FORMAT_BF16)
            key[c] = bf16_at(page, l->keys, (c / 2 * 16 + token) * 2 + c % 2);
        else
            key[c] = fp16_at(page, l->key_min, token) + fp16_at(page, l->key_step, token) * page[l->keys + (c / 4 * 16 + token) * 4 + c % 4];
    }
}

void ref_page_value(const struct subpage_layout *l, const uint8_t *page, int d, int token, double *value)
{
    for (int c = 0; c < d; c++) {
        int code, at = c / VALUE_GROUP * SUBPAGE_TOKENS + token;
        if (l->format == KV_FORMAT_BF16) {
            value[c] = bf16_at(page, l->values, token * d + c);
            continue;
        }
        if (l->format == KV_FORMAT_K8V8)
            code = page[l->values + token * d + c];
        else
            code = page[l->values + (token / 8 * d + c) * 4 + token % 4] >> (token % 8 / 4 * 4) & 15;
        value[c] = fp16_at(page, l->value_min, at) + fp16_at(page, l->value_step, at) * code;
    }
}

void ref_index_key(const struct block_layout *layout, const uint8_t *entry, int token, double *key)
{
    for (int c = 0; c < (int)layout->head_dim; c++) {
        int code = entry[(c / 16 * 16 + token) * 4 + c % 4] >> (c % 16 / 4 * 2) & 3;
        key[c] = fp16_at(entry, layout->index_min, token) + fp16_at(entry, layout->index_step, token) * (64 * code + 31.5);
    }
}
