/*
 * Shared parts of the forward and the backward pass of Kimi Delta Attention's rule (ops.def, kda_fwd): the gated delta
 * rule whose decay is one for each column of keys. Windows, runs and their scratch: scan.h. The order of sums stands in
 * docs/determinism.md.
 */
#ifndef MEGATRAIN_CPU_KDA_H
#define MEGATRAIN_CPU_KDA_H

#include "cpu/delta.h"

#define KDA_NAME "Kimi's delta rule"
#define KDA_OF(a)                                                                                                    \
    {                                                                                                                \
        .q = (a)->q, .k = (a)->k, .v = (a)->v, .g = (a)->g, .step = (a)->beta, .doc = (a)->doc, .first = (a)->first, \
        .window = DELTA_WINDOW                                                                                       \
    }

/* A head of a run. Rows of keys are [n][key_width], of values [n][width]; squares as scan.h says. */
typedef struct {
    float *q, *k, *g;
    float *from;  /* [i] what is left at row i of what stood before the run */
    float *last;  /* [j] what is left of row j behind the last one */
    float *since; /* rows of one block: what is left at row i of what stood before the block */
    float *until; /* [j] what is left of row j where a block begins */
    float *rows;  /* a product of q or k with one of these */
    float *turned;
    float *sums;  /* of one block, g from behind a row on */
    float *low;   /* [i][j] -(k[i] k[j]), each column by its decay, for j < i, else 0 */
    float *read;  /* [i][j] the same of q[i] and k[j] for j <= i, without the sign */
    float *error; /* [i] v - what the state gives for k */
    float *write; /* [i] beta times that */
    float beta[DELTA_WINDOW];
} KdaHead;

/* Takes the head's scratch from *at on. */
void CPU(kda_room)(const Scan *d, KdaHead *h, float **at);

/* Pairs of the run's rows, and what the rows write. state: that before the run, [D][width]; not read if the run
 * begins. */
void CPU(kda_head)(const Scan *d, KdaHead *h, const ScanRun *r, int64_t head, const float *state);

/* `since` and `until` of the block that begins with row s, of m rows. */
void CPU(kda_block)(const Scan *d, KdaHead *h, int64_t s, int64_t m);

/* y[i] = x[i] e[i] of n rows of keys. */
static inline void kda_times(const Scan *d, float *y, const float *x, const float *e, int64_t n)
{
    for (int64_t i = 0; i < n * d->key_width; i += VEC) vf_store(y + i, vf_mul(vf_load(x + i), vf_load(e + i)));
}

/* Rows of the state, each times its column's factor. */
static inline void kda_fade(const Scan *d, float *state, const float *left)
{
    for (int64_t i = 0; i < d->D; i++) scan_scale(state + i * d->width, state + i * d->width, left[i], d->width);
}

#endif
