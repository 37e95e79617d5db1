/*
 * The gated delta rule, forward, and what backward shares with it (delta.h).
 *
 * Of a run of n rows, with the state S before it, decay[i][j] = exp(the sum of g behind row j up to i) and from[i] =
 * exp(that from the run's first row on):
 *
 *   error[i] = v[i] - from[i] S^T k[i] - sum over j < i of (k[i] k[j]) decay[i][j] write[j]
 *   write[i] = beta[i] error[i]
 *   o[i]     = from[i] S^T q[i] + sum over j <= i of (q[i] k[j]) decay[i][j] write[j]
 *   S        = from[n - 1] S + sum over j of k[j] (decay[n - 1][j] write[j])^T
 *
 * That is the chunked form with the triangular system solved for the one right side that is needed. Sums of g that
 * begin behind row j lose no digits where an earlier row has forgotten all.
 *
 * Mapping  an item = a key head of a sample, with the value heads that read it, whose products of keys it shares;
 *          threads take items in any order.
 * Work     3 n D E + n n E multiplications a run and value head, and 1.3 n n D a run and key head.
 * Traffic  q, k, v, o once; the state stays in L2.
 * Source   Yang et al. 2024 (Gated Delta Networks), section 3.3.
 */
#include "cpu/delta.h"

#include <omp.h>
#include <stdatomic.h>

#include "cpu/team.h"

Err CPU(delta_open)(Delta *d, Tensor states)
{
    d->B = d->q.dim[0], d->T = d->q.dim[1], d->K = d->q.dim[2], d->D = d->q.dim[3];
    d->V = d->v.dim[2], d->E = d->v.dim[3];
    d->windows = (d->T + DELTA_WINDOW - 1) / DELTA_WINDOW;
    d->key_width = delta_lanes(d->D), d->width = delta_lanes(d->E);
    if (d->K < 1 || d->V % d->K)
        return err_set(ERR_SHAPE, "delta: %lld value heads for %lld key heads", (long long)d->V, (long long)d->K);
    if (d->first % DELTA_WINDOW)
        return err_set(ERR_SHAPE, "delta: rows from position %lld on, which begins no window", (long long)d->first);
    if (states.data && states.dim[0] != d->B * d->windows * d->V)
        return err_set(ERR_SHAPE, "delta: %lld states for %lld windows of %lld samples and %lld heads",
                       (long long)states.dim[0], (long long)d->windows, (long long)d->B, (long long)d->V);
    d->group = d->V / d->K;
    return ERR_OK;
}

static bool begins_document(const Delta *d, int64_t b, int64_t row)
{
    return d->doc.data && ((const int32_t *)d->doc.data)[b * d->doc.ld + row] == d->first + row;
}

int CPU(delta_runs)(const Delta *d, int64_t b, int64_t window, DeltaRun runs[DELTA_WINDOW])
{
    const int64_t row = window * DELTA_WINDOW, end = row + DELTA_WINDOW < d->T ? row + DELTA_WINDOW : d->T;
    int count = 0;
    for (int64_t t = row; t < end; t++) {
        const bool begins = begins_document(d, b, t);
        if (t == row || begins) runs[count++] = (DeltaRun){ .b = b, .row = t, .begins = begins };
        runs[count - 1].n++;
    }
    runs[count - 1].last = true;
    return count;
}

void CPU(delta_load)(float *to, int64_t width, Tensor x, const DeltaRun *r, int64_t head)
{
    const int64_t T = x.dim[1], H = x.dim[2], C = x.dim[3];
    for (int64_t i = 0; i < r->n; i++, to += width) {
        const Row from = row_of(x, (r->b * T + r->row + i) * H + head);
        for (int64_t c = 0; c < C; c += VEC) vf_store(to + c, row_get(from, c, C - c));
    }
}

void CPU(delta_store)(Tensor x, const float *from, int64_t width, const DeltaRun *r, int64_t head)
{
    const int64_t T = x.dim[1], H = x.dim[2], C = x.dim[3];
    for (int64_t i = 0; i < r->n; i++, from += width) {
        const Row to = row_of(x, (r->b * T + r->row + i) * H + head);
        for (int64_t c = 0; c < C; c += VEC) row_put(to, c, vf_add(vf_load(from + c), vf_zero()), C - c);
    }
}

