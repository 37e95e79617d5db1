/*
 * Gated DeltaNet: each value head has a state, a matrix of fixed size. Every row decays, corrects and reads it. Heads
 * are cut over tp. Value head h reads key head h / (V / K). A unit of recurrent.h is a key head:
 *
 *   q, k, v, z = x Wqkvz    columns lie key head by key head: its q and k, the v and z of the value heads that read it
 *   b, a       = x Wba      one of each for a value head; every rank of tp has all of Wba
 *   q, k, v    = silu(convolution over the last rows of each column)
 *   q, k       = both of length 1, q then / sqrt(D)
 *   beta, g    = gates of b and a: how much is written, and the logarithm of the decay
 *   o          = the gated delta rule (device/ops.def, delta_fwd)
 *   y          = (w norm(o) silu(z)) Wproj     the norm is of single heads; no linear layer here has a bias
 *
 * Source: Yang, Kautz, Hatamizadeh 2024 (Gated Delta Networks).
 */
#include <math.h>
#include <stdio.h>

#include "layer/delta.h"

static const float unit_eps = 1e-6f; /* of the lengths, as in published models */

enum { BETA, DECAY }; /* gates */
enum { B, A };        /* what they are made of */

static const DeltaMixer *mixer_of(const RecurrentCall *k) { return (const DeltaMixer *)k->r; }
static const DeltaSpec *spec_of(const RecurrentCall *k) { return &k->r->spec->delta; }

/* ---- what delta rules share (delta.h) ---- */

DeltaColumns delta_columns(const RecurrentCall *k, Tensor t)
{
    const int64_t D = k->r->shape.state[0];
    return (DeltaColumns){ part_of(t, k->mixed, 0, D), part_of(t, k->mixed, D, D),
                           part_of(t, k->mixed, 2 * D, k->gated) };
}

static float query_factor(const RecurrentCall *k) { return 1 / sqrtf((float)k->r->shape.state[0]); }

Err delta_unit(const RecurrentCall *k, DeltaColumns from, DeltaColumns to)
{
    Ctx *c = k->c;
    TRY(op(c->s, unit_fwd, .y = to.q, .x = from.q, .factor = query_factor(k), .eps = unit_eps));
    return op(c->s, unit_fwd, .y = to.k, .x = from.k, .factor = 1, .eps = unit_eps);
}

Err delta_unit_backward(const RecurrentCall *k, DeltaColumns raw, DeltaColumns d)
{
    Ctx *c = k->c;
    TRY(op(c->s, unit_bwd, .dx = d.q, .dy = d.q, .x = raw.q, .factor = query_factor(k), .eps = unit_eps));
    return op(c->s, unit_bwd, .dx = d.k, .dy = d.k, .x = raw.k, .factor = 1, .eps = unit_eps);
}

/* A weight, or its gradient, that all heads share. */
static Tensor shared(Tensor w) { return tensor_reshape(w, 1, w.dim[0]); }

Err delta_norm(const RecurrentCall *k, Tensor o, Tensor z, Tensor y)
{
    const Norm *n = &mixer_of(k)->norm;
    const int64_t E = k->r->shape.state[1];
    return op(k->c->s, gated_norm_fwd, .y = rows_of_heads(y, E), .x = rows_of_heads(o, E), .z = rows_of_heads(z, E),
              .w = shared(param_value(k->c, n->weight)), .eps = n->eps, .sigmoid = mixer_of(k)->sigmoid);
}

Err delta_norm_backward(const RecurrentCall *k, Tensor go, Tensor dz)
{
    Ctx *c = k->c;
    const Norm *n = &mixer_of(k)->norm;
    const int64_t E = k->r->shape.state[1];
    bool fresh;
    const Tensor dw = shared(grad_target(c, n->weight, &fresh)), rows = rows_of_heads(go, E);
    TRY(op(c->s, gated_norm_bwd, .dx = rows, .dz = below(dz, k->group), .dw = dw, .dy = rows,
           .x = rows_of_heads(save_get(c, k->save->o), E), .z = rows_of_heads(save_get(c, k->save->z), E),
           .w = shared(param_value(c, n->weight)), .shift = param_store_shift(c->params, n->weight),
           .overflow = c->params->stats->overflow, .eps = n->eps, .sigmoid = mixer_of(k)->sigmoid, .leaf = 1,
           .headroom_bits = c->canon.headroom_bits, .fresh = fresh));
    return grad_added(c, n->weight);
}

Err delta_mixer_add(DeltaMixer *m, ParamRegistry *reg, const RecurrentParts *p, const char *owner, int layer)
{
    char text[PARAM_NAME_MAX];
    TRY(recurrent_add(&m->r, reg, p, owner, layer));
    snprintf(text, sizeof text, "%s.norm", owner);
    const float eps = m->norm_eps > 0 ? m->norm_eps : m->r.spec->norm_eps;
    TRY(norm_register(&m->norm, reg, text, m->r.shape.state[1], NORM_RMS, eps, PARTIAL_HEADS));
    return recurrent_add_proj(&m->r, reg, owner, layer);
}

/* ---- gates ---- */

