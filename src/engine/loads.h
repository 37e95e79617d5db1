/* How evenly a mixture's router used its experts in the last step (docs/moe.md). */
#ifndef MEGATRAIN_ENGINE_LOADS_H
#define MEGATRAIN_ENGINE_LOADS_H

#include "base/layer_set.h"
#include "engine/trainer.h"

/* Blocks of a model, those of its modules of multi-token prediction behind the others. */
static inline int loads_layers(const ModelSpec *m) { return m->layers + m->mtp.count; }

/* By layer of these; 0 of blocks that are no mixtures. */
typedef struct {
    double load
        [LAYERS_MAX]; /* rows of the busiest expert over the mean of all: 1 is even, experts / topk the worst */
    int64_t dropped[LAYERS_MAX]; /* choices that no expert took */
} ExpertLoads;

/* Loads are in thousandths. After trainer_step; collective over all ranks. Of schedules that update several times a
 * step: since the last update. */
Err loads_read(Trainer *t, ExpertLoads *out);

/* ERR_MEMORY: in the step to come, or an evaluation, experts got more rows than there is room for. */
Err loads_no_room(const Trainer *t, bool step);
/* Asks, after the forward passes of an evaluation, all ranks for that; ERR_OK without moe.slack. */
Err loads_check_room(Trainer *t);

#endif
