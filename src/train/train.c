/*
 * The run's loop. Order after each step: metrics, evaluation, checkpoint, and only then the question whether
 * to stop: so a stop never loses what a step did. On a GPU a step may be enqueued before the line of the one before it
 * is written (trainer_start); never before an evaluation or a checkpoint that is due.
 */
#include "train/train.h"

#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/file.h"
#include "base/heap.h"
#include "base/log.h"
#include "base/run_files.h"
#include "base/trace.h"
#include "base/units.h"
#include "base/words.h"
#include "boot/supervised.h"
#include "train/announce.h"
#include "train/kept.h"
#include "train/loop.h"
#include "train/signals.h"

enum { MAX_SKIPPED_IN_A_ROW = 20 };

/* ---- what is said at the start ---- */

static void say_ranks(const Loop *l)
{
    const Ranks *r = &l->ranks;
    const Grid g = r->world.grid;
    const ParamRegistry *reg = l->run.trainer.stores[0].reg;
    const Config *c = l->cfg;
    const Schedule *s = &l->run.trainer.parts.step;
    if (r->boot.size == 1) return;
    char cp[24] = "", bands[32] = "", zero[48] = "", data[40] = "";
    const int states = reg->place.zero_shards[PARAM_DENSE] > 1 ? ZERO_STATES : ZERO_NONE;
    const int level = reg->place.near_shards[PARAM_DENSE] > 1 ? (int)reg->place.zero : states;
    if (level) snprintf(zero, sizeof zero, " with ZeRO-%d", level);
    if (level && g.zero_group && g.zero_group < g.dp * g.cp)
        snprintf(zero, sizeof zero, " with ZeRO-%d in groups of %d", level, g.zero_group);
    if (g.cp > 1) snprintf(cp, sizeof cp, "cp %d x ", g.cp);
    if (c->parallel.overlap_tp > 1) snprintf(bands, sizeof bands, " in %d bands", (int)c->parallel.overlap_tp);
    if (c->parallel.data_port) snprintf(data, sizeof data, ", data ports from %d on", (int)c->parallel.data_port);
    log_info("%d ranks on %d host%s (%s): tp %d%s%s x %sdp %d%s x pp %d; port %d%s, ready after %.2f s", r->boot.size,
             r->hosts, r->hosts > 1 ? "s" : "", r->boot.launcher, g.tp, g.sp ? " with sp" : "", bands, cp, g.dp, zero,
             g.pp, store_port(r->store), data, r->ready_s);
    if (g.pp > 1)
        log_info("pipeline %s: %d stages, %d chunk%s a rank%s, %d micro-batches a step; ranks are numbered %s", s->name,
                 s->stages, s->chunks, s->chunks > 1 ? "s" : "", s->replicas > 1 ? " in each direction" : "",
                 s->microbatches, grid_order_text(g));
    log_info("%d gradient bucket%s, %lld elements of padding%s%s; a rank counts as frozen after %g s, as "
             "hung after %g s",
             reg->bucket_count, reg->bucket_count > 1 ? "s" : "", (long long)param_padding(reg),
             c->parallel.overlap_grad ? ", reduced during backward" : "",
             c->parallel.overlap_param && reg->place.zero_shards[PARAM_DENSE] > 1 ? ", gathered during forward" : "",
             c->parallel.freeze_s, c->parallel.stall_s);
}

static void say_fp8(const ModelSpec *m)
{
    if (!m->fp8.recipe) return;
    const int blocks = layer_set_count(&m->fp8.blocks);
    log_info("run.fp8=%s: operands of the products of %d of %d blocks in %d bits, of the first and last %d in "
             "bf16%s",
             fp8_facts(m->fp8.recipe)->name, blocks, m->layers, fp8_facts(m->fp8.recipe)->bits,
             (m->layers - blocks) / 2,
             !m->moe.experts  ? ""
             : m->fp8.experts ? ", experts' products too"
                              : ", and experts' products in bf16");
}

