/* How evenly a mixture's router used its experts in the last step, and what is done where a rank's experts have no room
 * for the rows that came (docs/moe.md). */
#ifndef MEGATRAIN_ENGINE_EXPERT_LOAD_H
#define MEGATRAIN_ENGINE_EXPERT_LOAD_H

#include "base/layer_set.h"
#include "engine/trainer.h"

/* Loads by block of the model (model_blocks); 0 for blocks that are no mixtures. */
typedef struct {
    /* rows of the busiest expert over the mean of all: 1 is even, experts / topk the worst */
    double load[LAYERS_MAX];
    int64_t dropped[LAYERS_MAX]; /* choices that no expert took */
    /* Losses that balance routers (docs/moe.md), before their coefficient: the mean over the step's tokens and over the
     * mixtures, NaN where it is not finite. */
    double aux_loss, z_loss;
} ExpertLoads;

/* Once after each report of a step, which it belongs to; collective over all ranks. Of schedules that update several
 * times a step loads are those since the last update. The same numbers on all ranks and, with reproducible = layout,
 * from all layouts. */
Err expert_load_read(Trainer *t, ExpertLoads *out);

/* Before forward and backward of a step: nothing is counted yet. */
Err expert_load_begin(Trainer *t);
/* Takes what expert_load_read passes between ranks. */
Err expert_load_open(Trainer *t);

/* The rows that experts got, as the trainer reads them: their bytes in t->flight, the copy there behind a step that is
 * enqueued, and what they say when it is done, of a step of `batch` samples. */
int64_t expert_load_bytes(const Trainer *t);
Err expert_load_fetch(Trainer *t);
void expert_load_take(Trainer *t, int64_t batch);

/* The mixtures of a run, and how they are cut, with units of so many samples: a micro-batch, or what its schedule makes
 * of one. */
MoeCut expert_load_cut(const TrainSpec *spec, Grid grid, int64_t samples);
/* ERR_CONFIG if steps are to be done again in pieces of which none is small enough. */
Err expert_load_check_pieces(const TrainSpec *spec, Grid grid, int64_t samples);

/* ERR_CONFIG where balance counts the batch so far and some rank's micro-batches do not come in data order, or others
 * are computed at the same time. After t->parts is open. */
Err expert_load_check_order(const Trainer *t);
/* Takes, for a stage, what is counted so, and the sums of losses that balance. */
Err expert_load_open_stage(Trainer *t, ExecutorStage *s);

/* ERR_MEMORY: in the step to come, or an evaluation, experts got more rows than there is room for. */
Err expert_load_over_limit(const Trainer *t, bool step);
/* Asks, after the forward passes of an evaluation, all ranks whether there was; true without moe.slack. */
Err expert_load_within_limit(Trainer *t, bool *within);
/* Are there steps that are done again in pieces? */
bool expert_load_redo(const Trainer *t);
/* The step to come, in pieces or not: gradients of experts then come in other numbers. */
void expert_load_use_pieces(Trainer *t, bool pieces);

#endif
