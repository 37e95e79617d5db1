/*
 * What layouts mean: room for experts' rows, capacities, loads of the batch so far, 16-bit runs that are not exact.
 * test_array shows that each layout has the bits of one rank. A short list of layouts is for test/layout_controls.sh.
 * It breaks one rule of docs/determinism.md at a time and expects just the layouts that use the rule to differ.
 *
 * test_layouts [case]
 * MEGATRAIN_LAYOUTS=short prints the hash of each layout of the short list and leaves the verdict to the reader; else
 * one in four is tried. =brief, for sanitizers, tries fewer for two steps: their memory is looked at, not their bits.
 */
#include <math.h>

#include "engine/expert_load.h"
#include "test.h"
#include "tiny.h"

typedef struct {
    int dp, tp, sp, micro, threads;
    Isa isa;
    int zero, overlap;
    int ep, etp; /* of a mixture; 0 = 1 */
    DispatcherKind dispatcher;
    int cp; /* 0 = 1 */
    ContextComm context;
    int cp_heads; /* with CONTEXT_HIERARCHICAL */
    ContextCut cut;
    int bands; /* 0 = 1 */
    int hosts; /* that ep is spread over, with DISPATCH_NODE; 0 = 1 */
    int group; /* of ZeRO; 0: all copies */
} Layout;

enum { STEPS = 10, SHORT_STEPS = 3, BUCKET_BYTES = 64 << 10 /* some ten buckets */ };

/* What the others are compared with. */
static const Layout reference = { 1, 1, 0, 4, 2, ISA_AUTO };

/* At least two layouts with and without each property that a rule of docs/determinism.md is about. */
static const Layout few[] = {
    { 1, 1, 0, 8, 1, ISA_AUTO },
    { 1, 1, 0, 1, 2, ISA_AUTO },
    { 1, 1, 0, 4, 3, ISA_AVX2 },
    { 2, 1, 0, 4, 1, ISA_AUTO, 0, 1 },
    { 4, 1, 0, 2, 1, ISA_AUTO, 1, 1 },
    { 1, 2, 0, 4, 1, ISA_AUTO },
    { 1, 2, 1, 4, 1, ISA_AUTO },
    { 1, 4, 0, 8, 1, ISA_AUTO },
    { 2, 2, 1, 2, 1, ISA_AVX2, 1, 0 },
    { 1, 8, 1, 4, 1, ISA_AUTO },
    { 1, 4, 1, 4, 1, ISA_AUTO, .bands = 2 },
    { 1, 4, 0, 4, 1, ISA_AUTO, .bands = 4 },
    { 1, 8, 1, 4, 1, ISA_AUTO, .bands = 4 },
};

static const Layout few_mixtures[] = {
    { 1, 1, 0, 8, 1, ISA_AUTO },
    { 1, 1, 0, 1, 2, ISA_AUTO },
    { 1, 1, 0, 4, 3, ISA_AVX2 },
    { 1, 2, 1, 4, 1, ISA_AUTO, 0, 0, 1, 2 },
    { 4, 1, 0, 2, 1, ISA_AUTO, 1, 1, 2, 2 },
    { 2, 2, 1, 2, 1, ISA_AUTO, 1, 0, 1, 4 },
    { 2, 1, 0, 2, 2, ISA_AUTO, 1, 0, 2, 1, 1 },
    { 2, 2, 1, 2, 1, ISA_AUTO, 1, 0, 2, 2, 1 },
    { 2, 1, 0, 4, 1, ISA_AUTO, 0, 1, 1 },
    { 2, 1, 0, 2, 2, ISA_AUTO, 1, 0, 2 },
    { 4, 1, 0, 2, 1, ISA_AUTO, 1, 1, 2 },
    { 4, 1, 0, 1, 1, ISA_AUTO, 0, 0, 4 },
    { 1, 2, 1, 4, 1, ISA_AUTO, 0, 0, 2 },
    { 2, 2, 1, 2, 1, ISA_AVX2, 1, 0, 2 },
};

/* What this processor runs for a wish. */
static Isa isa_of(Layout l) { return l.isa != ISA_AUTO && isa_supported(l.isa) ? l.isa : isa_best(); }

static bool listed(void) { return env_is("MEGATRAIN_LAYOUTS", "short"); }

static TinyRun run_of(TrainSpec spec, Layout l, int steps)
{
    const Grid grid = { .tp = l.tp, .cp = l.cp, .dp = l.dp, .sp = l.sp && l.tp > 1, .ep = l.ep, .etp = l.etp,
                        .cp_heads = l.cp_heads, .ep_hosts = l.hosts, .zero_group = l.group };
    TinyRun r = { .spec = spec, .grid = grid, .steps = steps };
    r.spec.micro_batch = l.micro;
    r.spec.cut = l.cut;
    r.spec.model.context = layer_pattern_all((int32_t)l.context);
    r.spec.device.threads = l.threads;
    r.spec.device.isa = isa_of(l);
    r.spec.update.zero = l.zero;
    r.spec.update.overlap_grad = r.spec.update.overlap_param = l.overlap;
    r.spec.update.bucket_bytes = BUCKET_BYTES;
    r.spec.model.moe.dispatcher = l.dispatcher;
    r.spec.overlap_tp = l.bands;
    return r;
}

