/* Mixers whose heads have states share all but the recurrence itself, its gates and its norm (recurrent.h). */
#include "layer/recurrent.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const Tensor none;

/* ---- registration ---- */

Err recurrent_add_numbers(const Recurrent *r, ParamRegistry *reg, const char *owner, const char *what, int64_t each,
                          Init init, int *id)
{
    char name[PARAM_NAME_MAX];
    snprintf(name, sizeof name, "%s.%s", owner, what);
    const ParamSpec p = { .name = name,
                          .ndim = 1,
                          .shape = { r->shape.heads * each, 1 },
                          .cut = { CUT_TP },
                          .init = init,
                          .flags = PARAM_FP32 };
    return param_add(reg, p, id);
}

/* The convolution has the sections of Win but z's. Its bias begins as its weights do. */
static Err add_conv(Recurrent *r, ParamRegistry *reg, const RecurrentParts *p, const char *owner)
{
    const RecurrentShape *d = &r->shape;
    char name[PARAM_NAME_MAX];
    ParamSpec conv = { .name = name,
                       .ndim = 2,
                       .shape = { d->units * d->mixed, d->conv },
                       .cut = { CUT_TP },
                       .interleave = d->units,
                       .init = INIT_UNIFORM,
                       .std = 1 / sqrtf((float)d->conv),
                       .flags = PARAM_TABLE };
    memcpy(conv.section, p->section + d->z_first, (PARAM_MAX_SECTIONS - 1) * sizeof *conv.section);
    snprintf(name, sizeof name, "%s.conv.weight", owner);
    TRY(param_add(reg, conv, &r->conv));
    if (!p->conv_bias) return ERR_OK;
    conv.ndim = 1;
    conv.shape[1] = 1;
    conv.flags = 0;
    snprintf(name, sizeof name, "%s.conv.bias", owner);
    return param_add(reg, conv, &r->conv_bias);
}

/* The latents' parts of Wsmall lie first. */
static Err add_small(Recurrent *r, ParamRegistry *reg, const RecurrentParts *p, const char *owner, int layer)
{
    const RecurrentShape *d = &r->shape;
    const ModelSpec *s = r->spec;
    LinearSpec small = { owner, p->small, s->hidden, d->inputs * d->heads, LINEAR_WHOLE, .std = model_hidden_std(s) };
    const int64_t out[LATENTS] = { [LATENT_DECAY] = d->heads * d->decays, [LATENT_Z] = d->units * d->gated };
    if (!d->latent) return linear_register(&r->small, reg, small);
    small.out += LATENTS * d->latent;
    small.section[0] = small.section[1] = d->latent;
    small.section[2] = d->inputs * d->heads;
    TRY(linear_register(&r->small, reg, small));
    for (int i = 0; i < LATENTS; i++)
        TRY(linear_register(&r->up[i], reg,
                            (LinearSpec){ owner, p->up[i], d->latent, out[i], LINEAR_COLUMN, .std = model_hidden_std(s),
                                          .fp8 = model_fp8(s, layer) }));
    return ERR_OK;
}

Err recurrent_add(Recurrent *r, ParamRegistry *reg, const RecurrentParts *p, const char *owner, int layer)
{
    const RecurrentShape *d = &r->shape;
    const ModelSpec *s = r->spec;
    ASSERT(d->units > 0 && d->units % s->tp_blocks == 0 && d->heads % d->units == 0);
    LinearSpec in = { owner,
                      p->in,
                      s->hidden,
                      d->units * (d->mixed + (d->latent ? 0 : d->gated)),
                      LINEAR_COLUMN,
                      .std = model_hidden_std(s),
                      .interleave = d->units,
                      .fp8 = model_fp8(s, layer) };
    memcpy(in.section, p->section, sizeof in.section);
    memcpy(in.head_rows, p->head_rows, sizeof in.head_rows);
    r->conv_bias = r->skip = -1;
    TRY(linear_register(&r->in, reg, in));
    TRY(add_small(r, reg, p, owner, layer));
    TRY(add_conv(r, reg, p, owner));
    TRY(recurrent_add_numbers(r, reg, owner, "a_log", 1, INIT_LOG_RATE, &r->a_log));
    return recurrent_add_numbers(r, reg, owner, "dt_bias", d->decays, INIT_TIME, &r->dt_bias);
}

Err recurrent_add_proj(Recurrent *r, ParamRegistry *reg, const char *owner, int layer)
{
    const ModelSpec *s = r->spec;
    return linear_register(&r->proj, reg,
                           (LinearSpec){ owner, "proj", r->shape.units * r->shape.gated, s->hidden, LINEAR_ROW,
                                         .std = model_projection_std(s), .fp8 = model_fp8(s, layer) });
}

/* ---- sizes and views ---- */

/* Ranks of which each scans some of the heads. */
static int heads_ranks(const RecurrentCall *k) { return k->exchange.heads ? k->exchange.heads->size : 1; }

static RecurrentCall call_of(const Recurrent *r, Ctx *c, const RecurrentSave *save)
{
    const RecurrentShape *d = &r->shape;
    const int64_t tp = c->world->tp.size;
    Comm *cp = c->world->cp.size > 1 ? &c->world->cp : NULL;
    const bool in_order = cp && c->block.context == CONTEXT_STATE;
    RecurrentCall k = { .r = r,
                        .c = c,
                        .save = save,
                        .exchange = { in_order && c->cut == CONTEXT_ZIGZAG, in_order ? NULL : cp },
                        .chain = in_order ? cp : NULL,
                        .B = c->batch->B,
                        .T = c->batch->T,
                        .units = d->units / tp,
                        .heads = d->heads / tp,
                        .first = cp ? slice_span(c, c->slices.at).first[0] : c->batch->span.first[0],
                        .group = d->heads / d->units,
                        .mixed = d->mixed,
                        .gated = d->gated,
                        .before = d->conv - 1 };
    k.N = k.B * k.T;
    if (in_order) k.first += k.T * cp->rank;
    k.rows = k.T * heads_ranks(&k);
    k.scan_units = k.units / heads_ranks(&k);
    k.scan_heads = k.heads / heads_ranks(&k);
    return k;
}

