/*
 * Attention forward and backward in useful GFLOP/s: only scores that the causal mask and the window leave,
 * two products forward and five backward. Beside it the rate of our own matrix product (1024 x 768 x 768, one
 * chain), run in turns of equal length; that ratio is what means something on a machine that others use.
 *
 *   bench_attention [--json FILE] [--seconds S] [--isa avx512|avx2|c] [--only TEXT] [--bf16 fma|vdpbf16]
 *
 * OMP_NUM_THREADS sets the threads.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/half.h"
#include "base/json.h"
#include "cpu/gemm.h"
#include "device/ops.h"

typedef struct {
    const char *name;
    int64_t B, T, H, K, C, block, window;
    float drop;
} Row;

static struct {
    Device dev;
    double seconds; /* for each row */
    const char *only;
    DType dtype;
    JsonOut json;
    float *a, *b, *c; /* of the matrix product */
} bench = { .seconds = 1 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static float *filled(int64_t n)
{
    float *p = aligned_alloc(64, (size_t)(n * 4 + 63) / 64 * 64);
    uint64_t state = 1;
    for (int64_t i = 0; i < n; i++)
        p[i] = (float)((int64_t)((state = state * 6364136223846793005u + 1) >> 40) - 8388608) * 0x1p-23f;
    return p;
}

/* The same numbers in the dtype that is timed. */
static void *typed(int64_t n)
{
    float *p = filled(n);
    uint16_t *narrow = (uint16_t *)p;
    for (int64_t i = 0; bench.dtype == BF16 && i < n; i++) narrow[i] = bf16_from_float(p[i]);
    return p;
}

/* ---- what is timed ---- */

enum { GEMM_M = 1024, GEMM_NK = 768, STAGING_BYTES = 64 << 20, SHORTEST_LEAF = 128 };

static void run_gemm(void)
{
    bool (*const calls[ISA_COUNT])(const Device *, const Gemm *) = {
        [ISA_AVX512] = cpu_avx512_gemm, [ISA_AVX2] = cpu_avx2_gemm, [ISA_C] = cpu_c_gemm
    };
    Gemm g = { .mode = GEMM_CHAIN, .M = GEMM_M, .N = GEMM_NK, .K = GEMM_NK, .a = { bench.a, GEMM_NK, false },
               .b = { bench.b, GEMM_NK, true }, .c = bench.c, .ldc = GEMM_NK };
    calls[bench.dev.isa](&bench.dev, &g);
}

static Err run_forward(const attention_bwd_args *x)
{
    return op(&bench.dev.stream, attention_fwd, .o = x->o, .lse = x->lse, .q = x->q, .k = x->k, .v = x->v,
              .sample = x->sample, .q_span = x->q_span, .k_span = x->k_span, .scale = x->scale,
              .block = x->block, .window = x->window, .dropout = x->dropout);
}

static attention_bwd_args tensors_of(const Row *r, int64_t *samples)
{
    int64_t B = r->B, T = r->T, H = r->H, K = r->K, C = r->C;
#define LIKE_Q tensor_of(typed(B * T * H * C), bench.dtype, B, T, H, C)
#define LIKE_K tensor_of(typed(B * T * K * C), bench.dtype, B, T, K, C)
#define LIKE_LSE tensor_of(filled(B * T * H), F32, B, T, H)
    return (attention_bwd_args){
        .dq = LIKE_Q, .dk = LIKE_K, .dv = LIKE_K, .go = LIKE_Q, .q = LIKE_Q, .k = LIKE_K, .v = LIKE_K,
        .o = LIKE_Q, .lse = LIKE_LSE, .delta = LIKE_LSE, .sample = tensor_of(samples, I64, B),
        .q_span = spans_whole(T), .k_span = spans_whole(T), .scale = 0.125f, .block = r->block,
        .window = r->window, .dropout = { 1, (uint32_t)((double)r->drop * 0x1p32), 1 / (1 - r->drop) },
        .chunk = H / K, .leaf = T / 8 < SHORTEST_LEAF ? T : T / 8, .positions = T };
}

static void tensors_free(attention_bwd_args *x)
{
    Tensor *const all[] = { &x->dq, &x->dk, &x->dv, &x->go, &x->q, &x->k, &x->v, &x->o, &x->lse, &x->delta };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]->data);
}

/* ---- one row ---- */

/* FLOP of one product: 2 for each visible (query, key) and feature. */
static double product_flop(const Row *r)
{
    double seen = 0;
    for (int64_t t = 0; t < r->T; t++) seen += (double)(r->window && r->window < t + 1 ? r->window : t + 1);
    return 2 * seen * (double)(r->B * r->H * r->C);
}

static void report(const Row *r, const double best[3])
{
    double flop = product_flop(r), forward = 2e-9 * flop / best[0], backward = 5e-9 * flop / best[1],
           both = 7e-9 * flop / (best[0] + best[1]),
           gemm = 2e-9 * GEMM_M * GEMM_NK * GEMM_NK / best[2];
    printf("%-34s %8.1f %8.1f %8.1f %8.1f %7.0f%%\n", r->name, forward, backward, both, gemm,
           100 * both / gemm);
    fflush(stdout);
    json_open(&bench.json, NULL, '{');
    json_put_text(&bench.json, "name", r->name);
    json_put_number(&bench.json, "forward_gflops", forward);
    json_put_number(&bench.json, "backward_gflops", backward);
    json_put_number(&bench.json, "gemm_gflops", gemm);
    json_put_number(&bench.json, "gemm_share", both / gemm);
    json_close(&bench.json, '}');
}

