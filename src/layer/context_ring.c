/*
 * Attention of shared sequences (context.c) over keys that come part by part, in the order of positions, each from the
 * rank that has it: where all layouts have the same bits, and all is fp32 (else context_rotate.c). While a part is
 * worked on the next one travels:
 *
 *   part          0    1    2    3    4    5    6    7      cp = 4: rank 1 has parts 1 and 6
 *   of rank       0    1    2    3    3    2    1    0
 *   rank 1 sees   <    own  <    <    <    <    own  -      < received; 7 is behind all its queries
 *
 * A part goes to the ranks that have a query which may see some of it, by causality and window; documents, which only
 * the device knows, leave out no message. A rank keeps four parts of keys and values, however many there are: its own
 * two, packed for sending, and those at work and on their way.
 *
 * Backward is the same walk. dk and dv of a part are summed over the ranks as soon as each has its share of them, and
 * its owner keeps the sum.
 *
 * Bits. Parts begin and end at multiples of the attention block, so the chain over a query's keys is that of one call
 * (ops.def, attention_fwd). Ranks that see none of a part add zeros to its tree, as masked leaves do.
 */
#include <string.h>

#include "layer/ring.h"

Ring ring_of(Comm *group, Tensor k, Tensor v, int64_t window)
{
    Ring r = {
        .group = group, .parts = 2 * group->size, .rank = group->rank, .window = window, .dtype = k.dtype
    };
    memcpy(r.half[0], k.dim, sizeof k.dim);
    memcpy(r.half[1], v.dim, sizeof v.dim);
    r.length = r.half[0][1] = r.half[1][1] = k.dim[1] / 2;
    return r;
}

int64_t ring_part_count(const Ring *r)
{
    const int64_t *k = r->half[0], *v = r->half[1];
    return k[0] * k[1] * k[2] * k[3] + v[0] * v[1] * v[2] * v[3];
}

int ring_owner(const Ring *r, int part) { return part < r->parts / 2 ? part : r->parts - 1 - part; }

bool ring_sees(const Ring *r, int rank, int part)
{
    const int queries[2] = { rank, r->parts - 1 - rank };
    for (int i = 0; i < 2; i++) {
        /* from the first query to the last key */
        const int64_t least = r->behind + (queries[i] - part - 1) * r->length + 1;
        if ((r->behind || queries[i] >= part) && (!r->window || least < r->window)) return true;
    }
    return false;
}

Spans ring_span(const Ring *r, int part) { return spans_run(r->first + part * r->length, r->length); }

Tensor ring_half(const Ring *r, Tensor parts, int row, int half)
{
    const Tensor part = tensor_row_slice(parts, row, 1),
                 keys = tensor_view(part.data, parts.dtype, 4, r->half[0]);
    const int64_t at = half * tensor_bytes(keys);
    return tensor_view((void *)((uintptr_t)part.data + (uintptr_t)at), parts.dtype, 4, r->half[half]);
}

Err ring_pack(Ctx *c, const Ring *r, Tensor k, Tensor v, Tensor parts)
{
    for (int i = 0; i < 2; i++) {
        TRY(context_move_part(c, k, ring_half(r, parts, i, 0), i, false));
        TRY(context_move_part(c, v, ring_half(r, parts, i, 1), i, false));
    }
    return ERR_OK;
}

/* Starts the exchange of a part: its owner sends it to all that see it. */
static Err post(Ctx *c, RingWalk *w, int part)
{
    const Ring *r = &w->of;
    Comm *cp = r->group;
    CommMessage m[COMM_MESSAGES_MAX];
    const int owner = ring_owner(r, part);
    int count = 0;
    if (part == r->parts || (r->rank != owner && !ring_sees(r, r->rank, part))) return ERR_OK;
    ASSERT(cp->size <= COMM_MESSAGES_MAX + 1);
    for (int peer = 0; peer < cp->size; peer++) {
        const bool send = r->rank == owner && peer != owner && ring_sees(r, peer, part);
        if (!send && (r->rank == owner || peer != owner)) continue;
        const Tensor from =
            send ? ring_half(r, w->own, part != owner, 0) : ring_half(r, w->arriving, part % 2, 0);
        m[count++] = (CommMessage){ .send = send,
                                    .peer = peer,
                                    .data = from.data,
                                    .bytes = tensor_bytes(w->own) / 2,
                                    .what = { .kind = MESSAGE_KEYS, .stage = (uint16_t)part } };
    }
    if (!count) return ERR_OK;
    w->moving = true;
    return comm_exchange(cp, c->s, m, count, &cp->pending);
}

Err ring_open(Ctx *c, RingWalk *w, Tensor k, Tensor v)
{
    const int64_t count = ring_part_count(&w->of);
    TRY(tensor_new(c->scratch, &w->own, k.dtype, 2, count));
    TRY(tensor_new(c->scratch, &w->arriving, k.dtype, 2, count));
    TRY(ring_pack(c, &w->of, k, v, w->own));
    return post(c, w, 0);
}

