/*
 * A run's loop opened and closed; the loop itself: train.c.
 */
#include "train/loop.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/file.h"
#include "base/log.h"
#include "base/plain.h"
#include "base/run_files.h"
#include "base/trace.h"
#include "boot/supervised.h"
#include "train/join.h"
#include "train/kept.h"
#include "train/signals.h"

/* One run in a folder: rank 0 holds the lock for all. */
static Err take_folder(Loop *l)
{
    if (!l->lead) return ERR_OK;
    TRY_AS(ERR_STORAGE, file_make_dirs(l->cfg->run.dir));
    TRY(ckpt_lock(l->cfg->run.dir, &l->lock_fd));
    if (l->ranks.boot.attempt) speaker_forget(l->cfg->run.dir); /* (all earlier workers are gone, as all have met) */
    run_sweep(l->cfg->run.dir);
    const char *foreign = run_file_foreign(l->cfg->run.dir);
    if (!foreign) return ERR_OK;
    err_set(ERR_CONFIG, "run.dir = '%s' has a '%s', which no run wrote and this one would replace", l->cfg->run.dir,
            foreign);
    return err_hint("take another run.dir, or move that file away");
}

/* Who started the run: "srun '77.0', 4 ranks, port 21042, start 0", and Slurm's number where another launcher did. */
static void job_text(const Boot *b, char *out, size_t size)
{
    const char *slurm = getenv("SLURM_JOB_ID");
    int n = snprintf(out, size, "%s", b->size > 1 ? b->job : "one process");
    if (slurm && n < (int)size && strcmp(b->launcher, "srun"))
        snprintf(out + n, size - (size_t)n, ", Slurm job %.40s", slurm);
    plain_make(out, PLAIN_LINE);
}

static Err write_config(Loop *l)
{
    char path[PATH_MAX];
    const char *dir = l->cfg->run.dir;
    if (!l->lead) return ERR_OK;
    snprintf(path, sizeof path, "%s/" RUN_CONFIG, dir);
    identity_machine(l->machine);
    job_text(&l->ranks.boot, l->job, sizeof l->job);
    /* (first, for starts/ says whose files the others are) */
    TRY(kept_start(dir, l->config_text, l->run.trainer.progress.step, l->machine, l->job));
    TRY(file_replace(path, l->config_text, (int64_t)strlen(l->config_text)));
    return kept_tokenizer(dir, l->cfg->data.tokenizer);
}

/* A run that begins anew cuts the metrics of the one before. Where that one had a checkpoint, its disk may not be
 * there, or somebody removed too much: nothing is cut then. What was killed before its first checkpoint, or while
 * it wrote that one, just begins again. */
static Err check_earlier(const Loop *l)
{
    const char *dir = l->cfg->run.dir;
    char folder[PATH_MAX];
    MetricsLeft left;
    if (!l->lead || l->run.trainer.progress.step || strcmp(l->cfg->checkpoint.resume, "auto")) return ERR_OK;
    TRY(metrics_left(dir, &left));
    if (!left.last_step || !(left.saved || kept_was_saved(dir))) return ERR_OK;
    snprintf(folder, sizeof folder, "%.*s/" RUN_CHECKPOINTS, PATH_MAX - 16, dir);
    return err_set(ERR_CKPT, "'%s/metrics.jsonl' goes up to step %lld, but '%s/checkpoints' %s", dir,
                   (long long)left.last_step, dir, file_is_dir(folder) ? "is empty" : "is not there"),
           err_hint("is its disk mounted? To begin anew in this folder, which cuts the metrics of these steps: "
                    "checkpoint.resume=none; else take another run.dir");
}

/* How long the texts of a checkpoint's meta data are at most. */
static int64_t meta_bytes(const Loop *l)
{
    const char *overrides = l->run.overrides.text;
    return (int64_t)(strlen(l->config_text) + strlen(l->run.data_id) + (overrides ? strlen(overrides) : 0)) +
           l->run.valid.count * (SET_NAME_BYTES + 112) + (int64_t)(sizeof l->machine + sizeof l->job) + 1024;
}

