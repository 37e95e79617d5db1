/*
 * The search for layouts: cuts of chains against all cuts, bounds of memory against dry runs, and answers against the
 * best of every legal layout of small worlds. Seconds come from counts of work: what is tested here is that the best by
 * any clock is found, not the clock.
 */
#include "plan/estimate.h"
#include "plan/partition.h"
#include "plan/search.h"
#include "pipeline/simulate.h"
#include "test.h"

static uint64_t drawn;

/* 0 .. n - 1 */
static int draw(int n)
{
    drawn = drawn * 6364136223846793005u + 1442695040888963407u;
    return (int)((drawn >> 33) % (uint64_t)n);
}

static double draw_real(double low, double high) { return low + (high - low) * draw(1 << 20) / (1 << 20); }

/* ---- chains ---- */

enum { ITEMS_MOST = 11, CUTS_MOST = 400 };

typedef struct {
    Chain chain;
    ChainItem items[ITEMS_MOST];
    int in_flight[PARTITION_STAGES];
} Case;

static void draw_chain(Case *c, bool split)
{
    *c = (Case){ .chain = { .items = c->items, .in_flight = c->in_flight, .split = split } };
    c->chain.count = 4 + draw(ITEMS_MOST - 4 + 1);
    c->chain.stages = 1 + draw(4);
    c->chain.units = c->chain.stages + draw(8);
    c->chain.hop = draw(2) * draw_real(0, 0.2);
    for (int i = 0; i < c->chain.count; i++) {
        const double f = draw_real(0.2, 2), b = draw_real(0.5, 1.5);
        c->items[i] = (ChainItem){ .cost = { f, b * f, f }, .state = draw(100), .kept = draw(40) };
    }
    for (int s = 0; s < c->chain.stages; s++) {
        const int left = c->chain.stages - s;
        c->in_flight[s] = left < c->chain.units ? left : c->chain.units;
    }
    c->chain.limit = draw(2) ? INT64_MAX / 2 : 150 + draw(400);
}

/* Sums by hand: what partition.c does by prefix sums. */
static double bound_of(const Chain *c, const int16_t *end)
{
    double most = 0, before = 0, forward = 0, all = 0, w = 0;
    for (int s = 0; s < c->stages; s++) {
        double own = 0, f = 0;
        for (int i = s ? end[s - 1] : 0; i < end[s]; i++) {
            const StageCost k = c->items[i].cost;
            own += k.f + k.i + k.w, f += k.f, w += k.w;
        }
        const double at = c->units * own + (c->split ? forward + s * c->hop : before + 2 * s * c->hop);
        if (at > most) most = at;
        before += own, forward += f, all += own;
    }
    all += 2 * (c->stages - 1) * c->hop - (c->split ? w : 0);
    return most > all ? most : all;
}

static bool fits(const Chain *c, const int16_t *end)
{
    for (int s = 0; s < c->stages; s++) {
        int64_t state = 0, kept = 0;
        for (int i = s ? end[s - 1] : 0; i < end[s]; i++) state += c->items[i].state, kept += c->items[i].kept;
        if (state + c->in_flight[s] * kept > c->limit) return false;
    }
    return true;
}

static double replay(const Chain *c, const Schedule *s, const int16_t *end)
{
    StageCost costs[PARTITION_STAGES] = { { 0 } };
    Simulation sim;
    for (int k = 0; k < c->stages; k++)
        for (int i = k ? end[k - 1] : 0; i < end[k]; i++) {
            costs[k].f += c->items[i].cost.f;
            costs[k].i += c->items[i].cost.i;
            costs[k].w += c->items[i].cost.w;
        }
    OK(simulate(s, &(SimulateCosts){ .stage = costs, .latency = c->hop }, &sim));
    const double seconds = sim.makespan;
    simulation_free(&sim, s);
    return seconds;
}

typedef struct {
    int16_t end[4];
    double bound, seconds;
} Whole;

