/*
 * The run's loop. Order after each step: metrics, evaluation, checkpoint, and only then the question whether
 * to stop: so a stop never loses what a step did.
 */
#include "train/train.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "base/mathx.h"
#include "base/trace.h"
#include "train/metrics.h"
#include "train/run.h"

enum { MAX_SKIPPED_IN_A_ROW = 20 };

/* ---- signals: the first asks for a checkpoint, a second SIGINT leaves at once ---- */

static volatile sig_atomic_t stop_signal;

static void on_signal(int sig)
{
    if (sig == SIGINT && stop_signal == SIGINT) _exit(err_exit_code(ERR_INTERRUPTED));
    stop_signal = sig;
}

static void catch_signals(void)
{
    struct sigaction a = { .sa_handler = on_signal };
    sigemptyset(&a.sa_mask);
    a.sa_flags = SA_RESTART;
    stop_signal = 0;
    sigaction(SIGTERM, &a, NULL);
    sigaction(SIGUSR1, &a, NULL);
    sigaction(SIGINT, &a, NULL);
    signal(SIGPIPE, SIG_IGN); /* a closed pipe of the log must not end a run */
}

/* ---- state of the loop ---- */

typedef struct {
    const Config *cfg;
    Run run;
    Loader *loader;
    Ckpt ckpt;
    Metrics metrics;
    int lock_fd;
    char *config_text;
    double peak_flops, flop_per_token, started_s;
    const char *peak_source;
    int skipped_in_a_row;
    int64_t saved_step, steps_done;
} Loop;

static Err loader_tokens(void *user, int64_t first, int64_t count, int32_t *tokens)
{
    return loader_get(user, first, count, tokens);
}

/* ---- opening ---- */

/* The resolved configuration as text, for run.dir/config.ini and every checkpoint. */
static Err write_config(Loop *l)
{
    char path[PATH_MAX];
    size_t size = 0;
    FILE *f = open_memstream(&l->config_text, &size);
    if (!f) return err_set(ERR_MEMORY, "no memory for the configuration's text");
    config_dump(l->cfg, f, false);
    fclose(f);
    snprintf(path, sizeof path, "%s/config.ini", l->cfg->run.dir);
    return file_replace(path, l->config_text, (int64_t)size);
}

static Err open_ckpt(Loop *l)
{
    CkptOptions o = { .run_dir = l->cfg->run.dir,
                      .store = &l->run.trainer.params,
                      .world = &l->run.world,
                      .stream = &l->run.trainer.device.stream,
                      .keep = (int)l->cfg->checkpoint.keep,
                      .meta_bytes = (int64_t)strlen(l->config_text) + 1024 };
    TRY(ckpt_open(&l->ckpt, o, &l->run.setup));
    setup_freeze(&l->run.setup);
    return ERR_OK;
}

static Err open_loader(Loop *l)
{
    LoaderOptions o = { .dataset = l->run.train,
                        .first_position = l->run.trainer.samples,
                        .global_batch = l->cfg->train.global_batch,
                        .dp = 1 };
    return loader_open(&o, &l->loader);
}

static Err open_trace(const Loop *l)
{
    char path[PATH_MAX];
    if (!l->cfg->log.trace_every) return ERR_OK;
    snprintf(path, sizeof path, "%s/timeline.json", l->cfg->run.dir);
    return trace_open(path);
}

static Err open_metrics(Loop *l)
{
    MetricsOptions o = { .run_dir = l->cfg->run.dir,
                         .title = l->cfg->run.name,
                         .jsonl = l->cfg->log.jsonl,
                         .color = (int)l->cfg->log.color,
                         .log_every = l->cfg->log.every,
                         .total_steps = l->cfg->derived.steps,
                         .resume_step = l->run.trainer.step };
    return metrics_open(&l->metrics, o);
}

/* Global batches of the validation set, at most `most`. */
static int64_t valid_batches(const Run *r, int64_t most)
{
    int64_t whole = dataset_samples(r->valid) / r->spec.global_batch;
    if (whole < 1) whole = 1; /* a small set is read more than once */
    return most < whole ? most : whole;
}

/* Every evaluation reads the same samples: that their ids are in the vocabulary is known before step 1. */
static Err check_valid(const Run *r)
{
    if (!r->valid) return ERR_OK;
    return dataset_check(r->valid, valid_batches(r, r->cfg->train.eval_batches) * r->spec.global_batch);
}

