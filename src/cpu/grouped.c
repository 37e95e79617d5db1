/*
 * Products over experts (device/ops.def, grouped_*): as linear.c, with a matrix for each run of rows.
 *
 *   fwd  y [rows x O] = x [rows x I] w[e]^T     TREE of leaves of I
 *   dx  dx [rows x I] = dy [rows x O] w[e]      TREE of leaves of O
 *   dw  dw[e] [O x I] += dy^T x                 I64, a product for each leaf; an F32 dw: one chain over all rows
 *
 * Experts are many and small, so threads take tasks, a piece of the output of one expert, and each product runs on
 * one thread with its share of the workspace. A task's size depends on the threads, no bit does.
 */
#include <stdatomic.h>

#include "cpu/gemm.h"
#include "cpu/rows.h"

enum { TASK_ROWS = 128 }; /* of an output; enough that packing the weights for them does not show */

typedef enum { GROUPED_FWD, GROUPED_DX, GROUPED_DW } GroupedKind;

typedef struct {
    GroupedKind kind;
    Tensor out, a, b;      /* of a product out = a b */
    const int64_t *offset; /* of runs */
    int64_t E, runs;       /* of an expert */
    int64_t leaf;          /* of fwd and dx */
    const grouped_dw_args *dw;
    int64_t block, blocks; /* output rows of a task; tasks of an expert, at most */
} GroupedCall;

/* What is done with each product of a task: it is measured, or made. */
typedef void GemmVisit(void *user, const Gemm *g);

/* ---- tasks ---- */

/* Rows [first, end) of expert e: a piece of y or dx. */
static void visit_rows(const GroupedCall *c, int64_t e, int64_t first, int64_t end, GemmVisit *visit,
                       void *user)
{
    const bool fwd = c->kind == GROUPED_FWD;
    const int64_t O = c->b.dim[1], I = c->b.dim[2];
    const Gemm g = { .mode = GEMM_TREE,
                     .leaf = c->leaf,
                     .M = end - first,
                     .N = fwd ? O : I,
                     .K = fwd ? I : O,
                     .a = { row_f32(c->a, first), c->a.ld, false },
                     .b = { row_f32(c->b, e * O), c->b.ld, fwd },
                     .c = row_f32(c->out, first),
                     .ldc = c->out.ld };
    visit(user, &g);
}

/* Where the rows of expert e begin. */
static int64_t expert_start(const GroupedCall *c, int64_t e) { return c->offset[e * c->runs]; }

/* Output rows [first, end) of dw[e]. */
static void visit_gradient(const GroupedCall *c, int64_t e, int64_t first, int64_t end, GemmVisit *visit,
                           void *user)
{
    const grouped_dw_args *a = c->dw;
    const bool fixed = a->dw.dtype == I64;
    const int64_t O = a->dw.dim[1], at = (e * O + first) * a->dw.ld;
    const int64_t start = expert_start(c, e);
    Gemm g = { .mode = fixed ? GEMM_I64 : GEMM_CHAIN,
               .M = end - first,
               .N = a->dw.dim[2],
               .K = expert_start(c, e + 1) - start,
               .a = { row_f32(a->dy, start) + first, a->dy.ld, true },
               .b = { row_f32(a->x, start), a->x.ld, false },
               .ldc = a->dw.ld,
               .beta = !a->fresh };
    if (fixed) {
        g.starts = c->offset + e * c->runs;
        g.fixed = (int64_t *)a->dw.data + at;
        g.shift = *(const int32_t *)a->shift.data;
        g.room = a->room;
    } else {
        g.c = (float *)a->dw.data + at;
    }
    visit(user, &g);
}

static void visit_task(const GroupedCall *c, int64_t task, GemmVisit *visit, void *user)
{
    const int64_t e = task / c->blocks, first = task % c->blocks * c->block;
    const bool dw = c->kind == GROUPED_DW;
    const int64_t start = dw ? 0 : expert_start(c, e), end = dw ? c->dw->dw.dim[1] : expert_start(c, e + 1);
    const int64_t from = start + first, to = min64(from + c->block, end);
    if (from >= to) return;
    if (dw) visit_gradient(c, e, from, to, visit, user);
    else visit_rows(c, e, from, to, visit, user);
}

/* ---- threads ---- */

static void measure(void *user, const Gemm *g)
{
    int64_t *most = user;
    *most = max64(*most, CPU(gemm_bytes)(g));
}

typedef struct {
    Device dev; /* one thread, its share of the workspace */
    bool overflow;
} Worker;

static void multiply(void *user, const Gemm *g)
{
    Worker *w = user;
    w->overflow |= CPU(gemm)(&w->dev, g);
}

/* Returns whether a leaf did not fit. */
static bool grouped_run(const Stream *s, GroupedCall *c, int64_t most_rows)
{
    int threads = s->dev->threads;
    int64_t share = 64;
    atomic_bool overflow = false;
    atomic_llong next = 0;
    c->block = threads == 1 ? max64(most_rows, 1) : TASK_ROWS;
    c->blocks = max64((most_rows + c->block - 1) / c->block, 1);
    const int64_t tasks = c->E * c->blocks;
    for (int64_t t = 0; t < tasks; t++) visit_task(c, t, measure, &share);
    share = (share + 63) / 64 * 64;
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

static Err need_f32(const char *op, Tensor t)
{
    if (t.dtype == F32) return ERR_OK;
    return err_set(ERR_SHAPE, "%s on the cpu computes in f32, not '%s'", op, dtype_name(t.dtype));
}

static int64_t most_rows(const GroupedCall *c)
{
    int64_t most = 0;
    for (int64_t e = 0; e < c->E; e++) most = max64(most, expert_start(c, e + 1) - expert_start(c, e));
    return most;
}

static GroupedCall grouped_call(GroupedKind kind, Tensor offset, int64_t experts)
{
    ASSERT((offset.dim[0] - 1) % experts == 0);
    return (GroupedCall){
        .kind = kind, .offset = offset.data, .E = experts, .runs = (offset.dim[0] - 1) / experts
    };
}

Err CPU(grouped_fwd)(Stream *s, const grouped_fwd_args *a)
{
    GroupedCall c = grouped_call(GROUPED_FWD, a->offset, a->w.dim[0]);
    TRY(need_f32("grouped_fwd", a->x));
    c.out = a->y, c.a = a->x, c.b = a->w, c.leaf = a->leaf;
    grouped_run(s, &c, most_rows(&c));
    return ERR_OK;
}

Err CPU(grouped_dx)(Stream *s, const grouped_dx_args *a)
{
    GroupedCall c = grouped_call(GROUPED_DX, a->offset, a->w.dim[0]);
    TRY(need_f32("grouped_dx", a->dy));
    c.out = a->dx, c.a = a->dy, c.b = a->w, c.leaf = a->leaf;
    grouped_run(s, &c, most_rows(&c));
    return ERR_OK;
}

Err CPU(grouped_dw)(Stream *s, const grouped_dw_args *a)
{
    GroupedCall c = grouped_call(GROUPED_DW, a->offset, a->dw.dim[0]);
    TRY(need_f32("grouped_dw", a->dy));
    c.dw = a;
    if (grouped_run(s, &c, a->dw.dim[1])) *(int32_t *)a->overflow.data = 1;
    return ERR_OK;
}