/* Says of products of bf16 that they are slow here, or that the fastest kind could not be taken. */
static void say_dots(const Loop *l)
{
    const Device *d = &l->run.trainer.device;
    if (d->dot == DOT_VDPBF16 && !d->dot_pairs)
        log_warn("debug.dot=vdpbf16: these kernels have no VDPBF16PS, and others give its bits several times "
                 "slower");
    if (d->dot == DOT_AMX && !d->dot_tiles)
        log_warn("debug.dot=amx: these kernels have no TDPBF16PS%s, and others give its bits several times slower",
                 dot_tiles() == TILES_DIFFER ? " that sums as its manual says" : "");
    if (dot_tiles() == TILES_DIFFER && l->cfg->origin[CFG_debug_dot].kind == ORIGIN_AUTO)
        log_warn("debug.dot=auto takes %s: this processor's TDPBF16PS does not sum as its manual says",
                 dot_name(d->dot));
}

/* end: the last step of this start. */
static void say_start(const Loop *l, int64_t end)
{
    const MemoryPlan *p = &l->run.plan;
    const Trainer *t = &l->run.trainer;
    DeviceInfo gpu;
    char where[192], a[UNITS_BYTES], b[UNITS_BYTES], c[UNITS_BYTES], d[UNITS_BYTES], e[UNITS_BYTES];
    if (t->device.kind == DEVICE_CUDA && device_cuda_info(t->spec.device.index, &gpu) == ERR_OK)
        snprintf(where, sizeof where, "%s, %s", gpu.name, dtype_name(t->spec.compute));
    else
        snprintf(where, sizeof where, "%s kernels%s%s, %d thread%s", isa_name(t->device.isa),
                 t->spec.compute == BF16 ? ", bf16 by " : "", t->spec.compute == BF16 ? dot_name(t->device.dot) : "",
                 t->device.threads, t->device.threads == 1 ? "" : "s");
    log_info("%s: %s parameters, %s (state %s, saves %s, scratch %s), %s, %s %.0f GFLOP/s", l->cfg->run.name,
             units_count(a, (double)p->params.model), units_bytes(b, memory_plan_total(p)), units_bytes(c, p->state),
             units_bytes(d, p->save), units_bytes(e, p->scratch), where, l->peak_source, l->peak_flops * 1e-9);
    if (t->spec.compute == BF16 && t->device.kind == DEVICE_CPU) say_dots(l);
    say_fp8(&t->spec.model);
    say_ranks(l);
    if (p->states && p->host_apart) log_info("optim.states: %s in the host's memory", units_bytes(b, p->states));
    else if (p->states) log_info("optim.states=host: the device is the host, its memory holds all");
    if (t->spec.poison) log_info("debug.poison: released memory is filled with NaN");
    const DatasetStage data = dataset_stage(l->run.train, t->progress.samples);
    const int64_t steps = l->cfg->derived.steps;
    char epochs[48] = "";
    const double all = (double)batch_ramp_samples(&l->cfg->derived.batch, steps) / (double)data.samples;
    if (data.count == 1 && all < 1000) snprintf(epochs, sizeof epochs, ", which are %.3g epochs", all);
    else if (data.count == 1) snprintf(epochs, sizeof epochs, ", which are %s epochs", units_count(a, all));
    const char *order = t->progress.step > steps ? "beyond" : "of";
    log_info("%lld samples of %lld tokens an epoch; step %lld %s %lld%s", (long long)data.samples,
             (long long)l->run.spec.model.seq, (long long)t->progress.step, order, (long long)steps, epochs);
    announce_validation(&l->run);
    if (t->progress.step >= end)
        log_info("nothing to do: step %lld is the last (train.steps, train.tokens or train.stop_at)", (long long)end);
}

/* ---- what happens after a step ---- */

/* A step cannot be faster than what its speed is a share of: where it is, others had the machine when that was measured
 * at the start. It is measured again, and is at least what the step reached. */
static void correct_peak(Loop *l, double flops)
{
    double again;
    const double before = l->peak_flops;
    if (!l->lead || !(flops > before)) return;
    if (run_peak_rate(&l->run, &again, &l->peak_source)) again = 0;
    l->peak_flops = again > flops ? again : flops;
    log_info("%s measured again: %.3g GFLOP/s, at the start it was %.3g; mfu is a share of that", l->peak_source,
             l->peak_flops * 1e-9, before * 1e-9);
}

