/* See async.h. */
#include "engine/async.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mathx.h"
#include "engine/expert_load.h"

/* Something of a step that an update in the middle of it cannot have, and what says that it is not wanted. */
typedef struct {
    bool asked;
    const char *why, *way;
} Conflict;

/* The first is said, and the way out of all. */
static Err refuse(const TrainSpec *s, const Conflict *c, int count)
{
    char ways[ERR_WAY_BYTES] = "";
    int first = count;
    for (int i = count - 1; i >= 0; i--)
        if (c[i].asked) first = i;
    if (first == count) return ERR_OK;
    for (int i = first; i < count; i++) {
        if (!c[i].asked || strstr(ways, c[i].way)) continue;
        if (*ways) strncat(ways, " ", sizeof ways - strlen(ways) - 1);
        strncat(ways, c[i].way, sizeof ways - strlen(ways) - 1);
    }
    err_set(ERR_CONFIG, "schedule '%s' updates while the pipeline runs, and %s", s->pipeline.schedule, c[first].why);
    return err_take("%s", ways);
}

Err async_check(const TrainSpec *s, int ranks)
{
    Versions versions = VERSIONS_STEP;
    const MixtureSpec *moe = &s->model.moe;
    char one_batch[48];
    if (s->pipeline.schedule) TRY(schedule_versions(s->pipeline.schedule, &versions));
    if (versions == VERSIONS_STEP || s->purpose.forward_only) return ERR_OK;
    snprintf(one_batch, sizeof one_batch, "train.global_batch=%lld", (long long)s->global_batch);
    const Conflict conflicts[] = {
        { s->ramp.count > 1, "its updates have batches of one size", one_batch },
        { s->update.clip > 0, "there is no norm of the whole gradient to clip by", "optim.clip=0" },
        { s->model.tied && ranks > 1, "its first and last stage would need one gradient of the table",
          "model.tied=false" },
        { s->model.mtp.count > 0,
          "multi-token prediction would need one gradient of the embedding's table on two stages",
          "model.mtp_layers=0" },
        { moe->balance.bias_rate > 0, "experts' biases follow the load of a whole step", "moe.balance=aux" },
        { moe->balance.global, "global_aux counts the batch of a whole step", "moe.balance=aux" },
        { moe->capacity.slack > 0 && !moe->capacity.drop, "what it has updated when experts have no room stays so",
          "moe.slack=0 moe.overflow=stop" },
        { s->update.qk_clip.threshold > 0, "QK-clip follows the largest logits of a whole step", "optim.qk_clip=0" },
        { s->attention_logits, "there are no largest logits of a whole step", "log.max_attention_logit=false" },
        { s->documents.mask, "its stages do not know how many tokens count", "data.mask_eod=false" },
        { s->update.optimizer == OPTIMIZER_MUON, "Muon's matrices go to their owners once a step", "optim.name=adamw" },
        { s->compute == F16, "a step cannot be done again with another loss scale", "run.precision=bf16" },
    };
    return refuse(s, conflicts, (int)(sizeof conflicts / sizeof *conflicts));
}

/* The oldest weights that the rank's actions read. */
static int oldest(const ActionList *l)
{
    int age = 0;
    for (int i = 0; i < l->count; i++)
        if (action_is_compute(l->action[i].kind) && l->action[i].version > age) age = l->action[i].version;
    return age;
}

Err async_open(Trainer *t)
{
    const int updates = schedule_updates(&t->parts.step);
    void *history;
    if (!trainer_is_async(t) || t->spec.purpose.forward_only) return ERR_OK;
    TRY(param_store_keep_older(&t->stores[0], oldest(&t->parts.step.rank[t->world->pp_rank]), &t->memory.state));
    TRY(tensor_new(&t->memory.state, &t->async.tokens, I64, 3));
    TRY(arena_alloc(&t->memory.state, updates * (int64_t)sizeof(StepValues), &history));
    t->async.history = history;
    TRY(setup_array(&t->memory.setup, t->stats.count, &t->async.shifts));
    return setup_array(&t->memory.setup, updates, &t->async.outcome);
}

/* Writes the host's values of update `n` of the step. */
static Err begin_update(Trainer *t, int n)
{
    const TrainSpec *s = &t->spec;
    const int updates = schedule_updates(&t->parts.step);
    const int64_t nominal = t->serving.batch * s->model.seq / updates, update = t->progress.updates + n + 1;
    const int64_t sums[3] = { 0, nominal, 0 };
    StepValues v = { .step = t->progress.step + 1,
                     .nominal = nominal,
                     .lr = (float)lr_at(&s->update.lr, t->progress.updates / updates + 1),
                     .correct1 = (float)(1 - m_pow(s->update.adamw.beta1, (double)update)),
                     .correct2 = (float)(1 - m_pow(s->update.adamw.beta2, (double)update)),
                     .loss_scale = 1 / (float)nominal,
                     .unscale = 1 };
    Stream *stream = &t->device.stream;
    TRY(device_write(stream, t->step_values, &v, sizeof v));
    TRY(device_write(stream, t->async.tokens.data, sums, sizeof sums));
    param_store_begin(&t->stores[0]);
    TRY(ddp_begin(&t->ddp[0]));
    return device_zero(stream, t->stats.flags.data, tensor_bytes(t->stats.flags));
}

