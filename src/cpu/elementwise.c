/*
 * Elementwise ops: residual with dropout, activations, rotary positions, and moving columns about.
 * Threads own rows. An element's value depends on its inputs alone (and, for dropout, on its global
 * coordinates: base/rng.h), never on where it lies in the row.
 *
 * Traffic per element: residual reads 8 bytes, writes 4; gelu and relu2 4 and 4, their backwards 8 and 4; swiglu reads
 * 8 and writes 4, its backward 12 and 8, as a gate does; rope, split and merge read and write 4. With dropout a Philox
 * call for 64 elements adds about 2 instructions an element.
 */
#include "cpu/gelu.h"
#include "cpu/rows.h"

/* ---- residual and dropout ---- */

enum { KEEP = 64 }; /* features of one philox_keep64 */

typedef struct {
    Dropout dropout;
    const int32_t *position;
    const int64_t *sample;
} DropRows;

/* Bit i: feature first + i of row n is kept. */
VEC_FN uint64_t drop_keep(const DropRows *d, int64_t n, int64_t first)
{
    if (!d->dropout.threshold) return ~(uint64_t)0;
    uint64_t sample = (uint64_t)d->sample[n];
    vi c0 = vi_add(vi_set1((int32_t)(first / 4)), vi_iota());
    return philox_keep64(d->dropout.key, d->dropout.threshold, c0, vi_set1(d->position[n]),
                         vi_set1((int32_t)(uint32_t)sample), vi_set1((int32_t)(uint32_t)(sample >> 32)));
}

VEC_FN vf drop_apply(const DropRows *d, vf x, uint64_t keep)
{
    const vf scaled = vf_mul(x, vf_set1(d->dropout.scale));
    if (!d->dropout.threshold) return scaled;
    return vf_select(vm_from_bits((uint32_t)keep & 0xFFFF), scaled, vf_zero());
}

static void residual_fwd_part(const void *args, int64_t first, int64_t end)
{
    const residual_fwd_args *a = args;
    const DropRows drop = { a->dropout, a->position.data, a->sample.data };
    const Row bias = row_of(a->bias, 0);
    int64_t D = a->x.dim[1];
    for (int64_t n = first; n < end; n++) {
        const Row x = row_of(a->x, n), residual = row_of(a->residual, a->residual.data ? n : 0), y = row_of(a->y, n);
        uint64_t keep = 0;
        for (int64_t i = 0; i < D; i += VEC, keep >>= VEC) {
            int64_t left = D - i;
            if (i % KEEP == 0) keep = drop_keep(&drop, n, i);
            vf v = row_get(x, i, left);
            if (bias.data) v = vf_add(v, row_get(bias, i, left));
            v = drop_apply(&drop, v, keep);
            if (residual.data) v = vf_add(row_get(residual, i, left), v);
            row_put(y, i, v, left);
        }
    }
}

Err CPU(residual_fwd)(Stream *s, const residual_fwd_args *a)
{
    par_rows(s, rows_both(a->y, a->x), a->x.dim[1], residual_fwd_part, a);
    return ERR_OK;
}

static void residual_bwd_part(const void *args, int64_t first, int64_t end)
{
    const residual_bwd_args *a = args;
    const DropRows drop = { a->dropout, a->position.data, a->sample.data };
    int64_t D = a->dy.dim[1];
    for (int64_t n = first; n < end; n++) {
        const Row dy = row_of(a->dy, n), dx = row_of(a->dx, n);
        uint64_t keep = 0;
        for (int64_t i = 0; i < D; i += VEC, keep >>= VEC) {
            if (i % KEEP == 0) keep = drop_keep(&drop, n, i);
            row_put(dx, i, drop_apply(&drop, row_get(dy, i, D - i), keep), D - i);
        }
    }
}

Err CPU(residual_bwd)(Stream *s, const residual_bwd_args *a)
{
    par_rows(s, rows_both(a->dx, a->dy), a->dy.dim[1], residual_bwd_part, a);
    return ERR_OK;
}

/* ---- a factor ---- */

