/*
 * The dry run (trainer.h): a step and an evaluation on the null device, of one unit of each form, and for a clock one
 * pair of each stage; what a whole step does and holds is then arithmetic on its action list. Where weights change on
 * the way the whole list is walked.
 */
#include <stdlib.h>
#include <math.h>
#include <string.h>

#include "base/heap.h"
#include "ckpt/ckpt.h"
#include "data/loader.h"
#include "engine/async.h"
#include "engine/expert_load.h"
#include "engine/trainer_open.h"

static const int64_t UNLIMITED = (int64_t)1 << 45; /* of each arena of a dry run: 32 TiB */
static const int64_t UNLIMITED_SAVES = (int64_t)1 << 61;

/* ---- times ---- */

enum { UNIT_ACTIONS = ACT_W + 1 }; /* F, B, I, W */

/* Seconds of a unit by stage of the rank and kind of action: the shortest, beside which no gradients are summed. */
typedef struct {
    double least[PARTS_STAGES][UNIT_ACTIONS];  /* 0: there is none */
    int64_t first[PARTS_STAGES][UNIT_ACTIONS]; /* units of the first step that was walked */
    double first_s;                            /* seconds of that step */
    bool begun;
    double pair[PARTS_STAGES]; /* what a pair of its forward takes less than both halves one by one */
} UnitTimes;

static int stage_index(const Executor *e, const Action *a)
{
    int i = 0;
    while (e->stages[i].stage != a->stage || e->stages[i].replica != a->replica) i++;
    return i;
}

/* The times of a list that has run. */
static void note_times(UnitTimes *u, const Executor *e, const ActionList *l, double seconds)
{
    for (int i = 0; i < l->count; i++) {
        const Action *a = &l->action[i];
        if (!action_is_compute(a->kind)) continue;
        const int stage = stage_index(e, a);
        const double each = (e->times[i].end - e->times[i].start) / a->count;
        double *least = &u->least[stage][a->kind];
        if (*least == 0 || each < *least) *least = each;
        if (!u->begun) u->first[stage][a->kind] += a->count;
    }
    if (!u->begun) u->first_s = seconds;
    u->begun = true;
}

/* A backward of both halves counts as input alone where a stage has no other. */
static StepTimes step_times(const UnitTimes *u)
{
    StepTimes out = { .rest = u->first_s };
    for (int s = 0; s < PARTS_STAGES; s++) {
        const double *t = u->least[s];
        out.unit[s] = (StageCost){ t[ACT_F], t[ACT_I] > 0 ? t[ACT_I] : t[ACT_B], t[ACT_W], u->pair[s] };
        for (int k = 0; k < UNIT_ACTIONS; k++) out.rest -= (double)u->first[s][k] * t[k];
    }
    return out;
}

/* ---- parts of a list ---- */

/*
 * The units that a dry run walks. A group is as many units as one action has at most, or all slices of a micro-batch.
 * Of each replica the first group is walked, in which every gradient gets its first contribution, and of replica
 * `replica` also group `other`.
 */
typedef struct {
    bool all;    /* every unit */
    int *number; /* [units] of a unit among those of its replica */
    int group;   /* units */
    int replica, other;
    bool settled;          /* the step is not the first: the last unit's sums of gradients begin as soon as they can */
    const DryClock *clock; /* NULL: nobody asks for times */
    UnitTimes *times;
} Walk;

static int group_of_action(const Walk *w, const Action *a) { return w->number[a->microbatch] / w->group; }

static bool walked(const Walk *w, const Action *a)
{
    if (!action_is_compute(a->kind) && !action_is_message(a->kind)) return true;
    const int group = group_of_action(w, a);
    return !group || (a->replica == w->replica && group == w->other);
}

/* Walked actions of `all` into `out`, groups of messages closed again, and pairs, of which as a rule one half is
 * walked, taken apart: what a forward takes does not depend on whether it is in one (pair.h). */
static void filter(const Walk *w, const ActionList *all, ActionList *out)
{
    *out = (ActionList){ .action = out->action, .buffers = all->buffers };
    for (int i = 0; i < all->count; i++) {
        const Action *a = &all->action[i];
        if (w->all || walked(w, a)) out->action[out->count++] = *a;
        else if (out->count && action_is_message(a->kind) && !(a->flags & ACTION_MORE))
            out->action[out->count - 1].flags &= (uint8_t)~ACTION_MORE;
    }
    for (int i = 0; i < out->count; i++) out->action[i].flags &= (uint8_t)~ACTION_PAIR;
}

