/*
 * Products of linear layers by 8-bit operands (docs/precision.md). Weights, activations and gradients stay as they are;
 * each operand is cast when a product is made, in scratch, with the dim that it sums over last:
 *
 *   y  = x w^T      x [N, I]            w [O, I]
 *   dx = dy w       dy [N, O]           w transposed [I, O]
 *   dw = dy^T x     dy transposed [O, N]  x transposed [I, N]
 *
 *             one factor for             gradients
 *   tensorwise  the tensor               e5m2
 *   blockwise   1 x 128, w 128 x 128     e4m3
 *   mxfp8       1 x 32                   e4m3
 *
 * The largest magnitude of a whole tensor is that over all ranks that share it: columns are cut over tp, rows over sp
 * and cp. The maximum over tp and over cp is right for all: where ranks have the same, it changes nothing.
 */
#include "layer/internal.h"

/* An operand: its codes, whose scale points to the factor beside them. Not to be copied. */
typedef struct {
    Tensor codes, factor;
} Operand;

enum { AMAX_WEIGHT, AMAX_OPERAND, AMAX_OTHER, AMAX_COUNT };

/* What is cast; whole: of what tensor the amax is (AMAX_...). */
typedef struct {
    bool weight, gradient, transposed;
} Role;

Fp8Blocks fp8_blocks_of(Fp8Recipe recipe, bool weight)
{
    switch (recipe) {
    case FP8_BLOCKWISE: return (Fp8Blocks){ weight ? 128 : 1, 128, FP8_SCALE_POWER_OF_TWO };
    case FP8_MXFP8: return (Fp8Blocks){ 1, 32, FP8_SCALE_E8M0 };
    case FP8_NONE:
    case FP8_TENSORWISE: break;
    }
    return (Fp8Blocks){ 0, 0, FP8_SCALE_EXACT };
}

Err fp8_factor_alloc(Ctx *c, Fp8Blocks b, int64_t rows, int64_t columns, Tensor *factor)
{
    if (!b.rows) return tensor_new(c->scratch, factor, F32, 1);
    TRY(tensor_new(c->scratch, factor, F32, fp8_block_count(rows, b.rows), fp8_factor_ld(b, columns)));
    *factor = tensor_col_slice(*factor, 0, fp8_block_count(columns, b.columns));
    return ERR_OK;
}

static Err cast_operand(Ctx *c, Fp8Recipe recipe, Role r, Tensor x, Tensor amax, Operand *out)
{
    const DType t = r.gradient && recipe == FP8_TENSORWISE ? E5M2 : E4M3;
    const int64_t rows = x.dim[r.transposed], columns = x.dim[!r.transposed];
    const Fp8Blocks b = fp8_blocks_of(recipe, r.weight);
    TRY(tensor_new(c->scratch, &out->codes, t, rows, columns));
    TRY(fp8_factor_alloc(c, b, rows, columns, &out->factor));
    out->codes.scale = &out->factor;
    return op(c->s, fp8_cast, .y = out->codes, .x = x, .amax = amax, .transposed = r.transposed, .blocks = b);
}

static Tensor amax_at(Tensor amax, int i) { return amax.data ? tensor_row_slice(amax, i, 1) : amax; }

static Err put_amax(Ctx *c, Tensor amax, int i, Tensor x)
{
    return op(c->s, fp8_amax, .amax = amax_at(amax, i), .x = x, .fresh = true);
}

static Err over_ranks(Ctx *c, Tensor amax)
{
    Comm *groups[] = { &c->world->tp, &c->world->cp };
    for (int i = 0; i < 2; i++)
        if (groups[i]->size > 1) TRY(comm_max_i64(groups[i], c->s, amax.data, tensor_count(amax), NULL));
    return ERR_OK;
}

static Err cast_weight(Ctx *c, Fp8Weight *out, Tensor w, bool transposed)
{
    Operand o;
    TRY(cast_operand(c, out->recipe, (Role){ .weight = true, .transposed = transposed }, w,
                     amax_at(out->amax, AMAX_WEIGHT), &o));
    out->w = o.codes;
    out->factor = o.factor;
    return ERR_OK;
}