static void scale_part(const void *args, int64_t first, int64_t end)
{
    const scale_args *a = args;
    const int64_t D = a->x.dim[1];
    for (int64_t n = first; n < end; n++) {
        const float *x = row_f32(a->x, n);
        float *y = row_f32(a->y, n);
        for (int64_t i = 0; i < D; i += VEC)
            row_store(y + i, vf_mul(row_load(x + i, D - i), vf_set1(a->factor)), D - i);
    }
}

Err CPU(scale)(Stream *s, const scale_args *a)
{
    par_rows(s, rows_both(a->y, a->x), a->x.dim[1], scale_part, a);
    return ERR_OK;
}

/* ---- activations ---- */

/* y = value(x) for rows [first, end). */
VEC_FN void value_rows(Tensor y, Tensor x, int64_t first, int64_t end, vf (*value)(vf))
{
    const int64_t F = x.dim[1];
    for (int64_t n = first; n < end; n++) {
        const float *from = row_f32(x, n);
        float *to = row_f32(y, n);
        for (int64_t i = 0; i < F; i += VEC) row_store(to + i, value(row_load(from + i, F - i)), F - i);
    }
}

/* dx = dy slope(x) for rows [first, end). */
VEC_FN void slope_rows(Tensor dx, Tensor dy, Tensor x, int64_t first, int64_t end, vf (*slope)(vf))
{
    const int64_t F = x.dim[1];
    for (int64_t n = first; n < end; n++) {
        const float *at = row_f32(x, n), *from = row_f32(dy, n);
        float *to = row_f32(dx, n);
        for (int64_t i = 0; i < F; i += VEC)
            row_store(to + i, vf_mul(row_load(from + i, F - i), slope(row_load(at + i, F - i))), F - i);
    }
}

static void gelu_fwd_part(const void *args, int64_t first, int64_t end)
{
    const gelu_fwd_args *a = args;
    value_rows(a->y, a->x, first, end, gelu);
}

Err CPU(gelu_fwd)(Stream *s, const gelu_fwd_args *a)
{
    par_rows(s, rows_both(a->y, a->x), a->x.dim[1], gelu_fwd_part, a);
    return ERR_OK;
}

static void gelu_bwd_part(const void *args, int64_t first, int64_t end)
{
    const gelu_bwd_args *a = args;
    slope_rows(a->dx, a->dy, a->x, first, end, gelu_slope);
}

Err CPU(gelu_bwd)(Stream *s, const gelu_bwd_args *a)
{
    par_rows(s, rows_both(a->dx, a->dy), a->x.dim[1], gelu_bwd_part, a);
    return ERR_OK;
}

static void gelu_erf_fwd_part(const void *args, int64_t first, int64_t end)
{
    const gelu_erf_fwd_args *a = args;
    value_rows(a->y, a->x, first, end, gelu_erf);
}

Err CPU(gelu_erf_fwd)(Stream *s, const gelu_erf_fwd_args *a)
{
    par_rows(s, rows_both(a->y, a->x), a->x.dim[1], gelu_erf_fwd_part, a);
    return ERR_OK;
}

static void gelu_erf_bwd_part(const void *args, int64_t first, int64_t end)
{
    const gelu_erf_bwd_args *a = args;
    slope_rows(a->dx, a->dy, a->x, first, end, gelu_erf_slope);
}

Err CPU(gelu_erf_bwd)(Stream *s, const gelu_erf_bwd_args *a)
{
    par_rows(s, rows_both(a->dx, a->dy), a->x.dim[1], gelu_erf_bwd_part, a);
    return ERR_OK;
}

/* max(x, 0); NaN stays. */
VEC_FN vf relu(vf x) { return vf_max(vf_zero(), x); }

VEC_FN vf relu2(vf x)
{
    const vf r = relu(x);
    return vf_mul(r, r);
}

VEC_FN vf relu2_slope(vf x) { return vf_mul(vf_set1(2.0f), relu(x)); }

static void relu2_fwd_part(const void *args, int64_t first, int64_t end)
{
    const relu2_fwd_args *a = args;
    value_rows(a->y, a->x, first, end, relu2);
}