static void record_step(Loop *l, const StepReport *r, double seconds)
{
    double tokens = (double)r->samples * (double)l->run.spec.model.seq;
    /* a device's share; ranks that share a GPU are one device */
    double devices = (double)l->run.world->size / l->ranks.gpu.sharers;
    double flops = l->flop_per_token * tokens / seconds / devices;
    const MixtureSpec *moe = &l->run.spec.model.moe;
    correct_peak(l, flops);
    MetricsRecord m = { .step = r->step,
                        .tokens = l->run.trainer.progress.samples * l->run.spec.model.seq,
                        .loss = r->loss,
                        .grad_norm = r->grad_norm,
                        .lr = r->lr,
                        .step_ms = 1e3 * seconds,
                        .tokens_per_s = tokens / seconds,
                        .mfu = flops / l->peak_flops,
                        .tflops = flops * 1e-12,
                        .memory_bytes = memory_plan_total(&l->run.plan),
                        .skipped = r->skipped,
                        .time = clock_unix_s(),
                        .save = l->saved,
                        .bubble = l->bubble,
                        .ranks = l->slowest,
                        .load = moe->experts ? l->loads.load : NULL,
                        .dropped = moe->capacity.factor > 0 || moe->capacity.drop ? l->loads.dropped : NULL,
                        .aux_loss = moe->experts && moe->balance.aux > 0 ? &l->loads.aux_loss : NULL,
                        .z_loss = moe->experts && moe->balance.z > 0 ? &l->loads.z_loss : NULL,
                        .logits = { r->logits.by_layer, r->logits.most, r->logits.layer, r->logits.head },
                        .layers = model_blocks(&l->run.spec.model),
                        .mtp_loss = r->mtp_loss,
                        .mtp = l->run.spec.model.mtp.count };
    if (l->lead) metrics_step(&l->metrics, &m);
    l->saved = (MetricsSave){ 0 };
    l->bubble = (MetricsBubble){ 0 };
    if (r->rescaled && !r->skipped)
        log_info("step %lld: gradients beyond fp16, done again with loss scale 2^%lld", (long long)r->step,
                 (long long)l->run.trainer.progress.loss_scale.log2);
    if (r->retried_in_pieces)
        log_info("step %lld: a rank's experts got more rows than moe.slack=%g has room for, done again in pieces",
                 (long long)r->step, moe->capacity.slack);
    if (r->redone)
        log_info("step %lld: done again %d time%s with a coarser fixed point", (long long)r->step, r->redone,
                 r->redone == 1 ? "" : "s");
}

static Err check_numerics(Loop *l, const StepReport *r)
{
    l->skipped_in_a_row = r->skipped ? l->skipped_in_a_row + 1 : 0;
    if (!r->skipped) return ERR_OK;
    log_warn("step %lld skipped: loss or gradient is not finite (%d in a row)", (long long)r->step,
             l->skipped_in_a_row);
    if (l->skipped_in_a_row < MAX_SKIPPED_IN_A_ROW) return ERR_OK;
    return err_set(ERR_NUMERICS, "%d steps in a row had a loss or gradient that is not finite, the last was step %lld",
                   l->skipped_in_a_row, (long long)r->step),
           err_hint("lower optim.lr or raise optim.warmup, and resume from a checkpoint before the trouble");
}

static void record_valid(Loop *l, const char *set, double loss)
{
    const Trainer *t = &l->run.trainer;
    ValidRecord r = { .step = t->progress.step,
                      .tokens = t->progress.samples * l->run.spec.model.seq,
                      .loss = loss,
                      .time = clock_unix_s() };
    curve_cut_name(r.name, set);
    metrics_valid(&l->metrics, &r);
}

static void record_task(Loop *l, const Task *task)
{
    const Trainer *t = &l->run.trainer;
    TaskRecord r = { .step = t->progress.step,
                     .tokens = t->progress.samples * l->run.spec.model.seq,
                     .questions = task->count,
                     .time = clock_unix_s(),
                     .name = task->name,
                     .metric = task_metric_names };
    _Static_assert((int)RECORD_TASK_METRICS == (int)TASK_METRICS, "a record has room for all metrics");
    for (TaskMetric m = 0; m < TASK_METRICS && task_has(task, m); m++) {
        const TaskMean mean = task_mean(&l->run.tasks, task, m);
        r.mean[r.metrics] = mean.mean;
        r.error[r.metrics++] = mean.error;
    }
    metrics_task(&l->metrics, &r);
}

