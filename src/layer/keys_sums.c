/*
 * Gradients of keys. A rank's queries give gradients to keys of other ranks and of earlier slices. Each gradient goes
 * to the rank that has the key, and waits for the slice that has it. Backward runs from the last slice to the first. dk
 * and dv of a slice's own keys are whole when it has run, because all slices that see these keys have run by then.
 *
 * In a whole sequence nothing waits: the op, or the sum over ranks, writes dk and dv themselves.
 *
 * Ranks of cp. A rank's queries give gradients to the keys of all ranks. Gathered keys have a reduce-scatter; a part of
 * a ring is summed over the ranks, and its owner takes the sum. The leaves of dk and dv, numbered zigzag, are an
 * aligned run on each rank (cpu/attention_bwd.c), and the sum over ranks is the rest of their tree. Where several
 * chunks of query heads read a key head, the tree over leaves is the inner one: each chunk's dk and dv are summed over
 * ranks first, then the chunks.
 *
 * Slices. dk and dv of a key are a tree over leaves of query positions, numbered 0, n-1, 1, n-2, ... (ops.def,
 * attention_bwd). Its first pairs are of the first and the last slice, the next ones of the second and the last but
 * one. With k slices of g leaves each, slices j and k-1-j share g pairs. These are a column, an aligned part of the
 * tree; there are k/2 columns. The table says which slices of a column see the keys of slice s, with . for none:
 *
 *   k = 4   column   slices        s = 0    s = 1    s = 2    s = 3
 *              0      0 and 3       both     3        3        3
 *              1      1 and 2       both     both     2        .
 *
 *   one        the other slice is masked, which adds +0: the slice's own tree over its leaves is the column's node
 *   both       the later slice runs first. Each of its leaves waits in a place of its own, to which the earlier slice
 *              adds its leaf of the same pair
 *
 * The gradients of a slice's keys thus wait in one place for each column of one, and in g places for each column of
 * both. When the slice itself has run, only the tree over pairs and columns is left. Where bits are not promised there
 * is one place, to which slices add. A stage has one set of places, because the slices of a micro-batch run backward
 * one after another (schedule.h).
 *
 * Slices and ranks. Ranks that have all positions of some heads (reshard.c) do the same with these. Of m ranks with
 * zigzag parts of a slice, rank r has the g/m pairs of a column that lie in its parts r and 2m-1-r of both slices:
 *
 *   m = 2   pairs of a column, in four runs    0    1    2    3
 *           of rank                            0    1    1    0
 *
 * A rank's queries give gradients to the keys of all ranks, so a leaf's place has room for m ranks' keys. A column of
 * one is summed over ranks at once, a column of both when it is whole. The first runs of all ranks are one half of the
 * column's tree, and the second runs the other half, in the opposite order, which adds the same numbers. So each half
 * is a tree over ranks, and each rank gets its own keys' part of it. Where keys come part by part, their gradients lie
 * part by part in a place with room for all ranks, else in order.
 */
#include "base/int64.h"
#include "layer/keys.h"

/* ---- places ---- */

/* How the places of a layer are numbered. */
typedef struct {
    int slices;
    int leaves; /* of a slice; 0: sums in any order */
} Places;

static Places places_of(const Ctx *c)
{
    const int64_t leaves = c->canon.exact && c->slices.count > 1 ? slice_length(c) / c->canon.query_leaf : 0;
    return (Places){ c->slices.count, (int)leaves };
}

static int column_of(const Places *p, int slice) { return (int)min64(slice, p->slices - 1 - slice); }

/* Do both slices of the column of slice j see the keys of slice s? */
static bool is_pair(const Places *p, int s, int j) { return column_of(p, j) >= s; }

/* Number of places of the keys of slice s. The gradients that s itself gives to a column of one need none. (Each of the
 * m ranks that share a slice has its part of the keys in every place. It has g/m leaves of a column of both, in m
 * places each.) */
static int place_count(const Places *p, int s)
{
    if (!p->leaves) return s + 1 < p->slices;
    const int alone = column_of(p, s), columns = p->slices / 2;
    return s < columns ? alone + (columns - s) * p->leaves : alone;
}

