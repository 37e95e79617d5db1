/*
 * Pipelines of ranks that are threads: what schedules keep in flight and memory has for it, slices, pairs, steps in
 * pieces, checkpoints from one pipeline to another, layouts by hand that do not fit. That each schedule has the bits of
 * one rank, whatever else cuts a model, is test_array's.
 *
 * test_pipeline [case]; MEGATRAIN_PIPELINES=each (make test-grid): checkpoints of two models.
 */
#include <math.h>

#include "ckpt_save.h"
#include "pipeline/simulate.h"
#include "scratch.h"
#include "tiny.h"

typedef struct {
    const char *schedule, *layout;
    int pp, chunks, group;
    int tp, sp, dp, zero, overlap;
    int recompute; /* tiny_recompute */
    int micro;
    GridOrder order;
    int ep, etp;        /* of a mixture; 0 = 1 */
    DispatcherKind dispatcher;
    int pairs; /* pairs: their halves run in turn */
    int cp;             /* 0 = 1 */
    ContextComm context;
    int slices; /* 0 = 1 */
    int hosts; /* of experts, with DISPATCH_NODE; 0 = 1 */
    int zero_group; /* 0: all copies */
} Layout;

enum { STEPS = 2, BUCKET_BYTES = 64 << 10 };

static TrainSpec model(bool llama, int layers)
{
    TrainSpec s = llama ? tiny_llama() : tiny_gpt2();
    s.model.layers = layers;
    s.global_batch = 16;
    s.update.bucket_bytes = BUCKET_BYTES;
    return s;
}

static int ones(int n) { return n ? n : 1; }

static TinyRun run_of(const TrainSpec *spec, const Layout *l)
{
    TinyRun r = { .spec = *spec,
                  .steps = STEPS,
                  .grid = { .tp = ones(l->tp),
                            .dp = ones(l->dp),
                            .pp = ones(l->pp),
                            .sp = l->sp,
                            .order = l->order,
                            .ep = l->ep,
                            .etp = l->etp,
                            .ep_hosts = l->hosts,
                            .cp = l->cp,
                            .cp_heads = l->context == CONTEXT_HIERARCHICAL ? 2 : 0 } };
    r.spec.model.context = layer_pattern_all((int32_t)l->context);
    r.spec.model.moe.dispatcher = l->dispatcher;
    r.spec.overlap_moe = l->pairs;
    r.spec.pipeline = (PipelineSpec){ l->schedule, l->layout, l->chunks, l->group, l->slices };
    r.spec.micro_batch = l->micro ? l->micro : 2;
    r.spec.update.zero = l->zero;
    r.spec.update.overlap_grad = r.spec.update.overlap_param = l->overlap;
    r.spec.model.recompute = tiny_recompute(l->recompute);
    if (l->schedule) OK(schedule_two_way(l->schedule, &r.grid.bidirectional));
    r.grid.zero_group = param_zero_group(r.grid, r.spec.update.zero, l->zero_group);
    return r;
}

static uint64_t hash_of(const TrainSpec *spec, const Layout *l)
{
    TinyRun r = run_of(spec, l);
    tiny_train(&r);
    CHECK_MSG(!r.err, "%s pp %d: %s", l->schedule ? l->schedule : "1f1b", l->pp, r.message);
    return r.hash;
}

/* What the others are compared with. */
static uint64_t alone(const TrainSpec *spec)
{
    return brief() ? 0 : hash_of(spec, &(Layout){ .pp = 1 });
}

static TrainSpec mixture(TinyMixture kind, int layers)
{
    TrainSpec s = tiny_mixture(kind, layers);
    s.global_batch = 16;
    s.update.bucket_bytes = BUCKET_BYTES;
    return s;
}

/* What beside bf16 is fp32 changes bits: test_array compares layouts of the same. */
TEST(wider_sums_are_others)
{
    TrainSpec specs[] = { model(false, 4), tiny_gptoss(4) };
    for (int i = 0; i < 2; i++) {
        TrainSpec s = specs[i];
        s.compute = BF16;
        const uint64_t narrow = alone(&s);
        s.fp32_residual = i == 0, s.fp32_vectors = i == 1;
        CHECK_MSG(alone(&s) != narrow || brief(), "model %d", i);
    }
}

