/* See batch_ramp.h. */
#include "base/batch_ramp.h"

#include <ctype.h>
#include <stddef.h>

static const int64_t STEPS_MAX = 1000000000000;

BatchRamp batch_ramp_flat(int64_t batch) { return (BatchRamp){ { { batch, INT64_MAX } }, 1 }; }

/* A number from 1 to `most` at *at, behind which *at is left; 0 if there is none. */
static int64_t read_number(const char **at, int64_t most)
{
    int64_t n = 0;
    if (!isdigit((unsigned char)**at)) return 0;
    for (; isdigit((unsigned char)**at); (*at)++)
        if (n <= most) n = 10 * n + (**at - '0');
    return n <= most ? n : 0;
}

static const char *read_parts(const char *at, BatchRamp *r)
{
    int64_t last = 0;
    for (;; at++) {
        if (r->count == RAMP_PARTS) return "has more than 32 parts";
        const int64_t batch = read_number(&at, RAMP_BATCH_MAX);
        int64_t steps = 0;
        if (!batch || (*at && *at != '*' && *at != ','))
            return "must be an integer from 1 to 1073741824, in digits alone, or such a ramp: 32*1000,64 "
                   "(1000 "
                   "steps of 32, then 64)";
        if (*at == '*') {
            at++;
            steps = read_number(&at, STEPS_MAX);
        }
        if (*at ? !steps || *at != ',' : steps)
            return "must say of each part but the last, in digits alone, for how many steps it holds: "
                   "32*1000,64";
        last = steps ? last + steps : INT64_MAX;
        r->part[r->count++] = (BatchRampPart){ batch, last };
        if (!*at) return NULL;
    }
}

const char *batch_ramp_read(const char *text, BatchRamp *out)
{
    *out = (BatchRamp){ .count = 0 };
    const char *why = read_parts(text, out);
    if (why) *out = batch_ramp_flat(1);
    return why;
}

int64_t batch_ramp_at(const BatchRamp *r, int64_t step)
{
    int i = 0;
    while (r->part[i].last < step) i++;
    return r->part[i].batch;
}

int64_t batch_ramp_most(const BatchRamp *r)
{
    int64_t most = 1;
    for (int i = 0; i < r->count; i++)
        if (r->part[i].batch > most) most = r->part[i].batch;
    return most;
}

bool batch_ramp_divides(const BatchRamp *r, int64_t unit)
{
    for (int i = 0; i < r->count; i++)
        if (r->part[i].batch % unit) return false;
    return true;
}

int64_t batch_ramp_samples(const BatchRamp *r, int64_t steps)
{
    int64_t samples = 0, part, before = 0;
    for (int i = 0; i < r->count && before < steps; i++) {
        const int64_t last = r->part[i].last < steps ? r->part[i].last : steps;
        if (__builtin_mul_overflow(last - before, r->part[i].batch, &part) ||
            __builtin_add_overflow(samples, part, &samples))
            return INT64_MAX;
        before = last;
    }
    return samples;
}

int64_t batch_ramp_steps(const BatchRamp *r, int64_t samples)
{
    int64_t before = 0;
    for (int i = 0;; i++) {
        const BatchRampPart *p = &r->part[i];
        const int64_t steps = samples > 0 ? (samples - 1) / p->batch + 1 : 0;
        if (p->last == INT64_MAX || steps <= p->last - before) return before + steps;
        samples -= (p->last - before) * p->batch;
        before = p->last;
    }
}