static int steps_of(int steps) { return brief() ? 2 : steps; }

static uint64_t hash_of(TrainSpec spec, Layout l, int steps, double *first, double *last)
{
    TinyRun r = run_of(spec, l, steps_of(steps));
    tiny_train(&r);
    CHECK_MSG(r.err == ERR_OK, "%s", r.message);
    *first = r.loss[0];
    *last = r.loss[r.steps - 1];
    return r.hash;
}

static uint64_t reference_of(TrainSpec spec, int steps)
{
    double first, last;
    return brief() ? 0 : hash_of(spec, reference, steps, &first, &last);
}

static void print_layout(Layout l, uint64_t hash)
{
    static const char *const ways[] = { [CONTEXT_ALLGATHER] = "gather", [CONTEXT_RING] = "ring", [CONTEXT_A2A] = "a2a",
                                        [CONTEXT_HIERARCHICAL] = "both" };
    printf("    dp%d tp%d%s cp%d%s ep%d etp%d %s%s zero%d/%d overlap%d micro%d threads%d %-6s %016llx%s bands%d\n",
           l.dp, l.tp, l.sp && l.tp > 1 ? "+sp" : "   ", l.cp ? l.cp : 1, ways[l.context], l.ep ? l.ep : 1,
           l.etp ? l.etp : 1, dispatcher_text(l.dispatcher),
           l.hosts == 4 ? "4"
           : l.hosts    ? "2"
                        : "",
           l.zero, l.group, l.overlap, l.micro, l.threads, isa_name(isa_of(l)), (unsigned long long)hash,
           l.cut ? " in order" : "", l.bands > 1 ? l.bands : 1);
    fflush(stdout);
}

/* cp x tp x dp of 2 to 8 ranks, with every way to exchange keys (the models' key heads have 8 parts); sp, ZeRO,
 * overlap, micro-batch, threads and how sequences are cut cycle through. */
static int context_layouts(Layout *out)
{
    int n = 0;
    for (int cp = 2; cp <= 8; cp *= 2)
        for (int tp = 1; cp * tp <= 8; tp *= 2)
            for (int dp = 1; cp * tp * dp <= 8; dp *= 2)
                for (ContextComm way = CONTEXT_ALLGATHER; way <= CONTEXT_HIERARCHICAL; way++) {
                    const int turn = n + way;
                    if (way == CONTEXT_HIERARCHICAL && cp == 2) continue;
                    Layout l = { dp, tp, turn % 3 > 0, 1 << turn % 3, 1 + turn % 2, ISA_AUTO };
                    l.zero = turn % 4, l.overlap = turn % 5 > 1, l.cp = cp, l.context = way;
                    l.cut = (n / 2 + n / 7) % 2 ? CONTEXT_CONTIGUOUS : CONTEXT_ZIGZAG;
                    if (way == CONTEXT_HIERARCHICAL) l.cp_heads = turn % 2 ? 2 : cp / 2;
                    if (l.zero && dp > 1 && turn % 3 == 0) l.group = cp * dp / 2;
                    while (l.micro * dp > 8) l.micro /= 2;
                    out[n++] = l;
                }
    return n;
}

/* All of a list, or one in `every`, other ones for each list of a program. */
static void check_list(TrainSpec spec, const Layout *list, int count, int every)
{
    static int turn;
    double first, last;
    const uint64_t want = reference_of(spec, SHORT_STEPS);
    if (listed()) print_layout(reference, want);
    for (int i = listed() ? 0 : turn++ % every; i < count; i += listed() ? 1 : every) {
        if (list[i].micro % (spec.model.moe.experts ? spec.model.moe.balance.unit : 1)) continue;
        const uint64_t hash = hash_of(spec, list[i], SHORT_STEPS, &first, &last);
        if (listed()) print_layout(list[i], hash);
        CHECK_MSG(listed() || brief() || hash == want, "layout %d", i);
    }
}

static void check_few(TrainSpec spec)
{
    const bool mixture = spec.model.moe.experts > 0;
    check_list(spec, mixture ? few_mixtures : few,
               (int)(mixture ? sizeof few_mixtures / sizeof *few_mixtures : sizeof few / sizeof *few), brief() ? 6 : 4);
}

TEST(gpt2_layouts) { check_few(tiny_gpt2()); }
TEST(llama_layouts) { check_few(tiny_llama()); }
TEST(latent_layouts) { check_few(tiny_latent(tiny_llama(), 0)); }
TEST(mixtral_layouts) { check_few(tiny_mixture(TINY_MIXTRAL, 2)); }

