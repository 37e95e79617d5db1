/*
 * What stands around recurrences, the gated delta rule and Mamba-2: keys and queries of unit length, the gates, and the
 * norm of the output with a gate.
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

/* Gradients that have rows, of up to VEC heads of a row; and what these add to the sums of the leaf. */
typedef void GateRowFn(const void *args, int64_t n, int64_t head, int64_t count, float *da_log, float *ddt_bias);

typedef struct {
    const void *args;
    GateRowFn *row;
    GradAcc a_log, dt_bias;
    Tensor overflow;
    int64_t leaf, rows;
} GateGrads;

static void gates_bwd_part(const void *args, int64_t first, int64_t end)
{
    const GateGrads *g = args;
    int bad = 0;
    for (int64_t head = first; head < end; head += VEC) {
        const int64_t count = end - head < VEC ? end - head : VEC;
        for (int64_t row = 0; row < g->rows; row += g->leaf) {
            float da_log[VEC] = { 0 }, ddt_bias[VEC] = { 0 };
            for (int64_t n = row; n < row + g->leaf && n < g->rows; n++)
                g->row(g->args, n, head, count, da_log, ddt_bias);
            bad |= grad_acc_add(&g->a_log, head, vf_load(da_log), count);
            bad |= grad_acc_add(&g->dt_bias, head, vf_load(ddt_bias), count);
        }
    }
    if (bad) flag_raise(g->overflow);
}

static Err gates_backward(Stream *s, const char *name, const GateGrads *g, Tensor da_log, Tensor ddt_bias, int fresh)
{
    if (g->leaf < 1) return err_set(ERR_SHAPE, "%s: leaves of %lld rows", name, (long long)g->leaf);
    if (fresh) memset(da_log.data, 0, (size_t)tensor_bytes(da_log));
    if (fresh) memset(ddt_bias.data, 0, (size_t)tensor_bytes(ddt_bias));
    par_columns(s, da_log.dim[0], g->rows * GATE_COST, gates_bwd_part, g);
    return ERR_OK;
}

