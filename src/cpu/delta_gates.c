/*
 * What stands around the gated delta rule: keys and queries of unit length, the gates, and the norm of its output under
 * a gate.
 *
 * Row sums: 16 lanes by column mod 16, then vf_sum. Column sums: one chain a leaf of rows, then the accumulator.
 * Threads own rows, or columns of the sums. All are bound by memory, but for gates, of which a head has two a row.
 */
#include "cpu/gelu.h"
#include "cpu/rows.h"

static vf squares_of(Row x, int64_t D)
{
    vf sum = vf_zero();
    for (int64_t i = 0; i < D; i += VEC) {
        const vf v = row_get(x, i, D - i);
        sum = vf_fma(v, v, sum);
    }
    return sum;
}

/* ---- unit length ---- */

static void unit_fwd_part(const void *args, int64_t first, int64_t end)
{
    const unit_fwd_args *a = args;
    const int64_t D = a->x.dim[1];
    for (int64_t n = first; n < end; n++) {
        const Row x = row_of(a->x, n), y = row_of(a->y, n);
        const vf r = vf_set1(a->factor / __builtin_sqrtf(vf_sum(squares_of(x, D)) + a->eps));
        for (int64_t i = 0; i < D; i += VEC) row_put(y, i, vf_mul(row_get(x, i, D - i), r), D - i);
    }
}

Err CPU(unit_fwd)(Stream *s, const unit_fwd_args *a)
{
    par_rows(s, rows_both(a->y, a->x), a->x.dim[1], unit_fwd_part, a);
    return ERR_OK;
}

/* With h = x / root: dx = factor / root * (dy - h (h . dy)). */
static void unit_bwd_part(const void *args, int64_t first, int64_t end)
{
    const unit_bwd_args *a = args;
    const int64_t D = a->x.dim[1];
    for (int64_t n = first; n < end; n++) {
        const Row x = row_of(a->x, n), dy = row_of(a->dy, n), dx = row_of(a->dx, n);
        const float r = 1.0f / __builtin_sqrtf(vf_sum(squares_of(x, D)) + a->eps);
        vf both = vf_zero();
        for (int64_t i = 0; i < D; i += VEC)
            both = vf_fma(vf_mul(row_get(x, i, D - i), vf_set1(r)), row_get(dy, i, D - i), both);
        const vf dot = vf_set1(vf_sum(both)), scale = vf_set1(a->factor * r);
        for (int64_t i = 0; i < D; i += VEC) {
            const vf h = vf_mul(row_get(x, i, D - i), vf_set1(r));
            row_put(dx, i, vf_mul(scale, vf_fnma(h, dot, row_get(dy, i, D - i))), D - i);
        }
    }
}

Err CPU(unit_bwd)(Stream *s, const unit_bwd_args *a)
{
    par_rows(s, rows_both(a->dx, a->dy), a->x.dim[1], unit_bwd_part, a);
    return ERR_OK;
}

/* ---- gates ---- */

enum { GATE_COST = 32 }; /* elements that cost as much as a gate's exp and log in double */

/* softplus(x), and its slope. */
static double soft_gate(double x, double *slope)
{
    *slope = 1 / (1 + m_exp(-x));
    return x > 20 ? x : softplus(x);
}

/* Element h of row n of a float tensor. */
static float gate_value(Tensor x, int64_t n, int64_t h) { return any_load(x, tensor_row_at(x, n) + h); }

static void gates_fwd_part(const void *args, int64_t first, int64_t end)
{
    const delta_gates_fwd_args *a = args;
    for (int64_t n = first; n < end; n++) {
        float *beta = row_f32(a->beta, n), *g = row_f32(a->g, n);
        for (int64_t h = 0; h < a->b.dim[1]; h++) {
            const double rate = m_exp((double)any_load(a->a_log, h));
            double slope;
            beta[h] = a->top * sigmoid_f32(gate_value(a->b, n, h));
            g[h] = (float)(-rate * soft_gate((double)gate_value(a->a, n, h) + (double)any_load(a->dt_bias, h), &slope));
        }
    }
}

Err CPU(delta_gates_fwd)(Stream *s, const delta_gates_fwd_args *a)
{
    par_rows(s, rows_both(a->beta, a->b), a->b.dim[1] * GATE_COST, gates_fwd_part, a);
    return ERR_OK;
}

typedef struct {
    const delta_gates_bwd_args *a;
    GradAcc a_log, dt_bias;
    int64_t rows;
} GateGrads;

