/*
 * Gated DeltaNet: each value head has a state, a matrix of fixed size. Every row decays, corrects and reads it. Heads
 * are cut over tp. Value head h reads key head h / (V / K):
 *
 *   q, k, v, z = x Wqkvz    columns lie key head by key head: its q and k, the v and z of the value heads that read it
 *   b, a       = x Wba      one of each for a value head; every rank of tp has all of Wba
 *   q, k, v    = silu(convolution over the last rows of each column)
 *   q, k       = both of length 1, q then / sqrt(D)
 *   beta, g    = gates of b and a: how much is written, and the logarithm of the decay
 *   o          = the gated delta rule (device/ops.def, delta_fwd)
 *   y          = (w norm(o) silu(z)) Wproj     the norm is of single heads; no linear layer here has a bias
 *
 * Forward keeps for backward: the convolution's input (`mixed`), z, b, a, o, the states at the start of windows, and
 * the input of Wproj. Selective recomputation leaves out the last two. Backward computes convolution, lengths and
 * gates again in any case.
 *
 * A slice hands two things to the slice behind it: its last state, and the last rows that its convolution has read. In
 * backward their gradients come back from there. Each slice has whole windows (DELTA_WINDOW), so it begins where a
 * window of the uncut sequence begins, and the bits are the same.
 *
 * Generation keeps the state at the start of the open window. Each call computes that window's rows again, so that a
 * text has the same bits however calls cut it.
 *
 * Ranks of cp exchange positions for heads behind the projections. Each then has all positions of its heads. Gates,
 * norm and z stay with the rows.
 *
 * Source: Yang, Kautz, Hatamizadeh 2024 (Gated Delta Networks).
 */
#include <math.h>
#include <stdio.h>

#include "layer/attend.h"
#include "layer/reshard.h"

static const float unit_eps = 1e-6f; /* of the lengths, as in published models */

typedef struct {
    const ModelSpec *spec;
    Linear qkvz, ba, proj;
    Norm norm;
    int conv, a_log, dt_bias;
} Delta;

/* With selective recomputation states and gated are not kept. mixed and states are of the positions and heads that
 * the scan has. */
typedef struct {
    Saved mixed, z, b, a, o, states, gated;
} DeltaSave;

/* ---- registration ---- */

static Err add_head_numbers(ParamRegistry *reg, const ModelSpec *s, const char *owner, const char *what, Init init,
                            int *id)
{
    char name[PARAM_NAME_MAX];
    snprintf(name, sizeof name, "%s.%s", owner, what);
    const ParamSpec p = { .name = name,
                          .ndim = 1,
                          .shape = { s->delta.value_heads, 1 },
                          .cut = { CUT_TP },
                          .init = init,
                          .flags = PARAM_FP32 };
    return param_add(reg, p, id);
}

static Err add_conv(Delta *m, ParamRegistry *reg, const char *owner)
{
    const DeltaSpec *d = &m->spec->delta;
    const int64_t keys = d->key_heads * d->key, values = d->value_heads * d->value;
    char name[PARAM_NAME_MAX];
    snprintf(name, sizeof name, "%s.conv.weight", owner);
    const ParamSpec conv = { .name = name,
                             .ndim = 2,
                             .shape = { 2 * keys + values, d->conv },
                             .cut = { CUT_TP },
                             .section = { keys, keys, values },
                             .interleave = d->key_heads,
                             .init = INIT_UNIFORM,
                             .std = 1 / sqrtf((float)d->conv),
                             .flags = PARAM_TABLE };
    return param_add(reg, conv, &m->conv);
}

/* tp_blocks must divide the number of key heads. */
static Err delta_add(void *own, ParamRegistry *reg, const ModelSpec *s, const char *name, int layer)
{
    Delta *m = own;
    const DeltaSpec *d = &s->delta;
    const int64_t keys = d->key_heads * d->key, values = d->value_heads * d->value;
    const Fp8Recipe fp8 = model_fp8(s, layer);
    char norm[PARAM_NAME_MAX];
    *m = (Delta){ .spec = s };
    ASSERT(d->key_heads > 0 && d->key_heads % s->tp_blocks == 0 && d->value_heads % d->key_heads == 0);
    TRY(linear_register(&m->qkvz, reg,
                        (LinearSpec){ name, "qkvz", s->hidden, 2 * keys + 2 * values, LINEAR_COLUMN,
                                      .std = model_hidden_std(s), .section = { keys, keys, values, values },
                                      .interleave = d->key_heads, .head_rows = { d->key, d->key, d->value, d->value },
                                      .fp8 = fp8 }));
    TRY(linear_register(&m->ba, reg,
                        (LinearSpec){ name, "ba", s->hidden, 2 * d->value_heads, LINEAR_WHOLE,
                                      .std = model_hidden_std(s) }));
    TRY(add_conv(m, reg, name));
    TRY(add_head_numbers(reg, s, name, "a_log", INIT_LOG_RATE, &m->a_log));
    TRY(add_head_numbers(reg, s, name, "dt_bias", INIT_TIME, &m->dt_bias));
    snprintf(norm, sizeof norm, "%s.norm", name);
    TRY(norm_register(&m->norm, reg, norm, d->value, NORM_RMS, s->norm_eps, PARTIAL_HEADS));
    return linear_register(&m->proj, reg,
                           (LinearSpec){ name, "proj", values, s->hidden, LINEAR_ROW, .std = model_projection_std(s),
                                         .fp8 = fp8 });
}