/* Saves up to the end of this start; what a signal asks for comes besides. */
static int64_t saves_to_come(const Loop *l)
{
    const int64_t stop = l->cfg->train.stop_at, steps = l->cfg->derived.steps, every = l->cfg->checkpoint.every;
    const int64_t left = (stop && stop < steps ? stop : steps) - l->run.trainer.progress.step;
    return every ? (left - 1) / every + 1 : 1;
}

static Err open_ckpt(Loop *l)
{
    CkptOptions o = { .run_dir = l->cfg->run.dir,
                      .params = &l->run.trainer.params,
                      .world = l->run.world,
                      .stream = &l->run.trainer.device.stream,
                      .keep = (int)l->cfg->checkpoint.keep,
                      .to_come = saves_to_come(l),
                      .bad_from = l->run.trainer.progress.step + 1,
                      .async = l->cfg->checkpoint.async,
                      .comm = l->cfg->checkpoint.async ? &l->ranks.save : NULL,
                      .meta_bytes = meta_bytes(l),
                      .keep_every = l->cfg->checkpoint.keep_every,
                      .keep_best = l->cfg->checkpoint.keep_best };
    if (o.keep_best) o.best_set = l->run.valid.set[l->run.best_set].name;
    TRY(ckpt_open(&l->ckpt, o, &l->run.setup));
    setup_freeze(&l->run.setup);
    return ERR_OK;
}

static Err open_loader(Loop *l)
{
    LoaderOptions o = { .dataset = l->run.train,
                        .first_position = run_data_position(&l->run, l->run.trainer.progress.samples),
                        .first_step = l->run.trainer.progress.step + 1,
                        .ramp = l->cfg->derived.batch,
                        .dp = l->run.world->grid.dp,
                        .dp_rank = l->run.world->dp_rank };
    return loader_open(&o, &l->loader);
}

/* If there are several ranks, all have a timeline, and some of them record. */
static Err open_trace(Loop *l)
{
    const World *w = l->run.world;
    const char *ranks = l->cfg->log.trace_ranks, *dir = l->cfg->run.dir;
    char path[PATH_MAX];
    if (!l->cfg->log.trace_every && !l->cfg->derived.trace_first) return ERR_OK;
    trace_track("main thread");
    if (!*ranks) ranks = w->grid.pp > 1 ? "all" : "0";
    if (w->size > 1) return timeline_open(&l->run.trainer, dir, ranks, &l->timeline);
    snprintf(path, sizeof path, "%s/" RUN_TIMELINE, dir);
    return trace_open(path);
}

/* 0: the data change on the way. */
static int64_t epoch_tokens(const Loop *l)
{
    const DatasetStage data = dataset_stage(l->run.train, 0);
    return data.count == 1 ? data.samples * l->run.spec.model.seq : 0;
}

/* The run goes on by itself: why, and what that cost. */
static void say_restart(Loop *l)
{
    const Supervised *s = l->ranks.boot.supervised;
    const int64_t step = l->run.trainer.progress.step;
    const RestartRecord r = { .step = step,
                              .restart = l->ranks.boot.attempt,
                              .cause = s->before,
                              .lost = s->lost_step > step ? s->lost_step - step : 0,
                              .seconds = clock_s() - s->lost_s,
                              .time = clock_unix_s() };
    log_info("restart %lld: %s", (long long)r.restart, r.cause);
    log_info("after %.2f s the run goes on from step %lld, and does %lld step%s again", r.seconds, (long long)step,
             (long long)r.lost, r.lost == 1 ? "" : "s");
    metrics_restart(&l->metrics, &r);
}

static Err open_metrics(Loop *l)
{
    char folder[PATH_MAX];
    const char *slash = realpath(l->cfg->run.dir, folder) ? strrchr(folder, '/') : NULL;
    MetricsOptions o = { .run_dir = l->cfg->run.dir,
                         .title = slash && slash[1] ? slash + 1 : l->cfg->run.dir,
                         .jsonl = l->cfg->log.jsonl,
                         .tensorboard = l->cfg->log.tensorboard,
                         .prometheus = l->cfg->log.prometheus,
                         .color = (int)l->cfg->log.color,
                         .log_every = l->cfg->log.every,
                         .total_steps = l->cfg->derived.steps,
                         .epoch_tokens = epoch_tokens(l),
                         .config = l->config_text,
                         .resume_step = l->run.trainer.progress.step };
    const Overrides *changed = &l->run.overrides;
    if (!l->lead) return ERR_OK;
    TRY(metrics_open(&l->metrics, o));
    overrides_say(changed);
    for (int i = 0; i < changed->count; i++) {
        const ConfigKey *key = config_key(changed->item[i].key);
        OverrideRecord r = { .step = changed->step,
                             .section = key->section,
                             .key = key->name,
                             .was = changed->item[i].was,
                             .is = changed->item[i].is,
                             .time = clock_unix_s() };
        metrics_override(&l->metrics, &r);
    }
    if (l->ranks.boot.attempt) say_restart(l);
    return ERR_OK;
}