/* With norms behind layers alone no sum of rows is fp32: a norm reads each in 16 bits. */
TEST(sums_of_rows_before_norms)
{
    for (BlockNorms norms = BLOCK_NORMS_PRE; norms <= BLOCK_NORMS_POST; norms++) {
        TrainSpec s = mixture(TINY_DEEPSEEK, 4);
        s.compute = BF16, s.fp32_residual = s.fp32_vectors = true;
        s.model.block_norms = norms;
        const uint64_t narrow = alone(&s);
        s.fp32_row_sums = true;
        CHECK_MSG((alone(&s) != narrow) == (norms != BLOCK_NORMS_POST) || brief(), "norms %d", norms);
    }
}

/* In 16 bits sums of gradients are trees over other ranks; the first loss is of the weights that a run begins with. */
TEST(two_directions_in_16_bits)
{
    static const Layout list[] = { { "chimera", .pp = 2, .dp = 2, .zero = 3 },
                                   { "dualpipe", .pp = 2, .dp = 2, .zero = 2, .overlap = 1, .micro = 1 },
                                   { "chimera", .pp = 2, .dp = 4, .zero = 3, .zero_group = 2, .micro = 1 } };
    for (size_t i = 0; i < (brief() ? 1 : sizeof list / sizeof *list); i++) {
        TrainSpec s = model(true, 8);
        Layout whole = list[i];
        s.exact = false;
        s.compute = BF16;
        whole.zero = whole.zero_group = 0;
        TinyRun cut = run_of(&s, &list[i]), again = run_of(&s, &list[i]), want = run_of(&s, &whole);
        tiny_train(&cut), tiny_train(&again), tiny_train(&want);
        CHECK_MSG(!cut.err && !want.err && !again.err, "%s%s", cut.message, want.message);
        CHECK(cut.hash == again.hash && cut.loss[0] == want.loss[0]);
        for (int k = 1; k < want.steps; k++) CHECK_CLOSE(cut.loss[k], want.loss[k], 1e-2, "layout %zu, step %d", i, k);
    }
}

/* Calls that end late: each half waits for its own. */
TEST(pairs_whose_rows_come_late)
{
    const TrainSpec s = mixture(TINY_QWEN3, 4);
    const Layout alone = { .pp = 1 }, pairs = { "dualpipev", .pp = 2, .dp = 2, .ep = 2, .pairs = 1 };
    TinyRun one = run_of(&s, &alone), late = run_of(&s, &pairs);
    one.steps = late.steps = 2;
    late.delay_ms = 3;
    tiny_train(&one);
    tiny_train(&late);
    CHECK_MSG(!late.err && late.hash == one.hash, "%s", late.message);
}

static Err one_after_the_other_on_rank_1(Trainer *t, void *user)
{
    (void)user;
    if (t->world->rank == 1) pair_close(&t->executor.pair);
    return ERR_OK;
}

/* The order of calls is part of what ranks agree on. */
TEST(pairs_in_another_order_are_noticed)
{
    const TrainSpec s = mixture(TINY_MIXTRAL, 4);
    const Layout pairs = { "dualpipev", .pp = 2, .dp = 2, .ep = 2, .pairs = 1 };
    TinyRun r = run_of(&s, &pairs);
    r.before = one_after_the_other_on_rank_1;
    tiny_train(&r);
    CHECK_MSG(r.err && strstr(r.message, "tp-ep: ranks issued different calls: member 0 "), "%s", r.message);
}

/* Stages count the batch so far, micro-batch by micro-batch: schedules with another order are refused, as ranks with
 * shares of the batch are. */