static int largest_action(const ActionList *l)
{
    int most = 1;
    for (int i = 0; i < l->count; i++)
        if (action_is_compute(l->action[i].kind) && l->action[i].count > most) most = l->action[i].count;
    return most;
}

/*
 * Groups that do the same work: those whose backwards are split on the same of the rank's stages. (All other things are
 * alike: units have one shape.)
 */
typedef struct {
    int replica, group; /* one of them */
    uint64_t split;     /* by stage of the rank */
    int64_t count;      /* of them, the first group of a replica left out */
} Form;

enum { FORMS = 32 };

typedef struct {
    Form forms[FORMS];
    int count;
} Forms;

static Err add_form(Forms *f, Form form)
{
    int i = 0;
    while (i < f->count && (f->forms[i].replica != form.replica || f->forms[i].split != form.split)) i++;
    if (i == FORMS) return err_set(ERR_INTERNAL, "more than %d kinds of units in a schedule", FORMS);
    if (i == f->count) f->forms[f->count++] = form;
    f->forms[i].count++;
    return ERR_OK;
}

/* Numbers the units of each replica, and sorts their groups by form. */
static Err find_forms(const Trainer *t, Walk *w, uint64_t *split, Forms *f)
{
    const Schedule *s = &t->parts.step;
    const ActionList *list = &s->rank[t->world->pp_rank];
    int counts[REPLICAS] = { 0 };
    for (int u = 0; u < s->units; u++) w->number[u] = counts[s->unit_replica[u]]++;
    for (int i = 0; i < list->count; i++) {
        const Action *a = &list->action[i];
        if (a->kind == ACT_I)
            split[a->replica * s->units + group_of_action(w, a)] |= (uint64_t)1 << schedule_chunk_of(s, a->stage);
    }
    for (int r = 0; r < s->replicas; r++)
        for (int g = 1; g < counts[r] / w->group; g++)
            TRY(add_form(f, (Form){ .replica = r, .group = g, .split = split[r * s->units + g] }));
    return ERR_OK;
}

/* ---- counting work ---- */

static Err too_much_work(void)
{
    err_set(ERR_CONFIG, "a step is more work on a rank than 64 bits count");
    return err_hint("lower train.global_batch, train.micro_batch or model.seq");
}

static Err work_so_far(const Trainer *t, const DryClock *clock, StepWork *out)
{
    const DeviceCounters *c = &t->device.counters;
    if (c->flop > INT64_MAX || c->bytes > INT64_MAX) return too_much_work();
    StepWork w = { .flop = (int64_t)c->flop, .op_bytes = (int64_t)c->bytes };
    for (int i = 0; i < WORLD_COMMS; i++) {
        const Comm *comm = &t->world->comm[i];
        w.comm_bytes += comm->sent_bytes;
        w.comm_beside += comm->beside_bytes;
        for (int k = 0; k < COMM_KIND_COUNT; k++) w.comm[i][k] = (CommWork){ comm->calls[k], comm->bytes[k], 0 };
        w.comm[i][COMM_ALL_TO_ALL_ROWS].most = comm->rows_most;
    }
    if (clock) clock->read(clock->user, w.clock);
    *out = w;
    return ERR_OK;
}

/* false: a sum does not fit. */
static bool add_times(int64_t *sum, int64_t by, int64_t times)
{
    return !__builtin_mul_overflow(by, times, &by) && !__builtin_add_overflow(*sum, by, sum);
}

/* w += times * by. */
static bool add_work(StepWork *w, const StepWork *by, int64_t times)
{
    bool fits = add_times(&w->flop, by->flop, times) && add_times(&w->op_bytes, by->op_bytes, times) &&
                add_times(&w->comm_bytes, by->comm_bytes, times) && add_times(&w->comm_beside, by->comm_beside, times);
    for (int i = 0; i < WORLD_COMMS * COMM_KIND_COUNT && fits; i++) {
        CommWork *to = &w->comm[i / COMM_KIND_COUNT][i % COMM_KIND_COUNT];
        const CommWork *from = &by->comm[i / COMM_KIND_COUNT][i % COMM_KIND_COUNT];
        fits = add_times(&to->calls, from->calls, times) && add_times(&to->bytes, from->bytes, times) &&
               add_times(&to->most, from->most, times);
    }
    for (int i = 0; i < CLOCK_COUNTS; i++) w->clock[i] += (double)times * by->clock[i];
    return fits;
}