/* Every evaluation reads the same samples: that their ids are in the vocabulary is known before step 1. */
static Err check_valid(const Run *r)
{
    for (int i = 0; i < r->valid.count; i++) {
        const Dataset *set = r->valid.set[i].data;
        TRY(dataset_check(set, run_valid_samples(r, set)));
    }
    return ERR_OK;
}

/* Rank 0 chooses, while the others wait for its word. */
static Err choose_layout(Loop *l, Config *cfg, const Boot *boot, const LayoutChoice *choice)
{
    char text[2048] = "";
    Room room;
    TRY(join_meet(&l->ranks, cfg, boot, cfg->run.dir, &signals_stop, choice->by_room));
    if (choice->by_room) TRY(room_of_ranks(cfg, &l->ranks, &room));
    if (l->lead) TRY(choice->choose(choice->user, cfg, boot, choice->by_room ? &room : NULL, text, sizeof text));
    TRY(ranks_tell(&l->ranks, "layout", text, sizeof text));
    return choice->take(choice->user, text, boot, cfg);
}

Err loop_open(Loop *l, Config *cfg, const Boot *boot, const LayoutChoice *choice)
{
    const double started_s = boot->supervised ? boot->supervised->begun_s : clock_s(); /* for train.max_minutes */
    *l = (Loop){ .cfg = cfg, .lock_fd = -1, .started_s = started_s, .lead = boot->rank == 0 };
    if (choice) TRY(choose_layout(l, cfg, boot, choice));
    TRY(join_ranks(&l->ranks, cfg, boot, cfg->run.dir, &signals_stop, &l->config_text));
    TRY(take_folder(l));
    TRY(ranks_see_folder(&l->ranks, cfg->run.dir));
    watch_phase(l->ranks.watch, PHASE_LOAD, 0);
    fault_point("load");
    TRY(run_open(&l->run, cfg, RUN_TRAIN, &l->ranks));
    if (l->lead) TRY(check_valid(&l->run));
    TRY(run_resume(&l->run));
    if (l->ranks.boot.supervised) l->ranks.boot.supervised->saved = l->run.trainer.progress.step;
    TRY(check_earlier(l));
    TRY_AS(ERR_STORAGE, write_config(l));
    if (l->run.world->size > 1)
        TRY(rank_times_open(&l->times, l->run.world, &l->run.trainer.device.stream, &l->run.setup));
    TRY(open_ckpt(l));
    TRY(open_loader(l));
    TRY(open_trace(l));
    if (l->lead) TRY(run_peak_rate(&l->run, &l->peak_flops, &l->peak_source));
    TRY(run_tune(&l->run));
    l->flop_per_token = (double)model_flop_per_token(&l->run.spec.model, l->run.plan.params.model);
    l->saved_step = l->run.trainer.progress.step;
    dump_begin(&l->dump, &l->run.trainer.executor.ctx, cfg->debug.dump);
    return open_metrics(l);
}

/* (between ranks first: what is still on its way must not meet memory that is gone) */
Err loop_close(Loop *l, Err err)
{
    err = ranks_end(&l->ranks, err);
    ckpt_close(&l->ckpt);
    err = ranks_close(&l->ranks, err);
    timeline_close(l->timeline);
    dump_close(&l->dump);
    trace_close();
    loader_close(l->loader);
    run_close(&l->run);
    free(l->config_text);
    if (l->lock_fd >= 0 && err) run_leave(l->cfg->run.dir);
    if (l->lock_fd >= 0) file_unlock(l->lock_fd);
    return err;
}
