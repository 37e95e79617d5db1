/*
 * The gated delta rule and Mamba-2 beside attention of the same width, in milliseconds; and the rule beside its
 * recurrence, a loop token by token in vectors of the compiler. Calls take turns, and the shortest of each counts: a
 * ratio means something even on a machine that others use.
 *
 *   bench_scan [SECONDS]     for each row; OMP_NUM_THREADS sets the threads
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device/ops.h"

enum { KEYS = 4, VALUES = 8, WIDTH = 128, STATE = WIDTH * WIDTH };
/* Mamba-2 has twice as many heads of half the width, whose states together are as large. */
enum { HEADS = 2 * VALUES, GROUPS = 2, HEAD = WIDTH / 2 };

typedef struct {
    int64_t T;
    float *q, *k, *v, *go, *o, *g, *beta, *states, *dq, *dk, *dv, *dg, *dbeta; /* of the rule */
    float *aq, *ak, *ao, *lse, *delta;                                         /* of attention: VALUES heads */
    float *step, *decay, *skip, *kept, *dkept, *dstep, *ddecay, *dskip;        /* of Mamba-2 */
    int64_t sample;
    Device dev;
} Run;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static float *numbers(int64_t n, float low, float high)
{
    float *p = aligned_alloc(64, (size_t)(n * 4 + 63) / 64 * 64);
    uint64_t state = (uint64_t)n;
    if (!p) exit(1);
    for (int64_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1;
        p[i] = low + (high - low) * (float)(state >> 40) * 0x1p-24f;
    }
    return p;
}

/* ---- what is timed ---- */

/* One head; scratch: a state, and what the rows of it give. */
__attribute__((target("avx2,fma"), optimize("O3"))) static void loop_head(const Run *r, int head, float *S, float *y)
{
    memset(S, 0, STATE * sizeof *S);
    for (int64_t t = 0; t < r->T; t++) {
        const float *q = r->q + (t * KEYS + head / (VALUES / KEYS)) * WIDTH, *k = r->k + (q - r->q);
        const float *v = r->v + (t * VALUES + head) * WIDTH, beta = r->beta[t * VALUES + head];
        const float left = expf(r->g[t * VALUES + head]);
        float *o = r->o + (v - r->v);
        memset(y, 0, WIDTH * sizeof *y);
        memset(o, 0, WIDTH * sizeof *o);
        for (int d = 0; d < WIDTH; d++)
            for (int e = 0; e < WIDTH; e++) {
                S[d * WIDTH + e] *= left;
                y[e] += S[d * WIDTH + e] * k[d];
            }
        for (int e = 0; e < WIDTH; e++) y[e] = beta * (v[e] - y[e]);
        for (int d = 0; d < WIDTH; d++)
            for (int e = 0; e < WIDTH; e++) {
                S[d * WIDTH + e] += k[d] * y[e];
                o[e] += S[d * WIDTH + e] * q[d];
            }
    }
}

static Err loop(Run *r)
{
#pragma omp parallel for schedule(dynamic, 1)
    for (int h = 0; h < VALUES; h++) {
        _Alignas(64) float S[STATE], y[WIDTH];
        loop_head(r, h, S, y);
    }
    return ERR_OK;
}

#define ROWS(x, heads) tensor_of(r->x, F32, 1, r->T, heads, WIDTH)
#define GATES(x) tensor_of(r->x, F32, 1, r->T, VALUES)

static Err rule_forward(Run *r)
{
    const int64_t windows = (r->T + DELTA_WINDOW - 1) / DELTA_WINDOW;
    return op(&r->dev.stream, delta_fwd, .o = ROWS(o, VALUES),
              .states = tensor_of(r->states, F32, windows * VALUES, WIDTH, WIDTH), .q = ROWS(q, KEYS),
              .k = ROWS(k, KEYS), .v = ROWS(v, VALUES), .g = GATES(g), .beta = GATES(beta));
}

