/*
 * Mamba-2's recurrence in windows, forward and backward (ops.def, mamba_fwd; scan.h; docs/determinism.md).
 *
 * Of a run of n rows, with the state S before it, decay[i][j] = exp(the sum of g behind row j up to i), from[i] = exp(
 * that from the run's first row on) and left = decay[n - 1]; write[j] = delta[j] x[j]:
 *
 *   o[i] = from[i] S^T q[i] + sum over j <= i of (q[i] k[j]) decay[i][j] write[j], then + skip x[i]
 *   S    = from[n - 1] S + (sum over j of k[j] (left[j] write[j])^T)
 *
 * Backward, with dS of the state behind the run, in the end of that before it; d before a name is its gradient:
 *
 *   dwrite[j] = left[j] dS^T k[j] + sum over i >= j of (q[i] k[j]) decay[i][j] go[i]
 *   dx[j]     = delta[j] dwrite[j] + skip go[j],  ddelta[j] = dwrite[j] x[j],  dskip[j] = go[j] x[j]
 *   qk'[i][j] = (go[i] write[j]) decay[i][j]
 *   dq[i]     = from[i] S go[i] + sum over j <= i of qk'[i][j] k[j]
 *   dk[j]     = left[j] dS write[j] + sum over i >= j of qk'[i][j] q[i]
 *   dS        = from[n - 1] dS + (sum over i of q[i] (from[i] go[i])^T)
 *
 * dg as in delta_bwd.c. The heads of a group add, in ascending order, to qk' and the parts of dq and dk before it.
 *
 * Mapping  two passes each way: states, an item = a head of a sample, windows in order; then rows, an item = a window
 *          of a group of a sample, with its heads, which share products of q and k. A model with one group has as many
 *          items as windows.
 * Work     2 n D E + n n E / 2 multiplications a run and head forward, and n n D / 2 a run and group; backward
 *          4 n D E + n n E and 1.5 n n D.
 * Traffic  x, o and the states of windows twice; k and q once a head and once a group.
 * Source   Dao, Gu 2024 (Transformers are SSMs), section 6.
 */
#include "cpu/scan.h"

#define MAMBA_NAME "the scan of Mamba-2"
#define MAMBA_OF(a)                                                                                                   \
    {                                                                                                                 \
        .q = (a)->q, .k = (a)->k, .v = (a)->x, .g = (a)->g, .step = (a)->delta, .doc = (a)->doc, .first = (a)->first, \
        .window = MAMBA_WINDOW                                                                                        \
    }

/* The next `count` floats of `at`. */
static float *take(float **at, int64_t count)
{
    float *p = *at;
    *at += count;
    return p;
}

/* ---- states ---- */

/* One call of a pass. */
typedef struct {
    const Scan *d;
    const mamba_fwd_args *f;
    const mamba_bwd_args *b;
} MambaCall;

/* A thread's scratch. */
typedef struct {
    float *keys, *values, *state, *added;
} States;

static int64_t states_layout(States *f, const Scan *d, float *room)
{
    float *at = room;
    f->keys = take(&at, MAMBA_WINDOW * d->key_width);
    f->values = take(&at, MAMBA_WINDOW * d->width);
    f->state = take(&at, d->D * d->width);
    f->added = take(&at, d->D * d->width);
    return (int64_t)sizeof(float) * (at - room);
}