/* One layout in five of those that cut sequences, over 2, 4 and 8 ranks. The blocks are short, so that 16 parts have
 * whole ones. */
static void check_context(TrainSpec spec)
{
    Layout all[64], some[64];
    const int count = context_layouts(all);
    int n = 0;
    for (int i = 0; i < count; i += 5) some[n++] = all[i];
    spec.seq_blocks = 16;
    spec.attn_block = 4;
    check_list(spec, some, n, 4);
}

TEST(context_learned_positions) { check_context(tiny_gpt2()); }
TEST(context_rotary_positions) { check_context(tiny_llama()); }

/* Pairs of a query and a key that it sees, of a rank: zigzag all have as many. */
TEST(context_work_is_even)
{
    enum { SEQ = 256 };
    for (int cp = 2; cp <= 16; cp *= 2)
        for (int rank = 0; rank < cp; rank++) {
            const Spans span = context_span(CONTEXT_ZIGZAG, SEQ, cp, rank);
            int64_t pairs = 0;
            for (int64_t row = 0; row < SEQ / cp; row++) pairs += spans_position(span, row) + 1;
            CHECK_MSG(pairs * cp == SEQ * (SEQ + 1) / 2, "cp %d, rank %d: %lld", cp, rank, (long long)pairs);
        }
}

/* Which choices an expert drops depends on all rows of a balance unit, wherever they lie. */
static TrainSpec of_capacity(TinyMixture kind, double factor, bool by_position, int64_t unit)
{
    TrainSpec s = tiny_mixture(kind, 2);
    s.model.moe.capacity = (Capacity){ factor, by_position };
    s.model.moe.balance.unit = unit;
    return s;
}

TEST(capacity_layouts) { check_few(of_capacity(TINY_MIXTRAL, 1, false, 1)); }

/* What counts the batch so far is another balance. */
TEST(global_balance_matters)
{
    TrainSpec s = tiny_mixture(TINY_DEEPSEEK, 2);
    const uint64_t apart = reference_of(s, SHORT_STEPS);
    s.model.moe.balance.global = true;
    CHECK(reference_of(s, SHORT_STEPS) != apart || brief());
}

static Err same_sample(void *user, int64_t first, int64_t count, int32_t *out)
{
    for (int64_t i = 0; i < count; i++) TRY(tiny_tokens(user, first - first % 4, 1, out + i * (TINY_SEQ + 1)));
    return ERR_OK;
}

/* The loads so far end with those of the step, by another count, and rise by whole units. */
static Err loads_add_up(Trainer *t, void *user)
{
    const Tensor all = t->executor.stages[0].loads_so_far;
    const MixtureSpec *moe = &t->spec.model.moe;
    const int64_t units = all.dim[1], E = all.dim[2];
    (void)user;
    for (int layer = 0; layer < t->spec.model.layers; layer++) {
        const int64_t *rows = (const int64_t *)all.data + layer * units * E;
        char name[PARAM_NAME_MAX];
        snprintf(name, sizeof name, "layers.%d.mlp.router.bias", layer);
        const Tensor took = param_store_grad(&t->stores[0], param_find(t->stores[0].reg, name));
        for (int64_t u = 0; u < units; u++) {
            int64_t sum = 0;
            for (int64_t e = 0; e < E; e++) sum += rows[u * E + e];
            CHECK(sum == (u + 1) * moe->balance.unit * TINY_SEQ * moe->topk);
        }
        CHECK(!memcmp(&rows[(units - 1) * E], took.data, (size_t)E * sizeof *rows));
    }
    return ERR_OK;
}

static Err steps_of_same_samples(Trainer *t, void *user)
{
    StepReport report;
    (void)user;
    for (int i = 0; i < SHORT_STEPS; i++) TRY(trainer_step(t, (TokenSource){ NULL, same_sample }, &report));
    return t->spec.model.moe.balance.global ? loads_add_up(t, NULL) : ERR_OK;
}

/* In a batch of 4 equal samples each has the loads of all before it on the mean: the loss is that over single ones. (By
 * 1, 2 and 4 it is divided exactly; the third sample's differs in its last bit, so the fourth step is not asked
 * for.) */
TEST(global_balance_of_equal_samples)
{
    float *weights[2];
    TinyRun r[2];
    for (int global = 0; global < 2; global++) {
        TrainSpec s = tiny_mixture(TINY_MIXTRAL, 2);
        s.model.dropout = s.model.attention_dropout = 0;
        s.model.moe.balance.aux = 1;
        s.model.moe.balance.global = global;
        s.global_batch = 4;
        s.micro_batch = 1 + global;
        r[global] =
            (TinyRun){ .spec = s, .grid = { .tp = 1, .dp = 1 }, .after = steps_of_same_samples, .keep_state = true };
        tiny_train(&r[global]);
        CHECK_MSG(!r[global].err, "%s", r[global].message);
        weights[global] = r[global].state[0];
    }
    double worst = 0;
    for (int64_t i = 0; i < r[0].global_count; i++)
        worst = fmax(worst, fabs((double)weights[0][i] - (double)weights[1][i]));
    CHECK_MSG(worst <= 1e-6, "%g", worst);
    for (int k = 0; k < 6; k++) free(r[k / 3].state[k % 3]);
}

