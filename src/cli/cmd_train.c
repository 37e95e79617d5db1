/* train, eval: the configuration is read here; train/train.c and train/eval.c do the rest. */
#include <stdlib.h>
#include <string.h>

#include "base/fault.h"
#include "base/file.h"
#include "base/log.h"
#include "cli/auto_layout.h"
#include "cli/auto_micro_batch.h"
#include "cli/config_arg.h"
#include "boot/boot.h"
#include "device/device.h"
#include "boot/supervised.h"
#include "train/join.h"
#include "train/supervisor.h"
#include "train/train.h"

static const char *config_path, *run_dir, *may_differ, *ids_path, *logits_path, *tasks;
static char joined[OPTION_JOIN_BYTES]; /* of may_differ */
static bool as_json;
static int64_t step = -1;

static const Option train_options[] = {
    { "config", OPTION_TEXT, &config_path, .required = true, .value = "FILE", .help = "configuration (INI)" },
    { "override", OPTION_TEXT, &may_differ, .join = joined, .value = "KEY,KEY",
      .help = "keys that may differ from those of the checkpoint that the run goes on from" },
};

static const Option eval_options[] = {
    { "config", OPTION_TEXT, &config_path, .value = "FILE", .help = "configuration (INI)" },
    { "run", OPTION_TEXT, &run_dir, .value = "DIR",
      .help = "a run's folder instead: the configuration is its checkpoint's" },
    { "step", OPTION_INT, &step, .low = 0, .high = 9e15, .value = "N",
      .help = "the checkpoint of that step, not the newest" },
    { "tasks", OPTION_TEXT, &tasks, .value = "FILE,FILE",
      .help = "asks the questions of these files, not of train.eval_tasks" },
    { "json", OPTION_FLAG, &as_json, .help = "one JSON object instead of lines" },
    { "ids", OPTION_TEXT, &ids_path, .value = "FILE", .help = "sequences of token ids, one a line, for --logits" },
    { "logits", OPTION_TEXT, &logits_path, .value = "FILE",
      .help = "instead: writes their logits, fp32 [sequence, position, id], as .npy" },
};

static Err begin(Boot *boot)
{
    TRY(boot_from_env(boot));
    log_set_rank(boot->rank, boot->size);
    fault_init(boot->rank, 0);
    if (boot->rank) log_set_level(LOG_WARN);
    if (boot->job_tasks > 1)
        log_warn("one rank alone, though the Slurm job has %d tasks: srun starts a rank for each (srun "
                 "megatrain ...)",
                 boot->job_tasks);
    if (boot->size > 1) device_cuda_for_several();
    return ERR_OK;
}

/* (most runs have the key nowhere, and read their configuration once) */
static bool names_restarts(const char *text, Words rest)
{
    bool found = strstr(text, "restarts") != NULL;
    for (int i = 0; i < rest.count; i++) found |= strstr(rest.items[i], "restarts") != NULL;
    return found;
}

/*
 * With run.restarts this process holds the rank's place, and what follows is done by workers. It reads no more of the
 * configuration than that, so that it meets no GPU, and says nothing: workers do. The file is read once, for all of
 * them.
 */
static Err hold_place(Boot *boot, Words rest)
{
    char *text;
    int64_t size;
    Config c = { 0 };
    if (file_read_all(config_path, CONFIG_FILE_MAX_BYTES, &text, &size)) return ERR_OK; /* (said when it is read) */
    if ((int64_t)strlen(text) != size) return free(text), ERR_OK;                       /* (that, too) */
    config_arg_keep(config_path, text);
    if (!names_restarts(text, rest)) return ERR_OK;
    log_set_level(LOG_ERROR);
    const ConfigSource source = { .path = config_path,
                                  .text = text,
                                  .overrides = rest.items,
                                  .override_count = rest.count,
                                  .world_size = boot->size };
    if (config_read(&c, source)) log_debug("%s", err_message()); /* (a worker says what is wrong) */
    log_set_level(boot->rank ? LOG_WARN : LOG_INFO);
    const Err err = c.run.restarts ? supervise(boot, &c, text) : ERR_OK;
    config_release(&c);
    return err;
}

