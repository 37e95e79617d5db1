/*
 * The matrix product against OpenBLAS, alternating in one process: GFLOP/s (best of several runs), median of
 * the ratios of neighbouring runs (above 1: we are faster), share of the fma peak measured in between. The
 * trees and integer sums, which OpenBLAS has not, alternate with our own chain of the same product besides:
 * their cost is the time they take over it (median of neighbouring runs), and OpenBLAS's chain a mere scale.
 *
 *   bench_gemm [--json FILE] [--seconds S] [--isa avx512|avx2|c] [--only TEXT] [--no-blas]
 *
 * For shapes tokens x out x in: fwd, dgrad and wgrad as training runs them with reproducible = layout (trees
 * of 8 where a tp cut may fall, I64 gradients) and with reproducible = run (one chain, F32 gradients).
 * OMP_NUM_THREADS sets the threads of both. OpenBLAS is opened by name; without it the column is empty.
 */
#include <dlfcn.h>
#include <immintrin.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "base/json.h"
#include "cpu/gemm.h"

typedef bool (*GemmCall)(const Device *, const Gemm *);
typedef void (*SgemmCall)(const char *, const char *, const int *, const int *, const int *, const float *,
                          const float *, const int *, const float *, const int *, const float *, float *,
                          const int *);

typedef struct {
    char name[64];
    Gemm g;
} Row;

