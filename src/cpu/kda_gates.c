/*
 * The gates of Kimi Delta Attention (ops.def, kda_gates_fwd): a decay for each column of a head's keys, and how much of
 * a row is written.
 *
 * Column sums: one chain a leaf of rows, then the accumulator; those over a head's columns, too, have 16 lanes by
 * column mod 16 and then vf_sum. Threads own rows, or heads of the sums.
 */
#include "cpu/gelu.h"
#include "cpu/rows.h"

enum { KDA_GATE_COST = 8 }; /* elements that cost as much as one exponential and one logarithm */

/* log(1 + exp(x)) within 4 ulp: max(x, 0) + 2 atanh(u / (2 + u)) with u = exp(-|x|), by 8 terms of its series. */
VEC_FN vf softplus_f32(vf x)
{
    const vf u = vf_exp(vf_neg(vf_abs(x))), z = vf_div(u, vf_add(vf_set1(2.0f), u)), zz = vf_mul(z, z);
    vf p = vf_set1(1.0f / 15);
    for (int k = 13; k > 0; k -= 2) p = vf_fma(p, zz, vf_set1(1.0f / (float)k));
    return vf_fma(vf_add(z, z), p, vf_max(vf_zero(), x));
}

/* g of x = raw + dt_bias, and its slope over x. slope may be NULL. */
VEC_FN vf decay_of(vf x, float rate, float bound, vf *slope)
{
    vf s, t;
    if (bound < 0) {
        sigmoid_pair(vf_max(vf_set1(-80.0f), vf_mul(vf_set1(rate), x)), &s, &t);
        if (slope) *slope = vf_mul(vf_mul(s, t), vf_set1(bound * rate));
        return vf_mul(vf_set1(bound), s);
    }
    if (slope) {
        sigmoid_pair(vf_max(vf_set1(-80.0f), x), &s, &t);
        *slope = vf_mul(vf_set1(-rate), s);
    }
    return vf_mul(vf_set1(-rate), softplus_f32(x));
}

static float rate_of(Tensor a_log, int64_t head) { return (float)m_exp((double)any_load(a_log, head)); }

static void kda_gates_fwd_part(const void *args, int64_t first, int64_t end)
{
    const kda_gates_fwd_args *a = args;
    const int64_t V = a->raw.dim[1], D = a->raw.dim[2];
    for (int64_t n = first; n < end; n++)
        for (int64_t h = 0; h < V; h++) {
            const float rate = rate_of(a->a_log, h);
            const Row raw = row_of(a->raw, n * V + h), bias = row_of(a->dt_bias, h), g = row_of(a->g, n * V + h);
            row_f32(a->beta, n)[h] = sigmoid_f32(any_load(a->b, tensor_row_at(a->b, n) + h));
            for (int64_t c = 0; c < D; c += VEC)
                row_put(g, c, decay_of(vf_add(row_get(raw, c, D - c), row_get(bias, c, D - c)), rate, a->bound, NULL),
                        D - c);
        }
}

Err CPU(kda_gates_fwd)(Stream *s, const kda_gates_fwd_args *a)
{
    par_rows(s, rows_used(a->b), a->raw.dim[1] * a->raw.dim[2] * KDA_GATE_COST, kda_gates_fwd_part, a);
    return ERR_OK;
}

typedef struct {
    const kda_gates_bwd_args *a;
    GradAcc a_log, dt_bias;
} KdaGateGrads;

/* draw of a leaf of rows, of VEC columns of a head from c on; returns what they add to da_log, and to *bias. */
VEC_FN vf leaf_columns(const kda_gates_bwd_args *a, float rate, int64_t row, int64_t end, int64_t head, int64_t c,
                       vf *bias)
{
    const int64_t V = a->raw.dim[1], D = a->raw.dim[2];
    const vf dt = row_get(row_of(a->dt_bias, head), c, D - c);
    vf log = vf_zero(), slope;
    *bias = vf_zero();
    for (int64_t n = row; n < end; n++) {
        const vf x = vf_add(row_get(row_of(a->raw, n * V + head), c, D - c), dt);
        const vf g = decay_of(x, rate, a->bound, &slope), dg = row_get(row_of(a->dg, n * V + head), c, D - c);
        const vf draw = vf_mul(dg, slope);
        row_put(row_of(a->draw, n * V + head), c, draw, D - c);
        *bias = vf_add(*bias, draw);
        log = vf_fma(a->bound < 0 ? draw : dg, a->bound < 0 ? x : g, log);
    }
    return log;
}

static void kda_gates_bwd_part(const void *args, int64_t first, int64_t end)
{
    const KdaGateGrads *g = args;
    const kda_gates_bwd_args *a = g->a;
    const int64_t N = rows_used(a->b), D = a->raw.dim[2];
    int bad = 0;
    for (int64_t head = first; head < end; head++) {
        const float rate = rate_of(a->a_log, head);
        for (int64_t row = 0; row < N; row += a->leaf) {
            const int64_t stop = row + a->leaf < N ? row + a->leaf : N;
            vf log = vf_zero(), bias;
            for (int64_t c = 0; c < D; c += VEC) {
                log = vf_add(log, leaf_columns(a, rate, row, stop, head, c, &bias));
                bad |= grad_acc_add(&g->dt_bias, tensor_row_at(a->ddt_bias, head) + c, bias, D - c);
            }
            bad |= grad_acc_add(&g->a_log, head, vf_set1(vf_sum(log)), 1);
            for (int64_t n = row; n < stop; n++) {
                const double s = 1 / (1 + m_exp(-(double)any_load(a->b, tensor_row_at(a->b, n) + head)));
                any_store(a->db, tensor_row_at(a->db, n) + head,
                          (float)(s * (1 - s) * (double)row_f32(a->dbeta, n)[head]));
            }
        }
    }
    if (bad) flag_raise(a->overflow);
}

Err CPU(kda_gates_bwd)(Stream *s, const kda_gates_bwd_args *a)
{
    const KdaGateGrads g = { .a = a,
                             .a_log = grad_acc(a->da_log, a->shift_a, a->headroom_bits),
                             .dt_bias = grad_acc(a->ddt_bias, a->shift_dt, a->headroom_bits) };
    const int64_t V = a->raw.dim[1], size = dtype_size(a->ddt_bias.dtype);
    if (a->leaf < 1) return err_set(ERR_SHAPE, "kda_gates_bwd: leaves of %lld rows", (long long)a->leaf);
    if (a->fresh) memset(a->da_log.data, 0, (size_t)tensor_bytes(a->da_log));
    for (int64_t h = 0; h < V && a->fresh; h++)
        memset((char *)a->ddt_bias.data + tensor_row_at(a->ddt_bias, h) * size, 0, (size_t)(a->raw.dim[2] * size));
    par_units(s, V, rows_used(a->b) * a->raw.dim[2] * KDA_GATE_COST, 1, kda_gates_bwd_part, &g);
    return ERR_OK;
}
