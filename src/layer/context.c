/*
 * Attention of sequences that several ranks share (context parallelism; docs/context.md has the picture).
 *
 * A rank of cp has two parts of each sequence, one from the front and one from the back, so that all have the same
 * work under the causal mask (where sequences are cut in order, it has them for attention alone: reshard.c, which
 * also exchanges positions for heads). Its queries need the keys of all ranks. Here they are gathered; context_ring.c
 * takes them part by part:
 *
 *   forward    k, v of own positions --all-gather--> of all, in order; attention as on one rank, with few queries
 *   backward   k, v gathered again; dq is whole; dk, dv of all positions, from own queries --reduce-scatter--> of own
 *
 * Bits. A query's row sees its keys in ascending order, whoever holds them. The leaves of dk and dv, numbered zigzag,
 * are an aligned run on each rank (cpu/attention_bwd.c), and the sum over ranks is the rest of their tree; where a rank
 * has several chunks of query heads for a key head the tree over leaves is the inner one, so each chunk's dk and dv are
 * summed over ranks before chunks are.
 */
#include "base/int64.h"
#include "layer/keys.h"

/* ---- the plan ---- */

KeyPlan key_plan(const Ctx *c)
{
    World *w = c->world;
    const bool in_order = c->cut == CONTEXT_CONTIGUOUS;
    const KeyPlan ways[] = {
        [CONTEXT_ALLGATHER] = { .cut = in_order, .ranks = &w->cp },
        [CONTEXT_RING] = { .cut = in_order, .ranks = &w->cp, .parts = true },
        [CONTEXT_A2A] = { .heads = &w->cp }, /* (with all positions of some heads there is no cut) */
        [CONTEXT_HIERARCHICAL] = { .cut = in_order,
                                   .heads = &w->cp_heads,
                                   .ranks = &w->cp_ring,
                                   .parts = true },
    };
    KeyPlan p = { .cut = false };
    if (w->cp.size > 1) p = ways[c->context];
    if (p.ranks && p.ranks->size == 1) p.ranks = NULL;
    p.parts &= p.ranks != NULL;
    return p;
}

HeadRows context_head_rows(const Ctx *c, int64_t rows, int64_t heads)
{
    const Comm *group = key_plan(c).heads;
    if (!group) return (HeadRows){ rows, 0, heads };
    return (HeadRows){ rows * group->size, heads / group->size * group->rank, heads / group->size };
}

/* The positions of this rank's queries, and of its keys of the slice at work. */
static Spans span_of(const Ctx *c, const KeyPlan *p)
{
    return context_at_work(c, CONTEXT_ZIGZAG, p->ranks ? p->ranks->size : 1, p->ranks ? p->ranks->rank : 0);
}

static Tensor per_head(Tensor t, Tensor q) { return tensor_reshape(t, q.dim[0], q.dim[1], q.dim[2]); }

/* Of those that the exchange is between. */
static int64_t first_head(const KeyPlan *p, Tensor q) { return p->heads ? q.dim[2] * p->heads->rank : 0; }

/* The sinks of this rank's share of the heads. */
static Tensor own_sinks(const KeyPlan *p, Tensor sink)
{
    if (!p->heads || !sink.data) return sink;
    const int64_t heads = sink.dim[0] / p->heads->size;
    return tensor_row_slice(sink, p->heads->rank * heads, heads);
}

