/*
 * Kimi Delta Attention's rule, backward (ops.def, kda_bwd). Names as in kda.c; d before a name is its gradient. dS is
 * that of the state behind the run, in the end that of the one before it.
 *
 *   dwrite[j] = dS^T (k[j] last[j]) + sum over i >= j of read[i][j] go[i]
 *               + sum over i > j, descending, of low[i][j] derror[i]
 *   derror[j] = beta[j] dwrite[j] = dv[j],  dbeta[j] = dwrite[j] error[j]
 *   dread[i][j] = go[i] write[j],  dkk[i][j] = -(derror[i] write[j])
 *   dS        = from[n - 1] dS + sum over i of (q[i] from[i]) go[i]^T - sum over i of (k[i] from[i]) derror[i]^T
 *
 * A row x of q or k appears as x e, where e is the exponential of a sum of g over rows. With y = d(x e): dx += e y, and
 * g of each of those rows gets x e y, as a sum over the rows whose e it is in. So no sum cancels what another one adds.
 * In order: pairs of each block with those before it and inside it, blocks ascending; the state before the run; the
 * state behind it.
 *
 * Mapping  as the forward's, windows and runs descending.
 * Work     7 n D E + 3 n n E + 3 n n D multiplications and n n D / 4 + 18 n D exponentials a run.
 */
#include "cpu/kda.h"

typedef struct {
    Scan d;
    const kda_bwd_args *a;
} Call;

/* A thread's scratch. */
typedef struct {
    KdaHead head;
    float *dq, *dk, *dg, *product, *across;
    float *go, *dwrite, *derror;
    float *dread, *dkk;
    float *state, *turned, *dstate;
    float dbeta[DELTA_WINDOW];
} Backward;

static int64_t backward_layout(Backward *f, const Scan *d, float *base)
{
    const int64_t square = DELTA_WINDOW * DELTA_WINDOW, keys = DELTA_WINDOW * d->key_width;
    const int64_t values = DELTA_WINDOW * d->width;
    float **const of_keys[] = { &f->dq, &f->dk, &f->dg, &f->product };
    float **const of_values[] = { &f->go, &f->dwrite, &f->derror, &f->across };
    float *at = base;
    CPU(kda_room)(d, &f->head, &at);
    for (size_t i = 0; i < sizeof of_keys / sizeof *of_keys; i++) *of_keys[i] = at, at += keys;
    for (size_t i = 0; i < sizeof of_values / sizeof *of_values; i++) *of_values[i] = at, at += values;
    f->dread = at, at += square;
    f->dkk = at, at += square;
    f->state = at, at += d->key_width * d->width;
    f->turned = at, at += d->key_width * d->width;
    f->dstate = at, at += d->key_width * d->width;
    return (at - base) * (int64_t)sizeof(float);
}

/* ---- exponents ---- */

/* dx += e y, and dg[m] += the sum over rows i >= m of x e y, of n rows. */
static void since_backward(const Scan *d, float *dx, float *dg, const float *x, const float *e, const float *y,
                           int64_t n)
{
    for (int64_t c = 0; c < d->key_width; c += VEC) {
        vf sum = vf_zero();
        for (int64_t i = n - 1; i >= 0; i--) {
            const int64_t at = i * d->key_width + c;
            const vf t = vf_mul(vf_load(e + at), vf_load(y + at));
            vf_store(dx + at, vf_add(vf_load(dx + at), t));
            sum = vf_fma(vf_load(x + at), t, sum);
            vf_store(dg + at, vf_add(vf_load(dg + at), sum));
        }
    }
}

/* The same, but dg[m] += the sum over rows j < m. */
static void until_backward(const Scan *d, float *dx, float *dg, const float *x, const float *e, const float *y,
                           int64_t n)
{
    for (int64_t c = 0; c < d->key_width; c += VEC) {
        vf sum = vf_zero();
        for (int64_t j = 0; j < n; j++) {
            const int64_t at = j * d->key_width + c;
            const vf t = vf_mul(vf_load(e + at), vf_load(y + at));
            vf_store(dx + at, vf_add(vf_load(dx + at), t));
            vf_store(dg + at, vf_add(vf_load(dg + at), sum));
            sum = vf_fma(vf_load(x + at), t, sum);
        }
    }
}

/* ---- what rows wrote ---- */

static void writes_backward(const Scan *d, Backward *f, const ScanRun *r)
{
    const int64_t n = r->n, width = d->width;
    KdaHead *h = &f->head;
    if (r->last) {
        kda_times(d, h->rows, h->k, h->last, n);
        scan_product(f->dwrite, width, h->rows, d->key_width, f->dstate, width, n, width, d->D, false);
    } else {
        memset(f->dwrite, 0, (size_t)(n * width) * sizeof(float));
    }
    CPU(scan_later)(d, f->dwrite, h->read, f->go, width, n);
    CPU(delta_solve_back)(d, f->dwrite, f->derror, h->low, h->beta, n);
    for (int64_t j = 0; j < n; j++) f->dbeta[j] = scan_dot(f->dwrite + j * width, h->error + j * width, width);
}