static Err evaluate(Loop *l)
{
    Trainer *t = &l->run.trainer;
    int64_t counted;
    watch_phase(l->ranks.watch, PHASE_EVAL, t->progress.step);
    trace_begin("evaluation");
    for (int i = 0; i < l->run.valid.count; i++) {
        const NamedSet *set = &l->run.valid.set[i];
        double *loss = &l->run.valid_loss[i];
        TRY(trainer_eval(t, run_tokens(set->data), 0, run_valid_samples(&l->run, set->data), loss, &counted));
        if (l->lead) record_valid(l, set->name, *loss);
    }
    l->run.valid_step = t->progress.step;
    TRY(run_score_tasks(&l->run));
    for (int i = 0; i < l->run.tasks.count && l->lead; i++) record_task(l, &l->run.tasks.task[i]);
    trace_end();
    return ERR_OK;
}

/* The outcome of the save in flight, if there is one and it has ended or `wait`. must: the run ends with it, so a
 * failure is the run's; else it is a warning and training goes on. */
static Err collect_save(Loop *l, bool wait, bool must)
{
    CkptOutcome o;
    const double begin = clock_s();
    if (!ckpt_collect(&l->ckpt, wait, &o)) return ERR_OK;
    l->stall_s += clock_s() - begin;
    if (!o.err) l->saved_step = o.step;
    if (!o.err && l->ranks.boot.supervised) l->ranks.boot.supervised->saved = o.step;
    if (!o.err && l->lead && kept_saved(l->cfg->run.dir, o.step)) log_warn("%s", err_message());
    l->saved = (MetricsSave){ .step = o.step, .stall_ms = 1e3 * l->stall_s, .save_ms = 1e3 * o.seconds };
    if (o.err) text_cut(l->saved.failure, sizeof l->saved.failure, o.why.message);
    if (o.err && (must || o.err != ERR_STORAGE)) return err_again(&o.why, o.err);
    const int64_t most = l->cfg->checkpoint.fail_after;
    l->failed_saves = o.err ? l->failed_saves + 1 : 0;
    if (most && l->failed_saves >= most)
        return err_prefix(err_again(&o.why, o.err), "%lld save%s in a row failed (checkpoint.fail_after)",
                          (long long)most, most == 1 ? "" : "s");
    if (o.err) log_warn("%s; training goes on", o.why.message);
    else if (l->lead)
        log_info("checkpoint of step %lld: training stood still for %.1f ms, written in %.1f ms", (long long)o.step,
                 1e3 * l->stall_s, 1e3 * o.seconds);
    return ERR_OK;
}

/* One at a time: a save that is due while the one before is being written waits for that. The outcome of one that a
 * thread writes is for a later step, however soon it is known: the next line has room for that of the one before. */
static Err save(Loop *l, bool must)
{
    CkptMeta meta = run_meta(&l->run, l->config_text);
    meta.machine = l->machine;
    meta.job = l->job;
    watch_phase(l->ranks.watch, PHASE_SAVE, meta.step);
    fault_point("save");
    TRY(collect_save(l, true, false));
    const double begin = clock_s();
    TRY(trainer_settle(&l->run.trainer));
    trace_begin("checkpoint");
    Err err = ckpt_start(&l->ckpt, &meta);
    l->stall_s = clock_s() - begin;
    if (!err && (must || !l->cfg->checkpoint.async)) err = collect_save(l, true, must);
    trace_end();
    return err;
}

/* The last checkpoint: that of the step reached, unless the one in flight turns out to be it. */
static Err save_last(Loop *l)
{
    TRY(collect_save(l, true, false));
    return l->saved_step == l->run.trainer.progress.step ? ERR_OK : save(l, true);
}

/* After a failure that left the peers in touch, what was being written is still to be had. */
static Err end_of_save(Loop *l, Err err)
{
    ErrKept why;
    if (!l->cfg->checkpoint.async || err == ERR_PEER || err == ERR_HANG || err == ERR_INTERNAL) return err;
    err_keep(&why);
    if (collect_save(l, true, false)) log_warn("%s", err_message());
    return err_again(&why, err);
}

