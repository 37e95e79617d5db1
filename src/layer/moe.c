/*
 * A mixture of experts (docs/moe.md says what is defined and in which order sums are):
 *
 *   x_ND -> logits_NE -> index_NK, weight_NK       router, in fp32 whatever the dtype (moe_router.c)
 *        -> row_NK, choice_P, offset                 the order of the permuted rows, P = N K or fewer (capacity.c)
 *   x_ND -> x_NL -> x_QL                             rows go to the ranks that hold their experts (moe_dispatch.c)
 *        -> hidden_QH -> active_QF -> made_QL        grouped products
 *        -> out_PL                                   back where they came from
 *   y_ND =  sum over choices of weight * out, + the shared expert
 *
 * With moe.latent experts read latent_in x, rows of L numbers, and their sum goes through latent_out.
 *
 * Every size is known before a step: P is what the rank's tokens send at most, Q what its experts get at most. Tokens
 * may have to pass the experts in pieces (moe_pieces.c).
 */
#include "base/int64.h"
#include "layer/moe.h"

/* ---- what both directions share ---- */

/* This rank's part of an expert's width. */
static int64_t own_ffn(const Moe *m, const Ctx *c) { return m->spec->ffn / c->world->grid.etp; }

/* The weights of this rank's experts as [experts, outputs, inputs]. */
static Tensor expert_weights(const Moe *m, const Ctx *c, int id)
{
    const Tensor w = param_value(c, id);
    const int experts = moe_own_experts(m, c);
    return tensor_reshape(w, experts, w.dim[0] / experts, w.dim[1]);
}

/* A bias of experts as [experts, outputs]: of this rank's, or of all where each rank has it whole. */
static Tensor bias_rows(Tensor bias, int64_t experts) { return tensor_reshape(bias, experts, bias.dim[0] / experts); }

/* Memory for this rank's experts holds as many rows as may come; work is counted by how many are expected. */
static Tensor expect(const Moe *m, const Ctx *c, Tensor rows)
{
    rows.expected = moe_even_rows(m, c);
    return rows;
}

/* y += the bias of each row's expert, if there is one. */
static Err add_bias(Ctx *c, int bias, int64_t experts, Tensor y, Tensor offset)
{
    if (bias < 0) return ERR_OK;
    return op(c->s, grouped_bias, .y = y, .bias = bias_rows(param_value(c, bias), experts), .offset = offset);
}

static Err bias_backward(Ctx *c, int bias, int64_t experts, Tensor dy, Tensor offset)
{
    Tensor acc;
    if (bias < 0) return ERR_OK;
    TRY(grad_open(c, bias, &acc));
    TRY(op(c->s, grouped_bias_grad, .dbias = bias_rows(acc, experts), .dy = dy, .offset = offset,
           .shift = param_store_shift(c->params, bias), .overflow = c->params->stats->overflow,
           .headroom_bits = c->canon.headroom_bits));
    return grad_added(c, bias);
}

/* ---- forward ---- */

static Err route_alloc(const Moe *m, Ctx *c, int64_t N, MoeSave *save, MoeRows *t)
{
    const Dispatcher *d = moe_dispatcher(m, c);
    const int64_t K = m->spec->topk, E = m->spec->experts, run = moe_run_tokens(c), X = E * ((N + run - 1) / run),
                  pieces = (N + moe_piece_tokens(m, c) - 1) / moe_piece_tokens(m, c);
    TRY(save_new(c, REGION_I, &t->logits_NE, &save->logits, F32, N, moe_padded_cols(E)));
    t->logits_NE = moe_first_cols(t->logits_NE, E);
    TRY(save_new(c, REGION_I, &t->index_NK, &save->index, I32, N, K));
    TRY(save_new(c, REGION_I, &t->weight_NK, &save->weight, F32, N, K));
    TRY(save_new(c, REGION_I, &t->row_NK, &save->row, I32, N, K));
    TRY(save_new(c, REGION_I, &t->choice_P, &save->choice, I32, moe_sent_rows(m, c)));
    TRY(save_new(c, REGION_W, &t->offset, &save->offset, I64, X + pieces));
    t->owned = t->offset;
    save->owned = save->offset;
    if (!d->remote || c->mode.retry_in_pieces) return ERR_OK;
    TRY(save_new(c, REGION_W, &t->owned, &save->owned, I64, c->world->grid.etp * X + 1));
    return d->learned ? save_new(c, REGION_I, &t->learned, &save->learned, I32, d->learned(m, c)) : ERR_OK;
}

