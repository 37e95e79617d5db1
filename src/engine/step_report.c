/* See step_report.h. */
#include "engine/step_report.h"

#include <math.h>

/* Sums leave out what is not finite: of a bad step they are the loss and norm of something else. */
static double mean_loss(int64_t fixed, int64_t counted, bool bad)
{
    return bad || counted == 0 ? NAN : (double)fixed * exp2(-LOSS_FIXED_BITS) / (double)counted;
}

/* Losses of the modules of multi-token prediction. */
static Err read_modules(Trainer *t, StepReport *out)
{
    const int count = t->spec.model.mtp.count;
    int64_t sums[3 * (1 + MTP_MOST)] = { 0 };
    if (!count) return ERR_OK;
    TRY(device_read(&t->device.stream, sums, t->executor.sums.data, tensor_bytes(t->executor.sums)));
    for (int i = 0; i < count; i++) {
        const int64_t *s = sums + 3 * (i + 1);
        out->mtp_loss[i] = mean_loss(s[0], s[1], s[2] != 0);
    }
    return ERR_OK;
}

Err step_report(Trainer *t, const StepValues *v, StepReport *out)
{
    *out = (StepReport){ .step = v->step,
                         .loss = mean_loss(v->loss_fixed, v->counted, v->loss_nonfinite),
                         .counted = v->counted,
                         .grad_norm = v->skip ? NAN : v->grad_norm,
                         .lr = v->lr,
                         .samples = t->batch,
                         .skipped = v->skip };
    return read_modules(t, out);
}