static Err gathered(Ctx *c, attention_fwd_args a)
{
    ArenaMark mark = arena_mark(c->scratch);
    TRY(context_gather(c, CONTEXT_ZIGZAG, &c->world->cp, &a.k));
    TRY(context_gather(c, CONTEXT_ZIGZAG, &c->world->cp, &a.v));
    a.k_span = spans_whole(c->batch->seq);
    TRY(op_attention_fwd(c->s, &a));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Attention of the positions and heads that the plan has left this rank. */
static Err attend(Ctx *c, const KeyPlan *p, attention_fwd_args a)
{
    if (c->slice_count > 1) return slice_attention(c, p, a);
    if (!p->ranks) return op_attention_fwd(c->s, &a);
    return p->parts ? context_ring(c, p->ranks, a) : gathered(c, a);
}

Err context_attention(Ctx *c, attention_fwd_args a)
{
    ArenaMark mark = arena_mark(c->scratch);
    const KeyPlan p = key_plan(c);
    Reshard r = { .in = { &a.q, &a.k, &a.v }, .doc = &a.doc, .out = { &a.o } };
    TRY(reshard_in(c, &p, &r));
    a.lse = per_head(a.lse, a.q);
    if (p.cut || p.heads) a.q_span = a.k_span = span_of(c, &p);
    a.head0 += first_head(&p, a.q);
    a.sink = own_sinks(&p, a.sink);
    TRY(attend(c, &p, a));
    TRY(reshard_out(c, &p, &r));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- backward ---- */

/* own [B, T, K, C] = the sum over ranks, and over chunks, of this rank's positions of all [chunks * B, seq, K, C]. */
static Err scatter_positions(Ctx *c, Tensor all, Tensor own)
{
    const int64_t N = own.dim[0] * own.dim[1], columns = own.dim[2] * own.dim[3];
    const int64_t chunks = all.dim[0] / own.dim[0];
    ArenaMark mark = arena_mark(c->scratch);
    Tensor ranks, sums = tensor_reshape(own, 1, N, columns);
    if (chunks > 1) TRY(tensor_new(c->scratch, &sums, own.dtype, chunks, N, columns));
    TRY(tensor_new(c->scratch, &ranks, own.dtype, c->world->cp.size * chunks, N, columns));
    TRY(context_move(c, CONTEXT_ZIGZAG, c->world->cp.size, ranks, all, true));
    TRY(reduce_scatter_values(c, &c->world->cp, ranks, sums));
    TRY(context_sum_chunks(c, sums));
    if (chunks > 1) TRY(device_copy(c->s, own.data, sums.data, tensor_bytes(own)));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

static Err gathered_bwd(Ctx *c, attention_bwd_args a)
{
    ArenaMark mark = arena_mark(c->scratch);
    const Tensor dk = a.dk, dv = a.dv;
    const int64_t B = dk.dim[0], seq = c->batch->seq, K = dk.dim[2];
    const int64_t chunks = a.q.dim[2] / K / a.chunk;
    TRY(context_gather(c, CONTEXT_ZIGZAG, &c->world->cp, &a.k));
    TRY(context_gather(c, CONTEXT_ZIGZAG, &c->world->cp, &a.v));
    TRY(tensor_new(c->scratch, &a.dk, dk.dtype, chunks * B, seq, K, dk.dim[3]));
    TRY(tensor_new(c->scratch, &a.dv, dv.dtype, chunks * B, seq, K, dv.dim[3]));
    a.k_span = spans_whole(seq);
    TRY(op_attention_bwd(c->s, &a));
    TRY(scatter_positions(c, a.dk, dk));
    TRY(scatter_positions(c, a.dv, dv));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

static Err attend_bwd(Ctx *c, const KeyPlan *p, attention_bwd_args a)
{
    if (c->slice_count > 1) return slice_attention_bwd(c, p, a);
    if (!p->ranks) return op_attention_bwd(c->s, &a);
    return p->parts ? context_ring_bwd(c, p->ranks, a) : gathered_bwd(c, a);
}

Err context_attention_bwd(Ctx *c, attention_bwd_args a)
{
    ArenaMark mark = arena_mark(c->scratch);
    const KeyPlan p = key_plan(c);
    Reshard r = { .in = { &a.q, &a.k, &a.v, &a.o, &a.go }, .doc = &a.doc, .out = { &a.dq, &a.dk, &a.dv } };
    TRY(reshard_in(c, &p, &r));
    a.chunk = min64(a.chunk, a.q.dim[2] / a.k.dim[2]);
    a.lse = per_head(a.lse, a.q);
    a.delta = per_head(a.delta, a.q);
    if (p.cut || p.heads) a.q_span = a.k_span = span_of(c, &p);
    a.head0 += first_head(&p, a.q);
    TRY(attend_bwd(c, &p, a));
    TRY(reshard_out(c, &p, &r));
    arena_release(c->scratch, mark);
    return ERR_OK;
}
