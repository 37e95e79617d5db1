/* See predict.h. */
#include "plan/predict.h"

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/units.h"
#include "pipeline/chart.h"
#include "pipeline/simulate.h"
#include "plan/shape.h"
#include "train/threads.h"

/* ---- one rank ---- */

typedef struct {
    TimeLine line;
    const CostModel *model;
    bool graphs;
} Clock;

/* TimeShares are doubles alone: the counts of the clock, the seconds first. */
_Static_assert(sizeof(TimeShares) <= CLOCK_COUNTS * sizeof(double) && offsetof(TimeShares, now) == 0,
               "a clock has room for the shares");

static void attach(void *user, Device *dev, World *world)
{
    Clock *c = user;
    time_line_attach(&c->line, c->model, dev, world);
    c->line.graphs = c->graphs;
}

/* (Before each action, and behind it: a graph has work of one.) */
static double now(const void *user)
{
    Clock *c = (Clock *)(uintptr_t)user;
    c->line.in_piece = false;
    return c->line.shares.now;
}

static void read_shares(const void *user, double counts[CLOCK_COUNTS])
{
    memcpy(counts, &((const Clock *)user)->line.shares, sizeof(TimeShares));
}

Err predict_rank(const CostModel *m, const TrainSpec *spec, Grid grid, int rank, MemoryPlan *plan, StepTimes *times)
{
    Clock *c = calloc(1, sizeof *c);
    if (!c) return err_set(ERR_MEMORY, "no memory for a time line");
    c->model = m;
    c->graphs = spec->graphs && !m->cpu;
    const DryClock clock = { .user = c, .attach = attach, .now = now, .read = read_shares };
    const Err err = trainer_time(spec, grid, rank, &clock, plan, times);
    free(c);
    return err;
}

/* ---- the pipeline ---- */

/* same_host: both ends are there. */
static double hop_seconds(const CostModel *m, const TrainSpec *spec, Grid grid, bool same_host)
{
    const int slices = spec->pipeline.slices > 1 ? spec->pipeline.slices : 1, cp = grid.cp > 1 ? grid.cp : 1;
    const int64_t rows = spec->micro_batch * spec->model.seq / slices / cp / (grid.sp ? grid.tp : 1);
    return cost_message(m, same_host,
                        rows * spec->model.hidden * dtype_size(spec->fp32_residual ? F32 : spec->compute));
}

double predict_hop(const CostModel *m, const TrainSpec *spec, Grid grid)
{
    return hop_seconds(m, spec, grid, cost_place(m, grid_shape(grid), GROUP_PP, 0).hosts == 1);
}

Err predict_hops(const CostModel *m, const TrainSpec *spec, Grid grid, double *hop)
{
    const GridShape shape = grid_shape(grid);
    int *members = calloc((size_t)grid.pp, sizeof *members);
    if (!members) return err_set(ERR_MEMORY, "no memory for %d pipeline ranks", grid.pp);
    for (int i = 0; i < grid.pp; i++) hop[i] = 0;
    for (int g = 0; g < group_count(shape, GROUP_PP) && grid.pp > 1; g++) {
        group_members(shape, GROUP_PP, g, members);
        for (int i = 0; i < grid.pp; i++) {
            const bool here = cost_same_host(m, shape, members[i], members[(i + 1) % grid.pp]);
            hop[i] = fmax(hop[i], hop_seconds(m, spec, grid, here));
        }
    }
    free(members);
    return ERR_OK;
}

/* Seconds that the rank waits for those with the same weights, in a whole step. */
static double waits_for_copies(const TimeShares *s)
{
    double sum = 0;
    for (int i = 0; i < WORLD_COMMS; i++) sum += group_of_copies((GroupKind)i) ? s->waited[i] : 0;
    return sum;
}

static Err run_on_time_line(const void *user, const TrainSpec *spec, Grid grid, int rank, MemoryPlan *plan,
                            RankTimes *times)
{
    StepTimes t;
    TimeShares shares;
    TRY(predict_rank(user, spec, grid, rank, plan, &t));
    memcpy(&shares, plan->work.clock, sizeof shares);
    *times = (RankTimes){ .tail = t.rest, .reduce = fmin(t.rest, waits_for_copies(&shares)) };
    memcpy(times->stage, t.unit, sizeof times->stage);
    if (grid.pp > 1) times->hop = predict_hop(user, spec, grid);
    return ERR_OK;
}