static void expect_rows(const Moe *m, const Ctx *c, MoeRows *t)
{
    t->x_QL = expect(m, c, t->x_QL);
    t->hidden_QH = expect(m, c, t->hidden_QH);
    t->active_QF = expect(m, c, t->active_QF);
}

/* Recomputation leaves x and active to scratch: they are made again. */
static Err rows_alloc(const Moe *m, Ctx *c, MoeSave *save, MoeRows *t)
{
    const int64_t P = moe_sent_rows(m, c), Q = moe_limits_of(m, c).owned;
    const int64_t L = moe_width(m->model), F = own_ffn(m, c), H = activation_gated(m->model->activation) ? 2 * F : F;
    const bool keep = !ctx_recomputes(c, m->model);
    TRY(save_new(c, REGION_I, &t->hidden_QH, &save->hidden, c->dtype, Q, H));
    TRY(save_new(c, REGION_I, &t->out_PL, &save->out, c->dtype, P, L));
    TRY(save_if(c, keep, REGION_W, &t->x_QL, &save->x, c->dtype, Q, L));
    TRY(save_if(c, keep, REGION_W, &t->active_QF, &save->active, c->dtype, Q, F));
    expect_rows(m, c, t);
    return ERR_OK;
}

/* The order of the permuted rows of `kept` [N, K], piece by piece. */
static Err order_rows(const Moe *m, Ctx *c, Tensor kept, const MoeRows *t)
{
    for (int64_t first = 0; first < kept.dim[0]; first += moe_piece_tokens(m, c)) {
        const MoeRows p = moe_piece_at(m, c, t, first);
        TRY(op(c->s, permute_index, .row = p.row_NK, .choice = p.choice_P, .offset = p.offset,
               .index = tensor_row_slice(kept, first, p.row_NK.dim[0]), .experts = m->spec->experts,
               .run = moe_run_tokens(c)));
    }
    return ERR_OK;
}

static Err route(const Moe *m, Ctx *c, Tensor x_ND, const MoeRows *t)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor kept;
    TRY(moe_choose(m, c, x_ND, t));
    TRY(moe_choices_kept(m, c, t->index_NK, t->weight_NK, &kept));
    TRY(order_rows(m, c, kept, t));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

static Err activate(const Moe *m, Ctx *c, const MoeRows *t)
{
    return activation_forward(c, m->model, m->spec->ffn, moe_in_use(t->hidden_QH, t->owned),
                              moe_in_use(t->active_QF, t->owned));
}

/* (generation has all products in the compute dtype) */
static Err grouped_fwd(const Moe *m, Ctx *c, grouped_fwd_args a)
{
    return m->fp8 && !c->block.cache ? fp8_experts_fwd(c, m->fp8, a) : op_grouped_fwd(c->s, &a);
}

/* The experts up to their second product. */
static Err make_active(const Moe *m, Ctx *c, Tensor x_NL, const MoeRows *t)
{
    TRY(moe_dispatcher(m, c)->send(m, c, t, x_NL, t->x_QL));
    TRY(grouped_fwd(m, c,
                    (grouped_fwd_args){ .y = t->hidden_QH,
                                        .x = t->x_QL,
                                        .w = expert_weights(m, c, m->fc1),
                                        .offset = t->owned,
                                        .leaf = whole_leaf(moe_width(m->model)) }));
    TRY(add_bias(c, m->fc1_bias, moe_own_experts(m, c), t->hidden_QH, t->owned));
    return activate(m, c, t);
}

