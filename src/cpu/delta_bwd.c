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

#include <omp.h>
#include <stdatomic.h>

#include "cpu/team.h"

/* A thread's scratch. */
typedef struct {
    DeltaKeys keys;
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

static int64_t backward_layout(Backward *f, const Delta *d, float *base)
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

/* c = a b, dense rows of b and c; rows of a lie a_row apart. */
static void product(float *c, int64_t ldc, const float *a, int64_t a_row, const float *b, int64_t ldb, int64_t m,
                    int64_t n, int64_t k)
{
    const TileGemm g = {
        .m = m, .n = n, .k = k, .a = a, .a_row = a_row, .a_k = 1, .b = b, .ldb = ldb, .c = c, .ldc = ldc
    };
    CPU(tile_gemm)(&g);
}

/* c[j] += sum over rows i from j on, ascending, of square[i][j] b[i]; rows of b and c are `width` apart. */
static void add_from_later(float *c, const float *square, const float *b, int64_t width, int64_t n)
{
    for (int64_t j = 0; j < n; j += DELTA_ROWS) {
        const TileGemm g = { .m = n - j < DELTA_ROWS ? n - j : DELTA_ROWS,
                             .n = width,
                             .k = n - j,
                             .a = square + j * DELTA_WINDOW + j,
                             .a_row = 1,
                             .a_k = DELTA_WINDOW,
                             .b = b + j * width,
                             .ldb = width,
                             .c = c + j * width,
                             .ldc = width,
                             .beta = true };
        CPU(tile_gemm)(&g);
    }
}

/* ---- what rows wrote ---- */

/* Substitution from the last row on. */
static void solve_back(const Delta *d, Backward *f, int64_t n)
{
    const int64_t width = d->width;
    const float *low = f->head.low;
    for (int64_t j0 = (n - 1) / DELTA_ROWS * DELTA_ROWS; j0 >= 0; j0 -= DELTA_ROWS) {
        const int64_t end = j0 + DELTA_ROWS < n ? j0 + DELTA_ROWS : n;
        const TileGemm g = { .m = end - j0,
                             .n = width,
                             .k = n - end,
                             .a = low + (n - 1) * DELTA_WINDOW + j0,
                             .a_row = 1,
                             .a_k = -DELTA_WINDOW,
                             .b = f->derror + (n - 1) * width,
                             .ldb = -width,
                             .c = f->dwrite + j0 * width,
                             .ldc = width,
                             .beta = true };
        if (end < n) CPU(tile_gemm)(&g);
        for (int64_t c = 0; c < width; c += VEC)
            for (int64_t j = end - 1; j >= j0; j--) {
                vf x = vf_load(f->dwrite + j * width + c);
                for (int64_t i = end - 1; i > j; i--)
                    x = vf_fma(vf_set1(low[i * DELTA_WINDOW + j]), vf_load(f->derror + i * width + c), x);
                vf_store(f->dwrite + j * width + c, x);
                vf_store(f->derror + j * width + c, vf_mul(vf_set1(f->head.beta[j]), x));
            }
    }
}

/* dwrite, derror, dbeta, and dlast, the gradients of the decays up to the last row. */
static void writes_backward(const Delta *d, Backward *f, const DeltaRun *r, const float *dstate)
{
    const int64_t n = r->n, width = d->width;
    const float *last = f->head.decay + (n - 1) * DELTA_WINDOW;
    memset(f->dlast, 0, sizeof f->dlast);
    if (r->last) product(f->dwrite, width, f->keys.k, d->key_width, dstate, width, n, width, d->D);
    else memset(f->dwrite, 0, (size_t)(n * width) * sizeof(float));
    for (int64_t j = 0; j < n && r->last; j++) {
        float *x = f->dwrite + j * width;
        f->dlast[j] = delta_dot(f->head.write + j * width, x, width);
        delta_scale(x, x, last[j], width);
    }
    add_from_later(f->dwrite, f->head.read, f->go, width, n);
    solve_back(d, f, n);
    for (int64_t j = 0; j < n; j++) f->dbeta[j] = delta_dot(f->dwrite + j * width, f->head.error + j * width, width);
}

/* ---- what rows gave to each other ---- */

/* qk' and kk' of the head are added to the group's; go_write becomes decay times its gradient. */
static void pairs_backward(const Delta *d, Backward *f, int64_t n)
{
    const int64_t width = d->width;
    const DeltaHead *h = &f->head;
    CPU(transpose)(f->across, DELTA_WINDOW, h->write, width, n, d->E);
    for (int64_t i = 0; i < n; i += DELTA_ROWS) {
        const int64_t m = n - i < DELTA_ROWS ? n - i : DELTA_ROWS, at = i * DELTA_WINDOW;
        product(f->go_write + at, DELTA_WINDOW, f->go + i * width, width, f->across, DELTA_WINDOW, m, i + DELTA_ROWS,
                d->E);
        product(f->dlow + at, DELTA_WINDOW, f->derror + i * width, width, f->across, DELTA_WINDOW, m, i + DELTA_ROWS,
                d->E);
    }
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

/* f->product = rows of x times a state that is turned. */
static void rows_of_state(const Delta *d, Backward *f, const float *x, const float *state, int64_t n)
{
    CPU(transpose)(f->turned, d->key_width, state, d->width, d->D, d->E);
    product(f->product, d->key_width, x, d->width, f->turned, d->key_width, n, d->key_width, d->E);
}

static void keys_from_state(const Delta *d, Backward *f, const DeltaRun *r, const float *dstate)
{
    const int64_t n = r->n, width = d->key_width;
    const DeltaHead *h = &f->head;
    memset(f->dfrom, 0, sizeof f->dfrom);
    if (!r->begins) {
        rows_of_state(d, f, f->go, f->state, n);
        for (int64_t i = 0; i < n; i++) {
            const float *x = f->product + i * width;
            f->dfrom[i] = delta_dot(f->keys.q + i * width, x, width);
            delta_add(f->dq + i * width, x, h->from[i], width);
        }
        product(f->product, width, f->derror, d->width, f->turned, width, n, width, d->E);
        for (int64_t i = 0; i < n; i++) {
            const float *x = f->product + i * width;
            f->dfrom[i] = h->from[i] * (f->dfrom[i] - delta_dot(f->keys.k + i * width, x, width));
            delta_add(f->dk + i * width, x, -h->from[i], width);
        }
    }
    if (!r->last) return;
    rows_of_state(d, f, h->write, dstate, n);
    for (int64_t i = 0; i < n; i++)
        delta_add(f->dk + i * width, f->product + i * width, h->decay[(n - 1) * DELTA_WINDOW + i], width);
}

/* state += (factor[i] x[i]) y[i]^T over the rows. */
static void add_to_state(const Delta *d, Backward *f, float *state, const float *x, float factor, const float *y,
                         int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        delta_scale(f->scaled + i * d->key_width, x + i * d->key_width, factor * f->head.from[i], d->key_width);
    const TileGemm g = { .m = d->D,
                         .n = d->width,
                         .k = n,
                         .a = f->scaled,
                         .a_row = 1,
                         .a_k = d->key_width,
                         .b = y,
                         .ldb = d->width,
                         .c = state,
                         .ldc = d->width,
                         .beta = true };
    CPU(tile_gemm)(&g);
}

/* dstate from that behind the run to that before it. */
static void state_backward(const Delta *d, Backward *f, const DeltaRun *r, float *dstate)
{
    const int64_t n = r->n, size = d->D * d->width;
    if (r->begins) {
        memset(dstate, 0, (size_t)size * sizeof(float));
        return;
    }
    if (r->last) {
        const float left = f->head.from[n - 1];
        f->dfrom[n - 1] += left * delta_dot(dstate, f->state, size);
        delta_scale(dstate, dstate, left, size);
    }
    add_to_state(d, f, dstate, f->keys.q, 1, f->go, n);
    add_to_state(d, f, dstate, f->keys.k, -1, f->derror, n);
}

/* dgate[m], from what the decays of rows and states got. */
static void gates_backward(Backward *f, int64_t n)
{
    float *last = f->go_write + (n - 1) * DELTA_WINDOW, sum[DELTA_WINDOW] = { 0 }, whole = 0;
    for (int64_t j = 0; j < n - 1; j++) last[j] += f->head.decay[(n - 1) * DELTA_WINDOW + j] * f->dlast[j];
    for (int64_t m = n - 1; m >= 0; m--) {
        vf lane = vf_zero();
        for (int64_t j = 0; j < m; j += VEC) {
            const vm earlier = vm_first_n(m - j < VEC ? m - j : VEC);
            const vf s = vf_add(vf_load(sum + j), vf_load(f->go_write + m * DELTA_WINDOW + j));
            vf_store(sum + j, s);
            lane = vf_add(lane, vf_select(earlier, s, vf_zero()));
        }
        whole += f->dfrom[m];
        f->dgate[m] = vf_sum(lane) + whole;
    }
}

/* ---- the whole ---- */

static void head_backward(const Delta *d, Backward *f, const delta_bwd_args *a, const DeltaRun *r, int64_t head,
                          float *dstate)
{
    const int64_t n = r->n;
    CPU(delta_head)(d, &f->head, &f->keys, r, head, f->state);
    CPU(delta_load)(f->go, d->width, a->go, r, head);
    writes_backward(d, f, r, dstate);
    CPU(delta_store)(a->dv, f->derror, d->width, r, head);
    pairs_backward(d, f, n);
    keys_from_state(d, f, r, dstate);
    state_backward(d, f, r, dstate);
    gates_backward(f, n);
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = r->b * d->T + r->row + i;
        row_f32(a->dg, row)[head] = f->dgate[i];
        row_f32(a->dbeta, row)[head] = f->dbeta[i];
    }
}

/* dq and dk from what the group's heads have added up. */
static void keys_backward(const Delta *d, Backward *f, const delta_bwd_args *a, const DeltaRun *r, int64_t key_head)
{
    const int64_t n = r->n, width = d->key_width;
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < i; j++) f->dkk[j * DELTA_WINDOW + i] = f->dkk[i * DELTA_WINDOW + j];
    TileGemm g = { .m = n,
                   .n = width,
                   .k = n,
                   .a = f->dqk,
                   .a_row = DELTA_WINDOW,
                   .a_k = 1,
                   .b = f->keys.k,
                   .ldb = width,
                   .c = f->dq,
                   .ldc = width,
                   .beta = true };
    CPU(tile_gemm)(&g);
    g.a = f->dkk;
    g.c = f->dk;
    CPU(tile_gemm)(&g);
    add_from_later(f->dk, f->dqk, f->keys.q, width, n);
    CPU(delta_store)(a->dq, f->dq, width, r, key_head);
    CPU(delta_store)(a->dk, f->dk, width, r, key_head);
}