Err CPU(relu2_fwd)(Stream *s, const relu2_fwd_args *a)
{
    par_rows(s, rows_both(a->y, a->x), a->x.dim[1], relu2_fwd_part, a);
    return ERR_OK;
}

static void relu2_bwd_part(const void *args, int64_t first, int64_t end)
{
    const relu2_bwd_args *a = args;
    slope_rows(a->dx, a->dy, a->x, first, end, relu2_slope);
}

Err CPU(relu2_bwd)(Stream *s, const relu2_bwd_args *a)
{
    par_rows(s, rows_both(a->dx, a->dy), a->x.dim[1], relu2_bwd_part, a);
    return ERR_OK;
}

/* ---- activations of a gate and what it is on, chunk by chunk side by side ---- */

typedef struct {
    vf gate, up;
} GatePair;

/* The gated value, or the gradients of both operands where dy is that of the value. limit: of clamped ones. */
typedef vf GatedValue(vf gate, vf up, float limit);
typedef GatePair GatedSlopes(vf gate, vf up, vf dy, float limit);

VEC_FN void gated_fwd(Tensor y, Tensor x, int64_t chunk, float limit, GatedValue *of, int64_t first, int64_t end)
{
    for (int64_t n = first; n < end; n++) {
        for (int64_t f = 0; f < y.dim[1]; f += chunk) {
            const float *gate = row_f32(x, n) + 2 * f, *up = gate + chunk;
            float *out = row_f32(y, n) + f;
            for (int64_t i = 0; i < chunk; i += VEC) {
                const int64_t left = chunk - i;
                row_store(out + i, of(row_load(gate + i, left), row_load(up + i, left), limit), left);
            }
        }
    }
}

VEC_FN void gated_bwd(Tensor dx, Tensor dy, Tensor x, int64_t chunk, float limit, GatedSlopes *of, int64_t first,
                      int64_t end)
{
    for (int64_t n = first; n < end; n++) {
        for (int64_t f = 0; f < dy.dim[1]; f += chunk) {
            const float *gate = row_f32(x, n) + 2 * f, *up = gate + chunk, *d = row_f32(dy, n) + f;
            float *dgate = row_f32(dx, n) + 2 * f, *dup = dgate + chunk;
            for (int64_t i = 0; i < chunk; i += VEC) {
                const int64_t left = chunk - i;
                const GatePair g = of(row_load(gate + i, left), row_load(up + i, left), row_load(d + i, left), limit);
                row_store(dgate + i, g.gate, left);
                row_store(dup + i, g.up, left);
            }
        }
    }
}

VEC_FN vf swiglu(vf gate, vf up, float limit)
{
    (void)limit;
    return vf_mul(vf_mul(gate, sigmoid(gate)), up);
}

/* dgate = dy up s (1 + g (1 - s)), dup = dy g s. Below -80 both slopes are 0 in float. */
VEC_FN GatePair swiglu_slopes(vf gate, vf up, vf dy, float limit)
{
    const vf g = vf_max(vf_set1(-80.0f), gate);
    vf s, t;
    (void)limit;
    sigmoid_pair(g, &s, &t);
    const vf ds = vf_mul(dy, s), slope = vf_fma(g, t, vf_set1(1.0f));
    return (GatePair){ vf_mul(vf_mul(ds, up), slope), vf_mul(ds, g) };
}

VEC_FN vf geglu(vf gate, vf up, float limit)
{
    (void)limit;
    return vf_mul(gelu(gate), up);
}

/* dgate = dy up gelu'(gate), dup = dy gelu(gate) */
VEC_FN GatePair geglu_slopes(vf gate, vf up, vf dy, float limit)
{
    (void)limit;
    return (GatePair){ vf_mul(vf_mul(dy, up), gelu_slope(gate)), vf_mul(dy, gelu(gate)) };
}

/* Slope of the sigmoid in clamped_swiglu. */
#define CLAMPED_ALPHA 1.702f

