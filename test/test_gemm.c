/*
 * The matrix product against its definition (cpu/gemm.h), bit for bit: every mode, transposition and
 * instruction set, cuts of M, N and K, thread counts, row counts; nothing outside the result is written.
 */
#include "test.h"

#include <pthread.h>

#include "cpu/gemm.h"
#include "device/ops.h"

typedef struct {
    Isa isa;
    bool (*gemm)(const Device *, const Gemm *);
    void (*tile_gemm)(const TileGemm *);
    void (*transpose)(float *, int64_t, const float *, int64_t, int64_t, int64_t);
    Err (*fwd)(Stream *, const linear_fwd_args *);
    Err (*dx)(Stream *, const linear_dx_args *);
    Err (*dw)(Stream *, const linear_dw_args *);
} Build;

#define OPS(isa)                                                                                  \
    Err cpu_##isa##_linear_fwd(Stream *, const linear_fwd_args *);                                \
    Err cpu_##isa##_linear_dx(Stream *, const linear_dx_args *);                                  \
    Err cpu_##isa##_linear_dw(Stream *, const linear_dw_args *);
OPS(avx512)
OPS(avx2)
OPS(c)
#define BUILD(kind, isa)                                                                          \
    { kind, cpu_##isa##_gemm, cpu_##isa##_tile_gemm, cpu_##isa##_transpose, cpu_##isa##_linear_fwd, \
      cpu_##isa##_linear_dx, cpu_##isa##_linear_dw }
static const Build builds[] = { BUILD(ISA_AVX512, avx512), BUILD(ISA_AVX2, avx2), BUILD(ISA_C, c) };
#define EACH_BUILD(b) for (const Build *b = builds; b < builds + 3; b++) if (isa_supported(b->isa))

static uint64_t seed = 1;

static int64_t pick(int64_t low, int64_t high)
{
    return low + (int64_t)(test_rand(&seed) % (uint64_t)(high - low + 1));
}

static float *random_floats(int64_t n)
{
    float *p = malloc((size_t)(n ? n : 1) * sizeof *p);
    for (int64_t i = 0; i < n; i++) p[i] = (float)test_uniform(&seed, -1, 1);
    return p;
}

static void *copy_of(const void *p, int64_t bytes)
{
    void *q = malloc((size_t)(bytes ? bytes : 1));
    memcpy(q, p, (size_t)bytes);
    return q;
}

/* ---- the definition ---- */

static float at(GemmOperand m, int64_t i, int64_t j)
{
    return m.transposed ? m.data[j * m.ld + i] : m.data[i * m.ld + j];
}

static float chain(const Gemm *g, int64_t i, int64_t j, int64_t k, int64_t end, float c)
{
    for (; k < end; k++) c = fmaf(at(g->a, i, k), at(g->b, k, j), c);
    return c;
}

static float tree(const Gemm *g, int64_t i, int64_t j)
{
    float stack[64] = { 0 };
    int top = 0;
    int64_t leaf = 0;
    for (int64_t k = 0; k < g->K; k += g->leaf, leaf++) {
        stack[top++] = chain(g, i, j, k, k + g->leaf < g->K ? k + g->leaf : g->K, 0);
        for (int64_t x = leaf; x & 1; x >>= 1, top--) stack[top - 2] += stack[top - 1];
    }
    for (; top > 1; top--) stack[top - 2] += stack[top - 1];
    return stack[0];
}

static bool define_fixed(const Gemm *g, int64_t i, int64_t j)
{
    bool overflow = false;
    int64_t sum = g->beta ? g->fixed[i * g->ldc + j] : 0;
    for (int64_t k = 0; k < g->K; k += g->leaf) {
        float v = ldexpf(chain(g, i, j, k, k + g->leaf < g->K ? k + g->leaf : g->K, 0), g->shift);
        if (fabsf(v) < ldexpf(1, 62 - g->room)) sum += llrintf(v);
        else overflow = true;
    }
    if (g->fixed) g->fixed[i * g->ldc + j] = sum;
    else g->c[i * g->ldc + j] = ldexpf((float)sum, -g->shift);
    return overflow;
}

static bool define(const Gemm *g)
{
    bool overflow = false;
    for (int64_t i = 0; i < g->M; i++) {
        for (int64_t j = 0; j < g->N; j++) {
            float *c = g->c + i * g->ldc + j;
            if (g->mode == GEMM_I64) overflow |= define_fixed(g, i, j);
            else *c = g->mode == GEMM_TREE ? tree(g, i, j) : chain(g, i, j, 0, g->K, g->beta ? *c : 0);
            if (g->mode != GEMM_I64 && g->bias) *c += g->bias[j];
        }
    }
    return overflow;
}

/* ---- a product with its memory; C has guard columns and rows all round ---- */

typedef struct {
    Gemm g;
    float *a, *b, *bias;
    char *c;
    int64_t c_bytes;
    bool in_floats; /* C of floats, not G */
} Case;

enum { GUARD_ROWS = 2 };

static Case make(GemmMode mode, int64_t M, int64_t N, int64_t K, int64_t leaf)
{
    Case c = { .g = { .mode = mode, .M = M, .N = N, .K = K, .leaf = leaf, .shift = 40, .room = 16 } };
    bool ta = pick(0, 1), tb = pick(0, 1);
    c.in_floats = mode != GEMM_I64 || !pick(0, 2);
    int64_t lda = (ta ? M : K) + pick(0, 3) * pick(0, 1), ldb = (tb ? K : N) + pick(0, 3) * pick(0, 1);
    /* exactly as long as the product may read, for the sanitizer */
    int64_t na = K && M ? ((ta ? K : M) - 1) * lda + (ta ? M : K) : 0;
    int64_t nb = K && N ? ((tb ? N : K) - 1) * ldb + (tb ? K : N) : 0;
    c.g.a = (GemmOperand){ c.a = random_floats(na), lda, ta };
    c.g.b = (GemmOperand){ c.b = random_floats(nb), ldb, tb };
    c.g.beta = (mode == GEMM_CHAIN || !c.in_floats) && pick(0, 1);
    if (mode != GEMM_I64 && pick(0, 1)) c.g.bias = c.bias = random_floats(N);
    c.g.ldc = N + pick(0, 20);
    int64_t size = c.in_floats ? 4 : 8, count = (M + 2 * GUARD_ROWS) * c.g.ldc;
    c.c_bytes = count * size;
    c.c = malloc((size_t)c.c_bytes);
    for (int64_t i = 0; i < count; i++) {
        if (c.in_floats) ((float *)c.c)[i] = (float)test_uniform(&seed, -1, 1);
        else ((int64_t *)c.c)[i] = pick(-1000000, 1000000);
    }
    return c;
}

static Gemm with_c(const Case *c, char *memory)
{
    Gemm g = c->g;
    if (c->in_floats) g.c = (float *)memory + GUARD_ROWS * g.ldc;
    else g.fixed = (int64_t *)memory + GUARD_ROWS * g.ldc;
    return g;
}

static void drop(Case *c)
{
    free(c->a), free(c->b), free(c->bias), free(c->c);
}

/* A device of which gemm may use the threads and a workspace with a guard behind it. */
enum { WORKSPACE_GUARD = 4096 };
static char *workspace;

static Device device(int threads)
{
    if (!workspace) workspace = aligned_alloc(4096, DEVICE_WORKSPACE_BYTES + WORKSPACE_GUARD);
    memset(workspace + DEVICE_WORKSPACE_BYTES, 0x5a, WORKSPACE_GUARD);
    return (Device){ .threads = threads, .workspace = workspace, .workspace_bytes = DEVICE_WORKSPACE_BYTES };
}

static bool workspace_guard_ok(void)
{
    for (int i = 0; i < WORKSPACE_GUARD; i++)
        if (workspace[DEVICE_WORKSPACE_BYTES + i] != 0x5a) return false;
    return true;
}

/* All builds against the definition, over the whole memory round C. */
static void check_case(Case *c, int threads)
{
    char *want = copy_of(c->c, c->c_bytes), *got = malloc((size_t)c->c_bytes);
    Gemm g = with_c(c, want);
    bool overflow = define(&g);
    EACH_BUILD(b)
    {
        Device dev = device(threads);
        memcpy(got, c->c, (size_t)c->c_bytes);
        g = with_c(c, got);
        memset(workspace, 0xff, 1 << 20); /* stale memory is NaN */
        bool flag = b->gemm(&dev, &g);
        CHECK_MSG(!memcmp(got, want, (size_t)c->c_bytes) && flag == overflow && workspace_guard_ok(),
                  "%s mode %d, %lld x %lld x %lld, leaf %lld, ta %d tb %d beta %d bias %d, %d threads",
                  isa_name(b->isa), g.mode, (long long)g.M, (long long)g.N, (long long)g.K, (long long)g.leaf,
                  g.a.transposed, g.b.transposed, g.beta, g.bias != NULL, threads);
    }
    free(want), free(got);
}

static void check_shape(GemmMode mode, int64_t M, int64_t N, int64_t K, int64_t leaf, int threads)
{
    Case c = make(mode, M, N, K, leaf);
    check_case(&c, threads);
    drop(&c);
}

TEST(random_shapes)
{
    for (int i = 0; i < 200; i++) {
        int64_t M = pick(1, 150), N = pick(1, 150), K = pick(1, 1700);
        if (i % 4 == 1) M = pick(1, 20);
        if (i % 4 == 2) N = pick(1, 20);
        if (i % 4 == 3) K = pick(1, 40), M = pick(1, 400), N = pick(1, 400);
        check_shape((GemmMode)(i % 3), M, N, K, pick(1, 300), 1 + i / 3 % 3);
    }
}

/* Tile edges, slab edges, empty products; many tasks; more threads than cores. */
TEST(edges)
{
    static const int64_t shapes[][4] = {
        { 1, 1, 1, 1 },       { 8, 48, 384, 48 },    { 9, 49, 385, 48 },   { 7, 47, 383, 96 },  { 16, 96, 768, 96 },
        { 17, 97, 769, 96 },  { 1, 700, 100, 50 },   { 700, 1, 100, 50 },  { 3, 5, 1536, 192 }, { 33, 64, 3072, 384 },
        { 16, 768, 64, 8 },   { 768, 16, 64, 16 },   { 0, 5, 5, 1 },       { 5, 0, 5, 1 },      { 5, 5, 0, 1 },
        { 130, 20, 3, 1 },    { 20, 30, 1000, 1 },   { 6, 16, 512, 512 },  { 50, 60, 70, 1000 }, { 65, 400, 40, 7 },
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int mode = 0; mode < 3; mode++)
            for (int threads = 1; threads <= 9; threads += 4)
                check_shape((GemmMode)mode, shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], threads);
}

