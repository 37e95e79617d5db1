/* See run.h. */
#include "train/run.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/file.h"
#include "base/identity.h"
#include "base/log.h"
#include "base/processors.h"
#include "base/run_files.h"
#include "base/units.h"
#include "hf/folder.h"
#include "hf/load.h"
#include "param/odd.h"
#include "train/bind.h"
#include "train/data_id.h"
#include "train/inputs.h"
#include "train/kept.h"
#include "train/preflight.h"
#include "train/room.h"
#include "train/spec.h"
#include "train/threads.h"

/* ---- opening ---- */

static Err open_train(Run *r)
{
    DatasetOptions o = data_spec(r->cfg, r->tokenizer);
    const double began_s = clock_s();
    o.vocab = r->spec.model.vocab;
    TRY(data_error(r->cfg, CFG_data_train, dataset_open(&o, &r->train)));
    if (o.order == ORDER_MEGATRON && r->world->rank == 0)
        log_info("data.order=megatron: order of %lld samples, %.1f MiB on each rank, made in %.1f s",
                 (long long)o.samples, (double)dataset_index_bytes(r->train) / (1 << 20), clock_s() - began_s);
    return ERR_OK;
}

/* Files made without --append-eod have no ends of documents that these keys could go by. */
static void look_for_ends(const Run *r)
{
    const Config *c = r->cfg;
    if (!(c->data.mask_eod || c->data.reset_at_eod) || r->world->rank != 0) return;
    for (int i = 0; i < dataset_source_count(r->train); i++)
        if (!dataset_source_ends_with(r->train, i, r->spec.documents.eod))
            log_warn("'%s' does not end with an end-of-document token, which data.%s goes by: was it made without "
                     "--append-eod?",
                     dataset_source_name(r->train, i), c->data.mask_eod ? "mask_eod" : "reset_at_eod");
}

static Err open_valid(Run *r)
{
    DatasetOptions o = valid_spec(r->cfg, r->tokenizer);
    o.vocab = r->spec.model.vocab;
    return data_error(r->cfg, CFG_data_valid, sets_open(&o, &r->valid));
}

static Err open_data(Run *r, RunPurpose purpose)
{
    const Config *c = r->cfg;
    bool has_valid = *c->data.valid || *c->data.split;
    if (purpose == RUN_GENERATE || purpose == RUN_LOGITS) return ERR_OK;
    if (purpose == RUN_TRAIN) {
        if (!*c->data.train)
            return err_set(ERR_CONFIG, "data.train is empty: there is nothing to train on"),
                   err_hint("megatrain preprocess makes token files; then set data.train to their prefix");
        TRY(open_train(r));
        look_for_ends(r);
        TRY(data_id_make(r->train, r->tokenizer, &r->setup, &r->data_id));
    } else if (!has_valid && !*c->train.eval_tasks) {
        return err_set(ERR_CONFIG, "neither data.valid nor data.split is set: there is nothing to evaluate on"),
               err_hint("or train.eval_tasks=FILE, or --tasks FILE");
    }
    if (!has_valid) return ERR_OK;
    TRY(open_valid(r));
    if (purpose != RUN_TRAIN || !c->checkpoint.keep_best) return ERR_OK;
    return sets_find(&r->valid, c->checkpoint.best_set, "checkpoint.best_set", &r->best_set);
}

static void say_arenas(const MemoryPlan *p)
{
    char text[UNITS_BYTES];
    for (int i = 0; i < MEMORY_ROWS; i++) {
        const int64_t bytes = memory_plan_bytes(p, &memory_rows[i]);
        if (bytes) log_info("%-50s %9s", memory_rows[i].name, units_bytes(text, bytes));
    }
}

/* Twice as many slices, if that is legal and lets pipeline ranks hold less; else 0. */
static int64_t more_slices(const Run *r)
{
    const Config *c = r->cfg;
    const int64_t slices = 2 * c->parallel.slices;
    const bool free = c->origin[CFG_parallel_schedule].kind == ORIGIN_AUTO && !c->parallel.vpp;
    char values[64];
    if (r->spec.purpose.forward_only || c->parallel.pp == 1 || !(free || c->parallel.slices > 1)) return 0;
    snprintf(values, sizeof values, "parallel.slices=%lld", (long long)slices);
    return spec_allows(c, values) ? slices : 0;
}

