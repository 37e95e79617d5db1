/*
 * A mixture of experts (layer.h; docs/moe.md says what is defined and in which order sums are):
 *
 *   x [N, D] -> logits -> index, weight [N, K]        router, in fp32 whatever the dtype
 *            -> row, choice, offset                     the order of the permuted rows, P = N K or fewer (capacity.c)
 *   x        -> permuted rows [P, D] -> to the ranks that hold their experts:
 *               x [Q, D] -> hidden -> active [Q, F] -> made [Q, D]    grouped products
 *            -> back where they came from: out [P, D]
 *   y [N, D] =  sum over choices of weight * out, + the shared expert
 *
 * Every size is known before a step: P is what the rank's tokens send at most, Q what its experts get at most. How
 * many rows they do get only the offsets say, and these stay on the device. With one rank along ep nothing is sent, and
 * Q is P.
 *
 * In a step that is done again because Q was too small (Ctx.in_pieces), tokens go through the experts in pieces whose
 * rows fit wherever they go. Only what the experts gave is kept of a piece, and backward makes the rest again.
 */
#include "base/int64.h"
#include "base/trace.h"
#include "layer/moe.h"

/* ---- what both directions share ---- */

/* Tokens of a leaf of the weights' gradients. */
static int64_t run_tokens(const Ctx *c) { return c->canon.leaf_tokens; }

static bool sends(const Ctx *c) { return c->world->tp_ep.size > 1; }

/* The experts take their rows out of all ranks' tokens. */
static bool gathers(const Moe *m, const Ctx *c) { return sends(c) && m->spec->gathers; }

/* Neighbours that have a part of each of the same experts. */
static int copies(const Ctx *c) { return c->world->grid.etp; }

/* This rank's part of an expert's width. */
static int64_t own_ffn(const Moe *m, const Ctx *c) { return m->spec->ffn / copies(c); }

/* The weights of this rank's experts as [experts, outputs, inputs]. */
static Tensor expert_weights(const Moe *m, const Ctx *c, int id)
{
    const Tensor w = param_value(c, id);
    const int experts = moe_own_experts(m, c);
    return tensor_reshape(w, experts, w.dim[0] / experts, w.dim[1]);
}

/* A bias of experts as [experts, outputs]: of this rank's, or of all where each rank has it whole. */
static Tensor bias_rows(Tensor bias, int64_t experts)
{
    return tensor_reshape(bias, experts, bias.dim[0] / experts);
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
           .room = c->canon.room));
    return grad_added(c, bias);
}

/* ---- rows to the ranks that hold their experts, and back ---- */

/* A tensor of permuted rows, of which those count that the offsets say are there. */
static Tensor in_use(Tensor rows, Tensor offset)
{
    rows.rows = (const int64_t *)offset.data + offset.dim[0] - 1;
    return rows;
}

/*
 * Rows of `local` [P, ...] to the ranks of their experts, which get them as `remote` [Q, ...]; or back from there.
 * Begun here, with memory in scratch; done after move_rows_end.
 */
static Err move_rows_begin(const Moe *m, Ctx *c, const MoeRows *t, Tensor local, Tensor remote, bool back)
{
    Comm *group = &c->world->tp_ep;
    const MoeRoom most = moe_room_of(m, c);
    const int64_t sent = t->choice.dim[0]; /* of a piece, perhaps */
    CommRows rows = { .local = local.data,
                      .remote = remote.data,
                      .local_offset = t->offset.data,
                      .remote_offset = t->owned.data,
                      .chunks = moe_own_experts(m, c),
                      .stride = (t->offset.dim[0] - 1) / m->spec->experts,
                      .copies = copies(c),
                      .back = back,
                      .remote_rows = most.owned,
                      .most = min64(most.pair, sent) };
    const int64_t row_bytes = local.dim[1] * dtype_size(local.dtype),
                  room = comm_rows_room(group, &rows, row_bytes);
    void *slots = NULL;
    if (room) TRY(arena_alloc(c->scratch, room, &slots));
    rows.room = slots;
    return comm_all_to_all_rows(group, c->s, &rows, sent, row_bytes, c->moved);
}