/* Rows that go from host to host: hosts of 1, 2 and 4 ranks of a group, which may have parts of experts; sequences that
 * are cut; more choices than hosts, and fewer. */
static const Layout hosts[] = {
    { 2, 1, 0, 4, 1, .ep = 2, .dispatcher = DISPATCH_NODE, .hosts = 2 },
    { 4, 1, 0, 2, 2, .zero = 1, .overlap = 1, .ep = 4, .dispatcher = DISPATCH_NODE, .hosts = 2 },
    { 2, 2, 1, 2, 1, .ep = 4, .dispatcher = DISPATCH_NODE, .hosts = 4 },
    { 4, 1, 0, 2, 1, .ep = 2, .etp = 2, .dispatcher = DISPATCH_NODE, .hosts = 2 },
    { 4, 2, 1, 2, 1, .zero = 1, .ep = 8, .dispatcher = DISPATCH_NODE, .hosts = 2 },
    { 8, 1, 0, 1, 1, .zero = 1, .ep = 8, .dispatcher = DISPATCH_NODE, .hosts = 4 },
    { 2, 4, 1, 1, 1, .ep = 4, .etp = 2, .dispatcher = DISPATCH_NODE, .hosts = 2 },
    { 8, 1, 0, 1, 1, .ep = 4, .etp = 2, .dispatcher = DISPATCH_NODE, .hosts = 4 },
    { 4, 1, 0, 1, 1, .ep = 2, .dispatcher = DISPATCH_NODE, .hosts = 2 }, /* (two groups) */
    { 1, 2, 1, 4, 1, .ep = 4, .cp = 2, .context = CONTEXT_RING, .dispatcher = DISPATCH_NODE, .hosts = 2 },
};

static TinyRun run_on_hosts(TrainSpec spec, Layout l, Err (*before)(Trainer *t, void *user))
{
    TinyRun r = run_of(spec, l, steps_of(SHORT_STEPS));
    r.before = before;
    tiny_train(&r);
    CHECK_MSG(r.err == ERR_OK, "%s", r.message);
    return r;
}

static void check_on_hosts(TrainSpec spec, int every, Err (*before)(Trainer *t, void *user))
{
    TinyRun whole = run_of(spec, reference, SHORT_STEPS);
    whole.before = before;
    if (!brief()) tiny_train(&whole);
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
        if (i % (size_t)every || (brief() && i / (size_t)every % 4 != 1)) continue;
        const TinyRun r = run_on_hosts(spec, hosts[i], before);
        CHECK_MSG(brief() || r.hash == whole.hash, "layout %zu", i);
    }
}

/* Logits of 20 experts have gaps between their rows. */
TEST(sinkhorn_of_rows_with_gaps)
{
    const Layout sharded = { 1, 2, 1, 4, 1, ISA_AUTO, .ep = 2 };
    TrainSpec s = tiny_mixture(TINY_QWEN3, 2);
    double first, last;
    s.model.moe.experts = 20;
    s.model.moe.balance = (Balance){ .unit = 2, .sinkhorn = true };
    const uint64_t want = hash_of(s, reference, SHORT_STEPS, &first, &last);
    CHECK(hash_of(s, sharded, SHORT_STEPS, &first, &last) == want);
}

/* Something is dropped, and by another rule something else; capacity for all rows is none. */
TEST(capacity_matters)
{
    double first, last;
    const uint64_t all = hash_of(tiny_mixture(TINY_MIXTRAL, 2), reference, SHORT_STEPS, &first, &last);
    const uint64_t by_weight = hash_of(of_capacity(TINY_MIXTRAL, 1, false, 1), reference, SHORT_STEPS, &first, &last);
    const uint64_t by_place = hash_of(of_capacity(TINY_MIXTRAL, 1, true, 1), reference, SHORT_STEPS, &first, &last);
    CHECK(all != by_weight && all != by_place && by_weight != by_place);
    CHECK(hash_of(of_capacity(TINY_MIXTRAL, 4, false, 1), reference, SHORT_STEPS, &first, &last) == all);
}

/* Ranks that end in the middle of a unit: there is room for the parts of two units on each. */
TEST(capacity_cut_anywhere)
{
    static const Layout list[] = { { 1, 4, 1, 3, 1, ISA_AUTO, 0, 0, 1 }, { 1, 4, 1, 3, 1, ISA_AUTO, 0, 0, 2 },
                                   { 1, 4, 1, 6, 1, ISA_AUTO, 0, 0, 2 }, { 2, 2, 1, 3, 1, ISA_AUTO, 1, 0, 4 } };
    TrainSpec s = of_capacity(TINY_MIXTRAL, 0.5, false, 1);
    double first, last;
    s.global_batch = 6;
    const uint64_t want = hash_of(s, (Layout){ 1, 1, 0, 6, 2 }, SHORT_STEPS, &first, &last);
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        CHECK_MSG(hash_of(s, list[i], SHORT_STEPS, &first, &last) == want, "layout %zu", i);
}

