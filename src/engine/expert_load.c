/* See expert_load.h. The accumulators of experts' biases hold the rows that experts got in the whole step, on every
 * rank of a stage: what is missing to the choices made was dropped. */
#include "engine/expert_load.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/int64.h"

/* Integers that ranks tell each other: of each layer the rows of the busiest expert, those of all, choices dropped;
 * then losses that balance, as router_balance leaves them. */
enum { MOST, ROWS, DROPPED, BY_LAYER };
enum { LOSSES = 3 };

static int64_t told_count(const Trainer *t) { return BY_LAYER * model_blocks(&t->spec.model) + LOSSES; }

static int64_t *told(const Trainer *t, int what) { return t->host_loads + what * model_blocks(&t->spec.model); }

static int64_t rows_at(const void *rows, DType dtype, int64_t e)
{
    return dtype == I64 ? ((const int64_t *)rows)[e] : (int64_t)((const float *)rows)[e];
}

/* One rank of each stage says of the layers that it holds. */
static bool tells(const Trainer *t)
{
    const World *w = t->world;
    return t->spec.model.moe.experts && !w->tp_rank && !w->cp_rank && !w->dp_rank;
}

/* Rows that the experts of a block got, if parameter i is their bias and there are gradients; else no tensor. */
static Tensor rows_of(const ParamStore *s, int i)
{
    const Param *p = &s->reg->items[i];
    const bool counts = p->spec.group == PARAM_STATE && !p->copy && s->fresh;
    return counts ? param_store_grad(s, i) : (Tensor){ 0 };
}

static int block_of(const ParamStore *s, int i) { return s->reg->items[i].spec.block; }

static int64_t bytes_of(Tensor rows) { return rows.data ? tensor_bytes(rows) : 0; }

static bool has_losses(const Trainer *t)
{
    const Balance *b = &t->spec.model.moe.balance;
    return t->spec.model.moe.experts && !t->spec.purpose.forward_only && (b->aux > 0 || b->z > 0);
}

int64_t expert_load_bytes(const Trainer *t)
{
    int64_t bytes = 0;
    for (int r = 0; r < t->params.replicas && tells(t); r++)
        for (int i = 0; i < t->stores[r].reg->count; i++) bytes += bytes_of(rows_of(&t->stores[r], i));
    for (int i = 0; i < t->executor.stage_count; i++) bytes += bytes_of(t->executor.stages[i].balance_losses);
    return bytes;
}

Err expert_load_open(Trainer *t)
{
    return t->spec.model.moe.experts ? setup_array(&t->memory.setup, told_count(t), &t->host_loads) : ERR_OK;
}

Err expert_load_begin(Trainer *t)
{
    for (int i = 0; i < t->executor.stage_count; i++) {
        const Tensor sums = t->executor.stages[i].balance_losses;
        TRY(device_zero(&t->device.stream, sums.data, bytes_of(sums)));
    }
    return ERR_OK;
}

Err expert_load_fetch(Trainer *t)
{
    char *to = t->flight.loads;
    for (int r = 0; r < t->params.replicas && tells(t); r++)
        for (int i = 0; i < t->stores[r].reg->count; i++) {
            const Tensor rows = rows_of(&t->stores[r], i);
            TRY(device_read_later(&t->device.stream, to, rows.data, bytes_of(rows)));
            to += bytes_of(rows);
        }
    for (int i = 0; i < t->executor.stage_count; i++) {
        const Tensor sums = t->executor.stages[i].balance_losses;
        TRY(device_read_later(&t->device.stream, to, sums.data, bytes_of(sums)));
        to += bytes_of(sums);
    }
    return ERR_OK;
}

/* Rows of one block's experts: what was read of them. `choices`: of all tokens. */
static void take_rows(Trainer *t, int block, const char *from, Tensor rows, int64_t choices)
{
    int64_t *most = told(t, MOST) + block, *sum = told(t, ROWS) + block;
    for (int64_t e = 0; e < tensor_count(rows); e++) {
        const int64_t n = rows_at(from, rows.dtype, e);
        *most = max64(*most, n);
        *sum += n;
    }
    told(t, DROPPED)[block] = choices - *sum;
}

