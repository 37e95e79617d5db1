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
 */
#include <stdio.h>

#include "base/rng.h"
#include "layer/internal.h"

/* ---- registration ---- */

static Err add_weight(ParamRegistry *reg, const MoeSpec *m, const char *what, ParamSpec w, int *id)
{
    char name[PARAM_NAME_MAX];
    snprintf(name, sizeof name, "%s.%s.weight", m->name, what);
    w.name = name;
    w.ndim = 2;
    w.init = INIT_NORMAL;
    w.flags = PARAM_DECAY;
    return param_add(reg, w, id);
}

static Err register_shared(Moe *m, ParamRegistry *reg, const MoeSpec *s)
{
    char name[PARAM_NAME_MAX];
    m->shared_gate = -1;
    m->has_shared = s->shared_ffn > 0;
    if (!m->has_shared) return ERR_OK;
    snprintf(name, sizeof name, "%s.shared", s->name);
    TRY(mlp_register(&m->shared, reg,
                     (MlpSpec){ .name = name,
                                .hidden = s->hidden,
                                .ffn = s->shared_ffn,
                                .activation = s->activation,
                                .tp_blocks = s->tp_blocks,
                                .recompute = s->recompute,
                                .std = s->std,
                                .proj_std = s->proj_std }));
    if (!s->shared_gate) return ERR_OK;
    const ParamSpec gate = { .shape = { 1, s->hidden }, .std = s->std, .partial = PARTIAL_ROWS };
    return add_weight(reg, s, "shared_gate", gate, &m->shared_gate);
}

static Err add_bias(ParamRegistry *reg, const MoeSpec *s, int *id)
{
    char name[PARAM_NAME_MAX];
    snprintf(name, sizeof name, "%s.router.bias", s->name);
    return param_add(
        reg,
        (ParamSpec){
            .name = name, .ndim = 1, .shape = { s->experts }, .partial = PARTIAL_ROWS, .group = PARAM_STATE },
        id);
}

Err moe_register(Moe *m, ParamRegistry *reg, MoeSpec s)
{
    char noise[PARAM_NAME_MAX];
    snprintf(noise, sizeof noise, "%s.jitter", s.name);
    const int64_t E = s.experts, D = s.hidden, F = s.ffn, gated = s.activation == ACT_SWIGLU ? 2 : 1;
    ASSERT(s.balance.unit > 0);
    *m = (Moe){ .experts = s.experts,
                .topk = s.topk,
                .hidden = D,
                .ffn = F,
                .chunk = F / s.tp_blocks,
                .activation = s.activation,
                .scoring = s.scoring,
                .balance = s.balance,
                .gathers = s.gathers,
                .capacity = s.capacity,
                .jitter = s.jitter,
                .jitter_key = rng_key(s.seed, noise),
                .recompute = s.recompute };
    ParamSpec router = { .shape = { E, D }, .std = s.std, .partial = PARTIAL_ROWS, .init_repeat = s.parts };
    ParamSpec fc1 = { .shape = { E * gated * F, D }, .cut = { CUT_ETP }, .std = s.std };
    ParamSpec fc2 = { .shape = { E * D, F }, .cut = { CUT_NONE, CUT_ETP }, .std = s.proj_std };
    fc1.stack = fc2.stack = E;
    fc1.stack_cut = fc2.stack_cut = CUT_EP;
    fc1.group = fc2.group = PARAM_EXPERT;
    if (gated == 2) {
        fc1.section[0] = fc1.section[1] = F;
        fc1.interleave = s.tp_blocks;
    }
    TRY(add_weight(reg, &s, "router", router, &m->router));
    TRY(add_bias(reg, &s, &m->bias));
    TRY(add_weight(reg, &s, "experts.fc1", fc1, &m->fc1));
    TRY(add_weight(reg, &s, "experts.fc2", fc2, &m->fc2));
    return register_shared(m, reg, &s);
}

/* ---- what both directions share ---- */

/* Tokens of a leaf of the weights' gradients. */
static int64_t run_tokens(const Ctx *c) { return c->canon.leaf_tokens; }

static bool sends(const Ctx *c) { return c->world->tp_ep.size > 1; }

/* The experts take their rows out of all ranks' tokens. */
static bool gathers(const Moe *m, const Ctx *c) { return sends(c) && m->gathers; }

