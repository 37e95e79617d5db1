/*
 * Biases of experts (device/ops.def, grouped_bias): added to the rows of each expert, and their gradients. Threads own
 * rows, or columns, which they go down run by run.
 *
 * Traffic: grouped_bias reads and writes 4 bytes an element, its gradient reads 4.
 */
#include "base/int64.h"
#include "cpu/rows.h"

/* The rows of experts, in runs. */
typedef struct {
    const int64_t *offset;
    int64_t experts, runs; /* how many experts; how many runs each has */
} Runs;

static Runs runs_of(Tensor offset, int64_t experts)
{
    ASSERT((offset.dim[0] - 1) % experts == 0);
    return (Runs){ offset.data, experts, (offset.dim[0] - 1) / experts };
}

static int64_t expert_start(const Runs *r, int64_t e) { return r->offset[e * r->runs]; }

/* ---- added ---- */

typedef struct {
    const grouped_bias_args *a;
    Runs runs;
} BiasAdd;

static void add_row(float *y, const float *bias, int64_t n)
{
    for (int64_t i = 0; i < n; i += VEC)
        row_store(y + i, vf_add(row_load(y + i, n - i), row_load(bias + i, n - i)), n - i);
}

static void bias_part(const void *args, int64_t first, int64_t end)
{
    const BiasAdd *b = args;
    for (int64_t e = 0; e < b->runs.experts; e++) {
        const int64_t begin = max64(first, expert_start(&b->runs, e));
        const int64_t stop = min64(end, expert_start(&b->runs, e + 1));
        for (int64_t p = begin; p < stop; p++) add_row(row_f32(b->a->y, p), row_f32(b->a->bias, e), b->a->y.dim[1]);
    }
}

Err CPU(grouped_bias)(Stream *s, const grouped_bias_args *a)
{
    const BiasAdd b = { a, runs_of(a->offset, a->bias.dim[0]) };
    par_rows(s, expert_start(&b.runs, b.runs.experts), a->y.dim[1], bias_part, &b);
    return ERR_OK;
}

/* ---- gradient ---- */

typedef struct {
    const grouped_bias_grad_args *a;
    Runs runs;
    GradAcc acc;
} BiasSum;

/* A run's rows, 16 columns of them. Returns whether the leaf did not fit. */
VEC_FN int add_leaf(const BiasSum *b, int64_t run, int64_t column)
{
    const int64_t left = b->a->dy.dim[1] - column, at = run / b->runs.runs * b->a->dbias.ld + column;
    vf sum = vf_zero();
    for (int64_t p = b->runs.offset[run]; p < b->runs.offset[run + 1]; p++)
        sum = vf_add(sum, row_load(row_f32(b->a->dy, p) + column, left));
    return grad_acc_add(&b->acc, at, sum, left);
}

static void sum_part(const void *args, int64_t first, int64_t end)
{
    const BiasSum *b = args;
    int bad = 0;
    for (int64_t run = 0; run < b->runs.experts * b->runs.runs; run++)
        for (int64_t i = first; i < end; i += VEC) bad |= add_leaf(b, run, i);
    if (bad) flag_raise(b->a->overflow);
}

Err CPU(grouped_bias_grad)(Stream *s, const grouped_bias_grad_args *a)
{
    const BiasSum b = { a, runs_of(a->offset, a->dbias.dim[0]), grad_acc(a->dbias, a->shift, a->headroom_bits) };
    par_columns(s, a->dy.dim[1], expert_start(&b.runs, b.runs.experts), sum_part, &b);
    return ERR_OK;
}
