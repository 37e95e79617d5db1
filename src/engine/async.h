/*
 * Schedules that update while the pipeline runs (pipeline/schedule.h, Versions): PipeDream with and without vertical
 * sync, PipeDream-2BW.
 *
 * A step is one run of the list: it begins with the newest weights everywhere, makes several updates on its way, and
 * drains, so that metrics, evaluations and checkpoints see one version of every weight. Within a step, with updates
 * counted from 0 and a gradient g of one update:
 *
 *   pipedream            W_s(k+1) = W_s(k) - lr U(g_s at version max(0, k - (p-1-s)) of each stage s), k micro-batches
 *   pipedream-vertical   the same with max(0, k - (p-1)) on all stages
 *   2bw                  W(b+1) = W(b) - lr U(g at W(max(0, b-1))), b batches of a quarter of the step
 *
 * Stages update by themselves: no norm over all of them, so no clipping; an update whose gradients do not fit their
 * fixed point is left out on its stage and reported, not done again. What needs all stages is refused when the run
 * opens: tied embeddings over several stages, data.mask_eod, loss scaling.
 * Source: Narayanan et al. 2019 (PipeDream), 2021 (PipeDream-2BW).
 */
#ifndef MEGATRAIN_ENGINE_ASYNC_H
#define MEGATRAIN_ENGINE_ASYNC_H

#include "engine/trainer.h"

static inline bool trainer_is_async(const Trainer *t) { return t->parts.step.versions != VERSIONS_STEP; }

/* ERR_CONFIG for what such a schedule cannot do on so many pipeline ranks. */
Err async_check(const TrainSpec *s, int ranks);
/* Takes older weights and the outcomes of updates in state memory. */
Err async_open(Trainer *t);
/* The hook `update` of the executor. */
Err async_update(Trainer *t, int replica);
/* trainer_step. */
Err async_step(Trainer *t, StepReport *report);

#endif