static struct {
    Device dev;
    Isa isa;
    GemmCall own;
    SgemmCall blas;
    double seconds; /* for each row */
    double peak;    /* GFLOP/s, best seen */
    const char *only;
    JsonOut json;
} bench = { .isa = ISA_AUTO, .seconds = 0.5 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- the ceiling: 12 independent chains of fma in each thread, no memory ---- */

enum { PEAK_LOOPS = 300000, CHAINS = 12 };

__attribute__((target("avx512f"), noinline)) static float chains_avx512(void)
{
    __m512 c[CHAINS], x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(1e-3f);
    for (int j = 0; j < CHAINS; j++) c[j] = _mm512_set1_ps((float)j);
    for (int i = 0; i < PEAK_LOOPS; i++) {
#pragma GCC unroll 12
        for (int j = 0; j < CHAINS; j++) c[j] = _mm512_fmadd_ps(c[j], x, y);
    }
    for (int j = 1; j < CHAINS; j++) c[0] = _mm512_add_ps(c[0], c[j]);
    return _mm512_cvtss_f32(c[0]);
}

__attribute__((target("avx2,fma"), noinline)) static float chains_avx2(void)
{
    __m256 c[CHAINS], x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(1e-3f);
    for (int j = 0; j < CHAINS; j++) c[j] = _mm256_set1_ps((float)j);
    for (int i = 0; i < PEAK_LOOPS; i++) {
#pragma GCC unroll 12
        for (int j = 0; j < CHAINS; j++) c[j] = _mm256_fmadd_ps(c[j], x, y);
    }
    for (int j = 1; j < CHAINS; j++) c[0] = _mm256_add_ps(c[0], c[j]);
    return _mm256_cvtss_f32(c[0]);
}

static void measure_peak(void)
{
    if (!isa_supported(ISA_AVX2)) return;
    volatile float sink = 0;
    int lanes = isa_supported(ISA_AVX512) ? 16 : 8;
    for (int repeat = 0; repeat < 3; repeat++) {
        double t0 = now();
#pragma omp parallel num_threads(bench.dev.threads)
        sink = lanes == 16 ? chains_avx512() : chains_avx2();
        double rate = 2.0 * lanes * CHAINS * PEAK_LOOPS * bench.dev.threads / (now() - t0) * 1e-9;
        if (rate > bench.peak) bench.peak = rate;
    }
    (void)sink;
}

/* ---- one row ---- */

static void run_blas(const Gemm *g)
{
    const int M = (int)g->M, N = (int)g->N, K = (int)g->K, lda = (int)g->a.ld, ldb = (int)g->b.ld, ldc = (int)g->ldc;
    const float one = 1, beta = g->beta ? 1 : 0;
    bench.blas(g->b.transposed ? "T" : "N", g->a.transposed ? "T" : "N", &N, &M, &K, &one, g->b.data, &ldb, g->a.data,
               &lda, &beta, g->c, &ldc);
}

/* The contenders of a row. */
enum { OWN, BLAS, CHAIN, CONTENDERS };

/* Seconds of each contender, run by run; neighbours are compared: holds also where the machine's speed drifts. */
enum { RUNS_MAX = 2000, RUNS_MIN = 3 };
static double seconds[CONTENDERS][RUNS_MAX];

/* Memory as a device gives it (device.c): in huge pages, if the kernel has them. */
static void *huge(int64_t bytes)
{
    const int64_t page = 2 << 20;
    void *p = aligned_alloc((size_t)page, (size_t)((bytes + page - 1) / page * page));
    if (!p) abort();
    madvise(p, (size_t)bytes, MADV_HUGEPAGE);
    return p;
}

static float *filled(int64_t n)
{
    float *p = huge(n * (int64_t)sizeof *p);
    uint64_t state = 1;
    for (int64_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1;
        p[i] = (float)((int64_t)(state >> 40) - (1 << 23)) * 0x1p-27f;
    }
    return p;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median of seconds[x] / seconds[y], run by run. */
static double median_ratio(int x, int y, int runs)
{
    static double ratio[RUNS_MAX];
    for (int i = 0; i < runs; i++) ratio[i] = seconds[x][i] / seconds[y][i];
    qsort(ratio, (size_t)runs, sizeof *ratio, ascending);
    return ratio[runs / 2];
}

static double best(int who, int runs)
{
    double least = seconds[who][0];
    for (int i = 1; i < runs; i++)
        if (seconds[who][i] < least) least = seconds[who][i];
    return least;
}

static void report(const Row *r, int runs)
{
    const double flop = 2.0 * (double)r->g.M * (double)r->g.N * (double)r->g.K;
    const double own = flop / best(OWN, runs) * 1e-9, blas = bench.blas ? flop / best(BLAS, runs) * 1e-9 : 0;
    const double ratio = bench.blas ? median_ratio(BLAS, OWN, runs) : 0;
    const bool chain = r->g.mode == GEMM_CHAIN;
    const double cost = chain ? 0 : 100 * (median_ratio(OWN, CHAIN, runs) - 1);
    printf("%-44s %8.1f %8.1f %7.2f %7.0f%%", r->name, own, blas, ratio, 100 * own / bench.peak);
    if (chain) printf("\n");
    else printf(" %+9.0f%%\n", cost);
    fflush(stdout);
    json_open(&bench.json, NULL, '{');
    json_put_text(&bench.json, "name", r->name);
    json_put_number(&bench.json, "own_gflops", own);
    if (bench.blas) json_put_number(&bench.json, "openblas_gflops", blas);
    if (bench.blas) json_put_number(&bench.json, "ratio", ratio);
    json_put_number(&bench.json, "peak_share", own / bench.peak);
    if (!chain) json_put_number(&bench.json, "cost_percent", cost);
    json_close(&bench.json, '}');
}

/* One run of each contender that the row has. */
static void run_once(const Gemm *g, const Gemm *chain, double out[CONTENDERS])
{
    double t = now();
    bench.own(&bench.dev, g);
    out[OWN] = now() - t;
    t = now();
    if (bench.blas) run_blas(g);
    out[BLAS] = now() - t;
    t = now();
    if (g->mode != GEMM_CHAIN) bench.own(&bench.dev, chain);
    out[CHAIN] = now() - t;
}

static void run_row(Row *r)
{
    Gemm *g = &r->g;
    if (bench.only && !strstr(r->name, bench.only)) return;
    float *a = filled(g->M * g->K), *b = filled(g->K * g->N);
    g->a = (GemmOperand){ a, g->a.transposed ? g->M : g->K, g->a.transposed };
    g->b = (GemmOperand){ b, g->b.transposed ? g->K : g->N, g->b.transposed };
    g->ldc = g->N;
    g->c = filled(g->M * g->N);
    if (g->mode == GEMM_I64) {
        g->fixed = huge(g->M * g->N * (int64_t)sizeof *g->fixed);
        memset(g->fixed, 0, (size_t)(g->M * g->N) * sizeof *g->fixed);
    }
    g->shift = 40, g->headroom_bits = 16;
    Gemm chain = *g;
    chain.mode = GEMM_CHAIN, chain.fixed = NULL;
    double run[CONTENDERS];
    run_once(g, &chain, run); /* fills the caches */
    int runs = 0;
    for (double until = now() + bench.seconds; (runs < RUNS_MIN || now() < until) && runs < RUNS_MAX; runs++) {
        run_once(g, &chain, run);
        for (int i = 0; i < CONTENDERS; i++) seconds[i][runs] = run[i];
    }
    measure_peak();
    report(r, runs);
    free(a), free(b), free(g->c), free(g->fixed);
}

/* The three products of a linear layer, in the modes of both kinds of reproducibility. */
static void run_linear(int64_t tokens, int64_t out, int64_t in, int64_t leaf)
{
    Row rows[] = {
        { "fwd chain", { .mode = GEMM_CHAIN, tokens, out, in, .b.transposed = true } },
        { "fwd tree/8", { .mode = GEMM_TREE, tokens, out, in, in / 8, .b.transposed = true } },
        { "dgrad chain", { .mode = GEMM_CHAIN, tokens, in, out } },
        { "dgrad tree/8", { .mode = GEMM_TREE, tokens, in, out, out / 8 } },
        { "wgrad f32", { .mode = GEMM_CHAIN, out, in, tokens, .a.transposed = true, .beta = true } },
        { "wgrad i64", { .mode = GEMM_I64, out, in, tokens, leaf, .a.transposed = true, .beta = true } },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char what[sizeof rows->name], leaf_text[24] = "";
        memcpy(what, rows[i].name, sizeof what);
        if (rows[i].g.mode == GEMM_I64) snprintf(leaf_text, sizeof leaf_text, " leaf %lld", (long long)leaf);
        snprintf(rows[i].name, sizeof rows[i].name, "%lldx%lldx%lld %.16s%s", (long long)tokens, (long long)out,
                 (long long)in, what, leaf_text);
        run_row(&rows[i]);
    }
}

/* ---- ---- */

static void open_blas(void)
{
    void *lib = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (!lib) {
        fprintf(stderr, "no OpenBLAS to compare with: %s\n", dlerror());
        return;
    }
    *(void **)&bench.blas = dlsym(lib, "sgemm_");
    void (*set_threads)(int);
    *(void **)&set_threads = dlsym(lib, "openblas_set_num_threads");
    if (set_threads) set_threads(bench.dev.threads);
}

static bool parse(int argc, char **argv, const char **json_path)
{
    bool blas = true;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--no-blas")) {
            blas = false;
            continue;
        }
        if (!strcmp(argv[i], "--json")) *json_path = value;
        else if (!strcmp(argv[i], "--seconds")) bench.seconds = strtod(value, NULL);
        else if (!strcmp(argv[i], "--only")) bench.only = value;
        else if (!strcmp(argv[i], "--isa"))
            bench.isa = !strcmp(value, "avx512") ? ISA_AVX512 : !strcmp(value, "avx2") ? ISA_AVX2 : ISA_C;
        else return false;
        i++;
    }
    bench.dev.threads = omp_get_max_threads();
    if (blas) open_blas();
    return true;
}

