/*
 * Products of bf16 numbers against their definition (cpu/gemm.h), bit for bit: both kinds of dot product in every
 * build, and, where the processor has it, by the instruction itself; every mode, transposition and dtype of the result;
 * odd leaves and rows, denormals, infinities and NaN.
 */
#include "gemm_definition.h"

#include "device/ops.h"
#include "tile_emulation.h"

typedef struct {
    const char *name;
    Isa isa;
    bool pairs, tiles;
    bool (*gemm)(const Device *, const Gemm *);
} Build;

static const Build builds[] = { { "TDPBF16PS", ISA_AVX512, .pairs = true, .tiles = true, .gemm = cpu_avx512_gemm },
                                { "VDPBF16PS", ISA_AVX512, .pairs = true, .gemm = cpu_avx512_gemm },
                                { "avx512", ISA_AVX512, .gemm = cpu_avx512_gemm },
                                { "avx2", ISA_AVX2, .gemm = cpu_avx2_gemm },
                                { "c", ISA_C, .gemm = cpu_c_gemm },
                                { "TDPBF16PS, emulated", ISA_C, .tiles = true, .gemm = cpu_c_gemm } };
static bool has(const Build *b)
{
    if (b->tiles && b->pairs && dot_tiles() != TILES_AGREE) return false;
    return isa_supported(b->isa) && (!b->pairs || dot_supported());
}
#define EACH_BUILD(b) for (const Build *b = builds; b < builds + 6; b++) if (has(b))
/* (tiles take part in products of their own kind) */
static bool takes(const Build *b, DotKind dot) { return !b->tiles || dot == DOT_AMX; }

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
            if (!takes(b, defined_dot)) continue;
            Device dev = device(threads);
            dev.dot = defined_dot, dev.dot_pairs = b->pairs, dev.dot_tiles = b->tiles;
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

/* Number of random cases: a fifth under a sanitizer. */
static int cases_of(int count) { return brief() ? count / 5 : count; }

