/* See muon.h. */
#include "optim/muon.h"

#include <math.h>
#include <stdlib.h>

#include "base/int64.h"
#include "device/leaf.h"

#define MUON_EPS 1e-7f

/* ---- Newton-Schulz ---- */

enum { SET_MOST = 10 };

/* Coefficients of each step. Behind the last one it is repeated, or all are taken in turn. */
typedef struct {
    int count;
    bool cycled;
    float abc[SET_MOST][3];
} Coefficients;

#define SIMPLE                     \
    {                              \
        3.4445f, -4.7750f, 2.0315f \
    }
static const Coefficients sets[MUON_SETS] = {
    [MUON_SIMPLE] = { 1, false, { SIMPLE } },
    [MUON_QUINTIC] = { 5,
                       true,
                       { { 4.0848f, -6.8946f, 2.9270f },
                         { 3.9505f, -6.3029f, 2.6377f },
                         { 3.7418f, -5.5913f, 2.3037f },
                         { 2.8769f, -3.1427f, 1.2046f },
                         { 2.8366f, -3.0525f, 1.2012f } } },
    [MUON_POLAR_EXPRESS] = { 8,
                             false,
                             { { 8.2051f, -22.9019f, 16.4607f },
                               { 4.0664f, -2.8612f, .5184f },
                               { 3.9096f, -2.8234f, .5250f },
                               { 3.2856f, -2.4153f, .4853f },
                               { 2.2779f, -1.6198f, .3985f },
                               { 1.8726f, -1.2307f, .3585f },
                               { 1.8564f, -1.2132f, .3568f },
                               { 1.8750f, -1.2500f, .3750f } } },
    [MUON_DEEPSEEKV4] = { 10,
                          false,
                          { SIMPLE,
                            SIMPLE,
                            SIMPLE,
                            SIMPLE,
                            SIMPLE,
                            SIMPLE,
                            SIMPLE,
                            SIMPLE,
                            { 2, -1.5f, .5f },
                            { 2, -1.5f, .5f } } },
};

static const float *coefficients(MuonSet set, int step)
{
    const Coefficients *c = &sets[set];
    return c->abc[c->cycled ? step % c->count : step < c->count ? step : c->count - 1];
}

/* In fp32 sums are trees of short chains: the iteration amplifies what long ones round, to 2e-6 of the result. In 16
 * bits it is what is stored between products that counts. */
static int64_t leaf_of(Tensor x, int64_t length) { return x.dtype == F32 ? 16 : whole_leaf(length); }

Err muon_newton_schulz(Stream *s, MuonSet set, int steps, Tensor x, Arena *scratch)
{
    const ArenaMark mark = arena_mark(scratch);
    const int64_t r = x.dim[0], c = x.dim[1];
    Tensor gram, square, y;
    ASSERT(r <= c);
    TRY(tensor_new(scratch, &gram, x.dtype, r, r));
    TRY(tensor_new(scratch, &square, x.dtype, r, r));
    TRY(tensor_new(scratch, &y, x.dtype, r, c));
    for (int i = 0; i < steps; i++) {
        const float *abc = coefficients(set, i);
        TRY(op(s, linear_fwd, .y = gram, .x = x, .w = x, .leaf = leaf_of(x, c)));
        TRY(op(s, linear_fwd, .y = square, .x = gram, .w = gram, .leaf = leaf_of(x, r)));
        TRY(op(s, mix, .y = square, .x = gram, .a = abc[1], .b = abc[2]));
        TRY(op(s, linear_dx, .dx = y, .dy = square, .w = x, .leaf = leaf_of(x, r)));
        TRY(op(s, mix, .y = x, .x = y, .a = 1, .b = abc[0]));
    }
    arena_release(scratch, mark);
    return ERR_OK;
}

/* ---- matrices ---- */

static double cost_of(Box b)
{
    const double r = (double)b.shape[0], c = (double)b.shape[1];
    return fmax(r, c) * fmin(r, c) * fmin(r, c);
}

