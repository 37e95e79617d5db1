/* The passes that keep lists local: splitting backwards, and what ends a step. See passes.h. */
#include "pipeline/passes.h"

#include <stdlib.h>

#include "pipeline/check.h"
#include "pipeline/table.h"

static Err no_memory(const Schedule *s)
{
    return err_set(ERR_MEMORY, "no memory for the lists of schedule '%s': %d ranks, %d micro-batches", s->name,
                   s->ranks, s->microbatches);
}

/* ---- split ---- */

Err pass_split(Schedule *s)
{
    bool any = false;
    for (int r = 0; r < s->ranks && !s->no_memory; r++) {
        ActionList old = s->rank[r];
        s->rank[r] = (ActionList){ 0 };
        for (int i = 0; i < old.count; i++) {
            Action a = old.action[i];
            const bool whole = a.kind == ACT_B;
            any |= whole;
            if (whole) a.kind = ACT_I;
            schedule_push(s, r, a);
            a.kind = ACT_W;
            if (whole) schedule_push(s, r, a);
        }
        free(old.action);
    }
    if (s->no_memory) return no_memory(s);
    if (!any) return err_set(ERR_CONFIG, "schedule '%s': its backwards are split already", s->kind->name);
    return ERR_OK;
}

/* ---- the end of a step ---- */

static void end_with(Schedule *s, int rank, ActionKind kind, int replica)
{
    schedule_push(s, rank,
                  (Action){ .kind = (uint8_t)kind,
                            .replica = (uint8_t)replica,
                            .stage = (uint16_t)schedule_stage_at(s, rank, replica, 0),
                            .in = -1,
                            .out = -1 });
}

static bool may_hold_table(const Schedule *s, int rank)
{
    const int stages[] = { 0, s->stages - 1, s->table };
    for (int i = 0; i < 3 * s->replicas; i++)
        if (schedule_rank_of(s, i / 3, stages[i % 3]) == rank) return true;
    return false;
}

static void end_step(Schedule *s, int rank)
{
    const int lower = schedule_lower_replica(s, rank);
    if (s->stages > 1 && may_hold_table(s, rank)) end_with(s, rank, ACT_TIED, 0);
    for (int i = 0; i < s->replicas; i++) end_with(s, rank, ACT_REDUCE, i ^ lower);
    end_with(s, rank, ACT_NORM, 0);
    for (int i = 0; i < s->replicas; i++) end_with(s, rank, ACT_UPDATE, i ^ lower);
}

/* Updates between the computes of one rank with one stage, and the versions that its computes then read. */
static void update_on_the_way(Schedule *s, int rank)
{
    const int batch = s->versions == VERSIONS_DOUBLE ? s->microbatches * s->unit_div : 1;
    ActionList old = s->rank[rank];
    int updates = 0, weights = 0;
    s->rank[rank] = (ActionList){ 0 };
    for (int i = 0; i < old.count; i++) {
        Action a = old.action[i];
        if (a.kind != ACT_W) {
            const int version = check_version(s, a.stage, a.microbatch);
            ASSERT(version <= updates); /* the schedule's rule sees to it */
            a.version = (uint16_t)(updates - version);
        }
        schedule_push(s, rank, a);
        if ((a.kind != ACT_B && a.kind != ACT_W) || ++weights % batch) continue;
        end_with(s, rank, ACT_REDUCE, 0);
        end_with(s, rank, ACT_UPDATE, 0);
        updates++;
    }
    free(old.action);
}

Err pass_sync(Schedule *s)
{
    for (int r = 0; r < s->ranks && !s->no_memory; r++)
        if (s->versions == VERSIONS_STEP) end_step(s, r);
        else update_on_the_way(s, r);
    return s->no_memory ? no_memory(s) : ERR_OK;
}
