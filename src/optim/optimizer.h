/*
 * The optimizer of each parameter, and the moments that it keeps: the one that was chosen, as far as it takes them;
 * the rest is AdamW's, with the same learning rate and decay.
 *
 *   adamw   any parameter                       m, v
 *   lion    any parameter                       m
 *   sgd     any parameter                       m
 *   muon    matrices that inputs are multiplied by: no vectors, no tables of tokens or positions, no head, nothing of
 *           a single row or column; routers by choice            m
 *
 * Moments lie elementwise in the ranks' ZeRO shards (param/param.h), whatever the optimizer is.
 */
#ifndef MEGATRAIN_OPTIM_OPTIMIZER_H
#define MEGATRAIN_OPTIM_OPTIMIZER_H

#include "base/choices.h"
#include "param/param.h"

typedef struct {
    float beta1, beta2, eps, weight_decay;
} AdamWSpec;

typedef struct {
    float momentum;
    bool nesterov;
    MuonSet set; /* set of coefficients */
    int steps;   /* steps of Newton-Schulz */
    MuonScale scale;
    MuonSplit split;
    bool router; /* it takes routers */
} MuonSpec;

typedef struct {
    int moments;    /* moments that it keeps: m, or m and v */
    bool as_matrix; /* it updates matrix by matrix, not number by number */
    bool (*takes)(const ParamSpec *p, const MuonSpec *muon);
} Optimizer;

extern const Optimizer optimizers[OPTIMIZERS];

/* To be called when all parameters are registered, and before a store is made. */
void optimizer_assign(ParamRegistry *r, OptimizerKind kind, const MuonSpec *muon);

#endif