static float scale_of(MuonScale scale, Box b)
{
    const double r = (double)b.shape[0], c = (double)b.shape[1];
    switch (scale) {
    case MUON_MATCH_RMS_ADAMW: return (float)(.2 * sqrt(fmax(r, c)));
    case MUON_SPECTRAL: return (float)sqrt(fmax(r, c));
    case MUON_SHAPE: return (float)sqrt(fmax(1, r / c));
    case MUON_UNIT_RMS_NORM: break;
    }
    return (float)sqrt(r / c);
}

/* Rows of each matrix in section i, which has `rows`. */
static int64_t rows_of_matrix(const ParamSpec *p, const MuonSpec *m, int i, int64_t rows)
{
    return p->head_rows[i] && m->split == MUON_SPLIT_HEAD ? p->head_rows[i] : rows;
}

/* The matrices of parameter `id` in out[0..], if that is not NULL. Returns how many there are. */
static int split(const Param *p, int id, const MuonSpec *m, MuonMatrix *out)
{
    const ParamSpec *s = &p->spec;
    const int64_t all = s->shape[0] / s->stack;
    const bool whole = !s->section[0] || (s->head_rows[0] && m->split == MUON_SPLIT_NONE);
    int n = 0;
    for (int64_t e = 0, row = 0; e < s->stack; e++)
        for (int i = 0; i < (whole ? 1 : PARAM_MAX_SECTIONS); i++) {
            const int64_t rows = whole ? all : s->section[i], end = row + rows;
            for (const int64_t each = rows_of_matrix(s, m, i, rows); row < end; row += each, n++)
                if (out) out[n] = (MuonMatrix){ .id = id, .box = { { row, 0 }, { each, s->shape[1] } } };
        }
    return n;
}

static Err list_matrices(Muon *u, SetupArena *setup)
{
    const ParamRegistry *r = u->store->reg;
    for (int i = 0; i < r->count; i++)
        if (r->items[i].optimizer == OPTIMIZER_MUON) u->count += split(&r->items[i], i, u->spec, NULL);
    TRY(setup_array(setup, u->count, &u->matrix));
    for (int i = 0, n = 0; i < r->count; i++)
        if (r->items[i].optimizer == OPTIMIZER_MUON) n += split(&r->items[i], i, u->spec, u->matrix + n);
    return ERR_OK;
}

/* ---- what members have ---- */

static const Param *param_of(const Muon *u, const MuonMatrix *m) { return &u->store->reg->items[m->id]; }

static int room_for_boxes(const Muon *u)
{
    int most = 1;
    for (int i = 0; i < u->count; i++) {
        const int n = shard_boxes(param_of(u, &u->matrix[i]), NULL, 0);
        if (n > most) most = n;
    }
    return most + 2; /* a ZeRO shard may begin and end inside rows */
}

static int clip(Muon *u, const MuonMatrix *m, int boxes)
{
    int n = 0;
    for (int i = 0; i < boxes; i++) n += shard_clip(u->held[i], m->box, &u->piece[n]);
    return n;
}

/* The local elements of p, of a member's place, that are of the same matrix of a stack as m. */
static ParamRange in_stack(const Param *p, const MuonMatrix *m)
{
    const int64_t each = p->count / p->matrices;
    const int64_t at = m->box.offset[0] / (p->spec.shape[0] / p->spec.stack) - p->first_matrix;
    return at < 0 || at >= p->matrices ? (ParamRange){ 0 } : (ParamRange){ .first = at * each, .count = each };
}

/* u->piece: what of the matrix lies in the member's ZeRO shard. Returns how many pieces these are. */
static int pieces(Muon *u, const MuonMatrix *m, int member)
{
    const ParamPlace *at = &u->place[member];
    const Param p = shard_param(param_of(u, m), at);
    const ParamRange x = param_zero_shard_at(u->store->reg, m->id, at->zero_shard[p.spec.group]), in = in_stack(&p, m);
    const int64_t first = max64(x.first, in.first), end = min64(x.first + x.count, in.first + in.count);
    return first < end ? clip(u, m, shard_range(&p, first, end - first, u->held, u->capacity)) : 0;
}

/* Has the member any of the matrix, of which other copies may have the same or more? */
static bool shares(Muon *u, const MuonMatrix *m, int member)
{
    const Param p = shard_param(param_of(u, m), &u->place[member]);
    const ParamRange in = in_stack(&p, m);
    return clip(u, m, shard_range(&p, in.first, in.count, u->held, u->capacity)) > 0;
}

