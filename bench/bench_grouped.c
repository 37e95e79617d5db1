/*
 * The products of a mixture's experts, all in one call (ops.def, grouped_*), beside a product an expert (linear_*) with
 * the same threads, in turns: milliseconds (best), and how much faster the one call is (median of neighbours).
 *
 *   bench_grouped [--json FILE] [--seconds S] [--bf16 fma|vdpbf16]
 *
 * In fp32, or in bf16 with products of a kind (docs/determinism.md).
 * Rows are spread over the experts by a router that has no preference. OMP_NUM_THREADS sets the threads.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/half.h"
#include "base/json.h"
#include "base/rng.h"
#include "device/ops.h"

typedef struct {
    const char *name;
    int64_t experts, rows, outputs, inputs;
} Row;

enum { RUNS = 400, RUNS_LEAST = 5, LEAF = 256 /* rows of a leaf of a gradient */ };

static struct {
    Device dev;
    double seconds; /* for each row */
    DType dtype;
    DotKind dot;
    JsonOut json;
} bench = { .seconds = 2, .dtype = F32 };

typedef struct {
    Tensor x, w, dy, y, dx, dw, offset, shift, overflow;
} Grouped;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static Tensor filled(int64_t a, int64_t b, int64_t c)
{
    const int64_t n = a * b * (c ? c : 1);
    void *p = aligned_alloc(64, (size_t)(n * 4 + 63) / 64 * 64);
    for (int64_t i = 0; i < n; i++) {
        const float x = (float)(i * 7919 % 1000 - 500) * 1e-3f;
        if (bench.dtype == F32) ((float *)p)[i] = x;
        else ((uint16_t *)p)[i] = bf16_from_float(x);
    }
    return c ? tensor_of(p, bench.dtype, a, b, c) : tensor_of(p, bench.dtype, a, b);
}

/* Offsets of as many random choices, a run for each LEAF rows of an expert. */
static Tensor offsets_of(const Row *r, int64_t runs)
{
    int64_t *offset = calloc((size_t)(r->experts * runs + 1), sizeof *offset), total = 0;
    int64_t *count = calloc((size_t)r->experts, sizeof *count);
    for (int64_t i = 0; i < r->rows; i++) count[philox(1, (uint32_t)i, 0, 0, 0).v[0] % r->experts]++;
    for (int64_t e = 0; e < r->experts; e++)
        for (int64_t k = 0; k < runs; k++) {
            total += (k + 1) * count[e] / runs - k * count[e] / runs;
            offset[e * runs + k + 1] = total;
        }
    free(count);
    return tensor_of(offset, I64, r->experts * runs + 1);
}

static Grouped make(const Row *r)
{
    static int32_t shift = 20, overflow;
    const int64_t O = r->outputs, I = r->inputs, E = r->experts;
    int64_t *dw = calloc((size_t)(E * O * I), sizeof *dw);
    return (Grouped){ .x = filled(r->rows, I, 0),
                      .w = filled(E, O, I),
                      .dy = filled(r->rows, O, 0),
                      .y = filled(r->rows, O, 0),
                      .dx = filled(r->rows, I, 0),
                      .dw = tensor_of(dw, I64, E, O, I),
                      .offset = offsets_of(r, (r->rows / E + LEAF - 1) / LEAF),
                      .shift = tensor_of(&shift, I32, 1),
                      .overflow = tensor_of(&overflow, I32, 1) };
}

static Err all_at_once(const Grouped *g)
{
    Stream *s = &bench.dev.stream;
    TRY(op(s, grouped_fwd, .y = g->y, .x = g->x, .w = g->w, .offset = g->offset, .leaf = g->x.dim[1]));
    TRY(op(s, grouped_dx, .dx = g->dx, .dy = g->dy, .w = g->w, .offset = g->offset, .leaf = g->dy.dim[1]));
    return op(s, grouped_dw, .dw = g->dw, .dy = g->dy, .x = g->x, .offset = g->offset, .shift = g->shift,
              .overflow = g->overflow, .headroom_bits = 10, .fresh = 1);
}

