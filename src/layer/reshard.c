/*
 * The positions of a sequence that each rank has, and the heads of them. Where attention wants other ones than the
 * layers around it, tensors change on the way in and results on the way out. There are two changes, of which a plan
 * (ReshardPlan) has none, one or both.
 *
 * The cut. Outside of attention a rank may have the positions behind those of the rank before it. Under the causal mask
 * the last rank would have the most work, and the leaves of dk and dv, which are numbered zigzag, would not be a run on
 * any rank. So each rank gets zigzag parts, one from the front and one from the back:
 *
 *   rank        0      1      2      3
 *   in order    0 1    2 3    4 5    6 7     parts of a sequence, of 2 ranks equal ones
 *   zigzag      0 7    1 6    2 5    3 4
 *
 * A recurrence whose state passes from rank to rank wants the opposite: positions in order.
 *
 * Heads. Each rank gets all positions of an equal share of the heads, as DeepSpeed-Ulysses does, works as one rank
 * would, and gives back what it made:
 *
 *   q [B, T, H, C] of own positions <--> [B, nT, H/n, C] of all n ranks'; k and v likewise; o, dq, dk, dv the way back
 *
 * Where the group's positions are not the whole sequence, they are two parts of it, as those of one rank among fewer.
 * With more ranks than key heads, neighbours get the same one, each with some of its query heads. The rank whose
 * positions they are then adds what these ranks have for dk and dv.
 *
 * What has a number for each row and head stays as attention has it: lse [B, T, H] has as much room as [B, nT, H/n],
 * and only backward reads it. So does delta. The sinks' gradients, which are made of both, are of these heads on each
 * rank (context_head_rows).
 *
 * Bits. A rank has all queries of its heads, and of a shared key head whole chunks of them: the sum over the ranks that
 * share is the rest of the tree over chunks.
 */
#include "layer/reshard.h"

#include "base/int64.h"

/* ---- positions ---- */

Spans context_span(ContextCut cut, int64_t seq, int ranks, int rank)
{
    const int64_t part = seq / (2 * ranks);
    if (ranks == 1) return spans_whole(seq);
    if (cut == CONTEXT_CONTIGUOUS) return spans_run(2 * rank * part, 2 * part);
    return (Spans){ { rank * part, (2 * ranks - 1 - rank) * part }, { part, part } };
}

int64_t slice_length(const Ctx *c) { return c->batch->seq / max64(c->slices.count, 1); }

Spans slice_span(const Ctx *c, int s) { return spans_run(s * slice_length(c), slice_length(c)); }

Spans context_at_work(const Ctx *c, ContextCut cut, int ranks, int rank)
{
    const int64_t slice = slice_length(c);
    return spans_behind(context_span(cut, slice, ranks, rank), c->slices.at * slice);
}

int context_owner(ContextCut cut, int parts, int part)
{
    if (cut == CONTEXT_CONTIGUOUS) return part / 2;
    return part < parts / 2 ? part : parts - 1 - part;
}

