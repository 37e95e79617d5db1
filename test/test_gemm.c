/*
 * The matrix product against its definition (cpu/gemm.h), bit for bit: every mode, transposition and
 * instruction set, cuts of M, N and K, thread counts, row counts; nothing outside the result is written.
 */
#include "gemm_definition.h"

#include <pthread.h>

typedef struct {
    Isa isa;
    bool (*gemm)(const Device *, const Gemm *);
    void (*tile_gemm)(const TileGemm *);
    void (*transpose)(float *, int64_t, const float *, int64_t, int64_t, int64_t);
} Build;

#define BUILD(kind, isa) { kind, cpu_##isa##_gemm, cpu_##isa##_tile_gemm, cpu_##isa##_transpose }
static const Build builds[] = { BUILD(ISA_AVX512, avx512), BUILD(ISA_AVX2, avx2), BUILD(ISA_C, c) };
#define EACH_BUILD(b) for (const Build *b = builds; b < builds + 3; b++) if (isa_supported(b->isa))

/* ---- a product with its memory; C has guard columns and rows all round ---- */

typedef struct {
    Gemm g;
    float *a, *b, *bias;
    char *c;
    int64_t c_bytes;
    bool in_floats; /* C, not G */
} Case;

enum { GUARD_ROWS = 2 };

static Case make(GemmMode mode, int64_t M, int64_t N, int64_t K, int64_t leaf)
{
    Case c = { .g = { .mode = mode, .M = M, .N = N, .K = K, .leaf = leaf, .shift = 40, .headroom_bits = 16 } };
    bool ta = pick(0, 1), tb = pick(0, 1);
    c.in_floats = mode != GEMM_I64;
    int64_t lda = (ta ? M : K) + pick(0, 3) * pick(0, 1), ldb = (tb ? K : N) + pick(0, 3) * pick(0, 1);
    /* exactly as long as the product may read, for the sanitizer */
    int64_t na = K && M ? ((ta ? K : M) - 1) * lda + (ta ? M : K) : 0;
    int64_t nb = K && N ? ((tb ? N : K) - 1) * ldb + (tb ? K : N) : 0;
    c.g.a = (GemmOperand){ c.a = random_floats(na), lda, ta };
    c.g.b = (GemmOperand){ c.b = random_floats(nb), ldb, tb };
    c.g.beta = mode != GEMM_TREE && pick(0, 1);
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

static void drop(Case *c) { free(c->a), free(c->b), free(c->bias), free(c->c); }

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

/* Lengths of leaves from 0 to more than a slab, and from a number on that is not 0. */
TEST(leaves_of_any_length)
{
    enum { LEAVES_MOST = 24 };
    for (int i = 0; i < 60; i++) {
        int64_t starts[LEAVES_MOST + 1] = { pick(0, 100) }, most[] = { 3, 20, 100, 700 };
        const int64_t leaves = pick(1, LEAVES_MOST), longest = most[i % 4];
        for (int64_t l = 0; l < leaves; l++)
            starts[l + 1] = starts[l] + (pick(0, 2) ? pick(0, longest) : 0);
        Case c = make(GEMM_I64, pick(1, 40), pick(1, 70), starts[leaves] - starts[0], 0);
        c.g.starts = starts;
        check_case(&c, 1 + i % 3);
        drop(&c);
    }
}

/* In a tile that is whole: what is left of the short ones must not take the place of the long one's sum. */
TEST(long_leaf_behind_short_ones)
{
    for (int i = 0; i < 12; i++) {
        const int64_t starts[] = { 0, 40, 80, 780, 820 };
        Case c = make(GEMM_I64, 8, 48, 820, 0);
        c.g.starts = starts;
        check_case(&c, 1);
        drop(&c);
    }
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
               .shift = 40, .headroom_bits = 16 };
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

/* Integers so many that they pass the caches, in aligned rows; tiles that are whole, and others at the edges. */
TEST(streamed)
{
    enum { M = 524, N = 1064, K = 70, LEAF = 32 };
    const size_t bytes = (size_t)M * N * sizeof(int64_t);
    float *a = random_floats(M * K), *b = random_floats(K * N);
    int64_t *want = malloc(bytes), *got = aligned_alloc(64, bytes);
    Gemm g = { GEMM_I64, M, N, K, LEAF, { a, M, true }, { b, N, false }, .fixed = want, .ldc = N,
               .shift = 40, .headroom_bits = 16 };
    CHECK(!define(&g));
    g.fixed = got;
    EACH_BUILD(e) for (int threads = 1; threads <= 3; threads += 2) {
        Device dev = device(threads);
        memset(got, 0x55, bytes);
        CHECK(!e->gemm(&dev, &g));
        CHECK_MSG(!memcmp(want, got, bytes), "%s, %d threads", isa_name(e->isa), threads);
    }
    free(a), free(b), free(want), free(got);
}

/* ---- overflow of the fixed point ---- */

TEST(overflow_flag)
{
    static const struct {
        float value; /* of one element of A; B is 1 there, so this is the leaf */
        int shift, headroom_bits;
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
                   .shift = cases[i].shift, .headroom_bits = cases[i].headroom_bits };
        CHECK_MSG(e->gemm(&dev, &g) == cases[i].flag, "%s %a shift %d", isa_name(e->isa), (double)cases[i].value,
                  cases[i].shift);
        int64_t want = cases[i].flag ? 0 : llrintf(ldexpf(cases[i].value, cases[i].shift));
        CHECK_MSG(got[AT_I][AT_J] == want, "%a", (double)cases[i].value);
        CHECK(got[AT_I][0] == 0 && got[0][AT_J] == 0);
    }
}

