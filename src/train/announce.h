/* What a run says in the log about what it reads: in an evaluation, and where its steps begin to read otherwise. */
#ifndef MEGATRAIN_TRAIN_ANNOUNCE_H
#define MEGATRAIN_TRAIN_ANNOUNCE_H

#include "train/run.h"

/* How many samples an evaluation reads; a warning if they are more than training reads between two. */
void announce_validation(const Run *r);

/* Before a step: its global batch, if that of the step before had another size; its data, if a stage of them begins. */
void announce_step(const Run *r);

#endif
