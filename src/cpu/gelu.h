/* GELU of the tanh form, its derivative, the sigmoid in them: for elementwise ops, and for products that end in it. */
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

#endif