static Err hint_smaller(const Run *r)
{
    const int64_t slices = more_slices(r);
    const int ranks = 2 * r->world->grid.cp;
    const bool gpu = r->spec.device.kind == DEVICE_CUDA && !r->spec.purpose.forward_only;
    const char *host = gpu && !r->spec.update.states_on_host ? " optim.states=host;" : "";
    char cp[80] = "", cut[80] = "";
    if (r->cfg->model.seq % (2 * ranks * r->cfg->parallel.slices) == 0)
        snprintf(cp, sizeof cp, " parallel.cp=%d, with more ranks that share each sequence;", ranks);
    if (slices) snprintf(cut, sizeof cut, " parallel.slices=%lld, which pass the pipeline in turn;", (long long)slices);
    return err_hint("a smaller train.micro_batch (now %lld); train.recompute=full;%s%s%s or a smaller model",
                    (long long)r->spec.micro_batch, host, cp, cut);
}

/* Known before step 1: a run that cannot fit says so now, with what takes how much. */
static Err check_memory(const Run *r)
{
    double have = (double)room_of_host(r->ranks);
    double need = (double)memory_plan_total(&r->plan);
    char where[192] = "this machine", a[UNITS_BYTES], b[UNITS_BYTES], c[UNITS_BYTES], d[UNITS_BYTES], e[UNITS_BYTES],
         f[UNITS_BYTES];
    const double group = group_memory_left("");
    if (group > 0 && host_free_bytes() >= 0.9 * group) /* (it says the least of both, and what is free changes) */
        snprintf(where, sizeof where, "the control group's memory limit of %s",
                 units_bytes(a, (int64_t)group_memory_limit("")));
    if (r->ranks && r->ranks->local_size > 1)
        snprintf(where, sizeof where, "each of %d ranks on this machine", r->ranks->local_size);
    const double host = (double)memory_plan_host(&r->plan);
    if (r->plan.host_apart && host > have)
        return err_set(ERR_MEMORY,
                       "this run needs %s of the host's memory (%s for batches read ahead, %s for "
                       "checkpoint.async, %s for train.offload, %s for optim.states), %s has %s to give",
                       units_bytes(a, (int64_t)host), units_bytes(b, r->plan.ahead), units_bytes(c, r->plan.snapshot),
                       units_bytes(e, r->plan.offload_host), units_bytes(f, r->plan.states), where,
                       units_bytes(d, (int64_t)have)),
               err_hint("%s%s%sa smaller train.global_batch (now %lld)",
                        r->plan.snapshot ? "checkpoint.async=false, with which the step waits; " : "",
                        r->plan.offload_host ? "a smaller train.offload; " : "",
                        r->plan.states ? "optim.states=device; " : "", (long long)r->spec.global_batch);
    if (r->spec.device.kind == DEVICE_CUDA) {
        DeviceInfo gpu;
        const int sharers = r->ranks ? r->ranks->gpu.sharers : 1;
        int64_t room;
        TRY(room_of_gpu(r->ranks, r->spec.device.index, &gpu, &room));
        have = (double)(room - DEVICE_LIBRARY_BYTES);
        snprintf(where, sizeof where, "GPU %d (%s)", r->spec.device.index, gpu.name);
        if (sharers > 1)
            snprintf(where, sizeof where, "each of %d ranks on GPU %d (%s)", sharers, r->spec.device.index, gpu.name);
    }
    if (need <= have) return ERR_OK;
    say_arenas(&r->plan);
    return err_set(ERR_MEMORY, "this run needs %s, %s has %s to give", units_bytes(a, (int64_t)need), where,
                   units_bytes(b, (int64_t)have)),
           need / 2 < (double)r->plan.ahead
               ? err_hint("a smaller train.global_batch (now %lld)", (long long)r->spec.global_batch)
               : hint_smaller(r);
}

/* Before step 1, too: products that the GPU does not have. */
static Err check_gpu(const Run *r)
{
    DeviceInfo gpu;
    if (r->spec.device.kind != DEVICE_CUDA) return ERR_OK;
    TRY(device_cuda_info(r->spec.device.index, &gpu));
    return fp8_spec_on_gpu(&r->spec.model.fp8, device_info_capability(&gpu), gpu.name);
}

/* run.device = auto that finds no GPU. Why is of interest only where there is a driver, and so should be one. */
static void say_device(const Config *c)
{
    char why[256];
    if (c->origin[CFG_run_device].kind != ORIGIN_AUTO || device_cuda_count(why, sizeof why) > 0) return;
    if (file_exists("/proc/driver/nvidia/version")) log_info("computing on the CPU: %s", why);
    else log_info("no GPU: computing on the CPU");
}

