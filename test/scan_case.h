/* Pieces of the tests of recurrences (test_delta.c, test_mamba.c): numbers in float64, heads that lie as columns of a
 * projection, documents, and comparisons. */
#ifndef MEGATRAIN_TEST_SCAN_CASE_H
#define MEGATRAIN_TEST_SCAN_CASE_H

#include "base/half.h"
#include "ops_env.h"

static inline double *zeros(int64_t n)
{
    double *p = calloc((size_t)n + 1, sizeof *p);
    ASSERT(p);
    return p;
}

/* [B T H C], as columns of a projection if they are views. */
static inline Tensor heads(Env *e, bool views, bool out, double high, const int64_t dim[4])
{
    const int64_t N = dim[0] * dim[1] * dim[2];
    Tensor t = env_groups(e, -high, high, N, dim[3], views ? dim[2] : 0);
    if (out) env_mark_out(e, t);
    return tensor_reshape(t, dim[0], dim[1], dim[2], dim[3]);
}
#define HEADS(e, views, out, high, ...) heads(e, views, out, high, (const int64_t[]){ __VA_ARGS__ })

/* Documents of any length. One begins with row 128, and one with the first row of the second sample. */
static inline Tensor documents(Env *e, int64_t B, int64_t T, int64_t first)
{
    Tensor doc = env_in(e, I32, 0, 1, B, T);
    uint64_t state = 5;
    for (int64_t b = 0; b < B; b++) {
        int64_t begin = b ? first : first - 3;
        for (int64_t t = 0; t < T; t++) {
            if (t == 128 || (t && test_uniform(&state, 0, 1) < 0.06)) begin = first + t;
            ((int32_t *)(void *)env_row(&doc, b))[t] = (int32_t)begin;
        }
    }
    env_settle(e);
    return doc;
}

static inline void to_doubles(double *to, Tensor x, int64_t width)
{
    for (int64_t n = 0; x.data && n < env_rows(&x); n++)
        for (int64_t i = 0; i < width; i++) to[n * width + i] = (double)env_f(x, n)[i];
}

static inline void same_numbers(const char *name, Tensor x, const double *want, int64_t width, double tolerance)
{
    double most = 0;
    for (int64_t i = 0; x.data && i < env_rows(&x) * width; i++) most = fmax(most, fabs(want[i]));
    for (int64_t n = 0; x.data && n < env_rows(&x); n++)
        for (int64_t i = 0; i < width; i++) {
            const double got = (double)env_f(x, n)[i], w = want[n * width + i];
            CHECK_MSG(fabs(got - w) <= tolerance * (most + 1e-3), "%s row %d column %d: %.9g, want %.9g", name, (int)n,
                      (int)i, got, w);
        }
}

/* Runs of each case: right, and the same bits again on every instruction set, with 1 to 3 threads. */
static inline void scan_cases(CaseFn *fn, const Shape *p, int count)
{
    for (int k = 0; k < count; k++) {
        const int failures = test_failures;
        const uint64_t want = env_run(fn, &p[k], isa_best(), 1, true);
        for (Isa isa = ISA_AVX512; isa < ISA_COUNT; isa++)
            for (int threads = 1; threads <= 3; threads++)
                if (isa_supported(isa))
                    CHECK_MSG(env_run(fn, &p[k], isa, threads, false) == want, "%s with %d threads", isa_name(isa),
                              threads);
        if (test_failures > failures) fprintf(stderr, "    in case %d\n", k);
    }
}

static inline void fill(float *x, size_t bytes, double low, double high, uint64_t seed)
{
    for (size_t i = 0; i < bytes / sizeof *x; i++) x[i] = (float)test_uniform(&seed, low, high);
}

/* x rounded to bf16, in place; and the same numbers in 16 bits. */
static inline uint16_t *narrowed(float *x, size_t bytes)
{
    uint16_t *h = calloc(bytes / sizeof *x, sizeof *h);
    ASSERT(h);
    for (size_t i = 0; i < bytes / sizeof *x; i++) h[i] = bf16_from_float(x[i]), x[i] = bf16_to_float(h[i]);
    return h;
}

static inline void same_rounded(const char *name, const uint16_t *got, const float *wide, size_t bytes)
{
    for (size_t i = 0; i < bytes / sizeof *wide; i++)
        CHECK_MSG(got[i] == bf16_from_float(wide[i]), "%s %d: %04x for %g", name, (int)i, got[i], (double)wide[i]);
}

#endif
