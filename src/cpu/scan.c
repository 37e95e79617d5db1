/* Windows, runs, and what the rows of a run give to each other (scan.h). */
#include "cpu/scan.h"

#include <omp.h>
#include <stdatomic.h>

#include "cpu/team.h"

Err CPU(scan_open)(Scan *d, const char *name, Tensor states)
{
    d->B = d->q.dim[0], d->T = d->q.dim[1], d->K = d->q.dim[2], d->D = d->q.dim[3];
    d->V = d->v.dim[2], d->E = d->v.dim[3];
    d->windows = (d->T + d->window - 1) / d->window;
    d->key_width = scan_lanes(d->D), d->width = scan_lanes(d->E);
    if (d->K < 1 || d->V % d->K)
        return err_set(ERR_SHAPE, "%s: %lld value heads for %lld key heads", name, (long long)d->V, (long long)d->K);
    if (d->first % d->window)
        return err_set(ERR_SHAPE, "%s: rows from position %lld on, which begins no window", name, (long long)d->first);
    if (states.data && states.dim[0] != d->B * d->windows * d->V)
        return err_set(ERR_SHAPE, "%s: %lld states for %lld windows of %lld samples and %lld heads", name,
                       (long long)states.dim[0], (long long)d->windows, (long long)d->B, (long long)d->V);
    d->group = d->V / d->K;
    return ERR_OK;
}

static bool begins_document(const Scan *d, int64_t b, int64_t row)
{
    return d->doc.data && ((const int32_t *)d->doc.data)[b * d->doc.ld + row] == d->first + row;
}

int CPU(scan_runs)(const Scan *d, int64_t b, int64_t window, ScanRun runs[SCAN_MOST])
{
    const int64_t row = window * d->window, end = row + d->window < d->T ? row + d->window : d->T;
    int count = 0;
    for (int64_t t = row; t < end; t++) {
        const bool begins = begins_document(d, b, t);
        if (t == row || begins) runs[count++] = (ScanRun){ .b = b, .row = t, .begins = begins };
        runs[count - 1].n++;
    }
    runs[count - 1].last = true;
    return count;
}

void CPU(scan_load)(float *to, int64_t width, Tensor x, const ScanRun *r, int64_t head)
{
    const int64_t T = x.dim[1], H = x.dim[2], C = x.dim[3];
    for (int64_t i = 0; i < r->n; i++, to += width) {
        const Row from = row_of(x, (r->b * T + r->row + i) * H + head);
        for (int64_t c = 0; c < C; c += VEC) vf_store(to + c, row_get(from, c, C - c));
    }
}

void CPU(scan_store)(Tensor x, const float *from, int64_t width, const ScanRun *r, int64_t head)
{
    const int64_t T = x.dim[1], H = x.dim[2], C = x.dim[3];
    for (int64_t i = 0; i < r->n; i++, from += width) {
        const Row to = row_of(x, (r->b * T + r->row + i) * H + head);
        for (int64_t c = 0; c < C; c += VEC) row_put(to, c, vf_add(vf_load(from + c), vf_zero()), C - c);
    }
}

void CPU(scan_load_state)(const Scan *d, float *to, Tensor x, int64_t row)
{
    for (int64_t i = 0; i < d->D; i++, to += d->width) {
        const float *from = x.data ? row_f32(x, row + i) : NULL;
        for (int64_t c = 0; c < d->E; c += VEC) vf_store(to + c, from ? row_load(from + c, d->E - c) : vf_zero());
    }
}

void CPU(scan_store_state)(const Scan *d, Tensor x, const float *from, int64_t row)
{
    for (int64_t i = 0; i < d->D; i++, from += d->width) {
        float *to = row_f32(x, row + i);
        for (int64_t c = 0; c < d->E; c += VEC) row_store(to + c, vf_load(from + c), d->E - c);
    }
}

/* ---- rows of a run ---- */

void CPU(scan_keys)(const Scan *d, ScanKeys *keys, const ScanRun *r, int64_t key_head)
{
    const int64_t n = r->n, lanes = scan_lanes(n);
    CPU(scan_load)(keys->q, d->key_width, d->q, r, key_head);
    CPU(scan_load)(keys->k, d->key_width, d->k, r, key_head);
    for (int64_t i = n; i < lanes; i++) memset(keys->k + i * d->key_width, 0, (size_t)d->key_width * sizeof(float));
    CPU(transpose)(keys->across, d->window, keys->k, d->key_width, lanes, d->D);
    for (int64_t i = 0; i < n; i += SCAN_ROWS) {
        const int64_t m = n - i < SCAN_ROWS ? n - i : SCAN_ROWS, rows = i * d->key_width, at = i * d->window;
        if (keys->kk)
            scan_product(keys->kk + at, d->window, keys->k + rows, d->key_width, keys->across, d->window, m,
                         i + SCAN_ROWS, d->D, false);
        scan_product(keys->qk + at, d->window, keys->q + rows, d->key_width, keys->across, d->window, m, i + SCAN_ROWS,
                     d->D, false);
    }
}

/* Lanes of row i from column j on that stand before the diagonal, which may itself be one. */
VEC_FN vm lanes_before(int64_t i, int64_t j, int64_t diagonal)
{
    const int64_t count = i - j + diagonal;
    return vm_first_n(count < 0 ? 0 : count < VEC ? count : VEC);
}

static int64_t columns_of(int64_t row) { return row / SCAN_ROWS * SCAN_ROWS + SCAN_ROWS; }

