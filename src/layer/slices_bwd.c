/*
 * Backward of attention in slices (slices.c), from the last slice to the first. dq is whole after a slice's walk over
 * the keys; dk and dv of its own keys, too, for all slices that see them have run. What it gives to those of earlier
 * slices waits for them.
 *
 * Bits. dk and dv of a key are a tree over leaves of query positions, numbered 0, n-1, 1, n-2, ... (ops.def,
 * attention_bwd): its first pairs are of the first and the last slice, the next ones of the second and the last but
 * one. With k slices of g leaves each, the g pairs that slices j and k-1-j share are a column, an aligned part of the
 * tree; there are k/2. Of the keys of slice s, with . for what they do not see:
 *
 *   k = 4   column   slices        s = 0    s = 1    s = 2    s = 3
 *              0      0 and 3       both     3        3        3
 *              1      1 and 2       both     both     2        .
 *
 *   one        the other slice is masked, which adds +0: the slice's own tree over its leaves is the column's node
 *   both       the later slice runs first. Each of its leaves waits in a place of its own, to which the earlier slice
 *              adds its leaf of the same pair
 *
 * So a slice's keys have for what waits a place for each column of one, and g for each of both. When the slice itself
 * has run, the tree over pairs and columns is what is left. Where bits are not promised there is one place, to which
 * slices add. A stage has one set of places: the slices of a micro-batch run backward one after another (schedule.h).
 *
 * Ranks of cp that have all positions of some heads (reshard.c) do the same with these. Of m ranks with zigzag
 * parts of a slice, rank r has the g/m pairs of a column that lie in its parts r and 2m-1-r of both slices:
 *
 *   m = 2   pairs of a column, in four runs    0    1    2    3
 *           of rank                            0    1    1    0
 *
 * What a rank's queries give is of the keys of all ranks, so a leaf's place is as large as m; a column of one is summed
 * over ranks at once, and one of both when it is whole. The first runs of all ranks are one half of the column's tree
 * and the second ones the other, in the opposite order, which adds the same numbers. So each half is a tree over ranks,
 * of which each rank gets its own keys' part. Where keys come part by part, so do their gradients: in a place as large
 * as all ranks they lie part by part, else in order.
 */
#include "base/int64.h"
#include "layer/slices.h"

/* ---- places ---- */

/* How the places of a layer are numbered. */
typedef struct {
    int slices;
    int leaves; /* of a slice; 0: sums in any order */
} Places;

static Places places_of(const Ctx *c)
{
    const int64_t leaves = c->canon.exact ? slice_length(c) / c->canon.query_leaf : 0;
    return (Places){ c->slice_count, (int)leaves };
}

static int column_of(const Places *p, int slice) { return (int)min64(slice, p->slices - 1 - slice); }

/* Do both slices of the column of slice j see the keys of slice s? */
static bool is_pair(const Places *p, int s, int j) { return column_of(p, j) >= s; }

/* Of the keys of slice s, without a place for what s itself gives to a column of one. (Of the m ranks that share a
 * slice each has its part of the keys, in every place; and of a column of both g/m leaves, in m places each.) */
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

/* Of the column's pairs the first; the others are behind it. */
static int place_at(const Places *p, int s, int column)
{
    return first_place(p, s) + (column < s ? column : s + (column - s) * p->leaves);
}

Err slice_grads_init(const Ctx *c, SliceKeyShape shape, SliceGrads *g, Arena *state)
{
    const Places p = places_of(c);
    const Comm *by_heads = key_plan(c).heads;
    const int64_t heads = max64(shape.heads * shape.chunks, by_heads ? by_heads->size : 1);
    const int64_t rows = c->batch->B * c->batch->T * heads;
    const int places = first_place(&p, p.slices);
    TRY(tensor_new(state, &g->k, F32, places, rows * shape.k_cols));
    return tensor_new(state, &g->v, F32, places, rows * shape.v_cols);
}

