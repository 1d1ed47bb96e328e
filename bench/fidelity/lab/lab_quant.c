#include "bench/fidelity/lab/lab_quant.h"
#include "kernels/cpu/half.h"
#include <math.h>

static float to_fp16(float x)
{
    return fp16_to_float(fp16_from_float(x));
}

/* `count` values, `stride` apart. */
static void quant_group(float *x, int64_t count, int64_t stride, int bits)
{
    const float levels = (float)((1 << bits) - 1);
    float min = x[0], max = x[0];
    for (int64_t i = 1; i < count; i++) {
        const float v = x[i * stride];
        min = v < min ? v : min;
        max = v > max ? v : max;
    }
    const float lo = to_fp16(min), step = to_fp16((max - lo) / levels);
    for (int64_t i = 0; i < count; i++) {
        float code = step > 0 ? rintf((x[i * stride] - lo) / step) : 0;
        code = code < 0 ? 0 : code > levels ? levels : code;
        x[i * stride] = lo + step * code;
    }
}

void lab_quant_channels(float *x, int64_t n, int d, int group, int bits)
{
    for (int64_t row = 0; row < n; row += group)
        for (int c = 0; c < d; c++)
            quant_group(x + row * d + c, n - row < group ? n - row : group, d, bits);
}

void lab_quant_tokens(float *x, int64_t n, int d, int group, int bits)
{
    for (int64_t i = 0; i < n * d; i += group)
        quant_group(x + i, group, 1, bits);
}

/* ---- non-uniform levels ---- */

enum { NUQ_HALF = 2048, LLOYD_ROUNDS = 60 };

static double bin_value(int bin, int half)
{
    return (double)(bin - half) / half;
}

static void start_at_quantiles(const double *weight, int half, int n_levels, float *levels)
{
    double total = 0, sum = 0;
    for (int i = 0; i <= 2 * half; i++)
        total += weight[i];
    int level = 0;
    for (int i = 0; i <= 2 * half && level < n_levels; i++) {
        sum += weight[i];
        while (level < n_levels && sum >= total * (level + 0.5) / n_levels)
            levels[level++] = (float)bin_value(i, half);
    }
    for (; level < n_levels; level++)
        levels[level] = 1;
}

void lab_lloyd(const double *weight, int half, int n_levels, float *ret_levels)
{
    start_at_quantiles(weight, half, n_levels, ret_levels);
    for (int round = 0; round < LLOYD_ROUNDS; round++) {
        double mass[LAB_NUQ_MAX_LEVELS] = {0}, moment[LAB_NUQ_MAX_LEVELS] = {0};
        for (int i = 0, level = 0; i <= 2 * half; i++) {
            const double x = bin_value(i, half);
            while (level + 1 < n_levels && x > ((double)ret_levels[level] + (double)ret_levels[level + 1]) / 2)
                level++;
            mass[level] += weight[i];
            moment[level] += weight[i] * x;
        }
        for (int i = 0; i < n_levels; i++)
            if (mass[i] > 0)
                ret_levels[i] = (float)(moment[i] / mass[i]);
    }
}

struct codebook {
    float levels[LAB_NUQ_MAX_LEVELS];
    float borders[LAB_NUQ_MAX_LEVELS]; /* between a level and the next; INFINITY behind the last */
};

static void codebook_fill(const double *weight, int bits, struct codebook *book)
{
    const int n = 1 << bits;
    lab_lloyd(weight, NUQ_HALF, n, book->levels);
    for (int i = 0; i < LAB_NUQ_MAX_LEVELS; i++)
        book->borders[i] = i + 1 < n ? (book->levels[i] + book->levels[i + 1]) / 2 : INFINITY;
}

/* All borders are compared, so that the loop has no branches. */
static float nearest(const struct codebook *book, float x)
{
    int level = 0;
    for (int i = 0; i < LAB_NUQ_MAX_LEVELS - 1; i++)
        level += x > book->borders[i];
    return book->levels[level];
}

/* Middle and half width of a vector's values that are no outliers. */
struct range {
    float middle, half;
};

static struct range range_of(const float *x, const uint8_t *outlier, int64_t length)
{
    float min = INFINITY, max = -INFINITY;
    for (int64_t i = 0; i < length; i++)
        if (!outlier || !outlier[i]) {
            min = x[i] < min ? x[i] : min;
            max = x[i] > max ? x[i] : max;
        }
    if (min > max)
        return (struct range){0};
    min = to_fp16(min);
    max = to_fp16(max);
    return (struct range){(min + max) / 2, (max - min) / 2};
}

static void add_vector(const float *x, const uint8_t *outlier, int64_t length, struct range r, double *weight)
{
    for (int64_t i = 0; i < length; i++) {
        if ((outlier && outlier[i]) || r.half <= 0)
            continue;
        float y = (x[i] - r.middle) / r.half;
        y = y < -1 ? -1 : y > 1 ? 1 : y;
        weight[NUQ_HALF + (int)lrintf(y * NUQ_HALF)]++;
    }
}

static void code_vector(float *x, const uint8_t *outlier, int64_t length, const struct codebook *book)
{
    const struct range r = range_of(x, outlier, length);
    for (int64_t i = 0; i < length; i++)
        if (!outlier || !outlier[i])
            x[i] = r.half > 0 ? r.middle + r.half * nearest(book, (x[i] - r.middle) / r.half) : r.middle;
}

void lab_quant_nuq(float *x, int64_t n_vectors, int64_t length, const uint8_t *outlier, int bits)
{
    double weight[2 * NUQ_HALF + 1] = {0};
    struct codebook book;
    for (int64_t v = 0; v < n_vectors; v++) {
        const uint8_t *out = outlier ? outlier + v * length : NULL;
        add_vector(x + v * length, out, length, range_of(x + v * length, out, length), weight);
    }
    codebook_fill(weight, bits, &book);
    for (int64_t v = 0; v < n_vectors; v++)
        code_vector(x + v * length, outlier ? outlier + v * length : NULL, length, &book);
}