static void delta_gates_row(const void *args, int64_t n, int64_t head, int64_t count, float *da_log, float *ddt_bias)
{
    const delta_gates_bwd_args *a = args;
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

Err CPU(delta_gates_bwd)(Stream *s, const delta_gates_bwd_args *a)
{
    const GateGrads g = { .args = a,
                          .row = delta_gates_row,
                          .a_log = grad_acc(a->da_log, a->shift_a, a->headroom_bits),
                          .dt_bias = grad_acc(a->ddt_bias, a->shift_dt, a->headroom_bits),
                          .overflow = a->overflow,
                          .leaf = a->leaf,
                          .rows = rows_both(a->db, a->dbeta) };
    return gates_backward(s, "delta_gates_bwd", &g, a->da_log, a->ddt_bias, a->fresh);
}

/* Delta of a head of a row, and its slope. */
static double step_gate(Tensor dt, Tensor dt_bias, float low, int64_t n, int64_t h, double *slope)
{
    const double step = soft_gate((double)gate_value(dt, n, h) + (double)any_load(dt_bias, h), slope);
    if (step >= (double)low || step != step) return step;
    *slope = 0;
    return (double)low;
}

static void mamba_gates_part(const void *args, int64_t first, int64_t end)
{
    const mamba_gates_fwd_args *a = args;
    for (int64_t n = first; n < end; n++) {
        float *delta = row_f32(a->delta, n), *g = row_f32(a->g, n);
        for (int64_t h = 0; h < a->dt.dim[1]; h++) {
            double slope;
            const double step = step_gate(a->dt, a->dt_bias, a->low, n, h, &slope);
            delta[h] = (float)step;
            g[h] = (float)(-m_exp((double)any_load(a->a_log, h)) * step);
        }
    }
}

Err CPU(mamba_gates_fwd)(Stream *s, const mamba_gates_fwd_args *a)
{
    par_rows(s, rows_both(a->delta, a->dt), a->dt.dim[1] * GATE_COST, mamba_gates_part, a);
    return ERR_OK;
}

static void mamba_gates_row(const void *args, int64_t n, int64_t head, int64_t count, float *da_log, float *ddt_bias)
{
    const mamba_gates_bwd_args *a = args;
    const float *ddelta = row_f32(a->ddelta, n), *dg = row_f32(a->dg, n);
    for (int64_t i = 0, h = head; i < count; i++, h++) {
        double slope;
        const double rate = -m_exp((double)any_load(a->a_log, h));
        const double step = step_gate(a->dt, a->dt_bias, a->low, n, h, &slope);
        const float ddt = (float)(slope * ((double)ddelta[h] + rate * (double)dg[h]));
        any_store(a->ddt, tensor_row_at(a->ddt, n) + h, ddt);
        da_log[i] += (float)(rate * step * (double)dg[h]);
        ddt_bias[i] += ddt;
    }
}

Err CPU(mamba_gates_bwd)(Stream *s, const mamba_gates_bwd_args *a)
{
    const GateGrads g = { .args = a,
                          .row = mamba_gates_row,
                          .a_log = grad_acc(a->da_log, a->shift_a, a->headroom_bits),
                          .dt_bias = grad_acc(a->ddt_bias, a->shift_dt, a->headroom_bits),
                          .overflow = a->overflow,
                          .leaf = a->leaf,
                          .rows = rows_both(a->ddt, a->ddelta) };
    return gates_backward(s, "mamba_gates_bwd", &g, a->da_log, a->ddt_bias, a->fresh);
}

/* ---- a norm with a gate ---- */

/* Row n of a call: x, z, and its row of w. The norm is of v = x or, with the gate first, of x times it. */
typedef struct {
    Row x, z, w;
    bool gate_first, sigmoid;
} Gated;

/* The gate of u: silu(u), or sigmoid(u); and its slope. Below -80 the slope is 0 in float. */
VEC_FN vf gate_form(const Gated *g, vf u) { return g->sigmoid ? sigmoid(u) : vf_mul(u, sigmoid(u)); }

VEC_FN void gate_pair(const Gated *g, vf u, vf *value, vf *slope)
{
    vf s, t;
    const vf c = vf_max(vf_set1(-80.0f), u);
    sigmoid_pair(c, &s, &t);
    *value = g->sigmoid ? s : vf_mul(u, s);
    *slope = vf_mul(s, g->sigmoid ? t : vf_fma(c, t, vf_set1(1.0f)));
}

#define GATED_OF(a, n)                                                                                           \
    {                                                                                                            \
        row_of((a)->x, n), row_of((a)->z, n), row_of((a)->w, (n) % (a)->w.dim[0]), (a)->gate_first, (a)->sigmoid \
    }

VEC_FN vf gated_value(const Gated *g, int64_t i, int64_t left)
{
    const vf x = row_get(g->x, i, left);
    if (!g->gate_first) return x;
    return vf_mul(x, gate_form(g, row_get(g->z, i, left)));
}

/* 1 / sqrt(mean of v^2 + eps) */
static float gated_scale(const Gated *g, int64_t E, float eps)
{
    vf sum = vf_zero();
    for (int64_t i = 0; i < E; i += VEC) {
        const vf v = gated_value(g, i, E - i);
        sum = vf_fma(v, v, sum);
    }
    return 1.0f / __builtin_sqrtf(vf_sum(sum) / (float)E + eps);
}

static Err gated_check(Tensor x, Tensor w)
{
    if (w.dim[0] > 0 && x.dim[0] % w.dim[0] == 0) return ERR_OK;
    return err_set(ERR_SHAPE, "gated_norm: %lld rows of x for %lld of w", (long long)x.dim[0], (long long)w.dim[0]);
}

static void gated_norm_fwd_part(const void *args, int64_t first, int64_t end)
{
    const gated_norm_fwd_args *a = args;
    const int64_t E = a->x.dim[1];
    for (int64_t n = first; n < end; n++) {
        const Gated g = GATED_OF(a, n);
        const Row y = row_of(a->y, n);
        const vf r = vf_set1(gated_scale(&g, E, a->eps));
        for (int64_t i = 0; i < E; i += VEC) {
            const vf h = vf_mul(gated_value(&g, i, E - i), r), hw = vf_mul(h, row_get(g.w, i, E - i));
            row_put(y, i, g.gate_first ? hw : vf_mul(hw, gate_form(&g, row_get(g.z, i, E - i))), E - i);
        }
    }
}

Err CPU(gated_norm_fwd)(Stream *s, const gated_norm_fwd_args *a)
{
    TRY(gated_check(a->x, a->w));
    par_rows(s, rows_both(a->y, a->x), a->x.dim[1], gated_norm_fwd_part, a);
    return ERR_OK;
}

/* Terms of a vector of a row: h = v r, the gate and its slope, and dh, the gradient of h. */
typedef struct {
    vf x, h, gate, slope, dyw, dh;
} GatedTerms;

VEC_FN GatedTerms gated_terms(const Gated *g, Row dy, vf r, int64_t i, int64_t left)
{
    GatedTerms t = { .x = row_get(g->x, i, left) };
    gate_pair(g, row_get(g->z, i, left), &t.gate, &t.slope);
    t.h = vf_mul(g->gate_first ? vf_mul(t.x, t.gate) : t.x, r);
    t.dyw = vf_mul(row_get(dy, i, left), row_get(g->w, i, left));
    t.dh = g->gate_first ? t.dyw : vf_mul(t.dyw, t.gate);
    return t;
}

enum { GATED_VECTORS = 4 }; /* columns are summed 64 at a time, in registers */

/* Rows from `first` to end, whole leaves of all groups; scale: 1 / root of each. */
typedef struct {
    const gated_norm_bwd_args *a;
    GradAcc w;
    int64_t first, end;
    float *scale;
} GatedGrad;

static void gated_scale_part(const void *args, int64_t first, int64_t end)
{
    const GatedGrad *g = args;
    const gated_norm_bwd_args *a = g->a;
    for (int64_t n = first; n < end; n++) {
        const Gated row = GATED_OF(a, g->first + n);
        g->scale[n] = gated_scale(&row, a->x.dim[1], a->eps);
    }
}

/* The leaf that begins with `row`, for `vectors` vectors of columns; all but a last lone one are whole. */
VEC_FN int gated_grad_leaf(const GatedGrad *g, int64_t row, int64_t column, int vectors)
{
    const gated_norm_bwd_args *a = g->a;
    const int64_t E = a->x.dim[1], G = a->w.dim[0], stop = row + a->leaf * G, end = stop < g->end ? stop : g->end;
    vf sum[GATED_VECTORS];
    for (int j = 0; j < vectors; j++) sum[j] = vf_zero();
    for (int64_t n = row; n < end; n += G) {
        const Gated of = GATED_OF(a, n);
        const Row dy = row_of(a->dy, n);
        const vf r = vf_set1(g->scale[n - g->first]);
        for (int j = 0; j < vectors; j++) {
            const int64_t at = column + j * VEC, left = E - at;
            const vf gate = gate_form(&of, row_get(of.z, at, left)), d = row_get(dy, at, left);
            const vf x = row_get(of.x, at, left), h = vf_mul(of.gate_first ? vf_mul(x, gate) : x, r);
            sum[j] = vf_fma(of.gate_first ? d : vf_mul(d, gate), h, sum[j]);
        }
    }
    int bad = 0;
    const int64_t at = row % G * E + column;
    for (int j = 0; j < vectors; j++) bad |= grad_acc_add(&g->w, at + j * VEC, sum[j], E - column - j * VEC);
    return bad;
}

static void gated_grad_part(const void *args, int64_t first, int64_t end)
{
    const GatedGrad *g = args;
    const int64_t G = g->a->w.dim[0];
    int bad = 0;
    for (int64_t row = g->first; row < g->end; row += row % G == G - 1 ? (g->a->leaf - 1) * G + 1 : 1) {
        int64_t i = first;
        for (; i + GATED_VECTORS * VEC <= end; i += GATED_VECTORS * VEC)
            bad |= gated_grad_leaf(g, row, i, GATED_VECTORS);
        for (; i < end; i += VEC) bad |= gated_grad_leaf(g, row, i, 1);
    }
    if (bad) flag_raise(g->a->overflow);
}

/* Gradients of a row, by that of v, dv = r (dh - h mean(dh h)): dx = dv and dz = dy w h gate'; gate first, dx =
 * dv gate and dz = dv x gate'. */
static void gated_norm_bwd_row(const gated_norm_bwd_args *a, int64_t n, float scale)
{
    const Gated g = GATED_OF(a, n);
    const Row dy = row_of(a->dy, n), dx = row_of(a->dx, n), dz = row_of(a->dz, n);
    const int64_t E = a->x.dim[1];
    const vf r = vf_set1(scale);
    vf sum = vf_zero();
    for (int64_t i = 0; i < E; i += VEC) {
        const GatedTerms t = gated_terms(&g, dy, r, i, E - i);
        sum = vf_fma(t.dh, t.h, sum);
    }
    const vf mean = vf_set1(vf_sum(sum) / (float)E);
    for (int64_t i = 0; i < E; i += VEC) {
        const GatedTerms t = gated_terms(&g, dy, r, i, E - i);
        const vf dv = vf_mul(r, vf_fnma(t.h, mean, t.dh));
        row_put(dx, i, g.gate_first ? vf_mul(dv, t.gate) : dv, E - i);
        row_put(dz, i, vf_mul(g.gate_first ? vf_mul(dv, t.x) : vf_mul(t.dyw, t.h), t.slope), E - i);
    }
}

static void gated_norm_bwd_part(const void *args, int64_t first, int64_t end)
{
    const GatedGrad *g = args;
    for (int64_t n = first; n < end; n++) gated_norm_bwd_row(g->a, g->first + n, g->scale[n]);
}

Err CPU(gated_norm_bwd)(Stream *s, const gated_norm_bwd_args *a)
{
    const int64_t rows = rows_both(a->dx, a->dy), leaf = a->leaf * a->w.dim[0];
    const int64_t room = s->dev->workspace_bytes / (int64_t)sizeof(float);
    GatedGrad g = { .a = a, .w = grad_acc(a->dw, a->shift, a->headroom_bits), .scale = (float *)s->dev->workspace };
    TRY(gated_check(a->x, a->w));
    if (a->leaf < 1) return err_set(ERR_SHAPE, "gated_norm_bwd: leaves of %lld rows", (long long)a->leaf);
    const int64_t most = rows < room ? rows : room / leaf * leaf;
    if (rows && !most) return err_set(ERR_CONFIG, "gated_norm_bwd: no workspace for %lld rows", (long long)leaf);
    if (a->fresh) memset(a->dw.data, 0, (size_t)tensor_bytes(a->dw));
    for (; g.first < rows; g.first = g.end) {
        g.end = rows - g.first < most ? rows : g.first + most;
        par_rows(s, g.end - g.first, a->x.dim[1], gated_scale_part, &g);
        par_columns(s, a->x.dim[1], g.end - g.first, gated_grad_part, &g);
        par_rows(s, g.end - g.first, a->x.dim[1], gated_norm_bwd_part, &g);
    }
    return ERR_OK;
}