/* Collectives of replicas that run beside products get multiprocessors of their own, while they run (Device.beside). */
static void leave_free(Run *r)
{
    const UpdateSpec *u = &r->spec.update;
    const bool replicas = u->overlap_grad || u->overlap_param || u->zero >= ZERO_GRADS;
    if (!r->ranks || !r->ranks->nccl) return;
    const int dp = replicas && world_copies(r->world)->size > 1 ? r->ranks->dp_ctas.max : 0;
    const int tp = r->spec.overlap_tp > 1 && r->world->tp.size > 1 ? r->ranks->tp_ctas.max : 0;
    if (dp || tp) device_leave_free(&r->trainer.device, dp > tp ? dp : tp);
}

/* Memory that was to be had by the plan, but is not: for limits of the process, or what others took meanwhile. */
static Err open_trainer(Run *r)
{
    const Err err = trainer_open(&r->trainer, &r->spec, r->world, &r->plan);
    return err == ERR_MEMORY && !*err_hint_text() ? hint_smaller(r) : err;
}

static Err open_inputs(Run *r, RunPurpose purpose)
{
    TRY(tokenizer_open(r->cfg->data.tokenizer, &r->tokenizer));
    TRY(train_spec(r->cfg, tokenizer_vocab(r->tokenizer), &r->spec));
    TRY(spec_eod(r->cfg, r->tokenizer, &r->spec.documents.eod));
    TRY(open_data(r, purpose));
    if (!*r->cfg->train.eval_tasks || purpose == RUN_GENERATE || purpose == RUN_LOGITS) return ERR_OK;
    return tasks_open(&r->tasks, r->cfg->train.eval_tasks, r->tokenizer, r->spec.model.seq);
}

/* The whole model. Slices stay, as sums over a sequence are those of its slices (run.reproducible = run); and what the
 * schedule divides a micro-batch into, as its rows share scales in fp8. */
static void in_one_stage(const Config *c, TrainSpec *spec)
{
    const int slices = spec->pipeline.slices;
    spec->pipeline = (PipelineSpec){ .schedule = slices > 1 ? "seq1f1b" : NULL, .slices = slices };
    spec->micro_batch /= config_unit_div(c);
}

static Err open_all(Run *r, RunPurpose purpose)
{
    const Config *c = r->cfg;
    say_device(c);
    const Err inputs = open_inputs(r, purpose);
    if (inputs == ERR_DATA) return (purpose == RUN_TRAIN ? preflight_hint : preflight_hint_of_run)(c, inputs);
    TRY(inputs);
    TRY(inputs_agree(r));
    if (r->ranks) r->spec.device.index = r->ranks->gpu.index;
    TRY(check_gpu(r));
    r->spec.purpose.forward_only = purpose != RUN_TRAIN;
    if (purpose == RUN_GENERATE || purpose == RUN_LOGITS)
        r->spec.pipeline.slices = 0; /* tokens come one by one, or logits of whole sequences are asked for */
    r->spec.purpose.generate = purpose == RUN_GENERATE;
    r->spec.purpose.logits = purpose == RUN_LOGITS;
    r->spec.purpose.scores = r->tasks.count > 0;
    r->spec.purpose.ahead &= purpose == RUN_TRAIN;
    r->spec.purpose.snapshot &= purpose == RUN_TRAIN;
    if (r->world->grid.pp != c->parallel.pp || (purpose != RUN_TRAIN && r->world->grid.pp == 1))
        in_one_stage(c, &r->spec);
    if (purpose == RUN_GENERATE) {
        r->spec.micro_batch = r->spec.global_batch = r->spec.model.moe.balance.unit = 1;
        r->spec.ramp.count = 0;
    }
    TRY(trainer_plan(&r->spec, r->world->grid, r->world->rank, &r->plan));
    const bool chosen = !r->spec.device.threads && !getenv("OMP_NUM_THREADS");
    if (!r->spec.device.threads) r->spec.device.threads = threads_of_rank(r->ranks, &r->plan);
    if (r->ranks) bind_rank(c, r->ranks, &r->spec.device.threads, chosen);
    TRY(check_memory(r));
    TRY(open_trainer(r));
    r->trainer_open = true;
    leave_free(r);
    return ERR_OK;
}

Err run_open(Run *r, const Config *cfg, RunPurpose purpose, Ranks *ranks)
{
    *r = (Run){ .cfg = cfg, .ranks = ranks };
    TRY(world_open_self(&r->self));
    r->world = ranks ? &ranks->world : &r->self;
    setup_init(&r->setup);
    Err err = open_all(r, purpose);
    if (err) run_close(r);
    return err;
}

