/*
 * Op cast and base/half.h: every 16-bit pattern against the definition of its format in double, every rounding
 * boundary and many other floats against the nearest of the format's numbers, on every instruction set.
 */
#include "base/half.h"
#include "ops_env.h"

/* A format: numbers (mantissa + 2^mantissa_bits) * 2^(exponent - bias - mantissa_bits). */
typedef struct {
    DType dtype;
    int mantissa_bits, bias;
} Format;

static const Format formats[] = { { BF16, 7, 127 }, { F16, 10, 15 } };

static double value_of(Format f, uint16_t h)
{
    int mantissa = h & ((1 << f.mantissa_bits) - 1), exponent = (h & 0x7FFF) >> f.mantissa_bits;
    double sign = h & 0x8000 ? -1 : 1;
    if (exponent == 2 * f.bias + 1) return mantissa ? NAN : sign * INFINITY;
    if (!exponent) return sign * ldexp(mantissa, 1 - f.bias - f.mantissa_bits);
    return sign * ldexp(mantissa + (1 << f.mantissa_bits), exponent - f.bias - f.mantissa_bits);
}

/* The nearest pattern by bisection over the ordered positive patterns; infinity stands where the next number would. */
static uint16_t nearest(Format f, float x)
{
    int infinity = (2 * f.bias + 1) << f.mantissa_bits, low = 0, high = infinity;
    double a = fabs((double)x), top = ldexp(1, f.bias + 1);
    if (isnan(x)) return 0x7FFF;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (value_of(f, (uint16_t)middle) <= a) low = middle;
        else high = middle;
    }
    double below = a - value_of(f, (uint16_t)low), above = (high == infinity ? top : value_of(f, (uint16_t)high)) - a;
    int to = isinf(a) || below > above || (below == above && low & 1) ? high : low;
    return (uint16_t)(to | (signbit(x) ? 0x8000 : 0));
}

static void run_cast(Isa isa, int threads, Tensor y, Tensor x)
{
    Env e;
    env_open(&e, isa, threads, 0);
    RUN(&e, cast, .y = y, .x = x);
    env_close(&e);
}

TEST(every_pattern_to_float_and_back)
{
    enum { N = 1 << 16 };
    static uint16_t from[N], back[N];
    static float wide[N];
    for (int h = 0; h < N; h++) from[h] = (uint16_t)h;
    for (int k = 0; k < 2; k++) {
        Format f = formats[k];
        run_cast(isa_best(), 1, tensor_of(wide, F32, N), tensor_of(from, f.dtype, N));
        run_cast(isa_best(), 1, tensor_of(back, f.dtype, N), tensor_of(wide, F32, N));
        int64_t wrong = 0;
        for (int h = 0; h < N; h++) {
            double want = value_of(f, (uint16_t)h);
            if (isnan(want)) wrong += !isnan(wide[h]) || back[h] != 0x7FFF;
            else wrong += (double)wide[h] != want || !signbit(wide[h]) != !signbit(want) || back[h] != h;
        }
        CHECK_MSG(wrong == 0, "%lld patterns of %s", (long long)wrong, dtype_name(f.dtype));
    }
}

/* Floats at, just below and just above each middle between neighbours, and of all sizes. */
static int64_t rounding_input(Format f, float *x)
{
    int64_t n = 0;
    uint64_t state = 11;
    int infinity = (2 * f.bias + 1) << f.mantissa_bits;
    for (int h = 0; h < infinity; h++) {
        double next = h + 1 == infinity ? ldexp(1, f.bias + 1) : value_of(f, (uint16_t)(h + 1));
        float middle = (float)((value_of(f, (uint16_t)h) + next) / 2);
        x[n++] = middle;
        x[n++] = nextafterf(middle, 0);
        x[n++] = -nextafterf(middle, INFINITY);
    }
    for (int i = 0; i < 50000; i++) x[n++] = half_float_of((uint32_t)test_rand(&state));
    float last[] = { 0, -0.0f, INFINITY, -INFINITY, NAN, -NAN, 0x1p-149f, 0x1.fffffep127f };
    memcpy(x + n, last, sizeof last);
    return n + (int64_t)(sizeof last / sizeof *last);
}

TEST(float_to_nearest)
{
    enum { MOST = 3 * 32768 + 50008 };
    static float x[MOST];
    static uint16_t y[MOST + 1];
    for (int k = 0; k < 2; k++) {
        int64_t n = rounding_input(formats[k], x);
        for (Isa isa = ISA_AVX512; isa < ISA_COUNT; isa++) {
            if (!isa_supported(isa)) continue;
            memset(y, 0xA5, sizeof y);
            run_cast(isa, 2, tensor_of(y, formats[k].dtype, n), tensor_of(x, F32, n));
            int64_t wrong = 0;
            for (int64_t i = 0; i < n; i++) wrong += y[i] != nearest(formats[k], x[i]);
            CHECK_MSG(wrong == 0 && y[n] == 0xA5A5, "%s, %s: %lld of %lld", dtype_name(formats[k].dtype),
                      isa_name(isa), (long long)wrong, (long long)n);
        }
    }
}

/* Between the 16-bit formats by way of float; the same dtype is a copy; the count in use is kept. */
TEST(other_pairs_and_rows)
{
    enum { N = 1000 };
    static uint16_t b[N], h[N], want;
    float x[N], y[N];
    int64_t used = 700;
    for (int i = 0; i < N; i++) x[i] = (float)(i - 500) * 0.37f;
    run_cast(isa_best(), 1, tensor_of(b, BF16, N), tensor_of(x, F32, N));
    memset(h, 0xA5, sizeof h);
    Tensor to = tensor_of(h, F16, N);
    to.rows = &used;
    run_cast(isa_best(), 1, to, tensor_of(b, BF16, N));
    for (int i = 0; i < N; i++) {
        want = i < used ? nearest(formats[1], (float)value_of(formats[0], b[i])) : 0xA5A5;
        CHECK_MSG(h[i] == want, "element %d", i);
    }
    run_cast(isa_best(), 1, tensor_of(y, F32, N), tensor_of(x, F32, N));
    CHECK(!memcmp(x, y, sizeof x));
}

TEST_MAIN
