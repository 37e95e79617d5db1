/*
 * LayerNorm and RMSNorm (mean left out).
 *
 *   fwd   xhat = (x - mean) * rstd,  y = xhat * w + b
 *   bwd   g = dy * w,  dx += rstd * (g - mean(g) - xhat * mean(g * xhat))       RMSNorm: without mean(g)
 *         dw += sum_n dy * xhat,  db += sum_n dy
 *
 * Row sums: 16 lanes by column mod 16, then vf_sum. Column sums: one chain a leaf of rows, then the
 * accumulator. Threads own rows (y, dx) or columns (dw, db).
 *
 * Traffic per element: fwd reads 4 bytes and writes 4 (two more passes hit the L1 cache); bwd reads 12
 * and writes 4 for dx, reads 8 for dw and db. All are bound by memory.
 */
#include "cpu/rows.h"

static void norm_row_stats(Row x, int64_t D, float eps, float *mean, float *rstd)
{
    vf sum = vf_zero(), squares = vf_zero();
    float m = 0.0f;
    if (mean) {
        for (int64_t i = 0; i < D; i += VEC) sum = vf_add(sum, row_get(x, i, D - i));
        m = vf_sum(sum) / (float)D;
        *mean = m;
    }
    for (int64_t i = 0; i < D; i += VEC) {
        vf d = row_mask(vf_sub(row_get(x, i, D - i), vf_set1(m)), D - i);
        squares = vf_fma(d, d, squares);
    }
    *rstd = 1.0f / __builtin_sqrtf(vf_sum(squares) / (float)D + eps);
}

static void norm_fwd_part(const void *args, int64_t first, int64_t end)
{
    const norm_fwd_args *a = args;
    const Row w = row_of(a->w, 0), b = row_of(a->b, 0);
    const bool biased = a->b.data;
    int64_t D = a->x.dim[1];
    for (int64_t n = first; n < end; n++) {
        const Row x = row_of(a->x, n), y = row_of(a->y, n);
        float *mean = a->mean.data ? (float *)a->mean.data + n : NULL;
        float *rstd = (float *)a->rstd.data + n;
        norm_row_stats(x, D, a->eps, mean, rstd);
        vf m = vf_set1(mean ? *mean : 0.0f), r = vf_set1(*rstd);
        for (int64_t i = 0; i < D; i += VEC) {
            int64_t left = D - i;
            vf h = vf_mul(vf_sub(row_get(x, i, left), m), r);
            vf wi = row_get(w, i, left);
            row_put(y, i, biased ? vf_fma(h, wi, row_get(b, i, left)) : vf_mul(h, wi), left);
        }
    }
}

Err CPU(norm_fwd)(Stream *s, const norm_fwd_args *a)
{
    par_rows(s, rows_both(a->y, a->x), a->x.dim[1], norm_fwd_part, a);
    return ERR_OK;
}

/* Here two passes: the rows of the first are in the cache, or too long for it. */
Err CPU(residual_norm_fwd)(Stream *s, const residual_norm_fwd_args *a)
{
    return residual_norm_apart(s->dev->ops, s, a);
}

static void norm_bwd_row(const norm_bwd_args *a, int64_t n)
{
    const Row x = row_of(a->x, n), dy = row_of(a->dy, n), w = row_of(a->w, 0), dx = row_of(a->dx, n);
    int64_t D = a->x.dim[1];
    vf r = vf_set1(((const float *)a->rstd.data)[n]);
    vf m = vf_set1(a->mean.data ? ((const float *)a->mean.data)[n] : 0.0f);
    vf sum_g = vf_zero(), sum_gh = vf_zero();
    for (int64_t i = 0; i < D; i += VEC) {
        int64_t left = D - i;
        vf g = vf_mul(row_get(dy, i, left), row_get(w, i, left));
        vf h = row_mask(vf_mul(vf_sub(row_get(x, i, left), m), r), left);
        sum_g = vf_add(sum_g, g);
        sum_gh = vf_fma(g, h, sum_gh);
    }
    vf mean_g = vf_set1(a->mean.data ? vf_sum(sum_g) / (float)D : 0.0f);
    vf mean_gh = vf_set1(vf_sum(sum_gh) / (float)D);
    for (int64_t i = 0; i < D; i += VEC) {
        int64_t left = D - i;
        vf g = vf_mul(row_get(dy, i, left), row_get(w, i, left));
        vf h = vf_mul(vf_sub(row_get(x, i, left), m), r);
        vf d = vf_fnma(h, mean_gh, vf_sub(g, mean_g));
        const vf before = a->fresh_dx ? vf_zero() : row_get(dx, i, left);
        row_put(dx, i, vf_fma(r, d, before), left);
    }
}

