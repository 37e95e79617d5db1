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

/* ---- a head ---- */

/* low, in the lanes that decays have. */
static void make_low(DeltaHead *h, const ScanKeys *keys, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < i / SCAN_ROWS * SCAN_ROWS + SCAN_ROWS; j += VEC) {
            const int64_t at = i * DELTA_WINDOW + j, before = i - j < 0 ? 0 : i - j;
            const vf low = vf_neg(vf_mul(vf_load(keys->kk + at), vf_load(h->decay + at)));
            vf_store(h->low + at, vf_select(vm_first_n(before < VEC ? before : VEC), low, vf_zero()));
        }
}

void CPU(delta_solve)(const Scan *d, float *error, float *write, const float *low, const float *beta, int64_t n)
{
    const int64_t width = d->width;
    for (int64_t i0 = 0; i0 < n; i0 += SCAN_ROWS) {
        const int64_t end = i0 + SCAN_ROWS < n ? i0 + SCAN_ROWS : n;
        if (i0)
            scan_product(error + i0 * width, width, low + i0 * DELTA_WINDOW, DELTA_WINDOW, write, width, end - i0,
                         width, i0, true);
        for (int64_t c = 0; c < width; c += VEC)
            for (int64_t i = i0; i < end; i++) {
                vf e = vf_load(error + i * width + c);
                for (int64_t j = i0; j < i; j++)
                    e = vf_fma(vf_set1(low[i * DELTA_WINDOW + j]), vf_load(write + j * width + c), e);
                vf_store(error + i * width + c, e);
                vf_store(write + i * width + c, vf_mul(vf_set1(beta[i]), e));
            }
    }
}

void CPU(delta_head)(const Scan *d, DeltaHead *h, const ScanKeys *keys, const ScanRun *r, int64_t head,
                     const float *state)
{
    const int64_t n = r->n, width = d->width;
    scan_load_column(d, h->g, d->g, r, head);
    scan_load_column(d, h->beta, d->step, r, head);
    CPU(scan_decays)(d, h->decay, h->from, h->g, n);
    CPU(scan_read)(d, h->read, keys->qk, h->decay, n);
    make_low(h, keys, n);
    CPU(scan_load)(h->error, width, d->v, r, head);
    if (!r->begins) {
        scan_product(h->x, width, keys->k, d->key_width, state, width, n, width, d->D, false);
        for (int64_t i = 0; i < n; i++) scan_add(h->error + i * width, h->x + i * width, -h->from[i], width);
    }
    CPU(delta_solve)(d, h->error, h->write, h->low, h->beta, n);
}

/* ---- forward ---- */

/* A thread's scratch. */
typedef struct {
    ScanKeys keys;
    DeltaHead head;
    float *o, *state; /* state: of the group's heads, one after the other */
} Forward;

/* Lays the scratch out from `base` on; returns its bytes. */
static int64_t forward_layout(Forward *f, const Scan *d, float *base)
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

static void make_output(const Scan *d, Forward *f, const ScanRun *r, const float *state)
{
    const int64_t n = r->n, width = d->width;
    const DeltaHead *h = &f->head;
    if (!r->begins) {
        scan_product(f->o, width, f->keys.q, d->key_width, state, width, n, width, d->D, false);
        for (int64_t i = 0; i < n; i++) scan_scale(f->o + i * width, f->o + i * width, h->from[i], width);
    }
    CPU(scan_earlier)(d, f->o, h->read, h->write, width, n, !r->begins);
}

/* The state behind the run. */
static void move_state(const Scan *d, Forward *f, const ScanRun *r, float *state)
{
    const int64_t n = r->n, width = d->width, last = n - 1;
    DeltaHead *h = &f->head;
    if (!r->begins) scan_scale(state, state, h->from[last], d->D * width);
    for (int64_t j = 0; j < n; j++)
        scan_scale(h->x + j * width, h->write + j * width, h->decay[last * DELTA_WINDOW + j], width);
    scan_outer(d, state, f->keys.k, h->x, n, !r->begins);
}

static void forward_window(const Scan *d, Forward *f, const delta_fwd_args *a, int64_t b, int64_t key_head, int64_t w)
{
    ScanRun runs[SCAN_MOST];
    const int count = CPU(scan_runs)(d, b, w, runs);
    for (int i = 0; i < count; i++) {
        const ScanRun *r = &runs[i];
        CPU(scan_keys)(d, &f->keys, r, key_head);
        for (int64_t j = 0; j < d->group; j++) {
            const int64_t head = key_head * d->group + j, bytes = d->D * d->width * (int64_t)sizeof(float);
            float *state = f->state + j * d->D * d->width;
            if (i == 0 && r->begins) memset(state, 0, (size_t)bytes);
            if (i == 0 && a->states.data) CPU(scan_store_state)(d, a->states, state, scan_state_row(d, b, w, head));
            CPU(delta_head)(d, &f->head, &f->keys, r, head, state);
            make_output(d, f, r, state);
            CPU(scan_store)(a->o, f->o, d->width, r, head);
            if (r->last) move_state(d, f, r, state);
        }
    }
}

/* The call that threads share. */
typedef struct {
    const Scan *d;
    const delta_fwd_args *a;
} ForwardCall;

static void forward_item(const void *call, float *room, int64_t item)
{
    const ForwardCall *c = call;
    const Scan *d = c->d;
    const int64_t size = d->D * d->width, b = item / d->K, key_head = item % d->K;
    const int64_t first = (b * d->V + key_head * d->group) * d->D;
    Forward f;
    forward_layout(&f, d, room);
    for (int64_t j = 0; j < d->group; j++) CPU(scan_load_state)(d, f.state + j * size, c->a->before, first + j * d->D);
    for (int64_t w = 0; w < d->windows; w++) forward_window(d, &f, c->a, b, key_head, w);
    for (int64_t j = 0; j < d->group && c->a->after.data; j++)
        CPU(scan_store_state)(d, c->a->after, f.state + j * size, first + j * d->D);
}

Err CPU(delta_fwd)(Stream *s, const delta_fwd_args *a)
{
    Scan d = DELTA_OF(a);
    TRY(CPU(scan_open)(&d, DELTA_NAME, a->states));
    Forward unused;
    const int64_t bytes = forward_layout(&unused, &d, (float *)s->dev->workspace);
    return CPU(scan_items)(s, DELTA_NAME, d.B * d.K, bytes, forward_item, &(ForwardCall){ &d, a });
}
