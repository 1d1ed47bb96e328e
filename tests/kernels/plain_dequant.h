/* GGUF blocks to values in double, straight from the format's definition and independent of the code under test. The values are exact: every product and sum of
 * the formats fits in 53 bits. */
#pragma once
#include "kernels/kernels.h"

/* Bytes of one row in the file. */
size_t plain_row_bytes(enum weight_dtype dtype, int64_t n_cols);
double plain_weight(enum weight_dtype dtype, const uint8_t *row, int64_t col);
/* Random rows: codes are random bits, scales are finite fp16 of magnitude 2^-4 and below with either sign. */
void plain_fill_rows(enum weight_dtype dtype, uint8_t *rows, int64_t n_rows, int64_t n_cols, uint64_t seed);
const char *plain_dtype_name(enum weight_dtype dtype);
int plain_block_cols(enum weight_dtype dtype); /* n_cols must be a multiple */
