/*
 * Attention over keys that come block by block. A layer's call becomes a plan, which is decided once; a change of who
 * has what (reshard.c); and a walk over blocks of keys, one call of the op for each, whoever has them:
 *
 *   one rank, whole sequences    its own keys: one block, the op itself
 *   ranks of cp, gathered        k, v of own positions --all-gather--> of all, in order: one block
 *   in a ring                    part by part, by position (keys_ring.c) or by arrival (keys_rotate.c)
 *   slices                       the same of slices 0 .. s, one after the other, for the queries of slice s
 *
 * Backward is the same walk. dq is whole behind it. dk and dv of other ranks' keys and of earlier slices go to their
 * owners (keys_sums.c; in the order of arrival keys_rotate.c).
 *
 * Slices. The queries of a slice see the keys of those before it, which lie where they were kept, slot by slot: on one
 * rank nothing is gathered or copied. Each slice is cut over the ranks of cp as a whole sequence would be, and each
 * rank keeps its own part of the slice's keys. They are exchanged again for every slice that sees them, so a rank has
 * no more than one slice of other ranks' keys, or some parts of one where they come part by part.
 *
 * Bits. A query's row sees its keys in ascending order, whoever holds them. Blocks begin and end at multiples of the
 * attention block, so the chain over a query's keys is that of one call (ops.def, attention_fwd).
 */
#include "base/int64.h"
#include "layer/keys.h"

/* ---- slices ---- */

Err slice_keep_keys(Ctx *c, Tensor k, Tensor v, bool pass)
{
    if (c->slices.at + 1 >= c->slices.count) return ERR_OK; /* no later slice reads them */
    SliceKeys *kept = c->slot->kept[c->block.layer];
    if (kept->k.ndim) return ERR_OK; /* (they are made again for this slice's backward) */
    TRY(save_for_slices(c, k, pass, &kept->k));
    return save_for_slices(c, v, pass, &kept->v);
}

/* May a query of the slice at work, on any rank, see a key of slice s? (Documents, which the device knows, leave no
 * call out.) */
static bool slice_sees(const Ctx *c, int64_t window, int s)
{
    const int64_t nearest = (c->slices.at - s - 1) * slice_length(c) + 1; /* from the first query to the last key */
    return s == c->slices.at || !window || nearest < window;
}

/* Those that this rank has kept, as the plan changes them. */
static Err earlier_keys(KeyWalk *w)
{
    const Slot *slot = w->c->slices.slots[w->slice];
    const SliceKeys *kept = slot->kept[w->c->block.layer];
    w->kv[0] = save_in(slot, kept->k);
    w->kv[1] = save_in(slot, kept->v);
    for (int i = 0; i < 2; i++) TRY(reshard_kept(w->c, &w->plan->change, &w->kv[i]));
    return ERR_OK;
}

/* ---- keys of a slice at once ---- */

static Err at_once_open(KeyWalk *w)
{
    for (int i = 0; i < 2 && w->plan->ranks; i++) TRY(context_gather(w->c, CONTEXT_ZIGZAG, w->plan->ranks, &w->kv[i]));
    return ERR_OK;
}

static Err at_once_next(KeyWalk *w, int i)
{
    (void)i;
    w->at.kv[0] = w->kv[0];
    w->at.kv[1] = w->kv[1];
    if (w->plan->ranks || w->slice < w->c->slices.at) w->at.span = slice_span(w->c, w->slice);
    return ERR_OK;
}

/* ---- the plan ---- */

enum { AT_ONCE, BY_POSITION, BY_ARRIVAL };

static const KeySource sources[] = {
    [AT_ONCE] = { false, at_once_open, at_once_next, sums_begin, sums_give, sums_finish },
    [BY_POSITION] = { true, position_open, position_next, sums_begin, sums_give, sums_finish },
    [BY_ARRIVAL] = { true, arrival_open, arrival_next, arrival_begin, arrival_give, arrival_finish },
};