/* (no two ranks have the same rows: beside tp mixtures have sequence parallelism) */
static void take_losses(Trainer *t, const char *from)
{
    for (int i = 0; i < t->executor.stage_count && has_losses(t); i++, from += LOSSES * sizeof(int64_t))
        for (int k = 0; k < LOSSES; k++) told(t, BY_LAYER)[k] += ((const int64_t *)(const void *)from)[k];
}

void expert_load_take(Trainer *t, int64_t batch)
{
    /* of all tokens, since experts' rows were counted from 0 */
    const int64_t choices = batch * t->spec.model.seq * t->spec.model.moe.topk / schedule_updates(&t->parts.step);
    const char *from = t->flight.loads;
    if (!t->spec.model.moe.experts) return;
    memset(t->host_loads, 0, (size_t)told_count(t) * sizeof *t->host_loads);
    for (int r = 0; r < t->params.replicas && tells(t); r++)
        for (int i = 0; i < t->stores[r].reg->count; i++) {
            const Tensor rows = rows_of(&t->stores[r], i);
            if (rows.data) take_rows(t, block_of(&t->stores[r], i), from, rows, choices);
            from += bytes_of(rows);
        }
    take_losses(t, from);
}

static int mixtures_of(const ModelSpec *m)
{
    int count = 0;
    for (int i = 0; i < model_blocks(m); i++) count += model_is_mixture(m, i);
    return count;
}

/* The mean of a loss that was summed over tokens and mixtures. */
static double mean_loss(const Trainer *t, int64_t sum, int64_t bad)
{
    const ModelSpec *m = &t->spec.model;
    const double terms = (double)t->flight.batch * (double)m->seq * mixtures_of(m);
    return bad ? NAN : ldexp((double)sum, -ROUTER_LOSS_BITS) / terms;
}

Err expert_load_read(Trainer *t, ExpertLoads *out)
{
    const int layers = model_blocks(&t->spec.model);
    const double experts = t->spec.model.moe.experts;
    const int64_t *losses = told(t, BY_LAYER);
    TRY(comm_sum_i64(&t->world->host, &t->device.stream, t->host_loads, told_count(t), NULL));
    for (int i = 0; i < layers; i++) {
        const int64_t rows = told(t, ROWS)[i];
        out->load[i] = rows > 0 ? (double)told(t, MOST)[i] * experts / (double)rows : 0;
        out->dropped[i] = told(t, DROPPED)[i];
    }
    out->aux_loss = mean_loss(t, losses[0], losses[2]);
    out->z_loss = mean_loss(t, losses[1], losses[2]);
    return ERR_OK;
}

Err expert_load_over_limit(const Trainer *t, bool step)
{
    char when[48] = "evaluation";
    if (step) snprintf(when, sizeof when, "step %lld", (long long)t->progress.step + 1);
    err_set(ERR_MEMORY, "%s: a rank's experts got more rows than moe.slack=%g has room for", when,
            t->spec.model.moe.capacity.slack);
    return err_hint("raise moe.slack (0: room for all that can come), take moe.overflow=redo or drop, or even out the "
                    "load with moe.balance");
}

Err expert_load_within_limit(Trainer *t, bool *within)
{
    int64_t flags[2] = { 0 }; /* (nothing is read in a dry run) */
    Stream *stream = &t->device.stream;
    *within = true;
    if (!(t->spec.model.moe.capacity.slack > 0)) return ERR_OK;
    TRY(device_read(stream, flags, t->stats.flags.data, sizeof flags));
    TRY(comm_max_i64(&t->world->host, stream, flags, 2, NULL));
    *within = !flags[1];
    return ERR_OK;
}

/* ---- pieces ---- */

MoeCut expert_load_cut(const TrainSpec *s, Grid g, int64_t samples)
{
    const MixtureSpec *e = &s->model.moe;
    const int sp = g.sp ? g.tp : 1;
    const int slices = s->pipeline.slices ? s->pipeline.slices : 1;
    const int64_t seq = s->model.seq / ((g.cp ? g.cp : 1) * slices); /* of a sample, a rank's or a slice's */
    return (MoeCut){ .experts = e->experts,
                     .topk = e->topk,
                     .balance_unit = e->balance.unit,
                     .rows = samples * seq / sp,
                     .seq = seq,
                     .leaf = s->model.seq / s->seq_blocks,
                     .sp = sp,
                     .cp = g.cp ? g.cp : 1,
                     .ep = g.ep ? g.ep : 1,
                     .etp = g.etp ? g.etp : 1,
                     .hosts = g.ep_hosts ? g.ep_hosts : 1,
                     .groups = e->router.groups,
                     .group_topk = e->router.group_topk,
                     .capacity = e->capacity };
}

