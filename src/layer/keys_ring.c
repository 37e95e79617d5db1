/*
 * Keys that come part by part, in the order of positions, each from the rank that has it: where all layouts have the
 * same bits, and where sequences pass in slices (else keys_rotate.c). While a part is worked on the next one travels:
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
 * its owner keeps the sum. Ranks that see none of a part add zeros to its tree, as masked leaves do.
 */
#include <string.h>

#include "layer/keys.h"

Ring ring_of(const KeyWalk *w)
{
    const Ctx *c = w->c;
    const Tensor k = w->own[0], v = w->own[1];
    Ring r = { .group = w->plan->ranks,
               .parts = 2 * w->plan->ranks->size,
               .rank = w->plan->ranks->rank,
               .window = w->window,
               .first = w->slice * slice_length(c),
               .behind = (c->slices.at - w->slice) * slice_length(c),
               .dtype = k.dtype };
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

bool ring_sees(const Ring *r, int rank, int part)
{
    for (int i = 0; i < 2; i++) {
        const int queries = context_part(CONTEXT_ZIGZAG, r->parts, rank, i);
        /* from the first query to the last key */
        const int64_t least = r->behind + (queries - part - 1) * r->length + 1;
        if ((r->behind || queries >= part) && (!r->window || least < r->window)) return true;
    }
    return false;
}

Tensor ring_half(const Ring *r, Tensor parts, int row, int half)
{
    const Tensor part = tensor_row_slice(parts, row, 1), keys = tensor_view(part.data, parts.dtype, 4, r->half[0]);
    const int64_t at = half * tensor_bytes(keys);
    return tensor_view((void *)((uintptr_t)part.data + (uintptr_t)at), parts.dtype, 4, r->half[half]);
}

Err ring_pack(const KeyWalk *w, Tensor parts)
{
    for (int i = 0; i < 2; i++)
        for (int half = 0; half < 2; half++)
            TRY(context_move_part(w->c, w->kv[half], ring_half(&w->ring, parts, i, half), i, false));
    return ERR_OK;
}

void ring_put(KeyWalk *w, int part, Tensor parts, int row)
{
    const Ring *r = &w->ring;
    w->at.kv[0] = ring_half(r, parts, row, 0);
    w->at.kv[1] = ring_half(r, parts, row, 1);
    w->at.span = spans_run(r->first + part * r->length, r->length);
    w->at.part = part;
    w->at.seen = ring_sees(r, r->rank, part);
}

/* ---- in the order of positions: w->held is own parts, and those that arrive, in turns ---- */

/* Starts the exchange of a part: its owner sends it to all that see it. */
static Err post(KeyWalk *w, int part)
{
    const Ring *r = &w->ring;
    Comm *cp = r->group;
    CommMessage m[COMM_MESSAGES_MAX];
    const int owner = context_owner(CONTEXT_ZIGZAG, r->parts, part);
    int count = 0;
    w->moving = false;
    if (part == r->parts || (r->rank != owner && !ring_sees(r, r->rank, part))) return ERR_OK;
    ASSERT(cp->size <= COMM_MESSAGES_MAX + 1);
    for (int peer = 0; peer < cp->size; peer++) {
        const bool send = r->rank == owner && peer != owner && ring_sees(r, peer, part);
        if (!send && (r->rank == owner || peer != owner)) continue;
        const Tensor moved = tensor_row_slice(w->held[!send], send ? part != owner : part % 2, 1);
        m[count++] = (CommMessage){ .send = send,
                                    .peer = peer,
                                    .data = moved.data,
                                    .bytes = tensor_bytes(moved),
                                    .what = { .kind = MESSAGE_KEYS, .stage = (uint16_t)part } };
    }
    w->moving = count > 0;
    return count ? comm_exchange(cp, w->c->s, m, count, &cp->pending) : ERR_OK;
}

Err position_open(KeyWalk *w)
{
    w->ring = ring_of(w);
    w->blocks = w->ring.parts;
    for (int i = 0; i < 2; i++)
        TRY(tensor_new(w->c->scratch, &w->held[i], w->ring.dtype, 2, ring_part_count(&w->ring)));
    TRY(ring_pack(w, w->held[0]));
    return post(w, 0);
}

Err position_next(KeyWalk *w, int part)
{
    const Ring *r = &w->ring;
    const bool own = context_owner(CONTEXT_ZIGZAG, r->parts, part) == r->rank;
    if (w->moving) TRY(stream_wait(w->c->s, &r->group->pending));
    TRY(post(w, part + 1));
    ring_put(w, part, w->held[!own], own ? part != r->rank : part % 2);
    w->at.more |= part != context_part(CONTEXT_ZIGZAG, r->parts, r->rank,
                                       1); /* (of the slice at work the last one that is seen is its own) */
    return ERR_OK;
}
