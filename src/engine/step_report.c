/* See step_report.h. */
#include "engine/step_report.h"

#include <math.h>

/* Sums leave out what is not finite: of a bad step they are the loss and norm of something else. */
static double mean_loss(int64_t fixed, int64_t counted, bool bad)
{
    return bad || counted == 0 ? NAN : (double)fixed * exp2(-LOSS_FIXED_BITS) / (double)counted;
}

StepReport step_report(const Trainer *t)
{
    const StepValues *v = t->flight.values;
    StepReport r = { .step = v->step,
                     .loss = mean_loss(v->loss_fixed, v->counted, v->loss_nonfinite),
                     .counted = v->counted,
                     .grad_norm = v->skip ? NAN : v->grad_norm,
                     .lr = v->lr,
                     .samples = t->flight.batch,
                     .skipped = v->skip };
    for (int i = 0; i < t->spec.model.mtp.count; i++) {
        const int64_t *s = t->flight.sums + 3 * (i + 1);
        r.mtp_loss[i] = mean_loss(s[0], s[1], s[2] != 0);
    }
    return r;
}