static Err experts_forward(const Moe *m, Ctx *c, Tensor x_NL, Tensor y_NL, const MoeRows *t)
{
    ArenaMark mark = arena_mark(c->scratch);
    const Dispatcher *d = moe_dispatcher(m, c);
    MovedRows r = { .local = t->out_PL };
    TRY(make_active(m, c, x_NL, t));
    TRY(moe_remote_rows(m, c, t, &r));
    TRY(grouped_fwd(m, c,
                    (grouped_fwd_args){ .y = r.remote,
                                        .x = t->active_QF,
                                        .w = expert_weights(m, c, m->fc2),
                                        .offset = t->owned,
                                        .leaf = tree_leaf(c, m->spec->ffn, t->active_QF.dim[1]) }));
    TRY(d->bring_begin(m, c, t, &r));
    TRY(d->bring_end(c, &r));
    arena_release(c->scratch, mark);
    TRY(add_bias(c, m->fc2_bias, m->spec->experts, t->out_PL, t->offset));
    return op(c->s, unpermute_rows, .y = y_NL, .x = t->out_PL, .row = t->row_NK, .weight = t->weight_NK);
}

/* In most steps all tokens are one piece, of which it is known already where its rows go. */
static Err pieces_forward(const Moe *m, Ctx *c, Tensor x_NL, Tensor y_NL, const MoeRows *t)
{
    for (int64_t first = 0; first < x_NL.dim[0]; first += moe_piece_tokens(m, c)) {
        ArenaMark mark = arena_mark(c->scratch);
        MoeRows p = moe_piece_at(m, c, t, first);
        const int64_t n = p.index_NK.dim[0];
        if (c->mode.retry_in_pieces) TRY(moe_learn_piece(m, c, &p));
        TRY(experts_forward(m, c, tensor_row_slice(x_NL, first, n), tensor_row_slice(y_NL, first, n), &p));
        arena_release(c->scratch, mark);
    }
    return ERR_OK;
}

/* sum = residual, if given, + the shared expert's output + the bias that its last linear leaves to a sum. */
static Err shared_sum(const Moe *m, Ctx *c, Tensor out, Tensor residual, Tensor sum)
{
    return residual_add(c, &(ResidualSum){ .sum = sum,
                                           .residual = residual,
                                           .branch = out,
                                           .bias = param_value(c, m->shared.fc2.bias),
                                           .dropout = { .scale = 1 } });
}

/* The shared expert's output; with a gate backward needs it, its bias included. */
static Err shared_forward(const Moe *m, Ctx *c, Tensor x_ND, MoeSave *save, MoeRows *t)
{
    if (!m->spec->shared_ffn) return ERR_OK;
    TRY(save_if(c, m->shared_gate >= 0, REGION_I, &t->shared_out_ND, &save->shared_out, c->dtype, x_ND.dim[0],
                x_ND.dim[1]));
    if (m->shared_gate >= 0) {
        TRY(save_new(c, REGION_I, &t->gate_N1, &save->gate, F32, x_ND.dim[0], moe_padded_cols(1)));
        t->gate_N1 = moe_first_cols(t->gate_N1, 1);
        TRY(moe_fp32_linear(c, m->shared_gate, -1, x_ND, t->gate_N1));
    }
    TRY(mlp_forward(&m->shared, c, x_ND, t->shared_out_ND, &save->shared));
    if (m->shared_gate < 0 || m->shared.fc2.bias < 0) return ERR_OK;
    return shared_sum(m, c, t->shared_out_ND, (Tensor){ 0 }, t->shared_out_ND);
}