TEST(random_shapes)
{
    say_skipped();
    for (int i = 0; i < cases_of(1000); i++) {
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

/* Leaves of weights' gradients: of any lengths, empty ones too, which pairs must not cross. */
TEST(leaves_of_any_length)
{
    enum { LEAVES_MOST = 24 };
    for (int i = 0; i < cases_of(60); i++) {
        int64_t starts[LEAVES_MOST + 1] = { pick(0, 100) }, most[] = { 3, 20, 100, 700 };
        const int64_t leaves = pick(1, LEAVES_MOST), longest = most[i % 4];
        for (int64_t l = 0; l < leaves; l++) starts[l + 1] = starts[l] + (pick(0, 2) ? pick(0, longest) : 0);
        Case c = make(GEMM_I64, pick(1, 40), pick(1, 70), starts[leaves] - starts[0], 0, PLAIN, false);
        c.g.starts = starts;
        check_case(&c, 1 + i % 3);
        drop(&c);
    }
}

/* Shapes of whole tiles, slabs and more, with leaves that a layer has. */
TEST(edges)
{
    static const int64_t shapes[][4] = {
        { 1, 1, 1, 1 },    { 8, 48, 768, 96 },  { 9, 49, 769, 96 }, { 16, 96, 1536, 192 }, { 33, 64, 3072, 384 },
        { 0, 5, 5, 1 },    { 5, 0, 5, 1 },      { 5, 5, 0, 1 },     { 130, 20, 3, 1 },     { 20, 30, 1001, 1 },
        { 40, 17, 5000, 625 }, { 11, 57, 4999, 701 }, { 20, 30, 6001, 400 }, { 65, 400, 40, 7 },
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int mode = 0; mode < 3; mode++) {
            Case c = make((GemmMode)mode, shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], PLAIN, mode != 1);
            check_case(&c, 3);
            drop(&c);
        }
}

/* Processors whose tiles sum otherwise, and the one of the manual: what a run's first step asks them. */
TEST(tiles_are_checked)
{
    const long before = tile_products;
    for (int kind = 0; kind < TILES_KINDS; kind++) {
        const bool right = kind == TILES_AS_DEFINED || kind == TILES_ODD_FIRST;
        tiles_kind = (TilesKind)kind;
        CHECK_MSG(cpu_c_tiles_agree() == right, "tiles of kind %d", kind);
    }
    tiles_kind = TILES_AS_DEFINED;
    CHECK(tile_products > before && !tile_fault);
}

/* What a processor refuses is refused here. */
TEST(tiles_that_are_none)
{
    TileShapes shapes = { .palette = 1 };
    static float memory[16 * 16];
    CHECK(!tile_fault);
    tile_release();
    tile_move(0, (char *)memory, 64, 0);
    CHECK_MSG(tile_fault, "a load without shapes");
    for (int i = 0; i < 8; i++) shapes.rows[i] = 16, shapes.bytes[i] = 64;
    shapes.rows[3] = 17, tile_fault = NULL;
    tile_loadconfig(&shapes);
    CHECK_MSG(tile_fault, "17 rows");
    shapes.rows[3] = 16, shapes.bytes[3] = 68, tile_fault = NULL;
    tile_loadconfig(&shapes);
    CHECK_MSG(tile_fault, "rows of 68 bytes");
    shapes.bytes[3] = 64, shapes.rows[5] = 15, tile_fault = NULL;
    tile_loadconfig(&shapes);
    tile_multiply(0, 1, 2);
    CHECK(!tile_fault);
    tile_multiply(0, 1, 5);
    CHECK_MSG(tile_fault, "16 pairs and 15 rows of them");
    tile_fault = NULL;
    tile_multiply(0, 0, 1);
    CHECK_MSG(tile_fault, "a register twice");
    tile_fault = NULL;
    tile_move(1, (char *)memory, 60, 1);
    CHECK_MSG(tile_fault, "rows over each other");
    tile_fault = NULL;
    tile_release();
}

/* One product each: which of a pair is first, what is no denormal in and out, what rounds up to 2^-126. */
TEST(one_pair)
{
    static const struct {
        float a[2], b[2], c;
        float want;
    } cases[] = {
        { { 1, 1 }, { 0x1p-24f, 0x1p24f }, 0, 0x1p24f },               /* the second first: the first is lost */
        { { 1, -1 }, { 0x1.8p24f, 0x1.8p24f }, 1, 0 },                 /* (1 is lost before they cancel) */
        { { 0, 0x1p-63f }, { 0, 0x1p-64f }, 0, 0 },                    /* 2^-127 is 0 */
        /* of its sign, and the first pair's +0 0 adds 0 */
        { { 0, -0x1p-63f }, { 0, 0x1p-64f }, -0.0f, -0.0f },
        { { 0x1p-63f, 0 }, { 0x1p-63f, 0 }, 0, 0x1p-126f },
        { { 0x1p-130f, 0 }, { 0x1p100f, 0 }, 0, 0 },                   /* a denormal counts as 0 */
        { { 0, 0 }, { 0, 0 }, 0x1p-130f, 0 },                          /* the sum's, too */
        { { 0x1p-75f, 0 }, { -0x1p-75f, 0 }, 0x1p-126f, 0 },           /* 2^-126 - 2^-150 has 24 bits, and is below */
        { { 0x1p-75f, 0 }, { -0x1p-76f, 0 }, 0x1p-126f, 0x1p-126f },   /* 2^-126 - 2^-151 rounds up */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        EACH_BUILD(b)
        {
            uint16_t x[2], y[2];
            float got = cases[i].c, want = cases[i].want;
            for (int k = 0; k < 2; k++)
                x[k] = bf16_from_float(cases[i].a[k]), y[k] = bf16_from_float(cases[i].b[k]);
            Device dev = device(1);
            dev.dot = DOT_VDPBF16, dev.dot_pairs = b->pairs;
            const Gemm g = { .mode = GEMM_CHAIN, .M = 1, .N = 1, .K = 2, .a = { .bf16 = x, .ld = 2 },
                             .b = { .bf16 = y, .ld = 1 }, .c = &got, .ldc = 1, .beta = true };
            b->gemm(&dev, &g);
            CHECK_MSG(got == want, "case %d, %s: %a, not %a", (int)i, b->name, (double)got, (double)want);
        }
    }
}

/* How far from a sum in double, by the size of the result: neither kind is worse than the other by much. */
TEST(errors_beside_double)
{
    enum { M = 24, N = 48, K = 2048 };
    static float c[M * N];
    uint16_t *a = numbers(M * K, PLAIN), *b = numbers(K * N, PLAIN);
    double error[DOT_KINDS];
    for (int kind = 0; kind < DOT_KINDS; kind++) {
        double off = 0, size = 0;
        Device dev = device(2);
        dev.dot = (DotKind)kind;
        const Gemm g = { .mode = GEMM_CHAIN, .M = M, .N = N, .K = K, .a = { .bf16 = a, .ld = K },
                         .b = { .bf16 = b, .ld = N }, .c = c, .ldc = N };
        cpu_c_gemm(&dev, &g);
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) {
                double sum = 0;
                for (int k = 0; k < K; k++)
                    sum += (double)bf16_to_float(a[i * K + k]) * (double)bf16_to_float(b[k * N + j]);
                off += (sum - (double)c[i * N + j]) * (sum - (double)c[i * N + j]), size += sum * sum;
            }
        error[kind] = sqrt(off / size);
    }
    printf("    relative error of chains of %d: fma %.2e, vdpbf16 %.2e, amx %.2e\n", K, error[DOT_FMA],
           error[DOT_VDPBF16], error[DOT_AMX]);
    CHECK(error[DOT_VDPBF16] < 1.25 * error[DOT_FMA] && error[DOT_FMA] < 5e-6);
    CHECK(error[DOT_AMX] < error[DOT_FMA]); /* (chains of 16 and of 64, for one of 2,048) */
    free(a), free(b);
}

