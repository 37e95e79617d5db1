/* See optim.h. AdamW itself is an op (device/ops.def); this file decides what it runs over. */
#include "optim/optim.h"

#include "param/shard.h"

Err optim_sum_loss(Optim *o)
{
    const int64_t count = tensor_count(o->sums);
    TRY(comm_sum_i64(world_copies(o->world), o->stream, o->sums.data, count, NULL));
    return comm_sum_i64(&o->world->pp, o->stream, o->sums.data, count, NULL);
}

/* Statistics of what this rank holds, into the places of the whole model's. Each element counts on one rank. */
static Err add_stats(Optim *o, const ParamStore *ps)
{
    for (int i = 0; i < ps->reg->count; i++) {
        const Param *p = &ps->reg->items[i];
        Tensor g = param_slice_grad(ps, i);
        if (p->spec.group == PARAM_STATE) continue;
        if (p->copy || !shard_owner(p, &ps->reg->place) || !tensor_count(g)) continue;
        TRY(op(o->stream, grad_stats, .max = tensor_row_slice(o->stats->max, p->global, 1),
               .sumsq = tensor_reshape(tensor_row_slice(o->stats->sumsq, p->global, 1), 4), .g = g,
               .shift = param_store_shift(ps, i)));
    }
    return ERR_OK;
}

/* Over a group of ranks whose statistics add up. */
static Err sum_stats(Optim *o, Comm *c)
{
    Tensor max = o->stats->max, sumsq = o->stats->sumsq;
    TRY(comm_max_i64(c, o->stream, max.data, tensor_count(max), NULL));
    return comm_sum_i64(c, o->stream, sumsq.data, tensor_count(sumsq), NULL);
}

static Err own_stats(Optim *o)
{
    const GradStats *g = o->stats;
    TRY(device_zero(o->stream, g->max.data, tensor_bytes(g->max)));
    TRY(device_zero(o->stream, g->sumsq.data, tensor_bytes(g->sumsq)));
    for (int i = 0; i < o->stores; i++) TRY(add_stats(o, o->store[i]));
    return ERR_OK;
}

/* From the statistics to the step's decision. */
static Err finish(Optim *o, Tensor sums)
{
    const GradStats *g = o->stats;
    return op(o->stream, step_finish, .max = g->max, .sumsq = g->sumsq, .shift = g->shift,
              .next_shift = g->next_shift, .loss_sums = sums, .overflow = g->overflow, .no_room = g->no_room,
              .step = o->step, .room = o->room, .acc = o->store[0]->grad.dtype);
}

Err optim_norm(Optim *o)
{
    TRY(own_stats(o));
    TRY(sum_stats(o, &o->world->world));
    TRY(comm_max_i64(&o->world->world, o->stream, o->stats->flags.data, 2, NULL));
    return finish(o, tensor_row_slice(o->sums, 0, 3));
}

Err optim_norm_local(Optim *o, Tensor sums)
{
    TRY(own_stats(o));
    TRY(sum_stats(o, &o->world->tp));
    TRY(sum_stats(o, world_copies(o->world)));
    TRY(comm_max_i64(&o->world->tp, o->stream, o->stats->flags.data, 2, NULL));
    TRY(comm_max_i64(world_copies(o->world), o->stream, o->stats->flags.data, 2, NULL));
    return finish(o, sums);
}

static Err update_bias(Optim *o, ParamStore *ps, int id)
{
    if (!(o->bias_rate > 0)) return ERR_OK;
    return op(o->stream, expert_bias, .bias = param_slice_master(ps, id), .load = param_slice_grad(ps, id),
              .step = o->step, .rate = o->bias_rate);
}

Err optim_update(Optim *o, ParamStore *ps)
{
    for (int i = 0; i < ps->reg->count; i++) {
        const Param *p = &ps->reg->items[i];
        Tensor copy = { 0 }, g = param_slice_grad(ps, i); /* copy: for layers that do not read the master */
        if (p->spec.group == PARAM_STATE) {
            TRY(update_bias(o, ps, i));
            continue;
        }
        if (!tensor_count(g)) continue;
        if (ps->value.dtype != F32) copy = param_slice_value(ps, i);
        TRY(op(o->stream, adamw, .w = param_slice_master(ps, i), .m = param_slice_of(ps, i, ps->m),
               .v = param_slice_of(ps, i, ps->v), .g = g, .copy = copy, .shift = param_store_shift(ps, i),
               .step = o->step, .beta1 = o->adamw.beta1, .beta2 = o->adamw.beta2, .eps = o->adamw.eps,
               .decay = p->spec.flags & PARAM_DECAY ? o->adamw.weight_decay : 0));
    }
    return ERR_OK;
}
