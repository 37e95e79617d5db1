/*
 * The router of a mixture (moe.h; docs/moe.md): logits in fp32 whatever the dtype, choices and weights by them,
 * and their gradients, to which losses that balance the experts add. What happens to the rows then: moe.c.
 */
#include "base/int64.h"
#include "layer/moe.h"

/* ---- products in fp32 ---- */

static Tensor flat(Tensor t) { return tensor_reshape(t, tensor_count(t)); }

int64_t moe_padded_cols(int64_t cols) { return (cols + 7) / 8 * 8; }
Tensor moe_first_cols(Tensor padded, int64_t cols) { return tensor_col_slice(padded, 0, cols); }

Err moe_fp32_linear(Ctx *c, int weight, int bias, Tensor x, Tensor y)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor wide = { 0 };
    if (bias >= 0) TRY(as_fp32(c, param_value(c, bias), &wide));
    TRY(op(c->s, linear_fwd, .y = y, .x = x, .w = param_value(c, weight), .bias = wide, .leaf = x.dim[1]));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

Err moe_fp32_dy_alloc(Ctx *c, int64_t cols, Tensor *dy, Tensor *wide)
{
    TRY(dy_alloc(c, dy, ctx_rows(c), moe_padded_cols(cols)));
    return wide_sum(c, *dy, wide);
}

Err moe_fp32_linear_backward(Ctx *c, int weight, Tensor x, Tensor dy, Tensor wide, Tensor dx)
{
    const Tensor w = param_value(c, weight);
    if (wide.data != dy.data) TRY(cast_values(c, dy, wide));
    dy = moe_first_cols(dy, w.dim[0]);
    TRY(op(c->s, linear_dx, .dx = dx, .dy = dy, .w = w, .leaf = dy.dim[1]));
    return wgrad_push(c, (Wgrad){ .weight = weight, .dy = dy, .x = x });
}

/* ---- what the router is given ---- */

static bool has_noise(const Moe *m, const Ctx *c) { return m->spec->jitter > 0 && c->mode.training; }

/* y = x with the noise of these rows: so of the router's input, and so of its gradient. */
static Err add_noise(const Moe *m, Ctx *c, Tensor y, Tensor x)
{
    return op(c->s, jitter, .y = y, .x = x, .position = ctx_row_slice(c, c->batch->position),
              .sample = ctx_row_slice(c, c->batch->sample), .key = m->jitter_key, .eps = m->spec->jitter);
}