/* Forgets all steps before, so that only the units themselves decide what goes on beside ops. */
static Err forget_steps(Trainer *t)
{
    TRY(trainer_settle(t));
    for (int r = 0; r < t->params.replicas; r++) ddp_forget(&t->ddp[r]);
    return ERR_OK;
}

/* Work and times of a step of the actions of `part`. */
static Err dry_part(Trainer *t, const Walk *w, const ActionList *part, StepWork *work)
{
    ActionList *list = &t->parts.step.rank[t->world->pp_rank], whole = *list;
    StepReport report;
    StepWork before;
    TRY(forget_steps(t));
    *list = *part;
    Err err = w->settled ? trainer_step(t, (TokenSource){ 0 }, &report) : ERR_OK;
    if (!err) err = work_so_far(t, w->clock, &before);
    if (!err) err = trainer_step(t, (TokenSource){ 0 }, &report);
    *list = whole;
    TRY(err);
    TRY(work_so_far(t, w->clock, work));
    add_work(work, &before, -1);
    if (w->clock) note_times(w->times, &t->executor, part, work->clock[0]);
    return ERR_OK;
}

/* Work of a step of the walked units. */
static Err dry_step(Trainer *t, const Walk *w, StepWork *work)
{
    const ActionList *whole = &t->parts.step.rank[t->world->pp_rank];
    const size_t count = (size_t)whole->count;
    ActionList part = { .action = calloc(count, sizeof *part.action) };
    Span *times = w->clock ? calloc(count, sizeof *times) : NULL;
    Err err = part.action && (times || !w->clock)
                  ? ERR_OK
                  : err_set(ERR_MEMORY, "no memory for a list of %d actions", whole->count);
    t->executor.times = times;
    if (!err) filter(w, whole, &part);
    if (!err) err = dry_part(t, w, &part, work);
    t->executor.times = NULL;
    free(part.action);
    free(times);
    return err;
}

/* The clock's counts of the first groups as the last ones of a step: their sums of gradients go on beside them. */
static Err time_settled(Trainer *t, const Walk *w, double clock[CLOCK_COUNTS])
{
    Walk last = *w;
    StepWork work;
    last.settled = true;
    TRY(dry_step(t, &last, &work));
    memcpy(clock, work.clock, sizeof work.clock);
    return ERR_OK;
}

/* A step: the first groups, and for each further group what one of its form adds. */
static Err count_forms(Trainer *t, Walk *w, const Forms *f, StepWork *out)
{
    StepWork more;
    double settled[CLOCK_COUNTS];
    w->other = 0;
    if (w->clock) TRY(time_settled(t, w, settled));
    TRY(dry_step(t, w, out));
    const StepWork first = *out;
    if (w->clock) memcpy(out->clock, settled, sizeof settled);
    for (int i = 0; i < f->count; i++) {
        w->replica = f->forms[i].replica;
        w->other = f->forms[i].group;
        TRY(dry_step(t, w, &more));
        add_work(&more, &first, -1);
        if (!add_work(out, &more, f->forms[i].count)) return too_much_work();
    }
    /* (the last call of a step may have ops beside it in one of the walks alone) */
    if (out->comm_beside > out->comm_bytes) out->comm_beside = out->comm_bytes;
    return ERR_OK;
}

/* ---- pairs ---- */

/* Keeps what two units do of the whole list, and how a step ends. Messages, which take no time here, are left out.
 * Pairs are taken apart, but for `pair` if `together`. */
static void filter_pair(const ActionList *all, const Action *pair, bool together, ActionList *out)
{
    *out = (ActionList){ .action = out->action, .buffers = all->buffers };
    for (int i = 0; i < all->count; i++) {
        const Action *a = &all->action[i];
        const bool walked = a->microbatch == pair[0].microbatch || a->microbatch == pair[1].microbatch;
        if (action_is_message(a->kind) || (action_is_compute(a->kind) && !walked)) continue;
        out->action[out->count] = *a;
        out->action[out->count++].flags = a == pair && together ? ACTION_PAIR : 0;
    }
}

