/* See optim.h. AdamW itself is an op (device/ops.def); this file decides what it runs over. */
#include "optim/optim.h"

/* Integers add up exactly in any order; with f32 accumulators the sum is a tree over ranks. */
static Err sum_over(Optim *o, Comm *c, Tensor g)
{
    if (g.dtype == I64) return comm_sum_i64(c, o->stream, g.data, tensor_count(g), NULL);
    return comm_reduce_tree_f32(c, o->stream, g, NULL);
}

static Tensor flat_grad(const ParamStore *ps, int i)
{
    return tensor_reshape(param_store_grad(ps, i), ps->reg->items[i].count);
}

/* What got no gradient in this step has 0. */
static Err clear_fresh(Optim *o)
{
    for (int i = 0; i < o->params->reg->count; i++)
        if (o->params->place[i].fresh) TRY(op(o->stream, fill_zero_acc, .x = flat_grad(o->params, i)));
    return ERR_OK;
}

Err optim_reduce(Optim *o)
{
    const ParamRegistry *reg = o->params->reg;
    TRY(clear_fresh(o));
    ASSERT(o->world->dp.size == 1 || !tensor_count(o->params->grad_once));
    for (int i = 0; i < reg->count; i++) {
        Tensor g = param_store_grad(o->params, i);
        if (reg->items[i].spec.partial == PARTIAL_ROWS) TRY(sum_over(o, &o->world->sp, g));
        if (reg->items[i].spec.partial == PARTIAL_HEADS) TRY(sum_over(o, &o->world->tp, g));
    }
    TRY(sum_over(o, &o->world->dp, o->params->grad));
    return comm_sum_i64(&o->world->dp, o->stream, o->sums.data, 3, NULL);
}

/* A tensor that every tp rank holds whole counts once: its statistics are taken from tp rank 0. */
static bool counts_here(const Optim *o, const Param *p)
{
    return o->world->tp.rank == 0 || p->spec.cut[0] == CUT_TP || p->spec.cut[1] == CUT_TP;
}

Err optim_norm(Optim *o)
{
    ParamStore *ps = o->params;
    TRY(device_zero(o->stream, ps->max.data, tensor_bytes(ps->max)));
    TRY(device_zero(o->stream, ps->sumsq.data, tensor_bytes(ps->sumsq)));
    for (int i = 0; i < ps->reg->count; i++) {
        const Param *p = &ps->reg->items[i];
        if (!counts_here(o, p)) continue;
        TRY(op(o->stream, grad_stats, .max = tensor_row_slice(ps->max, i, 1),
               .sumsq = tensor_reshape(tensor_row_slice(ps->sumsq, i, 1), 4), .g = flat_grad(ps, i),
               .shift = param_store_shift(ps, i)));
    }
    TRY(comm_max_i64(&o->world->tp, o->stream, ps->max.data, tensor_count(ps->max), NULL));
    TRY(comm_sum_i64(&o->world->tp, o->stream, ps->sumsq.data, tensor_count(ps->sumsq), NULL));
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
        Tensor copy = { 0 }; /* for layers that do not read the master */
        if (ps->value.dtype != F32) copy = tensor_row_slice(ps->value, p->offset, p->count);
        TRY(op(o->stream, adamw, .w = tensor_row_slice(ps->master, p->offset, p->count),
               .m = tensor_row_slice(ps->m, p->offset, p->count),
               .v = tensor_row_slice(ps->v, p->offset, p->count), .g = flat_grad(ps, i), .copy = copy,
               .shift = param_store_shift(ps, i), .step = o->step, .beta1 = o->adamw.beta1,
               .beta2 = o->adamw.beta2, .eps = o->adamw.eps,
               .decay = p->spec.flags & PARAM_DECAY ? o->adamw.weight_decay : 0));
    }
    return ERR_OK;
}