void run_close(Run *r)
{
    if (r->trainer_open) trainer_close(&r->trainer);
    world_close(&r->self);
    dataset_close(r->train);
    sets_close(&r->valid);
    tasks_close(&r->tasks);
    tokenizer_close(r->tokenizer);
    setup_release(&r->setup);
    *r = (Run){ 0 };
}

/* ---- checkpoints ---- */

static CkptValid valid_of(const Run *r, int set)
{
    const NamedSet *v = &r->valid.set[set];
    return (CkptValid){ .set = v->name,
                        .loss = r->valid_loss[set],
                        .samples = run_valid_samples(r, v->data),
                        .crc = v->order_crc,
                        .content = v->content_crc,
                        .has_content = v->has_content_crc };
}

CkptMeta run_meta(const Run *r, const char *config_text)
{
    const Trainer *t = &r->trainer;
    CkptMeta m = { .step = t->progress.step,
                   .samples = t->progress.samples,
                   .tokens = t->progress.samples * r->spec.model.seq,
                   .seed = r->cfg->run.seed,
                   .tp_blocks = r->spec.model.tp_blocks,
                   .seq_blocks = r->spec.seq_blocks,
                   .attn_block = r->spec.attn_block,
                   .reproducible = r->spec.exact ? "layout" : "run",
                   .program = identity_program(),
                   .config = config_text,
                   .data = r->data_id,
                   .overrides = r->overrides.text,
                   .counters = { { "updates", t->progress.updates },
                                 { "skipped", t->progress.skipped },
                                 { "loss_scale_log2", t->progress.loss_scale.log2 },
                                 { "loss_scale_good_steps", t->progress.loss_scale.good_steps } },
                   .counter_count = 4 };
    if (r->data_begun || r->data_start) {
        m.counters[m.counter_count++] = (CkptCounter){ "data_begun", r->data_begun };
        m.counters[m.counter_count++] = (CkptCounter){ "data_start", r->data_start };
    }
    _Static_assert((int)SETS_MAX <= (int)CKPT_MAX_VALID, "a manifest has room for all validation sets");
    for (int i = 0; r->valid_step == t->progress.step && i < r->valid.count; i++)
        m.valid[m.valid_count++] = valid_of(r, i);
    return m;
}

/* Losses of other samples are not to be compared with those that the run had. */
static void warn_of_valid(const Run *r, const CkptMeta *meta)
{
    for (int i = 0; i < r->valid.count && !r->world->rank; i++) {
        const CkptValid now = valid_of(r, i);
        for (int k = 0; k < meta->valid_count; k++) {
            const CkptValid *was = &meta->valid[k];
            if (strcmp(was->set, now.set) || !was->samples) continue;
            if (ckpt_valid_comparable(was, &now)) continue;
            log_warn("validation losses%s%s are of %lld samples from here on, up to step %lld they were of "
                     "%lld%s: do not compare them",
                     *now.set ? " on " : "", now.set, (long long)now.samples, (long long)meta->step,
                     (long long)was->samples, was->samples == now.samples ? " others" : "");
        }
    }
}

/* A schedule that ends with the run changes with its length, and the steps done so far had the old one. */
static void warn_of_lr(const Run *r, const Config *was, const CkptMeta *meta)
{
    const LrSchedule before = lr_spec(was), now = lr_spec(r->cfg);
    const int64_t next = meta->step + 1 - ckpt_counter(meta, "skipped", 0);
    const double old = lr_at(&before, next), new = lr_at(&now, next);
    if (r->world->rank || before.decay_steps == now.decay_steps || fabs(new - old) <= 0.001 * old) return;
    log_warn("the run has another length: %lld steps, it had %lld; its learning rate goes from %.3g to %.3g. "
             "optim.decay_steps=%lld keeps the schedule that it had",
             (long long)r->cfg->derived.steps, (long long)was->derived.steps, old, new, (long long)before.decay_steps);
}

/* Its results may differ, so that a run which two builds computed says so. */
static void say_other_build(const Run *r, const CkptMeta *meta)
{
    if (r->world->rank || !strcmp(meta->program, identity_program())) return;
    log_info("the checkpoint is by another build, megatrain %s; this is megatrain %s", meta->program,
             identity_program());
}

int64_t run_data_position(const Run *r, int64_t samples)
{
    return samples < r->data_begun ? samples : samples - r->data_begun + r->data_start;
}