static int every_cut(const Chain *c, const Schedule *s, Whole *out)
{
    int count = 0;
    int16_t e[4] = { 0 };
    for (e[0] = 1; e[0] <= c->count; e[0]++)
        for (e[1] = e[0] + 1; e[1] <= (c->stages > 1 ? c->count : e[0] + 1); e[1]++)
            for (e[2] = e[1] + 1; e[2] <= (c->stages > 2 ? c->count : e[1] + 1); e[2]++)
                for (e[3] = e[2] + 1; e[3] <= (c->stages > 3 ? c->count : e[2] + 1); e[3]++) {
                    if (e[c->stages - 1] != c->count || !fits(c, e)) continue;
                    CHECK(count < CUTS_MOST);
                    Whole *w = &out[count++];
                    memcpy(w->end, e, sizeof e);
                    w->bound = bound_of(c, e);
                    w->seconds = replay(c, s, e);
                }
    return count;
}

static int by_bound(const void *a, const void *b)
{
    const Whole *x = a, *y = b;
    return x->bound < y->bound ? -1 : x->bound > y->bound;
}

/* The least bounds of all cuts, in order; none above its replay; and of the 64 the fastest is the fastest of all. */
static void check_chain(const Case *c, const char *schedule, int *few)
{
    static Whole all[CUTS_MOST];
    ChainCut cuts[PARTITION_BEST];
    Schedule s;
    int count;
    const Chain *chain = &c->chain;
    OK(schedule_make(&(ScheduleSpec){ .name = schedule, .ranks = chain->stages, .microbatches = chain->units }, &s));
    const int whole = every_cut(chain, &s, all);
    double fastest = 0, best = 0;
    for (int i = 0; i < whole; i++) {
        CHECK_MSG(all[i].bound <= all[i].seconds * (1 + 1e-12), "%s: bound %g above %g", schedule, all[i].bound,
                  all[i].seconds);
        if (!i || all[i].seconds < fastest) fastest = all[i].seconds;
    }
    OK(partition(chain, PARTITION_BEST, cuts, &count));
    CHECK(count == (whole < PARTITION_BEST ? whole : PARTITION_BEST));
    qsort(all, (size_t)whole, sizeof *all, by_bound);
    for (int i = 0; i < count; i++) {
        CHECK(fits(chain, cuts[i].end) && partition_fits(chain, cuts[i].end));
        CHECK_CLOSE(cuts[i].bound, all[i].bound, 1e-12, "cut %d", i);
        CHECK_CLOSE(cuts[i].bound, bound_of(chain, cuts[i].end), 1e-12, "cut %d", i);
        CHECK_CLOSE(partition_bound(chain, cuts[i].end), cuts[i].bound, 1e-12, "cut %d", i);
        const double seconds = replay(chain, &s, cuts[i].end);
        if (!i || seconds < best) best = seconds;
    }
    *few += count > 1;
    if (count) CHECK_CLOSE(best, fastest, 1e-9, "%s: %d of %d cuts", schedule, count, whole);
    schedule_free(&s);
}

TEST(cuts_of_chains)
{
    int compared = 0;
    Case c;
    for (int i = 0; i < 250; i++) {
        draw_chain(&c, false);
        check_chain(&c, "1f1b", &compared);
        draw_chain(&c, true);
        check_chain(&c, "zb-h1", &compared);
    }
    CHECK(compared > 200);
}

/* ---- whole searches ---- */

/* Bytes that ranks with the same weights send each other, and others, of pipelines not. */
static void count_sent(const MemoryPlan *p, double *copies, double *others)
{
    *copies = *others = 0;
    for (int k = 0; k < WORLD_COMMS; k++)
        for (int i = 0; i < COMM_KIND_COUNT; i++) {
            const bool once = group_of_copies((GroupKind)k) || k == GROUP_WORLD || k == GROUP_EMBD;
            if (k != GROUP_PP && i != COMM_SUM_I64 && i != COMM_MAX_I64)
                *(once ? copies : others) += (double)p->work.comm[k][i].bytes;
        }
}

/* Seconds of a rank's work by its counts: FLOP, and what units send; what is sent once a step is at its end. Stages of
 * one rank share the work by their blocks. */