Err expert_load_check_pieces(const TrainSpec *s, Grid grid, int64_t samples)
{
    if (!s->model.moe.experts || !s->model.moe.capacity.redo) return ERR_OK;
    const MoeCut cut = expert_load_cut(s, grid, samples);
    const MoeLimits limits = moe_limits(&cut);
    if (limits.piece > 0) return ERR_OK;
    err_set(ERR_CONFIG,
            "moe.overflow=redo: the smallest piece, the %lld tokens of a sequence block of each rank, sends a "
            "rank's experts up to %lld rows; moe.slack=%g has room for %lld",
            (long long)cut.leaf, (long long)(cut.leaf * min64(cut.experts / cut.ep, cut.topk) * cut.ep * cut.etp),
            cut.capacity.slack, (long long)limits.owned);
    return err_hint("raise parallel.seq_blocks, train.micro_batch or moe.slack");
}

bool expert_load_redo(const Trainer *t)
{
    if (!t->spec.model.moe.experts || !t->spec.model.moe.capacity.redo) return false;
    const MoeCut cut = expert_load_cut(&t->spec, t->world->grid, t->spec.micro_batch / t->parts.step.unit_div);
    const MoeLimits limits = moe_limits(&cut);
    return limits.piece < cut.rows || limits.passed < limits.most_passed;
}

void expert_load_use_pieces(Trainer *t, bool pieces)
{
    t->executor.ctx.mode.retry_in_pieces = pieces;
    for (int r = 0; r < t->params.replicas; r++) ddp_forget(&t->ddp[r]);
}

/* ---- the batch so far ---- */

static Err refuse_order(const char *why)
{
    return err_set(ERR_CONFIG, "moe.balance=global_aux counts the batch up to each micro-batch in data order, but %s",
                   why);
}

static Err take_other_balance(void)
{
    err_take("moe.balance=aux");
    err_take("moe.balance=bias moe.router=sigmoid");
    return err_take("moe.balance=bias moe.router=sigmoid moe.aux_coeff=0");
}

/* Does a rank compute the forwards of each of its stages in data order? */
static bool in_order(const Schedule *s, const ActionList *list)
{
    int next[PARTS_STAGES] = { 0 };
    for (int i = 0; i < list->count; i++) {
        const Action *a = &list->action[i];
        if (a->kind != ACT_F) continue;
        int *at = &next[a->replica * s->chunks + schedule_chunk_of(s, a->stage)];
        if (a->microbatch != *at) return false;
        *at += a->count;
    }
    return true;
}

Err expert_load_check_order(const Trainer *t)
{
    char why[96];
    const Schedule *s = &t->parts.step;
    if (!t->spec.model.moe.balance.global || t->spec.purpose.forward_only) return ERR_OK;
    if (t->world->grid.dp > 1) {
        refuse_order("data-parallel ranks compute their shares of it at the same time");
        err_hint("or as many ranks as tp x cp x pp");
        return take_other_balance();
    }
    snprintf(why, sizeof why, "schedule '%s' does not compute them so", s->name);
    for (int i = 0; i < s->ranks; i++)
        if (!in_order(s, &s->rank[i]))
            return refuse_order(why), err_take("parallel.schedule=1f1b"), take_other_balance();
    return ERR_OK;
}

Err expert_load_open_stage(Trainer *t, ExecutorStage *s)
{
    const ModelSpec *m = &t->spec.model;
    const int blocks = s->model->share.layer_count + s->model->share.mtp;
    if (has_losses(t)) TRY(tensor_new(&t->memory.state, &s->balance_losses, I64, LOSSES));
    if (!m->moe.balance.global || t->spec.purpose.forward_only) return ERR_OK;
    return tensor_new(&t->memory.state, &s->loads_so_far, I64, blocks, t->spec.global_batch / m->moe.balance.unit,
                      m->moe.experts);
}
