/* exp and log in 16 lanes, the project's own, built on lanes.h so that every build gives the same bits. Polynomials: weighted least squares toward minimax,
 * fitted by us. A scalar is lane 0 of the same code. */
#pragma once
#include "kernels/cpu/lanes.h"

/* 2^n * (1 + f + f^2 * P(f)) for x = n ln2 + f, for results that are normal numbers; elsewhere garbage. */
ALWAYS_INLINE v16 vmath_exp_core(v16 x)
{
    v16 shifted = v16_fma(x, v16_set1(0x1.715476p+0f), v16_set1(0x1.8p23f)); /* the integer nearest to x / ln2, in the low bits */
    v16 n = v16_sub(shifted, v16_set1(0x1.8p23f));
    v16 f = v16_fma(n, v16_set1(-0.693145751953125f), x); /* exact: ln2's upper 15 bits */
    f = v16_fma(n, v16_set1(-1.428606765330187e-06f), f);
    v16 p = v16_set1(0.0013814539415761828f);
    p = v16_fma(p, f, v16_set1(0.00836874544620514f));
    p = v16_fma(p, f, v16_set1(0.04166838899254799f));
    p = v16_fma(p, f, v16_set1(0.1666652113199234f));
    p = v16_fma(p, f, v16_set1(0.4999999403953552f));
    p = v16_fma(p, v16_mul(f, f), f);
    p = v16_add(p, v16_set1(1.0f));
    return v16_from_bits(v16i_add(v16_bits(p), v16i_shl(v16_bits(shifted), 23)));
}

/* exp(x), within 1 ulp. Results below 2^-126 are 0; above the largest float, +inf; NaN gives NaN. */
ALWAYS_INLINE v16 v16_exp(v16 x)
{
    v16 r = vmath_exp_core(x);
    r = v16_select(v16_lt(x, v16_set1(-87.33654f)), v16_zero(), r);
    r = v16_select(v16_lt(v16_set1(88.72283f), x), v16_set1(INFINITY), r);
    return v16_select(v16_eq(x, x), r, x);
}

/* The same bits as v16_exp for x <= 0 (-inf gives 0), cheaper; NaN gives 0. */
ALWAYS_INLINE v16 v16_exp_nonpositive(v16 x)
{
    return v16_select(v16_le(v16_set1(-87.33654f), x), vmath_exp_core(x), v16_zero());
}

ALWAYS_INLINE float vmath_expf(float x)
{
    float r[LANES];
    v16_store(r, v16_exp(v16_set1(x)));
    return r[0];
}

/* ln(x), within 1 ulp. 0 gives -inf, negative values and NaN give NaN, +inf gives +inf; subnormal arguments are exact inputs like any other. */
ALWAYS_INLINE v16 v16_log(v16 x)
{
    v16m tiny = v16_lt(x, v16_set1(0x1p-126f));
    v16 scaled = v16_select(tiny, v16_mul(x, v16_set1(0x1p23f)), x);
    /* x = 2^e * m with m in [sqrt(1/2), sqrt(2)): subtracting sqrt(1/2)'s bits carries into the exponent exactly where m would pass sqrt(2). */
    v16i offset = v16i_sub(v16_bits(scaled), v16i_set1(0x3F3504F3));
    v16i exponent = v16i_sar(offset, 23);
    v16 e = v16_sub(v16_from_i32(exponent), v16_select(tiny, v16_set1(23.0f), v16_zero()));
    v16 f = v16_sub(v16_from_bits(v16i_sub(v16_bits(scaled), v16i_shl(exponent, 23))), v16_set1(1.0f));
    v16 p = v16_set1(-0.07634492963552475f);
    p = v16_fma(p, f, v16_set1(0.12761574983596802f));
    p = v16_fma(p, f, v16_set1(-0.13160182535648346f));
    p = v16_fma(p, f, v16_set1(0.14201758801937103f));
    p = v16_fma(p, f, v16_set1(-0.16623356938362122f));
    p = v16_fma(p, f, v16_set1(0.20001226663589478f));
    p = v16_fma(p, f, v16_set1(-0.2500081956386566f));
    p = v16_fma(p, f, v16_set1(0.3333333134651184f));
    v16 ff = v16_mul(f, f);
    v16 r = v16_fma(e, v16_set1(1.428606765330187e-06f), v16_mul(v16_mul(p, f), ff)); /* small parts first */
    r = v16_fma(ff, v16_set1(-0.5f), r);
    r = v16_fma(e, v16_set1(0.693145751953125f), v16_add(f, r));
    r = v16_select(v16_eq(x, v16_set1(INFINITY)), x, r);
    r = v16_select(v16_eq(x, v16_zero()), v16_set1(-INFINITY), r);
    return v16_select(v16_le(v16_zero(), x), r, v16_set1(NAN));
}

ALWAYS_INLINE float vmath_logf(float x)
{
    float r[LANES];
    v16_store(r, v16_log(v16_set1(x)));
    return r[0];
}