static Err by_work(const void *user, const TrainSpec *s, Grid g, int rank, MemoryPlan *p, RankTimes *t)
{
    const double units = (double)s->global_batch / (double)(s->micro_batch * g.dp), slow = *(const double *)user / 1e8;
    double parts = 0, once, sent;
    TRY(trainer_plan(s, g, rank, p));
    count_sent(p, &once, &sent);
    if (s->update.zero >= ZERO_GRADS) { /* each unit sends what twice as many send more */
        MemoryPlan more;
        TrainSpec twice = *s;
        double copies, others;
        twice.global_batch *= 2;
        twice.ramp = batch_ramp_flat(twice.global_batch);
        TRY(trainer_plan(&twice, g, rank, &more));
        count_sent(&more, &copies, &others);
        sent += copies - once, once -= copies - once;
    }
    int replicas = 1;
    for (int i = 0; i < p->stage_count; i++) {
        parts += p->stages[i].layers + 0.5;
        if (p->stages[i].replica) replicas = 2; /* each has half of the units */
    }
    for (int i = 0; i < p->stage_count; i++) {
        const double work = ((double)p->work.flop / 1e9 + slow * sent) / units * replicas;
        const double each = work * (p->stages[i].layers + 0.5) / parts;
        t->stage[i] = (StageCost){ each / 3, each / 3, each / 3 };
    }
    t->reduce = slow * once;
    t->tail = (double)(p->params.flat + p->params.zero) / 1e7 + t->reduce;
    t->hop = 1e-4;
    /* the rank's own step: each of its units, and the end */
    TimeShares shares = { .now = t->tail };
    for (int i = 0; i < p->stage_count; i++)
        shares.now += units / replicas * (t->stage[i].f + t->stage[i].i + t->stage[i].w);
    shares.family[FAMILY_PRODUCTS] = shares.now - t->tail;
    shares.family[FAMILY_OPTIMIZER] = t->tail - t->reduce;
    shares.waited[GROUP_DP] = t->reduce;
    memcpy(p->work.clock, &shares, sizeof shares);
    return ERR_OK;
}

static double communication = 1;

static const char *const dense[] = { "model.layers=4", "model.hidden=64",      "model.heads=8",      "model.kv_heads=4",
                                     "model.ffn=128",  "model.seq=128",        "model.vocab=512",    "model.arch=llama",
                                     "run.device=cuda", "run.precision=bf16",  "train.global_batch=16" };
static const char *const mixture[] = { "model.layers=4", "model.hidden=64", "model.heads=4",   "model.ffn=128",
                                       "model.seq=64",   "model.vocab=256", "model.arch=llama", "moe.experts=8",
                                       "moe.topk=2",     "moe.ffn=64",      "moe.every=0,1*3",  "run.device=cuda",
                                       "run.precision=bf16", "train.global_batch=16" };
/* Blocks of one layer, whose costs differ: attention, a dense layer, attention, experts between latents. */
static const char *const letters[] = { "model.layers=8",  "model.hidden=64",      "model.heads=4",
                                       "model.ffn=128",   "model.seq=64",         "model.vocab=256",
                                       "model.arch=llama", "model.mixer=attention,none", "model.ffn_layers=0,1",
                                       "moe.experts=8",   "moe.topk=2",           "moe.ffn=64",
                                       "moe.latent=32",   "moe.every=0*3,1,0*3,1", "run.device=cuda",
                                       "run.precision=bf16", "train.global_batch=16" };
/* The first two blocks cost several times what the others do, by their mixer alone. */
static const char *const uneven[] = { "model.layers=8",        "model.hidden=64",        "model.heads=4",
                                      "model.ffn=64",          "model.seq=128",          "model.vocab=256",
                                      "model.arch=llama",      "model.mixer=delta*2,attention*6",
                                      "model.delta_key_heads=16", "model.delta_value_heads=32",
                                      "model.delta_key_dim=32", "model.delta_value_dim=32", "run.device=cuda",
                                      "run.precision=bf16",    "train.global_batch=16", "train.micro_batch=1",
                                      "train.recompute=none",  "parallel.pp=2",         "parallel.cp=1",
                                      "parallel.tp=1",         "parallel.zero=1",       "parallel.schedule=1f1b" };
static const char *const eights[] = { "model.layers=4",    "model.hidden=256",  "model.heads=8",
                                      "model.kv_heads=4",  "model.ffn=512",     "model.seq=128",
                                      "model.vocab=512",   "model.arch=llama",  "run.device=cuda",
                                      "run.precision=fp8", "run.fp8_weights=1", "train.global_batch=16" };

typedef struct {
    Config base;
    SearchQuestion q;
} Asked;