static Err gates(const RecurrentCall *k, const Tensor *in, const Tensor *gate)
{
    Ctx *c = k->c;
    return op(c->s, delta_gates_fwd, .beta = gate[BETA], .g = gate[DECAY], .b = in[B], .a = in[A],
              .a_log = param_value(c, k->r->a_log), .dt_bias = param_value(c, k->r->dt_bias),
              .top = spec_of(k)->negative ? 2 : 1);
}

static Err gates_backward(const RecurrentCall *k, const Tensor *in, const Tensor *dgate, const Tensor *din)
{
    Ctx *c = k->c;
    const int a_log = k->r->a_log, dt_bias = k->r->dt_bias;
    bool fresh;
    Tensor acc[2];
    TRY(grad_pair(k, a_log, dt_bias, false, acc, &fresh));
    return op(c->s, delta_gates_bwd, .db = din[B], .da = din[A], .da_log = acc[0], .ddt_bias = acc[1],
              .dbeta = dgate[BETA], .dg = dgate[DECAY], .b = in[B], .a = in[A], .a_log = param_value(c, a_log),
              .dt_bias = param_value(c, dt_bias), .shift_a = param_store_shift(c->params, a_log),
              .shift_dt = param_store_shift(c->params, dt_bias), .overflow = c->params->stats->overflow,
              .top = spec_of(k)->negative ? 2 : 1, .leaf = c->canon.leaf_rows, .headroom_bits = c->canon.headroom_bits,
              .fresh = fresh);
}

/* ---- the scan ---- */

static Err scan(const RecurrentCall *k, const Scan *x, Tensor y, Tensor o, Tensor states, Tensor after)
{
    const DeltaColumns h = delta_columns(k, y);
    TRY(delta_unit(k, h, h));
    return op(k->c->s, delta_fwd, .o = o, .states = states, .after = after, .q = by_row(k, h.q, 1, x->rows),
              .k = by_row(k, h.k, 1, x->rows), .v = by_row(k, h.v, k->group, x->rows), .g = x->gate[DECAY],
              .beta = x->gate[BETA], .doc = x->doc, .before = x->state, .first = x->first);
}

static Err scan_backward(const RecurrentCall *k, const Scan *x, Tensor y, const ScanBackward *b)
{
    Ctx *c = k->c;
    const int64_t n = x->rows;
    Tensor unit;
    TRY(tensor_alloc(c->scratch, &unit, y.dtype, y.ndim, y.dim));
    const DeltaColumns raw = delta_columns(k, y), h = delta_columns(k, unit), dh = delta_columns(k, b->dy);
    TRY(delta_unit(k, raw, h));
    TRY(op(c->s, delta_bwd, .dq = by_row(k, dh.q, 1, n), .dk = by_row(k, dh.k, 1, n),
           .dv = by_row(k, dh.v, k->group, n), .dg = b->dgate[DECAY], .dbeta = b->dgate[BETA], .dbefore = b->dbefore,
           .go = b->go, .dafter = b->dafter, .q = by_row(k, h.q, 1, n), .k = by_row(k, h.k, 1, n),
           .v = by_row(k, raw.v, k->group, n), .g = x->gate[DECAY], .beta = x->gate[BETA], .states = b->states,
           .doc = x->doc, .first = x->first));
    return delta_unit_backward(k, raw, dh);
}

/* ---- the kind ---- */

static const RecurrentOps delta_ops = { gates, gates_backward, scan, scan_backward, delta_norm, delta_norm_backward };

static Err delta_add(void *own, ParamRegistry *reg, const ModelSpec *s, const char *name, int layer)
{
    DeltaMixer *m = own;
    const DeltaSpec *d = &s->delta;
    const int64_t keys = d->key_heads * d->key, values = d->value_heads * d->value;
    ASSERT(d->key_heads > 0 && d->value_heads % d->key_heads == 0);
    const int64_t group = d->value_heads / d->key_heads;
    const RecurrentParts parts = { .in = "qkvz",
                                   .small = "ba",
                                   .section = { keys, keys, values, values },
                                   .head_rows = { d->key, d->key, d->value, d->value } };
    *m = (DeltaMixer){ .r = { .spec = s,
                              .ops = &delta_ops,
                              .shape = { .units = d->key_heads,
                                         .heads = d->value_heads,
                                         .mixed = 2 * d->key + group * d->value,
                                         .gated = group * d->value,
                                         .state = { d->key, d->value },
                                         .inputs = 2,
                                         .decays = 1,
                                         .conv = d->conv,
                                         .window = DELTA_WINDOW } },
                       .norm_eps = d->norm_eps };
    return delta_mixer_add(m, reg, &parts, name, layer);
}

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

const LayerKind delta_kind = { .name = "delta",
                               .own_bytes = sizeof(DeltaMixer),
                               .save_bytes = sizeof(RecurrentSave),
                               .linears = 3,
                               .sums_own_rows = true,
                               .add = delta_add,
                               .forward = recurrent_forward,
                               .backward = recurrent_backward,
                               .flop = delta_flop,
                               .state_flop = delta_state_flop,
                               .pair_flop = no_pair_flop,
                               .score_heads = no_score_heads,
                               .carry = RECURRENT_CARRY(DELTA_WINDOW) };
