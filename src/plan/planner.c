/* See planner.h. */
#include "plan/planner.h"

#include "base/processors.h"

Err planner_open(Planner *p, const char *device, int ranks)
{
    *p = (Planner){ 0 };
    p->source = predict_source(&p->model);
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