/* Have two members the same elements of a parameter? */
static bool same_part(const Muon *u, const Param *p, int a, int b)
{
    const ParamPlace *x = &u->place[a], *y = &u->place[b];
    const Cut axes[] = { p->spec.cut[0], p->spec.cut[1], p->spec.stack_cut };
    for (int i = 0; i < 3; i++)
        if (x->shard[axes[i]] != y->shard[axes[i]]) return false;
    return x->zero_shard[p->spec.group] == y->zero_shard[p->spec.group];
}

/* Does the member send its part of a matrix? The owner takes its own; where others have the same part, one of them
 * sends it. */
static bool sends(const Muon *u, const MuonMatrix *m, int member)
{
    const Param *p = param_of(u, m);
    int before = 0, all = 0;
    if (same_part(u, p, member, m->owner)) return member == m->owner;
    for (int i = 0; i < u->comm->size; i++) {
        if (!same_part(u, p, member, i)) continue;
        before += i < member;
        all++;
    }
    return before == m->owner % all;
}

/* ---- owners ---- */

typedef struct {
    double cost;
    int index;
} Turn;

static int longest_first(const void *a, const void *b)
{
    const Turn *x = a, *y = b;
    if (x->cost < y->cost || x->cost > y->cost) return x->cost < y->cost ? 1 : -1;
    return x->index - y->index;
}

static void deal(Muon *u, const Turn *turn, int *owned)
{
    for (int i = 0; i < u->count; i++) {
        MuonMatrix *m = &u->matrix[turn[i].index];
        m->owner = -1;
        for (int q = 0; q < u->comm->size; q++)
            if ((m->owner < 0 || u->load[q] < u->load[m->owner]) && shares(u, m, q)) m->owner = q;
        u->load[m->owner] += turn[i].cost;
        m->round = owned[m->owner]++;
        if (m->round >= u->rounds) u->rounds = m->round + 1;
    }
}

static Err choose_owners(Muon *u, SetupArena *setup)
{
    Turn *turn = calloc((size_t)u->count + 1, sizeof *turn);
    int *owned = calloc((size_t)u->comm->size, sizeof *owned);
    Err err = setup_array(setup, u->comm->size, &u->load);
    if (!err && (!turn || !owned)) err = err_set(ERR_MEMORY, "no memory for %d matrices", u->count);
    for (int i = 0; i < u->count && !err; i++) turn[i] = (Turn){ cost_of(u->matrix[i].box), i };
    if (!err) qsort(turn, (size_t)u->count, sizeof *turn, longest_first);
    if (!err) deal(u, turn, owned);
    free(turn);
    free(owned);
    return err;
}

static double flop_of(const Muon *u, Box b)
{
    const double s = (double)min64(b.shape[0], b.shape[1]), l = (double)max64(b.shape[0], b.shape[1]);
    const double products = 4 * l * s * s + 2 * s * s * s, sums = 3 * s * s + 3 * s * l;
    return u->spec->steps * (products + sums) + 3 * s * l; /* (as ops.def counts) */
}

double muon_flop(const Muon *u, int member)
{
    double sum = 0;
    for (int i = 0; i < u->count; i++)
        if (u->matrix[i].owner == member) sum += flop_of(u, u->matrix[i].box);
    return sum;
}

double muon_mean_flop(const Muon *u)
{
    double sum = 0;
    for (int i = 0; i < u->count; i++) sum += flop_of(u, u->matrix[i].box);
    return sum / u->comm->size;
}

double muon_imbalance(const Muon *u)
{
    double most = 0, sum = 0;
    for (int q = 0; q < u->comm->size; q++) {
        most = fmax(most, u->load[q]);
        sum += u->load[q];
    }
    return sum > 0 ? most * u->comm->size / sum : 1;
}

/* ---- boxes ---- */

/* A table that grows; err: it could not. */
typedef struct {
    FlatBox *box;
    int64_t count, capacity, chunks;
    Err err;
} BoxTable;

static BoxRange begin_range(BoxTable *t)
{
    t->chunks = 0;
    return (BoxRange){ .first = t->count };
}

