/*
 * Products over experts (device/ops.def, grouped_*): as linear.c, with a matrix for each run of rows.
 *
 *   fwd  y [rows x O] = x [rows x I] w[e]^T     TREE of leaves of I
 *   dx  dx [rows x I] = dy [rows x O] w[e]      TREE of leaves of O
 *   dw  dw[e] [O x I] += dy^T x                 I64, a product for each leaf; an F32 dw: one chain over all rows
 *
 * Experts are many and small, so threads take tasks, a piece of the output of one expert, and each product runs on
 * one thread with its share of the workspace. How many tasks there are depends on the threads, no bit does.
 */
#include <stdatomic.h>

#include "cpu/linear.h"
#include "cpu/rows.h"

enum {
    TASKS_PER_THREAD = 16, /* so that the last ones to end are short beside all */
    PIECE_LEAST = 128,     /* rows, or columns, of a task: below this, packing operands for so few would show */
    PIECE_UNIT = 48        /* whole tiles of any instruction set */
};

typedef enum { GROUPED_FWD, GROUPED_DX, GROUPED_DW } GroupedKind;

typedef struct {
    GroupedKind kind;
    Tensor out, a, b;      /* the product is out = a b */
    const int64_t *offset; /* where each run begins */
    int64_t E, runs;       /* how many experts; how many runs each has */
    int64_t leaf;          /* what fwd and dx sum as one chain */
    int64_t depth;         /* of fwd and dx */
    int64_t b_step;        /* fwd, dx: elements from one expert's b to the next */
    bool turned;           /* b's rows lie along what is summed: of fwd and dx as columns of the output, of dw all */
    grouped_dw_args dw;
    int64_t columns;                /* how many an expert's output has */
    int64_t row_pieces, col_pieces; /* an expert's output is cut into these, each a task */
} GroupedCall;

/* Rows, or columns, of an expert's output. */
typedef struct {
    int64_t first, end;
} Range;

/* Visits each product of a task, to measure it or to make it. */
typedef void GemmVisit(void *user, const Gemm *g);

/* ---- tasks ---- */

/* Begin of the rows of expert e. */
static int64_t expert_start(const GroupedCall *c, int64_t e) { return c->offset[e * c->runs]; }

/* Rows of expert e's output. */
static int64_t output_rows(const GroupedCall *c, int64_t e)
{
    return c->kind == GROUPED_DW ? c->out.dim[1] : expert_start(c, e + 1) - expert_start(c, e);
}

/* A matrix that begins at an element of t. */
static GemmOperand operand_at(Tensor t, int64_t at, bool transposed)
{
    GemmOperand m = { .ld = t.ld, .transposed = transposed };
    if (t.dtype == BF16) m.bf16 = (const uint16_t *)t.data + at;
    else m.data = (const float *)t.data + at;
    return m;
}

/* A piece of y or dx. */
static Gemm rows_product(const GroupedCall *c, int64_t e, Range rows, Range cols)
{
    const int64_t first = expert_start(c, e) + rows.first;
    Gemm g = { .mode = GEMM_TREE,
               .leaf = c->leaf,
               .M = rows.end - rows.first,
               .N = cols.end - cols.first,
               .K = c->depth,
               .a = operand_at(c->a, tensor_row_at(c->a, first), false),
               .b = operand_at(c->b, e * c->b_step + cols.first * (c->turned ? c->b.ld : 1), c->turned),
               .ldc = c->out.ld };
    if (c->out.dtype == BF16) g.narrow.c = (uint16_t *)c->out.data + tensor_row_at(c->out, first) + cols.first;
    else g.c = row_f32(c->out, first) + cols.first;
    return g;
}

/* dw's operands have rows for tokens, or, turned, columns. */
static GemmOperand gradient_operand(const GroupedCall *c, Tensor t, int64_t token, int64_t at, bool left)
{
    if (c->turned) return operand_at(t, at * t.ld + token, !left);
    return operand_at(t, tensor_row_at(t, token) + at, left);
}

