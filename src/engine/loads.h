/* How evenly a mixture's router used its experts in the last step (docs/moe.md). */
#ifndef MEGATRAIN_ENGINE_LOADS_H
#define MEGATRAIN_ENGINE_LOADS_H

#include "engine/trainer.h"

/*
 * load[layers of the model]: of a mixture the rows of its busiest expert over the mean of all experts, so 1 is even and
 * experts / topk the worst; 0 of other blocks. Thousandths. After trainer_step; collective over all ranks. Of schedules
 * that update several times a step: since the last update.
 */
Err loads_read(Trainer *t, double *load);

#endif
