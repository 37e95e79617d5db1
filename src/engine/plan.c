/*
 * The dry run (trainer.h): a step and an evaluation on the null device, of the first units of each replica; what a
 * whole step does and holds is then arithmetic on its action list.
 */
#include <stdlib.h>
#include <string.h>

#include "ckpt/ckpt.h"
#include "data/loader.h"
#include "engine/trainer_open.h"

static const int64_t UNLIMITED = (int64_t)1 << 45; /* of each arena of a dry run: 32 TiB */
static const int64_t UNLIMITED_SAVES = (int64_t)1 << 61;

/* ---- lists of the first units ---- */

/* Which units a dry run walks: of each replica the first `groups`, of as many units as one action has at most. */
typedef struct {
    const Schedule *schedule;
    int group; /* units */
    int groups[REPLICAS];
    int *number; /* [units] of a unit among those of its replica */
} Walk;

static bool walked(const Walk *w, const Action *a)
{
    if (!action_is_compute(a->kind) && !action_is_message(a->kind)) return true;
    return w->number[a->microbatch] / w->group < w->groups[a->replica];
}

/* Walked actions of `all` into `out`, groups of messages closed again. */
static void filter(const Walk *w, const ActionList *all, ActionList *out)
{
    *out = (ActionList){ .action = out->action, .buffers = all->buffers };
    for (int i = 0; i < all->count; i++) {
        const Action *a = &all->action[i];
        if (walked(w, a)) out->action[out->count++] = *a;
        else if (out->count && action_is_message(a->kind) && !(a->flags & ACTION_MORE))
            out->action[out->count - 1].flags &= (uint8_t)~ACTION_MORE;
    }
}

static int largest_action(const ActionList *l)
{
    int most = 1;
    for (int i = 0; i < l->count; i++)
        if (action_is_compute(l->action[i].kind) && l->action[i].count > most) most = l->action[i].count;
    return most;
}

/* Numbers the units of each replica; how many there are in counts. */
static void number_units(const Schedule *s, int *number, int counts[REPLICAS])
{
    memset(counts, 0, REPLICAS * sizeof *counts);
    for (int u = 0; u < s->units; u++) number[u] = counts[s->unit_replica ? s->unit_replica[u] : 0]++;
}

/* ---- counting work ---- */

static Err too_much_work(void)
{
    err_set(ERR_CONFIG, "a step is more work on a rank than 64 bits count");
    return err_hint("lower train.global_batch, train.micro_batch or model.seq");
}

static Err work_so_far(const Trainer *t, MemoryPlan *out)
{
    const DeviceCounters *c = &t->device.counters;
    if (c->flop > INT64_MAX || c->bytes > INT64_MAX) return too_much_work();
    MemoryPlan w = { .flop = (int64_t)c->flop, .op_bytes = (int64_t)c->bytes };
    for (int i = 0; i < WORLD_COMMS; i++) {
        const Comm *comm = &t->world->comm[i];
        w.comm_bytes += comm->sent_bytes;
        for (int k = 0; k < COMM_KIND_COUNT; k++) w.comm[i][k] = (CommWork){ comm->calls[k], comm->bytes[k] };
    }
    *out = w;
    return ERR_OK;
}

/* false: a sum does not fit. */
static bool add_times(int64_t *sum, int64_t by, int64_t times)
{
    return !__builtin_mul_overflow(by, times, &by) && !__builtin_add_overflow(*sum, by, sum);
}

/* The counts of work, and none of memory: w += times * by. */
static bool add_work(MemoryPlan *w, const MemoryPlan *by, int64_t times)
{
    bool fits = add_times(&w->flop, by->flop, times) && add_times(&w->op_bytes, by->op_bytes, times) &&
                add_times(&w->comm_bytes, by->comm_bytes, times);
    for (int i = 0; i < WORLD_COMMS * COMM_KIND_COUNT && fits; i++) {
        CommWork *to = &w->comm[i / COMM_KIND_COUNT][i % COMM_KIND_COUNT];
        const CommWork *from = &by->comm[i / COMM_KIND_COUNT][i % COMM_KIND_COUNT];
        fits = add_times(&to->calls, from->calls, times) && add_times(&to->bytes, from->bytes, times);
    }
    return fits;
}

/* Work of a step of the walked units. */
static Err dry_step(Trainer *t, const Walk *w, MemoryPlan *work)
{
    ActionList *list = &t->parts.step.rank[t->world->pp_rank], whole = *list, part = { 0 };
    StepReport report;
    MemoryPlan before;
    part.action = calloc((size_t)whole.count, sizeof *part.action);
    if (!part.action) return err_set(ERR_MEMORY, "no memory for a list of %d actions", whole.count);
    filter(w, &whole, &part);
    Err err = work_so_far(t, &before);
    *list = part;
    if (!err) err = trainer_step(t, (TokenSource){ 0 }, &report);
    *list = whole;
    free(part.action);
    TRY(err);
    TRY(work_so_far(t, work));
    add_work(work, &before, -1);
    return ERR_OK;
}

