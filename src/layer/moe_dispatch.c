/*
 * How rows get to the ranks that hold their experts, and back. The ranks of a tp-ep group share the experts; what they
 * do is one of the dispatchers of base/dispatcher.h, or, in a group of one, the local one:
 *
 *   local        one rank has all experts: the permuted rows are the experts' rows, P is Q
 *   all-to-all   each rank permutes its rows and sends each to the rank of its expert
 *   all-gather   each rank gets all ranks' tokens and takes its experts' rows out of them; results go back as by
 *                all-to-all
 *   node         a row goes once to each host that needs it (moe_node.c); results go back as by all-to-all
 *
 * Which rows come, and how many, only the offsets say, which lie on the device: tensors have the sizes of the most that
 * can come. A transport that needs lengths on the host reads them as soon as they are known (comm/comm.h, CommRows).
 */
#include "base/int64.h"
#include "base/trace.h"
#include "layer/moe.h"

/* Neighbours that have a part of each of the same experts. */
static int copies(const Ctx *c) { return c->world->grid.etp; }

DType moe_result_dtype(const Ctx *c) { return c->canon.exact && copies(c) > 1 ? F32 : c->dtype; }

/* This rank's experts are those from here on. */
static int64_t first_expert(const Moe *m, const Ctx *c)
{
    return (int64_t)(c->world->tp_ep.rank / copies(c)) * moe_own_experts(m, c);
}

Tensor moe_in_use(Tensor rows, Tensor offset)
{
    rows.rows = (const int64_t *)offset.data + offset.dim[0] - 1;
    return rows;
}

/* ---- messages ---- */

/* Rows of `local` [P, ...] to the ranks of their experts, which get them as `remote` [Q, ...]; or back from there.
 * Begun here; done after moe_rows_end. */
static Err move_rows_begin(const Moe *m, Ctx *c, const MoeRows *t, Tensor local, Tensor remote, bool back)
{
    const int64_t sent = t->choice_P.dim[0]; /* of a piece, perhaps */
    const CommRows rows = { .local = local.data,
                            .remote = remote.data,
                            .local_offset = t->offset.data,
                            .remote_offset = t->owned.data,
                            .chunks = moe_own_experts(m, c),
                            .stride = (t->offset.dim[0] - 1) / m->spec->experts,
                            .copies = copies(c),
                            .back = back,
                            .remote_rows = remote.dim[0],
                            .known = t->known };
    return comm_all_to_all_rows(&c->world->tp_ep, c->s, &rows, sent, local.dim[1] * dtype_size(local.dtype),
                                c->moves.done);
}

Err moe_rows_end(Ctx *c, const Comm *group)
{
    static const char *const names[] = { "KiB sent", NULL };
    const TraceArgs args = { .names = names, .value = { (int32_t)(group->last_bytes >> 10) } };
    if (c->moves.other_half) TRY(c->moves.other_half(c->moves.pair));
    trace_begin_with("wait for rows", &args);
    Err err = stream_wait(c->s, c->moves.done);
    trace_end();
    return err;
}

static Err move_rows(const Moe *m, Ctx *c, const MoeRows *t, Tensor local, Tensor remote)
{
    TRY(move_rows_begin(m, c, t, local, remote, false));
    return moe_rows_end(c, &c->world->tp_ep);
}

/* The offsets of all ranks [ranks, offsets], in scratch, and what they say of this rank's experts. */
static Err gather_offsets(const Moe *m, Ctx *c, const MoeRows *t, Tensor *all)
{
    Comm *group = &c->world->tp_ep;
    TRY(tensor_new(c->scratch, all, I64, group->size, t->offset.dim[0]));
    TRY(comm_all_gather(group, c->s, *all, t->offset, NULL));
    return op(c->s, dispatch_offsets, .offset = t->owned, .all = *all, .first = first_expert(m, c),
              .own = moe_own_experts(m, c), .most = moe_limits_of(m, c).owned);
}

/* ---- local ---- */

static Err nothing_to_learn(const Moe *m, Ctx *c, const MoeRows *t)
{
    (void)m, (void)c, (void)t;
    return ERR_OK;
}

static Err permute(const Moe *m, Ctx *c, const MoeRows *t, Tensor x, Tensor rows)
{
    return op(c->s, permute_rows, .y = rows, .x = x, .choice = moe_in_use(t->choice_P, t->offset),
              .topk = m->spec->topk);
}

static Err gradient_is_there(const Moe *m, Ctx *c, const MoeRows *t, Tensor dy, MovedRows d)
{
    (void)m, (void)c, (void)t, (void)dy;
    ASSERT(d.local.data == d.remote.data);
    return ERR_OK;
}

static Err are_back(const Moe *m, Ctx *c, const MoeRows *t, MovedRows *r)
{
    (void)m, (void)c, (void)t;
    ASSERT(r->local.data == r->remote.data);
    return ERR_OK;
}

static Err are_back_end(Ctx *c, const MovedRows *r)
{
    (void)c, (void)r;
    return ERR_OK;
}

/* ---- all-to-all ---- */

Err moe_learn_offsets(const Moe *m, Ctx *c, const MoeRows *t)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor all;
    TRY(gather_offsets(m, c, t, &all));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

static Err send_rows(const Moe *m, Ctx *c, const MoeRows *t, Tensor x, Tensor rows)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor local;
    TRY(tensor_new(c->scratch, &local, c->dtype, t->choice_P.dim[0], moe_width(m->model)));
    TRY(permute(m, c, t, x, local));
    TRY(move_rows(m, c, t, local, rows));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