/* Leaves longer than a slab; the tree over whole slots. */
TEST(long_leaves)
{
    static const int64_t cuts[][2] = { { 5000, 1250 }, { 5000, 625 }, { 4999, 700 }, { 6001, 400 }, { 3000, 3000 },
                                       { 2000, 385 },  { 7000, 1000 } };
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++)
        for (int mode = 0; mode < 3; mode++) check_shape((GemmMode)mode, 11, 57, cuts[i][0], cuts[i][1], 2);
}

/* ---- cuts ---- */

TEST(cut_rows_and_columns)
{
    for (int i = 0; i < 12; i++) {
        Case c = make((GemmMode)(i % 3), pick(20, 200), pick(20, 200), pick(20, 900), pick(1, 200));
        char *whole = copy_of(c.c, c.c_bytes), *parts = copy_of(c.c, c.c_bytes);
        Device dev = device(2);
        EACH_BUILD(b)
        {
            if (b->isa == ISA_C) continue;
            memcpy(whole, c.c, (size_t)c.c_bytes);
            memcpy(parts, c.c, (size_t)c.c_bytes);
            Gemm g = with_c(&c, whole);
            b->gemm(&dev, &g);
            int64_t dm = pick(1, 70), dn = pick(1, 70);
            for (int64_t m = 0; m < c.g.M; m += dm) {
                for (int64_t n = 0; n < c.g.N; n += dn) {
                    g = with_c(&c, parts);
                    g.M = g.M - m < dm ? g.M - m : dm;
                    g.N = g.N - n < dn ? g.N - n : dn;
                    g.a.data += g.a.transposed ? m : m * g.a.ld;
                    g.b.data += g.b.transposed ? n * g.b.ld : n;
                    if (g.fixed) g.fixed += m * g.ldc + n;
                    else g.c += m * g.ldc + n;
                    if (g.bias) g.bias += n;
                    b->gemm(&dev, &g);
                }
            }
            CHECK_MSG(!memcmp(whole, parts, (size_t)c.c_bytes), "%s mode %d pieces %lld x %lld", isa_name(b->isa),
                      g.mode, (long long)dm, (long long)dn);
        }
        free(whole), free(parts);
        drop(&c);
    }
}