/* ---- the ops ---- */

static Tensor wide_of(Tensor t, float *memory)
{
    for (int64_t i = 0; i < tensor_count(t); i++) memory[i] = bf16_to_float(((const uint16_t *)t.data)[i]);
    return tensor_view(memory, F32, t.ndim, t.dim);
}

static int64_t wrong(const uint16_t *got, const float *want, int64_t n)
{
    int64_t bad = 0;
    for (int64_t i = 0; i < n; i++) bad += got[i] != bf16_from_float(want[i]);
    return bad;
}

static const OpTable *table_of(const Build *b)
{
    return b->isa == ISA_AVX512 ? &cpu_avx512_ops : b->isa == ISA_AVX2 ? &cpu_avx2_ops : &cpu_c_ops;
}

/* Products of experts: some have no rows, runs are of any lengths. */
enum { EXPERTS_MOST = 6, RUNS_MOST = 4 };

typedef struct {
    int64_t E, runs, O, I, leaf, offset[EXPERTS_MOST * RUNS_MOST + 1];
    uint16_t *x, *w, *dy;
    int64_t start; /* what dw holds before */
} Experts;

static Experts experts_make(int turn)
{
    static const int64_t longest[] = { 2, 9, 40, 130 };
    Experts e = { .E = pick(1, EXPERTS_MOST), .runs = pick(1, RUNS_MOST), .O = pick(1, 60), .I = pick(1, 60) };
    for (int64_t r = 0; r < e.E * e.runs; r++)
        e.offset[r + 1] = e.offset[r] + (pick(0, 2) ? pick(0, longest[turn % 4]) : 0);
    const int64_t P = e.offset[e.E * e.runs];
    e.leaf = pick(1, 30);
    e.x = numbers(P * e.I, PLAIN), e.w = numbers(e.E * e.O * e.I, PLAIN), e.dy = numbers(P * e.O, PLAIN);
    e.start = pick(-1000, 1000);
    return e;
}

/* y, dx and dw of one expert after the other, each a product as gemm.h defines it. */
static void experts_define(const Experts *e, float *y, float *dx, int64_t *dw)
{
    for (int64_t i = 0; i < e->E * e->O * e->I; i++) dw[i] = e->start;
    for (int64_t n = 0; n < e->E; n++) {
        const int64_t *runs = e->offset + n * e->runs, O = e->O, I = e->I, rows = runs[e->runs] - runs[0];
        const GemmOperand x = { .bf16 = e->x + runs[0] * I, .ld = I }, dy = { .bf16 = e->dy + runs[0] * O, .ld = O };
        GemmOperand w = { .bf16 = e->w + n * O * I, .ld = I, .transposed = true }, to = dy;
        to.transposed = true;
        Gemm g = { .mode = GEMM_TREE, .M = rows, .N = O, .K = I, .leaf = e->leaf, .a = x, .b = w,
                   .c = y + runs[0] * O, .ldc = O };
        define(&g);
        w.transposed = false;
        g = (Gemm){ .mode = GEMM_TREE, .M = rows, .N = I, .K = O, .leaf = e->leaf, .a = dy, .b = w,
                    .c = dx + runs[0] * I, .ldc = I };
        define(&g);
        g = (Gemm){ .mode = GEMM_I64, .M = O, .N = I, .K = rows, .a = to, .b = x, .fixed = dw + n * O * I, .ldc = I,
                    .beta = true, .shift = 30, .headroom_bits = 16, .starts = runs };
        CHECK(!define(&g));
    }
}

