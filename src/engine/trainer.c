/*
 * See trainer.h. Order of a step:
 *
 *   step values -> device | actions: F and B of every micro-batch, reduce, norm, update | step values -> host
 *
 * The host reads nothing in between. If a gradient leaf did not fit its fixed point the update has skipped
 * itself (an op decided that); the host then lowers all shifts and runs the same step again.
 *
 * On a GPU the host is a step ahead, so that the device never waits for it:
 *
 *   enqueues F and B of step t + 1 | waits for the values of step t | enqueues the update of step t + 1
 *
 * What step t may still change of step t + 1 stands between the two parts: the number of updates, which learning rate
 * and bias corrections follow from, and the shifts; or F and B are enqueued anew, where step t has to be.
 */
#include "engine/trainer.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "base/mathx.h"
#include "ckpt/ckpt.h"
#include "engine/async.h"
#include "engine/expert_load.h"
#include "engine/step_report.h"
#include "engine/trainer_open.h"

enum { MAX_REDO = 2 };
_Static_assert(CKPT_SHIFT_MIN - MAX_REDO * SHIFT_STEP >= -126, "what a checkpoint holds can be lowered");

#define ROW(text, member) text, offsetof(MemoryPlan, member)
const MemoryRow memory_rows[MEMORY_ROWS] = {
    { ROW("state: weights, gradients, moments, tables", state) },
    { ROW("states of the optimizer", states), .on_host = true },
    { ROW("saves between forward and backward", save) },
    { ROW("buffers of saves on their way (train.offload)", offload_buffers) },
    { ROW("saves in the host's memory (train.offload)", offload_host), .on_host = true },
    { ROW("scratch of a layer call", scratch) },
    { ROW("workspace of kernels", workspace) },
    { ROW("widened copies of 16-bit tensors", staging) },
    { ROW("batches read ahead", ahead), .on_host = true },
    { ROW("copy of the state to be written (checkpoint.async)", snapshot), .on_host = true },
};

int64_t memory_plan_bytes(const MemoryPlan *p, const MemoryRow *row)
{
    return *(const int64_t *)(const void *)((const char *)p + row->field);
}

static int64_t sum_rows(const MemoryPlan *p, bool on_host)
{
    int64_t bytes = 0;
    for (int i = 0; i < MEMORY_ROWS; i++)
        if (memory_rows[i].on_host == on_host) bytes += memory_plan_bytes(p, &memory_rows[i]);
    return bytes;
}

int64_t memory_plan_host(const MemoryPlan *p) { return sum_rows(p, true); }

int64_t memory_plan_total(const MemoryPlan *p)
{
    return sum_rows(p, false) + (p->host_apart ? 0 : memory_plan_host(p));
}

MemoryPlan trainer_peak(const Trainer *t)
{
    const Executor *e = &t->executor;
    MemoryPlan p = { .state = t->memory.state.peak_bytes,
                     .states = t->memory.states.peak_bytes,
                     .save = e->heap[REGION_I].peak_bytes + e->heap[REGION_W].peak_bytes,
                     .save_region = { e->heap[REGION_I].peak_bytes, e->heap[REGION_W].peak_bytes },
                     .offload_host = e->away.peak_bytes,
                     .stage_count = e->stage_count,
                     .scratch = t->memory.scratch.peak_bytes + t->memory.scratch_forward.peak_bytes,
                     .scratch_forward = t->memory.scratch_forward.peak_bytes,
                     .workspace = t->device.workspace_bytes,
                     .staging = t->device.staging.peak_bytes };
    for (int i = 0; i < e->buffer_count; i++) p.boundary += tensor_bytes(e->buffers[i]);
    for (int i = 0; i < 2 * OFFLOAD_BUFFERS; i++) {
        const int64_t peak = e->offload[i / OFFLOAD_BUFFERS].buffer[i % OFFLOAD_BUFFERS].room.peak_bytes;
        p.offload[i / OFFLOAD_BUFFERS][i % OFFLOAD_BUFFERS] = peak;
        p.offload_buffers += peak;
    }
    for (int i = 0; i < e->stage_count; i++) {
        const ExecutorStage *s = &e->stages[i];
        p.stages[i] = (StagePlan){ .stage = s->stage,
                                   .replica = s->replica,
                                   .layers = s->model->share.layer_count,
                                   .in_flight = s->slot_count,
                                   .away = s->away_peak };
        memcpy(p.stages[i].save, s->peak_bytes, sizeof s->peak_bytes);
    }
    return p;
}