/* Neighbours that have a part of each of the same experts. */
static int copies(const Ctx *c) { return c->world->grid.etp; }

int moe_own_experts(const Moe *m, const Ctx *c) { return m->experts / (c->world->tp_ep.size / copies(c)); }

/* This rank's part of an expert's width. */
static int64_t own_ffn(const Moe *m, const Ctx *c) { return m->ffn / copies(c); }

/* The weights of this rank's experts as [experts, outputs, inputs]. */
static Tensor expert_weights(const Moe *m, const Ctx *c, int id)
{
    const Tensor w = param_value(c, id);
    const int experts = moe_own_experts(m, c);
    return tensor_reshape(w, experts, w.dim[0] / experts, w.dim[1]);
}

static Err activation_backward(const Moe *m, Ctx *c, Tensor hidden, Tensor dactive, Tensor dhidden)
{
    if (m->activation == ACT_GELU) return op(c->s, gelu_bwd, .dx = dhidden, .dy = dactive, .x = hidden);
    return op(c->s, swiglu_bwd, .dx = dhidden, .dy = dactive, .x = hidden, .chunk = m->chunk);
}

static Tensor flat(Tensor t) { return tensor_reshape(t, tensor_count(t)); }

/*
 * Results of the router and of the gate have a number for each expert, or one, and products take rows that begin on 16
 * bytes (cuda/gemm.c): memory has so many columns, of which the tensor is the first `cols`.
 */
static int64_t padded_cols(int64_t cols) { return (cols + 7) / 8 * 8; }
static Tensor first_cols(Tensor padded, int64_t cols) { return tensor_col_slice(padded, 0, cols); }

/* x itself if it is in fp32, else a copy that is. */
static Err in_fp32(Ctx *c, Tensor x, Tensor *out)
{
    *out = x;
    if (x.dtype == F32) return ERR_OK;
    TRY(tensor_new(c->scratch, out, F32, x.dim[0], x.dim[1]));
    return op(c->s, cast, .y = flat(*out), .x = flat(x));
}

/* y [N, rows of the weight] in fp32, of a product in fp32. */
static Err fp32_linear(Ctx *c, int weight, Tensor x, Tensor y)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor x32, w32;
    TRY(in_fp32(c, x, &x32));
    TRY(in_fp32(c, param_value(c, weight), &w32));
    TRY(op(c->s, linear_fwd, .y = y, .x = x32, .w = w32, .leaf = x.dim[1]));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Where the fp32 gradient of fp32_linear's y goes: `dy`, which the weight's gradient reads, or wide, rounded to it.
 * Padded. */
static Err fp32_dy_alloc(Ctx *c, int64_t cols, Tensor *dy, Tensor *wide)
{
    TRY(dy_alloc(c, dy, ctx_rows(c), padded_cols(cols)));
    *wide = *dy;
    return dy->dtype == F32 ? ERR_OK : tensor_new(c->scratch, wide, F32, dy->dim[0], dy->dim[1]);
}

/* dx (overwritten), and the weight's gradient queued: in the compute dtype, as those of other linears. */
static Err fp32_linear_backward(Ctx *c, int weight, Tensor x, Tensor dy, Tensor wide, Tensor dx)
{
    const Tensor w = param_value(c, weight);
    if (wide.data != dy.data) TRY(op(c->s, cast, .y = flat(dy), .x = flat(wide)));
    dy = first_cols(dy, w.dim[0]);
    TRY(op(c->s, linear_dx, .dx = dx, .dy = dy, .w = w, .leaf = dy.dim[1]));
    return wgrad_push(c, (Wgrad){ .weight = weight, .dy = dy, .x = x });
}

/* Tensors of one call: those of MoeSave, under the same names. */
typedef struct {
    Tensor logits, index, weight, row, choice, offset;
    Tensor owned, taken, x, hidden, active, out;
    Tensor shared_out, gate;
} MoeRows;

/* ---- rows to the ranks that hold their experts, and back ---- */

/* A tensor of permuted rows, of which those count that the offsets say are there. */
static Tensor in_use(Tensor rows, Tensor offset)
{
    rows.rows = (const int64_t *)offset.data + offset.dim[0] - 1;
    return rows;
}

