/*
 * Whole training steps on the GPU in bf16: forward, backward, norm, clip, update, on random tokens (those of
 * bench/torch_gpu.py). Each step ends when the host has its loss, as in training.
 *
 *   steps MODEL [OPTIONS]
 *       MODEL        124m, 350m, 1.3b, tiny, or LAYERS,HIDDEN,HEADS,BATCH,SEQ; with 8 experts, 2 a token: moe, tiny-moe
 *       --steps N    that are timed; else 20
 *       --muon       Muon updates matrices: its ops apart, and their share of a step that accumulates ACCUMULATED
 *                    tokens
 *       --micro N    micro-batches of a step; else 1
 *       --batch N, --seq N, --vocab N    in place of the model's
 *       --llama      gated (SwiGLU), RMSNorm, rotary positions, no biases, another matrix for the head
 *       --kv N       heads of keys and values
 *       --precision  bf16, or the recipe of fp8: tensorwise, blockwise, mxfp8
 *       --states     device, or host: where the optimizer's states lie
 *       --candidates every algorithm for each product, in as many turns as --steps (candidates.h), and no steps
 *       --no-autotune, --no-graphs, --json FILE
 *
 * Three passes over one trainer: as it trains (graphs), the same launched op by op, and some steps with an event
 * before and behind every op and copy. The last gives the share of time per op, and what part of its span lies between
 * ops: all of one pass, as clocks differ from pass to pass. An event each makes that an upper bound.
 * mfu: (6 N + 12 L C T) FLOP a token over the vendor's dense bf16 peak for the device's name.
 * Fails if a loss is not finite, the first is not that of an untrained model, memory is taken after the first
 * step, or more of it than planned and DEVICE_LIBRARY_BYTES.
 */
#include <math.h>

#include "base/clock.h"
#include "base/rng.h"
#include "candidates.h"
#include "device_cuda.h"
#include "gemm.h"
#include "gpu.h"
#include "engine/trainer.h"

enum { WARM_UP = 4, STEPS_MAX = 512, PROFILED = 10, CALLS_MAX = 1 << 15, GROUPS_MAX = 128, JSON_BYTES = 1 << 18 };
enum { TOKEN_STRIDE = 1000003 }; /* between samples, in random_tokens */
enum { ACCUMULATED = 1 << 19 };  /* tokens of a step, as models of this size are trained */

typedef struct {
    const char *name;
    int layers, heads;
    int64_t hidden, batch, seq, vocab;
    int experts; /* each of them half as wide as a dense layer, 2 a token: the same active FLOP */
} Model;

static const Model models[] = { { "124m", 12, 12, 768, 64, 1024, 50257, 0 },
                                { "350m", 24, 16, 1024, 32, 1024, 50257, 0 },
                                { "1.3b", 24, 16, 2048, 8, 2048, 50257, 0 },
                                { "moe", 12, 12, 768, 32, 1024, 50257, 8 },
                                { "tiny", 2, 2, 64, 2, 64, 257, 0 },
                                { "tiny-moe", 2, 2, 64, 2, 64, 257, 8 } };

typedef struct {
    Model model;
    TrainSpec spec;
    MemoryPlan plan;
    World world;
    Trainer trainer;
    int steps, micro, profiled;
    bool muon, llama, autotune, candidates, enough, opened;
    const char *precision;
    int64_t used_before;
    double first_loss, last_loss, ms, eager_ms;
    JsonOut json;
} Bench;

/* ---- the model ---- */

static Err random_tokens(void *user, int64_t first, int64_t count, int32_t *out)
{
    const Model *m = user;
    for (int64_t s = 0; s < count; s++)
        for (int64_t i = 0; i <= m->seq; i++)
            *out++ = (int32_t)(rng_mix((uint64_t)((first + s) * TOKEN_STRIDE + i)) % (uint64_t)m->vocab);
    return ERR_OK;
}