static int first_place(const Places *p, int s)
{
    int first = 0;
    for (int i = 0; i < s; i++) first += place_count(p, i);
    return first;
}

/* The place of the column's first pair; the others are behind it. */
static int place_at(const Places *p, int s, int column)
{
    return first_place(p, s) + (column < s ? column : s + (column - s) * p->leaves);
}

int sums_places(const Ctx *c)
{
    const Places p = places_of(c);
    return first_place(&p, p.slices);
}

/* `count` places of the layer at work. */
static SliceGrads grads_at(const Ctx *c, int place, int count)
{
    const SliceGrads *g = c->slices.grads[c->block.layer];
    return (SliceGrads){ { tensor_row_slice(g->of[0], place, count), tensor_row_slice(g->of[1], place, count) } };
}

/* ---- shapes ---- */

static int rank_count(const KeyWalk *w) { return w->plan->ranks ? w->plan->ranks->size : 1; }

/* A whole sequence: nothing waits. */
static bool is_whole(const KeyWalk *w) { return w->c->slices.count <= 1; }

/* Chunks of query heads that read a key head. The tree over leaves is the inner one. */
static int64_t chunks_of(const KeyWalk *w) { return w->a->q.dim[2] / w->a->k.dim[2] / w->a->chunk; }

/* `memory` as gradients of keys [B, positions, K, C], of each chunk. */
static Tensor shaped(const KeyWalk *w, Tensor memory, Tensor keys)
{
    return tensor_of(memory.data, memory.dtype, chunks_of(w) * keys.dim[0], keys.dim[1], keys.dim[2], keys.dim[3]);
}

static SliceGrads shaped_both(const KeyWalk *w, SliceGrads g, const Tensor keys[2])
{
    return (SliceGrads){ { shaped(w, g.of[0], keys[0]), shaped(w, g.of[1], keys[1]) } };
}

static Err grads_new(const KeyWalk *w, DType dtype, const Tensor keys[2], SliceGrads *out)
{
    for (int i = 0; i < 2; i++) {
        const Tensor t = shaped(w, (Tensor){ .dtype = dtype }, keys[i]);
        TRY(tensor_alloc(w->c->scratch, &out->of[i], dtype, t.ndim, t.dim));
    }
    return ERR_OK;
}

/* Some of this rank's queries, the same in each sample. */
typedef struct {
    int64_t first, count;
} Rows;

/* These rows of sample b of a tensor [B, T, ...], if there is one, as [1, count, ...]. */
static Tensor rows_of(Tensor t, int64_t b, Rows r)
{
    if (!t.data) return t;
    const int64_t columns = tensor_count(t) / (t.dim[0] * t.dim[1]), at = b * t.dim[1] + r.first;
    const int64_t offset = at * columns * dtype_size(t.dtype);
    t.data = (void *)((uintptr_t)t.data + (uintptr_t)offset);
    t.dim[0] = 1;
    t.dim[1] = r.count;
    if (t.ndim == 2) t.ld = r.count;
    return t;
}

/* Their positions. */
static Spans span_of_rows(Spans all, Rows q)
{
    for (int i = 0; i < 2; i++) {
        const int64_t skipped = min64(q.first, all.count[i]);
        all.first[i] += skipped;
        all.count[i] = min64(all.count[i] - skipped, q.count);
        q.first -= skipped;
        q.count -= all.count[i];
    }
    return all;
}

/* Gradients of sample b, which lie chunk by chunk: [B, chunks, positions, K, C]. */
static Tensor chunks_of_sample(const KeyWalk *w, Tensor all, int64_t b)
{
    const int64_t chunks = chunks_of(w), bytes = tensor_bytes(all) / all.dim[0] * chunks;
    void *own = (void *)((uintptr_t)all.data + (uintptr_t)(b * bytes));
    return tensor_of(own, all.dtype, chunks, all.dim[1], all.dim[2], all.dim[3]);
}

/* ---- what queries give to the keys at work ---- */

attention_bwd_args keys_bwd_args(const KeyWalk *w, Tensor dk, Tensor dv)
{
    attention_bwd_args a = *w->a;
    a.k = w->at.kv[0];
    a.v = w->at.kv[1];
    a.k_span = w->at.span;
    a.dk = dk;
    a.dv = dv;
    return a;
}