int context_part(ContextCut cut, int parts, int rank, int which)
{
    if (cut == CONTEXT_CONTIGUOUS) return 2 * rank + which;
    return which ? parts - 1 - rank : rank;
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
                char *in_order = (char *)((uintptr_t)all + (uintptr_t)((b * seq + span.first[i]) * row_bytes));
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

Err context_sum_chunks(Ctx *c, Tensor x)
{
    const int64_t chunks = x.dim[0], n = x.dim[1];
    const Tensor rows = tensor_reshape(x, chunks * n, x.dim[2]);
    if (chunks == 1) return ERR_OK;
    return op(c->s, sum_parts, .y = tensor_row_slice(rows, 0, n), .x = rows, .parts = chunks);
}

/* ---- rows of other layers ---- */

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

/* ---- the cut ---- */

static Tensor slot(Tensor halves, int which)
{
    return tensor_view((char *)halves.data + which * (tensor_bytes(halves) / 2), halves.dtype, halves.ndim - 1,
                       halves.dim + 1);
}

static ContextCut other_cut(ContextCut cut) { return cut == CONTEXT_ZIGZAG ? CONTEXT_CONTIGUOUS : CONTEXT_ZIGZAG; }

/* Parts of this rank, in `have` [2, ...], to their owners in the other cut; and from those that have them, `get`. */
static Err exchange_parts(Ctx *c, ContextCut to, Tensor have, Tensor get)
{
    Comm *cp = &c->world->cp;
    const ContextCut from = other_cut(to);
    const int parts = 2 * cp->size;
    const int64_t bytes = tensor_bytes(have) / 2;
    CommMessage m[4];
    int count = 0;
    /* (ascending on both ends, for messages between two ranks have no other tag) */
    for (int i = 0; i < 4; i++) {
        const bool send = i < 2;
        const int part = context_part(send ? from : to, parts, cp->rank, i % 2);
        const int peer = context_owner(send ? to : from, parts, part);
        void *data = slot(send ? have : get, i % 2).data;
        if (peer != cp->rank) {
            m[count++] = (CommMessage){ .send = send, .peer = peer, .data = data, .bytes = bytes };
        } else if (send) {
            const int place = context_part(to, parts, cp->rank, 0) == part ? 0 : 1;
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

static Err cut_in(Ctx *c, const ReshardPlan *p, Tensor *t)
{
    const Tensor own = *t;
    (void)p;
    TRY(tensor_alloc(c->scratch, t, own.dtype, own.ndim, own.dim));
    return change_cut(c, other_cut(c->cut), own, *t);
}

static Err cut_out(Ctx *c, const ReshardPlan *p, Tensor x, Tensor own)
{
    (void)p;
    return change_cut(c, c->cut, x, own);
}

/* ---- heads ---- */

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
    return op(c->s, join_columns, .y = tensor_reshape(y, second, first, C), .x = tensor_reshape(x, first, second, C));
}

/* Ranks that get the same of x's heads. */
static int64_t copies_of(const Comm *group, Tensor x)
{
    const int64_t heads = x.dim[2];
    return heads < group->size ? group->size / heads : 1;
}

/* How the positions of the ranks that exchange heads are cut over them. */
static ContextCut group_cut(const Ctx *c, const ReshardPlan *p) { return p->cut ? other_cut(c->cut) : c->cut; }

static Err heads_in(Ctx *c, const ReshardPlan *p, Tensor *x)
{
    Comm *group = p->heads;
    const int64_t n = group->size, B = x->dim[0], T = x->dim[1], copies = copies_of(group, *x);
    const Tensor own = *x;
    Tensor apart, ranks;
    TRY(tensor_new(c->scratch, x, own.dtype, B, n * T, own.dim[2] * copies / n, own.dim[3]));
    ArenaMark mark = arena_mark(c->scratch);
    TRY(tensor_new(c->scratch, &apart, own.dtype, tensor_count(own)));
    TRY(tensor_new(c->scratch, &ranks, own.dtype, n, tensor_count(own) * copies / n));
    TRY(swap_dims(c, own, apart, B * T, n / copies));
    TRY(exchange_slices(c, group, apart, ranks, copies));
    TRY(context_move(c, group_cut(c, p), group->size, ranks, *x, false));
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

/* own = x, summed over the ranks that have the same heads. */
static Err heads_out(Ctx *c, const ReshardPlan *p, Tensor x, Tensor own)
{
    Comm *group = p->heads;
    const int64_t n = group->size, N = own.dim[0] * own.dim[1], copies = copies_of(group, own);
    ArenaMark mark = arena_mark(c->scratch);
    Tensor apart, ranks;
    TRY(tensor_new(c->scratch, &apart, own.dtype, n, tensor_count(x) / n));
    TRY(tensor_new(c->scratch, &ranks, own.dtype, n, tensor_count(x) / n));
    TRY(context_move(c, group_cut(c, p), group->size, ranks, x, true));
    TRY(exchange_slices(c, group, ranks, apart, 1));
    TRY(sum_copies(c, apart, N, copies));
    TRY(swap_dims(c, tensor_row_slice(apart, 0, n / copies), own, n / copies, N));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* First positions of the documents of all the group's positions. */
static Err heads_documents(Ctx *c, const ReshardPlan *p, Tensor *doc)
{
    const int64_t B = doc->dim[0], T = doc->dim[1];
    *doc = tensor_reshape(*doc, B, T, 1, 1);
    TRY(context_gather(c, group_cut(c, p), p->heads, doc));
    *doc = tensor_reshape(*doc, B, T * p->heads->size);
    return ERR_OK;
}

/* ---- one change after the other ---- */

typedef struct {
    Err (*in)(Ctx *c, const ReshardPlan *p, Tensor *t);
    Err (*documents)(Ctx *c, const ReshardPlan *p, Tensor *doc);
    Err (*out)(Ctx *c, const ReshardPlan *p, Tensor x, Tensor own);
} Change;

static const Change changes[] = { { cut_in, cut_in, cut_out }, { heads_in, heads_documents, heads_out } };

static bool is_made(const ReshardPlan *p, int change) { return change == 0 ? p->cut : p->heads != NULL; }

/* Memory for result i of the positions and heads of in[i]. */
static Err result_alloc(Ctx *c, const Reshard *r, int i)
{
    const Tensor like = *r->in[i], own = *r->out[i];
    return tensor_new(c->scratch, r->out[i], own.dtype, like.dim[0], like.dim[1], like.dim[2], own.dim[3]);
}

Err reshard_in(Ctx *c, const ReshardPlan *p, Reshard *r)
{
    for (int k = 0; k < 2; k++) {
        if (!is_made(p, k)) continue;
        for (int i = 0; i < 5 && r->in[i]; i++) TRY(changes[k].in(c, p, r->in[i]));
        if (r->doc->data) TRY(changes[k].documents(c, p, r->doc));
        for (int i = 0; i < 3 && r->out[i]; i++) {
            r->own[k][i] = *r->out[i];
            TRY(result_alloc(c, r, i));
        }
    }
    return ERR_OK;
}

Err reshard_out(Ctx *c, const ReshardPlan *p, Reshard *r)
{
    for (int k = 1; k >= 0; k--)
        for (int i = 0; i < 3 && r->out[i] && is_made(p, k); i++) {
            TRY(changes[k].out(c, p, *r->out[i], r->own[k][i]));
            *r->out[i] = r->own[k][i];
        }
    return ERR_OK;
}

Err reshard_kept(Ctx *c, const ReshardPlan *p, Tensor *t)
{
    for (int k = 0; k < 2; k++)
        if (is_made(p, k)) TRY(changes[k].in(c, p, t));
    return ERR_OK;
}
