/*
 * Attention of shared sequences (context.c) with positions exchanged for heads, as DeepSpeed-Ulysses does: each rank
 * gets all positions of an equal share of the heads, works as one rank would, and gives back what it made.
 *
 *   q [B, T, H, C] of own positions <--> [B, nT, H/n, C] of all n ranks'; k and v likewise; o, dq, dk, dv the way back
 *
 * The log-sum-exp stays with the heads: lse [B, T, H] has as much room as [B, nT, H/n], and only backward reads it. So
 * does delta; the sinks' gradients, which are made of both, are of these heads on each rank (context_head_rows).
 *
 * Where the group's positions are not the whole sequence, they are two parts of it, as those of one rank among fewer;
 * the ranks with the same heads then are a ring (context_ring.c).
 *
 * More ranks than key heads: neighbours get the same one, each with some of its query heads. Whose positions they are
 * then adds what these ranks have for dk and dv.
 *
 * Bits. A rank has all queries of its heads, and of a shared key head whole chunks of them: the sum over the ranks that
 * share is the rest of the tree over chunks.
 */
#include "layer/internal.h"

/* Rank i of the group gets slice i / copies of from, and puts the i-th rank's into slice i of to [n, ...]. */
static Err exchange_slices(Ctx *c, Comm *group, Tensor from, Tensor to, int64_t copies)
{
    CommMessage m[COMM_MESSAGES_MAX];
    const int64_t bytes = tensor_bytes(to) / group->size;
    int count = 0;
    ASSERT(2 * (group->size - 1) <= COMM_MESSAGES_MAX);
    for (int peer = 0; peer < group->size; peer++) {
        char *out = (char *)((uintptr_t)from.data + (uintptr_t)(peer / copies * bytes));
        char *in = (char *)((uintptr_t)to.data + (uintptr_t)(peer * bytes));
        if (peer == group->rank) TRY(device_copy(c->s, in, out, bytes));
        if (peer == group->rank) continue;
        m[count++] = (CommMessage){ .send = true, .peer = peer, .data = out, .bytes = bytes };
        m[count++] = (CommMessage){ .peer = peer, .data = in, .bytes = bytes };
    }
    return comm_exchange(group, c->s, m, count, NULL);
}

/* y [second, first, ...] = x [first, second, ...] */
static Err swap_dims(Ctx *c, Tensor x, Tensor y, int64_t first, int64_t second)
{
    const int64_t C = tensor_count(x) / (first * second);
    return op(c->s, join_columns, .y = tensor_reshape(y, second, first, C),
              .x = tensor_reshape(x, first, second, C));
}

/* Ranks that get the same of x's heads. */
static int64_t copies_of(const Comm *group, Tensor x)
{
    const int64_t heads = x.dim[2];
    return heads < group->size ? group->size / heads : 1;
}

/* How the group's positions are cut over its ranks. */
static ContextCut group_cut(const Ctx *c) { return c->context == CONTEXT_A2A ? c->cut : CONTEXT_ZIGZAG; }