int main(int argc, char **argv)
{
    static const GemmCall calls[ISA_COUNT] = { [ISA_AVX512] = cpu_avx512_gemm, [ISA_AVX2] = cpu_avx2_gemm,
                                               [ISA_C] = cpu_c_gemm };
    static const int64_t shapes[][4] = {
        /* tokens, out, in, tokens of a gradient leaf */
        { 256, 3072, 768, 32 },   { 1024, 2304, 768, 128 }, { 1024, 1152, 384, 128 }, { 1024, 384, 384, 128 },
        { 4096, 3072, 768, 256 }, { 4096, 768, 3072, 256 }, { 256, 50304, 768, 64 },  { 1024, 50304, 384, 128 },
        { 2048, 1152, 384, 32 },  { 256, 768, 768, 8 },     { 1, 3072, 768, 1 },      { 4, 3072, 768, 4 },
        { 16, 3072, 768, 16 },    { 32, 3072, 768, 32 },    { 1, 50304, 768, 1 },
    };
    static char json[1 << 16];
    const char *json_path = NULL;
    if (!parse(argc, argv, &json_path)) {
        fprintf(stderr, "usage: bench_gemm [--json FILE] [--seconds S] [--isa avx512|avx2|c] [--only TEXT] "
                        "[--no-blas]\n");
        return 2;
    }
    if (bench.isa == ISA_AUTO) bench.isa = isa_best();
    bench.own = calls[bench.isa];
    bench.dev.workspace = huge(DEVICE_WORKSPACE_BYTES);
    bench.dev.workspace_bytes = DEVICE_WORKSPACE_BYTES;
    measure_peak();
    json_out_init(&bench.json, json, sizeof json);
    json_open(&bench.json, NULL, '{');
    json_put_text(&bench.json, "isa", isa_name(bench.isa));
    json_put_int(&bench.json, "threads", bench.dev.threads);
    json_open(&bench.json, "rows", '[');
    printf("%s, %d threads; tokens x out x in\n%-44s %8s %8s %7s %8s %10s\n", isa_name(bench.isa), bench.dev.threads,
           "GFLOP/s, best of several", "megatrain", "OpenBLAS", "ratio", "of peak", "over chain");
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        run_linear(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3]);
    json_close(&bench.json, ']');
    json_put_number(&bench.json, "peak_gflops", bench.peak);
    json_close(&bench.json, '}');
    printf("fma peak, best seen: %.1f GFLOP/s\n", bench.peak);
    free(bench.dev.workspace);
    if (!json_path) return 0;
    FILE *f = fopen(json_path, "w");
    if (!f || !json_out_ok(&bench.json) || fprintf(f, "%s\n", json) < 0 || fclose(f)) {
        fprintf(stderr, "cannot write '%s'\n", json_path);
        return 5;
    }
    return 0;
}
