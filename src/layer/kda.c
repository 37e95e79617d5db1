/*
 * Kimi Delta Attention: Gated DeltaNet (delta.c) with a decay for each column of a head's keys. As many heads have keys
 * as have values, and all widths are equal. A unit of recurrent.h is a head:
 *
 *   q, k, v = x Wqkv        columns lie head by head
 *   f, g, b = x Wfgb        two latents as wide as a head, and a number of each head; every rank of tp has all of Wfgb
 *   a       = f Wdecay      as many numbers as a head's keys have columns; with them and b the gates are made
 *   z       = g Wgate
 *   q, k, v = silu(convolution over the last rows of each column)
 *   q, k    = both of length 1, q then / sqrt(D)
 *   beta, g = gates of b and a: how much is written, and the logarithms of the decays
 *   o       = the rule (device/ops.def, kda_fwd)
 *   y       = (w norm(o) sigmoid(z)) Wproj     the norm is of single heads; no linear layer here has a bias
 *
 * Source: Kimi Linear (2025).
 */
#include "layer/delta.h"

enum { BETA, DECAY }; /* gates */
enum { B, A };        /* what they are made of */

static const KdaSpec *spec_of(const RecurrentCall *k) { return &k->r->spec->kda; }

/* Numbers of each column of heads: [.., heads, columns]. */
static Tensor by_column(const RecurrentCall *k, Tensor t)
{
    const int64_t D = spec_of(k)->head, heads = k->heads;
    return t.ndim == 1 ? tensor_reshape(t, heads, D) : tensor_reshape(t, t.dim[0], heads, D);
}

static Err gates(const RecurrentCall *k, const Tensor *in, const Tensor *gate)
{
    Ctx *c = k->c;
    return op(c->s, kda_gates_fwd, .beta = gate[BETA], .g = gate[DECAY], .b = in[B], .raw = by_column(k, in[A]),
              .a_log = param_value(c, k->r->a_log), .dt_bias = by_column(k, param_value(c, k->r->dt_bias)),
              .bound = spec_of(k)->bound);
}

static Err gates_backward(const RecurrentCall *k, const Tensor *in, const Tensor *dgate, const Tensor *din)
{
    Ctx *c = k->c;
    const int a_log = k->r->a_log, dt_bias = k->r->dt_bias;
    bool fresh;
    Tensor acc[2];
    TRY(grad_pair(k, a_log, dt_bias, false, acc, &fresh));
    return op(c->s, kda_gates_bwd, .db = din[B], .draw = by_column(k, din[A]), .da_log = acc[0],
              .ddt_bias = by_column(k, acc[1]), .dbeta = dgate[BETA], .dg = dgate[DECAY], .b = in[B],
              .raw = by_column(k, in[A]), .a_log = param_value(c, a_log),
              .dt_bias = by_column(k, param_value(c, dt_bias)), .shift_a = param_store_shift(c->params, a_log),
              .shift_dt = param_store_shift(c->params, dt_bias), .overflow = c->params->stats->overflow,
              .bound = spec_of(k)->bound, .leaf = c->canon.leaf_rows, .headroom_bits = c->canon.headroom_bits,
              .fresh = fresh);
}

static Err scan(const RecurrentCall *k, const Scan *x, Tensor y, Tensor o, Tensor states, Tensor after)
{
    const DeltaColumns h = delta_columns(k, y);
    TRY(delta_unit(k, h, h));
    return op(k->c->s, kda_fwd, .o = o, .states = states, .after = after, .q = by_row(k, h.q, 1, x->rows),
              .k = by_row(k, h.k, 1, x->rows), .v = by_row(k, h.v, 1, x->rows), .g = x->gate[DECAY],
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
    TRY(op(c->s, kda_bwd, .dq = by_row(k, dh.q, 1, n), .dk = by_row(k, dh.k, 1, n), .dv = by_row(k, dh.v, 1, n),
           .dg = b->dgate[DECAY], .dbeta = b->dgate[BETA], .dbefore = b->dbefore, .go = b->go, .dafter = b->dafter,
           .q = by_row(k, h.q, 1, n), .k = by_row(k, h.k, 1, n), .v = by_row(k, raw.v, 1, n), .g = x->gate[DECAY],
           .beta = x->gate[BETA], .states = b->states, .doc = x->doc, .first = x->first));
    return delta_unit_backward(k, raw, dh);
}

/* ---- the kind ---- */

static const RecurrentOps kda_ops = { gates, gates_backward, scan, scan_backward, delta_norm, delta_norm_backward };

static Err kda_add(void *own, ParamRegistry *reg, const ModelSpec *s, const char *name, int layer)
{
    DeltaMixer *m = own;
    const KdaSpec *d = &s->kda;
    const int64_t all = d->heads * d->head;
    const RecurrentParts parts = { .in = "qkv",
                                   .small = "fgb",
                                   .up = { [LATENT_DECAY] = "decay", [LATENT_Z] = "gate" },
                                   .section = { all, all, all },
                                   .head_rows = { d->head, d->head, d->head } };
    *m = (DeltaMixer){ .r = { .spec = s,
                              .ops = &kda_ops,
                              .shape = { .units = d->heads,
                                         .heads = d->heads,
                                         .mixed = 3 * d->head,
                                         .gated = d->head,
                                         .state = { d->head, d->head },
                                         .inputs = 1,
                                         .decays = d->head,
                                         .latent = d->head,
                                         .conv = d->conv,
                                         .window = DELTA_WINDOW } },
                       .sigmoid = true };
    return delta_mixer_add(m, reg, &parts, name, layer);
}

/* Wqkv, Wfgb, Wdecay, Wgate, Wproj, and the convolution. */
static int64_t kda_flop(const ModelSpec *s)
{
    const KdaSpec *d = &s->kda;
    const int64_t all = d->heads * d->head;
    return 2 * (s->hidden * (4 * all + 2 * d->head + d->heads) + 2 * d->head * all + 3 * d->conv * all);
}

/* As Gated DeltaNet's. */
static int64_t kda_state_flop(const ModelSpec *s)
{
    const KdaSpec *d = &s->kda;
    return 8 * d->heads * d->head * d->head;
}

const LayerKind kda_kind = { .name = "kda",
                             .own_bytes = sizeof(DeltaMixer),
                             .save_bytes = sizeof(RecurrentSave),
                             .linears = 5,
                             .sums_own_rows = true,
                             .add = kda_add,
                             .forward = recurrent_forward,
                             .backward = recurrent_backward,
                             .flop = kda_flop,
                             .state_flop = kda_state_flop,
                             .pair_flop = no_pair_flop,
                             .score_heads = no_score_heads,
                             .carry = RECURRENT_CARRY(DELTA_WINDOW) };
