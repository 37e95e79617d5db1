/*
 * Kimi Delta Attention's rule, forward, and what backward shares with it (kda.h).
 *
 * g[i] is a row of logarithms, one for each column of keys. left[i][j], a row too, = exp(the sum of g behind row j up
 * to i), and from[i] = exp(that from the run's first row on). Of a run of n rows, with the state S before it:
 *
 *   error[i] = v[i] - S^T (k[i] from[i]) - sum over j < i of (k[i] left[i][j] k[j]) write[j]
 *   write[i] = beta[i] error[i]
 *   o[i]     = S^T (q[i] from[i]) + sum over j <= i of (q[i] left[i][j] k[j]) write[j]
 *   S        = from[n - 1] S + sum over j of (k[j] left[n - 1][j]) write[j]^T
 *
 * left[i][j] does not split into a factor of i and one of j that are both finite. So rows stand in blocks of SCAN_ROWS:
 * left[i][j] = since[i] until[j], by what is left at row i since the block began, and of row j until then. Each is the
 * exponential of a sum of g, which is at most 0. Pairs inside a block are made one by one.
 *
 * Mapping  an item = a head of a sample; threads take items in any order.
 * Work     3 n D E + n n E multiplications and n n D / 8 + 9 n D exponentials a run.
 * Traffic  q, k, g, v, o once; the state stays in L2.
 * Source   Kimi Linear (2025), sections 3 and 4.
 */
#include "cpu/kda.h"

void CPU(kda_room)(const Scan *d, KdaHead *h, float **at)
{
    const int64_t square = DELTA_WINDOW * DELTA_WINDOW, keys = DELTA_WINDOW * d->key_width;
    const int64_t values = DELTA_WINDOW * d->width;
    float **const of_keys[] = { &h->q, &h->k, &h->g, &h->from, &h->last, &h->until, &h->rows, &h->turned };
    for (size_t i = 0; i < sizeof of_keys / sizeof *of_keys; i++) *of_keys[i] = *at, *at += keys;
    h->since = *at, *at += SCAN_ROWS * d->key_width;
    h->sums = *at, *at += SCAN_ROWS * d->key_width;
    h->low = *at, *at += square;
    h->read = *at, *at += square;
    h->error = *at, *at += values;
    h->write = *at, *at += values;
}

/* e[i] = exp(the sum of g from the first of n rows to i). */
static void fade_since(const Scan *d, float *e, const float *g, int64_t n)
{
    const int64_t width = d->key_width;
    for (int64_t c = 0; c < width; c += VEC) {
        vf sum = vf_zero();
        for (int64_t i = 0; i < n; i++) {
            sum = vf_add(sum, vf_load(g + i * width + c));
            vf_store(e + i * width + c, vf_exp(sum));
        }
    }
}

/* e[j] = exp(the sum of g behind row j up to the last of n rows). */
static void fade_until(const Scan *d, float *e, const float *g, int64_t n)
{
    const int64_t width = d->key_width;
    for (int64_t c = 0; c < width; c += VEC) {
        vf sum = vf_zero();
        for (int64_t j = n - 1; j >= 0; j--) {
            vf_store(e + j * width + c, vf_exp(sum));
            sum = vf_add(sum, vf_load(g + j * width + c));
        }
    }
}

void CPU(kda_block)(const Scan *d, KdaHead *h, int64_t s, int64_t m)
{
    fade_since(d, h->since, h->g + s * d->key_width, m);
    fade_until(d, h->until, h->g, s);
}

/* ---- what rows give to each other ---- */

/* The block's rows with those of the blocks before it. */
static void pairs_before(const Scan *d, KdaHead *h, int64_t s, int64_t m)
{
    const int64_t width = d->key_width, at = s * DELTA_WINDOW;
    kda_times(d, h->rows, h->k, h->until, s);
    CPU(transpose)(h->turned, DELTA_WINDOW, h->rows, width, s, d->D);
    kda_times(d, h->rows, h->q + s * width, h->since, m);
    scan_product(h->read + at, DELTA_WINDOW, h->rows, width, h->turned, DELTA_WINDOW, m, s, d->D, false);
    kda_times(d, h->rows, h->k + s * width, h->since, m);
    scan_product(h->low + at, DELTA_WINDOW, h->rows, width, h->turned, DELTA_WINDOW, m, s, d->D, false);
    for (int64_t i = 0; i < m; i++) scan_scale(h->low + at + i * DELTA_WINDOW, h->low + at + i * DELTA_WINDOW, -1, s);
}

/* Row i with an earlier row j of its block, whose sum of g grows by that of row i. */
static void pair_inside(const Scan *d, KdaHead *h, int64_t i, int64_t j, float *sum)
{
    const float *q = h->q + i * d->key_width, *k = h->k + i * d->key_width, *g = h->g + i * d->key_width;
    const float *key = h->k + j * d->key_width;
    vf low = vf_zero(), read = vf_zero();
    for (int64_t c = 0; c < d->key_width; c += VEC) {
        const vf s = vf_add(vf_load(sum + c), vf_load(g + c)), x = vf_mul(vf_load(key + c), vf_exp(s));
        vf_store(sum + c, s);
        low = vf_fma(vf_load(k + c), x, low);
        read = vf_fma(vf_load(q + c), x, read);
    }
    h->low[i * DELTA_WINDOW + j] = -vf_sum(low);
    h->read[i * DELTA_WINDOW + j] = vf_sum(read);
}