static void ask(Asked *a, const char *const *words, int count, int world, int64_t memory)
{
    OK(layout_base((ConfigSource){ .overrides = words, .override_count = count }, &a->base));
    a->q = (SearchQuestion){ .base = &a->base,
                             .world = world,
                             .limits = { .tp_most = 4, .cp_tokens = 32, .batch_most = 2 },
                             .vocab = a->base.model.vocab,
                             .memory = memory,
                             .source = { &communication, by_work },
                             .best = 3,
                             .threads = 1 };
}

#define ASK(a, words, world, memory) ask(a, words, (int)(sizeof(words) / sizeof *(words)), world, memory)

static Layout draw_layout(const LayoutSpace *s)
{
    Layout l = { .stages = "" };
    for (int k = 0; k < LAYOUT_KEYS; k++) l.value[k] = s->value[k][draw(s->count[k])];
    return l;
}

/* The bound of a layout's memory is never above what its dry runs take. */
static void check_bounds(const char *const *words, int count, int *compared)
{
    Asked a;
    ask(&a, words, count, 8, INT64_MAX);
    a.q.libraries = true;
    LayoutSpace space;
    layout_space(&a.base, a.q.world, a.q.limits, &space);
    for (int i = 0; i < 6000; i++) {
        char text[LAYOUT_WORDS];
        SearchResult r;
        const Layout l = draw_layout(&space);
        if (!layout_microbatches(&space, &l) || search_evaluate(&a.q, &space, &l, &r)) continue;
        const int64_t bound = search_memory_bound(&a.q, &space, &l);
        layout_words(&space, &l, text);
        CHECK_MSG(bound <= r.time.bytes, "%lld above %lld: %s", (long long)bound, (long long)r.time.bytes, text);
        *compared += bound > 0;
    }
    config_release(&a.base);
}

TEST(memory_is_bounded)
{
    int compared = 0;
    check_bounds(dense, sizeof dense / sizeof *dense, &compared);
    check_bounds(mixture, sizeof mixture / sizeof *mixture, &compared);
    check_bounds(eights, sizeof eights / sizeof *eights, &compared);
    CHECK_MSG(compared > 450, "%d layouts", compared);
}

/* Pruned by what does not divide: the rules refuse all of it. */
TEST(pruning_is_the_rules)
{
    Asked a;
    LayoutSpace space;
    int pruned = 0;
    ASK(&a, mixture, 12, INT64_MAX);
    layout_space(&a.base, a.q.world, a.q.limits, &space);
    for (int i = 0; i < 4000; i++) {
        const Layout l = draw_layout(&space);
        Config c;
        if (layout_microbatches(&space, &l)) continue;
        CHECK(layout_config(&space, &l, &c) == ERR_CONFIG);
        config_release(&c);
        pruned++;
    }
    CHECK(pruned > 100);
    config_release(&a.base);
}

/* Another value of a key that does nothing there is the same layout: one rank of an axis has no way to exchange, ... */
static bool is_repeated(const LayoutSpace *s, const Layout *l)
{
    const int *v = l->value;
    bool other[LAYOUT_KEYS];
    for (int k = 0; k < LAYOUT_KEYS; k++) other[k] = v[k] != s->value[k][0];
    const bool one = v[LAYOUT_PP] == 1;
    return (!one && v[LAYOUT_ZERO] == ZERO_VALUES) ||
           (v[LAYOUT_TP] == 1 && (other[LAYOUT_SP] || other[LAYOUT_OVERLAP_TP])) ||
           (v[LAYOUT_CP] == 1 && other[LAYOUT_CP_COMM]) ||
           (v[LAYOUT_EP] * v[LAYOUT_ETP] == 1 && (other[LAYOUT_DISPATCHER] || other[LAYOUT_OVERLAP_MOE])) ||
           (one && (other[LAYOUT_VPP] || other[LAYOUT_SCHEDULE] || other[LAYOUT_ORDER])) ||
           v[LAYOUT_VPP] > s->base->model.layers;
}

typedef struct {
    double step_s;
    int64_t bytes;
} Evaluated;

enum { LAYOUTS_MOST = 1 << 14 };