/* The weight with its factors, which lie in q. */
static Tensor weight_of(const Fp8Weight *q)
{
    Tensor w = q->w;
    w.scale = &q->factor;
    return w;
}

Err fp8_begin_forward(Ctx *c, Fp8Recipe recipe, Tensor x, Tensor w, Fp8Weight *out)
{
    *out = (Fp8Weight){ .recipe = recipe };
    if (!recipe) return ERR_OK;
    if (recipe == FP8_TENSORWISE) {
        TRY(tensor_new(c->scratch, &out->amax, I64, AMAX_OTHER));
        TRY(put_amax(c, out->amax, AMAX_WEIGHT, w));
        TRY(put_amax(c, out->amax, AMAX_OPERAND, x));
        TRY(over_ranks(c, out->amax));
    }
    return cast_weight(c, out, w, false);
}

Err fp8_forward(Ctx *c, const Fp8Weight *w, linear_fwd_args a)
{
    const ArenaMark mark = arena_mark(c->scratch);
    Operand x;
    TRY(cast_operand(c, w->recipe, (Role){ 0 }, a.x, amax_at(w->amax, AMAX_OPERAND), &x));
    TRY(op(c->s, fp8_product, .y = a.y, .x = x.codes, .w = weight_of(w), .bias = a.bias, .gelu = a.gelu,
           .leaf = a.leaf, .fast = w->recipe == FP8_TENSORWISE));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* The largest magnitudes are kept as long as wgrad waits. */
Err fp8_begin_backward(Ctx *c, Fp8Recipe recipe, Wgrad *wgrad, Fp8Weight *out)
{
    const Tensor w = recipe ? param_value(c, wgrad->weight) : (Tensor){ 0 };
    *out = (Fp8Weight){ .recipe = recipe };
    wgrad->fp8 = recipe;
    if (!recipe) return ERR_OK;
    if (recipe == FP8_TENSORWISE) {
        Arena *at = c->mode.split_backward ? c->into[REGION_W] : c->scratch;
        TRY(tensor_new(at, &out->amax, I64, AMAX_COUNT));
        TRY(put_amax(c, out->amax, AMAX_WEIGHT, w));
        TRY(put_amax(c, out->amax, AMAX_OPERAND, wgrad->dy));
        TRY(put_amax(c, out->amax, AMAX_OTHER, wgrad->x));
        TRY(over_ranks(c, out->amax));
        wgrad->amax = tensor_row_slice(out->amax, AMAX_OPERAND, 2);
    }
    return cast_weight(c, out, w, true);
}

Err fp8_dx(Ctx *c, const Fp8Weight *w, linear_dx_args a)
{
    const ArenaMark mark = arena_mark(c->scratch);
    Operand dy;
    TRY(cast_operand(c, w->recipe, (Role){ .gradient = true }, a.dy, amax_at(w->amax, AMAX_OPERAND), &dy));
    TRY(op(c->s, fp8_product, .y = a.dx, .x = dy.codes, .w = weight_of(w), .leaf = a.leaf));
    arena_release(c->scratch, mark);
    return a.gelu_x.data ? op(c->s, gelu_bwd, .dx = a.dx, .dy = a.dx, .x = a.gelu_x) : ERR_OK;
}

Err fp8_dw(Ctx *c, const Wgrad *w, linear_dw_args a)
{
    const ArenaMark mark = arena_mark(c->scratch);
    const Role turned = { .transposed = true };
    Operand dy, x;
    TRY(cast_operand(c, w->fp8, (Role){ .gradient = true, .transposed = true }, a.dy, amax_at(w->amax, 0),
                     &dy));
    TRY(cast_operand(c, w->fp8, turned, a.x, amax_at(w->amax, 1), &x));
    TRY(op(c->s, fp8_product_add, .dw = a.dw, .dy = dy.codes, .x = x.codes, .shift = a.shift,
           .overflow = a.overflow, .leaf = a.leaf, .headroom_bits = a.headroom_bits, .fresh = a.fresh));
    arena_release(c->scratch, mark);
    return ERR_OK;
}
