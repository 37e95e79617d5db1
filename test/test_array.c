/*
 * Every layout gives the same bits, beside everything else: models and layouts of test/axes.def, drawn so that together
 * they hold as many pairs of values of two axes as they can. A model is trained on one rank, then in each of its
 * layouts (ranks are threads). Losses, weights and moments must have one hash, largest logits another, and an
 * evaluation one loss. tiny.h holds each rank to its plan.
 *
 * test_array [kind of model]; MEGATRAIN_LAYOUTS=print lists draws and their seconds of processors, =whole draws more
 * (make test-grid), =all ten times as many, =brief 20 for a sanitizer, whose bits are not compared. A draw alone:
 * test_array 'kind=gpt2 tp=2 dp=2'; what it leaves out has its first value.
 */
#include "test.h"
#include "tiny.h"

#include "cpu_graphs.h"

/* (replays: two steps are listened to and one is recorded, or twice as many where weights are on their way) */
enum { REPLAYED_STEPS = 5, RANKS_MOST = 8, BUCKET_BYTES = 64 << 10, CANDIDATES = 140, VALUES_MOST = 256 };

/* ---- axes ---- */

enum {
#define MODEL(axis, values, ...) AXIS_##axis,
#define LAYOUT(axis, values, ...) AXIS_##axis,
#include "axes.def"
    AXES
};

#define MODEL(axis, values, ...) +1
#define LAYOUT(axis, values, ...)
enum { MODEL_AXES = 0
#include "axes.def"
};

static const struct {
    const char *name, *values;
} axes[AXES] = {
#define MODEL(axis, values, ...) { #axis, values },
#define LAYOUT(axis, values, ...) { #axis, values },
#include "axes.def"
};

typedef struct {
    uint8_t at[AXES];
    bool moot[AXES];
} Draw;

static int count_of(int axis)
{
    int n = 1;
    for (const char *c = axes[axis].values; *c; c++) n += *c == ' ';
    return n;
}

/* Word number v of an axis' values; the text of one call lasts until the next but three. */
static const char *word_of(int axis, int v)
{
    static _Thread_local char text[4][32];
    static _Thread_local int turn;
    const char *c = axes[axis].values;
    for (; v; c++) v -= *c == ' ';
    char *out = text[turn++ % 4];
    snprintf(out, sizeof *text, "%.*s", (int)strcspn(c, " "), c);
    return out;
}

static void text_of(const Draw *d, int first, int end, char *out, size_t size)
{
    size_t n = 0;
    *out = 0;
    for (int i = first; i < end && n < size; i++)
        if (!d->moot[i] && (d->at[i] || !i))
            n += (size_t)snprintf(out + n, size - n, "%s%s=%s", n ? " " : "", axes[i].name, word_of(i, d->at[i]));
}

/* ---- what values mean ---- */

static TrainSpec model_of(int kind)
{
    TrainSpec s;
    switch (kind) {
    case 0: s = tiny_gpt2(); break;
    case 1: s = tiny_llama(); break;
    case 2: s = tiny_variants(); break;
    case 3: s = tiny_llama(), s.model.attention_bias = ATTENTION_BIAS_QKV; break;
    case 4: s = tiny_latent(tiny_llama(), 0); break;
    case 5: s = tiny_latent(tiny_llama(), 12); break;
    case 6: s = tiny_mixture(TINY_MIXTRAL, 2); break;
    case 7: s = tiny_mixture(TINY_QWEN3, 2); break;
    case 8: s = tiny_mixture(TINY_DEEPSEEK, 2); break;
    case 9: s = tiny_gptoss(2); break;
    case 10: s = tiny_latent(tiny_mixture(TINY_DEEPSEEK, 2), 12); break;
    case 11: s = tiny_further(tiny_llama(), 2); break;
    case 12: s = tiny_further(tiny_mixture(TINY_DEEPSEEK, 2), 1); break;
    case 13: /* OLMo Hybrid's norms */
        s = tiny_delta(tiny_llama()), s.model.block_norms = BLOCK_NORMS_POST, s.model.state_pre_norms = true;
        s.model.delta.norm_eps = 1e-2f;
        break;
    case 14: s = tiny_delta(tiny_mixture(TINY_QWEN3, 3)), s.model.delta.negative = true; break;
    case 15: s = tiny_singles(tiny_gpt2(), 4); break;
    case 16: s = tiny_further(tiny_nemotron(5), 1); break;
    case 17: s = tiny_mamba(tiny_llama()); break;
    case 18:
        s = tiny_mamba(tiny_mixture(TINY_QWEN3, 3)), s.model.mamba.conv_bias = false, s.model.mamba.least = .01f;
        break;
    case 19: s = tiny_kda(tiny_llama()); break;
    default: s = tiny_kda(tiny_mixture(TINY_DEEPSEEK, 3)), s.model.kda.bound = -5, s.model.rope = (RopeSpec){ 0 };
    }
    s.update.bucket_bytes = BUCKET_BYTES;
    s.update.clip = .1f; /* (every gradient's norm counts) */
    s.device.isa = isa_best();
    return s;
}