/* Every layout of the space by itself, the legal ones; their number. */
static int every_layout(const Asked *a, Evaluated out[LAYOUTS_MOST])
{
    LayoutSpace s;
    Layout l = { .stages = "" };
    int at[LAYOUT_KEYS] = { 0 }, legal = 0, k = 0;
    layout_space(&a->base, a->q.world, a->q.limits, &s);
    while (k < LAYOUT_KEYS) {
        SearchResult r;
        for (int i = 0; i < LAYOUT_KEYS; i++) l.value[i] = s.value[i][at[i]];
        if (layout_microbatches(&s, &l) && !is_repeated(&s, &l) && !search_evaluate(&a->q, &s, &l, &r)) {
            CHECK(legal < LAYOUTS_MOST);
            out[legal++] = (Evaluated){ r.time.step_s, r.time.bytes };
        }
        for (k = 0; k < LAYOUT_KEYS && ++at[k] == s.count[k]; k++) at[k] = 0;
    }
    return legal;
}

/* The least step of those that fit. */
static double best_of(const Evaluated *all, int count, int64_t memory)
{
    double best = INFINITY;
    for (int i = 0; i < count; i++)
        if (all[i].bytes <= memory && all[i].step_s < best) best = all[i].step_s;
    return best;
}

/* Twice: with memory for all, and with 85 % of what the fastest takes. */
static void check_best(Asked *a, const char *what)
{
    static SearchAnswer answer;
    static Evaluated all[LAYOUTS_MOST];
    const int legal = every_layout(a, all);
    for (int tight = 0; tight < 2; tight++) {
        if (tight) a->q.memory = answer.best[0].time.bytes / 100 * 85;
        const double best = best_of(all, legal, a->q.memory);
        OK(search(&a->q, &answer));
        CHECK_MSG(legal > 5, "%s: %d layouts", what, legal);
        CHECK_MSG((answer.count > 0) == (best < INFINITY), "%s: %d answers", what, answer.count);
        if (!answer.count) return;
        const double found = answer.best[0].time.step_s;
        CHECK_MSG(found <= best * (1 + 1e-9), "%s%s: %g is not the best, %g", what, tight ? ", tight" : "", found,
                  best);
    }
}

/* What is told apart among the best alone, and how rows go to experts, is free in one world of each model and given in
 * the others. */
static void check_world(const char *const *words, int count, const char *given, int world, double slow)
{
    const char *all[32];
    char text[160], what[200];
    Asked a;
    if (brief() && world > 4) return; /* under a sanitizer */
    for (int i = 0; i < count; i++) all[i] = words[i];
    snprintf(text, sizeof text, "%s", given);
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " ")) all[count++] = word;
    communication = slow;
    snprintf(what, sizeof what, "%d ranks, %s, %g", world, given, slow);
    ask(&a, all, count, world, INT64_MAX);
    check_best(&a, what);
    config_release(&a.base);
    communication = 1;
}

#define WORLD(words, given, world, slow) check_world(words, (int)(sizeof(words) / sizeof *(words)), given, world, slow)

TEST(the_best_of_all_dense)
{
    WORLD(dense, "train.recompute=none parallel.sp=auto parallel.cp=1", 2, 20);
    WORLD(dense, "train.micro_batch=1 parallel.cp=1 parallel.overlap_tp=0", 4, 0.1);
    WORLD(dense, "parallel.tp=2 train.recompute=full parallel.overlap_tp=0", 4, 20);
    WORLD(dense, "parallel.cp=4 train.recompute=selective parallel.overlap_tp=0", 8, 20);
    WORLD(dense, "parallel.pp=4 parallel.cp=1 train.micro_batch=2 parallel.overlap_tp=0", 16, 20);
}

TEST(the_best_of_all_mixtures)
{
    WORLD(mixture, "train.recompute=none train.micro_batch=1 parallel.cp=1", 2, 1);
    WORLD(mixture, "parallel.tp=1 train.recompute=none parallel.cp_comm=ring", 4, 20);
    WORLD(mixture, "parallel.ep=8 parallel.cp=1 moe.dispatcher=alltoall", 8, 0.1);
    WORLD(mixture, "parallel.ep=8 parallel.pp=2 train.recompute=none train.micro_batch=1 moe.dispatcher=alltoall", 16,
          1);
}

/* A clock that is out of order for some layouts: these are no answers, and the others are in order. */
static Err now_and_then(const void *user, const TrainSpec *s, Grid g, int rank, MemoryPlan *p, RankTimes *t)
{
    TRY(by_work(user, s, g, rank, p, t));
    if (g.tp > 1) t->stage[0].f = NAN;
    return ERR_OK;
}

