/*
 * Shared parts of recurrences whose state goes from window to window (ops.def: the gated delta rule, Mamba-2). What is
 * computed, in which order, stands in docs/determinism.md.
 *
 * A window is cut into runs, each of one document. Matrices of a run lie in scratch: rows of keys `key_width` and of
 * values `width` apart, which are D and E rounded up to whole vectors; squares of rows by rows `window` apart.
 */
#ifndef MEGATRAIN_CPU_SCAN_H
#define MEGATRAIN_CPU_SCAN_H

#include <string.h>

#include "cpu/gemm.h"
#include "cpu/isa.h"
#include "cpu/rows.h"

/* Positions of a window, at most; rows of a run whose products are made together, so that they skip what is 0. */
enum { SCAN_MOST = MAMBA_WINDOW, SCAN_ROWS = 16 };

/* One call. q, k [B T K D], v [B T V E]; of each of the V heads g, the logarithm of its decay, and `step`, by which
 * what a row writes is multiplied. */
typedef struct {
    Tensor q, k, v, g, step, doc;
    int64_t first, window;
    int64_t B, T, K, V, D, E;
    int64_t group; /* heads of values for one of keys */
    int64_t windows, key_width, width;
} Scan;

/* Checks what the shape check cannot and fills the rest. ERR_SHAPE, which begins with `name`. `states` may be
 * absent. */
Err CPU(scan_open)(Scan *d, const char *name, Tensor states);

/* Rows from `row` on, one document's, of sample b. */
typedef struct {
    int64_t b, row, n;
    bool begins; /* its state begins with 0 */
    bool last;   /* of its window: its state is handed on */
} ScanRun;

/* The runs of a window in ascending order; returns how many. */
int CPU(scan_runs)(const Scan *d, int64_t b, int64_t window, ScanRun runs[SCAN_MOST]);

/* Rows of one head of x [B T H C] to and from scratch with rows `width` apart, with 0 behind the C columns. */
void CPU(scan_load)(float *to, int64_t width, Tensor x, const ScanRun *r, int64_t head);
void CPU(scan_store)(Tensor x, const float *from, int64_t width, const ScanRun *r, int64_t head);

/* A state of [P D E] or [B V D E], of which `row` is the first of D rows, to and from [D][width]; absent it is 0. */
void CPU(scan_load_state)(const Scan *d, float *to, Tensor x, int64_t row);
void CPU(scan_store_state)(const Scan *d, Tensor x, const float *from, int64_t row);

/* Row of states [P D E] in which a window's state begins. */
static inline int64_t scan_state_row(const Scan *d, int64_t b, int64_t window, int64_t head)
{
    return ((b * d->windows + window) * d->V + head) * d->D;
}

/* Column `head` of x [B T V], in a run's rows. */
static inline void scan_load_column(const Scan *d, float *to, Tensor x, const ScanRun *r, int64_t head)
{
    for (int64_t i = 0; i < r->n; i++) to[i] = row_f32(x, r->b * d->T + r->row + i)[head];
}

static inline void scan_store_column(const Scan *d, Tensor x, const float *from, const ScanRun *r, int64_t head)
{
    for (int64_t i = 0; i < r->n; i++) row_f32(x, r->b * d->T + r->row + i)[head] = from[i];
}

/*
 * What the n rows of a run give to each other; rows of squares are `window` apart.
 *
 * scan_keys   q and k of a head of keys, k across, and the products of q and of k with k; without kk not those.
 * scan_from   from[i] = what is left at row i of the state before the run.
 * scan_decays from, and decay[i][j] = what is left of row j's at row i >= j, 0 above, up to whole blocks of SCAN_ROWS.
 * scan_left   the last row of decay, and the last of `from`, which is returned.
 * scan_read   read = products * decay, 0 above the diagonal.
 * scan_pairs  c[i][j] = x[i] y[j] in the blocks that decays have, of y across; columns above the diagonal are anything.
 * scan_earlier  c[i] = (`add`: c[i] +) the sum over j <= i, ascending, of square[i][j] b[j]; rows are `width` apart.
 * scan_later  c[j] += sum over rows i from j on, ascending, of square[i][j] b[i]; rows of b and c are `width` apart.
 * scan_gates  dgate[m] = the sum over rows i >= m of both[i][j] of j < m and of dfrom[i]: both and dfrom are decays
 *             times their gradients.
 */
