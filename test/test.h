/*
 * Test cases, on a page. A test file:
 *
 *   #include "test.h"
 *   TEST(arena_marks) { CHECK(1 + 1 == 2); CHECK_CLOSE(got, want, 1e-6, "x=%d", x); }
 *   TEST_MAIN
 *
 * Each program runs all its cases (or those whose name contains argv[1]) and closes with the line
 * "N passed, N failed" (", N skipped" when some were). A case that checks nothing fails. Comparisons are
 * written so that NaN fails. SKIP("reason") ends a case as skipped, saying so.
 */
#ifndef MEGATRAIN_TEST_H
#define MEGATRAIN_TEST_H

#include <math.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/err.h"

/* Does AddressSanitizer stand in for malloc and for the handlers of signals? */
#if defined(__SANITIZE_ADDRESS__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

typedef struct TestCase {
    const char *name;
    void (*run)(void);
    struct TestCase *next;
} TestCase;

static TestCase *test_first, **test_last = &test_first;
static int64_t test_checks;
static int test_failures;
static bool test_skipped;
static jmp_buf test_out;

#define TEST(id)                                                                                  \
    static void test_##id(void);                                                                  \
    __attribute__((constructor)) static void test_add_##id(void)                                  \
    {                                                                                             \
        static TestCase c = { #id, test_##id, NULL };                                             \
        *test_last = &c;                                                                          \
        test_last = &c.next;                                                                      \
    }                                                                                             \
    static void test_##id(void)

#define TEST_FAIL(...)                                                                            \
    do {                                                                                          \
        if (test_failures++ < 20) {                                                               \
            fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                       \
            fprintf(stderr, __VA_ARGS__);                                                         \
            fputc('\n', stderr);                                                                  \
        }                                                                                         \
    } while (0)

#define CHECK(cond)                                                                               \
    do {                                                                                          \
        test_checks++;                                                                            \
        if (!(cond)) TEST_FAIL("%s", #cond);                                                      \
    } while (0)

/* CHECK with a printed explanation */
#define CHECK_MSG(cond, ...)                                                                      \
    do {                                                                                          \
        test_checks++;                                                                            \
        if (!(cond)) {                                                                            \
            TEST_FAIL("%s", #cond);                                                               \
            if (test_failures <= 20) fprintf(stderr, "    "), fprintf(stderr, __VA_ARGS__), fputc('\n', stderr); \
        }                                                                                         \
    } while (0)

/* |got - want| <= tol * max(1, |want|); NaN fails. */
#define CHECK_CLOSE(got, want, tol, ...)                                                          \
    do {                                                                                          \
        double test_g = (got), test_w = (want), test_t = (tol);                                   \
        test_checks++;                                                                            \
        if (!(fabs(test_g - test_w) <= test_t * fmax(1, fabs(test_w)))) {                         \
            TEST_FAIL("%s = %.9g, want %.9g (tolerance %g)", #got, test_g, test_w, test_t);       \
            if (test_failures <= 20) fprintf(stderr, "    " __VA_ARGS__), fputc('\n', stderr);    \
        }                                                                                         \
    } while (0)

/* The call must succeed; ends the case if not. */
#define OK(expr)                                                                                  \
    do {                                                                                          \
        Err test_err = (expr);                                                                    \
        test_checks++;                                                                            \
        if (test_err) {                                                                           \
            TEST_FAIL("%s: %s: %s", #expr, err_name(test_err), err_message());                    \
            longjmp(test_out, 1);                                                                 \
        }                                                                                         \
    } while (0)

/* The call must fail with this kind and a message that contains `text`. */
#define FAILS(expr, kind, text)                                                                   \
    do {                                                                                          \
        Err test_err = (expr);                                                                    \
        test_checks++;                                                                            \
        if (test_err != (kind) || !strstr(err_message(), text))                                   \
            TEST_FAIL("%s: got %s '%s', want %s '%s'", #expr, err_name(test_err), err_message(),  \
                      err_name(kind), text);                                                      \
    } while (0)

#define SKIP(...)                                                                                 \
    do {                                                                                          \
        printf("    skipped: ");                                                                  \
        printf(__VA_ARGS__);                                                                      \
        putchar('\n');                                                                            \
        test_skipped = true;                                                                      \
        longjmp(test_out, 1);                                                                     \
    } while (0)

/* Does the environment say this word? */
static inline bool env_is(const char *name, const char *word)
{
    const char *set = getenv(name);
    return set && !strcmp(set, word);
}

/* Under a sanitizer, for memory: what compares numbers and bits does so without it, so less is run. */
static inline bool brief(void) { return env_is("MEGATRAIN_LAYOUTS", "brief"); }

static inline double test_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Reproducible numbers for test data. */
static inline uint64_t test_rand(uint64_t *state)
{
    uint64_t x = *state += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static inline double test_uniform(uint64_t *state, double low, double high)
{
    return low + (high - low) * (double)(test_rand(state) >> 11) * 0x1p-53;
}

static int test_main(int argc, char **argv)
{
    volatile int passed = 0, failed = 0, skipped = 0; /* volatile: they live across longjmp */
    for (TestCase *volatile c = test_first; c; c = c->next) {
        if (argc > 1 && !strstr(c->name, argv[1])) continue;
        double t0 = test_now();
        test_checks = 0;
        test_failures = 0;
        test_skipped = false;
        if (!setjmp(test_out)) c->run();
        bool ok = test_failures == 0 && (test_skipped || test_checks > 0);
        if (!test_checks && !test_skipped) fprintf(stderr, "%s checks nothing\n", c->name);
        if (!ok) failed++;
        else if (test_skipped) skipped++;
        else passed++;
        printf("%s %s (%lld checks, %.2f s)\n", ok ? test_skipped ? "skip" : "ok  " : "FAIL", c->name,
               (long long)test_checks, test_now() - t0);
        fflush(stdout);
    }
    printf(skipped ? "%d passed, %d failed, %d skipped\n" : "%d passed, %d failed\n", passed, failed, skipped);
    return failed || passed + skipped == 0;
}

#define TEST_MAIN                                                                                 \
    int main(int argc, char **argv)                                                               \
    {                                                                                             \
        return test_main(argc, argv);                                                             \
    }

#endif