static Err shared_add(const Moe *m, Ctx *c, Tensor y_ND, const MoeRows *t)
{
    if (!m->spec->shared_ffn) return ERR_OK;
    if (m->shared_gate < 0) return shared_sum(m, c, t->shared_out_ND, y_ND, y_ND);
    return op(c->s, gated_add_fwd, .y = y_ND, .residual = y_ND, .x = t->shared_out_ND, .gate = t->gate_N1);
}

/* *x_NL: the rows that experts read. In a backward they are made again where they are wanted. */
static Err enter_latent(const Moe *m, Ctx *c, Tensor x_ND, Tensor *x_NL)
{
    *x_NL = x_ND;
    if (!m->spec->latent) return ERR_OK;
    TRY(tensor_new(c->scratch, x_NL, c->dtype, x_ND.dim[0], m->spec->latent));
    return linear_forward(&m->latent_in, c, x_ND, *x_NL);
}

/* y of the tokens; the experts' weighted sum is y itself, or what latent_out reads. */
static Err experts_to(const Moe *m, Ctx *c, Tensor x_ND, Tensor y_ND, MoeSave *save, const MoeRows *t)
{
    const bool keep = !ctx_recomputes(c, m->model);
    Tensor x_NL, sum_NL = y_ND;
    if (m->spec->latent) TRY(save_if(c, keep, REGION_W, &sum_NL, &save->sum, c->dtype, x_ND.dim[0], m->spec->latent));
    TRY(enter_latent(m, c, x_ND, &x_NL));
    TRY(pieces_forward(m, c, x_NL, sum_NL, t));
    return m->spec->latent ? linear_forward(&m->latent_out, c, sum_NL, y_ND) : ERR_OK;
}

static Err moe_forward(const void *own, Ctx *c, Tensor x_ND, Tensor y_ND, void *kept)
{
    const Moe *m = own;
    MoeSave *save = kept;
    MoeRows t = { 0 };
    TRY(route_alloc(m, c, x_ND.dim[0], save, &t));
    TRY(rows_alloc(m, c, save, &t));
    TRY(route(m, c, x_ND, &t));
    if (!c->mode.retry_in_pieces) TRY(moe_learn_piece(m, c, &t));
    /* (Work for the device while the host waits for numbers of rows.) */
    TRY(shared_forward(m, c, x_ND, save, &t));
    TRY(experts_to(m, c, x_ND, y_ND, save, &t));
    return shared_add(m, c, y_ND, &t);
}

/* ---- backward ---- */

/* What the experts see of the tokens: the rows that they read, where a backward makes them again; the gradient of their
 * weighted sum, and that of the rows. */
typedef struct {
    Tensor x_NL, dsum_NL, dx_NL;
} MoeEnds;

/* Makes again the rows that recomputation did not keep. */
static Err rows_again(const Moe *m, Ctx *c, Tensor x_NL, const MoeRows *t)
{
    if (!ctx_recomputes(c, m->model)) return ERR_OK;
    TRY(moe_dispatcher(m, c)->send(m, c, t, x_NL, t->x_QL));
    return activate(m, c, t);
}

static Err rows_saved(const Moe *m, Ctx *c, const MoeSave *save, MoeRows *t)
{
    const bool learned = moe_dispatcher(m, c)->learned && !c->mode.retry_in_pieces;
    *t = (MoeRows){ .logits_NE = moe_first_cols(save_get(c, save->logits), m->spec->experts),
                    .index_NK = save_get(c, save->index),
                    .weight_NK = save_get(c, save->weight),
                    .row_NK = save_get(c, save->row),
                    .choice_P = save_get(c, save->choice),
                    .offset = save_get(c, save->offset),
                    .owned = save_get(c, save->owned),
                    .learned = learned ? save_get(c, save->learned) : (Tensor){ 0 },
                    .hidden_QH = save_get(c, save->hidden),
                    .out_PL = save_get(c, save->out) };
    if (ctx_recomputes(c, m->model)) {
        TRY(dy_alloc(c, &t->x_QL, t->hidden_QH.dim[0], moe_width(m->model)));
        TRY(dy_alloc(c, &t->active_QF, t->hidden_QH.dim[0], own_ffn(m, c)));
    } else {
        t->x_QL = save_get(c, save->x);
        t->active_QF = save_get(c, save->active);
    }
    expect_rows(m, c, t);
    return ERR_OK;
}