static Err make_logits(const Moe *m, Ctx *c, Tensor x, Tensor logits)
{
    ArenaMark mark = arena_mark(c->scratch);
    if (m->spec->balance.forced)
        return op(c->s, router_even, .logits = logits, .position = ctx_row_slice(c, c->batch->position),
                  .sample = ctx_row_slice(c, c->batch->sample), .seq = c->batch->seq, .topk = m->spec->topk);
    if (has_noise(m, c)) {
        const Tensor plain = x;
        TRY(tensor_new(c->scratch, &x, plain.dtype, plain.dim[0], plain.dim[1]));
        TRY(add_noise(m, c, x, plain));
    }
    TRY(moe_fp32_linear(c, m->router, m->router_bias, x, logits));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Ranks of scores by which this rank's rows choose, where whole units are balanced, in training. */
static Err balance_ranks(const Moe *m, Ctx *c, Tensor logits, Tensor *rank)
{
    Tensor all, ranks, share;
    *rank = (Tensor){ 0 };
    if (!m->spec->balance.sinkhorn || !c->mode.training) return ERR_OK;
    logits = tensor_of(logits.data, F32, logits.dim[0], logits.ld); /* with the padding: rows without gaps */
    TRY(moe_gather_balance_rows(c, logits, &all));
    TRY(tensor_new(c->scratch, &ranks, F32, all.dim[0], m->spec->experts));
    TRY(tensor_new(c->scratch, &share, F32, all.dim[0]));
    TRY(op(c->s, sinkhorn, .rank = ranks, .share = share, .logits = moe_first_cols(all, m->spec->experts),
           .rows = moe_balance_rows(m, c)));
    return moe_own_rows(c, ranks, rank);
}

/* ---- rows that would choose each expert ---- */

/* Rows of a balance unit on the ranks of sp, and the first of this rank's rows among all of theirs. */
static int64_t sp_balance_rows(const Moe *m, const Ctx *c) { return m->spec->balance.unit * c->batch->T; }
static int64_t first_row(const Ctx *c) { return c->world->sp.rank * ctx_rows(c); }

/* load [units, experts] = how many rows of each balance unit, on all ranks, would choose each expert by their scores
 * alone. */
static Err balance_loads(const Moe *m, Ctx *c, const MoeRows *t, Tensor *load)
{
    const int64_t N = t->index_NK.dim[0], K = m->spec->topk;
    Tensor index = t->index_NK, weight;
    TRY(tensor_new(c->scratch, load, I64, c->batch->B / m->spec->balance.unit, m->spec->experts));
    TRY(device_zero(c->s, load->data, tensor_bytes(*load)));
    if (m->spec->router.groups > 1 || m->spec->balance.bias_rate > 0) {
        Router alone = m->spec->router;
        alone.groups = alone.group_topk = 1;
        TRY(tensor_new(c->scratch, &index, I32, N, K));
        TRY(tensor_new(c->scratch, &weight, F32, N, K));
        TRY(op(c->s, router_fwd, .index = index, .weight = weight, .logits = t->logits_NE, .router = alone));
    }
    TRY(op(c->s, router_count, .load = *load, .index = index, .first = first_row(c), .rows = sp_balance_rows(m, c)));
    TRY(comm_sum_i64(&c->world->sp, c->s, load->data, tensor_count(*load), NULL));
    return comm_sum_i64(&c->world->cp, c->s, load->data, tensor_count(*load), NULL);
}

/* The row of a unit of the batch among those of this mixture. */
static Tensor loads_so_far(const Ctx *c, int64_t unit)
{
    const Tensor all = c->balance.so_far;
    const Tensor rows = tensor_reshape(all, all.dim[0] * all.dim[1], all.dim[2]);
    return tensor_row_slice(rows, c->block.layer * all.dim[1] + unit, 1);
}

/* Each unit's row is that of the unit before plus its own counts; made again, by recomputation, it is the same. */
static Err follow_loads(const Moe *m, Ctx *c, const MoeRows *t)
{
    const int64_t unit = m->spec->balance.unit, first = c->batch->first / unit;
    ArenaMark mark = arena_mark(c->scratch);
    Tensor own;
    if (!m->spec->balance.global || !c->mode.training) return ERR_OK;
    TRY(balance_loads(m, c, t, &own));
    for (int64_t u = 0; u < own.dim[0]; u++) {
        const Tensor row = tensor_row_slice(own, u, 1), sum = loads_so_far(c, first + u);
        TRY(device_copy(c->s, sum.data, row.data, tensor_bytes(row)));
        if (first + u) TRY(op(c->s, add_acc, .y = flat(sum), .x = flat(loads_so_far(c, first + u - 1))));
    }
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- forward ---- */

Err moe_choose(const Moe *m, Ctx *c, Tensor x, const MoeRows *t)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor rank;
    TRY(make_logits(m, c, x, t->logits_NE));
    const Tensor bias = m->spec->balance.bias_rate > 0 ? param_state(c, m->bias) : (Tensor){ 0 };
    TRY(balance_ranks(m, c, t->logits_NE, &rank));
    TRY(op(c->s, router_fwd, .index = t->index_NK, .weight = t->weight_NK, .logits = t->logits_NE, .bias = bias,
           .rank = rank, .router = m->spec->router));
    arena_release(c->scratch, mark);
    return follow_loads(m, c, t);
}

/* ---- backward ---- */

/* dlogits += what balance losses cost, by the loads of whole units, if any. (An auxiliary loss is weighed by the rows
 * of a unit, of which cp ranks share the samples.) */
static Err add_losses(const Moe *m, Ctx *c, const MoeRows *t, Tensor dlogits, Tensor load)
{
    const Balance *b = &m->spec->balance;
    return op(c->s, router_balance, .dlogits = dlogits, .losses = c->balance.losses, .logits = t->logits_NE,
              .load = load, .router = m->spec->router, .step = c->step, .topk = m->spec->topk,
              .aux = b->aux / (float)c->world->cp.size, .aux_coeff = b->aux, .z = b->z, .first = first_row(c),
              .rows = sp_balance_rows(m, c));
}

/* The same unit by unit, by the mean load of the batch's units so far. */
static Err add_losses_so_far(const Moe *m, Ctx *c, const MoeRows *t, Tensor dlogits)
{
    const Balance *b = &m->spec->balance;
    const int64_t rows = sp_balance_rows(m, c), first = first_row(c), end = first + dlogits.dim[0];
    for (int64_t u = first / rows; u * rows < end; u++) {
        const int64_t number = c->batch->first / b->unit + u, from = max64(u * rows, first) - first;
        const int64_t count = min64((u + 1) * rows, end) - first - from;
        TRY(op(c->s, router_balance, .dlogits = tensor_row_slice(dlogits, from, count), .losses = c->balance.losses,
               .logits = tensor_row_slice(t->logits_NE, from, count), .load = loads_so_far(c, number),
               .router = m->spec->router, .step = c->step, .topk = m->spec->topk,
               .aux = b->aux / (float)c->world->cp.size / (float)(number + 1), .aux_coeff = b->aux, .z = b->z,
               .rows = rows));
    }
    return ERR_OK;
}

static Err balance_backward(const Moe *m, Ctx *c, const MoeRows *t, Tensor dlogits)
{
    const Balance *b = &m->spec->balance;
    Tensor load = { 0 };
    if (b->global) return add_losses_so_far(m, c, t, dlogits);
    if (!(b->aux > 0) && !(b->z > 0)) return ERR_OK;
    ArenaMark mark = arena_mark(c->scratch);
    if (b->aux > 0) TRY(balance_loads(m, c, t, &load));
    TRY(add_losses(m, c, t, dlogits, load));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

Err moe_router_backward(const Moe *m, Ctx *c, const MoeRows *t, Tensor x, Tensor dweight, Tensor dx)
{
    Tensor dy, wide, noisy;
    TRY(moe_fp32_dy_alloc(c, m->spec->experts, &dy, &wide));
    const Tensor dlogits = moe_first_cols(wide, m->spec->experts);
    TRY(op(c->s, router_bwd, .dlogits = dlogits, .dweight = dweight, .logits = t->logits_NE, .index = t->index_NK,
           .weight = t->weight_NK, .router = m->spec->router));
    TRY(balance_backward(m, c, t, dlogits));
    if (m->spec->balance.forced) TRY(device_zero(c->s, wide.data, tensor_bytes(wide)));
    TRY(grad_add_columns(c, m->router_bias, dlogits, 0));
    if (!has_noise(m, c)) return moe_fp32_linear_backward(c, m->router, x, dy, wide, dx);
    TRY(dy_alloc(c, &noisy, x.dim[0], x.dim[1]));
    TRY(add_noise(m, c, noisy, x));
    TRY(moe_fp32_linear_backward(c, m->router, noisy, dy, wide, dx));
    return add_noise(m, c, dx, dx);
}
