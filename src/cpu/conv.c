/*
 * Causal depthwise convolution over the rows of a sample, then SiLU (ops.def, conv_silu_fwd).
 *
 * Forward and dx are chains over rows, dx's from the last row that sees a row to the first, so that slices can go on
 * with each other's. Row t sees `back` rows before it: taps - 1, or fewer where its document begins; rows that it does
 * not see are left out of its chain. dw and dbias: a chain a leaf of rows of a sample, the last row first, then the
 * accumulator. Threads own columns.
 *
 * Traffic per element: forward reads 4 bytes and writes 4; backward reads 8 and writes 4. Both are bound by exp.
 */
#include "cpu/gelu.h"
#include "cpu/rows.h"

enum { CONV_TAPS = 8, CONV_COLUMNS = 128 }; /* at most; columns at a time, for whose weights there is room */

typedef struct {
    Tensor x, w, bias, before, doc;
    int64_t first, B, T, C, taps;
} Conv;

#define CONV_OF(a)                                                                                                \
    {                                                                                                             \
        .x = (a)->x, .w = (a)->w, .bias = (a)->bias, .before = (a)->before, .doc = (a)->doc, .first = (a)->first, \
        .B = (a)->x.dim[0], .T = (a)->x.dim[1], .C = (a)->x.dim[2], .taps = (a)->w.dim[1]                         \
    }

/* Weights of some columns from `column` on, tap by tap. */
typedef struct {
    int64_t column, count; /* of these */
    float w[CONV_TAPS][CONV_COLUMNS], bias[CONV_COLUMNS];
} ConvColumns;

static Err conv_check(const Conv *c, Tensor rows)
{
    if (c->taps < 1 || c->taps > CONV_TAPS)
        return err_set(ERR_SHAPE, "conv_silu: %lld taps, of at most %d", (long long)c->taps, CONV_TAPS);
    if (rows.data && rows.dim[1] != c->taps - 1)
        return err_set(ERR_SHAPE, "conv_silu: %lld rows for %lld taps", (long long)rows.dim[1], (long long)c->taps);
    return ERR_OK;
}

static void conv_columns(const Conv *c, ConvColumns *m, int64_t column, int64_t end)
{
    m->column = column, m->count = end - column < CONV_COLUMNS ? end - column : CONV_COLUMNS;
    for (int64_t i = 0; i < m->count; i++) {
        m->bias[i] = c->bias.data ? any_load(c->bias, column + i) : 0.0f;
        for (int64_t j = 0; j < c->taps; j++) m->w[j][i] = any_load(c->w, (column + i) * c->w.ld + j);
    }
}

/* How many rows before row t it sees. */
static int64_t conv_back(const Conv *c, int64_t b, int64_t t)
{
    const int64_t doc = c->doc.data ? ((const int32_t *)c->doc.data)[b * c->doc.ld + t] : 0;
    int64_t back = c->first + t - doc;
    if (!c->before.data && back > t) back = t;
    return back < c->taps - 1 ? back : c->taps - 1;
}

/* Row t of x, or of `before` if t < 0. */
static Row conv_row(const Conv *c, int64_t b, int64_t t)
{
    const int64_t J = c->taps - 1;
    return t < 0 ? row_of(c->before, b * J + J + t) : row_of(c->x, b * c->T + t);
}

/* The convolution of row t from column i of m on; x: rows t - back to t. */
VEC_FN vf conv_at(const Conv *c, const ConvColumns *m, const Row *x, int64_t back, int64_t i)
{
    vf sum = row_load(m->bias + i, m->count - i);
    for (int64_t j = 0; j <= back; j++)
        sum = vf_fma(row_load(m->w[c->taps - 1 - back + j] + i, m->count - i),
                     row_get(x[j], m->column + i, m->count - i), sum);
    return sum;
}

static void conv_rows(const Conv *c, Row *x, int64_t b, int64_t t, int64_t back)
{
    for (int64_t j = 0; j <= back; j++) x[j] = conv_row(c, b, t - back + j);
}

/* ---- forward ---- */

static void conv_fwd_part(const void *args, int64_t first, int64_t end)
{
    const conv_silu_fwd_args *a = args;
    const Conv c = CONV_OF(a);
    ConvColumns m;
    Row x[CONV_TAPS];
    for (int64_t column = first; column < end; column += CONV_COLUMNS) {
        conv_columns(&c, &m, column, end);
        for (int64_t n = 0; n < c.B * c.T; n++) {
            const int64_t b = n / c.T, t = n % c.T, back = conv_back(&c, b, t);
            const Row y = row_of(a->y, n);
            conv_rows(&c, x, b, t, back);
            for (int64_t i = 0; i < m.count; i += VEC) {
                const vf u = conv_at(&c, &m, x, back, i);
                row_put(y, column + i, vf_mul(u, sigmoid(u)), m.count - i);
            }
        }
    }
}

Err CPU(conv_silu_fwd)(Stream *s, const conv_silu_fwd_args *a)
{
    const Conv c = CONV_OF(a);
    TRY(conv_check(&c, a->before));
    par_columns(s, c.C, c.B * c.T, conv_fwd_part, a);
    return ERR_OK;
}

/* ---- backward ---- */

/* Gradients of some columns: the last rows' in front of SiLU, row t at t mod CONV_TAPS, and sums of a leaf. */
typedef struct {
    Conv c;
    const conv_silu_bwd_args *a;
    GradAcc dw, dbias;
    ConvColumns m;
    float du[CONV_TAPS][CONV_COLUMNS];
    int64_t back[CONV_TAPS]; /* how many rows before it that row saw */
    float w[CONV_TAPS][CONV_COLUMNS], b[CONV_COLUMNS];
} ConvBack;