static Err grouped_dx(const Moe *m, Ctx *c, int weight, const MoeRows *t, Tensor dy, Tensor dx)
{
    const int64_t width = dy.dim[1], all = m->spec->ffn / own_ffn(m, c) * width;
    const int64_t leaf = weight == m->fc1 ? tree_leaf(c, all, width) : whole_leaf(width);
    const grouped_dx_args a = {
        .dx = dx, .dy = dy, .w = expert_weights(m, c, weight), .offset = t->owned, .leaf = leaf
    };
    return m->fp8 ? fp8_experts_dx(c, m->fp8, a) : op_grouped_dx(c->s, &a);
}

static Err grouped_weight(const Moe *m, Ctx *c, int weight, const MoeRows *t, Tensor dy, Tensor x)
{
    return wgrad_push(c, (Wgrad){ .weight = weight, .dy = dy, .x = x, .fp8 = m->fp8, .offset = t->owned });
}

/* dx += what came through the experts, from the gradient of their outputs. */
static Err experts_backward(const Moe *m, Ctx *c, const MoeRows *t, Tensor dout_QL, Tensor dx_NL)
{
    const Dispatcher *d = moe_dispatcher(m, c);
    Tensor dactive_QF, dhidden_QH;
    MovedRows r = { 0 };
    TRY(tensor_new(c->scratch, &dactive_QF, c->dtype, t->active_QF.dim[0], t->active_QF.dim[1]));
    TRY(dy_alloc(c, &dhidden_QH, t->hidden_QH.dim[0], t->hidden_QH.dim[1]));
    TRY(tensor_new(c->scratch, &r.remote, moe_result_dtype(c), t->x_QL.dim[0], t->x_QL.dim[1]));
    dhidden_QH = expect(m, c, dhidden_QH);
    dactive_QF = expect(m, c, dactive_QF);
    TRY(grouped_dx(m, c, m->fc2, t, dout_QL, dactive_QF));
    TRY(grouped_weight(m, c, m->fc2, t, dout_QL, t->active_QF));
    TRY(activation_backward(c, m->model, m->spec->ffn,
                            (ActivationGrad){ moe_in_use(t->hidden_QH, t->owned), moe_in_use(dactive_QF, t->owned),
                                              moe_in_use(dhidden_QH, t->owned) }));
    TRY(bias_backward(c, m->fc1_bias, moe_own_experts(m, c), dhidden_QH, t->owned));
    TRY(grouped_dx(m, c, m->fc1, t, dhidden_QH, r.remote));
    TRY(moe_local_rows(m, c, t, &r));
    ArenaMark mark = arena_mark(c->scratch);
    TRY(d->bring_begin(m, c, t, &r));
    TRY(grouped_weight(m, c, m->fc1, t, dhidden_QH, t->x_QL)); /* while rows travel */
    TRY(d->bring_end(c, &r));
    arena_release(c->scratch, mark);
    /* (without a latent the router's gradient is there already) */
    return op(c->s, unpermute_rows, .y = dx_NL, .x = r.local, .row = t->row_NK, .add = !m->spec->latent);
}

