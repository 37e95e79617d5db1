/* See bind.h. */
#include "train/bind.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/log.h"
#include "base/placement.h"
#include "base/processors.h"

/* Has the environment a word about where threads run? */
static const char *variable_of_threads(void)
{
    static const char *const names[] = { "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (getenv(names[i])) return names[i];
    return NULL;
}

/* Where there are several nodes memory is near or far, and threads that move leave theirs. With a quota others have the
 * machine, too: bound beside them a rank loses more than it wins (docs/prediction.md, "Bound threads"). */
static bool has_nodes(const Machine *m) { return m->nodes > 1 && !(processors_quota("") > 0); }

/* The reason that stands against binding; "": none. */
static void find_hindrance(const Ranks *r, const Machine *m, int threads, char *why, size_t size)
{
    const char *variable = variable_of_threads();
    *why = 0;
    if (variable) snprintf(why, size, "%s is set", variable);
    else if (r->cpu_sharers < r->local_size)
        snprintf(why, size, "ranks of this host were started with different processors");
    else if (m->processors && (int64_t)threads * r->local_size > m->processors)
        snprintf(why, size, "%d ranks of %d thread%s on %d processor%s", r->local_size, threads,
                 threads == 1 ? "" : "s", m->processors, m->processors == 1 ? "" : "s");
}

/* Ranks whose GPUs are near the same processors divide these. Returns this rank's share; 0: it is not bound. threads:
 * what it cannot do with less. */
static int bind_near_gpu(const Ranks *r, int threads, char *text, size_t size)
{
    DeviceInfo gpu;
    PlacementNear near = r->gpu.near;
    const int ranks = r->gpu.neighbours;
    if (device_cuda_info(r->gpu.index, &gpu)) return snprintf(text, size, "its GPU does not say where it is"), 0;
    if (r->boot.size == 1) placement_near_device(gpu.pci, &near);
    if (near.processors && (int64_t)threads * ranks > near.processors)
        return snprintf(text, size, "%d rank%s of %d thread%s on the %d processor%s near their GPUs", ranks,
                        ranks == 1 ? "" : "s", threads, threads == 1 ? "" : "s", near.processors,
                        near.processors == 1 ? "" : "s"),
               0;
    const bool bound = near.processors && placement_bind_near(&near);
    snprintf(text, size, "%s", near.text);
    return bound ? near.processors / ranks : 0;
}

/* Says that nothing is bound. Of GPUs each rank has its own reason. */
static void say_unbound(const Ranks *r, bool asked, const char *how, bool of_rank, const char *why)
{
    const char *who = of_rank ? "this rank" : "no rank";
    if (!asked) log_info("run.bind=auto: %s is%s bound: %s", who, of_rank ? " not" : "", why);
    else if (of_rank || r->local_rank == 0)
        log_warn("run.bind=%s: %s is%s bound: %s", how, who, of_rank ? " not" : "", why);
}

void bind_rank(const Config *cfg, const Ranks *ranks, int *threads, bool chosen)
{
    Machine m;
    char text[256];
    const bool asked = cfg->run.bind != RUN_BIND_AUTO, on_gpu = cfg->run.device == RUN_DEVICE_CUDA;
    if (cfg->run.bind == RUN_BIND_NONE || (ranks->local_size < 2 && !on_gpu)) return;
    machine_look(&m); /* (what hwloc cannot say is 0, and said below) */
    if (!asked && !has_nodes(&m)) return;
    const PlacementUnit unit = cfg->run.bind == RUN_BIND_CORE ? PLACEMENT_CORE : PLACEMENT_NODE;
    const char *how = unit == PLACEMENT_CORE ? "core" : "node";
    int bound = 0;
    find_hindrance(ranks, &m, *threads, text, sizeof text);
    const PlacementChoice choice = { unit, ranks->local_size, ranks->local_rank, chosen ? 0 : *threads };
    const bool hindered = *text != 0;
    if (!hindered && on_gpu) bound = bind_near_gpu(ranks, chosen ? 1 : *threads, text, sizeof text);
    else if (!hindered) bound = placement_bind(choice, text, sizeof text);
    if (bound && on_gpu) log_info("run.bind=node: this rank is bound where its GPU is: %s", text);
    else if (bound) log_info("run.bind=%s: this host's ranks are bound to processors %s", how, text);
    else say_unbound(ranks, asked, how, on_gpu && !hindered, text);
    if (bound && chosen && *threads > bound) *threads = bound;
}

void bind_describe(char *text, size_t size)
{
    Machine m;
    const char *variable = variable_of_threads();
    if (!machine_look(&m)) {
        snprintf(text, size, "hwloc cannot tell this machine's processors: no rank can be bound");
        return;
    }
    const int n = snprintf(text, size, "%d processor%s of %d core%s in %d memory node%s%s; ", m.processors,
                           m.processors == 1 ? "" : "s", m.cores, m.cores == 1 ? "" : "s", m.nodes,
                           m.nodes == 1 ? "" : "s", m.elsewhere ? " of another machine (HWLOC_...)" : "");
    if (n < 0 || (size_t)n >= size) return;
    if (variable) snprintf(text + n, size - (size_t)n, "no rank is bound: %s is set", variable);
    else
        snprintf(text + n, size - (size_t)n, "run.bind=auto binds %s",
                 has_nodes(&m) ? "ranks to their node" : "no rank, core or node does");
}