Err async_update(Trainer *t, int replica)
{
    ParamStore *store = &t->stores[replica];
    Stream *stream = &t->device.stream;
    Tensor shift = t->stats.shift, next = t->stats.next_shift;
    const int n = t->async.done++;
    TRY(optim_norm_local(&t->optim, t->async.tokens));
    TRY(ddp_settle(&t->ddp[replica]));
    TRY(param_store_age(store, stream));
    TRY(optim_update(&t->optim, store));
    TRY(ddp_gather(&t->ddp[replica]));
    TRY(device_copy(stream, shift.data, next.data, tensor_bytes(shift)));
    TRY(device_copy(stream, &t->async.history[n], t->step_values, sizeof(StepValues)));
    return n + 1 < schedule_updates(&t->parts.step) ? begin_update(t, n + 1) : ERR_OK;
}

/* Every rank has the shifts of its own parameters; checkpoints want them of all. */
static Err share_shifts(Trainer *t)
{
    const int64_t n = t->stats.count;
    int64_t *all = t->async.shifts;
    int32_t *now = t->host_shift;
    TRY(device_read(&t->device.stream, now, t->stats.shift.data, tensor_bytes(t->stats.shift)));
    for (int64_t i = 0; i < n; i++) all[i] = INT64_MIN;
    for (int i = 0; i < t->stores[0].reg->count; i++) {
        const int global = t->stores[0].reg->items[i].global;
        all[global] = now[global];
    }
    TRY(comm_max_i64(&t->world->host, &t->device.stream, all, n, NULL));
    for (int64_t i = 0; i < n; i++) now[i] = (int32_t)all[i];
    return device_write(&t->device.stream, t->stats.shift.data, now, tensor_bytes(t->stats.shift));
}

/* The outcome of all updates on all stages: how many were left out, the last one's norm. */
static Err make_report(Trainer *t, StepReport *r)
{
    enum { NORM_BITS = 24 };
    const int updates = schedule_updates(&t->parts.step);
    Stream *stream = &t->device.stream;
    int64_t sums[3] = { 0 }, skipped = 0, square;
    StepValues *v = t->async.outcome;
    TRY(optim_sum_loss(&t->optim));
    TRY(device_read(stream, sums, t->executor.sums.data, sizeof sums));
    TRY(device_read(stream, v, t->async.history, updates * (int64_t)sizeof *v));
    for (int i = 0; i < updates; i++) skipped += v[i].skip != 0;
    const double norm = (double)v[updates - 1].grad_norm;
    square = isfinite(norm) ? (int64_t)ldexp(fmin(norm * norm, 0x1p36), NORM_BITS) : 0;
    TRY(comm_sum_i64(&t->world->pp, stream, &square, 1, NULL));
    TRY(comm_max_i64(&t->world->host, stream, &skipped, 1, NULL));
    const double nats = (double)sums[0] * 0x1p-28;
    *r = (StepReport){ .step = t->progress.step + 1,
                       .loss = sums[2] || !sums[1] ? NAN : nats / (double)sums[1],
                       .counted = sums[1],
                       .grad_norm = skipped ? NAN : (float)sqrt(ldexp((double)square, -NORM_BITS)),
                       .lr = v[0].lr,
                       .samples = t->serving.batch,
                       .skipped = skipped > 0 };
    return ERR_OK;
}

Err async_step(Trainer *t, StepReport *report)
{
    t->async.done = 0;
    t->stores[0].updates = 0;
    TRY(device_zero(&t->device.stream, t->executor.sums.data, tensor_bytes(t->executor.sums)));
    TRY(expert_load_begin(t));
    TRY(begin_update(t, 0));
    TRY(executor_run(&t->executor, &t->parts.step.rank[t->world->pp_rank], true));
    TRY(expert_load_fetch(t));
    TRY(make_report(t, report)); /* (waits) */
    expert_load_take(t, t->serving.batch);
    TRY(share_shifts(t));
    t->progress.updates += schedule_updates(&t->parts.step);
    t->progress.step++;
    t->progress.samples += t->serving.batch;
    t->progress.skipped += report->skipped;
    return ERR_OK;
}