CostSource predict_source(const CostModel *m) { return (CostSource){ m, run_on_time_line, m }; }

typedef struct {
    const CostSource *source;
    const TrainSpec *spec; /* of what is run dry; the step is */
    double times;          /* so many times as many micro-batches */
    Grid grid;
    PredictHow how;
    Schedule schedule;
    StageCost *stage; /* [stages] */
    double *hop;      /* [pipeline ranks] to the next */
    MemoryPlan *rank; /* [pipeline ranks] of the first tp and cp rank */
    double rest;      /* the longest */
    bool numbers;     /* all costs are */
    int slowest;      /* pipeline rank */
    int64_t bytes;    /* of the one that takes most */
    int worst;        /* pipeline rank */
} Pipeline;

static bool is_cost(StageCost c) { return c.f >= 0 && c.i >= 0 && c.w >= 0 && c.f + c.i + c.w < DBL_MAX; }

static void note_bytes(Pipeline *p, int pp, const MemoryPlan *plan)
{
    const int64_t bytes = memory_plan_total(plan);
    if (bytes <= p->bytes) return;
    p->bytes = bytes;
    p->worst = pp;
}

/* The last of the pipeline rank's tp and cp ranks: others take what the first or the last ones take. */
static Err run_corners(Pipeline *p, int pp)
{
    const int tp = p->grid.tp - 1, cp = p->grid.cp > 1 ? p->grid.cp - 1 : 0;
    for (int corner = 1; corner < 4; corner++) {
        MemoryPlan plan;
        const int t = corner & 1 ? tp : 0, c = corner & 2 ? cp : 0;
        if ((corner & 1 && !tp) || (corner & 2 && !cp)) continue;
        TRY(trainer_plan(p->spec, p->grid, grid_rank_at(p->grid, pp, t, c), &plan));
        note_bytes(p, pp, &plan);
    }
    return ERR_OK;
}

/* For how many ranks of a pipeline there are processors; 0: for all. */
static double processors_of_pipeline(const Pipeline *p)
{
    const CostModel *m = p->source->model;
    const double all = m ? (double)m->device->processors : 0, ranks = grid_size(p->grid);
    return m && m->cpu && ranks > all ? all * p->grid.pp / ranks : 0;
}

/* Ranks that take turns have no processor left for the threads that carry messages: what a message takes while all are
 * at work is work of theirs, that of its two ends a half each. Their stages' units take so much longer. */
static void charge_messages(Pipeline *p)
{
    const Schedule *s = &p->schedule;
    const double share = processors_of_pipeline(p) / p->grid.pp;
    for (int stage = 0; stage < s->stages && share > 0; stage++) {
        const int rank = schedule_rank_of(s, 0, stage);
        for (int side = -1; side <= 1; side += 2) {
            const int other = stage + side;
            if (other < 0 || other >= s->stages) continue;
            const int other_rank = schedule_rank_of(s, 0, other);
            if (other_rank == rank) continue;
            const int low = rank < other_rank ? rank : other_rank, high = rank < other_rank ? other_rank : rank;
            const double end = share * p->hop[high - low == 1 ? low : high] / 2;
            p->stage[stage].f += end;
            p->stage[stage].i += end;
        }
    }
}

/* Who sends goes on with its next unit, for which the thread that carries the message may have to wait. */
static Err time_hops(Pipeline *p)
{
    const CostModel *m = p->source->model;
    if (!m) return ERR_OK;
    TRY(predict_hops(m, p->spec, p->grid, p->hop));
    for (int r = 0; r < p->grid.pp && p->grid.pp > 1; r++)
        p->hop[r] += cost_skew(m, 2, p->stage[p->rank[r].stages[0].stage].f);
    charge_messages(p);
    return ERR_OK;
}