/* Room for 1.5 times an even share takes less memory than room for all, and changes nothing where it suffices; where it
 * does not no weight is written. */
TEST(slack)
{
    const Layout spread = { 4, 1, 0, 2, 1, ISA_AUTO, 1, 1, 4 };
    TrainSpec s = tiny_mixture(TINY_MIXTRAL, 2);
    MemoryPlan wide, tight;
    double first, last;
    const uint64_t want = hash_of(s, reference, SHORT_STEPS, &first, &last);
    const Grid grid = { .tp = 1, .dp = 4, .ep = 4 };
    OK(trainer_plan(&s, grid, 0, &wide));
    s.model.moe.capacity.slack = 1.5;
    OK(trainer_plan(&s, grid, 0, &tight));
    CHECK_MSG(tight.save < wide.save, "%lld and %lld bytes", (long long)tight.save, (long long)wide.save);
    CHECK(hash_of(s, spread, SHORT_STEPS, &first, &last) == want);
}

static Err step_without_room(Trainer *t, void *user)
{
    StepReport report;
    (void)user;
    CHECK(trainer_step(t, tiny_source(t), &report) == ERR_MEMORY);
    CHECK(strstr(err_message(), "step 1: a rank's experts got more rows than moe.slack=1 has room for"));
    CHECK(t->progress.step == 0 && t->progress.samples == 0);
    return ERR_OK;
}

/* Where it does not, no weight is written; */
TEST(slack_overflow_stops)
{
    TinyRun r = { .spec = tiny_mixture(TINY_MIXTRAL, 2), .grid = { .tp = 1, .dp = 4, .ep = 4 } };
    tiny_train(&r);
    const uint64_t start = r.hash;
    r.spec.model.moe.capacity.slack = 1;
    r.after = step_without_room;
    tiny_train(&r);
    CHECK_MSG(r.err == ERR_OK, "%s", r.message);
    CHECK(r.hash == start);
}

/* Choices of the last step that were dropped: some, but not most of them. */
static Err some_dropped(Trainer *t, void *user)
{
    ExpertLoads loads;
    const ModelSpec *m = &t->spec.model;
    const int64_t all = t->spec.global_batch * m->seq * m->moe.topk;
    (void)user;
    TRY(expert_load_read(t, &loads));
    for (int i = 0; i < m->layers; i++)
        CHECK_MSG(loads.dropped[i] > 0 && loads.dropped[i] < all / 2, "layer %d: %lld", i, (long long)loads.dropped[i]);
    return ERR_OK;
}

/* or, if they may be, rows are dropped: the same in every run. */
TEST(slack_overflow_drops)
{
    TinyRun r = { .spec = tiny_mixture(TINY_MIXTRAL, 2), .grid = { .tp = 2, .sp = true, .dp = 2, .ep = 4 },
                  .steps = steps_of(STEPS), .after = some_dropped };
    uint64_t first = 0;
    r.spec.exact = false;
    r.spec.model.moe.capacity = (Capacity){ .slack = 1, .drop = true };
    for (int threads = 1; threads <= (brief() ? 1 : 3); threads++) {
        r.spec.device.threads = threads;
        tiny_train(&r);
        CHECK_MSG(r.err == ERR_OK, "%s", r.message);
        CHECK_MSG(brief() || r.loss[STEPS - 1] < r.loss[0] - 0.2, "the loss must fall: %.4f -> %.4f", r.loss[0],
                  r.loss[STEPS - 1]);
        if (threads == 1) first = r.hash;
        CHECK(r.hash == first);
    }
}

/* or the step is done again in pieces, and the bits are those of a run with room for all: */
static void check_redone(TrainSpec spec, Err (*before)(Trainer *t, void *user))
{
    static const Layout list[] = { { 4, 1, 0, 2, 1, ISA_AUTO, 1, 1, 4 }, { 2, 2, 1, 2, 1, ISA_AUTO, 1, 0, 2, 2, 1 },
                                   { 1, 2, 1, 4, 1, ISA_AUTO, 0, 0, 1, 2 }, { 4, 1, 0, 1, 2, ISA_AUTO, 1, 1, 2 } };
    TinyRun whole = run_of(spec, reference, SHORT_STEPS);
    whole.before = before;
    if (!brief()) tiny_train(&whole);
    spec.model.moe.capacity.slack = 1;
    spec.model.moe.capacity.redo = true;
    for (size_t i = 0; i < sizeof list / sizeof *list; i += brief() ? 3 : 1) {
        TinyRun r = run_of(spec, list[i], steps_of(SHORT_STEPS));
        const bool room = list[i].ep == 1; /* all ranks have a part of every expert: rows of all come to each */
        r.before = before;
        tiny_train(&r);
        CHECK_MSG(!r.err && (r.hash == whole.hash || brief()), "layout %zu: %s", i, r.message);
        CHECK_MSG(room ? !r.retried_in_pieces : r.retried_in_pieces > 0, "layout %zu: %d steps", i,
                  r.retried_in_pieces);
    }
}

