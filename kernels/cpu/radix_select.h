/* Exact selection of the k largest floats without sorting: the k-th largest key is found byte by byte from the top (four histograms of 256 bins),
 * then one pass collects. The order is total: larger value first, then lower index; NaN counts as -infinity, -0 as +0.
 * Pure functions, any thread, O(n). */
#pragma once
#include <stdint.h>
#include <string.h>

/* Maps a float to an unsigned integer with the same order. */
static inline uint32_t radix_key(float x)
{
    uint32_t u;
    if (!(x == x))
        x = -__builtin_inff();
    x += 0.0f; /* -0 becomes +0 */
    memcpy(&u, &x, sizeof u);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* The key of the k-th largest of x[n], 1 <= k <= n. `ret_n_equal`: how many elements with exactly that key belong to the k largest (>= 1). */
uint32_t radix_select_key(const float *x, int64_t n, int64_t k, int64_t *ret_n_equal);
/* Indices of the k largest of x[n], ascending. 0 <= k <= n. */
void radix_select(const float *x, int64_t n, int64_t k, int32_t *ret_indices);