static SliceGrads grads_at(const SliceGrads *g, int place, int count)
{
    return (SliceGrads){ tensor_row_slice(g->k, place, count), tensor_row_slice(g->v, place, count) };
}

/* ---- what one slice gives to the keys of another ---- */

typedef struct {
    Ctx *c;
    const KeyPlan *plan;
    attention_bwd_args a; /* of the slice's queries and its own keys, on this rank */
    Places places;
    int64_t chunks;   /* of query heads that read a key head: their trees are the inner ones */
    int first;        /* slice whose keys the queries see */
    int s;            /* the slice whose keys are at work */
    const Ring *ring; /* that they come from part by part, or NULL; which part it is */
    int part;
    RingPart keys;   /* these: of the part, or all */
    bool resumed;    /* queries have seen keys before them */
    SliceGrads mine; /* what the slice gives to its own keys where that is a column of one */
} SliceCall;

static int rank_count(const SliceCall *x) { return x->plan->ranks ? x->plan->ranks->size : 1; }

/* `count` rows of a tensor [B, T, ...], if there is one, from `row` of sample b on, as [1, count, ...]. */
static Tensor rows_of(Tensor t, int64_t b, int64_t row, int64_t count)
{
    if (!t.data) return t;
    const int64_t columns = tensor_count(t) / (t.dim[0] * t.dim[1]), at = b * t.dim[1] + row;
    const int64_t offset = at * columns * dtype_size(t.dtype);
    t.data = (void *)((uintptr_t)t.data + (uintptr_t)offset);
    t.dim[0] = 1;
    t.dim[1] = count;
    if (t.ndim == 2) t.ld = count;
    return t;
}

/* Gradients of slice s's keys [B, chunks, T, K, C] in one row of memory: those of sample b. */
static Tensor gradient_of(Tensor all, int64_t b, int64_t chunks, Tensor keys)
{
    const int64_t bytes =
        chunks * tensor_bytes(keys) / keys.dim[0] / dtype_size(keys.dtype) * dtype_size(all.dtype);
    void *own = (void *)((uintptr_t)all.data + (uintptr_t)(b * bytes));
    return tensor_of(own, all.dtype, chunks, keys.dim[1], keys.dim[2], keys.dim[3]);
}

/* Of this rank's queries, in each sample. */
typedef struct {
    int64_t first, count;
} Rows;

static Rows all_rows(const SliceCall *x) { return (Rows){ 0, x->a.q.dim[1] }; }

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