/* loads as they come, */
TEST(slack_overflow_redone) { check_redone(tiny_mixture(TINY_QWEN3, 2), NULL); }

/* with less kept and with capacities, */
TEST(slack_overflow_redone_beside)
{
    TrainSpec s = of_capacity(TINY_DEEPSEEK, 1.5, false, 1);
    s.model.recompute = layer_pattern_all(RECOMPUTE_SELECTIVE);
    check_redone(s, NULL);
}

/* with biases, */
TEST(slack_overflow_redone_biases) { check_redone(tiny_gptoss(1), NULL); }

static Err equal_scores(Trainer *t, void *user)
{
    const ParamStore *s = &t->stores[0];
    (void)user;
    for (int i = 0; i < s->reg->count; i++) {
        const Tensor w = param_store_value(s, i, 0);
        if (strstr(s->reg->items[i].name, "router.weight")) memset(w.data, 0, (size_t)tensor_bytes(w));
    }
    return ERR_OK;
}

/* and if all tokens choose the same experts, those of one rank: of equal scores the lower ones win. */
TEST(slack_worst_case_redone) { check_redone(tiny_mixture(TINY_MIXTRAL, 2), equal_scores); }

/* On hosts the rows that a rank passes on have room for an even share, too: an overflow there alone is seen and
 * redone. */
static void check_redone_on_hosts(TrainSpec spec, Err (*before)(Trainer *t, void *user), bool all_retried)
{
    TinyRun whole = run_of(spec, reference, SHORT_STEPS);
    whole.before = before;
    if (!brief()) tiny_train(&whole);
    spec.model.moe.capacity.slack = 1;
    spec.model.moe.capacity.redo = true;
    for (size_t i = 1; i < sizeof hosts / sizeof *hosts; i += brief() ? 6 : 2) {
        const TinyRun r = run_on_hosts(spec, hosts[i], before);
        CHECK_MSG(r.hash == whole.hash || brief(), "layout %zu", i);
        CHECK_MSG(r.retried_in_pieces > 0 || !all_retried, "layout %zu: %d steps", i, r.retried_in_pieces);
    }
}

/* Tokens of two kinds, of which the first in a pair of samples has one and the second the other. */
static Err tokens_by_place(void *user, int64_t first, int64_t count, int32_t *out)
{
    TRY(tiny_tokens(user, first, count, out));
    for (int64_t i = 0; i < count * (TINY_SEQ + 1); i++)
        out[i] = out[i] % (TINY_VOCAB / 2) + (first + i / (TINY_SEQ + 1)) % 2 * (TINY_VOCAB / 2);
    return ERR_OK;
}

/* The first kind goes to the experts of the first half, the second to the others, evenly within a half. */
static Err kinds_apart(Trainer *t, void *user)
{
    const ParamStore *s = &t->stores[0];
    (void)user;
    for (int i = 0; i < s->reg->count; i++) {
        const Param *p = &s->reg->items[i];
        const Tensor w = param_store_value(s, i, 0);
        const float at = strstr(p->name, "router.weight") ? 1 : strstr(p->name, "embed") ? 3 : 0;
        for (int64_t row = 0; row < w.dim[0] && at > 0; row++)
            ((float *)w.data)[row * w.ld] = row < p->spec.shape[0] / 2 ? at : -at;
    }
    return ERR_OK;
}

static Err step_by_place(Trainer *t, void *user)
{
    StepReport report;
    TRY(kinds_apart(t, NULL));
    TRY(trainer_step(t, (TokenSource){ NULL, tokens_by_place }, &report));
    if (!t->world->rank) *(int *)user = report.retried_in_pieces;
    return ERR_OK;
}

/* All ranks' experts get as many rows, but a rank passes on twice as many as another way would bring it: that alone is
 * found. */
TEST(hosts_room)
{
    for (int node = 0; node < 2; node++) {
        int retried = 0;
        const DispatcherKind way = node ? DISPATCH_NODE : DISPATCH_ALLTOALL;
        const Layout l = { 4, 1, 0, 1, 1, .ep = 4, .dispatcher = way, .hosts = node ? 2 : 0 };
        TrainSpec s = tiny_mixture(TINY_QWEN3, 1);
        s.model.dropout = s.model.attention_dropout = 0;
        s.model.moe.capacity = (Capacity){ .slack = 1.7, .redo = true };
        s.global_batch = 4;
        TinyRun r = run_of(s, l, 0);
        r.after = step_by_place, r.user = &retried;
        tiny_train(&r);
        CHECK_MSG(!r.err, "%s", r.message);
        CHECK_MSG(retried == node, "%d steps in pieces", retried);
    }
}

