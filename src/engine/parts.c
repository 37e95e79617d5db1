/* See parts.h. */
#include "engine/parts.h"

static ScheduleSpec schedule_spec(const PipelineSpec *p, int ranks, int microbatches)
{
    return (ScheduleSpec){ .name = p->schedule ? p->schedule : "1f1b",
                           .ranks = ranks,
                           .microbatches = microbatches,
                           .chunks = p->chunks,
                           .waves = p->chunks / 2,
                           .group = p->group };
}

static const char *layout_of(const PartsSpec *s) { return s->pipeline.layout ? s->pipeline.layout : ""; }

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
    return err_set(ERR_CONFIG, "schedule '%s' updates after every '%d' micro-batches, and a step has '%d'",
                   s->name, s->microbatches, all),
           err_hint(
               "parallel.group is the number of micro-batches of an update; it must divide those of a step");
}

/* The layout says how many stages there are, where the user left that open. */
static Err make_schedules(Parts *p, const PartsSpec *spec, int ranks)
{
    ScheduleSpec s = schedule_spec(&spec->pipeline, ranks, spec->microbatches);
    int stages;
    TRY(stage_layout_count(layout_of(spec), &stages));
    if (stages && stages % ranks)
        return err_set(ERR_CONFIG,
                       "parallel.layout='%s' has '%d' stages, no multiple of the '%d' pipeline ranks",
                       layout_of(spec), stages, ranks);
    if (stages && !s.chunks) s.chunks = stages / ranks, s.waves = s.chunks / 2;
    TRY(share_batches(&s));
    TRY(schedule_make(&s, &p->step));
    s.chunks = p->step.chunks;
    s.microbatches = spec->microbatches;
    s.batches = 0;
    return schedule_forward(&s, &p->forward);
}

/* ---- registration ---- */

static Err register_stages(Parts *p, const PartsSpec *spec, int pp_rank, int replica, Stage *stages,
                           SetupArena *setup)
{
    const int chunks = p->step.chunks;
    StageShare *shares;
    TRY(setup_array(setup, chunks, &shares));
    for (int c = 0; c < chunks; c++) shares[c] = p->shares[schedule_stage_at(&p->step, pp_rank, replica, c)];
    return stages_register(stages, shares, chunks, &p->registries[pp_rank * p->step.replicas + replica],
                           spec->model, setup);
}

/* Without slices a second replica is a copy of the first. */
static void mark_copies(ParamRegistry *r)
{
    for (int i = 0; i < r->count; i++) r->items[i].copy = true;
}

static Err register_rank(Parts *p, const PartsSpec *spec, const World *w, int pp_rank, SetupArena *setup)
{
    const bool own = pp_rank == w->pp_rank;
    const Comm *group = w->grid.bidirectional ? &w->stage_low : &w->dp;
    const int slices = spec->zero ? group->size : 1;
    for (int r = 0; r < p->step.replicas; r++) {
        ParamRegistry *reg = &p->registries[pp_rank * p->step.replicas + r];
        Stage *stages = own ? parts_stage(p, r, 0) : NULL;
        if (!own) TRY(setup_array(setup, p->step.chunks, &stages));
        param_registry_init(reg, setup, w->grid.tp, w->tp_rank);
        TRY(register_stages(p, spec, pp_rank, r, stages, setup));
        if (r && slices == 1) mark_copies(reg);
        TRY(param_number(reg, &p->whole));
        TRY(param_layout(reg, spec->bucket_elems, slices, slices > 1 ? group->rank : 0));
    }
    return ERR_OK;
}

static Err register_whole(Parts *p, const PartsSpec *spec, const World *w, SetupArena *setup)
{
    const StageShare all = stage_whole(spec->model);
    Stage stage;
    param_registry_init(&p->whole, setup, w->grid.tp, w->tp_rank);
    return stages_register(&stage, &all, 1, &p->whole, spec->model, setup);
}

/* ---- the whole ---- */

Err parts_open(Parts *p, const PartsSpec *spec, const World *w, SetupArena *setup)
{
    const int ranks = w->grid.pp;
    *p = (Parts){ 0 };
    TRY(make_schedules(p, spec, ranks));
    ASSERT(w->grid.bidirectional == (p->step.replicas > 1));
    TRY(setup_array(setup, p->step.stages, &p->shares));
    TRY(setup_array(setup, ranks * p->step.replicas, &p->registries));
    TRY(setup_array(setup, p->step.replicas * p->step.chunks, &p->stages));
    TRY(stage_shares(spec->model, layout_of(spec), p->step.stages, p->shares));
    TRY(register_whole(p, spec, w, setup));
    for (int r = 0; r < ranks; r++) TRY(register_rank(p, spec, w, r, setup));
    return ERR_OK;
}

void parts_release(Parts *p)
{
    schedule_free(&p->step);
    schedule_free(&p->forward);
}

Comm *parts_group(const Parts *p, World *w, int replica)
{
    if (p->step.replicas == 1) return &w->dp;
    const int stage = schedule_stage_at(&p->step, w->pp_rank, replica, 0);
    return 2 * stage < p->step.stages ? &w->stage_low : &w->stage_high;
}