/* Queries of sample b on the keys at work. */
static Err attend_rows(const SliceCall *x, int64_t b, Rows q, SliceGrads to)
{
    const Ctx *c = x->c;
    attention_bwd_args a = x->a;
    Tensor *const of_rows[] = { &a.q, &a.go, &a.o, &a.dq, &a.lse, &a.delta, &a.doc };
    for (size_t i = 0; i < sizeof of_rows / sizeof *of_rows; i++)
        *of_rows[i] = rows_of(*of_rows[i], b, q.first, q.count);
    a.dk = gradient_of(to.k, b, x->chunks, x->keys.k);
    a.dv = gradient_of(to.v, b, x->chunks, x->keys.v);
    a.k = rows_of(x->keys.k, b, 0, x->keys.k.dim[1]);
    a.v = rows_of(x->keys.v, b, 0, x->keys.v.dim[1]);
    a.sample = tensor_row_slice(a.sample, b, 1);
    a.q_span = span_of_rows(a.q_span, q);
    a.k_span = x->keys.span;
    a.resumed = x->resumed;
    return op_attention_bwd(c->s, &a);
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

/* What queries give to the keys at work goes to memory in F32, or is added to it. */
static Err give_rows(const SliceCall *x, Rows q, SliceGrads to, bool add)
{
    Ctx *c = x->c;
    const DType dtype = x->a.k.dtype;
    const bool direct = dtype == F32 && !add;
    ArenaMark mark = arena_mark(c->scratch);
    SliceGrads own = to;
    if (!direct) TRY(tensor_new(c->scratch, &own.k, dtype, tensor_count(to.k)));
    if (!direct) TRY(tensor_new(c->scratch, &own.v, dtype, tensor_count(to.v)));
    for (int64_t b = 0; b < c->batch->B; b++) TRY(attend_rows(x, b, q, own));
    if (!direct) TRY(take_in(c, to.k, own.k, add));
    if (!direct) TRY(take_in(c, to.v, own.v, add));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Zero, where the slice that would be the first to write sees none of the keys. */
static Err give_nothing(const SliceCall *x, SliceGrads to)
{
    TRY(device_zero(x->c->s, to.k.data, tensor_bytes(to.k)));
    return device_zero(x->c->s, to.v.data, tensor_bytes(to.v));
}

/* Of a place as large as all ranks what is of the keys at work: all, or those of one of its parts. */
static SliceGrads of_keys(const SliceCall *x, SliceGrads g)
{
    if (!x->ring) return g;
    const int64_t k = tensor_count(g.k) / x->ring->parts, v = tensor_count(g.v) / x->ring->parts;
    return (SliceGrads){ tensor_row_slice(tensor_reshape(g.k, k * x->ring->parts), x->part * k, k),
                         tensor_row_slice(tensor_reshape(g.v, v * x->ring->parts), x->part * v, v) };
}

/* To a column of both, leaf by leaf; pair l has the l-th leaf of the earlier slice and the l-th from the end of the
 * later one. */
static Err give_leaves(const SliceCall *x)
{
    const Ctx *c = x->c;
    const Places *p = &x->places;
    const SliceGrads *g = &c->slice_grads[c->layer];
    const int column = column_of(p, c->slice), first = place_at(p, x->s, column), ranks = rank_count(x);
    const int leaves = p->leaves / ranks;
    const bool later = c->slice != column;
    const int64_t length = c->canon.query_leaf;
    for (int l = 0; l < leaves; l++) {
        const int leaf = later ? leaves - 1 - l : l;
        const SliceGrads to = of_keys(x, grads_at(g, first + l * ranks, ranks));
        if (x->keys.seen) TRY(give_rows(x, (Rows){ leaf * length, length }, to, !later));
        else if (later) TRY(give_nothing(x, to));
    }
    return ERR_OK;
}

/* ---- sums over ranks ---- */

/* Rows [chunks * B, T, K, C] of this rank's keys, of the sums over ranks of all parts. */
static Err own_parts(const SliceCall *x, Tensor all, Tensor rows)
{
    const int parts = 2 * x->plan->ranks->size,
              own[2] = { x->plan->ranks->rank, parts - 1 - x->plan->ranks->rank };
    const int64_t count = tensor_count(all) / parts, half = rows.dim[1] / 2;
    const Tensor flat = tensor_reshape(all, parts, count);
    TRY(reduce_values(x->c, x->plan->ranks, flat));
    for (int i = 0; i < 2; i++) {
        const Tensor part = tensor_row_slice(flat, own[i], 1);
        TRY(context_move_part(x->c, rows, tensor_reshape(part, rows.dim[0], half, rows.dim[2], rows.dim[3]),
                              i, true));
    }
    return ERR_OK;
}

/* sum = of this rank's keys, which are like `own`, what the sum over ranks of all has. It may lie where `all` does. */
static Err scatter(const SliceCall *x, Tensor all, Tensor own, Tensor sum)
{
    Ctx *c = x->c;
    const int64_t m = x->plan->ranks->size, samples = x->chunks * own.dim[0], T = own.dim[1];
    const bool parts = x->plan->parts;
    const Tensor whole = tensor_of(all.data, F32, samples, m * T, own.dim[2], own.dim[3]);
    ArenaMark mark = arena_mark(c->scratch);
    Tensor rows;
    TRY(tensor_new(c->scratch, &rows, F32, parts ? samples : m * samples, T, own.dim[2], own.dim[3]));
    if (parts) {
        TRY(own_parts(x, all, rows));
        TRY(device_copy(c->s, sum.data, rows.data, tensor_bytes(rows)));
    } else {
        TRY(context_move(c, CONTEXT_ZIGZAG, (int)m, rows, whole, true));
        TRY(reduce_scatter_values(c, x->plan->ranks, rows, sum));
    }
    arena_release(c->scratch, mark);
    return ERR_OK;
}

static Err scatter_keys(const SliceCall *x, SliceGrads all, SliceGrads sum)
{
    TRY(scatter(x, all.k, x->a.k, sum.k));
    return scatter(x, all.v, x->a.v, sum.v);
}

/* left = the tree over both; one of them may be absent. */
static Err join(Ctx *c, SliceGrads *left, SliceGrads right)
{
    if (!left->k.data) *left = right;
    else if (right.k.data) {
        TRY(add_to(c, left->k, right.k));
        TRY(add_to(c, left->v, right.v));
    }
    return ERR_OK;
}

static Err grads_new(Ctx *c, int64_t k, int64_t v, SliceGrads *out)
{
    TRY(tensor_new(c->scratch, &out->k, F32, k));
    return tensor_new(c->scratch, &out->v, F32, v);
}

/* Of one part, whose owner puts the sum into rows of its own keys. */
static Err take_part(const SliceCall *x, Tensor sum, Tensor own, Tensor to, bool add)
{
    Ctx *c = x->c;
    const int which = x->part != x->ring->rank;
    const int64_t samples = x->chunks * own.dim[0], half = own.dim[1] / 2;
    const Tensor rows = tensor_of(to.data, F32, samples, own.dim[1], own.dim[2], own.dim[3]);
    const Tensor part = tensor_of(sum.data, F32, samples, half, own.dim[2], own.dim[3]);
    ArenaMark mark = arena_mark(c->scratch);
    Tensor before;
    if (add) {
        TRY(tensor_alloc(c->scratch, &before, F32, part.ndim, part.dim));
        TRY(context_move_part(c, rows, before, which, false));
        TRY(add_to(c, part, before));
    }
    TRY(context_move_part(c, rows, part, which, true));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Sums over ranks are of all queries, or, where they are ordered, of the two halves of a column by themselves. */
static int sum_count(const SliceCall *x) { return x->places.leaves ? 2 : 1; }

static Rows rows_of_sum(const SliceCall *x, int i)
{
    const int64_t count = x->a.q.dim[1] / sum_count(x);
    return (Rows){ i * count, count };
}

/* What all queries give to the part of a ring that is at work. */
static Err give_part(const SliceCall *x, SliceGrads to, bool add)
{
    Ctx *c = x->c;
    SliceGrads sum[2];
    for (int i = 0; i < sum_count(x); i++) {
        TRY(grads_new(c, x->chunks * tensor_count(x->keys.k), x->chunks * tensor_count(x->keys.v), &sum[i]));
        TRY(x->keys.seen ? give_rows(x, rows_of_sum(x, i), sum[i], false) : give_nothing(x, sum[i]));
        TRY(ring_sum(c, x->ring, x->part, sum[i].k));
        TRY(ring_sum(c, x->ring, x->part, sum[i].v));
        if (i > 0) TRY(join(c, &sum[0], sum[1]));
    }
    if (ring_owner(x->ring, x->part) != x->ring->rank) return ERR_OK;
    TRY(take_part(x, sum[0].k, x->a.k, to.k, add));
    return take_part(x, sum[0].v, x->a.v, to.v, add);
}

/* The same for keys that were gathered. */
static Err give_gathered(const SliceCall *x, SliceGrads to, bool add)
{
    Ctx *c = x->c;
    SliceGrads all, own;
    TRY(grads_new(c, x->chunks * tensor_count(x->keys.k), x->chunks * tensor_count(x->keys.v), &all));
    TRY(grads_new(c, tensor_count(to.k), tensor_count(to.v), &own));
    for (int i = 0; i < sum_count(x); i++) {
        const bool more = add || i > 0;
        TRY(give_rows(x, rows_of_sum(x, i), all, false));
        TRY(scatter_keys(x, all, more ? own : to));
        if (more) TRY(join(c, &to, own));
    }
    return ERR_OK;
}

/* What all queries of the slice give to this rank's keys of those at work. */
static Err give_sum(const SliceCall *x, SliceGrads to, bool add)
{
    ArenaMark mark = arena_mark(x->c->scratch);
    if (x->ring) TRY(give_part(x, to, add));
    else if (!x->keys.seen) TRY(add ? ERR_OK : give_nothing(x, to));
    else TRY(x->plan->ranks ? give_gathered(x, to, add) : give_rows(x, all_rows(x), to, add));
    arena_release(x->c->scratch, mark);
    return ERR_OK;
}

/* To the keys at work. */
static Err give(const SliceCall *x)
{
    const Ctx *c = x->c;
    const Places *p = &x->places;
    const bool add = !p->leaves && x->s < c->slice && c->slice + 1 < c->slice_count;
    if (p->leaves && is_pair(p, x->s, c->slice)) return give_leaves(x);
    if (x->s == c->slice) return give_sum(x, x->mine, false);
    const int place = p->leaves ? place_at(p, x->s, column_of(p, c->slice)) : first_place(p, x->s);
    return give_sum(x, grads_at(&c->slice_grads[c->layer], place, 1), add);
}

/* To those of slice s, all at once or part by part. */
static Err give_slice(SliceCall *x, int s)
{
    Ctx *c = x->c;
    const bool seen = s >= x->first;
    RingWalk w;
    x->s = s;
    x->ring = NULL;
    x->keys = (RingPart){ x->a.k, x->a.v, slice_span(c, s), seen };
    if (seen) TRY(slice_keys(c, x->plan, s, &x->keys.k, &x->keys.v));
    if (!seen || !x->plan->parts) {
        TRY(give(x));
        x->resumed = seen;
        return ERR_OK;
    }
    w = slice_ring(c, x->plan->ranks, x->a.window, s, x->keys.k, x->keys.v);
    x->ring = &w.of;
    TRY(ring_open(c, &w, x->keys.k, x->keys.v));
    for (x->part = 0; x->part < w.of.parts; x->part++) {
        TRY(ring_advance(c, &w, x->part, &x->keys));
        TRY(give(x));
        x->resumed |= x->keys.seen;
    }
    x->ring = NULL;
    return ERR_OK;
}

/* ---- the slice's own keys ---- */

/* The tree over `count` pairs of a column of both, from the place of the first of them on. */
static Err pairs(const SliceCall *x, int place, int count, SliceGrads *out)
{
    const int ranks = rank_count(x);
    SliceGrads right;
    *out = grads_at(&x->c->slice_grads[x->c->layer], place, ranks);
    if (count == 1) return ERR_OK;
    TRY(pairs(x, place, count / 2, out));
    TRY(pairs(x, place + count / 2 * ranks, count / 2, &right));
    return join(x->c, out, right);
}

/* Of its two halves on each rank the sums over ranks, and of these the last: this rank's keys. */
static Err pairs_of_ranks(const SliceCall *x, int place, SliceGrads *out)
{
    const int half = x->places.leaves / rank_count(x) / 2;
    const SliceGrads *g = &x->c->slice_grads[x->c->layer];
    SliceGrads sum[2], all;
    for (int i = 0; i < 2; i++) {
        const int first = place + i * half * rank_count(x);
        TRY(pairs(x, first, half, &all));
        sum[i] = grads_at(g, first, 1); /* (what is there has left for its ranks) */
        TRY(scatter_keys(x, all, sum[i]));
    }
    *out = sum[0];
    return join(x->c, out, sum[1]);
}

/* Columns [first, first + count) of the present slice's tree; own: what the slice gave to a column of one, else
 * absent. */
static Err tree(const SliceCall *x, int first, int count, SliceGrads own, SliceGrads *out)
{
    const Places *p = &x->places;
    const int s = x->c->slice, later = p->slices - 1 - first;
    SliceGrads right;
    *out = (SliceGrads){ .k = { 0 } };
    if (count > 1) {
        TRY(tree(x, first, count / 2, own, out));
        TRY(tree(x, first + count / 2, count / 2, own, &right));
        return join(x->c, out, right);
    }
    if (first >= s && x->plan->ranks) return pairs_of_ranks(x, place_at(p, s, first), out);
    if (first >= s) return pairs(x, place_at(p, s, first), p->leaves, out);
    if (later == s) *out = own;
    else if (later > s) *out = grads_at(&x->c->slice_grads[x->c->layer], place_at(p, s, first), 1);
    return ERR_OK;
}

/* Of all slices, for sums in any order: what waits and what the slice itself gave. */
static Err sum_all(const SliceCall *x, SliceGrads own, SliceGrads *out)
{
    const Ctx *c = x->c;
    *out = own;
    if (c->slice + 1 == c->slice_count) return ERR_OK;
    return join(x->c, out, grads_at(&c->slice_grads[c->layer], first_place(&x->places, c->slice), 1));
}

/* The tree over chunks, and dk or dv [B, T, K, C] from it. */
static Err finish_keys(const SliceCall *x, Tensor all, Tensor out)
{
    Ctx *c = x->c;
    const int64_t T = out.dim[1], columns = out.dim[2] * out.dim[3];
    for (int64_t b = 0; b < c->batch->B; b++) {
        const Tensor part = tensor_reshape(gradient_of(all, b, x->chunks, out), x->chunks, T, columns);
        const Tensor to = rows_of(out, b, 0, T);
        TRY(context_sum_chunks(c, part));
        TRY(cast_values(c, to, tensor_of(part.data, part.dtype, T, columns)));
    }
    return ERR_OK;
}

static Err finish(const SliceCall *x)
{
    const Places *p = &x->places;
    SliceGrads sum;
    TRY(p->leaves ? tree(x, 0, p->slices / 2, x->mine, &sum) : sum_all(x, x->mine, &sum));
    TRY(finish_keys(x, sum.k, x->a.dk));
    return finish_keys(x, sum.v, x->a.dv);
}

Err slice_attention_bwd(Ctx *c, const KeyPlan *p, attention_bwd_args a)
{
    ArenaMark mark = arena_mark(c->scratch);
    const Tensor dq = a.dq;
    SliceCall x = { .c = c, .plan = p, .places = places_of(c), .chunks = a.q.dim[2] / a.k.dim[2] / a.chunk };
    ASSERT(!p->ranks || x.places.leaves % (2 * p->ranks->size) == 0);
    TRY(wide_sum(c, dq, &a.dq));
    x.a = a;
    while (!slice_sees(c, a.window, x.first)) x.first++;
    if (!x.places.leaves || !is_pair(&x.places, c->slice, c->slice))
        TRY(grads_new(c, x.chunks * tensor_count(a.dk), x.chunks * tensor_count(a.dv), &x.mine));
    for (int s = 0; s <= c->slice; s++) {
        ArenaMark keys = arena_mark(c->scratch);
        TRY(give_slice(&x, s));
        arena_release(c->scratch, keys);
    }
    TRY(finish(&x));
    TRY(round_sum(c, dq, a.dq));
    arena_release(c->scratch, mark);
    return ERR_OK;
}