static bool due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

/* For a step that makes a line of the log: how long each rank computed and waited in its own `seconds`. */
static Err share_times(Loop *l, int64_t step, double seconds)
{
    double stalled = 0;
    l->slowest = (MetricsRanks){ 0 };
    if (l->run.world->size == 1 || !due(step, l->cfg->log.every)) return ERR_OK;
    TRY(device_stalled(&l->run.trainer.device.stream, &stalled));
    return rank_times_share(&l->times, fmax(seconds - stalled, 0), stalled, &l->slowest);
}

/* The report of a step, if one was finished (trainer_start, trainer_finish). */
static Err take_report(Loop *l, const StepReport *r)
{
    if (!r->step) return ERR_OK;
    TRY(share_times(l, r->step, clock_s() - l->begun_s));
    if (l->run.spec.model.moe.experts) TRY(expert_load_read(&l->run.trainer, &l->loads));
    const double now = clock_s();
    record_step(l, r, now - l->begun_s);
    if (l->ranks.boot.supervised) l->ranks.boot.supervised->step = r->step;
    l->begun_s = now;                   /* a step that was enqueued meanwhile began */
    TRY(collect_save(l, false, false)); /* for the next line of metrics, which has room for one save */
    return check_numerics(l, r);
}

static Err finish_step(Loop *l)
{
    StepReport report;
    TRY(trainer_finish(&l->run.trainer, &report));
    return take_report(l, &report);
}

/* Is the step asked for by log.trace_every or log.trace_steps? Of a pipeline one of the largest batch, whose picture
 * shows the whole schedule. */
static bool wanted(const Loop *l, int64_t step)
{
    const Config *c = l->cfg;
    const int64_t first = c->derived.trace_first;
    if (l->run.world->grid.pp > 1 && trainer_batch(&l->run.trainer, step) < l->run.spec.global_batch) return false;
    return due(step, c->log.trace_every) || (first && step >= first && step <= c->derived.trace_last);
}

static void start_trace(Loop *l)
{
    l->tracing = true;
    if (l->timeline) timeline_start(l->timeline);
    else trace_start();
}

static Err write_trace(Loop *l)
{
    TimelineFigures f;
    if (!l->timeline) return err_as(trace_stop(), ERR_STORAGE);
    Err err = timeline_stop(l->timeline, &f);
    if (err) return err == ERR_IO ? err_as(err, ERR_STORAGE) : err;
    l->bubble = (MetricsBubble){ f.drawn, f.bubble, f.bubble_simulated };
    return ERR_OK;
}

/* With a timeline collective. What it takes is no part of the step. */
static Err stop_trace(Loop *l)
{
    const double began_s = clock_s();
    device_time_stalls(&l->run.trainer.device, false);
    l->tracing = false;
    Err err = write_trace(l);
    l->begun_s += clock_s() - began_s;
    return err;
}

static Err loader_tokens(void *user, int64_t first, int64_t count, int32_t *tokens)
{
    trace_begin("next batch");
    const Loop *l = user;
    Err err = loader_get(l->loader, run_data_position(&l->run, first), count, tokens);
    trace_end();
    return err;
}

/* Enqueues a step. Of the one before it, if that gets done meanwhile, the line is written. Among several ranks only
 * this one knows of a failure: no more is asked of the others. */
static Err start_step(Loop *l, TokenSource source)
{
    StepReport before;
    ErrKept why;
    Err err = trainer_start(&l->run.trainer, source, &before);
    if (!err) return take_report(l, &before);
    if (l->run.world->size > 1) return err;
    err_keep(&why);
    if (take_report(l, &before)) log_debug("%s", err_message());
    return err_again(&why, err);
}

/* Whether a step's outcome is wanted before the next is started. Else, on a GPU, it is read while that one runs. */
static bool waits_for(const Loop *l, int64_t step, int64_t end)
{
    const Config *c = l->cfg;
    return !trainer_runs_ahead(&l->run.trainer) || l->tracing || l->steps_done == 0 || step == end ||
           (run_evaluates(&l->run) && due(step, c->train.eval_every)) || due(step, c->checkpoint.every);
}