static Gemm k_range(Gemm g, int64_t k, int64_t count)
{
    g.K = count;
    g.a.data += g.a.transposed ? k * g.a.ld : k;
    g.b.data += g.b.transposed ? k : k * g.b.ld;
    return g;
}

/* beta = 1 goes on with the chain. */
TEST(cut_chain)
{
    for (int i = 0; i < 6; i++) {
        Case c = make(GEMM_CHAIN, 60, 70, 1500, 1);
        char *whole = copy_of(c.c, c.c_bytes), *parts = copy_of(c.c, c.c_bytes);
        Device dev = device(2);
        c.g.bias = NULL;
        Gemm g = with_c(&c, whole), p = with_c(&c, parts);
        EACH_BUILD(b) if (b->isa != ISA_C) {
            memcpy(whole, c.c, (size_t)c.c_bytes);
            memcpy(parts, c.c, (size_t)c.c_bytes);
            b->gemm(&dev, &g);
            for (int64_t k = 0, n; k < g.K; k += n) {
                n = pick(1, 500) < g.K - k ? pick(1, 100) : g.K - k;
                if (n > g.K - k) n = g.K - k;
                Gemm piece = k_range(p, k, n);
                piece.beta = k > 0 || g.beta;
                b->gemm(&dev, &piece);
            }
            CHECK(!memcmp(whole, parts, (size_t)c.c_bytes));
        }
        free(whole), free(parts);
        drop(&c);
    }
}

