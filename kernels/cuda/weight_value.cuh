/* One element of a weight matrix from the file's bytes: the values that kernels/cpu/weight_layout.h defines (d, dmin, sc and m exact in fp32, one fma), by the block formats
 * of GGUF. `block` points at the block of the file that holds column `c` of it. */
#pragma once
#include "kernels/cuda/cuda_private.h"
#include "kernels/cuda/math.cuh"

/* Columns and bytes of a block in the file. */
struct weight_file_block {
    int cols, bytes;
};

static inline constexpr struct weight_file_block weight_file_block_of(enum weight_dtype dtype)
{
    switch (dtype) {
    case WEIGHT_F32: return {1, 4};
    case WEIGHT_F16: return {1, 2};
    case WEIGHT_BF16: return {1, 2};
    case WEIGHT_Q8_0: return {32, 34};
    case WEIGHT_Q4_0: return {32, 18};
    case WEIGHT_Q4_1: return {32, 20};
    case WEIGHT_Q5_0: return {32, 22};
    case WEIGHT_Q4_K: return {256, 144};
    case WEIGHT_Q5_K: return {256, 176};
    case WEIGHT_Q6_K: return {256, 210};
    default: return {0, 0};
    }
}

/* Every block of the file has an even number of bytes, so that its 16-bit fields lie on two; wider ones do not. */
DEVICE uint16_t bytes16(const uint8_t *p)
{
    return *reinterpret_cast<const uint16_t *>(p);
}

DEVICE uint32_t bytes32(const uint8_t *p)
{
    return bytes16(p) | (uint32_t)bytes16(p + 2) << 16;
}

/* 32 nibbles: byte j holds columns j (low) and j + 16 (high). */
DEVICE int nibble_of(const uint8_t *q, int c)
{
    return c < 16 ? q[c] & 15 : q[c - 16] >> 4;
}

/* Q4_K, Q5_K: eight pairs (sc, m) of six bits in twelve bytes; `high`: fifth bits or NULL. */
DEVICE float value_k(const uint8_t *block, const uint8_t *high, const uint8_t *low, int c)
{
    const uint8_t *s = block + 4;
    const int sub = c / 32, j = c % 32;
    const int sc = sub < 4 ? s[sub] & 63 : (s[sub + 4] & 15) | s[sub - 4] >> 6 << 4, m = sub < 4 ? s[sub + 4] & 63 : s[sub + 4] >> 4 | s[sub] >> 6 << 4;
    const uint8_t byte = low[sub / 2 * 32 + j];
    const int code = (sub % 2 ? byte >> 4 : byte & 15) | (high ? (high[j] >> sub & 1) << 4 : 0);
    return fmaf((float)code, fp16_to_float(bytes16(block)) * (float)sc, -(fp16_to_float(bytes16(block + 2)) * (float)m));
}

DEVICE float value_q6_k(const uint8_t *block, int c)
{
    const uint8_t *low = block, *high = block + 128, *scales = block + 192;
    const int half = c / 128, quarter = c % 128 / 32, j = c % 32;
    const uint8_t byte = low[half * 64 + quarter % 2 * 32 + j];
    const int code = (quarter < 2 ? byte & 15 : byte >> 4) | (high[half * 32 + j] >> 2 * quarter & 3) << 4;
    const float d = fp16_to_float(bytes16(block + 208)) * (float)(int8_t)scales[c / 16];
    return fmaf((float)code, d, d * -32.0f);
}

DEVICE float weight_value(enum weight_dtype dtype, const uint8_t *block, int c)
{
    const float d = fp16_to_float(bytes16(block));
    switch (dtype) {
    case WEIGHT_F32: return __uint_as_float(bytes32(block));
    case WEIGHT_F16: return d;
    case WEIGHT_BF16: return bf16_to_float(bytes16(block));
    case WEIGHT_Q8_0: return (float)(int8_t)block[2 + c] * d;
    case WEIGHT_Q4_0: return fmaf((float)nibble_of(block + 2, c), d, d * -8.0f);
    case WEIGHT_Q4_1: return fmaf((float)nibble_of(block + 4, c), d, fp16_to_float(bytes16(block + 2)));
    case WEIGHT_Q5_0: return fmaf((float)(nibble_of(block + 6, c) | (int)(bytes32(block + 2) >> c & 1) << 4), d, d * -16.0f);
    case WEIGHT_Q4_K: return value_k(block, nullptr, block + 16, c);
    case WEIGHT_Q5_K: return value_k(block, block + 16, block + 48, c);
    default: return value_q6_k(block, c);
    }
}