typedef struct {
    float *q, *k, *across, *kk, *qk;
} ScanKeys;

void CPU(scan_keys)(const Scan *d, ScanKeys *keys, const ScanRun *r, int64_t key_head);
void CPU(scan_from)(float *from, const float *g, int64_t n);
void CPU(scan_decays)(const Scan *d, float *decay, float *from, const float *g, int64_t n);
float CPU(scan_left)(float *left, const float *g, int64_t n);
void CPU(scan_read)(const Scan *d, float *read, const float *products, const float *decay, int64_t n);
void CPU(scan_pairs)(const Scan *d, float *c, const float *x, const float *across, int64_t n);
void CPU(scan_earlier)(const Scan *d, float *c, const float *square, const float *b, int64_t width, int64_t n,
                       bool add);
void CPU(scan_later)(const Scan *d, float *c, const float *square, const float *b, int64_t width, int64_t n);
void CPU(scan_gates)(const Scan *d, float *dgate, const float *both, const float *dfrom, int64_t n);

/* c = (`add`: c +) a b, dense rows of b and c; rows of a lie a_row apart. */
static inline void scan_product(float *c, int64_t ldc, const float *a, int64_t a_row, const float *b, int64_t ldb,
                                int64_t m, int64_t n, int64_t k, bool add)
{
    const TileGemm g = {
        .m = m, .n = n, .k = k, .a = a, .a_row = a_row, .a_k = 1, .b = b, .ldb = ldb, .c = c, .ldc = ldc, .beta = add
    };
    CPU(tile_gemm)(&g);
}

/* c [n][key_width] = x [n][width] times a state turned, which `turned` then has: [E][key_width]. Columns of `turned`
 * beyond D are 0 before. */
void CPU(scan_turned)(const Scan *d, float *c, float *turned, const float *x, const float *state, int64_t n);

/* c [D][width] = (`add`: c +) the sum over n rows of x[i] y[i]^T. */
static inline void scan_outer(const Scan *d, float *c, const float *x, const float *y, int64_t n, bool add)
{
    const TileGemm g = { .m = d->D,
                         .n = d->width,
                         .k = n,
                         .a = x,
                         .a_row = 1,
                         .a_k = d->key_width,
                         .b = y,
                         .ldb = d->width,
                         .c = c,
                         .ldc = d->width,
                         .beta = add };
    CPU(tile_gemm)(&g);
}

/*
 * Does items 0 to items - 1, each by one thread that has `bytes` of workspace, in any order. ERR_CONFIG: there are not
 * so many.
 */
typedef void ScanItemFn(const void *call, float *room, int64_t item);
Err CPU(scan_items)(Stream *s, const char *name, int64_t items, int64_t bytes, ScanItemFn *fn, const void *call);

static inline int64_t scan_lanes(int64_t n) { return (n + VEC - 1) / VEC * VEC; }

/* y = factor * x of a row of whole vectors; y may be x. */
static inline void scan_scale(float *y, const float *x, float factor, int64_t width)
{
    for (int64_t i = 0; i < width; i += VEC) vf_store(y + i, vf_mul(vf_set1(factor), vf_load(x + i)));
}

/* y += factor * x */
static inline void scan_add(float *y, const float *x, float factor, int64_t width)
{
    for (int64_t i = 0; i < width; i += VEC) vf_store(y + i, vf_fma(vf_set1(factor), vf_load(x + i), vf_load(y + i)));
}

/* Sum of products of n elements, a multiple of VEC: 16 lanes and their tree. */
static inline float scan_dot(const float *x, const float *y, int64_t n)
{
    vf sum = vf_zero();
    for (int64_t i = 0; i < n; i += VEC) sum = vf_fma(vf_load(x + i), vf_load(y + i), sum);
    return vf_sum(sum);
}

#endif