static void pairs_inside(const Scan *d, KdaHead *h, int64_t s, int64_t m)
{
    const int64_t width = d->key_width;
    memset(h->sums, 0, (size_t)(SCAN_ROWS * width) * sizeof(float));
    for (int64_t i = s; i < s + m; i++) {
        float *low = h->low + i * DELTA_WINDOW, *read = h->read + i * DELTA_WINDOW;
        for (int64_t j = i; j < s + SCAN_ROWS; j++) low[j] = read[j] = 0;
        for (int64_t j = s; j < i; j++) pair_inside(d, h, i, j, h->sums + (j - s) * width);
        read[i] = scan_dot(h->q + i * width, h->k + i * width, width);
    }
}

void CPU(kda_head)(const Scan *d, KdaHead *h, const ScanRun *r, int64_t head, const float *state)
{
    const int64_t n = r->n, width = d->width;
    CPU(scan_load)(h->q, d->key_width, d->q, r, head);
    CPU(scan_load)(h->k, d->key_width, d->k, r, head);
    CPU(scan_load)(h->g, d->key_width, d->g, r, head);
    CPU(scan_load)(h->error, width, d->v, r, head);
    scan_load_column(d, h->beta, d->step, r, head);
    fade_since(d, h->from, h->g, n);
    fade_until(d, h->last, h->g, n);
    for (int64_t s = 0; s < n; s += SCAN_ROWS) {
        const int64_t m = n - s < SCAN_ROWS ? n - s : SCAN_ROWS;
        CPU(kda_block)(d, h, s, m);
        if (s) pairs_before(d, h, s, m);
        pairs_inside(d, h, s, m);
    }
    if (!r->begins) {
        kda_times(d, h->rows, h->k, h->from, n);
        scan_product(h->write, width, h->rows, d->key_width, state, width, n, width, d->D, false);
        for (int64_t i = 0; i < n; i++) scan_add(h->error + i * width, h->write + i * width, -1, width);
    }
    CPU(delta_solve)(d, h->error, h->write, h->low, h->beta, n);
}

/* ---- forward ---- */

typedef struct {
    Scan d;
    const kda_fwd_args *a;
} Call;

/* A thread's scratch. */
typedef struct {
    KdaHead head;
    float *o, *state;
} Forward;

/* Lays the scratch out from `base` on; returns its bytes. */
static int64_t forward_layout(Forward *f, const Scan *d, float *base)
{
    float *at = base;
    CPU(kda_room)(d, &f->head, &at);
    f->o = at, at += DELTA_WINDOW * d->width;
    f->state = at, at += d->key_width * d->width;
    return (at - base) * (int64_t)sizeof(float);
}

static void forward_run(const Call *c, Forward *f, const ScanRun *r, int64_t head)
{
    const Scan *d = &c->d;
    const int64_t n = r->n, width = d->width, keys = d->key_width;
    KdaHead *h = &f->head;
    CPU(kda_head)(d, h, r, head, f->state);
    if (!r->begins) {
        kda_times(d, h->rows, h->q, h->from, n);
        scan_product(f->o, width, h->rows, keys, f->state, width, n, width, d->D, false);
    }
    CPU(scan_earlier)(d, f->o, h->read, h->write, width, n, !r->begins);
    CPU(scan_store)(c->a->o, f->o, width, r, head);
    if (!r->last) return;
    if (!r->begins) kda_fade(d, f->state, h->from + (n - 1) * keys);
    kda_times(d, h->rows, h->k, h->last, n);
    scan_outer(d, f->state, h->rows, h->write, n, !r->begins);
}

static void forward_item(const void *call, float *room, int64_t item)
{
    const Call *c = call;
    const Scan *d = &c->d;
    const int64_t b = item / d->V, head = item % d->V;
    ScanRun runs[SCAN_MOST];
    Forward f;
    forward_layout(&f, d, room);
    CPU(scan_load_state)(d, f.state, c->a->before, item * d->D);
    for (int64_t w = 0; w < d->windows; w++) {
        const int count = CPU(scan_runs)(d, b, w, runs);
        if (runs[0].begins) memset(f.state, 0, (size_t)(d->D * d->width) * sizeof(float));
        if (c->a->states.data) CPU(scan_store_state)(d, c->a->states, f.state, scan_state_row(d, b, w, head));
        for (int i = 0; i < count; i++) forward_run(c, &f, &runs[i], head);
    }
    if (c->a->after.data) CPU(scan_store_state)(d, c->a->after, f.state, item * d->D);
}

Err CPU(kda_fwd)(Stream *s, const kda_fwd_args *a)
{
    Call c = { .d = KDA_OF(a), .a = a };
    Forward unused;
    TRY(CPU(scan_open)(&c.d, KDA_NAME, a->states));
    return CPU(scan_items)(s, KDA_NAME, c.d.B * c.d.V, forward_layout(&unused, &c.d, (float *)s->dev->workspace),
                           forward_item, &c);
}
