/*
 * Results as a chip rounds them (EMU_ROUND=chip; README.md, "Rounding"). A model: what NVIDIA documents of the functions,
 * and of a sum of products the coarsest alignment that measurements of tensor cores have found.
 */
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

namespace emu
{

static bool chip_wanted()
{
    const char *text = getenv("EMU_ROUND");
    if (text && strcmp(text, "exact") != 0 && strcmp(text, "chip") != 0)
        fail("EMU_ROUND=%s: exact or chip is wanted", text);
    return text && strcmp(text, "chip") == 0;
}

const bool chip_rounding = chip_wanted();

float rough(float x)
{
    enum { FRACTION = (1 << 23) - 1 };
    const uint32_t bits = bits_as<uint32_t>(x);
    if (!chip_rounding || !(bits & FRACTION) || !isfinite(x)) return x;
    const int32_t error = static_cast<int32_t>(bits * 0x9E3779B9u); /* the same for the same result */
    return static_cast<float>(x * (1 + error * 0x1p-53));
}

/* Exponent of the leading bit of a number that is not 0; a product of two halves is no subnormal. */
static int exponent(double x) { return static_cast<int>(bits_as<uint64_t>(x) >> 52 & 0x7ff) - 1023; }

static float toward_zero(double x)
{
    const float f = static_cast<float>(x);
    return fabs(static_cast<double>(f)) > fabs(x) ? nextafterf(f, 0.0f) : f;
}

float chip_sum(const double *x, int count)
{
    enum { KEPT = 24 }; /* bits behind the leading one of the largest */
    double plain = 0;
    int64_t sum = 0;
    int top = -1023;
    for (int i = 0; i < count; i++) {
        plain += x[i];
        if (exponent(x[i]) > top) top = exponent(x[i]);
    }
    if (top == -1023 || !isfinite(plain)) return static_cast<float>(plain);
    const double scale = ldexp(1, KEPT - top);
    for (int i = 0; i < count; i++) sum += static_cast<int64_t>(x[i] * scale);
    return toward_zero(static_cast<double>(sum) / scale);
}

} // namespace emu