static void end_range(const BoxTable *t, BoxRange *r)
{
    r->count = t->count - r->first;
    r->chunks = t->chunks;
}

static void put(BoxTable *t, FlatBox b)
{
    if (t->count == t->capacity && !t->err) {
        const int64_t capacity = t->capacity ? 2 * t->capacity : 256;
        FlatBox *more = realloc(t->box, (size_t)capacity * sizeof *more);
        if (!more) t->err = err_set(ERR_MEMORY, "no memory for %lld boxes", (long long)capacity);
        else t->box = more, t->capacity = capacity;
    }
    if (t->err) return;
    b.chunk = t->chunks;
    t->chunks += flat_chunks((int64_t)b.rows * b.columns);
    t->box[t->count++] = b;
}

/* Place of a piece in the matrix as its owner has it, which is transposed if it is higher than wide. */
static void set_place(FlatBox *b, const MuonMatrix *m, Box piece)
{
    const int64_t rows = m->box.shape[0], columns = m->box.shape[1];
    b->row_step = (int32_t)(rows > columns ? 1 : columns);
    b->column_step = (int32_t)(rows > columns ? rows : 1);
    b->at = (piece.offset[0] - m->box.offset[0]) * b->row_step + (piece.offset[1] - m->box.offset[1]) * b->column_step;
}

/* Place of this rank's piece in the store. */
static FlatBox stored(const Muon *u, const MuonMatrix *m, const ShardBox *s)
{
    const int64_t rows = s->box.shape[0], columns = s->box.shape[1];
    const FlatPart at = param_flat_part(u->store, m->id, s->at, (rows - 1) * s->ld + columns);
    return (FlatBox){ .grad = at.grad,
                      .value = at.value,
                      .shard = at.shard,
                      .ld = (int32_t)s->ld,
                      .rows = (int32_t)rows,
                      .columns = (int32_t)columns,
                      .number = at.number,
                      .flags = at.flags,
                      .scale = scale_of(u->spec->scale, m->box) };
}

/* This rank's pieces, one behind the other from *at on. */
static void put_packed(Muon *u, BoxTable *t, const MuonMatrix *m, int64_t *at)
{
    const int n = pieces(u, m, u->comm->rank);
    for (int i = 0; i < n; i++) {
        FlatBox b = stored(u, m, &u->piece[i]);
        b.at = *at;
        b.row_step = b.columns;
        b.column_step = 1;
        *at += (int64_t)b.rows * b.columns;
        put(t, b);
    }
}

/* This rank's pieces, in the matrix that it owns. */
static void put_mine(Muon *u, BoxTable *t, const MuonMatrix *m)
{
    const int n = pieces(u, m, u->comm->rank);
    for (int i = 0; i < n; i++) {
        FlatBox b = stored(u, m, &u->piece[i]);
        set_place(&b, m, u->piece[i].box);
        put(t, b);
    }
}

/* A member's pieces between a buffer, one behind the other from *at on, and the matrix. */
static void put_member(Muon *u, BoxTable *t, const MuonMatrix *m, int member, int64_t *at)
{
    const int n = pieces(u, m, member);
    for (int i = 0; i < n; i++) {
        const Box piece = u->piece[i].box;
        const int32_t rows = (int32_t)piece.shape[0], columns = (int32_t)piece.shape[1];
        FlatBox b = { .shard = *at, .ld = columns, .rows = rows, .columns = columns };
        set_place(&b, m, piece);
        *at += box_count(piece);
        put(t, b);
    }
}

/* ---- what a round takes ---- */

/* A member in a round: elements, and the shape of the matrix that it owns, the shorter side first. */
typedef struct {
    int64_t send[MUON_WAYS], take[MUON_WAYS], rows, columns;
} Need;

/* The members that have the same elements of a parameter: the first, and how many. */
typedef struct {
    int first, before, count;
    int pieces;       /* of the matrix that is looked at, */
    int64_t elements; /* and their elements */
} Class;

typedef struct {
    Need *need;     /* [rounds][members] */
    int64_t *boxes; /* [members] of all rounds */
    Class *at;      /* [members] */
} Needs;