static Err attend_sample(const KeyWalk *w, int64_t b, Rows q, SliceGrads to)
{
    attention_bwd_args a = keys_bwd_args(w, chunks_of_sample(w, to.of[0], b), chunks_of_sample(w, to.of[1], b));
    Tensor *const of_queries[] = { &a.q, &a.go, &a.o, &a.dq, &a.lse, &a.delta, &a.doc };
    for (size_t i = 0; i < sizeof of_queries / sizeof *of_queries; i++) *of_queries[i] = rows_of(*of_queries[i], b, q);
    a.k = rows_of(a.k, b, (Rows){ 0, a.k.dim[1] });
    a.v = rows_of(a.v, b, (Rows){ 0, a.v.dim[1] });
    a.sample = tensor_row_slice(a.sample, b, 1);
    a.q_span = span_of_rows(a.q_span, q);
    return op_attention_bwd(w->c->s, &a);
}

/* Runs sample by sample, because some rows of several samples do not follow each other. In a whole sequence all rows
 * do; its gradients, to which no other call adds, are [chunks, B, ...]. */
static Err attend(const KeyWalk *w, Rows q, SliceGrads to)
{
    attention_bwd_args a = keys_bwd_args(w, to.of[0], to.of[1]);
    if (is_whole(w)) return op_attention_bwd(w->c->s, &a);
    for (int64_t b = 0; b < w->c->batch->B; b++) TRY(attend_sample(w, b, q, to));
    return ERR_OK;
}

/* sum += x, both dense and F32. */
static Err add_to(Ctx *c, Tensor sum, Tensor x)
{
    const int64_t T = c->batch->T / (c->world->cp.size > 1 ? 2 : 1); /* (there may be one part of a ring) */
    const int64_t columns = tensor_count(sum) / T;
    const Tensor y = tensor_reshape(sum, T, columns);
    return op(c->s, residual_fwd, .y = y, .residual = y, .x = tensor_reshape(x, T, columns),
              .position = tensor_row_slice(c->batch->position, 0, T),
              .sample = tensor_row_slice(c->batch->sample, 0, T), .dropout = (Dropout){ 0, 0, 1 });
}

/* sum = x, or += x; x may be of 16 bits. */
static Err take_in(Ctx *c, Tensor sum, Tensor x, bool add)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor wide = x;
    if (add && x.dtype != F32) TRY(tensor_new(c->scratch, &wide, F32, tensor_count(x)));
    if (x.dtype != F32) TRY(cast_values(c, add ? wide : sum, x));
    if (add) TRY(add_to(c, sum, wide));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Writes the gradients that rows q give to the keys at work to `to`, or adds them to it. */
