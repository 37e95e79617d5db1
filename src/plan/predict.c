/* See predict.h. */
#include "plan/predict.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "pipeline/chart.h"
#include "pipeline/simulate.h"
#include "plan/layer_cost.h"
#include "train/threads.h"

/* ---- one rank ---- */

typedef struct {
    TimeLine line;
    const CostModel *model;
} Clock;

/* TimeShares are doubles alone: the counts of the clock, the seconds first. */
_Static_assert(sizeof(TimeShares) <= CLOCK_COUNTS * sizeof(double) && offsetof(TimeShares, now) == 0,
               "a clock has room for the shares");

static void attach(void *user, Device *dev, World *world)
{
    Clock *c = user;
    time_line_attach(&c->line, c->model, dev, world);
}

static double now(const void *user) { return ((const Clock *)user)->line.shares.now; }

static void read_shares(const void *user, double counts[CLOCK_COUNTS])
{
    memcpy(counts, &((const Clock *)user)->line.shares, sizeof(TimeShares));
}

Err predict_rank(const CostModel *m, const TrainSpec *spec, Grid grid, int rank, MemoryPlan *plan,
                 StepTimes *times)
{
    Clock *c = calloc(1, sizeof *c);
    if (!c) return err_set(ERR_MEMORY, "no memory for a time line");
    c->model = m;
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
    return cost_message(m, same_host, rows * spec->model.hidden * dtype_size(spec->compute));
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

typedef struct {
    StageCost *stage; /* [stages] */
    double *hop;      /* [pipeline ranks] to the next */
    MemoryPlan *rank; /* [pipeline ranks] */
    double rest;      /* the longest */
    int slowest;      /* pipeline rank */
    int64_t bytes;    /* of the one that takes most */
    int64_t params;
} Pipeline;

static Err time_ranks(const CostModel *m, const TrainSpec *spec, Grid grid, Pipeline *p)
{
    for (int r = 0; r < grid.pp; r++) {
        StepTimes t;
        MemoryPlan *plan = &p->rank[r];
        TRY(predict_rank(m, spec, grid, grid_rank_at(grid, r, 0, 0), plan, &t));
        for (int s = 0; s < plan->stage_count; s++) p->stage[plan->stages[s].stage] = t.unit[s];
        if (plan->clock[0] > p->rank[p->slowest].clock[0]) p->slowest = r;
        p->rest = fmax(p->rest, t.rest);
        p->params = plan->params;
        const int64_t bytes = memory_plan_total(plan);
        p->bytes = bytes > p->bytes ? bytes : p->bytes;
    }
    return ERR_OK;
}

static double ops_seconds(const double clock[CLOCK_COUNTS])
{
    TimeShares shares;
    double sum = 0;
    memcpy(&shares, clock, sizeof shares);
    for (int i = 0; i < FAMILIES; i++) sum += shares.family[i];
    return sum;
}

static double waited_seconds(const TimeShares *s)
{
    double sum = 0;
    for (int i = 0; i < WORLD_COMMS; i++) sum += s->waited[i];
    return sum;
}

/* More ranks than a host has processors take turns: what one would wait for another, it computes in, but all that they
 * compute is a processor's work. (What calls take between so many ranks was measured so.) */
static double shared_seconds(const CostModel *m, Grid grid, const Pipeline *p)
{
    const double processors = m->device->processors, ranks = grid_size(grid);
    double ops = 0;
    TimeShares slowest;
    if (!m->cpu || ranks <= processors) return 0;
    for (int r = 0; r < grid.pp; r++) ops += ops_seconds(p->rank[r].clock) * ranks / grid.pp;
    memcpy(&slowest, p->rank[p->slowest].clock, sizeof slowest);
    return ops / processors + waited_seconds(&slowest);
}

static void conclude(const CostModel *m, const TrainSpec *spec, Grid grid, const Pipeline *p, double makespan,
                     Prediction *out)
{
    const double peak = 1e12 * (spec->compute == F32 ? m->device->fp32_tflops : m->device->bf16_tflops);
    const double tokens = (double)(spec->global_batch * spec->model.seq), ranks = grid_size(grid);
    *out = (Prediction){
        .step_s = makespan + p->rest, .pp_rank = p->slowest, .rest_s = p->rest, .bytes = p->bytes
    };
    memcpy(&out->shares, p->rank[p->slowest].clock, sizeof out->shares);
    /* (units vary a little, by how far the host is ahead: no step is shorter than what a rank of it takes) */
    out->step_s = grid.pp == 1 ? out->shares.now : fmax(out->step_s, out->shares.now);
    out->step_s = fmax(out->step_s, shared_seconds(m, grid, p));
    out->bubble_s = out->step_s - out->shares.now;
    out->tokens_s = tokens / out->step_s;
    out->flop_s = (double)model_flop_per_token(&spec->model, p->params) * out->tokens_s / ranks;
    /* (a host's processors have one peak for all of its ranks) */
    out->mfu = peak > 0 ? out->flop_s * (m->cpu ? m->ranks : 1) / peak : 0;
}

/* The step's title and figures above its units, in milliseconds. */
static Err draw(const CostModel *m, const TrainSpec *spec, const Schedule *s, Pipeline *p,
                const Prediction *step, FILE *out)
{
    char title[128], figures[160];
    Simulation ms;
    for (int i = 0; i < s->stages; i++)
        p->stage[i] = (StageCost){ 1e3 * p->stage[i].f, 1e3 * p->stage[i].i, 1e3 * p->stage[i].w,
                                   1e3 * p->stage[i].pair };
    for (int i = 0; i < s->ranks; i++) p->hop[i] *= 1e3;
    const Err err = simulate(s, &(SimulateCosts){ .stage = p->stage, .hop = p->hop }, &ms);
    snprintf(title, sizeof title, "a step of %lld samples on %s, predicted", (long long)spec->global_batch,
             m->device->name);
    snprintf(figures, sizeof figures,
             "%.4g ms: units %.4g, of them %.1f %% idle; sums, norm and update behind them %.4g",
             1e3 * step->step_s, ms.makespan, err ? 0 : 100 * simulation_idle(s, &ms), 1e3 * step->rest_s);
    if (!err)
        chart_svg_runs(s,
                       &(ChartRuns){
                           .title = title, .figures = figures, .unit = "ms", .run = { &ms }, .runs = 1 },
                       out);
    simulation_free(&ms, s);
    return err;
}

/* For how many ranks of a pipeline there are processors; 0: for all. */
static double processors_of_pipeline(const CostModel *m, Grid grid)
{
    const double all = m->device->processors, ranks = grid_size(grid);
    return m->cpu && ranks > all ? all * grid.pp / ranks : 0;
}

/* A batch of an evaluation takes what the forwards of a step take, one behind the other. */
static Err time_forwards(const TrainSpec *spec, Grid grid, const Pipeline *p, double *seconds)
{
    Schedule s;
    Simulation simulation = { 0 };
    Err err = trainer_forwards(spec, grid, &s);
    if (!err) err = simulate(&s, &(SimulateCosts){ .stage = p->stage, .hop = p->hop }, &simulation);
    if (!err) *seconds = simulation.makespan;
    simulation_free(&simulation, &s);
    schedule_free(&s);
    return err;
}

/* svg: a picture of it, too; or NULL. */
static Err predict_with(const CostModel *m, const TrainSpec *spec, Grid grid, const Schedule *s, Pipeline *p,
                        Prediction *out, FILE *svg)
{
    Simulation simulation;
    TRY(time_ranks(m, spec, grid, p));
    TRY(predict_hops(m, spec, grid, p->hop));
    const SimulateCosts costs = { .stage = p->stage,
                                  .hop = p->hop,
                                  .processors = processors_of_pipeline(m, grid) };
    Err err = simulate(s, &costs, &simulation);
    if (!err) conclude(m, spec, grid, p, simulation.makespan, out);
    simulation_free(&simulation, s);
    if (!err) err = time_forwards(spec, grid, p, &out->forward_s);
    if (!err && svg) err = draw(m, spec, s, p, out, svg);
    return err;
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

static Err predict_step(const CostModel *m, const TrainSpec *spec, Grid grid, Prediction *out, FILE *svg)
{
    Schedule s;
    CostModel shared;
    if (!grid.pp) grid.pp = 1;
    TRY(use_threads(m, spec, grid, &shared));
    m = &shared;
    Err err = trainer_schedule(spec, grid, &s);
    Pipeline p = { 0 };
    if (!err) {
        p.stage = calloc((size_t)s.stages, sizeof *p.stage);
        p.rank = calloc((size_t)grid.pp, sizeof *p.rank);
        p.hop = calloc((size_t)grid.pp, sizeof *p.hop);
        err = p.stage && p.rank && p.hop ? predict_with(m, spec, grid, &s, &p, out, svg)
                                         : err_set(ERR_MEMORY, "no memory to predict %d stages", s.stages);
    }
    free(p.stage);
    free(p.rank);
    free(p.hop);
    schedule_free(&s);
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

const char *prediction_bound(const Prediction *p, double *seconds, char buf[48])
{
    double most = p->bubble_s;
    snprintf(buf, 48, "waits for other stages");
    for (int i = 0; i < FAMILIES; i++)
        if (p->shares.family[i] > most)
            most = p->shares.family[i], snprintf(buf, 48, "%s", family_name((OpFamily)i));
    for (int i = 0; i < WORLD_COMMS; i++)
        if (p->shares.waited[i] > most)
            most = p->shares.waited[i], snprintf(buf, 48, "waits for %s", group_name((GroupKind)i));
    if (p->shares.idle > most) most = p->shares.idle, snprintf(buf, 48, "waits for the host");
    if (seconds) *seconds = most;
    return buf;
}