/* The ops in one build, with results of 16 bits or of fp32. */
static void experts_check(const Experts *e, const Build *b, int threads, bool wide, const float *y, const float *dx,
                          const int64_t *dw)
{
    const int64_t P = e->offset[e->E * e->runs], O = e->O, I = e->I, weights = e->E * O * I;
    const OpTable *op = table_of(b);
    const DType type = wide ? F32 : BF16;
    float *got_y = malloc((size_t)(P * O + 1) * 4), *got_dx = malloc((size_t)(P * I + 1) * 4);
    int64_t *got_dw = malloc((size_t)weights * 8);
    int32_t shift = 30, overflow = 0;
    Device dev = device(threads);
    Stream s = { &dev };
    const Tensor x = tensor_of(e->x, BF16, P, I), w = tensor_of(e->w, BF16, e->E, O, I),
                 of = tensor_of(e->dy, BF16, P, O);
    const Tensor offset = tensor_of((void *)e->offset, I64, e->E * e->runs + 1);
    dev.dot = defined_dot, dev.dot_pairs = b->pairs, dev.dot_tiles = b->tiles;
    for (int64_t i = 0; i < weights; i++) got_dw[i] = e->start;
    OK(op->grouped_fwd(&s, &(grouped_fwd_args){ tensor_of(got_y, type, P, O), x, w, offset, .leaf = e->leaf }));
    OK(op->grouped_dx(&s, &(grouped_dx_args){ tensor_of(got_dx, type, P, I), of, w, offset, .leaf = e->leaf }));
    OK(op->grouped_dw(&s,
                      &(grouped_dw_args){ tensor_of(got_dw, I64, e->E, O, I), of, x, offset, tensor_of(&shift, I32, 1),
                                          tensor_of(&overflow, I32, 1), .headroom_bits = 16 }));
    const bool same = wide ? !memcmp(got_y, y, (size_t)(P * O) * 4) && !memcmp(got_dx, dx, (size_t)(P * I) * 4)
                           : !wrong((uint16_t *)got_y, y, P * O) && !wrong((uint16_t *)got_dx, dx, P * I);
    CHECK_MSG(same && !memcmp(got_dw, dw, (size_t)weights * 8) && !overflow,
              "%s %s, %d experts, %lld rows, %lld x %lld, leaf %lld, wide %d, %d threads", dot_name(defined_dot),
              b->name, (int)e->E, (long long)P, (long long)O, (long long)I, (long long)e->leaf, wide, threads);
    free(got_y), free(got_dx), free(got_dw);
}

TEST(grouped_ops)
{
    say_skipped();
    for (int i = 0; i < cases_of(70); i++) {
        Experts e = experts_make(i);
        const int64_t P = e.offset[e.E * e.runs];
        float *y = malloc((size_t)(P * e.O + 1) * 4), *dx = malloc((size_t)(P * e.I + 1) * 4);
        int64_t *dw = malloc((size_t)(e.E * e.O * e.I) * 8);
        for (defined_dot = 0; defined_dot < DOT_KINDS; defined_dot++) {
            experts_define(&e, y, dx, dw);
            EACH_BUILD(b)
            for (int wide = 0; wide < 2; wide++) experts_check(&e, b, 1 + i % 3, wide, y, dx, dw);
        }
        free(e.x), free(e.w), free(e.dy), free(y), free(dx), free(dw);
    }
}