/* Of up to VEC heads of a row, db and da; and what these add to the sums of the leaf. */
static void gates_row(const delta_gates_bwd_args *a, int64_t n, int64_t head, int64_t count, float *da_log,
                      float *ddt_bias)
{
    const float *dbeta = row_f32(a->dbeta, n), *dg = row_f32(a->dg, n);
    for (int64_t i = 0, h = head; i < count; i++, h++) {
        const double s = 1 / (1 + m_exp(-(double)gate_value(a->b, n, h))), rate = m_exp((double)any_load(a->a_log, h));
        const double x = (double)gate_value(a->a, n, h) + (double)any_load(a->dt_bias, h);
        double slope;
        const double g = -rate * soft_gate(x, &slope);
        const float da = (float)(-rate * slope * (double)dg[h]);
        any_store(a->db, tensor_row_at(a->db, n) + h, (float)((double)a->top * s * (1 - s) * (double)dbeta[h]));
        any_store(a->da, tensor_row_at(a->da, n) + h, da);
        da_log[i] += (float)(g * (double)dg[h]);
        ddt_bias[i] += da;
    }
}

static void gates_bwd_part(const void *args, int64_t first, int64_t end)
{
    const GateGrads *g = args;
    const int64_t leaf = g->a->leaf;
    int bad = 0;
    for (int64_t head = first; head < end; head += VEC) {
        const int64_t count = end - head < VEC ? end - head : VEC;
        for (int64_t row = 0; row < g->rows; row += leaf) {
            float da_log[VEC] = { 0 }, ddt_bias[VEC] = { 0 };
            for (int64_t n = row; n < row + leaf && n < g->rows; n++) gates_row(g->a, n, head, count, da_log, ddt_bias);
            bad |= grad_acc_add(&g->a_log, head, vf_load(da_log), count);
            bad |= grad_acc_add(&g->dt_bias, head, vf_load(ddt_bias), count);
        }
    }
    if (bad) flag_raise(g->a->overflow);
}

Err CPU(delta_gates_bwd)(Stream *s, const delta_gates_bwd_args *a)
{
    const GateGrads g = { .a = a,
                          .a_log = grad_acc(a->da_log, a->shift_a, a->headroom_bits),
                          .dt_bias = grad_acc(a->ddt_bias, a->shift_dt, a->headroom_bits),
                          .rows = rows_both(a->db, a->dbeta) };
    if (a->leaf < 1) return err_set(ERR_SHAPE, "delta_gates_bwd: leaves of %lld rows", (long long)a->leaf);
    if (a->fresh) memset(a->da_log.data, 0, (size_t)tensor_bytes(a->da_log));
    if (a->fresh) memset(a->ddt_bias.data, 0, (size_t)tensor_bytes(a->ddt_bias));
    par_columns(s, a->b.dim[1], g.rows * GATE_COST, gates_bwd_part, &g);
    return ERR_OK;
}

/* ---- a norm under a gate ---- */

static float rms_of(Row x, int64_t E, float eps)
{
    return 1.0f / __builtin_sqrtf(vf_sum(squares_of(x, E)) / (float)E + eps);
}

static void gated_norm_fwd_part(const void *args, int64_t first, int64_t end)
{
    const gated_norm_fwd_args *a = args;
    const Row w = row_of(a->w, 0);
    const int64_t E = a->x.dim[1];
    for (int64_t n = first; n < end; n++) {
        const Row x = row_of(a->x, n), z = row_of(a->z, n), y = row_of(a->y, n);
        const vf r = vf_set1(rms_of(x, E, a->eps));
        for (int64_t i = 0; i < E; i += VEC) {
            const vf h = vf_mul(row_get(x, i, E - i), r), u = row_get(z, i, E - i);
            row_put(y, i, vf_mul(vf_mul(h, row_get(w, i, E - i)), vf_mul(u, sigmoid(u))), E - i);
        }
    }
}

Err CPU(gated_norm_fwd)(Stream *s, const gated_norm_fwd_args *a)
{
    par_rows(s, rows_both(a->y, a->x), a->x.dim[1], gated_norm_fwd_part, a);
    return ERR_OK;
}

/* silu(u) and its slope. Below -80 the slope is 0 in float. */
VEC_FN void silu_pair(vf u, vf *value, vf *slope)
{
    vf s, t;
    const vf c = vf_max(vf_set1(-80.0f), u);
    sigmoid_pair(c, &s, &t);
    *value = vf_mul(u, s);
    *slope = vf_mul(s, vf_fma(c, t, vf_set1(1.0f)));
}