static void norm_bwd_part(const void *args, int64_t first, int64_t end)
{
    for (int64_t n = first; n < end; n++) norm_bwd_row(args, n);
}

enum { GRAD_VECTORS = 4 }; /* columns are summed 64 at a time: whole cache lines, sums in registers */

typedef struct {
    const norm_bwd_args *a;
    GradAcc w, b;
    int64_t rows;
} NormGrad;

/* One leaf of rows for `vectors` vectors of columns; all but a last lone one are whole. */
VEC_FN void norm_grad_leaf(const NormGrad *g, int64_t row, int64_t end, int64_t column, int vectors)
{
    const norm_bwd_args *a = g->a;
    const float *mean = a->mean.data, *rstd = a->rstd.data;
    int64_t left = a->x.dim[1] - column;
    vf dw[GRAD_VECTORS], db[GRAD_VECTORS];
    for (int j = 0; j < vectors; j++) dw[j] = db[j] = vf_zero();
    for (int64_t n = row; n < end; n++) {
        const Row x = row_of(a->x, n), dy = row_of(a->dy, n);
        vf m = vf_set1(mean ? mean[n] : 0.0f), r = vf_set1(rstd[n]);
        for (int j = 0; j < vectors; j++) {
            vf h = vf_mul(vf_sub(row_get(x, column + j * VEC, left - j * VEC), m), r);
            vf d = row_get(dy, column + j * VEC, left - j * VEC);
            dw[j] = vf_fma(d, h, dw[j]);
            db[j] = vf_add(db[j], d);
        }
    }
    int bad = 0;
    for (int j = 0; j < vectors; j++) {
        int64_t at = column + j * VEC;
        bad |= grad_acc_add(&g->w, at, dw[j], left - j * VEC);
        if (a->db.data) bad |= grad_acc_add(&g->b, at, db[j], left - j * VEC);
    }
    if (bad) flag_raise(a->overflow);
}

static void norm_grad_part(const void *args, int64_t first, int64_t end)
{
    const NormGrad *g = args;
    for (int64_t row = 0; row < g->rows; row += g->a->leaf) {
        int64_t stop = row + g->a->leaf < g->rows ? row + g->a->leaf : g->rows, i = first;
        for (; i + GRAD_VECTORS * VEC <= end; i += GRAD_VECTORS * VEC) {
            norm_grad_leaf(g, row, stop, i, GRAD_VECTORS);
        }
        for (; i < end; i += VEC) norm_grad_leaf(g, row, stop, i, 1);
    }
}

Err CPU(norm_bwd)(Stream *s, const norm_bwd_args *a)
{
    NormGrad g = { .a = a, .w = grad_acc(a->dw, a->shift_w, a->headroom_bits), .rows = rows_both(a->dy, a->x) };
    if (a->db.data) g.b = grad_acc(a->db, a->shift_b, a->headroom_bits);
    if (a->fresh) memset(a->dw.data, 0, (size_t)tensor_bytes(a->dw));
    if (a->fresh && a->db.data) memset(a->db.data, 0, (size_t)tensor_bytes(a->db));
    par_columns(s, a->dy.dim[1], g.rows, norm_grad_part, &g);
    par_rows(s, rows_both(a->dx, a->dy), a->x.dim[1], norm_bwd_part, a);
    if (!a->dsum.data) return ERR_OK;
    bias_grad_args sum = { .dbias = a->dsum,
                           .dy = a->dx,
                           .shift = a->shift_sum,
                           .overflow = a->overflow,
                           .leaf = a->leaf,
                           .headroom_bits = a->headroom_bits,
                           .fresh = a->fresh_sum };
    if (a->dy.rows) sum.dy.rows = a->dy.rows;
    return CPU(bias_grad)(s, &sum);
}
