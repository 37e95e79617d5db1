/*
 * What a training step costs on a GPU before one is at hand. The step runs on the null device, as for a plan; every op
 * that it calls is counted, its bytes and FLOP by device/ops.def, and timed by the rates below.
 *
 *   bench_predict [124m] [1.3b] [7b] [7b-tp8] [--block]     no model: all of them; --block: of one block alone
 *   bench_predict --config FILE --world N [KEY=VALUE ...]   of a configuration: its slowest pipeline rank
 *
 * bytes: tensors that an op reads once, those that it writes once, those that it changes in place twice. An op takes
 * the longer of bytes / memory rate and FLOP / matrix rate, and each kernel launch GAP_US besides. Products and
 * attention are matrix work, all others memory work. The figures are a yardstick for docs/gpu.md: a time measured on a
 * GPU belongs beside the line of its op, and one that is longer by much wants a reason. What the host does between
 * steps is not in them. Of a model on several ranks it is the step of one of them, and beside it what that one sends,
 * as the null communicators count it, and how much longer the step is for it: by how the ops wait for it
 * (time_line.h). A configuration's step counts all-to-alls in the open, and all else that is sent as hidden.
 *
 * Routing is taken to be even: experts have room for an even share (moe.slack = 1), all-to-alls send one. The bytes of
 * a grouped product are those of its order of tiles by l2_model.h. Rates named ASSUMED come from no measurement of
 * ours.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/trainer_open.h"
#include "l2_model.h"
#include "link.h"
#include "train/spec.h"
#include "time_line.h"

/* ---- rates ---- */

/*
 * What a device does: HBM bandwidth of the datasheet times what a copy reaches of it (0.9 on both), times what kernels
 * of memory work are to reach of a copy (rooflines.c wants 0.85).
 */
typedef struct {
    const char *name;
    double memory; /* bytes a second */
} Gpu;

static const Gpu gpus[] = { { "H100", 3.35e12 * 0.9 * 0.9 }, { "H200", 4.8e12 * 0.9 * 0.9 } };
enum { GPUS = sizeof gpus / sizeof *gpus };

static const double PEAK = 989e12; /* both, dense bf16: what MFU refers to */
static const double GAP_US = 1.5;  /* between kernels of a graph */
static const double NETWORK = 50e9 * 0.8; /* ASSUMED: a port of 400 Gb/s for each GPU, and the same share of it */
enum { HOST_GPUS = 8 };

/* ASSUMED: half of what cuBLASLt reaches with wgmma, for mma.sync with three stages. */
static const double GROUPED_RATE = 400e12;
static const double FP32_RATE = 67e12 * 0.8; /* on CUDA cores, as the share of bf16's peak */

/* Beside a call (train/join.c) products have so many multiprocessors less; a call takes a while to begin. */
static const double MATRIX_BESIDE = 132.0 / (132 - 16), CALL_S = 10e-6;

/* FLOP a second of a bf16 product, by the shortest of its three sides: cuBLASLt reaches 80 % of the peak with large
 * sides, and less with short ones. */
static double product_rate(int64_t side)
{
    return side < 1024 ? 650e12 : side < 1280 ? 680e12 : side < 2048 ? 705e12 : side < 4096 ? 720e12 : 740e12;
}

/* What kernels for mma.sync (FlashAttention-2's design) reach on Hopper for the needed half of causal
 * attention. */
static double attention_rate(bool forward, int64_t width, int64_t positions)
{
    if (width <= 64) return forward ? 230e12 : 170e12;
    return positions < 4096 ? (forward ? 290e12 : 230e12) : (forward ? 330e12 : 270e12);
}

/* Kernels of a call; of ops not named: 1. */
static int launches_of(OpId id, int64_t columns)
{
    enum { NORM_IN_BLOCK = 2048, SORT_KERNELS = 9 };
    switch (id) {
    case OP_norm_bwd: return columns <= NORM_IN_BLOCK ? 2 : 3;
    case OP_bias_grad:
    case OP_attention_bwd: return 2;
    case OP_permute_index: return 3;
    case OP_embedding_grad: return SORT_KERNELS;
    default: return 1;
    }
}