/* ---- sizes and views ---- */

/* One call, and its sizes: of the rows as other layers have them, with the heads of this rank of tp; and of the scan,
 * whose positions and heads ranks of cp exchange. */
typedef struct {
    const Delta *m;
    Ctx *c;
    const DeltaSave *save;
    ReshardPlan exchange;
    int64_t B, T, N, K, V;
    int64_t rows, keys, values; /* of the scan: rows of a sample, heads */
    int64_t first;              /* position of its first row */
    int64_t D, E, group;        /* widths of keys and values; value heads of a key head */
    int64_t mixed, chunk;       /* columns of a key head: q, k and v; these and z */
    int64_t before;             /* rows that the convolution sees besides the present one */
} Call;

static Call call_of(const Delta *m, Ctx *c, const DeltaSave *save)
{
    const DeltaSpec *d = &m->spec->delta;
    const int64_t tp = c->world->tp.size, cp = c->world->cp.size, group = d->value_heads / d->key_heads;
    Call k = { .m = m,
               .c = c,
               .save = save,
               .exchange.heads = cp > 1 ? &c->world->cp : NULL,
               .B = c->batch->B,
               .T = c->batch->T,
               .K = d->key_heads / tp,
               .V = d->value_heads / tp,
               .first = cp > 1 ? slice_span(c, c->slices.at).first[0] : c->batch->span.first[0],
               .D = d->key,
               .E = d->value,
               .group = group,
               .mixed = 2 * d->key + group * d->value,
               .before = d->conv - 1 };
    k.N = k.B * k.T;
    k.chunk = k.mixed + group * d->value;
    k.rows = k.T * cp;
    k.keys = k.K / cp;
    k.values = k.V / cp;
    return k;
}

static int64_t windows_of(int64_t rows) { return (rows + DELTA_WINDOW - 1) / DELTA_WINDOW; }

/* Some columns of each chunk of t [N, chunks]: [N * chunks / chunk, columns]. */
static Tensor part_of(Tensor t, int64_t chunk, int64_t before, int64_t columns)
{
    return tensor_col_slice(tensor_reshape(t, tensor_count(t) / chunk, chunk), before, columns);
}

/* Heads that lie `group` side by side in each row of t, one below the other. */
static Tensor below(Tensor t, int64_t group)
{
    return (Tensor){ .data = t.data,
                     .dim = { t.dim[0] * group, t.dim[1] / group },
                     .ld = t.ld,
                     .group = group,
                     .ndim = 2,
                     .dtype = t.dtype };
}

/* The same by sample and row: [B, rows, heads, width]. */
static Tensor by_row(const Call *k, Tensor t, int64_t group, int64_t rows)
{
    t = below(t, group);
    return (Tensor){ .data = t.data,
                     .dim = { k->B, rows, t.dim[0] / (k->B * rows), t.dim[1] },
                     .ld = t.ld,
                     .group = t.group,
                     .ndim = 4,
                     .dtype = t.dtype };
}

/* q, k and v in columns as the convolution has them. */
typedef struct {
    Tensor q, k, v;
} Mixed;

static Mixed mixed_in(const Call *k, Tensor t)
{
    return (Mixed){ part_of(t, k->mixed, 0, k->D), part_of(t, k->mixed, k->D, k->D),
                    part_of(t, k->mixed, 2 * k->D, k->group * k->E) };
}

static Tensor rows_of_heads(Tensor t, int64_t columns) { return tensor_reshape(t, tensor_count(t) / columns, columns); }

/* ---- what the scan reads ---- */

/* Rows of the scan: mixed [B, rows, channels]; g and beta [B, rows, values]; the rows ahead of them that the
 * convolution sees, and the state ahead of the first, absent at the start of a sequence. */
typedef struct {
    Tensor mixed, g, beta, doc;
    Tensor ahead, state;
    int64_t first, rows;
} Scan;

/* The rows of the convolution's weight, or of its gradient, of the heads that this rank of cp has. */
static Tensor own_channels(const Call *k, Tensor weight)
{
    const int64_t channels = k->keys * k->mixed;
    return tensor_row_slice(weight, k->exchange.heads ? channels * k->c->world->cp.rank : 0, channels);
}

static Err convolve(const Call *k, const Scan *x, Tensor *y)
{
    Ctx *c = k->c;
    const Tensor w = own_channels(k, param_value(c, k->m->conv));
    TRY(tensor_new(c->scratch, y, c->dtype, k->B, x->rows, k->keys * k->mixed));
    return op(c->s, conv_silu_fwd, .y = *y, .x = x->mixed, .w = w, .before = x->ahead, .doc = x->doc,
              .first = x->first);
}

/* Queries and keys of length 1. `to` may be `from`. */
static Err unit_lengths(const Call *k, Mixed from, Mixed to)
{
    Ctx *c = k->c;
    TRY(op(c->s, unit_fwd, .y = to.q, .x = from.q, .factor = 1 / sqrtf((float)k->D), .eps = unit_eps));
    return op(c->s, unit_fwd, .y = to.k, .x = from.k, .factor = 1, .eps = unit_eps);
}

