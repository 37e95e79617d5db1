/*
 * Pairs (cuda_case.h) as the kernels meet them besides dense tensors: some columns of a wider matrix, so that
 * rows lie apart and may begin off a multiple of 16 bytes; and tensors with a device-side count of rows.
 */
#ifndef MEGATRAIN_TEST_CUDA_PAIR_VIEWS_H
#define MEGATRAIN_TEST_CUDA_PAIR_VIEWS_H

#include "cuda_case.h"

/* A matrix with numbers around it: `gap` columns behind each row, of which `skip` stand before the first. */
typedef struct {
    Pair all, view; /* check `all`: what lies between the rows must stay */
} Matrix;

static inline Matrix matrix_uniform(CudaCase *c, DType T, double low, double high, int64_t rows,
                                    int64_t columns, int64_t gap, int64_t skip)
{
    Matrix m = { .all = pair_uniform(c, T, low, high, CASE_DIMS(rows, columns + gap)) };
    for (int side = 0; side < 2; side++) m.view.t[side] = tensor_col_slice(m.all.t[side], skip, columns);
    return m;
}

/* [N, columns] in groups of `group` rows side by side, with the gap around each group; group 0: around each row. */
static inline Matrix matrix_groups(CudaCase *c, DType T, double low, double high, int64_t N, int64_t columns,
                                   int64_t gap, int64_t skip, int64_t group)
{
    if (!group) return matrix_uniform(c, T, low, high, N, columns, gap, skip);
    Matrix m = matrix_uniform(c, T, low, high, N / group, group * columns, gap, skip);
    for (int side = 0; side < 2; side++) {
        Tensor *t = &m.view.t[side];
        t->dim[0] = N, t->dim[1] = columns, t->group = group;
    }
    return m;
}

/* The rows of `m` as [N, heads, columns]: heads are rows. */
static inline Pair matrix_heads(const Matrix *m, int64_t N, int64_t heads)
{
    Pair p = m->view;
    for (int side = 0; side < 2; side++) {
        Tensor *t = &p.t[side];
        t->ndim = 3;
        t->dim[2] = t->dim[1];
        t->dim[0] = N, t->dim[1] = heads;
    }
    return p;
}

/* The same tensor with a count of its rows in use (an I64 pair of one element). */
static inline Pair pair_used(Pair p, const Pair *count)
{
    for (int side = 0; side < 2; side++)
        if (count) p.t[side].rows = count->t[side].data;
    return p;
}

#endif