/* clock: what the two units take one by one, less what they take in turn. */
static Err time_pair(Trainer *t, const Walk *w, const Action *pair, ActionList *part, double clock[CLOCK_COUNTS])
{
    StepWork apart, together;
    const ActionList *whole = &t->parts.step.rank[t->world->pp_rank];
    filter_pair(whole, pair, false, part);
    TRY(dry_part(t, w, part, &apart));
    filter_pair(whole, pair, true, part);
    TRY(dry_part(t, w, part, &together));
    for (int i = 0; i < CLOCK_COUNTS; i++) clock[i] = apart.clock[i] - together.clock[i];
    return ERR_OK;
}

/* Times the first pair that each stage's forward begins. A stage's pairs have one backward stage (gen_dualpipe.c). */
static Err time_stage_pairs(Trainer *t, const Walk *w, ActionList *part, double sum[CLOCK_COUNTS])
{
    const ActionList *whole = &t->parts.step.rank[t->world->pp_rank];
    typedef double Clock[CLOCK_COUNTS];
    ON_HEAP(Clock, saved, PARTS_STAGES);
    bool timed[PARTS_STAGES] = { false };
    for (int i = 0; i < whole->count; i++) {
        const Action *a = &whole->action[i];
        if (!(a->flags & ACTION_PAIR) || a->count != 1 || a[1].count != 1) continue;
        const int s = stage_index(&t->executor, a);
        if (!timed[s]) TRY(time_pair(t, w, a, part, saved[s]));
        timed[s] = true;
        w->times->pair[s] = saved[s][0];
        for (int k = 0; k < CLOCK_COUNTS; k++) sum[k] += saved[s][k];
    }
    return ERR_OK;
}

/* Time that pairs which run in turn save of the step (pair.h). */
static Err time_pairs(Trainer *t, const Walk *w, StepWork *out)
{
    const size_t count = (size_t)t->parts.step.rank[t->world->pp_rank].count;
    double sum[CLOCK_COUNTS] = { 0 };
    if (!w->clock || !t->executor.pair.forward) return ERR_OK;
    ActionList part = { .action = calloc(count, sizeof *part.action) };
    t->executor.times = calloc(count, sizeof *t->executor.times);
    Err err = part.action && t->executor.times ? time_stage_pairs(t, w, &part, sum)
                                               : err_set(ERR_MEMORY, "no memory for a list of pairs");
    for (int k = 0; k < CLOCK_COUNTS; k++) out->clock[k] -= sum[k];
    free(part.action);
    free(t->executor.times);
    t->executor.times = NULL;
    return err;
}

/* The same in pieces, for its peaks: a step that needs them is rare, and its work is not counted. */
static Err dry_pieces(Trainer *t, Walk *w, const Forms *f)
{
    StepWork work;
    Walk untimed = *w;
    untimed.clock = NULL;
    expert_load_use_pieces(t, true);
    TRY(count_forms(t, &untimed, f, &work));
    expert_load_use_pieces(t, false);
    return ERR_OK;
}

static Err count_step(Trainer *t, const DryClock *clock, UnitTimes *times, StepWork *out)
{
    const Schedule *s = &t->parts.step;
    Walk w = { .all = true, .clock = clock, .times = times };
    if (trainer_is_async(t)) return dry_step(t, &w, out);
    const int most = largest_action(&s->rank[t->world->pp_rank]);
    w.all = false;
    w.group = most > s->slices ? most : s->slices;
    Forms f = { .count = 0 };
    w.number = calloc((size_t)s->units, sizeof *w.number);
    uint64_t *split = calloc((size_t)(s->units * s->replicas), sizeof *split);
    Err err =
        w.number && split ? find_forms(t, &w, split, &f) : err_set(ERR_MEMORY, "no memory for %d units", s->units);
    if (!err) err = count_forms(t, &w, &f, out);
    if (!err) err = time_pairs(t, &w, out);
    if (!err && expert_load_redo(t)) err = dry_pieces(t, &w, &f);
    free(w.number);
    free(split);
    return err;
}