/* x between -limit and limit; NaN stays. */
VEC_FN vf clamped(vf x, float limit) { return vf_max(vf_set1(-limit), vf_min(vf_set1(limit), x)); }

VEC_FN vf clamped_swiglu(vf gate, vf up, float limit)
{
    const vf g = vf_min(vf_set1(limit), gate), u = clamped(up, limit);
    return vf_mul(vf_mul(g, sigmoid(vf_mul(vf_set1(CLAMPED_ALPHA), g))), vf_add(u, vf_set1(1.0f)));
}

/* d gate = dy (u + 1) s (1 + v (1 - s)), d up = dy g s, with v = 1.702 g and s = sigmoid(v); 0 beyond the limits. Below
 * -47, where v is -80, both are below 1e-32. */
VEC_FN GatePair clamped_slopes(vf gate, vf up, vf dy, float limit)
{
    const vf g = vf_max(vf_set1(-47.0f), vf_min(vf_set1(limit), gate)), u = clamped(up, limit);
    const vf v = vf_mul(vf_set1(CLAMPED_ALPHA), g);
    vf s, t;
    sigmoid_pair(v, &s, &t);
    const vf ds = vf_mul(dy, s), slope = vf_fma(v, t, vf_set1(1.0f));
    const vf dgate = vf_mul(vf_mul(ds, vf_add(u, vf_set1(1.0f))), slope);
    const vm cut_gate = vf_lt(vf_set1(limit), gate), cut_up = vf_lt(vf_set1(limit), vf_abs(up));
    return (GatePair){ vf_select(cut_gate, vf_zero(), dgate), vf_select(cut_up, vf_zero(), vf_mul(ds, g)) };
}

