/* See parts.h. */
#include "engine/parts.h"

static const char *layout_of(const PartsSpec *s) { return s->pipeline.layout ? s->pipeline.layout : ""; }

static Err refuse_stages(const PartsSpec *spec, int stages, int ranks)
{
    int fewer = ranks, more = ranks;
    while (stages % fewer) fewer--;
    while (more < stages && stages % more) more++;
    err_set(ERR_CONFIG, "parallel.layout='%s' has %d stages, no multiple of the %d pipeline ranks", layout_of(spec),
            stages, ranks);
    if (stages < ranks) {
        err_hint("an empty stage is a bare '|'");
        return err_take("parallel.pp=%d", stages);
    }
    err_hint("the pipeline's ranks must divide the stages, with a schedule that has so many on each");
    err_take("parallel.pp=%d", fewer);
    return err_take("parallel.pp=%d", more);
}

/* A step of 2BW is several batches, each with an update. */
static Err share_batches(ScheduleSpec *s)
{
    Versions versions;
    TRY(schedule_versions(s->name, &versions));
    if (versions != VERSIONS_DOUBLE) return ERR_OK;
    const int all = s->microbatches;
    s->microbatches = s->group ? s->group : s->ranks;
    s->batches = all / s->microbatches;
    if (s->batches && all % s->microbatches == 0) return ERR_OK;
    return err_set(ERR_CONFIG, "schedule '%s' updates after every %d micro-batches, and a step has %d", s->name,
                   s->microbatches, all),
           err_hint("parallel.group, the micro-batches of an update, must divide those of a step");
}

static Err make_shares(const PartsSpec *spec, const Schedule *s, SetupArena *setup, StageShare **out)
{
    TRY(setup_array(setup, s->stages, out));
    return stage_shares(spec->model, layout_of(spec), s->stages, *out);
}

/* Asked of a shape that a hint would name (schedule.h). */
static bool stages_fit(const Schedule *s, const void *spec)
{
    SetupArena setup;
    StageShare *shares;
    setup_init(&setup);
    const Err err = make_shares(spec, s, &setup, &shares);
    setup_release(&setup);
    return !err;
}

/* Reads the facts of which the schedule is to be made. The layout says how many stages there are, where the user left
 * that open. */
static Err read_pipeline(const PartsSpec *spec, int ranks, ScheduleSpec *out)
{
    const PipelineSpec *p = &spec->pipeline;
    int stages;
    *out = (ScheduleSpec){ .name = p->schedule ? p->schedule : "1f1b",
                           .ranks = ranks,
                           .microbatches = spec->microbatches,
                           .chunks = p->chunks,
                           .group = p->group,
                           .slices = p->slices,
                           .stages_fit = stages_fit,
                           .user = spec };
    TRY(stage_layout_count(layout_of(spec), &stages));
    if (stages % ranks) return refuse_stages(spec, stages, ranks);
    if (!out->chunks) out->chunks = stages / ranks;
    return share_batches(out);
}

/* The multiples of `unit` around the micro-batch, the nearest first. */
static Err take_micro_batches(int64_t micro_batch, int64_t unit)
{
    const int64_t above = micro_batch / unit * unit + unit;
    for (int i = 0; i < ERR_WAYS / 2; i++) {
        err_take("train.micro_batch=%lld", (long long)(above + i * unit));
        if (above > (i + 1) * unit) err_take("train.micro_batch=%lld", (long long)(above - (i + 1) * unit));
    }
    return ERR_CONFIG;
}

static Err check_units(const PartsSpec *spec, const Schedule *s)
{
    const PipelineSpec *p = &spec->pipeline;
    const int held = s->replicas * s->chunks;
    const int64_t unit = spec->model->moe.balance.unit, whole = s->unit_div * (unit > 1 ? unit : 1);
    if (p->group && s->group != p->group && s->versions != VERSIONS_DOUBLE)
        return err_set(ERR_CONFIG, "parallel.group=%d: schedule '%s' has no groups of micro-batches", p->group,
                       s->name),
               err_take("parallel.group=0"), err_take("parallel.schedule=interleaved");
    if (spec->micro_batch % s->unit_div)
        return err_set(ERR_CONFIG, "schedule '%s' cuts a micro-batch into %d: train.micro_batch=%lld does not divide",
                       s->name, s->unit_div, (long long)spec->micro_batch),
               take_micro_batches(spec->micro_batch, whole);
    if (spec->micro_batch % whole)
        return err_set(ERR_CONFIG, "schedule '%s' cuts a micro-batch into %d: no whole balance units of moe.unit=%lld",
                       s->name, s->unit_div, (long long)unit),
               err_take("moe.unit=1"), take_micro_batches(spec->micro_batch, whole);
    if (held <= PARTS_STAGES) return ERR_OK;
    return err_set(ERR_CONFIG, "a rank would hold %d stages; at most %d are allowed", held, PARTS_STAGES);
}