static Err one_by_one(const Grouped *g)
{
    Stream *s = &bench.dev.stream;
    const int64_t E = g->w.dim[0], O = g->w.dim[1], I = g->w.dim[2], runs = (g->offset.dim[0] - 1) / E;
    const int64_t *offset = g->offset.data;
    for (int64_t e = 0; e < E; e++) {
        const int64_t first = offset[e * runs], n = offset[(e + 1) * runs] - first;
        if (!n) continue;
        const Tensor w = tensor_of((char *)g->w.data + e * O * I * dtype_size(g->w.dtype), g->w.dtype, O, I);
        const Tensor dw = tensor_of((int64_t *)g->dw.data + e * O * I, I64, O, I);
        const Tensor x = tensor_row_slice(g->x, first, n), dy = tensor_row_slice(g->dy, first, n);
        TRY(op(s, linear_fwd, .y = tensor_row_slice(g->y, first, n), .x = x, .w = w, .leaf = I));
        TRY(op(s, linear_dx, .dx = tensor_row_slice(g->dx, first, n), .dy = dy, .w = w, .leaf = O));
        TRY(op(s, linear_dw, .dw = dw, .dy = dy, .x = x, .shift = g->shift, .overflow = g->overflow,
               .leaf = LEAF, .headroom_bits = 10, .fresh = 1));
    }
    return ERR_OK;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static Err run_row(const Row *r)
{
    static double ratio[RUNS];
    const Grouped g = make(r);
    double best[2] = { 1e30, 1e30 };
    int n = 0;
    TRY(all_at_once(&g));
    TRY(one_by_one(&g));
    for (double until = now() + bench.seconds; n < RUNS && (n < RUNS_LEAST || now() < until); n++) {
        const double t0 = now();
        TRY(all_at_once(&g));
        const double t1 = now();
        TRY(one_by_one(&g));
        const double took[2] = { t1 - t0, now() - t1 };
        for (int k = 0; k < 2; k++) best[k] = took[k] < best[k] ? took[k] : best[k];
        ratio[n] = took[1] / took[0];
    }
    qsort(ratio, (size_t)n, sizeof *ratio, ascending);
    printf("%-34s %9.2f %9.2f %9.2f\n", r->name, 1e3 * best[0], 1e3 * best[1], ratio[n / 2]);
    fflush(stdout);
    json_open(&bench.json, NULL, '{');
    json_put_text(&bench.json, "name", r->name);
    json_put_number(&bench.json, "grouped_ms", 1e3 * best[0]);
    json_put_number(&bench.json, "one_by_one_ms", 1e3 * best[1]);
    json_put_number(&bench.json, "speed_median", ratio[n / 2]);
    json_close(&bench.json, '}');
    void *const all[] = { g.x.data, g.w.data, g.dy.data, g.y.data, g.dx.data, g.dw.data, g.offset.data };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    return ERR_OK;
}

static Err run_all(void)
{
    static const Row rows[] = {
        { "16 experts, 64 rows each, 256 x 128", 16, 1024, 256, 128 },
        { "16 experts, 128 rows each, 512 x 256", 16, 2048, 512, 256 },
        { "64 experts, 32 rows each, 256 x 256", 64, 2048, 256, 256 },
        { "8 experts, 512 rows each, 1024 x 512", 8, 4096, 1024, 512 },
    };
    TRY(device_open(&bench.dev, (DeviceChoice){ .isa = ISA_AUTO, .dot = bench.dot }));
    json_open(&bench.json, NULL, '{');
    json_put_int(&bench.json, "threads", bench.dev.threads);
    json_open(&bench.json, "rows", '[');
    printf("%s, %s%s%s, %d threads; fwd, dx and dw\n%-34s %9s %9s %9s\n", isa_name(bench.dev.isa),
           dtype_name(bench.dtype), bench.dtype == F32 ? "" : " by ",
           bench.dtype == F32 ? "" : dot_name(bench.dot), bench.dev.threads, "", "grouped", "one by one",
           "speed");
    Err err = ERR_OK;
    for (size_t i = 0; i < sizeof rows / sizeof *rows && !err; i++) err = run_row(&rows[i]);
    json_close(&bench.json, ']');
    json_close(&bench.json, '}');
    device_close(&bench.dev);
    return err;
}

static bool read_dot(const char *name)
{
    for (int kind = 0; kind < DOT_KINDS; kind++) {
        bench.dot = (DotKind)kind;
        if (!strcmp(name, dot_name(bench.dot))) return true;
    }
    return false;
}

int main(int argc, char **argv)
{
    static char json[1 << 13];
    const char *json_path = NULL;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--json")) json_path = argv[i + 1];
        else if (!strcmp(argv[i], "--seconds")) bench.seconds = strtod(argv[i + 1], NULL);
        else if (!strcmp(argv[i], "--bf16") && read_dot(argv[i + 1])) bench.dtype = BF16;
        else
            return fprintf(stderr, "usage: bench_grouped [--json FILE] [--seconds S] [--bf16 fma|vdpbf16]\n"),
                   2;
    }
    json_out_init(&bench.json, json, sizeof json);
    const Err err = run_all();
    if (err) {
        err_print(err, true);
        return err_exit_code(err);
    }
    if (!json_path) return 0;
    FILE *f = fopen(json_path, "w");
    if (f && json_out_ok(&bench.json) && fprintf(f, "%s\n", json) > 0 && !fclose(f)) return 0;
    fprintf(stderr, "cannot write '%s'\n", json_path);
    return 5;
}
