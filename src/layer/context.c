/*
 * Attention of sequences that several ranks share (context parallelism; docs/context.md has the picture).
 *
 * A rank of cp has two parts of each sequence, one from the front and one from the back, so that all have the same
 * work under the causal mask (where sequences are cut in order, it has them for attention alone: context_cut.c). Its
 * queries need the keys of all ranks. Here they are gathered; context_ring.c takes them part by part, context_a2a.c
 * exchanges positions for heads:
 *
 *   forward    k, v of own positions --all-gather--> of all, in order; attention as on one rank, with few queries
 *   backward   k, v gathered again; dq is whole; dk, dv of all positions, from own queries --reduce-scatter--> of own
 *
 * Bits. A query's row sees its keys in ascending order, whoever holds them. The leaves of dk and dv, numbered zigzag,
 * are an aligned run on each rank (cpu/attention_bwd.c), and the sum over ranks is the rest of their tree; where a rank
 * has several chunks of query heads for a key head the tree over leaves is the inner one, so each chunk's dk and dv are
 * summed over ranks before chunks are.
 */
#include "layer/internal.h"

Spans context_span(ContextCut cut, int64_t seq, int ranks, int rank)
{
    const int64_t part = seq / (2 * ranks);
    if (ranks == 1) return spans_whole(seq);
    if (cut == CONTEXT_CONTIGUOUS) return spans_run(2 * rank * part, 2 * part);
    return (Spans){ { rank * part, (2 * ranks - 1 - rank) * part }, { part, part } };
}

Spans context_at_work(const Ctx *c, ContextCut cut, int ranks, int rank)
{
    const int64_t slice = c->batch->seq / (c->slice_count > 1 ? c->slice_count : 1);
    return spans_behind(context_span(cut, slice, ranks, rank), c->slice * slice);
}

Err context_move(Ctx *c, ContextCut cut, int ranks, Tensor x, Tensor whole, bool back)
{
    const int64_t samples = whole.dim[0], seq = whole.dim[1];
    const int64_t row_bytes = whole.dim[2] * whole.dim[3] * dtype_size(whole.dtype);
    char *at = x.data, *all = whole.data;
    for (int r = 0; r < ranks; r++)
        for (int64_t b = 0; b < samples; b++)
            for (int i = 0; i < 2; i++) {
                const Spans span = context_span(cut, seq, ranks, r);
                const int64_t bytes = span.count[i] * row_bytes;
                char *in_order =
                    (char *)((uintptr_t)all + (uintptr_t)((b * seq + span.first[i]) * row_bytes));
                TRY(device_copy(c->s, back ? at : in_order, back ? in_order : at, bytes));
                at = (char *)((uintptr_t)at + (uintptr_t)bytes);
            }
    return ERR_OK;
}

Err context_move_part(Ctx *c, Tensor rows, Tensor part, int which, bool back)
{
    const int64_t bytes = tensor_bytes(part) / part.dim[0];
    for (int64_t b = 0; b < part.dim[0]; b++) {
        void *whole = (void *)((uintptr_t)rows.data + (uintptr_t)((2 * b + which) * bytes));
        void *own = (void *)((uintptr_t)part.data + (uintptr_t)(b * bytes));
        TRY(device_copy(c->s, back ? whole : own, back ? own : whole, bytes));
    }
    return ERR_OK;
}