/* With h = x r and gate = silu(z): of h, dh = dy w gate; dx = r (dh - h mean(dh h)); dz = dy w h silu'(z). */
static void gated_norm_bwd_row(const gated_norm_bwd_args *a, int64_t n)
{
    const Row x = row_of(a->x, n), z = row_of(a->z, n), dy = row_of(a->dy, n), w = row_of(a->w, 0);
    const Row dx = row_of(a->dx, n), dz = row_of(a->dz, n);
    const int64_t E = a->x.dim[1];
    const vf r = vf_set1(rms_of(x, E, a->eps));
    vf value, slope, sum = vf_zero();
    for (int64_t i = 0; i < E; i += VEC) {
        silu_pair(row_get(z, i, E - i), &value, &slope);
        const vf dyw = vf_mul(row_get(dy, i, E - i), row_get(w, i, E - i));
        sum = vf_fma(vf_mul(dyw, value), vf_mul(row_get(x, i, E - i), r), sum);
    }
    const vf mean = vf_set1(vf_sum(sum) / (float)E);
    for (int64_t i = 0; i < E; i += VEC) {
        silu_pair(row_get(z, i, E - i), &value, &slope);
        const vf dyw = vf_mul(row_get(dy, i, E - i), row_get(w, i, E - i)), h = vf_mul(row_get(x, i, E - i), r);
        row_put(dx, i, vf_mul(r, vf_fnma(h, mean, vf_mul(dyw, value))), E - i);
        row_put(dz, i, vf_mul(vf_mul(dyw, h), slope), E - i);
    }
}

static void gated_norm_bwd_part(const void *args, int64_t first, int64_t end)
{
    for (int64_t n = first; n < end; n++) gated_norm_bwd_row(args, n);
}

enum { GATED_VECTORS = 4 }; /* columns are summed 64 at a time, in registers */

typedef struct {
    const gated_norm_bwd_args *a;
    GradAcc w;
    int64_t rows;
} GatedGrad;

/* One leaf of rows for `vectors` vectors of columns; all but a last lone one are whole. */
VEC_FN int gated_grad_leaf(const GatedGrad *g, int64_t row, int64_t column, int vectors)
{
    const gated_norm_bwd_args *a = g->a;
    const int64_t E = a->x.dim[1], end = row + a->leaf < g->rows ? row + a->leaf : g->rows;
    vf sum[GATED_VECTORS];
    for (int j = 0; j < vectors; j++) sum[j] = vf_zero();
    for (int64_t n = row; n < end; n++) {
        const Row x = row_of(a->x, n), z = row_of(a->z, n), dy = row_of(a->dy, n);
        const vf r = vf_set1(rms_of(x, E, a->eps));
        for (int j = 0; j < vectors; j++) {
            const int64_t at = column + j * VEC, left = E - at;
            vf value, slope;
            silu_pair(row_get(z, at, left), &value, &slope);
            const vf h = vf_mul(row_get(x, at, left), r);
            sum[j] = vf_fma(vf_mul(row_get(dy, at, left), value), h, sum[j]);
        }
    }
    int bad = 0;
    for (int j = 0; j < vectors; j++) bad |= grad_acc_add(&g->w, column + j * VEC, sum[j], E - column - j * VEC);
    return bad;
}

static void gated_grad_part(const void *args, int64_t first, int64_t end)
{
    const GatedGrad *g = args;
    int bad = 0;
    for (int64_t row = 0; row < g->rows; row += g->a->leaf) {
        int64_t i = first;
        for (; i + GATED_VECTORS * VEC <= end; i += GATED_VECTORS * VEC)
            bad |= gated_grad_leaf(g, row, i, GATED_VECTORS);
        for (; i < end; i += VEC) bad |= gated_grad_leaf(g, row, i, 1);
    }
    if (bad) flag_raise(g->a->overflow);
}

Err CPU(gated_norm_bwd)(Stream *s, const gated_norm_bwd_args *a)
{
    const GatedGrad g = { .a = a, .w = grad_acc(a->dw, a->shift, a->headroom_bits), .rows = rows_both(a->dx, a->dy) };
    if (a->leaf < 1) return err_set(ERR_SHAPE, "gated_norm_bwd: leaves of %lld rows", (long long)a->leaf);
    if (a->fresh) memset(a->dw.data, 0, (size_t)tensor_bytes(a->dw));
    par_columns(s, a->x.dim[1], g.rows, gated_grad_part, &g);
    par_rows(s, rows_both(a->dx, a->dy), a->x.dim[1], gated_norm_bwd_part, a);
    return ERR_OK;
}