/* The ops of one. */
#define GATED(name, value, of_slopes, limit_of_args)                                   \
    static void name##_fwd_part(const void *args, int64_t first, int64_t end)          \
    {                                                                                  \
        const name##_fwd_args *a = args;                                               \
        gated_fwd(a->y, a->x, a->chunk, limit_of_args, value, first, end);             \
    }                                                                                  \
    Err CPU(name##_fwd)(Stream * s, const name##_fwd_args *a)                          \
    {                                                                                  \
        par_rows(s, rows_both(a->y, a->x), a->x.dim[1], name##_fwd_part, a);           \
        return ERR_OK;                                                                 \
    }                                                                                  \
    static void name##_bwd_part(const void *args, int64_t first, int64_t end)          \
    {                                                                                  \
        const name##_bwd_args *a = args;                                               \
        gated_bwd(a->dx, a->dy, a->x, a->chunk, limit_of_args, of_slopes, first, end); \
    }                                                                                  \
    Err CPU(name##_bwd)(Stream * s, const name##_bwd_args *a)                          \
    {                                                                                  \
        par_rows(s, rows_both(a->dx, a->dy), a->x.dim[1], name##_bwd_part, a);         \
        return ERR_OK;                                                                 \
    }

GATED(swiglu, swiglu, swiglu_slopes, 0)
GATED(geglu, geglu, geglu_slopes, 0)
GATED(clamped_swiglu, clamped_swiglu, clamped_slopes, a->limit)
#undef GATED

/* ---- a gate on each element ---- */

static void gate_fwd_part(const void *args, int64_t first, int64_t end)
{
    const gate_fwd_args *a = args;
    const int64_t F = a->x.dim[1];
    for (int64_t n = first; n < end; n++) {
        const float *x = row_f32(a->x, n), *gate = row_f32(a->gate, n);
        float *y = row_f32(a->y, n);
        for (int64_t i = 0; i < F; i += VEC)
            row_store(y + i, vf_mul(row_load(x + i, F - i), sigmoid(row_load(gate + i, F - i))), F - i);
    }
}

Err CPU(gate_fwd)(Stream *s, const gate_fwd_args *a)
{
    par_rows(s, rows_both(a->y, a->x), a->x.dim[1], gate_fwd_part, a);
    return ERR_OK;
}

/* dx = dy s, dgate = dy x s (1 - s) */
static void gate_bwd_part(const void *args, int64_t first, int64_t end)
{
    const gate_bwd_args *a = args;
    const int64_t F = a->x.dim[1];
    for (int64_t n = first; n < end; n++) {
        const float *dy = row_f32(a->dy, n), *x = row_f32(a->x, n), *gate = row_f32(a->gate, n);
        float *dx = row_f32(a->dx, n), *dgate = row_f32(a->dgate, n);
        for (int64_t i = 0; i < F; i += VEC) {
            vf s, t;
            sigmoid_pair(row_load(gate + i, F - i), &s, &t);
            const vf ds = vf_mul(row_load(dy + i, F - i), s);
            row_store(dgate + i, vf_mul(vf_mul(ds, row_load(x + i, F - i)), t), F - i);
            row_store(dx + i, ds, F - i);
        }
    }
}

Err CPU(gate_bwd)(Stream *s, const gate_bwd_args *a)
{
    par_rows(s, rows_both(a->dx, a->dy), a->dy.dim[1], gate_bwd_part, a);
    return ERR_OK;
}

/* ---- fill, add ---- */

static void fill_zero_part(const void *args, int64_t first, int64_t end)
{
    const fill_zero_args *a = args;
    size_t size_bytes = (size_t)a->x.dim[1] * sizeof(float);
    for (int64_t n = first; n < end; n++) memset(row_f32(a->x, n), 0, size_bytes);
}

Err CPU(fill_zero)(Stream *s, const fill_zero_args *a)
{
    par_rows(s, rows_used(a->x), a->x.dim[1], fill_zero_part, a);
    return ERR_OK;
}

static void fill_zero_acc_part(const void *args, int64_t first, int64_t end)
{
    const fill_zero_acc_args *a = args;
    int64_t size = dtype_size(a->x.dtype);
    memset((char *)a->x.data + first * size, 0, (size_t)((end - first) * size));
}

Err CPU(fill_zero_acc)(Stream *s, const fill_zero_acc_args *a)
{
    par_columns(s, rows_used(a->x), 1, fill_zero_acc_part, a);
    return ERR_OK;
}

static void add_acc_part(const void *args, int64_t first, int64_t end)
{
    const add_acc_args *a = args;
    if (a->y.dtype == F32)
        for (int64_t i = first; i < end; i++) ((float *)a->y.data)[i] += ((const float *)a->x.data)[i];
    else
        for (int64_t i = first; i < end; i++) ((uint64_t *)a->y.data)[i] += ((const uint64_t *)a->x.data)[i];
}

Err CPU(add_acc)(Stream *s, const add_acc_args *a)
{
    if (a->x.dtype != a->y.dtype) return err_set(ERR_SHAPE, "add_acc: y and x differ in dtype");
    par_columns(s, rows_used(a->y), 1, add_acc_part, a);
    return ERR_OK;
}

/* ---- cast ---- */

static void cast_part(const void *args, int64_t first, int64_t end)
{
    const cast_args *a = args;
    int64_t i = first;
    if (a->x.dtype != F16 && a->y.dtype != F16)
        for (; i + VEC <= end; i += VEC) {
            const vf v = a->x.dtype == F32 ? vf_load((const float *)a->x.data + i)
                                           : vf_load_bf16((const uint16_t *)a->x.data + i);
            if (a->y.dtype == F32) vf_store((float *)a->y.data + i, v);
            else vf_store_bf16((uint16_t *)a->y.data + i, v);
        }
    for (; i < end; i++) any_store(a->y, i, any_load(a->x, i));
}

Err CPU(cast)(Stream *s, const cast_args *a)
{
    par_columns(s, rows_both(a->y, a->x), 1, cast_part, a);
    return ERR_OK;
}

/* ---- attention's columns ---- */

typedef struct {
    Tensor q, k, v, gate, qkv;
    int64_t chunks;
    int merge;
} QkvMove;

/* `columns` of a row of q, k or v to or from the next columns of a row of qkv; returns the column after them. */
static float *qkv_piece(const QkvMove *m, float *own, int64_t columns, float *qkv)
{
    memcpy(m->merge ? qkv : own, m->merge ? own : qkv, (size_t)columns * sizeof(float));
    return qkv + columns;
}

static void qkv_part(const void *args, int64_t first, int64_t end)
{
    const QkvMove *m = args;
    const int64_t A = m->q.dim[1] / m->chunks, K = m->k.dim[1] / m->chunks;
    for (int64_t n = first; n < end; n++) {
        float *p = row_f32(m->qkv, n);
        for (int64_t i = 0; i < m->chunks; i++) {
            p = qkv_piece(m, row_f32(m->q, n) + i * A, A, p);
            p = qkv_piece(m, row_f32(m->k, n) + i * K, K, p);
            p = qkv_piece(m, row_f32(m->v, n) + i * K, K, p);
            if (m->gate.data) p = qkv_piece(m, row_f32(m->gate, n) + i * A, A, p);
        }
    }
}

static Err qkv_move(Stream *s, const QkvMove *m)
{
    const int64_t A = m->q.dim[1], K = m->k.dim[1], W = m->qkv.dim[1], like_q = m->gate.data ? 2 : 1;
    if (m->chunks < 1 || K % m->chunks || A % K || W != like_q * A + 2 * K)
        return err_set(ERR_SHAPE, "qkv: %lld columns for %lld x %lld and 2 x %lld in %lld chunks", (long long)W,
                       (long long)like_q, (long long)A, (long long)K, (long long)m->chunks);
    par_rows(s, rows_both(m->q, m->qkv), W, qkv_part, m);
    return ERR_OK;
}

Err CPU(qkv_split)(Stream *s, const qkv_split_args *a)
{
    const QkvMove m = { a->q, a->k, a->v, a->gate, a->qkv, a->chunks, 0 };
    return qkv_move(s, &m);
}

Err CPU(qkv_merge)(Stream *s, const qkv_merge_args *a)
{
    const QkvMove m = { a->q, a->k, a->v, a->gate, a->qkv, a->chunks, 1 };
    return qkv_move(s, &m);
}

static void join_part(const void *args, int64_t first, int64_t end)
{
    const join_columns_args *a = args;
    const int64_t N = a->y.dim[0], R = a->y.dim[1];
    const size_t bytes = (size_t)a->y.dim[2] * sizeof(float);
    for (int64_t n = first; n < end; n++)
        for (int64_t r = 0; r < R; r++) memcpy(row_f32(a->y, n * R + r), row_f32(a->x, r * N + n), bytes);
}

Err CPU(join_columns)(Stream *s, const join_columns_args *a)
{
    par_rows(s, rows_used(a->y), a->y.dim[1] * a->y.dim[2], join_part, a);
    return ERR_OK;
}

static void rope_part(const void *args, int64_t first, int64_t end)
{
    const rope_args *a = args;
    int64_t H = a->x.dim[1], R = a->cos.dim[1];
    for (int64_t row = first * H; row < end * H; row++) {
        int64_t position = ((const int32_t *)a->position.data)[row / H];
        const float *cosine = row_f32(a->cos, position), *sine = row_f32(a->sin, position);
        float *x = row_f32(a->x, row), *y = x + R;
        for (int64_t i = 0; i < R; i += VEC) {
            int64_t left = R - i;
            vf u = row_load(x + i, left), v = row_load(y + i, left);
            vf c = row_load(cosine + i, left), t = row_load(sine + i, left);
            if (a->inverse) t = vf_neg(t);
            row_store(x + i, vf_fnma(v, t, vf_mul(u, c)), left);
            row_store(y + i, vf_fma(u, t, vf_mul(v, c)), left);
        }
    }
}

Err CPU(rope)(Stream *s, const rope_args *a)
{
    const int64_t C = a->x.dim[2], R = a->cos.dim[1];
    if (2 * R > C) return err_set(ERR_SHAPE, "rope: %lld angles for %lld columns", (long long)R, (long long)C);
    par_rows(s, rows_both(a->x, a->position), a->x.dim[1] * 2 * R, rope_part, a);
    return ERR_OK;
}
