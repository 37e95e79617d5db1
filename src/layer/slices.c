/*
 * Attention of sequences that pass in slices (pipeline/schedule.h). The queries of a slice see the keys of the slices
 * before it, which lie where those were kept, slot by slot: on one rank nothing is gathered or copied.
 *
 *   forward    slice i: keys of slices 0 .. i, one call each, as a ring's parts (context_ring.c)
 *   backward   slice i, from the last to the first: the same walk (slices_bwd.c)
 *
 * Ranks of cp. Each slice is cut over them as a whole sequence would be (reshard.c), and each keeps its own part of the
 * slice's keys. Those of one slice after another are exchanged again for every slice that sees them, so a rank has no
 * more than one slice of other ranks' keys, or some parts of one where they come part by part.
 */
#include "layer/slices.h"

/* ---- keys ---- */

static Err keep(Ctx *c, Tensor t, bool passes, Saved *out)
{
    const Tensor from = t;
    if (passes) {
        TRY(tensor_alloc(&c->slot->region[REGION_I], &t, from.dtype, from.ndim, from.dim));
        TRY(device_copy(c->s, t.data, from.data, tensor_bytes(from)));
    }
    *out = saved_of(c, REGION_I, t);
    return ERR_OK;
}

Err slice_keep_keys(Ctx *c, Tensor k, Tensor v, bool pass)
{
    if (c->slice + 1 >= c->slice_count) return ERR_OK; /* no later slice reads them */
    SliceKeys *kept = &c->slot->keys[c->layer];
    if (kept->k.ndim) return ERR_OK; /* (they are made again for this slice's backward) */
    TRY(keep(c, k, pass, &kept->k));
    return keep(c, v, pass, &kept->v);
}

static Err all_positions(Ctx *c, Comm *ranks, Tensor *t)
{
    return ranks ? context_gather(c, CONTEXT_ZIGZAG, ranks, t) : ERR_OK;
}

Err slice_keys(Ctx *c, const KeyPlan *p, int s, Tensor *k, Tensor *v)
{
    if (s < c->slice) {
        const Slot *slot = c->slices[s];
        *k = save_in(slot, slot->keys[c->layer].k);
        *v = save_in(slot, slot->keys[c->layer].v);
        TRY(reshard_kept(c, p, k));
        TRY(reshard_kept(c, p, v));
    }
    if (p->parts) return ERR_OK;
    TRY(all_positions(c, p->ranks, k));
    return all_positions(c, p->ranks, v);
}

RingWalk slice_ring(const Ctx *c, Comm *ranks, int64_t window, int s, Tensor k, Tensor v)
{
    RingWalk w = { .of = ring_of(ranks, k, v, window) };
    w.of.first = s * slice_length(c);
    w.of.behind = (c->slice - s) * slice_length(c);
    return w;
}

Spans slice_span(const Ctx *c, int s) { return spans_run(s * slice_length(c), slice_length(c)); }

/* (documents, which the device knows, leave no call out) */
bool slice_sees(const Ctx *c, int64_t window, int s)
{
    const int64_t nearest =
        (c->slice - s - 1) * slice_length(c) + 1; /* from the first query to the last key */
    return s == c->slice || !window || nearest < window;
}

/* The calls over the keys of slice s. */
static Err attend_slice(Ctx *c, const KeyPlan *p, int s, attention_fwd_args *a)
{
    ArenaMark mark = arena_mark(c->scratch);
    TRY(slice_keys(c, p, s, &a->k, &a->v));
    if (p->parts) {
        RingWalk w = slice_ring(c, p->ranks, a->window, s, a->k, a->v);
        TRY(ring_open(c, &w, a->k, a->v));
        TRY(ring_attend(c, &w, s < c->slice, a));
    } else {
        a->k_span = slice_span(c, s);
        a->unfinished = s < c->slice;
        TRY(op_attention_fwd(c->s, a));
        a->resumed = true;
    }
    arena_release(c->scratch, mark);
    return ERR_OK;
}

Err slice_attention(Ctx *c, const KeyPlan *p, attention_fwd_args a)
{
    ArenaMark mark = arena_mark(c->scratch);
    const Tensor o = a.o, k = a.k, v = a.v;
    if (c->slice > 0 || p->parts) TRY(several_calls(c, &a));
    for (int s = 0; s <= c->slice; s++) {
        if (!slice_sees(c, a.window, s)) continue;
        a.k = k, a.v = v;
        TRY(attend_slice(c, p, s, &a));
    }
    TRY(round_sum(c, o, a.o));
    arena_release(c->scratch, mark);
    return ERR_OK;
}