static TrainSpec spec_of(const Model *m)
{
    TrainSpec s = { .micro_batch = m->batch,
                    .global_batch = m->batch,
                    .seq_blocks = 8,
                    .attn_block = 64,
                    .device.kind = DEVICE_CUDA,
                    .compute = BF16,
                    .graphs = true,
                    .update = { .adamw = { 0.9f, 0.95f, 1e-8f, 0.1f },
                                .clip = 1,
                                .lr = { LR_CONSTANT, 1e-4, 0, 0, 1000, 1 } },
                    .seed = 1 };
    s.model = (ModelSpec){ .layers = m->layers, .heads = m->heads, .kv_heads = m->heads,
                           .head_dim = (int)m->hidden / m->heads, .hidden = m->hidden, .ffn = 4 * m->hidden,
                           .seq = m->seq, .vocab = m->vocab, .padded_vocab = (m->vocab + 127) / 128 * 128,
                           .norm_eps = 1e-5f, .init_std = 0.02f, .seed = 1, .tp_blocks = 8,
                           .learned_positions = true, .bias = !m->experts, .tied = true, .activation = ACT_GELU };
    if (m->experts)
        s.model.moe = (MixtureSpec){ .experts = m->experts, .topk = 2, .ffn = 2 * m->hidden, .layers = { { ~0ull } },
                                     .router = { ROUTER_SOFTMAX, 1, 1, 1, 1 }, .balance = { 1, 0.01f } };
    return s;
}

static bool find_model(const char *text, Model *out)
{
    long long v[5];
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        if (!strcmp(models[i].name, text)) return *out = models[i], true;
    if (sscanf(text, "%lld,%lld,%lld,%lld,%lld", &v[0], &v[1], &v[2], &v[3], &v[4]) != 5) return false;
    *out = (Model){ text, (int)v[0], (int)v[2], v[1], v[3], v[4], 50257, 0 };
    return v[0] > 0 && v[1] > 0 && v[2] > 0 && v[3] > 0 && v[4] > 0 && v[1] % v[2] == 0;
}

/* Dense bf16, FLOP/s, by the vendor's datasheets; 0 = unknown. */
static double peak_of(const char *device)
{
    static const struct {
        const char *part;
        double tflop_s;
    } peaks[] = { { "H100 PCIe", 756 }, { "H100 NVL", 835 },  { "H100", 989 },  { "H200", 989 },     { "H800", 989 },
                  { "GH200", 989 },     { "H20", 148 },       { "A100", 312 },  { "A800", 312 },     { "GB200", 2500 },
                  { "B200", 2250 },     { "RTX 4090", 165.2 }, { "RTX 5090", 209.5 }, { "RTX PRO 6000", 500 } };
    for (size_t i = 0; i < sizeof peaks / sizeof *peaks; i++)
        if (strstr(device, peaks[i].part)) return peaks[i].tflop_s * 1e12;
    return 0;
}

/* ---- one op at a time: tables that call the device's own between two events ---- */

typedef struct {
    int kind;                  /* OpId, or one of those below */
    int64_t O, I, flop, bytes; /* O, I: of products */
} Call;

enum { CALL_WRITE = OP_COUNT, CALL_READ, CALL_COPY, CALL_ZERO };

static struct {
    const OpTable *ops;
    const DeviceBackend *backend;
    GpuMarks marks;
    Call calls[CALLS_MAX];
    int count, depth;    /* depth: calls that others make count with these */
    int64_t flop, bytes; /* counters at the last call */
} profile;

static Err call_begin(Stream *s, int kind, Tensor weight)
{
    if (profile.depth++) return ERR_OK;
    if (profile.count == CALLS_MAX) return err_set(ERR_INTERNAL, "more than %d calls in a step", CALLS_MAX);
    const DeviceCounters *c = &s->dev->counters;
    profile.calls[profile.count] = (Call){ kind, weight.dim[0], weight.dim[1], c->flop - profile.flop,
                                           c->bytes - profile.bytes };
    profile.flop = c->flop;
    profile.bytes = c->bytes;
    return gpu_mark(&profile.marks, 2 * profile.count, s);
}

static Err call_end(Stream *s)
{
    return --profile.depth ? ERR_OK : gpu_mark(&profile.marks, 2 * profile.count++ + 1, s);
}

static Tensor weight_of(int id, const void *args)
{
    if (id == OP_linear_fwd) return ((const linear_fwd_args *)args)->w;
    if (id == OP_linear_dx) return ((const linear_dx_args *)args)->w;
    if (id == OP_linear_dw) return ((const linear_dw_args *)args)->dw;
    return (Tensor){ 0 };
}