/* ---- counting ---- */

enum { LINES_MOST = 64 };

/* Calls of one op; products by the shape of their weight. */
typedef struct {
    OpId id;
    int64_t O, I;
    int64_t calls, launches;
    double bytes, flop, matrix_s; /* matrix_s: of products and attention, FLOP / rate */
} Line;

typedef struct {
    Line line[LINES_MOST];
    int count;
    WideCount flop; /* the device's counter at the last call */
} Count;

static Count *counting;
static const Gpu *timed; /* whose times are on the line */

static Tensor arg(OpId id, const void *args, const char *name)
{
    const OpInfo *info = op_info(id);
    for (int i = 0; i < info->field_count; i++)
        if (!strcmp(info->fields[i].name, name)) return *(const Tensor *)((const char *)args + info->fields[i].offset);
    return (Tensor){ 0 };
}

static bool is_product(OpId id) { return id == OP_linear_fwd || id == OP_linear_dx || id == OP_linear_dw; }
static bool is_grouped(OpId id) { return id == OP_grouped_fwd || id == OP_grouped_dx || id == OP_grouped_dw; }

/* [O, I]; of experts their first. */
static Tensor weight_of(OpId id, const void *args)
{
    if (!is_product(id) && !is_grouped(id)) return (Tensor){ 0 };
    Tensor w = arg(id, args, id == OP_linear_dw || id == OP_grouped_dw ? "dw" : "w");
    if (is_grouped(id)) w.dim[0] = w.dim[1], w.dim[1] = w.dim[2];
    return w;
}

/* What device memory serves of a grouped product with even routing, apart from a dw that is added to. */
static double grouped_bytes(OpId id, const void *args)
{
    static struct {
        GroupedShape shape;
        double bytes;
    } known[16]; /* the model takes a while */
    const Tensor w = weight_of(id, args), x = arg(id, args, id == OP_grouped_fwd ? "x" : "dy");
    const int experts = (int)arg(id, args, id == OP_grouped_dw ? "dw" : "w").dim[0];
    const int64_t O = w.dim[0], I = w.dim[1], rows = x.dim[0];
    GroupedShape s = { .experts = experts, .dw = id == OP_grouped_dw };
    if (s.dw) s.rows = O, s.columns = I, s.depth = rows / experts;
    else s.rows = rows, s.columns = id == OP_grouped_fwd ? O : I, s.depth = id == OP_grouped_fwd ? I : O;
    int i = 0;
    while (known[i].bytes > 0 && memcmp(&known[i].shape, &s, sizeof s) != 0) i++;
    ASSERT(i < 16);
    if (known[i].bytes == 0) known[i].shape = s, known[i].bytes = (double)grouped_traffic(s, grouped_place, L2_BYTES);
    return known[i].bytes;
}

static double bytes_of(OpId id, const void *args)
{
    const OpInfo *info = op_info(id);
    double bytes = 0;
    if (is_grouped(id)) return grouped_bytes(id, args);
    for (int i = 0; i < info->field_count; i++) {
        const OpField *f = &info->fields[i];
        const Tensor t = *(const Tensor *)((const char *)args + f->offset);
        if (t.data) bytes += (double)tensor_bytes(t) * (f->read + f->written);
    }
    if (id == OP_linear_dw && ((const linear_dw_args *)args)->fresh)
        bytes -= (double)tensor_bytes(((const linear_dw_args *)args)->dw);
    return bytes;
}

static double matrix_seconds(OpId id, const void *args, double flop)
{
    if (is_product(id)) {
        const Tensor w = weight_of(id, args);
        const int64_t rows = arg(id, args, id == OP_linear_fwd ? "x" : "dy").dim[0];
        const int64_t side = w.dim[0] < w.dim[1] ? w.dim[0] : w.dim[1];
        if (arg(id, args, id == OP_linear_fwd ? "x" : "dy").dtype == F32) return flop / FP32_RATE;
        return flop / product_rate(rows < side ? rows : side);
    }
    if (is_grouped(id)) return flop / GROUPED_RATE;
    if (id != OP_attention_fwd && id != OP_attention_bwd) return 0;
    const Tensor q = arg(id, args, "q");
    return flop / attention_rate(id == OP_attention_fwd, q.dim[3], q.dim[1]);
}

