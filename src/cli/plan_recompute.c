/*
 * What train.recompute costs (plan.h): the rank that takes the most, once with each kind for all of its layers. As what
 * a layer keeps adds up, a list of kinds lies in between.
 */
#include <stdio.h>

#include "base/units.h"
#include "cli/plan.h"
#include "plan/layer_cost.h"

Err plan_recompute(PlanTable *t)
{
    const PlanKind *k = plan_largest(t);
    const LayerPattern *planned = &t->spec.model.recompute;
    const int rank = grid_rank_at(t->grid, k->pp_rank, k->first_tp_rank, k->first_cp_rank);
    for (int kind = 0; kind < RECOMPUTE_KINDS; kind++) {
        TrainSpec spec = t->spec;
        if (planned->runs == 1 && planned->value[0] == kind) { /* it has been run dry */
            t->recomputed[kind] = k->plan;
            continue;
        }
        spec.model.recompute = layer_pattern_all(kind);
        TRY(trainer_plan(&spec, t->grid, rank, &t->recomputed[kind]));
    }
    return ERR_OK;
}

static const char *const names[RECOMPUTE_KINDS] = { RECOMPUTE_LIST(CHOICE_TEXT) };

static int layers_of(const MemoryPlan *p)
{
    int layers = 0;
    for (int s = 0; s < p->stage_count; s++) layers += p->stages[s].layers;
    return layers;
}

void plan_put_recompute(const PlanTable *t)
{
    const MemoryPlan *none = &t->recomputed[RECOMPUTE_NONE];
    const int layers = layers_of(none);
    char head[64];
    if (!layers) return;
    snprintf(head, sizeof head, "train.recompute, of %d layer%s", layers, layers == 1 ? "" : "s");
    printf("\n%-36s %12s %12s %12s %12s %18s\n", head, "saves", "scratch", "rank's total", "FLOP more",
           "saved by a layer");
    for (int kind = 0; kind < RECOMPUTE_KINDS; kind++) {
        const MemoryPlan *p = &t->recomputed[kind];
        char a[UNITS_BYTES], b[UNITS_BYTES], c[UNITS_BYTES], d[UNITS_BYTES] = "";
        if (kind) units_bytes(d, (none->save - p->save) / layers);
        printf("  %-34s %12s %12s %12s %10.1f %% %18s\n", names[kind], units_bytes(a, p->save),
               units_bytes(b, p->scratch), units_bytes(c, memory_plan_total(p)),
               100 * ((double)p->work.flop / (double)none->work.flop - 1), d);
    }
}

void plan_json_recompute(JsonOut *j, const PlanTable *t)
{
    json_open(j, "recompute", '{');
    for (int kind = 0; kind < RECOMPUTE_KINDS; kind++) {
        const MemoryPlan *p = &t->recomputed[kind];
        json_open(j, names[kind], '{');
        json_put_int(j, "saves", p->save);
        json_put_int(j, "scratch", p->scratch);
        json_put_int(j, "total", memory_plan_total(p));
        json_put_number(j, "flop", (double)p->work.flop);
        json_close(j, '}');
    }
    json_close(j, '}');
}