TEST(experts_of_global_balance)
{
    static const struct {
        Layout layout;
        const char *why;
    } refused[] = {
        { { "1f1b", .pp = 2, .dp = 2, .ep = 1 },
          "data-parallel ranks compute their shares of it at the same time" },
        { { "chimera", .pp = 2 }, "schedule 'chimera' does not compute them so" },
        { { "pipedream", .pp = 2 }, "global_aux counts the batch of a whole step" },
    };
    TrainSpec s = mixture(TINY_DEEPSEEK, 4);
    s.model.moe.balance.global = true;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        TinyRun r = run_of(&s, &refused[i].layout);
        if (!strcmp(refused[i].layout.schedule, "pipedream"))
            r.spec.model.moe.balance.bias_rate = r.spec.update.clip = 0;
        tiny_train(&r);
        CHECK_MSG(r.err == ERR_CONFIG && strstr(r.message, refused[i].why), "%zu: %s", i, r.message);
    }
}

/* Experts without room for the rows that come: steps are done again in pieces, with the bits of one rank. */
TEST(experts_in_pieces)
{
    static const Layout list[] = {
        { "zb-h1", .pp = 2, .dp = 2, .zero = 3, .overlap = 1, .ep = 2 },
        { "zb-h1", .pp = 2, .tp = 2, .sp = 1, .micro = 4, .ep = 2, .recompute = RECOMPUTE_SELECTIVE },
        { "zb-h1", .pp = 2, .dp = 2, .ep = 2, .recompute = RECOMPUTE_FULL },
        { "chimera", .pp = 2, .dp = 2, .zero = 1, .ep = 2, .dispatcher = DISPATCH_ALLGATHER,
          .recompute = RECOMPUTE_FULL },
        { "1f1b", .pp = 2, .cp = 2, .dp = 2, .zero = 1, .ep = 4 },
        { "dualpipev", .pp = 2, .dp = 2, .ep = 2, .pairs = 1 },
        { "dualpipev", .pp = 2, .dp = 2, .zero = 3, .overlap = 1, .ep = 2, .pairs = 1 },
        { "dualpipe", .pp = 2, .dp = 2, .zero = 3, .ep = 2, .pairs = 1 },
        { "dualpipev", .pp = 2, .dp = 4, .ep = 4, .dispatcher = DISPATCH_NODE, .hosts = 2, .pairs = 1, .micro = 1 },
        { "dualpipe", .pp = 2, .dp = 2, .ep = 2, .dispatcher = DISPATCH_ALLGATHER, .pairs = 1,
          .recompute = RECOMPUTE_FULL },
    };
    TrainSpec s = mixture(TINY_MIXTRAL, 4);
    const uint64_t want = alone(&s);
    s.model.moe.capacity = (Capacity){ .slack = 1, .redo = true };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        if (brief() && i % 5) continue;
        TinyRun r = run_of(&s, &list[i]);
        tiny_train(&r);
        CHECK_MSG(!r.err && (r.hash == want || brief()), "%s number %zu: %s", list[i].schedule, i, r.message);
        CHECK_MSG(r.retried_in_pieces > 0, "%s number %zu", list[i].schedule, i);
    }
}

/* With 8 leaves a sequence each slice has several. */
static TrainSpec of_slices(TrainSpec s, int layers)
{
    s.model.layers = layers;
    s.global_batch = 16;
    s.update.bucket_bytes = BUCKET_BYTES;
    s.seq_blocks = 8;
    s.attn_block = 8;
    return s;
}

