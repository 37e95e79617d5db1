/*
 * Whole training steps, timed: forward, backward, norm, clip, AdamW, on random tokens. One line a step, and a
 * closing JSON line. Several modes, with commas between them, take turns step by step in one process, and it closes
 * with the median of the ratios of neighbouring steps to those of the last mode. `both` is layout,run; bf16,
 * bf16-fma, bf16-stream and bf16-narrow are run in bf16, with products by VDPBF16PS, by fma, with vectors of 16 bits,
 * and with these and the residual stream of 16 bits (others have them in fp32); bf16-layout is layout in bf16. Least
 * processor time (with OMP_WAIT_POLICY=passive) says most where others use the machine. bench/run.py alternates this
 * with PyTorch on the same shapes.
 *
 *   bench_step LAYERS HIDDEN HEADS BATCH SEQ STEPS [MODE,...|both] [THREADS] [trace.json]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/rng.h"
#include "base/trace.h"
#include "engine/trainer.h"

enum { VOCAB = 50257, PADDED = 50304, SHORTEST_LEAF = 128, STEPS_MAX = 256, PEERS_MAX = 4 };

static double now_ms(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
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

static TrainSpec spec_of(char **a, const char *mode)
{
    int64_t seq = seq_len = atoll(a[5]), batch = atoll(a[4]), hidden = atoll(a[2]);
    const bool narrow = !strcmp(mode, "bf16-narrow"), stream = !strcmp(mode, "bf16-stream");
    const bool exact = !strcmp(mode, "bf16-layout");
    TrainSpec s = { .micro_batch = batch,
                    .global_batch = batch,
                    .seq_blocks = 8,
                    .attn_block = 64,
                    .exact = exact || !strcmp(mode, "layout"),
                    .compute = strncmp(mode, "bf16", 4) ? F32 : BF16,
                    .fp32_residual = !narrow,
                    .fp32_vectors = !narrow && !stream,
                    .fp32_row_sums = !narrow && !stream,
                    .device.dot = !strcmp(mode, "bf16") || narrow || stream || exact ? DOT_VDPBF16 : DOT_FMA,
                    .update.adamw = { 0.9f, 0.95f, 1e-8f, 0.1f },
                    .update.clip = 1,
                    .update.lr = { LR_CONSTANT, 1e-4, 0, 0, 1000, 1 },
                    .seed = 1,
                    .device.threads = atoi(a[8]) };
    while (s.seq_blocks > 1 && seq / s.seq_blocks < SHORTEST_LEAF) s.seq_blocks /= 2;
    int heads = atoi(a[3]), blocks = 8;
    while (heads % blocks) blocks /= 2;
    s.model = (ModelSpec){ .layers = atoi(a[1]), .heads = heads, .kv_heads = heads, .head_dim = (int)hidden / heads,
                           .hidden = hidden, .ffn = 4 * hidden, .seq = seq, .vocab = VOCAB, .padded_vocab = PADDED,
                           .norm_eps = 1e-5f, .init_std = 0.02f, .seed = 1, .tp_blocks = blocks,
                           .learned_positions = true, .bias = true, .tied = true, .activation = ACT_GELU };
    return s;
}

typedef struct {
    const char *mode;
    TrainSpec spec;
    World world;
    MemoryPlan plan;
    Trainer trainer;
    double ms[STEPS_MAX];
    double least_cpu; /* ms of processor time of the step that took least */
} Peer;

static Err peer_open(Peer *p)
{
    TRY(world_open_self(&p->world));
    TRY(trainer_plan(&p->spec, p->world.grid, 0, &p->plan));
    return trainer_open(&p->trainer, &p->spec, &p->world, &p->plan);
}

