/* Quantizers of other people's caches, as quantize-dequantize in place on fp32 rows. Any thread.
 *
 * The asymmetric code: lo = fp16(min x), step = fp16((max x - lo) / (2^bits - 1)), code = clamp(round-half-even((x - lo) / step), 0, 2^bits - 1), value = lo + step * code. Where the
 * step is not positive (a constant group) the value is lo. */
#pragma once
#include <stdint.h>

/* x [n, d], one lo and step for each channel of `group` consecutive rows; the last group may be short. */
void lab_quant_channels(float *x, int64_t n, int d, int group, int bits);
/* x [n, d], one lo and step for each `group` consecutive channels of a row; d is a multiple of group. */
void lab_quant_tokens(float *x, int64_t n, int d, int group, int bits);

enum { LAB_NUQ_MAX_LEVELS = 16 };
/* KVQuant's code of n_vectors vectors [n_vectors, length]: a value that is marked in `outlier` [n_vectors, length] stays as it is; the others are scaled to -1 .. 1 between their
 * vector's minimum and maximum (both fp16) and take the nearest of 2^bits levels, which all vectors share. The levels are found on these very values by Lloyd's algorithm.
 * bits 1 .. 4; outlier NULL: none. */
void lab_quant_nuq(float *x, int64_t n_vectors, int64_t length, const uint8_t *outlier, int bits);
/* Lloyd's algorithm in one dimension on a histogram of 2 * half + 1 equal bins over -1 .. 1: weight [2 * half + 1] -> n_levels ascending levels. Starts from the quantiles. */
void lab_lloyd(const double *weight, int half, int n_levels, float *ret_levels);