#define T(name, dims)
#define S(type, name)
#define OP(name, flop, args)                                     \
    static Err timed_##name(Stream *s, const name##_args *a)     \
    {                                                            \
        TRY(call_begin(s, OP_##name, weight_of(OP_##name, a)));  \
        TRY(profile.ops->name(s, a));                            \
        return call_end(s);                                      \
    }
#include "device/ops.def"
#undef OP
static const OpTable timed_ops = {
#define OP(name, flop, args) .name = timed_##name,
#include "device/ops.def"
#undef OP
};
#undef T
#undef S

#define TIMED_MOVE(move, kind)                                                                       \
    static Err timed_##move##_bytes(Stream *s, void *to, const void *from, int64_t size_bytes)       \
    {                                                                                                \
        TRY(call_begin(s, kind, (Tensor){ 0 }));                                                     \
        TRY(profile.backend->move(s, to, from, size_bytes));                                         \
        return call_end(s);                                                                          \
    }
TIMED_MOVE(write, CALL_WRITE)
TIMED_MOVE(read, CALL_READ)
TIMED_MOVE(copy, CALL_COPY)

static Err timed_zero_bytes(Stream *s, void *to, int64_t size_bytes)
{
    TRY(call_begin(s, CALL_ZERO, (Tensor){ 0 }));
    TRY(profile.backend->zero(s, to, size_bytes));
    return call_end(s);
}

/* Calls of one op, products by their size. */
typedef struct {
    Call of;
    int count;
    double ms;
} Group;

typedef struct {
    Group groups[GROUPS_MAX];
    int count;
    double ops_ms, gaps_ms, widest_ms;
} Shares;

static Group *share_of(Shares *s, const Call *c)
{
    for (int i = 0; i < s->count; i++) {
        const Call *o = &s->groups[i].of;
        if (o->kind == c->kind && o->O == c->O && o->I == c->I) return &s->groups[i];
    }
    ASSERT(s->count < GROUPS_MAX);
    s->groups[s->count] = (Group){ .of = { .kind = c->kind, .O = c->O, .I = c->I } };
    return &s->groups[s->count++];
}

static int by_ms(const void *a, const void *b)
{
    double x = ((const Group *)a)->ms, y = ((const Group *)b)->ms;
    return (x < y) - (x > y);
}

static Err sum_shares(Shares *s)
{
    *s = (Shares){ .count = 0 };
    for (int i = 0; i < profile.count; i++) {
        double ms = 0, gap = 0;
        Group *g = share_of(s, &profile.calls[i]);
        TRY(gpu_ms(&profile.marks, 2 * i, 2 * i + 1, &ms));
        if (i) TRY(gpu_ms(&profile.marks, 2 * i - 1, 2 * i, &gap));
        g->count++;
        g->ms += ms;
        g->of.flop += profile.calls[i].flop;
        g->of.bytes += profile.calls[i].bytes;
        s->ops_ms += ms;
        s->gaps_ms += gap;
        if (gap > s->widest_ms) s->widest_ms = gap;
    }
    qsort(s->groups, (size_t)s->count, sizeof *s->groups, by_ms);
    return ERR_OK;
}

static const char *share_name(const Group *g, char text[64])
{
    static const char *const moves[] = { "(write)", "(read)", "(copy)", "(zero)" };
    if (g->of.kind >= OP_COUNT) return moves[g->of.kind - OP_COUNT];
    const char *name = op_info((OpId)g->of.kind)->name;
    if (!g->of.O) return name;
    snprintf(text, 64, "%s %lldx%lld", name, (long long)g->of.O, (long long)g->of.I);
    return text;
}

static void report_shares(Bench *b, const Shares *s)
{
    JsonOut *j = &b->json;
    const double steps = b->profiled, span = s->ops_ms + s->gaps_ms, idle = s->gaps_ms / span;
    json_open(j, "profile", '{');
    json_put_int(j, "steps", b->profiled);
    json_put_number(j, "span_ms", span / steps);
    json_put_number(j, "ops_ms", s->ops_ms / steps);
    json_put_number(j, "gaps_ms", s->gaps_ms / steps);
    json_put_number(j, "widest_gap_ms", s->widest_ms);
    json_put_number(j, "idle_share", idle);
    json_put_number(j, "calls", profile.count / steps);
    json_open(j, "ops", '[');
    printf("%d steps of %.0f calls, an event each: %.2f ms a step in ops, %.2f ms between them (widest %.3f ms), "
           "%.1f %% of it\n",
           b->profiled, profile.count / steps, s->ops_ms / steps, s->gaps_ms / steps, s->widest_ms, 100 * idle);
    for (int i = 0; i < s->count; i++) {
        const Group *g = &s->groups[i];
        char text[64];
        const char *name = share_name(g, text);
        json_open(j, NULL, '{');
        json_put_text(j, "op", name);
        json_put_number(j, "calls", g->count / steps);
        json_put_number(j, "ms", g->ms / steps);
        json_put_number(j, "share", g->ms / s->ops_ms);
        json_put_number(j, "tflop_s", (double)g->of.flop * 1e-9 / g->ms);
        json_put_number(j, "gb_s", (double)g->of.bytes * 1e-6 / g->ms);
        json_close(j, '}');
        printf("  %-26s %5.0f x %9.3f ms  %5.1f %%\n", name, g->count / steps, g->ms / steps, 100 * g->ms / s->ops_ms);
    }
    json_close(j, ']');
    json_close(j, '}');
}

/* From the moment to the last weight: what Muon adds to AdamW's update of the rest. An event each makes the span an
 * upper bound; the sum of the ops is what is left of it where a graph launches them. */
static Err report_muon(Bench *b)
{
    JsonOut *j = &b->json;
    int first = -1, last = -1;
    double ops = 0, span = 0;
    for (int i = 0; i < profile.count; i++) { /* of the last step */
        if (profile.calls[i].kind == OP_xent_row) first = -1;
        if (profile.calls[i].kind == OP_muon_moment && first < 0) first = i;
        if (profile.calls[i].kind == OP_muon_apply) last = i;
    }
    if (first < 0 || last < first) return err_set(ERR_INTERNAL, "Muon updated nothing");
    for (int i = first; i <= last; i++) {
        double ms = 0;
        TRY(gpu_ms(&profile.marks, 2 * i, 2 * i + 1, &ms));
        ops += ms;
    }
    TRY(gpu_ms(&profile.marks, 2 * first, 2 * last + 1, &span));
    const int64_t tokens = b->model.batch * b->model.seq, micro = tokens < ACCUMULATED ? ACCUMULATED / tokens : 1;
    const double micro_ms = (b->ms - ops) / b->micro, whole = (double)micro * micro_ms + ops;
    json_open(j, "muon", '{');
    json_put_int(j, "calls", last - first + 1);
    json_put_number(j, "ops_ms", ops);
    json_put_number(j, "span_ms", span);
    json_put_number(j, "micro_ms", micro_ms);
    json_put_number(j, "share_of_step", ops / b->ms);
    json_put_int(j, "accumulated_tokens", micro * tokens);
    json_put_number(j, "share_accumulated", ops / whole);
    json_close(j, '}');
    printf("muon: %d calls, %.2f ms in them (%.2f ms with the gaps of op by op): %.2f %% of this step; a micro-batch "
           "takes %.2f ms, so of a step of %lld tokens it is %.2f %%\n", last - first + 1, ops, span, 100 * ops / b->ms,
           micro_ms, (long long)(micro * tokens), 100 * ops / whole);
    return ERR_OK;
}

/* ---- steps ---- */

/* Steps as training runs them: the next one is enqueued meanwhile. */
static Err timed_steps(Bench *b, int warm_up, int steps, double *median)
{
    double ms[STEPS_MAX];
    Trainer *t = &b->trainer;
    StepReport report;
    double start = clock_s();
    TRY(trainer_start(t, (TokenSource){ &b->model, random_tokens }, &report));
    for (int i = -warm_up; i < steps; i++) {
        if (i + 1 < steps)
            TRY(trainer_start(t, (TokenSource){ &b->model, random_tokens }, &report));
        else TRY(trainer_finish(t, &report));
        const double now = clock_s();
        if (i >= 0) ms[i] = 1e3 * (now - start);
        start = now;
        if (!isfinite(report.loss) || report.skipped)
            return err_set(ERR_NUMERICS, "step %lld: loss %g", (long long)report.step, report.loss);
        if (report.step == 1) b->first_loss = report.loss;
    }
    b->last_loss = report.loss;
    *median = gpu_median(ms, steps);
    return ERR_OK;
}

/* As many steps as there are marks for, through the timed tables. */
static Err profile_steps(Bench *b)
{
    Device *dev = &b->trainer.device;
    DeviceBackend timed = *dev->backend;
    double median;
    const int64_t launches = replays_counts(&b->trainer.executor.replays).launches;
    const int64_t most = CALLS_MAX / 2 / (launches + 1);
    b->profiled = b->steps < PROFILED ? b->steps : PROFILED;
    if (b->profiled > most) b->profiled = most > 1 ? (int)most : 1;
    timed.write = timed_write_bytes, timed.read = timed_read_bytes;
    timed.copy = timed_copy_bytes, timed.zero = timed_zero_bytes;
    profile.ops = dev->ops, profile.backend = dev->backend;
    profile.flop = dev->counters.flop, profile.bytes = dev->counters.bytes;
    TRY(gpu_marks_open(&profile.marks, 2 * CALLS_MAX));
    dev->ops = &timed_ops, dev->backend = &timed;
    Err err = timed_steps(b, 0, b->profiled, &median);
    dev->ops = profile.ops, dev->backend = profile.backend;
    return err ? err : device_sync(&dev->stream);
}

static Err used_bytes(int64_t *out)
{
    size_t free_bytes, total;
    TRY(gpu_check(cudaMemGetInfo(&free_bytes, &total), "reading the GPU's free memory"));
    *out = (int64_t)(total - free_bytes);
    return ERR_OK;
}

static Err report_memory(Bench *b, int64_t allocs_before)
{
    int64_t used, plan = memory_plan_total(&b->plan);
    TRY(used_bytes(&used));
    int64_t taken = used - b->used_before, over = taken - plan;
    int64_t allocs = b->trainer.device.counters.allocs - allocs_before;
    json_put_int(&b->json, "plan_bytes", plan);
    json_put_int(&b->json, "taken_bytes", taken);
    json_put_int(&b->json, "over_plan_bytes", over);
    json_put_int(&b->json, "allowed_over_plan_bytes", DEVICE_LIBRARY_BYTES);
    json_put_int(&b->json, "device_used_bytes", used);
    printf("memory: planned %.2f GiB, taken %.2f GiB (%.0f MiB more; libraries may take %d MiB), in use %.2f GiB\n",
           (double)plan / (1 << 30), (double)taken / (1 << 30), (double)over / (1 << 20), DEVICE_LIBRARY_BYTES >> 20,
           (double)used / (1 << 30));
    if (allocs) return err_set(ERR_MEMORY, "%lld allocations after the first step", (long long)allocs);
    if (over > DEVICE_LIBRARY_BYTES)
        return err_set(ERR_MEMORY, "%.0f MiB more than planned, %d MiB are allowed", (double)over / (1 << 20),
                       DEVICE_LIBRARY_BYTES >> 20);
    return ERR_OK;
}

static Err report_speed(Bench *b)
{
    DeviceInfo gpu;
    TRY(device_cuda_info(0, &gpu));
    JsonOut *j = &b->json;
    const ModelSpec *m = &b->spec.model;
    double tokens = (double)(b->spec.global_batch * m->seq), peak = peak_of(gpu.name);
    double flop = (double)model_flop_per_token(m, b->plan.params.model), per_s = tokens / b->ms * 1e3;
    double mfu = peak > 0 ? flop * per_s / peak : NAN;
    json_put_int(j, "params", b->plan.params.model);
    json_put_int(j, "tokens_per_step", (int64_t)tokens);
    json_put_number(j, "ms", b->ms);
    json_put_number(j, "ms_without_graphs", b->eager_ms);
    const StepCounts counts = replays_counts(&b->trainer.executor.replays);
    json_put_int(j, "launches", counts.launches);
    json_put_int(j, "graphs_launched", counts.graphs);
    json_put_number(j, "tokens_s", per_s);
    json_put_number(j, "tflop_s", flop * per_s * 1e-12);
    json_put_number(j, "peak_tflop_s", peak * 1e-12);
    json_put_number(j, "mfu", mfu);
    json_put_number(j, "first_loss", b->first_loss);
    json_put_number(j, "last_loss", b->last_loss);
    printf("%s: %.1f ms a step (op by op %.1f), %.0f tokens/s, %.1f TFLOP/s", b->model.name, b->ms, b->eager_ms, per_s,
           flop * per_s * 1e-12);
    if (peak > 0) printf(", MFU %.1f %%", 100 * mfu);
    printf(", loss %.4f -> %.4f\n", b->first_loss, b->last_loss);
    double untrained = log((double)b->model.vocab);
    if (fabs(b->first_loss - untrained) <= 0.5) return ERR_OK;
    return err_set(ERR_NUMERICS, "the first loss is %.4f, an untrained model's is near %.4f", b->first_loss, untrained);
}

static Err open_bench(Bench *b)
{
    b->plan = (MemoryPlan){ 0 };
    TRY(gpu_describe(&b->json));
    json_put_text(&b->json, "model", b->model.name);
    json_put_int(&b->json, "layers", b->model.layers);
    json_put_int(&b->json, "hidden", b->model.hidden);
    json_put_int(&b->json, "heads", b->model.heads);
    json_put_int(&b->json, "batch", b->model.batch);
    json_put_int(&b->json, "seq", b->model.seq);
    json_put_int(&b->json, "kv_heads", b->spec.model.kv_heads);
    json_put_int(&b->json, "vocab", b->model.vocab);
    json_put_text(&b->json, "arch", b->llama ? "llama" : "gpt2");
    json_put_text(&b->json, "precision", b->precision);
    json_put_text(&b->json, "states", b->spec.update.states_on_host ? "host" : "device");
    json_put_text(&b->json, "optimizer", b->muon ? "muon" : "adamw");
    json_put_int(&b->json, "micro_batches", b->micro);
    json_put_bool(&b->json, "graphs", b->spec.graphs);
    json_put_bool(&b->json, "autotune", b->autotune);
    TRY(world_open_self(&b->world));
    b->world.grid.owners = b->muon;
    TRY(trainer_plan(&b->spec, b->world.grid, 0, &b->plan));
    TRY(gpu_has_room(memory_plan_total(&b->plan) + DEVICE_LIBRARY_BYTES, &b->enough));
    if (!b->enough) return ERR_OK;
    TRY(used_bytes(&b->used_before));
    TRY(trainer_open(&b->trainer, &b->spec, &b->world, &b->plan));
    b->opened = true;
    cuda_gemm_autotune(((CudaDevice *)b->trainer.device.cuda)->gemm, b->autotune ? TUNE_SAME_BITS : TUNE_OFF);
    return ERR_OK;
}

/* One step makes the plans; then its memory is given back. */
static Err list_candidates(Bench *b)
{
    static Listed listed;
    listed.turns = b->steps < TURNS_MOST ? b->steps : TURNS_MOST;
    TRY(timed_steps(b, 0, 1, &b->ms));
    candidates_collect(((CudaDevice *)b->trainer.device.cuda)->gemm, &listed);
    trainer_close(&b->trainer);
    world_close(&b->world);
    b->opened = false;
    return candidates_list(&listed, &b->json);
}

static Err run_all(Bench *b)
{
    static Shares shares;
    b->autotune &= !b->candidates;
    TRY(open_bench(b));
    if (!b->enough) return ERR_OK;
    if (b->candidates) return list_candidates(b);
    int64_t allocs = b->trainer.device.counters.allocs;
    Replays *graphs = b->trainer.executor.graphs;
    TRY(timed_steps(b, WARM_UP, b->steps, &b->ms));
    b->trainer.executor.graphs = NULL; /* op by op from here */
    Err err = timed_steps(b, 1, b->steps, &b->eager_ms);
    if (!err) err = profile_steps(b);
    b->trainer.executor.graphs = graphs;
    TRY(err);
    TRY(sum_shares(&shares));
    err = report_speed(b);
    report_shares(b, &shares);
    if (b->muon && !err) err = report_muon(b);
    Err memory = report_memory(b, allocs);
    return err ? err : memory;
}

static void close_bench(Bench *b)
{
    gpu_marks_close(&profile.marks);
    if (b->opened) {
        trainer_close(&b->trainer);
        world_close(&b->world);
    }
}

static void take_muon(Bench *b)
{
    b->muon = true;
    b->spec.update.optimizer = OPTIMIZER_MUON;
    b->spec.update.muon = (MuonSpec){ .momentum = 0.95f, .nesterov = true, .steps = 5, .router = true };
}

static void take_llama(Bench *b)
{
    ModelSpec *m = &b->spec.model;
    b->llama = m->rms = true;
    m->learned_positions = m->bias = m->tied = false;
    m->activation = ACT_SWIGLU;
    m->rope = (RopeSpec){ .layers = layer_pattern_all(1), .base = 10000 };
}

static bool take_precision(Bench *b, const char *name)
{
    b->precision = name;
    if (!strcmp(name, "bf16")) return true;
    for (Fp8Recipe r = FP8_NONE + 1; r < FP8_RECIPES; r++)
        if (!strcmp(fp8_facts(r)->name, name))
            return b->spec.model.fp8 = fp8_between(r, b->spec.model.layers, 0), true;
    return false;
}

/* What a number stands for; 0: no number of this kind. */
static int64_t *number_of(Bench *b, const char *name)
{
    if (!strcmp(name, "--batch")) return &b->model.batch;
    if (!strcmp(name, "--seq")) return &b->model.seq;
    return !strcmp(name, "--vocab") ? &b->model.vocab : NULL;
}

/* First what the model is made of, then what is changed in it. */
static bool parse(int argc, char **argv, Bench *b, const char **json_path)
{
    if (argc < 2 || !find_model(argv[1], &b->model)) return false;
    for (int i = 2; i + 1 < argc; i++) {
        int64_t *number = number_of(b, argv[i]);
        if (number && (*number = atoll(argv[i + 1])) < 1) return false;
    }
    b->spec = spec_of(&b->model);
    for (int i = 2; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(argv[i], "--no-autotune")) b->autotune = false;
        else if (!strcmp(argv[i], "--candidates")) b->candidates = true;
        else if (!strcmp(argv[i], "--no-graphs")) b->spec.graphs = false;
        else if (!strcmp(argv[i], "--muon")) take_muon(b);
        else if (!strcmp(argv[i], "--llama")) take_llama(b);
        else if (!value) return false;
        else if (i++, !strcmp(argv[i - 1], "--json")) *json_path = value;
        else if (!strcmp(argv[i - 1], "--steps")) b->steps = atoi(value);
        else if (!strcmp(argv[i - 1], "--micro")) b->micro = atoi(value);
        else if (!strcmp(argv[i - 1], "--kv")) b->spec.model.kv_heads = atoi(value);
        else if (!strcmp(argv[i - 1], "--states")) b->spec.update.states_on_host = !strcmp(value, "host");
        else if (!strcmp(argv[i - 1], "--precision") && take_precision(b, value)) continue;
        else if (!number_of(b, argv[i - 1])) return false;
    }
    const int kv = b->spec.model.kv_heads;
    if (b->steps < 1 || b->steps > STEPS_MAX || b->micro < 1 || kv < 1 || b->model.heads % kv) return false;
    b->spec.global_batch *= b->micro;
    return true;
}

int main(int argc, char **argv)
{
    static Bench b = { .steps = 20, .micro = 1, .autotune = true, .precision = "bf16" };
    static char json[JSON_BYTES];
    const char *json_path = NULL;
    if (!parse(argc, argv, &b, &json_path))
        return fprintf(stderr, "usage: steps 124m|350m|1.3b|moe|tiny|tiny-moe|LAYERS,HIDDEN,HEADS,BATCH,SEQ [--steps N]"
                               " [--muon] [--micro N] [--batch N] [--seq N] [--vocab N] [--llama] [--kv N]"
                               " [--precision bf16|tensorwise|blockwise|mxfp8] [--states device|host] [--candidates]"
                               " [--no-autotune] [--no-graphs] [--json FILE]\n"), 2;
    json_out_init(&b.json, json, sizeof json);
    json_open(&b.json, NULL, '{');
    Err err = run_all(&b);
    json_close(&b.json, '}');
    Err written = gpu_write_json(&b.json, json, err == ERR_OK || b.ms > 0 ? json_path : NULL);
    if (err || written) err_print(err ? err : written, true);
    close_bench(&b);
    return err || written || b.enough ? err_exit_code(err ? err : written) : GPU_TOO_SMALL;
}