TEST(the_best_of_blocks_of_one_layer)
{
    WORLD(letters, "parallel.tp=1 train.recompute=none train.micro_batch=1 parallel.cp=1", 4, 1);
    WORLD(letters, "parallel.pp=4 parallel.cp=1 train.recompute=none train.micro_batch=1 moe.dispatcher=alltoall", 8,
          20);
}

/* A pipeline is cut by what its mixers cost, not by their number. */
TEST(stages_of_unequal_mixers)
{
    static SearchAnswer answer;
    LayoutSpace space;
    Asked a;
    SearchResult even;
    ASK(&a, uneven, 2, INT64_MAX);
    OK(search(&a.q, &answer));
    CHECK(answer.count > 0);
    layout_space(&a.base, a.q.world, a.q.limits, &space);
    Layout l = answer.best[0].layout;
    const double found = answer.best[0].time.step_s;
    CHECK_MSG(strstr(l.stages, "t*2|") || strstr(l.stages, "Et|"), "%s", l.stages);
    *l.stages = 0;
    OK(search_evaluate(&a.q, &space, &l, &even));
    CHECK_MSG(found < .8 * even.time.step_s, "%s: %g, of as many blocks in each %g", answer.best[0].layout.stages,
              found, even.time.step_s);
    config_release(&a.base);
}

/* With one group no head can be exchanged: states are handed on, and blocks with attention have any way. */
TEST(the_best_of_blocks_with_one_group)
{
    static const char *const words[] = { "model.layers=4",       "model.hidden=64",       "model.heads=8",
                                         "model.ffn=128",        "model.seq=512",         "model.vocab=256",
                                         "model.arch=llama",     "model.mixer=mamba2*3,attention",
                                         "model.mamba_heads=8",  "model.mamba_head_dim=16", "model.mamba_state=16",
                                         "run.device=cuda",      "run.precision=bf16",    "parallel.tp_blocks=1",
                                         "train.global_batch=8" };
    static SearchAnswer answer;
    char text[LAYOUT_WORDS];
    Asked a;
    WORLD(words, "parallel.overlap_tp=0 train.micro_batch=1", 4, 1);
    ASK(&a, words, 4, INT64_MAX);
    a.base.origin[CFG_parallel_cp].kind = ORIGIN_COMMAND_LINE;
    a.base.parallel.cp = 2;
    OK(search(&a.q, &answer));
    CHECK(answer.count > 0);
    for (int i = 0; i < answer.count; i++) {
        LayoutSpace space;
        layout_space(&a.base, a.q.world, a.q.limits, &space);
        layout_words(&space, &answer.best[i].layout, text);
        CHECK_MSG(strstr(text, "parallel.cp_comm=state*3,allgather"), "%s", text);
    }
    config_release(&a.base);
}

TEST(no_number_is_no_answer)
{
    static SearchAnswer answer;
    Asked a;
    ASK(&a, dense, 4, INT64_MAX);
    a.q.source.dry_run = now_and_then;
    OK(search(&a.q, &answer));
    CHECK(answer.count > 0);
    for (int i = 0; i < answer.count; i++)
        CHECK(answer.best[i].time.step_s > 0 && answer.best[i].layout.value[LAYOUT_TP] == 1);
    config_release(&a.base);
}

/* What needs least is said, and with as much memory there is an answer, with less there is none. */
TEST(the_least_memory)
{
    static SearchAnswer answer;
    Asked a;
    ASK(&a, dense, 8, 1 << 20);
    OK(search(&a.q, &answer));
    CHECK(!answer.count && answer.least_bytes > 1 << 20 && answer.least_bytes < INT64_MAX);
    a.q.memory = answer.least_bytes + (1 << 20);
    OK(search(&a.q, &answer));
    CHECK(answer.count > 0);
    config_release(&a.base);
}

/* Threads make no difference. */
TEST(one_answer)
{
    static SearchAnswer one, other;
    Asked a;
    ASK(&a, mixture, 8, INT64_MAX);
    OK(search(&a.q, &one));
    a.q.threads = 4;
    OK(search(&a.q, &other));
    CHECK(one.count == other.count && one.count == 3);
    for (int i = 0; i < one.count; i++)
        CHECK(!layout_compare(&one.best[i].layout, &other.best[i].layout) &&
              one.best[i].time.step_s == other.best[i].time.step_s);
    config_release(&a.base);
}

TEST_MAIN