/* Ranks that own aligned subtrees send one partial each; a tree over the ranks gives the whole product. */
TEST(cut_tree)
{
    for (int ranks = 2; ranks <= 8; ranks *= 2) {
        const int64_t M = 30, N = 50, leaf = pick(40, 500), K = 8 * leaf;
        float *a = random_floats(M * K), *b = random_floats(K * N), *whole = random_floats(M * N);
        float *part = random_floats(ranks * M * N);
        Device dev = device(2);
        Gemm g = { GEMM_TREE, M, N, K, leaf, { a, K, false }, { b, N, false }, whole, .ldc = N };
        EACH_BUILD(e)
        {
            e->gemm(&dev, &g);
            for (int r = 0; r < ranks; r++) {
                Gemm p = k_range(g, r * K / ranks, K / ranks);
                p.c = part + r * M * N;
                e->gemm(&dev, &p);
            }
            for (int step = 1; step < ranks; step *= 2)
                for (int r = 0; r < ranks; r += 2 * step)
                    for (int64_t i = 0; i < M * N; i++) part[r * M * N + i] += part[(r + step) * M * N + i];
            CHECK(!memcmp(whole, part, (size_t)(M * N) * sizeof *part));
        }
        free(a), free(b), free(whole), free(part);
    }
}

/* Leaves in any order and grouping, begun without beta. */
TEST(cut_fixed)
{
    const int64_t M = 60, N = 90, leaf = 32, leaves = 20, K = leaf * leaves;
    float *a = random_floats(M * K), *b = random_floats(K * N);
    int64_t *whole = calloc((size_t)(M * N), 8), *parts = calloc((size_t)(M * N), 8);
    Device dev = device(2);
    Gemm g = { GEMM_I64, M, N, K, leaf, { a, M, true }, { b, N, false }, .fixed = whole, .ldc = N,
               .shift = 40, .room = 16 };
    EACH_BUILD(e)
    {
        memset(whole, 0x55, (size_t)(M * N) * 8); /* without beta nobody reads it */
        memset(parts, 0x33, (size_t)(M * N) * 8);
        CHECK(!e->gemm(&dev, &g));
        for (int64_t l = leaves, n; l > 0; l -= n) {
            n = pick(1, l < 5 ? l : 5);
            Gemm p = k_range(g, (l - n) * leaf, n * leaf);
            p.fixed = parts;
            p.beta = l < leaves;
            CHECK(!e->gemm(&dev, &p));
        }
        CHECK(!memcmp(whole, parts, (size_t)(M * N) * 8));
    }
    free(a), free(b), free(whole), free(parts);
}