/* state = factor * state + added; without a factor the latter. */
static void move_state(const Scan *d, States *f, const float *factor)
{
    const int64_t size = d->D * d->width;
    if (!factor) {
        memcpy(f->state, f->added, (size_t)size * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < size; i += VEC)
        vf_store(f->state + i, vf_fma(vf_set1(*factor), vf_load(f->state + i), vf_load(f->added + i)));
}

/* The state behind a window, of which r is the last run. */
static void state_forward(const Scan *d, States *f, const ScanRun *r, int64_t head)
{
    float g[MAMBA_WINDOW], step[MAMBA_WINDOW], left[MAMBA_WINDOW];
    scan_load_column(d, g, d->g, r, head);
    scan_load_column(d, step, d->step, r, head);
    CPU(scan_load)(f->keys, d->key_width, d->k, r, head / d->group);
    CPU(scan_load)(f->values, d->width, d->v, r, head);
    const float from = CPU(scan_left)(left, g, r->n);
    for (int64_t i = 0; i < r->n; i++) {
        float *x = f->values + i * d->width;
        scan_scale(x, x, step[i], d->width);
        scan_scale(x, x, left[i], d->width);
    }
    scan_outer(d, f->added, f->keys, f->values, r->n, false);
    move_state(d, f, r->begins ? NULL : &from);
}

static void states_forward(const void *call, float *room, int64_t item)
{
    const MambaCall *c = call;
    const Scan *d = c->d;
    const int64_t b = item / d->V, head = item % d->V, bytes = d->D * d->width * (int64_t)sizeof(float);
    ScanRun runs[SCAN_MOST];
    States f;
    states_layout(&f, d, room);
    CPU(scan_load_state)(d, f.state, c->f->before, item * d->D);
    for (int64_t w = 0; w < d->windows; w++) {
        const int count = CPU(scan_runs)(d, b, w, runs);
        if (runs[0].begins) memset(f.state, 0, (size_t)bytes);
        CPU(scan_store_state)(d, c->f->states, f.state, scan_state_row(d, b, w, head));
        state_forward(d, &f, &runs[count - 1], head);
    }
    if (c->f->after.data) CPU(scan_store_state)(d, c->f->after, f.state, item * d->D);
}

/* The gradient of the state before a window, of which r is the first run. */
static void state_backward(const Scan *d, States *f, Tensor go, const ScanRun *r, int64_t head)
{
    float g[MAMBA_WINDOW], from[MAMBA_WINDOW];
    const int64_t n = r->n;
    if (r->begins) {
        memset(f->state, 0, (size_t)(d->D * d->width) * sizeof(float));
        return;
    }
    scan_load_column(d, g, d->g, r, head);
    CPU(scan_load)(f->keys, d->key_width, d->q, r, head / d->group);
    CPU(scan_load)(f->values, d->width, go, r, head);
    CPU(scan_from)(from, g, n);
    for (int64_t i = 0; i < n; i++) scan_scale(f->values + i * d->width, f->values + i * d->width, from[i], d->width);
    scan_outer(d, f->added, f->keys, f->values, n, false);
    move_state(d, f, r->last ? &from[n - 1] : NULL);
}

static void states_backward(const void *call, float *room, int64_t item)
{
    const MambaCall *c = call;
    const Scan *d = c->d;
    const int64_t b = item / d->V, head = item % d->V;
    ScanRun runs[SCAN_MOST];
    States f;
    states_layout(&f, d, room);
    CPU(scan_load_state)(d, f.state, c->b->dafter, item * d->D);
    for (int64_t w = d->windows - 1; w >= 0; w--) {
        CPU(scan_store_state)(d, c->b->dstates, f.state, scan_state_row(d, b, w, head));
        CPU(scan_runs)(d, b, w, runs);
        state_backward(d, &f, c->b->go, &runs[0], head);
    }
    if (c->b->dbefore.data) CPU(scan_store_state)(d, c->b->dbefore, f.state, item * d->D);
}

/* ---- rows, forward ---- */

/* A head of a run. */
typedef struct {
    float *decay, *read; /* [i][j] */
    float *x, *write;    /* rows of values */
    float *state;        /* that before the run */
    float from[MAMBA_WINDOW], g[MAMBA_WINDOW], step[MAMBA_WINDOW];
    float skip;
} MambaHead;

static void head_layout(const Scan *d, ScanKeys *keys, MambaHead *h, float **at)
{
    const int64_t square = MAMBA_WINDOW * MAMBA_WINDOW;
    *keys = (ScanKeys){ .q = take(at, MAMBA_WINDOW * d->key_width), .k = take(at, MAMBA_WINDOW * d->key_width) };
    keys->across = take(at, MAMBA_WINDOW * d->key_width);
    keys->qk = take(at, square);
    h->decay = take(at, square), h->read = take(at, square);
    h->x = take(at, MAMBA_WINDOW * d->width), h->write = take(at, MAMBA_WINDOW * d->width);
    h->state = take(at, d->D * d->width);
}

static void load_head(const Scan *d, MambaHead *h, const ScanKeys *keys, Tensor states, Tensor skip, const ScanRun *r,
                      int64_t head)
{
    const int64_t window = r->row / MAMBA_WINDOW;
    scan_load_column(d, h->g, d->g, r, head);
    scan_load_column(d, h->step, d->step, r, head);
    h->skip = any_load(skip, head);
    CPU(scan_decays)(d, h->decay, h->from, h->g, r->n);
    CPU(scan_read)(d, h->read, keys->qk, h->decay, r->n);
    CPU(scan_load)(h->x, d->width, d->v, r, head);
    for (int64_t i = 0; i < r->n; i++) scan_scale(h->write + i * d->width, h->x + i * d->width, h->step[i], d->width);
    if (!r->begins) CPU(scan_load_state)(d, h->state, states, scan_state_row(d, r->b, window, head));
}

typedef struct {
    ScanKeys keys;
    MambaHead head;
    float *o;
} Forward;

static int64_t forward_layout(Forward *f, const Scan *d, float *room)
{
    float *at = room;
    head_layout(d, &f->keys, &f->head, &at);
    f->o = take(&at, MAMBA_WINDOW * d->width);
    return (int64_t)sizeof(float) * (at - room);
}

static void head_forward(const Scan *d, Forward *f, const ScanRun *r)
{
    const int64_t n = r->n, width = d->width;
    const MambaHead *h = &f->head;
    if (!r->begins) {
        scan_product(f->o, width, f->keys.q, d->key_width, h->state, width, n, width, d->D, false);
        for (int64_t i = 0; i < n; i++) scan_scale(f->o + i * width, f->o + i * width, h->from[i], width);
    }
    CPU(scan_earlier)(d, f->o, h->read, h->write, width, n, !r->begins);
    scan_add(f->o, h->x, h->skip, n * width);
}

/* Item: a window of a group of a sample, windows before groups. */
static void rows_forward(const void *call, float *room, int64_t item)
{
    const MambaCall *c = call;
    const Scan *d = c->d;
    const int64_t group = item % d->K, w = item / d->K % d->windows, b = item / d->K / d->windows;
    ScanRun runs[SCAN_MOST];
    Forward f;
    forward_layout(&f, d, room);
    const int count = CPU(scan_runs)(d, b, w, runs);
    for (int i = 0; i < count; i++) {
        CPU(scan_keys)(d, &f.keys, &runs[i], group);
        for (int64_t head = group * d->group; head < (group + 1) * d->group; head++) {
            load_head(d, &f.head, &f.keys, c->f->states, c->f->skip, &runs[i], head);
            head_forward(d, &f, &runs[i]);
            CPU(scan_store)(c->f->o, f.o, d->width, &runs[i], head);
        }
    }
}

Err CPU(mamba_fwd)(Stream *s, const mamba_fwd_args *a)
{
    Scan d = MAMBA_OF(a);
    TRY(CPU(scan_open)(&d, MAMBA_NAME, a->states));
    const MambaCall c = { .d = &d, .f = a };
    States states;
    Forward rows;
    TRY(CPU(scan_items)(s, MAMBA_NAME, d.B * d.V, states_layout(&states, &d, (float *)s->dev->workspace),
                        states_forward, &c));
    return CPU(scan_items)(s, MAMBA_NAME, d.B * d.windows * d.K, forward_layout(&rows, &d, (float *)s->dev->workspace),
                           rows_forward, &c);
}

/* ---- rows, backward ---- */

typedef struct {
    ScanKeys keys;
    MambaHead head;
    float *both;              /* [i][j]: go write, then decay times its gradient */
    float *dqk;               /* qk', of the group */
    float *dq, *dk, *product; /* rows of keys */
    float *go, *dwrite, *across;
    float *turned, *dstate;
    float dfrom[MAMBA_WINDOW], dlast[MAMBA_WINDOW], dgate[MAMBA_WINDOW], dstep[MAMBA_WINDOW], dskip[MAMBA_WINDOW];
} Backward;

static int64_t backward_layout(Backward *f, const Scan *d, float *room)
{
    const int64_t square = MAMBA_WINDOW * MAMBA_WINDOW, keys = MAMBA_WINDOW * d->key_width;
    const int64_t rows = MAMBA_WINDOW * d->width;
    float *at = room;
    head_layout(d, &f->keys, &f->head, &at);
    f->both = take(&at, square), f->dqk = take(&at, square);
    f->dq = take(&at, keys), f->dk = take(&at, keys), f->product = take(&at, keys);
    f->go = take(&at, rows), f->dwrite = take(&at, rows), f->across = take(&at, rows);
    f->turned = take(&at, d->key_width * d->width), f->dstate = take(&at, d->D * d->width);
    return (int64_t)sizeof(float) * (at - room);
}

/* dwrite, and what becomes of it: dx in its place, dstep, dskip. dlast: the gradients of the decays up to the last row,
 * times these. */
static void writes_backward(const Scan *d, Backward *f, const ScanRun *r)
{
    const int64_t n = r->n, width = d->width;
    const MambaHead *h = &f->head;
    const float *left = h->decay + (n - 1) * MAMBA_WINDOW;
    memset(f->dlast, 0, sizeof f->dlast);
    if (r->last) scan_product(f->dwrite, width, f->keys.k, d->key_width, f->dstate, width, n, width, d->D, false);
    else memset(f->dwrite, 0, (size_t)(n * width) * sizeof(float));
    for (int64_t j = 0; j < n && r->last; j++) {
        float *x = f->dwrite + j * width;
        f->dlast[j] = left[j] * scan_dot(h->write + j * width, x, width);
        scan_scale(x, x, left[j], width);
    }
    CPU(scan_later)(d, f->dwrite, h->read, f->go, width, n);
    for (int64_t j = 0; j < n; j++) {
        float *dx = f->dwrite + j * width;
        f->dstep[j] = scan_dot(dx, h->x + j * width, width);
        f->dskip[j] = scan_dot(f->go + j * width, h->x + j * width, width);
        scan_scale(dx, dx, h->step[j], width);
        scan_add(dx, f->go + j * width, h->skip, width);
    }
}

/* qk' of the head is added to the group's; `both` becomes decay times its gradient. */
static void pairs_backward(const Scan *d, Backward *f, int64_t n)
{
    const MambaHead *h = &f->head;
    CPU(transpose)(f->across, MAMBA_WINDOW, h->write, d->width, n, d->E);
    CPU(scan_pairs)(d, f->both, f->go, f->across, n);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j <= i; j += VEC) {
            const int64_t at = i * MAMBA_WINDOW + j, seen = i - j + 1;
            const vf x = vf_select(vm_first_n(seen < VEC ? seen : VEC), vf_load(f->both + at), vf_zero());
            vf_store(f->dqk + at, vf_fma(x, vf_load(h->decay + at), vf_load(f->dqk + at)));
            vf_store(f->both + at, vf_mul(x, vf_load(h->read + at)));
        }
}

