/*
 * How long a step takes by plan/predict.h, on devices that are made up for it: against pipelines that are walked here,
 * bytes over a link, and what must hold of any prediction.
 */
#include <math.h>
#include <stddef.h>

#include "base/units.h"
#include "plan/besides.h"
#include "plan/layer_cost.h"
#include "plan/predict.h"
#include "test.h"
#include "tiny.h"

/* 4 multiprocessors; memory work is what most of a tiny model takes. Times of calls are their bytes alone. */
static DeviceFile device(void)
{
    return (DeviceFile){ .name = "made up",
                         .memory_mib = 1,
                         .bf16_tflops = 1,
                         .fp32_tflops = 1,
                         .memory_gb_s = 100,
                         .multiprocessors = 4,
                         .attention_fwd_tflops = 1,
                         .attention_bwd_tflops = 1,
                         .host_devices = 64,
                         .link_gb_s = 1e6,
                         .network_gb_s = 1e6,
                         .matrix_share = 1,
                         .memory_share = 1,
                         .attention_share = 1,
                         .experts_share = 1,
                         .link_share = 1 };
}

typedef struct {
    TrainSpec spec;
    Grid grid;
    DeviceFile device;
} Case;

/* Blocks over `pp` ranks, 1F1B if there are several. */
static Case stages(int layers, int pp, int units)
{
    Case c = { .spec = tiny_llama(), .grid = { .tp = 1, .dp = 1, .pp = pp }, .device = device() };
    c.spec.exact = false;
    c.spec.model.layers = layers;
    c.spec.model.kv_heads = c.spec.model.heads;
    c.spec.micro_batch = 1;
    c.spec.global_batch = units;
    c.spec.pipeline.schedule = "1f1b";
    c.spec.pipeline.chunks = 1;
    return c;
}

static Prediction predicted(const Case *c)
{
    CostModel m;
    Prediction p = { 0 };
    OK(cost_open(&m, &c->device, 1));
    OK(predict(&m, &c->spec, c->grid, &p));
    return p;
}

