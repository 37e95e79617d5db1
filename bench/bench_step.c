/*
 * Whole training steps, timed: forward, backward, norm, clip, AdamW, on random tokens. One line a step, and a
 * closing JSON line. bench/run.py alternates this with PyTorch on the same shapes.
 *
 *   bench_step LAYERS HIDDEN HEADS BATCH SEQ STEPS [layout|run] [THREADS] [trace.json]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/rng.h"
#include "base/trace.h"
#include "train/trainer.h"

enum { VOCAB = 50257, PADDED = 50304, SHORTEST_LEAF = 128 };

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static int64_t seq_len;

static Err random_tokens(void *user, int64_t first, int64_t count, int32_t *out)
{
    (void)user;
    for (int64_t i = 0; i < count * (seq_len + 1); i++)
        out[i] = (int32_t)(rng_mix((uint64_t)(first * 1000003 + i)) % VOCAB);
    return ERR_OK;
}

static TrainSpec spec_of(char **a)
{
    int64_t seq = seq_len = atoll(a[5]), batch = atoll(a[4]), hidden = atoll(a[2]);
    TrainSpec s = { .micro_batch = batch,
                    .global_batch = batch,
                    .seq_blocks = 8,
                    .attn_block = 64,
                    .exact = strcmp(a[7], "run") != 0,
                    .adamw = { 0.9f, 0.95f, 1e-8f, 0.1f },
                    .clip = 1,
                    .lr = { LR_CONSTANT, 1e-4, 0, 0, 1000, 1 },
                    .seed = 1,
                    .threads = atoi(a[8]) };
    while (s.seq_blocks > 1 && seq / s.seq_blocks < SHORTEST_LEAF) s.seq_blocks /= 2;
    int heads = atoi(a[3]), blocks = 8;
    while (heads % blocks) blocks /= 2;
    s.model = (ModelSpec){ .layers = atoi(a[1]), .heads = heads, .kv_heads = heads, .head_dim = (int)hidden / heads,
                           .hidden = hidden, .ffn = 4 * hidden, .seq = seq, .vocab = VOCAB, .padded_vocab = PADDED,
                           .norm_eps = 1e-5f, .init_std = 0.02f, .seed = 1, .tp_blocks = blocks,
                           .learned_positions = true, .bias = true, .tied = true, .activation = ACT_GELU };
    return s;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static Err run(const TrainSpec *spec, int steps, const char *trace)
{
    World w;
    Trainer t;
    MemoryPlan plan;
    StepReport report;
    double ms[256];
    TRY(world_open_self(&w));
    TRY(trainer_plan(spec, w.grid, 0, &plan));
    TRY(trainer_open(&t, spec, &w, &plan));
    for (int i = 0; i <= steps; i++) { /* the first warms up */
        if (trace && i == steps) TRY(trace_open(trace));
        double t0 = now_ms();
        TRY(trainer_step(&t, (TokenSource){ NULL, random_tokens }, &report));
        double took = now_ms() - t0;
        if (i) ms[i - 1] = took;
        printf("step %d loss %.4f ms %.1f\n", i, report.loss, took);
        fflush(stdout);
    }
    trace_close();
    qsort(ms, (size_t)steps, sizeof *ms, by_value);
    double tokens = (double)(spec->global_batch * spec->model.seq);
    double flop = (double)model_flop_per_token(&spec->model, plan.params) * tokens;
    printf("{\"peer\":\"megatrain\",\"mode\":\"%s\",\"ms\":%.1f,\"min_ms\":%.1f,\"tok_s\":%.1f,\"gflops_best\":%.1f,"
           "\"memory_gb\":%.2f}\n",
           spec->exact ? "layout" : "run", ms[steps / 2], ms[0], tokens / ms[steps / 2] * 1e3, flop / ms[0] * 1e-6,
           (double)memory_plan_total(&plan) * 1e-9);
    trainer_close(&t);
    world_close(&w);
    return ERR_OK;
}

int main(int argc, char **argv)
{
    char *a[10] = { argv[0], "12", "768", "12", "4", "64", "4", "layout", "0", NULL };
    for (int i = 1; i < argc && i < 10; i++) a[i] = argv[i];
    int steps = atoi(a[6]);
    if (steps < 1 || steps > 256) return fprintf(stderr, "bench_step: STEPS must be 1 to 256\n"), 2;
    TrainSpec spec = spec_of(a);
    Err err = run(&spec, steps, a[9]);
    if (err) err_print(err, true);
    return err_exit_code(err);
}