/* The next step, and its report if it is waited for, else one of step 0. A traced step is recorded with the one before
 * it, whose gathers of weights go on in its forward. */
static Err traced_step(Loop *l, int64_t end, StepReport *report)
{
    const Config *c = l->cfg;
    const int64_t step = trainer_next_step(&l->run.trainer);
    *report = (StepReport){ 0 };
    if (!l->tracing && (wanted(l, step) || wanted(l, step + 1))) {
        TRY(finish_step(l));
        start_trace(l);
    }
    trace_begin("step");
    TRY(start_step(l, (TokenSource){ l, loader_tokens }));
    if (waits_for(l, step, end)) TRY(trainer_finish(&l->run.trainer, report));
    trace_end();
    const bool last = due(step, c->log.trace_every) || step == c->derived.trace_last;
    return l->tracing && last ? stop_trace(l) : ERR_OK;
}

/* Somebody removed the run's folder, or made it anew, while the run writes into it: its log, metrics and lock are
 * gone. */
static void look_for_folder(Loop *l)
{
    char path[PATH_MAX];
    if (!l->lead || l->folder_gone || l->lock_fd < 0) return;
    if (snprintf(path, sizeof path, "%s/" RUN_LOCK, l->cfg->run.dir) >= PATH_MAX) return;
    if (file_is_still(l->lock_fd, path)) return;
    log_warn("the folder '%s' was removed or replaced while the run writes into it: its metrics and its log "
             "are lost "
             "from here on, and nothing keeps another run out; the next checkpoint makes it anew",
             l->cfg->run.dir);
    l->folder_gone = true;
}

/* Evaluation and checkpoint, where they are due; no step is in flight then. */
static Err after_step(Loop *l, int64_t end)
{
    const Config *c = l->cfg;
    const int64_t step = l->run.trainer.progress.step;
    if (run_evaluates(&l->run) && (due(step, c->train.eval_every) || step == end)) TRY(evaluate(l));
    return due(step, c->checkpoint.every) && step != end ? save(l, false) : ERR_OK;
}

/* A step's time begins with it, unless the one before is still in flight. */
static Err begin_times(Loop *l, int64_t step)
{
    double evaluating;
    Trainer *t = &l->run.trainer;
    device_time_stalls(&t->device, l->run.world->size > 1 && due(step, l->cfg->log.every));
    if (step != t->progress.step + 1) return ERR_OK;
    l->begun_s = clock_s();
    return device_stalled(&t->device.stream, &evaluating);
}

static Err one_step(Loop *l, int64_t end)
{
    StepReport report;
    Trainer *t = &l->run.trainer;
    const int64_t step = trainer_next_step(t);
    TRY(begin_times(l, step));
    signals_step(step);
    if (due(step, l->cfg->log.every)) look_for_folder(l);
    if (l->lead) announce_step(&l->run);
    watch_phase(l->ranks.watch, PHASE_STEP, step);
    fault_point("step");
    TRY(traced_step(l, end, &report));
    if (l->steps_done++ == 0) {
        TRY(run_keep_choices(&l->run)); /* every shape was met */
        TRY(dump_end(&l->dump, l->cfg->run.dir, l->run.world->rank, l->run.world->size == 1));
    }
    TRY(take_report(l, &report));
    return report.step ? after_step(l, end) : ERR_OK;
}

/* Reasons to end before the time, on any rank: a signal's number, OUT_OF_TIME, or 0. */
enum { OUT_OF_TIME = 1 << 16 };

static Err stop_reason(Loop *l, int64_t *reason)
{
    const double limit = l->cfg->train.max_minutes, minutes = (clock_s() - l->started_s) / 60;
    *reason = signals_stop;
    if (!*reason && limit > 0 && minutes >= limit) *reason = OUT_OF_TIME;
    return comm_max_i64(&l->run.world->host, &l->run.trainer.device.stream, reason, 1, NULL);
}