/* ---- one step ---- */

bool trainer_runs_ahead(const Trainer *t)
{
    const TrainSpec *s = &t->spec;
    return t->device.kind == DEVICE_CUDA && !trainer_is_async(t) && !s->exact && s->compute != F16;
}

int64_t trainer_next_step(const Trainer *t) { return t->progress.step + t->flight.running + 1; }

int64_t trainer_next_sample(const Trainer *t)
{
    return t->progress.samples + (t->flight.running ? t->flight.batch : 0);
}

BatchSpec trainer_batch_spec(const Trainer *t)
{
    const TrainSpec *s = &t->spec;
    const int64_t seq = s->model.seq;
    const int64_t slice = seq / t->parts.step.slices;
    return (BatchSpec){ .B = s->micro_batch / t->parts.step.unit_div,
                        .seq = seq,
                        .span = context_span(s->cut, slice, t->world->cp.size, t->world->cp_rank),
                        .documents = s->documents,
                        .scores = s->purpose.scores ? 1 + t->world->tp.size : 0 };
}

int64_t trainer_batch(const Trainer *t, int64_t step)
{
    return t->spec.ramp.count ? batch_ramp_at(&t->spec.ramp, step) : t->spec.global_batch;
}

void trainer_take_batch(Trainer *t, int64_t first, int64_t samples)
{
    t->serving.first_sample = first;
    t->serving.batch = t->serving.counting = samples;
    t->executor.units = (int)(samples / t->world->grid.dp / trainer_batch_spec(t).B) * t->parts.step.slices;
}

/* Writes the host's values of the next step. A step in flight is taken for one that is not skipped. */
static Err write_values(Trainer *t)
{
    const TrainSpec *s = &t->spec;
    const int64_t update = t->progress.updates + t->flight.running + 1, nominal = t->serving.batch * s->model.seq;
    StepValues v = { .step = trainer_next_step(t),
                     .nominal = nominal,
                     .lr = (float)lr_at(&s->update.lr, update),
                     .correct1 = (float)(1 - m_pow(s->update.adamw.beta1, (double)update)),
                     .correct2 = (float)(1 - m_pow(s->update.adamw.beta2, (double)update)),
                     .clip = s->update.clip,
                     .loss_scale = ldexpf(1 / (float)nominal, (int)t->progress.loss_scale.log2),
                     .unscale = ldexpf(1, -(int)t->progress.loss_scale.log2) };
    return device_write(&t->device.stream, t->step_values, &v, sizeof v);
}

static Err step_begin(Trainer *t)
{
    Stream *stream = &t->device.stream;
    TRY(write_values(t));
    const Tensor logits = t->executor.ctx.logit_max;
    TRY(device_zero(stream, t->executor.sums.data, tensor_bytes(t->executor.sums)));
    if (logits.data) TRY(device_zero(stream, logits.data, tensor_bytes(logits)));
    TRY(expert_load_begin(t));
    for (int r = 0; r < t->params.replicas; r++) {
        param_store_begin(&t->stores[r]);
        TRY(ddp_begin(&t->ddp[r]));
    }
    return device_zero(stream, t->stats.flags.data, tensor_bytes(t->stats.flags));
}

/* True if the step is to be done again with a smaller loss scale: fp16 gradients that are not finite. */
static bool lower_loss_scale(Trainer *t, const StepValues *v)
{
    if (t->spec.compute != F16 || !v->nonfinite || v->loss_nonfinite || t->progress.loss_scale.log2 == 0) return false;
    t->progress.loss_scale = (LossScale){ .log2 = t->progress.loss_scale.log2 - 1 };
    return true;
}

static void raise_loss_scale(Trainer *t)
{
    if (t->spec.compute != F16 || ++t->progress.loss_scale.good_steps < LOSS_SCALE_WINDOW) return;
    t->progress.loss_scale.good_steps = 0;
    if (t->progress.loss_scale.log2 < LOSS_SCALE_START) t->progress.loss_scale.log2++;
}

