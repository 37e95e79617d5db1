/*
 * Linear layers, cut over tp by columns (outputs) or rows (inputs):
 *
 *   COLUMN  forward   x [R, in] --gather rows--> [N, in]   y [N, out/tp] = x w^T + b      in whole on each rank
 *           backward  dx partial = dy w, a tree over out; --reduce rows--> dx [R, in]
 *   ROW     forward   partial = x w^T, a tree over in; --reduce rows--> y [R, out]
 *           backward  dy [R, out] --gather rows--> [N, out]   dx [N, in/tp] = dy w       out likewise
 *   WHOLE   not cut: own rows in and out, bias added; gradients of weight and bias are of these rows alone
 *
 * The summed dim that tp cuts is a tree over tp_blocks canonical chunks: a rank's call returns its aligned
 * subtree and the reduction over ranks is the rest of the same tree, so every tp gives the same bits.
 * No chain has more than LEAF_MOST products where it can be helped: longer ones are trees inside a chunk, too. The
 * error of a chain grows with its length, and over a vocabulary it would be the largest of a step.
 * Weight gradients are queued (layer.h, Wgrad).
 */
#include <stdio.h>
#include <string.h>

#include "layer/internal.h"

Err linear_register(Linear *l, ParamRegistry *reg, LinearSpec spec)
{
    char name[PARAM_NAME_MAX];
    *l = (Linear){ .bias = -1, .in = spec.in, .out = spec.out, .kind = spec.kind, .fp8 = spec.fp8 };
    bool column = spec.kind == LINEAR_COLUMN, row = spec.kind == LINEAR_ROW;
    ParamSpec w = { .name = name,
                    .ndim = 2,
                    .shape = { spec.out, spec.in },
                    .cut = { column ? CUT_TP : CUT_NONE, row ? CUT_TP : CUT_NONE },
                    .partial = spec.kind == LINEAR_WHOLE ? PARTIAL_ROWS : PARTIAL_NONE,
                    .interleave = spec.interleave,
                    .qk = spec.qk,
                    .block = spec.block,
                    .init = INIT_NORMAL,
                    .std = spec.std,
                    .flags = PARAM_DECAY | PARAM_HIDDEN | (spec.fp8 ? PARAM_EIGHT_BITS : 0) };
    memcpy(w.section, spec.section, sizeof w.section);
    memcpy(w.head_rows, spec.head_rows, sizeof w.head_rows);
    snprintf(name, sizeof name, "%s.%s.weight", spec.owner, spec.name);
    TRY(param_add(reg, w, &l->weight));
    if (!spec.bias) return ERR_OK;
    ParamSpec b = w;
    b.ndim = 1;
    b.shape[1] = 1;
    b.cut[1] = CUT_NONE;
    b.init = INIT_ZERO;
    b.flags = 0;
    b.partial = column ? PARTIAL_NONE : PARTIAL_ROWS;
    snprintf(name, sizeof name, "%s.%s.bias", spec.owner, spec.name);
    return param_add(reg, b, &l->bias);
}

/* A call may hold several chunks of a dim that tp cuts, so all leaves are equal: halves, as long as there are such. */
int64_t tree_leaf(const Ctx *c, int64_t global, int64_t local)
{
    if (!c->canon.exact || c->canon.tp_blocks == 1) return whole_leaf(local);
    int64_t leaf = global / c->canon.tp_blocks;
    while (leaf > LEAF_MOST && leaf % 2 == 0) leaf /= 2;
    return leaf;
}

static const Tensor none;

Err linear_forward(const Linear *l, Ctx *c, Tensor x, Tensor y) { return linear_forward_gelu(l, c, x, y, none); }

static Tensor run_of(Tensor t, RowRun r) { return t.data ? tensor_row_slice(t, r.first, r.count) : t; }

/* Generation, with few rows at a time and no gradients, has all products in the compute dtype. */
static Fp8Recipe recipe_of(const Linear *l, const Ctx *c) { return c->block.cache ? FP8_NONE : l->fp8; }

/* The products of a layer's rows, or of some of them; q: the weight in 8 bits, if they are of such. */
static Err product(Ctx *c, const Fp8Weight *q, linear_fwd_args a)
{
    return q->recipe ? fp8_forward(c, q, a) : op_linear_fwd(c->s, &a);
}

/* wgrad: of these rows and no others; NULL: of more, or it comes later. */
static Err product_dx(Ctx *c, const Fp8Weight *q, linear_dx_args a, Wgrad *wgrad)
{
    return q->recipe ? fp8_dx(c, q, a, wgrad) : op_linear_dx(c->s, &a);
}

static Err column_forward(const Linear *l, Ctx *c, Tensor x, Tensor y, Tensor active)
{
    const Tensor w = param_value(c, l->weight), bias = param_value(c, l->bias);
    Fp8Weight q;
    RowBands in;
    RowRun r;
    TRY(fp8_begin_forward(c, recipe_of(l, c), l->weight, x, &q));
    TRY(rows_in_begin(c, x, &in));
    for (int turn = 0; turn < in.count; turn++) {
        TRY(rows_in_band(c, &in, turn, &r));
        TRY(product(c, &q,
                    (linear_fwd_args){ .y = run_of(y, r),
                                       .gelu = run_of(active, r),
                                       .x = run_of(in.rows, r),
                                       .w = w,
                                       .bias = bias,
                                       .leaf = whole_leaf(l->in) }));
    }
    return ERR_OK;
}