static Err rule_backward(Run *r)
{
    const int64_t windows = (r->T + DELTA_WINDOW - 1) / DELTA_WINDOW;
    return op(&r->dev.stream, delta_bwd, .dq = ROWS(dq, KEYS), .dk = ROWS(dk, KEYS), .dv = ROWS(dv, VALUES),
              .dg = GATES(dg), .dbeta = GATES(dbeta), .go = ROWS(go, VALUES), .q = ROWS(q, KEYS), .k = ROWS(k, KEYS),
              .v = ROWS(v, VALUES), .g = GATES(g), .beta = GATES(beta),
              .states = tensor_of(r->states, F32, windows * VALUES, WIDTH, WIDTH));
}

#define MAMBA_ROWS(x) tensor_of(r->x, F32, 1, r->T, HEADS, HEAD)
#define MAMBA_KEYS(x) tensor_of(r->x, F32, 1, r->T, GROUPS, WIDTH)
#define MAMBA_GATES(x) tensor_of(r->x, F32, 1, r->T, HEADS)
#define MAMBA_STATES(x) tensor_of(r->x, F32, r->T / MAMBA_WINDOW * HEADS, WIDTH, HEAD)

static Err mamba_forward(Run *r)
{
    return op(&r->dev.stream, mamba_fwd, .o = MAMBA_ROWS(o), .states = MAMBA_STATES(kept), .x = MAMBA_ROWS(v),
              .k = MAMBA_KEYS(k), .q = MAMBA_KEYS(q), .delta = MAMBA_GATES(step), .g = MAMBA_GATES(decay),
              .skip = tensor_of(r->skip, F32, HEADS));
}

static Err mamba_backward(Run *r)
{
    return op(&r->dev.stream, mamba_bwd, .dx = MAMBA_ROWS(dv), .dk = MAMBA_KEYS(dk), .dq = MAMBA_KEYS(dq),
              .ddelta = MAMBA_GATES(dstep), .dg = MAMBA_GATES(ddecay), .dskip = MAMBA_GATES(dskip),
              .dstates = MAMBA_STATES(dkept), .go = MAMBA_ROWS(go), .x = MAMBA_ROWS(v), .k = MAMBA_KEYS(k),
              .q = MAMBA_KEYS(q), .delta = MAMBA_GATES(step), .g = MAMBA_GATES(decay),
              .skip = tensor_of(r->skip, F32, HEADS), .states = MAMBA_STATES(kept));
}

static Err attention_forward(Run *r)
{
    return op(&r->dev.stream, attention_fwd, .o = ROWS(ao, VALUES), .lse = GATES(lse), .q = ROWS(aq, VALUES),
              .k = ROWS(ak, KEYS), .v = ROWS(k, KEYS), .sample = tensor_of(&r->sample, I64, 1),
              .q_span = spans_whole(r->T), .k_span = spans_whole(r->T), .scale = 0.1f, .block = 64,
              .dropout = { 0, 0, 1 });
}

static Err attention_backward(Run *r)
{
    return op(&r->dev.stream, attention_bwd, .dq = ROWS(dv, VALUES), .dk = ROWS(dq, KEYS), .dv = ROWS(dk, KEYS),
              .go = ROWS(go, VALUES), .q = ROWS(aq, VALUES), .k = ROWS(ak, KEYS), .v = ROWS(k, KEYS),
              .o = ROWS(ao, VALUES), .lse = GATES(lse), .delta = GATES(delta), .sample = tensor_of(&r->sample, I64, 1),
              .q_span = spans_whole(r->T), .k_span = spans_whole(r->T), .scale = 0.1f, .block = 64,
              .dropout = { 0, 0, 1 }, .chunk = VALUES / KEYS, .leaf = 128, .positions = r->T);
}

enum { LOOP, RULE, RULE_BACK, MAMBA, MAMBA_BACK, ATTENTION, ATTENTION_BACK, CALLS };
static Err (*const calls[CALLS])(Run *) = { loop,           rule_forward,      rule_backward,     mamba_forward,
                                            mamba_backward, attention_forward, attention_backward };