/* Where sums need no order what waits is added up, in fp32: losses are near those of whole sequences. */
TEST(slices_in_any_order)
{
    static const Layout list[] = { { .pp = 1 },
                                   { "seq1f1b", .pp = 2, .slices = 4 },
                                   { "seq1f1b", .pp = 2, .slices = 4, .cp = 2 },
                                   { "seq1f1b", .pp = 1, .slices = 4, .cp = 2, .context = CONTEXT_RING },
                                   { "seq1f1b", .pp = 1, .slices = 2, .cp = 4, .context = CONTEXT_A2A } };
    enum { LAYOUTS = sizeof list / sizeof *list };
    for (int narrow = brief(); narrow < 2; narrow++) {
        TrainSpec s = of_slices(tiny_llama(), 2);
        TinyRun r[LAYOUTS];
        s.exact = false;
        s.compute = narrow ? BF16 : F32;
        for (int i = 0; i < LAYOUTS; i++) {
            r[i] = run_of(&s, &list[i]);
            tiny_train(&r[i]);
            CHECK_MSG(!r[i].err, "%s", r[i].message);
            /* (in 16 bits what rounding changes grows from step to step) */
            for (int k = 0; k < r[0].steps && (!narrow || k < STEPS); k++)
                CHECK_CLOSE(r[i].loss[k], r[0].loss[k], narrow ? 5e-3 : 1e-5, "layout %d, step %d", i, k);
        }
    }
}

static Err evaluate(Trainer *t, void *user)
{
    double loss;
    int64_t counted;
    TRY(trainer_eval(t, tiny_source(t), 100, 21, &loss, &counted)); /* (the last micro-batch in part) */
    if (t->world->rank == 0) *(double *)user = loss;
    return ERR_OK;
}

/* An evaluation, whose slices have no backwards, gives the loss of whole sequences. */
TEST(slices_evaluated)
{
    static const Layout list[] = { { .pp = 1 },
                                   { "seq1f1b", .pp = 2, .slices = 4, .recompute = RECOMPUTE_FULL } };
    const TrainSpec spec = of_slices(tiny_llama(), 2);
    double loss[2] = { 0 };
    for (int i = 0; i < 2; i++) {
        TinyRun r = run_of(&spec, &list[i]);
        r.steps = 1;
        r.after = evaluate;
        r.user = &loss[i];
        tiny_train(&r);
        CHECK_MSG(!r.err, "%s", r.message);
    }
    CHECK(loss[0] > 0 && loss[0] == loss[1]);
}

/* ---- checkpoints ---- */

/* One after the other: each run goes on from the checkpoint of the one before. */
typedef struct {
    char folder[64], path[128]; /* where this one saves; what it loads, "" for the first */
} Hop;

static Err hop_load(Trainer *t, void *user)
{
    const Hop *h = user;
    const CkptLoad load = { h->path, &t->params, t->world, &t->device.stream, false };
    SetupArena setup;
    CkptMeta meta;
    bool damaged;
    if (!*h->path) return ERR_OK;
    setup_init(&setup);
    Err err = ckpt_load(&load, &setup, &meta, &damaged);
    if (!err) {
        t->progress.step = meta.step;
        t->progress.samples = meta.samples;
        t->progress.updates = ckpt_counter(&meta, "updates", -1);
    }
    setup_release(&setup);
    return err;
}

static Err hop_save(Trainer *t, void *user)
{
    const Hop *h = user;
    const CkptOptions o = { h->folder, &t->params, t->world, &t->device.stream, .meta_bytes = 64 };
    const CkptMeta meta = { .step = t->progress.step,
                            .samples = t->progress.samples,
                            .reproducible = "layout",
                            .program = "",
                            .config = "",
                            .data = "",
                            .counters = { { "updates", t->progress.updates } },
                            .counter_count = 1 };
    SetupArena setup;
    Ckpt c = { 0 };
    setup_init(&setup);
    Err err = ckpt_open(&c, o, &setup);
    if (!err) err = ckpt_save(&c, &meta);
    ckpt_close(&c);
    setup_release(&setup);
    return err;
}

/* Two steps on. */
static uint64_t hop(const TrainSpec *spec, const Layout *l, Hop *h)
{
    TinyRun r = run_of(spec, l);
    r.steps = 2;
    r.before = hop_load, r.after = hop_save, r.user = h;
    tiny_train(&r);
    CHECK_MSG(!r.err, "%s pp %d: %s", l->schedule, l->pp, r.message);
    return r.hash;
}

