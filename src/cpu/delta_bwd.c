/*
 * The gated delta rule, backward (ops.def, delta_bwd). Names as in delta.c; d before a name is its gradient. dS is that
 * of the state behind the run, in the end that of the one before it.
 *
 *   dwrite[j] = decay[n - 1][j] dS^T k[j] + sum over i >= j of read[i][j] go[i]
 *               - sum over i > j, descending, of (k[i] k[j]) decay[i][j] derror[i]
 *   derror[j] = beta[j] dwrite[j] = dv[j],  dbeta[j] = dwrite[j] error[j]
 *   qk'[i][j] = (go[i] write[j]) decay[i][j], kk'[i][j] = -(derror[i] write[j]) decay[i][j]
 *   dq[i]     = from[i] S go[i] + sum over j <= i of qk'[i][j] k[j]
 *   dk[j]     = -from[j] S derror[j] + decay[n - 1][j] dS write[j] + sum over i of (kk'[i][j] + kk'[j][i]) k[i]
 *               + sum over i >= j of qk'[i][j] q[i]
 *   dS        = from[n - 1] dS + sum over i of (from[i] q[i]) go[i]^T - sum over i of (from[i] k[i]) derror[i]^T
 *
 * g of row m is in the decays of rows j < m, and of the state, at rows i >= m: dg[m] is the sum over these of the
 * decay times its gradient, first over i, descending, then over j. The value heads of a key head add, in ascending
 * order, to qk', kk' and the parts of dq and dk that stand before those.
 *
 * Mapping  as the forward's, windows and runs descending.
 * Work     7 n D E + 3.5 n n E a run and value head, and 4 n n D a run and key head.
 */
#include "cpu/delta.h"

/* A thread's scratch. */
typedef struct {
    ScanKeys keys;
    DeltaHead head;
    float *go, *dwrite, *derror;
    float *across;   /* write, rows across */
    float *go_write; /* [i][j] */
    float *dlow;     /* [i][j] derror[i] write[j] */
    float *dqk, *dkk, *dq, *dk;
    float *scaled, *product; /* rows of keys */
    float *state, *turned;   /* a state, and one turned: values down */
    float *dstate;           /* of the group's heads */
    float dfrom[DELTA_WINDOW], dlast[DELTA_WINDOW], dgate[DELTA_WINDOW], dbeta[DELTA_WINDOW];
} Backward;

static int64_t backward_layout(Backward *f, const Scan *d, float *base)
{
    const int64_t square = DELTA_WINDOW * DELTA_WINDOW, keys = DELTA_WINDOW * d->key_width;
    const int64_t rows = DELTA_WINDOW * d->width;
    int64_t used = 0;
    float **const squares[] = { &f->keys.kk,  &f->keys.qk, &f->head.decay, &f->head.low, &f->head.read,
                                &f->go_write, &f->dlow,    &f->dqk,        &f->dkk };
    float **const of_keys[] = { &f->keys.q, &f->keys.k, &f->keys.across, &f->dq, &f->dk, &f->scaled, &f->product };
    float **const of_values[] = {
        &f->head.error, &f->head.write, &f->head.x, &f->go, &f->dwrite, &f->derror, &f->across
    };
#define TAKE(p, count) ((p) = base + used, used += (count))
    for (size_t i = 0; i < sizeof squares / sizeof *squares; i++) TAKE(*squares[i], square);
    for (size_t i = 0; i < sizeof of_keys / sizeof *of_keys; i++) TAKE(*of_keys[i], keys);
    for (size_t i = 0; i < sizeof of_values / sizeof *of_values; i++) TAKE(*of_values[i], rows);
    TAKE(f->head.from, DELTA_WINDOW);
    TAKE(f->state, d->key_width * d->width);
    TAKE(f->turned, d->key_width * d->width);
    TAKE(f->dstate, d->group * d->D * d->width);
#undef TAKE
    return used * (int64_t)sizeof(float);
}

/* ---- what rows wrote ---- */

void CPU(delta_solve_back)(const Scan *d, float *dwrite, float *derror, const float *low, const float *beta, int64_t n)
{
    const int64_t width = d->width;
    for (int64_t j0 = (n - 1) / SCAN_ROWS * SCAN_ROWS; j0 >= 0; j0 -= SCAN_ROWS) {
        const int64_t end = j0 + SCAN_ROWS < n ? j0 + SCAN_ROWS : n;
        const TileGemm g = { .m = end - j0,
                             .n = width,
                             .k = n - end,
                             .a = low + (n - 1) * DELTA_WINDOW + j0,
                             .a_row = 1,
                             .a_k = -DELTA_WINDOW,
                             .b = derror + (n - 1) * width,
                             .ldb = -width,
                             .c = dwrite + j0 * width,
                             .ldc = width,
                             .beta = true };
        if (end < n) CPU(tile_gemm)(&g);
        for (int64_t c = 0; c < width; c += VEC)
            for (int64_t j = end - 1; j >= j0; j--) {
                vf x = vf_load(dwrite + j * width + c);
                for (int64_t i = end - 1; i > j; i--)
                    x = vf_fma(vf_set1(low[i * DELTA_WINDOW + j]), vf_load(derror + i * width + c), x);
                vf_store(dwrite + j * width + c, x);
                vf_store(derror + j * width + c, vf_mul(vf_set1(beta[j]), x));
            }
    }
}