/* Runs the first unit of an evaluation, for its peaks; its work is not counted. */
static Err dry_eval(Trainer *t)
{
    ActionList *list = &t->parts.forward.rank[t->world->pp_rank], whole = *list;
    ActionList part = { .action = calloc((size_t)whole.count + 1, sizeof *part.action) };
    const RowScore *scores;
    double loss;
    int64_t counted;
    if (!part.action) return err_set(ERR_MEMORY, "no memory for a list of %d actions", whole.count);
    for (int i = 0; i < whole.count; i++) {
        if (whole.action[i].microbatch >= t->parts.forward.slices) continue;
        part.action[part.count] = whole.action[i];
        part.action[part.count++].flags = 0;
    }
    *list = part;
    Err err = ERR_OK;
    if (t->spec.purpose.scores) err = trainer_scores(t, (TokenSource){ 0 }, 0, t->spec.global_batch, &scores);
    if (!err) err = trainer_eval(t, (TokenSource){ 0 }, 0, t->spec.global_batch, &loss, &counted);
    *list = whole;
    free(part.action);
    return err;
}

/* ---- the plan ---- */

/* Saves of all units that the list holds at once, now that one unit's are known. */
static Err count_saves(Trainer *t, MemoryPlan *p)
{
    Executor *e = &t->executor;
    const int rank = t->world->pp_rank;
    SaveNeed step = { .away = 0 }, forward;
    for (int i = 0; i < e->stage_count; i++) {
        memcpy(e->stages[i].save_bytes, e->stages[i].peak_bytes, sizeof e->stages[i].peak_bytes);
        e->stages[i].away_bytes = e->stages[i].away_peak;
    }
    if (!t->spec.purpose.forward_only) TRY(executor_need(e, &t->parts.step.rank[rank], true, &step));
    TRY(executor_need(e, &t->parts.forward.rank[rank], false, &forward));
    p->save = 0;
    for (int r = 0; r < REGION_COUNT; r++) {
        p->save_region[r] = forward.save[r] > step.save[r] ? forward.save[r] : step.save[r];
        p->save += p->save_region[r];
    }
    p->offload_host = step.away;
    return ERR_OK;
}

static int64_t elements_of(const ParamRegistry *reg, ParamGroup group)
{
    int64_t count = 0;
    for (int i = 0; i < reg->count; i++)
        if (reg->items[i].spec.group == group) count += reg->items[i].count;
    return count;
}

static void count_params(const Trainer *t, ParamCounts *p)
{
    p->model = param_trained(&t->parts.whole);
    for (int r = 0; r < t->params.replicas; r++) {
        const ParamRegistry *reg = t->stores[r].reg;
        p->flat += reg->flat_count;
        p->values += reg->value_count;
        p->zero += reg->zero_count;
        p->padding += param_padding(reg);
        p->experts += elements_of(reg, PARAM_EXPERT);
        p->buckets += reg->bucket_count;
        if (t->stores[r].v.data) p->second += tensor_count(t->stores[r].v);
        if (t->stores[r].grad.data) p->grad_bytes += tensor_bytes(t->stores[r].grad);
        if (t->stores[r].grad.data) p->unit_buffers += units_buffers(&t->ddp[r].units);
    }
}

static MuonWork muon_work(const Trainer *t)
{
    MuonWork w = { 0 };
    for (int r = 0; r < t->params.replicas && t->optim.muon; r++) {
        w.flop += muon_flop(&t->muon[r], t->world->owners.rank);
        w.mean += muon_mean_flop(&t->muon[r]);
        w.imbalance = fmax(w.imbalance, muon_imbalance(&t->muon[r]));
    }
    return w;
}

/* A whole sample, and one token behind others: what latent attention makes of these is not a part of the first. */
static Err dry_generation(Trainer *t)
{
    const int64_t seq = t->spec.model.seq;
    TRY(trainer_logits(t, NULL, 0, seq, NULL));
    return seq > 1 ? trainer_logits(t, NULL, seq - 1, 1, NULL) : ERR_OK;
}

static Err dry_run(Trainer *t, const DryClock *clock, UnitTimes *times, MemoryPlan *out)
{
    StepWork work = { 0 };
    if (t->caches) TRY(dry_generation(t));
    if (clock) {
        clock->attach(clock->user, &t->device, t->world);
        t->executor.clock = clock->now;
        t->executor.clock_user = clock->user;
    }
    if (!t->spec.purpose.forward_only) TRY(count_step(t, clock, times, &work));
    TRY(dry_eval(t));
    if (expert_load_redo(t)) {
        t->executor.ctx.mode.retry_in_pieces = true;
        TRY(dry_eval(t));
        t->executor.ctx.mode.retry_in_pieces = false;
    }
    MemoryPlan peak = trainer_peak(t);
    peak.work = work;
    TRY(count_saves(t, &peak));
    peak.workspace = DEVICE_WORKSPACE_BYTES;
    peak.unit = trainer_batch_spec(t).B;
    count_params(t, &peak.params);
    peak.muon = muon_work(t);
    if (t->device.counters.ops) peak.flop_of_op = (int64_t)(t->device.counters.flop / t->device.counters.ops);
    *out = peak;
    return ERR_OK;
}