/* What rules ask of a kind of model, a million times while draws are made. */
typedef struct {
    bool known, mixture, latent;
} Kind;

static Kind kind_of(const Draw *d)
{
    static Kind kinds[VALUES_MOST];
    Kind *k = &kinds[d->at[AXIS_kind]];
    if (k->known) return *k;
    const ModelSpec m = model_of(d->at[AXIS_kind]).model;
    *k = (Kind){ true, m.moe.experts > 0, m.latent.width.kv_rank > 0 };
    return *k;
}

static bool is_mixture(const Draw *d) { return kind_of(d).mixture; }

static bool is_latent(const Draw *d) { return kind_of(d).latent; }

/* In 8 bits a model is as wide as blocks want it. */
static void choose_precision(TrainSpec *s, int v)
{
    const Fp8Recipe recipe = v < 4 ? FP8_NONE : (Fp8Recipe)(FP8_TENSORWISE + v - 4);
    if (v) s->compute = BF16, s->device.dot = v < 4 ? (DotKind)(v - 1) : DOT_FMA;
    if (recipe == FP8_NONE) return;
    const int times = recipe == FP8_BLOCKWISE ? 4 : 2;
    s->model.hidden *= times, s->model.ffn *= times;
    if (!s->model.latent.width.kv_rank) s->model.head_dim *= times;
    s->model.delta.key *= times, s->model.delta.value *= times;
    s->model.mamba.head *= times, s->model.mamba.state *= times;
    s->model.kda.head *= times;
    s->model.fp8 = fp8_between(recipe, s->model.layers, 0);
    s->update.lr.lr = 3e-3;
}

static void one_choice(TrainSpec *s)
{
    s->model.moe.experts = 64;
    s->model.moe.topk = 1;
    s->model.moe.ffn = 16;
    s->model.moe.router.groups = s->model.moe.router.group_topk = 1;
}

static void experts_in_8_bits(TrainSpec *s)
{
    s->seq_blocks = 1;
    s->model.fp8.experts = true;
    s->model.moe.ffn = s->model.fp8.recipe == FP8_BLOCKWISE ? 256 : 64;
    if (s->model.moe.shared_ffn) s->model.moe.shared_ffn = 256;
    if (s->model.moe.latent) s->model.moe.latent = s->model.fp8.recipe == FP8_BLOCKWISE ? 128 : 64;
}

static void choose_optimizer(TrainSpec *s, int v)
{
    static const OptimizerKind kinds[] = { OPTIMIZER_ADAMW, OPTIMIZER_ADAMW, OPTIMIZER_MUON, OPTIMIZER_MUON,
                                           OPTIMIZER_MUON,  OPTIMIZER_LION,  OPTIMIZER_SGD,  OPTIMIZER_MUON };
    const int way = v == 7 ? 3 : v - 2;
    static const MuonSplit splits[] = { MUON_SPLIT_QKV, MUON_SPLIT_HEAD, MUON_SPLIT_NONE, MUON_SPLIT_QKV };
    s->update.optimizer = kinds[v];
    if (v == 1) s->update.moments = BF16;
    if (kinds[v] == OPTIMIZER_MUON)
        s->update.muon = (MuonSpec){ .momentum = .95f, .nesterov = v != 4, .steps = way == 3 ? 10 : 5,
                                     .set = (MuonSet)way, .scale = (MuonScale)way, .split = splits[way],
                                     .router = v != 3 };
    if (kinds[v] == OPTIMIZER_LION) s->update.adamw.beta2 = .99f;
    if (kinds[v] == OPTIMIZER_SGD) s->update.lr.lr = .1;
}

