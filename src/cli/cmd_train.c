/* train, eval: the configuration is read here; train/train.c does the rest. */
#include "base/log.h"
#include "cli/config_arg.h"
#include "comm/boot.h"
#include "train/train.h"

static const char *config_path;

static const Option options[] = {
    { "config", OPTION_TEXT, &config_path, .required = true, .value = "FILE", .help = "configuration (INI)" },
};

static Err train(Words rest)
{
    Config c;
    Boot boot;
    TRY(boot_from_env(&boot));
    log_set_rank(boot.rank, boot.size);
    if (boot.rank) log_set_level(LOG_WARN); /* what all ranks have to say rank 0 says */
    Err err = config_arg(&c, config_path, rest, boot.size);
    if (!err) err = train_run(&c, &boot);
    config_release(&c);
    return err;
}

static Err eval(Words rest)
{
    Config c;
    TRY(single_process());
    Err err = config_arg(&c, config_path, rest, CONFIG_ANY_WORLD);
    if (!err) err = eval_run(&c);
    config_release(&c);
    return err;
}

const Command command_train = {
    .name = "train",
    .summary = "train, or resume, the run that a configuration describes",
    .rest = REST_OVERRIDES,
    .text = "With checkpoint.resume = auto (the default) a run goes on from its newest checkpoint.\n"
            "SIGTERM, SIGUSR1 and the first SIGINT finish the step, write a checkpoint and exit with 75.\n"
            "megatrain config explain lists all keys.\n",
    OPTIONS(options),
    .run = train,
};

const Command command_eval = {
    .name = "eval",
    .summary = "loss, perplexity and bits per byte on the validation data",
    .rest = REST_OVERRIDES,
    .text = "train.eval_batches says how many global batches are read, at most the whole validation set.\n",
    OPTIONS(options),
    .run = eval,
};