KeyPlan key_plan(const Ctx *c)
{
    World *w = c->world;
    const bool cut = c->cut == CONTEXT_CONTIGUOUS;
    const KeySource *all = &sources[AT_ONCE];
    const KeySource *ring = &sources[c->canon.exact || c->slices.count > 1 ? BY_POSITION : BY_ARRIVAL];
    const KeyPlan ways[] = {
        [CONTEXT_ALLGATHER] = { { cut, NULL }, &w->cp, all },
        [CONTEXT_RING] = { { cut, NULL }, &w->cp, ring },
        [CONTEXT_A2A] = { { false, &w->cp }, NULL, all }, /* (all positions of some heads have no cut) */
        [CONTEXT_HIERARCHICAL] = { { cut, &w->cp_heads }, &w->cp_ring, ring },
    };
    KeyPlan p = { .source = all };
    if (w->cp.size > 1) p = ways[c->block.context];
    if (p.ranks && p.ranks->size > 1) return p;
    return (KeyPlan){ p.change, NULL, all };
}

Err slice_grads_init(const Ctx *c, SliceKeyShape shape, SliceGrads *g, Arena *state)
{
    const Comm *by_heads = key_plan(c).change.heads;
    const int64_t heads = max64(shape.heads * shape.chunks, by_heads ? by_heads->size : 1);
    const int64_t rows = c->batch->B * c->batch->T * heads;
    const int places = sums_places(c);
    TRY(tensor_new(state, &g->of[0], F32, places, rows * shape.k_cols));
    return tensor_new(state, &g->of[1], F32, places, rows * shape.v_cols);
}

HeadRows context_head_rows(const Ctx *c, int64_t rows, int64_t heads)
{
    const Comm *group = key_plan(c).change.heads;
    if (!group) return (HeadRows){ rows, 0, heads };
    return (HeadRows){ rows * group->size, heads / group->size * group->rank, heads / group->size };
}

/* The positions of this rank's queries, and of its keys of the slice at work; given: before any change. */
static Spans span_of(const Ctx *c, const KeyPlan *p, Spans given)
{
    if (!p->change.cut && !p->change.heads) return given;
    return context_at_work(c, CONTEXT_ZIGZAG, p->ranks ? p->ranks->size : 1, p->ranks ? p->ranks->rank : 0);
}

static Tensor per_head(Tensor t, Tensor q) { return tensor_reshape(t, q.dim[0], q.dim[1], q.dim[2]); }

/* The first of this rank's heads, among those that ranks exchange. */
static int64_t first_head(const ReshardPlan *p, Tensor q) { return p->heads ? q.dim[2] * p->heads->rank : 0; }

/* The sinks of this rank's share of the heads. */
static Tensor own_sinks(const ReshardPlan *p, Tensor sink)
{
    if (!p->heads || !sink.data) return sink;
    const int64_t heads = sink.dim[0] / p->heads->size;
    return tensor_row_slice(sink, p->heads->rank * heads, heads);
}

/* ---- the walk ---- */

static Err open_slice(KeyWalk *w)
{
    Ctx *c = w->c;
    w->kv[0] = w->own[0];
    w->kv[1] = w->own[1];
    w->block = 0;
    w->blocks = 1;
    w->mark = arena_mark(c->scratch);
    w->seen = slice_sees(c, w->window, w->slice);
    if (!w->seen) return ERR_OK;
    if (w->slice < c->slices.at) TRY(earlier_keys(w));
    return w->plan->source->open(w);
}

static bool keys_left(const KeyWalk *w) { return w->block + 1 < w->blocks || w->slice < w->c->slices.at; }

/* The next block is at work. A slice that is not seen is one block. */
static Err keys_next(KeyWalk *w)
{
    if (++w->block >= w->blocks) {
        if (w->slice >= 0) arena_release(w->c->scratch, w->mark);
        w->slice++;
        TRY(open_slice(w));
    }
    w->at = (KeyBlock){
        .kv = { w->own[0], w->own[1] }, .span = w->span, .part = -1, .seen = w->seen, .more = w->slice < w->c->slices.at
    };
    return w->seen ? w->plan->source->next(w, w->block) : ERR_OK;
}

/* State that attention keeps between calls, each with some of the keys. */
static Err several_calls(Ctx *c, attention_fwd_args *a)
{
    TRY(wide_sum(c, a->o, &a->o));
    TRY(tensor_new(c->scratch, &a->max, F32, a->lse.dim[0], a->lse.dim[1], a->lse.dim[2]));
    return tensor_new(c->scratch, &a->sum, F32, a->lse.dim[0], a->lse.dim[1], a->lse.dim[2]);
}

