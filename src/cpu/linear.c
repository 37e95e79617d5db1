/*
 * The linear ops as products (gemm.h): the only ops that read weights of linear layers.
 *
 *   fwd  y [N x O] = x [N x I] w^T + bias     TREE over I (row-parallel cuts), or one chain
 *   dx  dx [N x I] = dy [N x O] w             TREE over O (column-parallel cuts), or one chain
 *   dw  dw [O x I] += dy^T [O x N] x          I64 leaves of tokens; an F32 dw: one chain over all tokens,
 *                                             going on from dw: runs repeat, layouts do not
 *
 * GELU behind fwd and its gradient behind dx are the elementwise ops, so fusing changes no bit here. In bf16 GELU is of
 * y as it is stored, the gradient of the fp32 number that dx is rounded from, while it is at hand.
 *
 * Tensor.rows of any token tensor limits N: other rows are neither read nor written.
 */
#include "cpu/linear.h"

#include "device/product_speedup.h"

/* Token rows in use: the shape, or less by the counts of the two token tensors. */
static int64_t token_rows(Tensor a, Tensor b)
{
    int64_t n = a.dim[0];
    if (a.rows && *a.rows < n) n = *a.rows;
    if (b.rows && *b.rows < n) n = *b.rows;
    return n;
}

static Err check_dtype(const char *op, Tensor t)
{
    if (t.dtype == F32 || t.dtype == BF16) return ERR_OK;
    return err_set(ERR_SHAPE, "%s on the cpu reads f32 or bf16, not '%s'", op, dtype_name(t.dtype));
}

static GemmOperand operand(Tensor t, bool transposed)
{
    if (t.dtype == BF16) return (GemmOperand){ .bf16 = t.data, .ld = t.ld, .transposed = transposed };
    return (GemmOperand){ t.data, t.ld, transposed };
}

/* c = the product in c's dtype. */
static void result_in(Gemm *g, Tensor c)
{
    g->ldc = c.ld;
    if (c.dtype == BF16) g->narrow.c = c.data;
    else g->c = c.data;
}

Err CPU(linear_fwd)(Stream *s, const linear_fwd_args *a)
{
    TRY(check_dtype("linear_fwd", a->x));
    Gemm g = { .mode = GEMM_TREE,
               .M = token_rows(a->y, a->x),
               .N = a->w.dim[0],
               .K = a->w.dim[1],
               .leaf = a->leaf,
               .a = operand(a->x, false),
               .b = operand(a->w, true) };
    const bool fused = a->gelu.data && a->y.dtype == BF16;
    result_in(&g, a->y);
    if (a->bias.dtype == BF16) g.narrow.bias = a->bias.data;
    else g.bias = a->bias.data;
    if (fused) g.narrow.gelu = a->gelu.data, g.narrow.gelu_ld = a->gelu.ld;
    CPU(gemm)(s->dev, &g);
    if (!a->gelu.data || fused) return ERR_OK;
    gelu_fwd_args gelu = { .y = a->gelu, .x = a->y };
    if (a->x.rows) gelu.y.rows = a->x.rows; /* y's own count limits it as well */
    return CPU(gelu_fwd)(s, &gelu);
}

Err CPU(linear_dx)(Stream *s, const linear_dx_args *a)
{
    TRY(check_dtype("linear_dx", a->dy));
    Gemm g = { .mode = GEMM_TREE,
               .M = token_rows(a->dx, a->dy),
               .N = a->w.dim[1],
               .K = a->w.dim[0],
               .leaf = a->leaf,
               .a = operand(a->dy, false),
               .b = operand(a->w, false) };
    const bool fused = a->gelu_x.data && a->dx.dtype == BF16;
    result_in(&g, a->dx);
    if (fused) g.narrow.gelu_x = a->gelu_x.data, g.narrow.gelu_x_ld = a->gelu_x.ld;
    CPU(gemm)(s->dev, &g);
    if (!a->gelu_x.data || fused) return ERR_OK;
    gelu_bwd_args gelu = { .dx = a->dx, .dy = a->dx, .x = a->gelu_x };
    if (a->dy.rows) gelu.dy.rows = a->dy.rows;
    return CPU(gelu_bwd)(s, &gelu);
}

Err CPU(add_product)(Stream *s, const linear_dw_args *to, GemmOperand a, GemmOperand b, int64_t tokens)
{
    Gemm g = { .mode = GEMM_CHAIN,
               .M = to->dw.dim[0],
               .N = to->dw.dim[1],
               .K = tokens,
               .a = a,
               .b = b,
               .c = to->dw.data,
               .ldc = to->dw.ld,
               .beta = !to->fresh };
    if (to->dw.dtype == I64) {
        g.mode = GEMM_I64;
        g.fixed = to->dw.data;
        g.leaf = to->leaf;
        g.shift = *(const int32_t *)to->shift.data;
        g.headroom_bits = to->headroom_bits;
    }
    if (CPU(gemm)(s->dev, &g)) *(int32_t *)to->overflow.data = 1;
    return ERR_OK;
}

Err CPU(linear_dw)(Stream *s, const linear_dw_args *a)
{
    TRY(check_dtype("linear_dw", a->dy));
    return CPU(add_product)(s, a, operand(a->dy, true), operand(a->x, false), token_rows(a->dy, a->x));
}

/* (Most of these calls are such: sums of one leaf, and gradients of fixed point added to by leaves of 128 tokens. The
 * others have one chain over all.) */
double CPU(product_speedup)(const Device *dev, OpId id, ProductShape shape)
{
    enum { LEAF = 128 };
    static const uint16_t narrow = 0;
    static const float wide = 0;
    int64_t sums = 0;
    const GemmOperand a = { .data = shape.bf16 ? NULL : &wide, .bf16 = shape.bf16 ? &narrow : NULL },
                      turned = { .data = a.data, .bf16 = a.bf16, .transposed = true };
    const int64_t N = shape.rows, O = shape.outputs, I = shape.inputs;
    Gemm g = { .mode = GEMM_TREE, .M = N, .N = O, .K = I, .leaf = I, .a = a, .b = turned };
    if (id == OP_linear_dx) g.N = I, g.K = g.leaf = O, g.b = a;
    if (id == OP_linear_dw)
        g = (Gemm){ .mode = shape.fixed ? GEMM_I64 : GEMM_CHAIN,
                    .M = O,
                    .N = I,
                    .K = N,
                    .leaf = LEAF,
                    .a = turned,
                    .b = a,
                    .fixed = shape.fixed ? &sums : NULL,
                    .beta = true };
    g.a.ld = g.a.transposed ? g.M : g.K;
    g.b.ld = g.b.transposed ? g.K : g.N;
    return CPU(gemm_speedup)(dev, &g);
}