static Err loop_open(Loop *l, const Config *cfg)
{
    *l = (Loop){ .cfg = cfg, .lock_fd = -1, .started_s = clock_s() };
    TRY_AS(ERR_STORAGE, file_make_dirs(cfg->run.dir));
    TRY(ckpt_lock(cfg->run.dir, &l->lock_fd));
    TRY(run_open(&l->run, cfg, RUN_TRAIN));
    TRY(check_valid(&l->run));
    TRY(run_resume(&l->run));
    TRY_AS(ERR_STORAGE, write_config(l));
    TRY(open_ckpt(l));
    TRY(open_loader(l));
    TRY(open_trace(l));
    TRY(run_peak_rate(&l->run, &l->peak_flops, &l->peak_source));
    TRY(run_tune(&l->run));
    l->flop_per_token = (double)model_flop_per_token(&l->run.spec.model, l->run.plan.params);
    l->saved_step = l->run.trainer.step;
    return open_metrics(l);
}

static void loop_close(Loop *l)
{
    trace_close();
    loader_close(l->loader);
    run_close(&l->run);
    free(l->config_text);
    if (l->lock_fd >= 0) file_unlock(l->lock_fd);
}

static void say_start(const Loop *l)
{
    const MemoryPlan *p = &l->run.plan;
    const Trainer *t = &l->run.trainer;
    DeviceInfo gpu;
    char where[192];
    if (t->device.kind == DEVICE_CUDA && device_cuda_info(0, &gpu) == ERR_OK)
        snprintf(where, sizeof where, "%s, %s", gpu.name, dtype_name(t->spec.compute));
    else snprintf(where, sizeof where, "%s kernels, %d threads", isa_name(t->device.isa), t->device.threads);
    log_info("%s: %.2f M parameters, %.1f MiB (state %.1f, saves %.1f, scratch %.1f), %s, %s %.0f GFLOP/s",
             l->cfg->run.name, (double)p->params / 1e6, (double)memory_plan_total(p) / (1 << 20),
             (double)p->state / (1 << 20), (double)(p->slots * (p->save[0] + p->save[1])) / (1 << 20),
             (double)p->scratch / (1 << 20), where, l->peak_source, l->peak_flops * 1e-9);
    if (t->spec.poison) log_info("debug.poison: released memory is filled with NaN");
    log_info("%lld samples of %lld tokens an epoch; step %lld of %lld",
             (long long)dataset_samples(l->run.train), (long long)l->run.spec.model.seq, (long long)t->step,
             (long long)l->cfg->derived.steps);
}

/* ---- what happens after a step ---- */

static void record_step(Loop *l, const StepReport *r, double seconds)
{
    double tokens = (double)l->cfg->train.global_batch * (double)l->run.spec.model.seq;
    double flops = l->flop_per_token * tokens / seconds;
    MetricsRecord m = { .step = r->step,
                        .tokens = l->run.trainer.samples * l->run.spec.model.seq,
                        .loss = r->loss,
                        .grad_norm = r->grad_norm,
                        .lr = r->lr,
                        .step_ms = 1e3 * seconds,
                        .tokens_per_s = tokens / seconds,
                        .mfu = flops / l->peak_flops,
                        .tflops = flops * 1e-12,
                        .memory_bytes = memory_plan_total(&l->run.plan),
                        .skipped = r->skipped };
    metrics_step(&l->metrics, &m);
    if (r->rescaled)
        log_info("step %lld: gradients beyond fp16, done again with loss scale 2^%lld", (long long)r->step,
                 (long long)l->run.trainer.loss_scale.log2);
    if (r->redone)
        log_info("step %lld: done again %d times with a coarser fixed point", (long long)r->step, r->redone);
}

static Err check_numerics(Loop *l, const StepReport *r)
{
    l->skipped_in_a_row = r->skipped ? l->skipped_in_a_row + 1 : 0;
    if (!r->skipped) return ERR_OK;
    log_warn("step %lld skipped: loss or gradient is not finite (%d in a row)", (long long)r->step,
             l->skipped_in_a_row);
    if (l->skipped_in_a_row < MAX_SKIPPED_IN_A_ROW) return ERR_OK;
    return err_set(ERR_NUMERICS,
                   "%d steps in a row had a loss or gradient that is not finite, the last was step %lld",
                   l->skipped_in_a_row, (long long)r->step),
           err_hint("lower optim.lr or raise optim.warmup, and resume from a checkpoint before the trouble");
}

static Err evaluate(Loop *l)
{
    Trainer *t = &l->run.trainer;
    double loss;
    int64_t counted;
    TRY(trainer_eval(t, run_tokens(l->run.valid), 0, valid_batches(&l->run, l->cfg->train.eval_batches),
                     &loss, &counted));
    metrics_valid(&l->metrics, t->step, t->samples * l->run.spec.model.seq, "", loss);
    return ERR_OK;
}

/* must: the run ends with it, so a failure is the run's; else it is a warning and training goes on. */
static Err save(Loop *l, bool must)
{
    CkptMeta meta = run_meta(&l->run, l->config_text);
    Err err = ckpt_save(&l->ckpt, &meta);
    if (!err) l->saved_step = meta.step;
    if (!err || must) return err;
    log_warn("%s; training goes on", err_message());
    return ERR_OK;
}

static bool due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