/* A piece of dw[e]. */
static Gemm gradient_product(const GroupedCall *c, int64_t e, Range rows, Range cols)
{
    const grouped_dw_args *a = &c->dw;
    const int64_t start = expert_start(c, e), at = (e * c->out.dim[1] + rows.first) * c->out.ld + cols.first;
    Gemm g = { .mode = GEMM_CHAIN,
               .M = rows.end - rows.first,
               .N = cols.end - cols.first,
               .K = expert_start(c, e + 1) - start,
               .a = gradient_operand(c, c->a, start, rows.first, true),
               .b = gradient_operand(c, c->b, start, cols.first, false),
               .ldc = c->out.ld,
               .beta = !a->fresh };
    if (c->out.dtype == F32) {
        g.c = (float *)c->out.data + at;
        return g;
    }
    g.mode = GEMM_I64;
    g.starts = c->offset + e * c->runs;
    g.fixed = (int64_t *)c->out.data + at;
    g.shift = *(const int32_t *)a->shift.data;
    g.headroom_bits = a->headroom_bits;
    return g;
}

/* Piece `number` of `pieces` of n rows or columns. */
static Range piece_of(int64_t n, int64_t number, int64_t pieces)
{
    const int64_t units = (n + PIECE_UNIT - 1) / PIECE_UNIT;
    return (Range){ units * number / pieces * PIECE_UNIT, min64(units * (number + 1) / pieces * PIECE_UNIT, n) };
}

static void visit_task(const GroupedCall *c, int64_t task, GemmVisit *visit, void *user)
{
    const int64_t expert = task / (c->row_pieces * c->col_pieces), piece = task % (c->row_pieces * c->col_pieces);
    const Range rows = piece_of(output_rows(c, expert), piece / c->col_pieces, c->row_pieces);
    const Range cols = piece_of(c->columns, piece % c->col_pieces, c->col_pieces);
    if (rows.first >= rows.end || cols.first >= cols.end) return;
    const Gemm g =
        c->kind == GROUPED_DW ? gradient_product(c, expert, rows, cols) : rows_product(c, expert, rows, cols);
    visit(user, &g);
}

/* Rather pieces of the dim that costs nothing to cut: weights, the larger operand, are then packed or read once. */
static void plan_pieces(GroupedCall *c, int64_t threads)
{
    int64_t rows = 1;
    for (int64_t e = 0; e < c->E; e++) rows = max64(rows, output_rows(c, e));
    const int64_t wanted = threads == 1 ? 1 : (TASKS_PER_THREAD * threads + c->E - 1) / c->E;
    int64_t *first = &c->col_pieces, *second = &c->row_pieces, size[2] = { c->columns, rows };
    if (c->kind == GROUPED_DW) first = &c->row_pieces, second = &c->col_pieces, size[0] = rows, size[1] = c->columns;
    *first = min64(wanted, max64(size[0] / PIECE_LEAST, 1));
    *second = min64((wanted + *first - 1) / *first, max64(size[1] / PIECE_LEAST, 1));
}

/* ---- threads ---- */

typedef struct {
    Device dev; /* one thread, its share of the workspace */
    bool overflow;
} Worker;

/* Share of the workspace that a product needs. */
static void measure(void *user, const Gemm *g)
{
    Worker *w = user;
    w->dev.workspace_bytes = max64(w->dev.workspace_bytes, CPU(gemm_bytes)(&w->dev, g));
}

static void multiply(void *user, const Gemm *g)
{
    Worker *w = user;
    w->overflow |= CPU(gemm)(&w->dev, g);
}

/* Returns whether a leaf did not fit. */
static bool grouped_run(const Stream *s, GroupedCall *c)
{
    int threads = s->dev->threads;
    Worker one = { .dev = *s->dev };
    one.dev.workspace_bytes = 64;
    atomic_bool overflow = false;
    atomic_llong next = 0;
    plan_pieces(c, threads);
    const int64_t tasks = c->E * c->row_pieces * c->col_pieces;
    for (int64_t t = 0; t < tasks; t++) visit_task(c, t, measure, &one);
    const int64_t share = (one.dev.workspace_bytes + 63) / 64 * 64;
    ASSERT(share <= s->dev->workspace_bytes);
    threads = (int)min64(min64(threads, tasks), s->dev->workspace_bytes / share);
#pragma omp parallel num_threads(team_of(s->dev, threads))
    if (omp_get_thread_num() < threads) {
        fp_reset();
        Worker w = { .dev = *s->dev };
        w.dev.threads = 1;
        w.dev.workspace += omp_get_thread_num() * share;
        w.dev.workspace_bytes = share;
        for (int64_t t; (t = atomic_fetch_add(&next, 1)) < tasks;) visit_task(c, t, multiply, &w);
        if (w.overflow) atomic_store(&overflow, true);
    }
    return atomic_load(&overflow);
}

