/*
 * Each function: bring the argument into a short interval, sum a Taylor or atanh series there (its first
 * neglected term is below 1e-17 of the result), undo the reduction exactly or in two pieces.
 * Constants are written as a head with trailing zero bits, so that head * integer is exact, and a tail.
 */
#include "base/mathx.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "base/err.h"

/* ln 2: 32 bits and the rest; integer multiples of the head up to 2^21 are exact */
#define LN2_HEAD 0x1.62e42feep-1
#define LN2_TAIL 0x1.a39ef35793c76p-33

/* pi / 2 in three pieces of 33, 33 and 53 bits */
#define HALF_PI_1 0x1.921fb544p+0
#define HALF_PI_2 0x1.0b4611a6p-34
#define HALF_PI_3 0x1.3198a2e037073p-69

static double from_bits(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint64_t to_bits(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Nearest integer of |x| < 2^51, ties to even: adding 1.5 * 2^52 leaves no bits for a fraction. */
static double nearest(double x) { return (x + 0x1.8p52) - 0x1.8p52; }

static double power_of_two(int e) /* -1022 <= e <= 1023 */ { return from_bits((uint64_t)(e + 1023) << 52); }

/* sum of c[i] * x^i */
static double polynomial(const double *c, int n, double x)
{
    double sum = c[n - 1];
    for (int i = n - 2; i >= 0; i--) sum = sum * x + c[i];
    return sum;
}

double m_exp(double x)
{
    static const double c[] = {
        /* 1 / n! from n = 2 */
        1.0 / 2,     1.0 / 6,      1.0 / 24,      1.0 / 120,      1.0 / 720,       1.0 / 5040,
        1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800,
    };
    if (isnan(x)) return x;
    if (x > 709.8) return INFINITY;
    if (x < -745.2) return 0;
    double k = nearest(x * 1.4426950408889634);
    double head = x - k * LN2_HEAD, tail = k * LN2_TAIL;
    double r = head - tail; /* |r| <= ln(2) / 2 */
    double y = 1 + (r + r * r * polynomial(c, sizeof c / sizeof *c, r));
    int e = (int)k, half = e / 2; /* two factors: 2^e alone may not be a normal number */
    return y * power_of_two(half) * power_of_two(e - half);
}

double m_log(double x)
{
    static const double c[] = {
        /* atanh(s) = s + s^3/3 + s^5/5 + ... in powers of s^2 */
        1.0 / 3, 1.0 / 5, 1.0 / 7, 1.0 / 9, 1.0 / 11, 1.0 / 13, 1.0 / 15, 1.0 / 17, 1.0 / 19, 1.0 / 21,
    };
    if (isnan(x) || x < 0) return NAN;
    if (x == 0) return -INFINITY;
    if (isinf(x)) return x;
    int e = 0;
    if (x < 0x1p-1022) {
        x *= 0x1p54;
        e = -54;
    }
    uint64_t bits = to_bits(x);
    e += (int)(bits >> 52) - 1023;
    double m = from_bits((bits & 0xFFFFFFFFFFFFFu) | 0x3FF0000000000000u); /* 1 <= m < 2 */
    if (m > 1.4142135623730951) {
        m *= 0.5;
        e++;
    }
    double f = m - 1, s = f / (m + 1), z = s * s; /* log m = 2 atanh(s), |s| < 0.1716 */
    double tail = 2 * s * z * polynomial(c, sizeof c / sizeof *c, z);
    return e * LN2_HEAD + (2 * s + (tail + e * LN2_TAIL));
}

/* sin(x + turns * pi / 2) */
static double sine(double x, int turns)
{
    static const double odd[] = {
        /* (sin r - r) / r^3 in powers of r^2 */
        -1.0 / 6,        1.0 / 120,          -1.0 / 5040,         1.0 / 362880,
        -1.0 / 39916800, 1.0 / 6227020800.0, -1.0 / 1307674368e3, 1.0 / 355687428096e3,
    };
    static const double even[] = {
        /* (cos r - 1 + r^2/2) / r^4 in powers of r^2 */
        1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600, -1.0 / 87178291200.0, 1.0 / 20922789888e3,
    };
    if (isnan(x)) return x;
    ASSERT(fabs(x) <= 1e6);
    double k = nearest(x * 0.63661977236758134);
    double r = ((x - k * HALF_PI_1) - k * HALF_PI_2) - k * HALF_PI_3; /* |r| <= pi / 4 */
    double z = r * r, y;
    int quarter = (int)((int64_t)k + turns) & 3;
    if (quarter & 1) y = 1 - (0.5 * z - z * z * polynomial(even, sizeof even / sizeof *even, z));
    else y = r + r * z * polynomial(odd, sizeof odd / sizeof *odd, z);
    return quarter & 2 ? -y : y;
}

double m_sin(double x) { return sine(x, 0); }

double m_cos(double x) { return sine(x, 1); }

double m_pow(double x, double y)
{
    if (y == 0) return 1;
    return m_exp(y * m_log(x)); /* 0: exp(-infinity) = 0, exp(infinity) for y < 0 */
}
