#include "worker/model/rope_scaling.h"
#include <errno.h>
#include <math.h>
#include <stddef.h>

static const double pi = 3.14159265358979323846;
static const double ln2_high = 0x1.62e42fefa38p-1, ln2_low = 0x1.ef35793c7673p-45; /* the high part times a small integer is exact */
static const double max_value = 1e12; /* beyond any sane parameter; keeps what follows finite */

const char *rope_scaling_name(enum rope_scaling_type type)
{
    switch (type) {
    case ROPE_SCALING_NONE: return "none";
    case ROPE_SCALING_LINEAR: return "linear";
    case ROPE_SCALING_LLAMA3: return "llama3";
    case ROPE_SCALING_YARN: return "yarn";
    }
    return "unknown";
}

static bool in_range(double v, double low, double high)
{
    return v >= low && v <= high; /* false for NaN */
}

static int check_range(struct error *err, const char *name, double v, double low, double high)
{
    if (in_range(v, low, high))
        return 0;
    return error_set(err, -EINVAL, "RoPE: %s is %g (allowed: %g to %g)", name, v, low, high);
}

static int check_scaling(const struct rope_scaling *s, struct error *err)
{
    int r = check_range(err, "theta", s->theta, 2.0, max_value);
    if (r < 0 || s->type == ROPE_SCALING_NONE)
        return r;
    if ((r = check_range(err, "the scaling factor", s->factor, 1.0, 1e6)) < 0 || s->type == ROPE_SCALING_LINEAR)
        return r;
    if ((r = check_range(err, "the original context length", s->original_context, 1.0, max_value)) < 0)
        return r;
    if (s->type == ROPE_SCALING_LLAMA3) {
        if ((r = check_range(err, "low_freq_factor", s->low_freq_factor, 1e-6, 1e6)) < 0)
            return r;
        if (!(s->high_freq_factor > s->low_freq_factor && s->high_freq_factor <= 1e6))
            return error_set(err, -EINVAL, "RoPE: high_freq_factor is %g (allowed: above low_freq_factor, %g, up to 1e6)", s->high_freq_factor,
                             s->low_freq_factor);
        return 0;
    }
    if ((r = check_range(err, "attention_factor", s->attention_factor, 0.0, 1e3)) < 0 ||
        (r = check_range(err, "the attention multiplier", s->attention_multiplier, 0.0, 1e3)) < 0 ||
        (r = check_range(err, "mscale", s->mscale, 0.0, 1e3)) < 0 ||
        (r = check_range(err, "mscale_all_dim", s->mscale_all_dim, 0.0, 1e3)) < 0 ||
        (r = check_range(err, "beta_fast", s->beta_fast, 0.0, 1e6)) < 0)
        return r;
    return check_range(err, "beta_slow", s->beta_slow, 0.0, 1e6);
}

/* The C library's log and pow may differ in the last bit between machines (versions, FMA variants). These use nothing but correctly rounded operations, so that
 * every worker has the same frequencies; their error is a few units in the last place. */
static double fixed_log(double x)
{
    int exponent;
    double m = frexp(x, &exponent); /* [0.5, 1) */
    if (m < 0.70710678118654752) {
        m *= 2.0;
        exponent--;
    }
    double t = (m - 1.0) / (m + 1.0), t2 = t * t, sum = 0.0; /* log m = 2 atanh t, t^2 < 0.03 */
    for (int k = 27; k >= 1; k -= 2)
        sum = sum * t2 + 1.0 / k;
    return exponent * ln2_high + (exponent * ln2_low + 2.0 * t * sum);
}

static double fixed_exp(double x)
{
    double k = floor(x / (ln2_high + ln2_low) + 0.5);
    double r = (x - k * ln2_high) - k * ln2_low, sum = 1.0; /* |r| < 0.35 */
    for (int i = 18; i >= 1; i--)
        sum = 1.0 + sum * r / i;
    return ldexp(sum, (int)k);
}

/* Long wavelengths are interpolated, short ones kept, those between blended. */
static double llama3_freq(const struct rope_scaling *s, double freq)
{
    double wavelength = 2.0 * pi / freq;
    if (wavelength < s->original_context / s->high_freq_factor)
        return freq;
    if (wavelength > s->original_context / s->low_freq_factor)
        return freq / s->factor;
    double smooth = (s->original_context / wavelength - s->low_freq_factor) / (s->high_freq_factor - s->low_freq_factor);
    return (1.0 - smooth) * freq / s->factor + smooth * freq;
}

/* The pair (fractional) that turns `rotations` times within the original context. */
static double yarn_pair(const struct rope_scaling *s, int head_dim, double rotations)
{
    return head_dim * fixed_log(s->original_context / (rotations * 2.0 * pi)) / (2.0 * fixed_log(s->theta));
}

static double yarn_mscale(double factor, double mscale)
{
    return factor <= 1.0 ? 1.0 : 0.1 * mscale * fixed_log(factor) + 1.0;
}

static double yarn_attention_factor(const struct rope_scaling *s)
{
    if (s->attention_factor > 0)
        return s->attention_factor;
    if (s->mscale > 0 && s->mscale_all_dim > 0)
        return yarn_mscale(s->factor, s->mscale) / yarn_mscale(s->factor, s->mscale_all_dim);
    return yarn_mscale(s->factor, 1.0) * (s->attention_multiplier > 0 ? s->attention_multiplier : 1.0);
}

static void yarn_scale(const struct rope_scaling *s, int head_dim, struct rope_freqs *freqs)
{
    double low = yarn_pair(s, head_dim, s->beta_fast > 0 ? s->beta_fast : 32.0);
    double high = yarn_pair(s, head_dim, s->beta_slow > 0 ? s->beta_slow : 1.0);
    if (!s->no_truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0.0);
    high = fmin(high, head_dim - 1.0);
    if (low == high)
        high += 0.001;
    for (int i = 0; i < freqs->n_freqs; i++) {
        double interpolated = fmin(fmax((i - low) / (high - low), 0.0), 1.0);
        freqs->inv_freq[i] *= interpolated / s->factor + (1.0 - interpolated);
    }
    freqs->factor = yarn_attention_factor(s);
}

int rope_freqs_init(const struct rope_scaling *scaling, int head_dim, const float *divisors, struct rope_freqs *ret_freqs, struct error *err)
{
    if (head_dim < 2 || head_dim > 2 * ROPE_MAX_FREQS || head_dim % 2)
        return error_set(err, -EINVAL, "RoPE: the head dim is %d (allowed: even, 2 to %d)", head_dim, 2 * ROPE_MAX_FREQS);
    int r = check_scaling(scaling, err);
    if (r < 0)
        return r;
    struct rope_freqs freqs = {.n_freqs = head_dim / 2, .factor = 1.0};
    for (int i = 0; i < freqs.n_freqs; i++) {
        double freq = fixed_exp(-2.0 * i / head_dim * fixed_log(scaling->theta));
        if (scaling->type == ROPE_SCALING_LINEAR)
            freq /= scaling->factor;
        if (scaling->type == ROPE_SCALING_LLAMA3)
            freq = llama3_freq(scaling, freq);
        if (divisors) {
            if (!in_range((double)divisors[i], 1e-6, 1e6))
                return error_set(err, -EINVAL, "RoPE: the divisor of frequency %d is %g (allowed: 1e-6 to 1e6)", i, (double)divisors[i]);
            freq /= (double)divisors[i];
        }
        freqs.inv_freq[i] = freq;
    }
    if (scaling->type == ROPE_SCALING_YARN)
        yarn_scale(scaling, head_dim, &freqs);
    *ret_freqs = freqs;
    return 0;
}
