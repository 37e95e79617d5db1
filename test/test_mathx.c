/*
 * Random numbers, against the published vectors of Philox; elementary functions, against the C library in long
 * double; and the bits of both, which no compiler or machine may change.
 */
#include "base/mathx.h"
#include "base/rng.h"
#include "test.h"

/* ---- random numbers ---- */

TEST(philox_published)
{
    /* Random123 1.x, tests/kat_vectors, "philox4x32 10" */
    static const struct {
        uint64_t key;
        uint32_t counter[4], out[4];
    } cases[] = {
        { 0, { 0, 0, 0, 0 }, { 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 } },
        { 0xffffffffffffffff,
          { 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff },
          { 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd } },
        { 0x299f31d0a4093822,
          { 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344 },
          { 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1 } },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const uint32_t *c = cases[i].counter;
        Philox r = philox(cases[i].key, c[0], c[1], c[2], c[3]);
        for (int k = 0; k < 4; k++) CHECK_MSG(r.v[k] == cases[i].out[k], "case %d word %d", (int)i, k);
    }
}

TEST(rng_keys_and_dropout)
{
    CHECK(rng_mix(0) == 0xE220A8397B1DCDAFu); /* splitmix64's first output for seed 0 */
    CHECK(rng_key(1, "a") != rng_key(1, "b") && rng_key(1, "a") != rng_key(2, "a"));
    CHECK(dropout_threshold(0) == 0 && dropout_threshold(0.5f) == 0x80000000u && dropout_threshold(1) == UINT32_MAX);
    uint64_t key = rng_key(5, "site");
    int64_t kept = 0, kept_attn = 0, same = 0, n = 200000;
    for (int64_t i = 0; i < n; i++) {
        int a = dropout_keep(key, dropout_threshold(0.3f), i / 1000, i % 100, i % 777);
        kept += a;
        kept_attn += dropout_keep_attn(key, dropout_threshold(0.3f), 1, i % 7, i / 7 % 500, i / 3500);
        same += a == dropout_keep(key, dropout_threshold(0.3f), i / 1000 + (1ll << 32), i % 100, i % 777);
    }
    CHECK_CLOSE((double)kept / (double)n, 0.7, 0.01, "hidden");
    CHECK_CLOSE((double)kept_attn / (double)n, 0.7, 0.01, "attention");
    CHECK_CLOSE((double)same / (double)n, 0.58, 0.01, "the sample's high word matters");
}

/* ---- elementary functions ---- */

/* Largest |got - want| / scale over many arguments, against long double libm. */
static double worst_error(double (*f)(double), long double (*exact)(long double), double low, double high,
                          bool absolute)
{
    uint64_t seed = 4;
    double worst = 0;
    for (int i = 0; i < 200000; i++) {
        double x = test_uniform(&seed, low, high);
        if (i % 2) x *= test_uniform(&seed, 0, 1) * test_uniform(&seed, 0, 1e-3); /* small ones too */
        if (x < low) x = low;
        long double want = exact((long double)x);
        double err = (double)(fabsl((long double)f(x) - want) / (absolute ? 1 : fabsl(want)));
        if (!(err <= worst)) worst = err;
    }
    return worst;
}

TEST(mathx_against_long_double)
{
    CHECK_CLOSE(worst_error(m_exp, expl, -700, 700, false), 0, 1e-15, "exp");
    CHECK_CLOSE(worst_error(m_log, logl, 1e-300, 1e10, false), 0, 1e-15, "log");
    CHECK_CLOSE(worst_error(m_log, logl, 0.5, 2, false), 0, 1e-15, "log near 1");
    CHECK_CLOSE(worst_error(m_sin, sinl, -1e6, 1e6, true), 0, 1e-15, "sin");
    CHECK_CLOSE(worst_error(m_cos, cosl, -1e6, 1e6, true), 0, 1e-15, "cos");
    CHECK_CLOSE(worst_error(m_sin, sinl, -7, 7, false), 0, 1e-15, "sin, relative");
    uint64_t seed = 5;
    for (int i = 0; i < 100000; i++) {
        double x = exp(test_uniform(&seed, -14, 14)), y = test_uniform(&seed, -8, 8);
        long double want = powl((long double)x, (long double)y);
        double err = (double)fabsl(((long double)m_pow(x, y) - want) / want);
        CHECK(err <= 4e-16 * (1 + fabs(y * log(x))));
    }
    for (int t = 1; t < 5000; t++) CHECK_CLOSE(m_pow(0.999, t) / pow(0.999, t), 1, 2e-15, "t=%d", t);
}

TEST(mathx_edges)
{
    CHECK(m_exp(0) == 1 && m_log(1) == 0 && m_sin(0) == 0 && m_cos(0) == 1 && m_pow(3, 0) == 1);
    CHECK(isinf(m_exp(710)) && m_exp(-746) == 0 && m_exp(-745) > 0 && m_exp(-INFINITY) == 0);
    CHECK(isinf(m_exp(INFINITY)) && isnan(m_exp((double)NAN)) && isfinite(m_exp(709.78)));
    CHECK(m_log(0) == -INFINITY && isnan(m_log(-1)) && isnan(m_log((double)NAN)) && isinf(m_log(INFINITY)));
    CHECK_CLOSE(m_log(5e-324), log(5e-324), 1e-15, "smallest");
    CHECK_CLOSE(m_log(1.7976931348623157e308), log(1.7976931348623157e308), 1e-15, "largest");
    CHECK_CLOSE(m_exp(-740) / exp(-740), 1, 1e-2, "subnormal");
    CHECK(isnan(m_sin((double)NAN)) && isnan(m_cos((double)NAN)));
    CHECK(m_pow(0, 2) == 0 && isinf(m_pow(0, -1)) && m_pow(1, 1e300) == 1 && isnan(m_pow(-1, 2)));
    CHECK(m_pow(2, 10) == 1024 || fabs(m_pow(2, 10) / 1024 - 1) < 1e-15);
    double pi = 3.14159265358979323846;
    CHECK_CLOSE(m_sin(pi), 1.2246467991473532e-16, 1e-31, "sin pi");
    CHECK(fabs(m_sin(pi) / 1.2246467991473532e-16 - 1) < 1e-14);
}

/* The bits themselves: a change of compiler, flags or machine must not move one. */
TEST(mathx_bits)
{
    uint64_t hash = 0, seed = 6;
    for (int i = 0; i < 20000; i++) {
        double x = test_uniform(&seed, -30, 30);
        double y[] = { m_exp(x), m_log(x * x), m_sin(1000 * x), m_cos(x), m_pow(x * x, 0.37) };
        for (int k = 0; k < 5; k++) {
            uint64_t bits;
            memcpy(&bits, &y[k], 8);
            hash = rng_mix(hash ^ bits);
        }
    }
    CHECK_MSG(hash == 0xCBF08565700148EAu, "0x%llx", (unsigned long long)hash);
}

TEST_MAIN