static Err row_forward(const Linear *l, Ctx *c, Tensor x, Tensor y)
{
    const Tensor w = param_value(c, l->weight);
    Fp8Weight q;
    RowBands out;
    TRY(fp8_begin_forward(c, recipe_of(l, c), l->weight, x, &q));
    TRY(rows_out_begin(c, y, c->bands, &out));
    for (int turn = 0; turn < out.count; turn++) {
        const RowRun r = rows_out_band(c, &out, turn);
        TRY(product(c, &q,
                    (linear_fwd_args){
                        .y = run_of(out.rows, r), .x = run_of(x, r), .w = w, .leaf = tree_leaf(c, l->in, x.dim[1]) }));
        TRY(rows_out_send(c, &out, turn));
    }
    return reduce_rows_end(c, out.sum);
}

static Err whole_forward(const Linear *l, Ctx *c, Tensor x, Tensor y)
{
    const Tensor w = param_value(c, l->weight), bias = param_value(c, l->bias);
    Fp8Weight q;
    TRY(fp8_begin_forward(c, recipe_of(l, c), l->weight, x, &q));
    return product(c, &q, (linear_fwd_args){ .y = y, .x = x, .w = w, .bias = bias, .leaf = whole_leaf(l->in) });
}

Err linear_forward_gelu(const Linear *l, Ctx *c, Tensor x, Tensor y, Tensor active)
{
    ASSERT(l->kind == LINEAR_COLUMN || !active.data);
    ArenaMark mark = arena_mark(c->scratch);
    if (l->kind == LINEAR_COLUMN) TRY(column_forward(l, c, x, y, active));
    else if (l->kind == LINEAR_ROW) TRY(row_forward(l, c, x, y));
    else TRY(whole_forward(l, c, x, y));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* x is gathered while dx is computed, dx summed over the ranks while the weight's gradient is. Where that comes later
 * dx goes out in bands. */
static Err column_backward(const Linear *l, Ctx *c, Tensor x, Tensor dy, Tensor dx)
{
    const bool at_once = !c->mode.split_backward;
    const Tensor w = param_value(c, l->weight);
    Wgrad wgrad = { l->weight, dy, x, .gather_x = !at_once && c->world->sp.size > 1 };
    Fp8Weight q;
    RowBands out;
    TRY(fp8_begin_backward(c, l->fp8, &wgrad, &q));
    if (at_once) TRY(gather_rows_begin(c, x, &wgrad.x));
    TRY(rows_out_begin(c, dx, at_once ? 1 : c->bands, &out));
    for (int turn = 0; turn < out.count; turn++) {
        const RowRun r = rows_out_band(c, &out, turn);
        TRY(product_dx(c, &q,
                       (linear_dx_args){ .dx = run_of(out.rows, r),
                                         .dy = run_of(dy, r),
                                         .w = w,
                                         .leaf = tree_leaf(c, l->out, dy.dim[1]) },
                       at_once ? &wgrad : NULL));
        TRY(rows_out_send(c, &out, turn));
    }
    if (at_once) TRY(gather_rows_end(c));
    TRY(grad_add_columns(c, l->bias, dy, 0));
    TRY(wgrad_push(c, wgrad));
    return reduce_rows_end(c, out.sum);
}

static Err row_backward(const Linear *l, Ctx *c, Tensor x, Tensor dy, Tensor gelu_x, Tensor dx)
{
    const bool at_once = !c->mode.split_backward;
    const Tensor w = param_value(c, l->weight);
    /* a later W gathers dy again: keeping the gathered copy would cost tp times the memory */
    Wgrad wgrad = { l->weight, dy, x, .gather_dy = !at_once && c->world->sp.size > 1 };
    Fp8Weight q;
    RowBands in;
    RowRun r;
    TRY(fp8_begin_backward(c, l->fp8, &wgrad, &q));
    TRY(rows_in_begin(c, dy, &in));
    for (int turn = 0; turn < in.count; turn++) {
        TRY(rows_in_band(c, &in, turn, &r));
        TRY(product_dx(c, &q,
                       (linear_dx_args){ .dx = run_of(dx, r),
                                         .dy = run_of(in.rows, r),
                                         .w = w,
                                         .gelu_x = run_of(gelu_x, r),
                                         .leaf = whole_leaf(l->out) },
                       at_once && in.count == 1 ? &wgrad : NULL));
    }
    if (at_once) wgrad.dy = in.rows;
    return wgrad_push(c, wgrad);
}

static Err whole_backward(const Linear *l, Ctx *c, Tensor x, Tensor dy, Tensor dx)
{
    Wgrad wgrad = { l->weight, dy, x };
    Fp8Weight q;
    TRY(fp8_begin_backward(c, l->fp8, &wgrad, &q));
    TRY(product_dx(c, &q,
                   (linear_dx_args){ .dx = dx, .dy = dy, .w = param_value(c, l->weight), .leaf = whole_leaf(l->out) },
                   c->mode.split_backward ? NULL : &wgrad));
    TRY(grad_add_columns(c, l->bias, dy, 0));
    return wgrad_push(c, wgrad);
}

Err linear_backward(const Linear *l, Ctx *c, Tensor x, Tensor dy, Tensor dx)
{
    return linear_backward_gelu(l, c, x, dy, none, dx);
}

Err linear_backward_gelu(const Linear *l, Ctx *c, Tensor x, Tensor dy, Tensor gelu_x, Tensor dx)
{
    ASSERT(l->kind == LINEAR_ROW || !gelu_x.data);
    ArenaMark mark = arena_mark(c->scratch);
    if (l->kind == LINEAR_COLUMN) TRY(column_backward(l, c, x, dy, dx));
    else if (l->kind == LINEAR_ROW) TRY(row_backward(l, c, x, dy, gelu_x, dx));
    else TRY(whole_backward(l, c, x, dy, dx));
    arena_release(c->scratch, mark);
    return ERR_OK;
}