static Line *line_of(OpId id, Tensor weight)
{
    for (int i = 0; i < counting->count; i++) {
        Line *l = &counting->line[i];
        if (l->id == id && l->O == weight.dim[0] && l->I == weight.dim[1]) return l;
    }
    ASSERT(counting->count < LINES_MOST);
    counting->line[counting->count] = (Line){ .id = id, .O = weight.dim[0], .I = weight.dim[1] };
    return &counting->line[counting->count++];
}

static double seconds(const Line *l, const Gpu *g)
{
    const double memory = l->bytes / g->memory;
    return (l->matrix_s > memory ? l->matrix_s : memory) + (double)l->launches * GAP_US * 1e-6;
}

static void add_line(Line *sum, const Line *l, double by)
{
    sum->calls += (int64_t)by * l->calls;
    sum->launches += (int64_t)by * l->launches;
    sum->bytes += by * l->bytes;
    sum->flop += by * l->flop;
    sum->matrix_s += by * l->matrix_s;
}

/* The call on the line, by itself. */
static void pass_time(Line call)
{
    if (time_line) time_line_op(seconds(&call, timed), call.matrix_s > 0);
}

static Err count_call(Stream *s, OpId id, const void *args)
{
    const double flop = (double)(s->dev->counters.flop - counting->flop);
    const Tensor x = arg(id, args, "x");
    const Line call = { .calls = 1,
                        .launches = launches_of(id, x.ndim ? x.dim[x.ndim - 1] : 0),
                        .bytes = bytes_of(id, args),
                        .flop = flop,
                        .matrix_s = matrix_seconds(id, args, flop) };
    counting->flop = s->dev->counters.flop;
    add_line(line_of(id, weight_of(id, args)), &call, 1);
    pass_time(call);
    return ERR_OK;
}

#define T(name, dims)
#define S(type, name)
#define OP(name, flop, args) \
    static Err counted_##name(Stream *s, const name##_args *a) { return count_call(s, OP_##name, a); }
#include "device/ops.def"
#undef OP
static const OpTable counting_ops = {
#define OP(name, flop, args) .name = counted_##name,
#include "device/ops.def"
#undef OP
};
#undef T
#undef S

/* ---- models ---- */

typedef struct {
    const char *name, *what;
    bool llama;
    int layers, heads;
    int64_t hidden, ffn, vocab, seq, micro_batch, micro_batches;
    int tp; /* 0: one rank */
} Model;

static const Model models[] = {
    { "124m", "gpt2-124M, B64 T1024", false, 12, 12, 768, 3072, 50257, 1024, 64, 1, 0 },
    { "1.3b", "llama-1.3B, B8 T2048", true, 24, 16, 2048, 5504, 32000, 2048, 8, 1, 0 },
    { "7b", "llama-7B, 8 micro-batches of B2 T4096", true, 32, 32, 4096, 11008, 32000, 4096, 2, 8, 0 },
    { "7b-tp8", "llama-7B on each of 8 ranks, tp 8 with sp, 8 micro-batches of B2 T4096", true, 32, 32, 4096, 11008,
      32000, 4096, 2, 8, 8 },
};
enum { MODELS = sizeof models / sizeof *models };