/* Does forward keep all that backward reads? */
static bool keeps(const RecurrentCall *k) { return !ctx_recomputes(k->c, k->r->spec); }

/* Columns of the convolution in the scan. */
static int64_t channels_of(const RecurrentCall *k) { return k->scan_units * k->mixed; }
static int64_t head_width(const RecurrentCall *k) { return k->gated / k->group; }

/* Inputs of gates; numbers of a head in an input, or in a gate. */
static int inputs_of(const RecurrentCall *k) { return k->r->shape.inputs + (k->r->shape.latent > 0); }
static int64_t input_width(const RecurrentCall *k, int i) { return i < k->r->shape.inputs ? 1 : k->r->shape.decays; }
static int64_t gate_width(const RecurrentCall *k, int i) { return i < GATES - 1 ? 1 : k->r->shape.decays; }

/* A gate, or its gradient, as the ops have it: of n rows; of so many rows of each sample. */
static Tensor gate_rows(const RecurrentCall *k, Tensor t, int i, int64_t n)
{
    const int64_t width = gate_width(k, i);
    return width == 1 ? tensor_reshape(t, n, k->heads) : tensor_reshape(t, n, k->heads, width);
}

static Tensor gate_samples(const RecurrentCall *k, Tensor t, int i, int64_t rows, int64_t heads)
{
    const int64_t width = gate_width(k, i);
    return width == 1 ? tensor_reshape(t, k->B, rows, heads) : tensor_reshape(t, k->B, rows, heads, width);
}

int64_t windows_of(const RecurrentCall *k, int64_t rows)
{
    return (rows + k->r->shape.window - 1) / k->r->shape.window;
}

Tensor part_of(Tensor t, int64_t chunk, int64_t before, int64_t columns)
{
    return tensor_col_slice(tensor_reshape(t, tensor_count(t) / chunk, chunk), before, columns);
}

/* Columns of Win's results, or of their gradients: the convolution's; z's, where it has no latent. */
static Tensor mixed_in(const RecurrentCall *k, Tensor t)
{
    return part_of(t, k->mixed + k->gated, k->r->shape.z_first ? k->gated : 0, k->mixed);
}

static Tensor z_in(const RecurrentCall *k, Tensor t)
{
    return part_of(t, k->mixed + k->gated, k->r->shape.z_first ? 0 : k->mixed, k->gated);
}

Tensor below(Tensor t, int64_t group)
{
    return (Tensor){ .data = t.data,
                     .dim = { t.dim[0] * group, t.dim[1] / group },
                     .ld = t.ld,
                     .group = group,
                     .ndim = 2,
                     .dtype = t.dtype };
}

Tensor by_row(const RecurrentCall *k, Tensor t, int64_t group, int64_t rows)
{
    t = below(t, group);
    return (Tensor){ .data = t.data,
                     .dim = { k->B, rows, t.dim[0] / (k->B * rows), t.dim[1] },
                     .ld = t.ld,
                     .group = t.group,
                     .ndim = 4,
                     .dtype = t.dtype };
}

Tensor rows_of_heads(Tensor t, int64_t columns) { return tensor_reshape(t, tensor_count(t) / columns, columns); }

Tensor own_units(const RecurrentCall *k, Tensor t)
{
    const Comm *cp = k->exchange.heads;
    return t.data && cp ? tensor_row_slice(t, t.dim[0] / cp->size * cp->rank, t.dim[0] / cp->size) : t;
}

Err states_new(const RecurrentCall *k, int64_t heads, Tensor *t)
{
    return tensor_new(k->c->scratch, t, F32, heads, k->r->shape.state[0], k->r->shape.state[1]);
}

/* States of some of these heads, as they lie there. */
static Tensor some_states(Tensor states, int64_t first, int64_t heads)
{
    const int64_t rows = states.dim[1], columns = states.dim[2];
    const Tensor all = tensor_reshape(states, states.dim[0] * rows, columns);
    return tensor_reshape(tensor_row_slice(all, first * rows, heads * rows), heads, rows, columns);
}

/* The same by sample: [B, heads, ...]. */
static Tensor by_sample(const RecurrentCall *k, Tensor states)
{
    return tensor_reshape(states, k->B, states.dim[0] / k->B, states.dim[1], states.dim[2]);
}

/* ---- what the scan reads ---- */

/* Ranks that wait for each other's states must not make calls of all of them in between. Where streams share a queue,
 * the rank that has the state would wait there for the one that waits for it. So weights that the scan reads are there
 * before, and so are places for its gradients, which go out behind. */
static void have_weights(const RecurrentCall *k)
{
    const int id[] = { k->r->conv, k->r->conv_bias, k->r->skip };
    for (int i = 0; i < 3; i++) (void)param_value(k->c, id[i]);
}

static Err convolve(const RecurrentCall *k, const Scan *x, Tensor *y)
{
    Ctx *c = k->c;
    const Tensor w = own_units(k, param_value(c, k->r->conv)), bias = own_units(k, param_value(c, k->r->conv_bias));
    TRY(tensor_new(c->scratch, y, c->dtype, k->B, x->rows, channels_of(k)));
    return op(c->s, conv_silu_fwd, .y = *y, .x = x->mixed, .w = w, .bias = bias, .before = x->ahead, .doc = x->doc,
              .first = x->first);
}