/* ---- what rows gave to each other ---- */

static void squares_backward(const Scan *d, Backward *f, int64_t n)
{
    CPU(transpose)(f->across, DELTA_WINDOW, f->head.write, d->width, n, d->E);
    CPU(scan_pairs)(d, f->dread, f->go, f->across, n);
    CPU(scan_pairs)(d, f->dkk, f->derror, f->across, n);
    for (int64_t i = 0; i < n; i++)
        scan_scale(f->dkk + i * DELTA_WINDOW, f->dkk + i * DELTA_WINDOW, -1, scan_lanes(i + 1));
}

/* f->product [s][key_width] = (`add`: itself +) the sum over the block's m rows of square[i][j] h->rows[i]. */
static void to_columns(const Scan *d, Backward *f, const float *square, int64_t s, int64_t m, bool add)
{
    const TileGemm g = { .m = s,
                         .n = d->key_width,
                         .k = m,
                         .a = square + s * DELTA_WINDOW,
                         .a_row = 1,
                         .a_k = DELTA_WINDOW,
                         .b = f->head.rows,
                         .ldb = d->key_width,
                         .c = f->product,
                         .ldc = d->key_width,
                         .beta = add };
    CPU(tile_gemm)(&g);
}

/* The block's rows with those of the blocks before it. */
static void before_backward(const Scan *d, Backward *f, int64_t s, int64_t m)
{
    const int64_t width = d->key_width, at = s * width, square = s * DELTA_WINDOW;
    KdaHead *h = &f->head;
    kda_times(d, h->rows, h->k, h->until, s);
    scan_product(f->product, width, f->dread + square, DELTA_WINDOW, h->rows, width, m, width, s, false);
    since_backward(d, f->dq + at, f->dg + at, h->q + at, h->since, f->product, m);
    scan_product(f->product, width, f->dkk + square, DELTA_WINDOW, h->rows, width, m, width, s, false);
    since_backward(d, f->dk + at, f->dg + at, h->k + at, h->since, f->product, m);
    kda_times(d, h->rows, h->q + at, h->since, m);
    to_columns(d, f, f->dread, s, m, false);
    kda_times(d, h->rows, h->k + at, h->since, m);
    to_columns(d, f, f->dkk, s, m, true);
    until_backward(d, f->dk, f->dg, h->k, h->until, f->product, s);
}

/* Rows of a block with each other, of VEC columns of keys from c on. */
static void inside_backward(const Scan *d, Backward *f, int64_t s, int64_t m, int64_t c)
{
    const KdaHead *h = &f->head;
    const int64_t width = d->key_width;
    vf sum[SCAN_ROWS];
    for (int64_t i = s; i < s + m; i++) {
        const float *dread = f->dread + i * DELTA_WINDOW, *dkk = f->dkk + i * DELTA_WINDOW;
        const vf q = vf_load(h->q + i * width + c), k = vf_load(h->k + i * width + c);
        const vf g = vf_load(h->g + i * width + c), own = vf_set1(dread[i]);
        vf dq = vf_fma(own, k, vf_load(f->dq + i * width + c)), dk = vf_fma(own, q, vf_load(f->dk + i * width + c));
        vf run = vf_zero();
        for (int64_t j = s; j < i; j++) {
            const int64_t at = j * width + c;
            const vf read = vf_set1(dread[j]), low = vf_set1(dkk[j]), key = vf_load(h->k + at);
            sum[j - s] = vf_add(sum[j - s], g);
            const vf e = vf_exp(sum[j - s]), t = vf_mul(e, vf_fma(read, q, vf_mul(low, k)));
            dq = vf_fma(read, vf_mul(e, key), dq);
            dk = vf_fma(low, vf_mul(e, key), dk);
            vf_store(f->dk + at, vf_add(vf_load(f->dk + at), t));
            run = vf_fma(key, t, run);
            vf_store(f->dg + at + width, vf_add(vf_load(f->dg + at + width), run));
        }
        sum[i - s] = vf_zero();
        vf_store(f->dq + i * width + c, dq);
        vf_store(f->dk + i * width + c, dk);
    }
}

static void pairs_backward(const Scan *d, Backward *f, int64_t n)
{
    squares_backward(d, f, n);
    for (int64_t s = 0; s < n; s += SCAN_ROWS) {
        const int64_t m = n - s < SCAN_ROWS ? n - s : SCAN_ROWS;
        CPU(kda_block)(d, &f->head, s, m);
        if (s) before_backward(d, f, s, m);
        for (int64_t c = 0; c < d->key_width; c += VEC) inside_backward(d, f, s, m, c);
    }
}

