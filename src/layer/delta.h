/*
 * Parts that mixers with a delta rule share (delta.c, kda.c). The columns of a unit are its queries, its keys, and the
 * values of the heads that read these. Queries and keys are of length 1. The norm of o is of single heads; z gates it.
 */
#ifndef MEGATRAIN_LAYER_DELTA_H
#define MEGATRAIN_LAYER_DELTA_H

#include "layer/recurrent.h"

/* The struct of each such kind. shape.state: widths of keys and of values. */
typedef struct {
    Recurrent r;
    Norm norm;
    bool sigmoid;   /* the norm's gate is sigmoid(z), not silu(z) */
    float norm_eps; /* 0: the model's */
} DeltaMixer;

/* Rows of heads in columns as the convolution has them. */
typedef struct {
    Tensor q, k, v;
} DeltaColumns;

DeltaColumns delta_columns(const RecurrentCall *k, Tensor t);

/* Queries and keys of length 1, queries then / sqrt(their width). `to` may be `from`. Back: in place, of d. */
Err delta_unit(const RecurrentCall *k, DeltaColumns from, DeltaColumns to);
Err delta_unit_backward(const RecurrentCall *k, DeltaColumns raw, DeltaColumns d);

/* RecurrentOps.norm and norm_backward. */
Err delta_norm(const RecurrentCall *k, Tensor o, Tensor z, Tensor y);
Err delta_norm_backward(const RecurrentCall *k, Tensor go, Tensor dz);

/* All parameters; m->r is set as recurrent_add says. */
Err delta_mixer_add(DeltaMixer *m, ParamRegistry *reg, const RecurrentParts *p, const char *owner, int layer);

#endif