/* Of a call that was begun with c->moved. In a pair this is where the halves take turns. */
static Err move_rows_end(Ctx *c)
{
    if (c->other_half) TRY(c->other_half(c->pair));
    trace_begin("wait for rows");
    Err err = stream_wait(c->s, c->moved);
    trace_end();
    return err;
}

/* Rows [P, D] that come back: `local`, and what their parts come to, in scratch. */
typedef struct {
    Tensor local, parts;
} Returned;

/* Rows [Q, D] of this rank's experts, or its parts of their sums, back as the rows [P, D] that these are of. */
static Err return_rows_begin(const Moe *m, Ctx *c, const MoeRows *t, Tensor rows, Returned *r)
{
    const Tensor y = r->local;
    r->parts = y;
    if (copies(c) > 1) TRY(tensor_new(c->scratch, &r->parts, y.dtype, copies(c) * y.dim[0], y.dim[1]));
    return move_rows_begin(m, c, t, r->parts, rows, true);
}

static Err return_rows_end(Ctx *c, const Returned *r)
{
    TRY(move_rows_end(c));
    if (copies(c) == 1) return ERR_OK;
    return op(c->s, sum_parts, .y = r->local, .x = r->parts,
              .parts = copies(c)); /* the tree over tp_blocks, on */
}