/* or rows are dropped, on the way, too: the same in every run. */
TEST(hosts_slack_drops)
{
    uint64_t first = 0;
    for (int threads = 1; threads <= (brief() ? 1 : 2); threads++) {
        TinyRun r = { .spec = tiny_mixture(TINY_MIXTRAL, 2), .steps = steps_of(STEPS), .after = some_dropped,
                      .grid = { .tp = 2, .sp = true, .dp = 2, .ep = 4, .ep_hosts = 2 } };
        r.spec.exact = false;
        r.spec.device.threads = threads;
        r.spec.model.moe.dispatcher = DISPATCH_NODE;
        r.spec.model.moe.capacity = (Capacity){ .slack = 1, .drop = true };
        tiny_train(&r);
        CHECK_MSG(r.err == ERR_OK, "%s", r.message);
        CHECK_MSG(brief() || r.loss[STEPS - 1] < r.loss[0] - 0.2, "the loss must fall: %.4f -> %.4f", r.loss[0],
                  r.loss[STEPS - 1]);
        if (threads == 1) first = r.hash;
        CHECK(r.hash == first);
    }
}

TEST(hosts_slack_redone) { check_redone_on_hosts(tiny_mixture(TINY_QWEN3, 2), NULL, false); }
TEST(hosts_slack_worst_case_redone) { check_redone_on_hosts(tiny_mixture(TINY_MIXTRAL, 2), equal_scores, true); }
TEST(hosts_worst_case) { check_on_hosts(tiny_mixture(TINY_MIXTRAL, 2), 2, equal_scores); }

/* Pieces take more memory than the step that they repeat at most by what is made again; the smallest must fit. */
TEST(slack_pieces_are_planned)
{
    const Grid grid = { .tp = 1, .dp = 4, .ep = 4, .pp = 1 };
    TrainSpec s = tiny_mixture(TINY_MIXTRAL, 2);
    MemoryPlan wide, tight, redo;
    OK(trainer_plan(&s, grid, 0, &wide));
    s.model.moe.capacity.slack = 1.5;
    OK(trainer_plan(&s, grid, 0, &tight));
    s.model.moe.capacity.redo = true;
    OK(trainer_plan(&s, grid, 0, &redo));
    CHECK_MSG(memory_plan_total(&tight) <= memory_plan_total(&redo) &&
                  memory_plan_total(&redo) < memory_plan_total(&wide),
              "%lld, in pieces %lld, for all %lld bytes", (long long)memory_plan_total(&tight),
              (long long)memory_plan_total(&redo), (long long)memory_plan_total(&wide));
    CHECK(redo.work.flop == tight.work.flop && redo.work.comm_bytes == tight.work.comm_bytes);
    s.seq_blocks = s.micro_batch = 1;
    CHECK(trainer_check(&s, grid) == ERR_CONFIG);
    CHECK(
        strstr(err_message(), "the 64 tokens of a sequence block of each rank, sends a rank's experts up to 512 rows"));
}

/* A vocabulary whose chunks are cut into several leaves. */
TEST(long_vocabulary)
{
    TrainSpec s = tiny_gpt2();
    double first, last;
    s.model.vocab = 20000;
    s.model.layers = 1;
    s.model.padded_vocab = head_padded_vocab(s.model.vocab, s.model.tp_blocks);
    const uint64_t want = reference_of(s, 2);
    for (size_t i = brief() ? 6 : 0; i < sizeof few / sizeof *few; i += 3)
        CHECK_MSG(hash_of(s, few[i], 2, &first, &last) == want || brief(), "layout %zu", i);
}

/* Losses of all steps within a relative tolerance; NaN is far. */
static bool near(const TinyRun *a, const TinyRun *b, double tolerance)
{
    for (int i = 0; i < a->steps; i++)
        if (!(fabs(a->loss[i] - b->loss[i]) <= tolerance * b->loss[i])) return false;
    return true;
}

static TinyRun run_16_bit(TrainSpec spec, DType compute, Layout l, int steps)
{
    TinyRun r = { .spec = spec, .grid = { .tp = l.tp, .dp = l.dp, .sp = l.sp }, .steps = steps_of(steps) };
    r.spec.compute = compute;
    r.spec.exact = false;
    r.spec.micro_batch = l.micro;
    r.spec.device.threads = l.threads;
    r.spec.update.zero = l.zero;
    r.spec.update.overlap_grad = r.spec.update.overlap_param = l.overlap;
    r.spec.update.bucket_bytes = BUCKET_BYTES;
    r.spec.overlap_tp = l.bands;
    tiny_train(&r);
    CHECK_MSG(r.err == ERR_OK, "%s", r.message);
    return r;
}