/* All units of a replica have one shape: each group after the first adds what the second adds. */
static Err count_walks(Trainer *t, Walk *w, const int counts[REPLICAS], MemoryPlan *out)
{
    MemoryPlan more;
    TRY(dry_step(t, w, out));
    const MemoryPlan first = *out;
    for (int r = 0; r < t->params.replicas; r++) {
        const int64_t times = counts[r] / w->group - 1;
        if (times <= 0) continue;
        w->groups[r]++;
        TRY(dry_step(t, w, &more));
        w->groups[r]--;
        add_work(&more, &first, -1);
        if (!add_work(out, &more, times)) return too_much_work();
    }
    return ERR_OK;
}

static Err count_step(Trainer *t, MemoryPlan *out)
{
    const Schedule *s = &t->parts.step;
    Walk w = { .schedule = s, .group = largest_action(&s->rank[t->world->pp_rank]), .groups = { 1, 1 } };
    int counts[REPLICAS];
    w.number = calloc((size_t)s->units, sizeof *w.number);
    if (!w.number) return err_set(ERR_MEMORY, "no memory for %d units", s->units);
    number_units(s, w.number, counts);
    Err err = count_walks(t, &w, counts, out);
    free(w.number);
    return err;
}

/* Of an evaluation the first unit, for its peaks; its work is not counted. */
static Err dry_eval(Trainer *t)
{
    ActionList *list = &t->parts.forward.rank[t->world->pp_rank], whole = *list;
    ActionList part = { .action = calloc((size_t)whole.count + 1, sizeof *part.action) };
    double loss;
    int64_t counted;
    if (!part.action) return err_set(ERR_MEMORY, "no memory for a list of %d actions", whole.count);
    for (int i = 0; i < whole.count; i++) {
        if (whole.action[i].microbatch) continue;
        part.action[part.count] = whole.action[i];
        part.action[part.count++].flags = 0;
    }
    *list = part;
    Err err = trainer_eval(t, (TokenSource){ 0 }, 0, 1, &loss, &counted);
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
    int64_t step = 0, forward;
    for (int i = 0; i < e->stage_count; i++)
        memcpy(e->stages[i].save_bytes, e->stages[i].peak_bytes, sizeof e->stages[i].peak_bytes);
    if (!t->spec.forward_only) TRY(executor_need(e, &t->parts.step.rank[rank], true, &step));
    TRY(executor_need(e, &t->parts.forward.rank[rank], false, &forward));
    p->save = forward > step ? forward : step;
    return ERR_OK;
}

static void count_params(const Trainer *t, MemoryPlan *p)
{
    p->params = param_total(&t->parts.whole);
    for (int r = 0; r < t->params.replicas; r++) {
        const ParamRegistry *reg = t->stores[r].reg;
        p->flat_count += reg->flat_count;
        p->slice_count += reg->flat_count / reg->slices;
        p->padding += param_padding(reg);
        p->buckets += reg->bucket_count;
        if (t->stores[r].grad.data) p->grad_bytes += tensor_bytes(t->stores[r].grad);
    }
}

static Err dry_run(Trainer *t, MemoryPlan *out)
{
    if (t->kv) TRY(trainer_logits(t, NULL, 0, t->spec.model.seq, NULL));
    if (!t->spec.forward_only) TRY(count_step(t, out));
    TRY(dry_eval(t));
    MemoryPlan peak = trainer_peak(t);
    add_work(&peak, out, 1);
    TRY(count_saves(t, &peak));
    peak.workspace = DEVICE_WORKSPACE_BYTES;
    count_params(t, &peak);
    *out = peak;
    return ERR_OK;
}

Err trainer_plan(const TrainSpec *spec, Grid grid, int rank, MemoryPlan *out)
{
    World world;
    Trainer t;
    MemoryPlan unlimited = {
        .state = UNLIMITED, .save = UNLIMITED_SAVES, .scratch = UNLIMITED, .staging = UNLIMITED
    };
    for (int i = 0; i < PLAN_STAGES; i++)
        unlimited.stages[i].save[REGION_I] = unlimited.stages[i].save[REGION_W] = UNLIMITED;
    *out = (MemoryPlan){ 0 };
    TRY(world_open_null(&world, grid, rank));
    Err err = trainer_open_on(&t, DEVICE_NULL, spec, &world, &unlimited);
    if (!err) err = dry_run(&t, out);
    if (!err && spec->snapshot) err = ckpt_snapshot_bytes(&t.params, &world, &out->snapshot);
    if (spec->ahead) out->ahead = loader_bytes(spec->global_batch / grid.dp, spec->model.seq);
    out->host_apart = spec->device == DEVICE_CUDA;
    if (err == ERR_MEMORY) err_prefix(err, "this run needs more than %d TiB", (int)(UNLIMITED >> 40));
    trainer_close(&t);
    world_close(&world);
    return err;
}