/* dwrite, derror, dbeta, and dlast, the gradients of the decays up to the last row. */
static void writes_backward(const Scan *d, Backward *f, const ScanRun *r, const float *dstate)
{
    const int64_t n = r->n, width = d->width;
    const float *last = f->head.decay + (n - 1) * DELTA_WINDOW;
    memset(f->dlast, 0, sizeof f->dlast);
    if (r->last) scan_product(f->dwrite, width, f->keys.k, d->key_width, dstate, width, n, width, d->D, false);
    else memset(f->dwrite, 0, (size_t)(n * width) * sizeof(float));
    for (int64_t j = 0; j < n && r->last; j++) {
        float *x = f->dwrite + j * width;
        f->dlast[j] = scan_dot(f->head.write + j * width, x, width);
        scan_scale(x, x, last[j], width);
    }
    CPU(scan_later)(d, f->dwrite, f->head.read, f->go, width, n);
    CPU(delta_solve_back)(d, f->dwrite, f->derror, f->head.low, f->head.beta, n);
    for (int64_t j = 0; j < n; j++) f->dbeta[j] = scan_dot(f->dwrite + j * width, f->head.error + j * width, width);
}

/* ---- what rows gave to each other ---- */

/* qk' and kk' of the head are added to the group's; go_write becomes decay times its gradient. */
static void pairs_backward(const Scan *d, Backward *f, int64_t n)
{
    const int64_t width = d->width;
    const DeltaHead *h = &f->head;
    CPU(transpose)(f->across, DELTA_WINDOW, h->write, width, n, d->E);
    CPU(scan_pairs)(d, f->go_write, f->go, f->across, n);
    CPU(scan_pairs)(d, f->dlow, f->derror, f->across, n);
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j <= i; j += VEC) {
            const int64_t at = i * DELTA_WINDOW + j, before = i - j;
            const vm earlier = vm_first_n(before < VEC ? before : VEC);
            const vm seen = vm_first_n(before + 1 < VEC ? before + 1 : VEC);
            const vf left = vf_load(h->decay + at), low = vf_select(earlier, vf_load(f->dlow + at), vf_zero());
            const vf read = vf_select(seen, vf_load(f->go_write + at), vf_zero());
            vf_store(f->dqk + at, vf_fma(read, left, vf_load(f->dqk + at)));
            vf_store(f->dkk + at, vf_fnma(low, left, vf_load(f->dkk + at)));
            const vf both = vf_fma(low, vf_load(h->low + at), vf_mul(read, vf_load(h->read + at)));
            vf_store(f->go_write + at, vf_select(earlier, both, vf_zero()));
        }
    }
}

/* ---- the state ---- */

static void keys_from_state(const Scan *d, Backward *f, const ScanRun *r, const float *dstate)
{
    const int64_t n = r->n, width = d->key_width;
    const DeltaHead *h = &f->head;
    memset(f->dfrom, 0, sizeof f->dfrom);
    if (!r->begins) {
        CPU(scan_turned)(d, f->product, f->turned, f->go, f->state, n);
        for (int64_t i = 0; i < n; i++) {
            const float *x = f->product + i * width;
            f->dfrom[i] = scan_dot(f->keys.q + i * width, x, width);
            scan_add(f->dq + i * width, x, h->from[i], width);
        }
        scan_product(f->product, width, f->derror, d->width, f->turned, width, n, width, d->E, false);
        for (int64_t i = 0; i < n; i++) {
            const float *x = f->product + i * width;
            f->dfrom[i] = h->from[i] * (f->dfrom[i] - scan_dot(f->keys.k + i * width, x, width));
            scan_add(f->dk + i * width, x, -h->from[i], width);
        }
    }
    if (!r->last) return;
    CPU(scan_turned)(d, f->product, f->turned, h->write, dstate, n);
    for (int64_t i = 0; i < n; i++)
        scan_add(f->dk + i * width, f->product + i * width, h->decay[(n - 1) * DELTA_WINDOW + i], width);
}

/* state += (factor[i] x[i]) y[i]^T over the rows. */
static void add_to_state(const Scan *d, Backward *f, float *state, const float *x, float factor, const float *y,
                         int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        scan_scale(f->scaled + i * d->key_width, x + i * d->key_width, factor * f->head.from[i], d->key_width);
    scan_outer(d, state, f->scaled, y, n, true);
}