/* The leaf's sums go to the accumulators and begin anew. */
static void conv_leaf_end(ConvBack *k)
{
    const int64_t taps = k->c.taps, ld = k->a->dw.ld, some = ld == taps ? k->m.count : 1;
    float line[CONV_TAPS * CONV_COLUMNS];
    int bad = 0;
    for (int64_t i = 0; i < k->m.count; i++)
        for (int64_t j = 0; j < taps; j++) line[i * taps + j] = k->w[j][i];
    for (int64_t i = 0; i < k->m.count; i += some)
        for (int64_t j = 0; j < some * taps; j += VEC)
            bad |= grad_acc_add(&k->dw, (k->m.column + i) * ld + j, row_load(line + i * taps + j, some * taps - j),
                                some * taps - j);
    for (int64_t i = 0; i < k->m.count && k->a->dbias.data; i += VEC)
        bad |= grad_acc_add(&k->dbias, k->m.column + i, row_load(k->b + i, k->m.count - i), k->m.count - i);
    if (bad) flag_raise(k->a->overflow);
    memset(k->w, 0, sizeof k->w);
    memset(k->b, 0, sizeof k->b);
}

/* The gradient in front of SiLU of row t, and what it adds to the leaf's sums. Below -80 the slope is 0 in float. */
static void conv_row_gradient(ConvBack *k, int64_t b, int64_t t)
{
    const ConvColumns *m = &k->m;
    const int64_t back = conv_back(&k->c, b, t), slot = t % CONV_TAPS;
    const Row dy = row_of(k->a->dy, b * k->c.T + t);
    Row x[CONV_TAPS];
    conv_rows(&k->c, x, b, t, back);
    k->back[slot] = back;
    for (int64_t i = 0; i < m->count; i += VEC) {
        const int64_t left = m->count - i;
        const vf u = vf_max(vf_set1(-80.0f), conv_at(&k->c, m, x, back, i));
        vf s, rest;
        sigmoid_pair(u, &s, &rest);
        const vf slope = vf_mul(s, vf_fma(u, rest, vf_set1(1.0f)));
        const vf du = row_mask(vf_mul(row_get(dy, m->column + i, left), slope), left);
        vf_store(k->du[slot] + i, du);
        vf_store(k->b + i, vf_add(vf_load(k->b + i), du));
        for (int64_t j = 0; j <= back; j++) {
            float *w = k->w[k->c.taps - 1 - back + j] + i;
            vf_store(w, vf_fma(du, row_get(x[j], m->column + i, left), vf_load(w)));
        }
    }
}

/* The gradient of row t, of `before` if t < 0: from the rows t + taps - 1 to t that are here. */
static void conv_dx_row(ConvBack *k, int64_t b, int64_t t)
{
    const int64_t J = k->c.taps - 1, T = k->c.T, last = t + J < T ? t + J : T - 1;
    const conv_silu_bwd_args *a = k->a;
    const Row to = t < 0 ? row_of(a->dbefore, b * J + J + t) : row_of(a->dx, b * T + t);
    const float *after = t + J >= T && a->after.data ? row_f32(a->after, b * J + t + J - T) + k->m.column : NULL;
    for (int64_t i = 0; i < k->m.count; i += VEC) {
        const int64_t left = k->m.count - i;
        vf sum = after ? row_load(after + i, left) : vf_zero();
        for (int64_t u = last; u >= t && u >= 0; u--)
            if (u - t <= k->back[u % CONV_TAPS])
                sum = vf_fma(row_load(k->m.w[J - (u - t)] + i, left), row_load(k->du[u % CONV_TAPS] + i, left), sum);
        row_put(to, k->m.column + i, sum, left);
    }
}

static void conv_bwd_part(const void *args, int64_t first, int64_t end)
{
    ConvBack k = { .c = CONV_OF((const conv_silu_bwd_args *)args), .a = args };
    const conv_silu_bwd_args *a = k.a;
    const int64_t ahead = a->dbefore.data ? k.c.taps - 1 : 0;
    k.dw = grad_acc(a->dw, a->shift_w, a->headroom_bits);
    if (a->dbias.data) k.dbias = grad_acc(a->dbias, a->shift_b, a->headroom_bits);
    for (int64_t column = first; column < end; column += CONV_COLUMNS) {
        conv_columns(&k.c, &k.m, column, end);
        for (int64_t b = 0; b < k.c.B; b++)
            for (int64_t t = k.c.T - 1; t >= -ahead; t--) {
                if (t >= 0) conv_row_gradient(&k, b, t);
                if (t >= 0 && t % a->leaf == 0) conv_leaf_end(&k);
                conv_dx_row(&k, b, t);
            }
    }
}

Err CPU(conv_silu_bwd)(Stream *s, const conv_silu_bwd_args *a)
{
    const Conv c = CONV_OF(a);
    TRY(conv_check(&c, a->before));
    TRY(conv_check(&c, a->dbefore));
    TRY(conv_check(&c, a->after));
    if (a->leaf < 1) return err_set(ERR_SHAPE, "conv_silu_bwd: leaves of %lld rows", (long long)a->leaf);
    for (int64_t i = 0; i < c.C && a->fresh; i++)
        memset((char *)a->dw.data + i * a->dw.ld * dtype_size(a->dw.dtype), 0,
               (size_t)(c.taps * dtype_size(a->dw.dtype)));
    if (a->fresh && a->dbias.data) memset(a->dbias.data, 0, (size_t)tensor_bytes(a->dbias));
    par_columns(s, c.C, c.B * c.T, conv_bwd_part, a);
    return ERR_OK;
}
