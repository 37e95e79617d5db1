/*
 * Attention of sequences that pass in slices (pipeline/schedule.h). The queries of a slice see the keys of the slices
 * before it, which lie where those were kept, slot by slot: on one rank nothing is gathered or copied.
 *
 *   forward    slice i: keys of slices 0 .. i, one call each, as a ring's parts (context_ring.c)
 *   backward   slice i, from the last to the first: the same walk. dq is whole then; dk and dv of its own keys, too,
 *              for all slices that see them have run. What it gives to those of earlier slices waits for them.
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
 * Ranks of cp. Each slice is cut over them as a whole sequence would be (context.c), and each keeps its own part of the
 * slice's keys; those of one slice after another are exchanged again for every slice that sees them, so that a rank has
 * no more than one slice of other ranks' keys. With some of the heads and all positions (context_a2a.c) all is as above.
 * With zigzag parts of m ranks, rank r has the g/m pairs of a column that lie in its parts r and 2m-1-r of both slices:
 *
 *   m = 2   pairs of a column, in four runs    0    1    2    3
 *           of rank                            0    1    1    0
 *
 * What a rank's queries give is of the keys of all ranks, so a leaf's place is as large as m; a column of one is summed
 * over ranks at once, and one of both when it is whole. The first runs of all ranks are one half of the column's tree
 * and the second ones the other, in the opposite order, which adds the same numbers. So each half is a tree over ranks,
 * of which each rank gets its own keys' part.
 */
#include "base/int64.h"
#include "layer/internal.h"

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

/* Positions of a slice, on all ranks. */
static int64_t slice_length(const Ctx *c) { return c->batch->seq / c->slice_count; }

static Err all_positions(Ctx *c, Comm *ranks, Tensor *t)
{
    return ranks ? context_gather(c, CONTEXT_ZIGZAG, ranks, t) : ERR_OK;
}

/* All of slice s into *k and *v, which hold this rank's of the present one. */
static Err keys_of(Ctx *c, Comm *ranks, int s, Tensor *k, Tensor *v)
{
    if (s < c->slice) {
        const Slot *slot = c->slices[s];
        *k = save_in(slot, slot->keys[c->layer].k);
        *v = save_in(slot, slot->keys[c->layer].v);
        TRY(context_earlier_keys(c, k));
        TRY(context_earlier_keys(c, v));
    }
    TRY(all_positions(c, ranks, k));
    return all_positions(c, ranks, v);
}

static Spans span_of(const Ctx *c, int s) { return spans_run(s * slice_length(c), slice_length(c)); }

/* May a query of the present slice see a key of slice s? (Documents, which the device knows, leave no call out.) */
static bool sees(const Ctx *c, int64_t window, int s)
{
    const int64_t nearest =
        (c->slice - s - 1) * slice_length(c) + 1; /* from the first query to the last key */
    return s == c->slice || !window || nearest < window;
}

Err slice_attention(Ctx *c, Comm *ranks, attention_fwd_args a)
{
    ArenaMark mark = arena_mark(c->scratch);
    const Tensor o = a.o, k = a.k, v = a.v;
    if (c->slice > 0) {
        TRY(wide_sum(c, o, &a.o));
        TRY(tensor_new(c->scratch, &a.max, F32, a.lse.dim[0], a.lse.dim[1], a.lse.dim[2]));
        TRY(tensor_new(c->scratch, &a.sum, F32, a.lse.dim[0], a.lse.dim[1], a.lse.dim[2]));
    }
    for (int s = 0; s <= c->slice; s++) {
        ArenaMark keys = arena_mark(c->scratch);
        if (!sees(c, a.window, s)) continue;
        a.k = k, a.v = v;
        TRY(keys_of(c, ranks, s, &a.k, &a.v));
        a.k_span = span_of(c, s);
        a.unfinished = s < c->slice;
        TRY(op_attention_fwd(c->s, &a));
        a.resumed = true;
        arena_release(c->scratch, keys);
    }
    TRY(round_sum(c, o, a.o));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

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
    const Comm *by_heads = context_heads(c);
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
    Comm *ranks;
    attention_bwd_args a; /* of the slice's queries and its own keys, on this rank */
    Places places;
    int64_t chunks; /* of query heads that read a key head: their trees are the inner ones */
    int first;      /* slice whose keys the queries see */
    int s;          /* the slice whose keys are at work, and these, of all ranks */
    Tensor k, v;
} SliceCall;

static int rank_count(const SliceCall *x) { return x->ranks ? x->ranks->size : 1; }

/* Of the keys of slice s on. */
static Err take_keys(SliceCall *x, int s)
{
    x->s = s;
    x->k = x->a.k;
    x->v = x->a.v;
    return s >= x->first ? keys_of(x->c, x->ranks, s, &x->k, &x->v) : ERR_OK;
}

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
    a.dk = gradient_of(to.k, b, x->chunks, x->k);
    a.dv = gradient_of(to.v, b, x->chunks, x->v);
    a.k = rows_of(x->k, b, 0, x->k.dim[1]);
    a.v = rows_of(x->v, b, 0, x->v.dim[1]);
    a.sample = tensor_row_slice(a.sample, b, 1);
    a.q_span = span_of_rows(a.q_span, q);
    a.k_span = span_of(c, x->s);
    a.resumed = x->s > x->first;
    return op_attention_bwd(c->s, &a);
}

