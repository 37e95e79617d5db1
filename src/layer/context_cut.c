/*
 * Attention of shared sequences (context.c) that are cut in order: a rank has the positions behind those of the rank
 * before it. Under the causal mask the last rank would have the most work, and the leaves of dk and dv, which are
 * numbered zigzag, would not be a run on any rank. So each rank gets zigzag parts for attention:
 *
 *   rank        0      1      2      3
 *   in order    0 1    2 3    4 5    6 7     parts of a sequence, of 2 ranks equal ones
 *   zigzag      0 7    1 6    2 5    3 4
 *
 *   forward     q, k, v --> zigzag, attention, --> o in order
 *   backward    q, k, v, o, do --> zigzag, attention, --> dq, dk, dv in order
 *
 * The log-sum-exp stays zigzag: only backward reads it.
 */
#include "layer/internal.h"

static int owner_of(ContextCut cut, int parts, int part)
{
    if (cut == CONTEXT_CONTIGUOUS) return part / 2;
    return part < parts / 2 ? part : parts - 1 - part;
}

/* The first and the second part of a rank. */
static int part_of(ContextCut cut, int parts, int rank, int which)
{
    if (cut == CONTEXT_CONTIGUOUS) return 2 * rank + which;
    return which ? parts - 1 - rank : rank;
}

static Tensor slot(Tensor halves, int which)
{
    return tensor_view((char *)halves.data + which * (tensor_bytes(halves) / 2), halves.dtype,
                       halves.ndim - 1, halves.dim + 1);
}

/* Parts of this rank, in `have` [2, ...], to their owners in the other cut; and from those that have them, `get`. */
static Err exchange_parts(Ctx *c, ContextCut to, Tensor have, Tensor get)
{
    Comm *cp = &c->world->cp;
    const ContextCut from = to == CONTEXT_ZIGZAG ? CONTEXT_CONTIGUOUS : CONTEXT_ZIGZAG;
    const int parts = 2 * cp->size;
    const int64_t bytes = tensor_bytes(have) / 2;
    CommMessage m[4];
    int count = 0;
    /* (ascending on both ends, for messages between two ranks have no other tag) */
    for (int i = 0; i < 4; i++) {
        const bool send = i < 2;
        const int part = part_of(send ? from : to, parts, cp->rank, i % 2);
        const int peer = owner_of(send ? to : from, parts, part);
        void *data = slot(send ? have : get, i % 2).data;
        if (peer != cp->rank) {
            m[count++] = (CommMessage){ .send = send, .peer = peer, .data = data, .bytes = bytes };
        } else if (send) {
            const int place = part_of(to, parts, cp->rank, 0) == part ? 0 : 1;
            TRY(device_copy(c->s, slot(get, place).data, data, bytes));
        }
    }
    return count ? comm_exchange(cp, c->s, m, count, NULL) : ERR_OK;
}

/* x [B, T, ...] of this rank's positions in one cut, y in the other, `to`. */
static Err change_cut(Ctx *c, ContextCut to, Tensor x, Tensor y)
{
    ArenaMark mark = arena_mark(c->scratch);
    const int64_t B = x.dim[0], half = x.dim[1] / 2, columns = tensor_count(x) / (B * x.dim[1]);
    Tensor have, get;
    TRY(tensor_new(c->scratch, &have, x.dtype, 2, B, half, columns));
    TRY(tensor_new(c->scratch, &get, x.dtype, 2, B, half, columns));
    for (int i = 0; i < 2; i++) TRY(context_move_part(c, x, slot(have, i), i, false));
    TRY(exchange_parts(c, to, have, get));
    for (int i = 0; i < 2; i++) TRY(context_move_part(c, y, slot(get, i), i, true));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

Err context_to_zigzag(Ctx *c, Tensor *t)
{
    const Tensor in_order = *t;
    if (!t->data) return ERR_OK;
    TRY(tensor_alloc(c->scratch, t, in_order.dtype, in_order.ndim, in_order.dim));
    return change_cut(c, CONTEXT_ZIGZAG, in_order, *t);
}

static Spans zigzag_span(const Ctx *c)
{
    return context_at_work(c, CONTEXT_ZIGZAG, c->world->cp.size, c->world->cp.rank);
}

Err context_zigzag(Ctx *c, attention_fwd_args a)
{
    ArenaMark mark = arena_mark(c->scratch);
    const Tensor o = a.o;
    Tensor *const in[] = { &a.q, &a.k, &a.v, &a.doc };
    for (int i = 0; i < 4; i++) TRY(context_to_zigzag(c, in[i]));
    TRY(tensor_alloc(c->scratch, &a.o, o.dtype, o.ndim, o.dim));
    a.q_span = a.k_span = zigzag_span(c);
    TRY(context_attend(c, a));
    TRY(change_cut(c, CONTEXT_CONTIGUOUS, a.o, o));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

Err context_zigzag_bwd(Ctx *c, attention_bwd_args a)
{
    ArenaMark mark = arena_mark(c->scratch);
    const Tensor own[3] = { a.dq, a.dk, a.dv };
    Tensor *const in[] = { &a.q, &a.k, &a.v, &a.o, &a.go, &a.doc }, *const out[3] = { &a.dq, &a.dk, &a.dv };
    for (int i = 0; i < 6; i++) TRY(context_to_zigzag(c, in[i]));
    for (int i = 0; i < 3; i++) TRY(tensor_alloc(c->scratch, out[i], own[i].dtype, own[i].ndim, own[i].dim));
    a.q_span = a.k_span = zigzag_span(c);
    TRY(context_attend_bwd(c, a));
    for (int i = 0; i < 3; i++) TRY(change_cut(c, CONTEXT_CONTIGUOUS, *out[i], own[i]));
    arena_release(c->scratch, mark);
    return ERR_OK;
}
