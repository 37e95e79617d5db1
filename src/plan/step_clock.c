/* See step_clock.h. */
#include "plan/step_clock.h"

#include <stdlib.h>
#include <string.h>

#include "engine/async.h"
#include "engine/trainer_open.h"
#include "plan/shape.h"

enum { CALLS_MOST = 1 << 16 };

/* What a stage has taken so far, and in how many units. */
typedef struct {
    double forward, backward, weights;
    int forwards, backwards, halves;
} Spent;

typedef struct {
    const ClockRates *rates;
    double now, tail, reduce;
    double until[WORLD_COMMS];           /* how far each communicator has come */
    int here[WORLD_COMMS];               /* its members on this rank's host */
    double end[CALLS_MOST];              /* of each call */
    int calls;
    WideCount flop;                      /* the device's counter at the last op */
    Spent spent[PARTS_STAGES];
    const ExecutorCompute *compute;      /* what the trainer's own are */
    ExecutorHooks hooks;
} Clock;

/* Of the dry run on this thread: ops have no other way to it. */
static _Thread_local Clock *clock_here;

/* ---- ops ---- */

static double busy(const Clock *c)
{
    double until = 0;
    for (int i = 0; i < WORLD_COMMS; i++) until = until > c->until[i] ? until : c->until[i];
    return until > c->now ? until - c->now : 0;
}

static void pass(Clock *c, double s, bool matrix)
{
    const double beside = busy(c), slow = matrix ? c->rates->matrix_beside : 1;
    c->now += s * slow <= beside ? s * slow : beside + (s - beside / slow);
}

static double op_bytes(OpId id, const void *args)
{
    const OpInfo *info = op_info(id);
    double bytes = 0;
    for (int i = 0; i < info->field_count; i++) {
        const OpField *f = &info->fields[i];
        const Tensor t = *(const Tensor *)(const void *)((const char *)args + f->offset);
        if (!t.data) continue;
        const double used = t.expected ? (double)t.expected / (double)t.dim[0] : 1;
        bytes += used * (double)tensor_bytes(t) * (f->read + f->written);
    }
    return bytes;
}

static bool is_fp32(OpId id, const void *args)
{
    const OpInfo *info = op_info(id);
    return ((const Tensor *)(const void *)((const char *)args + info->fields[0].offset))->dtype == F32;
}

/* FLOP a second; 0: memory is what counts. */
static double matrix_rate(const ClockRates *r, OpId id, const void *args)
{
    switch (id) {
    case OP_linear_fwd:
    case OP_linear_dx:
    case OP_linear_dw: return is_fp32(id, args) && id != OP_linear_dw ? r->fp32 : r->matrix;
    case OP_grouped_fwd:
    case OP_grouped_dx:
    case OP_grouped_dw: return r->grouped;
    case OP_attention_fwd: return r->attention_fwd;
    case OP_attention_bwd: return r->attention_bwd;
    default: return 0;
    }
}

static Err take(Stream *s, OpId id, const void *args)
{
    Clock *c = clock_here;
    const double rate = matrix_rate(c->rates, id, args), flop = (double)(s->dev->counters.flop - c->flop);
    const double memory = op_bytes(id, args) / c->rates->memory, matrix = rate > 0 ? flop / rate : 0;
    c->flop = s->dev->counters.flop;
    pass(c, (matrix > memory ? matrix : memory) + c->rates->launch_s, matrix > memory);
    return ERR_OK;
}

#define T(name, dims)
#define S(type, name)
#define OP(name, flop, args) \
    static Err timed_##name(Stream *s, const name##_args *a) { return take(s, OP_##name, a); }
#include "device/ops.def"
#undef OP
static const OpTable timed_ops = {
#define OP(name, flop, args) .name = timed_##name,
#include "device/ops.def"
#undef OP
};
#undef T
#undef S

/* ---- calls ---- */

static Err wait_call(Stream *s, void *mark)
{
    Clock *c = clock_here;
    const double end = c->end[(int)(intptr_t)mark - 1];
    (void)s;
    if (end > c->now) c->now = end;
    return ERR_OK;
}

