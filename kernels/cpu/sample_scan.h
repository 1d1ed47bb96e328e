/* Vector passes over one row of logits, for sample.c. A pass reads 16 logits at a time; NaN reads as -INFINITY and +INFINITY as the largest float, so that
 * nothing after the load needs to think of them. Sums run in 16 lanes by chunks of SCAN_CHUNK tokens, chunks in order in double. */
#pragma once
#include "kernels/cpu/sample_cut.h"
#include "kernels/cpu/vmath.h"
#include <float.h>
#include <stdbool.h>

enum { SCAN_CHUNK = 1024, SCAN_BOUNDS = 5, SCAN_BLOCK = 64 /* tokens that one look decides about */ };

/* A row and the distribution drawn from it: weight of token i = exp((x[i] - max) * inverse_temperature) if it passes the threshold, that is if its exponent z is above
 * `z`, or equal with an id up to `id`. */
struct scan_row {
    const float *x;
    int n;
    float max, inverse_temperature;
    float z;
    int32_t id;
};

SPECIALIZE v16 scan_load(const float *x, int i, int n)
{
    v16 low = v16_set1(-INFINITY), v;
    if (n - i >= LANES) {
        v = v16_load(x + i);
    } else {
        float padded[LANES];
        v16_store(padded, low);
        memcpy(padded, x + i, sizeof *x * (size_t)(n - i));
        v = v16_load(padded);
    }
    return v16_min(v16_select(v16_eq(v, v), v, low), v16_set1(FLT_MAX));
}

static float scan_max(const float *x, int n)
{
    v16 max = v16_set1(-INFINITY);
    for (int i = 0; i < n; i += LANES)
        max = v16_max(scan_load(x, i, n), max);
    return v16_reduce_max(max);
}

/* The first token whose logit is `max`. */
static int32_t scan_first_equal(const float *x, int n, float max)
{
    for (int i = 0; i < n; i += LANES) {
        float v[LANES];
        v16_store(v, scan_load(x, i, n));
        for (int l = 0; l < LANES; l++)
            if (v[l] == max)
                return i + l;
    }
    return 0;
}

SPECIALIZE v16 scan_exponent(const struct scan_row *r, int i)
{
    return v16_mul(v16_sub(scan_load(r->x, i, r->n), v16_set1(r->max)), v16_set1(r->inverse_temperature));
}

