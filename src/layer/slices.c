/*
 * Attention of sequences that pass in slices (pipeline/schedule.h). The queries of a slice see the keys of the slices
 * before it, which lie where those were kept, slot by slot: nothing is gathered or copied.
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

/* Those of slice s into *k and *v, which hold the present one's. */
static void keys_of(const Ctx *c, int s, Tensor *k, Tensor *v)
{
    const Slot *slot = c->slices[s];
    if (s == c->slice) return;
    *k = save_in(slot, slot->keys[c->layer].k);
    *v = save_in(slot, slot->keys[c->layer].v);
}

static Spans span_of(const Ctx *c, int s) { return spans_run(s * c->batch->T, c->batch->T); }

/* May a query of the present slice see a key of slice s? (Documents, which the device knows, leave no call out.) */
static bool sees(const Ctx *c, int64_t window, int s)
{
    const int64_t nearest = (c->slice - s - 1) * c->batch->T + 1; /* from the first query to the last key */
    return s == c->slice || !window || nearest < window;
}

Err slice_attention(Ctx *c, attention_fwd_args a)
{
    ArenaMark mark = arena_mark(c->scratch);
    const Tensor o = a.o, k = a.k, v = a.v;
    if (c->slice == 0) return op_attention_fwd(c->s, &a);
    TRY(wide_sum(c, o, &a.o));
    TRY(tensor_new(c->scratch, &a.max, F32, a.lse.dim[0], a.lse.dim[1], a.lse.dim[2]));
    TRY(tensor_new(c->scratch, &a.sum, F32, a.lse.dim[0], a.lse.dim[1], a.lse.dim[2]));
    for (int s = 0; s <= c->slice; s++) {
        if (!sees(c, a.window, s)) continue;
        a.k = k, a.v = v;
        keys_of(c, s, &a.k, &a.v);
        a.k_span = span_of(c, s);
        a.unfinished = s < c->slice;
        TRY(op_attention_fwd(c->s, &a));
        a.resumed = true;
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
    const int64_t leaves = c->canon.exact ? c->batch->T / c->canon.query_leaf : 0;
    return (Places){ c->slice_count, (int)leaves };
}

static int column_of(const Places *p, int slice) { return (int)min64(slice, p->slices - 1 - slice); }

/* Do both slices of the column of slice j see the keys of slice s? */
static bool is_pair(const Places *p, int s, int j) { return column_of(p, j) >= s; }

/* Of the keys of slice s, without a place for what s itself gives to a column of one. */
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
    const int64_t rows = c->batch->B * c->batch->T * shape.heads * shape.chunks;
    const int places = first_place(&p, p.slices);
    TRY(tensor_new(state, &g->k, F32, places, rows * shape.k_cols));
    return tensor_new(state, &g->v, F32, places, rows * shape.v_cols);
}

static SliceGrads grads_at(const SliceGrads *g, int place)
{
    return (SliceGrads){ tensor_row_slice(g->k, place, 1), tensor_row_slice(g->v, place, 1) };
}

/* ---- what one slice gives to the keys of another ---- */

typedef struct {
    Ctx *c;
    attention_bwd_args a; /* of the slice's queries and its own keys */
    Places places;
    int64_t chunks; /* of query heads that read a key head: their trees are the inner ones */
    int first;      /* slice whose keys the queries see */
} SliceCall;

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

/* Of the slice's queries, in each sample. */
typedef struct {
    int64_t first, count;
} Rows;

static Rows all_rows(const SliceCall *x) { return (Rows){ 0, x->c->batch->T }; }

