/*
 * Results as a chip rounds them (EMU_ROUND=chip; README.md, "Rounding"). A model: what NVIDIA documents of the
 * functions, and of a sum of products what measurements of tensor cores have found (on an H100 ours,
 * test/cuda/test_cuda_hopper.cu).
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

enum { NO_EXPONENT = -1024 };

/* Exponent of a number's leading bit; NO_EXPONENT of 0. Halves are no subnormals in fp32, but for some of bf16. */
static int exponent(float x)
{
    const int biased = static_cast<int>(bits_as<uint32_t>(x) >> 23 & 0xff);
    return x == 0 ? NO_EXPONENT : biased - 127;
}

static float toward_zero(double x)
{
    const float f = static_cast<float>(x);
    return fabs(static_cast<double>(f)) > fabs(x) ? nextafterf(f, 0.0f) : f;
}

/* Bits that stay behind the leading one of the largest: on an H100 all sums that we measured; elsewhere the fewest
 * known. */
static int kept_bits() { return gpu().major == 9 ? 25 : 24; }

static float cut_sum(float c, const float *a, int a_step, const float *b, int b_step, int count, int kept)
{
    double plain = c;
    int top = exponent(c);
    for (int i = 0; i < count; i++) {
        const float x = a[i * a_step], y = b[i * b_step];
        plain += static_cast<double>(x) * y;
        const int e = x == 0 || y == 0 ? NO_EXPONENT : exponent(x) + exponent(y);
        if (e > top) top = e;
    }
    if (top == NO_EXPONENT || !isfinite(plain)) return static_cast<float>(plain);
    const double scale = ldexp(1, kept - top);
    int64_t sum = static_cast<int64_t>(c * scale);
    for (int i = 0; i < count; i++)
        sum += static_cast<int64_t>(static_cast<double>(a[i * a_step]) * b[i * b_step] * scale);
    return toward_zero(ldexp(static_cast<double>(sum), top - kept));
}

float chip_sum(float c, const float *a, int a_step, const float *b, int b_step, int count)
{
    static const int kept = kept_bits();
    return cut_sum(c, a, a_step, b, b_step, count, kept);
}

/* Not measured here: some 14 bits with the leading one, by others' reports of Hopper (DeepSeek-AI 2024, section
 * 3.3.2). */
float chip_sum_fp8(float c, const float *a, int a_step, const float *b, int b_step, int count)
{
    enum { KEPT = 13 };
    return cut_sum(c, a, a_step, b, b_step, count, KEPT);
}

} // namespace emu