/* After an overflow: coarser fixed point for every gradient. Done on the host, between steps. */
static Err lower_shifts(Trainer *t, int by)
{
    Tensor shift = t->stats.shift;
    int64_t n = t->stats.count;
    int32_t *now = t->host_shift + n;
    for (int64_t i = 0; i < n; i++) now[i] = t->host_shift[i] - by;
    return device_write(&t->device.stream, shift.data, now, tensor_bytes(shift));
}

/* Begins a trace of this step with the arenas: some of them do not change in it. */
static void show_arenas(const Trainer *t)
{
    arena_show(&t->memory.state);
    arena_show(&t->memory.scratch);
    for (int i = 0; i < t->executor.stage_count; i++) {
        const ExecutorStage *s = &t->executor.stages[i];
        for (int k = 0; k < s->slot_count; k++)
            for (int r = 0; r < REGION_COUNT; r++)
                if (s->slots[k].slot.region[r].name) arena_show(&s->slots[k].slot.region[r]);
    }
}

/* The next step's. */
static void begin_batch(Trainer *t)
{
    trainer_take_batch(t, trainer_next_sample(t), trainer_batch(t, trainer_next_step(t)));
    if (t->serving.last_batch && t->serving.batch != t->serving.last_batch) {
        for (int r = 0; r < t->params.replicas; r++) ddp_forget(&t->ddp[r]);
        executor_forget_graphs(&t->executor);
    }
    t->serving.last_batch = t->serving.batch;
}

static const ActionList *step_list(const Trainer *t) { return &t->parts.step.rank[t->world->pp_rank]; }

/* Forward and backward of the next step: they may be done again. */
static Err enqueue_units(Trainer *t)
{
    begin_batch(t);
    TRY(step_begin(t));
    Err err = executor_run_units(&t->executor, step_list(t));
    if (err) executor_drop_units(&t->executor);
    return err;
}

/* Its update, and the copies of what it says of itself: now it is in flight. */
static Err enqueue_update(Trainer *t)
{
    StepInFlight *f = &t->flight;
    Stream *stream = &t->device.stream;
    TRY(executor_run_update(&t->executor, step_list(t)));
    TRY(device_read_later(stream, f->values, t->step_values, sizeof *f->values));
    const Tensor logits = t->executor.ctx.logit_max;
    TRY(device_read_later(stream, f->sums, t->executor.sums.data, tensor_bytes(t->executor.sums)));
    if (logits.data) TRY(device_read_later(stream, f->logits, logits.data, tensor_bytes(logits)));
    TRY(expert_load_fetch(t));
    TRY(device_mark(stream, &f->done));
    f->batch = t->serving.batch;
    f->running = true;
    return ERR_OK;
}

/* Waits for the step in flight; it is then no longer. */
static Err await(Trainer *t)
{
    t->flight.running = false;
    return device_wait(&t->device.stream, &t->flight.done);
}

/* Times that a step was done again, and why. */
typedef struct {
    int redone, rescaled;
    bool retried_in_pieces;
} Again;

/* Prepares the step that was awaited to be done again, if it must; else *must is false. */
static Err prepare_again(Trainer *t, Again *a, bool *must)
{
    const StepValues *v = t->flight.values;
    Tensor shift = t->stats.shift;
    *must = true;
    if (v->over_limit && !t->spec.model.moe.capacity.redo) return expert_load_over_limit(t, true);
    if (v->over_limit) expert_load_use_pieces(t, a->retried_in_pieces = true);
    else if (lower_loss_scale(t, v)) a->rescaled++;
    else if (v->overflow && !v->nonfinite && a->redone < MAX_REDO) {
        if (!a->redone) TRY(device_read(&t->device.stream, t->host_shift, shift.data, tensor_bytes(shift)));
        TRY(lower_shifts(t, SHIFT_STEP * ++a->redone));
    } else *must = false;
    return ERR_OK;
}

/* Until the step's outcome stands. */
static Err settle_outcome(Trainer *t, Again *a)
{
    bool must;
    TRY(await(t));
    TRY(prepare_again(t, a, &must));
    while (must) {
        TRY(enqueue_units(t));
        TRY(enqueue_update(t));
        TRY(await(t));
        TRY(prepare_again(t, a, &must));
    }
    if (a->retried_in_pieces) expert_load_use_pieces(t, false);
    return ERR_OK;
}