static void choose_balance(TrainSpec *s, int v)
{
    Balance *b = &s->model.moe.balance;
    if (v == 1) b->unit = 2;
    if (v == 2) *b = (Balance){ .unit = 2, .sinkhorn = true };
    if (v == 3) b->global = true;
    if (v == 4) b->aux = 0, b->z = 1e-3f;
}

static void choose_way(TinyRun *r, int v)
{
    r->spec.model.context = layer_pattern_all(v < 4 ? v : CONTEXT_ALLGATHER);
    if (v == 4) r->spec.model.context = (LayerPattern){ 2, { CONTEXT_ALLGATHER, CONTEXT_RING }, { 1, 1 } };
    if (v == CONTEXT_HIERARCHICAL) r->grid.cp_heads = 2;
    if (r->spec.model.delta.key_heads || r->spec.model.mamba.heads || r->spec.model.kda.heads) /* (they have others) */
        r->spec.model.context = v == 5 ? (LayerPattern){ 2, { CONTEXT_STATE, CONTEXT_ALLGATHER }, { 1, 1 } }
                                       : (LayerPattern){ 2, { CONTEXT_A2A, v < 4 ? v : CONTEXT_RING }, { 1, 1 } };
}

static void choose_schedule(TinyRun *r, const char *name)
{
    static _Thread_local char text[8][40];
    static _Thread_local int turn;
    char *out = text[turn++ % 8];
    snprintf(out, sizeof *text, "%s", name);
    r->spec.pipeline.schedule = out;
    (void)schedule_two_way(out, &r->grid.bidirectional);
}

static void split_backwards(TinyRun *r)
{
    char text[40];
    snprintf(text, sizeof text, "%s+split", r->spec.pipeline.schedule);
    choose_schedule(r, text);
}

static bool two_way(const Draw *d)
{
    bool both = false;
    (void)schedule_two_way(word_of(AXIS_schedule, d->at[AXIS_schedule]), &both);
    return both;
}

/* Actions that run in turn: of two stages whose experts are on several ranks. */
static bool runs_in_pairs(const Draw *d)
{
    const char *schedule = word_of(AXIS_schedule, d->at[AXIS_schedule]);
    const bool paired = !strcmp(schedule, "dualpipev") || !strcmp(schedule, "dualpipe");
    return paired && d->at[AXIS_pp] && d->at[AXIS_ep] + d->at[AXIS_etp] > 0;
}

/* Scales, or one of two levels of them, are of a micro-batch's rows, or of more rows than a sample has: a micro-batch's
 * size belongs to the definition. */
static bool one_scale(const Draw *d)
{
    const int v = d->at[AXIS_precision] - 4;
    return v >= 0 && FP8_TENSORWISE + v != FP8_MXFP8;
}

/* Have ranks whole blocks of a scale? */
static bool blocks_fit(const TinyRun *r)
{
    static const int64_t lengths[FP8_RECIPES] = { 1, 1, 128, 32, 16 };
    const ModelSpec *m = &r->spec.model;
    const int64_t block = lengths[m->fp8.recipe], tp = r->grid.tp;
    const int64_t parts = r->grid.etp > 1 ? r->grid.etp : 1;
    if (m->fp8.experts && m->moe.ffn / parts % block) return false;
    if (tp == 1) return true;
    return !m->latent.width.kv_rank && m->kv_heads >= tp && m->kv_heads * m->head_dim / tp % block == 0 &&
           m->ffn / tp % block == 0 && m->moe.shared_ffn / tp % block == 0;
}