static Err host_wait(void *mark, double timeout_s)
{
    (void)timeout_s;
    return wait_call(NULL, mark);
}

static void free_nothing(void *mark) { (void)mark; }
static void close_nothing(Comm *c) { (void)c; }

/* Rows and messages for ranks of other hosts cross the network one by one; a ring crosses it once for all members of a
 * host, each of which has a way to it. */
static double call_seconds(const Clock *c, CommKind kind, int group, int size, double bytes)
{
    const ClockRates *r = c->rates;
    const int here = c->here[group];
    if (size <= here) return bytes / r->link + r->link_s;
    const bool pairs = kind == COMM_ALL_TO_ALL_ROWS || kind == COMM_EXCHANGE;
    const double crossing = bytes * (pairs ? (double)(size - here) / (size - 1) : 1.0 / here);
    const double link = (bytes - (pairs ? crossing : 0)) / r->link, network = crossing / r->network;
    return (link > network ? link : network) + r->network_s;
}

static Err submit(Comm *comm, const CommRequest *r)
{
    static const EventMarks marks = { wait_call, host_wait, free_nothing };
    Clock *c = clock_here;
    const int group = (int)(comm - (Comm *)comm->impl);
    event_complete(r->done, ERR_OK, "");
    /* (stages' messages are the simulator's) */
    if (comm->size == 1 || group == GROUP_PP || group == GROUP_HOST || c->calls == CALLS_MOST) return ERR_OK;
    double *until = &c->until[group];
    *until = (*until > c->now ? *until : c->now) +
             call_seconds(c, r->kind, group, comm->size, (double)comm->last_bytes);
    c->end[c->calls++] = *until;
    r->done->marks = &marks;
    r->done->mark = (void *)(intptr_t)c->calls;
    r->done->marked = true;
    return ERR_OK;
}

static void attach_world(Clock *c, World *w)
{
    static const CommTable table = { "clock", submit, close_nothing };
    const GridShape s = grid_shape(w->grid);
    const int first = w->rank / c->rates->host_devices * c->rates->host_devices;
    for (int k = 0; k < WORLD_COMMS; k++) {
        for (int r = first; r < first + c->rates->host_devices && r < w->size; r++)
            c->here[k] += group_of(s, (GroupKind)k, r) == group_of(s, (GroupKind)k, w->rank);
        w->comm[k].table = &table;
        w->comm[k].impl = w->comm;
    }
}

/* ---- actions ---- */

static Spent *spent_of(Executor *e, const ExecutorUnit *u) { return &clock_here->spent[u->stage - e->stages]; }

static Err run_forward(Executor *e, const ExecutorUnit *u)
{
    const double from = clock_here->now;
    TRY(clock_here->compute->forward(e, u));
    spent_of(e, u)->forward += clock_here->now - from;
    spent_of(e, u)->forwards++;
    return ERR_OK;
}

static Err run_backward(Executor *e, const ExecutorUnit *u)
{
    const double from = clock_here->now;
    TRY(clock_here->compute->backward(e, u));
    spent_of(e, u)->backward += clock_here->now - from;
    spent_of(e, u)->backwards++;
    return ERR_OK;
}

static Err run_weights(Executor *e, const ExecutorUnit *u)
{
    const double from = clock_here->now;
    TRY(clock_here->compute->weights(e, u));
    spent_of(e, u)->weights += clock_here->now - from;
    spent_of(e, u)->halves++;
    return ERR_OK;
}

static const ExecutorCompute timed_compute = { run_forward, run_backward, run_weights };

static Err end_tied(void *user)
{
    const double from = clock_here->now;
    TRY(clock_here->hooks.tied(user));
    clock_here->tail += clock_here->now - from;
    return ERR_OK;
}