static Err run_row(const Row *r)
{
    int64_t samples[16] = { 0 };
    if (bench.only && !strstr(r->name, bench.only)) return ERR_OK;
    attention_bwd_args x = tensors_of(r, samples);
    double best[3] = { 1e30, 1e30, 1e30 }, until = now() + bench.seconds;
    for (int i = 0; i < 3 || now() < until; i++) {
        double t0 = now();
        TRY(run_forward(&x));
        double t1 = now();
        TRY(op_attention_bwd(&bench.dev.stream, &x));
        double t2 = now();
        int products = 0; /* for as long, so that disturbances meet both alike */
        do run_gemm(), products++;
        while (now() - t2 < t2 - t0);
        double took[3] = { t1 - t0, t2 - t1, (now() - t2) / products };
        for (int k = 0; k < 3 && i > 0; k++)
            if (took[k] < best[k]) best[k] = took[k];
    }
    report(r, best);
    tensors_free(&x);
    return ERR_OK;
}

static Err run_rows(void)
{
    static const Row rows[] = {
        { "B1 T1024 H12 C64", 1, 1024, 12, 12, 64, 64, 0, 0 },
        { "B4 T64 H12 C64", 4, 64, 12, 12, 64, 64, 0, 0 },
        { "B8 T256 H6 C64", 8, 256, 6, 6, 64, 64, 0, 0 },
        { "B1 T4096 H12 C64", 1, 4096, 12, 12, 64, 64, 0, 0 },
        { "B1 T1024 H16 K4 C128", 1, 1024, 16, 4, 128, 64, 0, 0 },
        { "B1 T1024 H12 C64 block 128", 1, 1024, 12, 12, 64, 128, 0, 0 },
        { "B1 T4096 H12 C64 window 512", 1, 4096, 12, 12, 64, 64, 512, 0 },
        { "B1 T1024 H12 C64 dropout 0.1", 1, 1024, 12, 12, 64, 64, 0, 0.1f },
        { "B1 T1024 H12 C80", 1, 1024, 12, 12, 80, 64, 0, 0 },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) TRY(run_row(&rows[i]));
    return ERR_OK;
}

/* ---- ---- */

static bool parse(int argc, char **argv, DeviceChoice *choice, const char **json_path)
{
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--json")) *json_path = value;
        else if (!strcmp(argv[i], "--seconds")) bench.seconds = strtod(value, NULL);
        else if (!strcmp(argv[i], "--only")) bench.only = value;
        else if (!strcmp(argv[i], "--isa"))
            choice->isa = !strcmp(value, "avx512") ? ISA_AVX512 : !strcmp(value, "avx2") ? ISA_AVX2 : ISA_C;
        else if (!strcmp(argv[i], "--bf16")) {
            bench.dtype = BF16;
            choice->dot = !strcmp(value, "fma") ? DOT_FMA : DOT_VDPBF16;
            choice->staging_bytes = STAGING_BYTES;
        } else return false;
    }
    return true;
}

static Err run_all(DeviceChoice choice)
{
    TRY(device_open(&bench.dev, choice));
    bench.a = filled(GEMM_M * GEMM_NK), bench.b = filled(GEMM_NK * GEMM_NK);
    bench.c = filled(GEMM_M * GEMM_NK);
    json_open(&bench.json, NULL, '{');
    json_put_text(&bench.json, "isa", isa_name(bench.dev.isa));
    json_put_int(&bench.json, "threads", bench.dev.threads);
    json_open(&bench.json, "rows", '[');
    printf("%s, %d threads; useful GFLOP/s, best of several\n%-34s %8s %8s %8s %8s %8s\n",
           isa_name(bench.dev.isa), bench.dev.threads, "", "forward", "backward", "both", "gemm", "share");
    Err err = run_rows();
    json_close(&bench.json, ']');
    json_close(&bench.json, '}');
    free(bench.a), free(bench.b), free(bench.c);
    device_close(&bench.dev);
    return err;
}

int main(int argc, char **argv)
{
    static char json[1 << 14];
    const char *json_path = NULL;
    DeviceChoice choice = { 0 };
    if (!parse(argc, argv, &choice, &json_path)) {
        fprintf(stderr, "usage: bench_attention [--json FILE] [--seconds S] [--isa avx512|avx2|c] [--only TEXT] "
                        "[--bf16 fma|vdpbf16]\n");
        return 2;
    }
    json_out_init(&bench.json, json, sizeof json);
    Err err = run_all(choice);
    if (err) {
        err_print(err, true);
        return err_exit_code(err);
    }
    if (!json_path) return 0;
    FILE *f = fopen(json_path, "w");
    if (!f || !json_out_ok(&bench.json) || fprintf(f, "%s\n", json) < 0 || fclose(f)) {
        fprintf(stderr, "cannot write '%s'\n", json_path);
        return 5;
    }
    return 0;
}