/* Queries of sample b on the keys of slice s. */
static Err attend_rows(const SliceCall *x, int s, int64_t b, Rows q, SliceGrads to)
{
    const Ctx *c = x->c;
    attention_bwd_args a = x->a;
    Tensor *const of_rows[] = { &a.q, &a.go, &a.o, &a.dq, &a.lse, &a.delta, &a.doc };
    for (size_t i = 0; i < sizeof of_rows / sizeof *of_rows; i++)
        *of_rows[i] = rows_of(*of_rows[i], b, q.first, q.count);
    keys_of(c, s, &a.k, &a.v);
    a.dk = gradient_of(to.k, b, x->chunks, a.k);
    a.dv = gradient_of(to.v, b, x->chunks, a.v);
    a.k = rows_of(a.k, b, 0, c->batch->T);
    a.v = rows_of(a.v, b, 0, c->batch->T);
    a.sample = tensor_row_slice(a.sample, b, 1);
    a.q_span = spans_run(c->slice * c->batch->T + q.first, q.count);
    a.k_span = span_of(c, s);
    a.resumed = s > x->first;
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

/* What queries give to the keys of slice s goes to memory in F32, or is added to it. */
static Err give_rows(const SliceCall *x, int s, Rows q, SliceGrads to, bool add)
{
    Ctx *c = x->c;
    const DType dtype = x->a.k.dtype;
    const bool direct = dtype == F32 && !add;
    ArenaMark mark = arena_mark(c->scratch);
    SliceGrads own = to;
    if (!direct) TRY(tensor_new(c->scratch, &own.k, dtype, tensor_count(to.k)));
    if (!direct) TRY(tensor_new(c->scratch, &own.v, dtype, tensor_count(to.v)));
    for (int64_t b = 0; b < c->batch->B; b++) TRY(attend_rows(x, s, b, q, own));
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

static Err give(const SliceCall *x, int s, Rows q, int place, bool add)
{
    const SliceGrads to = grads_at(&x->c->slice_grads[x->c->layer], place);
    if (s >= x->first) return give_rows(x, s, q, to, add);
    return add ? ERR_OK : give_nothing(x, to);
}

/* To a column of both, leaf by leaf; pair l has the l-th leaf of the earlier slice and the l-th from the end of the
 * later one. */
static Err give_leaves(const SliceCall *x, int s)
{
    const Ctx *c = x->c;
    const Places *p = &x->places;
    const int column = column_of(p, c->slice), first = place_at(p, s, column);
    const bool later = c->slice != column;
    const int64_t length = c->canon.query_leaf;
    for (int l = 0; l < p->leaves; l++) {
        const int leaf = later ? p->leaves - 1 - l : l;
        TRY(give(x, s, (Rows){ leaf * length, length }, first + l, !later));
    }
    return ERR_OK;
}

/* To the keys of an earlier slice. */
static Err give_earlier(const SliceCall *x, int s)
{
    const Ctx *c = x->c;
    const Places *p = &x->places;
    const bool last = c->slice + 1 == c->slice_count;
    if (!p->leaves) return give(x, s, all_rows(x), first_place(p, s), !last);
    if (is_pair(p, s, c->slice)) return give_leaves(x, s);
    return give(x, s, all_rows(x), place_at(p, s, column_of(p, c->slice)), false);
}

/* ---- the slice's own keys ---- */

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

/* Pairs [first, first + count) of the present slice's tree, a column or more or less than one; own: what the slice gave
 * to a column of one, else absent. */
static Err tree(const SliceCall *x, int first, int count, SliceGrads own, SliceGrads *out)
{
    const Places *p = &x->places;
    const int s = x->c->slice, column = first / p->leaves;
    const SliceGrads *g = &x->c->slice_grads[x->c->layer];
    SliceGrads right;
    *out = (SliceGrads){ .k = { 0 } };
    if (count <= p->leaves && column < s) {
        const int later = p->slices - 1 - column;
        if (later == s) *out = own;
        else if (later > s) *out = grads_at(g, place_at(p, s, column));
        return ERR_OK;
    }
    if (count == 1) {
        *out = grads_at(g, place_at(p, s, column) + first % p->leaves);
        return ERR_OK;
    }
    TRY(tree(x, first, count / 2, own, out));
    TRY(tree(x, first + count / 2, count / 2, own, &right));
    return join(x->c, out, right);
}

/* Of all slices, for sums in any order: what waits and what the slice itself gave. */
static Err sum_all(const SliceCall *x, SliceGrads own, SliceGrads *out)
{
    const Ctx *c = x->c;
    *out = own;
    if (c->slice + 1 == c->slice_count) return ERR_OK;
    return join(x->c, out, grads_at(&c->slice_grads[c->layer], first_place(&x->places, c->slice)));
}

static Err sum_tree(const SliceCall *x, SliceGrads own, SliceGrads *out)
{
    const Places *p = &x->places;
    return tree(x, 0, p->slices / 2 * p->leaves, own, out);
}

/* The tree over chunks, and dk or dv [B, T, K, C] from it. */
static Err finish_keys(const SliceCall *x, Tensor all, Tensor out)
{
    Ctx *c = x->c;
    const int64_t columns = out.dim[2] * out.dim[3];
    for (int64_t b = 0; b < c->batch->B; b++) {
        const Tensor part =
            tensor_reshape(gradient_of(all, b, x->chunks, out), x->chunks, c->batch->T, columns);
        const Tensor to = rows_of(out, b, 0, c->batch->T);
        TRY(context_sum_chunks(c, part));
        TRY(cast_values(c, to, tensor_of(part.data, part.dtype, c->batch->T, columns)));
    }
    return ERR_OK;
}

static Err give_own(const SliceCall *x)
{
    Ctx *c = x->c;
    const bool pair = x->places.leaves && is_pair(&x->places, c->slice, c->slice);
    SliceGrads own = { .k = { 0 } }, sum;
    if (pair) {
        TRY(give_leaves(x, c->slice));
    } else {
        TRY(tensor_new(c->scratch, &own.k, F32, x->chunks * tensor_count(x->a.dk)));
        TRY(tensor_new(c->scratch, &own.v, F32, x->chunks * tensor_count(x->a.dv)));
        TRY(give_rows(x, c->slice, all_rows(x), own, false));
    }
    TRY(x->places.leaves ? sum_tree(x, own, &sum) : sum_all(x, own, &sum));
    TRY(finish_keys(x, sum.k, x->a.dk));
    return finish_keys(x, sum.v, x->a.dv);
}

Err slice_attention_bwd(Ctx *c, attention_bwd_args a)
{
    ArenaMark mark = arena_mark(c->scratch);
    const Tensor dq = a.dq;
    SliceCall x = { .c = c, .places = places_of(c), .chunks = a.q.dim[2] / a.k.dim[2] / a.chunk };
    TRY(wide_sum(c, dq, &a.dq));
    x.a = a;
    while (!sees(c, a.window, x.first)) x.first++;
    for (int s = 0; s < c->slice; s++) TRY(give_earlier(&x, s));
    TRY(give_own(&x));
    TRY(round_sum(c, dq, a.dq));
    arena_release(c->scratch, mark);
    return ERR_OK;
}