static Err time_ranks(Pipeline *p)
{
    p->numbers = true;
    for (int r = 0; r < p->grid.pp; r++) {
        RankTimes t = { .tail = 0 };
        MemoryPlan *plan = &p->rank[r];
        const int rank = grid_rank_at(p->grid, r, 0, 0);
        TRY(p->source->dry_run(p->source->user, p->spec, p->grid, rank, plan, &t));
        for (int s = 0; s < plan->stage_count; s++) {
            p->stage[plan->stages[s].stage] = t.stage[s];
            p->numbers &= is_cost(t.stage[s]);
        }
        if (plan->work.clock[0] > p->rank[p->slowest].work.clock[0]) p->slowest = r;
        p->rest = fmax(p->rest, t.tail);
        p->hop[r] = t.hop;
        note_bytes(p, r, plan);
        if (p->how == PREDICT_RANKS) TRY(run_corners(p, r));
    }
    return time_hops(p);
}

static double ops_seconds(const TimeShares *s)
{
    double sum = 0;
    for (int i = 0; i < FAMILIES; i++) sum += s->family[i];
    return sum;
}

static double waited_seconds(const TimeShares *s)
{
    double sum = 0;
    for (int i = 0; i < WORLD_COMMS; i++) sum += s->waited[i];
    return sum;
}

/* Seconds of what a step does once, however many micro-batches it has. */
static double seconds_once(const TimeShares *s) { return s->family[FAMILY_OPTIMIZER] + waits_for_copies(s); }

/* Shares of the rank's step; units: seconds of all of its units, where fewer were run dry. */
static TimeShares shares_of(const Pipeline *p, int pp, double units)
{
    TimeShares s;
    memcpy(&s, p->rank[pp].work.clock, sizeof s);
    const double once = seconds_once(&s), more = (units + p->rest - once) / (s.now - once);
    if (p->times == 1 || !(more > 0 && more < DBL_MAX)) return s;
    for (int i = 0; i < FAMILIES; i++) s.family[i] *= i == FAMILY_OPTIMIZER ? 1 : more;
    for (int i = 0; i < WORLD_COMMS; i++) s.waited[i] *= group_of_copies((GroupKind)i) ? 1 : more;
    s.copied *= more;
    s.idle *= more;
    s.now = units + p->rest;
    return s;
}

/* More ranks than a host has processors take turns: what one would wait for another, it computes in, but all that they
 * compute is a processor's work. (What calls take between so many ranks was measured so.) */
static double shared_seconds(const Pipeline *p, double units, const TimeShares *slowest)
{
    const CostModel *m = p->source->model;
    const double ranks = grid_size(p->grid);
    double ops = 0;
    if (!m || !m->cpu || ranks <= (double)m->device->processors) return 0;
    for (int r = 0; r < p->grid.pp; r++) {
        const TimeShares s = shares_of(p, r, units);
        ops += ops_seconds(&s) * ranks / p->grid.pp;
    }
    return ops / (double)m->device->processors + waited_seconds(slowest);
}

static void rate(const Pipeline *p, Prediction *out)
{
    const CostModel *m = p->source->model;
    const double samples = p->times * (double)p->spec->global_batch, ranks = grid_size(p->grid);
    out->tokens_s = samples * (double)p->spec->model.seq / out->step_s;
    out->flop_s = (double)model_flop_per_token(&p->spec->model, out->params) * out->tokens_s / ranks;
    if (!m) return;
    const double peak = 1e12 * (p->spec->compute == F32 ? m->device->fp32_tflops : m->device->bf16_tflops);
    /* (a host's processors have one peak for all of its ranks) */
    out->mfu = peak > 0 ? out->flop_s * (m->cpu ? m->ranks : 1) / peak : 0;
}

static void conclude(const Pipeline *p, const Simulation *s, Prediction *out)
{
    const double units = s->ideal * p->times;
    *out = (Prediction){ .step_s = units + s->bubble + p->rest,
                         .pp_rank = p->slowest,
                         .shares = shares_of(p, p->slowest, units),
                         .rest_s = p->rest,
                         .bytes = p->bytes,
                         .worst_pp = p->worst,
                         .params = p->rank[0].params.model };
    /* (units vary a little, by how far the host is ahead: no step is shorter than what a rank of it takes) */
    out->step_s = p->grid.pp == 1 ? out->shares.now : fmax(out->step_s, out->shares.now);
    out->step_s = p->numbers ? fmax(out->step_s, shared_seconds(p, units, &out->shares)) : NAN;
    out->bubble_s = out->step_s - out->shares.now;
    rate(p, out);
}