static void find_classes(const Muon *u, const Param *p, Class *at)
{
    for (int q = 0; q < u->comm->size; q++) at[q] = (Class){ .first = -1 };
    for (int q = 0; q < u->comm->size; q++) {
        if (at[q].first >= 0) continue;
        int count = 0;
        for (int i = q; i < u->comm->size; i++)
            if (at[i].first < 0 && same_part(u, p, q, i)) at[i] = (Class){ .first = q, .before = count++ };
        for (int i = q; i < u->comm->size; i++)
            if (at[i].first == q) at[i].count = count;
    }
}

/* Is the member the first that the owner has to give these elements to? */
static bool is_given(const Needs *n, const MuonMatrix *m, int member)
{
    const Class *c = &n->at[member];
    return c->before == (c->first == m->owner);
}

static void add_member(const Muon *u, Needs *n, const MuonMatrix *m, int q)
{
    Need *own = &n->need[(int64_t)m->round * u->comm->size], *of = own + q, *owner = own + m->owner;
    const Class *c = &n->at[q];
    n->boxes[q] += c->pieces; /* (its own, or what it is given) */
    if (q == m->owner) return;
    of->take[MUON_BACK] += c->elements;
    if (is_given(n, m, q)) {
        owner->send[MUON_BACK] += c->elements;
        n->boxes[m->owner] += c->pieces;
    }
    if (c->first == n->at[m->owner].first || c->before != m->owner % c->count) return;
    of->send[MUON_THERE] += c->elements;
    owner->take[MUON_THERE] += c->elements;
    n->boxes[q] += c->pieces;
    n->boxes[m->owner] += c->pieces;
}

static void add_matrix(Muon *u, Needs *n, const MuonMatrix *m)
{
    Need *owner = &n->need[(int64_t)m->round * u->comm->size + m->owner];
    owner->rows = min64(m->box.shape[0], m->box.shape[1]);
    owner->columns = max64(m->box.shape[0], m->box.shape[1]);
    for (int q = 0; q < u->comm->size; q++) {
        Class *c = &n->at[q];
        c->pieces = c->first == q ? pieces(u, m, q) : n->at[c->first].pieces;
        c->elements = c->first == q ? 0 : n->at[c->first].elements;
        for (int i = 0; c->first == q && i < c->pieces; i++) c->elements += box_count(u->piece[i].box);
    }
    for (int q = 0; q < u->comm->size; q++) add_member(u, n, m, q);
}

/* The most that run_round() takes at a time. */
static int64_t scratch_of(const Need *n, int64_t each)
{
    const int64_t all = n->rows * n->columns, wide = dtype_size(F32);
    const int64_t collect = arena_padded(wide * n->send[MUON_THERE]) + arena_padded(wide * n->take[MUON_THERE]) +
                            arena_padded(wide * all) + arena_padded(n->rows * dtype_size(I64));
    const int64_t products = 2 * arena_padded(each * n->rows * n->rows) + arena_padded(each * all);
    const int64_t back = arena_padded(each * n->send[MUON_BACK]) + arena_padded(each * n->take[MUON_BACK]);
    return arena_padded(each * all) + max64(collect, max64(products, back));
}

/* The scratch of each round, and *boxes: rows of the table; of the member that needs the most. */
static void find_most(Muon *u, Needs *n, int64_t *boxes)
{
    const int64_t each = dtype_size(u->store->value.dtype);
    const Param *p = NULL;
    for (int i = 0; i < u->count; i++) {
        if (param_of(u, &u->matrix[i]) != p) find_classes(u, p = param_of(u, &u->matrix[i]), n->at);
        add_matrix(u, n, &u->matrix[i]);
    }
    for (int q = 0; q < u->comm->size; q++) *boxes = max64(*boxes, n->boxes[q]);
    for (int r = 0; r < u->rounds; r++)
        for (int q = 0; q < u->comm->size; q++)
            u->round[r].scratch =
                max64(u->round[r].scratch, scratch_of(&n->need[(int64_t)r * u->comm->size + q], each));
}