static void backward_run(const Delta *d, Backward *f, const delta_bwd_args *a, const DeltaRun *r, int64_t window,
                         int64_t key_head)
{
    const size_t square = DELTA_WINDOW * DELTA_WINDOW * sizeof(float);
    const size_t rows = (size_t)(r->n * d->key_width) * sizeof(float);
    CPU(delta_keys)(d, &f->keys, r, key_head);
    memset(f->dqk, 0, square);
    memset(f->dkk, 0, square);
    memset(f->dq, 0, rows);
    memset(f->dk, 0, rows);
    for (int64_t j = 0; j < d->group; j++) {
        const int64_t head = key_head * d->group + j;
        if (!r->begins) CPU(delta_load_state)(d, f->state, a->states, delta_state_row(d, r->b, window, head));
        head_backward(d, f, a, r, head, f->dstate + j * d->D * d->width);
    }
    keys_backward(d, f, a, r, key_head);
}

static void backward_item(const Delta *d, Backward *f, const delta_bwd_args *a, int64_t b, int64_t key_head)
{
    DeltaRun runs[DELTA_WINDOW];
    const int64_t size = d->D * d->width, first = (b * d->V + key_head * d->group) * d->D;
    for (int64_t j = 0; j < d->group; j++) {
        if (a->dafter.data) CPU(delta_load_state)(d, f->dstate + j * size, a->dafter, first + j * d->D);
        else memset(f->dstate + j * size, 0, (size_t)size * sizeof(float));
    }
    memset(f->turned, 0, (size_t)(d->key_width * d->width) * sizeof(float));
    for (int64_t w = d->windows - 1; w >= 0; w--)
        for (int i = CPU(delta_runs)(d, b, w, runs) - 1; i >= 0; i--) backward_run(d, f, a, &runs[i], w, key_head);
    for (int64_t j = 0; j < d->group && a->dbefore.data; j++)
        CPU(delta_store_state)(d, a->dbefore, f->dstate + j * size, first + j * d->D);
}

Err CPU(delta_bwd)(Stream *s, const delta_bwd_args *a)
{
    Delta d = DELTA_OF(a);
    TRY(CPU(delta_open)(&d, a->states));
    Backward unused;
    const int64_t bytes = backward_layout(&unused, &d, (float *)s->dev->workspace), items = d.B * d.K;
    int threads;
    atomic_llong next = 0;
    TRY(CPU(delta_threads)(s->dev, &d, bytes, &threads));
#pragma omp parallel num_threads(team_of(s->dev, threads))
    if (omp_get_thread_num() < threads) {
        Backward f;
        fp_reset();
        backward_layout(&f, &d, (float *)(s->dev->workspace + omp_get_thread_num() * bytes));
        for (int64_t i; (i = atomic_fetch_add(&next, 1)) < items;) backward_item(&d, &f, a, i / d.K, i % d.K);
    }
    return ERR_OK;
}
