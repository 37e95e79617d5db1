/* See announce.h. */
#include "train/announce.h"

#include "base/log.h"

static const char *plural(int64_t n) { return n == 1 ? "" : "s"; }

void announce_tasks(const Tasks *t)
{
    log_info("%lld question%s of %d task%s an evaluation, with %lld choice%s in %lld sample%s",
             (long long)t->question_count, plural(t->question_count), t->count, plural(t->count),
             (long long)t->request_count, plural(t->request_count), (long long)t->samples, plural(t->samples));
    for (int i = 0; i < t->count; i++)
        if (t->task[i].cut)
            log_warn("'%s': %lld request%s longer than model.seq, %lld: cut from the left", t->task[i].path,
                     (long long)t->task[i].cut, t->task[i].cut == 1 ? " is" : "s are", (long long)t->seq);
}

void announce_validation(const Run *r)
{
    const int64_t every = r->cfg->train.eval_every, batch = r->spec.global_batch;
    int64_t samples = 0;
    for (int i = 0; i < r->valid.count; i++) samples += run_valid_samples(r, r->valid.set[i].data);
    if (r->tasks.count) announce_tasks(&r->tasks);
    if (!samples) return;
    log_info("%lld samples an evaluation", (long long)samples);
    if (r->cfg->train.eval_batches)
        log_warn("train.eval_batches=%lld counts global batches: with another train.global_batch other "
                 "samples are evaluated; train.eval_samples=%lld reads these with any",
                 (long long)r->cfg->train.eval_batches, (long long)r->cfg->derived.eval_samples);
    if (r->cfg->checkpoint.keep_best && r->valid.count > 1)
        log_info("checkpoint.keep_best goes by the loss on '%s'", r->valid.set[r->best_set].name);
    if (every && samples / batch >= every)
        log_warn("an evaluation reads %lld samples, training %lld between two of them: train.eval_samples "
                 "bounds it",
                 (long long)samples, (long long)(every * batch));
}

static void announce_batch(const Trainer *t, int64_t step)
{
    const int64_t before = step > 1 ? trainer_batch(t, step - 1) : 0, now = trainer_batch(t, step);
    if (before && before != now)
        log_info("from step %lld on: global batches of %lld samples, before %lld", (long long)step, (long long)now,
                 (long long)before);
}

void announce_step(const Run *r)
{
    const Trainer *t = &r->trainer;
    const int64_t step = trainer_next_step(t), sample = trainer_next_sample(t);
    const DatasetStage s = dataset_stage(r->train, sample);
    announce_batch(t, step);
    if (s.number && s.first == sample) log_info("from step %lld on: data.train is '%.600s'", (long long)step, s.spec);
}