/* The step's title and figures above its units, in milliseconds. */
static Err draw(Pipeline *p, const Prediction *step, FILE *out)
{
    char title[128], figures[160], whole[UNITS_BYTES], units[UNITS_BYTES], rest[UNITS_BYTES];
    const Schedule *s = &p->schedule;
    Simulation ms;
    for (int i = 0; i < s->stages; i++)
        p->stage[i] =
            (StageCost){ 1e3 * p->stage[i].f, 1e3 * p->stage[i].i, 1e3 * p->stage[i].w, 1e3 * p->stage[i].pair };
    for (int i = 0; i < s->ranks; i++) p->hop[i] *= 1e3;
    const Err err = simulate(s, &(SimulateCosts){ .stage = p->stage, .hop = p->hop }, &ms);
    snprintf(title, sizeof title, "a step of %lld samples on %s, predicted", (long long)p->spec->global_batch,
             p->source->model->device->name);
    snprintf(figures, sizeof figures,
             "a step of %s: units %s, of them %.1f %% idle; sums, norm and update behind them %s",
             units_step(whole, step->step_s), units_step(units, 1e-3 * ms.makespan),
             err ? 0 : 100 * simulation_idle(s, &ms), units_step(rest, step->rest_s));
    if (!err)
        chart_svg_runs(s, &(ChartRuns){ .title = title, .figures = figures, .unit = "ms", .run = { &ms }, .runs = 1 },
                       out);
    simulation_free(&ms, s);
    return err;
}

/* A batch of an evaluation takes what the forwards of a step take, one behind the other. */
static Err time_forwards(const Pipeline *p, double *seconds)
{
    Schedule s;
    Simulation simulation = { 0 };
    Err err = trainer_forwards(p->spec, p->grid, &s);
    if (!err) err = simulate(&s, &(SimulateCosts){ .stage = p->stage, .hop = p->hop }, &simulation);
    if (!err) *seconds = simulation.makespan;
    simulation_free(&simulation, &s);
    schedule_free(&s);
    return err;
}

static Err predict_with(Pipeline *p, Prediction *out)
{
    Simulation simulation;
    TRY(time_ranks(p));
    const SimulateCosts costs = { .stage = p->stage, .hop = p->hop, .processors = processors_of_pipeline(p) };
    const Err err = simulate(&p->schedule, &costs, &simulation);
    if (!err) conclude(p, &simulation, out);
    simulation_free(&simulation, &p->schedule);
    return err;
}

static void close_pipeline(Pipeline *p)
{
    free(p->stage);
    free(p->rank);
    free(p->hop);
    schedule_free(&p->schedule);
}

/* Predicts; *p is to be closed, also after an error. */
static Err open_pipeline(Pipeline *p, Prediction *out)
{
    TRY(trainer_schedule(p->spec, p->grid, &p->schedule));
    p->stage = calloc((size_t)p->schedule.stages, sizeof *p->stage);
    p->rank = calloc((size_t)p->grid.pp, sizeof *p->rank);
    p->hop = calloc((size_t)p->grid.pp, sizeof *p->hop);
    return p->stage && p->rank && p->hop ? predict_with(p, out)
                                         : err_set(ERR_MEMORY, "no memory to predict %d stages", p->schedule.stages);
}

/* A rank of a small model does not take all threads of its share (train/threads.h). */
static Err use_threads(const CostModel *m, const TrainSpec *spec, Grid grid, CostModel *out)
{
    MemoryPlan plan;
    *out = *m;
    if (!m->cpu || m->threads == 1) return ERR_OK;
    TRY(trainer_plan(spec, grid, 0, &plan));
    if (spec->device.threads) out->threads = spec->device.threads;
    else if (threads_useful(&plan) < m->threads) out->threads = threads_useful(&plan);
    return ERR_OK;
}