static Err forward(Ctx *c, const KeyPlan *p, attention_fwd_args a)
{
    ArenaMark mark = arena_mark(c->scratch);
    const Tensor o = a.o;
    KeyWalk w = { .c = c, .plan = p, .window = a.window, .own = { a.k, a.v }, .span = a.k_span, .slice = -1 };
    if (c->slices.at > 0 || p->source->in_parts) TRY(several_calls(c, &a));
    while (keys_left(&w)) {
        TRY(keys_next(&w));
        if (!w.at.seen) continue;
        a.k = w.at.kv[0];
        a.v = w.at.kv[1];
        a.k_span = w.at.span;
        a.unfinished = w.at.more;
        TRY(op_attention_fwd(c->s, &a));
        a.resumed = true;
    }
    TRY(round_sum(c, o, a.o));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* In exact runs what several ranks give to a key is not rounded before it is summed. */
static Err wide_keys(Ctx *c, bool several, attention_bwd_args *a)
{
    if (!c->canon.exact || !several) return ERR_OK;
    TRY(wide_sum(c, a->dk, &a->dk));
    return wide_sum(c, a->dv, &a->dv);
}

static Err round_keys(Ctx *c, const attention_bwd_args *a, Tensor dk, Tensor dv)
{
    TRY(round_sum(c, dk, a->dk));
    return round_sum(c, dv, a->dv);
}

static Err backward(Ctx *c, const KeyPlan *p, attention_bwd_args a)
{
    ArenaMark mark = arena_mark(c->scratch);
    const Tensor dq = a.dq, dk = a.dk, dv = a.dv;
    KeyWalk w = { .c = c, .plan = p, .window = a.window, .own = { a.k, a.v }, .span = a.k_span, .a = &a, .slice = -1 };
    if (c->slices.count > 1 || p->source->in_parts) TRY(wide_sum(c, dq, &a.dq));
    TRY(wide_keys(c, c->slices.count <= 1 && p->ranks, &a)); /* (sums of slices are in fp32 themselves) */
    TRY(p->source->begin(&w));
    while (keys_left(&w)) {
        TRY(keys_next(&w));
        TRY(p->source->give(&w));
        a.resumed |= w.at.seen;
    }
    arena_release(c->scratch, w.mark);
    TRY(p->source->finish(&w));
    TRY(round_sum(c, dq, a.dq));
    TRY(round_keys(c, &a, dk, dv));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- what layers call ---- */

Err context_attention(Ctx *c, attention_fwd_args a)
{
    ArenaMark mark = arena_mark(c->scratch);
    const KeyPlan p = key_plan(c);
    Reshard r = { .in = { &a.q, &a.k, &a.v }, .doc = &a.doc, .out = { &a.o } };
    TRY(reshard_in(c, &p.change, &r));
    a.lse = per_head(a.lse, a.q);
    a.q_span = span_of(c, &p, a.q_span);
    a.k_span = span_of(c, &p, a.k_span);
    a.head0 += first_head(&p.change, a.q);
    a.sink = own_sinks(&p.change, a.sink);
    if (a.logit_max.data) a.logit_max = tensor_row_slice(a.logit_max, a.head0, a.q.dim[2]);
    TRY(forward(c, &p, a));
    TRY(reshard_out(c, &p.change, &r));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

Err context_attention_bwd(Ctx *c, attention_bwd_args a)
{
    ArenaMark mark = arena_mark(c->scratch);
    const KeyPlan p = key_plan(c);
    const Tensor dk = a.dk, dv = a.dv;
    Reshard r = { .in = { &a.q, &a.k, &a.v, &a.o, &a.go }, .doc = &a.doc, .out = { &a.dq, &a.dk, &a.dv } };
    TRY(wide_keys(c, p.change.heads && a.k.dim[2] < p.change.heads->size, &a)); /* ranks then share key heads */
    TRY(reshard_in(c, &p.change, &r));
    a.chunk = min64(a.chunk, a.q.dim[2] / a.k.dim[2]);
    a.lse = per_head(a.lse, a.q);
    a.delta = per_head(a.delta, a.q);
    a.q_span = span_of(c, &p, a.q_span);
    a.k_span = span_of(c, &p, a.k_span);
    a.head0 += first_head(&p.change, a.q);
    TRY(backward(c, &p, a));
    TRY(reshard_out(c, &p.change, &r));
    TRY(round_keys(c, &a, dk, dv));
    arena_release(c->scratch, mark);
    return ERR_OK;
}