/* What a run saved as one pipeline is gone on with as another: the losses and the state of one rank. */
TEST(checkpoints_between_pipelines)
{
    static const Layout alone = { "1f1b", .pp = 1 };
    static const Layout ring[] = {
        { "1f1b", .pp = 4 },
        { "chimera", .pp = 2, .zero = 1 },
        { "zb-v", .pp = 2, .dp = 2, .zero = 3, .order = ORDER_PP_DP },
        { "interleaved", .pp = 2, .chunks = 2, .tp = 2, .sp = 1 },
        { "dualpipe", .pp = 2, .dp = 2 },
        { "1f1b", "Ett|t|tttttL", .pp = 3 },
    };
    enum { HOPS = sizeof ring / sizeof *ring };
    for (int llama = 0; llama < (getenv("MEGATRAIN_PIPELINES") ? 2 : 1); llama++) {
        const TrainSpec s = model(llama, 8);
        Hop one = { 0 }, many = { 0 };
        for (int i = 0; i < (brief() ? 2 : HOPS); i++) {
            snprintf(one.folder, sizeof one.folder, "%s", in_dir(llama ? "llama-one" : "one"));
            snprintf(many.folder, sizeof many.folder, "%s", in_dir(llama ? "llama-many" : "many"));
            CHECK_MSG(hop(&s, &ring[i], &many) == hop(&s, &alone, &one), "hop %d, %s pp %d", i,
                      ring[i].schedule, ring[i].pp);
            snprintf(one.path, sizeof one.path, "%s/checkpoints/step-%08d", one.folder, 2 * (i + 1));
            snprintf(many.path, sizeof many.path, "%s/checkpoints/step-%08d", many.folder, 2 * (i + 1));
        }
    }
}

/* ---- moments in 16 bits ---- */

/* A run on one rank that goes on from a checkpoint, and the moments it is left with, as floats. */
typedef struct {
    Hop hop; /* (first: hop_load takes it) */
    float *moments;
    int64_t count;
} MomentsOf;

static Err keep_moments(Trainer *t, void *user)
{
    MomentsOf *k = user;
    const Tensor both[2] = { t->stores->m, t->stores->v };
    k->count = 2 * tensor_count(*both);
    k->moments = malloc((size_t)k->count * sizeof *k->moments);
    for (int64_t i = 0; i < k->count; i++) {
        const Tensor from = both[i >= k->count / 2];
        const int64_t at = i % (k->count / 2);
        k->moments[i] = from.dtype == BF16 ? bf16_to_float(((uint16_t *)from.data)[at]) : ((float *)from.data)[at];
    }
    return k->hop.folder[0] ? hop_save(t, &k->hop) : ERR_OK;
}

static MomentsOf moments_of(TrainSpec s, DType moments, int steps, const char *folder, const char *from)
{
    MomentsOf k = { 0 };
    TinyRun r = run_of(&s, &(Layout){ "1f1b", .pp = 1 });
    snprintf(k.hop.folder, sizeof k.hop.folder, "%s", folder);
    snprintf(k.hop.path, sizeof k.hop.path, "%s", from);
    r.spec.update.moments = moments;
    r.steps = steps;
    r.before = hop_load, r.after = keep_moments, r.user = &k;
    tiny_train(&r);
    CHECK_MSG(!r.err, "%s", r.message);
    return k;
}

/* A checkpoint has moments as its run had them; one of fp32 is rounded where it is loaded as bf16, and one of bf16 is
 * what it is in fp32. Other layouts go on from it to the same bits. */