Err ring_advance(Ctx *c, RingWalk *w, int part, RingPart *out)
{
    const Ring *r = &w->of;
    const bool own = ring_owner(r, part) == r->rank;
    if (w->moving) TRY(stream_wait(c->s, &r->group->pending));
    w->moving = false;
    TRY(post(c, w, part + 1));
    const Tensor from = own ? w->own : w->arriving;
    const int pair = own ? part != r->rank : part % 2;
    *out = (RingPart){ .k = ring_half(r, from, pair, 0),
                       .v = ring_half(r, from, pair, 1),
                       .span = ring_span(r, part),
                       .seen = ring_sees(r, r->rank, part) };
    return ERR_OK;
}

Err ring_attend(Ctx *c, RingWalk *w, bool more, attention_fwd_args *a)
{
    const Ring *r = &w->of;
    const int last = r->parts - 1 - (r->behind ? 0 : r->rank); /* of the parts that this rank sees, or has */
    RingPart part;
    for (int i = 0; i <= last; i++) {
        TRY(ring_advance(c, w, i, &part));
        if (!part.seen) continue;
        a->k = part.k;
        a->v = part.v;
        a->k_span = part.span;
        a->unfinished = more || i < last;
        TRY(op_attention_fwd(c->s, a));
        a->resumed = true;
    }
    return ERR_OK;
}

Err context_ring(Ctx *c, Comm *group, attention_fwd_args a)
{
    if (!c->canon.exact) return context_rotate(c, group, a);
    ArenaMark mark = arena_mark(c->scratch);
    const Tensor o = a.o;
    RingWalk w = { .of = ring_of(group, a.k, a.v, a.window) };
    TRY(ring_open(c, &w, a.k, a.v));
    TRY(several_calls(c, &a));
    TRY(ring_attend(c, &w, false, &a));
    TRY(round_sum(c, o, a.o));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- backward ---- */

Err ring_sum(Ctx *c, const Ring *r, int part, Tensor d)
{
    bool others = false;
    for (int rank = 0; rank < r->parts / 2; rank++)
        others |= rank != ring_owner(r, part) && ring_sees(r, rank, part);
    return others ? reduce_values(c, r->group, d) : ERR_OK;
}

/* d [chunks * B, length, K, C], this rank's share of dk or dv of a part: summed over ranks, and by the owner over
 * chunks and into rows [B, T, K, C]. */
static Err sum_part(Ctx *c, const Ring *r, int part, Tensor d, Tensor rows)
{
    const int64_t chunks = d.dim[0] / rows.dim[0], n = rows.dim[0] * r->length;
    TRY(ring_sum(c, r, part, d));
    if (ring_owner(r, part) != r->rank) return ERR_OK;
    TRY(context_sum_chunks(c, tensor_reshape(d, chunks, n, d.dim[2] * d.dim[3])));
    const Tensor own =
        tensor_row_slice(tensor_reshape(d, d.dim[0], tensor_count(d) / d.dim[0]), 0, rows.dim[0]);
    return context_move_part(c, rows, own, part != r->rank, true);
}

Err context_ring_bwd(Ctx *c, Comm *group, attention_bwd_args a)
{
    if (!c->canon.exact) return context_rotate_bwd(c, group, a);
    ArenaMark mark = arena_mark(c->scratch);
    const Tensor dk = a.dk, dv = a.dv;
    const int64_t chunks = a.q.dim[2] / dk.dim[2] / a.chunk;
    RingWalk w = { .of = ring_of(group, a.k, a.v, a.window) };
    const Ring *r = &w.of;
    RingPart part;
    TRY(ring_open(c, &w, a.k, a.v));
    TRY(tensor_new(c->scratch, &a.dk, r->dtype, chunks * dk.dim[0], r->length, dk.dim[2], dk.dim[3]));
    TRY(tensor_new(c->scratch, &a.dv, r->dtype, chunks * dv.dim[0], r->length, dv.dim[2], dv.dim[3]));
    for (int i = 0; i < r->parts; i++) {
        TRY(ring_advance(c, &w, i, &part));
        if (part.seen) {
            a.k = part.k;
            a.v = part.v;
            a.k_span = part.span;
            TRY(op_attention_bwd(c->s, &a));
            a.resumed = true;
        } else {
            TRY(device_zero(c->s, a.dk.data, tensor_bytes(a.dk)));
            TRY(device_zero(c->s, a.dv.data, tensor_bytes(a.dv)));
        }
        TRY(sum_part(c, r, i, a.dk, dk));
        TRY(sum_part(c, r, i, a.dv, dv));
    }
    arena_release(c->scratch, mark);
    return ERR_OK;
}