/* Gradients that pass through the states before the run and behind it. */
static void states_of_rows(const Scan *d, Backward *f, const ScanRun *r)
{
    const int64_t n = r->n, width = d->key_width;
    const MambaHead *h = &f->head;
    memset(f->dfrom, 0, sizeof f->dfrom);
    if (!r->begins) {
        CPU(scan_turned)(d, f->product, f->turned, f->go, h->state, n);
        for (int64_t i = 0; i < n; i++) {
            const float *x = f->product + i * width;
            f->dfrom[i] = h->from[i] * scan_dot(f->keys.q + i * width, x, width);
            scan_add(f->dq + i * width, x, h->from[i], width);
        }
        if (r->last) f->dfrom[n - 1] += h->from[n - 1] * scan_dot(f->dstate, h->state, d->D * d->width);
    }
    if (!r->last) return;
    CPU(scan_turned)(d, f->product, f->turned, h->write, f->dstate, n);
    for (int64_t j = 0; j < n; j++)
        scan_add(f->dk + j * width, f->product + j * width, h->decay[(n - 1) * MAMBA_WINDOW + j], width);
}

static void head_backward(const MambaCall *c, Backward *f, const ScanRun *r, int64_t head)
{
    const Scan *d = c->d;
    const mamba_bwd_args *a = c->b;
    const int64_t n = r->n, row = scan_state_row(d, r->b, r->row / MAMBA_WINDOW, head);
    load_head(d, &f->head, &f->keys, a->states, a->skip, r, head);
    CPU(scan_load)(f->go, d->width, a->go, r, head);
    if (r->last) CPU(scan_load_state)(d, f->dstate, a->dstates, row);
    writes_backward(d, f, r);
    CPU(scan_store)(a->dx, f->dwrite, d->width, r, head);
    pairs_backward(d, f, n);
    states_of_rows(d, f, r);
    for (int64_t j = 0; j < n - 1; j++) f->both[(n - 1) * MAMBA_WINDOW + j] += f->dlast[j];
    CPU(scan_gates)(d, f->dgate, f->both, f->dfrom, n);
    scan_store_column(d, a->ddelta, f->dstep, r, head);
    scan_store_column(d, a->dg, f->dgate, r, head);
    scan_store_column(d, a->dskip, f->dskip, r, head);
}