TEST(narrow_moments_in_checkpoints)
{
    static const Layout two[] = { { "1f1b", .pp = 1 }, { "zb-v", .pp = 2, .dp = 2, .zero = 1 } };
    const char *step2 = "checkpoints/step-00000002";
    TrainSpec s = model(false, 4);
    char wide[128], narrow[128];
    snprintf(wide, sizeof wide, "%s/%s", in_dir("moments-fp32"), step2);
    snprintf(narrow, sizeof narrow, "%s/%s", in_dir("moments-bf16"), step2);
    MomentsOf was[2] = { moments_of(s, F32, 2, in_dir("moments-fp32"), ""),
                         moments_of(s, BF16, 2, in_dir("moments-bf16"), "") };
    MomentsOf rounded = moments_of(s, BF16, 0, "", wide), widened = moments_of(s, F32, 0, "", narrow);
    MomentsOf same = moments_of(s, BF16, 0, "", narrow);
    int64_t changed = 0;
    for (int64_t i = 0; i < was[0].count; i++) {
        const float to = bf16_to_float(bf16_from_float(was[0].moments[i]));
        changed += to < was[0].moments[i] || to > was[0].moments[i];
        CHECK_MSG(rounded.moments[i] == to, "moment %lld", (long long)i);
        CHECK_MSG(widened.moments[i] == was[1].moments[i] && same.moments[i] == was[1].moments[i], "moment %lld",
                  (long long)i);
    }
    CHECK(changed > was[0].count / 4);
    s.update.moments = BF16;
    uint64_t hash[2][2];
    for (int k = 0; k < 4; k++) {
        Hop h = { 0 };
        snprintf(h.folder, sizeof h.folder, "%s", in_dir("moments-on"));
        memcpy(h.path, k / 2 ? narrow : wide, sizeof h.path);
        hash[k / 2][k % 2] = hop(&s, &two[k % 2], &h);
    }
    CHECK(hash[0][0] == hash[0][1] && hash[1][0] == hash[1][1] && hash[0][0] != hash[1][0]);
    free(was[0].moments), free(was[1].moments), free(rounded.moments), free(widened.moments), free(same.moments);
}

/* Refused by the check that needs no ranks and by the plan of one, in the same words. */
static void refuse(const Layout *l, const char *why, const char *hint)
{
    const TrainSpec s = model(false, 4);
    MemoryPlan plan;
    const TinyRun r = run_of(&s, l);
    FAILS(trainer_check(&r.spec, r.grid), ERR_CONFIG, why);
    CHECK_MSG(strstr(err_hint_text(), hint), "%s: '%s'", why, err_hint_text());
    FAILS(trainer_plan(&r.spec, r.grid, 0, &plan), ERR_CONFIG, why);
    CHECK_MSG(strstr(err_hint_text(), hint), "%s: '%s'", why, err_hint_text());
}