/* ---- overflow of the fixed point ---- */

TEST(overflow_flag)
{
    static const struct {
        float value; /* of one element of A; B is 1 there, so this is the leaf */
        int shift, room;
        bool flag;
    } cases[] = {
        { 1, 40, 16, false },
        { 0x1p6f, 40, 16, true },          /* 2^46 is not below 2^46 */
        { 0x1.fffffep5f, 40, 16, false },  /* just below */
        { -0x1p6f, 40, 16, true },
        { -0x1.fffffep5f, 40, 16, false },
        { NAN, 40, 16, true },
        { INFINITY, 40, 16, true },
        { -INFINITY, -100, 16, true },
        { 0x1p100f, -54, 16, true },
        { 0x1p99f, -54, 16, false },
        { 0x1p-100f, 127, 16, false },
        { 0x1p-60f, 127, 16, true },
        { 0x1.8p0f, 0, 0, false },
        { 0x1p61f, 0, 0, false },
        { 0x1p62f, 0, 0, true },
    };
    EACH_BUILD(e) for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        enum { M = 19, N = 53, K = 6, AT_I = 17, AT_J = 51 };
        float a[K][M] = { { 0 } }, b[K][N] = { { 0 } };
        static int64_t got[M][N];
        memset(got, 0, sizeof got);
        for (int k = 0; k < K; k++)
            for (int j = 0; j < N; j++) b[k][j] = j == AT_J;
        a[3][AT_I] = cases[i].value;
        Device dev = device(3);
        Gemm g = { GEMM_I64, M, N, K, 2, { a[0], M, true }, { b[0], N, false }, .fixed = got[0], .ldc = N,
                   .shift = cases[i].shift, .room = cases[i].room };
        CHECK_MSG(e->gemm(&dev, &g) == cases[i].flag, "%s %a shift %d", isa_name(e->isa), (double)cases[i].value,
                  cases[i].shift);
        int64_t want = cases[i].flag ? 0 : llrintf(ldexpf(cases[i].value, cases[i].shift));
        CHECK_MSG(got[AT_I][AT_J] == want, "%a", (double)cases[i].value);
        CHECK(got[AT_I][0] == 0 && got[0][AT_J] == 0);
    }
}

/* ---- several ranks in one process ---- */

typedef struct {
    Case *c;
    const Build *build;
    char *got;
    bool same;
} Rank;

static void *rank_run(void *arg)
{
    Rank *r = arg;
    char *memory = aligned_alloc(4096, DEVICE_WORKSPACE_BYTES);
    Device dev = { .threads = 3, .workspace = memory, .workspace_bytes = DEVICE_WORKSPACE_BYTES };
    char *want = copy_of(r->got, r->c->c_bytes);
    Gemm g = with_c(r->c, want);
    define(&g);
    r->same = true;
    for (int i = 0; i < 5; i++) {
        memcpy(r->got, r->c->c, (size_t)r->c->c_bytes);
        g = with_c(r->c, r->got);
        r->build->gemm(&dev, &g);
        if (memcmp(r->got, want, (size_t)r->c->c_bytes)) r->same = false;
    }
    free(want), free(memory);
    return NULL;
}

TEST(ranks_as_threads)
{
    enum { RANKS = 4 };
    Case cases[RANKS];
    Rank rank[RANKS];
    pthread_t thread[RANKS];
    const Build *best = builds;
    while (!isa_supported(best->isa)) best++;
    for (int i = 0; i < RANKS; i++) {
        cases[i] = make((GemmMode)(i % 3), 100 + i, 150, 700, 100);
        rank[i] = (Rank){ &cases[i], best, copy_of(cases[i].c, cases[i].c_bytes), false };
    }
    for (int i = 0; i < RANKS; i++) pthread_create(&thread[i], NULL, rank_run, &rank[i]);
    for (int i = 0; i < RANKS; i++) {
        pthread_join(thread[i], NULL);
        CHECK_MSG(rank[i].same, "rank %d", i);
        free(rank[i].got);
        drop(&cases[i]);
    }
}