#define NEAR(got, want, by) \
    CHECK_MSG(fabs((got) / (want)-1) < (by), "%s is %.9g, not %.9g", #got, (double)(got), (double)(want))

/* What a step consists of, added up. */
static double sum_of(const Prediction *p)
{
    double sum = p->bubble_s + p->shares.copied + p->shares.idle;
    for (int i = 0; i < FAMILIES; i++) sum += p->shares.family[i];
    for (int i = 0; i < WORLD_COMMS; i++) sum += p->shares.waited[i];
    return sum;
}

static double waited(const Prediction *p)
{
    double sum = 0;
    for (int i = 0; i < WORLD_COMMS; i++) sum += p->shares.waited[i];
    return sum;
}

/* ---- pipelines ---- */

enum { UNITS_MOST = 32, RANKS_MOST = 8 };

/*
 * 1F1B walked event by event, from what it is: rank r does p - 1 - r forwards, then forward and backward in turn, then
 * what backwards remain. Rounds over all ranks until nothing changes: each start is the latest of what it waits for.
 */
static double walk_1f1b(const StageCost *stage, int p, int m, double hop)
{
    double f[RANKS_MOST][UNITS_MOST] = { { 0 } }, b[RANKS_MOST][UNITS_MOST] = { { 0 } }, end = 0;
    for (int round = 0; round < 2 * (p + m) * p; round++)
        for (int r = 0; r < p; r++) {
            const int warm = p - 1 - r < m ? p - 1 - r : m;
            double now = 0;
            for (int i = 0, done = 0, back = 0; i < 2 * m; i++) {
                const bool forward = done < m && (i < warm || (i - warm) % 2 == 0);
                if (forward) {
                    const double ready = r ? f[r - 1][done] + hop : 0;
                    now = f[r][done++] = fmax(now, ready) + stage[r].f;
                } else {
                    const double ready = r < p - 1 ? b[r + 1][back] + hop : 0;
                    now = b[r][back++] = fmax(now, ready) + stage[r].i + stage[r].w;
                }
            }
            end = fmax(end, now);
        }
    return end;
}

static void check_pipeline(const Case *c)
{
    CostModel m;
    StageCost stage[RANKS_MOST];
    double rest = 0, hop;
    OK(cost_open(&m, &c->device, 1));
    for (int r = 0; r < c->grid.pp; r++) {
        MemoryPlan plan;
        StepTimes t;
        OK(predict_rank(&m, &c->spec, c->grid, r, &plan, &t));
        stage[r] = t.unit[0];
        rest = fmax(rest, t.rest);
    }
    hop = predict_hop(&m, &c->spec, c->grid);
    const int units = (int)c->spec.global_batch;
    const Prediction p = predicted(c);
    NEAR(p.step_s, walk_1f1b(stage, c->grid.pp, units, hop) + rest, 1e-9);
    CHECK(p.bubble_s > 0 && p.rest_s == rest);
}

TEST(unequal_stages_take_what_their_events_take)
{
    for (int pp = 2; pp <= 4; pp++)
        for (int units = pp; units <= 9; units += 3) {
            Case c =
                stages(5, pp, units); /* (the first ranks have a block more, the last one has the head) */
            check_pipeline(&c);
            c.device.link_gb_s = .01; /* a hop counts */
            check_pipeline(&c);
        }
}

/* Four ranks on two hosts: of three hops one crosses the network, and both ways of a unit take it. */
TEST(only_hops_between_hosts_cross_the_network)
{
    Case c = stages(4, 4, 1);
    CostModel m;
    double hop[4], far[4];
    c.device.host_devices = 4;
    OK(cost_open(&m, &c.device, 1));
    OK(predict_hops(&m, &c.spec, c.grid, hop));
    const Prediction near = predicted(&c);
    c.device.host_devices = 2, c.device.network_us = 1000;
    OK(predict_hops(&m, &c.spec, c.grid, far));
    CHECK(hop[0] == hop[1] && hop[1] == hop[2] && hop[2] == hop[3]);
    CHECK(far[0] == hop[0] && far[2] == hop[2] && far[1] == far[3] && far[1] > hop[1] + 9e-4);
    CHECK(predict_hop(&m, &c.spec, c.grid) == far[1]);
    const Prediction apart = predicted(&c);
    NEAR(apart.step_s - apart.rest_s - (near.step_s - near.rest_s), 2 * (far[1] - hop[1]), 1e-6);
    Grid two = c.grid;
    two.dp = 2; /* each rank's neighbours are on other hosts */
    OK(predict_hops(&m, &c.spec, two, far));
    CHECK(far[0] == far[1] && far[1] == far[2] && far[0] > hop[0]);
    c.device.host_devices = 3; /* of two pipelines one crosses, first or second hop: both wait */
    OK(predict_hops(&m, &c.spec, two, far));
    CHECK(far[0] > hop[0] && far[1] > hop[1]);
}

/* (m + p - 1)(f + b) where all stages are alike: a block so large that tables, head and loss are nothing beside it. */
TEST(equal_stages_take_their_closed_form)
{
    for (int pp = 2; pp <= 4; pp++) {
        CostModel m;
        MemoryPlan plan;
        StepTimes t;
        Case c = stages(pp, pp, 8);
        c.spec.model.ffn = 1 << 18;
        OK(cost_open(&m, &c.device, 1));
        OK(predict_rank(&m, &c.spec, c.grid, 0, &plan, &t));
        const StageCost each = t.unit[0];
        const Prediction p = predicted(&c);
        NEAR(p.step_s - p.rest_s, (8 + pp - 1) * (each.f + each.i + each.w), 2e-2);
        NEAR(p.bubble_s, (pp - 1) * (each.f + each.i + each.w), 1e-1);
    }
}

/* ---- what is sent ---- */

static Case tensor_parallel(void)
{
    Case c = stages(4, 1, 4);
    c.spec.pipeline.schedule = NULL;
    c.grid = (Grid){ .tp = 4, .dp = 1, .sp = true };
    return c;
}

static double bytes_sent(const Case *c)
{
    CostModel m;
    MemoryPlan plan;
    StepTimes t;
    OK(cost_open(&m, &c->device, 1));
    OK(predict_rank(&m, &c->spec, c->grid, 0, &plan, &t));
    return (double)plan.work.comm_bytes;
}

TEST(beside_nothing_a_step_is_its_bytes_over_the_link)
{
    Case c = tensor_parallel();
    c.device.bf16_tflops = c.device.fp32_tflops = c.device.memory_gb_s = 1e9;
    c.device.attention_fwd_tflops = c.device.attention_bwd_tflops = 1e9;
    c.device.link_gb_s = 1e-3;
    const Prediction p = predicted(&c);
    NEAR(p.step_s, bytes_sent(&c) / 1e6, 1e-3); /* (of what is sent beside each other there is little) */
    NEAR(waited(&p), p.step_s, 1e-3);
}

TEST(what_is_sent_fast_is_not_waited_for)
{
    Case c = tensor_parallel();
    c.device.link_gb_s = 1e12;
    const Prediction p = predicted(&c);
    CHECK(waited(&p) >= 0 && waited(&p) < 1e-2 * p.step_s && p.bubble_s == 0);
}

/* Two ranks of a host whose calls take longer by a tenth of their work since they met, where no product is beside them.
 * Of four that take turns on two processors it was not measured. */
TEST(calls_take_longer_behind_work)
{
    static DevicePoint points[] = { { "skew", "", 2, 1, 1, { 1e-3 }, 1e-4 }, { "skew", "", 2, 1, 1, { 1e9 }, 1e8 } };
    const DevicePoints skew = { .items = points, .count = 2, .names = 1 };
    Case c = tensor_parallel();
    c.device.multiprocessors = 0;
    c.device.processors = 2;
    const Prediction even = predicted(&c);
    c.device.points = skew;
    CostModel m;
    Prediction late = { 0 };
    OK(cost_open(&m, &c.device, 2));
    OK(predict(&m, &c.spec, c.grid, &late));
    const double ops = late.shares.now - waited(&late), more = (waited(&late) - waited(&even)) / ops;
    CHECK_MSG(more > 0.03 && more < 0.1 + 1e-6, "%g of the work", more);
    CHECK(cost_skew(&m, 2, 1) > 0);
    OK(cost_open(&m, &c.device, 4));
    CHECK(cost_skew(&m, 2, 1) == 0);
}

/* A pipeline of four ranks, whose members of a call of all take so long on two processors. */
static double step_of_turns(double us)
{
    DevicePoint points[] = { { "exchange", "", 4, 1, 1, { 1e9 }, us } };
    Case c = stages(8, 4, UNITS_MOST);
    CostModel m;
    Prediction p = { 0 };
    c.device.multiprocessors = 0;
    c.device.processors = 2;
    c.device.points = (DevicePoints){ .items = points, .count = 1, .names = 1 };
    OK(cost_open(&m, &c.device, 4));
    OK(predict(&m, &c.spec, c.grid, &p));
    return p.step_s;
}

/* Nobody is idle behind whom a message could hide: of its time, while four calls share two processors, a half is each
 * end's and each's neighbour's. Three links, both ways, over two processors. */
TEST(messages_are_work_where_ranks_take_turns)
{
    const double none = step_of_turns(1e-6), us = 1e6 * none / UNITS_MOST / 60, more = step_of_turns(us) - none,
                 work = 1e-6 * us * UNITS_MOST * 3 * 2 / 2 / 2;
    CHECK_MSG(more > 0.9 * work && more < 1.3 * work, "%g, not about %g, of %g", more, work, none);
}

/* Sums of gradients go on beside the backward: much of what is sent is not waited for, and with more arithmetic less
 * is. */
TEST(sums_of_gradients_hide_behind_arithmetic)
{
    Case c = stages(8, 1, 2);
    c.spec.pipeline.schedule = NULL;
    c.spec.update.overlap_grad = true;
    c.spec.update.bucket_bytes = 1 << 16;
    c.spec.global_batch = 4;
    c.grid = (Grid){ .tp = 1, .dp = 2 };
    c.device.link_gb_s = 5;
    Case apart = c;
    apart.spec.update.overlap_grad = false;
    const Prediction beside = predicted(&c), behind = predicted(&apart);
    CHECK_MSG(waited(&beside) < .8 * waited(&behind), "%g s of waiting, and %g behind", waited(&beside),
              waited(&behind));
    CHECK(beside.step_s < behind.step_s);
    c.spec.micro_batch = 2, c.spec.global_batch = 8;
    const Prediction more = predicted(&c);
    CHECK(waited(&more) <= waited(&beside));
}

/* Ranks that hand states on scan one after the other: each waits for the others' turns, forward and backward, and with
 * recomputation for as many. Those that exchange heads do not. */
TEST(states_make_ranks_wait)
{
    Case c = { .spec = tiny_delta(tiny_llama()), .grid = { .tp = 1, .dp = 1, .cp = 4 }, .device = device() };
    c.spec.model.mixer = layer_pattern_all(MIXER_DELTA);
    c.spec.seq_blocks = 8;
    c.device.fp32_tflops = 1e-4; /* (scans are most of a step) */
    for (Recompute again = RECOMPUTE_NONE; again <= RECOMPUTE_FULL; again++) {
        c.spec.model.recompute = layer_pattern_all(again);
        c.spec.model.context = layer_pattern_all(CONTEXT_STATE);
        const Prediction p = predicted(&c);
        const double scans = p.shares.op[OP_delta_fwd] + p.shares.op[OP_delta_bwd];
        const double made_again = again == RECOMPUTE_SELECTIVE ? p.shares.op[OP_delta_fwd] / 2 : 0;
        NEAR(waited(&p), 3 * (scans - made_again), 1e-2);
        c.spec.model.context = layer_pattern_all(CONTEXT_A2A);
        const Prediction heads = predicted(&c);
        CHECK(waited(&heads) < 1e-2 * waited(&p));
    }
}

/* A host that issues slowly is what a step takes: so much for each kernel. */
TEST(a_slow_host_is_what_a_step_takes)
{
    Case c = stages(2, 1, 2);
    c.spec.pipeline.schedule = NULL;
    c.device.host_us = 1e6;
    const Prediction p = predicted(&c);
    NEAR(p.step_s, p.shares.launches, 1e-3);
    NEAR(p.shares.idle, p.step_s, 1e-3);
    c.device.host_us = 0;
    CHECK(predicted(&c).shares.idle == 0);
}

/* With graphs: so much for each piece between calls and waits. One rank has one or none an action: 2 of each
 * micro-batch, the norm and the update. Four calls in each pass of a block cut those of two ranks. */
TEST(a_slow_host_issues_graphs)
{
    enum { LAYERS = 2, UNITS = 2 };
    for (int tp = 1; tp <= 2; tp++) {
        Case c = stages(LAYERS, 1, UNITS);
        c.spec.pipeline.schedule = NULL;
        c.spec.graphs = true;
        c.grid = (Grid){ .tp = tp, .dp = 1, .sp = tp > 1 };
        c.device.host_us = 1e6;
        const Prediction p = predicted(&c);
        NEAR(p.step_s, p.shares.pieces, 1e-3);
        if (tp == 1) CHECK_MSG(p.shares.pieces == 2 * UNITS + 2, "%g pieces", p.shares.pieces);
        else CHECK_MSG(p.shares.pieces >= UNITS * LAYERS * 8 && p.shares.pieces < .8 * p.shares.launches,
                       "%g pieces of %g launches", p.shares.pieces, p.shares.launches);
    }
}

/* Bytes of all saves that leave and come back, of so many units. */
static double copied_bytes(const Case *c, int units)
{
    MemoryPlan plan;
    OK(trainer_plan(&c->spec, c->grid, 0, &plan));
    return 2. * units * (double)plan.stages[0].away;
}

/*
 * Over a slow link copies are what a step takes, out and back one behind the other: all bytes of its units but what ops
 * do before the first and behind the last. Over a fast one they hide behind ops, but for the first that comes back:
 * nothing is between it and the end of the last block's forward but the head.
 */
TEST(copies_over_the_host_link)
{
    enum { LAYERS = 6, UNITS = 4 };
    Case c = stages(LAYERS, 1, UNITS), kept = c;
    c.spec.pipeline.schedule = kept.spec.pipeline.schedule = NULL;
    c.spec.model.offload = LAYERS;
    const double ops = predicted(&kept).step_s;
    c.device.host_link_gb_s = 1e-3;
    NEAR(predicted(&c).step_s, copied_bytes(&c, UNITS) / 1e6, 1e-2);
    c.device.link_share = .5;
    NEAR(predicted(&c).step_s, 2 * copied_bytes(&c, UNITS) / 1e6, 1e-2);
    c.device.link_share = 1;
    /* (each unit's begin behind the copies before) */
    c.spec.model.layers = c.spec.model.offload = kept.spec.model.layers = 1;
    c.device.host_link_gb_s = 1e-9 * copied_bytes(&c, UNITS) / ops;
    const double alone = predicted(&kept).step_s, beside = predicted(&c).step_s - ops;
    CHECK_MSG(beside > .4 * alone && beside < alone, "%g s beside copies, of %g", beside, alone);
    c.spec.model.layers = c.spec.model.offload = LAYERS;
    c.device.host_link_gb_s = 1e-9 * copied_bytes(&c, UNITS) / (.1 * ops);
    const Prediction hidden = predicted(&c);
    CHECK_MSG(hidden.shares.copied <= .1 * ops / LAYERS, "%g s of waiting, in %g s", hidden.shares.copied, ops);
    CHECK(hidden.shares.copied >= 0 && hidden.step_s >= ops);
    NEAR(sum_of(&hidden), hidden.step_s, 1e-9);
    for (int n = 0, last = -1; n <= LAYERS; n++) { /* (more layers, never less) */
        c.spec.model.offload = n;
        c.device.host_link_gb_s = 1e-2;
        const int us = (int)(1e6 * predicted(&c).step_s);
        CHECK_MSG(us >= last, "%d layers: %d us, one less: %d", n, us, last);
        last = us;
    }
}

/* Rows on their way to experts: the host reads how many, and no longer runs ahead. */
TEST(a_mixture_waits_for_the_host)
{
    Case c = stages(2, 1, 4);
    c.spec.model = tiny_mixture(TINY_MIXTRAL, 2).model;
    c.spec.pipeline.schedule = NULL;
    c.grid = (Grid){ .tp = 1, .dp = 2, .ep = 2 };
    c.device.host_us = 1;
    const double ahead = predicted(&c).shares.idle;
    c.device.host_us = 2;
    const Prediction p = predicted(&c);
    CHECK(ahead > 0 && p.shares.idle > ahead);
    NEAR(sum_of(&p), p.step_s, 1e-9);
}

/* ---- pairs ---- */

enum { CALL_US = 1, PAIR_UNITS = 6 };

/* A mixture in two chunks on each of two ranks, whose kernels each take longer than a call on its way to experts. */
static Case paired(bool overlap)
{
    Case c = stages(4, 2, 2 * PAIR_UNITS);
    c.spec.model = tiny_mixture(TINY_MIXTRAL, 4).model;
    c.spec.pipeline.schedule = "dualpipev";
    c.spec.pipeline.chunks = 2;
    c.spec.overlap_moe = overlap;
    c.grid = (Grid){ .tp = 1, .dp = 2, .pp = 2, .ep = 2 };
    c.device.link_us = CALL_US;
    c.device.gap_us = 20 * CALL_US;
    return c;
}

static void one_rank(const Case *c, int pp, MemoryPlan *plan, StepTimes *t)
{
    CostModel m;
    OK(cost_open(&m, &c->device, 1));
    OK(predict_rank(&m, &c->spec, c->grid, grid_rank_at(c->grid, pp, 0, 0), plan, t));
}

static int pairs_of(const Case *c, int pp, int stage)
{
    Schedule s;
    int pairs = 0;
    OK(trainer_schedule(&c->spec, c->grid, &s));
    for (int i = 0; i < s.rank[pp].count; i++) {
        const Action *a = &s.rank[pp].action[i];
        pairs += a->flags & ACTION_PAIR && a->stage == stage;
    }
    schedule_free(&s);
    return pairs;
}

/* One of a unit's four trips of rows is beside other work anyway: sums of its experts' gradients. Three are waited for
 * where the halves come one by one, and none in a pair. */
TEST(a_pair_hides_what_its_halves_wait_for)
{
    const double trip = 1e-6 * (CALL_US + 1); /* (a peer takes another microsecond) */
    for (int pp = 0; pp < 2; pp++) {
        const Case apart = paired(false), turns = paired(true);
        MemoryPlan one_by_one, in_turn, memory;
        StepTimes times, pairs;
        int count = 0;
        one_rank(&apart, pp, &one_by_one, &times);
        one_rank(&turns, pp, &in_turn, &pairs);
        for (int s = 0; s < 2; s++) {
            NEAR(pairs.unit[s].f, times.unit[s].f, 1e-9);
            NEAR(pairs.unit[s].i, times.unit[s].i, 1e-9);
            NEAR(pairs.unit[s].w, times.unit[s].w, 1e-9);
            CHECK(times.unit[s].pair == 0);
            NEAR(pairs.unit[s].pair, 3 * trip, 1e-4);
            count += pairs_of(&turns, pp, in_turn.stages[s].stage);
        }
        TimeShares was, is;
        memcpy(&was, one_by_one.work.clock, sizeof was), memcpy(&is, in_turn.work.clock, sizeof is);
        CHECK(count > PAIR_UNITS);
        NEAR(was.waited[GROUP_TP_EP] - is.waited[GROUP_TP_EP], 3 * trip * count, 1e-4);
        NEAR(was.now - is.now, 3 * trip * count, 1e-4);
        NEAR(pairs.rest, times.rest, 1e-6);
        OK(trainer_plan(&turns.spec, turns.grid, grid_rank_at(turns.grid, pp, 0, 0), &memory));
        CHECK(memory_plan_total(&memory) == memory_plan_total(&in_turn));
    }
}

/* Rows of both halves take one way, one behind the other: a pair is never shorter than its four trips. */
TEST(a_pair_takes_its_trips_at_least)
{
    Case c = paired(true);
    MemoryPlan plan;
    StepTimes t;
    c.device.link_us = 1e6;
    one_rank(&c, 0, &plan, &t);
    for (int s = 0; s < 2; s++) {
        const StageCost *u = &t.unit[s], *other = &t.unit[1 - s];
        const double takes = u->f + other->i + other->w - u->pair;
        CHECK_MSG(takes >= 4 && takes < u->f + other->i + other->w, "%g s", takes);
    }
}

/* The lists walked event by event, in rounds until nothing changes: a half of a pair begins and ends with the other. */
static double walk_lists(const Schedule *s, const StageCost *stage, double hop)
{
    double made[2][RANKS_MOST][UNITS_MOST] = { { { 0 } } }, end = 0;
    for (int round = 0; round < 64; round++)
        for (int r = 0; r < s->ranks; r++) {
            double now = 0;
            for (int i = 0; i < s->rank[r].count; i++) {
                const Action *a = &s->rank[r].action[i];
                const int halves = a->flags & ACTION_PAIR ? 2 : 1;
                double takes = halves == 2 ? -stage[a->stage].pair : 0;
                if (!action_is_compute(a->kind)) continue;
                for (int h = 0; h < halves; h++) {
                    const int at = a[h].stage, unit = a[h].microbatch;
                    const bool forward = a[h].kind == ACT_F, back = a[h].kind == ACT_B || a[h].kind == ACT_I;
                    const int from = forward ? at - 1 : at + 1;
                    const bool far = from >= 0 && from < s->stages && schedule_rank_of(s, 0, from) != r;
                    if ((forward || back) && from >= 0 && from < s->stages)
                        now = fmax(now, made[back][from][unit] + (far ? hop : 0));
                    takes += forward ? stage[at].f : back ? stage[at].i : 0;
                    takes += a[h].kind == ACT_B || a[h].kind == ACT_W ? stage[at].w : 0;
                }
                now += takes;
                for (int h = 0; h < halves; h++)
                    if (a[h].kind != ACT_W) made[a[h].kind != ACT_F][a[h].stage][a[h].microbatch] = now;
                i += halves - 1;
            }
            end = fmax(end, now);
        }
    return end;
}

TEST(a_step_with_pairs_takes_what_its_events_take)
{
    for (int overlap = 0; overlap < 2; overlap++) {
        const Case c = paired(overlap);
        const Prediction p = predicted(&c);
        StageCost stage[RANKS_MOST];
        Schedule s;
        CostModel m;
        double rest = 0;
        OK(cost_open(&m, &c.device, 1));
        for (int r = 0; r < 2; r++) {
            MemoryPlan plan;
            StepTimes t;
            one_rank(&c, r, &plan, &t);
            for (int i = 0; i < plan.stage_count; i++) stage[plan.stages[i].stage] = t.unit[i];
            rest = fmax(rest, t.rest);
        }
        OK(trainer_schedule(&c.spec, c.grid, &s));
        NEAR(p.step_s, walk_lists(&s, stage, predict_hop(&m, &c.spec, c.grid)) + rest, 1e-9);
        NEAR(sum_of(&p), p.step_s, 1e-9);
        schedule_free(&s);
    }
    const Case apart = paired(false), turns = paired(true);
    CHECK(predicted(&turns).step_s < predicted(&apart).step_s);
}

/* ---- operands of 8 bits ---- */

/* Experts over two ranks, in blocks as wide as experts of 8 bits want them. */
static Case experts_of_8_bits(bool experts)
{
    Case c = stages(2, 1, 2);
    c.spec.model = tiny_mixture(TINY_MIXTRAL, 2).model;
    c.spec.compute = BF16;
    c.spec.seq_blocks = 1;
    c.spec.model.hidden = c.spec.model.moe.ffn = 256;
    c.spec.model.head_dim = 32;
    c.spec.model.fp8 = fp8_between(FP8_BLOCKWISE, 2, 0);
    c.spec.model.fp8.experts = experts;
    c.grid = (Grid){ .tp = 1, .dp = 2, .pp = 1, .ep = 2 };
    c.device.fp8_tflops = 2;
    return c;
}

/* Products of 8 bits are as many as those of 16, of the rows that are expected, whichever tensor of theirs says so. */
TEST(experts_of_8_bits_multiply_the_rows_that_are_expected)
{
    MemoryPlan plan[2];
    for (int eight = 0; eight < 2; eight++) {
        const Case c = experts_of_8_bits(eight);
        OK(trainer_plan(&c.spec, c.grid, 0, &plan[eight]));
    }
    CHECK_MSG(plan[0].work.flop == plan[1].work.flop, "%lld and %lld FLOP", (long long)plan[0].work.flop,
              (long long)plan[1].work.flop);
}

/* What weights need once a step is no cost of a unit: a part alone takes what it takes among many units. */
TEST(parts_cost_what_units_do_behind_the_first)
{
    for (int keeps = 0; keeps < 3; keeps++) {
        CostModel m;
        BlockKinds kinds;
        LayerCosts costs;
        MemoryPlan plan;
        StepTimes t;
        Case c = stages(3, 5, 10);
        c.spec.compute = BF16;
        c.spec.seq_blocks = 1;
        c.spec.model.hidden = c.spec.model.ffn = 256;
        c.spec.model.head_dim = 32;
        c.spec.model.fp8 = fp8_between(keeps < 2 ? FP8_BLOCKWISE : FP8_TENSORWISE, 3, 0);
        c.spec.model.fp8.keeps_weights = keeps == 1;
        c.spec.pipeline.layout = "E|t|t|t|L";
        c.device.fp8_tflops = 2;
        OK(cost_open(&m, &c.device, 1));
        const CostSource source = predict_source(&m);
        CHECK(block_kinds(&c.spec.model, &kinds) && kinds.count == 1);
        OK(layer_costs(&source, &c.spec, c.grid, &kinds, PARTS_ALL, &costs));
        one_rank(&c, 2, &plan, &t);
        NEAR(costs.block[0].cost[BACKWARD_WHOLE].f, t.unit[0].f, 1e-9);
        NEAR(costs.block[0].cost[BACKWARD_WHOLE].i, t.unit[0].i, 1e-9);
    }
}

/* ---- besides ---- */

/* Units one behind the other through stages: the way of the first, and the longest stage once for each further one. */
TEST(an_evaluation_takes_its_forwards)
{
    for (int pp = 1; pp <= 3; pp++) {
        Case c = stages(5, pp, 7);
        double way = 0, longest = 0;
        c.device.link_gb_s = .01; /* a hop counts */
        CostModel m;
        OK(cost_open(&m, &c.device, 1));
        const double hop = pp > 1 ? predict_hop(&m, &c.spec, c.grid) : 0;
        for (int r = 0; r < pp; r++) {
            MemoryPlan plan;
            StepTimes t;
            one_rank(&c, r, &plan, &t);
            way += t.unit[0].f;
            longest = fmax(longest, t.unit[0].f);
        }
        NEAR(predicted(&c).forward_s, way + (pp - 1) * hop + 6 * longest, 1e-9);
    }
}

/* Worked by hand: a step of 2 s, an evaluation's batch of 0.5 s; 80 GB of checkpoint, 4 ranks, the largest of which has
 * 30. */
TEST(what_a_run_does_besides_is_so_much_of_a_step)
{
    Config c = { .data = { .valid = "a: x  b: 0.7 y 0.3 z", .split = "" },
                 .train = { .eval_every = 100, .eval_tasks = "" },
                 .derived = { .eval_samples = 24, .global_batch = 8 },
                 .checkpoint = { .every = 20 } };
    DeviceFile d = { .host_link_gb_s = 80, .link_share = .75, .disk_gb_s = 2, .step_us = 250 };
    const BesidesOf of = { 2, .5, 4, 80000000000, 30000000000 };
    Besides b = besides_of(&c, &d, &of);
    NEAR(b.evaluations, 2 * 3 * .5 / 100, 1e-12);
    NEAR(b.checkpoints, 40. / 20, 1e-12);
    NEAR(b.host, 250e-6, 1e-12);
    NEAR(besides_sum(&b), .03 + 2 + 250e-6, 1e-12);
    c.checkpoint.async = true; /* 30 GB at 60 GB/s, and 40 s of writing beside 40 s of steps */
    b = besides_of(&c, &d, &of);
    NEAR(b.checkpoints, .5 / 20, 1e-12);
    c.checkpoint.every = 15; /* 10 s of the write are left */
    b = besides_of(&c, &d, &of);
    NEAR(b.checkpoints, (.5 + 10) / 15, 1e-12);
    d.processors = 2, d.memory_gb_s = 24; /* all ranks read and write in one memory */
    b = besides_of(&c, &d, &of);
    NEAR(b.checkpoints, (10. + 10) / 15, 1e-12);
}

TEST(what_nobody_knows_is_said_to_be_unknown)
{
    Config c = { .data = { .valid = "x", .split = "" },
                 .train = { .eval_every = 100, .eval_tasks = "" },
                 .checkpoint = { .every = 20 } };
    const DeviceFile d = { .host_link_gb_s = 80, .link_share = .75, .step_us = 100 };
    const BesidesOf of = { 2, .5, 4, 80, 30 };
    Besides b = besides_of(&c, &d, &of);
    CHECK(isnan(b.evaluations) && isnan(b.checkpoints) && besides_sets(&c) == 1);
    NEAR(besides_sum(&b), 1e-4, 1e-12);
    c.train.eval_every = c.checkpoint.every = 0; /* at the end alone */
    b = besides_of(&c, &d, &of);
    CHECK(b.evaluations == 0 && b.checkpoints == 0 && b.tasks == 0);
    c.train.eval_tasks = "questions"; /* not asked */
    CHECK(besides_of(&c, &d, &of).tasks == 0);
    c.data.valid = "", c.train.eval_every = 10;
    b = besides_of(&c, &d, &of);
    CHECK(b.evaluations == 0 && besides_sets(&c) == 0 && isnan(b.tasks));
    NEAR(besides_sum(&b), 1e-4, 1e-12);
    c.data.split = "98,2", c.derived.eval_samples = c.derived.global_batch = 4;
    b = besides_of(&c, &d, &of);
    NEAR(b.evaluations, .05, 1e-12);
}

/* ---- any prediction ---- */

static Case scheduled(const char *name, int chunks)
{
    Case c = stages(8, 4, 8);
    c.spec.pipeline.schedule = name;
    c.spec.pipeline.chunks = chunks;
    return c;
}

TEST(shares_are_all_of_a_step)
{
    static const struct {
        const char *name;
        int chunks;
    } all[] = { { "gpipe", 1 }, { "1f1b", 1 }, { "interleaved", 2 }, { "zb-h1", 1 }, { "zb-v", 2 } };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const Case c = scheduled(all[i].name, all[i].chunks);
        const Prediction p = predicted(&c);
        NEAR(sum_of(&p), p.step_s, 1e-9);
        CHECK_MSG(p.bubble_s > 0 && p.rest_s > 0 && p.rest_s < p.step_s,
                  "%s: %g s of %g wait, %g behind units", all[i].name, p.bubble_s, p.step_s, p.rest_s);
        NEAR(p.tokens_s, 8 * TINY_SEQ / p.step_s, 1e-9);
        double ops = 0, families = 0;
        for (int op = 0; op < OP_COUNT; op++) ops += p.shares.op[op];
        for (int f = 0; f < FAMILIES; f++) families += p.shares.family[f];
        NEAR(ops, families, 1e-9);
    }
}