static float *element(GemmOperand m, int64_t i, int64_t j)
{
    return (float *)m.data + (m.transposed ? j * m.ld + i : i * m.ld + j);
}

static void fill(GemmOperand m, int64_t rows, int64_t cols, float unit)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) *element(m, i, j) = unit * (float)pick(-8, 8);
}

/*
 * Leaves (of small integers times `unit`) on both sides of 2^51, below which they are rounded in a quicker way, and of
 * the limit; halves, whose rounding goes by even and odd; shifts for which squares of the limit are no floats; a number
 * in A and one in B that fit nothing.
 */
TEST(fixed_sizes)
{
    static const struct {
        float unit;
        int first, last, headroom_bits; /* shifts */
        float odd;
    } cases[] = {
        { 1, -3, 1, 4, 0 },
        { 1, 40, 55, 4, 0 },
        { 1, 34, 42, 16, 0 },
        { 0x1p-60f, 100, 116, 4, 0 },
        { 0x1p-126f, 105, 127, 4, 0 },
        { 0x1p-140f, 120, 127, 8, 0 },
        { 0x1p-149f, 126, 127, 8, 0 },
        { 0x1p60f, -20, -8, 4, 0 },
        { 0x1p80f, -40, -28, 5, 0 },
        { 1, 30, 32, 16, NAN },
        { 1, 30, 32, 16, INFINITY },
        { 1, 30, 32, 16, -INFINITY },
        { 1, 30, 32, 16, 0x1p100f },
        { 1, 30, 32, 16, 0x1p-100f },
        { 1, 30, 32, 16, 0x1p-149f },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int shift = cases[i].first; shift <= cases[i].last; shift++) {
            const int64_t leaf = shift % 2 ? pick(1, 9) : pick(20, 60), K = leaf * pick(1, 9) - pick(0, leaf - 1);
            Case c = make(GEMM_I64, pick(20, 60), pick(20, 130), K, leaf);
            c.g.shift = shift, c.g.headroom_bits = cases[i].headroom_bits;
            fill(c.g.a, c.g.M, K, cases[i].unit), fill(c.g.b, K, c.g.N, 1);
            if (cases[i].odd != 0) {
                *element(c.g.a, pick(0, c.g.M - 1), pick(0, K - 1)) = cases[i].odd;
                *element(c.g.b, pick(0, K - 1), pick(0, c.g.N - 1)) = cases[i].odd;
            }
            check_case(&c, 1 + shift % 2 * (shift > 0));
            drop(&c);
        }
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

TEST_MAIN