static Err end_reduce(void *user, int replica)
{
    const double from = clock_here->now;
    TRY(clock_here->hooks.reduce(user, replica));
    clock_here->tail += clock_here->now - from;
    clock_here->reduce += clock_here->now - from;
    return ERR_OK;
}

static Err end_norm(void *user)
{
    const double from = clock_here->now;
    TRY(clock_here->hooks.norm(user));
    clock_here->tail += clock_here->now - from;
    return ERR_OK;
}

static Err end_update(void *user, int replica)
{
    const double from = clock_here->now;
    TRY(clock_here->hooks.update(user, replica));
    clock_here->tail += clock_here->now - from;
    return ERR_OK;
}

static void attach_executor(Clock *c, Executor *e)
{
    c->compute = e->compute;
    c->hooks = e->hooks;
    e->compute = &timed_compute;
    e->hooks.tied = end_tied;
    e->hooks.reduce = end_reduce;
    e->hooks.norm = end_norm;
    e->hooks.update = end_update;
}

/* ---- a step ---- */

static StageCost cost_of(const Spent *s)
{
    StageCost c = { .f = s->forwards ? s->forward / s->forwards : 0 };
    if (s->backwards) c.i = s->backward / s->backwards;
    if (s->halves) c.w = s->weights / s->halves;
    else c.i = c.w = c.i / 2; /* a whole backward: its halves are about alike */
    return c;
}

static void read_clock(const Clock *c, const Trainer *t, RankTimes *out)
{
    const int stages = t->executor.stage_count;
    *out = (RankTimes){ .tail = c->tail, .reduce = c->reduce };
    /* what is still gathered when the step has ended, unless the next forward goes on beside it */
    const double gather = t->spec.update.overlap_param ? 0 : busy(c);
    out->tail += gather;
    out->reduce += gather;
    for (int i = 0; i < stages; i++) out->stage[i] = cost_of(&c->spent[i]);
    const Tensor *b = t->executor.buffer_count ? &t->executor.buffers[0] : NULL;
    const bool apart = t->world->grid.pp > 1 && c->here[GROUP_PP] < t->world->pp.size;
    if (b)
        out->hop = (double)tensor_bytes(*b) / (apart ? c->rates->network : c->rates->link) +
                   (apart ? c->rates->network_s : c->rates->link_s);
}

/* A step of as many micro-batches as show what the others do. */
static TrainSpec brief_step(const TrainSpec *spec, Grid g)
{
    TrainSpec s = *spec;
    const int64_t unit = s.micro_batch * g.dp;
    s.global_batch = unit * shape_microbatches(g.pp ? g.pp : 1, (int)(s.global_batch / unit));
    s.ramp = (BatchRamp){ .count = 0 };
    s.overlap_moe = false; /* (halves of a pair would count twice) */
    s.graphs = false;
    return s;
}

static Err time_step(Clock *c, const TrainSpec *spec, World *world, const MemoryPlan *plan, RankTimes *times)
{
    Trainer t;
    StepReport report;
    Err err = trainer_open_on(&t, DEVICE_NULL, spec, world, plan);
    if (!err) {
        attach_world(c, world);
        attach_executor(c, &t.executor);
        t.device.ops = &timed_ops;
        c->flop = t.device.counters.flop;
        err = trainer_step(&t, (TokenSource){ 0 }, &report);
    }
    if (!err) read_clock(c, &t, times);
    trainer_close(&t);
    return err;
}

Err step_clock_run(void *user, const TrainSpec *spec, Grid grid, int rank, MemoryPlan *plan, RankTimes *times)
{
    const TrainSpec brief = brief_step(spec, grid);
    World world;
    TRY(trainer_plan(spec, grid, rank, plan));
    Clock *c = calloc(1, sizeof *c);
    if (!c) return err_set(ERR_MEMORY, "no memory for a clock");
    c->rates = user;
    clock_here = c;
    Err err = world_open_null(&world, grid, rank);
    if (!err) {
        err = time_step(c, &brief, &world, plan, times);
        world_close(&world);
    }
    clock_here = NULL;
    free(c);
    return err;
}