TEST(a_schedule_with_smaller_bubbles_takes_less)
{
    const Case plain = scheduled("1f1b", 1), interleaved = scheduled("interleaved", 2),
               split = scheduled("zb-h1", 1);
    CHECK(predicted(&interleaved).step_s < predicted(&plain).step_s);
    CHECK(predicted(&split).bubble_s < predicted(&plain).bubble_s);
}

TEST(more_work_takes_longer)
{
    const Case plain = stages(2, 1, 4);
    const double base = predicted(&plain).step_s;
    Case c = stages(3, 1, 4);
    CHECK(predicted(&c).step_s > base);
    c = stages(2, 1, 8);
    CHECK(predicted(&c).step_s > base);
    c = stages(2, 1, 4), c.spec.model.ffn *= 2;
    CHECK(predicted(&c).step_s > base);
    c = stages(2, 1, 4), c.spec.model.padded_vocab = c.spec.model.vocab = 1024;
    CHECK(predicted(&c).step_s > base);
    c = stages(2, 1, 4), c.device.memory_gb_s *= 2;
    CHECK(predicted(&c).step_s < base);
}

TEST(what_has_no_part_in_it_changes_nothing)
{
    const Case c = scheduled("1f1b", 1);
    Case other = c;
    other.spec.seed = other.spec.model.seed = 7;
    other.spec.update.lr.lr *= 3;
    other.spec.model.init_std = .5f;
    const Prediction a = predicted(&c), b = predicted(&other), again = predicted(&c);
    CHECK(!memcmp(&a, &b, sizeof a) && !memcmp(&a, &again, sizeof a));
}