SPECIALIZE v16 scan_weight(const struct scan_row *r, int i, v16 z)
{
    static const int32_t lane[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    v16 w = v16_exp_nonpositive(z), id = v16_from_i32(v16i_add(v16i_set1(i), v16i_load(lane)));
    v16 tied = v16_select(v16_eq(z, v16_set1(r->z)), v16_select(v16_le(id, v16_from_i32(v16i_set1(r->id))), w, v16_zero()), v16_zero());
    return v16_select(v16_lt(v16_set1(r->z), z), w, tied);
}

/* Weights of the chunk that starts at `first`, summed; stored in w [SCAN_CHUNK] if not NULL. */
SPECIALIZE float scan_chunk(const struct scan_row *r, int first, float *w)
{
    v16 sum = v16_zero();
    int end = r->n - first < SCAN_CHUNK ? r->n : first + SCAN_CHUNK;
    for (int i = first; i < end; i += LANES) {
        v16 z = scan_exponent(r, i), weight = v16_zero();
        if (v16m_bits(v16_le(v16_set1(r->z), z)) != 0) /* behind a filter hardly any */
            weight = scan_weight(r, i, z);
        sum = v16_add(sum, weight);
        if (w)
            v16_store(w + (i - first), weight);
    }
    return v16_reduce_add(sum);
}

/* Sum of all weights; sums of the chunks in chunk_sum [ceil(n / SCAN_CHUNK)] if not NULL. */
static double scan_total(const struct scan_row *r, float *chunk_sum)
{
    double total = 0;
    for (int first = 0; first < r->n; first += SCAN_CHUNK) {
        float sum = scan_chunk(r, first, NULL);
        total += sum;
        if (chunk_sum)
            chunk_sum[first / SCAN_CHUNK] = sum;
    }
    return total;
}

/* How much lies at or above each bound on z: tokens and their weights. Bounds descend; what has no weight is no candidate. */
struct scan_histogram {
    double count[SCAN_BOUNDS], weight[SCAN_BOUNDS];
};

SPECIALIZE void scan_histogram_chunk(const struct scan_row *r, const float *bounds, int first, struct scan_histogram *h)
{
    v16 weight[SCAN_BOUNDS], count[SCAN_BOUNDS], one = v16_set1(1.0f), zero = v16_zero();
    UNROLL for (int b = 0; b < SCAN_BOUNDS; b++)
        weight[b] = count[b] = zero;
    int end = r->n - first < SCAN_CHUNK ? r->n : first + SCAN_CHUNK;
    float least = bounds[SCAN_BOUNDS - 1] > r->z ? bounds[SCAN_BOUNDS - 1] : r->z;
    for (int i = first; i < end; i += LANES) {
        v16 z = scan_exponent(r, i);
        if (v16m_bits(v16_le(v16_set1(least), z)) == 0)
            continue;
        v16 w = scan_weight(r, i, z);
        v16 kept = v16_select(v16_lt(zero, w), one, zero);
        UNROLL for (int b = 0; b < SCAN_BOUNDS; b++) {
            v16m above = v16_le(v16_set1(bounds[b]), z);
            weight[b] = v16_add(weight[b], v16_select(above, w, zero));
            count[b] = v16_add(count[b], v16_select(above, kept, zero));
        }
    }
    UNROLL for (int b = 0; b < SCAN_BOUNDS; b++) {
        h->weight[b] += v16_reduce_add(weight[b]);
        h->count[b] += v16_reduce_add(count[b]);
    }
}

static struct scan_histogram scan_histogram(const struct scan_row *r, const float *bounds)
{
    struct scan_histogram h = {{0}, {0}};
    for (int first = 0; first < r->n; first += SCAN_CHUNK)
        scan_histogram_chunk(r, bounds, first, &h);
    return h;
}

/* A candidate as one number that sorts by weight descending, then id ascending. */
static inline uint64_t scan_key(float z, int32_t id)
{
    return (uint64_t)(float_bits(z) & 0x7FFFFFFFu) << 32 | (uint32_t)id; /* z <= 0: its magnitude grows as its weight falls */
}
static inline float scan_key_z(uint64_t key)
{
    return -float_from_bits((uint32_t)(key >> 32));
}

static inline bool scan_passes(const struct scan_row *r, float z, int32_t id)
{
    return z > r->z || (z == r->z && id <= r->id);
}

/* Candidates with low <= z < high in order of id, at most `capacity`, with their weight or, for counting, 1. */
static int64_t scan_gather(const struct scan_row *r, float low, float high, bool counting, struct cut_candidate *ret, int64_t capacity)
{
    int64_t n = 0;
    for (int i = 0; i < r->n; i += LANES) {
        v16 z = scan_exponent(r, i);
        uint32_t in = v16m_bits(v16_le(v16_set1(low), z)) & v16m_bits(v16_lt(z, v16_set1(high)));
        if (in == 0)
            continue;
        float value[LANES], weight[LANES];
        v16_store(value, z);
        v16_store(weight, v16_exp_nonpositive(z));
        for (; in != 0 && n < capacity; in &= in - 1) {
            int l = __builtin_ctz(in);
            if (weight[l] > 0 && scan_passes(r, value[l], i + l))
                ret[n++] = (struct cut_candidate){.key = scan_key(value[l], i + l), .weight = counting ? 1 : weight[l]};
        }
    }
    return n;
}

/* Inserts a logit into the descending list; equal ones stand behind those found before. */
static int scan_top_insert(float value, int32_t id, int found, int n_top, int32_t *ids, float *values)
{
    int at = found < n_top ? found : n_top - 1;
    for (; at > 0 && values[at - 1] < value; at--) {
        values[at] = values[at - 1];
        ids[at] = ids[at - 1];
    }
    values[at] = value;
    ids[at] = id;
    return found < n_top ? found + 1 : found;
}

/* The n_top largest logits, descending, ties by lower id. Returns how many there are (fewer where logits are -INFINITY). */
static int scan_top(const float *x, int n, int n_top, int32_t *ret_ids, float *ret_values)
{
    int found = 0;
    float least = -INFINITY; /* what a newcomer must exceed */
    for (int first = 0; n_top > 0 && first < n; first += SCAN_BLOCK) {
        float value[SCAN_BLOCK];
        v16 max = v16_set1(-INFINITY);
        int end = n - first < SCAN_BLOCK ? n : first + SCAN_BLOCK;
        for (int i = first; i < end; i += LANES) {
            v16 v = scan_load(x, i, n);
            v16_store(value + (i - first), v);
            max = v16_max(max, v);
        }
        if (!(v16_reduce_max(max) > least))
            continue;
        for (int i = first; i < end; i++)
            if (value[i - first] > least) {
                found = scan_top_insert(value[i - first], i, found, n_top, ret_ids, ret_values);
                least = found == n_top ? ret_values[n_top - 1] : -INFINITY;
            }
    }
    return found;
}
