/* What the instruction VDPBF16PS does with one product, in plain C (cpu/gemm.h): for the tests of what is built of
 * it. */
#ifndef MEGATRAIN_TEST_DOT_STEP_H
#define MEGATRAIN_TEST_DOT_STEP_H

#include <math.h>
#include <stdbool.h>

static inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }

/* a b + c as the instruction has it. A number below 2^-126 - 2^-151, where 24 bits are rounded up to 2^-126, is 0. */
static inline float dot_step(float a, float b, float c)
{
    const double limit = 0x1p-126 - 0x1p-151;
    const float r = fmaf(flushed(a), flushed(b), flushed(c));
    const double product = (double)flushed(a) * (double)flushed(b), other = (double)flushed(c), sum = product + other;
    const double part = sum - product, lost = (product - (sum - part)) + (other - part); /* sum + lost is exact */
    const bool tiny = fabs(sum) < limit || (fabs(sum) == limit && lost * sum < 0);
    return tiny ? copysignf(0, r) : r;
}

#endif