/* GELU behind fwd is of the stored sum, its gradient behind dx of the sum before it is rounded. */
TEST(linear_ops_with_gelu)
{
    enum { N = 21, O = 50, I = 70 };
    static float w32[O * I], x32[N * I], y32[N * O], gelu32[N * O], bias32[O], dx32[N * I], pre32[N * I];
    static uint16_t y[N * O], gelu[N * O], dx[N * I];
    uint16_t *x = numbers(N * I, PLAIN), *w = numbers(O * I, PLAIN), *bias = numbers(O, PLAIN);
    uint16_t *dy = numbers(N * O, PLAIN), *pre = numbers(N * I, PLAIN);
    static float dy32[N * O];
    const Tensor tx = tensor_of(x, BF16, N, I), tw = tensor_of(w, BF16, O, I), tb = tensor_of(bias, BF16, O);
    const Tensor tdy = tensor_of(dy, BF16, N, O), tp = tensor_of(pre, BF16, N, I);
    EACH_BUILD(b)
    {
        const OpTable *op = table_of(b);
        Device dev = device(2);
        Stream s = { &dev };
        OK(op->linear_fwd(&s, &(linear_fwd_args){ tensor_of(y, BF16, N, O), tx, tw, tb, tensor_of(gelu, BF16, N, O),
                                                  .leaf = 35 }));
        OK(op->linear_fwd(&s, &(linear_fwd_args){ tensor_of(y32, F32, N, O), wide_of(tx, x32), wide_of(tw, w32),
                                                  wide_of(tb, bias32), .leaf = 35 }));
        CHECK_MSG(!wrong(y, y32, N * O), "%s fwd", b->name);
        for (int i = 0; i < N * O; i++) y32[i] = bf16_to_float(y[i]);
        OK(op->gelu_fwd(&s, &(gelu_fwd_args){ tensor_of(gelu32, F32, N, O), tensor_of(y32, F32, N, O) }));
        CHECK_MSG(!wrong(gelu, gelu32, N * O), "%s gelu", b->name);
        OK(op->linear_dx(&s, &(linear_dx_args){ tensor_of(dx, BF16, N, I), tdy, tw, tp, .leaf = O }));
        OK(op->linear_dx(&s, &(linear_dx_args){ tensor_of(dx32, F32, N, I), wide_of(tdy, dy32), wide_of(tw, w32),
                                                wide_of(tp, pre32), .leaf = O }));
        CHECK_MSG(!wrong(dx, dx32, N * I), "%s dx", b->name);
        OK(op->linear_dx(&s, &(linear_dx_args){ tensor_of(dx32, F32, N, I), tdy, tw, .leaf = O }));
        OK(op->linear_dx(&s, &(linear_dx_args){ tensor_of(dx, BF16, N, I), tdy, tw, .leaf = O }));
        CHECK_MSG(!wrong(dx, dx32, N * I), "%s dx in fp32", b->name);
    }
    free(x), free(w), free(bias), free(dy), free(pre);
}