void CPU(delta_load_state)(const Delta *d, float *to, Tensor x, int64_t row)
{
    for (int64_t i = 0; i < d->D; i++, to += d->width) {
        const float *from = row_f32(x, row + i);
        for (int64_t c = 0; c < d->E; c += VEC) vf_store(to + c, row_load(from + c, d->E - c));
    }
}

void CPU(delta_store_state)(const Delta *d, Tensor x, const float *from, int64_t row)
{
    for (int64_t i = 0; i < d->D; i++, from += d->width) {
        float *to = row_f32(x, row + i);
        for (int64_t c = 0; c < d->E; c += VEC) row_store(to + c, vf_load(from + c), d->E - c);
    }
}

Err CPU(delta_threads)(const Device *dev, const Delta *d, int64_t bytes, int *out)
{
    int64_t n = dev->workspace_bytes / bytes;
    if (n < 1)
        return err_set(ERR_CONFIG, "the delta rule needs %lld bytes of workspace, there are %lld", (long long)bytes,
                       (long long)dev->workspace_bytes);
    if (n > dev->threads) n = dev->threads;
    if (n > d->B * d->K) n = d->B * d->K;
    *out = n < 1 ? 1 : (int)n;
    return ERR_OK;
}

/* ---- keys ---- */

void CPU(delta_keys)(const Delta *d, DeltaKeys *keys, const DeltaRun *r, int64_t key_head)
{
    const int64_t n = r->n, lanes = delta_lanes(n);
    CPU(delta_load)(keys->q, d->key_width, d->q, r, key_head);
    CPU(delta_load)(keys->k, d->key_width, d->k, r, key_head);
    for (int64_t i = n; i < lanes; i++) memset(keys->k + i * d->key_width, 0, (size_t)d->key_width * sizeof(float));
    CPU(transpose)(keys->across, DELTA_WINDOW, keys->k, d->key_width, lanes, d->D);
    for (int64_t i = 0; i < n; i += DELTA_ROWS) {
        TileGemm g = { .m = n - i < DELTA_ROWS ? n - i : DELTA_ROWS,
                       .n = i + DELTA_ROWS,
                       .k = d->D,
                       .a = keys->k + i * d->key_width,
                       .a_row = d->key_width,
                       .a_k = 1,
                       .b = keys->across,
                       .ldb = DELTA_WINDOW,
                       .c = keys->kk + i * DELTA_WINDOW,
                       .ldc = DELTA_WINDOW };
        CPU(tile_gemm)(&g);
        g.a = keys->q + i * d->key_width;
        g.c = keys->qk + i * DELTA_WINDOW;
        CPU(tile_gemm)(&g);
    }
}

/* ---- a head ---- */

static void load_gates(const Delta *d, DeltaHead *h, const DeltaRun *r, int64_t head)
{
    for (int64_t i = 0; i < r->n; i++) {
        const int64_t row = r->b * d->T + r->row + i;
        h->g[i] = row_f32(d->g, row)[head];
        h->beta[i] = row_f32(d->beta, row)[head];
    }
}

/* Lanes beyond a row's own are 0, up to whole blocks of DELTA_ROWS. */
static void make_decays(DeltaHead *h, const DeltaKeys *keys, int64_t n)
{
    float sum[DELTA_WINDOW] = { 0 }, whole[DELTA_WINDOW] = { 0 };
    for (int64_t i = 0; i < n; i++) {
        const vf g = vf_set1(h->g[i]);
        for (int64_t j = 0; j < i / DELTA_ROWS * DELTA_ROWS + DELTA_ROWS; j += VEC) {
            const int64_t at = i * DELTA_WINDOW + j, before = i - j < 0 ? 0 : i - j;
            const vm earlier = vm_first_n(before < VEC ? before : VEC);
            const vm seen = vm_first_n(before + 1 < VEC ? before + 1 : VEC);
            const vf s = vf_add(vf_load(sum + j), vf_select(earlier, g, vf_zero()));
            const vf left = vf_select(seen, vf_exp(s), vf_zero());
            vf_store(sum + j, s);
            vf_store(h->decay + at, left);
            vf_store(h->read + at, vf_select(seen, vf_mul(vf_load(keys->qk + at), left), vf_zero()));
            vf_store(h->low + at, vf_select(earlier, vf_neg(vf_mul(vf_load(keys->kk + at), left)), vf_zero()));
        }
        whole[i] = (i ? whole[i - 1] : 0.0f) + h->g[i];
    }
    for (int64_t i = 0; i < n; i += VEC) vf_store(h->from + i, vf_exp(vf_load(whole + i)));
}