/* The gradients of the experts' outputs, where the experts are, and of the weights that they count. */
static Err out_backward(const Moe *m, Ctx *c, const MoeRows *t, Tensor dsum_NL, Tensor *dout_QL, Tensor dweight_NK)
{
    const Dispatcher *d = moe_dispatcher(m, c);
    MovedRows rows = { 0 };
    TRY(dy_alloc(c, &rows.remote, t->hidden_QH.dim[0], moe_width(m->model)));
    ArenaMark mark = arena_mark(c->scratch);
    if (!d->weighs || m->fc2_bias >= 0) TRY(moe_local_rows(m, c, t, &rows));
    TRY(op(c->s, unpermute_bwd, .dx = rows.local, .dweight = dweight_NK, .dy = dsum_NL, .x = t->out_PL,
           .row = t->row_NK, .weight = t->weight_NK));
    TRY(bias_backward(c, m->fc2_bias, m->spec->experts, rows.local, t->offset));
    TRY(d->send_gradient(m, c, t, dsum_NL, rows));
    *dout_QL = rows.remote;
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* The rows that experts get, for their biases and for reports. */
static Err count_rows(const Moe *m, Ctx *c, const MoeRows *t)
{
    Tensor load;
    TRY(grad_open(c, m->bias, &load));
    for (int64_t first = 0; first < t->index_NK.dim[0]; first += moe_piece_tokens(m, c))
        TRY(op(c->s, expert_count, .load = load, .offset = moe_piece_at(m, c, t, first).offset));
    return grad_added(c, m->bias);
}

/* The gradient of the shared expert's output through its gate, and dx += what came through the gate. */
static Err gate_backward(const Moe *m, Ctx *c, const MoeSave *save, Tensor x_ND, Tensor dy_ND, Tensor dx_ND,
                         Tensor *dshared_ND)
{
    Tensor dgate, wide, through;
    TRY(dy_alloc(c, dshared_ND, dy_ND.dim[0], dy_ND.dim[1]));
    TRY(moe_fp32_dy_alloc(c, 1, &dgate, &wide));
    TRY(tensor_new(c->scratch, &through, c->dtype, dx_ND.dim[0], dx_ND.dim[1]));
    TRY(op(c->s, gated_add_bwd, .dx = *dshared_ND, .dgate = moe_first_cols(wide, 1), .dy = dy_ND,
           .x = save_get(c, save->shared_out), .gate = moe_first_cols(save_get(c, save->gate), 1)));
    TRY(moe_fp32_linear_backward(c, m->shared_gate, x_ND, dgate, wide, through));
    return add_rows(c, dx_ND, through);
}

/* narrow_ND: dy in the dtype of products. */
static Err shared_backward(const Moe *m, Ctx *c, const MoeSave *save, Tensor x_ND, Tensor dy_ND, Tensor narrow_ND,
                           Tensor dx_ND)
{
    Tensor dshared_ND = narrow_ND, through;
    if (!m->spec->shared_ffn) return ERR_OK;
    if (m->shared_gate >= 0) TRY(gate_backward(m, c, save, x_ND, dy_ND, dx_ND, &dshared_ND));
    TRY(grad_add_columns(c, m->shared.fc2.bias, dshared_ND, 0));
    TRY(tensor_new(c->scratch, &through, c->dtype, dx_ND.dim[0], dx_ND.dim[1]));
    TRY(mlp_backward(&m->shared, c, &save->shared, x_ND, dshared_ND, through));
    return add_rows(c, dx_ND, through);
}

static Err whole_backward(const Moe *m, Ctx *c, const MoeRows *t, const MoeEnds *e, Tensor x_ND, Tensor dx_ND)
{
    Tensor dout_QL, dweight_NK;
    TRY(rows_again(m, c, e->x_NL, t));
    TRY(tensor_new(c->scratch, &dweight_NK, F32, t->weight_NK.dim[0], t->weight_NK.dim[1]));
    TRY(out_backward(m, c, t, e->dsum_NL, &dout_QL, dweight_NK));
    TRY(moe_router_backward(m, c, t, x_ND, dweight_NK, dx_ND));
    TRY(count_rows(m, c, t));
    return experts_backward(m, c, t, dout_QL, e->dx_NL);
}

/* The router's part, for which the results that were kept suffice. */
static Err pieces_router_backward(const Moe *m, Ctx *c, const MoeRows *t, Tensor dsum_NL, Tensor x_ND, Tensor dx_ND)
{
    Tensor dweight_NK;
    TRY(tensor_new(c->scratch, &dweight_NK, F32, t->weight_NK.dim[0], t->weight_NK.dim[1]));
    for (int64_t first = 0; first < x_ND.dim[0]; first += moe_piece_tokens(m, c)) {
        const MoeRows p = moe_piece_at(m, c, t, first);
        const int64_t n = p.index_NK.dim[0];
        TRY(op(c->s, unpermute_bwd, .dweight = tensor_row_slice(dweight_NK, first, n),
               .dy = tensor_row_slice(dsum_NL, first, n), .x = p.out_PL, .row = p.row_NK, .weight = p.weight_NK));
    }
    TRY(moe_router_backward(m, c, t, x_ND, dweight_NK, dx_ND));
    return count_rows(m, c, t);
}

/* One piece: forward kept the experts' outputs alone, so what leads to them is made again. */
static Err piece_backward(const Moe *m, Ctx *c, const MoeRows *p, const MoeEnds *e)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor dout_QL, dweight_NK;
    TRY(make_active(m, c, e->x_NL, p));
    TRY(tensor_new(c->scratch, &dweight_NK, F32, e->x_NL.dim[0], m->spec->topk));
    TRY(out_backward(m, c, p, e->dsum_NL, &dout_QL, dweight_NK));
    TRY(experts_backward(m, c, p, dout_QL, e->dx_NL));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Weights' gradients are added at once even if other linears' are later: the next piece overwrites what they read. */
static Err pieces_backward(const Moe *m, Ctx *c, const MoeRows *t, const MoeEnds *e, Tensor x_ND, Tensor dx_ND)
{
    Ctx at_once = *c;
    at_once.mode.split_backward = false;
    TRY(pieces_router_backward(m, c, t, e->dsum_NL, x_ND, dx_ND));
    for (int64_t first = 0; first < x_ND.dim[0]; first += moe_piece_tokens(m, c)) {
        ArenaMark mark = arena_mark(c->scratch);
        MoeRows p = moe_piece_at(m, c, t, first);
        const int64_t n = p.index_NK.dim[0];
        const MoeEnds part = { tensor_row_slice(e->x_NL, first, n), tensor_row_slice(e->dsum_NL, first, n),
                               tensor_row_slice(e->dx_NL, first, n) };
        TRY(moe_learn_piece(m, c, &p));
        TRY(piece_backward(m, &at_once, &p, &part));
        arena_release(c->scratch, mark);
    }
    return ERR_OK;
}

/* The input of latent_out. */
static Err sum_again(const Moe *m, Ctx *c, const MoeSave *save, const MoeRows *t, Tensor *sum_NL)
{
    const int64_t N = t->index_NK.dim[0];
    if (!ctx_recomputes(c, m->model)) {
        *sum_NL = save_get(c, save->sum);
        return ERR_OK;
    }
    TRY(dy_alloc(c, sum_NL, N, m->spec->latent));
    for (int64_t first = 0; first < N; first += moe_piece_tokens(m, c)) {
        const MoeRows p = moe_piece_at(m, c, t, first);
        TRY(op(c->s, unpermute_rows, .y = tensor_row_slice(*sum_NL, first, p.index_NK.dim[0]), .x = p.out_PL,
               .row = p.row_NK, .weight = p.weight_NK));
    }
    return ERR_OK;
}

/* Back through latent_out to the ends of the experts; without a latent these are the layer's own. */
static Err ends_of_experts(const Moe *m, Ctx *c, const MoeSave *save, const MoeRows *t, Tensor x_ND, Tensor narrow_ND,
                           MoeEnds *e)
{
    const int64_t N = x_ND.dim[0], L = m->spec->latent;
    Tensor sum_NL;
    if (!L) return ERR_OK;
    if (ctx_recomputes(c, m->model) || c->mode.retry_in_pieces) TRY(enter_latent(m, c, x_ND, &e->x_NL));
    TRY(sum_again(m, c, save, t, &sum_NL));
    TRY(dy_alloc(c, &e->dx_NL, N, L));
    TRY(tensor_new(c->scratch, &e->dsum_NL, c->dtype, N, L));
    return linear_backward(&m->latent_out, c, sum_NL, narrow_ND, e->dsum_NL);
}

/* dx += what came through latent_in. */
static Err leave_latent(const Moe *m, Ctx *c, Tensor x_ND, Tensor dx_NL, Tensor dx_ND)
{
    Tensor through;
    if (!m->spec->latent) return ERR_OK;
    TRY(tensor_new(c->scratch, &through, c->dtype, dx_ND.dim[0], dx_ND.dim[1]));
    TRY(linear_backward(&m->latent_in, c, x_ND, dx_NL, through));
    return add_rows(c, dx_ND, through);
}

/* dy for products, if some read it as it is. */
static Err narrow_gradient(const Moe *m, Ctx *c, Tensor dy, Tensor *out)
{
    const bool read = m->spec->latent || (m->spec->shared_ffn && m->shared_gate < 0);
    *out = dy;
    if (!read || dy.dtype == c->dtype) return ERR_OK;
    TRY(dy_alloc(c, out, dy.dim[0], dy.dim[1]));
    return cast_values(c, *out, dy);
}

static Err moe_backward(const void *own, Ctx *c, const void *kept, Tensor x_ND, Tensor dy_ND, Tensor dx_ND)
{
    const Moe *m = own;
    const MoeSave *save = kept;
    ArenaMark mark = arena_mark(c->scratch);
    MoeEnds ends = { x_ND, dy_ND, dx_ND };
    MoeRows t;
    Tensor narrow_ND;
    TRY(rows_saved(m, c, save, &t));
    TRY(narrow_gradient(m, c, dy_ND, &narrow_ND));
    TRY(ends_of_experts(m, c, save, &t, x_ND, narrow_ND, &ends));
    TRY((c->mode.retry_in_pieces ? pieces_backward : whole_backward)(m, c, &t, &ends, x_ND, dx_ND));
    TRY(leave_latent(m, c, x_ND, ends.dx_NL, dx_ND));
    TRY(shared_backward(m, c, save, x_ND, dy_ND, narrow_ND, dx_ND));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- the kind ---- */

/* Weights of one expert, without biases. */
static int64_t one_expert(const ModelSpec *s) { return mlp_weights(s, s->moe.ffn) / s->hidden * moe_width(s); }

static int64_t moe_flop(const ModelSpec *s)
{
    const MixtureSpec *e = &s->moe;
    const int64_t others = mlp_weights(s, e->shared_ffn) + s->hidden * (e->experts + e->shared_gate + 2 * e->latent);
    return 2 * (e->topk * one_expert(s) + others);
}

/* Those of the experts that it is not sent to. */
static int64_t moe_idle_params(const ModelSpec *s)
{
    const int64_t F = s->moe.ffn, first = activation_gated(s->activation) ? 2 * F : F;
    return (s->moe.experts - s->moe.topk) * (one_expert(s) + (s->bias ? first + moe_width(s) : 0));
}

const LayerKind moe_kind = { .name = "mlp",
                             .own_bytes = sizeof(Moe),
                             .save_bytes = sizeof(MoeSave),
                             .linears = 8,
                             .sums_own_rows = true,
                             .sums_rows = true,
                             .add = moe_add,
                             .forward = moe_forward,
                             .backward = moe_backward,
                             .flop = moe_flop,
                             .idle_params = moe_idle_params };