static Err peer_step(Peer *p, int step)
{
    StepReport report;
    const double t0 = now_ms(CLOCK_MONOTONIC), cpu0 = now_ms(CLOCK_PROCESS_CPUTIME_ID);
    trace_begin(p->mode);
    TRY(trainer_step(&p->trainer, (TokenSource){ NULL, random_tokens }, &report));
    trace_end();
    const double took = now_ms(CLOCK_MONOTONIC) - t0, cpu = now_ms(CLOCK_PROCESS_CPUTIME_ID) - cpu0;
    if (step) p->ms[step - 1] = took; /* the first warms up */
    if (step && (step == 1 || cpu < p->least_cpu)) p->least_cpu = cpu;
    printf("%s step %d loss %.4f ms %.1f\n", p->mode, step, report.loss, took);
    fflush(stdout);
    return ERR_OK;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const double *values, int n)
{
    double sorted[STEPS_MAX];
    memcpy(sorted, values, (size_t)n * sizeof *values);
    qsort(sorted, (size_t)n, sizeof *sorted, by_value);
    return n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

static void peer_print(const Peer *p, int steps)
{
    const double tokens = (double)(p->spec.global_batch * p->spec.model.seq), mid = median(p->ms, steps);
    const double flop = (double)model_flop_per_token(&p->spec.model, p->plan.params.model) * tokens;
    double least = p->ms[0];
    for (int i = 1; i < steps; i++) least = p->ms[i] < least ? p->ms[i] : least;
    printf("{\"peer\":\"megatrain\",\"mode\":\"%s\",\"ms\":%.1f,\"min_ms\":%.1f,\"min_cpu_ms\":%.1f,\"tok_s\":%.1f,"
           "\"gflops_best\":%.1f,\"memory_gb\":%.2f}\n",
           p->mode, mid, least, p->least_cpu, tokens / mid * 1e3, flop / least * 1e-6,
           (double)memory_plan_total(&p->plan) * 1e-9);
}

/* Peers take turns, and turns at being first: their ratios hold whatever else the machine does. */
static Err run(Peer *peers, int count, int steps, const char *trace)
{
    for (int k = 0; k < count; k++) TRY(peer_open(&peers[k]));
    if (trace) TRY(trace_open(trace));
    for (int i = 0; i <= steps; i++) {
        if (trace && i == 1) trace_start();
        for (int k = 0; k < count; k++) TRY(peer_step(&peers[(k + i) % count], i));
    }
    if (trace) TRY(trace_stop());
    trace_close();
    for (int k = 0; k < count; k++) peer_print(&peers[k], steps);
    for (int k = 0; k < count - 1; k++) {
        double ratio[STEPS_MAX];
        for (int i = 0; i < steps; i++) ratio[i] = peers[k].ms[i] / peers[count - 1].ms[i];
        printf("{\"ratio\":\"%s over %s\",\"median\":%.4f}\n", peers[k].mode, peers[count - 1].mode,
               median(ratio, steps));
    }
    for (int k = 0; k < count; k++) {
        trainer_close(&peers[k].trainer);
        world_close(&peers[k].world);
    }
    return ERR_OK;
}

/* Returns how many modes there are, 0 for too many or an unknown one. */
static int read_modes(char *text, Peer peers[PEERS_MAX])
{
    static const char *const modes[] = { "layout", "run", "bf16", "bf16-fma", "bf16-stream", "bf16-narrow",
                                         "bf16-layout" };
    static char both[] = "layout,run";
    int count = 0;
    if (!strcmp(text, "both")) text = both;
    for (char *word = strtok(text, ","); word; word = strtok(NULL, ",")) {
        size_t i = 0;
        while (i < sizeof modes / sizeof *modes && strcmp(word, modes[i])) i++;
        if (i == sizeof modes / sizeof *modes || count == PEERS_MAX) return 0;
        peers[count++].mode = word;
    }
    return count;
}

int main(int argc, char **argv)
{
    static Peer peers[PEERS_MAX];
    static char layout[] = "layout";
    char *a[10] = { argv[0], "12", "768", "12", "4", "64", "4", layout, "0", NULL };
    for (int i = 1; i < argc && i < 10; i++) a[i] = argv[i];
    const int steps = atoi(a[6]), count = read_modes(a[7], peers);
    if (steps < 1 || steps > STEPS_MAX) return fprintf(stderr, "bench_step: STEPS must be 1 to %d\n", STEPS_MAX), 2;
    if (!count)
        return fputs("bench_step: MODE is layout, run, bf16, bf16-layout, bf16-fma, bf16-stream, bf16-narrow, some of "
                     "them, or both\n", stderr), 2;
    for (int k = 0; k < count; k++) peers[k].spec = spec_of(a, peers[k].mode);
    Err err = run(peers, count, steps, a[9]);
    if (err) err_print(err, true);
    return err_exit_code(err);
}