/* dstate from that behind the run to that before it. */
static void state_backward(const Scan *d, Backward *f, const ScanRun *r, float *dstate)
{
    const int64_t n = r->n, size = d->D * d->width;
    if (r->begins) {
        memset(dstate, 0, (size_t)size * sizeof(float));
        return;
    }
    if (r->last) {
        const float left = f->head.from[n - 1];
        f->dfrom[n - 1] += left * scan_dot(dstate, f->state, size);
        scan_scale(dstate, dstate, left, size);
    }
    add_to_state(d, f, dstate, f->keys.q, 1, f->go, n);
    add_to_state(d, f, dstate, f->keys.k, -1, f->derror, n);
}

/* dgate, from what the decays of rows and states got. */
static void gates_backward(const Scan *d, Backward *f, int64_t n)
{
    float *last = f->go_write + (n - 1) * DELTA_WINDOW;
    for (int64_t j = 0; j < n - 1; j++) last[j] += f->head.decay[(n - 1) * DELTA_WINDOW + j] * f->dlast[j];
    CPU(scan_gates)(d, f->dgate, f->go_write, f->dfrom, n);
}

/* ---- the whole ---- */

static void head_backward(const Scan *d, Backward *f, const delta_bwd_args *a, const ScanRun *r, int64_t head,
                          float *dstate)
{
    const int64_t n = r->n;
    CPU(delta_head)(d, &f->head, &f->keys, r, head, f->state);
    CPU(scan_load)(f->go, d->width, a->go, r, head);
    writes_backward(d, f, r, dstate);
    CPU(scan_store)(a->dv, f->derror, d->width, r, head);
    pairs_backward(d, f, n);
    keys_from_state(d, f, r, dstate);
    state_backward(d, f, r, dstate);
    gates_backward(d, f, n);
    scan_store_column(d, a->dg, f->dgate, r, head);
    scan_store_column(d, a->dbeta, f->dbeta, r, head);
}

/* dq and dk from what the group's heads have added up. */
static void keys_backward(const Scan *d, Backward *f, const delta_bwd_args *a, const ScanRun *r, int64_t key_head)
{
    const int64_t n = r->n, width = d->key_width;
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < i; j++) f->dkk[j * DELTA_WINDOW + i] = f->dkk[i * DELTA_WINDOW + j];
    CPU(scan_earlier)(d, f->dq, f->dqk, f->keys.k, width, n, true);
    scan_product(f->dk, width, f->dkk, DELTA_WINDOW, f->keys.k, width, n, width, n, true);
    CPU(scan_later)(d, f->dk, f->dqk, f->keys.q, width, n);
    CPU(scan_store)(a->dq, f->dq, width, r, key_head);
    CPU(scan_store)(a->dk, f->dk, width, r, key_head);
}

static void backward_run(const Scan *d, Backward *f, const delta_bwd_args *a, const ScanRun *r, int64_t window,
                         int64_t key_head)
{
    const size_t square = DELTA_WINDOW * DELTA_WINDOW * sizeof(float);
    const size_t rows = (size_t)(r->n * d->key_width) * sizeof(float);
    CPU(scan_keys)(d, &f->keys, r, key_head);
    memset(f->dqk, 0, square);
    memset(f->dkk, 0, square);
    memset(f->dq, 0, rows);
    memset(f->dk, 0, rows);
    for (int64_t j = 0; j < d->group; j++) {
        const int64_t head = key_head * d->group + j;
        if (!r->begins) CPU(scan_load_state)(d, f->state, a->states, scan_state_row(d, r->b, window, head));
        head_backward(d, f, a, r, head, f->dstate + j * d->D * d->width);
    }
    keys_backward(d, f, a, r, key_head);
}

/* The call that threads share. */
typedef struct {
    const Scan *d;
    const delta_bwd_args *a;
} BackwardCall;

static void backward_item(const void *call, float *room, int64_t item)
{
    const BackwardCall *c = call;
    const Scan *d = c->d;
    const int64_t b = item / d->K, key_head = item % d->K, size = d->D * d->width;
    const int64_t first = (b * d->V + key_head * d->group) * d->D;
    ScanRun runs[SCAN_MOST];
    Backward f;
    backward_layout(&f, d, room);
    for (int64_t j = 0; j < d->group; j++) CPU(scan_load_state)(d, f.dstate + j * size, c->a->dafter, first + j * d->D);
    memset(f.turned, 0, (size_t)(d->key_width * d->width) * sizeof(float));
    for (int64_t w = d->windows - 1; w >= 0; w--)
        for (int i = CPU(scan_runs)(d, b, w, runs) - 1; i >= 0; i--) backward_run(d, &f, c->a, &runs[i], w, key_head);
    for (int64_t j = 0; j < d->group && c->a->dbefore.data; j++)
        CPU(scan_store_state)(d, c->a->dbefore, f.dstate + j * size, first + j * d->D);
}

Err CPU(delta_bwd)(Stream *s, const delta_bwd_args *a)
{
    Scan d = DELTA_OF(a);
    TRY(CPU(scan_open)(&d, DELTA_NAME, a->states));
    Backward unused;
    const int64_t bytes = backward_layout(&unused, &d, (float *)s->dev->workspace);
    return CPU(scan_items)(s, DELTA_NAME, d.B * d.K, bytes, backward_item, &(BackwardCall){ &d, a });
}
