/*
 * Products of experts by 8-bit operands whose scales are of blocks (docs/precision.md), as fp8.c has those of linear
 * layers:
 *
 *   y  = x w^T      x [Q, I]            w [E O, I]                experts one below the other
 *   dx = dy w       dy [Q, O]           w transposed [I, E O]     side by side
 *   dw = dy^T x     dy transposed [O, C]  x transposed [I, C]     rows in runs
 *
 * A row's blocks are its own. Along tokens blocks begin with each run, the rows of an expert that are of one leaf of
 * its gradient, which are the same in every layout (docs/moe.md): so are the codes. C has room for the blocks that runs
 * leave unfilled. Experts' sizes are whole blocks, so that none has numbers of two experts.
 */
#include "base/int64.h"
#include "layer/internal.h"

static Err operand_alloc(Ctx *c, Fp8Blocks b, int64_t rows, int64_t columns, Fp8Operand *out)
{
    return fp8_codes_alloc(c->scratch, E4M3, b, rows, columns, &out->codes, &out->factor);
}

/* The weights [E, O, I] as [E O, I], or transposed. */
static Err cast_weights(Ctx *c, Fp8Recipe recipe, Tensor w, bool transposed, Fp8Operand *out)
{
    const Tensor all = tensor_reshape(w, w.dim[0] * w.dim[1], w.dim[2]);
    const Fp8Blocks b = fp8_blocks_of(recipe, true);
    if (w.dim[1] % b.columns || w.dim[2] % b.columns)
        return err_set(ERR_SHAPE, "experts of 8 bits: [%lld, %lld] are not whole blocks of %d", (long long)w.dim[1],
                       (long long)w.dim[2], b.columns);
    TRY(operand_alloc(c, b, all.dim[transposed], all.dim[!transposed], out));
    const Tensor none = { 0 }, codes = out->codes;
    return op(c->s, fp8_cast, .y = transposed ? none : codes, .turned = transposed ? codes : none, .x = all,
              .blocks = b);
}

/* The rows in use. */
static Err cast_rows(Ctx *c, Fp8Recipe recipe, Tensor x, Tensor offset, Fp8Operand *out)
{
    const Fp8Blocks b = fp8_blocks_of(recipe, false);
    x.rows = (const int64_t *)offset.data + offset.dim[0] - 1;
    TRY(operand_alloc(c, b, x.dim[0], x.dim[1], out));
    out->codes.rows = x.rows;
    return op(c->s, fp8_cast, .y = out->codes, .x = x, .blocks = b);
}

static Err cast_runs(Ctx *c, Fp8Recipe recipe, Tensor x, Tensor offset, Tensor begin, Fp8Operand *out)
{
    const Fp8Blocks b = fp8_blocks_of(recipe, false);
    const int64_t columns = b.columns * (x.dim[0] / b.columns + offset.dim[0] - 1);
    TRY(operand_alloc(c, b, x.dim[1], columns, out));
    out->codes.expected = x.expected;
    return op(c->s, fp8_cast_runs, .y = out->codes, .begin = begin, .x = x, .offset = offset, .blocks = b);
}

/* Two tensors with the same rows share what one knows: how many are in use. */
static void share_expected(Tensor *a, Tensor *b)
{
    if (!a->expected) a->expected = b->expected;
    b->expected = a->expected;
}

static Err product(Ctx *c, Fp8Recipe recipe, Tensor y, Tensor x, Tensor w, bool transposed, Tensor offset, int64_t leaf)
{
    const ArenaMark mark = arena_mark(c->scratch);
    Fp8Operand weights, rows;
    share_expected(&x, &y);
    TRY(cast_weights(c, recipe, w, transposed, &weights));
    TRY(cast_rows(c, recipe, x, offset, &rows));
    TRY(op(c->s, fp8_grouped, .y = y, .x = rows.codes, .w = weights.codes, .offset = offset, .leaf = leaf));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

Err fp8_experts_fwd(Ctx *c, Fp8Recipe recipe, grouped_fwd_args a)
{
    return product(c, recipe, a.y, a.x, a.w, false, a.offset, a.leaf);
}

Err fp8_experts_dx(Ctx *c, Fp8Recipe recipe, grouped_dx_args a)
{
    return product(c, recipe, a.dx, a.dy, a.w, true, a.offset, a.leaf);
}

Err fp8_experts_dw(Ctx *c, Fp8Recipe recipe, grouped_dw_args a)
{
    const ArenaMark mark = arena_mark(c->scratch);
    Fp8Operand dy, x;
    Tensor begin;
    share_expected(&a.dy, &a.x);
    TRY(tensor_new(c->scratch, &begin, I64, a.offset.dim[0]));
    TRY(cast_runs(c, recipe, a.dy, a.offset, begin, &dy));
    TRY(cast_runs(c, recipe, a.x, a.offset, begin, &x));
    TRY(op(c->s, fp8_grouped_add, .dw = a.dw, .dy = dy.codes, .x = x.codes, .begin = begin, .shift = a.shift,
           .overflow = a.overflow, .headroom_bits = a.headroom_bits, .fresh = a.fresh));
    arena_release(c->scratch, mark);
    return ERR_OK;
}