static Err measure(Muon *u, int64_t *boxes)
{
    const size_t size = (size_t)u->comm->size;
    Needs n = { calloc((size_t)u->rounds * size + 1, sizeof *n.need), calloc(size, sizeof *n.boxes),
                calloc(size, sizeof *n.at) };
    Err err =
        n.need && n.boxes && n.at ? ERR_OK : err_set(ERR_MEMORY, "no memory for %d rounds of matrices", u->rounds);
    *boxes = 0;
    if (!err) find_most(u, &n, boxes);
    free(n.need);
    free(n.boxes);
    free(n.at);
    return err;
}

/* ---- rounds ---- */

/* This rank's matrices of each round, and others' in which it has a part: [rounds][members]. */
typedef struct {
    const MuonMatrix **of;
} Owners;

static const MuonMatrix *owned(const Muon *u, const Owners *o, int round, int member)
{
    return o->of[(int64_t)round * u->comm->size + member];
}

/* To the owners of other matrices what this rank is to send of them; and from them what it has. */
static void plan_others(Muon *u, BoxTable *t, const Owners *o, int round)
{
    MuonRound *r = &u->round[round];
    const int self = u->comm->rank;
    r->send = begin_range(t);
    for (int q = 0; q < u->comm->size; q++) {
        const MuonMatrix *m = owned(u, o, round, q);
        MuonParcel *p = &r->parcel[MUON_THERE][q];
        p->send_at = r->send_count[MUON_THERE];
        if (m && q != self && sends(u, m, self)) put_packed(u, t, m, &r->send_count[MUON_THERE]);
        p->send = r->send_count[MUON_THERE] - p->send_at;
    }
    end_range(t, &r->send);
    r->apply = begin_range(t);
    for (int q = 0; q < u->comm->size; q++) {
        const MuonMatrix *m = owned(u, o, round, q);
        MuonParcel *p = &r->parcel[MUON_BACK][q];
        p->take_at = r->take_count[MUON_BACK];
        if (m && q != self) put_packed(u, t, m, &r->take_count[MUON_BACK]);
        p->take = r->take_count[MUON_BACK] - p->take_at;
    }
    end_range(t, &r->apply);
}

/* Members that have the same elements get them from one place. */
static const MuonParcel *given(const Muon *u, const MuonRound *r, const MuonMatrix *m, int member)
{
    for (int q = 0; q < member; q++)
        if (q != u->comm->rank && same_part(u, param_of(u, m), q, member)) return &r->parcel[MUON_BACK][q];
    return NULL;
}

/* Plans the matrix that this rank owns. */
static void plan_own(Muon *u, BoxTable *t, const MuonMatrix *m, MuonRound *r)
{
    const int self = u->comm->rank;
    r->mine = begin_range(t);
    put_mine(u, t, m);
    end_range(t, &r->mine);
    r->place = begin_range(t);
    for (int q = 0; q < u->comm->size; q++) {
        MuonParcel *p = &r->parcel[MUON_THERE][q];
        p->take_at = r->take_count[MUON_THERE];
        if (q != self && sends(u, m, q)) put_member(u, t, m, q, &r->take_count[MUON_THERE]);
        p->take = r->take_count[MUON_THERE] - p->take_at;
    }
    end_range(t, &r->place);
    r->give = begin_range(t);
    for (int q = 0; q < u->comm->size; q++) {
        const MuonParcel *other = q == self ? NULL : given(u, r, m, q);
        MuonParcel *p = &r->parcel[MUON_BACK][q];
        p->send_at = other ? other->send_at : r->send_count[MUON_BACK];
        if (q == self) continue;
        if (!other) put_member(u, t, m, q, &r->send_count[MUON_BACK]);
        p->send = other ? other->send : r->send_count[MUON_BACK] - p->send_at;
    }
    end_range(t, &r->give);
}

static Err plan_rounds(Muon *u, BoxTable *t, const Owners *o, SetupArena *setup)
{
    for (int i = 0; i < u->rounds; i++) {
        MuonRound *r = &u->round[i];
        const MuonMatrix *m = owned(u, o, i, u->comm->rank);
        r->own = m ? (int)(m - u->matrix) : -1;
        for (int way = 0; way < MUON_WAYS; way++) TRY(setup_array(setup, u->comm->size, &r->parcel[way]));
        plan_others(u, t, o, i);
        if (m) plan_own(u, t, m, r);
    }
    return t->err;
}