/* Ops that read bf16 themselves have the bits of fp32 ones on widened copies. */
TEST(rows_of_16_bits)
{
    enum { N = 19, D = 70 };
    static float x32[N * D], w32[D], b32[D], y32[N * D], r32[N * D], mean[2][N], rstd[2][N], table32[N * D];
    static float s32[N * D], d32[N * D];
    static uint16_t y[N * D];
    static int64_t sum[2][D], bsum[2][D], sample[N];
    static int32_t position[N], shift = 30, overflow, index[N];
    uint16_t *x = numbers(N * D, PLAIN), *w = numbers(D, PLAIN), *bias = numbers(D, PLAIN), *r = numbers(N * D, ODD);
    const Tensor tx = tensor_of(x, BF16, N, D), tw = tensor_of(w, BF16, D), tb = tensor_of(bias, BF16, D);
    const Tensor tr = tensor_of(r, BF16, N, D), ty = tensor_of(y, BF16, N, D), wide = tensor_of(y32, F32, N, D);
    const Tensor t2 = tensor_of(s32, F32, N, D);
    const Tensor at = tensor_of(position, I32, N), of = tensor_of(sample, I64, N);
    for (int i = 0; i < N; i++) position[i] = i, sample[i] = 7 * i, index[i] = (i * 5) % (N + 2);
    EACH_BUILD(b)
    {
        const OpTable *op = table_of(b);
        Device dev = device(2);
        Stream s = { &dev };
        dev.ops = op; /* of which residual_norm_fwd is made */
        wide_of(tx, x32), wide_of(tw, w32), wide_of(tb, b32), wide_of(tr, r32), wide_of(tr, table32);
        const Tensor vx = tensor_of(x32, F32, N, D), vw = tensor_of(w32, F32, D), vb = tensor_of(b32, F32, D);
        OK(op->norm_fwd(&s, &(norm_fwd_args){ ty, tensor_of(mean[0], F32, N), tensor_of(rstd[0], F32, N), tx, tw, tb,
                                              .eps = 1e-5f }));
        OK(op->norm_fwd(&s, &(norm_fwd_args){ wide, tensor_of(mean[1], F32, N), tensor_of(rstd[1], F32, N), vx, vw, vb,
                                              .eps = 1e-5f }));
        CHECK_MSG(!wrong(y, y32, N * D) && !memcmp(mean[0], mean[1], sizeof mean[0]) &&
                      !memcmp(rstd[0], rstd[1], sizeof rstd[0]), "%s norm_fwd", b->name);
        OK(op->residual_fwd(&s, &(residual_fwd_args){ ty, tr, tx, tb, at, of, { 5, 1u << 30, 1.5f } }));
        OK(op->residual_fwd(&s, &(residual_fwd_args){ wide, tensor_of(r32, F32, N, D), vx, vb, at, of,
                                                      { 5, 1u << 30, 1.5f } }));
        CHECK_MSG(!wrong(y, y32, N * D), "%s residual_fwd", b->name);
        /* a residual stream in fp32 is not rounded; what is made of it is */
        OK(op->residual_fwd(&s, &(residual_fwd_args){ t2, vx, tx, tb, at, of, { 5, 1u << 30, 1.5f } }));
        OK(op->residual_fwd(&s, &(residual_fwd_args){ wide, vx, vx, vb, at, of, { 5, 1u << 30, 1.5f } }));
        CHECK_MSG(!memcmp(s32, y32, sizeof s32), "%s residual_fwd in fp32", b->name);
        OK(op->residual_bwd(&s, &(residual_bwd_args){ ty, t2, at, of, { 6, 1u << 30, 1.5f } }));
        OK(op->residual_bwd(&s, &(residual_bwd_args){ wide, t2, at, of, { 6, 1u << 30, 1.5f } }));
        CHECK_MSG(!wrong(y, y32, N * D), "%s residual_bwd of fp32", b->name);
        OK(op->residual_norm_fwd(&s, &(residual_norm_fwd_args){
            .y = ty, .mean = tensor_of(mean[0], F32, N), .rstd = tensor_of(rstd[0], F32, N), .sum = t2,
            .residual = vx, .x = tx, .bias = tb, .w = tw, .b = tb, .position = at, .sample = of,
            .dropout = { 5, 1u << 30, 1.5f }, .eps = 1e-5f }));
        OK(op->norm_fwd(&s, &(norm_fwd_args){ wide, tensor_of(mean[1], F32, N), tensor_of(rstd[1], F32, N), t2, vw, vb,
                                              .eps = 1e-5f }));
        CHECK_MSG(!wrong(y, y32, N * D) && !memcmp(mean[0], mean[1], sizeof mean[0]) &&
                      !memcmp(rstd[0], rstd[1], sizeof rstd[0]), "%s residual_norm_fwd in fp32", b->name);
        for (int k = 0; k < 2; k++) /* dy and w narrow, then wide: dx of fp32 is the same */
            OK(op->norm_bwd(&s, &(norm_bwd_args){ .dx = k ? wide : tensor_of(d32, F32, N, D),
                                                  .dw = tensor_of(sum[k], I64, D),
                                                  .dsum = tensor_of(bsum[k], I64, D),
                                                  .dy = k ? vx : tx,
                                                  .x = t2,
                                                  .w = k ? vw : tw,
                                                  .mean = tensor_of(mean[1], F32, N),
                                                  .rstd = tensor_of(rstd[1], F32, N),
                                                  .shift_w = tensor_of(&shift, I32, 1),
                                                  .shift_sum = tensor_of(&shift, I32, 1),
                                                  .overflow = tensor_of(&overflow, I32, 1),
                                                  .leaf = 4,
                                                  .headroom_bits = 16,
                                                  .fresh = 1,
                                                  .fresh_sum = 1,
                                                  .fresh_dx = 1 }));
        CHECK_MSG(!memcmp(d32, y32, sizeof d32) && !memcmp(sum[0], sum[1], sizeof sum[0]) &&
                      !memcmp(bsum[0], bsum[1], sizeof bsum[0]) && !overflow, "%s norm_bwd in fp32", b->name);
        OK(op->embedding_fwd(&s, &(embedding_fwd_args){ t2, tr, tensor_of(index, I32, N) }));
        OK(op->embedding_fwd(&s, &(embedding_fwd_args){ wide, tensor_of(table32, F32, N, D),
                                                        tensor_of(index, I32, N) }));
        CHECK_MSG(!memcmp(s32, y32, sizeof s32), "%s embedding_fwd in fp32", b->name);
        OK(op->embedding_fwd(&s, &(embedding_fwd_args){ ty, tr, tensor_of(index, I32, N) }));
        OK(op->embedding_fwd(&s, &(embedding_fwd_args){ wide, tensor_of(table32, F32, N, D),
                                                        tensor_of(index, I32, N) }));
        CHECK_MSG(!wrong(y, y32, N * D), "%s embedding_fwd", b->name);
        for (int k = 0; k < 2; k++)
            OK(op->bias_grad(&s, &(bias_grad_args){ tensor_of(sum[k], I64, D), k ? vx : tx, tensor_of(&shift, I32, 1),
                                                    tensor_of(&overflow, I32, 1), 4, 16, .fresh = 1 }));
        CHECK_MSG(!memcmp(sum[0], sum[1], sizeof sum[0]) && !overflow, "%s bias_grad", b->name);
    }
    free(x), free(w), free(bias), free(r);
}