/*
 * 16-bit runs that are not exact promise less: the products of tensor-parallel ranks are rounded before they are
 * summed, and gradients are float sums. Losses stay near; and the same bits come from layouts with the same dp, tp and
 * micro-batch, whatever threads, ZeRO, overlap and bands are.
 */
static void run_narrow(TrainSpec spec, DType compute)
{
    static const Layout cuts[] = { { 1, 2, 0, 8, 1 }, { 1, 2, 1, 8, 1 }, { 1, 4, 1, 8, 1 }, { 1, 8, 0, 8, 1 },
                                   { 2, 1, 0, 4, 1 }, { 2, 2, 1, 4, 1, ISA_AUTO, 1, 1 } };
    static const Layout same[][2] = { { { 1, 2, 1, 8, 1 }, { 1, 2, 1, 8, 2 } },
                                      { { 2, 2, 1, 4, 1 }, { 2, 2, 1, 4, 1, ISA_AUTO, 0, 1 } },
                                      { { 2, 2, 0, 4, 1 }, { 2, 2, 0, 4, 2, ISA_AUTO, 1, 1 } },
                                      { { 1, 4, 1, 8, 1 }, { 1, 4, 1, 8, 1, ISA_AUTO, .bands = 2 } },
                                      { { 1, 4, 0, 8, 1 }, { 1, 4, 0, 8, 1, ISA_AUTO, .bands = 4 } } };
    const TinyRun one = run_16_bit(spec, compute, (Layout){ 1, 1, 0, 8, 1 }, STEPS);
    CHECK_MSG(brief() || one.loss[STEPS - 1] < one.loss[0] - 0.2, "the loss must fall: %.4f -> %.4f", one.loss[0],
              one.loss[STEPS - 1]);
    int equal = 0;
    double worst = 0;
    const size_t tried = brief() ? 1 : sizeof cuts / sizeof *cuts;
    for (size_t i = 0; i < tried; i++) {
        const TinyRun r = run_16_bit(spec, compute, cuts[i], STEPS);
        CHECK_MSG(near(&r, &one, 1e-2), "dp%d tp%d sp%d: %.5f, one rank %.5f", cuts[i].dp, cuts[i].tp, cuts[i].sp,
                  r.loss[STEPS - 1], one.loss[STEPS - 1]);
        equal += r.hash == one.hash;
        for (int k = 0; k < one.steps; k++) worst = fmax(worst, fabs(r.loss[k] - one.loss[k]) / one.loss[k]);
    }
    printf("    %d of %zu layouts with one rank's bits, losses at most %.1e apart\n", equal, tried, worst);
    for (size_t i = 0; i < (brief() ? 1 : sizeof same / sizeof *same); i++) {
        const uint64_t a = run_16_bit(spec, compute, same[i][0], SHORT_STEPS).hash;
        const uint64_t b = run_16_bit(spec, compute, same[i][1], SHORT_STEPS).hash;
        CHECK_MSG(a == b, "pair %zu of layouts", i);
    }
}

TEST(bf16_layouts) { run_narrow(tiny_gpt2(), BF16); }

/* A norm in one op with the sum that it reads, and GELU behind a product, have the bits of those made again from what
 * is stored. */
TEST(bf16_recomputed)
{
    TrainSpec specs[] = { tiny_llama(), tiny_gpt2() };
    for (int i = 0; i < 4; i++) {
        TrainSpec s = specs[i % 2];
        s.fp32_residual = s.fp32_vectors = i / 2;
        const uint64_t kept = run_16_bit(s, BF16, (Layout){ 1, 1, 0, 4, 1 }, SHORT_STEPS).hash;
        for (int again = RECOMPUTE_SELECTIVE; again < TINY_RECOMPUTES; again += brief() ? 2 : 1) {
            s.model.recompute = tiny_recompute(again);
            CHECK_MSG(run_16_bit(s, BF16, (Layout){ 1, 1, 0, 4, 1 }, SHORT_STEPS).hash == kept,
                      "model %d, recomputation %d", i, again);
        }
    }
}

/* Choices of experts differ where scores are close, so losses are only near those of fp32; threads change nothing. */
TEST(bf16_mixture)
{
    for (TinyMixture kind = 0; kind < TINY_MIXTURES; kind++) {
        const TrainSpec s = tiny_mixture(kind, 2);
        const TinyRun wide = run_16_bit(s, F32, (Layout){ 1, 1, 0, 4, 1 }, STEPS);
        const TinyRun one = run_16_bit(s, BF16, (Layout){ 1, 1, 0, 4, 1 }, STEPS);
        CHECK_MSG(near(&one, &wide, 3e-2), "mixture %d: %.5f, in fp32 %.5f", kind, one.loss[STEPS - 1],
                  wide.loss[STEPS - 1]);
        CHECK(run_16_bit(s, BF16, (Layout){ 1, 1, 0, 4, 3 }, STEPS).hash == one.hash);
    }
}

TEST_MAIN