/* Whether a schedule's backwards are split already only its lists show. */
static Err split_check(const ScheduleSpec *asked)
{
    Schedule made;
    Err err = schedule_make(asked, &made);
    schedule_free(&made);
    return err;
}

/* Whether modules of multi-token prediction are in the stage before the last, which is the head's alone. */
static bool modules_apart(const PartsSpec *spec, const StageShare *shares, int stages)
{
    return stage_inputs(spec->model, shares[stages - 1]) > 1;
}

/* The pp ranks of the first stage and of those two sum the table's gradient; mirrored ranks would be five. */
static Err check_modules(const PartsSpec *spec, const Schedule *s, const StageShare *shares)
{
    if (s->replicas == 1 || !modules_apart(spec, shares, s->stages)) return ERR_OK;
    return err_set(ERR_CONFIG,
                   "parallel.layout='%s': schedule '%s' has stages in two directions, and modules of "
                   "multi-token prediction in another stage than the head",
                   layout_of(spec), s->name),
           err_hint("put the 'm' into the stage of the 'L', or take a schedule of one direction");
}

Err parts_table_ranks(const PartsSpec *spec, int ranks, int out[2])
{
    ScheduleSpec asked;
    Schedule s;
    SetupArena setup;
    StageShare *shares;
    out[0] = out[1] = 0;
    TRY(read_pipeline(spec, ranks, &asked));
    TRY(schedule_shape(&asked, &s));
    setup_init(&setup);
    Err err = make_shares(spec, &s, &setup, &shares);
    if (!err && modules_apart(spec, shares, s.stages)) {
        const int a = schedule_rank_of(&s, 0, s.stages - 2);
        const int b = spec->model->tied ? schedule_rank_of(&s, 0, s.stages - 1) : a;
        out[0] = a < b ? a : b, out[1] = a < b ? b : a;
        if (!out[0] || out[0] == out[1]) out[0] = out[1], out[1] = 0;
    }
    setup_release(&setup);
    return err;
}

Err parts_check(const PartsSpec *spec, int ranks, int64_t *unit)
{
    ScheduleSpec asked;
    Schedule s;
    SetupArena setup;
    StageShare *shares;
    TRY(read_pipeline(spec, ranks, &asked));
    Err err = schedule_shape(&asked, &s);
    if (!err && s.split) err = split_check(&asked);
    if (err && *layout_of(spec) && !spec->pipeline.chunks)
        err = err_prefix(err, "parallel.layout='%s', %d stages for %d ranks", layout_of(spec), asked.chunks * ranks,
                         ranks);
    if (err == ERR_CONFIG && spec->pipeline.chunks) err_take("parallel.vpp=0");
    if (err == ERR_CONFIG) err_take("parallel.schedule=auto");
    TRY(err);
    TRY(check_units(spec, &s));
    *unit = spec->micro_batch / s.unit_div;
    setup_init(&setup);
    err = make_shares(spec, &s, &setup, &shares);
    if (!err) err = check_modules(spec, &s, shares);
    setup_release(&setup);
    return err;
}

/* Costs of stages by the products' FLOP: the time of a stage is not known before it has run. */
static Err make_costs(const PartsSpec *spec, const StageShare *shares, int stages, SetupArena *setup,
                      const StageCost **out)
{
    StageCost *costs;
    TRY(setup_array(setup, stages, &costs));
    for (int i = 0; i < stages; i++) {
        const double flop = (double)stage_flop_per_token(spec->model, shares[i]);
        const double again = (double)stage_again_flop_per_token(spec->model, shares[i]);
        costs[i] = (StageCost){ .f = flop, .i = flop + again, .w = flop };
    }
    *out = costs;
    return ERR_OK;
}

static Err make_schedules(Parts *p, const PartsSpec *spec, int ranks, SetupArena *setup)
{
    ScheduleSpec s;
    Schedule shape;
    TRY(read_pipeline(spec, ranks, &s));
    TRY(schedule_shape(&s, &shape));
    TRY(check_units(spec, &shape));
    TRY(make_shares(spec, &shape, setup, &p->shares));
    TRY(make_costs(spec, p->shares, shape.stages, setup, &s.costs));
    if (modules_apart(spec, p->shares, shape.stages)) s.table = shape.stages - 2;
    TRY(schedule_make(&s, &p->step));
    s.chunks = shape.chunks;
    s.microbatches = spec->microbatches;
    s.batches = 0;
    return schedule_forward(&s, &p->forward);
}

static Err one_schedule(const PartsSpec *spec, int ranks, bool forwards, Schedule *out)
{
    SetupArena setup;
    Parts p = { 0 };
    setup_init(&setup);
    const Err err = make_schedules(&p, spec, ranks, &setup);
    *out = forwards ? p.forward : p.step;
    schedule_free(forwards ? &p.step : &p.forward);
    setup_release(&setup);
    return err;
}