/* A picture has each of the computes, and says what the step takes. */
TEST(a_picture_has_a_bar_for_each_compute)
{
    const Case c = stages(8, 4, 8);
    CostModel m;
    char *text = NULL, want[64], whole[UNITS_BYTES];
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    OK(cost_open(&m, &c.device, 1));
    Prediction drawn;
    OK(predict_svg(&m, &c.spec, c.grid, &drawn, f));
    const Prediction alone = predicted(&c);
    CHECK(!memcmp(&drawn, &alone, sizeof drawn));
    CHECK(!fclose(f));
    int bars = 0;
    for (const char *at = text; (at = strstr(at, " of unit ")); at++) bars++;
    CHECK_MSG(bars == 4 * 8 * 2, "%d bars", bars);
    snprintf(want, sizeof want, "a step of %s: units ", units_step(whole, predicted(&c).step_s));
    CHECK_MSG(strstr(text, want), "no '%s'", want);
    free(text);
}

/* A clock changes nothing of what is planned. */
TEST(bytes_are_those_of_a_plan_without_times)
{
    Case c = scheduled("interleaved", 2);
    c.grid.dp = 2;
    c.spec.global_batch *= 2;
    c.spec.update.overlap_grad = c.spec.update.overlap_param = true;
    c.spec.update.zero = ZERO_STATES;
    CostModel m;
    OK(cost_open(&m, &c.device, 1));
    for (int rank = 0; rank < 8; rank++) {
        MemoryPlan timed, plain;
        StepTimes t;
        OK(predict_rank(&m, &c.spec, c.grid, rank, &timed, &t));
        OK(trainer_plan(&c.spec, c.grid, rank, &plain));
        CHECK(timed.work.clock[0] > 0 && plain.work.clock[0] == 0);
        memset(timed.work.clock, 0, sizeof timed.work.clock);
        timed.flop_of_op =
            plain.flop_of_op; /* (a mean over what was walked, which with a clock is a step more) */
        CHECK(!memcmp(&timed, &plain, sizeof timed));
    }
}

TEST_MAIN