static void rows_backward(const void *call, float *room, int64_t item)
{
    const MambaCall *c = call;
    const Scan *d = c->d;
    const int64_t group = item % d->K, w = item / d->K % d->windows, b = item / d->K / d->windows;
    const int64_t width = d->key_width;
    ScanRun runs[SCAN_MOST];
    Backward f;
    backward_layout(&f, d, room);
    memset(f.turned, 0, (size_t)(width * d->width) * sizeof(float));
    const int count = CPU(scan_runs)(d, b, w, runs);
    for (int i = 0; i < count; i++) {
        const ScanRun *r = &runs[i];
        CPU(scan_keys)(d, &f.keys, r, group);
        memset(f.dqk, 0, MAMBA_WINDOW * MAMBA_WINDOW * sizeof(float));
        memset(f.dq, 0, (size_t)(r->n * width) * sizeof(float));
        memset(f.dk, 0, (size_t)(r->n * width) * sizeof(float));
        for (int64_t head = group * d->group; head < (group + 1) * d->group; head++) head_backward(c, &f, r, head);
        CPU(scan_earlier)(d, f.dq, f.dqk, f.keys.k, width, r->n, true);
        CPU(scan_later)(d, f.dk, f.dqk, f.keys.q, width, r->n);
        CPU(scan_store)(c->b->dq, f.dq, width, r, group);
        CPU(scan_store)(c->b->dk, f.dk, width, r, group);
    }
}

Err CPU(mamba_bwd)(Stream *s, const mamba_bwd_args *a)
{
    Scan d = MAMBA_OF(a);
    TRY(CPU(scan_open)(&d, MAMBA_NAME, a->states));
    const MambaCall c = { .d = &d, .b = a };
    States states;
    Backward rows;
    TRY(CPU(scan_items)(s, MAMBA_NAME, d.B * d.V, states_layout(&states, &d, (float *)s->dev->workspace),
                        states_backward, &c));
    return CPU(scan_items)(s, MAMBA_NAME, d.B * d.windows * d.K, backward_layout(&rows, &d, (float *)s->dev->workspace),
                           rows_backward, &c);
}