/* o [B, rows, values, E]; states and after may be absent. */
static Err scan_forward(const Call *k, const Scan *x, Tensor o, Tensor states, Tensor after)
{
    Ctx *c = k->c;
    ArenaMark mark = arena_mark(c->scratch);
    Tensor y;
    TRY(convolve(k, x, &y));
    const Mixed h = mixed_in(k, y);
    TRY(unit_lengths(k, h, h));
    TRY(op(c->s, delta_fwd, .o = o, .states = states, .after = after, .q = by_row(k, h.q, 1, x->rows),
           .k = by_row(k, h.k, 1, x->rows), .v = by_row(k, h.v, k->group, x->rows), .g = x->g, .beta = x->beta,
           .doc = x->doc, .before = x->state, .first = x->first));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* beta and g [B, T, K, group] of this rank's rows. */
static Err gates_forward(const Call *k, Tensor b, Tensor a, Tensor *beta, Tensor *g)
{
    Ctx *c = k->c;
    TRY(tensor_new(c->scratch, beta, F32, k->B, k->T, k->K, k->group));
    TRY(tensor_new(c->scratch, g, F32, k->B, k->T, k->K, k->group));
    return op(c->s, delta_gates_fwd, .beta = tensor_reshape(*beta, k->N, k->V), .g = tensor_reshape(*g, k->N, k->V),
              .b = b, .a = a, .a_log = param_value(c, k->m->a_log), .dt_bias = param_value(c, k->m->dt_bias),
              .top = k->m->spec->delta.negative ? 2 : 1);
}

/* ---- slices ---- */

/* State and last rows of a slice, for the one behind it. ndim 0: they have not been computed yet. */
typedef struct {
    Saved state, tail;
} DeltaKept;

/* Gradients of these, which the slice behind has left. */
typedef struct {
    Tensor state, tail;
} DeltaGrads;

static bool hands_over(const Ctx *c) { return c->slices.at + 1 < c->slices.count; }

/* State and rows that come from the slice before. */
static void take_over(const Call *k, Scan *x)
{
    Ctx *c = k->c;
    if (c->slices.at == 0) return;
    const Slot *slot = c->slices.slots[c->slices.at - 1];
    const DeltaKept *kept = slot->kept[c->block.layer];
    x->state = save_in(slot, kept->state);
    x->ahead = save_in(slot, kept->tail);
}

/* y [B, n, columns] = rows of each sample of x [B, rows, columns], from `first` on. */
static Err copy_some_rows(Ctx *c, Tensor y, Tensor x, int64_t first)
{
    const int64_t B = x.dim[0], rows = x.dim[1], n = y.dim[1], columns = x.dim[2];
    for (int64_t b = 0; b < B; b++) {
        const Tensor from = tensor_row_slice(tensor_reshape(x, B * rows, columns), b * rows + first, n);
        const Tensor to = tensor_row_slice(tensor_reshape(y, B * n, columns), b * n, n);
        TRY(device_copy(c->s, to.data, from.data, tensor_bytes(to)));
    }
    return ERR_OK;
}

static Err hand_over(const Call *k, const Scan *x, Tensor after)
{
    Ctx *c = k->c;
    ArenaMark mark = arena_mark(c->scratch);
    Tensor tail;
    if (!after.data) return ERR_OK;
    DeltaKept *kept = c->slot->kept[c->block.layer];
    TRY(tensor_new(c->scratch, &tail, c->dtype, k->B, k->before, k->keys * k->mixed));
    TRY(copy_some_rows(c, tail, x->mixed, x->rows - k->before));
    TRY(save_for_slices(c, after, true, &kept->state));
    TRY(save_for_slices(c, tail, true, &kept->tail));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* The state behind the slice, if it is to be handed over; made again it has been already. */
static Err after_alloc(const Call *k, Tensor *after)
{
    Ctx *c = k->c;
    *after = (Tensor){ 0 };
    if (!hands_over(c) || ((const DeltaKept *)c->slot->kept[c->block.layer])->state.ndim) return ERR_OK;
    return tensor_new(c->scratch, after, F32, k->B, k->values, k->D, k->E);
}

/* ---- generation ---- */

/*
 * The state at the start of the open window. `rows`: those ahead of it that the convolution sees, then the window's;
 * their gates and documents.
 */
typedef struct {
    Tensor state;   /* [1, V, D, E] */
    Tensor rows;    /* [conv - 1 + DELTA_WINDOW, channels] */
    Tensor g, beta; /* [DELTA_WINDOW, V] */
    Tensor doc;     /* [DELTA_WINDOW, 1] */
} DeltaCache;

/* all [at + n, ...] has room for `own` [n, ...] behind the first `at` rows of `kept`. */
static Err join(Ctx *c, Tensor all, Tensor kept, int64_t at, Tensor own)
{
    if (at) TRY(device_copy(c->s, all.data, kept.data, tensor_bytes(tensor_row_slice(kept, 0, at))));
    return device_copy(c->s, tensor_row_slice(all, at, own.dim[0]).data, own.data, tensor_bytes(own));
}

/* The first rows of `kept` become those of `all` from row `first` to its row `end`. */
static Err keep(Ctx *c, Tensor kept, Tensor all, int64_t first, int64_t end)
{
    const Tensor from = tensor_row_slice(all, first, end - first);
    return end > first ? device_copy(c->s, kept.data, from.data, tensor_bytes(from)) : ERR_OK;
}

/* Rows of the open window and the new ones, in memory that is as large wherever the window opens. */
static Err all_rows(const Call *k, const DeltaCache *cache, const Scan *own, int64_t open, Scan *x, Tensor *rows)
{
    Ctx *c = k->c;
    const int64_t room = DELTA_WINDOW - 1 + k->T, channels = k->K * k->mixed;
    Tensor g, beta, doc = { 0 };
    TRY(tensor_new(c->scratch, rows, c->dtype, k->before + room, channels));
    TRY(tensor_new(c->scratch, &g, F32, room, k->V));
    TRY(tensor_new(c->scratch, &beta, F32, room, k->V));
    if (own->doc.data) TRY(tensor_new(c->scratch, &doc, I32, room, 1));
    TRY(join(c, *rows, cache->rows, k->before + open, tensor_reshape(own->mixed, k->T, channels)));
    TRY(join(c, g, cache->g, open, tensor_reshape(own->g, k->T, k->V)));
    TRY(join(c, beta, cache->beta, open, tensor_reshape(own->beta, k->T, k->V)));
    if (doc.data) TRY(join(c, doc, cache->doc, open, tensor_reshape(own->doc, k->T, 1)));
    const int64_t n = open + k->T;
    *x = (Scan){ .mixed = tensor_reshape(tensor_row_slice(*rows, k->before, n), 1, n, channels),
                 .g = tensor_reshape(tensor_row_slice(g, 0, n), 1, n, k->V),
                 .beta = tensor_reshape(tensor_row_slice(beta, 0, n), 1, n, k->V),
                 .ahead = tensor_reshape(tensor_row_slice(*rows, 0, k->before), 1, k->before, channels),
                 .state = cache->state,
                 .first = k->first - open,
                 .rows = n };
    if (doc.data) x->doc = tensor_reshape(tensor_row_slice(doc, 0, n), 1, n);
    return ERR_OK;
}

/* The cache goes on to the window that is open behind the rows of x. */
static Err keep_open(const Call *k, DeltaCache *cache, const Scan *x, Tensor rows, Tensor states, Tensor after)
{
    Ctx *c = k->c;
    const int64_t open = x->rows % DELTA_WINDOW, from = x->rows - open, each = k->V * k->D;
    const Tensor state = open ? tensor_row_slice(tensor_reshape(states, tensor_count(states) / k->E, k->E),
                                                 from / DELTA_WINDOW * each, each)
                              : after;
    TRY(device_copy(c->s, cache->state.data, state.data, tensor_bytes(cache->state)));
    TRY(keep(c, cache->rows, rows, from, k->before + x->rows));
    TRY(keep(c, cache->g, tensor_reshape(x->g, x->rows, k->V), from, x->rows));
    TRY(keep(c, cache->beta, tensor_reshape(x->beta, x->rows, k->V), from, x->rows));
    return x->doc.data ? keep(c, cache->doc, tensor_reshape(x->doc, x->rows, 1), from, x->rows) : ERR_OK;
}

static Err begin_cache(Ctx *c, const DeltaCache *cache)
{
    TRY(op(c->s, fill_zero, .x = cache->rows));
    return op(c->s, fill_zero, .x = rows_of_heads(cache->state, cache->state.dim[3]));
}

static Err cached_forward(const Call *k, const Scan *own, Tensor o)
{
    Ctx *c = k->c;
    DeltaCache *cache = c->block.cache;
    ArenaMark mark = arena_mark(c->scratch);
    const int64_t open = k->first % DELTA_WINDOW, room = windows_of(DELTA_WINDOW - 1 + k->T);
    Tensor rows, all, states, after;
    Scan x;
    ASSERT(k->B == 1 && !k->exchange.heads && k->V == k->m->spec->delta.value_heads);
    if (k->first == 0) TRY(begin_cache(c, cache));
    TRY(all_rows(k, cache, own, open, &x, &rows));
    TRY(tensor_new(c->scratch, &all, c->dtype, DELTA_WINDOW - 1 + k->T, k->V * k->E));
    TRY(tensor_new(c->scratch, &states, F32, room * k->V * k->D, k->E));
    TRY(tensor_new(c->scratch, &after, F32, 1, k->V, k->D, k->E));
    const int64_t heads = windows_of(x.rows) * k->V; /* (of as many windows as there are) */
    states = tensor_reshape(tensor_row_slice(states, 0, heads * k->D), heads, k->D, k->E);
    TRY(scan_forward(k, &x, tensor_reshape(tensor_row_slice(all, 0, x.rows), 1, x.rows, k->V, k->E), states, after));
    TRY(keep_open(k, cache, &x, rows, states, after));
    TRY(device_copy(c->s, o.data, tensor_row_slice(all, open, k->T).data, tensor_bytes(o)));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- forward ---- */

static bool keeps(const Call *k) { return !ctx_recomputes(k->c, k->m->spec); }

typedef struct {
    Tensor mixed, z, b, a, o, states, gated;
} Outputs;

static Err outputs_alloc(const Call *k, DeltaSave *save, Outputs *t)
{
    Ctx *c = k->c;
    const bool cached = c->block.cache;
    *t = (Outputs){ .states = { 0 } };
    TRY(save_new(c, REGION_I, &t->mixed, &save->mixed, c->dtype, k->B, k->rows, k->keys, k->mixed));
    TRY(save_new(c, REGION_I, &t->z, &save->z, c->dtype, k->N, k->V, k->E));
    TRY(save_new(c, REGION_I, &t->b, &save->b, c->dtype, k->N, k->V));
    TRY(save_new(c, REGION_I, &t->a, &save->a, c->dtype, k->N, k->V));
    TRY(save_new(c, REGION_I, &t->o, &save->o, c->dtype, k->B, k->T, k->V, k->E));
    if (keeps(k) && !cached)
        TRY(save_new(c, REGION_I, &t->states, &save->states, F32, k->B * windows_of(k->rows) * k->values, k->D, k->E));
    return save_if(c, keeps(k), REGION_W, &t->gated, &save->gated, c->dtype, k->N, k->V, k->E);
}

/* mixed [N, K * mixed] of this rank's rows. */
static Err project(const Call *k, Tensor x, Tensor mixed, const Outputs *t)
{
    Ctx *c = k->c;
    ArenaMark mark = arena_mark(c->scratch);
    const int64_t values = k->group * k->E;
    Tensor qkvz;
    TRY(tensor_new(c->scratch, &qkvz, c->dtype, k->N, k->K * k->chunk));
    TRY(linear_forward(&k->m->qkvz, c, x, qkvz));
    TRY(copy_rows(c, rows_of_heads(mixed, k->mixed), part_of(qkvz, k->chunk, 0, k->mixed)));
    TRY(copy_rows(c, rows_of_heads(t->z, values), part_of(qkvz, k->chunk, k->mixed, values)));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Columns of this rank's heads in t [rows, 2 * heads]: of b (0) or a (1). */
static Tensor gate_columns(const Call *k, Tensor t, int which)
{
    return tensor_col_slice(t, which * k->m->spec->delta.value_heads + k->c->world->tp.rank * k->V, k->V);
}

/* b and a of this rank's heads. Their rows travel, two numbers a head, where those of x would travel a second time. */
static Err project_gates(const Call *k, Tensor x, const Outputs *t)
{
    Ctx *c = k->c;
    ArenaMark mark = arena_mark(c->scratch);
    Tensor own, all;
    TRY(tensor_new(c->scratch, &own, c->dtype, x.dim[0], k->m->ba.out));
    TRY(linear_forward(&k->m->ba, c, x, own));
    TRY(gather_rows(c, own, &all));
    TRY(copy_rows(c, t->b, gate_columns(k, all, 0)));
    TRY(copy_rows(c, t->a, gate_columns(k, all, 1)));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* What reshard_in has left, for the ops; ahead and state are those of the slice before. */
static Scan scan_of(const Call *k, Tensor mixed, Tensor g, Tensor beta, Tensor doc)
{
    Scan x = { .mixed = tensor_reshape(mixed, k->B, k->rows, k->keys * k->mixed),
               .g = tensor_reshape(g, k->B, k->rows, k->values),
               .beta = tensor_reshape(beta, k->B, k->rows, k->values),
               .doc = doc,
               .first = k->first,
               .rows = k->rows };
    take_over(k, &x);
    return x;
}

/* o of this rank's rows from `mixed` of them; t->mixed becomes that of the scan. */
static Err mix(const Call *k, Tensor mixed, const Outputs *t)
{
    Ctx *c = k->c;
    Tensor beta, g, after, doc = c->batch->doc;
    Tensor o = tensor_reshape(t->o, k->B, k->T, k->K, k->group * k->E);
    TRY(gates_forward(k, t->b, t->a, &beta, &g));
    Reshard r = { .in = { &mixed, &g, &beta }, .doc = &doc, .out = { &o } };
    TRY(reshard_in(c, &k->exchange, &r));
    if (mixed.data != t->mixed.data) TRY(device_copy(c->s, t->mixed.data, mixed.data, tensor_bytes(mixed)));
    const Scan x = scan_of(k, mixed, g, beta, doc);
    if (c->block.cache) return cached_forward(k, &x, o);
    TRY(after_alloc(k, &after));
    TRY(scan_forward(k, &x, tensor_reshape(o, k->B, k->rows, k->values, k->E), t->states, after));
    TRY(hand_over(k, &x, after));
    return reshard_out(c, &k->exchange, &r);
}

/* The weight of the norm, or its gradient, as the one row that all heads have. */
static Tensor norm_row(Tensor w) { return tensor_reshape(w, 1, tensor_count(w)); }

static Err norm_of_heads(const Call *k, Tensor o, Tensor z, Tensor y)
{
    const Norm *n = &k->m->norm;
    return op(k->c->s, gated_norm_fwd, .y = rows_of_heads(y, k->E), .x = rows_of_heads(o, k->E),
              .z = rows_of_heads(z, k->E), .w = norm_row(param_value(k->c, n->weight)), .eps = n->eps);
}

static Err delta_forward(const void *own, Ctx *c, Tensor x, Tensor y, void *kept)
{
    const Delta *m = own;
    DeltaSave *save = kept;
    const Call k = call_of(m, c, save);
    const bool in_scratch = c->into[REGION_I] == c->scratch; /* full recomputation: the saves stay there */
    Outputs t;
    TRY(outputs_alloc(&k, save, &t));
    ArenaMark mark = arena_mark(c->scratch);
    Tensor mixed = t.mixed;
    if (k.exchange.heads) TRY(tensor_new(c->scratch, &mixed, c->dtype, k.B, k.T, k.K, k.mixed));
    TRY(project(&k, x, mixed, &t));
    TRY(project_gates(&k, x, &t));
    TRY(mix(&k, mixed, &t));
    TRY(norm_of_heads(&k, t.o, t.z, t.gated));
    if (!in_scratch) arena_release(c->scratch, mark);
    return linear_forward(&m->proj, c, tensor_reshape(t.gated, k.N, k.V * k.E), y);
}

/* ---- backward ---- */

/* Gradients of what the scan reads; those of this rank's rows once they are exchanged. */
typedef struct {
    Tensor mixed, g, beta; /* [B, T, K, ...] */
} ScanGrads;

static Err conv_backward(const Call *k, const Scan *x, Tensor dy, Tensor dx, Tensor after, Tensor dahead)
{
    Ctx *c = k->c;
    const int id = k->m->conv;
    bool fresh = false;
    Tensor acc;
    const Tensor w = own_channels(k, param_value(c, id));
    if (k->exchange.heads) TRY(grad_open(c, id, &acc));
    else acc = grad_target(c, id, &fresh);
    TRY(op(c->s, conv_silu_bwd, .dx = dx, .dw = own_channels(k, acc), .dbefore = dahead, .dy = dy, .after = after,
           .x = x->mixed, .w = w, .before = x->ahead, .doc = x->doc, .shift_w = param_store_shift(c->params, id),
           .overflow = c->params->stats->overflow, .first = x->first, .leaf = c->canon.leaf_rows,
           .headroom_bits = c->canon.headroom_bits, .fresh = fresh));
    return grad_added(c, id);
}

/* The states at the start of windows, made again if they were not kept. */
static Err states_of(const Call *k, const Scan *x, Tensor *states)
{
    Ctx *c = k->c;
    Tensor o;
    const Tensor none = { 0 };
    if (keeps(k)) return *states = save_get(c, k->save->states), ERR_OK;
    TRY(tensor_new(c->scratch, states, F32, k->B * windows_of(k->rows) * k->values, k->D, k->E));
    ArenaMark mark = arena_mark(c->scratch);
    TRY(tensor_new(c->scratch, &o, c->dtype, k->B, k->rows, k->values, k->E));
    TRY(scan_forward(k, x, o, *states, none));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Gradients for the slice before, in scratch; absent where there is none. */
static Err ahead_alloc(const Call *k, DeltaGrads *d)
{
    Ctx *c = k->c;
    *d = (DeltaGrads){ .state = { 0 } };
    if (c->slices.at == 0) return ERR_OK;
    TRY(tensor_new(c->scratch, &d->state, F32, k->B, k->values, k->D, k->E));
    return tensor_new(c->scratch, &d->tail, F32, k->B, k->before, k->keys * k->mixed);
}

static Err give_back(const Call *k, const DeltaGrads *d)
{
    Ctx *c = k->c;
    if (!d->state.data) return ERR_OK;
    const DeltaGrads *to = c->slices.grads[c->block.layer];
    TRY(device_copy(c->s, to->state.data, d->state.data, tensor_bytes(d->state)));
    return device_copy(c->s, to->tail.data, d->tail.data, tensor_bytes(d->tail));
}

/* From go [B, rows, values, E] the gradients of the scan's rows. */
static Err scan_backward(const Call *k, const Scan *x, Tensor go, const ScanGrads *d)
{
    Ctx *c = k->c;
    const DeltaGrads none = { .state = { 0 } },
                     behind = hands_over(c) ? *(DeltaGrads *)c->slices.grads[c->block.layer] : none;
    const int64_t channels = k->keys * k->mixed, n = k->rows;
    Tensor states, y, unit, dy;
    DeltaGrads ahead;
    TRY(states_of(k, x, &states));
    TRY(ahead_alloc(k, &ahead));
    TRY(convolve(k, x, &y));
    TRY(tensor_new(c->scratch, &unit, c->dtype, k->B, n, channels));
    TRY(tensor_new(c->scratch, &dy, c->dtype, k->B, n, channels));
    const Mixed raw = mixed_in(k, y), h = mixed_in(k, unit), dh = mixed_in(k, dy);
    TRY(unit_lengths(k, raw, h));
    TRY(op(c->s, delta_bwd, .dq = by_row(k, dh.q, 1, n), .dk = by_row(k, dh.k, 1, n),
           .dv = by_row(k, dh.v, k->group, n), .dg = tensor_reshape(d->g, k->B, n, k->values),
           .dbeta = tensor_reshape(d->beta, k->B, n, k->values), .dbefore = ahead.state, .go = go,
           .dafter = behind.state, .q = by_row(k, h.q, 1, n), .k = by_row(k, h.k, 1, n),
           .v = by_row(k, raw.v, k->group, n), .g = x->g, .beta = x->beta, .states = states, .doc = x->doc,
           .first = x->first));
    TRY(op(c->s, unit_bwd, .dx = dh.q, .dy = dh.q, .x = raw.q, .factor = 1 / sqrtf((float)k->D), .eps = unit_eps));
    TRY(op(c->s, unit_bwd, .dx = dh.k, .dy = dh.k, .x = raw.k, .factor = 1, .eps = unit_eps));
    TRY(conv_backward(k, x, dy, tensor_reshape(d->mixed, k->B, n, channels), behind.tail, ahead.tail));
    return give_back(k, &ahead);
}

/* From go [N, V * E] the gradients of this rank's rows. */
static Err mix_backward(const Call *k, Tensor go, ScanGrads *d)
{
    Ctx *c = k->c;
    Tensor beta, g, doc = c->batch->doc;
    TRY(tensor_new(c->scratch, &d->mixed, c->dtype, k->B, k->T, k->K, k->mixed));
    TRY(tensor_new(c->scratch, &d->g, F32, k->B, k->T, k->K, k->group));
    TRY(tensor_new(c->scratch, &d->beta, F32, k->B, k->T, k->K, k->group));
    ArenaMark mark = arena_mark(c->scratch);
    go = tensor_reshape(go, k->B, k->T, k->K, k->group * k->E);
    TRY(gates_forward(k, save_get(c, k->save->b), save_get(c, k->save->a), &beta, &g));
    ScanGrads of = *d;
    Reshard r = { .in = { &go, &g, &beta }, .doc = &doc, .out = { &of.mixed, &of.g, &of.beta } };
    TRY(reshard_in(c, &k->exchange, &r));
    const Scan x = scan_of(k, save_get(c, k->save->mixed), g, beta, doc);
    TRY(scan_backward(k, &x, tensor_reshape(go, k->B, k->rows, k->values, k->E), &of));
    TRY(reshard_out(c, &k->exchange, &r));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* dba: the gradient of Wba's result for own rows, from those of b and a [N, V] for own heads. */
static Err gather_gates(const Call *k, Tensor db, Tensor da, Tensor dba)
{
    Ctx *c = k->c;
    Tensor heads;
    TRY(partial_alloc(c, dba, &heads));
    if (c->world->tp.size > 1) TRY(op(c->s, fill_zero, .x = heads)); /* other ranks' */
    TRY(copy_rows(c, gate_columns(k, heads, 0), db));
    TRY(copy_rows(c, gate_columns(k, heads, 1), da));
    return reduce_rows(c, heads, dba);
}

static Err gates_backward(const Call *k, const ScanGrads *d, Tensor dba)
{
    Ctx *c = k->c;
    const Delta *m = k->m;
    ArenaMark mark = arena_mark(c->scratch);
    bool fresh, as_fresh;
    Tensor db, da;
    TRY(tensor_new(c->scratch, &db, c->dtype, k->N, k->V));
    TRY(tensor_new(c->scratch, &da, c->dtype, k->N, k->V));
    const Tensor a_log = grad_target(c, m->a_log, &fresh), dt_bias = grad_target(c, m->dt_bias, &as_fresh);
    ASSERT(fresh == as_fresh); /* each call adds to both */
    TRY(op(c->s, delta_gates_bwd, .db = db, .da = da, .da_log = a_log, .ddt_bias = dt_bias,
           .dbeta = tensor_reshape(d->beta, k->N, k->V), .dg = tensor_reshape(d->g, k->N, k->V),
           .b = save_get(c, k->save->b), .a = save_get(c, k->save->a), .a_log = param_value(c, m->a_log),
           .dt_bias = param_value(c, m->dt_bias), .shift_a = param_store_shift(c->params, m->a_log),
           .shift_dt = param_store_shift(c->params, m->dt_bias), .overflow = c->params->stats->overflow,
           .top = m->spec->delta.negative ? 2 : 1, .leaf = c->canon.leaf_rows, .headroom_bits = c->canon.headroom_bits,
           .fresh = fresh));
    TRY(grad_added(c, m->a_log));
    TRY(grad_added(c, m->dt_bias));
    TRY(gather_gates(k, db, da, dba));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* go [N, V * E], the gradient behind the norm, becomes that of o; that of z goes to its columns of dqkvz. */
static Err norm_of_heads_backward(const Call *k, Tensor go, Tensor dqkvz)
{
    Ctx *c = k->c;
    const Norm *n = &k->m->norm;
    bool fresh;
    const Tensor dz = below(part_of(dqkvz, k->chunk, k->mixed, k->group * k->E), k->group);
    const Tensor dw = norm_row(grad_target(c, n->weight, &fresh)), rows = rows_of_heads(go, k->E);
    TRY(op(c->s, gated_norm_bwd, .dx = rows, .dz = dz, .dw = dw, .dy = rows,
           .x = rows_of_heads(save_get(c, k->save->o), k->E), .z = rows_of_heads(save_get(c, k->save->z), k->E),
           .w = norm_row(param_value(c, n->weight)), .shift = param_store_shift(c->params, n->weight),
           .overflow = c->params->stats->overflow, .eps = n->eps, .leaf = 1, .headroom_bits = c->canon.headroom_bits,
           .fresh = fresh));
    return grad_added(c, n->weight);
}

/* What Wproj has read, made again where a later W finds it if it was not kept. */
static Err gated_of(const Call *k, Tensor *gated)
{
    Ctx *c = k->c;
    if (!keeps(k)) {
        TRY(dy_alloc(c, gated, k->N, k->V * k->E));
        return norm_of_heads(k, save_get(c, k->save->o), save_get(c, k->save->z), *gated);
    }
    *gated = tensor_reshape(save_get(c, k->save->gated), k->N, k->V * k->E);
    return ERR_OK;
}

static Err delta_backward(const void *own, Ctx *c, const void *kept, Tensor x, Tensor dy, Tensor dx)
{
    const Delta *m = own;
    const Call k = call_of(m, c, kept);
    ArenaMark mark = arena_mark(c->scratch);
    Tensor dqkvz, dba, gated, go, through;
    ScanGrads d;
    TRY(dy_alloc(c, &dqkvz, k.N, k.K * k.chunk));
    TRY(dy_alloc(c, &dba, x.dim[0], m->ba.out));
    TRY(gated_of(&k, &gated));
    TRY(tensor_new(c->scratch, &go, c->dtype, k.N, k.V * k.E));
    TRY(tensor_new(c->scratch, &through, c->dtype, dx.dim[0], dx.dim[1]));
    TRY(linear_backward(&m->proj, c, gated, dy, go));
    TRY(norm_of_heads_backward(&k, go, dqkvz));
    TRY(mix_backward(&k, go, &d));
    TRY(copy_rows(c, part_of(dqkvz, k.chunk, 0, k.mixed), rows_of_heads(d.mixed, k.mixed)));
    TRY(gates_backward(&k, &d, dba));
    TRY(linear_backward(&m->qkvz, c, x, dqkvz, dx));
    TRY(linear_backward(&m->ba, c, x, dba, through));
    TRY(add_rows(c, dx, through));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- the kind ---- */

/* Wqkvz, Wba, Wproj, and the convolution. */
static int64_t delta_flop(const ModelSpec *s)
{
    const DeltaSpec *d = &s->delta;
    const int64_t keys = d->key_heads * d->key, values = d->value_heads * d->value;
    return 2 * (s->hidden * (2 * keys + 3 * values + 2 * d->value_heads) + d->conv * (2 * keys + values));
}

/* A state is decayed and read, corrected, and read again: four products of its size. */
static int64_t delta_state_flop(const ModelSpec *s)
{
    const DeltaSpec *d = &s->delta;
    return 8 * d->value_heads * d->key * d->value;
}

static int64_t no_pair_flop(const ModelSpec *s)
{
    (void)s;
    return 0;
}

static int no_score_heads(const ModelSpec *s)
{
    (void)s;
    return 0;
}

static Err delta_cache(const void *own, DType dtype, void *cache, Arena *state)
{
    const DeltaSpec *d = &((const Delta *)own)->spec->delta;
    const int64_t channels = 2 * d->key_heads * d->key + d->value_heads * d->value;
    DeltaCache *out = cache;
    TRY(tensor_new(state, &out->state, F32, 1, d->value_heads, d->key, d->value));
    TRY(tensor_new(state, &out->rows, dtype, d->conv - 1 + DELTA_WINDOW, channels));
    TRY(tensor_new(state, &out->g, F32, DELTA_WINDOW, d->value_heads));
    TRY(tensor_new(state, &out->beta, F32, DELTA_WINDOW, d->value_heads));
    return tensor_new(state, &out->doc, I32, DELTA_WINDOW, 1);
}

static Err delta_grads(const void *own, const Ctx *c, void *grads, Arena *state)
{
    const DeltaSpec *d = &((const Delta *)own)->spec->delta;
    const int64_t ranks = c->world->tp.size * c->world->cp.size, B = c->batch->B;
    const int64_t channels = (2 * d->key_heads * d->key + d->value_heads * d->value) / ranks;
    DeltaGrads *out = grads;
    TRY(tensor_new(state, &out->state, F32, B, d->value_heads / ranks, d->key, d->value));
    return tensor_new(state, &out->tail, F32, B, d->conv - 1, channels);
}

const LayerKind delta_kind = { .name = "delta",
                               .own_bytes = sizeof(Delta),
                               .save_bytes = sizeof(DeltaSave),
                               .linears = 3,
                               .sums_own_rows = true,
                               .add = delta_add,
                               .forward = delta_forward,
                               .backward = delta_backward,
                               .flop = delta_flop,
                               .state_flop = delta_state_flop,
                               .pair_flop = no_pair_flop,
                               .score_heads = no_score_heads,
                               .carry = { .ways = 1 << CONTEXT_A2A,
                                          .slice_unit = DELTA_WINDOW,
                                          .cache_bytes = sizeof(DeltaCache),
                                          .kept_bytes = sizeof(DeltaKept),
                                          .grads_bytes = sizeof(DeltaGrads),
                                          .cache = delta_cache,
                                          .grads = delta_grads } };