/* Rows of two steps: those of the next one are made while the GPU works on one. */
static int64_t rows_on_their_way(const Trainer *t)
{
    int64_t unit = 0;
    for (int i = 0; i < t->executor.stage_count; i++) unit += batch_bytes(&t->executor.stages[i].slots->batch);
    const int64_t bytes = 2 * t->executor.units * unit;
    return bytes > DEVICE_PINNED_BYTES ? bytes : DEVICE_PINNED_BYTES;
}

/* Without limits to its memory. (A step of the largest batch is planned: smaller ones leave out some of its units.) */
static Err open_unlimited(Trainer *t, const TrainSpec *asked, TrainSpec *spec, World *world)
{
    MemoryPlan unlimited = { .state = UNLIMITED,
                             .states = UNLIMITED,
                             .save = UNLIMITED_SAVES,
                             .save_region = { UNLIMITED_SAVES / 2 },
                             .scratch = UNLIMITED,
                             .scratch_forward = UNLIMITED / 2,
                             .offload = { { UNLIMITED, UNLIMITED }, { UNLIMITED, UNLIMITED } },
                             .offload_host = UNLIMITED_SAVES,
                             .staging = UNLIMITED };
    for (int i = 0; i < PARTS_STAGES; i++)
        unlimited.stages[i] = (StagePlan){ .save = { UNLIMITED, UNLIMITED }, .away = UNLIMITED };
    *spec = *asked;
    spec->ramp.count = 0;
    return trainer_open_on(t, DEVICE_NULL, spec, world, &unlimited);
}

static Err plan_rank(const TrainSpec *asked, Grid grid, int rank, const DryClock *clock, UnitTimes *times,
                     MemoryPlan *out)
{
    ON_HEAP(World, world, 1);
    ON_HEAP(Trainer, t, 1);
    ON_HEAP(TrainSpec, spec, 1);
    *out = (MemoryPlan){ 0 };
    TRY(trainer_check_shape(asked, grid)); /* (two directions over an odd number of ranks are no grid) */
    TRY(world_open_null(world, grid, rank));
    Err err = open_unlimited(t, asked, spec, world);
    if (!err) err = dry_run(t, clock, times, out);
    if (!err && spec->purpose.snapshot) err = ckpt_snapshot_bytes(&t->params, world, &out->snapshot);
    if (spec->device.kind == DEVICE_CUDA) out->pinned = rows_on_their_way(t);
    if (spec->purpose.ahead) out->ahead = loader_bytes(spec->global_batch / grid.dp, spec->model.seq) + out->pinned;
    out->host_apart = spec->device.kind == DEVICE_CUDA;
    if (err == ERR_MEMORY && arena_was_full())
        err_prefix(err, "this run needs more than %d TiB", (int)(UNLIMITED >> 40));
    trainer_close(t);
    world_close(world);
    return err;
}

Err trainer_plan(const TrainSpec *spec, Grid grid, int rank, MemoryPlan *out)
{
    return plan_rank(spec, grid, rank, NULL, NULL, out);
}

Err trainer_time(const TrainSpec *spec, Grid grid, int rank, const DryClock *clock, MemoryPlan *out, StepTimes *times)
{
    UnitTimes units = { 0 };
    TRY(plan_rank(spec, grid, rank, clock, &units, out));
    *times = step_times(&units);
    return ERR_OK;
}

Err trainer_shard_bytes(const TrainSpec *asked, Grid grid, int64_t *bytes)
{
    ON_HEAP(World, world, 1);
    ON_HEAP(Trainer, t, 1);
    ON_HEAP(TrainSpec, spec, 1);
    TRY(world_open_null(world, grid, 0));
    Err err = open_unlimited(t, asked, spec, world);
    if (!err) err = ckpt_shard_bytes(&t->params, world, bytes);
    trainer_close(t);
    world_close(world);
    return err;
}
