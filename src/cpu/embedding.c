/*
 * Table lookup, its gradient, and column sums. Gradients: threads own column ranges and each visits the
 * rows in ascending order, so no sort and no atomics are needed, and a float accumulator is reproducible too.
 *
 * Traffic: fwd and bias_grad read (and fwd writes) 4 bytes per element; embedding_grad reads 4 and updates
 * 8 bytes at scattered rows.
 */
#include "cpu/rows.h"

/* Row of the local table for this index; -1: another rank's, or none. */
static int64_t table_row(int32_t index, int64_t first, int64_t V)
{
    int64_t row = (int64_t)index - first;
    return index >= 0 && row >= 0 && row < V ? row : -1;
}

static void embedding_fwd_part(const void *args, int64_t first, int64_t end)
{
    const embedding_fwd_args *a = args;
    const int32_t *index = a->index.data;
    int64_t D = a->y.dim[1];
    for (int64_t n = first; n < end; n++) {
        int64_t v = table_row(index[n], a->first, a->table.dim[0]);
        const Row from = row_of(a->table, v < 0 ? 0 : v), y = row_of(a->y, n);
        for (int64_t i = 0; i < D; i += VEC) {
            int64_t left = D - i;
            /* adding +0 makes -0 +0, as the sum over ranks does */
            vf old = a->add ? row_get(y, i, left) : vf_zero();
            row_put(y, i, vf_add(old, v < 0 ? vf_zero() : row_get(from, i, left)), left);
        }
    }
}

Err CPU(embedding_fwd)(Stream *s, const embedding_fwd_args *a)
{
    par_rows(s, rows_both(a->y, a->index), a->y.dim[1], embedding_fwd_part, a);
    return ERR_OK;
}

typedef struct {
    const embedding_grad_args *a;
    GradAcc acc;
    int64_t rows;
} EmbeddingGrad;

static void embedding_grad_part(const void *args, int64_t first, int64_t end)
{
    const EmbeddingGrad *g = args;
    const int32_t *index = g->a->index.data;
    int64_t D = g->a->dy.dim[1], bad = 0;
    for (int64_t n = 0; n < g->rows; n++) {
        int64_t v = table_row(index[n], g->a->first, g->a->dtable.dim[0]);
        if (v < 0) continue;
        const Row dy = row_of(g->a->dy, n);
        int64_t at = v * g->a->dtable.ld;
        for (int64_t i = first; i < end; i += VEC) {
            bad |= grad_acc_add(&g->acc, at + i, row_get(dy, i, D - i), D - i);
        }
    }
    if (bad) flag_raise(g->a->overflow);
}

Err CPU(embedding_grad)(Stream *s, const embedding_grad_args *a)
{
    EmbeddingGrad g = { a, grad_acc(a->dtable, a->shift, a->headroom_bits), rows_both(a->dy, a->index) };
    par_columns(s, a->dy.dim[1], g.rows, embedding_grad_part, &g);
    return ERR_OK;
}

enum { GRAD_VECTORS = 8 }; /* columns are summed 128 at a time, in registers */

typedef struct {
    const bias_grad_args *a;
    GradAcc acc;
    int64_t rows;
} BiasGrad;

/* One leaf of rows for `vectors` vectors of columns; all but a last lone one are whole. */
VEC_FN void bias_grad_leaf(const BiasGrad *g, int64_t row, int64_t end, int64_t column, int vectors)
{
    int64_t left = g->a->dy.dim[1] - column;
    vf sum[GRAD_VECTORS];
    for (int j = 0; j < vectors; j++) sum[j] = vf_zero();
    for (int64_t n = row; n < end; n++) {
        const Row dy = row_of(g->a->dy, n);
        for (int j = 0; j < vectors; j++) {
            sum[j] = vf_add(sum[j], row_get(dy, column + j * VEC, left - j * VEC));
        }
    }
    int bad = 0;
    for (int j = 0; j < vectors; j++) {
        bad |= grad_acc_add(&g->acc, column + j * VEC, sum[j], left - j * VEC);
    }
    if (bad) flag_raise(g->a->overflow);
}

static void bias_grad_part(const void *args, int64_t first, int64_t end)
{
    const BiasGrad *g = args;
    for (int64_t row = 0; row < g->rows; row += g->a->leaf) {
        int64_t stop = row + g->a->leaf < g->rows ? row + g->a->leaf : g->rows, i = first;
        for (; i + GRAD_VECTORS * VEC <= end; i += GRAD_VECTORS * VEC) {
            bias_grad_leaf(g, row, stop, i, GRAD_VECTORS);
        }
        for (; i < end; i += VEC) bias_grad_leaf(g, row, stop, i, 1);
    }
}

Err CPU(bias_grad)(Stream *s, const bias_grad_args *a)
{
    BiasGrad g = { a, grad_acc(a->dbias, a->shift, a->headroom_bits), rows_used(a->dy) };
    if (a->fresh) memset(a->dbias.data, 0, (size_t)tensor_bytes(a->dbias));
    par_columns(s, a->dy.dim[1], g.rows, bias_grad_part, &g);
    return ERR_OK;
}