static Err refuse_start(const Run *r)
{
    if (r->cfg->data.start < 0 || dataset_stage(r->train, 0).count == 1) return ERR_OK;
    return err_set(ERR_CONFIG, "data.start = %lld with data.train = '%.600s': stages begin by the steps of the run",
                   (long long)r->cfg->data.start, r->cfg->data.train),
           err_hint("leave data.start out, or name one data set");
}

/* Sets the place from which the data are read on: that of the checkpoint's run or, if the data are others now,
 * data.start. */
static Err place_data(Run *r, const CkptMeta *meta, bool replaced)
{
    const int64_t start = r->cfg->data.start;
    r->data_begun = ckpt_counter(meta, "data_begun", 0);
    r->data_start = ckpt_counter(meta, "data_start", 0);
    if (replaced && start >= 0) {
        TRY(refuse_start(r));
        r->data_begun = meta->samples;
        r->data_start = start;
    } else if (replaced && dataset_stage(r->train, 0).count > 1) {
        r->data_begun = r->data_start = 0; /* stages begin by the steps of the run, wherever older data began */
    }
    const int64_t at = run_data_position(r, meta->samples);
    if (r->world->rank) return ERR_OK;
    if (replaced && at)
        log_info("the first %lld samples of the new data.train are passed over; data.start=0 begins with its "
                 "first",
                 (long long)at);
    if (!replaced && start >= 0 && start != r->data_start)
        log_warn("data.start=%lld has no effect: the run goes on with the data that it has, at sample %lld",
                 (long long)start, (long long)at);
    return ERR_OK;
}

/* Differences of the configuration and the data that are allowed. */
static Err compare_runs(Run *r, const Config *was, const CkptMeta *meta)
{
    const unsigned data = data_id_differs(r->data_id, meta->data);
    TRY(config_same_run(was, r->cfg));
    TRY(data_id_same(r->data_id, meta->data, overrides_data(was, r->cfg)));
    TRY(overrides_find(&r->overrides, was, r->cfg, meta, data, &r->setup));
    warn_of_lr(r, was, meta);
    say_other_build(r, meta);
    return place_data(r, meta, (data & (DATA_FILES | DATA_ORDER)) && r->cfg->may_differ[CFG_data_train]);
}

/* A resumed run must be the same run: keys that change the numbers, and the data. */
static Err check_same_run(Run *r, const CkptMeta *meta)
{
    Config was;
    Err err = config_read(&was, (ConfigSource){ .path = "the checkpoint's configuration",
                                                .text = meta->config,
                                                .earlier = true,
                                                .compared = true,
                                                .world_size = CONFIG_ANY_WORLD });
    if (err) err = err_prefix(err_as(err, ERR_CKPT), "cannot compare configurations");
    else err = compare_runs(r, &was, meta);
    config_release(&was);
    return err;
}

/* An evaluation of a run on other files than it was evaluated on, under the same names. */
static void warn_of_replaced(const Run *r, const CkptMeta *meta)
{
    static const ConfigId said[] = { CFG_data_valid, CFG_data_split, CFG_data_train, CFG_model_seq };
    for (int i = 0; i < 4; i++)
        if (r->cfg->origin[said[i]].kind == ORIGIN_COMMAND_LINE) return; /* other data are meant */
    for (int i = 0; i < r->valid.count && !r->world->rank; i++) {
        const CkptValid now = valid_of(r, i);
        for (int k = 0; k < meta->valid_count; k++) {
            const CkptValid *was = &meta->valid[k];
            const bool content = ckpt_valid_same_content(was, &now);
            if (strcmp(was->set, now.set) || !was->samples || (content && was->crc == now.crc)) continue;
            log_warn("the validation data%s%s are not those that the checkpoint of step %lld was evaluated "
                     "on: %s, and this loss is not comparable with the run's",
                     *now.set ? " of " : "", now.set, (long long)meta->step,
                     content ? "they have other documents, or another order" : "the files have other tokens");
        }
    }
}

/* Whoever only reads a model needs its tokenizer; a new run from its weights may want another. */
static Err check_tokenizer(const Run *r, const CkptMeta *meta)
{
    const Err err = data_id_same_tokenizer(r->tokenizer, meta->data);
    if (!err || r->spec.purpose.forward_only) return err;
    if (r->world->rank == 0) log_warn("checkpoint.load: %s", err_message());
    return ERR_OK;
}