/* Forward substitution. */
static void solve(const Delta *d, DeltaHead *h, int64_t n)
{
    const int64_t width = d->width;
    for (int64_t i0 = 0; i0 < n; i0 += DELTA_ROWS) {
        const int64_t end = i0 + DELTA_ROWS < n ? i0 + DELTA_ROWS : n;
        TileGemm g = { .m = end - i0,
                       .n = width,
                       .k = i0,
                       .a = h->low + i0 * DELTA_WINDOW,
                       .a_row = DELTA_WINDOW,
                       .a_k = 1,
                       .b = h->write,
                       .ldb = width,
                       .c = h->error + i0 * width,
                       .ldc = width,
                       .beta = true };
        if (i0) CPU(tile_gemm)(&g);
        for (int64_t c = 0; c < width; c += VEC)
            for (int64_t i = i0; i < end; i++) {
                vf e = vf_load(h->error + i * width + c);
                for (int64_t j = i0; j < i; j++)
                    e = vf_fma(vf_set1(h->low[i * DELTA_WINDOW + j]), vf_load(h->write + j * width + c), e);
                vf_store(h->error + i * width + c, e);
                vf_store(h->write + i * width + c, vf_mul(vf_set1(h->beta[i]), e));
            }
    }
}

void CPU(delta_head)(const Delta *d, DeltaHead *h, const DeltaKeys *keys, const DeltaRun *r, int64_t head,
                     const float *state)
{
    const int64_t n = r->n, width = d->width;
    load_gates(d, h, r, head);
    make_decays(h, keys, n);
    CPU(delta_load)(h->error, width, d->v, r, head);
    if (!r->begins) {
        TileGemm g = { .m = n,
                       .n = width,
                       .k = d->D,
                       .a = keys->k,
                       .a_row = d->key_width,
                       .a_k = 1,
                       .b = state,
                       .ldb = width,
                       .c = h->x,
                       .ldc = width };
        CPU(tile_gemm)(&g);
        for (int64_t i = 0; i < n; i++) delta_add(h->error + i * width, h->x + i * width, -h->from[i], width);
    }
    solve(d, h, n);
}

/* ---- forward ---- */

/* A thread's scratch. */
typedef struct {
    DeltaKeys keys;
    DeltaHead head;
    float *o, *state; /* state: of the group's heads, one after the other */
} Forward;

/* Lays the scratch out from `base` on; returns its bytes. */
static int64_t forward_layout(Forward *f, const Delta *d, float *base)
{
    const int64_t square = DELTA_WINDOW * DELTA_WINDOW, rows = DELTA_WINDOW * d->width;
    int64_t used = 0;
#define TAKE(p, count) ((p) = base + used, used += (count))
    TAKE(f->keys.q, DELTA_WINDOW * d->key_width);
    TAKE(f->keys.k, DELTA_WINDOW * d->key_width);
    TAKE(f->keys.across, DELTA_WINDOW * d->key_width);
    TAKE(f->keys.kk, square);
    TAKE(f->keys.qk, square);
    TAKE(f->head.decay, square);
    TAKE(f->head.low, square);
    TAKE(f->head.read, square);
    TAKE(f->head.from, DELTA_WINDOW);
    TAKE(f->head.error, rows);
    TAKE(f->head.write, rows);
    TAKE(f->head.x, rows);
    TAKE(f->o, rows);
    TAKE(f->state, d->group * d->D * d->width);
#undef TAKE
    return used * (int64_t)sizeof(float);
}