static Err send_gradient(const Moe *m, Ctx *c, const MoeRows *t, Tensor dy, MovedRows d)
{
    (void)dy;
    return move_rows(m, c, t, d.local, d.remote);
}

/* Brings back parts of an expert's results, where ranks have parts of an expert. */
Err moe_bring_begin(const Moe *m, Ctx *c, const MoeRows *t, MovedRows *r)
{
    const Tensor y = r->local;
    r->parts = y;
    if (copies(c) > 1) TRY(tensor_new(c->scratch, &r->parts, r->remote.dtype, copies(c) * y.dim[0], y.dim[1]));
    return move_rows_begin(m, c, t, r->parts, r->remote, true);
}

Err moe_bring_end(Ctx *c, const MovedRows *r)
{
    TRY(moe_rows_end(c, &c->world->tp_ep));
    if (copies(c) == 1) return ERR_OK;
    return sum_parts_to(c, r->parts, copies(c), r->local); /* the tree over tp_blocks, on */
}

/* ---- all-gather ---- */

static Err learn_choices(const Moe *m, Ctx *c, const MoeRows *t)
{
    Comm *group = &c->world->tp_ep;
    ArenaMark mark = arena_mark(c->scratch);
    Tensor all, choice;
    TRY(gather_offsets(m, c, t, &all));
    TRY(tensor_new(c->scratch, &choice, I32, group->size, t->choice_P.dim[0]));
    TRY(comm_all_gather(group, c->s, choice, t->choice_P, NULL));
    TRY(op(c->s, dispatch_choices, .choice = t->learned, .all_choice = choice, .all = all, .offset = t->owned,
           .first = first_expert(m, c), .own = moe_own_experts(m, c), .numbers = tensor_count(t->index_NK)));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Rows of this rank's experts [Q, D] from the tokens x [N, D] of all ranks, times their weights [N, K], if any. */
static Err take_weighed(const Moe *m, Ctx *c, const MoeRows *t, Tensor x, Tensor weight, Tensor rows)
{
    Comm *group = &c->world->tp_ep;
    ArenaMark mark = arena_mark(c->scratch);
    Tensor all, weights = { 0 };
    TRY(tensor_new(c->scratch, &all, x.dtype, group->size * x.dim[0], x.dim[1]));
    if (weight.data) {
        TRY(tensor_new(c->scratch, &weights, F32, group->size * x.dim[0], m->spec->topk));
        TRY(comm_all_gather(group, c->s, weights, weight, NULL));
    }
    TRY(comm_all_gather(group, c->s, all, x, c->moves.done));
    TRY(moe_rows_end(c, &c->world->tp_ep));
    TRY(op(c->s, take_rows, .y = moe_in_use(rows, t->owned), .x = all, .choice = t->learned, .weight = weights,
           .topk = m->spec->topk));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

static Err take_rows(const Moe *m, Ctx *c, const MoeRows *t, Tensor x, Tensor rows)
{
    return take_weighed(m, c, t, x, (Tensor){ 0 }, rows);
}

static Err take_gradient(const Moe *m, Ctx *c, const MoeRows *t, Tensor dy, MovedRows d)
{
    return take_weighed(m, c, t, dy, t->weight_NK, d.remote);
}

static int64_t taken_rows(const Moe *m, const Ctx *c) { return moe_limits_of(m, c).owned; }

/* ---- the dispatchers ---- */

static const Dispatcher local = { .learn = nothing_to_learn,
                                  .send = permute,
                                  .bring_begin = are_back,
                                  .bring_end = are_back_end,
                                  .send_gradient = gradient_is_there };

const Dispatcher moe_dispatcher_alltoall = { .remote = true,
                                             .learn = moe_learn_offsets,
                                             .send = send_rows,
                                             .bring_begin = moe_bring_begin,
                                             .bring_end = moe_bring_end,
                                             .send_gradient = send_gradient };

/* t->learned: the choices whose rows this rank's experts take. */
const Dispatcher moe_dispatcher_allgather = { .remote = true,
                                              .weighs = true,
                                              .learned = taken_rows,
                                              .learn = learn_choices,
                                              .send = take_rows,
                                              .bring_begin = moe_bring_begin,
                                              .bring_end = moe_bring_end,
                                              .send_gradient = take_gradient };

const Dispatcher *moe_dispatcher(const Moe *m, const Ctx *c)
{
#define DISPATCHER_OF(name, text, numbers, functions) [DISPATCH_##name] = &functions,
    static const Dispatcher *const all[] = { DISPATCHERS(DISPATCHER_OF) };
#undef DISPATCHER_OF
    if (c->world->tp_ep.size == 1) return &local;
    /* (in a group on one host rows cross no network; pieces are as large as fits the ranks that experts are on) */
    const bool plain = c->world->ep_rail.size == 1 || c->mode.retry_in_pieces;
    return all[m->spec->dispatcher == DISPATCH_NODE && plain ? DISPATCH_ALLTOALL : m->spec->dispatcher];
}

Err moe_remote_rows(const Moe *m, Ctx *c, const MoeRows *t, MovedRows *r)
{
    r->remote = r->local;
    if (!moe_dispatcher(m, c)->remote) return ERR_OK;
    return tensor_new(c->scratch, &r->remote, moe_result_dtype(c), t->hidden_QH.dim[0], moe_width(m->model));
}

Err moe_local_rows(const Moe *m, Ctx *c, const MoeRows *t, MovedRows *r)
{
    r->local = r->remote;
    if (!moe_dispatcher(m, c)->remote) return ERR_OK;
    return tensor_new(c->scratch, &r->local, c->dtype, t->out_PL.dim[0], moe_width(m->model));
}
