/* See optim.h. AdamW itself is an op (device/ops.def); this file decides what it runs over. */
#include "optim/optim.h"

/* The loss sums; gradients are summed by then, or on their way (ddp.h). */
Err optim_sum_loss(Optim *o) { return comm_sum_i64(&o->world->dp, o->stream, o->sums.data, 3, NULL); }

/*
 * Each element counts once: of a tensor that every tp rank holds whole the statistics are tp rank 0's, and with one
 * slice every dp rank takes the same of everything.
 */
static bool counts_here(const Optim *o, const Param *p)
{
    return o->world->tp.rank == 0 || p->spec.cut[0] == CUT_TP || p->spec.cut[1] == CUT_TP;
}

/* Ranks whose statistics together are those of the whole model. */
static Comm *stats_group(const Optim *o)
{
    return o->params->reg->slices > 1 ? &o->world->world : &o->world->tp;
}

Err optim_norm(Optim *o)
{
    ParamStore *ps = o->params;
    TRY(device_zero(o->stream, ps->max.data, tensor_bytes(ps->max)));
    TRY(device_zero(o->stream, ps->sumsq.data, tensor_bytes(ps->sumsq)));
    for (int i = 0; i < ps->reg->count; i++) {
        const Param *p = &ps->reg->items[i];
        Tensor g = param_slice_grad(ps, i);
        if (!counts_here(o, p) || !tensor_count(g)) continue;
        TRY(op(o->stream, grad_stats, .max = tensor_row_slice(ps->max, i, 1),
               .sumsq = tensor_reshape(tensor_row_slice(ps->sumsq, i, 1), 4), .g = g,
               .shift = param_store_shift(ps, i)));
    }
    TRY(comm_max_i64(stats_group(o), o->stream, ps->max.data, tensor_count(ps->max), NULL));
    TRY(comm_sum_i64(stats_group(o), o->stream, ps->sumsq.data, tensor_count(ps->sumsq), NULL));
    TRY(comm_max_i64(&o->world->world, o->stream, ps->overflow_cell.data, 1, NULL));
    return op(o->stream, step_finish, .max = ps->max, .sumsq = ps->sumsq, .shift = ps->shift,
              .next_shift = ps->next_shift, .loss_sums = o->sums, .overflow = ps->overflow, .step = o->step,
              .room = o->room, .acc = ps->grad.dtype);
}

Err optim_update(Optim *o)
{
    ParamStore *ps = o->params;
    for (int i = 0; i < ps->reg->count; i++) {
        const Param *p = &ps->reg->items[i];
        Tensor copy = { 0 }, g = param_slice_grad(ps, i); /* copy: for layers that do not read the master */
        if (!tensor_count(g)) continue;
        if (ps->value.dtype != F32) copy = param_slice_value(ps, i);
        TRY(op(o->stream, adamw, .w = param_slice_master(ps, i), .m = param_slice_of(ps, i, ps->m),
               .v = param_slice_of(ps, i, ps->v), .g = g, .copy = copy, .shift = param_store_shift(ps, i),
               .step = o->step, .beta1 = o->adamw.beta1, .beta2 = o->adamw.beta2, .eps = o->adamw.eps,
               .decay = p->spec.flags & PARAM_DECAY ? o->adamw.weight_decay : 0));
    }
    return ERR_OK;
}
