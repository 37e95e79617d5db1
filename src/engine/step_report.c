/* See step_report.h. */
#include "engine/step_report.h"

#include <math.h>

#include "base/int64.h"

/* Sums leave out what is not finite: of a bad step they are the loss and norm of something else. */
static double mean_loss(int64_t fixed, int64_t counted, bool bad)
{
    return bad || counted == 0 ? NAN : (double)fixed * exp2(-LOSS_FIXED_BITS) / (double)counted;
}

static AttentionLogits attention_logits(const Trainer *t)
{
    const int blocks = model_blocks(&t->spec.model), heads = t->spec.model.heads;
    const int64_t *order = t->flight.logits;
    int64_t most = 0;
    if (!t->layer_logits) return (AttentionLogits){ 0 };
    for (int i = 0; i < blocks; i++) {
        int64_t of_layer = 0;
        for (int h = 0; h < model_score_heads(&t->spec.model, i); h++) of_layer = max64(of_layer, order[i * heads + h]);
        t->layer_logits[i] = (double)logit_of_order(of_layer);
        if (of_layer > order[most]) most = (int64_t)i * heads;
        while (of_layer > order[most]) most++;
    }
    return (AttentionLogits){ .by_layer = t->layer_logits,
                              .most = (double)logit_of_order(order[most]),
                              .layer = (int)(most / heads),
                              .head = (int)(most % heads) };
}

StepReport step_report(const Trainer *t)
{
    const StepValues *v = t->flight.values;
    StepReport r = { .step = v->step,
                     .loss = mean_loss(v->loss_fixed, v->counted, v->loss_nonfinite),
                     .counted = v->counted,
                     .grad_norm = v->skip ? NAN : v->grad_norm,
                     .lr = v->lr,
                     .logits = attention_logits(t),
                     .samples = t->flight.batch,
                     .skipped = v->skip };
    for (int i = 0; i < t->spec.model.mtp.count; i++) {
        const int64_t *s = t->flight.sums + 3 * (i + 1);
        r.mtp_loss[i] = mean_loss(s[0], s[1], s[2] != 0);
    }
    return r;
}
