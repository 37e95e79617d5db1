/*
 * Shared parts of the forward and the backward pass of the gated delta rule (ops.def): windows, runs, and what the
 * rows of a run give to each other. What is computed, in which order, stands in docs/determinism.md.
 *
 * A window is cut into runs, each of one document. Matrices of a run lie in scratch: rows of keys `key_width` and of
 * values `width` apart, which are D and E rounded up to whole vectors; squares of rows by rows DELTA_WINDOW apart.
 */
#ifndef MEGATRAIN_CPU_DELTA_H
#define MEGATRAIN_CPU_DELTA_H

#include <string.h>

#include "cpu/gemm.h"
#include "cpu/isa.h"
#include "cpu/rows.h"

/* One call. */
typedef struct {
    Tensor q, k, v, g, beta, doc;
    int64_t first;
    int64_t B, T, K, V, D, E;
    int64_t group; /* value heads of a key head */
    int64_t windows, key_width, width;
} Delta;

#define DELTA_OF(a)                                                                                                 \
    {                                                                                                               \
        .q = (a)->q, .k = (a)->k, .v = (a)->v, .g = (a)->g, .beta = (a)->beta, .doc = (a)->doc, .first = (a)->first \
    }

/* Checks what the shape check cannot and fills the rest. ERR_SHAPE. `states` may be absent. */
Err CPU(delta_open)(Delta *d, Tensor states);

/* Rows from `row` on, one document's, of sample b. */
typedef struct {
    int64_t b, row, n;
    bool begins; /* its state begins with 0 */
    bool last;   /* of its window: its state is handed on */
} DeltaRun;

/* The runs of a window in ascending order; returns how many. */
int CPU(delta_runs)(const Delta *d, int64_t b, int64_t window, DeltaRun runs[DELTA_WINDOW]);

/* What the heads of a group share: rows of q and k, k across, and their products, rows down and keys across. */
typedef struct {
    float *q, *k, *across, *kk, *qk;
} DeltaKeys;

void CPU(delta_keys)(const Delta *d, DeltaKeys *keys, const DeltaRun *r, int64_t key_head);

/* A value head of a run. */
typedef struct {
    float *decay; /* [i][j] what is left of row j's at row i >= j; 0 above */
    float *from;  /* [i] what is left of the state before the run */
    float *low;   /* [i][j] -kk * decay for j < i, else 0 */
    float *read;  /* [i][j] qk * decay */
    float *error; /* [i] v - what the state gives for k */
    float *write; /* [i] beta times that */
    float *x;     /* a product with the state */
    float beta[DELTA_WINDOW], g[DELTA_WINDOW];
} DeltaHead;

/* state: that before the run, [D][width]; not read if the run begins. */
void CPU(delta_head)(const Delta *d, DeltaHead *h, const DeltaKeys *keys, const DeltaRun *r, int64_t head,
                     const float *state);

/* Rows of one head of x [B T H C] to and from scratch with rows `width` apart, with 0 behind the C columns. */
void CPU(delta_load)(float *to, int64_t width, Tensor x, const DeltaRun *r, int64_t head);
void CPU(delta_store)(Tensor x, const float *from, int64_t width, const DeltaRun *r, int64_t head);

/* A state of [P D E] or [B V D E], of which `row` is the first of D rows, to and from [D][width]. */
void CPU(delta_load_state)(const Delta *d, float *to, Tensor x, int64_t row);
void CPU(delta_store_state)(const Delta *d, Tensor x, const float *from, int64_t row);

/* Row of states [P D E] in which a window's state begins. */
static inline int64_t delta_state_row(const Delta *d, int64_t b, int64_t window, int64_t head)
{
    return ((b * d->windows + window) * d->V + head) * d->D;
}

/* How many threads compute the call, in which each needs `bytes` of workspace. ERR_CONFIG: it has not so many. */
Err CPU(delta_threads)(const Device *dev, const Delta *d, int64_t bytes, int *out);

static inline int64_t delta_lanes(int64_t n) { return (n + VEC - 1) / VEC * VEC; }

/* y = factor * x of a row of whole vectors; y may be x. */
static inline void delta_scale(float *y, const float *x, float factor, int64_t width)
{
    for (int64_t i = 0; i < width; i += VEC) vf_store(y + i, vf_mul(vf_set1(factor), vf_load(x + i)));
}

/* y += factor * x */
static inline void delta_add(float *y, const float *x, float factor, int64_t width)
{
    for (int64_t i = 0; i < width; i += VEC) vf_store(y + i, vf_fma(vf_set1(factor), vf_load(x + i), vf_load(y + i)));
}

/* Sum of products of n elements, a multiple of VEC: 16 lanes and their tree. */
static inline float delta_dot(const float *x, const float *y, int64_t n)
{
    vf sum = vf_zero();
    for (int64_t i = 0; i < n; i += VEC) sum = vf_fma(vf_load(x + i), vf_load(y + i), sum);
    return vf_sum(sum);
}

enum { DELTA_ROWS = 16 }; /* rows of a run whose products are made together, so that they skip what is 0 */

#endif
