/* Report of a step that was done, in numbers. */
#ifndef MEGATRAIN_ENGINE_STEP_REPORT_H
#define MEGATRAIN_ENGINE_STEP_REPORT_H

#include "engine/trainer.h"

/* From what t->flight has of it; redone, rescaled and retried_in_pieces are 0. */
StepReport step_report(const Trainer *t);

#endif
