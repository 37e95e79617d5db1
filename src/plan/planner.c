/* See planner.h. */
#include "plan/planner.h"

#include <string.h>

#include "base/processors.h"

/* What the rank waits for those with the same weights, in a whole step. */
static double waits_for_copies(const MemoryPlan *plan)
{
    static const GroupKind copies[] = { GROUP_DP,        GROUP_DP_CP,      GROUP_STAGE_LOW,  GROUP_STAGE_HIGH,
                                        GROUP_EXPERT_DP, GROUP_EXPERT_LOW, GROUP_EXPERT_HIGH };
    TimeShares shares;
    double sum = 0;
    memcpy(&shares, plan->clock, sizeof shares);
    for (size_t i = 0; i < sizeof copies / sizeof *copies; i++) sum += shares.waited[copies[i]];
    return sum;
}

Err planner_run(void *user, const TrainSpec *spec, Grid grid, int rank, MemoryPlan *plan, RankTimes *times)
{
    StepTimes t;
    TRY(predict_rank(user, spec, grid, rank, plan, &t));
    *times = (RankTimes){ .tail = t.rest, .reduce = waits_for_copies(plan) };
    if (times->reduce > times->tail) times->reduce = times->tail;
    memcpy(times->stage, t.unit, sizeof times->stage);
    if (grid.pp > 1) times->hop = predict_hop(user, spec, grid);
    return ERR_OK;
}

Err planner_open(Planner *p, const char *device, int ranks)
{
    *p = (Planner){ .source = { &p->model, planner_run } };
    if (!device)
        return err_set(ERR_CONFIG, "plan --search asks how long things take on a device, and none is named"),
               err_hint("--device h100, or the path of a device's file");
    TRY(device_file_read(device, &p->device));
    return cost_open(&p->model, &p->device, ranks);
}

void planner_close(Planner *p) { device_file_release(&p->device); }

SearchQuestion planner_question(const Planner *p, const Config *base, int64_t world)
{
    enum { TP_MOST = 8, LESS_TOKENS = 4096, BATCH_MOST = 8 };
    const int host = (int)p->device.host_devices;
    return (SearchQuestion){ .base = base,
                             .world = world,
                             .limits = { .tp_most = host > 0 && host < TP_MOST ? host : TP_MOST,
                                         .cp_tokens = LESS_TOKENS,
                                         .batch_most = BATCH_MOST },
                             .memory = p->device.memory_mib << 20,
                             .libraries = !p->model.cpu,
                             .source = p->source,
                             .threads = processors_share(1, 1) };
}