static Err open_rounds(Muon *u, Stream *stream, Arena *state, SetupArena *setup)
{
    BoxTable t = { 0 };
    int64_t rows;
    TRY(setup_array(setup, u->rounds, &u->round));
    TRY(measure(u, &rows));
    Owners o = { calloc((size_t)u->rounds * (size_t)u->comm->size + 1, sizeof *o.of) };
    Err err = o.of ? ERR_OK : err_set(ERR_MEMORY, "no memory for owners of %d matrices", u->count);
    for (int i = 0; i < u->count && !err; i++)
        o.of[(int64_t)u->matrix[i].round * u->comm->size + u->matrix[i].owner] = &u->matrix[i];
    if (!err) err = plan_rounds(u, &t, &o, setup);
    ASSERT(err || t.count <= rows);
    if (!err) err = tensor_new(state, &u->boxes, I64, rows, sizeof *t.box / sizeof(int64_t));
    if (!err && t.count) err = device_write(stream, u->boxes.data, t.box, t.count * (int64_t)sizeof *t.box);
    free(t.box);
    free((void *)o.of);
    return err;
}

Err muon_open(Muon *u, ParamStore *store, World *world, const MuonSpec *spec, Stream *stream, Arena *state)
{
    SetupArena *setup = store->reg->setup;
    const GridShape shape = grid_shape(world->grid);
    *u = (Muon){ .store = store, .comm = &world->owners, .spec = spec };
    const int size = u->comm->size;
    int *member;
    ASSERT(size == group_size(shape, GROUP_OWNERS));
    TRY(setup_array(setup, size, &member));
    TRY(setup_array(setup, size, &u->place));
    group_members(shape, GROUP_OWNERS, group_of(shape, GROUP_OWNERS, world->rank), member);
    for (int q = 0; q < size; q++) u->place[q] = param_place(world->grid, member[q], store->reg->place.zero);
    TRY(list_matrices(u, setup));
    u->capacity = room_for_boxes(u);
    TRY(setup_array(setup, u->capacity, &u->held));
    TRY(setup_array(setup, u->capacity, &u->piece));
    TRY(choose_owners(u, setup));
    return open_rounds(u, stream, state, setup);
}

/* ---- the update ---- */

static Tensor box_range(const Muon *u, BoxRange r) { return tensor_row_slice(u->boxes, r.first, r.count); }

/* All members come to their exchanges in the order of distances, so none waits for one that waits for it. */
static Err exchange(const Muon *u, Stream *s, const MuonParcel *parcel, Tensor out, Tensor in)
{
    enum { DISTANCES = COMM_MESSAGES_MAX / 2 };
    const int size = u->comm->size, self = u->comm->rank;
    const int64_t each = dtype_size(out.dtype);
    for (int first = 1; first < size; first += DISTANCES) {
        CommMessage message[COMM_MESSAGES_MAX];
        int n = 0;
        for (int d = first; d < size && d < first + DISTANCES; d++) {
            const int to = (self + d) % size, from = (self - d + size) % size;
            char *const data = (char *)out.data + parcel[to].send_at * each;
            char *const room = (char *)in.data + parcel[from].take_at * each;
            if (parcel[to].send) message[n++] = (CommMessage){ true, to, data, parcel[to].send * each, { 0 } };
            if (parcel[from].take) message[n++] = (CommMessage){ false, from, room, parcel[from].take * each, { 0 } };
        }
        if (n) TRY(comm_exchange(u->comm, s, message, n, NULL));
    }
    return ERR_OK;
}

typedef struct {
    Muon *u;
    Stream *s;
    const StepValues *step;
    float decay;
    Arena *scratch;
} Update;

static Err pack(const Update *x, BoxRange r, Tensor y)
{
    const ParamStore *ps = x->u->store;
    if (!r.count) return ERR_OK;
    return op(x->s, muon_pack, .y = y, .m = ps->m, .g = ps->grad, .shift = ps->stats->shift,
              .boxes = box_range(x->u, r), .chunks = r.chunks, .step = x->step, .beta = x->u->spec->momentum,
              .nesterov = x->u->spec->nesterov);
}