static Err give_rows(const KeyWalk *w, Rows q, SliceGrads to, bool add)
{
    Ctx *c = w->c;
    /* (The keys' dtype would round each of several sums.) */
    const DType dtype = c->canon.exact ? F32 : w->a->k.dtype;
    const bool straight = !add && (to.of[0].dtype == dtype || is_whole(w));
    ArenaMark mark = arena_mark(c->scratch);
    SliceGrads made = to;
    if (!straight) TRY(grads_new(w, dtype, w->at.kv, &made));
    TRY(attend(w, q, made));
    for (int i = 0; i < 2 && !straight; i++) TRY(take_in(c, to.of[i], made.of[i], add));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Writes zeros: the slice that would be the first to write sees none of the keys. */
static Err give_nothing(const KeyWalk *w, SliceGrads to)
{
    TRY(device_zero(w->c->s, to.of[0].data, tensor_bytes(to.of[0])));
    return device_zero(w->c->s, to.of[1].data, tensor_bytes(to.of[1]));
}

/* The keys at work fill a place that has room for all ranks' keys, or, in a ring, one part of it. */
static SliceGrads of_keys(const KeyWalk *w, SliceGrads g)
{
    if (w->at.part < 0) return g;
    for (int i = 0; i < 2; i++) {
        const int64_t count = tensor_count(g.of[i]) / w->ring.parts;
        g.of[i] = tensor_row_slice(tensor_reshape(g.of[i], w->ring.parts, count), w->at.part, 1);
    }
    return g;
}

/* Gives to a column of both, leaf by leaf. Pair l has the l-th leaf of the earlier slice, and the l-th from the end of
 * the later one. */
static Err give_leaves(const KeyWalk *w, const Places *p)
{
    const Ctx *c = w->c;
    const int column = column_of(p, c->slices.at), first = place_at(p, w->slice, column), ranks = rank_count(w);
    const int leaves = p->leaves / ranks;
    const bool later = c->slices.at != column;
    const int64_t length = c->canon.query_leaf;
    for (int l = 0; l < leaves; l++) {
        const int leaf = later ? leaves - 1 - l : l;
        const SliceGrads to = of_keys(w, grads_at(c, first + l * ranks, ranks));
        if (w->at.seen) TRY(give_rows(w, (Rows){ leaf * length, length }, shaped_both(w, to, w->at.kv), !later));
        else if (later) TRY(give_nothing(w, to));
    }
    return ERR_OK;
}

/* ---- sums over ranks ---- */

/* own [samples, T, K, C] = the rows for own keys of the sum over ranks of all [samples, m T, K, C]. Both may
 * overlap. */
static Err scatter(const KeyWalk *w, Tensor all, Tensor own)
{
    Ctx *c = w->c;
    const int m = rank_count(w);
    ArenaMark mark = arena_mark(c->scratch);
    Tensor rows;
    TRY(tensor_new(c->scratch, &rows, all.dtype, m * own.dim[0], own.dim[1], own.dim[2], own.dim[3]));
    TRY(context_move(c, CONTEXT_ZIGZAG, m, rows, all, true));
    TRY(reduce_scatter_values(c, w->plan->ranks, rows, own));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* The same for an `all` that lies part by part. */
static Err scatter_parts(const KeyWalk *w, Tensor all, Tensor own)
{
    Ctx *c = w->c;
    const Comm *m = w->plan->ranks;
    const int parts = 2 * m->size;
    const Tensor flat = tensor_reshape(all, parts, tensor_count(all) / parts);
    ArenaMark mark = arena_mark(c->scratch);
    Tensor rows;
    TRY(tensor_alloc(c->scratch, &rows, F32, own.ndim, own.dim));
    TRY(reduce_values(c, w->plan->ranks, flat));
    for (int i = 0; i < 2; i++) {
        const Tensor part = tensor_row_slice(flat, context_part(CONTEXT_ZIGZAG, parts, m->rank, i), 1);
        TRY(context_move_part(c, rows, tensor_reshape(part, own.dim[0], own.dim[1] / 2, own.dim[2], own.dim[3]), i,
                              true));
    }
    TRY(device_copy(c->s, own.data, rows.data, tensor_bytes(rows)));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Sums the chunks of sum, [chunks, B, ...], as a tree, where `to` has no chunks: no further call comes for these
 * keys. */
static Err sum_chunks(Ctx *c, Tensor *sum, Tensor to)
{
    const int64_t chunks = sum->dim[0] / to.dim[0], columns = to.dim[2] * to.dim[3];
    TRY(context_sum_chunks(c, tensor_reshape(*sum, chunks, tensor_count(*sum) / (chunks * columns), columns)));
    sum->dim[0] = to.dim[0];
    return ERR_OK;
}

/* d: in, the gradients that this rank's queries gave to a part of a ring, 0 if they see nothing of it; out, on the
 * part's owner, the sum over ranks. */
static Err sum_part(const KeyWalk *w, int part, Tensor d)
{
    const Ring *r = &w->ring;
    bool others = false;
    for (int rank = 0; rank < r->parts / 2; rank++)
        others |= rank != context_owner(CONTEXT_ZIGZAG, r->parts, part) && ring_sees(r, rank, part);
    return others ? reduce_values(w->c, r->group, d) : ERR_OK;
}

/* Sums the gradients that all ranks' queries give to the part of a ring that is at work. The part's owner puts the sum
 * into rows `to` of its keys. */
static Err own_part(const KeyWalk *w, Tensor sum, Tensor to, bool add)
{
    Ctx *c = w->c;
    const Ring *r = &w->ring;
    const int part = w->at.part, which = part != r->rank;
    Tensor before;
    TRY(sum_part(w, part, sum));
    if (context_owner(CONTEXT_ZIGZAG, r->parts, part) != r->rank) return ERR_OK;
    TRY(sum_chunks(c, &sum, to));
    if (add) {
        TRY(tensor_alloc(c->scratch, &before, F32, sum.ndim, sum.dim));
        TRY(context_move_part(c, to, before, which, false));
        TRY(add_to(c, sum, before));
    }
    return context_move_part(c, to, sum, which, true);
}

/* The same for keys that were gathered: takes the gradients of own keys. */
static Err own_rows(const KeyWalk *w, Tensor all, Tensor to, bool add)
{
    Ctx *c = w->c;
    const bool straight = !add && all.dim[0] == to.dim[0];
    Tensor sum = to;
    if (!straight) TRY(tensor_new(c->scratch, &sum, to.dtype, all.dim[0], to.dim[1], to.dim[2], to.dim[3]));
    TRY(scatter(w, all, sum));
    TRY(sum_chunks(c, &sum, to));
    if (add) return add_to(c, to, sum);
    return straight ? ERR_OK : device_copy(c->s, to.data, sum.data, tensor_bytes(to));
}

/* Number of sums over ranks: one of all queries or, where sums are ordered, one for each half of a column. */
static int sum_count(const Places *p) { return p->leaves ? 2 : 1; }

static Err give_over_ranks(const KeyWalk *w, const Places *p, SliceGrads to, bool add)
{
    Ctx *c = w->c;
    const int64_t count = w->a->q.dim[1] / sum_count(p);
    SliceGrads all;
    TRY(grads_new(w, to.of[0].dtype, w->at.kv, &all));
    for (int i = 0; i < sum_count(p); i++) {
        TRY(w->at.seen ? give_rows(w, (Rows){ i * count, count }, all, false) : give_nothing(w, all));
        for (int half = 0; half < 2; half++) {
            ArenaMark mark = arena_mark(c->scratch);
            TRY((w->at.part < 0 ? own_rows : own_part)(w, all.of[half], to.of[half], add || i > 0));
            arena_release(c->scratch, mark);
        }
    }
    return ERR_OK;
}

/* Gives the gradients of all queries of the slice to those of the keys at work that this rank has. */
static Err give_sum(const KeyWalk *w, const Places *p, SliceGrads to, bool add)
{
    ArenaMark mark = arena_mark(w->c->scratch);
    if (w->at.part < 0 && !w->at.seen) return add ? ERR_OK : give_nothing(w, to);
    if (!w->plan->ranks) return give_rows(w, (Rows){ 0, w->a->q.dim[1] }, to, add);
    TRY(give_over_ranks(w, p, to, add));
    arena_release(w->c->scratch, mark);
    return ERR_OK;
}

Err sums_give(KeyWalk *w)
{
    const Ctx *c = w->c;
    const Places p = places_of(c);
    const int s = w->slice;
    if (p.leaves && is_pair(&p, s, c->slices.at)) return give_leaves(w, &p);
    if (s == c->slices.at) return give_sum(w, &p, w->mine, false);
    const int place = p.leaves ? place_at(&p, s, column_of(&p, c->slices.at)) : first_place(&p, s);
    const SliceGrads to = shaped_both(w, grads_at(c, place, 1), w->own);
    return give_sum(w, &p, to, !p.leaves && c->slices.at + 1 < c->slices.count);
}

/* ---- the slice's own keys ---- */

Err sums_begin(KeyWalk *w)
{
    const Places p = places_of(w->c);
    ASSERT(!w->plan->ranks || p.leaves % (2 * rank_count(w)) == 0);
    w->mine = (SliceGrads){ { w->a->dk, w->a->dv } };
    if (is_whole(w)) return ERR_OK;
    w->mine.of[0].data = w->mine.of[1].data = NULL;
    return p.leaves && is_pair(&p, w->c->slices.at, w->c->slices.at) ? ERR_OK : grads_new(w, F32, w->own, &w->mine);
}

/* left = the tree over both; one of them may be absent. */
static Err join(Ctx *c, SliceGrads *left, SliceGrads right)
{
    if (!left->of[0].data) *left = right;
    else if (right.of[0].data)
        for (int i = 0; i < 2; i++) TRY(add_to(c, left->of[i], right.of[i]));
    return ERR_OK;
}

/* The tree over `count` pairs of a column of both, from the place of the first of them on. */
static Err pairs(const KeyWalk *w, int place, int count, SliceGrads *out)
{
    const int ranks = rank_count(w);
    SliceGrads right;
    *out = grads_at(w->c, place, ranks);
    if (count == 1) return ERR_OK;
    TRY(pairs(w, place, count / 2, out));
    TRY(pairs(w, place + count / 2 * ranks, count / 2, &right));
    return join(w->c, out, right);
}

/* For this rank's keys: sums over ranks the trees over pairs, for each half of the column by itself. */
static Err pairs_of_ranks(const KeyWalk *w, int place, int leaves, SliceGrads *out)
{
    const int ranks = rank_count(w), half = leaves / ranks / 2;
    SliceGrads sum[2], all;
    for (int i = 0; i < 2; i++) {
        const int first = place + i * half * ranks;
        TRY(pairs(w, first, half, &all));
        sum[i] = shaped_both(w, grads_at(w->c, first, 1), w->own); /* (the memory of all, which the sum leaves) */
        for (int k = 0; k < 2; k++) {
            Tensor whole = w->own[k];
            whole.dim[1] *= ranks;
            if (w->plan->source->in_parts) TRY(scatter_parts(w, all.of[k], sum[i].of[k]));
            else TRY(scatter(w, shaped(w, all.of[k], whole), sum[i].of[k]));
        }
    }
    *out = sum[0];
    return join(w->c, out, sum[1]);
}

/* Columns [first, first + count) of the tree of the slice at work. */
static Err tree(const KeyWalk *w, const Places *p, int first, int count, SliceGrads *out)
{
    const int s = w->c->slices.at, later = p->slices - 1 - first;
    SliceGrads right;
    *out = (SliceGrads){ { { .data = NULL } } };
    if (count > 1) {
        TRY(tree(w, p, first, count / 2, out));
        TRY(tree(w, p, first + count / 2, count / 2, &right));
        return join(w->c, out, right);
    }
    if (first >= s && w->plan->ranks) return pairs_of_ranks(w, place_at(p, s, first), p->leaves, out);
    if (first >= s) return pairs(w, place_at(p, s, first), p->leaves, out);
    if (later == s) *out = w->mine;
    else if (later > s) *out = grads_at(w->c, place_at(p, s, first), 1);
    return ERR_OK;
}

/* The sum in any order: the gradients that wait, and those that the slice itself gave. */
static Err sum_all(const KeyWalk *w, const Places *p, SliceGrads *out)
{
    const Ctx *c = w->c;
    *out = w->mine;
    if (c->slices.at + 1 == c->slices.count) return ERR_OK;
    return join(w->c, out, grads_at(c, first_place(p, c->slices.at), 1));
}

/* The tree over chunks, and dk or dv [B, T, K, C] from it. */
static Err finish_keys(const KeyWalk *w, Tensor sum, Tensor out)
{
    Ctx *c = w->c;
    const int64_t T = out.dim[1], columns = out.dim[2] * out.dim[3];
    for (int64_t b = 0; b < c->batch->B; b++) {
        const Tensor own = chunks_of_sample(w, shaped(w, sum, out), b);
        TRY(context_sum_chunks(c, tensor_reshape(own, own.dim[0], T, columns)));
        TRY(cast_values(c, rows_of(out, b, (Rows){ 0, T }), tensor_of(own.data, own.dtype, T, columns)));
    }
    return ERR_OK;
}

Err sums_finish(KeyWalk *w)
{
    const Places p = places_of(w->c);
    SliceGrads sum;
    if (is_whole(w)) return ERR_OK;
    TRY(p.leaves ? tree(w, &p, 0, p.slices / 2, &sum) : sum_all(w, &p, &sum));
    TRY(finish_keys(w, sum.of[0], w->a->dk));
    return finish_keys(w, sum.of[1], w->a->dv);
}