static Err say_stopped(const Loop *l, int64_t reason)
{
    const long long step = l->run.trainer.progress.step;
    char time[UNITS_BYTES];
    if (reason == OUT_OF_TIME)
        err_set(ERR_STOPPED, "stopped after %s (train.max_minutes) at step %lld, with a checkpoint in '%s'",
                units_seconds(time, clock_s() - l->started_s), step, l->cfg->run.dir);
    else
        err_set(ERR_STOPPED, "stopped by SIG%s after step %lld, with a checkpoint in '%s'", sigabbrev_np((int)reason),
                step, l->cfg->run.dir);
    const bool same = !strcmp(l->cfg->checkpoint.resume, "auto");
    return err_hint("%s command goes on from there", same ? "the same" : "with checkpoint.resume=auto this");
}

/* Data that cannot be read any more cost no step that was done. Among several ranks only this one knows: no save. */
static Err save_without_data(Loop *l, Err err)
{
    ErrKept why;
    if (err != ERR_DATA || l->run.world->size > 1) return err;
    err_keep(&why);
    Err saved = finish_step(l);
    if (!saved && l->saved_step != l->run.trainer.progress.step) saved = save(l, true);
    if (saved) log_warn("no checkpoint: %s", err_message());
    return err_again(&why, err);
}

/* What was traced up to a failure may show its cause: of several ranks what the lead recorded, for ranks that failed
 * tell nothing. */
static Err keep_trace(Loop *l, Err err)
{
    ErrKept why;
    if (!l->tracing || !l->lead || (l->timeline && !timeline_records(l->timeline))) return err;
    err_keep(&why);
    l->tracing = false;
    if (trace_stop()) log_warn("no timeline: %s", err_message());
    return err_again(&why, err);
}

static Err loop_run(Loop *l)
{
    Trainer *t = &l->run.trainer;
    int64_t end = l->cfg->derived.steps, stop_at = l->cfg->train.stop_at;
    int64_t reason = 0;
    Err err = ERR_OK;
    if (stop_at > 0 && stop_at < end) end = stop_at;
    if (l->lead) say_start(l, end);
    if (t->progress.step < end) metrics_wait(&l->metrics);
    while (!err && trainer_next_step(t) <= end && !reason) {
        err = one_step(l, end);
        if (!err && trainer_next_step(t) <= end) TRY(stop_reason(l, &reason));
    }
    if (!err) err = finish_step(l); /* (one that is in flight when a signal came) */
    if (err) return keep_trace(l, save_without_data(l, end_of_save(l, err)));
    TRY(save_last(l));
    if (l->tracing && l->cfg->derived.trace_first) TRY(stop_trace(l)); /* the run ends before trace_last */
    return reason ? say_stopped(l, reason) : ERR_OK;
}

/* Closing may fail too; the first failure is the one to report. */
static Err close_metrics(Loop *l, Err err)
{
    ErrKept first;
    err_keep(&first);
    Err closed = metrics_close(&l->metrics);
    return err ? err_again(&first, err) : closed;
}

/* Says where to look now. */
static void say_end(const Loop *l)
{
    char time_text[UNITS_BYTES];
    if (!l->lead || !l->steps_done) return;
    log_info("done: step %lld after %s; everything is in '%s', the curve in '%s/loss.svg'",
             (long long)l->run.trainer.progress.step, units_seconds(time_text, clock_s() - l->started_s),
             l->cfg->run.dir, l->cfg->run.dir);
}

/* A worker that is lost from here on needs no other: not even those that are there would come again. */
static Err end_together(Loop *l)
{
    int64_t nothing = 0;
    if (!l->ranks.boot.supervised) return ERR_OK;
    TRY(comm_max_i64(&l->run.world->host, &l->run.trainer.device.stream, &nothing, 1, NULL));
    l->ranks.boot.supervised->done = true;
    return ERR_OK;
}

Err train_run(Config *cfg, const Boot *boot, const LayoutChoice *choice)
{
    ON_HEAP(Loop, l, 1);
    signals_catch(boot->rank == 0, boot->supervised ? &boot->supervised->signals : NULL);
    signals_follow_launcher();
    Err err = loop_open(l, cfg, boot, choice);
    if (!err) err = loop_run(l);
    if (!err) fault_point("end");
    err = close_metrics(l, err);
    if (!err) say_end(l);
    if (!err) err = end_together(l);
    return loop_close(l, err);
}