static void make_output(const Delta *d, Forward *f, const DeltaRun *r, const float *state)
{
    const int64_t n = r->n, width = d->width;
    const DeltaHead *h = &f->head;
    TileGemm g = { .m = n,
                   .n = width,
                   .k = d->D,
                   .a = f->keys.q,
                   .a_row = d->key_width,
                   .a_k = 1,
                   .b = state,
                   .ldb = width,
                   .c = f->o,
                   .ldc = width };
    if (!r->begins) {
        CPU(tile_gemm)(&g);
        for (int64_t i = 0; i < n; i++) delta_scale(f->o + i * width, f->o + i * width, h->from[i], width);
    }
    for (int64_t i = 0; i < n; i += DELTA_ROWS) {
        TileGemm w = { .m = n - i < DELTA_ROWS ? n - i : DELTA_ROWS,
                       .n = width,
                       .k = n < i + DELTA_ROWS ? n : i + DELTA_ROWS,
                       .a = h->read + i * DELTA_WINDOW,
                       .a_row = DELTA_WINDOW,
                       .a_k = 1,
                       .b = h->write,
                       .ldb = width,
                       .c = f->o + i * width,
                       .ldc = width,
                       .beta = !r->begins };
        CPU(tile_gemm)(&w);
    }
}

/* The state behind the run. */
static void move_state(const Delta *d, Forward *f, const DeltaRun *r, float *state)
{
    const int64_t n = r->n, width = d->width, last = n - 1;
    DeltaHead *h = &f->head;
    if (!r->begins) delta_scale(state, state, h->from[last], d->D * width);
    for (int64_t j = 0; j < n; j++)
        delta_scale(h->x + j * width, h->write + j * width, h->decay[last * DELTA_WINDOW + j], width);
    TileGemm g = { .m = d->D,
                   .n = width,
                   .k = n,
                   .a = f->keys.k,
                   .a_row = 1,
                   .a_k = d->key_width,
                   .b = h->x,
                   .ldb = width,
                   .c = state,
                   .ldc = width,
                   .beta = !r->begins };
    CPU(tile_gemm)(&g);
}

static void forward_window(const Delta *d, Forward *f, const delta_fwd_args *a, int64_t b, int64_t key_head, int64_t w)
{
    DeltaRun runs[DELTA_WINDOW];
    const int count = CPU(delta_runs)(d, b, w, runs);
    for (int i = 0; i < count; i++) {
        const DeltaRun *r = &runs[i];
        CPU(delta_keys)(d, &f->keys, r, key_head);
        for (int64_t j = 0; j < d->group; j++) {
            const int64_t head = key_head * d->group + j, bytes = d->D * d->width * (int64_t)sizeof(float);
            float *state = f->state + j * d->D * d->width;
            if (i == 0 && r->begins) memset(state, 0, (size_t)bytes);
            if (i == 0 && a->states.data) CPU(delta_store_state)(d, a->states, state, delta_state_row(d, b, w, head));
            CPU(delta_head)(d, &f->head, &f->keys, r, head, state);
            make_output(d, f, r, state);
            CPU(delta_store)(a->o, f->o, d->width, r, head);
            if (r->last) move_state(d, f, r, state);
        }
    }
}

static void forward_item(const Delta *d, Forward *f, const delta_fwd_args *a, int64_t b, int64_t key_head)
{
    const int64_t size = d->D * d->width, head = key_head * d->group;
    for (int64_t j = 0; j < d->group; j++) {
        if (a->before.data) CPU(delta_load_state)(d, f->state + j * size, a->before, (b * d->V + head + j) * d->D);
        else memset(f->state + j * size, 0, (size_t)size * sizeof(float));
    }
    for (int64_t w = 0; w < d->windows; w++) forward_window(d, f, a, b, key_head, w);
    for (int64_t j = 0; j < d->group && a->after.data; j++)
        CPU(delta_store_state)(d, a->after, f->state + j * size, (b * d->V + head + j) * d->D);
}

Err CPU(delta_fwd)(Stream *s, const delta_fwd_args *a)
{
    Delta d = DELTA_OF(a);
    TRY(CPU(delta_open)(&d, a->states));
    Forward unused;
    const int64_t bytes = forward_layout(&unused, &d, (float *)s->dev->workspace), items = d.B * d.K;
    int threads;
    atomic_llong next = 0;
    TRY(CPU(delta_threads)(s->dev, &d, bytes, &threads));
#pragma omp parallel num_threads(team_of(s->dev, threads))
    if (omp_get_thread_num() < threads) {
        Forward f;
        fp_reset();
        forward_layout(&f, &d, (float *)(s->dev->workspace + omp_get_thread_num() * bytes));
        for (int64_t i; (i = atomic_fetch_add(&next, 1)) < items;) forward_item(&d, &f, a, i / d.K, i % d.K);
    }
    return ERR_OK;
}