static TrainSpec spec_of(const Model *m, int layers)
{
    TrainSpec s = { .micro_batch = m->micro_batch,
                    .global_batch = m->micro_batch * m->micro_batches,
                    .seq_blocks = 8,
                    .attn_block = 64,
                    .device.kind = DEVICE_CUDA,
                    .compute = BF16,
                    .update.adamw = { 0.9f, 0.95f, 1e-8f, 0.1f },
                    .update.clip = 1,
                    .update.lr = { LR_CONSTANT, 1e-4, 0, 0, 1000, 1 },
                    .seed = 1 };
    s.model = (ModelSpec){ .layers = layers,
                           .heads = m->heads,
                           .kv_heads = m->heads,
                           .head_dim = (int)m->hidden / m->heads,
                           .hidden = m->hidden,
                           .ffn = m->ffn,
                           .seq = m->seq,
                           .vocab = m->vocab,
                           .padded_vocab = (m->vocab + 127) / 128 * 128,
                           .norm_eps = 1e-5f,
                           .init_std = 0.02f,
                           .seed = 1,
                           .tp_blocks = 8,
                           .learned_positions = !m->llama,
                           .rms = m->llama,
                           .bias = !m->llama,
                           .tied = !m->llama,
                           .activation = m->llama ? ACT_SWIGLU : ACT_GELU };
    if (m->llama) s.model.rope = (RopeSpec){ .layers = layer_pattern_all(1), .base = 10000 };
    return s;
}

static Err one_step(Trainer *t, Count *out)
{
    StepReport report;
    *out = (Count){ .flop = t->device.counters.flop };
    counting = out;
    t->device.ops = &counting_ops;
    return trainer_step(t, (TokenSource){ 0 }, &report);
}

/* What opening sent is not the step's. */
static void forget_sent(World *world)
{
    for (int i = 0; i < WORLD_COMMS; i++) {
        Comm *c = &world->comm[i];
        c->sent_bytes = 0;
        memset(c->calls, 0, sizeof c->calls);
        memset(c->bytes, 0, sizeof c->bytes);
    }
}

/* What the step sent by its own communicators. */
static void count_sent(const World *world, MemoryPlan *plan)
{
    plan->comm_bytes = 0;
    for (int i = 0; i < WORLD_COMMS; i++) {
        const Comm *c = &world->comm[i];
        plan->comm_bytes += c->sent_bytes;
        for (int k = 0; k < COMM_KIND_COUNT; k++) plan->comm[i][k] = (CommWork){ c->calls[k], c->bytes[k] };
    }
}

/* The calls of one step of a rank; plan: of the same trainer. */
static Err count_rank(const TrainSpec *spec, Grid grid, int rank, Count *out, MemoryPlan *plan)
{
    World world;
    Trainer t;
    TRY(trainer_plan(spec, grid, rank, plan));
    TRY(world_open_null(&world, grid, rank));
    Err err = trainer_open_on(&t, DEVICE_NULL, spec, &world, plan);
    forget_sent(&world);
    time_line_of(&world);
    if (!err) err = one_step(&t, out);
    if (!err) count_sent(&world, plan);
    trainer_close(&t);
    world_close(&world);
    return err;
}

static Err count_step(const TrainSpec *spec, int tp, Count *out, MemoryPlan *plan)
{
    return count_rank(spec, (Grid){ .tp = tp ? tp : 1, .dp = 1, .sp = tp > 1 }, 0, out, plan);
}

/* ---- tables ---- */

static void print_head(const char *first)
{
    printf("| %s | calls | launches | GB | TFLOP |", first);
    for (int g = 0; g < GPUS; g++) printf(" %s ms |", gpus[g].name);
    printf("\n| --- | ---: | ---: | ---: | ---: |");
    for (int g = 0; g < GPUS; g++) printf(" ---: |");
    printf("\n");
}

static void print_line(const char *name, const Line *l, const double s[GPUS])
{
    printf("| %s | %lld | %lld | %.3f | %.3f |", name, (long long)l->calls, (long long)l->launches, 1e-9 * l->bytes,
           1e-12 * l->flop);
    for (int g = 0; g < GPUS; g++) printf(" %.3f |", 1e3 * s[g]);
    printf("\n");
}

static const char *line_name(const Line *l, char text[64])
{
    if (!l->O) return op_info(l->id)->name;
    snprintf(text, 64, "%s %lldx%lld", op_info(l->id)->name, (long long)l->O, (long long)l->I);
    return text;
}