static Err traced_step(Loop *l, TokenSource source, StepReport *report)
{
    if (!due(l->run.trainer.step + 1, l->cfg->log.trace_every))
        return trainer_step(&l->run.trainer, source, report);
    trace_start();
    TRY(trainer_step(&l->run.trainer, source, report));
    TRY_AS(ERR_STORAGE, trace_stop());
    return ERR_OK;
}

static Err one_step(Loop *l, int64_t end)
{
    StepReport report;
    Trainer *t = &l->run.trainer;
    double t0 = clock_s();
    TRY(traced_step(l, (TokenSource){ l->loader, loader_tokens }, &report));
    if (l->steps_done++ == 0) TRY(run_keep_choices(&l->run)); /* every shape was met */
    record_step(l, &report, clock_s() - t0);
    TRY(check_numerics(l, &report));
    if (l->run.valid && (due(t->step, l->cfg->train.eval_every) || t->step == end)) TRY(evaluate(l));
    if (due(t->step, l->cfg->checkpoint.every) && t->step != end) TRY(save(l, false));
    return ERR_OK;
}

/* ERR_STOPPED when somebody wants the run to end before its time. */
static Err asked_to_stop(const Loop *l)
{
    int64_t step = l->run.trainer.step;
    double minutes = (clock_s() - l->started_s) / 60;
    if (stop_signal)
        return err_set(ERR_STOPPED, "stopped by %s after step %lld, with a checkpoint",
                       strsignal(stop_signal), (long long)step);
    if (l->cfg->train.max_minutes > 0 && minutes >= l->cfg->train.max_minutes)
        return err_set(ERR_STOPPED,
                       "stopped after %.1f minutes (train.max_minutes) at step %lld, with a checkpoint",
                       minutes, (long long)step);
    return ERR_OK;
}

static Err loop_run(Loop *l)
{
    Trainer *t = &l->run.trainer;
    int64_t end = l->cfg->derived.steps, stop_at = l->cfg->train.stop_at;
    Err stopped = ERR_OK;
    if (stop_at > 0 && stop_at < end) end = stop_at;
    say_start(l);
    while (t->step < end && !stopped) {
        TRY(one_step(l, end));
        if (t->step < end) stopped = asked_to_stop(l);
    }
    if (l->saved_step == t->step) return stopped;
    TRY(save(l, true));
    return stopped ? asked_to_stop(l) : ERR_OK; /* says it again: saving has used the record */
}

/* Closing may fail too; the first failure is the one to report. */
static Err close_metrics(Loop *l, Err err)
{
    char message[512], hint[512];
    snprintf(message, sizeof message, "%s", err_message());
    snprintf(hint, sizeof hint, "%s", err_hint_text());
    Err closed = metrics_close(&l->metrics);
    if (!err) return closed;
    err_set(err, "%s", message);
    return *hint ? err_hint("%s", hint) : err;
}

Err train_run(const Config *cfg)
{
    Loop l;
    catch_signals();
    Err err = loop_open(&l, cfg);
    if (!err) err = loop_run(&l);
    err = close_metrics(&l, err);
    loop_close(&l);
    return err;
}

/* ---- evaluation ---- */

/* Bytes that the targets of these samples stand for: what makes losses of different vocabularies comparable. */
static Err target_bytes(const Run *r, int64_t samples, int64_t *bytes)
{
    int64_t T = r->spec.model.seq;
    int32_t *tokens = malloc((size_t)(T + 1) * sizeof *tokens);
    if (!tokens) return err_set(ERR_MEMORY, "no memory for a sample of %lld tokens", (long long)T);
    Err err = ERR_OK;
    *bytes = 0;
    for (int64_t i = 0; i < samples && !err; i++) {
        err = dataset_get(r->valid, i, tokens);
        for (int64_t k = 1; k <= T && !err; k++) {
            int32_t size = 0;
            tokenizer_bytes(r->tokenizer, tokens[k], &size);
            *bytes += size;
        }
    }
    free(tokens);
    return err;
}

static Err eval_print(Run *r)
{
    double loss;
    int64_t counted, bytes = 0, batches = valid_batches(r, r->cfg->train.eval_batches);
    TRY(run_load_newest(r, r->cfg->run.dir));
    TRY(trainer_eval(&r->trainer, run_tokens(r->valid), 0, batches, &loss, &counted));
    TRY(target_bytes(r, batches * r->spec.global_batch, &bytes));
    printf("loss %.6f\nperplexity %.4f\ntokens %lld\nbytes %lld\nbits_per_byte %.4f\n", loss, m_exp(loss),
           (long long)counted, (long long)bytes, loss / m_log(2) * (double)counted / (double)bytes);
    return ERR_OK;
}

Err eval_run(const Config *cfg)
{
    Run r;
    TRY(run_open(&r, cfg, RUN_EVAL));
    Err err = eval_print(&r);
    run_close(&r);
    return err;
}