TEST(what_does_not_fit)
{
    static const char parts[] =
        "of each stage E (embedding), t (a block), m (a module of multi-token prediction)";
    static const struct {
        Layout layout;
        const char *why, *hint;
    } cases[] = {
        { { "1f1b", .pp = 8 }, "4 blocks cannot be shared by 8 pipeline stages", "of at most 4" },
        { { "1f1b", .pp = 2, .chunks = 2 }, "has 1 chunk a rank, not 2", "" },
        { { "chimera", .pp = 3 }, "an even number of ranks", "4 ranks, 8 micro-batches" },
        { { "zb-h1+split", .pp = 2 }, "backwards are split already", "" },
        { { "chimera-bhalf", .pp = 2, .micro = 1 }, "cuts a micro-batch into 2", "take train.micro_batch=2" },
        { { "dualpipev", .pp = 2, .micro = 8 },
          "at least twice as many micro-batches",
          "2 ranks, 4 micro-batches" },
        { { "interleaved", .pp = 2, .group = 1 }, "needs groups of at least as many", "groups of 2" },
        { { "zb-v", .pp = 2, .group = 2 * 2 }, "'zb-v' has no groups", "take parallel.group=0" },
        { { "1f1b", .pp = 2, .slices = 2 }, "passes whole sequences on, not 2 slices", "schedule seq1f1b" },
        { { "seq1f1b", .pp = 2, .chunks = 2, .slices = 2 }, "has 1 chunk a rank, not 2", "" },
        { { "interleaved", .pp = 1, .chunks = 65 }, "would hold 65 stages; at most 64", "" },
        { { "1f1b", "Et|tL", .pp = 2 }, "has 2 blocks, the model 4", "a 't' for each" },
        { { "1f1b", "Ett|ttL", .pp = 1, .chunks = 1 }, "has 2 stages, the pipeline 1", "parallel.pp x" },
        { { "1f1b", "Et|t|tt|L", .pp = 3 },
          "no multiple of the 3 pipeline ranks",
          "take parallel.pp=2, or parallel.pp=4" },
        { { "1f1b", "Ett|ttL", .pp = 3 },
          "no multiple of the 3 pipeline ranks",
          "take parallel.pp=2; an empty stage" },
        { { "zb-v", "Ett|ttL", .pp = 2 },
          "2 stages for 2 ranks: schedule 'zb-v' has 2 chunks a rank, not 1",
          "" },
        { { "1f1b", "tE|tttL", .pp = 2 }, "'E' must come first, at character 1", parts },
        { { "1f1b", "Ett|ttLt", .pp = 2 }, "'L' must come last", parts },
        { { "1f1b", "Ett|tmtL", .pp = 2 }, "behind 'm' come others and 'L' alone", parts },
        { { "1f1b", "Ett|ttm||L", .pp = 4 },
          "'L' in the stage of the 'm' or in the next one, at character 10",
          parts },
        { { "1f1b", "Ett|ttm|mL", .pp = 3 }, "each 'm' in the same stage, at character 9", parts },
        { { "1f1b", "Ett|ttmL", .pp = 2 },
          "has 1 modules of multi-token prediction, the model 0",
          "an 'm' for each of model.mtp_layers" },
        { { "1f1b", "E(tt|tt|L", .pp = 2 }, "')' is missing", parts },
        { { "1f1b", "E()*9tt|ttL", .pp = 2 }, "a group of nothing", parts },
        { { "1f1b", "Ett|tt", .pp = 2 }, "one 'E' and one 'L'", parts },
        { { "1f1b", "Etx", .pp = 2 }, "not a part of a layout", parts },
        { { "1f1b", "E(((((((((t)))))))))L", .pp = 1 }, "groups too deep", parts },
        { { "1f1b", "E(t*60000)*60000L", .pp = 1 }, "too many blocks", parts },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        refuse(&cases[i].layout, cases[i].why, cases[i].hint);
}

/* Where all stages of a rank keep equally much, saves are the simulator's peak of units times that. */
static void check_saves(const TrainSpec *s, const Schedule *made, int rank)
{
    const TinyRun r = run_of(s, &(Layout){ .schedule = made->name,
                                           .pp = made->ranks,
                                           .micro = 1,
                                           .recompute = (int)model_recompute(&s->model, 0) });
    MemoryPlan p;
    OK(trainer_plan(&r.spec, r.grid, rank, &p));
    const int64_t I = p.stages[0].save[REGION_I], W = p.stages[0].save[REGION_W];
    bool alike = true;
    for (int i = 1; i < p.stage_count; i++)
        alike &= !memcmp(p.stages[i].save, p.stages[0].save, sizeof p.stages[0].save);
    const int to_w = simulate_peak(made, rank, false), to_i = simulate_peak(made, rank, true);
    if (alike)
        CHECK_MSG(p.save == to_w * W + to_i * I, "%s rank %d: %lld, %d of %lld and %d of %lld", made->name,
                  rank, (long long)p.save, to_w, (long long)W, to_i, (long long)I);
}

/* Recomputation changes the bytes that a unit keeps, not how many units are kept. */
TEST(saves_are_the_simulators_peaks)
{
    for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_FULL; recompute++)
        for (int i = 0; schedule_name(i); i++) {
            TrainSpec s = model(true, 8);
            const ScheduleSpec shape = { .name = schedule_name(i), .ranks = 4, .microbatches = 16 };
            Schedule made = { 0 };
            bool two_way = false;
            OK(schedule_two_way(shape.name, &two_way));
            s.model.recompute = layer_pattern_all(recompute);
            if (schedule_make(&shape, &made) == ERR_OK && made.versions == VERSIONS_STEP &&
                made.stages <= 8 && made.unit_div == 1)
                for (int rank = 0; rank < 4; rank++) check_saves(&s, &made, rank);
            schedule_free(&made);
        }
}

