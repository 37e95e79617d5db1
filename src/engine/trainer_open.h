/*
 * Opening and closing a trainer (trainer.h), on any kind of device, and what is needed of that while it runs. Shared by
 * trainer_open.c, trainer.c and plan.c.
 */
#ifndef MEGATRAIN_ENGINE_TRAINER_OPEN_H
#define MEGATRAIN_ENGINE_TRAINER_OPEN_H

#include "engine/trainer.h"

/* Like trainer_open, on `kind` whatever spec->device says; after an error the trainer is still to be closed. */
Err trainer_open_on(Trainer *t, DeviceKind kind, const TrainSpec *spec, World *world, const MemoryPlan *limits);

/* The first part of trainer_check: where there is no pipeline there is no grid either. */
Err trainer_check_shape(const TrainSpec *spec, Grid grid);

/* Gradients' shifts: at first, and what they are lowered by when a leaf does not fit. */
enum { FIRST_SHIFT = 40, SHIFT_STEP = 12 };

/* The batch of a unit, without the tokens of modules that predict further on, which one stage alone has. */
BatchSpec trainer_batch_spec(const Trainer *t);

/* The samples of a step or an evaluation. The lists are of the largest step: a smaller one leaves out their last
 * units. */
void trainer_take_batch(Trainer *t, int64_t first, int64_t samples);

/* Room for the scores of an evaluation's rows. */
Err trainer_open_rows(Trainer *t);
/* ExecutorHooks.rows, of a Trainer. */
Err trainer_hook_rows(void *trainer, const ExecutorSlot *slot);

#endif