/* The same of cross entropy: words that end inside a vector, padding, a row without a target, a cap. */
TEST(cross_entropy_of_16_bits)
{
    enum { N = 9, V = 150, J = 3, WORDS = 141 };
    static float x32[N * V], max[2][N * J], sum[2][N * J], target_logit[2][N], loss[2][N], row_max[N], row_sum[N];
    static uint16_t y[N * V];
    static int32_t target[N];
    StepValues step = { .loss_scale = 0.25f };
    uint16_t *x = numbers(N * V, PLAIN);
    for (int i = 0; i < N; i++)
        target[i] = i == 4 ? -1 : (i * 37) % WORDS, row_max[i] = 2, row_sum[i] = 200 + (float)i;
    const Tensor to = tensor_of(target, I32, N), rm = tensor_of(row_max, F32, N), rs = tensor_of(row_sum, F32, N);
    EACH_BUILD(b)
    {
        const OpTable *op = table_of(b);
        Device dev = device(2);
        Stream s = { &dev };
        const Tensor narrow = tensor_of(y, BF16, N, V);
        for (int cap = 0; cap <= 5; cap += 5) {
            for (int k = 1; k >= 0; k--) { /* y is left by the op of 16 bits */
                memcpy(y, x, sizeof y);
                const Tensor logits = k ? wide_of(narrow, x32) : narrow;
                OK(op->xent_stats(&s, &(xent_stats_args){ tensor_of(max[k], F32, N, J), tensor_of(sum[k], F32, N, J),
                                                          tensor_of(target_logit[k], F32, N), logits, to,
                                                          .block = V / J, .vocab = WORDS }));
                OK(op->xent_bwd(&s, &(xent_bwd_args){ logits, to, rm, rs, &step, .weight = 3, .softcap = (float)cap,
                                                      .vocab = WORDS }));
            }
            CHECK_MSG(!memcmp(max[0], max[1], sizeof max[0]) && !memcmp(sum[0], sum[1], sizeof sum[0]) &&
                          !memcmp(target_logit[0], target_logit[1], sizeof target_logit[0]), "%s stats", b->name);
            CHECK_MSG(!wrong(y, x32, N * V), "%s xent_bwd, cap %d", b->name, cap);
            for (int k = 1; k >= 0; k--) { /* y is left by the op of 16 bits */
                memcpy(y, x, sizeof y);
                const Tensor logits = k ? wide_of(narrow, x32) : narrow;
                OK(op->xent_row(&s, &(xent_row_args){ tensor_of(loss[k], F32, N), logits, to, &step, .weight = 3,
                                                      .softcap = (float)cap, .block = V / J, .vocab = WORDS }));
            }
            CHECK_MSG(!memcmp(loss[0], loss[1], sizeof loss[0]) && loss[0][0] > 0, "%s loss", b->name);
            CHECK_MSG(!wrong(y, x32, N * V), "%s xent_row, cap %d", b->name, cap);
        }
    }
    free(x);
}

TEST_MAIN