Err predict_allowed(const DeviceFile *d, const TrainSpec *spec)
{
    const int capability = device_capability(d);
    return capability ? fp8_spec_on_gpu(&spec->model.fp8, capability, d->name) : ERR_OK;
}

/* On how many threads a rank computes is a property of the model, of which the source then has a copy. */
static Err open_source(const CostSource *asked, const TrainSpec *spec, Grid grid, CostModel *m, CostSource *out)
{
    *out = *asked;
    if (!asked->model) return ERR_OK;
    TRY(predict_allowed(asked->model->device, spec));
    TRY(use_threads(asked->model, spec, grid, m));
    *out = predict_source(m);
    return ERR_OK;
}

/* The specification of a step with only as many micro-batches as show what more of them do. Those take *times as
 * long. */
static TrainSpec brief_spec(const TrainSpec *asked, Grid grid, double *times)
{
    TrainSpec out = *asked;
    const int64_t share = asked->micro_batch * grid.dp;
    const int all = (int)(asked->global_batch / share), made = shape_microbatches(grid.pp, all);
    out.global_batch = made * share;
    out.ramp = batch_ramp_flat(out.global_batch);
    *times = (double)all / made;
    return out;
}

Err predict_by(const CostSource *source, const TrainSpec *spec, Grid grid, PredictHow how, Prediction *out)
{
    CostModel shared;
    CostSource by;
    TrainSpec brief;
    if (!grid.pp) grid.pp = 1;
    TRY(open_source(source, spec, grid, &shared, &by));
    Pipeline p = { .source = &by, .spec = spec, .times = 1, .grid = grid, .how = how };
    if (how == PREDICT_BRIEF) brief = brief_spec(spec, grid, &p.times), p.spec = &brief;
    const Err err = open_pipeline(&p, out);
    close_pipeline(&p);
    return err;
}

/* svg: a picture of it, too; or NULL. */
static Err predict_step(const CostModel *m, const TrainSpec *spec, Grid grid, Prediction *out, FILE *svg)
{
    const CostSource asked = predict_source(m);
    CostModel shared;
    CostSource by;
    if (!grid.pp) grid.pp = 1;
    TRY(open_source(&asked, spec, grid, &shared, &by));
    Pipeline p = { .source = &by, .spec = spec, .times = 1, .grid = grid, .how = PREDICT_STEP };
    Err err = open_pipeline(&p, out);
    if (!err) err = time_forwards(&p, &out->forward_s);
    if (!err && svg) err = draw(&p, out, svg);
    close_pipeline(&p);
    return err;
}

Err predict(const CostModel *m, const TrainSpec *spec, Grid grid, Prediction *out)
{
    return predict_step(m, spec, grid, out, NULL);
}

Err predict_svg(const CostModel *m, const TrainSpec *spec, Grid grid, Prediction *out, FILE *svg)
{
    return predict_step(m, spec, grid, out, svg);
}

/* ---- what it is bound by ---- */

void prediction_shares(const Prediction *p, PredictionShare out[PREDICTION_SHARES])
{
    int n = 0;
    for (int i = 0; i < FAMILIES; i++, n++) {
        snprintf(out[n].name, sizeof out[n].name, "%s", family_name((OpFamily)i));
        out[n].seconds = p->shares.family[i];
    }
    for (int i = 0; i < WORLD_COMMS; i++, n++) {
        snprintf(out[n].name, sizeof out[n].name, "waits for %s", group_name((GroupKind)i));
        out[n].seconds = p->shares.waited[i];
    }
    out[n++] = (PredictionShare){ "waits for other stages", p->bubble_s };
    out[n++] = (PredictionShare){ "waits for copies", p->shares.copied };
    out[n++] = (PredictionShare){ "waits for the host", p->shares.idle };
}

PredictionShare prediction_bound(const Prediction *p)
{
    PredictionShare all[PREDICTION_SHARES];
    int most = 0;
    prediction_shares(p, all);
    for (int i = 1; i < PREDICTION_SHARES; i++)
        if (all[i].seconds > all[most].seconds) most = i;
    return all[most];
}
