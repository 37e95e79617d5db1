/* See optim.h. AdamW itself is an op (device/ops.def); this file decides what it runs over. Muon is in muon.c. */
#include "optim/optim.h"

Err optim_sum_loss(Optim *o)
{
    const int64_t count = tensor_count(o->sums);
    TRY(comm_sum_i64(world_copies(o->world), o->stream, o->sums.data, count, NULL));
    return comm_sum_i64(&o->world->pp, o->stream, o->sums.data, count, NULL);
}

/* Statistics of what this rank holds, into the places of the whole model's. Each element counts on one rank. */
static Err add_stats(Optim *o, const ParamStore *ps)
{
    if (!ps->chunks) return ERR_OK;
    return op(o->stream, grad_stats, .max = o->stats->max, .sumsq = o->stats->sumsq, .g = ps->grad,
              .shift = o->stats->shift, .parts = ps->parts, .chunks = ps->chunks);
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
    return op(o->stream, step_finish, .max = g->max, .sumsq = g->sumsq, .shift = g->shift, .next_shift = g->next_shift,
              .loss_sums = sums, .overflow = g->overflow, .over_limit = g->over_limit, .step = o->step,
              .headroom_bits = o->headroom_bits, .acc = o->store[0]->grad.dtype);
}

Err optim_norm(Optim *o)
{
    TRY(own_stats(o));
    TRY(sum_stats(o, &o->world->world));
    TRY(comm_max_i64(&o->world->world, o->stream, o->stats->flags.data, 2, NULL));
    if (o->logit_max.data)
        TRY(comm_max_i64(&o->world->world, o->stream, o->logit_max.data, tensor_count(o->logit_max), NULL));
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

static Err update_biases(Optim *o, ParamStore *ps)
{
    if (!(o->bias_rate > 0)) return ERR_OK;
    for (int i = 0; i < ps->reg->count; i++) {
        if (ps->reg->items[i].spec.group != PARAM_STATE) continue;
        TRY(op(o->stream, expert_bias, .bias = param_zero_shard_master(ps, i), .load = param_zero_shard_grad(ps, i),
               .step = o->step, .rate = o->bias_rate));
    }
    return ERR_OK;
}

static Err update_matrices(Optim *o, ParamStore *ps)
{
    for (int i = 0; i < o->stores; i++)
        if (o->store[i] == ps) TRY(muon_update(&o->muon[i], o->stream, o->step, o->adamw.weight_decay, o->scratch));
    return ERR_OK;
}

static Err update_by_one_moment(Optim *o, ParamStore *ps)
{
    return op(o->stream, one_moment, .w = ps->master, .m = ps->m, .g = ps->grad, .copy = param_store_copy(ps),
              .shift = o->stats->shift, .parts = ps->parts, .chunks = ps->chunks, .step = o->step,
              .beta1 = o->adamw.beta1, .beta2 = o->adamw.beta2, .decay = o->adamw.weight_decay,
              .hidden_rate = o->hidden_rate, .lion = o->kind == OPTIMIZER_LION);
}

static Err update_others(Optim *o, ParamStore *ps)
{
    if (o->kind == OPTIMIZER_LION || o->kind == OPTIMIZER_SGD) return update_by_one_moment(o, ps);
    return op(o->stream, adamw, .w = ps->master, .m = ps->m, .v = ps->v, .g = ps->grad, .copy = param_store_copy(ps),
              .shift = o->stats->shift, .parts = ps->parts, .chunks = ps->chunks, .step = o->step,
              .beta1 = o->adamw.beta1, .beta2 = o->adamw.beta2, .eps = o->adamw.eps, .decay = o->adamw.weight_decay,
              .hidden_rate = o->hidden_rate);
}

/* Clips this rank's ZeRO shard of a matrix or a bias that makes queries and keys. */
static Err clip_rows(Optim *o, ParamStore *ps, int id)
{
    const Param *p = &ps->reg->items[id];
    const ParamRange x = param_zero_shard(ps->reg, id);
    const int64_t heads = o->logit_max.dim[1];
    if (!p->spec.qk.chunk || !x.count) return ERR_OK;
    ASSERT(p->matrices == 1 && p->spec.cut[1] == CUT_NONE);
    return op(o->stream, qk_clip, .w = param_zero_shard_master(ps, id),
              .copy = ps->value.dtype != F32 ? param_zero_shard_value(ps, id) : (Tensor){ 0 },
              .logit_max = tensor_reshape(tensor_row_slice(o->logit_max, p->spec.block, 1), heads), .step = o->step,
              .rows = p->spec.qk, .first = p->first[0] * p->local[1] + x.first, .columns = p->local[1],
              .threshold = o->qk_clip.threshold, .alpha = o->qk_clip.alpha);
}

static Err clip_queries_and_keys(Optim *o, ParamStore *ps)
{
    if (!(o->qk_clip.threshold > 0)) return ERR_OK;
    for (int i = 0; i < ps->reg->count; i++) TRY(clip_rows(o, ps, i));
    return ERR_OK;
}

Err optim_update(Optim *o, ParamStore *ps)
{
    TRY(update_biases(o, ps));
    if (o->muon) TRY(update_matrices(o, ps));
    if (!ps->chunks) return ERR_OK;
    TRY(update_others(o, ps));
    return clip_queries_and_keys(o, ps);
}