static Err copy(const Update *x, BoxRange r, Tensor y, Tensor from, bool back)
{
    if (!r.count) return ERR_OK;
    return op(x->s, box_copy, .y = y, .x = from, .boxes = box_range(x->u, r), .chunks = r.chunks, .back = back);
}

static Err apply(const Update *x, BoxRange r, Tensor from)
{
    const ParamStore *ps = x->u->store;
    if (!r.count) return ERR_OK;
    return op(x->s, muon_apply, .w = ps->master, .copy = param_store_copy(ps), .x = from, .boxes = box_range(x->u, r),
              .chunks = r.chunks, .step = x->step, .decay = x->decay);
}

/* matrix: of no elements where this rank owns none in this round. */
static Err collect(const Update *x, const MuonRound *r, Tensor matrix)
{
    const ArenaMark mark = arena_mark(x->scratch);
    const int64_t count = tensor_count(matrix);
    Tensor out, in, sums, u;
    TRY(tensor_new(x->scratch, &out, F32, r->send_count[MUON_THERE]));
    TRY(tensor_new(x->scratch, &in, F32, r->take_count[MUON_THERE]));
    TRY(tensor_new(x->scratch, &u, F32, matrix.dim[0], matrix.dim[1]));
    TRY(tensor_new(x->scratch, &sums, I64, matrix.dim[0]));
    TRY(pack(x, r->send, out));
    TRY(pack(x, r->mine, tensor_reshape(u, count)));
    TRY(exchange(x->u, x->s, r->parcel[MUON_THERE], out, in));
    TRY(copy(x, r->place, tensor_reshape(u, count), in, false));
    if (count) TRY(op(x->s, normalize, .y = matrix, .sums = sums, .x = u, .eps = MUON_EPS));
    arena_release(x->scratch, mark);
    return ERR_OK;
}

static Err hand_out(const Update *x, const MuonRound *r, Tensor matrix)
{
    const ArenaMark mark = arena_mark(x->scratch);
    const Tensor flat = tensor_reshape(matrix, tensor_count(matrix));
    Tensor out, in;
    TRY(tensor_new(x->scratch, &out, matrix.dtype, r->send_count[MUON_BACK]));
    TRY(tensor_new(x->scratch, &in, matrix.dtype, r->take_count[MUON_BACK]));
    TRY(copy(x, r->give, out, flat, true));
    TRY(exchange(x->u, x->s, r->parcel[MUON_BACK], out, in));
    TRY(apply(x, r->mine, flat));
    TRY(apply(x, r->apply, in));
    arena_release(x->scratch, mark);
    return ERR_OK;
}

static Err run_round(const Update *x, const MuonRound *r)
{
    const ArenaMark mark = arena_mark(x->scratch);
    const Muon *u = x->u;
    const Box box = r->own < 0 ? (Box){ { 0, 0 }, { 0, 0 } } : u->matrix[r->own].box;
    Tensor matrix;
    void *room;
    TRY(arena_alloc(x->scratch, r->scratch, &room));
    arena_release(x->scratch, mark); /* (there it is for what follows) */
    TRY(tensor_new(x->scratch, &matrix, u->store->value.dtype, min64(box.shape[0], box.shape[1]),
                   max64(box.shape[0], box.shape[1])));
    TRY(collect(x, r, matrix));
    if (r->own >= 0) TRY(muon_newton_schulz(x->s, u->spec->set, u->spec->steps, matrix, x->scratch));
    TRY(hand_out(x, r, matrix));
    arena_release(x->scratch, mark);
    return ERR_OK;
}

Err muon_update(Muon *u, Stream *s, const StepValues *step, float decay, Arena *scratch)
{
    const ParamStore *ps = u->store;
    const Update x = { u, s, step, decay, scratch };
    if (ps->chunks)
        TRY(op(s, muon_moment, .m = ps->m, .g = ps->grad, .shift = ps->stats->shift, .parts = ps->parts,
               .chunks = ps->chunks, .step = step, .beta = u->spec->momentum));
    for (int i = 0; i < u->rounds; i++) TRY(run_round(&x, &u->round[i]));
    return ERR_OK;
}