Err context_gather(Ctx *c, ContextCut cut, Comm *group, Tensor *t)
{
    const Tensor own = *t;
    Tensor ranks;
    TRY(tensor_new(c->scratch, t, own.dtype, own.dim[0], own.dim[1] * group->size, own.dim[2], own.dim[3]));
    ArenaMark mark = arena_mark(c->scratch);
    TRY(tensor_new(c->scratch, &ranks, own.dtype, group->size, tensor_count(own)));
    TRY(comm_all_gather(group, c->s, ranks, own, NULL));
    TRY(context_move(c, cut, group->size, ranks, *t, false));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

Err context_all_rows(Ctx *c, Tensor *rows)
{
    const Batch *b = c->batch;
    const int64_t columns = rows->dim[1];
    if (c->world->cp.size == 1) return ERR_OK;
    *rows = tensor_reshape(*rows, b->B, b->T, 1, columns);
    TRY(context_gather(c, c->cut, &c->world->cp, rows));
    *rows = tensor_reshape(*rows, b->B * b->seq, columns);
    return ERR_OK;
}

Err context_own_rows(Ctx *c, Tensor *rows)
{
    const Batch *b = c->batch;
    const Tensor all = *rows;
    if (c->world->cp.size == 1) return ERR_OK;
    TRY(tensor_new(c->scratch, rows, all.dtype, b->B * b->T, all.dim[1]));
    for (int64_t i = 0, at = 0; i < 2 * b->B; at += b->span.count[i++ % 2]) {
        const int64_t n = b->span.count[i % 2];
        const Tensor from = tensor_row_slice(all, i / 2 * b->seq + b->span.first[i % 2], n);
        TRY(device_copy(c->s, tensor_row_slice(*rows, at, n).data, from.data, tensor_bytes(from)));
    }
    return ERR_OK;
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

Err context_attend(Ctx *c, attention_fwd_args a)
{
    World *w = c->world;
    Comm *ring = w->cp_ring.size > 1 ? &w->cp_ring : NULL;
    const bool slices = c->slice_count > 1;
    switch (c->context) {
    case CONTEXT_RING: return slices ? slice_attention(c, &w->cp, a) : context_ring(c, &w->cp, a);
    case CONTEXT_A2A: return context_a2a(c, &w->cp, NULL, a);
    case CONTEXT_HIERARCHICAL: return context_a2a(c, &w->cp_heads, ring, a);
    default: return slices ? slice_attention(c, &w->cp, a) : gathered(c, a);
    }
}

/* (with all positions of some heads there is no cut) */
static bool attends_zigzag(const Ctx *c) { return c->cut == CONTEXT_CONTIGUOUS && c->context != CONTEXT_A2A; }

Err context_attention(Ctx *c, attention_fwd_args a)
{
    if (c->world->cp.size > 1) return attends_zigzag(c) ? context_zigzag(c, a) : context_attend(c, a);
    return c->slice_count > 1 ? slice_attention(c, NULL, a) : op_attention_fwd(c->s, &a);
}

Err context_earlier_keys(Ctx *c, Tensor *t)
{
    Comm *heads = context_heads(c);
    if (c->world->cp.size == 1) return ERR_OK;
    if (attends_zigzag(c)) TRY(context_to_zigzag(c, t));
    return heads ? context_to_heads(c, heads, t) : ERR_OK;
}

/* ---- backward ---- */

Err context_sum_chunks(Ctx *c, Tensor x)
{
    const int64_t chunks = x.dim[0], n = x.dim[1];
    const Tensor rows = tensor_reshape(x, chunks * n, x.dim[2]);
    if (chunks == 1) return ERR_OK;
    return op(c->s, sum_parts, .y = tensor_row_slice(rows, 0, n), .x = rows, .parts = chunks);
}

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

Err context_attend_bwd(Ctx *c, attention_bwd_args a)
{
    World *w = c->world;
    Comm *ring = w->cp_ring.size > 1 ? &w->cp_ring : NULL;
    const bool slices = c->slice_count > 1;
    switch (c->context) {
    case CONTEXT_RING: return slices ? slice_attention_bwd(c, &w->cp, a) : context_ring_bwd(c, &w->cp, a);
    case CONTEXT_A2A: return context_a2a_bwd(c, &w->cp, NULL, a);
    case CONTEXT_HIERARCHICAL: return context_a2a_bwd(c, &w->cp_heads, ring, a);
    default: return slices ? slice_attention_bwd(c, &w->cp, a) : gathered_bwd(c, a);
    }
}

Err context_attention_bwd(Ctx *c, attention_bwd_args a)
{
    if (c->world->cp.size > 1) return attends_zigzag(c) ? context_zigzag_bwd(c, a) : context_attend_bwd(c, a);
    return c->slice_count > 1 ? slice_attention_bwd(c, NULL, a) : op_attention_bwd(c->s, &a);
}