static int by_time(const void *a, const void *b)
{
    const double x = seconds(a, &gpus[GPUS - 1]), y = seconds(b, &gpus[GPUS - 1]);
    return (x < y) - (x > y);
}

/* All lines and their sum; memory_only: those of memory work. Leaves the sum's times in `total`. */
static void print_count(Count *c, bool memory_only, double total[GPUS])
{
    Line sum = { 0 };
    memset(total, 0, GPUS * sizeof *total);
    qsort(c->line, (size_t)c->count, sizeof *c->line, by_time);
    for (int i = 0; i < c->count; i++) {
        const Line *l = &c->line[i];
        char text[64];
        double s[GPUS];
        if (l->calls == 0 || (memory_only && l->matrix_s > 0)) continue;
        for (int g = 0; g < GPUS; g++) total[g] += s[g] = seconds(l, &gpus[g]);
        print_line(line_name(l, text), l, s);
        add_line(&sum, l, 1);
    }
    print_line("all", &sum, total);
}

/* What a block more adds, without the optimizer. */
static void difference(Count *more, Count *less)
{
    Count *kept = counting;
    counting = more;
    for (int i = 0; i < less->count; i++) {
        const Line *l = &less->line[i];
        add_line(line_of(l->id, (Tensor){ .dim = { l->O, l->I } }), l, -1);
    }
    for (int i = 0; i < more->count; i++)
        if (more->line[i].id == OP_adamw || more->line[i].id == OP_grad_stats) more->line[i].calls = 0;
    counting = kept;
}

static Err predict_block(const Model *m)
{
    const TrainSpec two = spec_of(m, 2), three = spec_of(m, 3);
    static Count less, more;
    MemoryPlan plan;
    double total[GPUS];
    TRY(count_step(&two, m->tp, &less, &plan));
    TRY(count_step(&three, m->tp, &more, &plan));
    difference(&more, &less);
    printf("\nMemory work of one block of %s, forward and backward:\n\n", m->what);
    print_head("op");
    print_count(&more, true, total);
    return ERR_OK;
}

/* Bytes a second of a rank's group: over the network as soon as a member is on another host. */
static double rate_of(Grid grid, int rank, GroupKind kind)
{
    const GridShape shape = grid_shape(grid);
    const int group = group_of(shape, kind, rank), size = group_size(shape, kind);
    int *members = calloc((size_t)size, sizeof *members);
    ASSERT(members);
    if (group >= 0) group_members(shape, kind, group, members);
    const bool apart = members[0] / HOST_GPUS != members[size - 1] / HOST_GPUS;
    free(members);
    return apart ? NETWORK : LINK;
}

/* What the rank sends in a step. */
static void print_sent(const MemoryPlan *plan, Grid grid, int rank)
{
    double all = 0;
    printf("\n| group, call | calls | GB sent | ms |\n| --- | ---: | ---: | ---: |\n");
    for (int i = 0; i < WORLD_COMMS; i++)
        for (int k = 0; k < COMM_KIND_COUNT; k++) {
            const CommWork *w = &plan->comm[i][k];
            if (!w->calls || !w->bytes) continue;
            const double ms = 1e3 * (double)w->bytes / rate_of(grid, rank, (GroupKind)i);
            printf("| %s %s | %lld | %.3f | %.3f |\n", group_name((GroupKind)i), comm_kind_name((CommKind)k),
                   (long long)w->calls, 1e-9 * (double)w->bytes, ms);
            all += ms;
        }
    printf("| all | | %.3f | %.3f |\n", 1e-9 * (double)plan->comm_bytes, all);
}

/* flop: of a token, on each of the GPUs. */
static void print_rates(const char *what, const double total[GPUS], double tokens, double flop)
{
    for (int g = 0; g < GPUS; g++)
        printf("%s%s: %.1f ms, %.0f tokens/s, MFU %.1f %%%s", g ? "; " : what, gpus[g].name, 1e3 * total[g],
               tokens / total[g], 100 * flop * tokens / total[g] / PEAK, g + 1 < GPUS ? "" : ".\n");
}