/* 1F1B holds p - r micro-batches on rank r. */
TEST(one_forward_one_backward_in_flight)
{
    const TrainSpec s = model(true, 8);
    const TinyRun r = run_of(&s, &(Layout){ "1f1b", .pp = 4, .micro = 1 });
    for (int rank = 0; rank < 4; rank++) {
        MemoryPlan p;
        OK(trainer_plan(&r.spec, r.grid, rank, &p));
        CHECK(p.stages[0].in_flight == 4 - rank && p.stages[0].stage == rank && p.stages[0].layers == 2);
        CHECK(p.save == (4 - rank) * (p.stages[0].save[REGION_I] + p.stages[0].save[REGION_W]));
    }
}

/* Seq1F1B with k slices holds p - r + k - 1 of them: with 4, on the first of 4 ranks 7/4 of a micro-batch instead of 4,
 * to the byte where rows fill whole blocks of memory. What waits for earlier slices' keys is state. */
TEST(slices_in_flight)
{
    TrainSpec s = of_slices(tiny_gpt2(), 8);
    s.global_batch = 64;
    const TinyRun whole = run_of(&s, &(Layout){ "1f1b", .pp = 4, .micro = 8 });
    const TinyRun sliced = run_of(&s, &(Layout){ "seq1f1b", .pp = 4, .slices = 4, .micro = 8 });
    for (int rank = 0; rank < 4; rank++) {
        MemoryPlan w, p;
        OK(trainer_plan(&whole.spec, whole.grid, rank, &w));
        OK(trainer_plan(&sliced.spec, sliced.grid, rank, &p));
        CHECK(p.stages[0].in_flight == 7 - rank && w.stages[0].in_flight == 4 - rank);
        for (int r = 0; r < REGION_COUNT; r++) CHECK(4 * p.stages[0].save[r] == w.stages[0].save[r]);
        CHECK(p.save == (7 - rank) * (p.stages[0].save[REGION_I] + p.stages[0].save[REGION_W]));
        CHECK(p.scratch < w.scratch);
        if (rank == 0)
            printf("    saves %lld -> %lld, state %lld -> %lld, scratch %lld -> %lld\n", (long long)w.save,
                   (long long)p.save, (long long)w.state, (long long)p.state, (long long)w.scratch,
                   (long long)p.scratch);
    }
}

/* Ranks that share slices keep a part of each: half of what one keeps, to the byte; of what waits as well. */
TEST(slices_of_ranks_kept)
{
    static const ContextComm ways[] = { CONTEXT_ALLGATHER, CONTEXT_A2A, CONTEXT_RING };
    TrainSpec s = of_slices(tiny_gpt2(), 8);
    s.seq_blocks = 16;
    const TinyRun alone = run_of(&s, &(Layout){ "seq1f1b", .pp = 4, .slices = 4, .micro = 8 });
    const TinyRun wide = run_of(&s, &(Layout){ "seq1f1b", .pp = 4, .slices = 4, .micro = 16 });
    for (int way = 0; way < (int)(sizeof ways / sizeof *ways); way++) {
        const TinyRun two = run_of(&s, &(Layout){ "seq1f1b", .pp = 4, .slices = 4, .micro = 16, .cp = 2,
                                                  .context = ways[way] });
        MemoryPlan a, w, p;
        OK(trainer_plan(&alone.spec, alone.grid, 0, &a));
        OK(trainer_plan(&wide.spec, wide.grid, 0, &w));
        OK(trainer_plan(&two.spec, two.grid, 0, &p));
        for (int r = 0; r < REGION_COUNT; r++) CHECK(2 * p.stages[0].save[r] == w.stages[0].save[r]);
        /* (16 samples' numbers beside 8's) */
        CHECK_MSG(p.state - a.state < (w.state - a.state) / 50, "%lld, of half as much %lld, of all %lld",
                  (long long)p.state, (long long)a.state, (long long)w.state);
        CHECK(p.scratch < w.scratch);
    }
}

TEST_MAIN