/* Does a layout cut inside a leaf of a sequence? */
static bool leaves_are_cut(const TinyRun *r)
{
    const int slices = r->spec.pipeline.slices > 1 ? r->spec.pipeline.slices : 1, cp = r->grid.cp;
    const int64_t leaves = r->spec.seq_blocks / slices, rows = r->spec.micro_batch * r->spec.seq_blocks;
    const bool whole = model_sums_own_rows(&r->spec.model);
    if (r->spec.seq_blocks % slices || (cp > 1 && leaves % (2 * cp))) return true;
    return whole && r->grid.sp && rows % (r->grid.tp * cp * slices);
}

static int stages_of(const TinyRun *r)
{
    const ScheduleSpec shape = { .name = r->spec.pipeline.schedule, .ranks = r->grid.pp, .microbatches = 8,
                                 .chunks = r->spec.pipeline.chunks, .slices = r->spec.pipeline.slices };
    Schedule s;
    const int stages = schedule_make(&shape, &s) ? 0 : s.stages;
    schedule_free(&s);
    return stages;
}

/* The embedding and the head have stages of their own; or the second stage has nothing. */
static void choose_stages(TinyRun *r, int v)
{
    static _Thread_local char text[8][160];
    static _Thread_local int turn;
    char *out = text[turn++ % 8];
    const int stages = v ? stages_of(r) : 0, first = v == 1, end = stages - (v == 1), modules = r->spec.model.mtp.count;
    int left = r->spec.model.layers, places = v == 1 ? end - first : stages - 1;
    size_t n = 0;
    if (places < 1) return;
    for (int s = 0; s < stages; s++) {
        const bool filled = s >= first && s < end && !(v == 2 && s == 1);
        const int own = filled ? left / places : 0;
        if (filled) left -= own, places--;
        n += (size_t)snprintf(out + n, sizeof *text - n, "%s%s", s ? "|" : "", s ? "" : "E");
        if (own) n += (size_t)snprintf(out + n, sizeof *text - n, "t*%d", own);
        if (modules && s == end - 1) n += (size_t)snprintf(out + n, sizeof *text - n, "m*%d", modules);
    }
    snprintf(out + n, sizeof *text - n, "L");
    r->spec.pipeline.layout = out;
}

static void choose_dispatcher(TinyRun *r, int v)
{
    r->spec.model.moe.dispatcher = v == 0 ? DISPATCH_ALLTOALL : v == 1 ? DISPATCH_ALLGATHER : DISPATCH_NODE;
    if (v >= 2) r->grid.ep_hosts = v == 2 ? 2 : 4;
}

static void choose_isa(TinyRun *r, int v)
{
    const Isa isa = v == 1 ? ISA_AVX2 : ISA_C;
    if (v && isa_supported(isa)) r->spec.device.isa = isa;
}

/* Bytes that are released are overwritten. */
static void choose_offload(TinyRun *r, int v)
{
    r->spec.model.offload = v < 3 ? v : r->spec.model.layers;
    r->spec.poison = v > 0;
}

static Err are_replayed(Trainer *t, void *user)
{
    (void)user;
    const Replays *r = &t->executor.replays;
    return r->mode == REPLAYS_REPLAYS ? ERR_OK : err_set(ERR_INTERNAL, "the last step was not replayed");
}

/* Steps are recorded and replayed (engine/replays.h), and every completion of a communicator is late: what a replay
 * does not wait for is read too early. */
static void replay_steps(TinyRun *r)
{
    r->before = cpu_graphs_of_steps, r->after = are_replayed;
    r->steps = REPLAYED_STEPS;
    r->delay_ms = 1;
}

static int copies_of(const Grid *g) { return g->dp * g->cp; }

/* ---- draws ---- */

#define at(axis) d->at[AXIS_##axis]