/* o [B, rows, heads, width]; states and after may be absent. */
static Err scan_forward(const RecurrentCall *k, const Scan *x, Tensor o, Tensor states, Tensor after)
{
    Ctx *c = k->c;
    ArenaMark mark = arena_mark(c->scratch);
    Tensor y;
    TRY(convolve(k, x, &y));
    TRY(k->r->ops->scan(k, x, y, o, states, after));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* This rank's rows of gates: [B, T, units, group] each, and as the ops have them. */
static Err gates_alloc(const RecurrentCall *k, Tensor *gate, Tensor *rows)
{
    for (int i = 0; i < GATES; i++) {
        TRY(tensor_new(k->c->scratch, &gate[i], F32, k->B, k->T, k->units, k->group * gate_width(k, i)));
        rows[i] = gate_rows(k, gate[i], i, k->N);
    }
    return ERR_OK;
}

static Err gates_forward(const RecurrentCall *k, const Tensor *in, Tensor *gate)
{
    Tensor rows[GATES];
    TRY(gates_alloc(k, gate, rows));
    return k->r->ops->gates(k, in, rows);
}

/* ---- slices ---- */

/* The first or last of the ranks that have a slice. */
static bool is_first(const RecurrentCall *k) { return !k->chain || k->chain->rank == 0; }
static bool is_last(const RecurrentCall *k) { return !k->chain || k->chain->rank == k->chain->size - 1; }

static bool hands_over(const Ctx *c) { return c->slices.at + 1 < c->slices.count; }

/* State and rows that come from the slice before. */
static void take_over(const RecurrentCall *k, Scan *x)
{
    Ctx *c = k->c;
    if (c->slices.at == 0 || !is_first(k)) return;
    const Slot *slot = c->slices.slots[c->slices.at - 1];
    const RecurrentKept *kept = slot->kept[c->block.layer];
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

static Err tail_new(const RecurrentCall *k, DType dtype, Tensor *t)
{
    return tensor_new(k->c->scratch, t, dtype, k->B, k->before, channels_of(k));
}

static Err state_new(const RecurrentCall *k, Tensor *t)
{
    TRY(states_new(k, k->B * k->scan_heads, t));
    *t = by_sample(k, *t);
    return ERR_OK;
}

/* The last rows of x. */
static Err tail_of(const RecurrentCall *k, const Scan *x, Tensor *tail)
{
    TRY(tail_new(k, k->c->dtype, tail));
    return copy_some_rows(k->c, *tail, x->mixed, x->rows - k->before);
}

/* For the slice behind; made again they have been kept already. */
static Err keep_border(Ctx *c, RecurrentBorder b)
{
    RecurrentKept *kept = c->slot->kept[c->block.layer];
    if (kept->state.ndim) return ERR_OK;
    TRY(save_for_slices(c, b.state, true, &kept->state));
    return save_for_slices(c, b.tail, true, &kept->tail);
}

static Err hand_over(const RecurrentCall *k, const Scan *x, Tensor after)
{
    Ctx *c = k->c;
    ArenaMark mark = arena_mark(c->scratch);
    RecurrentBorder b = { .state = after };
    if (!after.data) return ERR_OK;
    TRY(tail_of(k, x, &b.tail));
    TRY(keep_border(c, b));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* The state behind the rows at work, if it is to be handed over; for a slice that is made again it has been already. */
static Err after_alloc(const RecurrentCall *k, Tensor *after)
{
    Ctx *c = k->c;
    *after = none;
    if (is_last(k) && !hands_over(c)) return ERR_OK;
    if (!k->chain && ((const RecurrentKept *)c->slot->kept[c->block.layer])->state.ndim) return ERR_OK;
    return state_new(k, after);
}

/* ---- ranks in a row ---- */

/* One message to the rank that is `step` further on, round the end, and one from the rank as far behind; absent: none.
 * What passes round the end goes from slice to slice. */
static Err pass(const RecurrentCall *k, int step, MessageKind kind, Tensor out, Tensor in)
{
    const Comm *ranks = k->chain;
    const Tensor t[2] = { in, out };
    CommMessage m[2];
    int count = 0;
    for (int send = 0; send < 2; send++)
        if (t[send].data)
            m[count++] = (CommMessage){ .send = send,
                                        .peer = (ranks->rank + (send ? step : -step) + ranks->size) % ranks->size,
                                        .data = t[send].data,
                                        .bytes = tensor_bytes(t[send]),
                                        .what = { .kind = (uint16_t)kind } };
    return count ? comm_exchange(k->chain, k->c->s, m, count, NULL) : ERR_OK;
}

/* The tensor if it is to travel. (All ranks have memory for all, so that plans are alike.) */
static Tensor when(bool is, Tensor t) { return is ? t : none; }

/* Last rows go to the rank behind, then the state of the rank before comes, in `before`. */
static Err take_from_rank(const RecurrentCall *k, Scan *x, RecurrentBorder before)
{
    Ctx *c = k->c;
    const bool round = hands_over(c);
    ArenaMark mark = arena_mark(c->scratch);
    Tensor tail;
    TRY(tail_of(k, x, &tail));
    TRY(pass(k, 1, MESSAGE_TAIL, when(!is_last(k) || round, tail), when(!is_first(k) || round, before.tail)));
    arena_release(c->scratch, mark);
    if (is_first(k)) return ERR_OK;
    x->ahead = before.tail;
    x->state = before.state;
    return pass(k, 1, MESSAGE_STATE, none, before.state);
}

/* The first rank keeps what comes round the end. */
static Err give_to_rank(const RecurrentCall *k, Tensor after, RecurrentBorder before)
{
    const bool keeps = is_first(k) && hands_over(k->c);
    TRY(pass(k, 1, MESSAGE_STATE, after, none));
    TRY(pass(k, 1, MESSAGE_STATE, none, when(keeps, before.state)));
    return keeps ? keep_border(k->c, before) : ERR_OK;
}

/* ---- generation ---- */

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

/* The same of a number for each head, from `kept` and `own`; those of the window and the new rows, of one sample. */
static Err join_numbers(const RecurrentCall *k, Tensor kept, int64_t open, Tensor own, DType dtype, int64_t columns,
                        Tensor *out)
{
    Ctx *c = k->c;
    TRY(tensor_new(c->scratch, out, dtype, k->r->shape.window - 1 + k->T, columns));
    TRY(join(c, *out, kept, open, tensor_reshape(own, k->T, columns)));
    *out = tensor_reshape(tensor_row_slice(*out, 0, open + k->T), 1, open + k->T, columns);
    return ERR_OK;
}

/* Rows of the open window and the new ones, in memory that is as large wherever the window opens. */
static Err all_rows(const RecurrentCall *k, const RecurrentCache *cache, const Scan *own, int64_t open, Scan *x,
                    Tensor *rows)
{
    Ctx *c = k->c;
    const int64_t room = k->r->shape.window - 1 + k->T, channels = channels_of(k), n = open + k->T;
    TRY(tensor_new(c->scratch, rows, c->dtype, k->before + room, channels));
    TRY(join(c, *rows, cache->rows, k->before + open, tensor_reshape(own->mixed, k->T, channels)));
    *x = (Scan){ .mixed = tensor_reshape(tensor_row_slice(*rows, k->before, n), 1, n, channels),
                 .ahead = tensor_reshape(tensor_row_slice(*rows, 0, k->before), 1, k->before, channels),
                 .state = cache->state,
                 .first = k->first - open,
                 .rows = n };
    for (int i = 0; i < GATES; i++) {
        TRY(join_numbers(k, cache->gate[i], open, own->gate[i], F32, k->heads * gate_width(k, i), &x->gate[i]));
        x->gate[i] = gate_samples(k, x->gate[i], i, n, k->heads);
    }
    if (!own->doc.data) return ERR_OK;
    TRY(join_numbers(k, cache->doc, open, own->doc, I32, 1, &x->doc));
    x->doc = tensor_reshape(x->doc, 1, n);
    return ERR_OK;
}

/* The cache goes on to the window that is open behind the rows of x. */
static Err keep_open(const RecurrentCall *k, RecurrentCache *cache, const Scan *x, Tensor rows, Tensor states,
                     Tensor after)
{
    Ctx *c = k->c;
    const int64_t window = k->r->shape.window, open = x->rows % window, from = x->rows - open;
    const Tensor state = open ? some_states(states, from / window * k->heads, k->heads) : after;
    TRY(device_copy(c->s, cache->state.data, state.data, tensor_bytes(cache->state)));
    TRY(keep(c, cache->rows, rows, from, k->before + x->rows));
    for (int i = 0; i < GATES; i++)
        TRY(keep(c, cache->gate[i], tensor_reshape(x->gate[i], x->rows, k->heads * gate_width(k, i)), from, x->rows));
    return x->doc.data ? keep(c, cache->doc, tensor_reshape(x->doc, x->rows, 1), from, x->rows) : ERR_OK;
}

static Err begin_cache(Ctx *c, const RecurrentCache *cache)
{
    TRY(op(c->s, fill_zero, .x = cache->rows));
    return op(c->s, fill_zero, .x = rows_of_heads(cache->state, cache->state.dim[3]));
}

static Err cached_forward(const RecurrentCall *k, const Scan *own, Tensor o)
{
    Ctx *c = k->c;
    RecurrentCache *cache = c->block.cache;
    ArenaMark mark = arena_mark(c->scratch);
    const int64_t window = k->r->shape.window, open = k->first % window, room = window - 1 + k->T;
    const int64_t width = head_width(k);
    Tensor rows, all, states, after;
    Scan x;
    ASSERT(k->B == 1 && !k->exchange.heads && !k->chain && k->heads == k->r->shape.heads);
    if (k->first == 0) TRY(begin_cache(c, cache));
    TRY(all_rows(k, cache, own, open, &x, &rows));
    TRY(tensor_new(c->scratch, &all, c->dtype, room, k->heads * width));
    TRY(states_new(k, windows_of(k, room) * k->heads, &states));
    TRY(states_new(k, k->heads, &after));
    states = some_states(states, 0, windows_of(k, x.rows) * k->heads); /* (of as many windows as there are) */
    TRY(scan_forward(k, &x, tensor_reshape(tensor_row_slice(all, 0, x.rows), 1, x.rows, k->heads, width), states,
                     by_sample(k, after)));
    TRY(keep_open(k, cache, &x, rows, states, after));
    TRY(device_copy(c->s, o.data, tensor_row_slice(all, open, k->T).data, tensor_bytes(o)));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- forward ---- */

typedef struct {
    Tensor mixed, z, latent[LATENTS], input[GATES], o, states, gated;
    RecurrentBorder before; /* what the rank before hands on */
} Outputs;

static Err before_alloc(const RecurrentCall *k, RecurrentSave *save, RecurrentBorder *b)
{
    Ctx *c = k->c;
    const int64_t *state = k->r->shape.state;
    if (!k->chain) return ERR_OK;
    TRY(save_new(c, REGION_I, &b->tail, &save->tail, c->dtype, k->B, k->before, channels_of(k)));
    return save_if(c, !keeps(k), REGION_I, &b->state, &save->state, F32, k->B, k->scan_heads, state[0], state[1]);
}

/* R: rows outside of tensor-parallel regions. */
static Err outputs_alloc(const RecurrentCall *k, RecurrentSave *save, int64_t R, Outputs *t)
{
    Ctx *c = k->c;
    const int64_t *state = k->r->shape.state;
    *t = (Outputs){ .states = none };
    TRY(save_new(c, REGION_I, &t->mixed, &save->mixed, c->dtype, k->B, k->rows, k->scan_units, k->mixed));
    TRY(save_new(c, REGION_I, &t->z, &save->z, c->dtype, k->N, k->units * k->gated));
    for (int i = 0; i < LATENTS && k->r->shape.latent; i++)
        TRY(save_new(c, REGION_W, &t->latent[i], &save->latent[i], c->dtype, R, k->r->shape.latent));
    for (int i = 0; i < inputs_of(k); i++)
        TRY(save_new(c, REGION_I, &t->input[i], &save->input[i], c->dtype, k->N, k->heads * input_width(k, i)));
    TRY(save_new(c, REGION_I, &t->o, &save->o, c->dtype, k->N, k->units * k->gated));
    if (keeps(k) && !c->block.cache)
        TRY(save_new(c, REGION_I, &t->states, &save->states, F32, k->B * windows_of(k, k->rows) * k->scan_heads,
                     state[0], state[1]));
    TRY(before_alloc(k, save, &t->before));
    return save_if(c, keeps(k), REGION_W, &t->gated, &save->gated, c->dtype, k->N, k->units * k->gated);
}

/* mixed [N, units * mixed] of this rank's rows. */
static Err project(const RecurrentCall *k, Tensor x, Tensor mixed, const Outputs *t)
{
    Ctx *c = k->c;
    ArenaMark mark = arena_mark(c->scratch);
    Tensor all;
    if (k->r->shape.latent) return linear_forward(&k->r->in, c, x, tensor_reshape(mixed, k->N, k->units * k->mixed));
    TRY(tensor_new(c->scratch, &all, c->dtype, k->N, k->units * (k->mixed + k->gated)));
    TRY(linear_forward(&k->r->in, c, x, all));
    TRY(copy_rows(c, rows_of_heads(mixed, k->mixed), mixed_in(k, all)));
    TRY(copy_rows(c, rows_of_heads(t->z, k->gated), z_in(k, all)));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Columns of this rank's heads in t [rows, inputs * heads]: of input i. */
static Tensor input_columns(const RecurrentCall *k, Tensor t, int i)
{
    return tensor_col_slice(t, i * k->r->shape.heads + k->c->world->tp.rank * k->heads, k->heads);
}

/* Columns of the latents in Wsmall's results, or their gradients; those of heads are behind these. */
static Tensor latent_columns(const RecurrentCall *k, Tensor t, int i)
{
    return tensor_col_slice(t, i * k->r->shape.latent, k->r->shape.latent);
}

static Tensor head_columns(const RecurrentCall *k, Tensor t)
{
    const int64_t before = LATENTS * k->r->shape.latent;
    return tensor_col_slice(t, before, t.dim[1] - before);
}

/* The last gate's input and z, of latents. Of Wsmall's results the columns of heads are left, in `own`. */
static Err project_latents(const RecurrentCall *k, const Outputs *t, Tensor *own)
{
    Ctx *c = k->c;
    Tensor heads;
    if (!k->r->shape.latent) return ERR_OK;
    for (int i = 0; i < LATENTS; i++) TRY(copy_rows(c, t->latent[i], latent_columns(k, *own, i)));
    TRY(linear_forward(&k->r->up[LATENT_DECAY], c, t->latent[LATENT_DECAY], t->input[k->r->shape.inputs]));
    TRY(linear_forward(&k->r->up[LATENT_Z], c, t->latent[LATENT_Z], t->z));
    TRY(tensor_new(c->scratch, &heads, c->dtype, own->dim[0], head_columns(k, *own).dim[1]));
    TRY(copy_rows(c, heads, head_columns(k, *own)));
    *own = heads;
    return ERR_OK;
}

/* Inputs of the gates of this rank's heads. Their rows travel, few numbers a head, where those of x would travel a
 * second time. */
static Err project_small(const RecurrentCall *k, Tensor x, const Outputs *t)
{
    Ctx *c = k->c;
    ArenaMark mark = arena_mark(c->scratch);
    Tensor own, all;
    TRY(tensor_new(c->scratch, &own, c->dtype, x.dim[0], k->r->small.out));
    TRY(linear_forward(&k->r->small, c, x, own));
    TRY(project_latents(k, t, &own));
    TRY(gather_rows(c, own, &all));
    for (int i = 0; i < k->r->shape.inputs; i++) TRY(copy_rows(c, t->input[i], input_columns(k, all, i)));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Results of reshard_in, for the ops; ahead and state are those of the slice before. */
static Scan scan_of(const RecurrentCall *k, Tensor mixed, const Tensor *gate, Tensor doc)
{
    Scan x = {
        .mixed = tensor_reshape(mixed, k->B, k->rows, channels_of(k)), .doc = doc, .first = k->first, .rows = k->rows
    };
    for (int i = 0; i < GATES; i++) x.gate[i] = gate_samples(k, gate[i], i, k->rows, k->scan_heads);
    take_over(k, &x);
    return x;
}

/* o [B, T, units, gated] as the ops have it. */
static Tensor by_head(const RecurrentCall *k, Tensor o)
{
    return tensor_reshape(o, k->B, k->rows, k->scan_heads, head_width(k));
}

/* o of this rank's rows from `mixed` of them; t->mixed becomes that of the scan. */
static Err mix(const RecurrentCall *k, Tensor mixed, const Outputs *t)
{
    Ctx *c = k->c;
    Tensor gate[GATES], after, doc = c->batch->doc;
    Tensor o = tensor_reshape(t->o, k->B, k->T, k->units, k->gated);
    TRY(gates_forward(k, t->input, gate));
    Reshard r = { .in = { &mixed, &gate[0], &gate[1] }, .doc = &doc, .out = { &o } };
    TRY(reshard_in(c, &k->exchange, &r));
    if (mixed.data != t->mixed.data) TRY(device_copy(c->s, t->mixed.data, mixed.data, tensor_bytes(mixed)));
    Scan x = scan_of(k, mixed, gate, doc);
    if (c->block.cache) return cached_forward(k, &x, o);
    have_weights(k);
    if (k->chain) TRY(take_from_rank(k, &x, t->before));
    TRY(after_alloc(k, &after));
    TRY(scan_forward(k, &x, by_head(k, o), t->states, after));
    TRY(k->chain ? give_to_rank(k, after, t->before) : hand_over(k, &x, after));
    return reshard_out(c, &k->exchange, &r);
}

Err recurrent_forward(const void *own, Ctx *c, Tensor x, Tensor y, void *kept)
{
    const Recurrent *r = own;
    RecurrentSave *save = kept;
    const RecurrentCall k = call_of(r, c, save);
    const bool in_scratch = c->into[REGION_I] == c->scratch; /* full recomputation: the saves stay there */
    Outputs t;
    TRY(outputs_alloc(&k, save, x.dim[0], &t));
    ArenaMark mark = arena_mark(c->scratch);
    Tensor mixed = t.mixed;
    if (k.exchange.heads || k.exchange.cut) TRY(tensor_new(c->scratch, &mixed, c->dtype, k.B, k.T, k.units, k.mixed));
    TRY(project(&k, x, mixed, &t));
    TRY(project_small(&k, x, &t));
    TRY(mix(&k, mixed, &t));
    TRY(r->ops->norm(&k, t.o, t.z, t.gated));
    if (!in_scratch) arena_release(c->scratch, mark);
    return linear_forward(&r->proj, c, t.gated, y);
}

/* ---- backward ---- */

/* Gradients of what the scan reads; those of this rank's rows once they are exchanged. */
typedef struct {
    Tensor mixed, gate[GATES]; /* [B, T, units, ...] */
} ScanGrads;

Err grad_pair(const RecurrentCall *k, int a, int b, bool in_parts, Tensor acc[2], bool *fresh)
{
    const int id[] = { a, b };
    bool first[2] = { false, false };
    for (int i = 0; i < 2; i++) {
        acc[i] = none;
        if (id[i] < 0) continue;
        if (in_parts && k->exchange.heads) TRY(grad_open(k->c, id[i], &acc[i]));
        else acc[i] = grad_target(k->c, id[i], &first[i]);
    }
    const bool apart = b >= 0 && first[0] != first[1]; /* (a matrix may be in a buffer that was taken for it now) */
    for (int i = 0; i < 2; i++) {
        if (apart && first[i]) TRY(op(k->c->s, fill_zero_acc, .x = tensor_reshape(acc[i], tensor_count(acc[i]))));
        if (in_parts) acc[i] = own_units(k, acc[i]);
    }
    *fresh = first[0] && !apart;
    return ERR_OK;
}

/* Sums that a weight's and a bias' gradient go to; nothing is in them yet. */
typedef struct {
    Tensor acc[2];
    bool fresh;
} GradPair;

static Err conv_backward(const RecurrentCall *k, const Scan *x, const GradPair *d, Tensor dy, Tensor dx, Tensor after,
                         Tensor dahead)
{
    Ctx *c = k->c;
    const int w = k->r->conv, bias = k->r->conv_bias;
    return op(c->s, conv_silu_bwd, .dx = dx, .dw = d->acc[0], .dbias = d->acc[1], .dbefore = dahead, .dy = dy,
              .after = after, .x = x->mixed, .w = own_units(k, param_value(c, w)),
              .bias = own_units(k, param_value(c, bias)), .before = x->ahead, .doc = x->doc,
              .shift_w = param_store_shift(c->params, w),
              .shift_b = bias < 0 ? none : param_store_shift(c->params, bias), .overflow = c->params->stats->overflow,
              .first = x->first, .leaf = c->canon.leaf_rows, .headroom_bits = c->canon.headroom_bits,
              .fresh = d->fresh);
}

/* (have_weights says why here) */
static Err grads_added(const RecurrentCall *k)
{
    const int id[] = { k->r->conv, k->r->conv_bias, k->r->skip };
    for (int i = 0; i < 3; i++)
        if (id[i] >= 0) TRY(grad_added(k->c, id[i]));
    return ERR_OK;
}

/* The states at the start of windows, made again if they were not kept. */
static Err states_of(const RecurrentCall *k, const Scan *x, Tensor *states)
{
    Ctx *c = k->c;
    Tensor o;
    if (keeps(k)) return *states = save_get(c, k->save->states), ERR_OK;
    TRY(states_new(k, k->B * windows_of(k, k->rows) * k->scan_heads, states));
    ArenaMark mark = arena_mark(c->scratch);
    TRY(tensor_new(c->scratch, &o, c->dtype, k->B, k->rows, k->scan_heads, head_width(k)));
    TRY(scan_forward(k, x, o, *states, none));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Gradients for the slice or rank before, in scratch; absent where there is none. */
static Err ahead_alloc(const RecurrentCall *k, RecurrentBorder *d)
{
    Ctx *c = k->c;
    *d = (RecurrentBorder){ .state = none };
    if (c->slices.at == 0 && !k->chain) return ERR_OK;
    TRY(state_new(k, &d->state));
    TRY(tail_new(k, F32, &d->tail));
    if (c->slices.at == 0 && is_first(k)) *d = (RecurrentBorder){ .state = none };
    return ERR_OK;
}

/* From the slice or rank behind; of a rank's last rows only once it has scanned its own. */
static Err take_behind(const RecurrentCall *k, RecurrentBorder *d)
{
    Ctx *c = k->c;
    RecurrentBorder own;
    *d = hands_over(c) ? *(RecurrentBorder *)c->slices.grads[c->block.layer] : (RecurrentBorder){ .state = none };
    if (!k->chain) return ERR_OK;
    TRY(state_new(k, &own.state));
    TRY(tail_new(k, F32, &own.tail));
    if (is_last(k)) return ERR_OK;
    *d = own;
    return pass(k, -1, MESSAGE_STATE, none, d->state);
}

static Err give_back(const RecurrentCall *k, const RecurrentBorder *d)
{
    Ctx *c = k->c;
    const bool round = c->slices.at > 0;
    const RecurrentBorder *to = round ? c->slices.grads[c->block.layer] : NULL;
    if (k->chain) {
        TRY(pass(k, -1, MESSAGE_TAIL, d->tail, none));
        if (round && is_first(k)) TRY(pass(k, -1, MESSAGE_STATE, d->state, none));
        if (!round || !is_last(k)) return ERR_OK;
        TRY(pass(k, -1, MESSAGE_TAIL, none, to->tail));
        return pass(k, -1, MESSAGE_STATE, none, to->state);
    }
    if (!round) return ERR_OK;
    TRY(device_copy(c->s, to->state.data, d->state.data, tensor_bytes(d->state)));
    return device_copy(c->s, to->tail.data, d->tail.data, tensor_bytes(d->tail));
}

/* From go [B, rows, heads, width] the gradients of the scan's rows. */
static Err scan_backward(const RecurrentCall *k, const Scan *x, Tensor go, const ScanGrads *d)
{
    Ctx *c = k->c;
    const int64_t channels = channels_of(k);
    ScanBackward b = { .go = go };
    Tensor y;
    RecurrentBorder behind, ahead;
    GradPair conv, skip = { .fresh = false };
    TRY(states_of(k, x, &b.states));
    TRY(ahead_alloc(k, &ahead));
    b.dbefore = ahead.state;
    TRY(convolve(k, x, &y));
    TRY(tensor_new(c->scratch, &b.dy, c->dtype, k->B, k->rows, channels));
    for (int i = 0; i < GATES; i++) b.dgate[i] = gate_samples(k, d->gate[i], i, k->rows, k->scan_heads);
    have_weights(k);
    TRY(grad_pair(k, k->r->conv, k->r->conv_bias, true, conv.acc, &conv.fresh));
    if (k->r->skip >= 0) TRY(grad_pair(k, k->r->skip, -1, true, skip.acc, &skip.fresh));
    b.skip = skip.acc[0], b.fresh = skip.fresh;
    TRY(take_behind(k, &behind));
    b.dafter = behind.state;
    TRY(k->r->ops->scan_backward(k, x, y, &b));
    if (k->chain && !is_first(k)) TRY(pass(k, -1, MESSAGE_STATE, ahead.state, none));
    if (!is_last(k)) TRY(pass(k, -1, MESSAGE_TAIL, none, behind.tail));
    TRY(conv_backward(k, x, &conv, b.dy, tensor_reshape(d->mixed, k->B, k->rows, channels), behind.tail, ahead.tail));
    TRY(give_back(k, &ahead));
    return grads_added(k);
}

/* From go [N, units * gated] the gradients of this rank's rows. */
static Err mix_backward(const RecurrentCall *k, Tensor go, const Tensor *input, ScanGrads *d)
{
    Ctx *c = k->c;
    Tensor gate[GATES], rows[GATES], doc = c->batch->doc;
    TRY(tensor_new(c->scratch, &d->mixed, c->dtype, k->B, k->T, k->units, k->mixed));
    TRY(gates_alloc(k, d->gate, rows));
    ArenaMark mark = arena_mark(c->scratch);
    go = tensor_reshape(go, k->B, k->T, k->units, k->gated);
    TRY(gates_forward(k, input, gate));
    ScanGrads of = *d;
    Reshard r = { .in = { &go, &gate[0], &gate[1] }, .doc = &doc, .out = { &of.mixed, &of.gate[0], &of.gate[1] } };
    TRY(reshard_in(c, &k->exchange, &r));
    Scan x = scan_of(k, save_get(c, k->save->mixed), gate, doc);
    if (!is_first(k)) {
        x.ahead = save_get(c, k->save->tail);
        if (!keeps(k)) x.state = save_get(c, k->save->state);
    }
    TRY(scan_backward(k, &x, by_head(k, go), &of));
    TRY(reshard_out(c, &k->exchange, &r));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* dsmall: the gradient of Wsmall's result for own rows, from those of inputs [N, heads] for own heads. */
static Err gather_inputs(const RecurrentCall *k, const Tensor *din, Tensor dsmall)
{
    Ctx *c = k->c;
    Tensor all, heads = dsmall;
    if (k->r->shape.latent)
        TRY(tensor_new(c->scratch, &heads, c->dtype, dsmall.dim[0], head_columns(k, dsmall).dim[1]));
    TRY(partial_alloc(c, heads, &all));
    if (c->world->tp.size > 1) TRY(op(c->s, fill_zero, .x = all)); /* other ranks' */
    for (int i = 0; i < k->r->shape.inputs; i++) TRY(copy_rows(c, input_columns(k, all, i), din[i]));
    TRY(reduce_rows(c, all, heads));
    return k->r->shape.latent ? copy_rows(c, head_columns(k, dsmall), heads) : ERR_OK;
}

/* dsmall's columns of a latent, from the gradient of its product. */
static Err latent_backward(const RecurrentCall *k, int i, Tensor dy, Tensor dsmall)
{
    Ctx *c = k->c;
    ArenaMark mark = arena_mark(c->scratch);
    Tensor dlatent;
    TRY(tensor_new(c->scratch, &dlatent, c->dtype, dsmall.dim[0], k->r->shape.latent));
    TRY(linear_backward(&k->r->up[i], c, save_get(c, k->save->latent[i]), dy, dlatent));
    TRY(copy_rows(c, latent_columns(k, dsmall, i), dlatent));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

static Err gates_backward(const RecurrentCall *k, const Tensor *input, const ScanGrads *d, Tensor dsmall)
{
    Ctx *c = k->c;
    ArenaMark mark = arena_mark(c->scratch);
    Tensor din[GATES], dgate[GATES];
    for (int i = 0; i < k->r->shape.inputs; i++) TRY(tensor_new(c->scratch, &din[i], c->dtype, k->N, k->heads));
    if (k->r->shape.latent) TRY(dy_alloc(c, &din[k->r->shape.inputs], k->N, k->heads * k->r->shape.decays));
    for (int i = 0; i < GATES; i++) dgate[i] = gate_rows(k, d->gate[i], i, k->N);
    TRY(k->r->ops->gates_backward(k, input, dgate, din));
    TRY(grad_added(c, k->r->a_log));
    TRY(grad_added(c, k->r->dt_bias));
    if (k->r->shape.latent) TRY(latent_backward(k, LATENT_DECAY, din[k->r->shape.inputs], dsmall));
    TRY(gather_inputs(k, din, dsmall));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Wproj's input, made again where a later W finds it if it was not kept. */
static Err gated_of(const RecurrentCall *k, Tensor *gated)
{
    Ctx *c = k->c;
    if (keeps(k)) return *gated = save_get(c, k->save->gated), ERR_OK;
    TRY(dy_alloc(c, gated, k->N, k->units * k->gated));
    return k->r->ops->norm(k, save_get(c, k->save->o), save_get(c, k->save->z), *gated);
}

/* [units of rows, gated]: columns of the gradient of Win's results, or what the latent's product reads. */
static Err dz_alloc(const RecurrentCall *k, Tensor din, Tensor *dz)
{
    if (!k->r->shape.latent) return *dz = z_in(k, din), ERR_OK;
    TRY(dy_alloc(k->c, dz, k->N, k->units * k->gated));
    *dz = rows_of_heads(*dz, k->gated);
    return ERR_OK;
}

Err recurrent_backward(const void *own, Ctx *c, const void *kept, Tensor x, Tensor dy, Tensor dx)
{
    const Recurrent *r = own;
    const RecurrentSave *save = kept;
    const RecurrentCall k = call_of(r, c, save);
    ArenaMark mark = arena_mark(c->scratch);
    Tensor din, dsmall, gated, go, through, dz, input[GATES];
    ScanGrads d;
    for (int i = 0; i < inputs_of(&k); i++) input[i] = save_get(c, save->input[i]);
    TRY(dy_alloc(c, &din, k.N, k.units * (k.mixed + (r->shape.latent ? 0 : k.gated))));
    TRY(dy_alloc(c, &dsmall, x.dim[0], r->small.out));
    TRY(gated_of(&k, &gated));
    TRY(tensor_new(c->scratch, &go, c->dtype, k.N, k.units * k.gated));
    TRY(tensor_new(c->scratch, &through, c->dtype, dx.dim[0], dx.dim[1]));
    TRY(linear_backward(&r->proj, c, gated, dy, go));
    TRY(dz_alloc(&k, din, &dz));
    TRY(r->ops->norm_backward(&k, go, dz));
    if (r->shape.latent) TRY(latent_backward(&k, LATENT_Z, tensor_reshape(dz, k.N, k.units * k.gated), dsmall));
    TRY(mix_backward(&k, go, input, &d));
    TRY(copy_rows(c, r->shape.latent ? rows_of_heads(din, k.mixed) : mixed_in(&k, din),
                  rows_of_heads(d.mixed, k.mixed)));
    TRY(gates_backward(&k, input, &d, dsmall));
    TRY(linear_backward(&r->in, c, x, din, dx));
    TRY(linear_backward(&r->small, c, x, dsmall, through));
    TRY(add_rows(c, dx, through));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- the kind ---- */

int64_t no_pair_flop(const ModelSpec *s)
{
    (void)s;
    return 0;
}

int no_score_heads(const ModelSpec *s)
{
    (void)s;
    return 0;
}

Err recurrent_cache(const void *own, DType dtype, void *cache, Arena *state)
{
    const RecurrentShape *d = &((const Recurrent *)own)->shape;
    RecurrentCache *out = cache;
    TRY(tensor_new(state, &out->state, F32, 1, d->heads, d->state[0], d->state[1]));
    TRY(tensor_new(state, &out->rows, dtype, d->conv - 1 + d->window, d->units * d->mixed));
    for (int i = 0; i < GATES; i++)
        TRY(tensor_new(state, &out->gate[i], F32, d->window, d->heads * (i < GATES - 1 ? 1 : d->decays)));
    return tensor_new(state, &out->doc, I32, d->window, 1);
}

Err recurrent_grads(const void *own, const Ctx *c, void *grads, Arena *state)
{
    const RecurrentShape *d = &((const Recurrent *)own)->shape;
    const int64_t by_heads = c->block.context == CONTEXT_STATE ? 1 : c->world->cp.size;
    const int64_t ranks = c->world->tp.size * by_heads, B = c->batch->B;
    RecurrentBorder *out = grads;
    TRY(tensor_new(state, &out->state, F32, B, d->heads / ranks, d->state[0], d->state[1]));
    return tensor_new(state, &out->tail, F32, B, d->conv - 1, d->units * d->mixed / ranks);
}