static void run_open(Run *r, int64_t T)
{
    const float unit = 0.15f;
    r->T = T;
    r->q = numbers(T * KEYS * WIDTH, -unit, unit), r->k = numbers(T * KEYS * WIDTH, -unit, unit);
    r->v = numbers(T * VALUES * WIDTH, -1, 1), r->go = numbers(T * VALUES * WIDTH, -1, 1);
    r->g = numbers(T * VALUES, -.1f, 0), r->beta = numbers(T * VALUES, 0, 1);
    r->states = numbers((T / DELTA_WINDOW + 1) * VALUES * STATE, 0, 1);
    r->dq = numbers(T * KEYS * WIDTH, 0, 1), r->dk = numbers(T * KEYS * WIDTH, 0, 1);
    r->dg = numbers(T * VALUES, 0, 1), r->dbeta = numbers(T * VALUES, 0, 1), r->lse = numbers(T * VALUES, 0, 1);
    r->delta = numbers(T * VALUES, 0, 1), r->aq = numbers(T * VALUES * WIDTH, -1, 1);
    r->ak = numbers(T * KEYS * WIDTH, -1, 1);
    r->o = numbers(T * VALUES * WIDTH, 0, 1), r->ao = numbers(T * VALUES * WIDTH, 0, 1);
    r->dv = numbers(T * VALUES * WIDTH, 0, 1);
    r->step = numbers(T * HEADS, 0, .1f), r->decay = numbers(T * HEADS, -.1f, 0), r->skip = numbers(HEADS, 0, 1);
    r->kept = numbers(T / MAMBA_WINDOW * HEADS * WIDTH * HEAD, 0, 1);
    r->dkept = numbers(T / MAMBA_WINDOW * HEADS * WIDTH * HEAD, 0, 1);
    r->dstep = numbers(T * HEADS, 0, 1), r->ddecay = numbers(T * HEADS, 0, 1), r->dskip = numbers(T * HEADS, 0, 1);
}

static bool run_row(Run *r, double seconds)
{
    double best[CALLS];
    for (int i = 0; i < CALLS; i++) best[i] = 1e9;
    for (double end = now() + seconds; now() < end;)
        for (int i = 0; i < CALLS; i++) {
            const double begin = now();
            if (calls[i](r)) {
                fprintf(stderr, "bench_scan: %s\n", err_message());
                return false;
            }
            best[i] = fmin(best[i], now() - begin);
        }
    const double token = (double)r->T * VALUES * STATE;
    printf("%6lld", (long long)r->T);
    for (int i = 0; i < CALLS; i++) printf(" %8.1f", best[i] * 1e3);
    printf("   %5.2f %5.2f %5.2f %5.2f %5.2f   %6.1f %6.1f %6.1f %6.1f\n", best[LOOP] / best[RULE],
           best[ATTENTION] / best[RULE], best[ATTENTION_BACK] / best[RULE_BACK], best[ATTENTION] / best[MAMBA],
           best[ATTENTION_BACK] / best[MAMBA_BACK], 8e-9 * token / best[RULE], 16e-9 * token / best[RULE_BACK],
           6e-9 * token / best[MAMBA], 12e-9 * token / best[MAMBA_BACK]);
    return true;
}

int main(int argc, char **argv)
{
    static const int64_t lengths[] = { 1024, 4096 };
    const double seconds = argc > 1 ? atof(argv[1]) : 4;
    printf("     T  loop ms rule fwd rule bwd mamb fwd mamb bwd att. fwd att. bwd   loop/ att./rule   att./mamba "
           "   GFLOP/s rule, mamba\n");
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        Run r = { 0 };
        if (device_open(&r.dev, (DeviceChoice){ .threads = 0 })) return 1;
        run_open(&r, lengths[i]);
        if (!run_row(&r, seconds)) return 1;
        device_close(&r.dev);
    }
    return 0;
}
