/* GELU, its derivative, and the sigmoid in its tanh form: for elementwise ops, and products that end in it. */
#ifndef MEGATRAIN_CPU_GELU_H
#define MEGATRAIN_CPU_GELU_H

#include "cpu/vec.h"

/*
 * s = sigmoid(u) and t = 1 - s = e s with e = exp(-u), so that neither loses digits. -u is kept at or below
 * 80: e s would else be inf * 0.
 */
VEC_FN void sigmoid_pair(vf u, vf *s, vf *t)
{
    vf e = vf_exp(vf_min(vf_set1(80.0f), vf_neg(u)));
    *s = vf_div(vf_set1(1.0f), vf_add(vf_set1(1.0f), e));
    *t = vf_mul(e, *s);
}

VEC_FN vf sigmoid(vf u) { return vf_div(vf_set1(1.0f), vf_add(vf_set1(1.0f), vf_exp(vf_neg(u)))); }

#define GELU_C 1.5957691216057308f /* 2 sqrt(2 / pi) */
#define GELU_A 0.044715f

/* u = c (x + a x^3) */
VEC_FN vf gelu_inner(vf x, vf xx)
{
    return vf_mul(vf_mul(vf_set1(GELU_C), x), vf_fma(vf_set1(GELU_A), xx, vf_set1(1.0f)));
}

VEC_FN vf gelu(vf x) { return vf_mul(x, sigmoid(gelu_inner(x, vf_mul(x, x)))); }

/* d(x s(u))/dx = s + x s (1 - s) u'. Beyond 20 it is 0 or 1 in float; the clamp keeps x^2 from overflowing.
 */
VEC_FN vf gelu_slope(vf x)
{
    vf s, t, c = vf_max(vf_set1(-20.0f), vf_min(vf_set1(20.0f), x)), cc = vf_mul(c, c);
    sigmoid_pair(gelu_inner(c, cc), &s, &t);
    vf du = vf_mul(vf_set1(GELU_C), vf_fma(vf_set1(3.0f * GELU_A), cc, vf_set1(1.0f)));
    return vf_fma(vf_mul(vf_mul(c, s), t), du, s);
}

/*
 * The normal distribution's integral P and density p at x, |x| <= 20. Below 0 P = exp(-x^2 / 2) t q(t) with
 * t = 1 / (1 + GELU_ERF_T |x|), where q is fitted to the largest relative error, 2.3e-8; above 0 it is one less that.
 */
#define GELU_ERF_T 0.26f
#define GELU_ERF_Q                                                                                          \
    {                                                                                                       \
        0.103760922f, 0.102985821f, 0.103246431f, 0.0501962236f, 0.162875685f, -0.153713613f, 0.253891155f, \
            -0.153984279f, 0.030741643f                                                                     \
    }

VEC_FN vf normal_integral(vf x, vf *density)
{
    static const float q[] = GELU_ERF_Q;
    const vf t = vf_div(vf_set1(1.0f), vf_fma(vf_set1(GELU_ERF_T), vf_abs(x), vf_set1(1.0f)));
    const vf e = vf_exp(vf_mul(vf_mul(vf_set1(-0.5f), x), x));
    vf p = vf_set1(q[8]);
    for (int i = 7; i >= 0; i--) p = vf_fma(p, t, vf_set1(q[i]));
    const vf tail = vf_mul(e, vf_mul(p, t));
    *density = vf_mul(vf_set1(0.3989422804f), e);
    return vf_select(vf_lt(x, vf_zero()), tail, vf_sub(vf_set1(1.0f), tail));
}

/* Beyond 20 the integral is 0 or 1 in float. NaN stays. */
VEC_FN vf gelu_erf_clamped(vf x) { return vf_max(vf_set1(-20.0f), vf_min(vf_set1(20.0f), x)); }

VEC_FN vf gelu_erf(vf x)
{
    vf density;
    return vf_mul(x, normal_integral(gelu_erf_clamped(x), &density));
}

/* d(x P(x))/dx = P + x p */
VEC_FN vf gelu_erf_slope(vf x)
{
    vf density, c = gelu_erf_clamped(x), integral = normal_integral(c, &density);
    return vf_fma(c, density, integral);
}

#endif
