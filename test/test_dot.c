/*
 * Products of bf16 numbers against their definition (cpu/gemm.h), bit for bit: both kinds of dot product in every build,
 * and, where the processor has it, by the instruction itself; every mode, transposition and dtype of the result; odd
 * leaves and rows, denormals, infinities and NaN.
 */
#include "gemm_definition.h"

typedef struct {
    const char *name;
    Isa isa;
    bool pairs;
    bool (*gemm)(const Device *, const Gemm *);
} Build;

static const Build builds[] = { { "VDPBF16PS", ISA_AVX512, true, cpu_avx512_gemm },
                                { "avx512", ISA_AVX512, false, cpu_avx512_gemm },
                                { "avx2", ISA_AVX2, false, cpu_avx2_gemm },
                                { "c", ISA_C, false, cpu_c_gemm } };
static bool has(const Build *b) { return isa_supported(b->isa) && (!b->pairs || dot_supported()); }
#define EACH_BUILD(b) for (const Build *b = builds; b < builds + 4; b++) if (has(b))

/* What numbers are drawn. */
typedef enum { PLAIN, TINY, LARGE, ODD, SETS } Numbers;

/* TINY: products from 2^-160 to 2^-110 and denormals; ODD: some are infinite, no number, or 0 of either sign. */
static uint16_t number(Numbers set)
{
    static const uint16_t odd[] = { 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001, 0x807F, 0x0000, 0x8000, 0x0080, 0x7F7F };
    const uint16_t bits = (uint16_t)test_rand(&seed) & 0x807F;
    if (set == ODD && pick(0, 150) == 0) return odd[pick(0, 9)];
    if (set == TINY) return (uint16_t)(bits | (pick(0, 20) ? pick(50, 70) : pick(0, 1)) << 7);
    if (set == LARGE) return (uint16_t)(bits | pick(180, 190) << 7);
    return (uint16_t)(bits | pick(120, 127) << 7);
}

static uint16_t *numbers(int64_t n, Numbers set)
{
    uint16_t *p = malloc((size_t)(n ? n : 1) * sizeof *p);
    for (int64_t i = 0; i < n; i++) p[i] = number(set);
    return p;
}

typedef struct {
    Gemm g;
    uint16_t *a, *b, *bias;
    char *c;
    int64_t c_bytes, element;
} Case;

enum { GUARD_ROWS = 2 };

static Case make(GemmMode mode, int64_t M, int64_t N, int64_t K, int64_t leaf, Numbers set, bool narrow)
{
    Case c = { .g = { .mode = mode, .M = M, .N = N, .K = K, .leaf = leaf, .shift = 40, .headroom_bits = 16 } };
    const bool ta = pick(0, 1), tb = pick(0, 1);
    const int64_t lda = (ta ? M : K) + pick(0, 3) * pick(0, 1), ldb = (tb ? K : N) + pick(0, 3) * pick(0, 1);
    const int64_t na = K && M ? ((ta ? K : M) - 1) * lda + (ta ? M : K) : 0;
    const int64_t nb = K && N ? ((tb ? N : K) - 1) * ldb + (tb ? K : N) : 0;
    c.g.a = (GemmOperand){ .bf16 = c.a = numbers(na, set), .ld = lda, .transposed = ta };
    c.g.b = (GemmOperand){ .bf16 = c.b = numbers(nb, set), .ld = ldb, .transposed = tb };
    narrow = narrow && mode != GEMM_I64;
    c.g.beta = mode != GEMM_TREE && !narrow && pick(0, 1);
    if (set == TINY) c.g.shift = 120;
    if (mode != GEMM_I64 && pick(0, 1)) c.g.narrow.bias = c.bias = numbers(N, set);
    c.g.ldc = N + pick(0, 20);
    c.element = narrow ? 2 : mode == GEMM_I64 ? 8 : 4;
    const int64_t count = (M + 2 * GUARD_ROWS) * c.g.ldc;
    c.c_bytes = count * c.element;
    c.c = malloc((size_t)c.c_bytes);
    for (int64_t i = 0; i < count; i++) {
        const float tiny = half_float_of((uint32_t)test_rand(&seed) & 0x80FFFFFF);
        if (c.element == 2) ((uint16_t *)c.c)[i] = number(set);
        else if (c.element == 4) ((float *)c.c)[i] = set == TINY ? tiny : (float)test_uniform(&seed, -1, 1);
        else ((int64_t *)c.c)[i] = pick(-1000000, 1000000);
    }
    return c;
}

static Gemm with_c(const Case *c, char *memory)
{
    Gemm g = c->g;
    memory += GUARD_ROWS * g.ldc * c->element;
    if (c->element == 2) g.narrow.c = (uint16_t *)memory;
    else if (c->element == 4) g.c = (float *)memory;
    else g.fixed = (int64_t *)memory;
    return g;
}

static void drop(Case *c) { free(c->a), free(c->b), free(c->bias), free(c->c); }

/* One pattern for every NaN: others are not promised. */
static void canonical(const Case *c, char *memory)
{
    float *f = (float *)memory;
    for (int64_t i = 0; c->element == 4 && i < c->c_bytes / 4; i++)
        if (isnan(f[i])) f[i] = NAN;
}

static void check_case(Case *c, int threads)
{
    char *want = copy_of(c->c, c->c_bytes), *got = malloc((size_t)c->c_bytes);
    for (defined_dot = 0; defined_dot < DOT_KINDS; defined_dot++) {
        memcpy(want, c->c, (size_t)c->c_bytes);
        Gemm g = with_c(c, want);
        const bool overflow = define(&g);
        canonical(c, want);
        EACH_BUILD(b)
        {
            Device dev = device(threads);
            dev.dot = defined_dot, dev.dot_pairs = b->pairs;
            memcpy(got, c->c, (size_t)c->c_bytes);
            g = with_c(c, got);
            memset(workspace, 0xff, 1 << 20); /* stale memory is NaN */
            const bool flag = b->gemm(&dev, &g);
            canonical(c, got);
            CHECK_MSG(!memcmp(got, want, (size_t)c->c_bytes) && flag == overflow,
                      "%s %s mode %d, %lld x %lld x %lld, leaf %lld, ta %d tb %d beta %d bias %d, %d bytes, %d threads",
                      dot_name(defined_dot), b->name, g.mode, (long long)g.M, (long long)g.N, (long long)g.K,
                      (long long)g.leaf, g.a.transposed, g.b.transposed, g.beta, g.narrow.bias != NULL,
                      (int)c->element, threads);
        }
    }
    free(want), free(got);
}

static void say_skipped(void)
{
    if (!dot_supported()) printf("    SKIPPED: VDPBF16PS itself, which this processor or build lacks\n");
}

TEST(random_shapes)
{
    say_skipped();
    for (int i = 0; i < 2000; i++) {
        int64_t M = pick(1, 40), N = pick(1, 60), K = pick(1, 120);
        if (i % 8 == 1) M = pick(1, 6), K = pick(1, 400);
        if (i % 8 == 2) N = pick(1, 6), K = pick(1, 400);
        if (i % 40 == 3) M = pick(1, 100), N = pick(1, 150);
        if (i % 40 == 4) K = pick(700, 1700), M = pick(1, 20), N = pick(1, 20);
        Case c = make((GemmMode)(i % 3), M, N, K, pick(1, pick(0, 1) ? 12 : 300), (Numbers)(i / 3 % SETS), i % 2);
        check_case(&c, 1 + i / 3 % 3);
        drop(&c);
    }
}

TEST_MAIN
