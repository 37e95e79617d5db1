/*
 * Shared parts of the forward and the backward pass of the gated delta rule (ops.def): what a value head makes of the
 * rows of a run. Windows, runs and their scratch: scan.h.
 */
#ifndef MEGATRAIN_CPU_DELTA_H
#define MEGATRAIN_CPU_DELTA_H

#include "cpu/scan.h"

#define DELTA_NAME "the delta rule"
#define DELTA_OF(a)                                                                                                  \
    {                                                                                                                \
        .q = (a)->q, .k = (a)->k, .v = (a)->v, .g = (a)->g, .step = (a)->beta, .doc = (a)->doc, .first = (a)->first, \
        .window = DELTA_WINDOW                                                                                       \
    }

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
void CPU(delta_head)(const Scan *d, DeltaHead *h, const ScanKeys *keys, const ScanRun *r, int64_t head,
                     const float *state);

/*
 * Writes of a run's rows, where each reads what earlier rows of the run wrote: rows of values, and low [i][j] of
 * j < i.
 *
 * delta_solve       error[i] += the sum over j < i of low[i][j] write[j], and write[i] = beta[i] error[i]: i ascending.
 * delta_solve_back  dwrite[j] += the sum over i > j, descending, of low[i][j] derror[i], and derror[j] = beta[j]
 *                   dwrite[j]: j descending.
 */
void CPU(delta_solve)(const Scan *d, float *error, float *write, const float *low, const float *beta, int64_t n);
void CPU(delta_solve_back)(const Scan *d, float *dwrite, float *derror, const float *low, const float *beta, int64_t n);

#endif