/* ---- the small product and the transpose ---- */

TEST(tiles)
{
    for (int i = 0; i < 100; i++) {
        int64_t m = pick(1, 70), n = i % 3 ? pick(1, 70) : 64, k = pick(0, 70);
        int64_t ldb = n + pick(0, 3), ldc = n + pick(0, 3);
        bool by_column = pick(0, 1), beta = pick(0, 1);
        float *a = random_floats(m * k), *b = random_floats(k ? (k - 1) * ldb + n : 0), *c = random_floats(m * ldc);
        float *want = copy_of(c, m * ldc * 4), *got = copy_of(c, m * ldc * 4);
        Gemm g = { GEMM_CHAIN, m, n, k, 1, { a, by_column ? m : k, by_column }, { b, ldb, false }, want, .ldc = ldc,
                   .beta = beta };
        define(&g);
        EACH_BUILD(e)
        {
            memcpy(got, c, (size_t)(m * ldc) * 4);
            e->tile_gemm(&(TileGemm){ m, n, k, a, by_column ? 1 : k, by_column ? m : 1, b, ldb, got, ldc, beta });
            CHECK_MSG(!memcmp(got, want, (size_t)(m * ldc) * 4), "%s %lld x %lld x %lld", isa_name(e->isa),
                      (long long)m, (long long)n, (long long)k);
        }
        free(a), free(b), free(c), free(want), free(got);
    }
}

TEST(transposes)
{
    EACH_BUILD(e) for (int i = 0; i < 30; i++) {
        int64_t rows = pick(1, 40), cols = pick(1, 40), lds = cols + pick(0, 2), ldd = rows + pick(0, 2);
        float *src = random_floats((rows - 1) * lds + cols), *dst = random_floats(cols * ldd);
        float *want = copy_of(dst, cols * ldd * 4);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t q = 0; q < cols; q++) want[q * ldd + r] = src[r * lds + q];
        e->transpose(dst, ldd, src, lds, rows, cols);
        CHECK_MSG(!memcmp(dst, want, (size_t)(cols * ldd) * 4), "%s %lld x %lld", isa_name(e->isa), (long long)rows,
                  (long long)cols);
        free(src), free(dst), free(want);
    }
}

/* ---- the ops: which operand goes where, leaves, row counts ---- */

TEST(linear_ops)
{
    enum { N = 37, O = 50, I = 96, LEAF = 10 };
    static const int64_t counts[] = { -1, 0, 1, 20, 100 }; /* -1: no row count */
    float *x = random_floats(N * I), *w = random_floats(O * I), *dy = random_floats(N * O), *bias = random_floats(O);
    float *y = random_floats(N * O), *dx = random_floats(N * I), *dw = random_floats(O * I);
    EACH_BUILD(e) for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        int64_t rows = counts[i] < 0 || counts[i] > N ? N : counts[i];
        Device dev = device(2);
        Stream s = { &dev };
        Tensor tx = tensor_of(x, F32, N, I), tw = tensor_of(w, F32, O, I), tdy = tensor_of(dy, F32, N, O);
        if (counts[i] >= 0) tx.rows = tdy.rows = &counts[i];
        float *got = copy_of(y, N * O * 4), *want = copy_of(y, N * O * 4);
        OK(e->fwd(&s, &(linear_fwd_args){ tensor_of(got, F32, N, O), tx, tw, tensor_of(bias, F32, O), .leaf = I / 8 }));
        define(&(Gemm){ GEMM_TREE, rows, O, I, I / 8, { x, I, false }, { w, I, true }, want, .ldc = O, .bias = bias });
        CHECK_MSG(!memcmp(got, want, N * O * 4), "%s fwd, %lld rows", isa_name(e->isa), (long long)counts[i]);
        free(got), free(want);

        got = copy_of(dx, N * I * 4), want = copy_of(dx, N * I * 4);
        OK(e->dx(&s, &(linear_dx_args){ tensor_of(got, F32, N, I), tdy, tw, .leaf = O }));
        define(&(Gemm){ GEMM_CHAIN, rows, I, O, 0, { dy, O, false }, { w, I, false }, want, .ldc = I });
        CHECK_MSG(!memcmp(got, want, N * I * 4), "%s dx, %lld rows", isa_name(e->isa), (long long)counts[i]);
        free(got), free(want);

        got = copy_of(dw, O * I * 4), want = copy_of(dw, O * I * 4);
        int32_t shift = 40, overflow = 0;
        linear_dw_args a = { tensor_of(got, F32, O, I), tdy, tx, tensor_of(&shift, I32, 1),
                             tensor_of(&overflow, I32, 1), .leaf = LEAF, .room = 16 };
        OK(e->dw(&s, &a));
        define(&(Gemm){ GEMM_CHAIN, O, I, rows, 0, { dy, O, true }, { x, I, false }, want, .ldc = I, .beta = true });
        CHECK_MSG(!memcmp(got, want, O * I * 4), "%s dw f32, %lld rows", isa_name(e->isa), (long long)counts[i]);
        free(got), free(want);

        int64_t *fixed = calloc(O * I, 8), *want_fixed = calloc(O * I, 8);
        a.dw = tensor_of(fixed, I64, O, I);
        OK(e->dw(&s, &a));
        define(&(Gemm){ GEMM_I64, O, I, rows, LEAF, { dy, O, true }, { x, I, false }, .fixed = want_fixed, .ldc = I,
                        .beta = true, .shift = shift, .room = 16 });
        CHECK_MSG(!memcmp(fixed, want_fixed, O * I * 8), "%s dw i64, %lld rows", isa_name(e->isa),
                  (long long)counts[i]);
        CHECK(overflow == 0);
        shift = 60;
        OK(e->dw(&s, &a));
        CHECK(overflow == (rows > 0));
        free(fixed), free(want_fixed);
    }
    free(x), free(w), free(dy), free(bias), free(y), free(dx), free(dw);
}

