/* What a step that was done comes to, in numbers. */
#ifndef MEGATRAIN_ENGINE_STEP_REPORT_H
#define MEGATRAIN_ENGINE_STEP_REPORT_H

#include "engine/trainer.h"

/* v: as the step left them. Reads sums of losses that the step left on the device; out->redone and rescaled are 0. */
Err step_report(Trainer *t, const StepValues *v, StepReport *out);

#endif
