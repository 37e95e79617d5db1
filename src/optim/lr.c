/* Learning-rate shapes, one function each: the share of (lr - min_lr) at progress r in [0, 1] of the decay. */
#include <math.h>

#include "base/mathx.h"
#include "optim/optim.h"

static double share(const LrSchedule *s, int64_t step)
{
    double r = (double)(step - s->warmup) / (double)(s->decay_steps - s->warmup);
    if (s->shape == LR_COSINE) return 0.5 * (m_cos(M_PI * r) + 1);
    if (s->shape == LR_LINEAR) return 1 - r;
    int64_t start = s->decay_steps - s->wsd_decay; /* WSD: flat, then 2 * 0.5^r - 1 */
    if (step <= start) return 1;
    return 2 * m_exp(-m_log(2) * (double)(step - start) / (double)s->wsd_decay) - 1;
}

double lr_at(const LrSchedule *s, int64_t step)
{
    if (s->warmup > 0 && step <= s->warmup) return s->lr * (double)step / (double)s->warmup;
    if (s->shape == LR_CONSTANT) return s->lr;
    if (step > s->decay_steps) return s->min_lr;
    if (s->shape == LR_INVERSE_SQRT) {
        double w = (double)(s->warmup > 1 ? s->warmup : 1);
        double x = s->lr * sqrt(w) / sqrt((double)(step > 1 ? step : 1));
        return x > s->min_lr ? x : s->min_lr;
    }
    return s->min_lr + share(s, step) * (s->lr - s->min_lr);
}