/* Progress of an outcome that stands, and the shifts of the next step. */
static Err account(Trainer *t, const Again *a, LossScale before)
{
    const bool skip = t->flight.values->skip;
    Stream *stream = &t->device.stream;
    Tensor shift = t->stats.shift, next = t->stats.next_shift;
    if (!skip) TRY(device_copy(stream, shift.data, next.data, tensor_bytes(next)));
    else if (a->redone) TRY(device_write(stream, shift.data, t->host_shift, tensor_bytes(shift)));
    t->progress.step++;
    t->progress.samples += t->flight.batch;
    t->progress.updates += !skip;
    t->executor.graphs_wait &= skip;
    if (!skip) raise_loss_scale(t);
    else t->progress.loss_scale = before; /* no scale was small enough: it was not the scale */
    t->progress.skipped += skip;
    expert_load_take(t, t->flight.batch);
    return ERR_OK;
}

Err trainer_finish(Trainer *t, StepReport *report)
{
    const LossScale before = t->progress.loss_scale;
    Again again = { 0 };
    *report = (StepReport){ 0 };
    if (!t->flight.running) return ERR_OK;
    if (trainer_is_async(t)) {
        t->flight.running = false;
        return async_step(t, report);
    }
    TRY(settle_outcome(t, &again));
    TRY(account(t, &again, before));
    *report = step_report(t);
    report->redone = again.redone;
    report->rescaled = again.rescaled;
    report->retried_in_pieces = again.retried_in_pieces;
    return ERR_OK;
}

/* The step before, while forward and backward of the next one are enqueued: these began with what it was expected to
 * come to, and are done again if it was itself. */
static Err finish_before(Trainer *t, StepReport *before)
{
    TRY(trainer_finish(t, before));
    if (before->redone || before->retried_in_pieces) return enqueue_units(t);
    return before->skipped ? write_values(t) : ERR_OK;
}

Err trainer_start(Trainer *t, TokenSource source, StepReport *before)
{
    const bool ahead = t->flight.running;
    *before = (StepReport){ 0 };
    ASSERT(!ahead || trainer_runs_ahead(t));
    t->serving.source = source;
    show_arenas(t);
    if (trainer_is_async(t)) { /* (updates and their outcomes are one list: all of it is trainer_finish's) */
        begin_batch(t);
        t->flight.batch = t->serving.batch;
        t->flight.running = true;
        return ERR_OK;
    }
    TRY(enqueue_units(t));
    if (ahead) TRY(finish_before(t, before));
    return enqueue_update(t);
}

Err trainer_step(Trainer *t, TokenSource source, StepReport *report)
{
    StepReport before;
    ASSERT(!t->flight.running);
    TRY(trainer_start(t, source, &before));
    return trainer_finish(t, report);
}

Err trainer_logits(Trainer *t, const int32_t *tokens, int64_t past, int64_t n, float *logits)
{
    Executor *e = &t->executor;
    ExecutorStage *stage = &e->stages[0];
    ExecutorSlot *s = &stage->slots[0];
    const int64_t width = t->spec.model.padded_vocab;
    Batch whole = s->batch;
    Tensor out, wide;
    ASSERT(t->caches && past >= 0 && n >= 1 && past + n <= whole.seq);
    s->batch = batch_part(&whole, past, n);
    if (tokens) memcpy(t->batches.tokens + past, tokens, (size_t)n * sizeof *tokens);
    TRY(batch_fill(&t->batches, &t->device.stream, &s->batch, 0, 1));
    TRY(executor_take(e, stage, s));
    e->ctx.mode.training = false;
    ArenaMark mark = arena_mark(&t->memory.scratch);
    TRY(tensor_new(&t->memory.scratch, &out, t->spec.compute, 1, width));
    executor_enter(&e->ctx, stage, s);
    TRY(stage_logits(stage->model, &e->ctx, &s->save, t->caches, out));
    wide = tensor_reshape(out, width);
    if (t->spec.compute != F32) {
        TRY(tensor_new(&t->memory.scratch, &wide, F32, width));
        TRY(op(&t->device.stream, cast, .y = wide, .x = tensor_reshape(out, width)));
    }
    if (logits) TRY(device_read(&t->device.stream, logits, wide.data, t->spec.model.vocab * (int64_t)sizeof *logits));
    arena_release(&t->memory.scratch, mark);
    executor_give(e, stage, s);
    whole.position_span = (Spans){ { 0 }, { 0 } };
    s->batch = whole;
    return ERR_OK;
}
