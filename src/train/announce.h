/* Lines of the log about what a run reads: in an evaluation, and where its steps begin to read otherwise. */
#ifndef MEGATRAIN_TRAIN_ANNOUNCE_H
#define MEGATRAIN_TRAIN_ANNOUNCE_H

#include "train/run.h"

/* Says how many samples an evaluation reads, and warns if they are more than training reads between two evaluations. */
void announce_validation(const Run *r);

/* Says how many questions an evaluation asks, and warns of choices that were cut to fit. */
void announce_tasks(const Tasks *t);

/* Says before a step its global batch, if that of the step before had another size, and its data, if a stage of them
 * begins. */
void announce_step(const Run *r);

#endif
