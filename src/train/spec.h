/* From configuration to numbers: what the step engine, planning and generation need of a Config. */
#ifndef MEGATRAIN_TRAIN_SPEC_H
#define MEGATRAIN_TRAIN_SPEC_H

#include "base/config.h"
#include "engine/trainer.h"

/* vocab: the tokenizer's, unless model.vocab says otherwise. ERR_CONFIG when the two do not fit. */
Err train_spec(const Config *cfg, int64_t vocab, TrainSpec *out);

/* Learning rates by update. */
LrSchedule lr_spec(const Config *cfg);

/* The ranks' grid. ERR_CONFIG, with the rule and the nearest that fits, where the pipeline asked for is
 * none: a schedule that is not in the table or not for this shape, a layout that is not the model's. */
Err grid_spec(const Config *cfg, Grid *out);

#endif