/* ---- the ops ---- */

static Err check_dtype(const char *op, Tensor t)
{
    if (t.dtype == F32 || t.dtype == BF16) return ERR_OK;
    return err_set(ERR_SHAPE, "%s on the cpu reads f32 or bf16, not '%s'", op, dtype_name(t.dtype));
}

static GroupedCall grouped_call(GroupedKind kind, Tensor offset, int64_t experts)
{
    ASSERT((offset.dim[0] - 1) % experts == 0);
    return (GroupedCall){ .kind = kind, .offset = offset.data, .E = experts, .runs = (offset.dim[0] - 1) / experts };
}

Err CPU(grouped_fwd)(Stream *s, const grouped_fwd_args *a)
{
    GroupedCall c = grouped_call(GROUPED_FWD, a->offset, a->w.dim[0]);
    TRY(check_dtype("grouped_fwd", a->x));
    c.out = a->y, c.a = a->x, c.b = a->w, c.leaf = a->leaf, c.columns = a->y.dim[1];
    c.depth = a->w.dim[2], c.b_step = a->w.dim[1] * a->w.ld, c.turned = true;
    grouped_run(s, &c);
    return ERR_OK;
}

Err CPU(grouped_dx)(Stream *s, const grouped_dx_args *a)
{
    GroupedCall c = grouped_call(GROUPED_DX, a->offset, a->w.dim[0]);
    TRY(check_dtype("grouped_dx", a->dy));
    c.out = a->dx, c.a = a->dy, c.b = a->w, c.leaf = a->leaf, c.columns = a->dx.dim[1];
    c.depth = a->w.dim[1], c.b_step = a->w.dim[1] * a->w.ld;
    grouped_run(s, &c);
    return ERR_OK;
}

Err CPU(grouped_dw)(Stream *s, const grouped_dw_args *a)
{
    GroupedCall c = grouped_call(GROUPED_DW, a->offset, a->dw.dim[0]);
    TRY(check_dtype("grouped_dw", a->dy));
    c.out = a->dw, c.a = a->dy, c.b = a->x, c.dw = *a, c.columns = a->dw.dim[2];
    if (grouped_run(s, &c)) *(int32_t *)a->overflow.data = 1;
    return ERR_OK;
}

/* ---- of 8-bit operands, which are in fp32 now (device/widen.c) ---- */

Err CPU(fp8_grouped)(Stream *s, const fp8_grouped_args *a)
{
    const int64_t O = a->y.dim[1], I = a->x.dim[1], down = a->w.dim[0] / O, across = a->w.dim[1] / I;
    TRY(check_widened(a->x, a->w));
    if (down * O != a->w.dim[0] || across * I != a->w.dim[1] || (down != 1 && across != 1))
        return err_set(ERR_SHAPE, "fp8_grouped: w is [%lld, %lld], its experts [%lld, %lld]", (long long)a->w.dim[0],
                       (long long)a->w.dim[1], (long long)O, (long long)I);
    GroupedCall c = grouped_call(GROUPED_FWD, a->offset, down * across);
    c.out = a->y, c.a = a->x, c.b = a->w, c.leaf = a->leaf, c.columns = O;
    c.depth = I, c.b_step = across > 1 ? I : O * a->w.ld, c.turned = true;
    grouped_run(s, &c);
    return ERR_OK;
}

Err CPU(fp8_grouped_add)(Stream *s, const fp8_grouped_add_args *a)
{
    GroupedCall c = grouped_call(GROUPED_DW, a->begin, a->dw.dim[0]);
    TRY(check_widened(a->dy, a->x));
    c.out = a->dw, c.a = a->dy, c.b = a->x, c.columns = a->dw.dim[2], c.turned = true;
    c.dw = (grouped_dw_args){ .shift = a->shift, .headroom_bits = a->headroom_bits, .fresh = a->fresh };
    if (grouped_run(s, &c)) *(int32_t *)a->overflow.data = 1;
    return ERR_OK;
}