/* Rows of `local` [P, ...] to the ranks of their experts, which get them as `remote` [Q, ...]; or back from there. */
static Err move_rows(const Moe *m, Ctx *c, const MoeRows *t, Tensor local, Tensor remote, bool back)
{
    Comm *group = &c->world->tp_ep;
    const MoeRoom most = moe_room_of(m, c);
    CommRows rows = { .local = local.data,
                      .remote = remote.data,
                      .local_offset = t->offset.data,
                      .remote_offset = t->owned.data,
                      .chunks = moe_own_experts(m, c),
                      .stride = (t->offset.dim[0] - 1) / m->experts,
                      .copies = copies(c),
                      .back = back,
                      .remote_rows = most.owned,
                      .most = most.pair };
    const int64_t row_bytes = local.dim[1] * dtype_size(local.dtype),
                  room = comm_rows_room(group, &rows, row_bytes);
    ArenaMark mark = arena_mark(c->scratch);
    void *slots = NULL;
    if (room) TRY(arena_alloc(c->scratch, room, &slots));
    rows.room = slots;
    TRY(comm_all_to_all_rows(group, c->s, &rows, t->choice.dim[0], row_bytes, NULL));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Rows [Q, D] of this rank's experts, or its parts of their sums, back as the rows [P, D] that these are of. */
static Err return_rows(const Moe *m, Ctx *c, const MoeRows *t, Tensor rows, Tensor local)
{
    const int64_t P = local.dim[0], parts = copies(c);
    ArenaMark mark = arena_mark(c->scratch);
    Tensor all;
    if (parts == 1) return move_rows(m, c, t, local, rows, true);
    TRY(tensor_new(c->scratch, &all, local.dtype, parts * P, local.dim[1]));
    TRY(move_rows(m, c, t, all, rows, true));
    TRY(op(c->s, sum_parts, .y = local, .x = all, .parts = parts)); /* the rest of the tree over tp_blocks */
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
    if (m->gathers) {
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
    TRY(comm_all_gather(group, c->s, all, x, NULL));
    if (weight.data) {
        TRY(tensor_new(c->scratch, &weights, F32, group->size * x.dim[0], m->topk));
        TRY(comm_all_gather(group, c->s, weights, weight, NULL));
    }
    TRY(op(c->s, take_rows, .y = in_use(rows, t->owned), .x = all, .choice = t->taken, .weight = weights,
           .topk = m->topk));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Rows of tokens x [N, D] to rows of this rank's experts [Q, D]. */
static Err dispatch(const Moe *m, Ctx *c, const MoeRows *t, Tensor x, Tensor rows)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor local = rows;
    if (gathers(m, c)) return take_rows(m, c, t, x, (Tensor){ 0 }, rows);
    if (sends(c)) TRY(tensor_new(c->scratch, &local, c->dtype, t->choice.dim[0], m->hidden));
    TRY(op(c->s, permute_rows, .y = local, .x = x, .choice = in_use(t->choice, t->offset), .topk = m->topk));
    if (sends(c)) TRY(move_rows(m, c, t, local, rows, false));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- what the router is given ---- */

static bool has_noise(const Moe *m, const Ctx *c) { return m->jitter > 0 && c->dropout_on; }

/* y = x with the noise of these rows: so of the router's input, and so of its gradient. */
static Err add_noise(const Moe *m, Ctx *c, Tensor y, Tensor x)
{
    return op(c->s, jitter, .y = y, .x = x, .position = ctx_row_slice(c, c->batch->position),
              .sample = ctx_row_slice(c, c->batch->sample), .key = m->jitter_key, .eps = m->jitter);
}

static Err make_logits(const Moe *m, Ctx *c, Tensor x, Tensor logits)
{
    ArenaMark mark = arena_mark(c->scratch);
    if (m->balance.forced)
        return op(c->s, router_even, .logits = logits, .position = ctx_row_slice(c, c->batch->position),
                  .sample = ctx_row_slice(c, c->batch->sample), .seq = c->batch->seq, .topk = m->topk);
    if (has_noise(m, c)) {
        const Tensor plain = x;
        TRY(tensor_new(c->scratch, &x, plain.dtype, plain.dim[0], plain.dim[1]));
        TRY(add_noise(m, c, x, plain));
    }
    TRY(fp32_linear(c, m->router, x, logits));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- forward ---- */

static Err route_alloc(const Moe *m, Ctx *c, int64_t N, MoeSave *save, MoeRows *t)
{
    const int64_t K = m->topk, E = m->experts, run = run_tokens(c), X = E * ((N + run - 1) / run);
    TRY(save_new(c, REGION_I, &t->logits, &save->logits, F32, N, padded_cols(E)));
    t->logits = first_cols(t->logits, E);
    TRY(save_new(c, REGION_I, &t->index, &save->index, I32, N, K));
    TRY(save_new(c, REGION_I, &t->weight, &save->weight, F32, N, K));
    TRY(save_new(c, REGION_I, &t->row, &save->row, I32, N, K));
    TRY(save_new(c, REGION_I, &t->choice, &save->choice, I32, moe_room_of(m, c).sent));
    TRY(save_new(c, REGION_W, &t->offset, &save->offset, I64, X + 1));
    t->owned = t->offset;
    save->owned = save->offset;
    if (!sends(c)) return ERR_OK;
    TRY(save_new(c, REGION_W, &t->owned, &save->owned, I64, copies(c) * X + 1));
    return m->gathers ? save_new(c, REGION_I, &t->taken, &save->taken, I32, moe_room_of(m, c).owned) : ERR_OK;
}

/* Recomputation leaves x and active to scratch: they are made again. */
static Err rows_alloc(const Moe *m, Ctx *c, MoeSave *save, MoeRows *t)
{
    const MoeRoom room = moe_room_of(m, c);
    const int64_t P = room.sent, Q = room.owned;
    const int64_t D = m->hidden, F = own_ffn(m, c), H = m->activation == ACT_SWIGLU ? 2 * F : F;
    TRY(save_new(c, REGION_I, &t->hidden, &save->hidden, c->dtype, Q, H));
    TRY(save_new(c, REGION_I, &t->out, &save->out, c->dtype, P, D));
    if (m->recompute) {
        TRY(tensor_new(c->scratch, &t->x, c->dtype, Q, D));
        return tensor_new(c->scratch, &t->active, c->dtype, Q, F);
    }
    TRY(save_new(c, REGION_W, &t->x, &save->x, c->dtype, Q, D));
    return save_new(c, REGION_W, &t->active, &save->active, c->dtype, Q, F);
}

/* What this rank's rows choose by where whole units are balanced, in training. */
static Err unit_ranks(const Moe *m, Ctx *c, Tensor logits, Tensor *rank)
{
    Tensor all, ranks, share;
    *rank = (Tensor){ 0 };
    if (!m->balance.sinkhorn || !c->dropout_on) return ERR_OK;
    TRY(moe_gather_units(c, logits, &all));
    TRY(tensor_new(c->scratch, &ranks, F32, all.dim[0], m->experts));
    TRY(tensor_new(c->scratch, &share, F32, all.dim[0]));
    TRY(op(c->s, sinkhorn, .rank = ranks, .share = share, .logits = all,
           .rows = m->balance.unit * c->batch->T));
    *rank = ctx_row_slice(c, ranks);
    return ERR_OK;
}

static Err route(const Moe *m, Ctx *c, Tensor x, const MoeRows *t)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor kept, rank;
    TRY(make_logits(m, c, x, t->logits));
    const Tensor bias = m->balance.bias_rate > 0 ? param_state(c, m->bias) : (Tensor){ 0 };
    TRY(unit_ranks(m, c, t->logits, &rank));
    TRY(op(c->s, router_fwd, .index = t->index, .weight = t->weight, .logits = t->logits, .bias = bias,
           .rank = rank, .router = m->scoring));
    TRY(moe_choices_kept(m, c, t->index, t->weight, &kept));
    TRY(op(c->s, permute_index, .row = t->row, .choice = t->choice, .offset = t->offset, .index = kept,
           .experts = m->experts, .run = run_tokens(c)));
    arena_release(c->scratch, mark);
    return learn_owned(m, c, t);
}

static Err activate(const Moe *m, Ctx *c, const MoeRows *t)
{
    return activation_forward(c, m->activation, m->chunk, in_use(t->hidden, t->owned),
                              in_use(t->active, t->owned));
}

static Err experts_forward(const Moe *m, Ctx *c, Tensor x, Tensor y, const MoeRows *t)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor made = t->out;
    TRY(dispatch(m, c, t, x, t->x));
    TRY(op(c->s, grouped_fwd, .y = t->hidden, .x = t->x, .w = expert_weights(m, c, m->fc1),
           .offset = t->owned, .leaf = whole_leaf(m->hidden)));
    TRY(activate(m, c, t));
    if (sends(c)) TRY(tensor_new(c->scratch, &made, c->dtype, t->x.dim[0], m->hidden));
    TRY(op(c->s, grouped_fwd, .y = made, .x = t->active, .w = expert_weights(m, c, m->fc2),
           .offset = t->owned, .leaf = tree_leaf(c, m->ffn, t->active.dim[1])));
    if (sends(c)) TRY(return_rows(m, c, t, made, t->out));
    arena_release(c->scratch, mark);
    return op(c->s, unpermute_rows, .y = y, .x = t->out, .row = t->row, .weight = t->weight);
}

/* The shared expert's output; with a gate backward needs it. */
static Err shared_forward(const Moe *m, Ctx *c, Tensor x, MoeSave *save, MoeRows *t)
{
    if (!m->has_shared) return ERR_OK;
    if (m->shared_gate < 0) {
        TRY(tensor_new(c->scratch, &t->shared_out, c->dtype, x.dim[0], x.dim[1]));
    } else {
        TRY(save_new(c, REGION_I, &t->shared_out, &save->shared_out, c->dtype, x.dim[0], x.dim[1]));
        TRY(save_new(c, REGION_I, &t->gate, &save->gate, F32, x.dim[0], padded_cols(1)));
        t->gate = first_cols(t->gate, 1);
        TRY(fp32_linear(c, m->shared_gate, x, t->gate));
    }
    return mlp_forward(&m->shared, c, x, t->shared_out, &save->shared);
}

static Err shared_add(const Moe *m, Ctx *c, Tensor y, const MoeRows *t)
{
    if (!m->has_shared) return ERR_OK;
    if (m->shared_gate < 0) return add_rows(c, y, t->shared_out);
    return op(c->s, gated_add_fwd, .y = y, .residual = y, .x = t->shared_out, .gate = t->gate);
}

Err moe_forward(const Moe *m, Ctx *c, Tensor x, Tensor y, MoeSave *save)
{
    MoeRows t = { 0 };
    TRY(route_alloc(m, c, x.dim[0], save, &t));
    TRY(rows_alloc(m, c, save, &t));
    TRY(shared_forward(m, c, x, save, &t));
    TRY(route(m, c, x, &t));
    TRY(experts_forward(m, c, x, y, &t));
    return shared_add(m, c, y, &t);
}

/* ---- backward ---- */

static Err rows_again(const Moe *m, Ctx *c, const MoeSave *save, Tensor x, MoeRows *t)
{
    if (!m->recompute) {
        t->x = save_get(c, save->x);
        t->active = save_get(c, save->active);
        return ERR_OK;
    }
    TRY(dy_alloc(c, &t->x, t->hidden.dim[0], m->hidden));
    TRY(dy_alloc(c, &t->active, t->hidden.dim[0], own_ffn(m, c)));
    TRY(dispatch(m, c, t, x, t->x));
    return activate(m, c, t);
}

static Err rows_saved(const Moe *m, Ctx *c, const MoeSave *save, Tensor x, MoeRows *t)
{
    *t = (MoeRows){ .logits = first_cols(save_get(c, save->logits), m->experts),
                    .index = save_get(c, save->index),
                    .weight = save_get(c, save->weight),
                    .row = save_get(c, save->row),
                    .choice = save_get(c, save->choice),
                    .offset = save_get(c, save->offset),
                    .owned = save_get(c, save->owned),
                    .taken = gathers(m, c) ? save_get(c, save->taken) : (Tensor){ 0 },
                    .hidden = save_get(c, save->hidden),
                    .out = save_get(c, save->out) };
    return rows_again(m, c, save, x, t);
}

static Err grouped_backward(const Moe *m, Ctx *c, int weight, const MoeRows *t, Wgrad w, Tensor dx)
{
    const int64_t width = w.dy.dim[1], all = m->ffn / own_ffn(m, c) * width;
    const int64_t leaf = weight == m->fc1 ? tree_leaf(c, all, width) : whole_leaf(width);
    TRY(op(c->s, grouped_dx, .dx = dx, .dy = w.dy, .w = expert_weights(m, c, weight), .offset = t->owned,
           .leaf = leaf));
    w.weight = weight;
    w.offset = t->owned;
    return wgrad_push(c, w);
}

/* dx += what came through the experts, from the gradient of their outputs. */
static Err experts_backward(const Moe *m, Ctx *c, const MoeRows *t, Tensor dout, Tensor dx)
{
    Tensor dactive, dhidden, drows, local;
    TRY(tensor_new(c->scratch, &dactive, c->dtype, t->active.dim[0], t->active.dim[1]));
    TRY(dy_alloc(c, &dhidden, t->hidden.dim[0], t->hidden.dim[1]));
    TRY(tensor_new(c->scratch, &drows, c->dtype, t->x.dim[0], t->x.dim[1]));
    TRY(grouped_backward(m, c, m->fc2, t, (Wgrad){ .dy = dout, .x = t->active }, dactive));
    TRY(activation_backward(m, c, in_use(t->hidden, t->owned), in_use(dactive, t->owned),
                            in_use(dhidden, t->owned)));
    TRY(grouped_backward(m, c, m->fc1, t, (Wgrad){ .dy = dhidden, .x = t->x }, drows));
    local = drows;
    if (sends(c)) {
        TRY(tensor_new(c->scratch, &local, c->dtype, t->out.dim[0], t->out.dim[1]));
        TRY(return_rows(m, c, t, drows, local));
    }
    return op(c->s, unpermute_rows, .y = dx, .x = local, .row = t->row, .add = 1);
}

/* The gradients of the experts' outputs, where the experts are, and of the weights that they count. */
static Err out_backward(const Moe *m, Ctx *c, const MoeRows *t, Tensor dy, Tensor *dout, Tensor dweight)
{
    TRY(dy_alloc(c, dout, t->hidden.dim[0], m->hidden));
    ArenaMark mark = arena_mark(c->scratch);
    Tensor local = *dout;
    if (gathers(m, c)) {
        TRY(op(c->s, unpermute_bwd, .dweight = dweight, .dy = dy, .x = t->out, .row = t->row,
               .weight = t->weight));
        return take_rows(m, c, t, dy, t->weight, *dout);
    }
    if (sends(c)) TRY(tensor_new(c->scratch, &local, c->dtype, t->out.dim[0], m->hidden));
    TRY(op(c->s, unpermute_bwd, .dx = local, .dweight = dweight, .dy = dy, .x = t->out, .row = t->row,
           .weight = t->weight));
    if (sends(c)) TRY(move_rows(m, c, t, local, *dout, false));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* The rows that experts get, for their biases and for who watches. */
static Err count_rows(const Moe *m, Ctx *c, const MoeRows *t)
{
    Tensor load;
    TRY(grad_open(c, m->bias, &load));
    TRY(op(c->s, expert_count, .load = load, .offset = t->offset));
    return grad_added(c, m->bias);
}

/* Of each balance unit the rows that would choose each expert by their scores alone, on all ranks. */
static Err unit_loads(const Moe *m, Ctx *c, const MoeRows *t, int64_t first, int64_t rows, Tensor *load)
{
    const int64_t N = t->index.dim[0], K = m->topk;
    Tensor index = t->index, weight;
    TRY(tensor_new(c->scratch, load, I64, c->batch->B / m->balance.unit, m->experts));
    TRY(device_zero(c->s, load->data, tensor_bytes(*load)));
    if (m->scoring.groups > 1 || m->balance.bias_rate > 0) {
        Router alone = m->scoring;
        alone.groups = alone.group_topk = 1;
        TRY(tensor_new(c->scratch, &index, I32, N, K));
        TRY(tensor_new(c->scratch, &weight, F32, N, K));
        TRY(op(c->s, router_fwd, .index = index, .weight = weight, .logits = t->logits, .router = alone));
    }
    TRY(op(c->s, router_count, .load = *load, .index = index, .first = first, .rows = rows));
    TRY(comm_sum_i64(&c->world->sp, c->s, load->data, tensor_count(*load), NULL));
    return comm_sum_i64(&c->world->cp, c->s, load->data, tensor_count(*load), NULL);
}

/* dlogits += what balance losses cost. (An auxiliary loss is weighed by the rows of a unit, of which cp ranks share the
 * samples: `rows` of them are here.) */
static Err balance_backward(const Moe *m, Ctx *c, const MoeRows *t, Tensor dlogits)
{
    const Balance *b = &m->balance;
    const int64_t rows = b->unit * c->batch->T, first = c->world->sp.rank * ctx_rows(c);
    Tensor load = { 0 };
    if (!(b->aux > 0) && !(b->z > 0)) return ERR_OK;
    ArenaMark mark = arena_mark(c->scratch);
    if (b->aux > 0) TRY(unit_loads(m, c, t, first, rows, &load));
    TRY(op(c->s, router_balance, .dlogits = dlogits, .logits = t->logits, .load = load, .router = m->scoring,
           .step = c->step, .topk = m->topk, .aux = b->aux / (float)c->world->cp.size, .z = b->z,
           .first = first, .rows = rows));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* dx = what came through the router's weights. */
static Err router_backward(const Moe *m, Ctx *c, const MoeRows *t, Tensor x, Tensor dweight, Tensor dx)
{
    Tensor dy, wide, noisy;
    TRY(fp32_dy_alloc(c, m->experts, &dy, &wide));
    const Tensor dlogits = first_cols(wide, m->experts);
    TRY(op(c->s, router_bwd, .dlogits = dlogits, .dweight = dweight, .logits = t->logits, .index = t->index,
           .weight = t->weight, .router = m->scoring));
    TRY(balance_backward(m, c, t, dlogits));
    TRY(count_rows(m, c, t));
    if (m->balance.forced) TRY(device_zero(c->s, wide.data, tensor_bytes(wide)));
    if (!has_noise(m, c)) return fp32_linear_backward(c, m->router, x, dy, wide, dx);
    TRY(dy_alloc(c, &noisy, x.dim[0], x.dim[1]));
    TRY(add_noise(m, c, noisy, x));
    TRY(fp32_linear_backward(c, m->router, noisy, dy, wide, dx));
    return add_noise(m, c, dx, dx);
}

/* The gradient of the shared expert's output through its gate, and dx += what came through the gate. */
static Err gate_backward(const Moe *m, Ctx *c, const MoeSave *save, Tensor x, Tensor dy, Tensor dx,
                         Tensor *dshared)
{
    Tensor dgate, wide, through;
    TRY(dy_alloc(c, dshared, dy.dim[0], dy.dim[1]));
    TRY(fp32_dy_alloc(c, 1, &dgate, &wide));
    TRY(tensor_new(c->scratch, &through, c->dtype, dx.dim[0], dx.dim[1]));
    TRY(op(c->s, gated_add_bwd, .dx = *dshared, .dgate = first_cols(wide, 1), .dy = dy,
           .x = save_get(c, save->shared_out), .gate = first_cols(save_get(c, save->gate), 1)));
    TRY(fp32_linear_backward(c, m->shared_gate, x, dgate, wide, through));
    return add_rows(c, dx, through);
}

static Err shared_backward(const Moe *m, Ctx *c, const MoeSave *save, Tensor x, Tensor dy, Tensor dx)
{
    Tensor dshared = dy, through;
    if (!m->has_shared) return ERR_OK;
    if (m->shared_gate >= 0) TRY(gate_backward(m, c, save, x, dy, dx, &dshared));
    TRY(tensor_new(c->scratch, &through, c->dtype, dx.dim[0], dx.dim[1]));
    TRY(mlp_backward(&m->shared, c, &save->shared, x, dshared, through));
    return add_rows(c, dx, through);
}

Err moe_backward(const Moe *m, Ctx *c, const MoeSave *save, Tensor x, Tensor dy, Tensor dx)
{
    ArenaMark mark = arena_mark(c->scratch);
    MoeRows t;
    Tensor dout, dweight;
    TRY(rows_saved(m, c, save, x, &t));
    TRY(tensor_new(c->scratch, &dweight, F32, t.weight.dim[0], t.weight.dim[1]));
    TRY(out_backward(m, c, &t, dy, &dout, dweight));
    TRY(router_backward(m, c, &t, x, dweight, dx));
    TRY(experts_backward(m, c, &t, dout, dx));
    TRY(shared_backward(m, c, save, x, dy, dx));
    arena_release(c->scratch, mark);
    return ERR_OK;
}