Err parts_schedule(const PartsSpec *spec, int ranks, Schedule *out) { return one_schedule(spec, ranks, false, out); }

Err parts_forwards(const PartsSpec *spec, int ranks, Schedule *out) { return one_schedule(spec, ranks, true, out); }

/* ---- registration ---- */

static Err register_stages(Parts *p, const PartsSpec *spec, int pp_rank, int replica, Stage *stages, SetupArena *setup)
{
    const int chunks = p->step.chunks;
    StageShare *shares;
    TRY(setup_array(setup, chunks, &shares));
    for (int c = 0; c < chunks; c++) shares[c] = p->shares[schedule_stage_at(&p->step, pp_rank, replica, c)];
    return stages_register(stages, shares, chunks, &p->registries[pp_rank * p->step.replicas + replica], spec->model,
                           setup);
}

/* Marks parameters without slices in a second replica as copies of the first's. */
static void mark_copies(ParamRegistry *r)
{
    for (int i = 0; i < r->count; i++)
        if (r->place.zero_shards[r->items[i].spec.group] == 1) r->items[i].copy = true;
}

static Err register_rank(Parts *p, const PartsSpec *spec, const World *w, int pp_rank, SetupArena *setup)
{
    const bool own = pp_rank == w->pp_rank;
    const ParamPlace place = param_place(w->grid, w->rank, spec->zero);
    for (int r = 0; r < p->step.replicas; r++) {
        ParamRegistry *reg = &p->registries[pp_rank * p->step.replicas + r];
        Stage *stages = own ? parts_stage(p, r, 0) : NULL;
        if (!own) TRY(setup_array(setup, p->step.chunks, &stages));
        param_registry_init(reg, setup, place);
        reg->narrow = spec->narrow;
        reg->fp32_vectors = spec->fp32_vectors;
        TRY(register_stages(p, spec, pp_rank, r, stages, setup));
        if (r) mark_copies(reg);
        optimizer_assign(reg, spec->optimizer, spec->muon);
        TRY(param_number(reg, &p->whole));
        TRY(param_layout(reg, spec->bucket_elems));
    }
    return ERR_OK;
}

static Err register_whole(Parts *p, const PartsSpec *spec, const World *w, SetupArena *setup)
{
    const StageShare all = stage_whole(spec->model);
    Stage stage;
    param_registry_init(&p->whole, setup, param_place(w->grid, w->rank, spec->zero));
    TRY(stages_register(&stage, &all, 1, &p->whole, spec->model, setup));
    optimizer_assign(&p->whole, spec->optimizer, spec->muon);
    return ERR_OK;
}

/* ---- the whole ---- */

Err parts_open(Parts *p, const PartsSpec *spec, const World *w, SetupArena *setup)
{
    const int ranks = w->grid.pp;
    *p = (Parts){ 0 };
    TRY(make_schedules(p, spec, ranks, setup));
    ASSERT(w->grid.bidirectional == (p->step.replicas > 1));
    ASSERT(w->grid.zero_group || !param_zero_group(w->grid, spec->zero, 0));
    ASSERT(!spec->model->moe.experts || w->grid.ep || w->grid.tp * w->grid.cp * w->grid.dp == 1);
    TRY(setup_array(setup, ranks * p->step.replicas, &p->registries));
    TRY(setup_array(setup, p->step.replicas * p->step.chunks, &p->stages));
    TRY(register_whole(p, spec, w, setup));
    for (int r = 0; r < ranks; r++) TRY(register_rank(p, spec, w, r, setup));
    return ERR_OK;
}

void parts_release(Parts *p)
{
    schedule_free(&p->step);
    schedule_free(&p->forward);
}

/* Ranks of both replicas that have the stage. */
static Comm *stage_group(const Parts *p, World *w, int replica, bool experts)
{
    const int stage = schedule_stage_at(&p->step, w->pp_rank, replica, 0);
    if (2 * stage < p->step.stages) return experts ? &w->expert_low : &w->stage_low;
    return experts ? &w->expert_high : &w->stage_high;
}

Comm *parts_group(const Parts *p, World *w, int replica, ParamGroup group)
{
    const bool experts = group == PARAM_EXPERT;
    if (w->grid.zero_group) return experts ? &w->expert_zero : &w->zero;
    if (p->step.replicas > 1) return stage_group(p, w, replica, experts);
    return experts ? &w->expert_dp : world_copies(w);
}

Comm *parts_far(const Parts *p, World *w, int replica, ParamGroup group)
{
    const bool experts = group == PARAM_EXPERT;
    if (!w->grid.zero_group) return NULL;
    if (p->step.replicas > 1) return stage_group(p, w, replica, experts);
    return experts ? &w->expert_zero_far : &w->zero_far;
}
