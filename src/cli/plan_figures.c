/* See plan.h: the rows of a plan, for both writers: the bytes of a rank and its work; and whether they fit a device. */
#include <stddef.h>

#include "cli/plan.h"
#include "train/spec.h"

/* In f32 the weights that layers read are the optimizer's own, whole; else those are cut like the moments. */
static int64_t weights(const PlanTable *t, const PlanKind *k)
{
    return (t->spec.compute == F32 ? k->plan.params.values : k->plan.params.zero) * dtype_size(F32);
}

static int64_t narrow_weights(const PlanTable *t, const PlanKind *k)
{
    return t->spec.compute == F32 ? 0 : k->plan.params.values * dtype_size(t->spec.compute);
}

static int64_t moments(const PlanTable *t, const PlanKind *k)
{
    return (k->plan.params.zero + k->plan.params.second) * dtype_size(t->spec.update.moments);
}

int64_t plan_param_bytes(const PlanTable *t, const PlanKind *k)
{
    return weights(t, k) + narrow_weights(t, k) + k->plan.params.grad_bytes + moments(t, k);
}

static int64_t tables(const PlanTable *t, const PlanKind *k)
{
    return k->plan.state + k->plan.states - k->plan.boundary - k->plan.params.unit_buffers - plan_param_bytes(t, k);
}

static int64_t total(const PlanTable *t, const PlanKind *k)
{
    (void)t;
    return memory_plan_total(&k->plan);
}

static int64_t flop(const PlanTable *t, const PlanKind *k)
{
    (void)t;
    return k->plan.work.flop;
}

static bool in_16_bits(const PlanTable *t) { return t->spec.compute != F32; }
static bool is_widened(const PlanTable *t) { return t->spec.device.kind == DEVICE_CPU && in_16_bits(t); }
static bool is_staged(const PlanTable *t) { return t->grid.pp > 1; }
static bool is_paired(const PlanTable *t) { return t->spec.overlap_moe; }
static bool is_in_units(const PlanTable *t) { return t->spec.update.zero >= ZERO_GRADS; }
static bool is_copied(const PlanTable *t) { return t->spec.purpose.snapshot; }
static bool always(const PlanTable *t) { return t != NULL; }
static bool states_away(const PlanTable *t) { return t->spec.update.states_on_host; }
static bool masters_away(const PlanTable *t) { return states_away(t) && in_16_bits(t); }
static bool is_offloaded(const PlanTable *t) { return t->spec.model.offload > 0; }

#define FIELD(name) .field = offsetof(MemoryPlan, name)

const PlanFigure plan_memory[] = {
    { "weights", "weights (fp32)", "weights", weights, .on_host = masters_away },
    { "weights_16_bit", "their 16-bit copy", "in 16 bits", narrow_weights, in_16_bits },
    { "gradients", "gradients", "gradients", FIELD(params.grad_bytes) },
    { "moments", "moments", "moments", moments, .on_host = states_away },
    { "tables", "tables, batches, statistics", "tables", tables },
    { "unit_buffers", "units that are whole at once", "units", FIELD(params.unit_buffers), .shown = is_in_units },
    { "boundary", "buffers between stages", "buffers", FIELD(boundary), .shown = is_staged },
    { "saves", "saves between forward and backward", "saves", FIELD(save) },
    { "offload_buffers", "  others on their way to the host", "on their way", FIELD(offload_buffers),
      .shown = is_offloaded },
    { "scratch", "scratch of a layer call", "scratch", FIELD(scratch) },
    { "scratch_in_pairs", "  of it for forwards in pairs", "in pairs", FIELD(scratch_forward), .shown = is_paired },
    { "workspace", "workspace of kernels, at most", "workspace", FIELD(workspace) },
    { "staging", "16-bit tensors widened for an op", "widened", FIELD(staging), .shown = is_widened },
    { "offload_host", "saves of offloaded layers", "offloaded", FIELD(offload_host), .shown = is_offloaded,
      .on_host = always },
    { "read_ahead", "batches read ahead", "ahead", FIELD(ahead), .on_host = always },
    { "snapshot", "copy to be written", "copy", FIELD(snapshot), .shown = is_copied, .on_host = always },
    { "total", "total", "total", total },
    { NULL },
};

const PlanFigure plan_work[] = {
    { "op_bytes", "bytes read and written by ops", "op bytes", FIELD(work.op_bytes) },
    { "comm_bytes", "bytes sent to other ranks", "sent", FIELD(work.comm_bytes) },
    { "comm_beside_ops", "  of it beside ops of a unit", "beside ops", FIELD(work.comm_beside) },
    { "flop", "FLOP of the ops", "FLOP", flop, .is_count = true },
    { NULL },
};

int64_t plan_value(const PlanTable *t, const PlanKind *k, const PlanFigure *f)
{
    if (f->value) return f->value(t, k);
    return *(const int64_t *)(const void *)((const char *)&k->plan + f->field);
}

const PlanKind *plan_largest(const PlanTable *t)
{
    const PlanKind *most = &t->kinds[0];
    for (int i = 1; i < t->count; i++)
        if (memory_plan_total(&t->kinds[i].plan) > memory_plan_total(&most->plan)) most = &t->kinds[i];
    return most;
}

int64_t plan_largest_total(const PlanTable *t) { return memory_plan_total(&plan_largest(t)->plan); }

int64_t plan_checkpoint(const PlanTable *t)
{
    int64_t bytes = 0;
    for (int rank = 0; rank < grid_size(t->grid); rank++) bytes += t->shards[rank];
    return bytes;
}

double plan_flop(const PlanTable *t)
{
    double flop = 0;
    for (int i = 0; i < t->count; i++) {
        const PlanKind *k = &t->kinds[i];
        flop += (double)k->plan.work.flop * k->tp_ranks * k->cp_ranks * t->grid.dp;
    }
    return flop;
}

/* Bytes that CUDA and its libraries take beside a plan. */
static int64_t libraries(const Config *cfg, Grid grid)
{
    return cfg->run.device == RUN_DEVICE_CPU ? 0 : spec_library_bytes(cfg, grid);
}

/* (the ranks of a machine whose processors are the device share its memory) */
bool plan_holds(const DeviceFile *target, const Config *cfg, Grid grid, int64_t bytes)
{
    const int64_t sharers = target->processors > 0 ? grid_size(grid) : 1;
    return sharers * bytes + libraries(cfg, grid) <= target->memory_mib << 20;
}

bool plan_fits(const PlanTable *t) { return plan_holds(t->target, t->cfg, t->grid, plan_largest_total(t)); }

int plan_pairs(const PlanTable *t)
{
    return world_pairs(t->grid, spec_sums_by_message(t->cfg), spec_host_ranks(t->cfg));
}

int64_t plan_library_bytes(const PlanTable *t) { return libraries(t->cfg, t->grid); }