void CPU(scan_from)(float *from, const float *g, int64_t n)
{
    float whole[SCAN_MOST] = { 0 };
    for (int64_t i = 0; i < n; i++) whole[i] = (i ? whole[i - 1] : 0.0f) + g[i];
    for (int64_t i = 0; i < n; i += VEC) vf_store(from + i, vf_exp(vf_load(whole + i)));
}

void CPU(scan_decays)(const Scan *d, float *decay, float *from, const float *g, int64_t n)
{
    float sum[SCAN_MOST] = { 0 };
    for (int64_t i = 0; i < n; i++, decay += d->window)
        for (int64_t j = 0; j < columns_of(i); j += VEC) {
            const vf s = vf_add(vf_load(sum + j), vf_select(lanes_before(i, j, 0), vf_set1(g[i]), vf_zero()));
            vf_store(sum + j, s);
            vf_store(decay + j, vf_select(lanes_before(i, j, 1), vf_exp(s), vf_zero()));
        }
    CPU(scan_from)(from, g, n);
}

float CPU(scan_left)(float *left, const float *g, int64_t n)
{
    float sum[SCAN_MOST] = { 0 }, whole[VEC] = { 0 };
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < columns_of(i); j += VEC)
            vf_store(sum + j, vf_add(vf_load(sum + j), vf_select(lanes_before(i, j, 0), vf_set1(g[i]), vf_zero())));
        whole[0] += g[i];
    }
    for (int64_t j = 0; j < n; j += VEC) vf_store(left + j, vf_exp(vf_load(sum + j)));
    vf_store(whole, vf_exp(vf_load(whole)));
    return whole[0];
}

void CPU(scan_read)(const Scan *d, float *read, const float *products, const float *decay, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < columns_of(i); j += VEC) {
            const int64_t at = i * d->window + j;
            const vf x = vf_mul(vf_load(products + at), vf_load(decay + at));
            vf_store(read + at, vf_select(lanes_before(i, j, 1), x, vf_zero()));
        }
}

void CPU(scan_pairs)(const Scan *d, float *c, const float *x, const float *across, int64_t n)
{
    for (int64_t i = 0; i < n; i += SCAN_ROWS)
        scan_product(c + i * d->window, d->window, x + i * d->width, d->width, across, d->window,
                     n - i < SCAN_ROWS ? n - i : SCAN_ROWS, i + SCAN_ROWS, d->E, false);
}

void CPU(scan_earlier)(const Scan *d, float *c, const float *square, const float *b, int64_t width, int64_t n, bool add)
{
    for (int64_t i = 0; i < n; i += SCAN_ROWS) {
        const int64_t end = i + SCAN_ROWS < n ? i + SCAN_ROWS : n;
        scan_product(c + i * width, width, square + i * d->window, d->window, b, width, end - i, width, end, add);
    }
}

void CPU(scan_later)(const Scan *d, float *c, const float *square, const float *b, int64_t width, int64_t n)
{
    for (int64_t j = 0; j < n; j += SCAN_ROWS) {
        const TileGemm g = { .m = n - j < SCAN_ROWS ? n - j : SCAN_ROWS,
                             .n = width,
                             .k = n - j,
                             .a = square + j * d->window + j,
                             .a_row = 1,
                             .a_k = d->window,
                             .b = b + j * width,
                             .ldb = width,
                             .c = c + j * width,
                             .ldc = width,
                             .beta = true };
        CPU(tile_gemm)(&g);
    }
}

void CPU(scan_turned)(const Scan *d, float *c, float *turned, const float *x, const float *state, int64_t n)
{
    CPU(transpose)(turned, d->key_width, state, d->width, d->D, d->E);
    scan_product(c, d->key_width, x, d->width, turned, d->key_width, n, d->key_width, d->E, false);
}

void CPU(scan_gates)(const Scan *d, float *dgate, const float *both, const float *dfrom, int64_t n)
{
    float sum[SCAN_MOST] = { 0 }, whole = 0;
    for (int64_t m = n - 1; m >= 0; m--) {
        vf lane = vf_zero();
        for (int64_t j = 0; j < m; j += VEC) {
            const vf s = vf_add(vf_load(sum + j), vf_load(both + m * d->window + j));
            vf_store(sum + j, s);
            lane = vf_add(lane, vf_select(lanes_before(m, j, 0), s, vf_zero()));
        }
        whole += dfrom[m];
        dgate[m] = vf_sum(lane) + whole;
    }
}

/* ---- threads ---- */

Err CPU(scan_items)(Stream *s, const char *name, int64_t items, int64_t bytes, ScanItemFn *fn, const void *call)
{
    const Device *dev = s->dev;
    int64_t threads = dev->workspace_bytes / bytes;
    atomic_llong next = 0;
    if (threads < 1)
        return err_set(ERR_CONFIG, "%s needs %lld bytes of workspace, there are %lld", name, (long long)bytes,
                       (long long)dev->workspace_bytes);
    if (threads > dev->threads) threads = dev->threads;
    if (threads > items) threads = items;
#pragma omp parallel num_threads(team_of(dev, threads))
    if (omp_get_thread_num() < threads) {
        float *room = (float *)(dev->workspace + omp_get_thread_num() * bytes);
        fp_reset();
        for (int64_t i; (i = atomic_fetch_add(&next, 1)) < items;) fn(call, room, i);
    }
    return ERR_OK;
}
