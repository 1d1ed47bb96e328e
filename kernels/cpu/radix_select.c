#include "kernels/cpu/radix_select.h"

enum { DIGIT_BITS = 8, N_BINS = 1 << DIGIT_BITS };

/* Counts the digit at `shift` of the keys that agree with `prefix` above it. Two histograms take turns: equal digits in a row, the usual case
 * in the top byte, would otherwise wait for each other's store. */
static void count_digits(const float *x, int64_t n, uint32_t prefix, int shift, int64_t bins[N_BINS])
{
    uint32_t even[N_BINS] = {0}, odd[N_BINS] = {0};
    uint64_t above = shift + DIGIT_BITS; /* 64-bit: a shift by 32 is meant to leave nothing */
    int64_t i = 0;
    for (; i + 1 < n; i += 2) {
        uint32_t a = radix_key(x[i]), b = radix_key(x[i + 1]);
        even[(a >> shift) & (N_BINS - 1)] += (uint64_t)a >> above == (uint64_t)prefix >> above;
        odd[(b >> shift) & (N_BINS - 1)] += (uint64_t)b >> above == (uint64_t)prefix >> above;
    }
    if (i < n) {
        uint32_t a = radix_key(x[i]);
        even[(a >> shift) & (N_BINS - 1)] += (uint64_t)a >> above == (uint64_t)prefix >> above;
    }
    for (int b = 0; b < N_BINS; b++)
        bins[b] = (int64_t)even[b] + odd[b];
}

uint32_t radix_select_key(const float *x, int64_t n, int64_t k, int64_t *ret_n_equal)
{
    uint32_t prefix = 0;
    int64_t bins[N_BINS];
    for (int shift = 32 - DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        count_digits(x, n, prefix, shift, bins);
        int digit = N_BINS - 1;
        while (k > bins[digit])
            k -= bins[digit--];
        prefix |= (uint32_t)digit << shift;
    }
    *ret_n_equal = k;
    return prefix;
}

void radix_select(const float *x, int64_t n, int64_t k, int32_t *ret_indices)
{
    if (k <= 0)
        return;
    int64_t n_equal, at = 0;
    uint32_t key = radix_select_key(x, n, k, &n_equal);
    for (int64_t i = 0; at < k; i++) {
        uint32_t u = radix_key(x[i]);
        if (u > key || (u == key && n_equal-- > 0))
            ret_indices[at++] = (int32_t)i;
    }
}