/* Weights of the chosen experts add up to `scale`, or, of a softmax over all, on average to topk / experts of it. */
static Upcycle upcycle_of(const ModelSpec *m)
{
    const MixtureSpec *e = &m->moe;
    const bool whole = e->router.score == ROUTER_SOFTMAX || e->router.normalize;
    const float sum = whole ? 1 : (float)e->topk / (float)e->experts;
    return (Upcycle){ .experts = e->experts, .parts = e->parts, .factor = (float)e->parts / (sum * e->router.scale) };
}

/* Weights that were loaded may be those of a run that had gone wrong. */
static Err look_at_weights(Run *r, const char *path)
{
    Stream *stream = &r->trainer.device.stream;
    const ParamSet *params = &r->trainer.params;
    SetupArena a;
    OddValues odd;
    setup_init(&a);
    Err err = odd_open(&odd, params->whole, &a);
    for (int i = 0; !err && i < params->replicas; i++) err = odd_look_at_store(&odd, &params->stores[i], stream);
    if (!err) err = odd_share(&odd, &r->world->host, stream);
    if (!err && !r->world->rank) odd_warn(&odd, path);
    setup_release(&a);
    return err;
}

static Err load(Run *r, const char *path, bool weights_only, bool *damaged)
{
    CkptMeta meta;
    const Upcycle upcycle = upcycle_of(&r->spec.model);
    CkptLoad load = { .path = path,
                      .params = &r->trainer.params,
                      .world = r->world,
                      .stream = &r->trainer.device.stream,
                      .weights_only = weights_only,
                      .upcycle = weights_only && upcycle.parts ? &upcycle : NULL };
    TRY(inputs_agree_on_weights(r, path, damaged));
    if (!weights_only) {
        *damaged = true;
        TRY(ckpt_meta(path, &r->setup, &meta));
        *damaged = false;
        TRY(check_same_run(r, &meta));
    }
    TRY(ckpt_load(&load, &r->setup, &meta, damaged));
    if (weights_only) TRY(check_tokenizer(r, &meta));
    if (r->spec.purpose.forward_only) warn_of_replaced(r, &meta);
    log_info("%s from %s", load.upcycle ? "upcycling the dense weights" : weights_only ? "weights" : "resuming", path);
    if (weights_only) return look_at_weights(r, path);
    warn_of_valid(r, &meta);
    r->trainer.progress.step = meta.step;
    r->trainer.progress.samples = meta.samples;
    r->trainer.progress.updates = ckpt_counter(&meta, "updates", meta.step);
    r->trainer.progress.skipped = ckpt_counter(&meta, "skipped", 0);
    LossScale *scale = &r->trainer.progress.loss_scale;
    scale->log2 = ckpt_counter(&meta, "loss_scale_log2", scale->log2);
    scale->good_steps = ckpt_counter(&meta, "loss_scale_good_steps", 0);
    return ERR_OK;
}

Err run_load(Run *r, const char *path, bool weights_only, bool *damaged)
{
    const bool there = file_is_dir(path);
    fault_point("read");
    const Err err = load(r, path, weights_only, damaged);
    return there && !err_is_elsewhere() ? ckpt_removed(path, err) : err;
}

static int64_t step_of(const char *path)
{
    long long step = 0;
    return sscanf(strrchr(path, '/'), "/step-%lld", &step) == 1 ? step : 0;
}

/* ckpt_find, and all ranks have found the same. */
static Err find_alike(Run *r, const char *run_dir, int64_t below, char path[PATH_MAX], bool *found)
{
    TRY(ckpt_find(run_dir, below, path, found));
    const int64_t mine = *found ? step_of(path) : -1;
    int64_t ends[2] = { mine, -mine };
    TRY(comm_max_i64(&r->world->host, &r->trainer.device.stream, ends, 2, NULL));
    if (ends[0] == -ends[1]) return ERR_OK;
    return err_set(ERR_CKPT, "the ranks see different checkpoints in '%s': this one step %lld, others up to %lld",
                   run_dir, (long long)mine, (long long)ends[0]),
           err_hint("run.dir must be one folder that all hosts share");
}

/* After a failed load: on any rank, is it because the folder is not there any more? */
static Err is_gone(Run *r, const char *path, bool *gone)
{
    int64_t any = !file_is_dir(path);
    TRY(comm_max_i64(&r->world->host, &r->trainer.device.stream, &any, 1, NULL));
    *gone = any;
    return ERR_OK;
}

/* Newest first; a checkpoint that proves damaged while being read gives way to the one before it. Another run's folder
 * may be trained in: what is removed while it is read gives way to what is newer by now. */