/* GELU within the product and its gradient behind it: the bits of the two ops one after the other. */
TEST(linear_gelu)
{
    enum { N = 37, O = 50, I = 96 };
    static const int64_t counts[] = { -1, 20 }; /* -1: no row count */
    const OpTable *const tables[ISA_COUNT] = { [ISA_AVX512] = &cpu_avx512_ops, [ISA_AVX2] = &cpu_avx2_ops,
                                               [ISA_C] = &cpu_c_ops };
    float *x = random_floats(N * I), *w = random_floats(O * I), *dy = random_floats(N * O), *bias = random_floats(O),
          *start = random_floats(N * I);
    EACH_BUILD(e) for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        Device dev = device(2);
        Stream s = { &dev };
        Tensor tx = tensor_of(x, F32, N, I), tw = tensor_of(w, F32, O, I), tdy = tensor_of(dy, F32, N, O),
               tb = tensor_of(bias, F32, O), out[2][3];
        if (counts[i] >= 0) tx.rows = tdy.rows = &counts[i];
        for (int fused = 0; fused < 2; fused++) {
            Tensor *t = out[fused];
            for (int j = 0; j < 3; j++)
                t[j] = tensor_of(copy_of(start, N * I * 4), F32, N, j == 2 ? I : O);
            OK(e->fwd(&s, &(linear_fwd_args){ .y = t[0], .x = tx, .w = tw, .bias = tb, .leaf = I / 8,
                                              .gelu = fused ? t[1] : (Tensor){ 0 } }));
            OK(e->dx(&s, &(linear_dx_args){ .dx = t[2], .dy = tdy, .w = tw, .leaf = O,
                                            .gelu_x = fused ? tensor_of(x, F32, N, I) : (Tensor){ 0 } }));
            if (fused) continue;
            t[0].rows = t[2].rows = tx.rows;
            OK(tables[e->isa]->gelu_fwd(&s, &(gelu_fwd_args){ .y = t[1], .x = t[0] }));
            OK(tables[e->isa]->gelu_bwd(&s, &(gelu_bwd_args){ .dx = t[2], .dy = t[2], .x = tensor_of(x, F32, N, I) }));
        }
        for (int j = 0; j < 3; j++) {
            CHECK_MSG(!memcmp(out[0][j].data, out[1][j].data, N * I * 4), "%s tensor %d, %lld rows", isa_name(e->isa),
                      j, (long long)counts[i]);
            free(out[0][j].data), free(out[1][j].data);
        }
    }
    free(x), free(w), free(dy), free(bias), free(start);
}

TEST_MAIN
