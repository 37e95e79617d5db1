/* See besides.h. */
#include "plan/besides.h"

#include <math.h>
#include <string.h>

#include "base/words.h"

/* Words that end in ':' begin a set (data/sets.h). */
int besides_sets(const Config *cfg)
{
    const char *at = cfg->data.valid;
    int named = 0;
    if (!*at) return *cfg->data.split ? 1 : 0;
    for (size_t n; *(at += strspn(at, " ")); at += n) {
        n = word_length(at);
        named += at[n - 1] == ':';
    }
    return named ? named : 1;
}

static double evaluations(const Config *cfg, const BesidesOf *of)
{
    const double samples = (double)cfg->derived.eval_samples * besides_sets(cfg);
    if (!cfg->train.eval_every || !besides_sets(cfg)) return 0;
    if (!cfg->derived.eval_samples) return NAN;
    return samples / (double)cfg->derived.global_batch * of->forward_s / (double)cfg->train.eval_every;
}

/* Seconds in which a rank copies its state. On processors memory is read and written, by all ranks at once. */
static double copy_seconds(const DeviceFile *d, const BesidesOf *of)
{
    if (d->processors > 0) return 2. * of->ranks * (double)of->shard / (1e9 * d->memory_gb_s);
    return (double)of->shard / device_host_rate(d);
}

static double checkpoints(const Config *cfg, const DeviceFile *d, const BesidesOf *of)
{
    const double every = (double)cfg->checkpoint.every, write = (double)of->checkpoint / (1e9 * d->disk_gb_s);
    if (!cfg->checkpoint.every) return 0;
    if (!(d->disk_gb_s > 0)) return NAN;
    if (!cfg->checkpoint.async) return write / every;
    return (copy_seconds(d, of) + fmax(0, write - every * of->step_s)) / every;
}

Besides besides_of(const Config *cfg, const DeviceFile *d, const BesidesOf *of)
{
    return (Besides){ .evaluations = evaluations(cfg, of),
                      .tasks = cfg->train.eval_every && *cfg->train.eval_tasks ? NAN : 0,
                      .checkpoints = checkpoints(cfg, d, of),
                      .host = 1e-6 * d->step_us };
}

static double known(double seconds) { return isnan(seconds) ? 0 : seconds; }

double besides_sum(const Besides *b) { return known(b->evaluations) + known(b->checkpoints) + b->host; }