static void settle(Draw *d)
{
    memset(d->moot, 0, sizeof d->moot);
#define MODEL(axis, values, ...)
#define LAYOUT(axis, values, ...)
#define MOOT(axis, condition) \
    if (condition) d->at[AXIS_##axis] = 0, d->moot[AXIS_##axis] = true;
#include "axes.def"
}

static bool never(const Draw *d, const TinyRun *r)
{
#define MODEL(axis, values, ...)
#define LAYOUT(axis, values, ...)
#define NEVER(condition) \
    if (condition) return true;
#include "axes.def"
    return false;
}

static TrainSpec spec_of(const Draw *d)
{
    TrainSpec spec, *s = &spec;
#define MODEL(axis, values, ...) \
    { \
        const int v = d->at[AXIS_##axis]; \
        (void)v; \
        __VA_ARGS__; \
    }
#define LAYOUT(axis, values, ...)
#include "axes.def"
    return spec;
}

static TinyRun run_of(const Draw *d, int steps)
{
    TinyRun run = { .spec = spec_of(d), .grid.ep = 0, .steps = steps }, *r = &run;
#define MODEL(axis, values, ...)
#define LAYOUT(axis, values, ...) \
    { \
        const int v = d->at[AXIS_##axis]; \
        (void)v; \
        __VA_ARGS__; \
    }
#include "axes.def"
    run.grid.owners = run.spec.update.optimizer == OPTIMIZER_MUON;
    run.grid.kv = run.grid.tp > run.spec.model.kv_heads ? run.grid.tp / run.spec.model.kv_heads : 1;
    run.grid.zero_group = param_zero_group(run.grid, run.spec.update.zero, run.grid.zero_group);
    return run;
}

static bool legal(Draw *d)
{
    settle(d);
    TinyRun r = run_of(d, 0);
    const Grid g = r.grid;
    if (never(d, &r)) return false;
    if (g.tp * g.cp * g.dp * g.pp > RANKS_MOST || r.spec.micro_batch * g.dp > r.spec.global_batch) return false;
    return !trainer_grid(&r.spec, &r.grid) && grid_fits(grid_shape(r.grid)) && !trainer_check(&r.spec, r.grid);
}

/* ---- pairs ---- */

static uint8_t tried[VALUES_MOST][VALUES_MOST];
static int first_value[AXES + 1];

static int gain_of(const Draw *d, int first, int end, bool take)
{
    int gain = 0;
    for (int i = first; i < end; i++)
        for (int k = 0; k < i && !d->moot[i]; k++) {
            uint8_t *seen = &tried[first_value[i] + d->at[i]][first_value[k] + d->at[k]];
            if (d->moot[k] || *seen) continue;
            gain++;
            if (take) *seen = 1;
        }
    return gain;
}

static int below(uint64_t *seed, int n) { return (int)(test_rand(seed) % (uint64_t)n); }

static void draw_models(Draw *d, int kind, uint64_t *seed)
{
    *d = (Draw){ 0 };
    for (int i = 1; i < MODEL_AXES; i++)
        if (below(seed, 3)) d->at[i] = (uint8_t)below(seed, count_of(i));
    d->at[AXIS_kind] = (uint8_t)kind;
}

static const int cuts[] = { AXIS_tp, AXIS_cp, AXIS_dp, AXIS_pp };
static bool taken[VALUES_MOST]; /* values of layouts that are in the array */

/* Half of the draws have a value that no layout of the array has. */
static void draw_new_value(Draw *d, uint64_t *seed)
{
    int axis[VALUES_MOST], value[VALUES_MOST], n = 0;
    for (int i = MODEL_AXES; i < AXES; i++)
        for (int v = 0; v < count_of(i); v++)
            if (!taken[first_value[i] + v]) axis[n] = i, value[n++] = v;
    if (n == 0 || below(seed, 2)) return;
    const int k = below(seed, n);
    for (int i = 0; i < 4; i++)
        if (axis[k] == cuts[i]) d->at[AXIS_tp] = d->at[AXIS_cp] = d->at[AXIS_dp] = d->at[AXIS_pp] = 0;
    d->at[axis[k]] = (uint8_t)value[k];
#define MODEL(axis, values, ...)
#define LAYOUT(axis, values, ...)
#define WANTS(name, statement) \
    if (axis[k] == AXIS_##name) statement;
#include "axes.def"
}

/* Up to eight ranks, shared by the axes that cut a model. */
static void draw_layout(Draw *d, uint64_t *seed)
{
    for (int i = MODEL_AXES; i < AXES; i++) d->at[i] = below(seed, 2) ? (uint8_t)below(seed, count_of(i)) : 0;
    for (int i = 0; i < 4; i++) d->at[cuts[i]] = 0;
    for (int k = 1 + below(seed, 3); k; k--) {
        const int axis = cuts[below(seed, 4)];
        if (d->at[axis] + 1 < count_of(axis)) d->at[axis]++;
    }
    draw_new_value(d, seed);
}

/* (drawing is dear under a sanitizer) */
static int candidates(void) { return brief() ? 24 : CANDIDATES; }

/* The best of a few legal draws; false: none of many was legal. */
static bool best_layout(const Draw *model, uint64_t *seed, Draw *best)
{
    int most = -1, found = 0;
    for (int i = 0; i < 4000 && found < candidates(); i++) {
        Draw d = *model;
        draw_layout(&d, seed);
        if (!legal(&d)) continue;
        found++;
        const int gain = gain_of(&d, MODEL_AXES, AXES, false);
        if (gain > most) most = gain, *best = d;
    }
    return found > 0;
}

static bool best_model(int kind, uint64_t *seed, Draw *best)
{
    int most = -1, found = 0;
    for (int i = 0; i < 400 && found < candidates(); i++) {
        Draw d;
        draw_models(&d, kind, seed);
        if (!legal(&d)) continue;
        found++;
        const int gain = gain_of(&d, 0, MODEL_AXES, false);
        if (gain > most) most = gain, *best = d;
    }
    return found > 0;
}

/* ---- the array ---- */

enum { KINDS = 21, MODELS_MOST = 40, LAYOUTS_MOST = 6 };

typedef struct {
    Draw model, layout[LAYOUTS_MOST];
    int count;
} Models;

static Models array[KINDS][MODELS_MOST];

static bool mode_is(const char *mode) { return env_is("MEGATRAIN_LAYOUTS", mode); }
static bool whole(void) { return mode_is("whole") || mode_is("all"); }
static int step_count(void) { return whole() ? 3 : 2; }
static int model_count(void) { return mode_is("all") ? MODELS_MOST : whole() ? 6 : brief() ? 1 : 4; }

/* Under a sanitizer 20 in all. */
static int layout_count(int kind) { return whole() ? LAYOUTS_MOST : brief() ? 1 + (kind < 20 - KINDS) : 3; }

static void fill(Models *m, int kind, uint64_t *seed)
{
    if (!best_model(kind, seed, &m->model)) return;
    for (; m->count < layout_count(kind); m->count++) {
        if (!best_layout(&m->model, seed, &m->layout[m->count])) return;
        if (m->count == 0) gain_of(&m->model, 0, MODEL_AXES, true);
        gain_of(&m->layout[m->count], MODEL_AXES, AXES, true);
        for (int i = MODEL_AXES; i < AXES; i++)
            taken[first_value[i] + m->layout[m->count].at[i]] |= !m->layout[m->count].moot[i];
    }
}

/* All kinds, whichever is to run: a draw depends on those before. */
static void draw_all(void)
{
    if (first_value[AXES]) return;
    for (int i = 0; i < AXES; i++) first_value[i + 1] = first_value[i] + count_of(i);
    ASSERT(first_value[AXES] <= VALUES_MOST);
    for (int kind = 0; kind < KINDS; kind++) {
        uint64_t seed = 701 + (uint64_t)kind;
        for (int i = 0; i < model_count(); i++) fill(&array[kind][i], kind, &seed);
    }
}

/* ---- the test ---- */

static TinyRun train(const Draw *d, bool logits, int steps)
{
    TinyRun r = run_of(d, steps);
    const clock_t begun = clock();
    r.spec.attention_logits |= logits;
    tiny_train(&r);
    if (mode_is("print")) printf("    %5.2f s ", (double)(clock() - begun) / CLOCKS_PER_SEC);
    return r;
}

/* A model, and its runs on one rank of as many steps as its layouts make. */
typedef struct {
    Draw model;
    TinyRun run[2];
} Alone;

static const TinyRun *alone(Alone *a, int steps)
{
    char text[512];
    TinyRun *r = &a->run[steps == REPLAYED_STEPS];
    if (r->steps) return r;
    *r = train(&a->model, true, steps);
    text_of(&a->model, 0, MODEL_AXES, text, sizeof text);
    if (mode_is("print")) printf("%s\n", text), fflush(stdout);
    CHECK_MSG(!r->err, "%s: %s", text, r->message);
    for (int i = 0; i < r->steps; i++) /* (what is no number would be the same everywhere) */
        CHECK_MSG(r->err || (r->loss[i] > 0 && r->loss[i] < 1.1 * r->loss[0]), "%s: losses %.4f, %.4f", text,
                  r->loss[0], r->loss[i]);
    return r;
}

static void check_layout(const Draw *d, Alone *a)
{
    char model[512], layout[512];
    const TinyRun r = train(d, false, step_count());
    text_of(d, 0, MODEL_AXES, model, sizeof model);
    text_of(d, MODEL_AXES, AXES, layout, sizeof layout);
    if (mode_is("print")) printf("%s: %s\n", model, layout), fflush(stdout);
    CHECK_MSG(!r.err, "%s: %s: %s", model, layout, r.message);
    if (r.err || brief()) return;
    const TinyRun *want = alone(a, r.steps);
    CHECK_MSG(r.hash == want->hash, "%s: %s: other bits", model, layout);
    CHECK_MSG(r.valid_loss == want->valid_loss, "%s: %s: evaluated: %.9g, alone %.9g", model, layout, r.valid_loss,
              want->valid_loss);
    CHECK_MSG(!r.spec.attention_logits || r.logits == want->logits, "%s: %s: other logits", model, layout);
}

/* axis=value of each word, to a colon or the end; the other axes have their first values. A word that is none fails. */
static void read_draw(const char *text, Draw *d)
{
    *d = (Draw){ 0 };
    for (const char *c = text; *c && *c != ':'; c += strspn(c, " ")) {
        const int n = (int)strcspn(c, " :");
        bool found = false;
        for (int i = 0; i < AXES; i++)
            for (int v = 0; v < count_of(i); v++) {
                char word[64];
                const int length = snprintf(word, sizeof word, "%s=%s", axes[i].name, word_of(i, v));
                if (length == n && !strncmp(c, word, (size_t)n)) d->at[i] = (uint8_t)v, found = true;
            }
        CHECK_MSG(found, "no axis has the value of '%.*s'", n, c);
        c += n;
    }
}

/* What a failure printed: MEGATRAIN_DRAW="kind=gpt2 tp=2 dp=2". */
TEST(the_draw_that_is_asked_for)
{
    Draw d;
    if (!getenv("MEGATRAIN_DRAW")) SKIP("MEGATRAIN_DRAW names none");
    read_draw(getenv("MEGATRAIN_DRAW"), &d);
    CHECK_MSG(legal(&d), "%s", err_message());
    Alone a = { .model = d };
    for (int i = MODEL_AXES; i < AXES; i++) a.model.at[i] = 0;
    check_layout(&d, &a);
}

static void run_kind(int kind)
{
    draw_all();
    for (int i = 0; i < model_count(); i++) {
        const Models *m = &array[kind][i];
        Alone a = { .model = m->model };
        CHECK_MSG(m->count == layout_count(kind), "model %d has %d layouts", i, m->count);
        for (int k = 0; k < m->count; k++) check_layout(&m->layout[k], &a);
    }
}

/* A legal model in which an axis has this value and an effect; false: there is none. */
static bool model_with(int axis, int value, Draw *d)
{
    for (int i = 0; i < KINDS * count_of(AXIS_precision); i++) {
        *d = (Draw){ 0 };
        d->at[AXIS_kind] = (uint8_t)(i % KINDS), d->at[AXIS_precision] = (uint8_t)(i / KINDS);
        d->at[axis] = (uint8_t)value;
        if (legal(d) && !d->moot[axis]) return true;
    }
    return false;
}

/* What a value says is done: after one step the first value and the one before have other bits. */
TEST(each_value_is_another_model)
{
    for (int axis = 1; axis < MODEL_AXES; axis++)
        for (int v = 1; v < count_of(axis); v++) {
            Draw d;
            const bool found = model_with(axis, v, &d);
            CHECK_MSG(found, "%s=%s has no model", axes[axis].name, word_of(axis, v));
            if (!found || brief()) continue;
            TinyRun r = run_of(&d, 1);
            tiny_train(&r);
            CHECK_MSG(!r.err, "%s", r.message);
            for (int u = v - 1; u >= 0; u = u ? 0 : -1) {
                d.at[axis] = (uint8_t)u;
                if (!legal(&d)) continue;
                TinyRun other = run_of(&d, 1);
                tiny_train(&other);
                CHECK_MSG(!other.err, "%s", other.message);
                CHECK_MSG(other.hash != r.hash, "%s=%s is %s", axes[axis].name, word_of(axis, v), word_of(axis, u));
            }
        }
}

/* All that update at the end of a step. */
TEST(every_schedule_is_a_value)
{
    for (int i = 0; schedule_name(i); i++) {
        const ScheduleSpec shape = { .name = schedule_name(i), .ranks = 2, .microbatches = 8 };
        Schedule s;
        int v = 0;
        OK(schedule_make(&shape, &s));
        while (v < count_of(AXIS_schedule) && strcmp(word_of(AXIS_schedule, v), shape.name)) v++;
        CHECK_MSG(s.versions != VERSIONS_STEP || v < count_of(AXIS_schedule), "%s", shape.name);
        schedule_free(&s);
    }
}

/* As many as rules of axes.def leave: one that forbids too much is noticed. */
TEST(pairs)
{
    int count = 0, all = 0, draws = 0;
    draw_all();
    for (int i = 0; i < AXES; i++)
        for (int k = 0; k < i; k++) all += count_of(i) * count_of(k);
    for (int i = 0; i < VALUES_MOST * VALUES_MOST; i++) count += tried[i / VALUES_MOST][i % VALUES_MOST];
    for (int i = 0; i < KINDS * MODELS_MOST; i++) draws += array[i / MODELS_MOST][i % MODELS_MOST].count;
    printf("    %d layouts: %d pairs of values of two axes, of %d\n", draws, count, all);
    for (int i = 0; i < first_value[AXES] && !brief(); i++) {
        int beside = 0, axis = AXES - 1;
        while (first_value[axis] > i) axis--;
        for (int k = 0; k < VALUES_MOST; k++) beside += tried[i][k] + tried[k][i];
        CHECK_MSG(beside > 0, "%s=%s is never drawn", axes[axis].name, word_of(axis, i - first_value[axis]));
    }
    CHECK(count > (brief() ? 1000 : 14000));
}

TEST(gpt2) { run_kind(0); }
TEST(llama) { run_kind(1); }
TEST(variants) { run_kind(2); }
TEST(biases) { run_kind(3); }
TEST(latent) { run_kind(4); }
TEST(latent_queries) { run_kind(5); }
TEST(mixtral) { run_kind(6); }
TEST(qwen3) { run_kind(7); }
TEST(deepseek) { run_kind(8); }
TEST(gptoss) { run_kind(9); }
TEST(latent_experts) { run_kind(10); }
TEST(further) { run_kind(11); }
TEST(further_experts) { run_kind(12); }
TEST(delta) { run_kind(13); }
TEST(delta_experts) { run_kind(14); }
TEST(singles) { run_kind(15); }
TEST(singles_experts) { run_kind(16); }
TEST(mamba2) { run_kind(17); }
TEST(mamba2_experts) { run_kind(18); }
TEST(kda) { run_kind(19); }
TEST(kda_experts) { run_kind(20); }

/* An argument with '=' is a draw. */
int main(int argc, char **argv)
{
    static char *draw[] = { "", "the_draw", NULL };
    if (argc < 2 || !strchr(argv[1], '=')) return test_main(argc, argv);
    setenv("MEGATRAIN_DRAW", argv[1], 1);
    return test_main(2, draw);
}
