/*
 * Mamba-2: each head has a state, a matrix of fixed size that every row lets decay, adds to and reads. Heads are cut
 * over tp. Head h reads the keys and queries (papers: B and C) of group h / (H / G). A unit of recurrent.h is a group:
 *
 *   z, x, k, q = x Win      columns lie group by group: z and x of its heads, its k and q
 *   dt         = x Wdt      one of each head; every rank of tp has all of Wdt
 *   x, k, q    = silu(convolution over the last rows of each column, with a bias)
 *   delta, g   = gates of dt: how much of x is written, and the logarithm of the decay
 *   o          = the scan (device/ops.def, mamba_fwd)
 *   y          = (w norm(o silu(z))) Wproj     the norm is of all columns of a group; no linear layer here has a bias
 *
 * Source: Dao, Gu 2024 (Transformers are SSMs).
 */
#include <stdio.h>

#include "layer/recurrent.h"

typedef struct {
    Recurrent r;
    int norm; /* the norm's weight, [columns of all groups] */
} Mamba;

enum { STEP, DECAY }; /* gates */

static const Mamba *mamba_of(const RecurrentCall *k) { return (const Mamba *)k->r; }
static const MambaSpec *spec_of(const RecurrentCall *k) { return &k->r->spec->mamba; }

/* ---- gates ---- */

static Err gates(const RecurrentCall *k, const Tensor *in, const Tensor *gate)
{
    Ctx *c = k->c;
    return op(c->s, mamba_gates_fwd, .delta = gate[STEP], .g = gate[DECAY], .dt = in[0],
              .a_log = param_value(c, k->r->a_log), .dt_bias = param_value(c, k->r->dt_bias), .low = spec_of(k)->least);
}

static Err gates_backward(const RecurrentCall *k, const Tensor *in, const Tensor *dgate, const Tensor *din)
{
    Ctx *c = k->c;
    const int a_log = k->r->a_log, dt_bias = k->r->dt_bias;
    bool fresh;
    Tensor acc[2];
    TRY(grad_pair(k, a_log, dt_bias, false, acc, &fresh));
    return op(c->s, mamba_gates_bwd, .ddt = din[0], .da_log = acc[0], .ddt_bias = acc[1], .ddelta = dgate[STEP],
              .dg = dgate[DECAY], .dt = in[0], .a_log = param_value(c, a_log), .dt_bias = param_value(c, dt_bias),
              .shift_a = param_store_shift(c->params, a_log), .shift_dt = param_store_shift(c->params, dt_bias),
              .overflow = c->params->stats->overflow, .low = spec_of(k)->least, .leaf = c->canon.leaf_rows,
              .headroom_bits = c->canon.headroom_bits, .fresh = fresh);
}

/* ---- the scan ---- */

/* x, k and q of columns as the convolution has them, by row: [B, rows, heads or groups, width]. */
typedef struct {
    Tensor x, k, q;
} Mixed;

static Mixed mixed_of(const RecurrentCall *k, Tensor t, int64_t rows)
{
    const int64_t N = spec_of(k)->state;
    return (Mixed){ by_row(k, part_of(t, k->mixed, 0, k->gated), k->group, rows),
                    by_row(k, part_of(t, k->mixed, k->gated, N), 1, rows),
                    by_row(k, part_of(t, k->mixed, k->gated + N, N), 1, rows) };
}

static Err scan(const RecurrentCall *k, const Scan *x, Tensor y, Tensor o, Tensor states, Tensor after)
{
    const Mixed h = mixed_of(k, y, x->rows);
    if (!states.data) TRY(states_new(k, k->B * windows_of(k, x->rows) * k->scan_heads, &states));
    return op(k->c->s, mamba_fwd, .o = o, .states = states, .after = after, .x = h.x, .k = h.k, .q = h.q,
              .delta = x->gate[STEP], .g = x->gate[DECAY], .skip = own_units(k, param_value(k->c, k->r->skip)),
              .doc = x->doc, .before = x->state, .first = x->first);
}

/* dskip [B, rows, heads]; recurrent.c says when the gradient may go out. */
static Err skip_backward(const RecurrentCall *k, Tensor dskip, const ScanBackward *b)
{
    Ctx *c = k->c;
    return op(c->s, bias_grad, .dbias = b->skip, .dy = rows_of_heads(dskip, k->scan_heads),
              .shift = param_store_shift(c->params, k->r->skip), .overflow = c->params->stats->overflow,
              .leaf = c->canon.leaf_rows, .headroom_bits = c->canon.headroom_bits, .fresh = b->fresh);
}