static Err load_newest(Run *r, const char *run_dir, bool weights_only, bool *found)
{
    char path[PATH_MAX];
    int64_t below = INT64_MAX;
    for (int rescans = 0;;) {
        bool damaged, gone = false;
        ErrKept why;
        TRY(find_alike(r, run_dir, below, path, found));
        if (!*found) return ERR_OK;
        Err err = run_load(r, path, weights_only, &damaged);
        if (!err || !damaged) return err;
        err_keep(&why);
        if (weights_only) TRY(is_gone(r, path, &gone));
        if (gone && rescans++ < CKPT_RESCANS) {
            log_info("'%s' was removed while it was read: looking again", path);
            below = INT64_MAX;
            continue;
        }
        err_again(&why, err);
        log_warn("'%s' is damaged and passed over: %s", path, err_message());
        below = step_of(path);
    }
}

static Err load_hub_folder(Run *r, const char *from)
{
    const CkptLoad load = { .path = from,
                            .params = &r->trainer.params,
                            .world = r->world,
                            .stream = &r->trainer.device.stream,
                            .weights_only = true,
                            .upcycle = r->spec.model.moe.parts ? &(Upcycle){ 0 } : NULL };
    bool damaged;
    fault_point("read");
    TRY(inputs_agree_on_weights(r, from, &damaged));
    TRY(hf_load(&load, r->cfg));
    log_info("weights from %s", from);
    return look_at_weights(r, from);
}

Err run_load_weights(Run *r, const char *from, int64_t step)
{
    char path[PATH_MAX];
    bool found, damaged;
    snprintf(path, sizeof path, "%s/manifest.json", from);
    const bool hub = hf_folder_is(from), checkpoint = file_exists(path);
    TRY(inputs_agree_on_source(r, from,
                               hub                 ? "a model of Hugging Face's"
                               : checkpoint        ? "a checkpoint"
                               : file_is_dir(from) ? "a run's folder"
                                                   : "no folder"));
    if (hub) return load_hub_folder(r, from);
    if (step >= 0) {
        TRY(ckpt_of_step(from, step, path));
        return run_load(r, path, true, &damaged);
    }
    if (checkpoint) return run_load(r, from, true, &damaged);
    TRY(load_newest(r, from, true, &found));
    if (found) return ERR_OK;
    return err_set(ERR_CKPT, "no checkpoint in '%s'", from), err_hint("train first: megatrain --config FILE");
}

/* Going back to an older checkpoint: later ones in the same folder would be taken for newer next time. */
static Err check_none_newer(const Run *r, const char *dir)
{
    char newest[PATH_MAX];
    bool found;
    TRY(ckpt_find(dir, INT64_MAX, newest, &found));
    if (!found || step_of(newest) <= r->trainer.progress.step) return ERR_OK;
    return err_set(ERR_CKPT, "'%s' is newer than the checkpoint to resume from, of step %lld", newest,
                   (long long)r->trainer.progress.step),
           err_hint("remove what is newer, or take another run.dir");
}

/* Has an earlier worker of a run that goes on by itself left a checkpoint behind the one that resume names? At the
 * first start there was none (check_none_newer, and resume = none). All ranks find the same. */
static Err has_later(Run *r, const char *how, const char *dir, bool *later)
{
    char newest[PATH_MAX];
    CkptMeta meta = { 0 };
    TRY(find_alike(r, dir, INT64_MAX, newest, later));
    if (!*later || !strcmp(how, "auto") || !strcmp(how, "none")) return ERR_OK;
    TRY(ckpt_meta(how, &r->setup, &meta));
    *later = step_of(newest) > meta.step;
    return ERR_OK;
}

Err run_resume(Run *r)
{
    const char *how = r->cfg->checkpoint.resume, *dir = r->cfg->run.dir, *load = r->cfg->checkpoint.load;
    bool found = false, damaged, later = false;
    if (r->ranks && r->ranks->boot.attempt) TRY(has_later(r, how, dir, &later));
    if (later) how = "auto";
    if (!strcmp(how, "none")) {
        if (ckpt_any(dir))
            return err_set(ERR_CKPT, "checkpoint.resume=none, but '%s' holds checkpoints", dir),
                   err_hint("take another run.dir, remove '%s/checkpoints', or resume with checkpoint.resume=auto",
                            dir);
    } else if (!strcmp(how, "auto")) {
        TRY(load_newest(r, dir, false, &found));
    } else {
        TRY(run_load(r, how, false, &damaged));
        TRY(check_none_newer(r, dir));
        found = true;
    }
    if (found) return ERR_OK;
    TRY(overrides_none(r->cfg));
    TRY(refuse_start(r));
    if (r->cfg->data.start > 0) r->data_start = r->cfg->data.start;
    return *load ? run_load_weights(r, load, RUN_NEWEST) : ERR_OK;
}