static Err return_rows(const Moe *m, Ctx *c, const MoeRows *t, Tensor rows, Tensor local)
{
    ArenaMark mark = arena_mark(c->scratch);
    Returned r = { .local = local };
    TRY(return_rows_begin(m, c, t, rows, &r));
    TRY(return_rows_end(c, &r));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* What the offsets of all ranks say of this rank's experts. */
static Err learn_owned(const Moe *m, Ctx *c, const MoeRows *t)
{
    Comm *group = &c->world->tp_ep;
    const int own = moe_own_experts(m, c);
    ArenaMark mark = arena_mark(c->scratch);
    Tensor all;
    if (!sends(c)) return ERR_OK;
    TRY(tensor_new(c->scratch, &all, I64, group->size, t->offset.dim[0]));
    TRY(comm_all_gather(group, c->s, all, t->offset, NULL));
    const int64_t first = (int64_t)(group->rank / copies(c)) * own;
    TRY(op(c->s, dispatch_offsets, .offset = t->owned, .all = all, .first = first, .own = own,
           .most = moe_room_of(m, c).owned));
    if (m->spec->gathers) {
        Tensor choice;
        TRY(tensor_new(c->scratch, &choice, I32, group->size, t->choice.dim[0]));
        TRY(comm_all_gather(group, c->s, choice, t->choice, NULL));
        TRY(op(c->s, dispatch_choices, .choice = t->taken, .all_choice = choice, .all = all,
               .offset = t->owned, .first = first, .own = own, .numbers = tensor_count(t->index)));
    }
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Rows of this rank's experts [Q, D] from the tokens x [N, D] of all ranks, times their weights [N, K], if any. */
static Err take_rows(const Moe *m, Ctx *c, const MoeRows *t, Tensor x, Tensor weight, Tensor rows)
{
    Comm *group = &c->world->tp_ep;
    ArenaMark mark = arena_mark(c->scratch);
    Tensor all, weights = { 0 };
    TRY(tensor_new(c->scratch, &all, x.dtype, group->size * x.dim[0], x.dim[1]));
    if (weight.data) {
        TRY(tensor_new(c->scratch, &weights, F32, group->size * x.dim[0], m->spec->topk));
        TRY(comm_all_gather(group, c->s, weights, weight, NULL));
    }
    TRY(comm_all_gather(group, c->s, all, x, c->moved));
    TRY(move_rows_end(c));
    TRY(op(c->s, take_rows, .y = in_use(rows, t->owned), .x = all, .choice = t->taken, .weight = weights,
           .topk = m->spec->topk));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Rows of tokens x [N, D] to rows of this rank's experts [Q, D]. */
static Err dispatch(const Moe *m, Ctx *c, const MoeRows *t, Tensor x, Tensor rows)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor local = rows;
    if (gathers(m, c)) return take_rows(m, c, t, x, (Tensor){ 0 }, rows);
    if (sends(c)) TRY(tensor_new(c->scratch, &local, c->dtype, t->choice.dim[0], m->model->hidden));
    TRY(op(c->s, permute_rows, .y = local, .x = x, .choice = in_use(t->choice, t->offset),
           .topk = m->spec->topk));
    if (sends(c)) {
        TRY(move_rows_begin(m, c, t, local, rows, false));
        TRY(move_rows_end(c));
    }
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- pieces ---- */

/* Tokens of this rank that pass the experts at once. */
static int64_t piece_tokens(const Moe *m, const Ctx *c)
{
    return c->in_pieces ? moe_room_of(m, c).piece : ctx_rows(c);
}

/* Permuted rows of all its tokens: pieces have places of their own, which no capacity makes smaller. */
static int64_t sent_rows(const Moe *m, const Ctx *c)
{
    return c->in_pieces ? ctx_rows(c) * m->spec->topk : moe_room_of(m, c).sent;
}

/* The part of `t` that is of the piece from token `first` on. */
static MoeRows piece_at(const Moe *m, const Ctx *c, const MoeRows *t, int64_t first)
{
    const int64_t K = m->spec->topk, per = piece_tokens(m, c), n = min64(per, t->index.dim[0] - first),
                  run = run_tokens(c), lists = m->spec->experts * ((n + run - 1) / run);
    MoeRows p = *t;
    if (!c->in_pieces) return p;
    p.index = tensor_row_slice(t->index, first, n);
    p.weight = tensor_row_slice(t->weight, first, n);
    p.row = tensor_row_slice(t->row, first, n);
    p.choice = tensor_row_slice(t->choice, first * K, n * K);
    p.out = tensor_row_slice(t->out, first * K, n * K);
    p.offset = tensor_row_slice(t->offset, m->spec->experts * (first / run) + first / per, lists + 1);
    return p;
}

/* What other ranks' offsets say of a piece, in scratch. */
static Err learn_piece(const Moe *m, Ctx *c, MoeRows *p)
{
    p->owned = p->offset;
    if (!sends(c)) return ERR_OK;
    TRY(tensor_new(c->scratch, &p->owned, I64, copies(c) * (p->offset.dim[0] - 1) + 1));
    if (m->spec->gathers) TRY(tensor_new(c->scratch, &p->taken, I32, moe_room_of(m, c).owned));
    return learn_owned(m, c, p);
}

/* ---- forward ---- */

static Err route_alloc(const Moe *m, Ctx *c, int64_t N, MoeSave *save, MoeRows *t)
{
    const int64_t K = m->spec->topk, E = m->spec->experts, run = run_tokens(c), X = E * ((N + run - 1) / run),
                  pieces = (N + piece_tokens(m, c) - 1) / piece_tokens(m, c);
    TRY(save_new(c, REGION_I, &t->logits, &save->logits, F32, N, moe_padded_cols(E)));
    t->logits = moe_first_cols(t->logits, E);
    TRY(save_new(c, REGION_I, &t->index, &save->index, I32, N, K));
    TRY(save_new(c, REGION_I, &t->weight, &save->weight, F32, N, K));
    TRY(save_new(c, REGION_I, &t->row, &save->row, I32, N, K));
    TRY(save_new(c, REGION_I, &t->choice, &save->choice, I32, sent_rows(m, c)));
    TRY(save_new(c, REGION_W, &t->offset, &save->offset, I64, X + pieces));
    t->owned = t->offset;
    save->owned = save->offset;
    if (!sends(c) || c->in_pieces) return ERR_OK;
    TRY(save_new(c, REGION_W, &t->owned, &save->owned, I64, copies(c) * X + 1));
    return m->spec->gathers ? save_new(c, REGION_I, &t->taken, &save->taken, I32, moe_room_of(m, c).owned)
                            : ERR_OK;
}

/* Recomputation leaves x and active to scratch: they are made again. */
static Err rows_alloc(const Moe *m, Ctx *c, MoeSave *save, MoeRows *t)
{
    const int64_t P = sent_rows(m, c), Q = moe_room_of(m, c).owned;
    const int64_t D = m->model->hidden, F = own_ffn(m, c),
                  H = activation_gated(m->model->activation) ? 2 * F : F;
    TRY(save_new(c, REGION_I, &t->hidden, &save->hidden, c->dtype, Q, H));
    TRY(save_new(c, REGION_I, &t->out, &save->out, c->dtype, P, D));
    if (model_recomputes(m->model)) {
        TRY(tensor_new(c->scratch, &t->x, c->dtype, Q, D));
        return tensor_new(c->scratch, &t->active, c->dtype, Q, F);
    }
    TRY(save_new(c, REGION_W, &t->x, &save->x, c->dtype, Q, D));
    return save_new(c, REGION_W, &t->active, &save->active, c->dtype, Q, F);
}

/* The order of the permuted rows of `kept` [N, K], piece by piece. */
static Err order_rows(const Moe *m, Ctx *c, Tensor kept, const MoeRows *t)
{
    for (int64_t first = 0; first < kept.dim[0]; first += piece_tokens(m, c)) {
        const MoeRows p = piece_at(m, c, t, first);
        TRY(op(c->s, permute_index, .row = p.row, .choice = p.choice, .offset = p.offset,
               .index = tensor_row_slice(kept, first, p.row.dim[0]), .experts = m->spec->experts,
               .run = run_tokens(c)));
    }
    return ERR_OK;
}

static Err route(const Moe *m, Ctx *c, Tensor x, const MoeRows *t)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor kept;
    TRY(moe_choose(m, c, x, t));
    TRY(moe_choices_kept(m, c, t->index, t->weight, &kept));
    TRY(order_rows(m, c, kept, t));
    arena_release(c->scratch, mark);
    return c->in_pieces ? ERR_OK : learn_owned(m, c, t);
}

static Err activate(const Moe *m, Ctx *c, const MoeRows *t)
{
    return activation_forward(c, m->model, m->spec->ffn, in_use(t->hidden, t->owned),
                              in_use(t->active, t->owned));
}

/* The experts up to their second product. */
static Err make_active(const Moe *m, Ctx *c, Tensor x, const MoeRows *t)
{
    TRY(dispatch(m, c, t, x, t->x));
    TRY(op(c->s, grouped_fwd, .y = t->hidden, .x = t->x, .w = expert_weights(m, c, m->fc1),
           .offset = t->owned, .leaf = whole_leaf(m->model->hidden)));
    TRY(add_bias(c, m->fc1_bias, moe_own_experts(m, c), t->hidden, t->owned));
    return activate(m, c, t);
}

static Err experts_forward(const Moe *m, Ctx *c, Tensor x, Tensor y, const MoeRows *t)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor made = t->out;
    TRY(make_active(m, c, x, t));
    if (sends(c)) TRY(tensor_new(c->scratch, &made, c->dtype, t->x.dim[0], m->model->hidden));
    TRY(op(c->s, grouped_fwd, .y = made, .x = t->active, .w = expert_weights(m, c, m->fc2),
           .offset = t->owned, .leaf = tree_leaf(c, m->spec->ffn, t->active.dim[1])));
    if (sends(c)) TRY(return_rows(m, c, t, made, t->out));
    arena_release(c->scratch, mark);
    TRY(add_bias(c, m->fc2_bias, m->spec->experts, t->out, t->offset));
    return op(c->s, unpermute_rows, .y = y, .x = t->out, .row = t->row, .weight = t->weight);
}

static Err pieces_forward(const Moe *m, Ctx *c, Tensor x, Tensor y, const MoeRows *t)
{
    for (int64_t first = 0; first < x.dim[0]; first += piece_tokens(m, c)) {
        ArenaMark mark = arena_mark(c->scratch);
        MoeRows p = piece_at(m, c, t, first);
        const int64_t n = p.index.dim[0];
        TRY(learn_piece(m, c, &p));
        TRY(experts_forward(m, c, tensor_row_slice(x, first, n), tensor_row_slice(y, first, n), &p));
        arena_release(c->scratch, mark);
    }
    return ERR_OK;
}

/* sum = residual, if given, + the shared expert's output + the bias that its last linear leaves to a sum. */
static Err shared_sum(const Moe *m, Ctx *c, Tensor out, Tensor residual, Tensor sum)
{
    const int bias = m->shared.fc2.bias;
    return residual_add(c, &(ResidualSum){ .sum = sum,
                                           .residual = residual,
                                           .branch = out,
                                           .bias = bias >= 0 ? param_value(c, bias) : (Tensor){ 0 },
                                           .dropout = { .scale = 1 } });
}

/* The shared expert's output; with a gate backward needs it, its bias included. */
static Err shared_forward(const Moe *m, Ctx *c, Tensor x, MoeSave *save, MoeRows *t)
{
    if (!m->spec->shared_ffn) return ERR_OK;
    if (m->shared_gate < 0) {
        TRY(tensor_new(c->scratch, &t->shared_out, c->dtype, x.dim[0], x.dim[1]));
    } else {
        TRY(save_new(c, REGION_I, &t->shared_out, &save->shared_out, c->dtype, x.dim[0], x.dim[1]));
        TRY(save_new(c, REGION_I, &t->gate, &save->gate, F32, x.dim[0], moe_padded_cols(1)));
        t->gate = moe_first_cols(t->gate, 1);
        TRY(moe_fp32_linear(c, m->shared_gate, -1, x, t->gate));
    }
    TRY(mlp_forward(&m->shared, c, x, t->shared_out, &save->shared));
    if (m->shared_gate < 0 || m->shared.fc2.bias < 0) return ERR_OK;
    return shared_sum(m, c, t->shared_out, (Tensor){ 0 }, t->shared_out);
}

static Err shared_add(const Moe *m, Ctx *c, Tensor y, const MoeRows *t)
{
    if (!m->spec->shared_ffn) return ERR_OK;
    if (m->shared_gate < 0) return shared_sum(m, c, t->shared_out, y, y);
    return op(c->s, gated_add_fwd, .y = y, .residual = y, .x = t->shared_out, .gate = t->gate);
}

static Err moe_forward(const void *own, Ctx *c, Tensor x, Tensor y, void *kept)
{
    const Moe *m = own;
    MoeSave *save = kept;
    MoeRows t = { 0 };
    TRY(route_alloc(m, c, x.dim[0], save, &t));
    TRY(rows_alloc(m, c, save, &t));
    TRY(shared_forward(m, c, x, save, &t));
    TRY(route(m, c, x, &t));
    TRY(c->in_pieces ? pieces_forward(m, c, x, y, &t) : experts_forward(m, c, x, y, &t));
    return shared_add(m, c, y, &t);
}

/* ---- backward ---- */

/* What recomputation did not keep. */
static Err rows_again(const Moe *m, Ctx *c, Tensor x, const MoeRows *t)
{
    if (!model_recomputes(m->model)) return ERR_OK;
    TRY(dispatch(m, c, t, x, t->x));
    return activate(m, c, t);
}

static Err rows_saved(const Moe *m, Ctx *c, const MoeSave *save, MoeRows *t)
{
    *t = (MoeRows){ .logits = moe_first_cols(save_get(c, save->logits), m->spec->experts),
                    .index = save_get(c, save->index),
                    .weight = save_get(c, save->weight),
                    .row = save_get(c, save->row),
                    .choice = save_get(c, save->choice),
                    .offset = save_get(c, save->offset),
                    .owned = save_get(c, save->owned),
                    .taken = gathers(m, c) && !c->in_pieces ? save_get(c, save->taken) : (Tensor){ 0 },
                    .hidden = save_get(c, save->hidden),
                    .out = save_get(c, save->out) };
    if (model_recomputes(m->model)) {
        TRY(dy_alloc(c, &t->x, t->hidden.dim[0], m->model->hidden));
        return dy_alloc(c, &t->active, t->hidden.dim[0], own_ffn(m, c));
    }
    t->x = save_get(c, save->x);
    t->active = save_get(c, save->active);
    return ERR_OK;
}

static Err grouped_dx(const Moe *m, Ctx *c, int weight, const MoeRows *t, Tensor dy, Tensor dx)
{
    const int64_t width = dy.dim[1], all = m->spec->ffn / own_ffn(m, c) * width;
    const int64_t leaf = weight == m->fc1 ? tree_leaf(c, all, width) : whole_leaf(width);
    return op(c->s, grouped_dx, .dx = dx, .dy = dy, .w = expert_weights(m, c, weight), .offset = t->owned,
              .leaf = leaf);
}

static Err grouped_weight(Ctx *c, int weight, const MoeRows *t, Tensor dy, Tensor x)
{
    return wgrad_push(c, (Wgrad){ .weight = weight, .dy = dy, .x = x, .offset = t->owned });
}

/* Gradients of rows [Q, D] back as those of `local` [P, D], while the gradient of fc1 from `dhidden` is computed. */
static Err return_drows(const Moe *m, Ctx *c, const MoeRows *t, Tensor dhidden, Tensor drows, Tensor local)
{
    ArenaMark mark = arena_mark(c->scratch);
    Returned r = { .local = local };
    TRY(return_rows_begin(m, c, t, drows, &r));
    TRY(grouped_weight(c, m->fc1, t, dhidden, t->x));
    TRY(return_rows_end(c, &r));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* dx += what came through the experts, from the gradient of their outputs. */
static Err experts_backward(const Moe *m, Ctx *c, const MoeRows *t, Tensor dout, Tensor dx)
{
    Tensor dactive, dhidden, drows, local;
    TRY(tensor_new(c->scratch, &dactive, c->dtype, t->active.dim[0], t->active.dim[1]));
    TRY(dy_alloc(c, &dhidden, t->hidden.dim[0], t->hidden.dim[1]));
    TRY(tensor_new(c->scratch, &drows, c->dtype, t->x.dim[0], t->x.dim[1]));
    TRY(grouped_dx(m, c, m->fc2, t, dout, dactive));
    TRY(grouped_weight(c, m->fc2, t, dout, t->active));
    TRY(activation_backward(c, m->model, m->spec->ffn,
                            (ActivationGrad){ in_use(t->hidden, t->owned), in_use(dactive, t->owned),
                                              in_use(dhidden, t->owned) }));
    TRY(bias_backward(c, m->fc1_bias, moe_own_experts(m, c), dhidden, t->owned));
    TRY(grouped_dx(m, c, m->fc1, t, dhidden, drows));
    local = drows;
    if (sends(c)) {
        TRY(tensor_new(c->scratch, &local, c->dtype, t->out.dim[0], t->out.dim[1]));
        TRY(return_drows(m, c, t, dhidden, drows, local));
    } else {
        TRY(grouped_weight(c, m->fc1, t, dhidden, t->x));
    }
    return op(c->s, unpermute_rows, .y = dx, .x = local, .row = t->row, .add = 1);
}

/* The gradients of the experts' outputs, where the experts are, and of the weights that they count. */
static Err out_backward(const Moe *m, Ctx *c, const MoeRows *t, Tensor dy, Tensor *dout, Tensor dweight)
{
    TRY(dy_alloc(c, dout, t->hidden.dim[0], m->model->hidden));
    ArenaMark mark = arena_mark(c->scratch);
    const bool taken = gathers(m, c), needs_rows = !taken || m->fc2_bias >= 0;
    Tensor local = needs_rows ? *dout : (Tensor){ 0 };
    if (sends(c) && needs_rows)
        TRY(tensor_new(c->scratch, &local, c->dtype, t->out.dim[0], m->model->hidden));
    TRY(op(c->s, unpermute_bwd, .dx = local, .dweight = dweight, .dy = dy, .x = t->out, .row = t->row,
           .weight = t->weight));
    TRY(bias_backward(c, m->fc2_bias, m->spec->experts, local, t->offset));
    if (taken) {
        TRY(take_rows(m, c, t, dy, t->weight, *dout));
    } else if (sends(c)) {
        TRY(move_rows_begin(m, c, t, local, *dout, false));
        TRY(move_rows_end(c));
    }
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* The rows that experts get, for their biases and for who watches. */
static Err count_rows(const Moe *m, Ctx *c, const MoeRows *t)
{
    Tensor load;
    TRY(grad_open(c, m->bias, &load));
    for (int64_t first = 0; first < t->index.dim[0]; first += piece_tokens(m, c))
        TRY(op(c->s, expert_count, .load = load, .offset = piece_at(m, c, t, first).offset));
    return grad_added(c, m->bias);
}

/* The gradient of the shared expert's output through its gate, and dx += what came through the gate. */
static Err gate_backward(const Moe *m, Ctx *c, const MoeSave *save, Tensor x, Tensor dy, Tensor dx,
                         Tensor *dshared)
{
    Tensor dgate, wide, through;
    TRY(dy_alloc(c, dshared, dy.dim[0], dy.dim[1]));
    TRY(moe_fp32_dy_alloc(c, 1, &dgate, &wide));
    TRY(tensor_new(c->scratch, &through, c->dtype, dx.dim[0], dx.dim[1]));
    TRY(op(c->s, gated_add_bwd, .dx = *dshared, .dgate = moe_first_cols(wide, 1), .dy = dy,
           .x = save_get(c, save->shared_out), .gate = moe_first_cols(save_get(c, save->gate), 1)));
    TRY(moe_fp32_linear_backward(c, m->shared_gate, x, dgate, wide, through));
    return add_rows(c, dx, through);
}

static Err shared_backward(const Moe *m, Ctx *c, const MoeSave *save, Tensor x, Tensor dy, Tensor dx)
{
    Tensor dshared = dy, through;
    if (!m->spec->shared_ffn) return ERR_OK;
    if (m->shared_gate >= 0) TRY(gate_backward(m, c, save, x, dy, dx, &dshared));
    if (m->shared.fc2.bias >= 0) TRY(grad_add_columns(c, m->shared.fc2.bias, dshared, 0));
    TRY(tensor_new(c->scratch, &through, c->dtype, dx.dim[0], dx.dim[1]));
    TRY(mlp_backward(&m->shared, c, &save->shared, x, dshared, through));
    return add_rows(c, dx, through);
}

static Err whole_backward(const Moe *m, Ctx *c, const MoeRows *t, Tensor x, Tensor dy, Tensor dx)
{
    Tensor dout, dweight;
    TRY(rows_again(m, c, x, t));
    TRY(tensor_new(c->scratch, &dweight, F32, t->weight.dim[0], t->weight.dim[1]));
    TRY(out_backward(m, c, t, dy, &dout, dweight));
    TRY(moe_router_backward(m, c, t, x, dweight, dx));
    TRY(count_rows(m, c, t));
    return experts_backward(m, c, t, dout, dx);
}

/* The router's part, for which the results that were kept suffice. */
static Err pieces_router_backward(const Moe *m, Ctx *c, const MoeRows *t, Tensor x, Tensor dy, Tensor dx)
{
    Tensor dweight;
    TRY(tensor_new(c->scratch, &dweight, F32, t->weight.dim[0], t->weight.dim[1]));
    for (int64_t first = 0; first < x.dim[0]; first += piece_tokens(m, c)) {
        const MoeRows p = piece_at(m, c, t, first);
        const int64_t n = p.index.dim[0];
        TRY(op(c->s, unpermute_bwd, .dweight = tensor_row_slice(dweight, first, n),
               .dy = tensor_row_slice(dy, first, n), .x = p.out, .row = p.row, .weight = p.weight));
    }
    TRY(moe_router_backward(m, c, t, x, dweight, dx));
    return count_rows(m, c, t);
}

/* Weights' gradients are added at once even if other linears' are later: the next piece overwrites what they read. */
static Err pieces_backward(const Moe *m, Ctx *c, const MoeRows *t, Tensor x, Tensor dy, Tensor dx)
{
    const bool split = c->split_backward;
    TRY(pieces_router_backward(m, c, t, x, dy, dx));
    c->split_backward = false;
    for (int64_t first = 0; first < x.dim[0]; first += piece_tokens(m, c)) {
        ArenaMark mark = arena_mark(c->scratch);
        MoeRows p = piece_at(m, c, t, first);
        const int64_t n = p.index.dim[0];
        const Tensor rows = tensor_row_slice(x, first, n);
        Tensor dout, dweight;
        TRY(learn_piece(m, c, &p));
        TRY(make_active(m, c, rows, &p));
        TRY(tensor_new(c->scratch, &dweight, F32, n, m->spec->topk));
        TRY(out_backward(m, c, &p, tensor_row_slice(dy, first, n), &dout, dweight));
        TRY(experts_backward(m, c, &p, dout, tensor_row_slice(dx, first, n)));
        arena_release(c->scratch, mark);
    }
    c->split_backward = split;
    return ERR_OK;
}

static Err moe_backward(const void *own, Ctx *c, const void *kept, Tensor x, Tensor dy, Tensor dx)
{
    const Moe *m = own;
    const MoeSave *save = kept;
    ArenaMark mark = arena_mark(c->scratch);
    MoeRows t;
    TRY(rows_saved(m, c, save, &t));
    TRY(c->in_pieces ? pieces_backward(m, c, &t, x, dy, dx) : whole_backward(m, c, &t, x, dy, dx));
    TRY(shared_backward(m, c, save, x, dy, dx));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- the kind ---- */

static int no_bias(const void *own)
{
    (void)own;
    return -1;
}

static int64_t moe_flop(const ModelSpec *s)
{
    const MixtureSpec *e = &s->moe;
    return 2 * (mlp_weights(s, e->topk * e->ffn + e->shared_ffn) + s->hidden * (e->experts + e->shared_gate));
}

/* Those of the experts that it is not sent to. */
static int64_t moe_idle_params(const ModelSpec *s)
{
    const int64_t F = s->moe.ffn, first = activation_gated(s->activation) ? 2 * F : F;
    return (s->moe.experts - s->moe.topk) * (mlp_weights(s, F) + (s->bias ? first + s->hidden : 0));
}

const LayerKind moe_kind = { .own_bytes = sizeof(Moe),
                             .save_bytes = sizeof(MoeSave),
                             .linears = 6,
                             .sums_own_rows = true,
                             .add = moe_add,
                             .forward = moe_forward,
                             .backward = moe_backward,
                             .residual_bias = no_bias,
                             .flop = moe_flop,
                             .idle_params = moe_idle_params };