/* The same step with rows in 1, 2, ... bands: how long ops wait for what is sent, and the step takes. */
static Err print_bands(const Model *m, double tokens, double flop)
{
    TrainSpec spec = spec_of(m, m->layers);
    static Count count;
    static TimeLine line;
    MemoryPlan plan;
    printf("\n| bands | calls |");
    for (int g = 0; g < GPUS; g++) printf(" %s: waited, ms | step, ms | MFU |", gpus[g].name);
    printf("\n| ---: | ---: |");
    for (int g = 0; g < GPUS; g++) printf(" ---: | ---: | ---: |");
    for (spec.overlap_tp = 1; spec.overlap_tp <= m->tp; spec.overlap_tp *= 2) {
        for (int g = 0; g < GPUS; g++) {
            line = (TimeLine){ .link = LINK, .call_s = CALL_S, .matrix_beside = MATRIX_BESIDE };
            timed = &gpus[g], time_line = &line;
            const Err err = count_step(&spec, m->tp, &count, &plan);
            time_line = NULL;
            TRY(err);
            if (!g) printf("\n| %d | %d |", spec.overlap_tp, line.calls);
            printf(" %.1f | %.1f | %.1f %% |", 1e3 * line.waited, 1e3 * line.now,
                   100 * flop * tokens / line.now / PEAK);
        }
    }
    printf("\n");
    return ERR_OK;
}

static Err predict_step(const Model *m)
{
    const TrainSpec spec = spec_of(m, m->layers);
    const double tokens = (double)(spec.global_batch * spec.model.seq);
    static Count count;
    MemoryPlan plan;
    double total[GPUS];
    TRY(count_step(&spec, m->tp, &count, &plan));
    printf("\nA step of %s, %.0f million parameters:\n\n", m->what, 1e-6 * (double)plan.params);
    print_head("op");
    print_count(&count, false, total);
    const double flop = (double)model_flop_per_token(&spec.model, plan.params) / (m->tp ? m->tp : 1);
    if (m->tp) print_sent(&plan, (Grid){ .tp = m->tp, .dp = 1, .sp = true }, 0);
    print_rates("\n", total, tokens, flop);
    if (!m->tp) return ERR_OK;
    for (int g = 0; g < GPUS; g++) total[g] += (double)plan.comm_bytes / LINK;
    print_rates("With nothing sent beside products, ", total, tokens, flop);
    return print_bands(m, tokens, flop);
}

/* ---- a configuration ---- */

enum { OVERRIDES_MOST = 16 };

typedef struct {
    const char *path;
    int64_t world;
    const char *overrides[OVERRIDES_MOST];
    int count;
} Asked;

/* --config FILE --world N [KEY=VALUE ...]; false: something else. */
static bool asked_of(int argc, char **argv, Asked *out)
{
    *out = (Asked){ .overrides = { "moe.slack=1" }, .count = 1 };
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--config") && i + 1 < argc) out->path = argv[++i];
        else if (!strcmp(argv[i], "--world") && i + 1 < argc) out->world = atoll(argv[++i]);
        else if (strchr(argv[i], '=') && out->count < OVERRIDES_MOST) out->overrides[out->count++] = argv[i];
        else return false;
    }
    return out->path && out->world > 0;
}

static double seconds_of(const Count *c, const Gpu *g)
{
    double sum = 0;
    for (int i = 0; i < c->count; i++) sum += seconds(&c->line[i], g);
    return sum;
}

/* What nothing can be computed beside, as the program is: rows on their way to experts and back. */
static double all_to_all_seconds(const MemoryPlan *p, Grid grid, int rank)
{
    return (double)p->comm[GROUP_TP_EP][COMM_ALL_TO_ALL_ROWS].bytes / rate_of(grid, rank, GROUP_TP_EP);
}