static Err scan_backward(const RecurrentCall *k, const Scan *x, Tensor y, const ScanBackward *b)
{
    Ctx *c = k->c;
    const Mixed h = mixed_of(k, y, x->rows), dh = mixed_of(k, b->dy, x->rows);
    ArenaMark mark = arena_mark(c->scratch);
    Tensor dskip, dstates;
    TRY(tensor_new(c->scratch, &dskip, F32, k->B, x->rows, k->scan_heads));
    TRY(tensor_alloc(c->scratch, &dstates, F32, b->states.ndim, b->states.dim));
    TRY(op(c->s, mamba_bwd, .dx = dh.x, .dk = dh.k, .dq = dh.q, .ddelta = b->dgate[STEP], .dg = b->dgate[DECAY],
           .dskip = dskip, .dbefore = b->dbefore, .dstates = dstates, .go = b->go, .dafter = b->dafter, .x = h.x,
           .k = h.k, .q = h.q, .delta = x->gate[STEP], .g = x->gate[DECAY],
           .skip = own_units(k, param_value(c, k->r->skip)), .states = b->states, .doc = x->doc, .first = x->first));
    TRY(skip_backward(k, dskip, b));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- the norm, of a group's columns together ---- */

/* Rows of groups, of the norm's weight or its gradient as well. */
static Tensor by_group(const RecurrentCall *k, Tensor t) { return rows_of_heads(t, k->gated); }

static Err norm_groups(const RecurrentCall *k, Tensor o, Tensor z, Tensor y)
{
    Ctx *c = k->c;
    return op(c->s, gated_norm_fwd, .y = by_group(k, y), .x = by_group(k, o), .z = by_group(k, z),
              .w = by_group(k, param_value(c, mamba_of(k)->norm)), .eps = k->r->spec->norm_eps, .gate_first = true);
}

static Err norm_groups_backward(const RecurrentCall *k, Tensor go, Tensor dz)
{
    Ctx *c = k->c;
    const int id = mamba_of(k)->norm;
    bool fresh;
    const Tensor dw = by_group(k, grad_target(c, id, &fresh)), rows = by_group(k, go);
    TRY(op(c->s, gated_norm_bwd, .dx = rows, .dz = dz, .dw = dw, .dy = rows, .x = by_group(k, save_get(c, k->save->o)),
           .z = by_group(k, save_get(c, k->save->z)), .w = by_group(k, param_value(c, id)),
           .shift = param_store_shift(c->params, id), .overflow = c->params->stats->overflow,
           .eps = k->r->spec->norm_eps, .gate_first = true, .leaf = c->canon.leaf_rows,
           .headroom_bits = c->canon.headroom_bits, .fresh = fresh));
    return grad_added(c, id);
}

/* ---- the kind ---- */

static const RecurrentOps mamba_ops = { gates, gates_backward, scan, scan_backward, norm_groups, norm_groups_backward };

static Err add_norm(Mamba *m, ParamRegistry *reg, const char *owner)
{
    char name[PARAM_NAME_MAX];
    snprintf(name, sizeof name, "%s.norm.weight", owner);
    const ParamSpec p = { .name = name,
                          .ndim = 1,
                          .shape = { m->r.shape.units * m->r.shape.gated, 1 },
                          .cut = { CUT_TP },
                          .init = INIT_ONE };
    return param_add(reg, p, &m->norm);
}

static Err mamba_add(void *own, ParamRegistry *reg, const ModelSpec *s, const char *name, int layer)
{
    Mamba *m = own;
    const MambaSpec *d = &s->mamba;
    ASSERT(d->groups > 0 && d->heads % d->groups == 0);
    const int64_t group = d->heads / d->groups * d->head, all = d->heads * d->head, keys = d->groups * d->state;
    const RecurrentParts parts = { .in = "in",
                                   .small = "dt",
                                   .section = { all, all, keys, keys },
                                   .head_rows = { d->head, d->head, d->state, d->state },
                                   .conv_bias = d->conv_bias };
    *m = (Mamba){ .r = { .spec = s,
                         .ops = &mamba_ops,
                         .shape = { .units = d->groups,
                                    .heads = d->heads,
                                    .mixed = group + 2 * d->state,
                                    .gated = group,
                                    .state = { d->state, d->head },
                                    .inputs = 1,
                                    .decays = 1,
                                    .conv = d->conv,
                                    .window = MAMBA_WINDOW,
                                    .z_first = true } } };
    TRY(recurrent_add(&m->r, reg, &parts, name, layer));
    TRY(recurrent_add_numbers(&m->r, reg, name, "skip", 1, INIT_ONE, &m->r.skip));
    TRY(add_norm(m, reg, name));
    return recurrent_add_proj(&m->r, reg, name, layer);
}

/* Win, Wdt and Wproj. */
static int64_t mamba_flop(const ModelSpec *s)
{
    const MambaSpec *d = &s->mamba;
    return 2 * s->hidden * (3 * d->heads * d->head + 2 * d->groups * d->state + d->heads);
}

/* As Megatron counts them. */
static int64_t mamba_state_flop(const ModelSpec *s)
{
    const MambaSpec *d = &s->mamba;
    return 7 * d->heads * d->head * d->state;
}

const LayerKind mamba2_kind = { .name = "mamba",
                                .own_bytes = sizeof(Mamba),
                                .save_bytes = sizeof(RecurrentSave),
                                .linears = 3,
                                .sums_own_rows = true,
                                .add = mamba_add,
                                .forward = recurrent_forward,
                                .backward = recurrent_backward,
                                .flop = mamba_flop,
                                .state_flop = mamba_state_flop,
                                .pair_flop = no_pair_flop,
                                .score_heads = no_score_heads,
                                .carry = RECURRENT_CARRY(MAMBA_WINDOW) };
