/* Shared by trainer.c and plan.c: opening a trainer on any kind of device. */
#ifndef MEGATRAIN_ENGINE_TRAINER_OPEN_H
#define MEGATRAIN_ENGINE_TRAINER_OPEN_H

#include "engine/trainer.h"

/* As trainer_open, on `kind` whatever spec->device says; after an error the trainer is still to be closed. */
Err trainer_open_on(Trainer *t, DeviceKind kind, const TrainSpec *spec, World *world,
                    const MemoryPlan *limits);

#endif