/* ---- odds ---- */

/* The name of a file that file_replace was writing, or metrics.c, of those that lie in a run folder. */
static bool is_leftover(const char *name)
{
    const size_t n = run_file_unfinished(name), number = strspn(name, "0123456789");
    if (!strncmp(name, RUN_SHARED_MARK, strlen(RUN_SHARED_MARK))) return true;
    if (!n) return false;
    if (number && number + 4 == n && strncmp(name + number, ".ini", 4) == 0) return true; /* starts/N.ini */
    for (int i = 0; kept_tokenizer_files[i]; i++)
        if (strlen(kept_tokenizer_files[i]) == n && !strncmp(kept_tokenizer_files[i], name, n)) return true;
    return run_file_is_own(name, n) || (n == 5 && !strncmp(name, "saved", n)); /* starts/saved */
}

static void sweep(const char *dir)
{
    DIR *d = opendir(dir);
    for (struct dirent *entry; d && (entry = readdir(d));) {
        char path[PATH_MAX];
        if (!is_leftover(entry->d_name)) continue;
        if (snprintf(path, sizeof path, "%s/%s", dir, entry->d_name) >= (int)sizeof path) continue;
        if (file_remove_tree(path)) log_warn("%s, what a killed run left", err_message());
    }
    if (d) closedir(d);
}

void run_sweep(const char *run_dir)
{
    char folder[PATH_MAX];
    sweep(run_dir);
    if (snprintf(folder, sizeof folder, "%s/" RUN_STARTS, run_dir) < PATH_MAX) sweep(folder);
    if (snprintf(folder, sizeof folder, "%s/" RUN_TOKENIZER, run_dir) < PATH_MAX) sweep(folder);
}

void run_leave(const char *run_dir)
{
    char lock[PATH_MAX];
    int others = 0;
    DIR *d = opendir(run_dir);
    if (!d) return;
    for (struct dirent *entry; (entry = readdir(d));)
        others += strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..") && strcmp(entry->d_name, RUN_LOCK) &&
                  strcmp(entry->d_name, RUN_LOCK ".held"); /* (base/held.h) */
    closedir(d);
    if (others || snprintf(lock, sizeof lock, "%s/" RUN_LOCK, run_dir) >= (int)(sizeof lock - sizeof ".held")) return;
    unlink(lock);
    strcat(lock, ".held");
    unlink(lock);
    rmdir(run_dir);
}

static Err get_tokens(void *user, int64_t first, int64_t count, int32_t *tokens)
{
    const Dataset *d = user;
    for (int64_t i = 0; i < count; i++) TRY(dataset_get(d, first + i, tokens + i * (dataset_seq(d) + 1)));
    return ERR_OK;
}

TokenSource run_tokens(const Dataset *d) { return (TokenSource){ (void *)d, get_tokens, NULL }; }

bool run_evaluates(const Run *r) { return r->valid.count || r->tasks.count; }

/* Scores a request: the scores are those of the positions of its sample. */
static void score_request(TaskRequest *q, const RowScore *scores)
{
    const RowScore *row = scores + q->begin + q->count - 1 - q->scored;
    q->score = 0;
    q->greedy = true;
    for (int32_t i = 0; i < q->scored; i++) {
        q->score -= row[i].loss;
        q->greedy &= !row[i].outdone;
    }
}

Err run_score_tasks(Run *r)
{
    const int64_t most = r->spec.global_batch, seq = r->spec.model.seq;
    const TokenSource source = { &r->tasks, tasks_tokens, tasks_requests };
    for (int64_t first = 0; first < r->tasks.samples; first += most) {
        const int64_t left = r->tasks.samples - first, count = left < most ? left : most;
        const RowScore *scores;
        TaskRequest *q;
        TRY(trainer_scores(&r->trainer, source, first, count, &scores));
        for (int64_t i = 0; i < count; i++)
            for (int64_t n = 0; (q = tasks_request(&r->tasks, first + i, n)); n++) score_request(q, scores + i * seq);
    }
    return ERR_OK;
}

int64_t run_valid_samples(const Run *r, const Dataset *set)
{
    const int64_t all = dataset_samples(set), most = r->cfg->derived.eval_samples;
    return most && most < all ? most : all;
}