/* sum += x, both dense and F32. */
static Err add_to(Ctx *c, Tensor sum, Tensor x)
{
    const int64_t T = c->batch->T, columns = tensor_count(sum) / T;
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
        const SliceGrads to = grads_at(g, first + l * ranks, ranks);
        if (x->s >= x->first) TRY(give_rows(x, (Rows){ leaf * length, length }, to, !later));
        else if (later) TRY(give_nothing(x, to));
    }
    return ERR_OK;
}

/* ---- sums over ranks ---- */

/* sum = this rank's keys of the sum over ranks of all, gradients of all keys like these. */
static Err scatter(const SliceCall *x, Tensor all, Tensor keys, Tensor sum)
{
    Ctx *c = x->c;
    const int64_t samples = x->chunks * keys.dim[0], m = x->ranks->size;
    const Tensor whole = tensor_of(all.data, F32, samples, keys.dim[1], keys.dim[2], keys.dim[3]);
    ArenaMark mark = arena_mark(c->scratch);
    Tensor parts;
    TRY(tensor_new(c->scratch, &parts, F32, m, tensor_count(whole) / m));
    TRY(context_move(c, CONTEXT_ZIGZAG, (int)m, parts, whole, true));
    TRY(reduce_scatter_values(c, x->ranks, parts, sum));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

static Err scatter_keys(const SliceCall *x, SliceGrads all, SliceGrads sum)
{
    TRY(scatter(x, all.k, x->k, sum.k));
    return scatter(x, all.v, x->v, sum.v);
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

/* What all queries give to this rank's keys of those at work; of ordered sums the two halves of the column apart. */
static Err give_sum(const SliceCall *x, SliceGrads to, bool add)
{
    Ctx *c = x->c;
    ArenaMark mark = arena_mark(c->scratch);
    const int64_t parts = x->places.leaves ? 2 : 1, count = x->a.q.dim[1] / parts;
    SliceGrads all, own;
    if (!x->ranks) return give_rows(x, all_rows(x), to, add);
    TRY(grads_new(c, x->chunks * tensor_count(x->k), x->chunks * tensor_count(x->v), &all));
    TRY(grads_new(c, tensor_count(to.k), tensor_count(to.v), &own));
    for (int64_t i = 0; i < parts; i++) {
        const bool more = add || i > 0;
        TRY(give_rows(x, (Rows){ i * count, count }, all, false));
        TRY(scatter_keys(x, all, more ? own : to));
        if (more) TRY(join(c, &to, own));
    }
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* To the keys of an earlier slice. */
static Err give_earlier(const SliceCall *x)
{
    const Ctx *c = x->c;
    const Places *p = &x->places;
    const bool add = !p->leaves && c->slice + 1 < c->slice_count;
    if (p->leaves && is_pair(p, x->s, c->slice)) return give_leaves(x);
    const int place = p->leaves ? place_at(p, x->s, column_of(p, c->slice)) : first_place(p, x->s);
    const SliceGrads to = grads_at(&c->slice_grads[c->layer], place, 1);
    if (x->s >= x->first) return give_sum(x, to, add);
    return add ? ERR_OK : give_nothing(x, to);
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
    if (first >= s && x->ranks) return pairs_of_ranks(x, place_at(p, s, first), out);
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

static Err give_own(const SliceCall *x)
{
    Ctx *c = x->c;
    const Places *p = &x->places;
    SliceGrads own = { .k = { 0 } }, sum;
    if (p->leaves && is_pair(p, c->slice, c->slice)) {
        TRY(give_leaves(x));
    } else {
        TRY(grads_new(c, x->chunks * tensor_count(x->a.dk), x->chunks * tensor_count(x->a.dv), &own));
        TRY(give_sum(x, own, false));
    }
    TRY(p->leaves ? tree(x, 0, p->slices / 2, own, &sum) : sum_all(x, own, &sum));
    TRY(finish_keys(x, sum.k, x->a.dk));
    return finish_keys(x, sum.v, x->a.dv);
}

Err slice_attention_bwd(Ctx *c, Comm *ranks, attention_bwd_args a)
{
    ArenaMark mark = arena_mark(c->scratch);
    const Tensor dq = a.dq;
    SliceCall x = {
        .c = c, .ranks = ranks, .places = places_of(c), .chunks = a.q.dim[2] / a.k.dim[2] / a.chunk
    };
    ASSERT(!ranks || x.places.leaves % (2 * ranks->size) == 0);
    TRY(wide_sum(c, dq, &a.dq));
    x.a = a;
    while (!sees(c, a.window, x.first)) x.first++;
    for (int s = 0; s <= c->slice; s++) {
        ArenaMark keys = arena_mark(c->scratch);
        TRY(take_keys(&x, s));
        TRY(s < c->slice ? give_earlier(&x) : give_own(&x));
        arena_release(c->scratch, keys);
    }
    TRY(round_sum(c, dq, a.dq));
    arena_release(c->scratch, mark);
    return ERR_OK;
}