/* ---- the state ---- */

/* Through the state before the run; dstate becomes its gradient but for what the rows read of it. */
static void before_run_backward(const Scan *d, Backward *f, const ScanRun *r)
{
    const int64_t n = r->n, width = d->key_width;
    const KdaHead *h = &f->head;
    CPU(scan_turned)(d, f->product, f->turned, f->go, f->state, n);
    since_backward(d, f->dq, f->dg, h->q, h->from, f->product, n);
    scan_product(f->product, width, f->derror, d->width, f->turned, width, n, width, d->E, false);
    for (int64_t i = 0; i < n; i++) scan_scale(f->product + i * width, f->product + i * width, -1, width);
    since_backward(d, f->dk, f->dg, h->k, h->from, f->product, n);
    for (int64_t i = 0; i < d->D && r->last; i++) {
        const int64_t at = i * d->width;
        const float left = h->from[(n - 1) * width + i];
        const float gate = left * scan_dot(f->dstate + at, f->state + at, d->width);
        for (int64_t m = 0; m < n; m++) f->dg[m * width + i] += gate;
        scan_scale(f->dstate + at, f->dstate + at, left, d->width);
    }
}

static void state_backward(const Scan *d, Backward *f, const ScanRun *r)
{
    const int64_t n = r->n;
    KdaHead *h = &f->head;
    if (r->last) {
        CPU(scan_turned)(d, f->product, f->turned, h->write, f->dstate, n);
        until_backward(d, f->dk, f->dg, h->k, h->last, f->product, n);
    }
    if (r->begins) {
        memset(f->dstate, 0, (size_t)(d->D * d->width) * sizeof(float));
        return;
    }
    before_run_backward(d, f, r);
    kda_times(d, h->rows, h->q, h->from, n);
    scan_outer(d, f->dstate, h->rows, f->go, n, true);
    kda_times(d, h->rows, h->k, h->from, n);
    for (int64_t i = 0; i < n; i++)
        scan_scale(h->rows + i * d->key_width, h->rows + i * d->key_width, -1, d->key_width);
    scan_outer(d, f->dstate, h->rows, f->derror, n, true);
}

/* ---- the whole ---- */

static void backward_run(const Call *c, Backward *f, const ScanRun *r, int64_t window, int64_t head)
{
    const Scan *d = &c->d;
    const size_t keys = (size_t)(r->n * d->key_width) * sizeof(float);
    if (!r->begins) CPU(scan_load_state)(d, f->state, c->a->states, scan_state_row(d, r->b, window, head));
    CPU(kda_head)(d, &f->head, r, head, f->state);
    CPU(scan_load)(f->go, d->width, c->a->go, r, head);
    memset(f->dq, 0, keys);
    memset(f->dk, 0, keys);
    memset(f->dg, 0, keys);
    writes_backward(d, f, r);
    pairs_backward(d, f, r->n);
    state_backward(d, f, r);
    CPU(scan_store)(c->a->dq, f->dq, d->key_width, r, head);
    CPU(scan_store)(c->a->dk, f->dk, d->key_width, r, head);
    CPU(scan_store)(c->a->dg, f->dg, d->key_width, r, head);
    CPU(scan_store)(c->a->dv, f->derror, d->width, r, head);
    scan_store_column(d, c->a->dbeta, f->dbeta, r, head);
}

static void backward_item(const void *call, float *room, int64_t item)
{
    const Call *c = call;
    const Scan *d = &c->d;
    ScanRun runs[SCAN_MOST];
    Backward f;
    backward_layout(&f, d, room);
    memset(f.turned, 0, (size_t)(d->key_width * d->width) * sizeof(float));
    CPU(scan_load_state)(d, f.dstate, c->a->dafter, item * d->D);
    for (int64_t w = d->windows - 1; w >= 0; w--)
        for (int i = CPU(scan_runs)(d, item / d->V, w, runs) - 1; i >= 0; i--)
            backward_run(c, &f, &runs[i], w, item % d->V);
    if (c->a->dbefore.data) CPU(scan_store_state)(d, c->a->dbefore, f.dstate, item * d->D);
}

Err CPU(kda_bwd)(Stream *s, const kda_bwd_args *a)
{
    Call c = { .d = KDA_OF(a), .a = a };
    Backward unused;
    TRY(CPU(scan_open)(&c.d, KDA_NAME, a->states));
    return CPU(scan_items)(s, KDA_NAME, c.d.B * c.d.V, backward_layout(&unused, &c.d, (float *)s->dev->workspace),
                           backward_item, &c);
}