Err context_to_heads(Ctx *c, Comm *group, Tensor *x)
{
    const int64_t n = group->size, B = x->dim[0], T = x->dim[1], copies = copies_of(group, *x);
    const Tensor own = *x;
    Tensor apart, ranks;
    TRY(tensor_new(c->scratch, x, own.dtype, B, n * T, own.dim[2] * copies / n, own.dim[3]));
    ArenaMark mark = arena_mark(c->scratch);
    TRY(tensor_new(c->scratch, &apart, own.dtype, tensor_count(own)));
    TRY(tensor_new(c->scratch, &ranks, own.dtype, n, tensor_count(own) * copies / n));
    TRY(swap_dims(c, own, apart, B * T, n / copies));
    TRY(exchange_slices(c, group, apart, ranks, copies));
    TRY(context_move(c, group_cut(c), group->size, ranks, *x, false));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* From slices of N rows, `copies` of each side by side, to one of each: their tree. */
static Err sum_copies(Ctx *c, Tensor slices, int64_t N, int64_t copies)
{
    const int64_t count = slices.dim[0] / copies;
    for (int64_t i = 0; i < count && copies > 1; i++) {
        const Tensor same = tensor_row_slice(slices, i * copies, copies), to = tensor_row_slice(slices, i, 1);
        TRY(context_sum_chunks(c, tensor_reshape(same, copies, N, slices.dim[1] / N)));
        if (i > 0) TRY(device_copy(c->s, to.data, same.data, tensor_bytes(to)));
    }
    return ERR_OK;
}

/* And back: own = x, summed over the ranks that have the same heads. */
static Err from_heads(Ctx *c, Comm *group, Tensor x, Tensor own)
{
    const int64_t n = group->size, N = own.dim[0] * own.dim[1], copies = copies_of(group, own);
    ArenaMark mark = arena_mark(c->scratch);
    Tensor apart, ranks;
    TRY(tensor_new(c->scratch, &apart, own.dtype, n, tensor_count(x) / n));
    TRY(tensor_new(c->scratch, &ranks, own.dtype, n, tensor_count(x) / n));
    TRY(context_move(c, group_cut(c), group->size, ranks, x, true));
    TRY(exchange_slices(c, group, ranks, apart, 1));
    TRY(sum_copies(c, apart, N, copies));
    TRY(swap_dims(c, tensor_row_slice(apart, 0, n / copies), own, n / copies, N));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* First positions of the documents of all positions, in scratch; nothing if they are not kept apart. */
static Err all_documents(Ctx *c, Comm *group, Tensor *doc)
{
    if (!doc->data) return ERR_OK;
    *doc = tensor_reshape(*doc, doc->dim[0], doc->dim[1], 1, 1);
    TRY(context_gather(c, group_cut(c), group, doc));
    *doc = tensor_reshape(*doc, doc->dim[0], doc->dim[1]);
    return ERR_OK;
}

static Tensor per_head(Tensor t, Tensor q) { return tensor_reshape(t, q.dim[0], q.dim[1], q.dim[2]); }

/* The sinks of this rank's share of the heads. */
static Tensor own_sinks(const Comm *group, Tensor sink)
{
    const int64_t heads = sink.dim[0] / group->size;
    return sink.data ? tensor_row_slice(sink, group->rank * heads, heads) : sink;
}

Comm *context_heads(const Ctx *c)
{
    World *w = c->world;
    if (w->cp.size == 1) return NULL;
    return c->context == CONTEXT_A2A ? &w->cp : c->context == CONTEXT_HIERARCHICAL ? &w->cp_heads : NULL;
}

HeadRows context_head_rows(const Ctx *c, int64_t rows, int64_t heads)
{
    const Comm *group = context_heads(c);
    if (!group) return (HeadRows){ rows, 0, heads };
    return (HeadRows){ rows * group->size, heads / group->size * group->rank, heads / group->size };
}

/* The positions of the whole group. */
static Spans group_span(const Ctx *c, const Comm *ring)
{
    return context_at_work(c, CONTEXT_ZIGZAG, ring ? ring->size : 1, ring ? ring->rank : 0);
}

/* Attention of the group's positions and this rank's share of the heads. */
static Err attend(Ctx *c, Comm *ring, attention_fwd_args a)
{
    if (c->slice_count > 1) return slice_attention(c, ring, a);
    return ring ? context_ring(c, ring, a) : op_attention_fwd(c->s, &a);
}

static Err attend_bwd(Ctx *c, Comm *ring, attention_bwd_args a)
{
    if (c->slice_count > 1) return slice_attention_bwd(c, ring, a);
    return ring ? context_ring_bwd(c, ring, a) : op_attention_bwd(c->s, &a);
}

Err context_a2a(Ctx *c, Comm *group, Comm *ring, attention_fwd_args a)
{
    ArenaMark mark = arena_mark(c->scratch);
    const Tensor o = a.o;
    TRY(context_to_heads(c, group, &a.q));
    TRY(context_to_heads(c, group, &a.k));
    TRY(context_to_heads(c, group, &a.v));
    TRY(all_documents(c, group, &a.doc));
    TRY(tensor_new(c->scratch, &a.o, o.dtype, a.q.dim[0], a.q.dim[1], a.q.dim[2], a.v.dim[3]));
    a.lse = per_head(a.lse, a.q);
    a.q_span = a.k_span = group_span(c, ring);
    a.head0 += a.q.dim[2] * group->rank;
    a.sink = own_sinks(group, a.sink);
    TRY(attend(c, ring, a));
    TRY(from_heads(c, group, a.o, o));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

Err context_a2a_bwd(Ctx *c, Comm *group, Comm *ring, attention_bwd_args a)
{
    ArenaMark mark = arena_mark(c->scratch);
    const Tensor own[3] = { a.dq, a.dk, a.dv };
    Tensor *const in[5] = { &a.q, &a.k, &a.v, &a.o, &a.go }, *const out[3] = { &a.dq, &a.dk, &a.dv };
    for (int i = 0; i < 5; i++) TRY(context_to_heads(c, group, in[i]));
    TRY(all_documents(c, group, &a.doc));
    for (int i = 0; i < 3; i++) TRY(tensor_alloc(c->scratch, out[i], own[i].dtype, 4, in[i]->dim));
    if (a.chunk > a.q.dim[2] / a.k.dim[2]) a.chunk = a.q.dim[2] / a.k.dim[2];
    a.lse = per_head(a.lse, a.q);
    a.delta = per_head(a.delta, a.q);
    a.q_span = a.k_span = group_span(c, ring);
    a.head0 += a.q.dim[2] * group->rank;
    TRY(attend_bwd(c, ring, a));
    for (int i = 0; i < 3; i++) TRY(from_heads(c, group, *out[i], own[i]));
    arena_release(c->scratch, mark);
    return ERR_OK;
}
