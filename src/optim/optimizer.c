/* See optimizer.h. */
#include "optim/optimizer.h"

static bool takes_all(const ParamSpec *p, const MuonSpec *muon)
{
    (void)p;
    (void)muon;
    return true;
}

static bool takes_matrices(const ParamSpec *p, const MuonSpec *muon)
{
    if (p->ndim != 2 || p->group == PARAM_STATE || p->flags & PARAM_TABLE) return false;
    if (p->flags & PARAM_ROUTER && !muon->router) return false;
    return p->shape[0] / p->stack > 1 && p->shape[1] > 1;
}

const Optimizer optimizers[OPTIMIZERS] = {
    [OPTIMIZER_ADAMW] = { 2, false, takes_all },
    [OPTIMIZER_MUON] = { 1, true, takes_matrices },
    [OPTIMIZER_LION] = { 1, false, takes_all },
    [OPTIMIZER_SGD] = { 1, false, takes_all },
};

void optimizer_assign(ParamRegistry *r, OptimizerKind kind, const MuonSpec *muon)
{
    for (int i = 0; i < r->count; i++) {
        Param *p = &r->items[i];
        p->optimizer = optimizers[kind].takes(&p->spec, muon) ? (int)kind : OPTIMIZER_ADAMW;
        p->moments = optimizers[p->optimizer].moments;
        p->as_matrix = optimizers[p->optimizer].as_matrix;
    }
}