/* By 6 N + 12 L C T, as published figures count. */
static void print_tflops(const TrainSpec *spec, Grid grid, const MemoryPlan *p, const double total[GPUS])
{
    const double units = (double)spec->global_batch / (double)(spec->micro_batch * grid.dp);
    const double tokens = (double)(spec->global_batch * spec->model.seq), ranks = grid_size(grid);
    const int stages = grid.pp > 1 ? grid.pp : 1;
    const double flop = (double)model_flop_per_token(&spec->model, p->params);
    printf("\nWith the all-to-all in the open, all else that is sent hidden, and %d of %g units' time idle:\n",
           stages - 1, units + stages - 1);
    for (int g = 0; g < GPUS; g++) {
        const double step = total[g] * (units + stages - 1) / units, rate = tokens / step / ranks;
        printf("%s%s: %.0f ms, %.0f tokens/s a GPU, %.0f TFLOP/s a GPU%s", g ? "; " : "", gpus[g].name, 1e3 * step,
               rate, 1e-12 * flop * rate, g + 1 < GPUS ? "" : ".\n");
    }
}

/* The rank of the first replica that takes the longest. */
static Err slowest_rank(const TrainSpec *spec, Grid grid, int *slowest)
{
    static Count count;
    MemoryPlan plan;
    double most = 0;
    for (int rank = 0; rank < grid_size(grid); rank++) {
        const GridCoords at = grid_coords(grid, rank);
        if (at.tp || at.cp || at.dp) continue;
        TRY(count_rank(spec, grid, rank, &count, &plan));
        const double s = seconds_of(&count, &gpus[0]) + all_to_all_seconds(&plan, grid, rank);
        if (s > most) most = s, *slowest = rank;
    }
    return ERR_OK;
}

static Err predict_spec(const Asked *a, const TrainSpec *spec, Grid grid)
{
    static Count count;
    MemoryPlan plan;
    double total[GPUS];
    int rank = 0;
    TRY(slowest_rank(spec, grid, &rank));
    TRY(count_rank(spec, grid, rank, &count, &plan));
    printf("\nA step of %s on %d ranks, rank %d, %.0f million parameters:\n\n", a->path, grid_size(grid), rank,
           1e-6 * (double)plan.params);
    print_head("op");
    print_count(&count, false, total);
    print_sent(&plan, grid, rank);
    for (int g = 0; g < GPUS; g++) total[g] += all_to_all_seconds(&plan, grid, rank);
    print_tflops(spec, grid, &plan, total);
    return ERR_OK;
}

static Err predict_config(const Asked *a)
{
    Config cfg;
    TrainSpec spec;
    Grid grid;
    Err err = config_read(&cfg, (ConfigSource){ .path = a->path,
                                                .overrides = a->overrides,
                                                .override_count = a->count,
                                                .world_size = a->world });
    if (!err) err = grid_spec(&cfg, &grid);
    if (!err) err = train_spec(&cfg, cfg.model.vocab, &spec);
    if (!err) err = predict_spec(a, &spec, grid);
    config_release(&cfg);
    return err;
}

static int finish(Err err)
{
    if (err) err_print(err, true);
    return err_exit_code(err);
}

int main(int argc, char **argv)
{
    Asked asked;
    if (asked_of(argc, argv, &asked)) return finish(predict_config(&asked));
    bool block = false, any = false, wanted[MODELS] = { false };
    for (int i = 1; i < argc; i++) {
        int m = 0;
        while (m < MODELS && strcmp(argv[i], models[m].name) != 0) m++;
        if (m < MODELS) wanted[m] = any = true;
        else if (!strcmp(argv[i], "--block")) block = true;
        else
            return fprintf(stderr, "usage: bench_predict [124m] [1.3b] [7b] [7b-tp8] [--block]\n"
                                   "       bench_predict --config FILE --world N [KEY=VALUE ...]\n"),
                   2;
    }
    Err err = ERR_OK;
    for (int m = 0; m < MODELS && !err; m++)
        if (!any || wanted[m]) err = block ? predict_block(&models[m]) : predict_step(&models[m]);
    return finish(err);
}