/* A worker finds what its supervisor has for it; with run.restarts any other process becomes a supervisor here. */
static Err begin_rank(Boot *boot, Words rest)
{
    char *text;
    TRY(supervised_find(boot, &text));
    if (!text) return hold_place(boot, rest);
    config_arg_keep(config_path, text);
    fault_init(boot->rank, boot->attempt);
    if (!boot->rank && !boot->attempt)
        log_info("run.restarts is on: a rank that is lost is started again, and the run goes on");
    return ERR_OK;
}

/* Its supervisor hears how it ends. */
static Err end_worker(const Boot *boot, Err err)
{
    if (!boot->supervised) return err;
    if (err) supervised_cause(boot->supervised, err_message());
    boot->supervised->ended = true;
    return err;
}

static Err train(Words rest)
{
    Config c = { 0 };
    Boot boot;
    AutoLayout layout = { 0 };
    TRY(begin(&boot));
    TRY(begin_rank(&boot, rest));
    Err err = config_arg(&c, config_path, rest, boot.size);
    const bool planned = c.parallel.planned;
    if (planned) err = auto_layout_open(&layout, config_path, rest, &c); /* (whatever its layout was) */
    layout.may_differ = may_differ;
    if (!err && may_differ) err = config_let_differ(&c, may_differ);
    AutoMicroBatch micro_batch = { config_path, rest, may_differ };
    const bool open = planned || c.derived.open_micro_batch; /* (a layout has a micro-batch) */
    const LayoutChoice choice = planned ? auto_layout_choice(&layout) : auto_micro_batch_choice(&micro_batch);
    err = join_said_once(&boot, err); /* what all ranks have to say rank 0 says */
    if (!err) err = train_run(&c, &boot, open ? &choice : NULL);
    auto_layout_close(&layout);
    config_release(&c);
    return end_worker(&boot, err);
}

/* (train.micro_batch=auto stays the least number: an evaluation gains nothing by a larger one) */
static Err read_evaluated(Config *c, const Boot *boot, Words rest)
{
    const int64_t size = boot->size > 1 ? boot->size : CONFIG_ANY_WORLD;
    if (run_dir) return config_of_run(c, run_dir, step, rest, size);
    return config_arg(c, config_path, rest, size);
}

static Err eval(Words rest)
{
    Config c = { 0 };
    Boot boot;
    if (!config_path == !run_dir)
        return err_set(ERR_CONFIG, "'megatrain eval' needs one of --config FILE and --run DIR"),
               err_hint("megatrain eval --help");
    if (!ids_path != !logits_path)
        return err_set(ERR_CONFIG, "--ids FILE says what --logits FILE is computed of: both are needed"),
               err_hint("megatrain eval --help");
    TRY(begin(&boot));
    Err err = join_said_once(&boot, read_evaluated(&c, &boot, rest));
    if (!err && tasks) c.train.eval_tasks = tasks;
    if (!err) err = eval_run(&c, &boot, &(EvalOptions){ run_dir, step, ids_path, logits_path, as_json });
    config_release(&c);
    return err;
}

const Command command_train = {
    .name = "train",
    .summary = "train, or resume, the run that a configuration describes",
    .rest = REST_OVERRIDES,
    .text = "With checkpoint.resume = auto (the default) a run goes on from its newest checkpoint.\n"
            "What it computes must be the same then, but for what --override names, such as optim.lr.\n"
            "SIGTERM, SIGUSR1, SIGHUP and the first SIGINT finish the step, write a checkpoint and exit with "
            "75.\n"
            "megatrain config explain lists all keys.\n",
    OPTIONS(train_options),
    .run = train,
};

const Command command_eval = {
    .name = "eval",
    .summary = "loss, perplexity and bits per byte on the validation data",
    .rest = REST_OVERRIDES,
    .text = "From the newest checkpoint of the run, or the one that --step, checkpoint.load or "
            "checkpoint.resume\n"
            "names. Every sample of the validation data is read once, or the first train.eval_samples.\n"
            "One process reads a checkpoint of any layout; several are the ranks of the layout configured.\n",
    OPTIONS(eval_options),
    .run = eval,
};
